// One matrix of a stored stack: its bytes and its scales.
#ifndef LOWBIT_MATRIX_H_
#define LOWBIT_MATRIX_H_

#include "decode.h"

namespace lowbit::LOWBIT_ISA {

// Joins codes of two components and looks their levels up, which are integers of 8 bits.
class Joiner {
 public:
  explicit Joiner(const Weights& w) : low_bits_(low_bits(w.bits)), high_bits_(w.bits - low_bits_) {
    if (w.high == nullptr) return;
    for (int i = 0; i < 64; ++i) {
      levels_[i / 16][i % 16] = i < 1 << w.bits ? static_cast<uint8_t>(static_cast<int>(w.levels[i])) : 0;
    }
  }

  // `count` levels from `column` on, of a row with these codes.
  void join(const uint8_t* low, const uint8_t* high, int64_t column, int64_t count, uint8_t* out) const {
    int64_t i = 0;
#if defined(LOWBIT_AVX512) || defined(LOWBIT_AVX2)
    if (column % 8 == 0) {
      for (; i + 32 <= count; i += 32) {
        join_32(low + (column + i) * low_bits_ / 8, high + (column + i) * high_bits_ / 8, out + i);
      }
    }
#elif defined(LOWBIT_NEON)
    for (; column % 16 == 0 && i + 16 <= count; i += 16) {
      join_16(low + (column + i) * low_bits_ / 8, high + (column + i) * high_bits_ / 8, out + i);
    }
#endif
    for (; i < count; ++i) {
      const int code = bits_at(low, column + i, low_bits_) | bits_at(high, column + i, high_bits_) << low_bits_;
      out[i] = levels_[code / 16][code % 16];
    }
  }

 private:
  static int bits_at(const uint8_t* bytes, int64_t i, int bits) {
    const int64_t per_byte = 8 / bits;
    return bytes[i / per_byte] >> (8 - bits * (i % per_byte + 1)) & ((1 << bits) - 1);
  }

#if defined(LOWBIT_AVX512) || defined(LOWBIT_AVX2)
  // 32 codes of kBits, one in each byte. Each byte is repeated for its codes; bits are tested one by one, or nibbles
  // taken from both halves.
  template <int kBits>
  LOWBIT_INLINE static __m256i spread_32(const uint8_t* bytes) {
    if constexpr (kBits == 4) {
      const __m256i order = _mm256_setr_epi8(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11,
                                             12, 12, 13, 13, 14, 14, 15, 15);
      const __m128i stored = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
      const __m256i all = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(stored), order);
      const __m256i even = _mm256_and_si256(_mm256_srli_epi16(all, 4), _mm256_set1_epi16(0x000f));
      return _mm256_or_si256(even, _mm256_and_si256(all, _mm256_set1_epi16(0x0f00)));
    } else if constexpr (kBits == 2) {
      int64_t stored;
      memcpy(&stored, bytes, 8);
      const __m256i order = _mm256_setr_epi8(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 6,
                                             6, 6, 6, 7, 7, 7, 7);
      const __m256i all = _mm256_shuffle_epi8(_mm256_set1_epi64x(stored), order);
      const __m256i upper = _mm256_set1_epi32(0x02082080), lower = _mm256_set1_epi32(0x01041040);
      return _mm256_or_si256(tested(all, upper, 2), tested(all, lower, 1));
    } else {
      int32_t stored;
      memcpy(&stored, bytes, 4);
      const __m256i order = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3,
                                             3, 3, 3, 3, 3, 3, 3);
      const __m256i all = _mm256_shuffle_epi8(_mm256_set1_epi32(stored), order);
      return tested(all, _mm256_set1_epi64x(0x0102040810204080), 1);
    }
  }
  // `value` where the bit of the mask is set
  LOWBIT_INLINE static __m256i tested(__m256i bytes, __m256i mask, char value) {
    const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, mask), mask);
    return _mm256_and_si256(set, _mm256_set1_epi8(value));
  }

  LOWBIT_INLINE __m256i looked_up(__m256i codes, int chunk) const {
    const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(levels_[chunk]));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), codes);
  }

  LOWBIT_INLINE void join_32(const uint8_t* low, const uint8_t* high, uint8_t* out) const {
    __m256i found;
    if (low_bits_ == 2) {
      const __m256i above = spread_32<1>(high);
      found = looked_up(_mm256_or_si256(spread_32<2>(low), _mm256_slli_epi16(above, 2)), 0);
    } else {
      const __m256i above = high_bits_ == 1 ? spread_32<1>(high) : spread_32<2>(high), below = spread_32<4>(low);
      found = _mm256_setzero_si256();
      for (int chunk = 0; chunk < 1 << high_bits_; ++chunk) {
        const __m256i here = _mm256_cmpeq_epi8(above, _mm256_set1_epi8(static_cast<char>(chunk)));
        found = _mm256_or_si256(found, _mm256_and_si256(here, looked_up(below, chunk)));
      }
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), found);
  }
#elif defined(LOWBIT_NEON)
  LOWBIT_INLINE void join_16(const uint8_t* low, const uint8_t* high, uint8_t* out) const {
    if (low_bits_ == 2) {
      const uint8x16_t codes = vsliq_n_u8(spread_16<2>(low), spread_16<1>(high), 2);
      return vst1q_u8(out, vqtbl1q_u8(vld1q_u8(levels_[0]), codes));
    }
    if (high_bits_ == 1) {
      const uint8x16x2_t table = {{vld1q_u8(levels_[0]), vld1q_u8(levels_[1])}};
      return vst1q_u8(out, vqtbl2q_u8(table, vsliq_n_u8(spread_16<4>(low), spread_16<1>(high), 4)));
    }
    const uint8x16x4_t table = {
        {vld1q_u8(levels_[0]), vld1q_u8(levels_[1]), vld1q_u8(levels_[2]), vld1q_u8(levels_[3])}};
    vst1q_u8(out, vqtbl4q_u8(table, vsliq_n_u8(spread_16<4>(low), spread_16<2>(high), 4)));
  }
#endif

  int low_bits_, high_bits_;
  alignas(16) uint8_t levels_[4][16];
};

struct Matrix {
  const Weights& w;
  const uint8_t* codes;
  const uint8_t* high;
  int64_t scale_layer;
  Joiner joiner;
  const float* held_scales = nullptr;
  int64_t held_row = 0;

  Matrix(const Weights& weights, int64_t layer)
      : w(weights),
        codes(weights.codes + layer * weights.rows * weights.low_bytes),
        high(weights.high == nullptr ? nullptr : weights.high + layer * weights.rows * weights.high_bytes),
        scale_layer(weights.scale_layers == 1 ? 0 : layer),
        joiner(weights) {}

  // Whether codes are in two components, and are joined before they are decoded.
  LOWBIT_INLINE bool joined() const { return high != nullptr; }

  // `count` bytes of a row from `byte` on: a pointer to them, or to `out` if they are joined.
  template <typename D>
  LOWBIT_INLINE const uint8_t* bytes(int64_t row, int64_t byte, int64_t count, uint8_t* out) const {
    if (D::kPerByte > 1 || !joined()) return codes + row * w.row_bytes + byte;
    joiner.join(codes + row * w.low_bytes, high + row * w.high_bytes, byte, count, out);
    return out;
  }

  // The same for whole rows, w.row_bytes apart. `out` may be null if codes are not joined.
  template <typename D>
  LOWBIT_INLINE const uint8_t* rows(int64_t row, int64_t count, uint8_t* out) const {
    if (D::kPerByte > 1 || !joined()) return codes + row * w.row_bytes;
    for (int64_t r = 0; r < count; ++r) bytes<D>(row + r, 0, w.columns, out + r * w.columns);
    return out;
  }

  // `count` stored scales from (row, col) on: a pointer to them, or to `out` if they must be decoded.
  LOWBIT_INLINE const float* scales(int64_t row, int64_t col, int64_t count, float* out) const {
    if (held_scales != nullptr) return held_scales + (row - held_row) * w.scale_cols + col;
    const int64_t start = row * w.scale_cols + col;
    const int64_t matrix = scale_layer * w.scale_rows * w.scale_cols;
    if (w.scale_type == ScaleType::f32) return static_cast<const float*>(w.scales) + matrix + start;
    decode_scales(matrix, row, col, count, out);
    return out;
  }

  // Decodes `rows` rows of scales to `out`, unless they are floats. From then on only these rows have scales.
  void hold_scales(int64_t row, int64_t rows, float* out) {
    held_scales = nullptr;
    held_row = row;
    if (w.scale_type == ScaleType::f32) return;
    for (int64_t r = 0; r < rows; ++r) scales(row + r, 0, w.scale_cols, out + r * w.scale_cols);
    held_scales = out;
  }

  // The same without their factors, if they have any (`has_factors`).
  const float* without_factors(int64_t row, int64_t col, int64_t count, float* out) const;

  LOWBIT_INLINE const uint8_t* scale_codes(int64_t row, int64_t col) const {
    return static_cast<const uint8_t*>(w.scales) + (scale_layer * w.scale_rows + row) * w.scale_cols + col;
  }

  // Whether a scale is a small float times a factor that is the same along the rows or, if `last`, the columns: a
  // product can multiply by the factor at the end.
  LOWBIT_INLINE bool has_factors(bool last) const {
    if (w.scale_type != ScaleType::signed8 && w.scale_type != ScaleType::e4m3) return false;
    return w.group_scales == nullptr || (last ? w.group_col_step : w.group_row_step) == 0;
  }
  LOWBIT_INLINE SmallFloats small_scales() const { return w.scale_type == ScaleType::signed8 ? signed8() : e4m3(); }
  // out[i] = the factor of the stored row or column `from + i` of scales
  void factors(bool last, int64_t from, int64_t count, float* out) const {
    const float unit = small_scales().unit;
    const float* group = w.group_scales == nullptr ? nullptr : w.group_scales + scale_layer * w.group_layer_step;
    const int64_t step = last ? w.group_row_step : w.group_col_step;
    for (int64_t i = 0; i < count; ++i) out[i] = group == nullptr ? unit : unit * group[(from + i) * step];
  }

  LOWBIT_INLINE float scale(int64_t row, int64_t col) const {
    float value = 0;
    return *scales(row, col, 1, &value);
  }

  // Prefetches the share [begin, end) / of of some rows of stored scales, if there are such rows.
  LOWBIT_INLINE void prefetch_scales(int64_t row, int64_t begin, int64_t end, int64_t of, int64_t rows = 1) const {
    if (row + rows > w.scale_rows) return;
    const int64_t size = w.scale_type == ScaleType::f32                                      ? 4
                         : w.scale_type == ScaleType::f16 || w.scale_type == ScaleType::bf16 ? 2
                                                                                             : 1;
    const int64_t row_bytes = w.scale_cols * size, bytes = rows * row_bytes;
    const char* from = static_cast<const char*>(w.scales) + (scale_layer * w.scale_rows + row) * row_bytes;
    for (int64_t at = bytes * begin / of; at < bytes * end / of; at += 64) prefetch(from + at);
  }

  void decode_scales(int64_t matrix, int64_t row, int64_t col, int64_t count, float* out) const;
};

// out[i] = value of code i * factor[i * factor_step], or without `unit` if there is no factor. Inlined, so that the
// kind of floats is a constant.
LOWBIT_INLINE void decode_small_floats(const SmallFloats& floats, const uint8_t* codes, int64_t count,
                                       const float* factor, int64_t factor_step, float* out) {
  const bool plain = factor == nullptr;
  const F unit = broadcast(floats.unit), same = plain ? unit : unit * broadcast(*factor);
  const auto times = [&](F value, int64_t i, int64_t lanes) {
    if (plain) return value;
    if (factor_step == 0) return value * same;
    return value * unit * (lanes == kLanes ? load(factor + i) : load(factor + i, lanes));
  };
  int64_t i = 0;
#if defined(LOWBIT_AVX2)
  for (; i + 16 <= count; i += 16) {
    const __m256i half = floats.half_of_16(codes + i);
    store(out + i, times(_mm256_cvtph_ps(_mm256_castsi256_si128(half)), i, kLanes));
    store(out + i + 8, times(_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)), i + 8, kLanes));
  }
#endif
  for (; i + kLanes <= count; i += kLanes) store(out + i, times(floats.without_unit(codes + i), i, kLanes));
  if (i < count) {
    uint8_t rest[kLanes] = {};
    memcpy(rest, codes + i, static_cast<size_t>(count - i));
    store(out + i, times(floats.without_unit(rest), i, count - i), count - i);
  }
}

// 2^(code - 127); 0 is a subnormal number, 255 is NaN.
inline void decode_powers(const uint8_t* codes, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = codes[i] == 255 ? 0x7fc00000
                          : codes[i] == 0 ? 0x00400000
                                          : static_cast<uint32_t>(codes[i]) << 23;
    memcpy(out + i, &bits, 4);
  }
}

inline void Matrix::decode_scales(int64_t matrix, int64_t row, int64_t col, int64_t count, float* out) const {
  const int64_t start = row * w.scale_cols + col;
  const uint8_t* stored = static_cast<const uint8_t*>(w.scales) + matrix + start;
  constexpr float kOne = 1;
  const bool grouped = w.group_scales != nullptr;
  const float* group =
      grouped ? w.group_scales + scale_layer * w.group_layer_step + row * w.group_row_step + col * w.group_col_step
              : &kOne;
  const int64_t group_step = grouped ? w.group_col_step : 0;
  const bool is_signed = w.scale_type == ScaleType::signed8;
  if (count < 8 && (is_signed || w.scale_type == ScaleType::e4m3)) {
    const float* values = (is_signed ? kSigned8Values : kE4m3Values).of;
    for (int64_t i = 0; i < count; ++i) out[i] = values[stored[i]] * group[i * group_step];
    return;
  }
  switch (w.scale_type) {
    case ScaleType::f32:
      break;
    case ScaleType::bf16:
      return to_f32(w.scales, Float::bf16, matrix + start, count, out);
    case ScaleType::f16:
      return to_f32(w.scales, Float::f16, matrix + start, count, out);
    case ScaleType::dynamic: {
      const float* tops = w.group_scales + scale_layer * w.group_layer_step;
      for (int64_t i = 0; i < count; ++i) {
        out[i] = w.scale_map[stored[i]] * tops[(start + i) / kScaleGroup] + w.offset[scale_layer];
      }
      return;
    }
    case ScaleType::signed8:
      return decode_small_floats(signed8(), stored, count, group, group_step, out);
    case ScaleType::e4m3:
      return decode_small_floats(e4m3(), stored, count, group, group_step, out);
    case ScaleType::e8m0:
      decode_powers(stored, count, out);
      for (int64_t i = 0; i < count; ++i) out[i] *= group[i * group_step];
  }
}

inline const float* Matrix::without_factors(int64_t row, int64_t col, int64_t count, float* out) const {
  if (w.scale_type == ScaleType::signed8) {
    decode_small_floats(signed8(), scale_codes(row, col), count, nullptr, 0, out);
  } else {
    decode_small_floats(e4m3(), scale_codes(row, col), count, nullptr, 0, out);
  }
  return out;
}

}  // namespace lowbit::LOWBIT_ISA

#endif  // LOWBIT_MATRIX_H_
