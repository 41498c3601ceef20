// Products in float32 with few rows of x that contract the last stored axis: each stored row gives one element of y.
#ifndef LOWBIT_EXACT_DOT_H_
#define LOWBIT_EXACT_DOT_H_

#include "dot_parts.h"

namespace lowbit::LOWBIT_ISA {

// Blocks of one or two vectors, several in a line. The decoder's order keeps 16 columns together.
inline bool short_blocks(const Weights& w) {
  return w.col_span < kLine && w.col_span % 16 == 0 && kLine % w.col_span == 0 && w.col_span < w.columns;
}

inline bool dot_fits(const Weights& w, int64_t m) {
  const bool along = w.row_span == 1 && (w.col_span % kLine == 0 || w.col_span >= w.columns || short_blocks(w));
  const bool across = w.col_span == 1 && w.row_span >= 8;
  // With more rows of x a panel is faster, which decodes scales across only once.
  return (along && m <= kDotMost) || (across && m <= max(kDotMost / 2, kDotRows));
}

// Stored rows that are multiplied at a time: they share the loads of x.
template <int kM>
constexpr int kDotStored = kRegisters < 32 || kM == 1 ? 1 : 2;

// GCC 12 would load x again for each of several stored rows.
template <int kRows>
LOWBIT_INLINE F load_once(const float* from) {
  F a = load(from);
#if defined(LOWBIT_AVX512)
  if (kRows > 1) asm("" : "+v"(a));
#endif
  return a;
}

// total[r][m] += x[m] * levels * scales[r] of a part of some stored rows; x is [line][row][kLine] in the decoder's
// order. A line has kBlocks scales, of which the last may be that of the next lines, too; none are used if it is 0.
template <int kM, int kBlocks, int kRows, typename D>
LOWBIT_INLINE void add_part(const D& decoder, const Part<kRows>& part, const float* x, const float* (&scales)[kRows],
                            int64_t block, F (&total)[kRows][kM]) {
  constexpr int kEach = kVectors / (kBlocks > 0 ? kBlocks : 1);
  // Whichever takes fewer multiplications.
  constexpr bool kScaleLevels = kM * kBlocks > kVectors, kScaleSums = kBlocks > 0 && !kScaleLevels;
  // Independent sums, so that additions need not wait for each other, if there are registers for them.
  constexpr int kSums = kM * kRows, kMost = kSums <= 2 ? 4 : kSums <= 4 ? 2 : 1, kChains = kScaleSums ? kBlocks : kMost;
  F sums[kRows][kM][kChains];
  const uint8_t *bytes[kRows], *ahead[kRows];
  for (int r = 0; r < kRows; ++r) {
    bytes[r] = part.bytes[r];
    ahead[r] = part.ahead[r];
    if (kBlocks > 0) scales[r] += part.column / block;
    for (int m = 0; m < kM; ++m) {
      for (int i = 0; i < kChains; ++i) sums[r][m][i] = zero();
    }
  }
  PaddedLine<D> padded[kRows];
  float last_scales[kRows][kVectors];
  const int64_t lines = block / kLine;
  int64_t in_block = kBlocks == 1 ? part.column / kLine % lines : 0;
  for (int64_t columns = part.columns; columns > 0; columns -= kLine, x += kM * kLine) {
    if (columns < kLine) {
      for (int r = 0; r < kRows; ++r) {
        padded[r] = PaddedLine<D>(bytes[r], columns);
        bytes[r] = padded[r].bytes;
        if (kBlocks == 0) continue;
        for (int64_t b = 0; b < kBlocks; ++b) last_scales[r][b] = scales[r][min(b, (columns - 1) / (kEach * kLanes))];
        scales[r] = last_scales[r];
      }
    }
    F v[kRows][kVectors];
    for (int r = 0; r < kRows; ++r) {
      prefetch(ahead[r]);
      decoder.decode(bytes[r], v[r]);
    }
    for (int b = 0; b < kVectors / kEach; ++b) {
      F scale[kRows];
      for (int r = 0; kBlocks > 0 && r < kRows; ++r) {
        scale[r] = broadcast(scales[r][b]);
        for (int i = 0; kScaleLevels && i < kEach; ++i) v[r][b * kEach + i] *= scale[r];
      }
      for (int m = 0; m < kM; ++m) {
        const float* at = x + m * kLine + b * kEach * kLanes;
        if (kScaleSums) {
          F of_x[kEach];
          for (int i = 0; i < kEach; ++i) of_x[i] = load_once<kRows>(at + i * kLanes);
          for (int r = 0; r < kRows; ++r) {
            const F* levels = v[r] + b * kEach;
            F sum = levels[0] * of_x[0];
            for (int i = 1; i < kEach; ++i) sum = fma(levels[i], of_x[i], sum);
            sums[r][m][b % kChains] = fma(sum, scale[r], sums[r][m][b % kChains]);
          }
        } else {
          for (int i = 0; i < kEach; ++i) {
            const F of_x = load_once<kRows>(at + i * kLanes);
            for (int r = 0; r < kRows; ++r) {
              F& sum = sums[r][m][(b * kEach + i) % kChains];
              sum = fma(v[r][b * kEach + i], of_x, sum);
            }
          }
        }
      }
    }
    const bool next = kBlocks == 1 && ++in_block == lines;
    if (next) in_block = 0;
    for (int r = 0; r < kRows; ++r) {
      bytes[r] += kLineBytes<D>;
      ahead[r] += kLineBytes<D>;
      if (kBlocks > 1) scales[r] += kBlocks;
      if (next) ++scales[r];
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int m = 0; m < kM; ++m) {
      for (int i = 0; i < kChains; ++i) total[r][m] += sums[r][m][i];
    }
  }
}

// y[m * step + row] for the stored rows [begin, end). Not inlined, so that the decoder's tables stay in registers.
// `held` is a buffer for scales, `codes` one for joined codes.
template <int kM, int kBlocks, typename D>
__attribute__((noinline)) void dot_rows(const D& shared, const Matrix& w, int64_t begin, int64_t end, const float* x,
                                        bool along, float* held, uint8_t* codes, float* y, int64_t step) {
  constexpr int kRows = kDotStored<kM>;
  const D decoder = shared;
  const int64_t columns = w.w.columns, width = part_columns(columns, kLine, kM * columns * 4);
  RowScales of_rows(w, held);
  PartSums<kM, kRows> sums;
  each_part<kRows, D>(w, begin, end, width, along ? &of_rows : nullptr, codes,
                      [&](const Part<kRows>& part) LOWBIT_INLINE_LAMBDA {
                        const float* scales[kRows] = {};
                        for (int r = 0; along && r < kRows; ++r)
                          scales[r] = of_rows.of(part.row + min(r, part.rows - 1));
                        F total[kRows][kM];
                        sums.load_to(total, part);
                        add_part<kM, kBlocks>(decoder, part, x + part.column * kM, scales, w.w.col_span, total);
                        const auto factor = [&](int64_t row) {
                          return !along ? 1 : of_rows.factor(row) * (kBlocks == 0 ? *of_rows.of(row) : 1);
                        };
                        sums.put(total, part, factor, y, step);
                      });
}

template <typename D>
bool matmul_dot(const D& decoder, const Matmul& p, const Matrix& w, const float* x, float* y,
                const Parallel& parallel) {
  const int64_t width = round_up(p.k, kLine), tiles = ceil_div(p.m, kDotRows);
  const bool along = w.w.row_span == 1;
  const auto first_of = [&](int64_t tile) { return p.m * tile / tiles; };
  float* packed = buffer<float>(Scratch::call_pack, p.m * width);
  if (packed == nullptr) return false;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t first = first_of(tile), rows = first_of(tile + 1) - first;
    for (int64_t m = 0; m < rows; ++m) {
      for (int64_t c = 0; c < width; c += 2 * kLanes) {
        float* to = packed + first * width + c / kLine * kLine * rows + m * kLine + c % kLine;
        unordered_pair<D>(x + (first + m) * p.k + c, p.k - c, to);
      }
    }
  }
  bool enough_memory = true;
  const int64_t unit = along ? 1 : min(p.w.row_span, kDotAgain);
  const Shares shares(ceil_div(p.n, unit), parallel.threads(), ceil_div(kShareWork, unit * p.k * p.m));
  parallel.each(shares.count, [&](int64_t t) {
    const int64_t begin = shares.begins[t] * unit, end = min(p.n, shares.begins[t + 1] * unit);
    float* scaled = along ? nullptr : buffer<float>(Scratch::task_panel, p.m * width);
    float* held = buffer<float>(Scratch::task_scales, max(RowScales::buffer_size(p.w), kLine));
    uint8_t* codes = buffer<uint8_t>(Scratch::task_codes, w.joined() ? 2 * p.k : 1);
    if ((!along && scaled == nullptr) || held == nullptr || codes == nullptr) {
      __atomic_store_n(&enough_memory, false, __ATOMIC_RELAXED);
      return;
    }
    const float* operand = packed;
    for (int64_t n = begin, count; n < end; n += count) {
      count = min(kDotAgain, end - n);
      if (!along) {
        // Multiply x by the scales of a block of rows.
        const int64_t in_block = n % p.w.row_span;
        count = min(count, p.w.row_span - in_block);
        operand = scaled;
        for (int64_t c = 0; (in_block == 0 || n == begin) && c < p.k; c += kLine) {
          F s[kVectors];
          line_scales<D>(w, n / p.w.row_span, c, s);
          for (int64_t tile = 0; tile < tiles; ++tile) {
            const int64_t first = first_of(tile), rows = first_of(tile + 1) - first;
            const float* from = packed + first * width + c * rows;
            float* to = scaled + first * width + c * rows;
            for (int64_t i = 0; i < rows * kVectors; ++i) {
              store(to + i * kLanes, load(from + i * kLanes) * s[i % kVectors]);
            }
          }
        }
      }
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t first = first_of(tile);
        with_constant<kDotRows>(first_of(tile + 1) - first, [&](auto m) {
          auto run = dot_rows<m.value, 0, D>;
          if (along && p.w.col_span < p.k) {
            const int64_t blocks = kLine / p.w.col_span;
            run = blocks <= 1   ? dot_rows<m.value, 1, D>
                  : blocks == 2 ? dot_rows<m.value, 2, D>
                                : dot_rows<m.value, kVectors, D>;
          }
          run(decoder, w, n, n + count, operand + first * width, along, held, codes, y + first * p.n, p.n);
        });
      }
    }
  });
  return enough_memory;
}

}  // namespace lowbit::LOWBIT_ISA

#endif  // LOWBIT_EXACT_DOT_H_
