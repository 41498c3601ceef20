// A vector of floats and the operations that the drivers need, for the instruction set in LOWBIT_ISA.
// Compiler operators add and multiply vectors.
#ifndef LOWBIT_SIMD_H_
#define LOWBIT_SIMD_H_

#if defined(LOWBIT_AVX512) && defined(LOWBIT_EMULATE_AVX512)
#include "emulate_avx512.h"
#elif defined(__x86_64__)
#include <immintrin.h>
#endif
#include <stdint.h>
#include <string.h>

#include "kernels.h"

#define LOWBIT_INLINE inline __attribute__((always_inline))
#define LOWBIT_INLINE_LAMBDA __attribute__((always_inline))

#if defined(LOWBIT_NEON)
#include "simd_neon.h"
#endif

// Which instruction sets have `add_dots` (bytes.h), and which of them use it for all levels in the register tile.
#if defined(LOWBIT_AVX512) || defined(LOWBIT_NEON)
#define LOWBIT_TILE_DOTS
#endif
#if defined(LOWBIT_TILE_DOTS) || defined(LOWBIT_AVX2)
#define LOWBIT_DOTS
#endif

namespace lowbit::LOWBIT_ISA {

#if defined(LOWBIT_AVX512)

using F = __m512;
constexpr int kLanes = 16;
constexpr int kTileVectors = 4;  // of the register tile: 6 x 4 sums, 4 vectors, 1 broadcast in 32 registers
constexpr int kRegisters = 32;
constexpr int kStreamRows = 4;
constexpr int kDirectRows = 32;
constexpr int kDotRows = 8, kDotMost = 32;
constexpr bool kLooksUp16 = true;      // in one instruction
constexpr bool kAddsBesideFma = true;  // shifts and lookups keep one of the two FMA units busy

LOWBIT_INLINE F zero() { return _mm512_setzero_ps(); }
LOWBIT_INLINE F broadcast(float a) { return _mm512_set1_ps(a); }
LOWBIT_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
LOWBIT_INLINE void store(float* p, F a) { _mm512_storeu_ps(p, a); }
LOWBIT_INLINE __mmask16 first(int64_t count) { return static_cast<__mmask16>((1u << count) - 1); }
LOWBIT_INLINE F load(const float* p, int64_t count) { return _mm512_maskz_loadu_ps(first(count), p); }
LOWBIT_INLINE void store(float* p, F a, int64_t count) { _mm512_mask_storeu_ps(p, first(count), a); }
LOWBIT_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
LOWBIT_INLINE F square_root(F a) { return _mm512_sqrt_ps(a); }
LOWBIT_INLINE F smaller(F a, F b) { return _mm512_min_ps(a, b); }
LOWBIT_INLINE F larger(F a, F b) { return _mm512_max_ps(a, b); }
LOWBIT_INLINE float sum_of(F a) { return _mm512_reduce_add_ps(a); }
LOWBIT_INLINE F permute(F a, __m512i lanes) { return _mm512_permutexvar_ps(lanes, a); }

LOWBIT_INLINE F load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
LOWBIT_INLINE void store_f16(uint16_t* p, F a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}

#elif defined(LOWBIT_AVX2)

using F = __m256;
constexpr int kLanes = 8;
constexpr int kTileVectors = 2;  // of the register tile: 6 x 2 sums, 2 vectors, 1 broadcast in 16 registers
constexpr int kRegisters = 16;
constexpr int kStreamRows = 4;
constexpr int kDirectRows = 0;
constexpr int kDotRows = 4, kDotMost = 32;
constexpr bool kLooksUp16 = false;
constexpr bool kAddsBesideFma = true;  // shuffles keep one of the two FMA units busy, and one of the two adders

LOWBIT_INLINE F zero() { return _mm256_setzero_ps(); }
LOWBIT_INLINE F broadcast(float a) { return _mm256_set1_ps(a); }
LOWBIT_INLINE F load(const float* p) { return _mm256_loadu_ps(p); }
LOWBIT_INLINE void store(float* p, F a) { _mm256_storeu_ps(p, a); }
LOWBIT_INLINE __m256i first(int64_t count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
LOWBIT_INLINE F load(const float* p, int64_t count) { return _mm256_maskload_ps(p, first(count)); }
LOWBIT_INLINE void store(float* p, F a, int64_t count) { _mm256_maskstore_ps(p, first(count), a); }
LOWBIT_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
LOWBIT_INLINE F square_root(F a) { return _mm256_sqrt_ps(a); }
LOWBIT_INLINE F smaller(F a, F b) { return _mm256_min_ps(a, b); }
LOWBIT_INLINE F larger(F a, F b) { return _mm256_max_ps(a, b); }
LOWBIT_INLINE float sum_of(F a) {
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
LOWBIT_INLINE F permute(F a, __m256i lanes) { return _mm256_permutevar8x32_ps(a, lanes); }

LOWBIT_INLINE F load_f16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
LOWBIT_INLINE void store_f16(uint16_t* p, F a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}

#elif !defined(LOWBIT_NEON)

using F = float __attribute__((vector_size(16)));
constexpr int kLanes = 4;
constexpr int kTileVectors = 2;
constexpr int kRegisters = 16;
constexpr int kStreamRows = 2;
constexpr int kDirectRows = 0;
constexpr int kDotRows = 2, kDotMost = 2;
constexpr bool kLooksUp16 = false;
constexpr bool kAddsBesideFma = false;

LOWBIT_INLINE F zero() { return F{}; }
LOWBIT_INLINE F broadcast(float a) { return F{a, a, a, a}; }
LOWBIT_INLINE F load(const float* p) {
  F a;
  memcpy(&a, p, sizeof(a));
  return a;
}
LOWBIT_INLINE void store(float* p, F a) { memcpy(p, &a, sizeof(a)); }
LOWBIT_INLINE F load(const float* p, int64_t count) {
  F a{};
  for (int64_t i = 0; i < count; ++i) a[i] = p[i];
  return a;
}
LOWBIT_INLINE void store(float* p, F a, int64_t count) {
  for (int64_t i = 0; i < count; ++i) p[i] = a[i];
}
LOWBIT_INLINE F fma(F a, F b, F c) { return a * b + c; }
LOWBIT_INLINE F square_root(F a) {
  return F{__builtin_sqrtf(a[0]), __builtin_sqrtf(a[1]), __builtin_sqrtf(a[2]), __builtin_sqrtf(a[3])};
}
LOWBIT_INLINE F smaller(F a, F b) { return a < b ? a : b; }
LOWBIT_INLINE F larger(F a, F b) { return a > b ? a : b; }
LOWBIT_INLINE float sum_of(F a) { return (a[0] + a[2]) + (a[1] + a[3]); }

LOWBIT_INLINE float f32_of_f16(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 0x3ff;
  float value = static_cast<float>(fraction) * 0x1p-24f;  // denormal
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if (exponent > 0) bits = (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13;
  bits |= sign;
  memcpy(&value, &bits, 4);
  return value;
}
LOWBIT_INLINE uint16_t f16_of_f32(float a) {
  uint32_t bits;
  memcpy(&bits, &a, 4);
  const uint32_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00 | (bits >> 13 & 0x3ff));
  if (bits >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
  if (bits < 0x38800000) {
    // Denormal: adding 0.5 leaves the rounded fraction in the last bits.
    float small;
    memcpy(&small, &bits, 4);
    small += 0.5f;
    memcpy(&bits, &small, 4);
    return static_cast<uint16_t>(sign | (bits - 0x3f000000));
  }
  bits += 0xfff + (bits >> 13 & 1);
  return static_cast<uint16_t>(sign | (bits - 0x38000000) >> 13);
}
LOWBIT_INLINE F load_f16(const uint16_t* p) {
  return F{f32_of_f16(p[0]), f32_of_f16(p[1]), f32_of_f16(p[2]), f32_of_f16(p[3])};
}
LOWBIT_INLINE void store_f16(uint16_t* p, F a) {
  for (int i = 0; i < kLanes; ++i) p[i] = f16_of_f32(a[i]);
}

#endif

// ---- Common to all instruction sets

constexpr int kTileRows = 6;

LOWBIT_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }
LOWBIT_INLINE void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }  // to L2

LOWBIT_INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
LOWBIT_INLINE int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
LOWBIT_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
LOWBIT_INLINE int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

LOWBIT_INLINE float f32_of_bf16(uint16_t h) {
  const uint32_t bits = static_cast<uint32_t>(h) << 16;
  float a;
  memcpy(&a, &bits, 4);
  return a;
}
LOWBIT_INLINE uint16_t bf16_of_f32(float a) {
  uint32_t bits;
  memcpy(&bits, &a, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// out[i] = float32(x[at + i])
inline void to_f32(const void* x, Float type, int64_t at, int64_t count, float* out) {
  if (type == Float::f32) {
    memcpy(out, static_cast<const float*>(x) + at, static_cast<size_t>(count) * 4);
    return;
  }
  const uint16_t* half = static_cast<const uint16_t*>(x) + at;
  if (type == Float::bf16) {
    for (int64_t i = 0; i < count; ++i) out[i] = f32_of_bf16(half[i]);
    return;
  }
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(out + i, load_f16(half + i));
  if (i < count) {
    uint16_t rest[kLanes] = {};
    memcpy(rest, half + i, static_cast<size_t>(count - i) * 2);
    store(out + i, load_f16(rest), count - i);
  }
}

// The inverse, rounded to nearest even.
inline void from_f32(const float* x, int64_t count, void* out, Float type, int64_t at) {
  if (type == Float::f32) {
    memcpy(static_cast<float*>(out) + at, x, static_cast<size_t>(count) * 4);
    return;
  }
  uint16_t* half = static_cast<uint16_t*>(out) + at;
  if (type == Float::bf16) {
    for (int64_t i = 0; i < count; ++i) half[i] = bf16_of_f32(x[i]);
    return;
  }
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store_f16(half + i, load(x + i));
  if (i < count) {
    uint16_t rest[kLanes];
    store_f16(rest, load(x + i, count - i));
    memcpy(half + i, rest, static_cast<size_t>(count - i) * 2);
  }
}

}  // namespace lowbit::LOWBIT_ISA

#endif  // LOWBIT_SIMD_H_
