// The FFI targets that JAX calls: they check every operand and call the kernels for this machine.

#include "xla/ffi/api/ffi.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "checks.h"
#include "choose.h"
#include "groups.h"

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

// Tells the core that this thread waits.
void pause() {
#if defined(__aarch64__)
  asm volatile("yield");
#else
  __builtin_ia32_pause();
#endif
}

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
      pause();
    } else {
      std::this_thread::yield();
    }
  }
}

Parallel parallel_on(ffi::ThreadPool& pool) {
  return Parallel(std::max<int64_t>(pool.num_threads(), 1), &pool, run_on_pool);
}

// A large result is new memory, and each page of it is cleared when it is first written: asks for huge ones.
void prefer_huge_pages(void* data, size_t size) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = uintptr_t{1} << 21;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kPage - 1) / kPage * kPage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + size) / kPage * kPage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data;
  (void)size;
#endif
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

bool multiply(const Matmul& p, bool fast, const Parallel& parallel) {
  const Kernels& kernels = *choice().kernels;
  return (fast && kernels.matmul_fast(p, parallel)) || kernels.matmul(p, parallel);
}

ffi::Error matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, const Stored& stored, const Weights& w, ffi::AnyBuffer index,
                  ffi::AnyBuffer sizes, ffi::Result<ffi::AnyBuffer> y, int64_t contract, bool fast) {
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
  const bool grouped = sizes.dimensions().size() == 2;
  const int64_t groups = grouped ? sizes.dimensions()[1] : 1;
  if (sizes.element_type() != ffi::DataType::S32 || (grouped && !has_shape(sizes, {p.batch, groups}))) {
    return invalid("sizes " + text_of(sizes) + " must be s32, those of the groups of each of " +
                   std::to_string(p.batch) + ".");
  }
  if (index.element_type() != ffi::DataType::S32 || !has_shape(index, {p.batch * groups})) {
    return invalid("index " + text_of(index) + " must be s32, one for each of " + std::to_string(p.batch * groups) +
                   ".");
  }
  if (p.batch * groups > 0 && w.layers == 0) return invalid("codes " + text_of(stored.codes) + " hold no layer.");
  p.x = x.untyped_data();
  p.x_type = *x_type;
  p.index = static_cast<const int32_t*>(index.untyped_data());
  p.y = y->untyped_data();
  p.y_type = *y_type;
  if (p.batch * p.m * p.n == 0) return ffi::Error::Success();
  Parallel parallel = parallel_on(pool);
  const auto run = [fast](const Matmul& part, const Parallel& threads) { return multiply(part, fast, threads); };
  if (!grouped) return finished(run(p, parallel));
  return finished(multiply_groups(p, groups, static_cast<const int32_t*>(sizes.untyped_data()), parallel, run));
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

std::optional<Encoding> encoding_of(std::string_view format) {
  if (format == "int8") return Encoding::int8;
  if (format == "nf4") return Encoding::nf4;
  if (format == "ternary") return Encoding::ternary;
  if (format == "absmean") return Encoding::absmean;
  if (format == "binary") return Encoding::binary;
  return std::nullopt;
}

ffi::Error encode(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> codes,
                  ffi::Result<ffi::AnyBuffer> scales, std::string_view format, int64_t row_span, int64_t col_span) {
  if (choice().kernels == nullptr) return invalid(choice().error);
  if (x.dimensions().size() != 3) return invalid("x " + text_of(x) + " must have three axes.");
  const auto encoding = encoding_of(format);
  if (!encoding) {
    return invalid("encode knows int8, nf4, ternary, absmean and binary, not '" + std::string(format) + "'.");
  }
  Encode p;
  p.encoding = *encoding;
  if (auto error = set_spans(x.dimensions()[0], x.dimensions()[1], x.dimensions()[2], row_span, col_span, p);
      error.failure()) {
    return error;
  }
  p.row_bytes = ceil_div(p.columns, codes_per_byte(p.encoding));
  auto x_type = float_of(x.element_type());
  if (!x_type) return invalid("x must be f32, bf16 or f16.");
  if (codes->element_type() != (p.encoding == Encoding::int8 ? ffi::DataType::S8 : ffi::DataType::U8) ||
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
  prefer_huge_pages(p.codes, static_cast<size_t>(p.layers * p.rows * p.row_bytes));
  return finished(choice().kernels->encode(p, parallel_on(pool)));
}

// What a search needs to know of the levels: `levels` and `middle` of a table, or none for integers.
ffi::Error set_levels(const ffi::AnyBuffer& levels, const ffi::AnyBuffer& middle, int64_t bits, Search& p) {
  if (bits < 1 || bits > (levels.element_count() > 0 ? 4 : 6)) {
    return invalid("bits=" + std::to_string(bits) + " must be 1 to 4 for a table, 1 to 6 for integers.");
  }
  p.bits = static_cast<int>(bits);
  p.levels = p.middle = nullptr;
  if (levels.element_count() == 0) return ffi::Error::Success();
  const int64_t count = int64_t{1} << bits;
  if (levels.element_type() != ffi::DataType::F32 || !has_shape(levels, {count}) ||
      middle.element_type() != ffi::DataType::F32 || !has_shape(middle, {count - 1})) {
    return invalid("levels " + text_of(levels) + " and middle " + text_of(middle) + " must be f32, for " +
                   std::to_string(bits) + " bits.");
  }
  p.levels = floats_of(levels);
  p.middle = floats_of(middle);
  return ffi::Error::Success();
}

// The results of a search: where codes, scales and group scales go.
ffi::Error set_results(ffi::AnyBuffer codes, ffi::AnyBuffer high, ffi::AnyBuffer scales, ffi::AnyBuffer group_scales,
                       Search& p) {
  const int low = low_bits(p.bits), above = p.bits - low;
  const int64_t blocks = ceil_div(p.along_rows ? p.rows : p.columns, p.span);
  p.low_bytes = ceil_div(p.columns, 8 / low);
  p.high_bytes = above == 0 ? 0 : ceil_div(p.columns, 8 / above);
  p.scale_rows = p.along_rows ? blocks : p.rows;
  p.scale_cols = p.along_rows ? p.columns : blocks;
  const bool grouped = group_scales.element_count() > 0;
  const auto type = float_of(scales.element_type());
  const bool fits =
      codes.element_type() == ffi::DataType::U8 && has_shape(codes, {p.layers, p.rows, p.low_bytes}) &&
      high.element_type() == ffi::DataType::U8 && (above == 0 || has_shape(high, {p.layers, p.rows, p.high_bytes})) &&
      has_shape(scales, {p.layers, p.scale_rows, p.scale_cols}) &&
      (grouped ? scales.element_type() == ffi::DataType::U8 : type.has_value()) &&
      (!grouped || (group_scales.element_type() == ffi::DataType::F32 &&
                    has_shape(group_scales, {p.layers, p.along_rows ? 1 : p.rows, p.along_rows ? p.columns : 1})));
  if (!fits) {
    return invalid("codes " + text_of(codes) + ", high " + text_of(high) + ", scales " + text_of(scales) +
                   " and group_scales " + text_of(group_scales) + " do not fit x with blocks of " +
                   std::to_string(p.span) + " along its " + (p.along_rows ? "rows." : "columns."));
  }
  p.codes = static_cast<uint8_t*>(codes.untyped_data());
  p.high = above == 0 ? nullptr : static_cast<uint8_t*>(high.untyped_data());
  p.scales = scales.untyped_data();
  p.scale_type = type.value_or(Float::f32);
  p.group_scales = grouped ? static_cast<float*>(group_scales.untyped_data()) : nullptr;
  return ffi::Error::Success();
}

ffi::Error search(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer levels, ffi::AnyBuffer middle,
                  ffi::AnyBuffer factors, ffi::Result<ffi::AnyBuffer> codes, ffi::Result<ffi::AnyBuffer> high,
                  ffi::Result<ffi::AnyBuffer> scales, ffi::Result<ffi::AnyBuffer> group_scales, int64_t bits,
                  int64_t zero, std::string_view weighting, float inverse_top, float group_factor, bool along_rows,
                  int64_t span) {
  if (choice().kernels == nullptr) return invalid(choice().error);
  auto x_type = float_of(x.element_type());
  if (!x_type || x.dimensions().size() != 3)
    return invalid("x " + text_of(x) + " must be f32, bf16 or f16 with 3 axes.");
  if (span < 1 || span > kSearchBlock) {
    return invalid("span=" + std::to_string(span) + " must be 1 to " + std::to_string(kSearchBlock) + ".");
  }
  if (factors.element_type() != ffi::DataType::F32 || factors.dimensions().size() != 1) {
    return invalid("factors " + text_of(factors) + " must be f32 with one axis.");
  }
  Search p;
  if (auto error = set_levels(levels, middle, bits, p); error.failure()) return error;
  p.zero = static_cast<int>(zero);
  if (weighting != "plain" && weighting != "square" && weighting != "root") {
    return invalid("unknown weighting '" + std::string(weighting) + "'.");
  }
  p.weighting = weighting == "plain" ? Weighting::plain : weighting == "square" ? Weighting::square : Weighting::root;
  p.inverse_top = inverse_top;
  p.group_factor = group_factor;
  p.factors = floats_of(factors);
  p.factor_count = static_cast<int64_t>(factors.element_count());
  p.along_rows = along_rows;
  p.span = span;
  p.layers = x.dimensions()[0];
  p.rows = x.dimensions()[1];
  p.columns = x.dimensions()[2];
  p.x = x.untyped_data();
  p.x_type = *x_type;
  if (auto error = set_results(*codes, *high, *scales, *group_scales, p); error.failure()) return error;
  prefer_huge_pages(p.codes, static_cast<size_t>(p.layers * p.rows * p.low_bytes));
  return finished(choice().kernels->search(p, parallel_on(pool)));
}

}  // namespace
}  // namespace lowbit

#define LOWBIT_EXPORT extern "C" __attribute__((visibility("default")))

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(lowbit_matmul, lowbit::OnStored<lowbit::matmul>(),
                              lowbit::bind_stored()
                                  .Arg<ffi::AnyBuffer>()  // index
                                  .Arg<ffi::AnyBuffer>()  // sizes
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(lowbit_search, lowbit::search,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // x
                                  .Arg<ffi::AnyBuffer>()  // levels
                                  .Arg<ffi::AnyBuffer>()  // middle
                                  .Arg<ffi::AnyBuffer>()  // factors
                                  .Ret<ffi::AnyBuffer>()  // codes
                                  .Ret<ffi::AnyBuffer>()  // high
                                  .Ret<ffi::AnyBuffer>()  // scales
                                  .Ret<ffi::AnyBuffer>()  // group_scales
                                  .Attr<int64_t>("bits")
                                  .Attr<int64_t>("zero")
                                  .Attr<std::string_view>("weighting")
                                  .Attr<float>("inverse_top")
                                  .Attr<float>("group_factor")
                                  .Attr<bool>("along_rows")
                                  .Attr<int64_t>("span"));

#pragma GCC visibility pop

// The names of the targets above, which Python registers.
LOWBIT_EXPORT const char* lowbit_targets() {
  return "lowbit_matmul,lowbit_take,lowbit_squares,lowbit_encode,lowbit_search";
}

// The instruction set in use, or an empty string if the forced one cannot run here.
LOWBIT_EXPORT const char* lowbit_isa() {
  return lowbit::choice().kernels == nullptr ? "" : lowbit::choice().kernels->name;
}

// Why there is none.
LOWBIT_EXPORT const char* lowbit_error() { return lowbit::choice().error.c_str(); }
