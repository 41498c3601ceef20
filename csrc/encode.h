// Codes and scales of float arrays, bit for bit equal to the formats' `_encode` in Python as XLA runs it on CPU:
// denormal numbers count as zero, and the scale of a block with a NaN or infinity is NaN.
#ifndef LOWBIT_ENCODE_H_
#define LOWBIT_ENCODE_H_

#include "encode_signs.h"

namespace lowbit::LOWBIT_ISA {

// QLoRA, arXiv:2305.14314, appendix E.
alignas(64) constexpr float kNf4Levels[16] = {
    -1.0f,
    -0.6961928009986877f,
    -0.5250730514526367f,
    -0.39491748809814453f,
    -0.28444138169288635f,
    -0.18477343022823334f,
    -0.09105003625154495f,
    0.0f,
    0.07958029955625534f,
    0.16093020141124725f,
    0.24611230194568634f,
    0.33791524171829224f,
    0.44070982933044434f,
    0.5626170039176941f,
    0.7229568362236023f,
    1.0f,
};

// How each format encodes: constructed from the largest magnitude of a block, then encodes kLanes elements at a time.

constexpr float nf4_midpoint(int i) { return (kNf4Levels[i] + kNf4Levels[i + 1]) / 2; }

// The midpoints in the order of a binary search, without the middle one.
struct Nf4Search {
  alignas(64) float step[3][16] = {};
  constexpr Nf4Search() {
    for (int s = 0; s < 3; ++s) {
      for (int i = 0; i < 2 << s; ++i) step[s][i] = nf4_midpoint((4 >> s) * (2 * i + 1) - 1);
    }
  }
};
constexpr Nf4Search kNf4Search;

// Cells of 1/16, with at most one midpoint in each: the code at the start of the cell, and the midpoint. None is near
// the border of a cell, so a value there may be counted to either cell.
struct Nf4Cells {
  alignas(64) float code[32] = {};
  alignas(64) float midpoint[32] = {};
  bool fits = true;
  constexpr Nf4Cells() {
    for (int cell = 0; cell < 32; ++cell) {
      const float begin = static_cast<float>(cell - 16) / 16, end = static_cast<float>(cell - 15) / 16;
      midpoint[cell] = __builtin_inff();  // values of blocks with NaN may be large
      for (int i = 0; i < 15; ++i) {
        const float here = nf4_midpoint(i), margin = 1e-4f;
        if (here < begin) ++code[cell];
        if (here < begin || here > end) continue;
        if (midpoint[cell] <= 1 || here < begin + margin || here > end - margin) fits = false;
        midpoint[cell] = here;
      }
    }
  }
};
constexpr Nf4Cells kNf4Cells;
static_assert(kNf4Cells.fits, "a cell has more than one midpoint, or one near its border");

struct EncodeNf4 {
  static constexpr int kPerByte = 2;
  F scale, shrink, inverse;

  explicit EncodeNf4(I top) {
    const F largest = top_or_zero(top);
    scale = finite_or_nan(top, largest);
    // The reciprocal of a very large scale would be denormal. Multiplying by a power of two is exact.
    shrink = as_floats(scale > broadcast(1e30f) ? as_ints(broadcast(0x1p-20f)) : as_ints(broadcast(1.0f)));
    inverse = broadcast(1.0f) / as_floats(scale > zero() ? as_ints(scale * shrink) : as_ints(broadcast(1.0f)));
  }

  // The number of midpoints below x; a midpoint itself rounds down. NaN has code 0.
  LOWBIT_INLINE I codes(F x) const {
    const F relative = x * shrink * inverse;
#if defined(LOWBIT_AVX512)
    const F place = larger(fma(relative, broadcast(16.0f), broadcast(15.5f)), zero());
    const I cell = round_to_int(smaller(place, broadcast(31.0f)));
    return round_to_int(lookup(kNf4Cells.code, cell)) - (relative > lookup(kNf4Cells.midpoint, cell));
#else
    I code = -(relative > broadcast(nf4_midpoint(7)));
    for (const auto& thresholds : kNf4Search.step) code = code + code - (relative > lookup(thresholds, code));
    return code;
#endif
  }
};

struct EncodeInt8 {
  static constexpr int kPerByte = 1;
  F scale, inverse;

  explicit EncodeInt8(I top) {
    // XLA divides by a constant in this way.
    scale = finite_or_nan(top, top_or_zero(top) * broadcast(1.0f / 127.0f));
    // The code is 0 if the scale is 0 or NaN.
    const I usable = scale > zero();
    inverse =
        as_floats(as_ints(broadcast(1.0f) / as_floats(usable ? as_ints(scale) : as_ints(broadcast(1.0f)))) & usable);
  }

  LOWBIT_INLINE I codes(F x) const {
    const F quotient = x * inverse;
    return round_to_int(as_floats(as_ints(quotient) & (quotient == quotient)));
  }
};

template <typename E>
struct CodePass {
  static constexpr bool kTops = false, kCounts = false, kSums = false;
  const E* encoders;
  uint8_t* codes;
  int64_t row_bytes;

  template <bool kFull>
  LOWBIT_INLINE F operator()(const Rows<kFull>& rows) const {
    const E encoder = encoders[rows.column / kLanes];
    for (int i = 0; i < kRows; ++i) {
      if (!kFull && rows.count(i) == 0) continue;
      put_codes<E::kPerByte>(encoder.codes(rows.x[i]), rows.count(i), codes + (rows.first + i) * row_bytes,
                             rows.column);
    }
    return zero();
  }
};

// Scales that follow from the largest magnitude.
template <typename E>
struct EncodeByMax {
  static constexpr int64_t kColumnStep = kLanes;

  static bool columns(BlockOfRows& b, const Parallel& parallel) {
    const int64_t vectors = b.padded / kLanes;
    E* encoders = static_cast<E*>(scratch(Scratch::call_y, static_cast<size_t>(vectors) * sizeof(E)));
    if (encoders == nullptr) return false;
    const auto find = [](int64_t, int32_t* tops, int32_t*, uint8_t*) { return FindTops{tops}; };
    if (!b.pass(parallel, find)) return false;
    b.join_tops();
    const FlushDenormals flush;
    for (int64_t v = 0; v < vectors; ++v) {
      encoders[v] = E(load_as<I>(b.tops + v * kLanes));
      store(b.scales + v * kLanes, encoders[v].scale);
    }
    b.store_scales();
    return b.pass(parallel, [&](int64_t at, int32_t*, int32_t*, uint8_t* codes) {
      return CodePass<E>{encoders + at / kLanes, codes, b.p.row_bytes};
    });
  }

  static bool row(const Encode& p, const float* x, uint8_t* codes, float* scales) {
    for (int64_t c = 0; c < p.columns; c += p.col_span) {
      const int64_t end = min(c + p.col_span, p.columns), whole = c + (end - c) / kLanes * kLanes;
      I top{};
      for (int64_t i = c; i < whole; i += kLanes) top = max(top, magnitude(load(x + i)));
      if (whole < end) top = max(top, magnitude(load(x + whole, end - whole)));
      const E encoder(I{} + largest(top));
      store(scales + c / p.col_span, encoder.scale, 1);
      for (int64_t i = c; i < whole; i += kLanes) put_codes<E::kPerByte>(encoder.codes(load(x + i)), codes, i);
      if (whole < end) put_codes<E::kPerByte>(encoder.codes(load(x + whole, end - whole)), end - whole, codes, whole);
    }
    return true;
  }
};

// ---- Division of the work

// A whole row in float32: the array itself, or a converted copy; null if out of memory.
inline const float* row_of(const Encode& p, int64_t row) {
  const int64_t at = row * p.columns;
  if (p.x_type == Float::f32) return static_cast<const float*>(p.x) + at;
  float* copy = static_cast<float*>(scratch(Scratch::task_panel, static_cast<size_t>(p.columns) * 4));
  if (copy != nullptr) to_f32(p.x, p.x_type, at, p.columns, copy);
  return copy;
}

// Blocks along rows: a task has several rows.
template <typename X>
bool encode_each_row(const Encode& p, const Parallel& parallel) {
  const int64_t group = max(1, 65536 / p.columns), rows = p.layers * p.rows;
  bool done = true;
  parallel.each(ceil_div(rows, group), [&](int64_t i) {
    const FlushDenormals flush;
    for (int64_t r = i * group; r < min((i + 1) * group, rows); ++r) {
      const float* x = row_of(p, r);
      if (x != nullptr && X::row(p, x, p.codes + r * p.row_bytes, p.scales + r * p.scale_cols)) continue;
      __atomic_store_n(&done, false, __ATOMIC_RELAXED);
    }
  });
  return done;
}

// Blocks that a cache holds: a task has one of them, or some of its columns, in whole bytes and blocks.
template <typename X>
bool encode_small_blocks(const Encode& p, const Parallel& parallel) {
  int64_t width = p.col_span;
  while (width % 8 != 0) width *= 2;
  width = min(width * max(1, BlockOfRows::kPartColumns / width), p.columns);
  const int64_t strips = ceil_div(p.columns, width);
  bool done = true;
  parallel.each(p.layers * p.scale_rows * strips, [&](int64_t i) {
    const int64_t at = i / strips, column = i % strips * width;
    BlockOfRows block(p, at / p.scale_rows, at % p.scale_rows, column, min(width, p.columns - column));
    const Parallel alone(1, nullptr, nullptr);
    if (!block.allocate() || !X::columns(block, alone)) __atomic_store_n(&done, false, __ATOMIC_RELAXED);
  });
  return done;
}

template <typename X>
bool encode_as(const Encode& p, const Parallel& parallel) {
  if (p.layers * p.rows * p.columns == 0) {
    memset(p.scales, 0, static_cast<size_t>(p.layers * p.scale_rows * p.scale_cols) * 4);
    return true;
  }
  if (p.row_span == 1 && (p.col_span % X::kColumnStep == 0 || p.col_span >= p.columns)) {
    return encode_each_row<X>(p, parallel);
  }
  if (p.row_span <= 2 * BlockOfRows::kPartRows || min(p.row_span, p.rows) * p.columns <= 65536) {
    return encode_small_blocks<X>(p, parallel);
  }
  for (int64_t i = 0; i < p.layers * p.scale_rows; ++i) {
    BlockOfRows block(p, i / p.scale_rows, i % p.scale_rows, 0, p.columns);
    if (!block.allocate() || !X::columns(block, parallel)) return false;
  }
  return true;
}

inline bool encode(const Encode& p, const Parallel& parallel) {
  switch (p.encoding) {
    case Encoding::nf4:
      return encode_as<EncodeByMax<EncodeNf4>>(p, parallel);
    case Encoding::ternary:
      return encode_as<EncodeSigns<Encoding::ternary>>(p, parallel);
    case Encoding::absmean:
      return encode_as<EncodeSigns<Encoding::absmean>>(p, parallel);
    case Encoding::binary:
      return encode_as<EncodeSigns<Encoding::binary>>(p, parallel);
    case Encoding::int8:
      return encode_as<EncodeByMax<EncodeInt8>>(p, parallel);
  }
  return false;
}

}  // namespace lowbit::LOWBIT_ISA

#endif  // LOWBIT_ENCODE_H_
