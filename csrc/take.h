// Rows of the stored matrix by their numbers: y[t, c] = level[code(ids[t], c)] * scale, rounded once.
#ifndef LOWBIT_TAKE_H_
#define LOWBIT_TAKE_H_

#include "decode.h"

namespace lowbit::LOWBIT_ISA {

// out[i] = in[i / span], span at least 1, `count` of them
inline void repeat(const float* in, int64_t span, int64_t count, float* out) {
  for (int64_t begin = 0; begin < count; begin += span, ++in) {
    const int64_t end = min(begin + span, count);
    for (int64_t i = begin; i < end; ++i) out[i] = *in;
  }
}

template <typename D>
void take_row(const D& decoder, const Matrix& w, int64_t row, float* factors, float* line, const Take& p, int64_t t) {
  const int64_t columns = w.w.columns, span = w.w.col_span;
  // Stored scales behind the place for those of each column.
  const float* scales = w.scales(row / w.w.row_span, 0, w.w.scale_cols, factors + columns);
  if (span > 1) {
    repeat(scales, span, columns, factors);
    scales = factors;
  }
  const uint8_t* bytes = w.row(row);
  const bool direct = p.y_type == Float::f32;
  float* y = direct ? static_cast<float*>(p.y) + t * columns : line;
  for (int64_t c = 0; c < columns; c += kLine) {
    const int64_t count = min(kLine, columns - c);
    F v[kVectors];
    alignas(64) uint8_t end[kLine] = {};
    const uint8_t* from = bytes + c / D::kPerByte;
    if (count < kLine) {
      memcpy(end, from, static_cast<size_t>(ceil_div(count, D::kPerByte)));
      from = end;
    }
    decoder.decode(from, v);
    for (int i = 0; i < kVectors && i * kLanes < count; ++i) {
      const int64_t lanes = min(kLanes, count - i * kLanes), at = c + i * kLanes;
      if (lanes == kLanes) {
        store(y + at, D::order(v[i]) * load(scales + at));
      } else {
        store(y + at, D::order(v[i]) * load(scales + at, lanes), lanes);
      }
    }
  }
  if (!direct) from_f32(line, columns, p.y, p.y_type, t * columns);
}

inline bool take(const Take& p, const Parallel& parallel) {
  const Matrix w(p.w, p.layer);
  const int64_t columns = p.w.columns, group = max(1, 32768 / columns);
  bool enough_memory = true;
  parallel.each(ceil_div(p.count, group), [&](int64_t task) {
    const int64_t size = 2 * columns + p.w.scale_cols;
    float* factors = static_cast<float*>(scratch(Scratch::task_scales, static_cast<size_t>(size) * 4));
    if (factors == nullptr) return __atomic_store_n(&enough_memory, false, __ATOMIC_RELAXED);
    with_decoder(p.w.format, [&](const auto& decoder) {
      for (int64_t t = task * group; t < min((task + 1) * group, p.count); ++t) {
        const int64_t row = min(max(p.ids[t], 0), p.w.rows - 1);
        take_row(decoder, w, row, factors, factors + columns + p.w.scale_cols, p, t);
      }
    });
  });
  return enough_memory;
}

}  // namespace lowbit::LOWBIT_ISA

#endif  // LOWBIT_TAKE_H_
