// Vectors of integers and bytes; simd.h has the vectors of floats.
// Compiler operators compare, mask and shift lanes; a comparison gives -1 or 0 in each lane.
#ifndef LOWBIT_BYTES_H_
#define LOWBIT_BYTES_H_

#include "simd.h"

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

constexpr int kBytes = sizeof(F);
using Bytes = uint8_t __attribute__((vector_size(sizeof(F))));
using Words = uint16_t __attribute__((vector_size(sizeof(F))));

template <typename V>
LOWBIT_INLINE V load_as(const void* p) {
  V a;
  memcpy(&a, p, sizeof(a));
  return a;
}
template <typename V>
LOWBIT_INLINE void store_as(void* p, V a) {
  memcpy(p, &a, sizeof(a));
}
// GCC 12 would load the bytes again for each use.
LOWBIT_INLINE Bytes load_once(const void* p) {
  Bytes a = load_as<Bytes>(p);
#if defined(LOWBIT_AVX2)
  asm("" : "+x"(a));
#endif
  return a;
}
LOWBIT_INLINE I splat(const void* dword) { return I{} + load_as<int32_t>(dword); }

// Bits cross into the adjacent byte; the caller masks them.
template <int kBits>
LOWBIT_INLINE Bytes shift_right(Bytes a) {
  const Words words = reinterpret_cast<Words>(a);
  if constexpr (kBits < 0) return reinterpret_cast<Bytes>(words << -kBits);
  return reinterpret_cast<Bytes>(words >> (kBits < 0 ? 0 : kBits));
}
#if defined(LOWBIT_AVX512) || defined(LOWBIT_AVX2)
LOWBIT_INLINE int32_t largest_of_8(__m256i a) {
  __m128i b = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  b = _mm_max_epi32(b, _mm_shuffle_epi32(b, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(b, _mm_shuffle_epi32(b, 0xb1)));
}
LOWBIT_INLINE int32_t sum_of_8(__m256i a) {
  __m128i b = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  b = _mm_add_epi32(b, _mm_shuffle_epi32(b, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(b, _mm_shuffle_epi32(b, 0xb1)));
}
#endif

// Wraps an intrinsic of two vectors, whose types differ between instruction sets and compilers.
#define LOWBIT_BYTES_OP(name, vector, intrinsic)                                                         \
  LOWBIT_INLINE Bytes name(Bytes a, Bytes b) {                                                           \
    return reinterpret_cast<Bytes>(intrinsic(reinterpret_cast<vector>(a), reinterpret_cast<vector>(b))); \
  }

#if defined(LOWBIT_AVX512)

LOWBIT_INLINE int32_t largest(I a) {
  __m256i halves[2];
  memcpy(halves, &a, sizeof(a));
  return largest_of_8(_mm256_max_epi32(halves[0], halves[1]));
}
LOWBIT_INLINE int32_t sum_of(I a) {
  __m256i halves[2];
  memcpy(halves, &a, sizeof(a));
  return sum_of_8(_mm256_add_epi32(halves[0], halves[1]));
}

// table[index] for an index below 8
LOWBIT_INLINE F lookup(const float (&table)[16], I index) {
  return permute(load(table), reinterpret_cast<__m512i>(index));
}
// table[index] for an index below 32
LOWBIT_INLINE F lookup(const float (&table)[32], I index) {
  return _mm512_permutex2var_ps(load(table), reinterpret_cast<__m512i>(index), load(table + 16));
}
LOWBIT_INLINE I round_to_int(F a) { return reinterpret_cast<I>(_mm512_cvtps_epi32(a)); }
LOWBIT_INLINE F to_float(I a) { return _mm512_cvtepi32_ps(reinterpret_cast<__m512i>(a)); }

// Packs kLanes codes into bytes, `kPerByte` in each, the first one in the highest bits.
template <int kPerByte>
LOWBIT_INLINE void pack_codes(I codes, uint8_t* out) {
  const __m512i a = reinterpret_cast<__m512i>(codes);
  if constexpr (kPerByte == 1) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(a));
  } else if constexpr (kPerByte == 8) {
    const __m512i order = _mm512_setr_epi32(7, 6, 5, 4, 3, 2, 1, 0, 15, 14, 13, 12, 11, 10, 9, 8);
    const uint16_t bits = _mm512_test_epi32_mask(_mm512_permutexvar_epi32(order, a), _mm512_set1_epi32(1));
    memcpy(out, &bits, 2);
  } else if constexpr (kPerByte == 4) {
    const __m128i pairs = _mm_maddubs_epi16(_mm512_cvtepi32_epi8(a), _mm_set1_epi16(0x0104));
    const __m128i fours = _mm_madd_epi16(pairs, _mm_set1_epi32(0x00010010));
    const __m128i bytes = _mm_shuffle_epi8(fours, _mm_set1_epi32(0x0c080400));
    memcpy(out, &bytes, 4);
  } else {
    const __m512i pairs = _mm512_or_si512(_mm512_slli_epi64(a, 4), _mm512_srli_epi64(a, 32));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm512_cvtepi64_epi8(pairs));
  }
}

LOWBIT_BYTES_OP(low_bytes, __m512i, _mm512_unpacklo_epi8)
LOWBIT_BYTES_OP(high_bytes, __m512i, _mm512_unpackhi_epi8)
LOWBIT_BYTES_OP(low_words, __m512i, _mm512_unpacklo_epi16)
LOWBIT_BYTES_OP(high_words, __m512i, _mm512_unpackhi_epi16)
LOWBIT_BYTES_OP(low_dwords, __m512i, _mm512_unpacklo_epi32)
LOWBIT_BYTES_OP(high_dwords, __m512i, _mm512_unpackhi_epi32)
LOWBIT_BYTES_OP(low_qwords, __m512i, _mm512_unpacklo_epi64)
LOWBIT_BYTES_OP(high_qwords, __m512i, _mm512_unpackhi_epi64)

// table[index & 15]
LOWBIT_INLINE Bytes lookup(const uint8_t (&table)[16], Bytes index) {
  const __m512i tables = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return reinterpret_cast<Bytes>(_mm512_permutexvar_epi8(reinterpret_cast<__m512i>(index), tables));
}
LOWBIT_INLINE Bytes swap_parts(Bytes a) { return a; }
// 128-bit lane i of vector j goes to lane j of vector i.
LOWBIT_INLINE void transpose_parts(Bytes* v, int stride) {
  __m512i a[4];
  for (int i = 0; i < 4; ++i) a[i] = reinterpret_cast<__m512i>(v[i * stride]);
  const __m512i b[4] = {_mm512_shuffle_i32x4(a[0], a[1], 0x44), _mm512_shuffle_i32x4(a[0], a[1], 0xee),
                        _mm512_shuffle_i32x4(a[2], a[3], 0x44), _mm512_shuffle_i32x4(a[2], a[3], 0xee)};
  for (int i = 0; i < 2; ++i) {
    v[2 * i * stride] = reinterpret_cast<Bytes>(_mm512_shuffle_i32x4(b[i], b[i + 2], 0x88));
    v[(2 * i + 1) * stride] = reinterpret_cast<Bytes>(_mm512_shuffle_i32x4(b[i], b[i + 2], 0xdd));
  }
}
LOWBIT_INLINE void split_pairs(F a, F b, F& first, F& second) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  first = _mm512_permutex2var_ps(a, even, b);
  second = _mm512_permutex2var_ps(a, _mm512_add_epi32(even, _mm512_set1_epi32(1)), b);
}
// The inverse
LOWBIT_INLINE void join_pairs(F first, F second, F& a, F& b) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  a = _mm512_permutex2var_ps(first, low, second);
  b = _mm512_permutex2var_ps(first, _mm512_add_epi32(low, _mm512_set1_epi32(8)), second);
}
// sums[i] += dot product of the four unsigned bytes w and signed bytes x in dword i
LOWBIT_INLINE void add_dots(I& sums, Bytes w, I x) {
#if defined(LOWBIT_EMULATE_AVX512)
  sums = reinterpret_cast<I>(
      _mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sums), reinterpret_cast<__m512i>(w), reinterpret_cast<__m512i>(x)));
#else
  // GCC 12 moves sums to memory and back around the intrinsic.
  I added = sums;  // a copy, or the sums of a tile stay in memory
  asm("vpdpbusd %2, %1, %0" : "+v"(added) : "v"(w), "v"(x));
  sums = added;
#endif
}

constexpr bool kSignedDots = false;
template <bool>
LOWBIT_INLINE void add_dots(I& sums, Bytes w, I x) {
  add_dots(sums, w, x);
}

#elif defined(LOWBIT_AVX2)

LOWBIT_INLINE int32_t largest(I a) { return largest_of_8(reinterpret_cast<__m256i>(a)); }
LOWBIT_INLINE int32_t sum_of(I a) { return sum_of_8(reinterpret_cast<__m256i>(a)); }

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
  } else if constexpr (kPerByte == 8) {
    const __m256i turned = _mm256_permutevar8x32_epi32(a, _mm256_setr_epi32(7, 6, 5, 4, 3, 2, 1, 0));
    *out = static_cast<uint8_t>(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_slli_epi32(turned, 31))));
  } else if constexpr (kPerByte == 4) {
    const __m128i pairs = _mm_madd_epi16(words, _mm_set1_epi32(0x00010004));
    const __m128i fours = _mm_madd_epi16(_mm_packs_epi32(pairs, pairs), _mm_set1_epi32(0x00010010));
    const __m128i bytes = _mm_shuffle_epi8(fours, _mm_set1_epi32(0x0c080400));
    memcpy(out, &bytes, 2);
  } else {
    const __m128i pairs = _mm_madd_epi16(words, _mm_set1_epi32(0x00010010));
    const __m128i bytes = _mm_shuffle_epi8(pairs, _mm_set1_epi32(0x0c080400));
    memcpy(out, &bytes, 4);
  }
}

LOWBIT_BYTES_OP(low_bytes, __m256i, _mm256_unpacklo_epi8)
LOWBIT_BYTES_OP(high_bytes, __m256i, _mm256_unpackhi_epi8)
LOWBIT_BYTES_OP(low_words, __m256i, _mm256_unpacklo_epi16)
LOWBIT_BYTES_OP(high_words, __m256i, _mm256_unpackhi_epi16)
LOWBIT_BYTES_OP(low_dwords, __m256i, _mm256_unpacklo_epi32)
LOWBIT_BYTES_OP(high_dwords, __m256i, _mm256_unpackhi_epi32)
LOWBIT_BYTES_OP(low_qwords, __m256i, _mm256_unpacklo_epi64)
LOWBIT_BYTES_OP(high_qwords, __m256i, _mm256_unpackhi_epi64)

LOWBIT_INLINE Bytes lookup(const uint8_t (&table)[16], Bytes index) {
  const __m256i tables = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return reinterpret_cast<Bytes>(_mm256_shuffle_epi8(tables, reinterpret_cast<__m256i>(index & 15)));
}
// Dword i of 128-bit lane j goes to dword j of lane i.
LOWBIT_INLINE Bytes swap_parts(Bytes a) {
  const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
  return reinterpret_cast<Bytes>(_mm256_permutevar8x32_epi32(reinterpret_cast<__m256i>(a), order));
}
LOWBIT_INLINE void transpose_parts(Bytes* v, int stride) {
  const __m256i a = reinterpret_cast<__m256i>(v[0]), b = reinterpret_cast<__m256i>(v[stride]);
  v[0] = reinterpret_cast<Bytes>(_mm256_permute2x128_si256(a, b, 0x20));
  v[stride] = reinterpret_cast<Bytes>(_mm256_permute2x128_si256(a, b, 0x31));
}
LOWBIT_INLINE void split_pairs(F a, F b, F& first, F& second) {
  const F even = _mm256_shuffle_ps(a, b, 0x88), odd = _mm256_shuffle_ps(a, b, 0xdd);
  first = _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(even), 0xd8));
  second = _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(odd), 0xd8));
}
LOWBIT_INLINE void join_pairs(F first, F second, F& a, F& b) {
  const F low = _mm256_unpacklo_ps(first, second), high = _mm256_unpackhi_ps(first, second);
  a = _mm256_permute2f128_ps(low, high, 0x20);
  b = _mm256_permute2f128_ps(low, high, 0x31);
}
// sums[i] += dot product of the two signed words in dword i
LOWBIT_INLINE void add_pair_dots(I& sums, Bytes w, I x) {
  // With intrinsics, GCC 12 computes the products of a whole tile first and runs out of registers.
  I added = sums, products;  // a copy, or the sums of a tile stay in memory
  asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(added), "=&x"(products) : "x"(w), "x"(x));
  sums = added;
}
// sums[i] += dot product of the four levels and signed bytes x in dword i. Levels are unsigned, with their offset, if
// kSmall, else signed; x is never -128.
constexpr bool kSignedDots = true;
template <bool kSmall>
LOWBIT_INLINE void add_dots(I& sums, Bytes w, I x) {
  __m256i a = reinterpret_cast<__m256i>(w), b = reinterpret_cast<__m256i>(x);
  if constexpr (!kSmall) {
    b = _mm256_sign_epi8(b, a);
    a = _mm256_abs_epi8(a);  // two products of 128 and 127 fit in a word
  }
  const __m256i pairs = _mm256_maddubs_epi16(a, b);
  sums += reinterpret_cast<I>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
// Dot product of the two unsigned bytes a and signed bytes b in each word; it must fit in 16 bits.
LOWBIT_INLINE Words small_dots(Bytes a, I b) {
  return reinterpret_cast<Words>(_mm256_maddubs_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
}
// sums += the same
LOWBIT_INLINE void add_small_dots(Words& sums, Bytes a, I b) {
  // As in add_pair_dots.
  Words added = sums, products;
  asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(added), "=&x"(products) : "x"(a), "x"(b));
  sums = added;
}

#elif !defined(LOWBIT_NEON)

LOWBIT_INLINE int32_t largest(I a) {
  const int64_t low = max(int64_t{a[0]}, a[1]), high = max(int64_t{a[2]}, a[3]);
  return static_cast<int32_t>(max(low, high));
}
LOWBIT_INLINE F lookup(const float (&table)[16], I index) {
  return F{table[index[0]], table[index[1]], table[index[2]], table[index[3]]};
}
LOWBIT_INLINE int32_t sum_of(I a) { return a[0] + a[1] + (a[2] + a[3]); }
// Of numbers below 2^22: adding 1.5 * 2^23 leaves the rounded integer in the last bits.
LOWBIT_INLINE I round_to_int(F a) { return as_ints(a + broadcast(0x1.8p23f)) - as_ints(broadcast(0x1.8p23f)); }
LOWBIT_INLINE F to_float(I a) { return __builtin_convertvector(a, F); }

template <int kPerByte>
LOWBIT_INLINE void pack_codes(I codes, uint8_t* out) {
  for (int i = 0; i < kLanes; i += kPerByte) {
    out[i / kPerByte] = static_cast<uint8_t>(kPerByte == 1 ? codes[i] : codes[i] << 4 | codes[i + 1]);
  }
}

#if defined(__x86_64__)
LOWBIT_BYTES_OP(low_bytes, __m128i, _mm_unpacklo_epi8)
LOWBIT_BYTES_OP(high_bytes, __m128i, _mm_unpackhi_epi8)
LOWBIT_BYTES_OP(low_words, __m128i, _mm_unpacklo_epi16)
LOWBIT_BYTES_OP(high_words, __m128i, _mm_unpackhi_epi16)
LOWBIT_BYTES_OP(low_dwords, __m128i, _mm_unpacklo_epi32)
LOWBIT_BYTES_OP(high_dwords, __m128i, _mm_unpackhi_epi32)
LOWBIT_BYTES_OP(low_qwords, __m128i, _mm_unpacklo_epi64)
LOWBIT_BYTES_OP(high_qwords, __m128i, _mm_unpackhi_epi64)
LOWBIT_INLINE void add_pair_dots(I& sums, Bytes w, I x) {
  sums += reinterpret_cast<I>(_mm_madd_epi16(reinterpret_cast<__m128i>(w), reinterpret_cast<__m128i>(x)));
}
#else
// Units of kSize bytes from the lower or upper half of a and b in turn.
template <int kSize, bool kUpper>
LOWBIT_INLINE Bytes interleave(Bytes a, Bytes b) {
  Bytes mixed{};
  for (int i = 0; i < kBytes; ++i) {
    const int from = i / (2 * kSize) * kSize + i % kSize + (kUpper ? kBytes / 2 : 0);
    mixed[i] = i / kSize % 2 == 0 ? a[from] : b[from];
  }
  return mixed;
}
LOWBIT_INLINE Bytes low_bytes(Bytes a, Bytes b) { return interleave<1, false>(a, b); }
LOWBIT_INLINE Bytes high_bytes(Bytes a, Bytes b) { return interleave<1, true>(a, b); }
LOWBIT_INLINE Bytes low_words(Bytes a, Bytes b) { return interleave<2, false>(a, b); }
LOWBIT_INLINE Bytes high_words(Bytes a, Bytes b) { return interleave<2, true>(a, b); }
LOWBIT_INLINE Bytes low_dwords(Bytes a, Bytes b) { return interleave<4, false>(a, b); }
LOWBIT_INLINE Bytes high_dwords(Bytes a, Bytes b) { return interleave<4, true>(a, b); }
LOWBIT_INLINE Bytes low_qwords(Bytes a, Bytes b) { return interleave<8, false>(a, b); }
LOWBIT_INLINE Bytes high_qwords(Bytes a, Bytes b) { return interleave<8, true>(a, b); }
LOWBIT_INLINE void add_pair_dots(I& sums, Bytes w, I x) {
  const I a = reinterpret_cast<I>(w);
  sums += (a << 16 >> 16) * (x << 16 >> 16) + (a >> 16) * (x >> 16);
}
#endif

LOWBIT_INLINE Bytes lookup(const uint8_t (&table)[16], Bytes index) {
  Bytes found{};
  for (int i = 0; i < kBytes; ++i) found[i] = table[index[i] & 15];
  return found;
}
LOWBIT_INLINE Bytes swap_parts(Bytes a) { return a; }
LOWBIT_INLINE void transpose_parts(Bytes*, int) {}
LOWBIT_INLINE void split_pairs(F a, F b, F& first, F& second) {
  first = F{a[0], a[2], b[0], b[2]};
  second = F{a[1], a[3], b[1], b[3]};
}
LOWBIT_INLINE void join_pairs(F first, F second, F& a, F& b) {
  a = F{first[0], second[0], first[1], second[1]};
  b = F{first[2], second[2], first[3], second[3]};
}

#endif

#undef LOWBIT_BYTES_OP

}  // namespace lowbit::LOWBIT_ISA

#if defined(LOWBIT_NEON)
#include "bytes_neon.h"
#endif

namespace lowbit::LOWBIT_ISA {

// The bytes of four rows, interleaved: of the four vectors that result, kCount from the first one on. Dword i, counted
// over all four, holds byte i of each row; but with AVX-512 the dwords of each 128-bit part stay there: part i of
// vector j is then what part j of vector i should be (`turn_parts`), which saves a shuffle for each row.
template <int kFirst, int kCount>
LOWBIT_INLINE void interleave_rows(const Bytes rows[4], Bytes v[kCount]) {
  Bytes r[4];
  for (int i = 0; i < 4; ++i) r[i] = swap_parts(rows[i]);
  for (int i = 0; i < kCount; ++i) {
    const bool upper = kFirst + i >= 2;
    const Bytes a = upper ? high_bytes(r[0], r[1]) : low_bytes(r[0], r[1]);
    const Bytes b = upper ? high_bytes(r[2], r[3]) : low_bytes(r[2], r[3]);
    v[i] = (kFirst + i) % 2 == 0 ? low_words(a, b) : high_words(a, b);
  }
}

// Between the order that `interleave_rows` leaves and that of the columns; v has `stride` times four vectors.
LOWBIT_INLINE void turn_parts([[maybe_unused]] Bytes* v, [[maybe_unused]] int stride) {
#if defined(LOWBIT_AVX512)
  for (int i = 0; i < stride; ++i) transpose_parts(v + i, stride);
#endif
}
// The same for bytes of 8 * kLanes columns, of which each has one, if a vector has the even or the odd columns.
LOWBIT_INLINE const uint8_t* turn_bytes(const uint8_t* bytes, [[maybe_unused]] uint8_t turned[8 * kLanes]) {
#if defined(LOWBIT_AVX512)
  const __m512i low = _mm512_loadu_si512(bytes), high = _mm512_loadu_si512(bytes + 64);
  const __m512i order = _mm512_setr_epi64(0, 4, 8, 12, 1, 5, 9, 13);
  _mm512_storeu_si512(turned, _mm512_permutex2var_epi64(low, order, high));
  const __m512i others = _mm512_add_epi64(order, _mm512_set1_epi64(2));
  _mm512_storeu_si512(turned + 64, _mm512_permutex2var_epi64(low, others, high));
  return turned;
#else
  return bytes;
#endif
}

// Dword i of vector j goes to dword j of vector i.
LOWBIT_INLINE void transpose_dwords(Bytes v[kLanes]) {
  for (int i = 0; i < kLanes; i += 4) {
    const Bytes a = low_dwords(v[i], v[i + 1]), b = high_dwords(v[i], v[i + 1]);
    const Bytes c = low_dwords(v[i + 2], v[i + 3]), d = high_dwords(v[i + 2], v[i + 3]);
    v[i] = low_qwords(a, c);
    v[i + 1] = high_qwords(a, c);
    v[i + 2] = low_qwords(b, d);
    v[i + 3] = high_qwords(b, d);
  }
  for (int i = 0; i < 4; ++i) transpose_parts(v + i, 4);
}

// Treats denormal numbers as zero during its lifetime, as XLA's own code does.
class FlushDenormals {
 public:
#if defined(__aarch64__)
  FlushDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" : : "r"(before_ | 1 << 24));
  }
  ~FlushDenormals() { asm volatile("msr fpcr, %0" : : "r"(before_)); }

 private:
  uint64_t before_;
#else
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#endif
};

}  // namespace lowbit::LOWBIT_ISA

#endif  // LOWBIT_BYTES_H_
