// Products with activations in int8.
//
//   y[m, n] = sum_b s[m, b] * scale[b, n] * sum_{k in block b} q[m, k] * level[k, n]
//   s[m, b] = max_{k in b} |x[m, k]| / 127,  q[m, k] = x[m, k] * (127 / max), rounded to nearest even
//
// The inner sums are integers and exact, so that instruction sets and numbers of threads agree but for the rounding of
// the outer sum. A block is what shares a scale of the weights along k, or a part of at most 512 of it; where a column
// has a single scale, the whole row (up to kWholeRow). NF4 levels are rounded to 127ths.
// Error relative to the product of the same codes in float32, root mean square, x normal: 6e-3 to 1.1e-2 (blocks are
// better than whole rows). Blocks of x whose largest magnitude is below 2^-110 count as zeros; NaN and infinity make
// their rows of y NaN.
//
// Weights are decoded to unsigned bytes, level + offset, into a panel of dwords that hold four k of one column; sums
// begin at -offset * sum_k q. The dot of such dwords is one instruction with VNNI. Without, bytes are widened to words,
// unless levels are so small that products can be added in 16 bits.
#ifndef LOWBIT_MATMUL_FAST_H_
#define LOWBIT_MATMUL_FAST_H_

#include "matmul_exact.h"

namespace lowbit::LOWBIT_ISA {

constexpr int64_t kWholeRow = 65536;  // 128 * 127 * this is below 2^31
constexpr int64_t kTileBytes = 64;    // of stored rows that make a tile of columns: a cache line

// The register tile, and the bytes that four values of x take.
#if defined(LOWBIT_AVX512)
constexpr int kFastVectors = 4;
constexpr int fast_rows(bool) { return 6; }
constexpr int x_bytes(bool) { return 4; }
#elif defined(LOWBIT_AVX2)
constexpr int kFastVectors = 2;
constexpr int fast_rows(bool small) { return small ? 6 : 4; }
constexpr int x_bytes(bool small) { return small ? 4 : 8; }
#else
constexpr int kFastVectors = 2;
constexpr int fast_rows(bool) { return 4; }
constexpr int x_bytes(bool) { return 8; }
#endif
constexpr int kFastColumns = kFastVectors * kLanes;

// How a product is cut. All lengths along k are multiples of the unit of k that is decoded at once.
struct FastPlan {
  bool blocked;     // else one block, whose integer sums are kept until the end
  int64_t unit;     // of k in one dword of stored bytes (last axis contracted) or in four rows
  int64_t block;    // of k that share a scale of x
  int64_t blocks;
  int64_t slab;     // of k in a panel; a multiple of the block if blocked
  int64_t slabs;
  int64_t columns;  // in a tile
  int64_t tiles;    // of all columns
};

// ---- x to int8

// Four values of x beside each other as the dots want them.
template <int kBytesOfX>
LOWBIT_INLINE void put_x(int8_t a, int8_t b, int8_t c, int8_t d, uint8_t* out) {
  if constexpr (kBytesOfX == 4) {
    const int8_t bytes[4] = {a, b, c, d};
    memcpy(out, bytes, 4);
  } else {
    // The even bytes of a dword of the panel become words by a mask, the odd ones by a shift.
    const int16_t words[4] = {a, c, b, d};
    memcpy(out, words, 8);
  }
}

// One row of x in int8, with its seeds and scales, [block][row].
template <typename D>
void quantize_row(const FastPlan& plan, const float* x, int64_t k, int64_t m, int64_t rows, int8_t* q, int32_t* seeds,
                  float* scales) {
  for (int64_t b = 0; b < plan.blocks; ++b) {
    const int64_t begin = b * plan.block, end = min(begin + plan.block, k);
    const int64_t whole = begin + (end - begin) / kLanes * kLanes, rest = end - whole;
    // The bits of a float without its sign order like the numbers, with infinity and NaN on top.
    I tops{};
    for (int64_t i = begin; i < whole; i += kLanes) tops = max(tops, as_ints(load(x + i)) & 0x7fffffff);
    if (rest > 0) tops = max(tops, as_ints(load(x + whole, rest)) & 0x7fffffff);
    const int32_t top_bits = largest(tops);
    float top;
    memcpy(&top, &top_bits, 4);
    const bool finite = top_bits < 0x7f800000, zero = top < 0x1p-110f;
    const F factor = broadcast(finite && !zero ? 127.0f / top : 0.0f);
    I sum{};
    for (int64_t i = begin; i < whole; i += kLanes) {
      const I rounded = round_to_int(load(x + i) * factor);
      sum += rounded;
      pack_codes<1>(rounded, reinterpret_cast<uint8_t*>(q + i));
    }
    if (rest > 0) {
      const I rounded = round_to_int(load(x + whole, rest) * factor);
      sum += rounded;
      uint8_t bytes[kLanes];
      pack_codes<1>(rounded, bytes);
      memcpy(q + whole, bytes, static_cast<size_t>(rest));
    }
    uint32_t total = 0;
    for (int i = 0; i < kLanes; ++i) total += static_cast<uint32_t>(sum[i]);
    seeds[b * rows + m] = finite ? -D::kOffset * static_cast<int32_t>(total) : 0;
    scales[b * rows + m] = !finite ? __builtin_nanf("") : zero ? 0 : top / 127.0f * D::kUnit;
  }
  memset(q + k, 0, static_cast<size_t>(plan.slabs * plan.slab - k));
}

// Spreads it over its places in `packed`: [slab][row tile][group of 4 k][row of tile].
template <typename D>
void pack_row(const FastPlan& plan, bool contract_last, int64_t m, int64_t rows, const int8_t* q, uint8_t* packed) {
  constexpr int kSize = x_bytes(D::kSmall), kRows = fast_rows(D::kSmall), kPer = D::kPerByte;
  const int64_t tile = m / kRows * kRows, tile_rows = min(kRows, rows - tile), groups = plan.slab / 4;
  for (int64_t s = 0; s < plan.slabs; ++s) {
    uint8_t* out = packed + ((s * rows + tile) * groups + m - tile) * kSize;
    const int8_t* from = q + s * plan.slab;
    const int64_t step = tile_rows * kSize;
    if (!contract_last || kPer == 1) {
      for (int64_t g = 0; g < groups; ++g) put_x<kSize>(from[4 * g], from[4 * g + 1], from[4 * g + 2], from[4 * g + 3], out + g * step);
      continue;
    }
    // The four bytes of a dword, then the next code of each.
    for (int64_t g = 0; g < groups; ++g) {
      const int8_t* at = from + g / kPer * 4 * kPer + g % kPer;
      put_x<kSize>(at[0], at[kPer], at[2 * kPer], at[3 * kPer], out + g * step);
    }
  }
}

// ---- Weights to a panel: [group of vectors][group of 4 k][vector]

// Each code of the stored bytes to place(i).
template <typename D, int i = 0, typename Place>
LOWBIT_INLINE void put_bytes(Bytes codes, const Place& place) {
  if constexpr (i < D::kPerByte) {
    store_as(place(i), D::template bytes<i>(codes));
    put_bytes<D, i + 1>(codes, place);
  }
}

constexpr int64_t kGroupBytes = kFastVectors * kBytes;  // of a panel for four k

LOWBIT_INLINE uint8_t* vector_in(uint8_t* panel, int64_t depth, int64_t vector) {
  return panel + vector / kFastVectors * (depth / 4) * kGroupBytes + vector % kFastVectors * kBytes;
}

// First axis contracted, four stored rows at a time. Lane l of vector j * kPerByte + i is column
// (j * kLanes + l) * kPerByte + i of the tile.
template <typename D>
void panel_of_rows(const Matrix& w, int64_t k, int64_t depth, int64_t tile, uint8_t* panel) {
  const int64_t byte = tile * kTileBytes, bytes = min(kTileBytes, w.w.row_bytes - byte);
  alignas(64) uint8_t ends[4][kTileBytes] = {};
  for (int64_t r = 0; r < depth; r += 4) {
    const uint8_t* rows[4];
    for (int i = 0; i < 4; ++i) {
      rows[i] = w.row(min(k + r + i, w.w.rows - 1)) + byte;
      prefetch(rows[i] + kTileBytes);  // the tile to the right
      if (bytes < kTileBytes) {
        memcpy(ends[i], rows[i], static_cast<size_t>(bytes));
        rows[i] = ends[i];
      }
    }
    uint8_t* out = panel + r / 4 * kGroupBytes;
    for (int part = 0; part < kTileBytes / kBytes; ++part) {
      Bytes v[4];
      for (int i = 0; i < 4; ++i) v[i] = load_as<Bytes>(rows[i] + part * kBytes);
      interleave_rows(v);
      for (int j = 0; j < 4; ++j) {
        const int first = (part * 4 + j) * D::kPerByte;
        put_bytes<D>(v[j], [&](int i) { return vector_in(out, depth, first + i); });
      }
    }
  }
}

// Last axis contracted: a dword of each of kLanes stored rows at a time.
template <typename D>
void panel_of_columns(const Matrix& w, int64_t k, int64_t depth, int64_t tile, uint8_t* panel) {
  constexpr int64_t kUnit = 4 * D::kPerByte;
  const int64_t byte = k / D::kPerByte, dwords = depth / kUnit;
  for (int64_t vector = 0; vector < kTileBytes / kLanes; ++vector) {
    const int64_t row = tile * kTileBytes + vector * kLanes;
    uint8_t* out = vector_in(panel, depth, vector);
    for (int64_t d = 0; d < dwords; d += kLanes) {
      const int64_t bytes = min(kBytes, w.w.row_bytes - byte - 4 * d);
      Bytes v[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const uint8_t* from = w.row(min(row + i, w.w.rows - 1)) + byte + 4 * d;
        prefetch(from + depth / D::kPerByte);  // the next slab
        if (bytes == kBytes) {
          v[i] = load_as<Bytes>(from);
        } else {
          v[i] = Bytes{};
          memcpy(&v[i], from, static_cast<size_t>(bytes));
        }
      }
      transpose_dwords(v);
      for (int64_t i = 0; i < min(kLanes, dwords - d); ++i) {
        put_bytes<D>(v[i], [&](int j) { return out + ((d + i) * D::kPerByte + j) * kGroupBytes; });
      }
    }
  }
}

// The scales of a tile for the block at k, in the order of the panel's columns; zeros beyond the last column.
template <typename D>
void panel_scales(const Matrix& w, bool contract_last, int64_t k, int64_t tile, float* out) {
  if (contract_last) {
    for (int64_t i = 0; i < kTileBytes; ++i) {
      const int64_t row = tile * kTileBytes + i;
      float scale = 0;
      if (row < w.w.rows) scale = *w.scales(row / w.w.row_span, k / w.w.col_span, 1, &scale);
      out[i] = scale;
    }
    return;
  }
  constexpr int64_t kPer = D::kPerByte, kColumns = kTileBytes * kPer;
  const int64_t column = tile * kColumns, count = min(kColumns, w.w.columns - column);
  alignas(64) float buffer[kColumns];
  const float* scales = w.scales(k / w.w.row_span, column, count, buffer);
  if (count < kColumns) {
    if (scales != buffer) memcpy(buffer, scales, static_cast<size_t>(count) * 4);
    memset(buffer + count, 0, static_cast<size_t>(kColumns - count) * 4);
    scales = buffer;
  }
  for (int64_t j = 0; j < kColumns; j += kLanes * kPer) {
    if constexpr (kPer == 1) {
      store(out + j, load(scales + j));
    } else if constexpr (kPer == 2) {
      F even, odd;
      split_pairs(load(scales + j), load(scales + j + kLanes), even, odd);
      store(out + j, even);
      store(out + j + kLanes, odd);
    } else {
      for (int64_t i = 0; i < kLanes * kPer; ++i) out[j + i % kPer * kLanes + i / kPer] = scales[j + i];
    }
  }
}

// ---- The register tile

// sums += panel * x over `groups` of four k
template <int kRows, bool kSmall>
LOWBIT_INLINE void add_products(I (&sums)[kRows][kFastVectors], const uint8_t* panel, const uint8_t* x, int64_t groups) {
#if defined(LOWBIT_AVX512)
  for (int64_t g = 0; g < groups; ++g, panel += kGroupBytes, x += kRows * 4) {
    Bytes w[kFastVectors];
    for (int v = 0; v < kFastVectors; ++v) w[v] = load_as<Bytes>(panel + v * kBytes);
    for (int r = 0; r < kRows; ++r) {
      const I multiplier = splat(x + r * 4);
      for (int v = 0; v < kFastVectors; ++v) add_dots(sums[r][v], w[v], multiplier);
    }
  }
#else
#if defined(LOWBIT_AVX2)
  if constexpr (kSmall) {
    constexpr int64_t kFit = 32;  // groups: 2 * 3 * 127 * 32 is below 2^15
    for (int64_t begin = 0; begin < groups; begin += kFit) {
      Words words[kRows][kFastVectors] = {};
      for (int64_t g = begin; g < min(begin + kFit, groups); ++g, panel += kGroupBytes, x += kRows * 4) {
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

struct FastTile {
  const uint8_t* panel;
  const uint8_t* x;
  int64_t groups;
  bool first;                 // of all blocks, or of the slabs of the only one
  const int32_t* seeds;       // of the rows
  const float* x_scales;      // of the rows
  const float* scales;        // of the columns
  void* sums;                 // [row][kFastColumns] int32, or float if blocked
};

// A function of its own: inlined into a large one, GCC 12 keeps the sums in memory.
template <int kRows, bool kSmall, bool kBlocked>
__attribute__((noinline)) void fast_tile(const FastTile& t) {
  I sums[kRows][kFastVectors];
  int32_t* whole = static_cast<int32_t*>(t.sums);
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kFastVectors; ++v) {
      const bool begin = kBlocked || t.first;
      sums[r][v] = begin ? splat(t.seeds + r) : load_as<I>(whole + r * kFastColumns + v * kLanes);
    }
  }
  add_products<kRows, kSmall>(sums, t.panel, t.x, t.groups);
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
}

// ---- The driver

// A product's x in int8.
struct FastX {
  const uint8_t* packed;
  const int32_t* seeds;  // [block][m]
  const float* scales;   // [block][m]
};

// The tiles [begin, end) of the columns of one product.
template <typename D, bool kBlocked>
bool fast_tiles(const Matmul& p, const FastPlan& plan, const Matrix& w, const FastX& x, int64_t batch, int64_t begin,
                int64_t end) {
  const int64_t columns = plan.columns, blocks = kBlocked ? plan.slab / plan.block : 1;
  uint8_t* panel = static_cast<uint8_t*>(scratch(Scratch::task_panel, static_cast<size_t>(plan.slab * columns)));
  float* scales = static_cast<float*>(scratch(Scratch::task_scales, static_cast<size_t>(blocks * columns) * 4));
  float* sums = static_cast<float*>(scratch(Scratch::task_sums, static_cast<size_t>((end - begin) * columns * p.m) * 4));
  if (panel == nullptr || scales == nullptr || sums == nullptr) return false;
  constexpr bool kSmall = D::kSmall;
  constexpr int kSize = x_bytes(kSmall), kRows = fast_rows(kSmall);
  for (int64_t slab = 0; slab < plan.slabs; ++slab) {
    const int64_t k = slab * plan.slab, depth = round_up(min(plan.slab, p.k - k), plan.unit);
    for (int64_t tile = begin; tile < end; ++tile) {
      if (p.contract_last) {
        panel_of_columns<D>(w, k, depth, tile, panel);
      } else {
        panel_of_rows<D>(w, k, depth, tile, panel);
      }
      const int64_t block_count = kBlocked ? ceil_div(depth, plan.block) : 1;
      if (kBlocked) {
        for (int64_t b = 0; b < block_count; ++b) {
          panel_scales<D>(w, p.contract_last, k + b * plan.block, tile, scales + b * columns);
        }
      }
      for (int64_t group = 0; group < columns / kFastColumns; ++group) {
        for (int64_t m = 0; m < p.m; m += kRows) {
          const int64_t rows = min(kRows, p.m - m);
          for (int64_t b = 0; b < block_count; ++b) {
            const int64_t block = slab * blocks + b, at = b * plan.block / 4;
            FastTile t;
            t.groups = (kBlocked ? min(plan.block, depth - b * plan.block) : depth) / 4;
            t.panel = panel + (group * (depth / 4) + at) * kGroupBytes;
            t.x = x.packed + ((slab * p.m + m) * (plan.slab / 4) + at * rows) * kSize;
            t.first = kBlocked ? block == 0 : slab == 0;
            t.seeds = x.seeds + (kBlocked ? block : 0) * p.m + m;
            t.x_scales = x.scales + (kBlocked ? block : 0) * p.m + m;
            t.scales = scales + b * columns + group * kFastColumns;
            t.sums = sums + (((tile - begin) * columns / kFastColumns + group) * p.m + m) * kFastColumns;
            with_constant<kRows>(rows, [&](auto r) { fast_tile<decltype(r)::value, kSmall, kBlocked>(t); });
          }
        }
      }
    }
  }
  // To y, in the order of its columns.
  const int64_t per = p.contract_last ? 1 : D::kPerByte;
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
  return true;
}

// False where scales vary inside what would be an integer sum.
template <typename D>
bool make_plan(const Matmul& p, FastPlan& plan) {
  const int64_t across = p.contract_last ? p.w.row_span : p.w.col_span;
  const int64_t along = p.contract_last ? p.w.col_span : p.w.row_span;
  if (across != 1 || p.k == 0) return false;
  plan.unit = p.contract_last ? 4 * D::kPerByte : 4;
  plan.blocked = along < p.k || p.k > kWholeRow;
  plan.block = plan.blocked ? along : round_up(p.k, plan.unit);
  if (plan.blocked && plan.block > 512) {
    for (plan.block = 512; along < p.k && along % plan.block != 0; plan.block /= 2) {
    }
  }
  if (plan.block % plan.unit != 0 || (plan.blocked && plan.block < 16)) return false;
  plan.blocks = ceil_div(p.k, plan.block);
  const int64_t depth = p.contract_last ? max(256, kBytes * D::kPerByte) : p.m <= 4 ? 64 : 256;
  plan.slab = plan.blocked ? max(depth / plan.block, 1) * plan.block : min(depth, plan.block);
  plan.slabs = ceil_div(p.k, plan.slab);
  plan.columns = p.contract_last ? kTileBytes : kTileBytes * D::kPerByte;
  plan.tiles = ceil_div(p.n, plan.columns);
  return true;
}

#if defined(LOWBIT_AVX512) || defined(LOWBIT_AVX2)

// ---- One row of x: nothing is used twice, so weights go from memory to the sums without a panel

constexpr int64_t kFastGroup = 8;  // stored rows side by side

template <typename D>
bool one_row_fits(const Matmul& p, const FastPlan& plan) {
  return p.m == 1 && (!p.contract_last || !plan.blocked || plan.block % (kBytes * D::kPerByte) == 0);
}

// Where the sums of a block of rows go, in the order of a panel's columns: `partial` from its first group of rows to
// its last, which adds them to `sums`, times the scale of x and, if there are any, those of the columns.
struct FastSums {
  int32_t* partial;
  float* sums;
  const float* scales;
  float x_scale;
  int32_t seed;
};

// Are levels multiplied with their offset, which sums then begin without?
template <typename D>
constexpr bool kSeeded = D::kSmall || !kSignedDots;

// sum += the i-th codes of the bytes times x
template <typename D, int i>
LOWBIT_INLINE void add_code(I& sum, Bytes codes, I x) {
  if constexpr (kSeeded<D>) {
    add_dots<D::kSmall>(sum, D::template bytes<i>(codes), x);
  } else {
    add_dots<D::kSmall>(sum, D::template signed_bytes<i>(codes), x);
  }
}

template <typename D, bool kFirst, bool kLast, int i = 0>
LOWBIT_INLINE void add_codes(Bytes a, Bytes b, I xa, I xb, const FastSums& to, int64_t at) {
  if constexpr (i < D::kPerByte) {
    I sum = kFirst ? I{} + to.seed : load_as<I>(to.partial + at);
    add_code<D, i>(sum, a, xa);
    add_code<D, i>(sum, b, xb);
    if (kLast) {
      F scale = broadcast(to.x_scale);
      if (to.scales != nullptr) scale *= load(to.scales + at);
      store(to.sums + at, fma(to_float(sum), scale, load(to.sums + at)));
    } else {
      store_as(to.partial + at, sum);
    }
    add_codes<D, kFirst, kLast, i + 1>(a, b, xa, xb, to, at + kLanes);
  }
}

// kFastGroup stored rows (of which the last may be the same) times q, in `parts` of kBytes.
template <typename D, bool kFirst, bool kLast>
__attribute__((noinline)) void add_fast_rows(const uint8_t* const rows[kFastGroup], int64_t parts, int64_t ahead,
                                             const int8_t* q, const FastSums& where) {
  const FastSums to = where;  // a copy, which the stores can not change
  const I xa = splat(q), xb = splat(q + 4);
  for (int64_t part = 0; part < parts; ++part) {
    Bytes v[kFastGroup];
    for (int r = 0; r < kFastGroup; ++r) {
      if (kBytes == 64 || part % 2 == 0) prefetch(rows[r] + part * kBytes + ahead);
      v[r] = load_as<Bytes>(rows[r] + part * kBytes);
    }
    interleave_rows(v);
    interleave_rows(v + 4);
    for (int j = 0; j < 4; ++j) {
      add_codes<D, kFirst, kLast>(v[j], v[4 + j], xa, xb, to, (part * 4 + j) * kLanes * D::kPerByte);
    }
  }
}

// The stored rows [begin, end) times q, to sums.
template <typename D>
bool fast_stream(const FastPlan& plan, const Matrix& w, const int8_t* q, const float* x_scales, int64_t begin,
                 int64_t end, float* sums) {
  constexpr int64_t kColumns = kTileBytes * D::kPerByte;
  const int64_t row_bytes = w.w.row_bytes, parts = row_bytes / kBytes, rest = row_bytes % kBytes;
  const int64_t tiles = ceil_div(row_bytes, kTileBytes), width = tiles * kColumns;
  int32_t* partial = buffer<int32_t>(Scratch::task_panel, width);
  float* scales = buffer<float>(Scratch::task_scales, width);
  if (partial == nullptr || scales == nullptr) return false;
  memset(sums, 0, static_cast<size_t>(width) * 4);
  for (int64_t block = begin; block < end;) {
    const int64_t block_end = min(end, (block / plan.block + 1) * plan.block);
    FastSums to = {partial, sums, nullptr, x_scales[block / plan.block], 0};
    if (plan.blocked) {
      for (int64_t t = 0; t < tiles; ++t) panel_scales<D>(w, false, block, t, scales + t * kColumns);
      to.scales = scales;
    }
    if (kSeeded<D>) {
      for (int64_t r = block; r < block_end; ++r) to.seed -= D::kOffset * q[r];
    }
    for (int64_t row = block; row < block_end; row += kFastGroup) {
      const int64_t count = min(kFastGroup, block_end - row);
      int8_t group[kFastGroup] = {};  // zeros for the rows that are not there
      memcpy(group, q + row, static_cast<size_t>(count));
      const uint8_t* rows[kFastGroup];
      for (int64_t r = 0; r < kFastGroup; ++r) rows[r] = w.row(row + min(r, count - 1));
      const auto add = [&](int64_t count_of_parts, int64_t ahead, const FastSums& sums_of_parts) {
        const bool last = row + count == block_end;
        auto run = last ? add_fast_rows<D, false, true> : add_fast_rows<D, false, false>;
        if (row == block) run = last ? add_fast_rows<D, true, true> : add_fast_rows<D, true, false>;
        run(rows, count_of_parts, ahead, group, sums_of_parts);
      };
      add(parts, kFastGroup * row_bytes, to);
      if (rest > 0) {
        // The last bytes of the rows, copied where a whole part can be read.
        uint8_t ends[kFastGroup][kBytes] = {};
        for (int64_t r = 0; r < kFastGroup; ++r) {
          memcpy(ends[r], rows[r] + parts * kBytes, static_cast<size_t>(rest));
          rows[r] = ends[r];
        }
        const int64_t at = parts * kBytes * D::kPerByte;
        add(1, 0, {partial + at, sums + at, to.scales == nullptr ? nullptr : scales + at, to.x_scale, to.seed});
      }
    }
    block = block_end;
  }
  return true;
}

template <typename D>
bool fast_first(const Matmul& p, const FastPlan& plan, const Matrix& w, const int8_t* q, const float* x_scales,
                float* y, const Parallel& parallel) {
  constexpr int64_t kPer = D::kPerByte;
  const int64_t width = plan.tiles * plan.columns, unit = plan.blocked ? plan.block : 64;
  const Shares shares(ceil_div(p.k, unit), parallel.threads(), ceil_div(kShareWork, unit * p.n));
  float* sums = buffer<float>(Scratch::call_sums, shares.count * width + p.n);
  if (sums == nullptr) return false;
  bool enough_memory = true;
  parallel.each(shares.count, [&](int64_t t) {
    const int64_t begin = shares.begins[t] * unit, end = min(p.k, shares.begins[t + 1] * unit);
    if (!fast_stream<D>(plan, w, q, x_scales, begin, end, sums + t * width)) {
      __atomic_store_n(&enough_memory, false, __ATOMIC_RELAXED);
    }
  });
  if (!enough_memory) return false;
  float* held = sums + shares.count * width;
  const float* scales = plan.blocked ? nullptr : w.scales(0, 0, p.n, held);
  for (int64_t at = 0; at < width; at += kLanes) {
    F total = load(sums + at);
    for (int64_t t = 1; t < shares.count; ++t) total += load(sums + t * width + at);
    const int64_t column = at / (kLanes * kPer) * (kLanes * kPer) + at / kLanes % kPer;
    for (int64_t i = 0; i < kLanes && column + i * kPer < p.n; ++i) {
      const int64_t n = column + i * kPer;
      y[n] = scales == nullptr ? total[i] : total[i] * scales[n];
    }
  }
  return true;
}

// sum += the products of the codes of kBytes with x, [code of a byte][byte]
template <typename D, int i = 0>
LOWBIT_INLINE void add_chunk(I& sum, Bytes codes, const int8_t* x) {
  if constexpr (i < D::kPerByte) {
    add_code<D, i>(sum, codes, load_as<I>(x + i * kBytes));
    add_chunk<D, i + 1>(sum, codes, x);
  }
}

// y[n] of the stored rows [begin, end); x is in the order of `add_chunk`. `scaled` has room for the scales of a row.
template <typename D>
__attribute__((noinline)) void fast_dots(const FastPlan& plan, const Matrix& w, const int8_t* x, const int32_t* seeds,
                                         const float* x_scales, int64_t begin, int64_t end, float* scaled, float* y) {
  constexpr int64_t kCodes = kBytes * D::kPerByte;
  const int64_t row_bytes = w.w.row_bytes, span = max(w.w.col_span / plan.block, 1);
  for (int64_t row = begin; row < end; ++row) {
    const float* scales = w.scales(row, 0, w.w.scale_cols, scaled + plan.blocks);
    if (span == 1) {
      for (int64_t b = 0; b < plan.blocks; ++b) scaled[b] = x_scales[b] * scales[b];
    } else {
      for (int64_t b = 0; b < plan.blocks; ++b) scaled[b] = x_scales[b] * scales[b / span];
    }
    const uint8_t* bytes = w.row(row);
    const int8_t* from = x;
    int64_t left = row_bytes;
    F total = zero();
    for (int64_t b = 0; b < plan.blocks; ++b) {
      I sum{};
      if (kSeeded<D>) sum[0] = seeds[b];
      for (int64_t c = 0; c < plan.block && left > 0; c += kCodes, left -= kBytes, bytes += kBytes, from += kCodes) {
        prefetch(bytes + kDotAhead);
        if (left >= kBytes) {
          add_chunk<D>(sum, load_as<Bytes>(bytes), from);
        } else {
          Bytes codes{};
          memcpy(&codes, bytes, static_cast<size_t>(left));
          add_chunk<D>(sum, codes, from);
        }
      }
      total = fma(to_float(sum), broadcast(scaled[b]), total);
    }
    y[row] = sum_of(total);
  }
}

template <typename D>
bool fast_last(const Matmul& p, const FastPlan& plan, const Matrix& w, const int8_t* q, const int32_t* seeds,
               const float* x_scales, float* y, const Parallel& parallel) {
  constexpr int64_t kPer = D::kPerByte, kCodes = kBytes * kPer;
  const int64_t padded = round_up(p.k, kCodes);
  int8_t* x = buffer<int8_t>(Scratch::call_sums, padded);
  if (x == nullptr) return false;
  memset(x, 0, static_cast<size_t>(padded));
  for (int64_t k = 0; k < p.k; ++k) x[k / kCodes * kCodes + k % kPer * kBytes + k % kCodes / kPer] = q[k];
  const Shares shares(p.n, parallel.threads(), ceil_div(kShareWork, p.k));
  bool enough_memory = true;
  parallel.each(shares.count, [&](int64_t t) {
    float* scaled = buffer<float>(Scratch::task_scales, plan.blocks + p.w.scale_cols);
    if (scaled == nullptr) return __atomic_store_n(&enough_memory, false, __ATOMIC_RELAXED);
    fast_dots<D>(plan, w, x, seeds, x_scales, shares.begins[t], shares.begins[t + 1], scaled, y);
  });
  return enough_memory;
}

template <typename D>
bool matmul_one_row(const Matmul& p, const FastPlan& plan, const Parallel& parallel) {
  return each_product(p, parallel, [&](int64_t layer, const float* x, float* y, const Parallel& inner) {
    const int64_t padded = plan.slabs * plan.slab;
    float* x_scales = buffer<float>(Scratch::call_pack, plan.blocks * 2 + ceil_div(padded, 4));
    if (x_scales == nullptr) return false;
    int32_t* seeds = reinterpret_cast<int32_t*>(x_scales + plan.blocks);
    int8_t* q = reinterpret_cast<int8_t*>(seeds + plan.blocks);
    quantize_row<D>(plan, x, p.k, 0, 1, q, seeds, x_scales);
    const Matrix w(p.w, layer);
    return p.contract_last ? fast_last<D>(p, plan, w, q, seeds, x_scales, y, inner)
                           : fast_first<D>(p, plan, w, q, x_scales, y, inner);
  });
}

#endif

template <typename D>
bool matmul_fast_as(const Matmul& p, const Parallel& parallel) {
  FastPlan plan;
  if (!make_plan<D>(p, plan)) return false;
#if defined(LOWBIT_AVX512) || defined(LOWBIT_AVX2)
  if (one_row_fits<D>(p, plan)) return matmul_one_row<D>(p, plan, parallel);
#endif
  const int64_t padded = plan.slabs * plan.slab, x_size = p.m * padded / 4 * x_bytes(D::kSmall);
  const int64_t x_scales = plan.blocks * p.m;
  uint8_t* packed = static_cast<uint8_t*>(scratch(Scratch::call_pack, static_cast<size_t>(p.batch * x_size)));
  float* scales = static_cast<float*>(scratch(Scratch::call_sums, static_cast<size_t>(p.batch * x_scales) * 8));
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
  each(p.batch * p.m, p.batch * p.m * p.k < 65536, [&](int64_t row) {
    float* wide = static_cast<float*>(scratch(Scratch::task_panel, static_cast<size_t>(p.k * 4 + padded)));
    if (wide == nullptr) return false;
    const float* x = static_cast<const float*>(p.x) + row * p.k;
    if (p.x_type != Float::f32) {
      to_f32(p.x, p.x_type, row * p.k, p.k, wide);
      x = wide;
    }
    const int64_t b = row / p.m;
    int8_t* q = reinterpret_cast<int8_t*>(wide + p.k);
    quantize_row<D>(plan, x, p.k, row % p.m, p.m, q, seeds + b * x_scales, scales + b * x_scales);
    pack_row<D>(plan, p.contract_last, row % p.m, p.m, q, packed + b * x_size);
    return true;
  });
  // Long runs of memory for few rows; sums that stay in the second cache for many.
  const int64_t fit = max(1, 65536 / (p.m * plan.columns));
  const int64_t run = min(fit, ceil_div(plan.tiles, max(1, parallel.threads() / p.batch)));
  const int64_t runs = ceil_div(plan.tiles, run);
  each(p.batch * runs, p.batch * p.m * p.k * p.n < 300000, [&](int64_t i) {
    const int64_t b = i / runs, begin = i % runs * run, end = min(begin + run, plan.tiles);
    const Matrix w(p.w, min(max(p.index[b], 0), p.w.layers - 1));
    const FastX x{packed + b * x_size, seeds + b * x_scales, scales + b * x_scales};
    return plan.blocked ? fast_tiles<D, true>(p, plan, w, x, b, begin, end)
                        : fast_tiles<D, false>(p, plan, w, x, b, begin, end);
  });
  return enough_memory;
}

template <typename T>
struct PlainType;
template <typename T>
struct PlainType<const T&> {
  using type = T;
};
template <typename T>
using Plain = typename PlainType<T>::type;

inline bool matmul_fast(const Matmul& p, const Parallel& parallel) {
  return with_decoder(p.w.format, [&](const auto& d) {
    return matmul_fast_as<Plain<decltype(d)>>(p, parallel);
  });
}

}  // namespace lowbit::LOWBIT_ISA

#endif  // LOWBIT_MATMUL_FAST_H_
