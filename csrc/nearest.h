// The nearest level of a value: of integers, of a table, of a table of small integers.
#ifndef LOWBIT_NEAREST_H_
#define LOWBIT_NEAREST_H_

#include "encode.h"

namespace lowbit::LOWBIT_ISA {

LOWBIT_INLINE F select(I mask, F yes, F no) { return as_floats((as_ints(yes) & mask) | (as_ints(no) & ~mask)); }
LOWBIT_INLINE F reciprocal(F x) {
  const I is_zero = x == zero();
  return as_floats(as_ints(broadcast(1.0f) / select(is_zero, broadcast(1.0f), x)) & ~is_zero);
}

// ---- The nearest level
//
//   codes(x, inverse, out)    the codes of the levels nearest to kChunk vectors, times `inverse`
//   levels(x, inverse, out)   these levels

constexpr int kChunk = 8;

// Of integers, code - zero: to nearest even.
struct NearestInteger {
  F low, high;

  explicit NearestInteger(const Search& p)
      : low(broadcast(static_cast<float>(-p.zero))), high(broadcast(static_cast<float>((1 << p.bits) - 1 - p.zero))) {}

  // The bounds are integers, so that clipping first gives the same.
  LOWBIT_INLINE F clipped(F x) const { return smaller(larger(x, low), high); }
  LOWBIT_INLINE void codes(const float* x, F inverse, I out[kChunk]) const {
    for (int i = 0; i < kChunk; ++i) {
      out[i] = round_to_int(clipped(load(x + i * kLanes) * inverse)) - round_to_int(low);
    }
  }
  LOWBIT_INLINE void levels(const float* x, F inverse, F out[kChunk]) const {
    for (int i = 0; i < kChunk; ++i) out[i] = to_float(round_to_int(clipped(load(x + i * kLanes) * inverse)));
  }
};

// Of a table of 2^kBits levels: the number of midpoints up to x, by binary search.
template <int kBits>
struct NearestInTable {
  static constexpr int kCount = 1 << kBits;
  alignas(64) float step[kBits][16] = {};
  alignas(64) float low[16] = {}, high[16] = {};

  explicit NearestInTable(const Search& p) {
    for (int s = 0; s < kBits; ++s) {
      const int half = kCount >> (s + 1);
      for (int i = 0; i < 1 << s; ++i) step[s][i] = p.middle[half * (2 * i + 1) - 1];
    }
    for (int i = 0; i < kCount; ++i) (kCount <= 8 || i < 8 ? low[i] : high[i - 8]) = p.levels[i];
    if (kLanes == 16) {
      for (int i = 0; i < kCount; ++i) low[i] = p.levels[i];
    }
  }

  LOWBIT_INLINE I code(F x) const {
    I code = -(x >= broadcast(step[0][0]));
    for (int s = 1; s < kBits; ++s) code = code + code - (x >= lookup(step[s], code));
    return code;
  }
  LOWBIT_INLINE void codes(const float* x, F inverse, I out[kChunk]) const {
    for (int i = 0; i < kChunk; ++i) out[i] = code(load(x + i * kLanes) * inverse);
  }
  LOWBIT_INLINE void levels(const float* x, F inverse, F out[kChunk]) const {
    for (int i = 0; i < kChunk; ++i) {
      const I found = code(load(x + i * kLanes) * inverse);
      if constexpr (kCount <= 8 || kLanes == 16) {
        out[i] = lookup(low, found);
      } else {
        out[i] = select(found > 7, lookup(high, found & 7), lookup(low, found & 7));
      }
    }
  }
};

#if defined(LOWBIT_AVX2)

// The same for tables of small integers, 32 values at a time. Levels change at multiples of 1/2, so floor(2x) decides,
// in a byte. Its upper bits are a cell, with at most one change in it: the code at the start of the cell, and the place
// of the change, are looked up in bytes, separately for cells below and above zero.
template <int kBits>
struct NearestSmall : NearestInTable<kBits> {
  static constexpr int kCell = 4;
  alignas(16) int8_t level_of[16] = {};
  alignas(16) int8_t code_above[16], code_below[16], change_above[16], change_below[16];
  bool fits = true;

  explicit NearestSmall(const Search& p) : NearestInTable<kBits>(p) {
    constexpr int kCount = 1 << kBits;
    int change[kCount];
    for (int i = 0; i < kCount; ++i) {
      if (p.levels[i] < -127 || p.levels[i] > 127) fits = false;
      level_of[i] = fits ? static_cast<int8_t>(p.levels[i]) : 0;
      if (static_cast<float>(level_of[i]) != p.levels[i]) fits = false;
    }
    for (int i = 0; i + 1 < kCount && fits; ++i) {
      if (!(p.middle[i] >= -31 && p.middle[i] <= 31)) fits = false;
      change[i] = fits ? static_cast<int>(2 * p.middle[i]) : 0;
      if (static_cast<float>(change[i]) != 2 * p.middle[i]) fits = false;
    }
    for (int cell = -16; cell < 16 && fits; ++cell) {
      int code = 0, changes = 0, place = 127;
      for (int i = 0; i + 1 < kCount; ++i) {
        if (change[i] <= kCell * cell) {
          ++code;
        } else if (change[i] < kCell * (cell + 1)) {
          place = change[i] - 1;
          ++changes;
        }
      }
      if (changes > 1) fits = false;
      (cell < 0 ? code_below[~cell] : code_above[cell]) = static_cast<int8_t>(code);
      (cell < 0 ? change_below[~cell] : change_above[cell]) = static_cast<int8_t>(place);
    }
  }

  LOWBIT_INLINE static __m256i table(const int8_t* from) {
    return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(from)));
  }

  LOWBIT_INLINE void codes(const float* x, F inverse, I out[kChunk]) const {
    for (int i = 0; i < kChunk; i += 4) {
      __m256i wide[4];
      widen(codes_of_four(x + i * kLanes, inverse + inverse), wide);
      for (int j = 0; j < 4; ++j) out[i + j] = reinterpret_cast<I>(wide[j]);
    }
  }
  LOWBIT_INLINE void levels(const float* x, F inverse, F out[kChunk]) const {
    for (int i = 0; i < kChunk; i += 4) {
      __m256i wide[4];
      widen(_mm256_shuffle_epi8(table(level_of), codes_of_four(x + i * kLanes, inverse + inverse)), wide);
      for (int j = 0; j < 4; ++j) out[i + j] = _mm256_cvtepi32_ps(wide[j]);
    }
  }

  // The codes of four vectors, as bytes in the order of `widen`.
  LOWBIT_INLINE __m256i codes_of_four(const float* x, F inverse) const {
    __m256i halves[4];
    for (int i = 0; i < 4; ++i) {
      halves[i] = _mm256_cvtps_epi32(_mm256_floor_ps(load(x + i * kLanes) * inverse));
    }
    const __m256i a = _mm256_packs_epi32(halves[0], halves[1]), b = _mm256_packs_epi32(halves[2], halves[3]);
    const __m256i steps = _mm256_packs_epi16(a, b);
    // Beyond +-64 the last cells continue.
    __m256i cells = _mm256_packs_epi16(_mm256_srai_epi16(a, 2), _mm256_srai_epi16(b, 2));
    cells = _mm256_max_epi8(_mm256_min_epi8(cells, _mm256_set1_epi8(15)), _mm256_set1_epi8(-16));
    const __m256i below = _mm256_xor_si256(cells, _mm256_set1_epi8(-1));  // a negative index looks up a zero
    const __m256i code =
        _mm256_or_si256(_mm256_shuffle_epi8(table(code_above), cells), _mm256_shuffle_epi8(table(code_below), below));
    const __m256i change = _mm256_or_si256(_mm256_shuffle_epi8(table(change_above), cells),
                                           _mm256_shuffle_epi8(table(change_below), below));
    return _mm256_sub_epi8(code, _mm256_cmpgt_epi8(steps, change));
  }

  // Signed bytes, as two rounds of packing order them, to four vectors.
  LOWBIT_INLINE static void widen(__m256i mixed, __m256i out[4]) {
    const __m256i bytes = _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    const __m128i low = _mm256_castsi256_si128(bytes), high = _mm256_extracti128_si256(bytes, 1);
    out[0] = _mm256_cvtepi8_epi32(low);
    out[1] = _mm256_cvtepi8_epi32(_mm_srli_si128(low, 8));
    out[2] = _mm256_cvtepi8_epi32(high);
    out[3] = _mm256_cvtepi8_epi32(_mm_srli_si128(high, 8));
  }
};

#endif

}  // namespace lowbit::LOWBIT_ISA

#endif  // LOWBIT_NEAREST_H_
