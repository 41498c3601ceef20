// Products in float32 with few rows of x that contract the last stored axis: each stored row gives one element of y.
#ifndef LOWBIT_EXACT_DOT_H_
#define LOWBIT_EXACT_DOT_H_

#include "matmul_common.h"

namespace lowbit::LOWBIT_ISA {

constexpr int64_t kDotColumns = 512;  // maximum number of columns in one chain of sums

// Blocks of one or two vectors, several in a line. The decoder's order keeps 16 columns together.
inline bool short_blocks(const Weights& w) {
  return w.col_span < kLine && w.col_span % 16 == 0 && kLine % w.col_span == 0 && w.col_span < w.columns;
}

inline bool dot_fits(const Weights& w) {
  const bool along = w.row_span == 1 && (w.col_span % kLine == 0 || w.col_span >= w.columns || short_blocks(w));
  const bool across = w.col_span == 1 && w.row_span >= 8;
  return along || across;
}

// y[m] = sum over columns of x[m] * levels * scales of a stored row; x (kM, width) is in the decoder's order.
template <int kM, typename D>
LOWBIT_INLINE void dot_row(const D& decoder, const uint8_t* bytes, int64_t columns, const float* x, int64_t width,
                           const float* scales, int64_t block, float* y, int64_t y_stride) {
  constexpr int kChains = kM == 1 ? 2 : 1;
  F total[kM];
  for (int m = 0; m < kM; ++m) total[m] = zero();
  for (int64_t in_block = 0; columns > 0;) {
    const int64_t count = min(min(block - in_block, kDotColumns), columns);
    F sum[kM][kChains];
    for (int m = 0; m < kM; ++m) {
      for (int i = 0; i < kChains; ++i) sum[m][i] = zero();
    }
    const auto add = [&](const uint8_t* line) {
      F v[kVectors];
      decoder.decode(line, v);
      for (int m = 0; m < kM; ++m) {
        for (int i = 0; i < kVectors; ++i) {
          sum[m][i % kChains] = fma(v[i], load(x + m * width + i * kLanes), sum[m][i % kChains]);
        }
      }
      x += kLine;
    };
    prefetch(bytes + kDotAhead);
    for (int64_t line = count / kLine; line > 0; --line, bytes += kLineBytes<D>) {
      if (kLineBytes<D> == 32) prefetch(bytes + kDotAhead);
      add(bytes);
    }
    if (count % kLine > 0) add(PaddedLine<D>(bytes, count % kLine).bytes);
    const F scale = broadcast(scales == nullptr ? 1.0f : *scales);
    for (int m = 0; m < kM; ++m) {
      total[m] = fma(kChains == 2 ? sum[m][0] + sum[m][kChains - 1] : sum[m][0], scale, total[m]);
    }
    columns -= count;
    in_block += count;
    if (in_block == block) {
      in_block = 0;
      if (scales != nullptr) ++scales;
    }
  }
  for (int m = 0; m < kM; ++m) y[m * y_stride] = sum_of(total[m]);
}

// The same for blocks of kEach vectors.
template <int kM, int kEach, typename D>
LOWBIT_INLINE void dot_row_short(const D& decoder, const uint8_t* bytes, int64_t columns, const float* x, int64_t width,
                                 const float* scales, float* y, int64_t y_stride) {
  constexpr int kBlocks = kVectors / kEach;
  F total[kM][kBlocks];
  for (int m = 0; m < kM; ++m) {
    for (int b = 0; b < kBlocks; ++b) total[m][b] = zero();
  }
  const float* last = scales + (columns - 1) / (kEach * kLanes);
  const auto add = [&](const uint8_t* line) {
    F v[kVectors];
    decoder.decode(line, v);
    for (int b = 0; b < kBlocks; ++b, scales += scales < last) {
      const F scale = broadcast(*scales);
      for (int m = 0; m < kM; ++m) {
        const float* at = x + m * width + b * kEach * kLanes;
        F sum = v[b * kEach] * load(at);
        if (kEach == 2) sum = fma(v[b * kEach + 1], load(at + kLanes), sum);
        total[m][b] = fma(sum, scale, total[m][b]);
      }
    }
    x += kLine;
  };
  for (; columns >= kLine; columns -= kLine, bytes += kLineBytes<D>) {
    prefetch(bytes + kDotAhead);
    add(bytes);
  }
  if (columns > 0) add(PaddedLine<D>(bytes, columns).bytes);
  for (int m = 0; m < kM; ++m) {
    for (int b = 1; b < kBlocks; ++b) total[m][0] += total[m][b];
    y[m * y_stride] = sum_of(total[m][0]);
  }
}

// Multiplies the stored rows [begin, end). Not inlined, so that the decoder's tables stay in registers. `held` is a
// buffer for scales, `codes` one for a row of joined codes.
template <int kM, typename D>
__attribute__((noinline)) void dot_rows(const D& shared, const Matrix& w, int64_t begin, int64_t end, const float* x,
                                        int64_t width, bool along, float* held, uint8_t* codes, float* y,
                                        int64_t y_stride) {
  const D decoder = shared;
  const int64_t columns = w.w.columns, block = along ? w.w.col_span : columns;
  const int64_t each = along && short_blocks(w.w) ? block / kLanes : 0;
  RowScales row_scales(w, begin, end, held);
  for (int64_t row = begin; row < end; ++row) {
    const float* scales = along ? row_scales.of(row) : nullptr;
    const uint8_t* bytes = w.rows<D>(row, 1, codes);
    if (each == 1) {
      dot_row_short<kM, 1>(decoder, bytes, columns, x, width, scales, y + row, y_stride);
    } else if (each == 2) {
      dot_row_short<kM, 2>(decoder, bytes, columns, x, width, scales, y + row, y_stride);
    } else {
      dot_row<kM>(decoder, bytes, columns, x, width, scales, block, y + row, y_stride);
    }
    for (int m = 0; along && m < kM; ++m) y[m * y_stride + row] *= row_scales.factor(row);
  }
}

template <typename D>
bool matmul_dot(const D& decoder, const Matmul& p, const Matrix& w, const float* x, float* y,
                const Parallel& parallel) {
  const int64_t width = round_up(p.k, kLine);
  const bool along = w.w.row_span == 1;
  float* packed = buffer<float>(Scratch::call_pack, p.m * width);
  if (packed == nullptr) return false;
  for (int64_t m = 0; m < p.m; ++m) {
    for (int64_t c = 0; c < width; c += 2 * kLanes) unordered_pair<D>(x + m * p.k + c, p.k - c, packed + m * width + c);
  }
  bool enough_memory = true;
  const int64_t unit = along ? 1 : min(p.w.row_span, p.n);
  const Shares shares(ceil_div(p.n, unit), parallel.threads(), ceil_div(kShareWork, unit * p.k * p.m));
  parallel.each(shares.count, [&](int64_t t) {
    const int64_t begin = shares.begins[t] * unit, end = min(p.n, shares.begins[t + 1] * unit);
    float* scaled = buffer<float>(Scratch::task_panel, p.m * width);
    float* held = buffer<float>(Scratch::task_scales, max(RowScales::buffer_size(p.w), kLine));
    uint8_t* codes = buffer<uint8_t>(Scratch::task_codes, w.joined() ? p.k : 1);
    if (scaled == nullptr || held == nullptr || codes == nullptr) {
      __atomic_store_n(&enough_memory, false, __ATOMIC_RELAXED);
      return;
    }
    for (int64_t n = begin; n < end;) {
      int64_t rows = end - n;
      const float* operand = packed;
      if (!along) {
        // Multiply x by the scales of a block of rows.
        rows = min(rows, unit);
        operand = scaled;
        for (int64_t c = 0; c < p.k; c += kLine) {
          F s[kVectors];
          line_scales<D>(w, n / p.w.row_span, c, s);
          for (int64_t m = 0; m < p.m; ++m) {
            for (int i = 0; i < kVectors; ++i) {
              const int64_t at = m * width + c + i * kLanes;
              store(scaled + at, load(packed + at) * s[i]);
            }
          }
        }
      }
      with_constant<kDotRows>(
          p.m, [&](auto m) { dot_rows<m.value>(decoder, w, n, n + rows, operand, width, along, held, codes, y, p.n); });
      n += rows;
    }
  });
  return enough_memory;
}

}  // namespace lowbit::LOWBIT_ISA

#endif  // LOWBIT_EXACT_DOT_H_
