// Messages between proxy.cc and host.cc, over two pipes: numbers of 64 bits, and bytes behind their length.
#ifndef LOWBIT_TESTS_ARM_WIRE_H_
#define LOWBIT_TESTS_ARM_WIRE_H_

#include <stdint.h>
#include <unistd.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "xla/ffi/api/c_api.h"

namespace lowbit::wire {

class Pipe {
 public:
  Pipe(int from, int to) : from_(from), to_(to) {}

  void send(const void* data, size_t size) {
    const char* at = static_cast<const char*>(data);
    while (size > 0) {
      const ssize_t sent = write(to_, at, size);
      if (sent <= 0) throw std::runtime_error("the other side of the pipe is gone");
      at += sent;
      size -= static_cast<size_t>(sent);
    }
  }
  void receive(void* data, size_t size) {
    char* at = static_cast<char*>(data);
    while (size > 0) {
      const ssize_t got = read(from_, at, size);
      if (got <= 0) throw std::runtime_error("the other side of the pipe is gone");
      at += got;
      size -= static_cast<size_t>(got);
    }
  }

  void send_number(uint64_t a) { send(&a, sizeof(a)); }
  uint64_t number() {
    uint64_t a;
    receive(&a, sizeof(a));
    return a;
  }
  void send_text(const char* text, size_t size) {
    send_number(size);
    send(text, size);
  }
  std::string text() {
    std::string text(number(), 0);
    receive(text.data(), text.size());
    return text;
  }

 private:
  int from_, to_;
};

// Bytes of an element of the types that lowbit's targets take.
inline size_t size_of(XLA_FFI_DataType type) {
  switch (type) {
    case XLA_FFI_DataType_PRED:
    case XLA_FFI_DataType_S8:
    case XLA_FFI_DataType_U8:
      return 1;
    case XLA_FFI_DataType_F16:
    case XLA_FFI_DataType_BF16:
      return 2;
    case XLA_FFI_DataType_S32:
    case XLA_FFI_DataType_F32:
      return 4;
    case XLA_FFI_DataType_S64:
    case XLA_FFI_DataType_F64:
      return 8;
    default:
      throw std::runtime_error("a data type without a size in wire.h");
  }
}

inline size_t bytes_of(const XLA_FFI_Buffer& buffer) {
  size_t size = size_of(buffer.dtype);
  for (int64_t i = 0; i < buffer.rank; ++i) size *= static_cast<size_t>(buffer.dims[i]);
  return size;
}

}  // namespace lowbit::wire

#endif  // LOWBIT_TESTS_ARM_WIRE_H_
