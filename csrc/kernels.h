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

// What a code means: itself, as a signed byte; an entry of a table; or a float of 8 bits.
enum class Format { int8, table, e4m3, e5m2 };

// How scales are stored: as floats, as codes of NF4's dynamic map, or as codes that are small floats (signed8 has one
// sign, three exponent and four mantissa bits; e8m0 is a power of two).
enum class ScaleType { f32, bf16, f16, dynamic, signed8, e4m3, e8m0 };

// Codes of 3, 5 and 6 bits are stored in two components: the low 2 or 4 bits, and the bits above them.
constexpr int low_bits(int bits) { return bits == 3 ? 2 : bits == 5 || bits == 6 ? 4 : bits; }

// A stack of stored matrices. The element (r, c) of layer l is
//
//   level[code(l, r, c)] * scale(l, r / row_span, c / col_span)
//
// where codes are packed along the columns, the first one in the highest bits of a byte.
struct Weights {
  Format format;
  int bits;             // of a code
  const float* levels;  // [2^bits] of a table; integers of 8 bits if codes are in two components
  int64_t layers, rows, columns;
  int64_t row_bytes;           // that a decoder reads: the stored ones, or a byte for each column of joined codes
  int64_t low_bytes;           // stored for a row: ceil(columns / codes per byte)
  int64_t high_bytes;          // the same of the second component; 0 if there is none
  int64_t row_span, col_span;  // at least 1; for the whole axis, its length (or 1 if that is 0)
  int64_t scale_layers;        // layers, or 1 if all layers share their scales
  int64_t scale_rows, scale_cols;
  const uint8_t* codes;  // [layers, rows, low_bytes]
  const uint8_t* high;   // [layers, rows, high_bytes], or null
  ScaleType scale_type;
  const void* scales;  // [scale_layers, scale_rows, scale_cols]
  // Of codes that are small floats: scale = value[code] * group scale, if there are any.
  const float* group_scales;  // or null
  int64_t group_layer_step, group_row_step, group_col_step;
  // Of the dynamic map: scale = map[code] * group_scales[i / kScaleGroup] + offset,  i is the index in the matrix.
  const float* offset;     // [scale_layers]
  const float* scale_map;  // [256]
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

// How to encode: `absmean` is ternary with the mean magnitude for a scale.
enum class Encoding { int8, nf4, ternary, absmean, binary };

constexpr int codes_per_byte(Encoding encoding) {
  return encoding == Encoding::int8 ? 1 : encoding == Encoding::nf4 ? 2 : encoding == Encoding::binary ? 8 : 4;
}

// Codes and float32 scales of x; spans as in Weights.
struct Encode {
  Encoding encoding;
  int64_t layers, rows, columns;
  int64_t row_bytes;
  int64_t row_span, col_span;
  int64_t scale_rows, scale_cols;
  const void* x;  // [layers, rows, columns]
  Float x_type;
  uint8_t* codes;  // [layers, rows, row_bytes]
  float* scales;   // [layers, scale_rows, scale_cols]
};

// Codes and scales of x by a search (formats/search.py), with blocks of `span` along the rows or the columns.
constexpr int64_t kSearchBlock = 512;  // the longest block

enum class Weighting { plain, square, root };

struct Search {
  int bits;
  int zero;             // of integers, code - zero
  const float* levels;  // [2^bits] of a table, or null for integers
  const float* middle;  // [2^bits - 1], where the nearest level of a table changes
  Weighting weighting;  // of squared errors
  float inverse_top;    // 1 / largest level
  float group_factor;   // group scale in units of the largest magnitude
  const float* factors;
  int64_t factor_count;
  bool along_rows;
  int64_t span;
  int64_t layers, rows, columns, low_bytes, high_bytes, scale_rows, scale_cols;
  const void* x;  // [layers, rows, columns]
  Float x_type;
  uint8_t* codes;  // [layers, rows, low_bytes]
  uint8_t* high;   // [layers, rows, high_bytes], or null
  void* scales;    // [layers, scale_rows, scale_cols] of scale_type, or of codes if there are group scales
  Float scale_type;
  float* group_scales;  // one for each column or row of a layer, or null
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
enum class Scratch { call_x, call_y, call_pack, call_sums, task_panel, task_sums, task_scales, task_codes, count };
void* scratch(Scratch slot, size_t bytes);

struct Kernels {
  const char* name;
  bool (*matmul)(const Matmul&, const Parallel&);       // false: out of memory
  bool (*matmul_fast)(const Matmul&, const Parallel&);  // int8 activations. false: not supported, call matmul
  bool (*take)(const Take&, const Parallel&);           // false: out of memory
  bool (*squares)(const Squares&, const Parallel&);     // false: out of memory
  bool (*encode)(const Encode&, const Parallel&);       // false: out of memory
  bool (*search)(const Search&, const Parallel&);       // false: out of memory
};

namespace generic {
extern const Kernels kernels;
}
#if defined(__aarch64__)
namespace neon {
extern const Kernels kernels;
}
namespace neon_dot {
extern const Kernels kernels;
}
namespace neon_i8mm {
extern const Kernels kernels;
}
#else
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
#endif

}  // namespace lowbit

#endif  // LOWBIT_KERNELS_H_
