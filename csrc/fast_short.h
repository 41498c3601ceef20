// Products with one row of x in int8 that contract the last stored axis, with spans shorter than a vector: each lane
// belongs to one span, so a vector of integer sums is scaled by a vector of scales.
#ifndef LOWBIT_FAST_SHORT_H_
#define LOWBIT_FAST_SHORT_H_

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

// The row of x, [code of a byte][byte] for each kBytes of a stored row; its seeds and scales for each lane.
struct ShortX {
  const int8_t* q;
  const int32_t* seeds;
  const float* scales;
};

// Spreads the seeds of the spans of x and the scales of its blocks over `lanes` lanes, in a buffer of twice as many
// floats.
template <typename D>
ShortX short_x(const FastTiling& tiling, const int8_t* q, int64_t lanes, const int32_t* seeds, const float* scales,
               float* to) {
  const int64_t per_span = lanes_of<D>(tiling), shared = tiling.block / tiling.span;
  int32_t* lane_seeds = reinterpret_cast<int32_t*>(to + lanes);
  memset(to, 0, static_cast<size_t>(lanes) * 8);
  for (int64_t b = 0; b < tiling.spans; ++b) {
    lane_seeds[b * per_span] = seeds[b];
    for (int64_t i = b * per_span; i < min((b + 1) * per_span, lanes); ++i) to[i] = scales[b / shared];
  }
  return {q, lane_seeds, to};
}

// sum += the codes of kBytes times x
template <bool kSeededDots, int i = 0, typename D>
LOWBIT_INLINE void add_short(const D& decoder, I& sum, Bytes codes, const int8_t* x) {
  if constexpr (i < D::kPerByte) {
    const I operand = load_as<I>(x + i * kBytes);
    if constexpr (kSeededDots) {
      add_dots<D::kSmall>(sum, decoder.template bytes<i>(codes), operand);
    } else {
      add_dots<D::kSmall>(sum, decoder.template signed_bytes<i>(codes), operand);
    }
    add_short<kSeededDots, i + 1>(decoder, sum, codes, x);
  }
}

// y[n] for the stored rows [begin, end). `held` is a buffer for scales, `joined` one for its joined codes.
template <typename D>
__attribute__((noinline)) void short_dots(const D& shared, const FastTiling& tiling, const Matrix& w, const ShortX& x,
                                          int64_t begin, int64_t end, float* held, uint8_t* joined, float* y) {
  const D decoder = shared;
  constexpr bool kSeededDots = D::kSmall || !kSignedDots;
  constexpr int64_t kCodes = kBytes * D::kPerByte;
  const int64_t row_bytes = w.w.row_bytes, per_span = lanes_of<D>(tiling), spans = kLanes / per_span;
  I order;
  for (int i = 0; i < kLanes; ++i) order[i] = static_cast<int32_t>(i / per_span);
  // x is zero past the end of a row, so what follows the row in memory may be read with it.
  const uint8_t* last = w.joined() ? nullptr : w.codes + w.w.rows * row_bytes - kBytes;
  RowScales row_scales(w, begin, end, held);
  for (int64_t row = begin; row < end; ++row) {
    const float* scales = row_scales.of(row);
    const uint8_t* bytes = w.rows<D>(row, 1, joined);
    F total = zero();
    int64_t span = 0, lane = 0;
    for (int64_t left = row_bytes; left > 0; left -= kBytes, bytes += kBytes, span += spans, lane += kLanes) {
      prefetch(bytes + kDotAhead);
      I sum = kSeededDots ? load_as<I>(x.seeds + lane) : I{};
      if (left >= kBytes || bytes <= last) {
        add_short<kSeededDots>(decoder, sum, load_as<Bytes>(bytes), x.q + lane / kLanes * kCodes);
      } else {
        Bytes codes{};
        memcpy(&codes, bytes, static_cast<size_t>(left));
        add_short<kSeededDots>(decoder, sum, codes, x.q + lane / kLanes * kCodes);
      }
      const int64_t stored = w.w.scale_cols - span;
      const F some = stored >= kLanes ? load(scales + span) : load(scales + span, stored);
      const F scale = reordered(some, order) * load(x.scales + lane);
      total = fma(to_float(sum), scale, total);
    }
    y[row] = sum_of(total) * row_scales.factor(row);
  }
}

#endif

}  // namespace lowbit::LOWBIT_ISA

#endif  // LOWBIT_FAST_SHORT_H_
