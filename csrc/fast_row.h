// Products with few rows of x in int8. Weights are hardly reused, so they are decoded in registers, without a panel.
#ifndef LOWBIT_FAST_ROW_H_
#define LOWBIT_FAST_ROW_H_

#include "fast_short.h"

namespace lowbit::LOWBIT_ISA {

#if defined(LOWBIT_DOTS)

// Stored rows that are multiplied at a time: with several rows of x, there are as many more loads and stores of sums.
// With few registers, wide levels need more of them.
template <int kM, typename D>
constexpr int kFastGroup = (kRegisters < 32 ? D::kSmall : kM > 1) ? 16 : 8;
// Half as many if otherwise they, the next ones and the sums would not fit in L1. Longer rows do not fit anyway.
template <int kM, typename D>
constexpr int kShortGroup = kBytes == 64 && D::kPerByte == 1 ? kFastGroup<kM, D> / 2 : kFastGroup<kM, D>;
constexpr int64_t kShortBytes = 4096;
constexpr int kFewVectors = kRegisters < 32 ? 1 : 4;  // vectors of columns whose sums are in registers at a time
// Whether the next group of rows fits in L1, too.
template <int kM, int kRows>
constexpr bool kNextFits = kM == 1 || kRows <= 8;
// Stored rows to prefetch ahead.
template <int kM, int kRows>
constexpr int64_t kRowsAhead = (kNextFits<kM, kRows> ? 1 : 2) * kRows;

// Rows of x against the last axis of bytes, kFewRows at a time: transposing a panel takes longer.
constexpr int kFewTiles = kFewRows > 1 ? 8 : 1;

template <typename D>
bool few_rows_fit(const Matmul& p, const FastTiling& tiling) {
  if (p.m > (p.contract_last && D::kPerByte == 1 ? kFewTiles : 1) * kFewRows) return false;
  return !p.contract_last || !tiling.blocked || tiling.span % (kBytes * D::kPerByte) == 0 || short_spans<D>(tiling);
}

// Some rows of x in int8, and their scales [block][row].
struct FewRows {
  int64_t first, count;
  const int8_t* q;
  int64_t step;  // between rows
  const float* scales;
};

// Where the sums of a block of rows are accumulated, in the order of a panel's columns: in `partial` (m, width). The
// last group of rows adds them to `sums` (m, width), times the scales of the rows of x and, if there are any, those of
// the columns.
struct FastSums {
  int32_t* partial;
  float* sums;
  int64_t width;
  const Matrix* scaled;  // or null if there are no scales of columns
  int64_t row;           // whose scales
  const float* x_scales;
  const int32_t* seeds;
};

// sum += a * xa + b * xb, for levels as bytes: products of small ones are added in 16 bits.
template <typename D>
LOWBIT_INLINE void add_two(I& sum, Bytes a, I xa, Bytes b, I xb) {
#if defined(LOWBIT_AVX2)
  if constexpr (D::kSmall) {
    const Words words = small_dots(a, xa) + small_dots(b, xb);
    add_pair_dots(sum, reinterpret_cast<Bytes>(words), I{} + 0x00010001);
    return;
  }
#endif
  add_dots<D::kSmall>(sum, a, xa);
  add_dots<D::kSmall>(sum, b, xb);
}

template <bool kFirst>
LOWBIT_INLINE I first_sum(const FastSums& to, int m, int64_t at) {
  return kFirst ? splat(to.seeds + m) : load_as<I>(to.partial + at);
}
template <bool kLast>
LOWBIT_INLINE void put_sum(I sum, const FastSums& to, const float* scales, int m, int64_t at) {
  if (!kLast) return store_as(to.partial + at, sum);
  F scale = broadcast(to.x_scales[m]);
  if (to.scaled != nullptr) scale *= load(scales);
  store(to.sums + at, fma(to_float(sum), scale, load(to.sums + at)));
}

// The i-th and later codes of the stored rows, kFewVectors times kBytes of each four, times q (kM, rows): added to the
// sums. Loops that the compiler unrolls: functions for each pair of a row and a vector take sanitizers ten minutes.
template <int kM, int kRows, bool kFirst, bool kLast, int i = 0, typename D>
LOWBIT_INLINE void add_codes(const D& decoder, const Bytes* codes, const int8_t* q, const FastSums& to,
                             const float* scales, int64_t at) {
  if constexpr (i < D::kPerByte) {
    constexpr int kStep = kLanes * D::kPerByte;
    I sums[kM][kFewVectors];
    for (int m = 0; m < kM; ++m) {
      for (int v = 0; v < kFewVectors; ++v) sums[m][v] = first_sum<kFirst>(to, m, at + m * to.width + v * kStep);
    }
    for (int r = 0; kRows == 4 && r < kRows; r += 4) {
      for (int v = 0; v < kFewVectors; ++v) {
        const Bytes a = level_bytes<i>(decoder, codes[r + v]);
        for (int m = 0; m < kM; ++m) add_dots<D::kSmall>(sums[m][v], a, splat(q + m * kRows + r));
      }
    }
    for (int r = 0; kRows > 4 && r < kRows; r += 8) {
      Bytes a[kFewVectors], b[kFewVectors];
      for (int v = 0; v < kFewVectors; ++v) {
        a[v] = level_bytes<i>(decoder, codes[r + v]);
        b[v] = level_bytes<i>(decoder, codes[r + 4 + v]);
      }
      for (int m = 0; m < kM; ++m) {
        const I xa = splat(q + m * kRows + r), xb = splat(q + m * kRows + r + 4);
        for (int v = 0; v < kFewVectors; ++v) add_two<D>(sums[m][v], a[v], xa, b[v], xb);
      }
    }
    for (int m = 0; m < kM; ++m) {
      for (int v = 0; v < kFewVectors; ++v)
        put_sum<kLast>(sums[m][v], to, scales + v * kStep, m, at + m * to.width + v * kStep);
    }
    add_codes<kM, kRows, kFirst, kLast, i + 1>(decoder, codes, q, to, scales + kLanes, at + kLanes);
  }
}

// Adds the stored rows times q (kM, rows), kBytes of each row at a time, from byte `begin` of the rows on. The last
// rows may be repeated, with q = 0.
template <int kM, int kRows, bool kFirst, bool kLast, typename D>
__attribute__((noinline)) void add_fast_rows(const D& shared, const uint8_t* const rows[], int64_t begin, int64_t parts,
                                             const uint8_t* next, const int8_t* from, const FastSums& where) {
  const D decoder = shared;
  const FastSums to = where;  // copies that the stores cannot alias
  int8_t q[kM * kRows];
  memcpy(q, from, sizeof(q));
  alignas(64) float scales[kTileBytes * D::kPerByte];
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t byte = part * kBytes, in_row = begin + byte, in_tile = in_row % kTileBytes, at = in_row * D::kPerByte;
    // A later group, in the order of its addresses: memory is fastest so. With sums of several rows of x, groups of
    // whole bytes are too large for L1.
    for (int r = 0; byte % 64 == 0 && r < kRows; ++r) {
      const uint8_t* line = next + byte * kRows + 64 * r;
      if constexpr (kNextFits<kM, kRows> || D::kPerByte > 1) {
        prefetch(line);
      } else {
        prefetch_far(line);
      }
    }
    // Scales are decoded while memory is read.
    if (kLast && to.scaled != nullptr && (part == 0 || in_tile == 0)) {
      panel_scales<D>(*to.scaled, to.row, in_row / kTileBytes, scales);
    }
    Bytes codes[kRows];
    for (int r = 0; r < kRows; ++r) codes[r] = load_as<Bytes>(rows[r] + byte);
    for (int r = 0; r < kRows; r += 4) interleave_rows<0, 4>(codes + r, codes + r);
    for (int v = 0; v < 4; v += kFewVectors) {
      const int64_t column = v * kLanes * D::kPerByte;
      add_codes<kM, kRows, kFirst, kLast>(decoder, codes + v, q, to, scales + in_tile * D::kPerByte + column,
                                          at + column);
    }
  }
}

// A group of stored rows, and x for them.
template <int kM, int kRows, typename D>
struct FastRows {
  const uint8_t* rows[kRows];
  int8_t q[kM][kRows] = {};  // zeros for missing rows

  FastRows(const FewRows& x, int64_t row, int64_t count, const uint8_t* first, int64_t row_bytes) {
    for (int m = 0; m < kM; ++m) memcpy(q[m], x.q + m * x.step + row, static_cast<size_t>(count));
    for (int64_t r = 0; r < kRows; ++r) rows[r] = first + min(r, count - 1) * row_bytes;
  }

  // `may_read`: bytes past the end of the rows can be read, since other rows follow.
  void add(const D& decoder, int64_t bytes, bool may_read, bool first, bool last, const FastSums& to) {
    auto run = last ? add_fast_rows<kM, kRows, false, true, D> : add_fast_rows<kM, kRows, false, false, D>;
    if (first) run = last ? add_fast_rows<kM, kRows, true, true, D> : add_fast_rows<kM, kRows, true, false, D>;
    const int64_t parts = (may_read ? bytes + kBytes - 1 : bytes) / kBytes, rest = bytes - parts * kBytes;
    run(decoder, rows, 0, parts, rows[0] + kRowsAhead<kM, kRows> * bytes, q[0], to);
    if (rest <= 0) return;
    // The last bytes of the rows, copied so that kBytes can be read.
    uint8_t ends[kRows][kBytes] = {};
    for (int64_t r = 0; r < kRows; ++r) {
      memcpy(ends[r], rows[r] + parts * kBytes, static_cast<size_t>(rest));
      rows[r] = ends[r];
    }
    run(decoder, rows, parts * kBytes, 1, rows[0], q[0], to);
  }
};

// sums (kM, width) = x times the stored rows [begin, end)
template <int kM, int kRows, typename D>
bool fast_stream(const D& decoder, const FastTiling& tiling, const Matrix& w, const FewRows& x, int64_t begin,
                 int64_t end, float* sums) {
  const int64_t row_bytes = w.w.row_bytes, width = sums_width(kM, round_up(row_bytes, kTileBytes) * D::kPerByte);
  int32_t* partial = buffer<int32_t>(Scratch::task_panel, kM * width);
  uint8_t* codes = buffer<uint8_t>(Scratch::task_codes, w.joined() ? kRows * row_bytes : 1);
  if (partial == nullptr || codes == nullptr) return false;
  memset(sums, 0, static_cast<size_t>(kM * width) * 4);
  for (int64_t block = begin; block < end;) {
    const int64_t block_end = min(end, (block / tiling.span + 1) * tiling.span);
    int32_t seeds[kM] = {};
    const FastSums to = {
        partial, sums, width, tiling.blocked ? &w : nullptr, block, x.scales + block / tiling.block * kM, seeds};
    for (int m = 0; kSeeded<D> && m < kM; ++m) {
      for (int64_t r = block; r < block_end; ++r) seeds[m] -= decoder.offset() * x.q[m * x.step + r];
    }
    for (int64_t row = block; row < block_end; row += kRows) {
      const int64_t count = min(kRows, block_end - row), after = row + count;
      if (tiling.blocked) w.prefetch_scales(block / w.w.row_span + 1, row - block, after - block, w.w.row_span);
      FastRows<kM, kRows, D> rows(x, row, count, w.rows<D>(row, count, codes), row_bytes);
      // kBytes from the last byte of a row on are in the rows that follow.
      const bool may_read = !w.joined() && (w.w.rows - after) * row_bytes >= kBytes;
      rows.add(decoder, row_bytes, may_read, row == block, after == block_end, to);
    }
    block = block_end;
  }
  return true;
}

template <typename D>
bool fast_first(const D& decoder, const Matmul& p, const FastTiling& tiling, const Matrix& w, const FewRows& x,
                float* y, const Parallel& parallel) {
  const int64_t width = sums_width(p.m, tiling.tiles * tiling.columns), size = p.m * width,
                unit = tiling.blocked ? tiling.span : 64;
  const Shares shares(ceil_div(p.k, unit), parallel.threads(), ceil_div(kShareWork, unit * p.n));
  float* sums = buffer<float>(Scratch::call_sums, (shares.count + 1) * size + p.n);
  if (sums == nullptr) return false;
  bool enough_memory = true;
  parallel.each(shares.count, [&](int64_t t) {
    const int64_t begin = shares.begins[t] * unit, end = min(p.k, shares.begins[t + 1] * unit);
    with_constant<kFewRows>(p.m, [&](auto m) {
      const auto run = w.w.row_bytes <= kShortBytes ? fast_stream<m.value, kShortGroup<m.value, D>, D>
                                                    : fast_stream<m.value, kFastGroup<m.value, D>, D>;
      if (run(decoder, tiling, w, x, begin, end, sums + t * size)) return;
      __atomic_store_n(&enough_memory, false, __ATOMIC_RELAXED);
    });
  });
  if (!enough_memory) return false;
  float* held = sums + (shares.count + 1) * size;
  const float* scales = tiling.blocked ? nullptr : w.scales(0, 0, p.n, held);
  if (tiling.blocked && scales_later<D>(w, false)) {
    w.factors(false, 0, p.n, held);
    scales = held;
  }
  const auto add = [&](int64_t m) {
    float *row = sums + m * width, *ordered = row + shares.count * size;
    for (int64_t t = 1; t < shares.count; ++t) {
      for (int64_t at = 0; at < width; at += kLanes) store(row + at, load(row + at) + load(row + t * size + at));
    }
    in_column_order<D>(row, tiling.tiles * tiling.columns, ordered);
    for (int64_t n = 0; n < p.n; ++n) y[m * p.n + n] = scales == nullptr ? ordered[n] : ordered[n] * scales[n];
  };
  if (size * shares.count < kShareWork) {
    for (int64_t m = 0; m < p.m; ++m) add(m);
  } else {
    parallel.each(p.m, add);
  }
  return true;
}

// y[m * step + row] for the stored rows [begin, end). `held` is a buffer for scales, `joined` one for joined codes.
template <int kM, typename D>
__attribute__((noinline)) void fast_dots(const D& shared, const FastTiling& tiling, const Matrix& w, const DotX& rows,
                                         int64_t begin, int64_t end, float* held, uint8_t* joined, float* y,
                                         int64_t step) {
  const D decoder = shared;
  const DotX x = rows;  // copies that the stores cannot alias
  constexpr int64_t kCodes = kBytes * D::kPerByte;
  const int64_t columns = w.w.columns, span = tiling.span, per_scale = tiling.scale_spans;
  const int64_t width = tiling.blocked ? part_columns(columns, span, kM * columns) : columns;
  RowScales of_rows(w, held);
  PartSums<kM, 1> sums;
  each_part<1, D>(w, begin, end, width, &of_rows, joined, [&](const Part<1>& part) LOWBIT_INLINE_LAMBDA {
    const uint8_t *bytes = part.bytes[0], *ahead = part.ahead[0];
    const int8_t* q = x.q + part.column * kM;
    const float* scale = of_rows.of(part.row) + part.column / w.w.col_span;
    int64_t at = part.column / span, in_scale = at % per_scale;
    F totals[1][kM];
    sums.load_to(totals, part);
    for (int64_t left = ceil_div(part.columns, D::kPerByte); left > 0; ++at) {
      // Two sums of each row of x, so that additions need not wait for each other.
      I sum[kM] = {}, other[kM] = {};
      for (int m = 0; kSeeded<D> && m < kM; ++m) sum[m] = load_as<I>(x.seeds + (at * kM + m) * kLanes);
      int64_t c = 0;
      for (; c + 2 * kCodes <= span && left >= 2 * kBytes; c += 2 * kCodes, left -= 2 * kBytes) {
        for (int i = 0; i < 2 * kBytes; i += 64) prefetch(ahead + i);
        add_dots_of(decoder, sum, load_as<Bytes>(bytes), q);
        add_dots_of(decoder, other, load_as<Bytes>(bytes + kBytes), q + kM * kCodes);
        bytes += 2 * kBytes;
        ahead += 2 * kBytes;
        q += 2 * kM * kCodes;
      }
      for (; c < span && left > 0; c += kCodes, left -= kBytes) {
        prefetch(ahead);
        if (left >= kBytes) {
          add_dots_of(decoder, sum, load_as<Bytes>(bytes), q);
        } else {
          Bytes codes{};
          memcpy(&codes, bytes, static_cast<size_t>(left));
          add_dots_of(decoder, sum, codes, q);
        }
        bytes += kBytes;
        ahead += kBytes;
        q += kM * kCodes;
      }
      for (int m = 0; m < kM; ++m) sum[m] += other[m];
      for (int m = 0; m < kM; ++m) {
        totals[0][m] = fma(to_float(sum[m]), broadcast(x.scales[at * kM + m] * *scale), totals[0][m]);
      }
      if (++in_scale == per_scale) {
        in_scale = 0;
        ++scale;
      }
    }
    sums.put(totals, part, [&](int64_t row) { return of_rows.factor(row); }, y, step);
  });
}

template <typename D>
bool fast_last(const D& decoder, const Matmul& p, const FastTiling& tiling, const Matrix& w, const FewRows* x,
               int64_t tiles, float* y, const Parallel& parallel) {
  constexpr int64_t kPer = D::kPerByte, kCodes = kBytes * kPer;
  const int64_t padded = round_up(p.k, kCodes), lanes = padded / (4 * kPer), spread = 2 * lanes;
  float* packed = buffer<float>(Scratch::call_sums, p.m * (spread + padded / 4));
  if (packed == nullptr) return false;
  DotX dots[kFewTiles];
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const FewRows& rows = x[tile];
    float* for_spans = packed + rows.first * (spread + padded / 4);
    int8_t* q = reinterpret_cast<int8_t*>(for_spans + rows.count * spread);
    for (int64_t m = 0; m < rows.count; ++m) {
      for (int64_t k = 0; k < padded; k += kCodes) {
        int8_t part[kCodes] = {};
        memcpy(part, rows.q + m * rows.step + k, static_cast<size_t>(min(kCodes, p.k - k)));
        int8_t* to = q + k * rows.count + m * kCodes;
        for (int i = 0; i < kPer; ++i) {
          for (int b = 0; b < kBytes; ++b) to[i * kBytes + b] = part[b * kPer + i];
        }
      }
    }
    dots[tile] = spread_x(decoder, tiling, q, rows.scales, rows.count, lanes, for_spans);
  }
  const Shares shares(p.n, parallel.threads(), ceil_div(kShareWork, p.m * p.k));
  bool enough_memory = true;
  parallel.each(shares.count, [&](int64_t t) {
    float* held = buffer<float>(Scratch::task_scales, RowScales::buffer_size(p.w));
    uint8_t* joined = buffer<uint8_t>(Scratch::task_codes, w.joined() ? p.k : 1);
    if (held == nullptr || joined == nullptr) return __atomic_store_n(&enough_memory, false, __ATOMIC_RELAXED);
    const int64_t share_end = shares.begins[t + 1], again = tiles == 1 ? share_end : kDotAgain;
    for (int64_t n = shares.begins[t], end; n < share_end; n = end) {
      end = min(n + again, share_end);
      for (int64_t tile = 0; tile < tiles; ++tile) {
        with_constant<kFewRows>(x[tile].count, [&](auto m) {
          const auto run = short_spans<D>(tiling) ? short_dots<m.value, D> : fast_dots<m.value, D>;
          run(decoder, tiling, w, dots[tile], n, end, held, joined, y + x[tile].first * p.n, p.n);
        });
      }
    }
  });
  return enough_memory;
}

template <typename D>
bool matmul_few_rows(const D& decoder, const Matmul& p, const FastTiling& tiling, const Parallel& parallel) {
  return each_product(p, parallel, [&](int64_t layer, const float* x, float* y, const Parallel& inner) {
    const int64_t padded = tiling.slabs * tiling.slab, blocks = p.m * tiling.blocks, spans = p.m * tiling.spans;
    float* scales = buffer<float>(Scratch::call_pack, blocks + spans + ceil_div(p.m * padded, 4));
    if (scales == nullptr) return false;
    int32_t* seeds = reinterpret_cast<int32_t*>(scales + blocks);
    int8_t* q = reinterpret_cast<int8_t*>(seeds + spans);
    const int64_t tiles = ceil_div(p.m, kFewRows);
    FewRows rows[kFewTiles];
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t first = p.m * tile / tiles, count = p.m * (tile + 1) / tiles - first;
      int32_t* of_spans = seeds + first * tiling.spans;
      float* of_blocks = scales + first * tiling.blocks;
      rows[tile] = {first, count, q + first * padded, padded, of_blocks};
      for (int64_t m = 0; m < count; ++m) {
        int8_t* to = q + (first + m) * padded;
        quantize_row(decoder, tiling, x + (first + m) * p.k, p.k, m, count, to, of_spans, of_blocks);
      }
    }
    const Matrix w(p.w, layer);
    return p.contract_last ? fast_last(decoder, p, tiling, w, rows, tiles, y, inner)
                           : fast_first(decoder, p, tiling, w, rows[0], y, inner);
  });
}

#endif

}  // namespace lowbit::LOWBIT_ISA

#endif  // LOWBIT_FAST_ROW_H_
