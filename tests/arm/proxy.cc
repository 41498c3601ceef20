// A library for x86-64 with the targets of lowbit_native.so. Each call is sent to a library for ARM in an emulated
// process (host.cc), so that JAX and the tests run at full speed and only the kernels are emulated.
//
// LOWBIT_ARM_HOST is the command line of that process.

#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include <csignal>
#include <mutex>

#include "wire.h"
#include "xla/ffi/api/ffi.h"

namespace lowbit {
namespace {

class Host {
 public:
  Host() {
    int to[2], from[2];
    const char* command = getenv("LOWBIT_ARM_HOST");
    if (command == nullptr || pipe(to) != 0 || pipe(from) != 0) throw std::runtime_error("LOWBIT_ARM_HOST is not set");
    const std::string line = std::string("exec ") + command;
    if (fork() == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      dup2(to[0], 0);
      dup2(from[1], 3);
      for (int i = 4; i < 256; ++i) close(i);
      execl("/bin/sh", "sh", "-c", line.c_str(), nullptr);
      _exit(127);
    }
    close(to[0]);
    close(from[1]);
    pipe_ = wire::Pipe(from[0], to[1]);
    isa = pipe_.text();
    targets = pipe_.text();
    error = pipe_.text();
  }

  // Returns a status, 0 for success, and sets `message`.
  uint64_t call(const char* name, const XLA_FFI_CallFrame& frame, std::string& message) {
    const std::lock_guard<std::mutex> lock(mutex_);
    pipe_.send_text(name, std::string(name).size());
    pipe_.send_number(static_cast<uint64_t>(frame.args.size));
    for (int64_t i = 0; i < frame.args.size; ++i) send_buffer(frame.args.args[i], true);
    pipe_.send_number(static_cast<uint64_t>(frame.rets.size));
    for (int64_t i = 0; i < frame.rets.size; ++i) send_buffer(frame.rets.rets[i], false);
    send_attributes(frame.attrs);
    const uint64_t status = pipe_.number();
    if (status != 0) {
      message = pipe_.text();
      return status;
    }
    for (int64_t i = 0; i < frame.rets.size; ++i) {
      const XLA_FFI_Buffer& buffer = *static_cast<XLA_FFI_Buffer*>(frame.rets.rets[i]);
      pipe_.receive(buffer.data, wire::bytes_of(buffer));
    }
    return 0;
  }

  std::string isa, targets, error;

 private:
  void send_buffer(const void* pointer, bool with_data) {
    const XLA_FFI_Buffer& buffer = *static_cast<const XLA_FFI_Buffer*>(pointer);
    pipe_.send_number(static_cast<uint64_t>(buffer.dtype));
    pipe_.send_number(static_cast<uint64_t>(buffer.rank));
    pipe_.send(buffer.dims, static_cast<size_t>(buffer.rank) * sizeof(int64_t));
    if (with_data) pipe_.send(buffer.data, wire::bytes_of(buffer));
  }

  void send_attributes(const XLA_FFI_Attrs& attrs) {
    pipe_.send_number(static_cast<uint64_t>(attrs.size));
    for (int64_t i = 0; i < attrs.size; ++i) {
      pipe_.send_text(attrs.names[i]->ptr, attrs.names[i]->len);
      pipe_.send_number(static_cast<uint64_t>(attrs.types[i]));
      if (attrs.types[i] == XLA_FFI_AttrType_STRING) {
        const auto& text = *static_cast<const XLA_FFI_ByteSpan*>(attrs.attrs[i]);
        pipe_.send_text(text.ptr, text.len);
      } else if (attrs.types[i] == XLA_FFI_AttrType_SCALAR) {
        const auto& scalar = *static_cast<const XLA_FFI_Scalar*>(attrs.attrs[i]);
        pipe_.send_number(static_cast<uint64_t>(scalar.dtype));
        pipe_.send(scalar.value, wire::size_of(scalar.dtype));
      } else {
        throw std::runtime_error("only scalars and strings are sent as attributes");
      }
    }
  }

  wire::Pipe pipe_{-1, -1};
  std::mutex mutex_;
};

Host& host() {
  static Host* started = new Host();
  return *started;
}

XLA_FFI_Error* forward(const char* name, XLA_FFI_CallFrame* frame) {
  if (frame->extension_start != nullptr) {
    // XLA asks for the version of the interface; a handler that is never called answers.
    static auto* described = xla::ffi::Ffi::Bind().To([] { return xla::ffi::Error::Success(); }).release();
    return described->Call(frame);
  }
  std::string message;
  uint64_t status;
  try {
    status = host().call(name, *frame, message);
  } catch (const std::exception& error) {
    message = std::string("the emulated library: ") + error.what();
    status = XLA_FFI_Error_Code_INTERNAL;
  }
  if (status == 0) return nullptr;
  XLA_FFI_Error_Create_Args args{};
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.message = message.c_str();
  args.errc = static_cast<XLA_FFI_Error_Code>(status);
  return frame->api->XLA_FFI_Error_Create(&args);
}

}  // namespace
}  // namespace lowbit

#define LOWBIT_EXPORT extern "C" __attribute__((visibility("default")))
#define LOWBIT_TARGET(name) \
  LOWBIT_EXPORT XLA_FFI_Error* name(XLA_FFI_CallFrame* frame) { return lowbit::forward(#name, frame); }

LOWBIT_TARGET(lowbit_matmul)
LOWBIT_TARGET(lowbit_take)
LOWBIT_TARGET(lowbit_squares)
LOWBIT_TARGET(lowbit_encode)
LOWBIT_TARGET(lowbit_search)

LOWBIT_EXPORT const char* lowbit_targets() { return lowbit::host().targets.c_str(); }
LOWBIT_EXPORT const char* lowbit_isa() { return lowbit::host().isa.c_str(); }
LOWBIT_EXPORT const char* lowbit_error() { return lowbit::host().error.c_str(); }
