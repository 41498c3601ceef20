// codes.h for NEON; included by it. Columns are in order: a line is 16 codes, one in each byte of a register.
#ifndef LOWBIT_CODES_NEON_H_
#define LOWBIT_CODES_NEON_H_

namespace lowbit::LOWBIT_ISA {

// Each byte goes to the top of a dword, which is converted as a fixed-point number.
struct Int8Vectors : InOrder {
  LOWBIT_INLINE void decode(const uint8_t* bytes, F v[kVectors]) const {
    const uint8x16_t codes = vld1q_u8(bytes);
    for (int i = 0; i < kVectors; ++i) {
      const uint32_t first = 0xffffff | static_cast<uint32_t>(4 * i) << 24;  // the lookup of 255 is zero
      const uint32x4_t order = {first, first + (1u << 24), first + (2u << 24), first + (3u << 24)};
      const uint8x16_t dwords = vqtbl1q_u8(codes, reinterpret_cast<uint8x16_t>(order));
      v[i] = vcvtq_n_f32_s32(reinterpret_cast<int32x4_t>(dwords), 24);
    }
  }
};

// `tbl` looks up 16 bytes: each of the four bytes of the floats is looked up for 16 codes at once, and the bytes are
// interleaved to floats. If the lower two bytes are zero (kShort), as those of small integers are, words of the upper
// ones are widened by a shift.
template <bool kShort>
struct FloatPlanes {
  uint8x16_t planes[4];

  FloatPlanes() = default;
  LOWBIT_INLINE explicit FloatPlanes(const float (&levels)[16]) {
    const uint8x16x4_t bytes = vld4q_u8(reinterpret_cast<const uint8_t*>(levels));
    for (int i = 0; i < 4; ++i) planes[i] = bytes.val[i];
  }

  LOWBIT_INLINE void look_up(uint8x16_t codes, F v[kVectors]) const {
    const uint8x16_t byte2 = vqtbl1q_u8(planes[2], codes), byte3 = vqtbl1q_u8(planes[3], codes);
    const uint16x8_t high_a = vreinterpretq_u16_u8(vzip1q_u8(byte2, byte3));
    const uint16x8_t high_b = vreinterpretq_u16_u8(vzip2q_u8(byte2, byte3));
    if constexpr (kShort) {
      v[0] = reinterpret_cast<F>(vshll_n_u16(vget_low_u16(high_a), 16));
      v[1] = reinterpret_cast<F>(vshll_high_n_u16(high_a, 16));
      v[2] = reinterpret_cast<F>(vshll_n_u16(vget_low_u16(high_b), 16));
      v[3] = reinterpret_cast<F>(vshll_high_n_u16(high_b, 16));
      return;
    }
    const uint8x16_t byte0 = vqtbl1q_u8(planes[0], codes), byte1 = vqtbl1q_u8(planes[1], codes);
    const uint16x8_t low_a = vreinterpretq_u16_u8(vzip1q_u8(byte0, byte1));
    const uint16x8_t low_b = vreinterpretq_u16_u8(vzip2q_u8(byte0, byte1));
    v[0] = reinterpret_cast<F>(vzip1q_u16(low_a, high_a));
    v[1] = reinterpret_cast<F>(vzip2q_u16(low_a, high_a));
    v[2] = reinterpret_cast<F>(vzip1q_u16(low_b, high_b));
    v[3] = reinterpret_cast<F>(vzip2q_u16(low_b, high_b));
  }
};

// 16 codes of kBits, one in each byte.
template <int kBits>
LOWBIT_INLINE uint8x16_t spread_16(const uint8_t* bytes) {
  if constexpr (kBits == 4) {
    const uint8x8_t pairs = vld1_u8(bytes), even = vshr_n_u8(pairs, 4), odd = vand_u8(pairs, vdup_n_u8(15));
    return vzip1q_u8(vcombine_u8(even, even), vcombine_u8(odd, odd));
  } else if constexpr (kBits == 2) {
    const uint8x16_t order = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
    const int8x16_t shifts = {-6, -4, -2, 0, -6, -4, -2, 0, -6, -4, -2, 0, -6, -4, -2, 0};
    uint32_t stored;
    memcpy(&stored, bytes, 4);
    const uint8x16_t all = vqtbl1q_u8(vreinterpretq_u8_u32(vdupq_n_u32(stored)), order);
    return vandq_u8(vshlq_u8(all, shifts), vdupq_n_u8(3));
  } else {
    const uint8x16_t order = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1};
    const uint8x16_t bits = {128, 64, 32, 16, 8, 4, 2, 1, 128, 64, 32, 16, 8, 4, 2, 1};
    uint16_t stored;
    memcpy(&stored, bytes, 2);
    const uint8x16_t all = vqtbl1q_u8(vreinterpretq_u8_u16(vdupq_n_u16(stored)), order);
    return vandq_u8(vtstq_u8(all, bits), vdupq_n_u8(1));
  }
}

template <bool kShort>
struct NibbleVectors : InOrder {
  FloatPlanes<kShort> planes;

  NibbleVectors() = default;
  LOWBIT_INLINE explicit NibbleVectors(const float* levels) {
    float table[16];
    memcpy(table, levels, sizeof(table));
    planes = FloatPlanes<kShort>(table);
  }

  LOWBIT_INLINE void decode(const uint8_t* bytes, F v[kVectors]) const { planes.look_up(spread_16<4>(bytes), v); }
};

struct CrumbVectors : InOrder {
  FloatPlanes<false> planes;

  explicit CrumbVectors(const float* levels) {
    float table[16] = {};
    memcpy(table, levels, 4 * sizeof(float));
    planes = FloatPlanes<false>(table);
  }

  LOWBIT_INLINE void decode(const uint8_t* bytes, F v[kVectors]) const { planes.look_up(spread_16<2>(bytes), v); }
};

// All lanes hold the same 16 codes; each tests a bit and selects one of two levels.
struct BitVectors : InOrder {
  F levels[2];

  explicit BitVectors(const float* table) : levels{broadcast(table[0]), broadcast(table[1])} {}

  LOWBIT_INLINE void decode(const uint8_t* bytes, F v[kVectors]) const {
    uint16_t stored;
    memcpy(&stored, bytes, 2);
    const uint32x4_t codes = vdupq_n_u32(stored);
    for (int i = 0; i < kVectors; ++i) {
      const uint32_t first = 128u >> i % 2 * 4 << i / 2 * 8;  // the first code is in the highest bit of a byte
      const uint32x4_t bits = {first, first >> 1, first >> 2, first >> 3};
      v[i] = vbslq_f32(vtstq_u32(codes, bits), levels[1], levels[0]);
    }
  }
};

}  // namespace lowbit::LOWBIT_ISA

#endif  // LOWBIT_CODES_NEON_H_
