// Products with activations in int8.
//
//   y[m, n] = sum_b s[m, b] * sum_{span c in block b} scale[c, n] * sum_{k in span c} q[m, k] * level[k, n]
//   s[m, b] = max_{k in b} |x[m, k]| / 127,  q[m, k] = x[m, k] * (127 / max), rounded to nearest even
//
// The inner sums are exact integers, so results differ between instruction sets and numbers of threads only in the
// rounding of the outer sums. A span is the k that share a scale of the weights, or at most 512 of them. A block is as
// many spans as 256 of k have, at least one; if a column has a single scale, the whole row (up to kWholeRow). Levels
// that are no small integers (see ByteLevels) are rounded to 127ths of the largest. For normal x the relative rms error
// against the float32 product of the same codes is 7e-3 to 1.1e-2 (blocks are better than whole rows). Blocks of x
// whose largest magnitude is below 2^-110 count as zeros; NaN and infinity make their rows of y NaN.
//
// Weights are decoded to unsigned bytes, level + offset, into a panel of dwords that hold four k of one column; sums
// start at -offset * sum_k q (the seeds). The dot product of such dwords is one instruction with VNNI. Without VNNI,
// bytes are widened to words, unless levels are so small that products can be added in 16 bits.
#ifndef LOWBIT_MATMUL_FAST_H_
#define LOWBIT_MATMUL_FAST_H_

#include "fast_row.h"
#include "fast_tile.h"

namespace lowbit::LOWBIT_ISA {

template <typename D>
bool matmul_fast_as(const D& decoder, const Matmul& p, const Parallel& parallel) {
  FastTiling tiling;
  if (!decoder.is_fast() || !make_tiling<D>(p, tiling)) return false;
#if defined(LOWBIT_DOTS)
  if (few_rows_fit<D>(p, tiling)) return matmul_few_rows(decoder, p, tiling, parallel);
#endif
  const int64_t rows = tiling.rows, padded = tiling.slabs * tiling.slab,
                x_size = rows * padded * value_bytes(D::kSmall);
  const int64_t x_scales = tiling.blocks * rows, x_seeds = tiling.spans * rows;
  uint8_t* packed = static_cast<uint8_t*>(scratch(Scratch::call_pack, static_cast<size_t>(p.batch * x_size)));
  float* scales =
      static_cast<float*>(scratch(Scratch::call_sums, static_cast<size_t>(p.batch * (x_scales + x_seeds)) * 4));
  if (packed == nullptr || scales == nullptr) return false;
  int32_t* seeds = reinterpret_cast<int32_t*>(scales + p.batch * x_scales);
  bool enough_memory = true;
  const auto each = [&](int64_t n, bool alone, const auto& task) {
    const auto checked = [&](int64_t i) {
      if (!task(i)) __atomic_store_n(&enough_memory, false, __ATOMIC_RELAXED);
    };
    if (!alone) return parallel.each(n, checked);
    for (int64_t i = 0; i < n; ++i) checked(i);
  };
  // A task has all rows of a tile, since they share lines of the cache in `packed`.
  const int64_t row_tiles = tiling.row_tiles();
  each(p.batch * row_tiles, p.batch * p.m * p.k < 65536, [&](int64_t i) {
    const int64_t b = i / row_tiles, begin = tiling.row_of(i % row_tiles),
                  end = begin + tiling.height_of(i % row_tiles);
    float* wide = static_cast<float*>(scratch(Scratch::task_panel, static_cast<size_t>(p.k * 4 + padded)));
    if (wide == nullptr) return false;
    int8_t* q = reinterpret_cast<int8_t*>(wide + p.k);
    for (int64_t m = begin; m < end; ++m) {
      const int64_t row = b * p.m + m;
      const float* x = static_cast<const float*>(p.x) + row * p.k;
      if (m == p.m) {
        x = static_cast<float*>(memset(wide, 0, static_cast<size_t>(p.k) * 4));
      } else if (p.x_type != Float::f32) {
        to_f32(p.x, p.x_type, row * p.k, p.k, wide);
        x = wide;
      }
      quantize_row(decoder, tiling, x, p.k, m, rows, q, seeds + b * x_seeds, scales + b * x_scales);
      pack_row<D>(tiling, p.contract_last, m, rows, q, packed + b * x_size);
    }
    return true;
  });
  // Long runs of memory for few rows of x, sums that stay in L2 for many.
  const int64_t fit = tiling.by_tile ? 4 : max(1, 65536 / (p.m * tiling.columns));
  const int64_t run = min(fit, ceil_div(tiling.tiles, max(1, parallel.threads() / p.batch)));
  const int64_t runs = ceil_div(tiling.tiles, run);
  each(p.batch * runs, p.batch * p.m * p.k * p.n < 300000, [&](int64_t i) {
    const int64_t b = i / runs, begin = i % runs * run, end = min(begin + run, tiling.tiles);
    const Matrix w(p.w, min(max(p.index[b], 0), p.w.layers - 1));
    const FastX x{packed + b * x_size, seeds + b * x_seeds, scales + b * x_scales};
    return tiling.blocked ? fast_tiles<true>(decoder, p, tiling, w, x, b, begin, end)
                          : fast_tiles<false>(decoder, p, tiling, w, x, b, begin, end);
  });
  return enough_memory;
}

// Floats of 8 bits are not rounded to integers.
inline bool matmul_fast_as(const Fp8&, const Matmul&, const Parallel&) { return false; }

inline bool matmul_fast(const Matmul& p, const Parallel& parallel) {
  return with_decoder(p.w, [&](const auto& decoder) { return matmul_fast_as(decoder, p, parallel); });
}

}  // namespace lowbit::LOWBIT_ISA

#endif  // LOWBIT_MATMUL_FAST_H_
