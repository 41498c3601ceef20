// The register tile of a product with activations in int8, and the loop over tiles of columns.
#ifndef LOWBIT_FAST_TILE_H_
#define LOWBIT_FAST_TILE_H_

#include "fast_pack.h"

namespace lowbit::LOWBIT_ISA {

#if defined(LOWBIT_AVX2)
// The same for kCount vectors of small levels from the v-th on, two groups at a time.
template <int kRows, int kCount>
LOWBIT_INLINE void add_small_products(I (&sums)[kRows][kFastVectors], int v, const uint8_t* panel, const uint8_t* x,
                                      int64_t groups) {
  I total[kRows][kCount];
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kCount; ++i) total[r][i] = sums[r][v + i];
  }
  const I ones = I{} + 0x00010001;
  panel += v * kBytes;
  for (; groups >= 2; groups -= 2, panel += 2 * kGroupBytes, x += 2 * kRows * 4) {
    Bytes a[kCount], b[kCount];
    for (int i = 0; i < kCount; ++i) {
      a[i] = load_as<Bytes>(panel + i * kBytes);
      b[i] = load_as<Bytes>(panel + kGroupBytes + i * kBytes);
    }
    for (int r = 0; r < kRows; ++r) {
      const I xa = splat(x + r * 4), xb = splat(x + (kRows + r) * 4);
      for (int i = 0; i < kCount; ++i) {
        add_pair_dots(total[r][i], reinterpret_cast<Bytes>(small_dots(a[i], xa) + small_dots(b[i], xb)), ones);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kCount; ++i) {
      const Bytes last = groups > 0 ? load_as<Bytes>(panel + i * kBytes) : Bytes{};
      const I xa = groups > 0 ? splat(x + r * 4) : I{};
      if (groups > 0) add_pair_dots(total[r][i], reinterpret_cast<Bytes>(small_dots(last, xa)), ones);
      sums[r][v + i] = total[r][i];
    }
  }
}
#endif

// sums += panel * x over `groups` of four k; the sums of `fit` groups fit in 16 bits if kSmall
template <int kRows, bool kSmall>
LOWBIT_INLINE void add_products(I (&sums)[kRows][kFastVectors], const uint8_t* panel, const uint8_t* x, int64_t groups,
                                [[maybe_unused]] int64_t fit) {
#if defined(LOWBIT_TILE_DOTS)
  for (int64_t g = 0; g < groups; ++g, panel += kGroupBytes, x += kRows * 4) {
    Bytes w[kFastVectors];
    for (int v = 0; v < kFastVectors; ++v) w[v] = load_as<Bytes>(panel + v * kBytes);
    for (int r = 0; r < kRows; ++r) {
      const I multiplier = splat(x + r * 4);
      for (int v = 0; v < kFastVectors; ++v) add_dots<kSmall>(sums[r][v], w[v], multiplier);
    }
  }
#else
#if defined(LOWBIT_AVX2)
  if constexpr (kSmall) {
    // If few sums fit, they are widened often: as many vectors at a time as leave all sums in registers.
    if (fit < 8) {
      constexpr int kCount = kRows <= 4 ? kFastVectors : 1;
#pragma GCC unroll 2
      for (int v = 0; v < kFastVectors; v += kCount) add_small_products<kRows, kCount>(sums, v, panel, x, groups);
      return;
    }
    for (int64_t begin = 0; begin < groups; begin += fit) {
      Words words[kRows][kFastVectors] = {};
      for (int64_t g = begin; g < min(begin + fit, groups); ++g, panel += kGroupBytes, x += kRows * 4) {
        Bytes w[kFastVectors];
        for (int v = 0; v < kFastVectors; ++v) w[v] = load_as<Bytes>(panel + v * kBytes);
        for (int r = 0; r < kRows; ++r) {
          const I multiplier = splat(x + r * 4);
          for (int v = 0; v < kFastVectors; ++v) words[r][v] += small_dots(w[v], multiplier);
        }
      }
      for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kFastVectors; ++v) {
          add_pair_dots(sums[r][v], reinterpret_cast<Bytes>(words[r][v]), I{} + 0x00010001);
        }
      }
    }
    return;
  }
#endif
  for (int64_t g = 0; g < groups; ++g, panel += kGroupBytes, x += kRows * 8) {
    for (int half = 0; half < 2; ++half) {
      Bytes w[kFastVectors];
      for (int v = 0; v < kFastVectors; ++v) {
        const Words words = load_as<Words>(panel + v * kBytes);
        w[v] = reinterpret_cast<Bytes>(half == 0 ? words & 255 : words >> 8);
      }
      for (int r = 0; r < kRows; ++r) {
        const I multiplier = splat(x + r * 8 + half * 4);
        for (int v = 0; v < kFastVectors; ++v) add_pair_dots(sums[r][v], w[v], multiplier);
      }
    }
  }
#endif
}

// The blocks of a slab: block b has the seeds and scales of its rows at b * x_step, those of its columns at
// b * scale_step.
struct FastTile {
  const uint8_t* panel;
  const uint8_t* x;
  int64_t groups, block_groups;  // of four k: in all blocks, and in each but the last
  int64_t fit;
  bool first;             // the first slab
  const int32_t* seeds;   // of the rows
  const float* x_scales;  // of the rows
  const float* scales;    // of the columns
  int64_t x_step, scale_step;
  void* sums;  // [row][kFastColumns] int32, or float if blocked
};

// Not inlined: in a large function, GCC 12 keeps the sums in memory.
template <int kRows, bool kSmall, bool kBlocked>
__attribute__((noinline)) void fast_tile(const FastTile& tile) {
  FastTile t = tile;  // a copy that the stores cannot alias
  int32_t* whole = static_cast<int32_t*>(t.sums);
  while (t.groups > 0) {
    const int64_t groups = min(t.groups, t.block_groups);
    I sums[kRows][kFastVectors];
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kFastVectors; ++v) {
        const bool begin = kBlocked || t.first;
        sums[r][v] = begin ? splat(t.seeds + r) : load_as<I>(whole + r * kFastColumns + v * kLanes);
      }
    }
    add_products<kRows, kSmall>(sums, t.panel, t.x, groups, t.fit);
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kFastVectors; ++v) {
        if constexpr (kBlocked) {
          float* out = static_cast<float*>(t.sums) + r * kFastColumns + v * kLanes;
          const F scale = broadcast(t.x_scales[r]) * load(t.scales + v * kLanes);
          store(out, t.first ? to_float(sums[r][v]) * scale : fma(to_float(sums[r][v]), scale, load(out)));
        } else {
          store_as(whole + r * kFastColumns + v * kLanes, sums[r][v]);
        }
      }
    }
    t.first = false;
    t.groups -= groups;
    t.panel += groups * kGroupBytes;
    t.x += groups * kRows * x_bytes(kSmall);
    t.seeds += t.x_step;
    t.x_scales += t.x_step;
    t.scales += t.scale_step;
  }
}

// ---- Tiles of columns

// The x of a product in int8.
struct FastX {
  const uint8_t* packed;
  const int32_t* seeds;  // [block][m]
  const float* scales;   // [block][m]
};

// Writes the sums of the tiles [begin, end) to y, in column order. `scales` is a buffer for the scales of a tile.
template <typename D, bool kBlocked>
void store_tiles(const Matmul& p, const FastTiling& tiling, const Matrix& w, const FastX& x, int64_t batch,
                 int64_t begin, int64_t end, const float* sums, float* scales) {
  const int64_t columns = tiling.columns, per = p.contract_last ? 1 : D::kPerByte;
  for (int64_t tile = begin; tile < end; ++tile) {
    const int64_t n = tile * columns, count = min(columns, p.n - n);
    if (!kBlocked) panel_scales<D>(w, p.contract_last, 0, tile, scales);
    for (int64_t m = 0; m < p.m; ++m) {
      alignas(64) float line[kTileBytes * D::kPerByte];
      for (int64_t v = 0; v < columns; v += kLanes) {
        const float* from = sums + (((tile - begin) * columns + v / kFastColumns * kFastColumns) * p.m) +
                            m * kFastColumns + v % kFastColumns;
        F value = load(from);
        if (!kBlocked) value = to_float(load_as<I>(from)) * broadcast(x.scales[m]) * load(scales + v);
        if (per == 1) {
          store(line + v, value);
        } else {
          float* out = line + v / (kLanes * per) * kLanes * per + v / kLanes % per;
          for (int i = 0; i < kLanes; ++i) out[i * per] = value[i];
        }
      }
      from_f32(line, count, p.y, p.y_type, (batch * p.m + m) * p.n + n);
    }
  }
}

// Computes the tiles [begin, end) of the columns of one product.
template <bool kBlocked, typename D>
bool fast_tiles(const D& decoder, const Matmul& p, const FastTiling& tiling, const Matrix& w, const FastX& x,
                int64_t batch, int64_t begin, int64_t end) {
  const int64_t columns = tiling.columns, blocks = kBlocked ? tiling.slab / tiling.block : 1;
  uint8_t* panel = static_cast<uint8_t*>(scratch(Scratch::task_panel, static_cast<size_t>(tiling.slab * columns)));
  float* scales = static_cast<float*>(scratch(Scratch::task_scales, static_cast<size_t>(blocks * columns) * 4));
  float* sums =
      static_cast<float*>(scratch(Scratch::task_sums, static_cast<size_t>((end - begin) * columns * p.m) * 4));
  if (panel == nullptr || scales == nullptr || sums == nullptr) return false;
  constexpr bool kSmall = D::kSmall;
  constexpr int kSize = x_bytes(kSmall), kRows = fast_rows(kSmall);
  for (int64_t slab = 0; slab < tiling.slabs; ++slab) {
    const int64_t k = slab * tiling.slab, depth = round_up(min(tiling.slab, p.k - k), tiling.unit);
    for (int64_t tile = begin; tile < end; ++tile) {
      if (p.contract_last) {
        panel_of_columns(decoder, w, k, depth, tile, panel);
      } else {
        panel_of_rows(decoder, w, k, depth, tile, panel);
      }
      const int64_t block_count = kBlocked ? ceil_div(depth, tiling.block) : 1;
      if (kBlocked) {
        for (int64_t b = 0; b < block_count; ++b) {
          panel_scales<D>(w, p.contract_last, k + b * tiling.block, tile, scales + b * columns);
        }
      }
      for (int64_t group = 0; group < columns / kFastColumns; ++group) {
        for (int64_t m = 0; m < p.m; m += kRows) {
          const int64_t rows = min(kRows, p.m - m);
          const int64_t block = kBlocked ? slab * blocks : 0;
          FastTile t;
          t.panel = panel + group * (depth / 4) * kGroupBytes;
          t.x = x.packed + (slab * p.m + m) * (tiling.slab / 4) * kSize;
          t.groups = depth / 4;
          t.block_groups = kBlocked ? tiling.block / 4 : t.groups;
          t.fit = decoder.fit();
          t.first = slab == 0;
          t.seeds = x.seeds + block * p.m + m;
          t.x_scales = x.scales + block * p.m + m;
          t.x_step = p.m;
          t.scales = scales + group * kFastColumns;
          t.scale_step = columns;
          t.sums = sums + (((tile - begin) * columns / kFastColumns + group) * p.m + m) * kFastColumns;
          with_constant<kRows>(rows, [&](auto r) { fast_tile<decltype(r)::value, kSmall, kBlocked>(t); });
        }
      }
    }
  }
  store_tiles<D, kBlocked>(p, tiling, w, x, batch, begin, end, sums, scales);
  return true;
}

}  // namespace lowbit::LOWBIT_ISA

#endif  // LOWBIT_FAST_TILE_H_
