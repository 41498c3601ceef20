// What a vector of a tile's sums holds. In general, vector [r][v] is row r of x times the columns of vector v. With
// pairs (kPair == 2) it is a matrix: rows r and r + 1 of x times the first two columns of vector v if r is even, rows r
// - 1 and r times the last two if it is odd.
#ifndef LOWBIT_FAST_SUMS_H_
#define LOWBIT_FAST_SUMS_H_

#include "fast_tiling.h"

namespace lowbit::LOWBIT_ISA {

#if defined(LOWBIT_NEON_I8MM)

LOWBIT_INLINE I seeds_of(const int32_t* seeds, int r) {
  const int32_t *first = seeds + r / 2 * 2, *second = first + 1;
  return I{*first, *first, *second, *second};
}
LOWBIT_INLINE F column_scales(const float* scales, int r) {
  return reinterpret_cast<F>(vdupq_n_s64(load_as<int64_t>(scales + r % 2 * 2)));
}
LOWBIT_INLINE F row_scales(const float* scales, int r) {
  const float *first = scales + r / 2 * 2, *second = first + 1;
  return F{*first, *first, *second, *second};
}
// Row m, in a vector of a tile's columns, of sums [row][kFastColumns].
LOWBIT_INLINE F sums_of_row(const float* sums, int64_t m) {
  const float* pair = sums + m / 2 * 2 * kFastColumns;
  const Bytes a = load_as<Bytes>(pair), b = load_as<Bytes>(pair + kFastColumns);
  return reinterpret_cast<F>(m % 2 == 0 ? low_qwords(a, b) : high_qwords(a, b));
}

#else

LOWBIT_INLINE I seeds_of(const int32_t* seeds, int r) { return splat(seeds + r); }
LOWBIT_INLINE F column_scales(const float* scales, int) { return load(scales); }
LOWBIT_INLINE F row_scales(const float* scales, int r) { return broadcast(scales[r]); }
LOWBIT_INLINE F sums_of_row(const float* sums, int64_t m) { return load(sums + m * kFastColumns); }

#endif

}  // namespace lowbit::LOWBIT_ISA

#endif  // LOWBIT_FAST_SUMS_H_
