// bytes.h for NEON; included by it.
#ifndef LOWBIT_BYTES_NEON_H_
#define LOWBIT_BYTES_NEON_H_

namespace lowbit::LOWBIT_ISA {

LOWBIT_INLINE int32_t largest(I a) { return vmaxvq_s32(reinterpret_cast<int32x4_t>(a)); }
LOWBIT_INLINE int32_t sum_of(I a) { return vaddvq_s32(reinterpret_cast<int32x4_t>(a)); }

// The bytes of four floats or integers, from a table of bytes: dword i of the result is dword index[i] of the table.
LOWBIT_INLINE uint8x16_t bytes_of_dwords(I index) {
  return reinterpret_cast<uint8x16_t>(index * 0x04040404 + 0x03020100);
}
LOWBIT_INLINE F lookup(const float (&table)[16], I index) {
  const uint8x16x2_t bytes = {
      {vld1q_u8(reinterpret_cast<const uint8_t*>(table)), vld1q_u8(reinterpret_cast<const uint8_t*>(table + 4))}};
  return reinterpret_cast<F>(vqtbl2q_u8(bytes, bytes_of_dwords(index)));
}
LOWBIT_INLINE I round_to_int(F a) { return reinterpret_cast<I>(vcvtnq_s32_f32(a)); }
LOWBIT_INLINE F to_float(I a) { return vcvtq_f32_s32(reinterpret_cast<int32x4_t>(a)); }

template <int kPerByte>
LOWBIT_INLINE void pack_codes(I codes, uint8_t* out) {
  if constexpr (kPerByte == 1) {
    const uint8x16_t order = {0, 4, 8, 12};
    const uint8x16_t bytes = vqtbl1q_u8(reinterpret_cast<uint8x16_t>(codes), order);
    memcpy(out, &bytes, 4);
  } else {
    const uint8x16_t order = {0, 8}, next = {4, 12}, bytes = reinterpret_cast<uint8x16_t>(codes);
    const uint8x16_t pairs = vsliq_n_u8(vqtbl1q_u8(bytes, next), vqtbl1q_u8(bytes, order), 4);
    memcpy(out, &pairs, 2);
  }
}

#define LOWBIT_ZIP(name, vector, intrinsic)                                                              \
  LOWBIT_INLINE Bytes name(Bytes a, Bytes b) {                                                           \
    return reinterpret_cast<Bytes>(intrinsic(reinterpret_cast<vector>(a), reinterpret_cast<vector>(b))); \
  }
LOWBIT_ZIP(low_bytes, uint8x16_t, vzip1q_u8)
LOWBIT_ZIP(high_bytes, uint8x16_t, vzip2q_u8)
LOWBIT_ZIP(low_words, uint16x8_t, vzip1q_u16)
LOWBIT_ZIP(high_words, uint16x8_t, vzip2q_u16)
LOWBIT_ZIP(low_dwords, uint32x4_t, vzip1q_u32)
LOWBIT_ZIP(high_dwords, uint32x4_t, vzip2q_u32)
LOWBIT_ZIP(low_qwords, uint64x2_t, vzip1q_u64)
LOWBIT_ZIP(high_qwords, uint64x2_t, vzip2q_u64)
#undef LOWBIT_ZIP

LOWBIT_INLINE Bytes lookup(const uint8_t (&table)[16], Bytes index) {
  return reinterpret_cast<Bytes>(vqtbl1q_u8(vld1q_u8(table), reinterpret_cast<uint8x16_t>(index & 15)));
}
LOWBIT_INLINE Bytes swap_parts(Bytes a) { return a; }
LOWBIT_INLINE void transpose_parts(Bytes*, int) {}
LOWBIT_INLINE void split_pairs(F a, F b, F& first, F& second) {
  first = vuzp1q_f32(a, b);
  second = vuzp2q_f32(a, b);
}
LOWBIT_INLINE void join_pairs(F first, F second, F& a, F& b) {
  a = vzip1q_f32(first, second);
  b = vzip2q_f32(first, second);
}

// sums[i] += dot product of the four signed bytes w and x in dword i; x is never -128. Levels with their offset are
// small enough to be signed.
constexpr bool kSignedDots = true;
template <bool>
LOWBIT_INLINE void add_dots(I& sums, Bytes w, I x) {
  const int8x16_t a = reinterpret_cast<int8x16_t>(w), b = reinterpret_cast<int8x16_t>(x);
#if defined(LOWBIT_NEON_DOT)
  sums = reinterpret_cast<I>(vdotq_s32(reinterpret_cast<int32x4_t>(sums), a, b));
#else
  // Two products of 128 and 127 fit in a word.
  const int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b)), high = vmull_high_s8(a, b);
  sums = reinterpret_cast<I>(vpadalq_s16(reinterpret_cast<int32x4_t>(sums), vpaddq_s16(low, high)));
#endif
}

#if defined(LOWBIT_NEON_I8MM)
// sums[2 i + j] += dot product of the eight signed bytes of qword i of x and qword j of w
LOWBIT_INLINE void add_matrix(I& sums, Bytes x, Bytes w) {
  const int8x16_t a = reinterpret_cast<int8x16_t>(x), b = reinterpret_cast<int8x16_t>(w);
  sums = reinterpret_cast<I>(vmmlaq_s32(reinterpret_cast<int32x4_t>(sums), a, b));
}
#endif

}  // namespace lowbit::LOWBIT_ISA

#endif  // LOWBIT_BYTES_NEON_H_
