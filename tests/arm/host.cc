// Loads lowbit_native.so for ARM and runs the calls that proxy.cc sends, in the place of XLA.
//
//   host LIBRARY    reads calls from descriptor 0 and writes results to descriptor 3

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <memory>
#include <thread>

#include "wire.h"

// An opaque type to handlers.
struct XLA_FFI_Error {
  std::string message;
  XLA_FFI_Error_Code code;
};

namespace {

using lowbit::wire::bytes_of;

XLA_FFI_Error* create_error(XLA_FFI_Error_Create_Args* args) { return new XLA_FFI_Error{args->message, args->errc}; }

XLA_FFI_Error* schedule(XLA_FFI_ThreadPool_Schedule_Args* args) {
  std::thread(args->task, args->data).detach();
  return nullptr;
}

XLA_FFI_Error* num_threads(XLA_FFI_ThreadPool_NumThreads_Args* args) {
  *args->num_threads = 3;
  return nullptr;
}

// Exactly as long as the data, so that a sanitizer sees every access behind them.
struct Held {
  XLA_FFI_Buffer buffer{};
  std::vector<int64_t> dims;
  void* data = nullptr;

  explicit Held(lowbit::wire::Pipe& pipe) {
    buffer.struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
    buffer.dtype = static_cast<XLA_FFI_DataType>(pipe.number());
    buffer.rank = static_cast<int64_t>(pipe.number());
    dims.resize(static_cast<size_t>(buffer.rank));
    pipe.receive(dims.data(), dims.size() * sizeof(int64_t));
    buffer.dims = dims.data();
    if (posix_memalign(&data, 64, bytes_of(buffer)) != 0) throw std::bad_alloc();
    buffer.data = data;
  }
  Held(const Held&) = delete;
  ~Held() { free(data); }
};

struct Attribute {
  std::string name, text;
  uint64_t type;
  XLA_FFI_ByteSpan name_span, text_span;
  XLA_FFI_Scalar scalar;
  char value[8];

  explicit Attribute(lowbit::wire::Pipe& pipe) : name(pipe.text()), type(pipe.number()) {
    if (type == XLA_FFI_AttrType_STRING) {
      text = pipe.text();
    } else {
      scalar.dtype = static_cast<XLA_FFI_DataType>(pipe.number());
      pipe.receive(value, lowbit::wire::size_of(scalar.dtype));
    }
    scalar.value = value;
    name_span = {name.data(), name.size()};
    text_span = {text.data(), text.size()};
  }
  Attribute(const Attribute&) = delete;
  void* pointer() { return type == XLA_FFI_AttrType_STRING ? static_cast<void*>(&text_span) : &scalar; }
};

void run(lowbit::wire::Pipe& pipe, void* library) {
  const std::string name = pipe.text();
  std::vector<std::unique_ptr<Held>> buffers;
  std::vector<void*> args, rets, attrs;
  std::vector<std::unique_ptr<Attribute>> attributes;
  for (uint64_t n = pipe.number(); n > 0; --n) {
    buffers.push_back(std::make_unique<Held>(pipe));
    pipe.receive(buffers.back()->data, bytes_of(buffers.back()->buffer));
    args.push_back(&buffers.back()->buffer);
  }
  for (uint64_t n = pipe.number(); n > 0; --n) {
    buffers.push_back(std::make_unique<Held>(pipe));
    memset(buffers.back()->data, 0xa5, bytes_of(buffers.back()->buffer));
    rets.push_back(&buffers.back()->buffer);
  }
  std::vector<XLA_FFI_AttrType> types;
  std::vector<XLA_FFI_ByteSpan*> names;
  for (uint64_t n = pipe.number(); n > 0; --n) {
    attributes.push_back(std::make_unique<Attribute>(pipe));
    types.push_back(static_cast<XLA_FFI_AttrType>(attributes.back()->type));
    names.push_back(&attributes.back()->name_span);
    attrs.push_back(attributes.back()->pointer());
  }
  XLA_FFI_Api api{};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
  api.XLA_FFI_Error_Create = create_error;
  api.XLA_FFI_ThreadPool_Schedule = schedule;
  api.XLA_FFI_ThreadPool_NumThreads = num_threads;
  std::vector<XLA_FFI_ArgType> arg_types(args.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> ret_types(rets.size(), XLA_FFI_RetType_BUFFER);
  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(args.size()), arg_types.data(), args.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(rets.size()), ret_types.data(), rets.data()};
  frame.attrs = {
      XLA_FFI_Attrs_STRUCT_SIZE, nullptr, static_cast<int64_t>(attrs.size()), types.data(), names.data(), attrs.data()};
  const auto handler = reinterpret_cast<XLA_FFI_Handler*>(dlsym(library, name.c_str()));
  if (handler == nullptr) throw std::runtime_error("the library has no " + name);
  const std::unique_ptr<XLA_FFI_Error> error(handler(&frame));
  pipe.send_number(error == nullptr ? 0 : static_cast<uint64_t>(error->code));
  if (error != nullptr) return pipe.send_text(error->message.data(), error->message.size());
  for (void* ret : rets) {
    const auto& buffer = *static_cast<XLA_FFI_Buffer*>(ret);
    pipe.send(buffer.data, bytes_of(buffer));
  }
}

}  // namespace

int main(int, char** argv) {
  void* library = dlopen(argv[1], RTLD_NOW);
  if (library == nullptr) {
    fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  lowbit::wire::Pipe pipe(0, 3);
  for (const char* name : {"lowbit_isa", "lowbit_targets", "lowbit_error"}) {
    const char* text = reinterpret_cast<const char* (*)()>(dlsym(library, name))();
    pipe.send_text(text, strlen(text));
  }
  try {
    for (;;) run(pipe, library);
  } catch (const std::exception& error) {
    // The normal end: the other side has closed the pipe.
    return 0;
  }
}
