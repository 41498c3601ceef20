// Vectors of integers and bytes, beside the vectors of floats of simd.h.
// Lanes are compared, masked and shifted by the compiler's own operators; a comparison gives -1 or 0 in each lane.
#ifndef LOWBIT_BYTES_H_
#define LOWBIT_BYTES_H_

#include "decode.h"

namespace lowbit::LOWBIT_ISA {

using I = int32_t __attribute__((vector_size(sizeof(F))));

LOWBIT_INLINE I as_ints(F a) {
  I b;
  memcpy(&b, &a, sizeof(b));
  return b;
}
LOWBIT_INLINE F as_floats(I a) {
  F b;
  memcpy(&b, &a, sizeof(b));
  return b;
}
LOWBIT_INLINE I max(I a, I b) { return a > b ? a : b; }
#if defined(LOWBIT_AVX512)

LOWBIT_INLINE int32_t largest(I a) { return _mm512_reduce_max_epi32(reinterpret_cast<__m512i>(a)); }

// table[index] for an index below 8
LOWBIT_INLINE F lookup(const float (&table)[16], I index) {
  return permute(load(table), reinterpret_cast<__m512i>(index));
}
LOWBIT_INLINE I round_to_int(F a) { return reinterpret_cast<I>(_mm512_cvtps_epi32(a)); }
LOWBIT_INLINE F to_float(I a) { return _mm512_cvtepi32_ps(reinterpret_cast<__m512i>(a)); }

// kLanes codes in bytes, `kPerByte` in each, the first in the highest bits
template <int kPerByte>
LOWBIT_INLINE void pack_codes(I codes, uint8_t* out) {
  const __m512i a = reinterpret_cast<__m512i>(codes);
  if constexpr (kPerByte == 1) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(a));
  } else {
    const __m512i pairs = _mm512_or_si512(_mm512_slli_epi64(a, 4), _mm512_srli_epi64(a, 32));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm512_cvtepi64_epi8(pairs));
  }
}

#elif defined(LOWBIT_AVX2)

LOWBIT_INLINE int32_t largest(I a) {
  const __m256i v = reinterpret_cast<__m256i>(a);
  __m128i b = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  b = _mm_max_epi32(b, _mm_shuffle_epi32(b, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(b, _mm_shuffle_epi32(b, 0xb1)));
}

LOWBIT_INLINE F lookup(const float (&table)[16], I index) {
  return permute(load(table), reinterpret_cast<__m256i>(index));
}
LOWBIT_INLINE I round_to_int(F a) { return reinterpret_cast<I>(_mm256_cvtps_epi32(a)); }
LOWBIT_INLINE F to_float(I a) { return _mm256_cvtepi32_ps(reinterpret_cast<__m256i>(a)); }

template <int kPerByte>
LOWBIT_INLINE void pack_codes(I codes, uint8_t* out) {
  const __m256i a = reinterpret_cast<__m256i>(codes);
  const __m128i low = _mm256_castsi256_si128(a), high = _mm256_extracti128_si256(a, 1);
  const __m128i words = _mm_packs_epi32(low, high);
  if constexpr (kPerByte == 1) {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packs_epi16(words, words));
  } else {
    const __m128i pairs = _mm_madd_epi16(words, _mm_set1_epi32(0x00010010));
    const __m128i bytes = _mm_shuffle_epi8(pairs, _mm_set1_epi32(0x0c080400));
    memcpy(out, &bytes, 4);
  }
}

#else

LOWBIT_INLINE int32_t largest(I a) {
  const int64_t low = max(int64_t{a[0]}, a[1]), high = max(int64_t{a[2]}, a[3]);
  return static_cast<int32_t>(max(low, high));
}
LOWBIT_INLINE F lookup(const float (&table)[16], I index) {
  return F{table[index[0]], table[index[1]], table[index[2]], table[index[3]]};
}
LOWBIT_INLINE I round_to_int(F a) { return reinterpret_cast<I>(_mm_cvtps_epi32(a)); }
LOWBIT_INLINE F to_float(I a) { return _mm_cvtepi32_ps(reinterpret_cast<__m128i>(a)); }

template <int kPerByte>
LOWBIT_INLINE void pack_codes(I codes, uint8_t* out) {
  for (int i = 0; i < kLanes; i += kPerByte) {
    out[i / kPerByte] = static_cast<uint8_t>(kPerByte == 1 ? codes[i] : codes[i] << 4 | codes[i + 1]);
  }
}

#endif

// Denormal numbers count as zero while this lives, as everywhere in XLA's own code.
class FlushDenormals {
 public:
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
};

}  // namespace lowbit::LOWBIT_ISA

#endif  // LOWBIT_BYTES_H_
