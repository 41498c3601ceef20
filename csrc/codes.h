// Levels of four vectors of columns from the bytes of a row, for each number of bits.
#ifndef LOWBIT_CODES_H_
#define LOWBIT_CODES_H_

#include "small_floats.h"

namespace lowbit::LOWBIT_ISA {

constexpr int kVectors = 4;
constexpr int kLine = kVectors * kLanes;

LOWBIT_INLINE float int8_level(uint8_t byte) { return static_cast<float>(static_cast<int8_t>(byte)); }

struct InOrder {
  static constexpr bool kTimes = false;
  LOWBIT_INLINE static void order(F*) {}
  LOWBIT_INLINE static void unorder(F*) {}
};

#if defined(LOWBIT_AVX512)

struct Int8Vectors : InOrder {
  LOWBIT_INLINE void decode(const uint8_t* bytes, F v[kVectors]) const {
    for (int i = 0; i < kVectors; ++i) {
      const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + 16 * i));
      v[i] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
    }
  }
};

// A lookup in a table of 16 floats uses only the low four bits of each lane, so no mask is needed. All qwords hold the
// same 16 codes, and each is shifted to bring two of them, 8 columns apart, to the low bits of its lanes.
template <bool>
struct NibbleVectors {
  NibbleVectors() = default;
  explicit NibbleVectors(const float* levels) : table(_mm512_loadu_ps(levels)) {}

  F table;
  __m512i turns = _mm512_setr_epi64(4, 0, 12, 8, 20, 16, 28, 24);

  LOWBIT_INLINE void decode(const uint8_t* bytes, F v[kVectors]) const {
    for (int i = 0; i < kVectors; ++i) v[i] = permute(table, _mm512_srlv_epi64(codes_at(bytes, i), turns));
  }
  LOWBIT_INLINE static __m512i codes_at(const uint8_t* bytes, int i) {
    int64_t codes;
    memcpy(&codes, bytes + 8 * i, 8);
    return _mm512_set1_epi64(codes);
  }
  LOWBIT_INLINE static void order(F v[2]) {
    const __m512i lanes = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    for (int i = 0; i < 2; ++i) v[i] = permute(v[i], lanes);
  }
  LOWBIT_INLINE static void unorder(F v[2]) {
    const __m512i lanes = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    for (int i = 0; i < 2; ++i) v[i] = permute(v[i], lanes);
  }
};

// All lanes hold the same codes, each shifted by a different number of bits; the lookup in four floats uses only the
// lowest two bits.
struct CrumbVectors : InOrder {
  explicit CrumbVectors(const float* levels) : table(_mm512_broadcast_f32x4(_mm_loadu_ps(levels))) {}

  F table;
  __m512i shifts = _mm512_setr_epi32(6, 4, 2, 0, 14, 12, 10, 8, 22, 20, 18, 16, 30, 28, 26, 24);

  LOWBIT_INLINE void decode(const uint8_t* bytes, F v[kVectors]) const {
    for (int i = 0; i < kVectors; ++i) {
      int32_t codes;
      memcpy(&codes, bytes + 4 * i, 4);
      v[i] = _mm512_permutevar_ps(table, _mm512_srlv_epi32(_mm512_set1_epi32(codes), shifts));
    }
  }
};

struct BitVectors : InOrder {
  explicit BitVectors(const float* levels) : table(_mm512_set4_ps(levels[1], levels[0], levels[1], levels[0])) {}

  F table;
  __m512i low = _mm512_setr_epi32(7, 6, 5, 4, 3, 2, 1, 0, 15, 14, 13, 12, 11, 10, 9, 8);
  __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(16));

  LOWBIT_INLINE void decode(const uint8_t* bytes, F v[kVectors]) const {
    for (int i = 0; i < kVectors; i += 2) {
      int32_t codes;
      memcpy(&codes, bytes + 2 * i, 4);
      v[i] = _mm512_permutevar_ps(table, _mm512_srlv_epi32(_mm512_set1_epi32(codes), low));
      v[i + 1] = _mm512_permutevar_ps(table, _mm512_srlv_epi32(_mm512_set1_epi32(codes), high));
    }
  }
};

#elif defined(LOWBIT_AVX2)

struct Int8Vectors : InOrder {
  LOWBIT_INLINE void decode(const uint8_t* bytes, F v[kVectors]) const {
    for (int i = 0; i < kVectors; ++i) {
      const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes + 8 * i));
      v[i] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes));
    }
  }
};

// AVX2 has a lookup in 16 bytes but not in 16 floats: each of the four bytes of the floats is looked up for 32 codes at
// once, and the bytes are interleaved to floats, in 14 operations for 32 columns. In 10 if the lower two bytes are zero
// (kShort), as those of small integers are: the upper ones are interleaved to words, and the even and the odd words
// become floats by a shift and a mask, which other units execute than the shuffles. The high nibbles (even columns) are
// in the lower half of each register, the low ones in the upper half.
template <bool kShort>
struct NibbleVectors {
  __m256i planes[4];

  NibbleVectors() = default;
  LOWBIT_INLINE explicit NibbleVectors(const float* levels) {
    // Byte 4c + i of the levels goes to byte c of plane i.
    const __m128i gather = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m128i part[4];
    for (int i = 0; i < 4; ++i) {
      part[i] = _mm_shuffle_epi8(_mm_castps_si128(_mm_loadu_ps(levels + 4 * i)), gather);
    }
    const __m128i low01 = _mm_unpacklo_epi32(part[0], part[1]), low23 = _mm_unpacklo_epi32(part[2], part[3]);
    const __m128i high01 = _mm_unpackhi_epi32(part[0], part[1]), high23 = _mm_unpackhi_epi32(part[2], part[3]);
    planes[0] = _mm256_broadcastsi128_si256(_mm_unpacklo_epi64(low01, low23));
    planes[1] = _mm256_broadcastsi128_si256(_mm_unpackhi_epi64(low01, low23));
    planes[2] = _mm256_broadcastsi128_si256(_mm_unpacklo_epi64(high01, high23));
    planes[3] = _mm256_broadcastsi128_si256(_mm_unpackhi_epi64(high01, high23));
  }

  LOWBIT_INLINE void decode(const uint8_t* bytes, F v[kVectors]) const {
    __m256i codes = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
    codes = _mm256_srlv_epi32(codes, _mm256_setr_epi32(4, 4, 4, 4, 0, 0, 0, 0));
    codes = _mm256_and_si256(codes, _mm256_set1_epi8(15));
    const __m256i byte2 = _mm256_shuffle_epi8(planes[2], codes), byte3 = _mm256_shuffle_epi8(planes[3], codes);
    const __m256i high_a = _mm256_unpacklo_epi8(byte2, byte3), high_b = _mm256_unpackhi_epi8(byte2, byte3);
    if constexpr (kShort) {
      const __m256i odd = _mm256_set1_epi32(static_cast<int>(0xffff0000));
      v[0] = _mm256_castsi256_ps(_mm256_slli_epi32(high_a, 16));
      v[1] = _mm256_castsi256_ps(_mm256_and_si256(high_a, odd));
      v[2] = _mm256_castsi256_ps(_mm256_slli_epi32(high_b, 16));
      v[3] = _mm256_castsi256_ps(_mm256_and_si256(high_b, odd));
      return;
    }
    const __m256i byte0 = _mm256_shuffle_epi8(planes[0], codes), byte1 = _mm256_shuffle_epi8(planes[1], codes);
    const __m256i low_a = _mm256_unpacklo_epi8(byte0, byte1), low_b = _mm256_unpackhi_epi8(byte0, byte1);
    v[0] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(low_a, high_a));
    v[1] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(low_a, high_a));
    v[2] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(low_b, high_b));
    v[3] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(low_b, high_b));
  }
  LOWBIT_INLINE static void order(F v[2]) {
    const F a = kShort ? _mm256_unpacklo_ps(v[0], v[1]) : v[0], b = kShort ? _mm256_unpackhi_ps(v[0], v[1]) : v[1];
    v[0] = permute(a, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    v[1] = permute(b, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }
  LOWBIT_INLINE static void unorder(F v[2]) {
    const F a = permute(v[0], _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
    const F b = permute(v[1], _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
    v[0] = kShort ? _mm256_shuffle_ps(a, b, 0x88) : a;
    v[1] = kShort ? _mm256_shuffle_ps(a, b, 0xdd) : b;
  }
};

// All lanes hold the same codes, each shifted by a different number of bits; the lookup in four floats uses only the
// lowest two bits.
struct CrumbVectors : InOrder {
  explicit CrumbVectors(const float* levels) : table(_mm256_broadcast_ps(reinterpret_cast<const __m128*>(levels))) {}

  F table;
  __m256i low = _mm256_setr_epi32(6, 4, 2, 0, 14, 12, 10, 8);
  __m256i high = _mm256_setr_epi32(22, 20, 18, 16, 30, 28, 26, 24);

  LOWBIT_INLINE void decode(const uint8_t* bytes, F v[kVectors]) const {
    for (int i = 0; i < kVectors; i += 2) {
      int32_t codes;
      memcpy(&codes, bytes + 2 * i, 4);
      v[i] = _mm256_permutevar_ps(table, _mm256_srlv_epi32(_mm256_set1_epi32(codes), low));
      v[i + 1] = _mm256_permutevar_ps(table, _mm256_srlv_epi32(_mm256_set1_epi32(codes), high));
    }
  }
};

struct BitVectors : InOrder {
  explicit BitVectors(const float* levels)
      : table(_mm256_castpd_ps(_mm256_broadcast_sd(reinterpret_cast<const double*>(levels)))) {}

  F table;

  LOWBIT_INLINE void decode(const uint8_t* bytes, F v[kVectors]) const {
    int32_t codes;
    memcpy(&codes, bytes, 4);
    for (int i = 0; i < kVectors; ++i) {
      const __m256i shifts = _mm256_add_epi32(_mm256_setr_epi32(7, 6, 5, 4, 3, 2, 1, 0), _mm256_set1_epi32(8 * i));
      v[i] = _mm256_permutevar_ps(table, _mm256_srlv_epi32(_mm256_set1_epi32(codes), shifts));
    }
  }
};

#elif !defined(LOWBIT_NEON)

struct Int8Vectors : InOrder {
  LOWBIT_INLINE void decode(const uint8_t* bytes, F v[kVectors]) const {
    float levels[kLine];
    for (int i = 0; i < kLine; ++i) levels[i] = int8_level(bytes[i]);
    for (int i = 0; i < kVectors; ++i) v[i] = load(levels + i * kLanes);
  }
};

template <int kBits>
struct OneByOne : InOrder {
  float table[1 << kBits];

  OneByOne() = default;
  explicit OneByOne(const float* levels) { memcpy(table, levels, sizeof(table)); }

  LOWBIT_INLINE void decode(const uint8_t* bytes, F v[kVectors]) const {
    constexpr int kPer = 8 / kBits;
    float levels[kLine];
    for (int i = 0; i < kLine; ++i)
      levels[i] = table[bytes[i / kPer] >> (8 - kBits * (i % kPer + 1)) & ((1 << kBits) - 1)];
    for (int i = 0; i < kVectors; ++i) v[i] = load(levels + i * kLanes);
  }
};

template <bool>
using NibbleVectors = OneByOne<4>;
using CrumbVectors = OneByOne<2>;
using BitVectors = OneByOne<1>;

#endif

}  // namespace lowbit::LOWBIT_ISA

#if defined(LOWBIT_NEON)
#include "codes_neon.h"
#endif

namespace lowbit::LOWBIT_ISA {

// Levels that are added but not multiplied. Zen 4 rotates on the units that multiply, and shifts on those that look up.
LOWBIT_INLINE void decode_to_add(const NibbleVectors<false>& decoder, const uint8_t* bytes, F v[kVectors]) {
#if defined(LOWBIT_AVX512)
  for (int i = 0; i < kVectors; ++i) {
    v[i] = permute(decoder.table, _mm512_rorv_epi64(decoder.codes_at(bytes, i), decoder.turns));
  }
#else
  decoder.decode(bytes, v);
#endif
}

// Floats of 8 bits.
struct Fp8Vectors : InOrder {
  SmallFloats floats;

  LOWBIT_INLINE void decode(const uint8_t* bytes, F v[kVectors]) const {
#if defined(LOWBIT_AVX2)
    for (int i = 0; i < kVectors; i += 2) {
      const __m256i half = floats.half_of_16(bytes + i * kLanes);
      v[i] = _mm256_cvtph_ps(_mm256_castsi256_si128(half)) * broadcast(floats.unit);
      v[i + 1] = _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)) * broadcast(floats.unit);
    }
#elif defined(LOWBIT_NEON)
    for (int i = 0; i < kVectors; i += 2) {
      const float16x8_t half = floats.half_of_8<false>(vld1_u8(bytes + i * kLanes));
      v[i] = vcvt_f32_f16(vget_low_f16(half)) * broadcast(floats.unit);
      v[i + 1] = vcvt_high_f32_f16(half) * broadcast(floats.unit);
    }
#else
    for (int i = 0; i < kVectors; ++i) v[i] = floats.decode(bytes + i * kLanes);
#endif
  }
};

}  // namespace lowbit::LOWBIT_ISA

#endif  // LOWBIT_CODES_H_
