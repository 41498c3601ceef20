// Decoding the codes of each format: one functor per format.
//
//   level(byte, i)      the level of the i-th code of a byte, for code that is not performance-critical
//   decode(bytes, v)    the levels of kLine consecutive columns, in four vectors of kLanes columns each
//   times(f)            a decoder of f times the levels, if that is faster (kTimes)
//   order(v)            such a vector with its lanes in column order; a decoder may use a different order
//   unorder(v)          the inverse
//   bytes<i>(codes)     for int8 products: level / kUnit + kOffset of the i-th code of each byte, unsigned; rounded for
//                       NF4; at most 3 if kSmall
//   signed_bytes<i>     the same without the offset, if not kSmall
#ifndef LOWBIT_DECODE_H_
#define LOWBIT_DECODE_H_

#include "bytes.h"

namespace lowbit::LOWBIT_ISA {

constexpr int kVectors = 4;
constexpr int kLine = kVectors * kLanes;

// QLoRA, arXiv:2305.14314, appendix E.
alignas(64) constexpr float kNf4Levels[16] = {
    -1.0f,
    -0.6961928009986877f,
    -0.5250730514526367f,
    -0.39491748809814453f,
    -0.28444138169288635f,
    -0.18477343022823334f,
    -0.09105003625154495f,
    0.0f,
    0.07958029955625534f,
    0.16093020141124725f,
    0.24611230194568634f,
    0.33791524171829224f,
    0.44070982933044434f,
    0.5626170039176941f,
    0.7229568362236023f,
    1.0f,
};

// The levels in 127ths, rounded.
struct Nf4Bytes {
  uint8_t offset_by_128[16] = {}, plain[16] = {};
  constexpr Nf4Bytes() {
    for (int i = 0; i < 16; ++i) {
      offset_by_128[i] = static_cast<uint8_t>(kNf4Levels[i] * 127 + 128.5f);
      plain[i] = offset_by_128[i] ^ 128;
    }
  }
};
constexpr Nf4Bytes kNf4Bytes;

LOWBIT_INLINE float int8_level(uint8_t byte, int) { return static_cast<float>(static_cast<int8_t>(byte)); }
LOWBIT_INLINE float nf4_level(uint8_t byte, int i) { return kNf4Levels[byte >> (4 - 4 * i) & 15]; }
LOWBIT_INLINE float ternary_level(uint8_t byte, int i) { return static_cast<float>((byte >> (6 - 2 * i) & 3) - 1); }
LOWBIT_INLINE float binary_level(uint8_t byte, int i) { return static_cast<float>((byte >> (7 - i) & 1) * 2 - 1); }

// ---- Decoders of four vectors

struct InOrder {
  static constexpr bool kTimes = false;
  LOWBIT_INLINE static F order(F v) { return v; }
  LOWBIT_INLINE static F unorder(F v) { return v; }
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
// same 16 codes, and each is rotated to bring two of them, 8 columns apart, to the low bits of its lanes.
struct NibbleVectors {
  explicit NibbleVectors(const float* levels = kNf4Levels) : table(_mm512_loadu_ps(levels)) {}

  F table;
  __m512i turns = _mm512_setr_epi64(4, 0, 12, 8, 20, 16, 28, 24);

  LOWBIT_INLINE void decode(const uint8_t* bytes, F v[kVectors]) const {
    for (int i = 0; i < kVectors; ++i) {
      int64_t codes;
      memcpy(&codes, bytes + 8 * i, 8);
      v[i] = _mm512_permutexvar_ps(_mm512_rorv_epi64(_mm512_set1_epi64(codes), turns), table);
    }
  }
  LOWBIT_INLINE static F order(F v) {
    return permute(v, _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
  }
  LOWBIT_INLINE static F unorder(F v) {
    return permute(v, _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15));
  }
};

// All lanes hold the same codes, each shifted by a different number of bits; the lookup in four floats uses only the
// lowest two bits.
struct TernaryVectors : InOrder {
  F table = _mm512_set4_ps(2, 1, 0, -1);
  __m512i shifts = _mm512_setr_epi32(6, 4, 2, 0, 14, 12, 10, 8, 22, 20, 18, 16, 30, 28, 26, 24);

  LOWBIT_INLINE void decode(const uint8_t* bytes, F v[kVectors]) const {
    for (int i = 0; i < kVectors; ++i) {
      int32_t codes;
      memcpy(&codes, bytes + 4 * i, 4);
      v[i] = _mm512_permutevar_ps(table, _mm512_srlv_epi32(_mm512_set1_epi32(codes), shifts));
    }
  }
};

struct BinaryVectors : InOrder {
  F table = _mm512_set4_ps(1, -1, 1, -1);
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
// once, and the bytes are interleaved to floats, in 14 operations for 32 columns. The high nibbles (even
// columns) are in the lower half of each register, the low ones in the upper half.
struct NibbleVectors {
  __m256i planes[4];

  LOWBIT_INLINE explicit NibbleVectors(const float* levels = kNf4Levels) {
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
    const __m256i byte0 = _mm256_shuffle_epi8(planes[0], codes), byte1 = _mm256_shuffle_epi8(planes[1], codes);
    const __m256i byte2 = _mm256_shuffle_epi8(planes[2], codes), byte3 = _mm256_shuffle_epi8(planes[3], codes);
    const __m256i low_a = _mm256_unpacklo_epi8(byte0, byte1), low_b = _mm256_unpackhi_epi8(byte0, byte1);
    const __m256i high_a = _mm256_unpacklo_epi8(byte2, byte3), high_b = _mm256_unpackhi_epi8(byte2, byte3);
    v[0] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(low_a, high_a));
    v[1] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(low_a, high_a));
    v[2] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(low_b, high_b));
    v[3] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(low_b, high_b));
  }
  LOWBIT_INLINE static F order(F v) { return permute(v, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)); }
  LOWBIT_INLINE static F unorder(F v) { return permute(v, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7)); }
};

// All lanes hold the same codes, each shifted by a different number of bits; the lookup in four floats uses only the
// lowest two bits.
struct TernaryVectors : InOrder {
  F table = _mm256_setr_ps(-1, 0, 1, 2, -1, 0, 1, 2);
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

struct BinaryVectors : InOrder {
  F table = _mm256_setr_ps(-1, 1, -1, 1, -1, 1, -1, 1);

  LOWBIT_INLINE void decode(const uint8_t* bytes, F v[kVectors]) const {
    int32_t codes;
    memcpy(&codes, bytes, 4);
    for (int i = 0; i < kVectors; ++i) {
      const __m256i shifts = _mm256_add_epi32(_mm256_setr_epi32(7, 6, 5, 4, 3, 2, 1, 0), _mm256_set1_epi32(8 * i));
      v[i] = _mm256_permutevar_ps(table, _mm256_srlv_epi32(_mm256_set1_epi32(codes), shifts));
    }
  }
};

#else

template <int kPerByte, float (*level)(uint8_t, int)>
struct OneByOne : InOrder {
  LOWBIT_INLINE void decode(const uint8_t* bytes, F v[kVectors]) const {
    float levels[kLine];
    for (int i = 0; i < kLine; ++i) levels[i] = level(bytes[i / kPerByte], i % kPerByte);
    for (int i = 0; i < kVectors; ++i) v[i] = load(levels + i * kLanes);
  }
};

struct NibbleVectors : InOrder {
  float table[16];

  explicit NibbleVectors(const float* levels = kNf4Levels) { memcpy(table, levels, sizeof(table)); }

  LOWBIT_INLINE void decode(const uint8_t* bytes, F v[kVectors]) const {
    float levels[kLine];
    for (int i = 0; i < kLine; ++i) levels[i] = table[bytes[i / 2] >> (i % 2 == 0 ? 4 : 0) & 15];
    for (int i = 0; i < kVectors; ++i) v[i] = load(levels + i * kLanes);
  }
};

using Int8Vectors = OneByOne<1, int8_level>;
using TernaryVectors = OneByOne<4, ternary_level>;
using BinaryVectors = OneByOne<8, binary_level>;

#endif

// ---- Formats

// The bits of a where the mask has ones, else those of b. Shifts act on 16 bits; bits that cross bytes are masked.
LOWBIT_INLINE Words merge(Words a, Words b, uint16_t mask) { return (a & mask) | (b & static_cast<uint16_t>(~mask)); }

struct Int8 : Int8Vectors {
  static constexpr int kPerByte = 1;
  static constexpr int kTableRows = 0;
  static float level(uint8_t byte, int i) { return int8_level(byte, i); }
  static constexpr int kOffset = 128;
  static constexpr bool kSmall = false;
  static constexpr float kUnit = 1;
  template <int>
  LOWBIT_INLINE static Bytes bytes(Bytes codes) {
    return codes ^ 128;
  }
  template <int>
  LOWBIT_INLINE static Bytes signed_bytes(Bytes codes) {
    return codes;
  }
};

struct Nf4 : NibbleVectors {
  static constexpr bool kTimes = kAddsBesideFma;
  LOWBIT_INLINE static NibbleVectors times(float f) {
    float levels[16];
    for (int i = 0; i < 16; i += kLanes) store(levels + i, load(kNf4Levels + i) * broadcast(f));
    return NibbleVectors(levels);
  }

  static constexpr int kPerByte = 2;
  static constexpr int kTableRows = 0;
  static float level(uint8_t byte, int i) { return nf4_level(byte, i); }
  static constexpr int kOffset = 128;
  static constexpr bool kSmall = false;
  static constexpr float kUnit = 1.0f / 127;
  template <int i>
  LOWBIT_INLINE static Bytes bytes(Bytes codes) {
    return lookup(kNf4Bytes.offset_by_128, shift_right<4 - 4 * i>(codes));
  }
  template <int i>
  LOWBIT_INLINE static Bytes signed_bytes(Bytes codes) {
    return lookup(kNf4Bytes.plain, shift_right<4 - 4 * i>(codes));
  }
};

// kTableRows stored rows, if not 0, have four bits in each column. `regroup` combines them to nibbles, with the bits of
// earlier rows on top: nibble j of plane i belongs to column kTableRows * j + kPlaneColumn[i].
struct Ternary : TernaryVectors {
  static constexpr int kPerByte = 4;
  static constexpr int kTableRows = kLooksUp16 ? 2 : 0;  // slower if a lookup takes several instructions
  static constexpr int kPlaneColumn[2] = {0, 1};
  static float level(uint8_t byte, int i) { return ternary_level(byte, i); }
  static constexpr int kOffset = 1;
  static constexpr bool kSmall = true;
  static constexpr float kUnit = 1;
  template <int i>
  LOWBIT_INLINE static Bytes bytes(Bytes codes) {
    return shift_right<6 - 2 * i>(codes) & 3;
  }

  LOWBIT_INLINE static void regroup(const Words rows[2], Words planes[2]) {
    planes[0] = merge(rows[0], rows[1] >> 2, 0xcccc);
    planes[1] = merge(rows[0] << 2, rows[1], 0xcccc);
  }
};

struct Binary : BinaryVectors {
  static constexpr int kPerByte = 8;
  static constexpr int kTableRows = 4;
  static constexpr int kPlaneColumn[4] = {0, 2, 1, 3};
  static float level(uint8_t byte, int i) { return binary_level(byte, i); }
  static constexpr int kOffset = 1;
  static constexpr bool kSmall = true;
  static constexpr float kUnit = 1;
  template <int i>
  LOWBIT_INLINE static Bytes bytes(Bytes codes) {
    return shift_right<6 - i>(codes) & 2;  // 2 * code
  }

  LOWBIT_INLINE static void regroup(const Words rows[4], Words planes[4]) {
    const Words even01 = merge(rows[0], rows[1] >> 1, 0xaaaa), odd01 = merge(rows[0] << 1, rows[1], 0xaaaa);
    const Words even23 = merge(rows[2], rows[3] >> 1, 0xaaaa), odd23 = merge(rows[2] << 1, rows[3], 0xaaaa);
    planes[0] = merge(even01, even23 >> 2, 0xcccc);
    planes[1] = merge(even01 << 2, even23, 0xcccc);
    planes[2] = merge(odd01, odd23 >> 2, 0xcccc);
    planes[3] = merge(odd01 << 2, odd23, 0xcccc);
  }
};

// Calls run(functor) with the functor of a format.
template <typename F>
LOWBIT_INLINE auto with_decoder(Format format, const F& run) {
  switch (format) {
    case Format::int8:
      return run(Int8());
    case Format::nf4:
      return run(Nf4());
    case Format::ternary:
      return run(Ternary());
    default:
      return run(Binary());
  }
}

// One matrix of the stack.
struct Matrix {
  const Weights& w;
  const uint8_t* codes;
  int64_t scale_layer;

  Matrix(const Weights& weights, int64_t layer)
      : w(weights),
        codes(weights.codes + layer * weights.rows * weights.row_bytes),
        scale_layer(weights.scale_layers == 1 ? 0 : layer) {}

  const uint8_t* row(int64_t r) const { return codes + r * w.row_bytes; }

  // `count` stored scales from (row, col) on: a pointer to them, or to `out` if they must be decoded.
  LOWBIT_INLINE const float* scales(int64_t row, int64_t col, int64_t count, float* out) const {
    const int64_t start = row * w.scale_cols + col;
    const int64_t matrix = scale_layer * w.scale_rows * w.scale_cols;
    if (w.scales != nullptr) return w.scales + matrix + start;
    decode_scales(matrix, start, count, out);
    return out;
  }

  LOWBIT_INLINE float scale(int64_t row, int64_t col) const {
    float value;
    return *scales(row, col, 1, &value);
  }

  void decode_scales(int64_t matrix, int64_t start, int64_t count, float* out) const {
    const float* tops = w.group_absmax + scale_layer * w.groups;
    for (int64_t i = 0; i < count; ++i) {
      const float value = w.scale_map[w.scale_codes[matrix + start + i]];
      out[i] = value * tops[(start + i) / kScaleGroup] + w.offset[scale_layer];
    }
  }
};

}  // namespace lowbit::LOWBIT_ISA

#endif  // LOWBIT_DECODE_H_
