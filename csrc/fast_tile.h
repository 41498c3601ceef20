// The register tile of a product with activations in int8, and the loop over tiles of columns.
#ifndef LOWBIT_FAST_TILE_H_
#define LOWBIT_FAST_TILE_H_

#include "fast_pack.h"
#include "fast_sums.h"

namespace lowbit::LOWBIT_ISA {

// Whether the next slab is prefetched between products: with AVX-512 there are enough registers.
constexpr bool kPrefetchBetween = kBytes == 64;
// Blocks leave fewer of them. With more rows of x there are so few lines for each tile of rows that they can be
// prefetched at once.
constexpr int64_t kPrefetchBlocked = 32;

#if defined(LOWBIT_AVX2)
// sums += panel * x over kGroups of four k, whose sums fit in 16 bits. Moves panel and x to the groups that follow.
template <int kGroups, int kRows, int kWidth>
LOWBIT_INLINE void add_fitting(I (&sums)[kRows][kWidth], const uint8_t*& panel, const uint8_t*& x) {
  Words words[kRows][kWidth];
  each_constant<kGroups>([&](auto g) LOWBIT_INLINE_LAMBDA {
    Bytes w[kWidth];
    each_constant<kWidth>([&](auto v) LOWBIT_INLINE_LAMBDA { w[v.value] = load_once(panel + v.value * kBytes); });
    each_constant<kRows>([&](auto r) LOWBIT_INLINE_LAMBDA {
      const I multiplier = splat(x + r.value * 4);
      each_constant<kWidth>([&](auto v) LOWBIT_INLINE_LAMBDA {
        Words& word = words[r.value][v.value];
        if constexpr (g.value == 0) {
          word = small_dots(w[v.value], multiplier);
        } else {
          add_small_dots(word, w[v.value], multiplier);
        }
      });
    });
    panel += kVectorsBytes;
    x += kRows * 4;
  });
  each_pair<kRows, kWidth>([&](auto r, auto v) LOWBIT_INLINE_LAMBDA {
    const Bytes words_of = reinterpret_cast<Bytes>(words[r.value][v.value]);
    add_pair_dots(sums[r.value][v.value], words_of, I{} + 0x00010001);
  });
}
#endif

// sums += panel * x over `groups` of four k; the sums of `fit` groups fit in 16 bits if kSmall: kFit are unrolled if
// that is not 0. Calls beside(g) for each group.
template <bool kSmall, int kFit, int kRows, int kWidth, typename Beside>
LOWBIT_INLINE void add_products(I (&sums)[kRows][kWidth], const uint8_t* panel, const uint8_t* x, int64_t groups,
                                [[maybe_unused]] int64_t fit, [[maybe_unused]] const Beside& beside) {
#if defined(LOWBIT_NEON_I8MM)
  for (int64_t g = 0; g < groups; g += kPair, panel += kPair * kVectorsBytes, x += kPair * kRows * 4) {
    Bytes multipliers[kRows / kPair];
    for (int r = 0; r < kRows / kPair; ++r) multipliers[r] = load_as<Bytes>(x + r * kBytes);
    for (int v = 0; v < kPair * kWidth; ++v) {
      const Bytes w = load_as<Bytes>(panel + v * kBytes);
      for (int r = 0; r < kRows / kPair; ++r) add_matrix(sums[kPair * r + v % kPair][v / kPair], multipliers[r], w);
    }
  }
#elif defined(LOWBIT_TILE_DOTS)
  for (int64_t g = 0; g < groups; ++g, panel += kVectorsBytes, x += kRows * 4) {
    beside(g);
    Bytes w[kWidth];
    each_constant<kWidth>([&](auto v) LOWBIT_INLINE_LAMBDA { w[v.value] = load_as<Bytes>(panel + v.value * kBytes); });
    each_constant<kRows>([&](auto r) LOWBIT_INLINE_LAMBDA {
      const I multiplier = splat(x + r.value * 4);
      each_constant<kWidth>(
          [&](auto v) LOWBIT_INLINE_LAMBDA { add_dots<kSmall>(sums[r.value][v.value], w[v.value], multiplier); });
    });
  }
#else
#if defined(LOWBIT_AVX2)
  if constexpr (kSmall) {
    if constexpr (kFit > 0) {
      for (; groups >= kFit; groups -= kFit) add_fitting<kFit>(sums, panel, x);
      if constexpr (kFit > 4) {
        if ((groups & 4) != 0) add_fitting<4>(sums, panel, x);
      }
      if constexpr (kFit > 2) {
        if ((groups & 2) != 0) add_fitting<2>(sums, panel, x);
      }
      if ((groups & 1) != 0) add_fitting<1>(sums, panel, x);
      return;
    }
    for (int64_t begin = 0; begin < groups; begin += fit) {
      Words words[kRows][kWidth] = {};
      for (int64_t g = begin; g < min(begin + fit, groups); ++g, panel += kVectorsBytes, x += kRows * 4) {
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
  for (int64_t g = 0; g < groups; ++g, x += kRows * 8) {
    each_constant<2>([&](auto half) LOWBIT_INLINE_LAMBDA {
      Bytes w[kWidth];
      each_constant<kWidth>([&](auto v) LOWBIT_INLINE_LAMBDA { w[v.value] = load_once(panel + v.value * kBytes); });
      each_constant<kRows>([&](auto r) LOWBIT_INLINE_LAMBDA {
        const I multiplier = splat(x + r.value * 8 + half.value * 4);
        each_constant<kWidth>(
            [&](auto v) LOWBIT_INLINE_LAMBDA { add_pair_dots(sums[r.value][v.value], w[v.value], multiplier); });
      });
      panel += kVectorsBytes;
    });
  }
#endif
}

// The part of a slab that tiles of rows of x multiply. If blocked, span b of it has the seeds of its rows at b *
// seed_step, and the scales of its columns at b * scale_step.
struct FastTiles {
  int64_t count;  // tiles of rows of x: a call for each of them takes a tenth of the time
  const uint8_t* panel;
  const uint8_t* x;
  int64_t x_step;               // bytes to the next tile
  int64_t groups, span_groups;  // of four k: in all spans, and in each but the last
  int64_t fit;
  bool first;             // the first slab
  const int32_t* seeds;   // of the rows
  const float* x_scales;  // of the rows
  const float* scales;    // of the columns
  int64_t seed_step, scale_step;
  void* sums;  // [row][kFastColumns] int32, or float if blocked
};

// Sums of a whole row, as integers; `Beside` is EachTile, NextSlab or a NextPanel. Not inlined: in a large function,
// GCC 12 keeps the sums in memory.
template <int kRows, bool kSmall, typename Beside>
__attribute__((noinline)) void whole_tiles(const FastTiles& tiles, Beside& shared) {
  FastTiles t = tiles;  // copies that the stores cannot alias
  Beside beside = shared;
  int32_t* whole = static_cast<int32_t*>(t.sums);
  for (; t.count > 0; --t.count) {
    beside.in_tile();
    I sums[kRows][kFastVectors];
    each_pair<kRows, kFastVectors>([&](auto r, auto v) LOWBIT_INLINE_LAMBDA {
      const int32_t* from = whole + r.value * kFastColumns + v.value * kLanes;
      sums[r.value][v.value] = t.first ? seeds_of(t.seeds, r.value) : load_as<I>(from);
    });
    add_products<kSmall, 0>(sums, t.panel, t.x, t.groups, t.fit,
                            [&](int64_t g) LOWBIT_INLINE_LAMBDA { beside.template in_group<kFastVectors, false>(g); });
    each_pair<kRows, kFastVectors>([&](auto r, auto v) LOWBIT_INLINE_LAMBDA {
      store_as(whole + r.value * kFastColumns + v.value * kLanes, sums[r.value][v.value]);
    });
    t.x += t.x_step;
    t.seeds += kRows;
    whole += kRows * kFastColumns;
  }
  shared = beside;
}

// Sums of the spans of a slab, times the scales of their columns; the scales of the rows multiply the result. kWidth
// vectors of columns from the v-th on: as many as leave the sums of a span, and those of the slab, in registers.
template <int kRows, int kWidth, bool kSmall, int kFit, typename Beside>
LOWBIT_INLINE void blocked_tile(FastTiles t, int v, float* out, Beside& beside) {
  t.panel += v * kPair * kBytes;
  t.scales += v * kLanes;
  F total[kRows][kWidth];
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kWidth; ++i) total[r][i] = zero();
  }
  while (t.groups > 0) {
    const int64_t groups = min(t.groups, t.span_groups);
    beside.in_span();
    I sums[kRows][kWidth];
    for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < kWidth; ++i) sums[r][i] = seeds_of(t.seeds, r);
    }
    add_products<kSmall, kFit>(sums, t.panel, t.x, groups, t.fit,
                               [&](int64_t g) LOWBIT_INLINE_LAMBDA { beside.template in_group<kWidth, true>(g); });
    for (int i = 0; i < kWidth; ++i) {
      for (int r = 0; r < kRows; ++r) {
        total[r][i] = fma(to_float(sums[r][i]), column_scales(t.scales + i * kLanes, r), total[r][i]);
      }
    }
    t.groups -= groups;
    t.panel += groups * group_bytes(kSmall);
    t.x += groups * kRows * 4 * value_bytes(kSmall);
    t.seeds += t.seed_step;
    t.scales += t.scale_step;
  }
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kWidth; ++i) {
      float* at = out + r * kFastColumns + (v + i) * kLanes;
      const F scale = row_scales(t.x_scales, r);
      store(at, t.first ? total[r][i] * scale : fma(total[r][i], scale, load(at)));
    }
  }
}

template <int kRows, bool kSmall, int kFit, typename Beside>
__attribute__((noinline)) void blocked_tiles(const FastTiles& tiles, Beside& shared) {
  FastTiles t = tiles;
  Beside beside = shared;
  float* out = static_cast<float*>(t.sums);
  for (; t.count > 0; --t.count) {
    beside.in_tile();
    for (int v = 0; v < kFastVectors; v += kBlockedVectors) {
      blocked_tile<kRows, kBlockedVectors, kSmall, kFit>(t, v, out, beside);
    }
    t.x += t.x_step;
    t.seeds += kRows;
    t.x_scales += kRows;
    out += kRows * kFastColumns;
  }
  shared = beside;
}

// Multiplies tiles of kRows rows of x.
template <int kRows, bool kBlocked, bool kSmall, typename Beside>
LOWBIT_INLINE void multiply_tiles(const FastTiles& tiles, Beside& beside) {
  if constexpr (!kBlocked) return whole_tiles<kRows, kSmall>(tiles, beside);
#if defined(LOWBIT_AVX2)
  if constexpr (kBlocked && kSmall) {
    if (tiles.fit >= 8) return blocked_tiles<kRows, kSmall, 8>(tiles, beside);
    if (tiles.fit >= 4) return blocked_tiles<kRows, kSmall, 4>(tiles, beside);
    if (tiles.fit == 3) return blocked_tiles<kRows, kSmall, 3>(tiles, beside);
    return blocked_tiles<kRows, kSmall, 2>(tiles, beside);
  }
#endif
  if constexpr (kBlocked) blocked_tiles<kRows, kSmall, 0>(tiles, beside);
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
  constexpr int64_t kMost = kTileBytes * D::kPerByte;
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
  const int64_t columns = tiling.columns, rows = tiling.rows, spans = kBlocked ? tiling.slab / tiling.span : 1,
                panel_bytes = columns / kFastColumns * panel_step<D>(tiling.slab);
  uint8_t* panel = static_cast<uint8_t*>(scratch(Scratch::task_panel, static_cast<size_t>(2 * panel_bytes)));
  float* scales = buffer<float>(Scratch::task_scales, (tiling.by_tile ? tiling.spans : spans) * columns);
  float* sums =
      static_cast<float*>(scratch(Scratch::task_sums, static_cast<size_t>((end - begin) * columns * tiling.rows) * 4));
  if (panel == nullptr || scales == nullptr || sums == nullptr) return false;
  constexpr bool kSmall = D::kSmall;
  constexpr int kSize = 4 * value_bytes(kSmall), kRows = fast_rows(kSmall, kBlocked);
  const bool between = kPrefetchBetween && (!kBlocked || rows <= kPrefetchBlocked);
  uint8_t* other_panel = panel + panel_bytes;
  NextPanel<D> next_panel(decoder);
  bool decoded = false;  // the panel of this tile, during the products of the last one
  const auto depth_at = [&](int64_t k) { return round_up(min(tiling.slab, p.k - k), tiling.unit); };
  // All slabs of a tile, or all tiles of a slab.
  const int64_t tiles = end - begin, steps = tiling.slabs * tiles;
  const auto slab_at = [&](int64_t step) { return tiling.by_tile ? step % tiling.slabs : step / tiles; };
  const auto tile_at = [&](int64_t step) { return begin + (tiling.by_tile ? step / tiling.slabs : step % tiles); };
  NextSlab next_slab;
  for (int64_t step = 0; step < steps; ++step) {
    const int64_t slab = slab_at(step), tile = tile_at(step), k = slab * tiling.slab, depth = depth_at(k);
    const bool more = step + 1 < steps;
    const int64_t next_tile = tile_at(step + 1), next_k = slab_at(step + 1) * tiling.slab;
    // Tiles of rows with products that do nothing else.
    const int64_t free_tiles = tiling.row_tiles() - (between && tiling.decodes_ahead ? 1 : 0);
    const int64_t stored = p.contract_last ? kTileBytes * ceil_div(depth, kTileBytes * D::kPerByte) : depth;
    const int64_t lines = ceil_div(stored, columns / kFastColumns * max(free_tiles, 1));
    const int64_t times = !between ? 1 : kBlocked ? kFastVectors / kBlockedVectors * spans : depth / 4;
    if (p.contract_last) {
      panel_of_columns(decoder, w, k, depth, tile, panel);
      // The next panel: rows apart, of which L1 may not hold all.
      const int64_t byte = next_k / D::kPerByte;
      next_slab = NextSlab(w, next_tile * kTileBytes, byte, byte + (more ? depth / D::kPerByte : 0), true);
    } else {
      if (!decoded) panel_of_rows(decoder, w, k, depth, tile, panel);
      // The next slab of all tiles.
      const int64_t row_end = min(end * kTileBytes, w.w.row_bytes);
      if (tile == begin) next_slab = NextSlab(w, k + depth, begin * kTileBytes, row_end);
    }
    decoded = false;
    if (tiling.decodes_ahead && more) {
      decoded = next_panel.set(w, next_k, depth_at(next_k), next_tile, other_panel);
    }
    if (kBlocked) {
      const int64_t count = ceil_div(depth, tiling.span);
      if (tiling.by_tile) {
        if (slab == 0) panel_scales_last<D>(tiling, w, 0, tiling.spans, tile, scales);
        w.prefetch_scales((tile + 1) * kTileBytes, slab, slab + 1, tiling.slabs, kTileBytes);
      } else if (p.contract_last) {
        panel_scales_last<D>(tiling, w, k, count, tile, scales);
      }
      for (int64_t b = 0; b < count && !p.contract_last; ++b) {
        panel_scales<D>(w, k + b * tiling.span, tile, scales + b * columns);
        w.prefetch_scales((k + depth + b * tiling.span) / w.w.row_span, tile, tile + 1, tiling.tiles);
      }
    }
    for (int64_t group = 0; group < columns / kFastColumns; ++group) {
      for (int64_t row_tile = 0, count; row_tile < tiling.row_tiles(); row_tile += count) {
        const int64_t m = tiling.row_of(row_tile), height = tiling.height_of(row_tile);
        count = tiling.tiles_like(row_tile);
        FastTiles t;
        t.count = count;
        t.panel = panel + group * panel_step<D>(depth);
        t.x = x.packed + (slab * rows + m) * (tiling.slab / 4) * kSize;
        t.x_step = height * (tiling.slab / 4) * kSize;
        t.groups = depth / 4;
        t.span_groups = tiling.span / 4;
        t.fit = decoder.fit();
        t.first = slab == 0;
        t.seeds = x.seeds + (kBlocked ? k / tiling.span * rows : 0) + m;
        t.x_scales = x.scales + (kBlocked ? k / tiling.block * rows : 0) + m;
        t.seed_step = rows;
        t.scales = scales + group * kFastColumns + (tiling.by_tile ? k / tiling.span * columns : 0);
        t.scale_step = columns;
        t.sums = sums + (((tile - begin) * columns / kFastColumns + group) * rows + m) * kFastColumns;
        if constexpr (kAheadRows > 0) {
          if (row_tile == 0 && tiling.decodes_ahead) {
            if (!between) next_slab.prefetch_all(lines);
            multiply_tiles<kAheadRows, kBlocked, kSmall>(t, next_panel);
            continue;
          }
        }
        next_slab.set(lines * count, times * count);
        with_constant<kRows / kPair>(height / kPair, [&](auto pairs) {
          constexpr int kHeight = kPair * decltype(pairs)::value;
          if constexpr (kPrefetchBetween) {
            if (between) return multiply_tiles<kHeight, kBlocked, kSmall>(t, next_slab);
          }
          if constexpr (!kPrefetchBetween || kBlocked) {
            EachTile each_tile{&next_slab};
            multiply_tiles<kHeight, kBlocked, kSmall>(t, each_tile);
          }
        });
      }
    }
    next_panel.finish();
    if (decoded) {
      uint8_t* const used = panel;
      panel = other_panel;
      other_panel = used;
    }
  }
  store_tiles<D, kBlocked>(p, tiling, w, x, batch, begin, end, sums);
  return true;
}

}  // namespace lowbit::LOWBIT_ISA

#endif  // LOWBIT_FAST_TILE_H_
