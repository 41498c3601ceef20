// Products in float32, in three forms:
//
//   stream   few rows of x, the first stored axis contracted: each stored row, times its element of x, is added to y
//   dot      few rows of x, the last stored axis contracted: each stored row gives one element of y
//   panel    any product: part of the matrix is decoded into a panel, which is multiplied by many rows of x
//
// x and y are float32 here, of shape (m, k) and (m, n); scales are applied where the fewest multiplications are.
#ifndef LOWBIT_MATMUL_EXACT_H_
#define LOWBIT_MATMUL_EXACT_H_

#include "decode.h"

namespace lowbit::LOWBIT_ISA {

template <int N>
struct Constant {
  static constexpr int value = N;
};

// run(Constant<n>) for n in 1..kMax.
template <int kMax, typename Run>
LOWBIT_INLINE void with_constant(int64_t n, const Run& run) {
  if constexpr (kMax > 1) {
    if (n < kMax) return with_constant<kMax - 1>(n, run);
  }
  run(Constant<kMax>());
}

template <typename T>
LOWBIT_INLINE T* buffer(Scratch slot, int64_t count) {
  return static_cast<T*>(scratch(slot, static_cast<size_t>(count) * sizeof(T)));
}

constexpr int64_t kAloneWork = 300000;  // multiplications that are done before another thread has begun
constexpr int64_t kShareWork = 50000;   // that outweigh what it costs to hand them out

// Work of `units` cut for threads that begin late or are held up: large shares first, small ones to end together. It
// depends on the number of threads alone, and with it the order of sums.
struct Shares {
  static constexpr int64_t kMost = 512;
  int64_t count = 0;
  int64_t begins[kMost + 1];

  Shares(int64_t units, int64_t threads, int64_t least) {
    least = threads == 1 ? units : max(least, ceil_div(units, kMost));
    for (int64_t at = 0; at < units; ++count) {
      begins[count] = at;
      at += min(max((units - at) / (2 * threads), least), units - at);
    }
    begins[count] = units;
  }
};

template <typename D>
constexpr int kLineBytes = kLine / D::kPerByte;

// A line at the end of a row, whose missing bytes must not be read.
template <typename D>
struct PaddedLine {
  alignas(64) uint8_t bytes[kLine];
  PaddedLine(const uint8_t* from, int64_t columns) {
    memset(bytes, 0, sizeof(bytes));
    memcpy(bytes, from, static_cast<size_t>(ceil_div(columns, D::kPerByte)));
  }
};

// The scales of a line of columns from `column` on, in the decoder's order.
template <typename D>
LOWBIT_INLINE void line_scales(const Matrix& w, int64_t scale_row, int64_t column, F s[kVectors]) {
  const int64_t columns = min(kLine, w.w.columns - column), span = w.w.col_span;
  float held[kLine] = {};
  if (span == 1) {
    const float* scales = w.scales(scale_row, column, columns, held);
    if (columns < kLine && scales != held) {
      memcpy(held, scales, static_cast<size_t>(columns) * 4);
      scales = held;
    }
    for (int i = 0; i < kVectors; ++i) s[i] = D::unorder(load(scales + i * kLanes));
    return;
  }
  const int64_t from = column / span, to = (column + columns - 1) / span;
  const float* scales = w.scales(scale_row, from, to - from + 1, held);
  if (from == to) {
    for (int i = 0; i < kVectors; ++i) s[i] = broadcast(scales[0]);
    return;
  }
  float spread[kLine] = {};
  for (int64_t i = 0; i < columns; ++i) spread[i] = scales[(column + i) / span - from];
  for (int i = 0; i < kVectors; ++i) s[i] = D::unorder(load(spread + i * kLanes));
}

// ---- Stream form

// Stored rows read side by side, from left to right: as many streams as memory likes. More rows of x have more sums to
// load and store for each group; yet rows are often 4 KB apart, and L1 holds only 8 such lines.
template <int kM>
constexpr int64_t kGroupRows = kM == 1 ? 8 : 16;

// Are the scales constant along lines of a row, or along groups of rows?
inline bool stream_fits(const Weights& w) {
  const bool along = w.col_span == 1 && w.row_span >= 8;
  const bool across = w.row_span == 1 && (w.col_span % kLine == 0 || w.col_span >= w.columns);
  return along || across;
}

// What the rows of a group are multiplied by: row r of it and row m of x, in block b of the columns.
struct Factors {
  const float* at;
  int64_t row_step, m_step;  // from block to block it is 1
  int64_t block_lines;
};

// Where the sums of a block of rows go: `partial` (kM, width) in the decoder's order from its first group of rows to
// its last, which adds them to `sums` (kM, width) in the order of columns, times `scales` if there are any.
struct Sums {
  float* partial;
  float* sums;
  const float* scales;
  int64_t width;
  bool first, last;
};

// sums += factor * levels of `rows` stored rows, in whole lines. kRows is their number if it is a constant, else 0.
// Not inlined: this is the loop that must keep its tables in registers.
template <int kM, bool kAlong, int kRows, typename D>
__attribute__((noinline)) void add_rows(const D& decoder, const uint8_t* bytes, int64_t row_bytes, int64_t any_rows,
                                        int64_t lines, const Factors& factors, const Sums& where) {
  const Sums to = where;  // a copy, which the stores below can not change
  const int64_t rows = kRows > 0 ? kRows : any_rows;
  const int64_t row_step = kAlong ? 1 : factors.row_step, m_step = factors.m_step;
  const float* factor = factors.at;
  int64_t in_block = 0;
  // Every other row may have its factor in the decoder's tables, and is added.
  constexpr bool kTimes = D::kTimes && kM == 1 && kAlong && kRows > 0;
  constexpr int kTables = kTimes ? kRows / 2 : 1;
  NibbleVectors tables[kTables];
  if constexpr (kTimes) {
    for (int i = 0; i < kTables; ++i) tables[i] = D::times(factor[2 * i + 1]);
  }
  for (int64_t line = 0; line < lines; ++line) {
    const int64_t offset = line * kLineBytes<D>;
    if (offset % 64 < kLineBytes<D>) {
      // The same place in the next group, or a little further on in this one.
      int64_t ahead = kM == 1 ? rows * row_bytes : 256;
      if (kM > 1 && offset + ahead >= row_bytes) ahead += (rows - 1) * row_bytes;
      for (int64_t r = 0; r < rows; ++r) prefetch(bytes + r * row_bytes + offset + ahead);
    }
    F acc[kM][kVectors];
    for (int m = 0; m < kM; ++m) {
      const float* partial = to.partial + m * to.width + line * kLine;
      for (int i = 0; i < kVectors; ++i) acc[m][i] = to.first ? zero() : load(partial + i * kLanes);
    }
#pragma GCC unroll 8
    for (int64_t r = 0; r < rows; ++r) {
      F v[kVectors];
      if (kTimes && r % 2 == 1) {
        tables[r / 2].decode(bytes + r * row_bytes + offset, v);
        for (int i = 0; i < kVectors; ++i) acc[0][i] += v[i];
        continue;
      }
      decoder.decode(bytes + r * row_bytes + offset, v);
      for (int m = 0; m < kM; ++m) {
        const F f = broadcast(factor[m * m_step + r * row_step]);
        for (int i = 0; i < kVectors; ++i) acc[m][i] = fma(v[i], f, acc[m][i]);
      }
    }
    for (int m = 0; m < kM; ++m) {
      float* partial = to.partial + m * to.width + line * kLine;
      float* sums = to.sums + m * to.width + line * kLine;
      if (!to.last) {
        for (int i = 0; i < kVectors; ++i) store(partial + i * kLanes, acc[m][i]);
        continue;
      }
      for (int i = 0; i < kVectors; ++i) {
        const F sum = load(sums + i * kLanes), added = D::order(acc[m][i]);
        store(sums + i * kLanes, kAlong ? fma(added, load(to.scales + line * kLine + i * kLanes), sum) : added + sum);
      }
    }
    if (!kAlong && ++in_block == factors.block_lines) {
      in_block = 0;
      ++factor;
    }
  }
}

// The rows [begin, end) of the matrix times x (kM, k), to sums (kM, width). `scaled` has room for the factors, to which
// scales across go.
template <int kM, bool kAlong, typename D>
void stream_rows(const D& decoder, const Matrix& w, const float* x, int64_t k, int64_t begin, int64_t end, float* sums,
                 float* partial, float* scaled) {
  constexpr int64_t kGroup = kGroupRows<kM>;
  const int64_t columns = w.w.columns, row_bytes = w.w.row_bytes, blocks = w.w.scale_cols;
  const int64_t lines = columns / kLine, rest = columns % kLine, width = round_up(columns, kLine);
  memset(sums, 0, static_cast<size_t>(kM * width) * 4);
  for (int64_t block = begin; block < end;) {
    const int64_t block_end = kAlong ? min(end, (block / w.w.row_span + 1) * w.w.row_span) : end;
    const float* scales = kAlong ? w.scales(block / w.w.row_span, 0, columns, scaled) : nullptr;
    float last_scales[kLine] = {};
    if (kAlong) memcpy(last_scales, scales + lines * kLine, static_cast<size_t>(rest) * 4);
    for (int64_t row = block; row < block_end; row += kGroup) {
      const int64_t rows = min(kGroup, block_end - row);
      Factors factors = {x + row, 1, k, 0};
      Sums to = {partial, sums, scales, width, row == block, row + rows == block_end};
      if (!kAlong) {
        for (int64_t r = 0; r < rows; ++r) {
          const float* s = w.scales(row + r, 0, blocks, scaled + kM * kGroup * blocks);
          for (int m = 0; m < kM; ++m) {
            float* out = scaled + (m * kGroup + r) * blocks;
            for (int64_t b = 0; b < blocks; ++b) out[b] = s[b] * x[m * k + row + r];
          }
        }
        factors = {scaled, blocks, kGroup * blocks, ceil_div(w.w.col_span, kLine)};
      }
      if (rows == kGroup) {
        add_rows<kM, kAlong, kGroup>(decoder, w.row(row), row_bytes, rows, lines, factors, to);
      } else {
        add_rows<kM, kAlong, 0>(decoder, w.row(row), row_bytes, rows, lines, factors, to);
      }
      if (rest > 0) {
        // The last columns of the rows, copied where a whole line can be read.
        uint8_t line[kGroup * kLineBytes<D>] = {};
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t from = lines * kLineBytes<D>;
          memcpy(line + r * kLineBytes<D>, w.row(row + r) + from, static_cast<size_t>(row_bytes - from));
        }
        if (!kAlong) factors.at += lines * kLine / w.w.col_span;
        to = {partial + lines * kLine, sums + lines * kLine, last_scales, width, to.first, to.last};
        add_rows<kM, kAlong, 0>(decoder, line, kLineBytes<D>, rows, 1, factors, to);
      }
    }
    block = block_end;
  }
}

// The same for one row of x and codes of one or two bits: the codes of several rows in one column are a number of four
// bits, and all that they can add to y stands in a table of 16 sums. One look-up takes the place of kTableRows
// multiplications. `nibbles` has room for kTableGroup rows.
constexpr int64_t kTableGroup = 16;

template <typename D>
struct Nibbles {
  static constexpr int64_t kBytes = sizeof(Words), kPlane = 2 * kBytes;
  static constexpr int64_t kChunk = D::kTableRows * kPlane;  // columns that are regrouped at a time
  static int64_t width(int64_t columns) { return round_up(columns, kChunk); }
};

// nibbles = the codes of kTableRows rows, regrouped
template <typename D>
LOWBIT_INLINE void regroup_rows(const uint8_t* const rows[], int64_t row_bytes, int64_t ahead, uint8_t* nibbles) {
  constexpr int64_t kBytes = Nibbles<D>::kBytes;
  Words codes[D::kTableRows], planes[D::kTableRows];
  int64_t at = 0;
  for (; at + kBytes <= row_bytes; at += kBytes) {
    for (int r = 0; r < D::kTableRows; ++r) {
      if (at % 64 == 0) prefetch(rows[r] + ahead + at);
      memcpy(&codes[r], rows[r] + at, kBytes);
    }
    D::regroup(codes, planes);
    memcpy(nibbles + at * D::kTableRows, planes, sizeof(planes));
  }
  if (at < row_bytes) {
    memset(codes, 0, sizeof(codes));
    for (int r = 0; r < D::kTableRows; ++r) memcpy(&codes[r], rows[r] + at, static_cast<size_t>(row_bytes - at));
    D::regroup(codes, planes);
    memcpy(nibbles + at * D::kTableRows, planes, sizeof(planes));
  }
}

template <typename D>
void stream_tables(const Matrix& w, const float* x, int64_t begin, int64_t end, float* sums, float* partial,
                   float* scale_row, uint8_t* nibbles) {
  using N = Nibbles<D>;
  const int64_t columns = w.w.columns, width = N::width(columns);
  const bool along = w.w.col_span == 1 && w.w.scale_cols == columns;
  memset(sums, 0, static_cast<size_t>(round_up(columns, kLine)) * 4);
  for (int64_t block = begin; block < end;) {
    const int64_t block_end = along ? min(end, (block / w.w.row_span + 1) * w.w.row_span) : end;
    for (int64_t row = block; row < block_end; row += kTableGroup) {
      const int64_t rows = min(kTableGroup, block_end - row), tables = ceil_div(rows, D::kTableRows);
      NibbleVectors decoders[kTableGroup / D::kTableRows];
      for (int64_t t = 0; t < tables; ++t) {
        const uint8_t* from[D::kTableRows];
        float table[16] = {};
        for (int r = 0; r < D::kTableRows; ++r) {
          const int64_t at = row + t * D::kTableRows + r;
          from[r] = w.row(min(at, block_end - 1));
          if (at >= block_end) continue;
          const float factor = along ? x[at] : x[at] * w.scale(at / w.w.row_span, 0);
          for (int c = 0; c < 16; ++c) table[c] += factor * D::level(static_cast<uint8_t>(c << 4), r);
        }
        decoders[t] = NibbleVectors(table);
        regroup_rows<D>(from, w.w.row_bytes, kTableGroup * w.w.row_bytes, nibbles + t * width / 2);
      }
      for (int64_t at = 0; at < width; at += kLine) {
        F acc[kVectors];
        for (int i = 0; i < kVectors; ++i) acc[i] = row == block ? zero() : load(partial + at + i * kLanes);
        for (int64_t t = 0; t < tables; ++t) {
          F v[kVectors];
          decoders[t].decode(nibbles + (t * width + at) / 2, v);
          for (int i = 0; i < kVectors; ++i) acc[i] += v[i];
        }
        for (int i = 0; i < kVectors; ++i) store(partial + at + i * kLanes, acc[i]);
      }
    }
    const float* scales = along ? w.scales(block / w.w.row_span, 0, columns, scale_row) : nullptr;
    for (int64_t at = 0; at < width; at += kLanes) {
      float plane[kLanes];
      store(plane, NibbleVectors::order(load(partial + at)));
      const int64_t in_chunk = at % N::kChunk, i = in_chunk / N::kPlane, j = in_chunk % N::kPlane;
      const int64_t column = at - in_chunk + D::kTableRows * j + D::kPlaneColumn[i];
      for (int lane = 0; lane < kLanes; ++lane) {
        const int64_t c = column + D::kTableRows * lane;
        if (c < columns) sums[c] += along ? plane[lane] * scales[c] : plane[lane];
      }
    }
    block = block_end;
  }
}

template <typename D>
bool matmul_stream(const D& decoder, const Matmul& p, const Matrix& w, const float* x, float* y,
                   const Parallel& parallel) {
  const int64_t width = round_up(p.n, kLine);
  // Each share of the rows has sums of its own. Shares end where blocks do, if there are enough.
  const int64_t unit = p.w.col_span == 1 && p.w.row_span * parallel.threads() <= p.k ? p.w.row_span : 64;
  const Shares shares(ceil_div(p.k, unit), parallel.threads(), ceil_div(kShareWork, unit * p.n * p.m));
  const int64_t tasks = shares.count;
  float* sums = buffer<float>(Scratch::call_sums, tasks * p.m * width);
  if (sums == nullptr) return false;
  bool enough_memory = true;
  parallel.each(tasks, [&](int64_t t) {
    const int64_t begin = shares.begins[t] * unit, end = min(p.k, shares.begins[t + 1] * unit);
    float* partial = buffer<float>(Scratch::task_panel, p.m * width);
    const int64_t factors_size = max(p.w.scale_cols * (p.m * kGroupRows<2> + 1), p.n);
    float* factors = buffer<float>(Scratch::task_scales, factors_size);
    if (partial == nullptr || factors == nullptr) {
      __atomic_store_n(&enough_memory, false, __ATOMIC_RELAXED);
      return;
    }
    if constexpr (D::kTableRows > 0) {
      if (p.m == 1 && (p.w.col_span == 1 || p.w.scale_cols == 1)) {
        const int64_t columns = Nibbles<D>::width(p.n);
        uint8_t* nibbles = buffer<uint8_t>(Scratch::task_sums, kTableGroup / D::kTableRows * columns / 2);
        partial = buffer<float>(Scratch::task_panel, columns);
        if (nibbles == nullptr || partial == nullptr) {
          __atomic_store_n(&enough_memory, false, __ATOMIC_RELAXED);
        } else {
          stream_tables<D>(w, x, begin, end, sums + t * width, partial, factors, nibbles);
        }
        return;
      }
    }
    with_constant<kStreamRows>(p.m, [&](auto m) {
      if (p.w.col_span == 1) {
        stream_rows<m.value, true>(decoder, w, x, p.k, begin, end, sums + t * p.m * width, partial, factors);
      } else {
        stream_rows<m.value, false>(decoder, w, x, p.k, begin, end, sums + t * p.m * width, partial, factors);
      }
    });
  });
  for (int64_t m = 0; m < p.m; ++m) {
    for (int64_t n = 0; n < p.n; n += kLanes) {
      F total = load(sums + m * width + n);
      for (int64_t t = 1; t < tasks; ++t) total += load(sums + (t * p.m + m) * width + n);
      store(y + m * p.n + n, total, min(kLanes, p.n - n));
    }
  }
  return enough_memory;
}

// ---- Dot form

constexpr int64_t kDotColumns = 512;  // columns in one chain of sums, at most
constexpr int64_t kDotAhead = 2048;   // bytes to prefetch: rows follow each other in memory

inline bool dot_fits(const Weights& w) {
  const bool along = w.row_span == 1 && (w.col_span % kLine == 0 || w.col_span >= w.columns);
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

// The stored rows [begin, end); not inlined, so that the decoder's tables stay in registers. `held` has room for a row
// of scales.
template <int kM, typename D>
__attribute__((noinline)) void dot_rows(const D& shared, const Matrix& w, int64_t begin, int64_t end, const float* x,
                                        int64_t width, bool along, float* held, float* y, int64_t y_stride) {
  const D decoder = shared;
  const int64_t columns = w.w.columns, block = along ? w.w.col_span : columns;
  for (int64_t row = begin; row < end; ++row) {
    const float* scales = along ? w.scales(row, 0, w.w.scale_cols, held) : nullptr;
    dot_row<kM>(decoder, w.row(row), columns, x, width, scales, block, y + row, y_stride);
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
    for (int64_t c = 0; c < width; c += kLanes) {
      const float* from = x + m * p.k + c;
      const F v = c + kLanes <= p.k ? load(from) : c < p.k ? load(from, p.k - c) : zero();
      store(packed + m * width + c, D::unorder(v));
    }
  }
  bool enough_memory = true;
  const int64_t unit = along ? 1 : min(p.w.row_span, p.n);
  const Shares shares(ceil_div(p.n, unit), parallel.threads(), ceil_div(kShareWork, unit * p.k * p.m));
  parallel.each(shares.count, [&](int64_t t) {
    const int64_t begin = shares.begins[t] * unit, end = min(p.n, shares.begins[t + 1] * unit);
    float* scaled = buffer<float>(Scratch::task_panel, p.m * width);
    float* held = buffer<float>(Scratch::task_scales, max(p.w.scale_cols, kLine));
    if (scaled == nullptr || held == nullptr) {
      __atomic_store_n(&enough_memory, false, __ATOMIC_RELAXED);
      return;
    }
    for (int64_t n = begin; n < end;) {
      int64_t rows = end - n;
      const float* operand = packed;
      if (!along) {
        // The scales of a block of rows go to x.
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
      with_constant<kDotRows>(p.m, [&](auto m) {
        dot_rows<m.value>(decoder, w, n, n + rows, operand, width, along, held, y, p.n);
      });
      n += rows;
    }
  });
  return enough_memory;
}

// ---- Panel form

constexpr int kTileLanes = kTileVectors * kLanes;
constexpr int64_t kPanelDepth = kLanes == 16 ? 128 : 256;  // of k: the part of a panel as wide as a tile stays in L1

// tile[r, :] = sum over k of a[r * a_row + k * a_step] * b[k, :]; not inlined, so that all sums stay in registers.
template <int kRows, int kWidth>
__attribute__((noinline)) void multiply_tile(int64_t depth, const float* a, int64_t a_row, int64_t a_step,
                                             const float* b, float* tile) {
  F acc[kRows][kWidth];
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kWidth; ++i) acc[r][i] = zero();
  }
  for (int64_t k = 0; k < depth; ++k) {
    F v[kWidth];
    for (int i = 0; i < kWidth; ++i) v[i] = load(b + k * kWidth * kLanes + i * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const F factor = broadcast(a[r * a_row + k * a_step]);
      for (int i = 0; i < kWidth; ++i) acc[r][i] = fma(v[i], factor, acc[r][i]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kWidth; ++i) store(tile + r * kWidth * kLanes + i * kLanes, acc[r][i]);
  }
}

// The scaled values of a line of `rows` stored rows, in the decoder's order: vector i of row r goes to
// out + r * row_step + vector_at[i].
template <typename D>
LOWBIT_INLINE void decode_lines(const D& decoder, const Matrix& w, int64_t row, int64_t rows, int64_t column,
                                float* out, int64_t row_step, const int64_t vector_at[kVectors]) {
  const bool whole = column + kLine <= w.w.columns;
  const int64_t offset = column / D::kPerByte;
  const int64_t scale_col = column / w.w.col_span;
  const bool one_scale = scale_col == (min(column + kLine, w.w.columns) - 1) / w.w.col_span;
  int64_t scale_row = row / w.w.row_span - 1, scaled_until = row;
  F s[kVectors] = {};
  for (int64_t r = row; r < row + rows; ++r) {
    if (r == scaled_until) {
      scaled_until = (++scale_row + 1) * w.w.row_span;
      if (one_scale) {
        for (int i = 0; i < kVectors; ++i) s[i] = broadcast(w.scale(scale_row, scale_col));
      } else {
        line_scales<D>(w, scale_row, column, s);
      }
    }
    const uint8_t* bytes = w.row(r) + offset;
    F v[kVectors];
    if (whole) {
      prefetch(bytes + 64);
      decoder.decode(bytes, v);
    } else {
      decoder.decode(PaddedLine<D>(bytes, w.w.columns - column).bytes, v);
    }
    for (int i = 0; i < kVectors; ++i) store(out + (r - row) * row_step + vector_at[i], v[i] * s[i]);
  }
}

// First stored axis contracted: the panel is (k, columns), x is packed by tiles of rows as (slab, tile, k, row).
template <typename D>
bool matmul_panel_first(const D& decoder, const Matmul& p, const Matrix& w, const float* x, float* y,
                        const Parallel& parallel) {
  const int64_t tiles = ceil_div(p.m, kTileRows);
  const auto tile_begin = [&](int64_t tile) { return p.m * tile / tiles; };
  float* packed = buffer<float>(Scratch::call_pack, p.m * p.k);
  if (packed == nullptr) return false;
  parallel.each(ceil_div(p.k, kPanelDepth), [&](int64_t i) {
    const int64_t slab = i * kPanelDepth, depth = min(kPanelDepth, p.k - slab);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t begin = tile_begin(tile), rows = tile_begin(tile + 1) - begin;
      float* out = packed + slab * p.m + begin * depth;
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t k = 0; k < depth; ++k) out[k * rows + r] = x[(begin + r) * p.k + slab + k];
      }
    }
  });
  const int64_t lines = ceil_div(p.n, kLine);
  const int64_t tasks = min(lines, parallel.threads() * (p.m >= 48 ? 4 : 2));
  parallel.each(tasks, [&](int64_t t) {
    alignas(64) float panel[kPanelDepth * kLine];
    alignas(64) float tile_sums[kTileRows * kTileLanes];
    // A line is one or more tiles wide.
    int64_t vector_at[kVectors];
    for (int i = 0; i < kVectors; ++i) {
      vector_at[i] = i / kTileVectors * (kPanelDepth * kTileLanes) + i % kTileVectors * kLanes;
    }
    for (int64_t slab = 0; slab < p.k; slab += kPanelDepth) {
      const int64_t depth = min(kPanelDepth, p.k - slab);
      for (int64_t line = lines * t / tasks; line < lines * (t + 1) / tasks; ++line) {
        decode_lines(decoder, w, slab, depth, line * kLine, panel, kTileLanes, vector_at);
        for (int sub = 0; sub < kVectors / kTileVectors; ++sub) {
          const int64_t column = line * kLine + sub * kTileLanes;
          if (column >= p.n) break;
          for (int64_t tile = 0; tile < tiles; ++tile) {
            const int64_t begin = tile_begin(tile), rows = tile_begin(tile + 1) - begin;
            const float* a = packed + slab * p.m + begin * depth;
            with_constant<kTileRows>(rows, [&](auto count) {
              const float* b = panel + sub * kPanelDepth * kTileLanes;
              multiply_tile<count.value, kTileVectors>(depth, a, 1, count.value, b, tile_sums);
            });
            for (int64_t r = 0; r < rows; ++r) {
              for (int i = 0; i < kTileVectors; ++i) {
                const int64_t n = column + i * kLanes;
                if (n >= p.n) break;
                float* out = y + (begin + r) * p.n + n;
                F sum = D::order(load(tile_sums + r * kTileLanes + i * kLanes));
                const int64_t count = p.n - n;
                if (count >= kLanes) {
                  store(out, slab == 0 ? sum : sum + load(out));
                } else {
                  store(out, slab == 0 ? sum : sum + load(out, count), count);
                }
              }
            }
          }
        }
      }
    }
  });
  return true;
}

// Last stored axis contracted: vectors run along the rows of x, packed as (slab, tile, k, row) with k in the decoder's
// order, and each decoded value is broadcast. kWidth vectors of rows of x and kRows stored rows make a tile.
template <int kWidth, typename D>
bool matmul_panel_last(const D& decoder, const Matmul& p, const Matrix& w, const float* x, float* y,
                       const Parallel& parallel) {
  constexpr int kRows = kWidth == 1 ? 12 : kTileRows * kTileVectors / kWidth;  // as many sums as registers hold
  constexpr int64_t kStored = 48, kDepth = 128;  // stored rows and columns decoded at a time, 24 KB
  constexpr int64_t kTile = kWidth * kLanes;
  static_assert(kStored % kRows == 0 && kDepth % kLine == 0, "");
  const int64_t tiles = ceil_div(p.m, kTile), width = tiles * kTile, depth = round_up(p.k, kLine);
  float* packed = buffer<float>(Scratch::call_pack, width * depth);
  if (packed == nullptr) return false;
  parallel.each(ceil_div(depth, kDepth), [&](int64_t i) {
    const int64_t slab = i * kDepth, steps = min(kDepth, depth - slab);
    for (int64_t m = 0; m < width; ++m) {
      float* out = packed + slab * width + m / kTile * (steps * kTile) + m % kTile;
      for (int64_t k = 0; k < steps; k += kLanes) {
        float v[kLanes] = {};
        if (m < p.m && slab + k < p.k) {
          const float* from = x + m * p.k + slab + k;
          store(v, D::unorder(load(from, min(kLanes, p.k - slab - k))));
        }
        for (int lane = 0; lane < kLanes; ++lane) out[(k + lane) * kTile] = v[lane];
      }
    }
  });
  bool enough_memory = true;
  parallel.each(ceil_div(p.n, kStored), [&](int64_t block) {
    alignas(64) float panel[kStored * kDepth];
    alignas(64) float tile_sums[kRows * kTile];
    const int64_t row = block * kStored, rows = min(kStored, p.n - row);
    float* sums = buffer<float>(Scratch::task_panel, kStored * width);
    if (sums == nullptr) {
      __atomic_store_n(&enough_memory, false, __ATOMIC_RELAXED);
      return;
    }
    memset(sums, 0, static_cast<size_t>(kStored * width) * 4);
    if (rows < kStored) memset(panel, 0, sizeof(panel));  // tiles are multiplied whole
    const int64_t vector_at[kVectors] = {0, kLanes, 2 * kLanes, 3 * kLanes};
    for (int64_t slab = 0; slab < depth; slab += kDepth) {
      const int64_t steps = min(kDepth, depth - slab);
      for (int64_t k = 0; k < steps; k += kLine) {
        decode_lines(decoder, w, row, rows, slab + k, panel + k, kDepth, vector_at);
      }
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const float* b = packed + slab * width + tile * steps * kTile;
        for (int64_t r = 0; r < rows; r += kRows) {
          multiply_tile<kRows, kWidth>(steps, panel + r * kDepth, kDepth, 1, b, tile_sums);
          for (int64_t i = 0; i < kRows; ++i) {
            for (int64_t lane = 0; lane < kTile; lane += kLanes) {
              float* sum = sums + (r + i) * width + tile * kTile + lane;
              store(sum, load(sum) + load(tile_sums + i * kTile + lane));
            }
          }
        }
      }
    }
    for (int64_t m = 0; m < p.m; ++m) {
      for (int64_t r = 0; r < rows; ++r) y[m * p.n + row + r] = sums[r * width + m];
    }
  });
  return enough_memory;
}

// ---- The choice

template <typename D>
bool matmul_one(const D& decoder, const Matmul& p, const Matrix& w, const float* x, float* y,
                const Parallel& parallel) {
  if (p.contract_last) {
    if (p.m <= kDotRows && dot_fits(p.w)) return matmul_dot(decoder, p, w, x, y, parallel);
    // As many vectors as leave the fewest lanes empty.
    const int64_t vectors = ceil_div(p.m, kLanes), tiles = ceil_div(vectors, kTileVectors);
    bool done = false;
    with_constant<kTileVectors>(ceil_div(vectors, tiles), [&](auto width) {
      done = matmul_panel_last<width.value>(decoder, p, w, x, y, parallel);
    });
    return done;
  }
  if (p.m <= kStreamRows && stream_fits(p.w)) return matmul_stream(decoder, p, w, x, y, parallel);
  return matmul_panel_first(decoder, p, w, x, y, parallel);
}

// multiply(layer, x, y, parallel) for each matrix of the batch, with x and y in float32.
template <typename Multiply>
bool each_product(const Matmul& p, const Parallel& parallel, const Multiply& multiply) {
  const int64_t x_size = p.m * p.k, y_size = p.m * p.n;
  const float* x = static_cast<const float*>(p.x);
  float* y = static_cast<float*>(p.y);
  if (p.x_type != Float::f32) {
    float* wide = buffer<float>(Scratch::call_x, p.batch * x_size);
    if (wide == nullptr) return false;
    to_f32(p.x, p.x_type, 0, p.batch * x_size, wide);
    x = wide;
  }
  if (p.y_type != Float::f32) {
    y = buffer<float>(Scratch::call_y, p.batch * y_size);
    if (y == nullptr) return false;
  }
  bool enough_memory = true;
  const Parallel alone(1, nullptr, nullptr);
  const auto one = [&](int64_t b, const Parallel& inner) {
    const int64_t layer = min(max(p.index[b], 0), p.w.layers - 1);
    if (multiply(layer, x + b * x_size, y + b * y_size, inner)) return;
    __atomic_store_n(&enough_memory, false, __ATOMIC_RELAXED);
  };
  const int64_t work = p.m * p.k * p.n;
  if (p.batch >= 2 * parallel.threads() && p.batch * work > kAloneWork) {
    parallel.each(p.batch, [&](int64_t b) { one(b, alone); });
  } else {
    for (int64_t b = 0; b < p.batch; ++b) one(b, work > kAloneWork ? parallel : alone);
  }
  if (p.y_type != Float::f32) from_f32(y, p.batch * y_size, p.y, p.y_type, 0);
  return enough_memory;
}

inline bool matmul_exact(const Matmul& p, const Parallel& parallel) {
  return each_product(p, parallel, [&](int64_t layer, const float* x, float* y, const Parallel& inner) {
    if (p.k == 0) {
      memset(y, 0, static_cast<size_t>(p.m * p.n) * 4);
      return true;
    }
    return with_decoder(p.w.format, [&](const auto& decoder) {
      return matmul_one(decoder, p, Matrix(p.w, layer), x, y, inner);
    });
  });
}

}  // namespace lowbit::LOWBIT_ISA

#endif  // LOWBIT_MATMUL_EXACT_H_
