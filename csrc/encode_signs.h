// Ternary and binary codes, bit for bit equal to `formats/onebit.py` as XLA runs it on CPU.
#ifndef LOWBIT_ENCODE_SIGNS_H_
#define LOWBIT_ENCODE_SIGNS_H_

#include "encode_rows.h"

namespace lowbit::LOWBIT_ISA {

// ---- Passes; `inverse` is that of the unit

// The largest magnitudes, the sums of elements or of magnitudes, and the codes of binary.
template <bool kMagnitudes, bool kSigns, typename P>
struct FirstPass {
  static constexpr bool kTops = true, kCounts = false, kSums = true;
  int32_t* tops;
  P inverse;
  uint8_t* codes;
  int64_t row_bytes;

  template <bool kFull>
  LOWBIT_INLINE F operator()(const Rows<kFull>& rows) const {
    raise_tops(rows, tops);
    for (int i = 0; kSigns && i < kRows; ++i) {
      if (!kFull && rows.count(i) == 0) continue;
      put_codes<8>(-(rows.x[i] >= zero()), rows.count(i), codes + (rows.first + i) * row_bytes, rows.column);
    }
    const F unit = inverse.at(rows.column);
    return rows.sum([&](int, F x) { return (kMagnitudes ? size_of(x) : x) * unit; });
  }
};

// The sums of squared distances to the mean.
template <typename P>
struct SquarePass {
  static constexpr bool kTops = false, kCounts = false, kSums = true;
  P inverse, mean;

  template <bool kFull>
  LOWBIT_INLINE F operator()(const Rows<kFull>& rows) const {
    const F unit = inverse.at(rows.column), middle = mean.at(rows.column);
    return rows.sum([&](int, F x) {
      const F distance = x * unit - middle;
      return distance * distance;
    });
  }
};

// The codes of ternary; if kKept, also the sums of the magnitudes beyond the limit, and how many they are.
template <bool kKept, typename P>
struct TernaryPass {
  static constexpr bool kTops = false, kCounts = kKept, kSums = kKept;
  P inverse, limit;
  int32_t* counts;
  uint8_t* codes;
  int64_t row_bytes;

  template <bool kFull>
  LOWBIT_INLINE F operator()(const Rows<kFull>& rows) const {
    const F unit = inverse.at(rows.column), high = limit.at(rows.column), low = -high;
    I count{};
    const F sum = rows.sum([&](int i, F x) {
      if (!kFull && rows.count(i) == 0) return zero();
      x = x * unit;
      const I above = x > high, below = x < low;
      put_codes<4>(below - above + 1, rows.count(i), codes + (rows.first + i) * row_bytes, rows.column);
      I kept = above | below;
      if (!kFull) kept = kept & (lane_numbers() < static_cast<int32_t>(rows.count(i)));
      count -= kept;
      return as_floats(magnitude(x) & kept);
    });
    if (kKept) store_as(counts + rows.column, load_as<I>(counts + rows.column) + count);
    return sum;
  }
};

// ---- What follows from sums

// The exponent of the unit of a block: 0, or near that of its maximum if squares or sums might overflow.
LOWBIT_INLINE I unit_exponent(I top) {
  I exponent = (top >> 23) - 127;
  const I is_common = (exponent >= -30) & (exponent <= 30);
  exponent = exponent < -100 ? I{} - 100 : exponent > 100 ? I{} + 100 : exponent;
  return exponent & ~is_common;
}
LOWBIT_INLINE F power_of_two(I exponent) { return as_floats((exponent + 127) << 23); }

LOWBIT_INLINE F half_deviation(F squares, F inverse_count) {
  return broadcast(0.5f) * square_root(squares * inverse_count);
}
LOWBIT_INLINE F mean_of_kept(F sum, I count) { return sum / to_float(count > 0 ? count : I{} + 1); }

// ---- Scales of rows and columns

template <Encoding kEncoding>
struct EncodeSigns {
  static constexpr bool kTernary = kEncoding == Encoding::ternary, kBinary = kEncoding == Encoding::binary;
  static constexpr int64_t kColumnStep = kRun;
  template <typename P>
  using First = FirstPass<!kTernary, kBinary, P>;
  template <typename P>
  using Codes = TernaryPass<kTernary, P>;

  static bool columns(BlockOfRows& b, const Parallel& parallel) {
    const auto first = [&](int64_t at, int32_t* tops, int32_t*, uint8_t* codes) {
      return First<EachColumn>{tops, {b.inverses + at}, codes, b.p.row_bytes};
    };
    const auto squares = [&](int64_t at, int32_t*, int32_t*, uint8_t*) {
      return SquarePass<EachColumn>{{b.inverses + at}, {b.scales + at}};
    };
    const auto codes = [&](int64_t at, int32_t*, int32_t* counts, uint8_t* codes) {
      return Codes<EachColumn>{{b.inverses + at}, {b.limits + at}, counts, codes, b.p.row_bytes};
    };
    const FlushDenormals flush;
    b.set_shares();
    for (int64_t c = 0; c < b.padded; c += kLanes) store(b.inverses + c, broadcast(1.0f));
    if (!b.pass(parallel, first)) return false;
    b.join_tops();
    if (set_units(b)) {
      if (!b.pass(parallel, first)) return false;
      b.join_tops();
    }
    if (!b.join_sums()) return false;
    for (int64_t c = 0; c < b.padded; c += kLanes) {
      const F mean = load(b.sums + c) * load(b.shares + c);
      store(b.scales + c, mean);
      store(b.limits + c, broadcast(0.5f) * mean);
    }
    if constexpr (kTernary) {
      if (!b.pass(parallel, squares) || !b.join_sums()) return false;
      for (int64_t c = 0; c < b.padded; c += kLanes) {
        store(b.limits + c, half_deviation(load(b.sums + c), load(b.shares + c)));
      }
    }
    if constexpr (!kBinary) {
      if (!b.pass(parallel, codes)) return false;
    }
    if constexpr (kTernary) {
      b.join_counts();
      if (!b.join_sums()) return false;
      for (int64_t c = 0; c < b.padded; c += kLanes) {
        store(b.scales + c, mean_of_kept(load(b.sums + c), load_as<I>(b.counts + c)));
      }
    }
    for (int64_t c = 0; c < b.padded; c += kLanes) {
      const I top = load_as<I>(b.tops + c);
      store(b.scales + c, finite_or_nan(top, load(b.scales + c) * power_of_two(unit_exponent(top))));
    }
    b.store_scales();
    return true;
  }

  // Whether any unit is not 1.
  static bool set_units(const BlockOfRows& b) {
    I any{};
    for (int64_t c = 0; c < b.padded; c += kLanes) {
      const I exponent = unit_exponent(load_as<I>(b.tops + c));
      store(b.inverses + c, power_of_two(-exponent));
      any = any | (exponent != 0);
    }
    return largest(any & 1) != 0;
  }

  static bool row(const Encode& p, const float* x, uint8_t* codes, float* scales) {
    float* levels = static_cast<float*>(scratch(Scratch::task_sums, static_cast<size_t>(PairSums::size(kRun)) * 4));
    if (levels == nullptr) return false;
    for (int64_t c = 0; c < p.columns; c += p.col_span) {
      const int64_t count = min(p.col_span, p.columns - c);
      scales[c / p.col_span] =
          runs(x + c, count, p.col_span, codes + c / codes_per_byte(kEncoding), PairSums(levels, kRun));
    }
    return true;
  }

  // The scale of a row, or of a block of it, whose codes it packs.
  static float runs(const float* x, int64_t count, int64_t span, uint8_t* codes, PairSums pairs) {
    constexpr int64_t kRunBytes = kRun / codes_per_byte(kEncoding);
    alignas(64) int32_t tops[kRun] = {}, counts[kRun] = {};
    const Lines lines = runs_of(x, count);
    const F share = broadcast(1.0f / static_cast<float>(count));
    const auto vector_sum = [&] { return broadcast(sum_of_lines(pairs, count, span)); };
    AllColumns inverse{1.0f};
    each_group(lines, nullptr, pairs, First<AllColumns>{tops, inverse, codes, kRunBytes});
    I top{};
    for (int64_t i = 0; i < kRun; i += kLanes) top = max(top, load_as<I>(tops + i));
    top = I{} + largest(top);
    const I exponent = unit_exponent(top);
    if (exponent[0] != 0) {
      inverse.value = power_of_two(-exponent)[0];
      each_group(lines, nullptr, pairs, First<AllColumns>{tops, inverse, codes, kRunBytes});
    }
    F scale = vector_sum() * share;
    AllColumns limit{(broadcast(0.5f) * scale)[0]};
    if constexpr (kTernary) {
      each_group(lines, nullptr, pairs, SquarePass<AllColumns>{inverse, {scale[0]}});
      limit.value = half_deviation(vector_sum(), share)[0];
    }
    if constexpr (!kBinary) {
      each_group(lines, nullptr, pairs, Codes<AllColumns>{inverse, limit, counts, codes, kRunBytes});
    }
    if constexpr (kTernary) {
      int32_t kept = 0;
      for (const int32_t some : counts) kept += some;
      scale = mean_of_kept(vector_sum(), I{} + kept);
    }
    return finite_or_nan(top, scale * power_of_two(exponent))[0];
  }
};

}  // namespace lowbit::LOWBIT_ISA

#endif  // LOWBIT_ENCODE_SIGNS_H_
