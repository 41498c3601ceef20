// Products in float32 with few rows of x that contract the first stored axis: each stored row, times its element of x,
// is added to y.
#ifndef LOWBIT_EXACT_STREAM_H_
#define LOWBIT_EXACT_STREAM_H_

#include "matmul_common.h"

namespace lowbit::LOWBIT_ISA {

// Stored rows that are read in parallel, from left to right: as many streams as memory handles well. With more rows of
// x, larger groups save loads and stores of sums; but rows are often 4 KB apart, and L1 holds only 8 such lines.
template <int kM>
constexpr int64_t kGroupRows = kM == 1 ? 8 : 16;

// Whether scales are constant along lines of a row, or along groups of rows.
inline bool stream_fits(const Weights& w) {
  const bool along = w.col_span == 1 && w.row_span >= 8;
  const bool across = w.row_span == 1 && (w.col_span % kLine == 0 || w.col_span >= w.columns);
  return along || across;
}

// Whether the sums lack a factor of their column, which is part of all scales in it.
LOWBIT_INLINE bool factors_later(const Matrix& w) { return w.w.col_span == 1 && w.has_factors(false); }

// What the rows of a group are multiplied by: for row r of the group and row m of x, in block b of the columns.
struct Factors {
  const float* at;
  int64_t row_step, m_step;  // the step between blocks is 1
  int64_t block_lines;
};

// Where the sums of a block of rows are accumulated: in `partial` (kM, width), in the decoder's order. The last group
// of rows adds them to `sums` (kM, width), in column order, times `scales` if there are any.
struct Sums {
  float* partial;
  float* sums;
  const float* scales;
  int64_t width;
  bool first, last;
};

// Vectors of columns whose sums are in registers at a time. With many rows of x they are half a line, whose other half
// is decoded again.
template <int kM>
constexpr int kStreamVectors = kM * kVectors < kRegisters ? kVectors : kVectors / 2;

// The stored rows of a group, from some column on, and what they are multiplied by. If kTables is not 0, every other
// row has its factor in a table, and needs only an addition.
template <typename D, int kTables>
struct StreamRows {
  const D& decoder;
  const NibbleVectors<false>* tables;
  const uint8_t* bytes;
  int64_t row_bytes, count;
  const float* factor;
  int64_t row_step, m_step;

  LOWBIT_INLINE bool is_table(int64_t row) const { return kTables > 0 && row % 2 == 1; }
  LOWBIT_INLINE void decode(int64_t row, F v[kVectors]) const {
    const uint8_t* from = bytes + row * row_bytes;
    is_table(row) ? decode_to_add(tables[row / 2], from, v) : decoder.decode(from, v);
  }
};

// sums += factor * levels of the vectors of a line from kFrom on
template <int kM, bool kAlong, int kRows, int kFrom, typename D, int kTables>
LOWBIT_INLINE void add_vectors(const StreamRows<D, kTables>& rows, const Sums& to, int64_t line) {
  constexpr int kCount = kStreamVectors<kM>;
  const int64_t count = kRows > 0 ? kRows : rows.count, column = line * kLine + kFrom * kLanes;
  F acc[kM][kCount];
  for (int m = 0; m < kM; ++m) {
    const float* partial = to.partial + m * to.width + column;
    for (int i = 0; i < kCount; ++i) acc[m][i] = to.first ? zero() : load(partial + i * kLanes);
  }
#pragma GCC unroll 8
  for (int64_t r = 0; r < count; ++r) {
    F v[kVectors];
    rows.decode(r, v);
    for (int m = 0; m < kM; ++m) {
      const F f = broadcast(rows.factor[m * rows.m_step + r * rows.row_step]);
      for (int i = 0; i < kCount; ++i) {
        acc[m][i] = rows.is_table(r) ? acc[m][i] + v[kFrom + i] : fma(v[kFrom + i], f, acc[m][i]);
      }
    }
  }
  for (int m = 0; m < kM; ++m) {
    float* partial = to.partial + m * to.width + column;
    float* sums = to.sums + m * to.width + column;
    if (!to.last) {
      for (int i = 0; i < kCount; ++i) store(partial + i * kLanes, acc[m][i]);
      continue;
    }
    for (int i = 0; i < kCount; i += 2) D::order(acc[m] + i);
    for (int i = 0; i < kCount; ++i) {
      const F sum = load(sums + i * kLanes);
      const F scale = kAlong ? load(to.scales + column + i * kLanes) : zero();
      store(sums + i * kLanes, kAlong ? fma(acc[m][i], scale, sum) : acc[m][i] + sum);
    }
  }
}

// sums += factor * levels of `rows` stored rows, in whole lines. kRows is their number if it is a constant, else 0.
// Not inlined, so that the tables of this loop stay in registers.
template <int kM, bool kAlong, int kRows, typename D>
__attribute__((noinline)) void add_rows(const D& decoder, const uint8_t* bytes, int64_t row_bytes, int64_t any_rows,
                                        int64_t lines, const Factors& factors, const Sums& where) {
  constexpr int kTables = D::kTimes && kM == 1 && kAlong && kRows > 0 ? kRows / 2 : 0;
  const Sums to = where;  // a copy that the stores below cannot alias
  const int64_t count = kRows > 0 ? kRows : any_rows;
  NibbleVectors<false> tables[kTables + 1];
  if constexpr (kTables > 0) {
    for (int i = 0; i < kTables; ++i) tables[i] = decoder.times(factors.at[2 * i + 1]);
  }
  StreamRows<D, kTables> rows{decoder,       tables, bytes, row_bytes, count, factors.at, kAlong ? 1 : factors.row_step,
                              factors.m_step};
  int64_t in_block = 0;
  for (int64_t line = 0; line < lines; ++line) {
    const int64_t offset = line * kLineBytes<D>;
    rows.bytes = bytes + offset;
    if (offset % 64 < kLineBytes<D>) {
      // The next group, in the order of its addresses: memory is fastest so.
      const uint8_t* next = bytes + count * row_bytes + offset / 64 * 64 * count;
      for (int64_t r = 0; r < count; ++r) prefetch(next + 64 * r);
    }
    add_vectors<kM, kAlong, kRows, 0>(rows, to, line);
    if constexpr (kStreamVectors<kM> < kVectors) add_vectors<kM, kAlong, kRows, kStreamVectors<kM>>(rows, to, line);
    if (!kAlong && ++in_block == factors.block_lines) {
      in_block = 0;
      ++rows.factor;
    }
  }
}

// sums (kM, width) = x (kM, k) times the rows [begin, end) of the matrix. `scaled` is a buffer for the factors, which
// include scales across the contracted axis, `codes` one for joined codes of a group of rows.
template <int kM, bool kAlong, typename D>
void stream_rows(const D& decoder, const Matrix& w, const float* x, int64_t k, int64_t begin, int64_t end, float* sums,
                 float* partial, float* scaled, uint8_t* codes) {
  constexpr int64_t kGroup = kGroupRows<kM>;
  const int64_t columns = w.w.columns, row_bytes = w.w.row_bytes, blocks = w.w.scale_cols;
  const int64_t lines = columns / kLine, rest = columns % kLine;
  const int64_t width = sums_width(kM, round_up(columns, kLine));
  memset(sums, 0, static_cast<size_t>(kM * width) * 4);
  const bool later = kAlong && factors_later(w);
  for (int64_t block = begin; block < end;) {
    const int64_t block_end = kAlong ? min(end, (block / w.w.row_span + 1) * w.w.row_span) : end;
    const float* scales = nullptr;
    if (kAlong) {
      const int64_t scale_row = block / w.w.row_span;
      scales = later ? w.without_factors(scale_row, 0, columns, scaled) : w.scales(scale_row, 0, columns, scaled);
    }
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
      if (kAlong) w.prefetch_scales(block / w.w.row_span + 1, row - block, row - block + rows, w.w.row_span);
      const uint8_t* bytes = w.rows<D>(row, rows, codes);
      if (rows == kGroup) {
        add_rows<kM, kAlong, kGroup>(decoder, bytes, row_bytes, rows, lines, factors, to);
      } else {
        add_rows<kM, kAlong, 0>(decoder, bytes, row_bytes, rows, lines, factors, to);
      }
      if (rest > 0) {
        // The last columns of the rows, copied so that a whole line can be read.
        uint8_t line[kGroup * kLineBytes<D>] = {};
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t from = lines * kLineBytes<D>;
          memcpy(line + r * kLineBytes<D>, bytes + r * row_bytes + from, static_cast<size_t>(row_bytes - from));
        }
        if (!kAlong) factors.at += lines * kLine / w.w.col_span;
        to = {partial + lines * kLine, sums + lines * kLine, last_scales, width, to.first, to.last};
        add_rows<kM, kAlong, 0>(decoder, line, kLineBytes<D>, rows, 1, factors, to);
      }
    }
    block = block_end;
  }
}

// The same for one row of x and codes of one or two bits: the codes of several rows in one column form a 4-bit index
// into a table of the 16 sums that they can add to y. One lookup replaces kTableRows multiplications. `nibbles` is a
// buffer for kTableGroup rows.
constexpr int64_t kTableGroup = 16;

template <typename D>
struct Nibbles {
  static constexpr int64_t kBytes = sizeof(Words), kPlane = 2 * kBytes;
  static constexpr int64_t kChunk = D::kTableRows * kPlane;  // columns regrouped at a time
  static int64_t width(int64_t columns) { return round_up(columns, kChunk); }
};

// nibbles = regrouped codes of kTableRows rows
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
void stream_tables(const D& decoder, const Matrix& w, const float* x, int64_t begin, int64_t end, float* sums,
                   float* partial, float* scale_row, uint8_t* nibbles) {
  using N = Nibbles<D>;
  const int64_t columns = w.w.columns, width = N::width(columns);
  const bool along = w.w.col_span == 1 && w.w.scale_cols == columns;
  memset(sums, 0, static_cast<size_t>(round_up(columns, kLine)) * 4);
  for (int64_t block = begin; block < end;) {
    const int64_t block_end = along ? min(end, (block / w.w.row_span + 1) * w.w.row_span) : end;
    for (int64_t row = block; row < block_end; row += kTableGroup) {
      const int64_t rows = min(kTableGroup, block_end - row), tables = ceil_div(rows, D::kTableRows);
      NibbleVectors<false> decoders[kTableGroup / D::kTableRows];
      for (int64_t t = 0; t < tables; ++t) {
        const uint8_t* from[D::kTableRows];
        float table[16] = {};
        for (int r = 0; r < D::kTableRows; ++r) {
          const int64_t at = row + t * D::kTableRows + r;
          from[r] = w.rows<D>(min(at, block_end - 1), 1, nullptr);
          if (at >= block_end) continue;
          const float factor = along ? x[at] : x[at] * w.scale(at / w.w.row_span, 0);
          for (int c = 0; c < 16; ++c) table[c] += factor * decoder.level(static_cast<uint8_t>(c << 4), r);
        }
        decoders[t] = NibbleVectors<false>(table);
        regroup_rows<D>(from, w.w.row_bytes, kTableGroup * w.w.row_bytes, nibbles + t * width / 2);
      }
      for (int64_t at = 0; at < width; at += kLine) {
        F acc[kVectors];
        for (int i = 0; i < kVectors; ++i) acc[i] = row == block ? zero() : load(partial + at + i * kLanes);
        for (int64_t t = 0; t < tables; ++t) {
          F v[kVectors];
          decode_to_add(decoders[t], nibbles + (t * width + at) / 2, v);
          for (int i = 0; i < kVectors; ++i) acc[i] += v[i];
        }
        for (int i = 0; i < kVectors; ++i) store(partial + at + i * kLanes, acc[i]);
      }
    }
    const float* scales = nullptr;
    if (along) {
      const int64_t row = block / w.w.row_span;
      scales = factors_later(w) ? w.without_factors(row, 0, columns, scale_row) : w.scales(row, 0, columns, scale_row);
    }
    for (int64_t at = 0; at < width; at += 2 * kLanes) {
      F pair[2] = {load(partial + at), load(partial + at + kLanes)};
      NibbleVectors<false>::order(pair);
      float plane[2 * kLanes];
      for (int i = 0; i < 2; ++i) store(plane + i * kLanes, pair[i]);
      const int64_t in_chunk = at % N::kChunk, i = in_chunk / N::kPlane, j = in_chunk % N::kPlane;
      const int64_t column = at - in_chunk + D::kTableRows * j + D::kPlaneColumn[i];
      for (int lane = 0; lane < 2 * kLanes; ++lane) {
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
  const int64_t width = sums_width(p.m, round_up(p.n, kLine));
  // Each share of the rows has its own sums. Shares end at block boundaries, if there are enough blocks.
  const int64_t unit = p.w.col_span == 1 && p.w.row_span * parallel.threads() <= p.k ? p.w.row_span : 64;
  const Shares shares(ceil_div(p.k, unit), parallel.threads(), ceil_div(kShareWork, unit * p.n * p.m));
  const int64_t tasks = shares.count;
  float* sums = buffer<float>(Scratch::call_sums, tasks * p.m * width + width);
  if (sums == nullptr) return false;
  float* factors = factors_later(w) ? sums + tasks * p.m * width : nullptr;
  if (factors != nullptr) w.factors(false, 0, p.n, factors);
  bool enough_memory = true;
  parallel.each(tasks, [&](int64_t t) {
    const int64_t begin = shares.begins[t] * unit, end = min(p.k, shares.begins[t + 1] * unit);
    float* partial = buffer<float>(Scratch::task_panel, p.m * width);
    const int64_t factors_size = max(p.w.scale_cols * (p.m * kGroupRows<2> + 1), p.n);
    float* scaled = buffer<float>(Scratch::task_scales, factors_size);
    uint8_t* codes = buffer<uint8_t>(Scratch::task_codes, w.joined() ? kGroupRows<2> * p.n : 1);
    if (partial == nullptr || scaled == nullptr || codes == nullptr) {
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
          stream_tables(decoder, w, x, begin, end, sums + t * width, partial, scaled, nibbles);
        }
        return;
      }
    }
    with_constant<kStreamRows>(p.m, [&](auto m) {
      if (p.w.col_span == 1) {
        stream_rows<m.value, true>(decoder, w, x, p.k, begin, end, sums + t * p.m * width, partial, scaled, codes);
      } else {
        stream_rows<m.value, false>(decoder, w, x, p.k, begin, end, sums + t * p.m * width, partial, scaled, codes);
      }
    });
  });
  const auto add = [&](int64_t m) {
    for (int64_t n = 0; n < p.n; n += kLanes) {
      F total = load(sums + m * width + n);
      for (int64_t t = 1; t < tasks; ++t) total += load(sums + (t * p.m + m) * width + n);
      if (factors != nullptr) total *= load(factors + n);
      store(y + m * p.n + n, total, min(kLanes, p.n - n));
    }
  };
  if (p.m * p.n * tasks < kShareWork) {
    for (int64_t m = 0; m < p.m; ++m) add(m);
  } else {
    parallel.each(p.m, add);
  }
  return enough_memory;
}

}  // namespace lowbit::LOWBIT_ISA

#endif  // LOWBIT_EXACT_STREAM_H_
