// Products in float32, in three forms: stream, dot and panel.
//
// x and y are float32, of shape (m, k) and (m, n). Scales are applied where that takes the fewest multiplications.
#ifndef LOWBIT_MATMUL_EXACT_H_
#define LOWBIT_MATMUL_EXACT_H_

#include "exact_direct.h"
#include "exact_dot.h"
#include "exact_panel.h"
#include "exact_stream.h"

namespace lowbit::LOWBIT_ISA {

template <typename D>
bool matmul_one(const D& decoder, const Matmul& p, const Matrix& w, const float* x, float* y,
                const Parallel& parallel) {
  if (p.contract_last) {
    if (dot_fits(p.w, p.m)) return matmul_dot(decoder, p, w, x, y, parallel);
    // The number of vectors that leaves the fewest lanes empty.
    const int64_t vectors = ceil_div(p.m, kLanes), tiles = ceil_div(vectors, kTileVectors);
    bool done = false;
    with_constant<kTileVectors>(ceil_div(vectors, tiles), [&](auto width) {
      done = matmul_panel_last<width.value>(decoder, p, w, x, y, parallel);
    });
    return done;
  }
  if constexpr (kDirectRows > 0) {
    if (p.m > kStreamRows && direct_fits(p)) return matmul_direct(decoder, p, w, x, y, parallel);
  }
  if (p.m <= kStreamRows && stream_fits(p.w)) return matmul_stream(decoder, p, w, x, y, parallel);
  return matmul_panel_first(decoder, p, w, x, y, parallel);
}

inline bool matmul_exact(const Matmul& p, const Parallel& parallel) {
  return each_product(p, parallel, [&](int64_t layer, const float* x, float* y, const Parallel& inner) {
    if (p.k == 0) {
      memset(y, 0, static_cast<size_t>(p.m * p.n) * 4);
      return true;
    }
    return with_decoder(p.w,
                        [&](const auto& decoder) { return matmul_one(decoder, p, Matrix(p.w, layer), x, y, inner); });
  });
}

}  // namespace lowbit::LOWBIT_ISA

#endif  // LOWBIT_MATMUL_EXACT_H_
