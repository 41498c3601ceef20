// Any product in float32: decodes a slab of the matrix into a panel and multiplies it by many rows of x.
#ifndef LOWBIT_EXACT_PANEL_H_
#define LOWBIT_EXACT_PANEL_H_

#include "matmul_common.h"

namespace lowbit::LOWBIT_ISA {

constexpr int kTileLanes = kTileVectors * kLanes;
constexpr int64_t kPanelDepth = 512;  // along k: more would leave no room in L2, fewer add to y too often

// Calls done(r, sums) with sums = sum over k of a[r * a_row + k * a_step] * b[k, :], for each r. Not inlined, so that
// all sums stay in registers.
template <int kRows, int kWidth, typename Done>
__attribute__((noinline)) void multiply_tile(int64_t depth, const float* a, int64_t a_row, int64_t a_step,
                                             const float* b, const Done& shared) {
  const Done done = shared;  // a copy that the stores cannot alias
  F acc[kRows][kWidth];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kWidth; ++i) acc[r][i] = zero();
  }
  for (int64_t k = 0; k < depth; ++k) {
    F v[kWidth];
    for (int i = 0; i < kWidth; ++i) v[i] = load(b + k * kWidth * kLanes + i * kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const F factor = broadcast(a[r * a_row + k * a_step]);
      for (int i = 0; i < kWidth; ++i) acc[r][i] = fma(v[i], factor, acc[r][i]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) done(r, acc[r]);
}

// What is done with the sums of a tile: no lambdas, so that decoders share the tiles.

// Writes row r of the tile to y, or adds it to what an earlier slab wrote. kOrder is that of the decoder.
template <void (*kOrder)(F*)>
struct ToRows {
  float* y;
  int64_t n, columns;
  bool first;

  LOWBIT_INLINE void operator()(int r, F sums[kTileVectors]) const {
    for (int i = 0; i < kTileVectors; i += 2) kOrder(sums + i);
    if (columns >= kTileVectors * kLanes) {
      float* out = y + r * n;
      for (int i = 0; i < kTileVectors; ++i, out += kLanes) store(out, first ? sums[i] : sums[i] + load(out));
      return;
    }
    for (int i = 0; i < kTileVectors && i * kLanes < columns; ++i) {
      float* out = y + r * n + i * kLanes;
      const int64_t left = columns - i * kLanes;
      if (left >= kLanes) {
        store(out, first ? sums[i] : sums[i] + load(out));
      } else {
        store(out, first ? sums[i] : sums[i] + load(out, left), left);
      }
    }
  }
};

// Adds row r of the tile to sums with rows of `width`.
template <int kWidth>
struct AddToRows {
  float* sums;
  int64_t width;

  LOWBIT_INLINE void operator()(int r, const F acc[kWidth]) const {
    for (int v = 0; v < kWidth; ++v) {
      float* sum = sums + r * width + v * kLanes;
      store(sum, load(sum) + acc[v]);
    }
  }
};

// Decodes and scales a line of `rows` stored rows, in the decoder's order: vector i of row r goes to
// out + r * row_step + vector_at[i].
template <typename D>
LOWBIT_INLINE void decode_lines(const D& decoder, const Matrix& w, int64_t row, int64_t rows, int64_t column,
                                float* out, int64_t row_step, const int64_t vector_at[kVectors]) {
  const bool whole = column + kLine <= w.w.columns;
  const int64_t offset = column / D::kPerByte;
  const int64_t scale_col = column / w.w.col_span;
  const bool one_scale = scale_col == (min(column + kLine, w.w.columns) - 1) / w.w.col_span;
  int64_t scale_row = row / w.w.row_span - 1, scaled_until = row;
  F s[kVectors] = {};
  for (int64_t r = row; r < row + rows; ++r) {
    if (r == scaled_until) {
      scaled_until = (++scale_row + 1) * w.w.row_span;
      if (one_scale) {
        for (int i = 0; i < kVectors; ++i) s[i] = broadcast(w.scale(scale_row, scale_col));
      } else {
        line_scales<D>(w, scale_row, column, s);
      }
    }
    uint8_t joined[kLine];
    const uint8_t* bytes = w.bytes<D>(r, offset, min(kLine, w.w.columns - column), joined);
    F v[kVectors];
    if (whole) {
      prefetch(bytes + 64);
      decoder.decode(bytes, v);
    } else {
      decoder.decode(PaddedLine<D>(bytes, w.w.columns - column).bytes, v);
    }
    for (int i = 0; i < kVectors; ++i) store(out + (r - row) * row_step + vector_at[i], v[i] * s[i]);
  }
}

// Contracts the first stored axis: the panel is (k, columns).
template <typename D>
bool matmul_panel_first(const D& decoder, const Matmul& p, const Matrix& w, const float* x, float* y,
                        const Parallel& parallel) {
  const int64_t tiles = ceil_div(p.m, kTileRows);
  const auto tile_begin = [&](int64_t tile) { return p.m * tile / tiles; };
  const int64_t lines = ceil_div(p.n, kLine);
  const int64_t tasks = min(lines, parallel.threads() * (p.m >= 48 ? 4 : 2));
  parallel.each(tasks, [&](int64_t t) {
    alignas(64) float panel[kPanelDepth * kLine];
    // A line is one or more tiles wide.
    int64_t vector_at[kVectors];
    for (int i = 0; i < kVectors; ++i) {
      vector_at[i] = i / kTileVectors * (kPanelDepth * kTileLanes) + i % kTileVectors * kLanes;
    }
    for (int64_t slab = 0; slab < p.k; slab += kPanelDepth) {
      const int64_t depth = min(kPanelDepth, p.k - slab);
      for (int64_t line = lines * t / tasks; line < lines * (t + 1) / tasks; ++line) {
        decode_lines(decoder, w, slab, depth, line * kLine, panel, kTileLanes, vector_at);
        for (int sub = 0; sub < kVectors / kTileVectors; ++sub) {
          const int64_t column = line * kLine + sub * kTileLanes;
          if (column >= p.n) break;
          for (int64_t tile = 0; tile < tiles; ++tile) {
            const int64_t begin = tile_begin(tile), rows = tile_begin(tile + 1) - begin;
            const float* a = x + begin * p.k + slab;
            const ToRows<D::order> done{y + begin * p.n + column, p.n, p.n - column, slab == 0};
            with_constant<kTileRows>(rows, [&](auto count) {
              const float* b = panel + sub * kPanelDepth * kTileLanes;
              multiply_tile<count.value, kTileVectors>(depth, a, p.k, 1, b, done);
            });
          }
        }
      }
    }
  });
  return true;
}

// out[k * step + r] = x[m + r, column + k] for kLanes rows r and two vectors of columns in the decoder's order; zeros
// past the end of x.
template <typename D>
LOWBIT_INLINE void pack_rows(const Matmul& p, const float* x, int64_t m, int64_t column, float* out, int64_t step) {
  Bytes v[2][kLanes] = {};
  for (int64_t r = 0; r < min(kLanes, p.m - m); ++r) {
    float pair[2 * kLanes];
    unordered_pair<D>(x + (m + r) * p.k + column, p.k - column, pair);
    for (int i = 0; i < 2; ++i) v[i][r] = load_as<Bytes>(pair + i * kLanes);
  }
  for (int i = 0; i < 2; ++i) {
    transpose_dwords(v[i]);
    for (int k = 0; k < kLanes; ++k) store_as(out + (i * kLanes + k) * step, v[i][k]);
  }
}

// Contracts the last stored axis: vectors run along the rows of x, packed as (slab, tile, k, row) with k in the
// decoder's order, and each decoded value is broadcast. A tile is kWidth vectors of rows of x times kRows stored rows.
template <int kWidth, typename D>
bool matmul_panel_last(const D& decoder, const Matmul& p, const Matrix& w, const float* x, float* y,
                       const Parallel& parallel) {
  constexpr int kRows = kWidth == 1 ? 12 : kTileRows * kTileVectors / kWidth;  // as many sums as registers hold
  constexpr int64_t kStored = 48, kDepth = 128;  // stored rows and columns decoded at a time, 24 KB
  constexpr int64_t kTile = kWidth * kLanes;
  static_assert(kStored % kRows == 0 && kStored % kLanes == 0 && kDepth % kLine == 0, "");
  const int64_t tiles = ceil_div(p.m, kTile), width = tiles * kTile, depth = round_up(p.k, kLine);
  float* packed = buffer<float>(Scratch::call_pack, width * depth);
  if (packed == nullptr) return false;
  parallel.each(ceil_div(depth, kDepth), [&](int64_t i) {
    const int64_t slab = i * kDepth, steps = min(kDepth, depth - slab);
    for (int64_t m = 0; m < width; m += kLanes) {
      float* out = packed + slab * width + m / kTile * (steps * kTile) + m % kTile;
      for (int64_t k = 0; k < steps; k += 2 * kLanes) pack_rows<D>(p, x, m, slab + k, out + k * kTile, kTile);
    }
  });
  bool enough_memory = true;
  parallel.each(ceil_div(p.n, kStored), [&](int64_t block) {
    alignas(64) float panel[kStored * kDepth];
    const int64_t row = block * kStored, rows = min(kStored, p.n - row);
    const bool holds = w.w.row_span == 1;
    float* sums = buffer<float>(Scratch::task_panel, kStored * width);
    float* scales = buffer<float>(Scratch::task_scales, holds ? kStored * w.w.scale_cols : 1);
    if (sums == nullptr || scales == nullptr) {
      __atomic_store_n(&enough_memory, false, __ATOMIC_RELAXED);
      return;
    }
    Matrix held = w;
    if (holds) held.hold_scales(row, rows, scales);
    memset(sums, 0, static_cast<size_t>(kStored * width) * 4);
    if (rows < kStored) memset(panel, 0, sizeof(panel));  // whole tiles are multiplied
    const int64_t vector_at[kVectors] = {0, kLanes, 2 * kLanes, 3 * kLanes};
    for (int64_t slab = 0; slab < depth; slab += kDepth) {
      const int64_t steps = min(kDepth, depth - slab);
      for (int64_t k = 0; k < steps; k += kLine) {
        decode_lines(decoder, held, row, rows, slab + k, panel + k, kDepth, vector_at);
      }
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const float* b = packed + slab * width + tile * steps * kTile;
        for (int64_t r = 0; r < rows; r += kRows) {
          const AddToRows<kWidth> done{sums + r * width + tile * kTile, width};
          multiply_tile<kRows, kWidth>(steps, panel + r * kDepth, kDepth, 1, b, done);
        }
      }
    }
    for (int64_t m = 0; m < p.m; m += kLanes) {
      for (int64_t r = 0; r < rows; r += kLanes) {
        Bytes v[kLanes];
        for (int i = 0; i < kLanes; ++i) v[i] = load_as<Bytes>(sums + (r + i) * width + m);
        transpose_dwords(v);
        for (int64_t i = 0; i < min(kLanes, p.m - m); ++i) {
          store(y + (m + i) * p.n + row + r, reinterpret_cast<F>(v[i]), min(kLanes, rows - r));
        }
      }
    }
  });
  return enough_memory;
}

}  // namespace lowbit::LOWBIT_ISA

#endif  // LOWBIT_EXACT_PANEL_H_
