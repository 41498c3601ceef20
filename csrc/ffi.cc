// The FFI targets that JAX calls: they check every operand and call the kernels for this machine.

#include "xla/ffi/api/ffi.h"

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

#include "kernels.h"

namespace ffi = xla::ffi;

namespace lowbit {

// ---- Memory and threads

namespace {

struct Buffer {
  void* data = nullptr;
  size_t size = 0;
  ~Buffer() { std::free(data); }
};

thread_local Buffer buffers[static_cast<size_t>(Scratch::count)];

}  // namespace

void* scratch(Scratch slot, size_t bytes) {
  Buffer& buffer = buffers[static_cast<size_t>(slot)];
  if (buffer.size < bytes || buffer.data == nullptr) {
    std::free(buffer.data);
    buffer.size = (bytes + 4095) / 4096 * 4096 + 4096;
    buffer.data = std::aligned_alloc(64, buffer.size);
    if (buffer.data == nullptr) buffer.size = 0;
  }
  return buffer.data;
}

namespace {

// Shared by the calling thread and its helpers; a helper that starts late finds no task left and releases it.
struct Work {
  int64_t n;
  Parallel::Task task;
  const void* context;
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};

  void run() {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) {
      task(context, i);
      done.fetch_add(1, std::memory_order_release);
    }
  }
};

void run_on_pool(void* pool, int64_t threads, int64_t n, Parallel::Task task, const void* context) {
  auto work = std::make_shared<Work>();
  work->n = n;
  work->task = task;
  work->context = context;
  for (int64_t i = 0; i < std::min(threads, n) - 1; ++i) {
    static_cast<ffi::ThreadPool*>(pool)->Schedule([work] { work->run(); });
  }
  work->run();
  // Other threads are finishing the last tasks.
  for (int spins = 0; work->done.load(std::memory_order_acquire) < n; ++spins) {
    if (spins < 20000) {
      _mm_pause();
    } else {
      std::this_thread::yield();
    }
  }
}

Parallel parallel_on(ffi::ThreadPool& pool) {
  return Parallel(std::max<int64_t>(pool.num_threads(), 1), &pool, run_on_pool);
}

// ---- The instruction set

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool has_avx512() {
#if defined(LOWBIT_EMULATE_AVX512)
  return has_avx2();
#endif
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi");
}

struct Choice {
  const Kernels* kernels;  // null if none can run, for the reason in `error`
  std::string error;
};

Choice choose_kernels() {
  const char* forced = std::getenv("LOWBIT_ISA");
  std::string_view isa = forced == nullptr ? "" : forced;
  if (isa == "") isa = has_avx512() ? "avx512" : has_avx2() ? "avx2" : "generic";
  if (isa == "generic") return {&generic::kernels, ""};
  if (isa == "avx2" && has_avx2()) return {&avx2::kernels, ""};
  if (isa == "avx512" && has_avx512()) return {&avx512::kernels, ""};
  if (isa == "avx2" || isa == "avx512") {
    return {nullptr, "LOWBIT_ISA=" + std::string(isa) + ": this machine lacks some of its instructions."};
  }
  return {nullptr, "LOWBIT_ISA=" + std::string(isa) + " must be generic, avx2 or avx512."};
}

const Choice& choice() {
  static const Choice chosen = choose_kernels();
  return chosen;
}

// ---- Checks

ffi::Error invalid(const std::string& text) { return ffi::Error::InvalidArgument("lowbit: " + text); }

std::string text_of(const ffi::AnyBuffer& b) {
  std::string text = "[";
  for (int64_t d : b.dimensions()) text += (text.size() > 1 ? ", " : "") + std::to_string(d);
  return text + "]";
}

bool has_shape(const ffi::AnyBuffer& b, std::initializer_list<int64_t> shape) {
  auto dims = b.dimensions();
  return dims.size() == shape.size() && std::equal(dims.begin(), dims.end(), shape.begin());
}

// A stack of matrices, with any number of leading axes. It is not reshaped in JAX: reshaping a value that is updated in
// place would make XLA update a copy of it.
struct Matrices {
  int64_t count, rows, columns;
};

std::optional<Matrices> matrices_of(const ffi::AnyBuffer& b) {
  auto dims = b.dimensions();
  if (dims.size() < 2) return std::nullopt;
  Matrices m{1, dims[dims.size() - 2], dims[dims.size() - 1]};
  for (size_t i = 0; i + 2 < dims.size(); ++i) m.count *= dims[i];
  return m;
}

std::optional<Float> float_of(ffi::DataType type) {
  if (type == ffi::DataType::F32) return Float::f32;
  if (type == ffi::DataType::BF16) return Float::bf16;
  if (type == ffi::DataType::F16) return Float::f16;
  return std::nullopt;
}

std::optional<Format> format_of(std::string_view name) {
  if (name == "int8") return Format::int8;
  if (name == "table") return Format::table;
  if (name == "e4m3") return Format::e4m3;
  if (name == "e5m2") return Format::e5m2;
  return std::nullopt;
}

// The type of scales that are codes.
std::optional<ScaleType> codec_of(std::string_view name) {
  if (name == "dynamic") return ScaleType::dynamic;
  if (name == "signed8") return ScaleType::signed8;
  if (name == "e4m3") return ScaleType::e4m3;
  if (name == "e8m0") return ScaleType::e8m0;
  return std::nullopt;
}

int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

// The fields that Weights and Encode share: spans and the sizes that follow from them.
template <typename Stored>
ffi::Error set_spans(int64_t layers, int64_t rows, int64_t columns, int64_t row_span, int64_t col_span, Stored& w) {
  if (row_span < 0 || col_span < 0 || columns < 0) {
    return invalid("columns, row_span and col_span must not be negative.");
  }
  w.layers = layers;
  w.rows = rows;
  w.columns = columns;
  w.row_span = row_span == 0 ? std::max<int64_t>(rows, 1) : row_span;
  w.col_span = col_span == 0 ? std::max<int64_t>(columns, 1) : col_span;
  w.scale_rows = row_span == 0 ? 1 : ceil_div(rows, row_span);
  w.scale_cols = col_span == 0 ? 1 : ceil_div(columns, col_span);
  return ffi::Error::Success();
}

// The operands and attributes of a stored stack of matrices, as JAX passes them. Empty operands are not there.
struct Stored {
  ffi::AnyBuffer codes, high, levels, scales, group_scales, offset, scale_map;
  std::string_view format, codec;
  int64_t columns, row_span, col_span;
};

const float* floats_of(const ffi::AnyBuffer& b) { return static_cast<const float*>(b.untyped_data()); }

// Codes of NF4's dynamic map, with groups in the order of the scales.
ffi::Error set_dynamic_scales(const Stored& s, Weights& w) {
  const int64_t groups = ceil_div(w.scale_rows * w.scale_cols, kScaleGroup);
  if (s.group_scales.element_type() != ffi::DataType::F32 || !has_shape(s.group_scales, {w.scale_layers, groups}) ||
      s.offset.element_type() != ffi::DataType::F32 || !has_shape(s.offset, {w.scale_layers, 1}) ||
      s.scale_map.element_type() != ffi::DataType::F32 || !has_shape(s.scale_map, {256})) {
    return invalid("group_scales " + text_of(s.group_scales) + ", offset " + text_of(s.offset) + " and scale_map " +
                   text_of(s.scale_map) + " do not fit scales " + text_of(s.scales) + " in u8.");
  }
  w.group_scales = floats_of(s.group_scales);
  w.group_layer_step = groups;
  w.offset = floats_of(s.offset);
  w.scale_map = floats_of(s.scale_map);
  return ffi::Error::Success();
}

// The scales, or their codes and the values to decode them.
ffi::Error set_scales(const Stored& s, Weights& w) {
  w.scales = s.scales.untyped_data();
  w.group_scales = w.offset = w.scale_map = nullptr;
  w.group_layer_step = w.group_row_step = w.group_col_step = 0;
  if (auto type = float_of(s.scales.element_type())) {
    if (s.group_scales.element_count() != 0 || s.offset.element_count() != 0) {
      return invalid("group_scales and offset belong to scales in u8.");
    }
    w.scale_type = *type == Float::f32 ? ScaleType::f32 : *type == Float::f16 ? ScaleType::f16 : ScaleType::bf16;
    return ffi::Error::Success();
  }
  if (s.scales.element_type() != ffi::DataType::U8) return invalid("scales must be f32, bf16, f16 or u8.");
  auto codec = codec_of(s.codec);
  if (!codec) return invalid("unknown codec '" + std::string(s.codec) + "' of scales in u8.");
  w.scale_type = *codec;
  if (*codec == ScaleType::dynamic) return set_dynamic_scales(s, w);
  if (s.group_scales.element_count() == 0) return ffi::Error::Success();
  const auto groups = matrices_of(s.group_scales);
  if (!groups || s.group_scales.element_type() != ffi::DataType::F32 || groups->count != w.scale_layers ||
      (groups->rows != w.scale_rows && groups->rows != 1) ||
      (groups->columns != w.scale_cols && groups->columns != 1)) {
    return invalid("group_scales " + text_of(s.group_scales) + " do not fit scales " + text_of(s.scales) + ".");
  }
  w.group_scales = floats_of(s.group_scales);
  w.group_layer_step = groups->rows * groups->columns;
  w.group_row_step = groups->rows == 1 ? 0 : groups->columns;
  w.group_col_step = groups->columns == 1 ? 0 : 1;
  return ffi::Error::Success();
}

// The levels of a table, and the number of bits of a code.
ffi::Error set_levels(const Stored& s, Weights& w) {
  w.bits = 8;
  w.levels = nullptr;
  if (w.format != Format::table) {
    return s.levels.element_count() == 0 ? ffi::Error::Success() : invalid("levels belong to the format 'table'.");
  }
  const auto dims = s.levels.dimensions();
  const int64_t count = dims.size() == 1 && s.levels.element_type() == ffi::DataType::F32 ? dims[0] : 0;
  for (w.bits = 1; w.bits <= 6 && count != 1 << w.bits;) ++w.bits;
  if (w.bits > 6) return invalid("levels " + text_of(s.levels) + " must be f32, 2 to 64 of them, a power of two.");
  w.levels = floats_of(s.levels);
  if (low_bits(w.bits) == w.bits) return ffi::Error::Success();
  for (int64_t i = 0; i < count; ++i) {
    const float level = w.levels[i];
    if (!(level >= -127 && level <= 127 && level == static_cast<float>(static_cast<int>(level)))) {
      return invalid("levels of codes in two components must be integers within +-127.");
    }
  }
  return ffi::Error::Success();
}

// The codes, in one component or two.
ffi::Error set_codes(const Stored& s, const Matrices& stored, Weights& w) {
  const int low = low_bits(w.bits), high = w.bits - low;
  const bool is_signed = w.format == Format::int8;
  w.low_bytes = ceil_div(w.columns, 8 / low);
  w.row_bytes = high == 0 ? w.low_bytes : w.columns;
  w.high_bytes = high == 0 ? 0 : ceil_div(w.columns, 8 / high);
  if (s.codes.element_type() != (is_signed ? ffi::DataType::S8 : ffi::DataType::U8) || stored.columns != w.low_bytes) {
    return invalid("codes " + text_of(s.codes) + " must be " + (is_signed ? "s8" : "u8") + " with " +
                   std::to_string(w.low_bytes) + " bytes for " + std::to_string(w.columns) + " columns.");
  }
  w.codes = static_cast<const uint8_t*>(s.codes.untyped_data());
  w.high = nullptr;
  if (high == 0) {
    return s.high.element_count() == 0 ? ffi::Error::Success() : invalid("high belongs to codes of 3, 5 or 6 bits.");
  }
  const auto above = matrices_of(s.high);
  if (!above || s.high.element_type() != ffi::DataType::U8 || above->count != w.layers || above->rows != w.rows ||
      above->columns != w.high_bytes) {
    return invalid("high " + text_of(s.high) + " must be u8 with " + std::to_string(w.high_bytes) +
                   " bytes for each row of codes " + text_of(s.codes) + ".");
  }
  w.high = static_cast<const uint8_t*>(s.high.untyped_data());
  return ffi::Error::Success();
}

ffi::Error set_weights(const Stored& s, Weights& w) {
  const auto stored = matrices_of(s.codes), scaled = matrices_of(s.scales);
  if (!stored) return invalid("codes " + text_of(s.codes) + " must have at least two axes.");
  if (!scaled) return invalid("scales " + text_of(s.scales) + " must have at least two axes.");
  auto format = format_of(s.format);
  if (!format) return invalid("unknown format '" + std::string(s.format) + "'.");
  w.format = *format;
  if (auto error = set_spans(stored->count, stored->rows, s.columns, s.row_span, s.col_span, w); error.failure()) {
    return error;
  }
  if (auto error = set_levels(s, w); error.failure()) return error;
  if (auto error = set_codes(s, *stored, w); error.failure()) return error;
  w.scale_layers = scaled->count;
  if ((w.scale_layers != w.layers && w.scale_layers != 1) || scaled->rows != w.scale_rows ||
      scaled->columns != w.scale_cols) {
    return invalid("scales " + text_of(s.scales) + " do not fit codes " + text_of(s.codes) + " with row_span " +
                   std::to_string(s.row_span) + " and col_span " + std::to_string(s.col_span) + ".");
  }
  return set_scales(s, w);
}

ffi::Error finished(bool done) {
  return done ? ffi::Error::Success() : ffi::Error(ffi::ErrorCode::kResourceExhausted, "lowbit: out of memory.");
}

// ---- Handlers

// Common to products, lookups and sums of squares: checks the weights and calls `run(pool, x, stored, w, ...)`.
template <auto run>
struct OnStored {
  template <typename... Rest>
  ffi::Error operator()(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer codes, ffi::AnyBuffer high,
                        ffi::AnyBuffer levels, ffi::AnyBuffer scales, ffi::AnyBuffer group_scales,
                        ffi::AnyBuffer offset, ffi::AnyBuffer scale_map, std::string_view format,
                        std::string_view codec, int64_t columns, int64_t row_span, int64_t col_span,
                        Rest... rest) const {
    if (choice().kernels == nullptr) return invalid(choice().error);
    const Stored stored{codes,     high,   levels, scales,  group_scales, offset,
                        scale_map, format, codec,  columns, row_span,     col_span};
    Weights w;
    if (auto error = set_weights(stored, w); error.failure()) return error;
    return run(pool, x, stored, w, rest...);
  }
};

// The operands and attributes that OnStored takes.
auto bind_stored() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<ffi::AnyBuffer>()  // x
      .Arg<ffi::AnyBuffer>()  // codes
      .Arg<ffi::AnyBuffer>()  // high
      .Arg<ffi::AnyBuffer>()  // levels
      .Arg<ffi::AnyBuffer>()  // scales
      .Arg<ffi::AnyBuffer>()  // group_scales
      .Arg<ffi::AnyBuffer>()  // offset
      .Arg<ffi::AnyBuffer>()  // scale_map
      .Attr<std::string_view>("format")
      .Attr<std::string_view>("codec")
      .Attr<int64_t>("columns")
      .Attr<int64_t>("row_span")
      .Attr<int64_t>("col_span");
}

ffi::Error matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, const Stored& stored, const Weights& w, ffi::AnyBuffer index,
                  ffi::Result<ffi::AnyBuffer> y, int64_t contract, bool fast) {
  if (contract != 0 && contract != 1) return invalid("contract=" + std::to_string(contract) + " must be 0 or 1.");
  auto x_type = float_of(x.element_type()), y_type = float_of(y->element_type());
  if (!x_type || !y_type) return invalid("x and y must be f32, bf16 or f16.");
  Matmul p;
  p.w = w;
  p.contract_last = contract == 1;
  p.k = p.contract_last ? w.columns : w.rows;
  p.n = p.contract_last ? w.rows : w.columns;
  auto dims = x.dimensions();
  if (dims.size() != 3 || dims[2] != p.k || !has_shape(*y, {dims[0], dims[1], p.n})) {
    return invalid("x " + text_of(x) + " and y " + text_of(*y) + " do not fit codes " + text_of(stored.codes) +
                   " with " + std::to_string(w.columns) + " columns contracted along axis " + std::to_string(contract) +
                   ".");
  }
  p.batch = dims[0];
  p.m = dims[1];
  if (index.element_type() != ffi::DataType::S32 || !has_shape(index, {p.batch})) {
    return invalid("index " + text_of(index) + " must be s32, one for each of " + std::to_string(p.batch) + ".");
  }
  if (p.batch > 0 && w.layers == 0) return invalid("codes " + text_of(stored.codes) + " hold no layer.");
  p.x = x.untyped_data();
  p.x_type = *x_type;
  p.index = static_cast<const int32_t*>(index.untyped_data());
  p.y = y->untyped_data();
  p.y_type = *y_type;
  if (p.batch * p.m * p.n == 0) return ffi::Error::Success();
  const Kernels& kernels = *choice().kernels;
  Parallel parallel = parallel_on(pool);
  if (fast && kernels.matmul_fast(p, parallel)) return ffi::Error::Success();
  return finished(kernels.matmul(p, parallel));
}

ffi::Error take(ffi::ThreadPool pool, ffi::AnyBuffer ids, const Stored& stored, const Weights& w,
                ffi::Result<ffi::AnyBuffer> y) {
  auto y_type = float_of(y->element_type());
  if (!y_type) return invalid("y must be f32, bf16 or f16.");
  if (ids.element_type() != ffi::DataType::S32 || ids.dimensions().size() != 1 ||
      !has_shape(*y, {ids.dimensions()[0], w.columns})) {
    return invalid("ids " + text_of(ids) + " must be s32 and y " + text_of(*y) + " one row of " +
                   std::to_string(w.columns) + " for each.");
  }
  if (w.layers != 1) return invalid("codes " + text_of(stored.codes) + " must be one matrix.");
  Take p;
  p.w = w;
  p.count = ids.dimensions()[0];
  if (p.count * w.columns == 0) return ffi::Error::Success();
  if (w.rows == 0) return invalid("codes " + text_of(stored.codes) + " hold no row.");
  p.ids = static_cast<const int32_t*>(ids.untyped_data());
  p.y = y->untyped_data();
  p.y_type = *y_type;
  return finished(choice().kernels->take(p, parallel_on(pool)));
}

ffi::Error squares(ffi::ThreadPool pool, ffi::AnyBuffer x, const Stored& stored, const Weights& w,
                   ffi::Result<ffi::AnyBuffer> lost, ffi::Result<ffi::AnyBuffer> size) {
  auto x_type = float_of(x.element_type());
  if (!x_type) return invalid("x must be f32, bf16 or f16.");
  if (!has_shape(x, {w.layers, w.rows, w.columns})) {
    return invalid("x " + text_of(x) + " does not fit codes " + text_of(stored.codes) + ".");
  }
  for (const auto& sums : {*lost, *size}) {
    if (sums.element_type() != ffi::DataType::F32 || !has_shape(sums, {w.layers, w.rows})) {
      return invalid("sums " + text_of(sums) + " must be f32, one for each row of x " + text_of(x) + ".");
    }
  }
  Squares p;
  p.w = w;
  p.x = x.untyped_data();
  p.x_type = *x_type;
  p.lost = static_cast<float*>(lost->untyped_data());
  p.size = static_cast<float*>(size->untyped_data());
  return finished(choice().kernels->squares(p, parallel_on(pool)));
}

ffi::Error encode(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> codes,
                  ffi::Result<ffi::AnyBuffer> scales, std::string_view format, int64_t row_span, int64_t col_span) {
  if (choice().kernels == nullptr) return invalid(choice().error);
  if (x.dimensions().size() != 3) return invalid("x " + text_of(x) + " must have three axes.");
  if (format != "nf4" && format != "int8") {
    return invalid("encode knows nf4 and int8, not '" + std::string(format) + "'.");
  }
  Encode p;
  p.nf4 = format == "nf4";
  if (auto error = set_spans(x.dimensions()[0], x.dimensions()[1], x.dimensions()[2], row_span, col_span, p);
      error.failure()) {
    return error;
  }
  p.row_bytes = ceil_div(p.columns, p.nf4 ? 2 : 1);
  auto x_type = float_of(x.element_type());
  if (!x_type) return invalid("x must be f32, bf16 or f16.");
  if (codes->element_type() != (p.nf4 ? ffi::DataType::U8 : ffi::DataType::S8) ||
      !has_shape(*codes, {p.layers, p.rows, p.row_bytes}) || scales->element_type() != ffi::DataType::F32 ||
      !has_shape(*scales, {p.layers, p.scale_rows, p.scale_cols})) {
    return invalid("codes " + text_of(*codes) + " and scales " + text_of(*scales) + " do not fit x " + text_of(x) +
                   " with row_span " + std::to_string(row_span) + " and col_span " + std::to_string(col_span) + ".");
  }
  p.x = x.untyped_data();
  p.x_type = *x_type;
  p.codes = static_cast<uint8_t*>(codes->untyped_data());
  p.scales = static_cast<float*>(scales->untyped_data());
  if (p.layers == 0) return ffi::Error::Success();
  return finished(choice().kernels->encode(p, parallel_on(pool)));
}

}  // namespace
}  // namespace lowbit

#define LOWBIT_EXPORT extern "C" __attribute__((visibility("default")))

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(lowbit_matmul, lowbit::OnStored<lowbit::matmul>(),
                              lowbit::bind_stored()
                                  .Arg<ffi::AnyBuffer>()  // index
                                  .Ret<ffi::AnyBuffer>()  // y
                                  .Attr<int64_t>("contract")
                                  .Attr<bool>("fast"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(lowbit_take, lowbit::OnStored<lowbit::take>(),
                              lowbit::bind_stored().Ret<ffi::AnyBuffer>());  // y

XLA_FFI_DEFINE_HANDLER_SYMBOL(lowbit_squares, lowbit::OnStored<lowbit::squares>(),
                              lowbit::bind_stored()
                                  .Ret<ffi::AnyBuffer>()    // lost
                                  .Ret<ffi::AnyBuffer>());  // size

XLA_FFI_DEFINE_HANDLER_SYMBOL(lowbit_encode, lowbit::encode,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // x
                                  .Ret<ffi::AnyBuffer>()  // codes
                                  .Ret<ffi::AnyBuffer>()  // scales
                                  .Attr<std::string_view>("format")
                                  .Attr<int64_t>("row_span")
                                  .Attr<int64_t>("col_span"));

#pragma GCC visibility pop

// The names of the targets above, which Python registers.
LOWBIT_EXPORT const char* lowbit_targets() { return "lowbit_matmul,lowbit_take,lowbit_squares,lowbit_encode"; }

// The instruction set in use, or an empty string if the forced one cannot run here.
LOWBIT_EXPORT const char* lowbit_isa() {
  return lowbit::choice().kernels == nullptr ? "" : lowbit::choice().kernels->name;
}
