// Codes and scales of float arrays, bit for bit equal to the formats' `_encode` in Python as XLA runs it on CPU:
// denormal numbers count as zero, and the scale of a block with a NaN or infinity is NaN.
#ifndef LOWBIT_ENCODE_H_
#define LOWBIT_ENCODE_H_

#include "bytes.h"

namespace lowbit::LOWBIT_ISA {

// Without the sign, the bits of floats compare like the numbers themselves, with NaN above infinity.
LOWBIT_INLINE I magnitude(F x) { return as_ints(x) & 0x7fffffff; }

// XLA's maximum does the same, except where each element has its own scale and there is no maximum.
LOWBIT_INLINE F top_or_zero(I top) { return as_floats(top >= 0x00800000 ? top : I{}); }

LOWBIT_INLINE F finite_or_nan(I top, F scale) {
  return as_floats(top >= 0x7f800000 ? I{} + 0x7fc00000 : as_ints(scale));
}

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

  // The number of midpoints below x, by binary search; a midpoint itself rounds down. NaN has code 0.
  LOWBIT_INLINE I codes(F x) const {
    const F relative = x * shrink * inverse;
    I code = -(relative > broadcast(nf4_midpoint(7)));
    for (const auto& thresholds : kNf4Search.step) code = code + code - (relative > lookup(thresholds, code));
    return code;
  }
};

// XLA divides by a scale, but multiplies by its reciprocal if one block covers a whole axis.
template <bool kReciprocal>
struct EncodeInt8 {
  static constexpr int kPerByte = 1;
  F scale, divisor;

  explicit EncodeInt8(I top) {
    // XLA divides by a constant in this way.
    scale = finite_or_nan(top, top_or_zero(top) * broadcast(1.0f / 127.0f));
    // The code is also 0 if the scale is 0, which must not be a divisor, or NaN, which has no code.
    divisor = as_floats(scale > zero() ? as_ints(scale) : I{} + 0x7f800000);
    if (kReciprocal) divisor = broadcast(1.0f) / divisor;
  }

  LOWBIT_INLINE I codes(F x) const {
    const F quotient = kReciprocal ? x * divisor : x / divisor;
    return round_to_int(as_floats(as_ints(quotient) & (quotient == quotient)));
  }
};

// Packs up to kLanes codes into whole bytes; the last byte is padded with zeros after `count`.
template <int kPerByte>
LOWBIT_INLINE void pack(I codes, int64_t count, uint8_t* out) {
  if (count == kLanes) return pack_codes<kPerByte>(codes, out);
  alignas(64) int32_t lanes[kLanes];
  memcpy(lanes, &codes, sizeof(codes));
  for (int64_t i = count; i < kLanes; ++i) lanes[i] = 0;
  memcpy(&codes, lanes, sizeof(codes));
  uint8_t bytes[kLanes];
  pack_codes<kPerByte>(codes, bytes);
  memcpy(out, bytes, static_cast<size_t>(ceil_div(count, kPerByte)));
}

// A scale for each column of a block of rows: lanes are columns.
//
// The stride of rows is often a power of two, so that few of them fit into a cache at the same time. So the strip is
// copied, which also converts it to float32 and pads its last vector.
template <typename E>
bool encode_block_of_rows(const Encode& p, int64_t layer, int64_t block, int64_t column, int64_t width) {
  constexpr int64_t kCopyRows = 64, kAhead = 8;
  const int64_t last = p.layers * p.rows * p.columns - width;
  const int64_t row = block * p.row_span, rows = min(p.row_span, p.rows - row);
  const int64_t vectors = ceil_div(width, kLanes), stride = vectors * kLanes;
  float* copy = static_cast<float*>(scratch(Scratch::task_panel, static_cast<size_t>(kCopyRows * stride) * 4));
  I* tops = static_cast<I*>(scratch(Scratch::task_scales, static_cast<size_t>(vectors) * (sizeof(I) + sizeof(E))));
  if (copy == nullptr || tops == nullptr) return false;
  E* encoders = reinterpret_cast<E*>(tops + vectors);
  memset(tops, 0, static_cast<size_t>(vectors) * sizeof(I));
  memset(copy, 0, static_cast<size_t>(kCopyRows * stride) * 4);
  const auto copied = [&](int64_t r) {
    float* to = copy + r % kCopyRows * stride;
    const int64_t at = (layer * p.rows + row + r) * p.columns + column, size = p.x_type == Float::f32 ? 4 : 2;
    // Hardware prefetchers do not follow short runs on many pages.
    const char* ahead = static_cast<const char*>(p.x) + min(at + kAhead * p.columns, last) * size;
    for (int64_t i = 0; i < width * size; i += 64) __builtin_prefetch(ahead + i);
    to_f32(p.x, p.x_type, at, width, to);
    return to;
  };
  for (int64_t r = 0; r < rows; ++r) {
    const float* x = copied(r);
    for (int64_t v = 0; v < vectors; ++v) tops[v] = max(tops[v], magnitude(load(x + v * kLanes)));
  }
  float* scales = p.scales + (layer * p.scale_rows + block) * p.scale_cols + column;
  for (int64_t v = 0; v < vectors; ++v) {
    encoders[v] = E(tops[v]);
    store(scales + v * kLanes, encoders[v].scale, min(kLanes, width - v * kLanes));
  }
  for (int64_t r = 0; r < rows; ++r) {
    const float* x = rows <= kCopyRows ? copy + r * stride : copied(r);
    uint8_t* out = p.codes + (layer * p.rows + row + r) * p.row_bytes + column / E::kPerByte;
    for (int64_t v = 0; v < width / kLanes; ++v) {
      pack_codes<E::kPerByte>(encoders[v].codes(load(x + v * kLanes)), out + v * kLanes / E::kPerByte);
    }
    if (width % kLanes != 0) {
      const int64_t v = vectors - 1;
      pack<E::kPerByte>(encoders[v].codes(load(x + v * kLanes)), width % kLanes, out + v * kLanes / E::kPerByte);
    }
  }
  return true;
}

// A whole row in float32: the array itself, or a converted copy; null if out of memory.
inline const float* row_of(const Encode& p, int64_t layer, int64_t row) {
  const int64_t at = (layer * p.rows + row) * p.columns;
  if (p.x_type == Float::f32) return static_cast<const float*>(p.x) + at;
  float* copy = static_cast<float*>(scratch(Scratch::task_panel, static_cast<size_t>(p.columns) * 4));
  if (copy != nullptr) to_f32(p.x, p.x_type, at, p.columns, copy);
  return copy;
}

// A scale for each block of a row: lanes are elements of a block.
template <typename E>
bool encode_row(const Encode& p, int64_t layer, int64_t row) {
  const float* x = row_of(p, layer, row);
  if (x == nullptr) return false;
  uint8_t* out = p.codes + (layer * p.rows + row) * p.row_bytes;
  float* scales = p.scales + (layer * p.scale_rows + row) * p.scale_cols;
  for (int64_t c = 0; c < p.columns; c += p.col_span) {
    const int64_t end = min(c + p.col_span, p.columns), whole = c + (end - c) / kLanes * kLanes;
    I top{};
    for (int64_t i = c; i < whole; i += kLanes) top = max(top, magnitude(load(x + i)));
    if (whole < end) top = max(top, magnitude(load(x + whole, end - whole)));
    const E encoder(I{} + largest(top));
    store(scales + c / p.col_span, encoder.scale, 1);
    for (int64_t i = c; i < whole; i += kLanes)
      pack_codes<E::kPerByte>(encoder.codes(load(x + i)), out + i / E::kPerByte);
    if (whole < end)
      pack<E::kPerByte>(encoder.codes(load(x + whole, end - whole)), end - whole, out + whole / E::kPerByte);
  }
  return true;
}

// Any spans, one element at a time.
template <typename E>
bool encode_plain(const Encode& p, int64_t layer, int64_t block) {
  const int64_t row = block * p.row_span, rows = min(p.row_span, p.rows - row);
  int32_t* tops = static_cast<int32_t*>(scratch(Scratch::task_scales, static_cast<size_t>(p.scale_cols) * 4));
  if (tops == nullptr || (rows > 0 && row_of(p, layer, row) == nullptr)) return false;
  memset(tops, 0, static_cast<size_t>(p.scale_cols) * 4);
  for (int64_t r = row; r < row + rows; ++r) {
    const float* x = row_of(p, layer, r);
    for (int64_t c = 0; c < p.columns; ++c) {
      int32_t& top = tops[c / p.col_span];
      top = static_cast<int32_t>(max(top, magnitude(broadcast(x[c]))[0]));
    }
  }
  float* scales = p.scales + (layer * p.scale_rows + block) * p.scale_cols;
  for (int64_t b = 0; b < p.scale_cols; ++b) store(scales + b, E(I{} + tops[b]).scale, 1);
  for (int64_t r = row; r < row + rows; ++r) {
    const float* x = row_of(p, layer, r);
    uint8_t* out = p.codes + (layer * p.rows + r) * p.row_bytes;
    memset(out, 0, static_cast<size_t>(p.row_bytes));
    for (int64_t b = 0; b < p.scale_cols; ++b) {
      const E encoder(I{} + tops[b]);
      for (int64_t c = b * p.col_span; c < min((b + 1) * p.col_span, p.columns); ++c) {
        const uint32_t code = static_cast<uint32_t>(encoder.codes(broadcast(x[c]))[0]);
        constexpr int kBits = 8 / E::kPerByte;
        out[c / E::kPerByte] |= static_cast<uint8_t>(code << (8 - kBits - kBits * (c % E::kPerByte)));
      }
    }
  }
  return true;
}

template <typename E>
bool encode_as(const Encode& p, const Parallel& parallel) {
  bool done = true;
  const auto each = [&](int64_t n, const auto& task) {
    parallel.each(n, [&](int64_t i) {
      const FlushDenormals flush;
      if (!task(i)) __atomic_store_n(&done, false, __ATOMIC_RELAXED);
    });
    return done;
  };
  const int64_t blocks = p.layers * p.scale_rows;
  if (p.col_span == 1 && p.scale_cols == p.columns && p.row_span > 1) {
    const int64_t width = 256;  // 64 rows fit in L2, in runs of 1 KB
    const int64_t strips = ceil_div(p.columns, width);
    return each(blocks * strips, [&](int64_t i) {
      const int64_t at = i / strips, column = i % strips * width;
      return encode_block_of_rows<E>(p, at / p.scale_rows, at % p.scale_rows, column, min(width, p.columns - column));
    });
  }
  if (p.row_span == 1 && p.scale_rows == p.rows && (p.col_span % kLanes == 0 || p.col_span >= p.columns)) {
    const int64_t group = max(1, 65536 / max(p.columns, 1)), rows = p.layers * p.rows;
    return each(ceil_div(rows, group), [&](int64_t i) {
      for (int64_t r = i * group; r < min((i + 1) * group, rows); ++r) {
        if (!encode_row<E>(p, r / p.rows, r % p.rows)) return false;
      }
      return true;
    });
  }
  return each(blocks, [&](int64_t i) { return encode_plain<E>(p, i / p.scale_rows, i % p.scale_rows); });
}

inline bool encode(const Encode& p, const Parallel& parallel) {
  if (p.nf4) return encode_as<EncodeNf4>(p, parallel);
  const bool whole = (p.scale_rows == 1 && p.rows > 1) || (p.scale_cols == 1 && p.columns > 1);
  return whole ? encode_as<EncodeInt8<true>>(p, parallel) : encode_as<EncodeInt8<false>>(p, parallel);
}

}  // namespace lowbit::LOWBIT_ISA

#endif  // LOWBIT_ENCODE_H_
