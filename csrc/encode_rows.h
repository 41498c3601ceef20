// What the encoders share: packing of codes, and passes over a block of rows with a scale for each column or for blocks
// of columns.
#ifndef LOWBIT_ENCODE_ROWS_H_
#define LOWBIT_ENCODE_ROWS_H_

#include "sums.h"

namespace lowbit::LOWBIT_ISA {

// XLA's maximum does the same, except where each element has its own scale and there is no maximum.
LOWBIT_INLINE F top_or_zero(I top) { return as_floats(top >= 0x00800000 ? top : I{}); }

LOWBIT_INLINE F finite_or_nan(I top, F scale) {
  return as_floats(top >= 0x7f800000 ? I{} + 0x7fc00000 : as_ints(scale));
}

// Packs kLanes codes into the row of bytes from `column` on, which may be half a byte if there are few lanes.
template <int kPerByte>
LOWBIT_INLINE void put_codes(I codes, uint8_t* row, int64_t column) {
  uint8_t* out = row + column / kPerByte;
  if constexpr (kPerByte <= 2 || kLanes > 4) {
    pack_codes<kPerByte>(codes, out);
  } else {
    constexpr int kBits = 8 / kPerByte;
    const int four = codes[0] << 3 * kBits | codes[1] << 2 * kBits | codes[2] << kBits | codes[3];
    *out = static_cast<uint8_t>(column % kPerByte == 0 ? four << (8 - 4 * kBits) : *out | four);
  }
}

// The same of the first `count` codes; the last byte is padded with zeros.
template <int kPerByte>
LOWBIT_INLINE void put_codes(I codes, int64_t count, uint8_t* row, int64_t column) {
  if (count == kLanes) return put_codes<kPerByte>(codes, row, column);
  codes = codes & (lane_numbers() < static_cast<int32_t>(count));
  uint8_t bytes[kLanes] = {};
  uint8_t* out = row + column / kPerByte;
  if (column % kPerByte != 0) bytes[0] = *out;
  put_codes<kPerByte>(codes, bytes, column % kPerByte);
  memcpy(out, bytes, static_cast<size_t>(ceil_div(count, kPerByte)));
}

// A number for each column, and one for all.
struct EachColumn {
  const float* values;
  LOWBIT_INLINE F at(int64_t column) const { return load(values + column); }
};
struct AllColumns {
  float value;
  LOWBIT_INLINE F at(int64_t) const { return broadcast(value); }
};

// The largest magnitudes of columns.
template <bool kFull>
LOWBIT_INLINE void raise_tops(const Rows<kFull>& rows, int32_t* tops) {
  I top = load_as<I>(tops + rows.column);
  for (int i = 0; i < kRows; ++i) top = max(top, magnitude(rows.x[i]));
  store_as(tops + rows.column, top);
}

// A step of a pass says what it finds for each column.
struct FindTops {
  static constexpr bool kTops = true, kCounts = false, kSums = false;
  int32_t* tops;

  template <bool kFull>
  LOWBIT_INLINE F operator()(const Rows<kFull>& rows) const {
    raise_tops(rows, tops);
    return zero();
  }
};

struct AddRows {
  static constexpr bool kTops = false, kCounts = false, kSums = true;
  template <bool kFull>
  LOWBIT_INLINE F operator()(const Rows<kFull>& rows) const {
    return rows.sum([](int, F x) { return x; });
  }
};

// A block of rows, or some of its columns: passes over it in parts, with numbers for each column.
class BlockOfRows {
 public:
  static constexpr int64_t kPartRows = 64, kPartColumns = 1024;  // a power of two, for the order of sums; whole bytes

  const Encode& p;
  int64_t layer, block, row, rows, column, width;
  int64_t tall, wide, padded;  // parts, and the width in whole vectors
  // One for each column; of all its rows after a pass.
  int32_t *tops, *counts;
  float *sums, *inverses, *limits, *scales, *shares;

  BlockOfRows(const Encode& p, int64_t layer, int64_t block, int64_t column, int64_t width)
      : p(p),
        layer(layer),
        block(block),
        row(block * p.row_span),
        rows(min(p.row_span, p.rows - row)),
        column(column),
        width(width),
        tall(ceil_div(rows, kPartRows)),
        wide(ceil_div(width, kPartColumns)),
        padded(round_up(width, kLanes)) {}

  bool allocate() {
    const size_t line = static_cast<size_t>(padded) * 4;
    float* totals = static_cast<float*>(scratch(Scratch::call_pack, 7 * line));
    part_sums_ = static_cast<float*>(scratch(Scratch::call_sums, 3 * static_cast<size_t>(tall) * line));
    if (totals == nullptr || part_sums_ == nullptr) return false;
    part_tops_ = reinterpret_cast<int32_t*>(part_sums_ + tall * padded);
    part_counts_ = part_tops_ + tall * padded;
    sums = totals;
    inverses = totals + padded;
    limits = totals + 2 * padded;
    scales = totals + 3 * padded;
    shares = totals + 4 * padded;
    tops = reinterpret_cast<int32_t*>(totals + 5 * padded);
    counts = tops + padded;
    return true;
  }

  // shares = 1 / number of elements that share a scale
  void set_shares() {
    for (int64_t at = 0; at < padded; at += p.col_span) {
      const int64_t end = min(at + p.col_span, padded), columns = max(min(p.col_span, width - at), 1);
      const float share = 1.0f / (static_cast<float>(rows) * static_cast<float>(columns));
      for (int64_t c = at; c < end; ++c) shares[c] = share;
    }
  }

  // Runs the step make(first column, tops, counts, codes) over each part, and joins what it finds.
  template <typename Make>
  bool pass(const Parallel& parallel, const Make& make) {
    using Step = decltype(make(int64_t{}, tops, counts, p.codes));
    bool done = true;
    // A task has whole rows if there are enough, so that different threads do not write to the same page.
    const int64_t split = tall >= 4 * parallel.threads() ? 1 : wide;
    parallel.each(tall * split, [&](int64_t i) {
      const FlushDenormals flush;
      for (int64_t s = i % split; s < wide; s += split) {
        if (!one_part(i / split, s, make)) __atomic_store_n(&done, false, __ATOMIC_RELAXED);
      }
    });
    if (!done) return false;
    parallel.each(wide, [&](int64_t i) {
      const FlushDenormals flush;
      if (!join_parts<Step>(i * kPartColumns)) __atomic_store_n(&done, false, __ATOMIC_RELAXED);
    });
    return done;
  }

  // One number for each block of columns, in each of its columns.
  void join_tops() {
    for (int64_t at = 0; p.col_span > 1 && at < width; at += p.col_span) {
      const int64_t end = min(at + p.col_span, width);
      int32_t top = 0;
      for (int64_t c = at; c < end; ++c) top = tops[c] > top ? tops[c] : top;
      for (int64_t c = at; c < end; ++c) tops[c] = top;
    }
  }
  void join_counts() {
    for (int64_t at = 0; p.col_span > 1 && at < width; at += p.col_span) {
      const int64_t end = min(at + p.col_span, width);
      int32_t count = 0;
      for (int64_t c = at; c < end; ++c) count += counts[c];
      for (int64_t c = at; c < end; ++c) counts[c] = count;
    }
  }
  bool join_sums() {
    if (p.col_span == 1) return true;
    float* levels = static_cast<float*>(scratch(Scratch::task_sums, static_cast<size_t>(PairSums::size(kRun)) * 4));
    if (levels == nullptr) return false;
    for (int64_t at = 0; at < width; at += p.col_span) {
      const int64_t count = min(p.col_span, width - at);
      const PairSums pairs(levels, kRun);
      each_group(runs_of(sums + at, count), nullptr, pairs, AddRows());
      const float sum = sum_of_lines(pairs, count, p.col_span);
      for (int64_t c = 0; c < count; ++c) sums[at + c] = sum;
    }
    return true;
  }

  void store_scales() const {
    float* out = p.scales + (layer * p.scale_rows + block) * p.scale_cols + column / p.col_span;
    if (p.col_span == 1) {
      memcpy(out, scales, static_cast<size_t>(width) * 4);
      return;
    }
    for (int64_t at = 0; at < width; at += p.col_span) out[at / p.col_span] = scales[at];
  }

 private:
  float* part_sums_;
  int32_t *part_tops_, *part_counts_;

  template <typename Make>
  bool one_part(int64_t t, int64_t s, const Make& make) {
    using Step = decltype(make(int64_t{}, tops, counts, p.codes));
    const int64_t first = t * kPartRows, from = s * kPartColumns, at = t * padded + from;
    const int64_t count = min(kPartRows, rows - first), columns = min(kPartColumns, width - from);
    const int64_t levels_size = Step::kSums ? PairSums::size(columns) : 1;
    const int64_t copy_size = p.x_type == Float::f32 ? 1 : kRows * columns;
    float* levels = static_cast<float*>(scratch(Scratch::task_sums, static_cast<size_t>(levels_size) * 4));
    float* copy = static_cast<float*>(scratch(Scratch::task_panel, static_cast<size_t>(copy_size) * 4));
    if (levels == nullptr || copy == nullptr) return false;
    if (Step::kTops) memset(part_tops_ + at, 0, static_cast<size_t>(round_up(columns, kLanes)) * 4);
    if (Step::kCounts) memset(part_counts_ + at, 0, static_cast<size_t>(round_up(columns, kLanes)) * 4);
    const int64_t top_row = layer * p.rows + row + first;
    const int64_t start = top_row * p.columns + column + from;
    const Lines lines{p.x, p.x_type, start, p.columns, count, columns, columns};
    const PairSums pairs(levels, columns);
    uint8_t* codes = p.codes + top_row * p.row_bytes + (column + from) / codes_per_byte(p.encoding);
    each_group(lines, copy, pairs, make(from, part_tops_ + at, part_counts_ + at, codes));
    if (Step::kSums) store_totals(pairs, count, columns, part_sums_ + at);
    return true;
  }

  static void store_totals(const PairSums& pairs, int64_t rows, int64_t columns, float* out) {
    const int64_t groups = ceil_div(rows, kRows);
    for (int64_t c = 0; c < columns; c += kLanes) store(out + c, pairs.total(groups, c));
  }

  template <typename Step>
  bool join_parts(int64_t from) {
    const int64_t columns = min(kPartColumns, padded - from), size = PairSums::size(columns);
    for (int64_t c = from; c < from + columns; c += kLanes) {
      I top{}, count{};
      for (int64_t t = 0; t < tall; ++t) {
        if (Step::kTops) top = max(top, load_as<I>(part_tops_ + t * padded + c));
        if (Step::kCounts) count += load_as<I>(part_counts_ + t * padded + c);
      }
      if (Step::kTops) store_as(tops + c, top);
      if (Step::kCounts) store_as(counts + c, count);
    }
    if (!Step::kSums) return true;
    float* levels = static_cast<float*>(scratch(Scratch::task_sums, static_cast<size_t>(size) * 4));
    if (levels == nullptr) return false;
    const PairSums pairs(levels, columns);
    each_group(Lines{part_sums_, Float::f32, from, padded, tall, columns, columns}, nullptr, pairs, AddRows());
    store_totals(pairs, tall, columns, sums + from);
    return true;
  }
};

}  // namespace lowbit::LOWBIT_ISA

#endif  // LOWBIT_ENCODE_ROWS_H_
