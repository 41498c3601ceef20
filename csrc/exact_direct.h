// Products in float32 with some rows of x that contract the first stored axis, with scales along it: weights are
// decoded in registers for each tile of rows of x, without a panel.
//
// Decoding uses other units of the processor than multiplying, so it takes hardly any time beside it. For many rows of
// x it does, and a panel is decoded once for all of them.
#ifndef LOWBIT_EXACT_DIRECT_H_
#define LOWBIT_EXACT_DIRECT_H_

#include "exact_panel.h"

namespace lowbit::LOWBIT_ISA {

constexpr int64_t kDirectDepth = 256;                           // of k: more than the second half of a line stays in L2
constexpr int64_t kLeastSpan = 8;                               // of k that share a scale
constexpr int64_t kMostScales = kDirectDepth / kLeastSpan + 2;  // rows of scales that a slab may have

inline bool direct_fits(const Matmul& p) {
  return p.m <= kDirectRows && p.w.col_span == 1 && p.w.row_span >= kLeastSpan;
}

// A line of the stored rows of a slab, and scales of its columns in the decoder's order, one row after the other.
struct DirectLine {
  const uint8_t* bytes;
  int64_t row_step, depth;
  int64_t first, span;  // of k that share the first row of scales, and each later one
  const float* scales;
};

// Calls done(r, sums) with the sums of row r of x times a line, for each row; x is x_step apart.
template <int kRows, typename D, typename Done>
__attribute__((noinline)) void direct_tile(const D& shared, const DirectLine& where, const float* x, int64_t x_step,
                                           NextSlab& shared_next, const Done& done) {
  const D decoder = shared;
  DirectLine line = where;  // copies that the stores cannot alias
  NextSlab next = shared_next;
  F total[kRows][kVectors];
  bool first = true;
  for (int64_t k = 0, end = line.first; k < line.depth; end += line.span, line.scales += kLine) {
    next.in_span();
    F acc[kRows][kVectors];
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < kVectors; ++i) acc[r][i] = zero();
    }
    for (const int64_t until = min(end, line.depth); k < until; ++k, ++x, line.bytes += line.row_step) {
      F v[kVectors];
      decoder.decode(line.bytes, v);
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r) {
        const F factor = broadcast(x[r * x_step]);
        for (int i = 0; i < kVectors; ++i) acc[r][i] = fma(v[i], factor, acc[r][i]);
      }
    }
    F scale[kVectors];
    for (int i = 0; i < kVectors; ++i) scale[i] = load(line.scales + i * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < kVectors; ++i) {
        total[r][i] = first ? acc[r][i] * scale[i] : fma(acc[r][i], scale[i], total[r][i]);
      }
    }
    first = false;
  }
  shared_next = next;
  for (int r = 0; r < kRows; ++r) done(r, total[r]);
}

template <typename D>
bool matmul_direct(const D& decoder, const Matmul& p, const Matrix& w, const float* x, float* y,
                   const Parallel& parallel) {
  const int64_t tiles = ceil_div(p.m, kTileRows), lines = ceil_div(p.n, kLine), span = p.w.row_span;
  const auto tile_begin = [&](int64_t tile) { return p.m * tile / tiles; };
  const int64_t tasks = min(lines, parallel.threads());
  parallel.each(tasks, [&](int64_t t) {
    const int64_t begin = lines * t / tasks, end = lines * (t + 1) / tasks;
    alignas(64) float scales[kMostScales * kLine];
    alignas(64) uint8_t copied[kDirectDepth * kLineBytes<D>];
    for (int64_t slab = 0; slab < p.k; slab += kDirectDepth) {
      const int64_t depth = min(kDirectDepth, p.k - slab), block = slab / span;
      NextSlab next(w, slab + depth, begin * kLineBytes<D>, min(end * kLineBytes<D>, w.w.row_bytes));
      const int64_t blocks = (slab + depth - 1) / span - block + 1;
      for (int64_t at = begin; at < end; ++at) {
        const int64_t column = at * kLine, offset = at * kLineBytes<D>;
        DirectLine line = {
            w.codes + slab * w.w.row_bytes + offset, w.w.row_bytes, depth, (block + 1) * span - slab, span, scales};
        if (w.joined() || column + kLine > p.n) {
          // Joined codes, and the end of the rows, which must not be passed.
          line.bytes = copied;
          line.row_step = kLineBytes<D>;
          const int64_t count = min(kLineBytes<D>, w.w.row_bytes - offset);
          for (int64_t r = 0; r < depth; ++r) {
            uint8_t* to = copied + r * kLineBytes<D>;
            const uint8_t* from = w.bytes<D>(slab + r, offset, count, to);
            if (from != to) memcpy(to, from, static_cast<size_t>(count));
            memset(to + count, 0, static_cast<size_t>(kLineBytes<D> - count));
          }
        }
        for (int64_t b = 0; b < blocks; ++b) {
          F s[kVectors];
          line_scales<D>(w, block + b, column, s);
          for (int i = 0; i < kVectors; ++i) store(scales + b * kLine + i * kLanes, s[i]);
          w.prefetch_scales(block + b + blocks, at, at + 1, lines);
        }
        for (int64_t tile = 0; tile < tiles; ++tile) {
          const int64_t m = tile_begin(tile), rows = tile_begin(tile + 1) - m;
          next.set(ceil_div(depth * kLineBytes<D>, 64 * tiles), blocks);
          const ToRows<D::order> done{y + m * p.n + column, p.n, p.n - column, slab == 0};
          with_constant<kTileRows>(
              rows, [&](auto count) { direct_tile<count.value>(decoder, line, x + m * p.k + slab, p.k, next, done); });
        }
      }
    }
  });
  return true;
}

}  // namespace lowbit::LOWBIT_ISA

#endif  // LOWBIT_EXACT_DIRECT_H_
