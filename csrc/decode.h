// Decoding codes: one functor for each kind of codes, made from the levels of a format.
//
//   level(byte, i)      the level of the i-th code of a byte, for code that is not performance-critical
//   decode(bytes, v)    the levels of kLine consecutive columns, in four vectors of kLanes columns each
//   times(f)            a decoder of f times the levels, if that is faster (kTimes)
//   order(v)            puts the lanes of the first or the last two of them in column order; a decoder may use another
//   unorder(v)          the inverse
//
// and for int8 products, if is_fast():
//
//   bytes<i>(codes)     level / unit + offset of the i-th code of each byte, unsigned; rounded if not kSmall
//   signed_bytes<i>     the same without the offset, if not kSmall
//   fit                 how many sums of two products with x fit in 16 bits, if kSmall
#ifndef LOWBIT_DECODE_H_
#define LOWBIT_DECODE_H_

#include "codes.h"

namespace lowbit::LOWBIT_ISA {

// The levels of a table of up to 16 as bytes, for int8 products: integers in a unit that is a power of two, or else
// rounded to 127ths of the largest. Tables of fewer levels are repeated, so that bits above the code do not matter.
struct ByteLevels {
  static constexpr int kMost = 64;  // above the lowest: products with x that can be added twice in 16 bits
  alignas(16) uint8_t plus_offset[16], plain[16];
  float unit = 1;
  int offset = 128, fit = 0;
  bool small = false;

  ByteLevels(const float* levels, int count) {
    float largest = 0;
    for (int i = 0; i < count; ++i) largest = max_of(largest, levels[i] < 0 ? -levels[i] : levels[i]);
    for (float tried = 1; tried >= 0.125f && !small; tried /= 2) small = set(levels, count, tried);
    if (small) return;
    unit = largest / 127;
    for (int i = 0; i < 16; ++i) {
      const float relative = largest > 0 ? levels[i % count] / largest : 0;
      plus_offset[i] = static_cast<uint8_t>(relative * 127 + 128.5f);
      plain[i] = plus_offset[i] ^ 128;
    }
  }

 private:
  static float max_of(float a, float b) { return a > b ? a : b; }

  bool set(const float* levels, int count, float tried) {
    int lowest = 127, highest = -127;
    for (int i = 0; i < count; ++i) {
      const float relative = levels[i] / tried;
      if (!(relative >= -kMost && relative <= kMost)) return false;
      const int integer = static_cast<int>(relative);
      if (static_cast<float>(integer) != relative) return false;
      lowest = integer < lowest ? integer : lowest;
      highest = integer > highest ? integer : highest;
    }
    if (highest - lowest > kMost) return false;
    unit = tried;
    offset = -lowest;
    fit = 32767 / (2 * 127 * (highest - lowest > 0 ? highest - lowest : 1));
    for (int i = 0; i < 16; ++i) {
      plain[i] = static_cast<uint8_t>(static_cast<int>(levels[i % count] / tried));
      plus_offset[i] = static_cast<uint8_t>(plain[i] + offset);
    }
    return true;
  }
};

// The i-th code of each byte, in the low bits; the bits above it are others'.
template <int kBits, int i>
LOWBIT_INLINE Bytes code_at(Bytes codes) {
  return shift_right<8 - kBits*(i + 1)>(codes);
}

// The bits of a where the mask has ones, else those of b. Shifts act on 16 bits; bits that cross bytes are masked.
LOWBIT_INLINE Words merge(Words a, Words b, uint16_t mask) { return (a & mask) | (b & static_cast<uint16_t>(~mask)); }

// A table of up to 16 levels, in codes of kBits.
template <int kBits, bool kIsSmall>
struct Levels {
  static constexpr int kPerByte = 8 / kBits;
  static constexpr bool kSmall = kIsSmall;
  const float* levels;
  ByteLevels as_bytes;

  explicit Levels(const float* table) : levels(table), as_bytes(table, 1 << kBits) {}

  float level(uint8_t byte, int i) const { return levels[byte >> (8 - kBits * (i + 1)) & ((1 << kBits) - 1)]; }
  bool is_fast() const { return as_bytes.small || !kSmall; }
  float unit() const { return as_bytes.unit; }
  int offset() const { return as_bytes.offset; }
  int fit() const { return as_bytes.fit; }

  template <int i>
  LOWBIT_INLINE Bytes bytes(Bytes codes) const {
    return lookup(as_bytes.plus_offset, code_at<kBits, i>(codes));
  }
  template <int i>
  LOWBIT_INLINE Bytes signed_bytes(Bytes codes) const {
    return lookup(as_bytes.plain, code_at<kBits, i>(codes));
  }
};

// Signed bytes: int8, and joined codes of two components.
struct Int8 : Int8Vectors {
  static constexpr int kPerByte = 1;
  static constexpr int kTableRows = 0;
  static constexpr bool kSmall = false;
  bool is_fast() const { return true; }
  float unit() const { return 1; }
  int offset() const { return 128; }
  int fit() const { return 0; }
  template <int>
  LOWBIT_INLINE Bytes bytes(Bytes codes) const {
    return codes ^ 128;
  }
  template <int>
  LOWBIT_INLINE Bytes signed_bytes(Bytes codes) const {
    return codes;
  }
};

struct Fp8 : Fp8Vectors {
  static constexpr int kPerByte = 1;
  static constexpr int kTableRows = 0;
};

template <bool kIsSmall>
struct NibbleLevels : NibbleVectors<kIsSmall>, Levels<4, kIsSmall> {
  static constexpr int kTableRows = 0;
  // Without a lookup of floats, small levels decode in fewer instructions than their multiples.
  static constexpr bool kTimes = kAddsBesideFma && (kLooksUp16 || !kIsSmall);

  explicit NibbleLevels(const float* table) : NibbleVectors<kIsSmall>(table), Levels<4, kIsSmall>(table) {}

  LOWBIT_INLINE NibbleVectors<false> times(float f) const {
    float scaled[16];
    for (int i = 0; i < 16; i += kLanes) store(scaled + i, load(this->levels + i) * broadcast(f));
    return NibbleVectors<false>(scaled);
  }
};

// kTableRows stored rows, if not 0, have four bits in each column. `regroup` combines them to nibbles, with the bits of
// earlier rows on top: nibble j of plane i belongs to column kTableRows * j + kPlaneColumn[i].
struct CrumbLevels : CrumbVectors, Levels<2, true> {
  static constexpr int kTableRows = kLooksUp16 ? 2 : 0;  // slower if a lookup takes several instructions
  static constexpr int kPlaneColumn[2] = {0, 1};

  explicit CrumbLevels(const float* table) : CrumbVectors(table), Levels<2, true>(table) {}

  LOWBIT_INLINE static void regroup(const Words rows[2], Words planes[2]) {
    planes[0] = merge(rows[0], rows[1] >> 2, 0xcccc);
    planes[1] = merge(rows[0] << 2, rows[1], 0xcccc);
  }
};

struct BitLevels : BitVectors, Levels<1, true> {
  static constexpr int kTableRows = 4;
  static constexpr int kPlaneColumn[4] = {0, 2, 1, 3};

  explicit BitLevels(const float* table) : BitVectors(table), Levels<1, true>(table) {}

  LOWBIT_INLINE static void regroup(const Words rows[4], Words planes[4]) {
    const Words even01 = merge(rows[0], rows[1] >> 1, 0xaaaa), odd01 = merge(rows[0] << 1, rows[1], 0xaaaa);
    const Words even23 = merge(rows[2], rows[3] >> 1, 0xaaaa), odd23 = merge(rows[2] << 1, rows[3], 0xaaaa);
    planes[0] = merge(even01, even23 >> 2, 0xcccc);
    planes[1] = merge(even01 << 2, even23, 0xcccc);
    planes[2] = merge(odd01, odd23 >> 2, 0xcccc);
    planes[3] = merge(odd01 << 2, odd23, 0xcccc);
  }
};

// Calls run(functor) with the functor for these codes.
template <typename F>
LOWBIT_INLINE auto with_decoder(const Weights& w, const F& run) {
  if (w.format == Format::e4m3 || w.format == Format::e5m2) {
    Fp8 decoder;
    decoder.floats = w.format == Format::e4m3 ? e4m3() : e5m2();
    return run(decoder);
  }
  if (w.format == Format::int8 || w.high != nullptr) return run(Int8());
  if (w.bits == 1) return run(BitLevels(w.levels));
  if (w.bits == 2) return run(CrumbLevels(w.levels));
  return ByteLevels(w.levels, 16).small ? run(NibbleLevels<true>(w.levels)) : run(NibbleLevels<false>(w.levels));
}

}  // namespace lowbit::LOWBIT_ISA

#endif  // LOWBIT_DECODE_H_
