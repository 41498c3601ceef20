// The register tile of a product with activations in int8, and the loop over tiles of columns.
#ifndef LOWBIT_FAST_TILE_H_
#define LOWBIT_FAST_TILE_H_

#include "fast_pack.h"
#include "fast_sums.h"

namespace lowbit::LOWBIT_ISA {

// Whether the next slab is prefetched between the products of whole rows: with AVX-512 there are enough registers.
constexpr bool kPrefetchBetween = kBytes == 64;

// sums += panel * x over `groups` of four k; the sums of `fit` groups fit in 16 bits if kSmall
template <int kRows, int kWidth, bool kSmall, bool kPrefetch>
LOWBIT_INLINE void add_products(I (&sums)[kRows][kWidth], const uint8_t* panel, const uint8_t* x, int64_t groups,
                                [[maybe_unused]] int64_t fit, [[maybe_unused]] NextSlab& next) {
#if defined(LOWBIT_NEON_I8MM)
  for (int64_t g = 0; g < groups; g += kPair, panel += kPair * kGroupBytes, x += kPair * kRows * 4) {
    Bytes multipliers[kRows / kPair];
    for (int r = 0; r < kRows / kPair; ++r) multipliers[r] = load_as<Bytes>(x + r * kBytes);
    for (int v = 0; v < kPair * kWidth; ++v) {
      const Bytes w = load_as<Bytes>(panel + v * kBytes);
      for (int r = 0; r < kRows / kPair; ++r) add_matrix(sums[kPair * r + v % kPair][v / kPair], multipliers[r], w);
    }
  }
#elif defined(LOWBIT_TILE_DOTS)
  for (int64_t g = 0; g < groups; ++g, panel += kGroupBytes, x += kRows * 4) {
    if constexpr (kPrefetch) next.prefetch_some();
    Bytes w[kWidth];
    for (int v = 0; v < kWidth; ++v) w[v] = load_as<Bytes>(panel + v * kBytes);
    for (int r = 0; r < kRows; ++r) {
      const I multiplier = splat(x + r * 4);
      for (int v = 0; v < kWidth; ++v) add_dots<kSmall>(sums[r][v], w[v], multiplier);
    }
  }
#else
#if defined(LOWBIT_AVX2)
  if constexpr (kSmall) {
    for (int64_t begin = 0; begin < groups; begin += fit) {
      Words words[kRows][kWidth] = {};
      for (int64_t g = begin; g < min(begin + fit, groups); ++g, panel += kGroupBytes, x += kRows * 4) {
        Bytes w[kWidth];
        for (int v = 0; v < kWidth; ++v) w[v] = load_as<Bytes>(panel + v * kBytes);
        for (int r = 0; r < kRows; ++r) {
          const I multiplier = splat(x + r * 4);
          for (int v = 0; v < kWidth; ++v) words[r][v] += small_dots(w[v], multiplier);
        }
      }
      for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kWidth; ++v) {
          add_pair_dots(sums[r][v], reinterpret_cast<Bytes>(words[r][v]), I{} + 0x00010001);
        }
      }
    }
    return;
  }
#endif
  for (int64_t g = 0; g < groups; ++g, panel += kGroupBytes, x += kRows * 8) {
    for (int half = 0; half < 2; ++half) {
      Bytes w[kWidth];
      for (int v = 0; v < kWidth; ++v) {
        const Words words = load_as<Words>(panel + v * kBytes);
        w[v] = reinterpret_cast<Bytes>(half == 0 ? words & 255 : words >> 8);
      }
      for (int r = 0; r < kRows; ++r) {
        const I multiplier = splat(x + r * 8 + half * 4);
        for (int v = 0; v < kWidth; ++v) add_pair_dots(sums[r][v], w[v], multiplier);
      }
    }
  }
#endif
}

// The part of a slab that a tile multiplies. If blocked, span b of it has the seeds of its rows at b * seed_step, and
// the scales of its columns at b * scale_step.
struct FastTile {
  explicit FastTile(const NextSlab& slab) : next(slab) {}

  NextSlab next;
  const uint8_t* panel;
  const uint8_t* x;
  int64_t groups, span_groups;  // of four k: in all spans, and in each but the last
  int64_t fit;
  bool first;             // the first slab
  const int32_t* seeds;   // of the rows
  const float* x_scales;  // of the rows
  const float* scales;    // of the columns
  int64_t seed_step, scale_step;
  void* sums;  // [row][kFastColumns] int32, or float if blocked
};

// Sums of a whole row, as integers. Not inlined: in a large function, GCC 12 keeps the sums in memory.
template <int kRows, bool kSmall>
__attribute__((noinline)) void whole_tile(FastTile& tile) {
  FastTile t = tile;  // a copy that the stores cannot alias
  int32_t* whole = static_cast<int32_t*>(t.sums);
  I sums[kRows][kFastVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kFastVectors; ++v) {
      sums[r][v] = t.first ? seeds_of(t.seeds, r) : load_as<I>(whole + r * kFastColumns + v * kLanes);
    }
  }
  add_products<kRows, kFastVectors, kSmall, kPrefetchBetween>(sums, t.panel, t.x, t.groups, t.fit, t.next);
  tile.next = t.next;
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kFastVectors; ++v) store_as(whole + r * kFastColumns + v * kLanes, sums[r][v]);
  }
}

// Sums of the spans of a slab, times the scales of their columns; the scales of the rows multiply the result. kWidth
// vectors of columns from the v-th on: as many as leave the sums of a span, and those of the slab, in registers.
template <int kRows, int kWidth, bool kSmall>
__attribute__((noinline)) void blocked_tile(const FastTile& tile, int v) {
  FastTile t = tile;
  t.panel += v * kPair * kBytes;
  t.scales += v * kLanes;
  F total[kRows][kWidth];
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kWidth; ++i) total[r][i] = zero();
  }
  while (t.groups > 0) {
    const int64_t groups = min(t.groups, t.span_groups);
    I sums[kRows][kWidth];
    for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < kWidth; ++i) sums[r][i] = seeds_of(t.seeds, r);
    }
    add_products<kRows, kWidth, kSmall, false>(sums, t.panel, t.x, groups, t.fit, t.next);
    for (int i = 0; i < kWidth; ++i) {
      for (int r = 0; r < kRows; ++r) {
        total[r][i] = fma(to_float(sums[r][i]), column_scales(t.scales + i * kLanes, r), total[r][i]);
      }
    }
    t.groups -= groups;
    t.panel += groups * kGroupBytes;
    t.x += groups * kRows * x_bytes(kSmall);
    t.seeds += t.seed_step;
    t.scales += t.scale_step;
  }
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kWidth; ++i) {
      float* out = static_cast<float*>(t.sums) + r * kFastColumns + (v + i) * kLanes;
      const F scale = row_scales(t.x_scales, r);
      store(out, t.first ? total[r][i] * scale : fma(total[r][i], scale, load(out)));
    }
  }
}

// ---- Tiles of columns

// The x of a product in int8.
struct FastX {
  const uint8_t* packed;
  const int32_t* seeds;  // [span][m]
  const float* scales;   // [block][m]
};

// Writes the sums of the tiles [begin, end) to y, in column order.
template <typename D, bool kBlocked>
void store_tiles(const Matmul& p, const FastTiling& tiling, const Matrix& w, const FastX& x, int64_t batch,
                 int64_t begin, int64_t end, const float* sums) {
  constexpr int64_t kMost = kTileBytes<D> * D::kPerByte;
  const int64_t columns = tiling.columns;
  const bool later = kBlocked && scales_later<D>(w, p.contract_last);
  for (int64_t tile = begin; tile < end; ++tile) {
    const int64_t n = tile * columns, count = min(columns, p.n - n);
    alignas(64) float scales[kMost] = {}, ordered[kMost], line[kMost];
    if (later) w.factors(p.contract_last, n, count, scales);
    for (int64_t i = 0; !kBlocked && i < count; ++i)
      scales[i] = p.contract_last ? w.scale(n + i, 0) : w.scale(0, n + i);
    for (int64_t m = 0; m < p.m; ++m) {
      for (int64_t v = 0; v < columns; v += kLanes) {
        const float* from = sums + ((tile - begin) * columns + v / kFastColumns * kFastColumns) * tiling.rows;
        const F sum = sums_of_row(from + v % kFastColumns, m);
        store(line + v, kBlocked ? sum : to_float(as_ints(sum)) * broadcast(x.scales[m]));
      }
      const float* values = line;
      if (!p.contract_last) {
        in_column_order<D>(line, columns, ordered);
        values = ordered;
      }
      if (!kBlocked || later) {
        for (int64_t v = 0; v < columns; v += kLanes) store(ordered + v, load(values + v) * load(scales + v));
        values = ordered;
      }
      from_f32(values, count, p.y, p.y_type, (batch * p.m + m) * p.n + n);
    }
  }
}

// Computes the tiles [begin, end) of the columns of one product.
template <bool kBlocked, typename D>
bool fast_tiles(const D& decoder, const Matmul& p, const FastTiling& tiling, const Matrix& w, const FastX& x,
                int64_t batch, int64_t begin, int64_t end) {
  const int64_t columns = tiling.columns, rows = tiling.rows, spans = kBlocked ? tiling.slab / tiling.span : 1;
  uint8_t* panel = static_cast<uint8_t*>(scratch(Scratch::task_panel, static_cast<size_t>(tiling.slab * columns)));
  float* scales = static_cast<float*>(scratch(Scratch::task_scales, static_cast<size_t>(spans * columns) * 4));
  float* sums =
      static_cast<float*>(scratch(Scratch::task_sums, static_cast<size_t>((end - begin) * columns * tiling.rows) * 4));
  if (panel == nullptr || scales == nullptr || sums == nullptr) return false;
  constexpr bool kSmall = D::kSmall;
  constexpr int kSize = x_bytes(kSmall), kRows = fast_rows(kSmall, kBlocked);
  for (int64_t slab = 0; slab < tiling.slabs; ++slab) {
    const int64_t k = slab * tiling.slab, depth = round_up(min(tiling.slab, p.k - k), tiling.unit);
    FastTile t(NextSlab(w, k + depth, begin * kTileBytes<D>, min(end * kTileBytes<D>, w.w.row_bytes)));
    const int64_t calls = columns / kFastColumns * ceil_div(rows, kRows);
    const int64_t lines = p.contract_last ? 0 : ceil_div(depth * kTileBytes<D> / 64, calls);
    for (int64_t tile = begin; tile < end; ++tile) {
      if (p.contract_last) {
        panel_of_columns(decoder, w, k, depth, tile, panel);
      } else {
        panel_of_rows(decoder, w, k, depth, tile, panel);
      }
      if (kBlocked) {
        const int64_t count = ceil_div(depth, tiling.span);
        if (p.contract_last) panel_scales_last<D>(w, k, count, tiling.span, tile, columns, scales);
        for (int64_t b = 0; b < count && !p.contract_last; ++b) {
          panel_scales<D>(w, k + b * tiling.span, tile, scales + b * columns);
        }
      }
      for (int64_t group = 0; group < columns / kFastColumns; ++group) {
        for (int64_t m = 0; m < rows; m += kRows) {
          const int64_t height = min(kRows, rows - m);
          t.next.set(lines, kPrefetchBetween && !kBlocked ? depth / 4 : 1);
          if (!kPrefetchBetween || kBlocked) t.next.prefetch_some();
          t.panel = panel + group * (depth / 4) * kGroupBytes;
          t.x = x.packed + (slab * rows + m) * (tiling.slab / 4) * kSize;
          t.groups = depth / 4;
          t.span_groups = tiling.span / 4;
          t.fit = decoder.fit();
          t.first = slab == 0;
          t.seeds = x.seeds + (kBlocked ? k / tiling.span * rows : 0) + m;
          t.x_scales = x.scales + (kBlocked ? k / tiling.block * rows : 0) + m;
          t.seed_step = rows;
          t.scales = scales + group * kFastColumns;
          t.scale_step = columns;
          t.sums = sums + (((tile - begin) * columns / kFastColumns + group) * rows + m) * kFastColumns;
          with_constant<kRows / kPair>(height / kPair, [&](auto pairs) {
            constexpr int kHeight = kPair * decltype(pairs)::value;
            if constexpr (kBlocked) {
              for (int v = 0; v < kFastVectors; v += kBlockedVectors) {
                blocked_tile<kHeight, kBlockedVectors, kSmall>(t, v);
              }
            } else {
              whole_tile<kHeight, kSmall>(t);
            }
          });
        }
      }
    }
  }
  store_tiles<D, kBlocked>(p, tiling, w, x, batch, begin, end, sums);
  return true;
}

}  // namespace lowbit::LOWBIT_ISA

#endif  // LOWBIT_FAST_TILE_H_
