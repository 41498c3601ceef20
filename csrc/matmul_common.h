// Shared by all products: constants as types, scratch memory, division of work over threads, the scales of a line, and
// the loop over the matrices of a batch.
#ifndef LOWBIT_MATMUL_COMMON_H_
#define LOWBIT_MATMUL_COMMON_H_

#include "matrix.h"

namespace lowbit::LOWBIT_ISA {

template <int N>
struct Constant {
  static constexpr int value = N;
};

// Calls run(Constant<n>) for n in 1..kMax.
template <int kMax, typename Run>
LOWBIT_INLINE void with_constant(int64_t n, const Run& run) {
  if constexpr (kMax > 1) {
    if (n < kMax) return with_constant<kMax - 1>(n, run);
  }
  run(Constant<kMax>());
}

// Calls run(Constant<i>) for i in 0..kCount - 1. Indices of a loop become constants too late for GCC 12: it copies the
// sums of a tile through memory on the way to registers and back.
template <int kCount, int i = 0, typename Run>
LOWBIT_INLINE void each_constant(const Run& run) {
  if constexpr (i < kCount) {
    run(Constant<i>());
    each_constant<kCount, i + 1>(run);
  }
}
// The same for pairs of r in 0..kRows - 1 and v in 0..kWidth - 1.
template <int kRows, int kWidth, typename Run>
LOWBIT_INLINE void each_pair(const Run& run) {
  each_constant<kRows * kWidth>(
      [&](auto i) LOWBIT_INLINE_LAMBDA { run(Constant<i.value / kWidth>(), Constant<i.value % kWidth>()); });
}

template <typename T>
LOWBIT_INLINE T* buffer(Scratch slot, int64_t count) {
  return static_cast<T*>(scratch(slot, static_cast<size_t>(count) * sizeof(T)));
}

constexpr int64_t kAloneWork = 300000;  // multiplications that take less time than starting another thread
constexpr int64_t kShareWork = 50000;   // multiplications that outweigh the overhead of a task

// Divides `units` of work for threads that start late or stall: large shares first, small ones last, so that all
// threads finish together. The division, and so the order of sums, depends only on the number of threads.
struct Shares {
  static constexpr int64_t kMost = 512;
  int64_t count = 0;
  int64_t begins[kMost + 1];

  Shares(int64_t units, int64_t threads, int64_t least) {
    // A share may have sums of its own, which are added at the end.
    least = threads == 1 ? units : max(max(least, ceil_div(units, 4 * threads)), ceil_div(units, kMost));
    for (int64_t at = 0; at < units; ++count) {
      begins[count] = at;
      at += min(max((units - at) * 3 / (4 * threads), least), units - at);
    }
    begins[count] = units;
  }
};

// The step between the sums of several rows of x. Loads wait for stores whose addresses have the same last 12 bits, and
// L1 holds few lines that are a power of two apart.
LOWBIT_INLINE int64_t sums_width(int64_t rows, int64_t columns) { return columns + (rows > 1 ? 144 : 0); }

template <typename D>
constexpr int kLineBytes = kLine / D::kPerByte;

// The last line of a row, padded: bytes past the end of the row must not be read.
template <typename D>
struct PaddedLine {
  alignas(64) uint8_t bytes[kLine];
  PaddedLine() = default;
  PaddedLine(const uint8_t* from, int64_t columns) {
    memset(bytes, 0, sizeof(bytes));
    memcpy(bytes, from, static_cast<size_t>(ceil_div(columns, D::kPerByte)));
  }
};

// The scales of the line of columns that starts at `column`, in the decoder's order.
template <typename D>
LOWBIT_INLINE void line_scales(const Matrix& w, int64_t scale_row, int64_t column, F s[kVectors]) {
  const int64_t columns = min(kLine, w.w.columns - column), span = w.w.col_span;
  float held[kLine] = {};
  if (span == 1) {
    const float* scales = w.scales(scale_row, column, columns, held);
    if (columns < kLine && scales != held) {
      memcpy(held, scales, static_cast<size_t>(columns) * 4);
      scales = held;
    }
    for (int i = 0; i < kVectors; ++i) s[i] = load(scales + i * kLanes);
    for (int i = 0; i < kVectors; i += 2) D::unorder(s + i);
    return;
  }
  const int64_t from = column / span, to = (column + columns - 1) / span;
  const float* scales = w.scales(scale_row, from, to - from + 1, held);
  if (from == to) {
    for (int i = 0; i < kVectors; ++i) s[i] = broadcast(scales[0]);
    return;
  }
  if (span % 16 == 0) {
    // A decoder's order keeps 16 columns together.
    int64_t next = (from + 1) * span - column;
    for (int i = 0; i < kVectors; ++i) {
      if (i * kLanes / 16 * 16 >= next && next < columns) {
        ++scales;
        next += span;
      }
      s[i] = broadcast(*scales);
    }
    return;
  }
  float spread[kLine] = {};
  for (int64_t i = 0; i < columns; ++i) spread[i] = scales[(column + i) / span - from];
  for (int i = 0; i < kVectors; ++i) s[i] = load(spread + i * kLanes);
  for (int i = 0; i < kVectors; i += 2) D::unorder(s + i);
}

// out = two vectors of x in the decoder's order; zeros from `count` on
template <typename D>
LOWBIT_INLINE void unordered_pair(const float* x, int64_t count, float* out) {
  F v[2];
  for (int i = 0; i < 2; ++i) {
    const int64_t left = count - i * kLanes;
    v[i] = left >= kLanes ? load(x + i * kLanes) : left > 0 ? load(x + i * kLanes, left) : zero();
  }
  D::unorder(v);
  for (int i = 0; i < 2; ++i) store(out + i * kLanes, v[i]);
}

// Prefetches the rows of the next slab from left to right, a line at a time, while tiles of this one are multiplied:
// tiles are columns of memory, whose lines are far apart, and memory is fastest in the order of its addresses. Decoding
// a tile takes less time than reading one, so prefetching then would wait for the memory.
class NextSlab {
 public:
  NextSlab() = default;
  NextSlab(const Matrix& w, int64_t row, int64_t begin, int64_t end, bool far = false)
      : at_(w.codes + row * w.w.row_bytes + begin),
        row_end_(at_ + round_up(end - begin, 64)),
        step_(w.w.row_bytes),
        back_(step_ - (row_end_ - at_)),
        far_(far) {}

  // `lines` are for the next `times` steps. Many at a time wait for the memory, and leave it idle afterwards; but each
  // step takes registers and instructions of a loop.
  void set(int64_t lines, int64_t times) {
    left_ = lines;
    some_ = ceil_div(lines, times);
  }
  void prefetch_all(int64_t lines) {
    set(lines, 1);
    prefetch_some();
  }

  // Steps in the products of whole rows, and of the spans of a block.
  template <int, bool kBlocked>
  LOWBIT_INLINE void in_group(int64_t) {
    if constexpr (!kBlocked) prefetch_some();
  }
  LOWBIT_INLINE void in_span() { prefetch_some(); }
  LOWBIT_INLINE void in_tile() {}

  LOWBIT_INLINE void prefetch_some() {
    for (int64_t i = 0; i < some_ && left_ > 0; ++i, --left_) {
      if (far_) {
        prefetch_far(at_);
      } else {
        prefetch(at_);
      }
      at_ += 64;
      if (at_ >= row_end_) {
        at_ += back_;
        row_end_ += step_;
      }
    }
  }

 private:
  const uint8_t *at_ = nullptr, *row_end_ = nullptr;
  int64_t step_ = 0, back_ = 0, left_ = 0, some_ = 0;
  bool far_ = false;
};

// The same before each tile of rows.
struct EachTile {
  NextSlab* next;
  template <int, bool>
  LOWBIT_INLINE void in_group(int64_t) {}
  LOWBIT_INLINE void in_span() {}
  LOWBIT_INLINE void in_tile() { next->prefetch_some(); }
};

// Calls multiply(layer, x, y, parallel) for each matrix of the batch, with x and y in float32.
template <typename Multiply>
bool each_product(const Matmul& p, const Parallel& parallel, const Multiply& multiply) {
  const int64_t x_size = p.m * p.k, y_size = p.m * p.n;
  const float* x = static_cast<const float*>(p.x);
  float* y = static_cast<float*>(p.y);
  if (p.x_type != Float::f32) {
    float* wide = buffer<float>(Scratch::call_x, p.batch * x_size);
    if (wide == nullptr) return false;
    to_f32(p.x, p.x_type, 0, p.batch * x_size, wide);
    x = wide;
  }
  if (p.y_type != Float::f32) {
    y = buffer<float>(Scratch::call_y, p.batch * y_size);
    if (y == nullptr) return false;
  }
  bool enough_memory = true;
  const Parallel alone(1, nullptr, nullptr);
  const auto one = [&](int64_t b, const Parallel& inner) {
    const int64_t layer = min(max(p.index[b], 0), p.w.layers - 1);
    if (multiply(layer, x + b * x_size, y + b * y_size, inner)) return;
    __atomic_store_n(&enough_memory, false, __ATOMIC_RELAXED);
  };
  const int64_t work = p.m * p.k * p.n;
  if (p.batch >= 2 * parallel.threads() && p.batch * work > kAloneWork) {
    parallel.each(p.batch, [&](int64_t b) { one(b, alone); });
  } else {
    for (int64_t b = 0; b < p.batch; ++b) one(b, work > kAloneWork ? parallel : alone);
  }
  if (p.y_type != Float::f32) from_f32(y, p.batch * y_size, p.y, p.y_type, 0);
  return enough_memory;
}

}  // namespace lowbit::LOWBIT_ISA

#endif  // LOWBIT_MATMUL_COMMON_H_
