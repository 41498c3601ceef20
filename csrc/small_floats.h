// Floats of 8 bits: weights in fp8, and scales. They become float16 by shifts, which every number of them fits.
#ifndef LOWBIT_SMALL_FLOATS_H_
#define LOWBIT_SMALL_FLOATS_H_

#include "bytes.h"

namespace lowbit::LOWBIT_ISA {

using HalfWords = uint16_t __attribute__((vector_size(sizeof(F) / 2)));  // kLanes of them

struct SmallFloats {
  int shift;     // from the magnitude to float16: 10 less the bits of the mantissa
  float unit;    // 2^(15 - bias): float16 has a larger bias
  int nan_from;  // the first magnitude that is NaN, if nan_code is -1
  int nan_code;  // the only code that is NaN, or -1

#if defined(LOWBIT_AVX512) || defined(LOWBIT_AVX2)
  // 16 of them, as float16 that is too small by `unit`.
  LOWBIT_INLINE __m256i half_of_16(const uint8_t* codes) const {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    const __m256i magnitude = _mm256_set1_epi16(0x7f);
    const __m256i is_nan = nan_code < 0 ? _mm256_cmpgt_epi16(_mm256_and_si256(wide, magnitude),
                                                             _mm256_set1_epi16(static_cast<short>(nan_from - 1)))
                                        : _mm256_cmpeq_epi16(wide, _mm256_set1_epi16(static_cast<int8_t>(nan_code)));
    const __m128i places = _mm_cvtsi32_si128(shift);
    const __m256i kept = _mm256_or_si256(_mm256_sll_epi16(magnitude, places), _mm256_set1_epi16(-0x8000));
    const __m256i half = _mm256_and_si256(_mm256_sll_epi16(wide, places), kept);
    return _mm256_or_si256(half, _mm256_and_si256(is_nan, _mm256_set1_epi16(0x7e00)));
  }
#elif defined(LOWBIT_NEON)
  // 8 of them, as float16 that is too small by `unit`. Weights have several codes that are NaN, scales may have one.
  template <bool kMayBeOne>
  LOWBIT_INLINE float16x8_t half_of_8(uint8x8_t codes) const {
    const int16x8_t wide = vmovl_s8(vreinterpret_s8_u8(codes));
    const int16x8_t magnitude = vandq_s16(wide, vdupq_n_s16(0x7f));
    const uint16x8_t is_nan = !kMayBeOne || nan_code < 0
                                  ? vcgeq_s16(magnitude, vdupq_n_s16(static_cast<int16_t>(nan_from)))
                                  : vceqq_s16(wide, vdupq_n_s16(static_cast<int8_t>(nan_code)));
    const int16x8_t half = vshlq_s16(magnitude, vdupq_n_s16(static_cast<int16_t>(shift)));
    const uint16x8_t with_sign =
        vbslq_u16(vdupq_n_u16(0x8000), vreinterpretq_u16_s16(wide), vreinterpretq_u16_s16(half));
    return vreinterpretq_f16_u16(vorrq_u16(with_sign, vandq_u16(is_nan, vdupq_n_u16(0x7e00))));
  }
#endif

  // 2 * kLanes of them, the even and the odd ones apart, as float32 that is too small by `unit`.
  LOWBIT_INLINE void pairs(const uint8_t* codes, F& even, F& odd) const {
    const HalfWords words = load_as<HalfWords>(codes);
    even = widen(half_of_high_bytes(words << 8));
    odd = widen(half_of_high_bytes(words & 0xff00));
  }

  // kLanes of them, as float32 that is too small by `unit`. The conversion from float16 keeps subnormal numbers, also
  // where others are flushed.
  LOWBIT_INLINE F without_unit(const uint8_t* codes) const {
#if defined(LOWBIT_AVX512)
    return _mm512_cvtph_ps(half_of_16(codes));
#elif defined(LOWBIT_AVX2)
    uint8_t twice[16] = {};
    memcpy(twice, codes, 8);
    return _mm256_cvtph_ps(_mm256_castsi256_si128(half_of_16(twice)));
#elif defined(LOWBIT_NEON)
    uint32_t four;
    memcpy(&four, codes, 4);
    return vcvt_f32_f16(vget_low_f16(half_of_8<true>(vreinterpret_u8_u32(vdup_n_u32(four)))));
#else
    uint16_t half[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const int magnitude = codes[i] & 0x7f;
      const bool is_nan = magnitude >= nan_from || codes[i] == nan_code;
      half[i] = static_cast<uint16_t>((codes[i] & 0x80) << 8 | magnitude << shift | (is_nan ? 0x7e00 : 0));
    }
    return load_f16(half);
#endif
  }
  LOWBIT_INLINE F decode(const uint8_t* codes) const { return without_unit(codes) * broadcast(unit); }

 private:
  // From float16 to float32.
  LOWBIT_INLINE static F widen(HalfWords half) {
#if defined(LOWBIT_AVX512)
    return _mm512_cvtph_ps(reinterpret_cast<__m256i>(half));
#elif defined(LOWBIT_AVX2)
    return _mm256_cvtph_ps(reinterpret_cast<__m128i>(half));
#else
    uint16_t stored[kLanes];
    store_as(stored, half);
    return load_f16(stored);
#endif
  }
  // The shift moves the magnitude and copies the sign, which stays in the highest bit.
  LOWBIT_INLINE HalfWords half_of_high_bytes(HalfWords codes) const {
    using Signed = int16_t __attribute__((vector_size(sizeof(HalfWords))));
    const uint16_t kept = static_cast<uint16_t>(0x8000 | 0x7f << shift), nan = 0x7e00;
    const HalfWords half = reinterpret_cast<HalfWords>(reinterpret_cast<Signed>(codes) >> (8 - shift)) & kept;
    if (nan_code >= 0) {
      const uint16_t only = static_cast<uint16_t>((nan_code & 0x80) << 8 | (nan_code & 0x7f) << shift);
      return half | (reinterpret_cast<HalfWords>(half == only) & nan);
    }
    const uint16_t first = static_cast<uint16_t>(nan_from << shift);
    return half | (reinterpret_cast<HalfWords>((half & 0x7fff) >= first) & nan);
  }
};

// The values of all codes, for few of them at a time.
struct SmallValues {
  float of[256] = {};

  // The last `mantissa` bits are a fraction, those above them an exponent; 2^-lowest is the smallest positive value.
  constexpr SmallValues(int mantissa, int lowest, int nan_from, int nan_code) {
    for (int code = 0; code < 256; ++code) {
      const int magnitude = code & 0x7f, exponent = magnitude >> mantissa, fraction = magnitude & ((1 << mantissa) - 1);
      const int steps = exponent == 0 ? fraction : ((1 << mantissa) + fraction) << (exponent - 1);
      const float value = static_cast<float>(steps) / static_cast<float>(1 << lowest);
      of[code] = magnitude >= nan_from || code == nan_code ? __builtin_nanf("") : code < 128 ? value : -value;
    }
  }
};
constexpr SmallValues kSigned8Values(4, 6, 0x80, 0x80), kE4m3Values(3, 9, 0x7f, -1);

LOWBIT_INLINE SmallFloats e4m3() { return {7, 256.0f, 0x7f, -1}; }
LOWBIT_INLINE SmallFloats e5m2() { return {8, 1.0f, 0x7c, -1}; }
LOWBIT_INLINE SmallFloats signed8() { return {6, 4096.0f, 0x80, 0x80}; }

}  // namespace lowbit::LOWBIT_ISA

#endif  // LOWBIT_SMALL_FLOATS_H_
