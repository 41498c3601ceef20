// The arguments of each kernel, and the table of kernels that each instruction set provides.
//
// Nothing here may include code of the standard library: this header is compiled once per instruction set, and the
// linker keeps one copy of an inline function, which may use instructions that the machine lacks.
#ifndef LOWBIT_KERNELS_H_
#define LOWBIT_KERNELS_H_

#include <stddef.h>
#include <stdint.h>

namespace lowbit {

enum class Float { f32, bf16, f16 };
enum class Format { int8, nf4, ternary, binary };

constexpr int codes_per_byte(Format format) {
  return format == Format::int8 ? 1 : format == Format::nf4 ? 2 : format == Format::ternary ? 4 : 8;
}

// A stack of stored matrices. The element (r, c) of layer l is
//
//   level[code(l, r, c)] * scale(l, r / row_span, c / col_span)
//
// where codes are packed along the columns, the first one in the highest bits of a byte.
struct Weights {
  Format format;
  int64_t layers, rows, columns;
  int64_t row_bytes;           // ceil(columns / codes per byte)
  int64_t row_span, col_span;  // at least 1; for the whole axis, its length (or 1 if that is 0)
  int64_t scale_layers;        // layers, or 1 if all layers share their scales
  int64_t scale_rows, scale_cols;
  const uint8_t* codes;  // [layers, rows, row_bytes]
  const float* scales;   // [scale_layers, scale_rows, scale_cols]; null if scales are quantized (double_quant):
  //   scale = scale_map[scale_codes[i]] * group_absmax[i / kScaleGroup] + offset,  i is the index in the matrix
  const uint8_t* scale_codes;
  const float* group_absmax;  // [scale_layers, groups]
  const float* offset;        // [scale_layers]
  const float* scale_map;     // [256]
  int64_t groups;
};

constexpr int64_t kScaleGroup = 256;

// y[b, m, n] = sum_k x[b, m, k] * w[index[b], k, n], or w[index[b], n, k] if the last stored axis is contracted.
struct Matmul {
  Weights w;
  bool contract_last;
  int64_t batch, m, k, n;
  const void* x;  // [batch, m, k]
  Float x_type;
  const int32_t* index;  // [batch], clamped to the layers
  void* y;               // [batch, m, n]
  Float y_type;
};

// y[t, c] = w[0, ids[t], c]
struct Take {
  Weights w;  // of one layer
  int64_t count;
  const int32_t* ids;  // [count], clamped to the rows
  void* y;             // [count, w.columns]
  Float y_type;
};

// lost[l, r] = sum_c (w[l, r, c] - x[l, r, c])^2, size[l, r] = sum_c x[l, r, c]^2
struct Squares {
  Weights w;
  const void* x;  // [w.layers, w.rows, w.columns]
  Float x_type;
  float* lost;  // [w.layers, w.rows]
  float* size;
};

// Codes and float32 scales of x; spans as in Weights.
struct Encode {
  Format format;
  int64_t layers, rows, columns;
  int64_t row_bytes;
  int64_t row_span, col_span;
  int64_t scale_rows, scale_cols;
  const void* x;  // [layers, rows, columns]
  Float x_type;
  uint8_t* codes;  // [layers, rows, row_bytes]
  float* scales;   // [layers, scale_rows, scale_cols]
};

// Runs tasks on a thread pool; the calling thread runs tasks too.
class Parallel {
 public:
  using Task = void (*)(const void* context, int64_t i);

  Parallel(int64_t threads, void* pool, void (*run)(void* pool, int64_t threads, int64_t n, Task, const void* context))
      : threads_(threads), pool_(pool), run_(run) {}

  int64_t threads() const { return threads_; }

  // Runs task(i) for each i in [0, n), concurrently and in any order; returns when all are done.
  template <typename F>
  void each(int64_t n, const F& task) const {
    if (n <= 1 || threads_ <= 1) {
      for (int64_t i = 0; i < n; ++i) task(i);
    } else {
      run_(pool_, threads_, n, [](const void* f, int64_t i) { (*static_cast<const F*>(f))(i); }, &task);
    }
  }

 private:
  int64_t threads_;
  void* pool_;
  void (*run_)(void*, int64_t, int64_t, Task, const void*);
};

// Uninitialized memory that a thread reuses between calls, aligned to 64 bytes; null if out of memory.
// A second request for the same slot by the same thread invalidates the first.
enum class Scratch { call_x, call_y, call_pack, call_sums, task_panel, task_sums, task_scales, count };
void* scratch(Scratch slot, size_t bytes);

struct Kernels {
  const char* name;
  bool (*matmul)(const Matmul&, const Parallel&);       // false: out of memory
  bool (*matmul_fast)(const Matmul&, const Parallel&);  // int8 activations. false: not supported, call matmul
  bool (*take)(const Take&, const Parallel&);           // false: out of memory
  bool (*squares)(const Squares&, const Parallel&);     // false: out of memory
  bool (*encode)(const Encode&, const Parallel&);       // false: out of memory
};

namespace generic {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}

}  // namespace lowbit

#endif  // LOWBIT_KERNELS_H_
