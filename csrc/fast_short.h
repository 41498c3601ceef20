// Products with few rows of x in int8 that contract the last stored axis, with spans shorter than a vector: each lane
// belongs to one span, so a vector of integer sums is scaled by a vector of scales.
#ifndef LOWBIT_FAST_SHORT_H_
#define LOWBIT_FAST_SHORT_H_

#include "dot_parts.h"
#include "fast_pack.h"

namespace lowbit::LOWBIT_ISA {

#if defined(LOWBIT_DOTS)

// Lane i of the result is lane order[i] of a.
LOWBIT_INLINE F reordered(F a, I order) {
#if defined(LOWBIT_AVX512)
  return permute(a, reinterpret_cast<__m512i>(order));
#elif defined(LOWBIT_AVX2)
  return permute(a, reinterpret_cast<__m256i>(order));
#else
  F b{};
  for (int i = 0; i < kLanes; ++i) b[i] = a[order[i]];
  return b;
#endif
}

// The lanes that a span takes; a lane is the codes of four bytes.
template <typename D>
constexpr int64_t lanes_of(const FastTiling& tiling) {
  return tiling.span / (4 * D::kPerByte);
}

template <typename D>
bool short_spans(const FastTiling& tiling) {
  const int64_t lanes = lanes_of<D>(tiling);
  return tiling.blocked && tiling.span % (4 * D::kPerByte) == 0 && lanes < kLanes && kLanes % lanes == 0;
}

// Whether levels include their offset in the products; then sums start at minus its contribution.
template <typename D>
constexpr bool kSeeded = D::kSmall || !kSignedDots;

// The levels of the i-th codes as bytes.
template <int i, typename D>
LOWBIT_INLINE Bytes level_bytes(const D& decoder, Bytes codes) {
  if constexpr (kSeeded<D>) {
    return decoder.template bytes<i>(codes);
  } else {
    return decoder.template signed_bytes<i>(codes);
  }
}

// Some rows of x in int8: [kBytes of a stored row][row][code of a byte][byte]. Seeds are [span][row][lane] and scales
// [span][row], or both [kBytes of a stored row][row][lane] if spans are short. A lane's seed is for its own codes:
// floats would round the offsets that cancel between lanes.
struct DotX {
  const int8_t* q;
  const int32_t* seeds;
  const float* scales;
};

// Makes seeds of the packed q, and spreads the scales of blocks, in a buffer of 2 * rows * lanes floats.
template <typename D>
DotX spread_x(const D& decoder, const FastTiling& tiling, const int8_t* q, const float* scales, int64_t rows,
              int64_t lanes, float* to) {
  const bool is_short = short_spans<D>(tiling);
  const int64_t per_block = tiling.block / tiling.span, vectors = lanes / kLanes, per_span = lanes_of<D>(tiling);
  int32_t* seeds = reinterpret_cast<int32_t*>(to + rows * lanes);
  memset(to, 0, static_cast<size_t>(rows * lanes) * 8);
  const Bytes offsets = Bytes{} + static_cast<uint8_t>(decoder.offset());
  for (int64_t v = 0; kSeeded<D> && v < vectors; ++v) {
    for (int64_t m = 0; m < rows; ++m) {
      const int8_t* from = q + (v * rows + m) * kBytes * D::kPerByte;
      int32_t* of_lanes = seeds + ((is_short ? v : v * kLanes / per_span) * rows + m) * kLanes;
      I sum{};
      for (int i = 0; i < D::kPerByte; ++i) add_dots<D::kSmall>(sum, offsets, load_as<I>(from + i * kBytes));
      store_as(of_lanes, load_as<I>(of_lanes) - sum);
    }
  }
  for (int64_t b = 0; b < tiling.spans; ++b) {
    for (int64_t m = 0; m < rows; ++m) {
      const float scale = scales[b / per_block * rows + m];
      if (!is_short) to[b * rows + m] = scale;
      for (int64_t i = b * per_span; is_short && i < min((b + 1) * per_span, lanes); ++i) {
        to[(i / kLanes * rows + m) * kLanes + i % kLanes] = scale;
      }
    }
  }
  return {q, seeds, to};
}

// sum[m] += the codes of kBytes times x
template <int i = 0, int kM, typename D>
LOWBIT_INLINE void add_dots_of(const D& decoder, I (&sum)[kM], Bytes codes, const int8_t* x) {
  if constexpr (i < D::kPerByte) {
    const Bytes levels = level_bytes<i>(decoder, codes);
    for (int m = 0; m < kM; ++m) {
      add_dots<D::kSmall>(sum[m], levels, load_as<I>(x + (m * D::kPerByte + i) * kBytes));
    }
    add_dots_of<i + 1>(decoder, sum, codes, x);
  }
}

// y[m * step + row] for the stored rows [begin, end). `held` is a buffer for scales, `joined` one for joined codes.
template <int kM, typename D>
__attribute__((noinline)) void short_dots(const D& shared, const FastTiling& tiling, const Matrix& w, const DotX& rows,
                                          int64_t begin, int64_t end, float* held, uint8_t* joined, float* y,
                                          int64_t step) {
  const D decoder = shared;
  const DotX x = rows;  // copies that the stores cannot alias
  constexpr int64_t kCodes = kBytes * D::kPerByte;
  const int64_t columns = w.w.columns, per_span = lanes_of<D>(tiling), spans = kLanes / per_span;
  I order;
  for (int i = 0; i < kLanes; ++i) order[i] = static_cast<int32_t>(i / per_span);
  // x is zero past the end of a row, so what follows the row in memory may be read with it.
  const uint8_t* readable = w.joined() ? nullptr : w.codes + w.w.rows * w.w.row_bytes - kBytes;
  // For each dword of codes, x has a seed and a scale.
  const int64_t width = part_columns(columns, kCodes, kM * (columns + 2 * columns / D::kPerByte));
  RowScales row_scales(w, held);
  PartSums<kM, 1> sums;
  each_part<1, D>(w, begin, end, width, &row_scales, joined, [&](const Part<1>& part) LOWBIT_INLINE_LAMBDA {
    const uint8_t *bytes = part.bytes[0], *ahead = part.ahead[0];
    int64_t vector = part.column / kCodes, stored = w.w.scale_cols - vector * spans;
    const float* scales = row_scales.of(part.row) + vector * spans;
    F totals[1][kM];
    sums.load_to(totals, part);
    F(&total)[kM] = totals[0];
    for (int64_t left = ceil_div(part.columns, D::kPerByte); left > 0; left -= kBytes, ++vector) {
      prefetch(ahead);
      I sum[kM] = {};
      for (int m = 0; kSeeded<D> && m < kM; ++m) sum[m] = load_as<I>(x.seeds + (vector * kM + m) * kLanes);
      if (left >= kBytes || bytes <= readable) {
        add_dots_of(decoder, sum, load_as<Bytes>(bytes), x.q + vector * kM * kCodes);
      } else {
        Bytes codes{};
        memcpy(&codes, bytes, static_cast<size_t>(left));
        add_dots_of(decoder, sum, codes, x.q + vector * kM * kCodes);
      }
      const F some = reordered(stored >= kLanes ? load(scales) : load(scales, stored), order);
      for (int m = 0; m < kM; ++m) {
        total[m] = fma(to_float(sum[m]), some * load(x.scales + (vector * kM + m) * kLanes), total[m]);
      }
      bytes += kBytes;
      ahead += kBytes;
      scales += spans;
      stored -= spans;
    }
    sums.put(totals, part, [&](int64_t row) { return row_scales.factor(row); }, y, step);
  });
}

#endif

}  // namespace lowbit::LOWBIT_ISA

#endif  // LOWBIT_FAST_SHORT_H_
