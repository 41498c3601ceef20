// Products in float32: decode and multiply.
#ifndef LOWBIT_MATMUL_EXACT_H_
#define LOWBIT_MATMUL_EXACT_H_

#include "decode.h"

namespace lowbit::LOWBIT_ISA {

// Any spans and sizes, one row of the stored matrix after another.
template <typename D>
void matmul_plain(const D&, const Matmul& p, const Matrix& w, const float* x, float* y) {
  float* scales = static_cast<float*>(scratch(Scratch::task_scales, static_cast<size_t>(w.w.scale_cols) * 4));
  memset(y, 0, static_cast<size_t>(p.m * p.n) * 4);
  for (int64_t r = 0; r < w.w.rows; ++r) {
    w.scales(r / w.w.row_span, 0, w.w.scale_cols, scales);
    const uint8_t* bytes = w.row(r);
    for (int64_t c = 0; c < w.w.columns; ++c) {
      const float value = D::level(bytes[c / D::kPerByte], static_cast<int>(c % D::kPerByte)) * scales[c / w.w.col_span];
      const int64_t k = p.contract_last ? c : r, n = p.contract_last ? r : c;
      for (int64_t m = 0; m < p.m; ++m) y[m * p.n + n] += x[m * p.k + k] * value;
    }
  }
}

inline bool matmul_exact(const Matmul& p, const Parallel& parallel) {
  float* all_x = static_cast<float*>(scratch(Scratch::call_x, static_cast<size_t>(p.batch * p.m * p.k) * 4));
  float* all_y = static_cast<float*>(scratch(Scratch::call_y, static_cast<size_t>(p.batch * p.m * p.n) * 4));
  if (all_x == nullptr || all_y == nullptr) return false;
  to_f32(p.x, p.x_type, 0, p.batch * p.m * p.k, all_x);
  parallel.each(p.batch, [&](int64_t b) {
    const Matrix w(p.w, min(max(p.index[b], 0), p.w.layers - 1));
    with_decoder(p.w.format, [&](const auto& decoder) {
      matmul_plain(decoder, p, w, all_x + b * p.m * p.k, all_y + b * p.m * p.n);
    });
  });
  from_f32(all_y, p.batch * p.m * p.n, p.y, p.y_type, 0);
  return true;
}

}  // namespace lowbit::LOWBIT_ISA

#endif  // LOWBIT_MATMUL_EXACT_H_
