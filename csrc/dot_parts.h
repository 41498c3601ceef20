// For products of few rows of x that contract the last stored axis: the order in which they read stored rows.
#ifndef LOWBIT_DOT_PARTS_H_
#define LOWBIT_DOT_PARTS_H_

#include "matmul_common.h"

namespace lowbit::LOWBIT_ISA {

constexpr int64_t kDotAhead = 2048;   // bytes of stored rows to prefetch ahead
constexpr int64_t kPartAhead = 8192;  // the same if parts of them are read: hardware does not foresee them
constexpr int64_t kPartX = 24576;     // bytes of x that stay in L1, beside stored rows and their scales
constexpr int64_t kPartRows = 32;     // stored rows whose parts are multiplied in turn
constexpr int64_t kDotAgain = 64;     // stored rows that stay in L2 for the next rows of x

// The columns of a part, a multiple of `unit` if there are several: x takes `x_bytes` in all.
inline int64_t part_columns(int64_t columns, int64_t unit, int64_t x_bytes) {
  return min(round_up(ceil_div(columns, ceil_div(x_bytes, kPartX)), unit), columns);
}

// The scales of some stored rows at a time. Rows may have few scales, so small floats are decoded for several rows at
// once, without the factor of their row, which multiplies the result.
class RowScales {
 public:
  static int64_t buffer_size(const Weights& w) { return kRows * (w.scale_cols + 1); }

  // `held` is a buffer.
  RowScales(const Matrix& w, float* held) : w_(w), later_(w.has_factors(true)), held_(held) {}

  // How many rows to decode at once if they are read one after the other.
  int64_t at_once() const { return later_ ? min(kRows, max(kAtOnce / w_.w.scale_cols, 1)) : 1; }

  // Not inlined: decoding is much code, and runs once for many products.
  __attribute__((noinline)) void set(int64_t row, int64_t rows) {
    const int64_t columns = w_.w.scale_cols;
    first_ = row;
    if (later_) {
      scales_ = w_.without_factors(row, 0, rows * columns, held_);
      return w_.factors(true, row, rows, held_ + kRows * columns);
    }
    scales_ = w_.scales(row, 0, columns, held_);
    for (int64_t r = 1; scales_ == held_ && r < rows; ++r) w_.scales(row + r, 0, columns, held_ + r * columns);
  }
  LOWBIT_INLINE const float* of(int64_t row) const { return scales_ + (row - first_) * w_.w.scale_cols; }
  LOWBIT_INLINE float factor(int64_t row) const { return later_ ? held_[kRows * w_.w.scale_cols + row - first_] : 1; }

 private:
  static constexpr int64_t kRows = 32, kAtOnce = 128;
  static_assert(kPartRows <= kRows, "");
  const Matrix& w_;
  int64_t first_ = 0;
  bool later_;
  float* held_;
  const float* scales_ = nullptr;
};

// The same part of kRows stored rows, or of fewer that are followed by the last of them again.
template <int kRows>
struct Part {
  int64_t row, rows, column, columns;
  const uint8_t* bytes[kRows];
  const uint8_t* ahead[kRows];  // what is read about kDotAhead bytes later
  int64_t of;                   // which of the rows whose parts are multiplied in turn
  bool last;                    // of its row
};

// Calls run(part) for the parts of the stored rows [begin, end), kRows at a time: whole rows, or the same part of
// kPartRows rows, then their next parts. `joined` is a buffer for the joined codes of kRows rows.
template <int kRows, typename D, typename Run>
LOWBIT_INLINE void each_part(const Matrix& w, int64_t begin, int64_t end, int64_t columns, RowScales* scales,
                             uint8_t* joined, const Run& run) {
  static_assert(kPartRows % kRows == 0, "");
  const int64_t row_bytes = w.w.row_bytes, bytes = columns / D::kPerByte;
  const bool whole = columns >= w.w.columns;
  const int64_t most = !whole ? kPartRows : scales != nullptr ? max(scales->at_once(), kRows) : kRows;
  const int64_t rows_ahead = min(round_up(max(kPartAhead / max(bytes, 1), 1), kRows), kPartRows);
  Part<kRows> part;
  for (int64_t row = begin, rows; row < end; row += rows) {
    rows = min(most, end - row);
    if (scales != nullptr) scales->set(row, rows);
    for (part.column = 0; part.column < w.w.columns; part.column += columns) {
      part.columns = min(columns, w.w.columns - part.column);
      part.last = part.column + part.columns == w.w.columns;
      for (part.of = 0; part.of < rows; part.of += kRows) {
        if (scales != nullptr && !whole) {
          const int64_t done = part.column * rows + part.of * part.columns;
          w.prefetch_scales(row + rows, done, done + min(kRows, rows - part.of) * part.columns, w.w.columns * rows,
                            rows);
        }
        part.row = row + part.of;
        part.rows = min(kRows, rows - part.of);
        const int64_t byte = part.column / D::kPerByte;
        // Past the rows of this part: the first rows of the next one, or of the next rows.
        const bool past = !whole && part.of + rows_ahead >= rows;
        const int64_t ahead = whole && kRows == 1 ? kDotAhead
                                                  : rows_ahead * row_bytes + (!past       ? 0
                                                                              : part.last ? -byte
                                                                                          : bytes - rows * row_bytes);
        for (int r = 0; r < kRows; ++r) {
          const int64_t stored = part.row + min(r, part.rows - 1);
          part.bytes[r] = w.bytes<D>(stored, byte, part.columns, joined + r * w.w.columns);
          part.ahead[r] = part.bytes[r] + (w.joined() ? 0 : ahead);
        }
        run(part);
      }
    }
  }
}

// The sums of kM rows of x, between the parts of stored rows.
template <int kM, int kRows>
class PartSums {
 public:
  LOWBIT_INLINE void load_to(F (&sums)[kRows][kM], const Part<kRows>& part) const {
    for (int r = 0; r < kRows; ++r) {
      for (int m = 0; m < kM; ++m) sums[r][m] = part.column == 0 ? zero() : load(kept_[part.of + r][m]);
    }
  }
  // y[m * step + row] = factor(row) * the sums of a whole row
  template <typename Factor>
  LOWBIT_INLINE void put(const F (&sums)[kRows][kM], const Part<kRows>& part, const Factor& factor, float* y,
                         int64_t step) {
    for (int r = 0; r < kRows; ++r) {
      if (r == part.rows) return;
      const float times = part.last ? factor(part.row + r) : 0;
      for (int m = 0; m < kM; ++m) {
        if (part.last) {
          y[m * step + part.row + r] = sum_of(sums[r][m]) * times;
        } else {
          store(kept_[part.of + r][m], sums[r][m]);
        }
      }
    }
  }

 private:
  alignas(64) float kept_[kPartRows][kM][kLanes];
};

}  // namespace lowbit::LOWBIT_ISA

#endif  // LOWBIT_DOT_PARTS_H_
