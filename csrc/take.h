// Decoding rows of a stored matrix: lookups by row index, y[t, c] = level[code(ids[t], c)] * scale, rounded once; and
// the squared error of each row against the dense one.
#ifndef LOWBIT_TAKE_H_
#define LOWBIT_TAKE_H_

#include "matrix.h"

namespace lowbit::LOWBIT_ISA {

// out[i] = in[i / span] for i < count; span >= 1
inline void repeat(const float* in, int64_t span, int64_t count, float* out) {
  for (int64_t begin = 0; begin < count; begin += span, ++in) {
    const int64_t end = min(begin + span, count);
    for (int64_t i = begin; i < end; ++i) out[i] = *in;
  }
}

// Calls use(column, values, count) for a row, kLanes columns at a time; values after `count` are zero. `factors` is a
// buffer for the scale of each column, followed by the stored scales of the row.
template <typename D, typename Use>
LOWBIT_INLINE void decode_row(const D& decoder, const Matrix& w, int64_t row, float* factors, const Use& use) {
  const int64_t columns = w.w.columns, span = w.w.col_span;
  const float* scales = w.scales(row / w.w.row_span, 0, w.w.scale_cols, factors + max(columns, kLanes));
  const bool shared = span % kLine == 0 || span >= columns;  // by all columns of a line
  if (span > 1 && !shared) {
    repeat(scales, span, columns, factors);
    scales = factors;
  }
  for (int64_t c = 0; c < columns; c += kLine) {
    const int64_t count = min(kLine, columns - c);
    F v[kVectors];
    alignas(64) uint8_t end[kLine] = {};
    const uint8_t* from = w.bytes<D>(row, c / D::kPerByte, count, end);
    if (count < kLine && from != end) {
      memcpy(end, from, static_cast<size_t>(ceil_div(count, D::kPerByte)));
      from = end;
    }
    decoder.decode(from, v);
    for (int i = 0; i < kVectors; i += 2) D::order(v + i);
    if (shared && (c == 0 || c % span == 0)) {
      for (int i = 0; i < kLanes; ++i) factors[i] = scales[c / span];
    }
    for (int i = 0; i < kVectors && i * kLanes < count; ++i) {
      const int64_t lanes = min(kLanes, count - i * kLanes), at = c + i * kLanes;
      const float* scale = shared ? factors : scales + at;
      if (lanes == kLanes) {
        use(at, v[i] * load(scale), kLanes);
      } else {
        use(at, v[i] * load(scale, lanes), lanes);
      }
    }
  }
}

inline bool take(const Take& p, const Parallel& parallel) {
  const Matrix w(p.w, 0);
  const int64_t columns = p.w.columns, group = max(1, 32768 / columns);
  bool enough_memory = true;
  parallel.each(ceil_div(p.count, group), [&](int64_t task) {
    const int64_t size = columns + max(columns, kLanes) + p.w.scale_cols;
    float* line = static_cast<float*>(scratch(Scratch::task_scales, static_cast<size_t>(size) * 4));
    if (line == nullptr) return __atomic_store_n(&enough_memory, false, __ATOMIC_RELAXED);
    with_decoder(p.w, [&](const auto& decoder) {
      for (int64_t t = task * group; t < min((task + 1) * group, p.count); ++t) {
        const int64_t row = min(max(p.ids[t], 0), p.w.rows - 1);
        const bool direct = p.y_type == Float::f32;
        float* y = direct ? static_cast<float*>(p.y) + t * columns : line;
        decode_row(decoder, w, row, line + columns, [y](int64_t at, F v, int64_t lanes) {
          lanes == kLanes ? store(y + at, v) : store(y + at, v, lanes);
        });
        if (!direct) from_f32(line, columns, p.y, p.y_type, t * columns);
      }
    });
  });
  return enough_memory;
}

template <typename D>
void squares_of_row(const D& decoder, const Matrix& w, int64_t row, float* factors, const float* x, float* lost,
                    float* size) {
  constexpr int64_t kRun = 4096;  // columns summed in float; sums of runs are added in double
  double all_lost = 0, all_size = 0;
  F some_lost{}, some_size{};
  decode_row(decoder, w, row, factors, [&](int64_t at, F v, int64_t lanes) {
    const F was = lanes == kLanes ? load(x + at) : load(x + at, lanes);
    some_lost += (v - was) * (v - was);
    some_size += was * was;
    if ((at + kLanes) % kRun == 0) {
      all_lost += sum_of(some_lost);
      all_size += sum_of(some_size);
      some_lost = some_size = F{};
    }
  });
  *lost = static_cast<float>(all_lost + sum_of(some_lost));
  *size = static_cast<float>(all_size + sum_of(some_size));
}

inline bool squares(const Squares& p, const Parallel& parallel) {
  const int64_t columns = p.w.columns, rows = p.w.layers * p.w.rows, group = max(1, 32768 / max(columns, 1));
  bool enough_memory = true;
  parallel.each(ceil_div(rows, group), [&](int64_t task) {
    const int64_t size = columns + max(columns, kLanes) + p.w.scale_cols;
    float* wide = static_cast<float*>(scratch(Scratch::task_scales, static_cast<size_t>(size) * 4));
    if (wide == nullptr) return __atomic_store_n(&enough_memory, false, __ATOMIC_RELAXED);
    with_decoder(p.w, [&](const auto& decoder) {
      for (int64_t r = task * group; r < min((task + 1) * group, rows); ++r) {
        const float* x = static_cast<const float*>(p.x) + r * columns;
        if (p.x_type != Float::f32) {
          to_f32(p.x, p.x_type, r * columns, columns, wide);
          x = wide;
        }
        const Matrix w(p.w, r / p.w.rows);
        squares_of_row(decoder, w, r % p.w.rows, wide + columns, x, p.lost + r, p.size + r);
      }
    });
  });
  return enough_memory;
}

}  // namespace lowbit::LOWBIT_ISA

#endif  // LOWBIT_TAKE_H_
