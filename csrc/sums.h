// Passes over the rows of a matrix, eight at a time, and sums of them in the order of `ordered_sum` in Python: adjacent
// pairs of rows, then of pairs, and so on, so that they do not depend on how the work is divided.
#ifndef LOWBIT_SUMS_H_
#define LOWBIT_SUMS_H_

#include "bytes.h"

namespace lowbit::LOWBIT_ISA {

// Without the sign, the bits of floats compare like the numbers themselves, with NaN above infinity.
LOWBIT_INLINE I magnitude(F x) { return as_ints(x) & 0x7fffffff; }
LOWBIT_INLINE F size_of(F x) { return as_floats(magnitude(x)); }

LOWBIT_INLINE I lane_numbers() {
  I lanes{};
  for (int i = 0; i < kLanes; ++i) lanes[i] = i;
  return lanes;
}
LOWBIT_INLINE F first_of(F x, int64_t count) {
  return as_floats(as_ints(x) & (lane_numbers() < static_cast<int32_t>(count)));
}

constexpr int64_t kRun = 64;     // elements of a row that `ordered_sum` adds at a time, as if they were a row
constexpr int kRows = 8;         // added in registers
constexpr int64_t kLevels = 56;  // of pairs of pairs, above those in registers

// Rows of `width` elements; the last one may be shorter.
struct Lines {
  const void* x;
  Float type;
  int64_t at, stride;  // in elements
  int64_t rows, width, last_width;
};

// What a step gets: up to eight rows, with so many elements in each vector.
template <bool kFull>
struct Rows {
  F x[kRows];
  int64_t counts[kFull ? 1 : kRows];
  int64_t first, column;  // the first row of the lines, and the column of the vectors

  LOWBIT_INLINE int64_t count(int row) const { return kFull ? kLanes : counts[kFull ? 0 : row]; }

  // The sum of leaf(row, x), in adjacent pairs; 0 for elements that are not there.
  template <typename Leaf>
  LOWBIT_INLINE F sum(const Leaf& leaf) const {
    F s[kRows];
    for (int i = 0; i < kRows; ++i) {
      s[i] = leaf(i, x[i]);
      if (!kFull) s[i] = first_of(s[i], count(i));
    }
    return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
  }
};

// Sums of pairs of pairs: those of 2^i groups of rows wait in level i for their other half.
class PairSums {
 public:
  // Floats that it needs for lines of this width, which is rounded up to whole vectors.
  static int64_t size(int64_t width) { return kLevels * round_up(width, kLanes); }
  PairSums(float* levels, int64_t width) : levels_(levels), width_(round_up(width, kLanes)) {}

  LOWBIT_INLINE void add(int64_t group, int64_t column, F sum) {
    float* level = levels_ + column;
    for (; (group & 1) != 0; group >>= 1, level += width_) sum = load(level) + sum;
    store(level, sum);
  }
  // The sum of the first `groups`.
  LOWBIT_INLINE F total(int64_t groups, int64_t column) const {
    const float* level = levels_ + column;
    F sum = zero();
    bool any = false;
    for (; groups > 0; groups >>= 1, level += width_) {
      if ((groups & 1) == 0) continue;
      sum = any ? load(level) + sum : load(level);
      any = true;
    }
    return sum;
  }

 private:
  float* levels_;
  int64_t width_;
};

// Eight rows in float32: the array itself, or a converted copy.
struct Group {
  const float* x;
  int64_t stride, rows;
};
inline Group group_of(const Lines& lines, int64_t first, float* converted) {
  const int64_t rows = min(kRows, lines.rows - first), at = lines.at + first * lines.stride;
  if (lines.type == Float::f32) return {static_cast<const float*>(lines.x) + at, lines.stride, rows};
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t width = first + i + 1 < lines.rows ? lines.width : lines.last_width;
    to_f32(lines.x, lines.type, at + i * lines.stride, width, converted + i * lines.width);
  }
  return {converted, lines.width, rows};
}

// The vectors of a group that has fewer rows or columns.
LOWBIT_INLINE Rows<false> some_rows(const Group& group, int64_t first, int64_t column, int64_t count,
                                    int64_t last_count) {
  Rows<false> some;
  some.first = first;
  some.column = column;
  for (int i = 0; i < kRows; ++i) {
    some.counts[i] = i < group.rows ? max(i + 1 == group.rows ? last_count : count, 0) : 0;
    some.x[i] = some.counts[i] > 0 ? load(group.x + i * group.stride + column, some.counts[i]) : zero();
  }
  return some;
}

// Calls step(Rows) for every vector of columns, eight rows at a time, and adds what it returns to `sums`.
// `converted` has eight rows of space, unless the lines are float32.
template <typename Step>
void each_group(const Lines& lines, float* converted, PairSums sums, const Step& step) {
  for (int64_t first = 0; first < lines.rows; first += kRows) {
    const Group group = group_of(lines, first, converted);
    const bool is_last = first + kRows >= lines.rows;
    const bool is_whole = group.rows == kRows && (!is_last || lines.last_width == lines.width);
    int64_t column = 0;
    for (; is_whole && column + kLanes <= lines.width; column += kLanes) {
      Rows<true> rows;
      rows.first = first;
      rows.column = column;
      for (int i = 0; i < kRows; ++i) rows.x[i] = load(group.x + i * group.stride + column);
      const F sum = step(rows);
      if (Step::kSums) sums.add(first / kRows, column, sum);
    }
    for (; column < lines.width; column += kLanes) {
      const int64_t count = min(kLanes, lines.width - column);
      const int64_t last_count = is_last ? min(kLanes, lines.last_width - column) : count;
      const F sum = step(some_rows(group, first, column, count, last_count));
      if (Step::kSums) sums.add(first / kRows, column, sum);
    }
  }
}

// The sum of the first `count` of up to 64 floats: the halves are added until one is left. They are overwritten.
inline float sum_of_halves(float* x, int64_t count) {
  while (count > 1) {
    const int64_t half = ceil_div(count, 2);
    for (int64_t i = 0; i < count - half; ++i) x[i] += x[half + i];
    count = half;
  }
  return count == 1 ? x[0] : 0.0f;
}

// The same of 64.
LOWBIT_INLINE float sum_of_run(float* x) {
  for (int64_t half = kRun / 2; half >= kLanes; half /= 2) {
    for (int64_t i = 0; i < half; i += kLanes) store(x + i, load(x + i) + load(x + half + i));
  }
  return sum_of_halves(x, kLanes);
}

// A row, or a part of it, as lines of 64 elements.
LOWBIT_INLINE Lines runs_of(const float* x, int64_t count) {
  const int64_t rows = ceil_div(count, kRun);
  return {x, Float::f32, 0, kRun, rows, kRun, count - (rows - 1) * kRun};
}

// The sum of a block of `span` elements from the sums of its lines; `count` of its elements are there.
inline float sum_of_lines(const PairSums& sums, int64_t count, int64_t span) {
  alignas(64) float run[kRun];
  const int64_t groups = ceil_div(ceil_div(count, kRun), kRows);
  for (int64_t i = 0; i < kRun; i += kLanes) store(run + i, sums.total(groups, i));
  return span >= kRun ? sum_of_run(run) : sum_of_halves(run, span);
}

}  // namespace lowbit::LOWBIT_ISA

#endif  // LOWBIT_SUMS_H_
