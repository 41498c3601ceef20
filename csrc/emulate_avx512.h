// AVX-512 in terms of other instructions, to test its kernels on machines without it: the SIMDe headers, and the
// intrinsics that these lack.
#ifndef LOWBIT_EMULATE_AVX512_H_
#define LOWBIT_EMULATE_AVX512_H_

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <immintrin.h>
#include <simde/x86/avx512.h>
#include <string.h>

namespace lowbit::emulated {

inline __m512 cvtepi32_ps(__m512i a) {
  int32_t from[16];
  float to[16];
  memcpy(from, &a, 64);
  for (int i = 0; i < 16; ++i) to[i] = static_cast<float>(from[i]);
  return _mm512_loadu_ps(to);
}

inline __m512i cvtps_epi32(__m512 a) {
  float from[16];
  memcpy(from, &a, 64);
  __m256i to[2] = {_mm256_cvtps_epi32(_mm256_loadu_ps(from)), _mm256_cvtps_epi32(_mm256_loadu_ps(from + 8))};
  return _mm512_loadu_si512(to);
}

template <typename From>
__m128i truncated_to_bytes(__m512i a) {
  From from[64 / sizeof(From)];
  int8_t to[16] = {};
  memcpy(from, &a, 64);
  for (size_t i = 0; i < 64 / sizeof(From); ++i) to[i] = static_cast<int8_t>(from[i]);
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(to));
}

inline __m512i cvtepi8_epi32(__m128i a) {
  int8_t from[16];
  int32_t to[16];
  memcpy(from, &a, 16);
  for (int i = 0; i < 16; ++i) to[i] = from[i];
  return _mm512_loadu_si512(to);
}

inline __m512 cvtph_ps(__m256i a) {
  float to[16];
  _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm256_castsi256_si128(a)));
  _mm256_storeu_ps(to + 8, _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1)));
  return _mm512_loadu_ps(to);
}

inline __m256i cvtps_ph(__m512 a) {
  float from[16];
  memcpy(from, &a, 64);
  return _mm256_set_m128i(_mm256_cvtps_ph(_mm256_loadu_ps(from + 8), 0), _mm256_cvtps_ph(_mm256_loadu_ps(from), 0));
}

inline __m512 maskz_loadu_ps(unsigned mask, const float* p) {
  float to[16] = {};
  for (int i = 0; i < 16; ++i) {
    if (mask >> i & 1) to[i] = p[i];
  }
  return _mm512_loadu_ps(to);
}

inline void mask_storeu_ps(float* p, unsigned mask, __m512 a) {
  float from[16];
  memcpy(from, &a, 64);
  for (int i = 0; i < 16; ++i) {
    if (mask >> i & 1) p[i] = from[i];
  }
}

inline __m512 permutevar_ps(__m512 a, __m512i lanes) {
  float from[16], to[16];
  int32_t lane[16];
  memcpy(from, &a, 64);
  memcpy(lane, &lanes, 64);
  for (int i = 0; i < 16; ++i) to[i] = from[i / 4 * 4 + (lane[i] & 3)];
  return _mm512_loadu_ps(to);
}

inline float reduce_add_ps(__m512 a) {
  float from[16], total = 0;
  memcpy(from, &a, 64);
  for (int i = 0; i < 16; ++i) total += from[i];
  return total;
}

}  // namespace lowbit::emulated

#define _mm512_cvtepi32_ps lowbit::emulated::cvtepi32_ps
#define _mm512_cvtps_epi32 lowbit::emulated::cvtps_epi32
#define _mm512_cvtepi32_epi8 lowbit::emulated::truncated_to_bytes<int32_t>
#define _mm512_cvtepi64_epi8 lowbit::emulated::truncated_to_bytes<int64_t>
#define _mm512_cvtepi8_epi32 lowbit::emulated::cvtepi8_epi32
#define _mm512_cvtph_ps lowbit::emulated::cvtph_ps
#define _mm512_cvtps_ph(a, rounding) lowbit::emulated::cvtps_ph(a)
#define _mm512_maskz_loadu_ps lowbit::emulated::maskz_loadu_ps
#define _mm512_mask_storeu_ps lowbit::emulated::mask_storeu_ps
#define _mm512_permutevar_ps lowbit::emulated::permutevar_ps
#define _mm512_reduce_add_ps lowbit::emulated::reduce_add_ps

#endif  // LOWBIT_EMULATE_AVX512_H_
