// What the codes of each format mean: one functor per format.
//
//   level(byte, i)      the level of the i-th code of a byte, for code that need not be fast
//   decode(bytes, v)    the levels of kLine consecutive columns, in four vectors of kLanes columns each
//   order(v)            the columns of one such vector in their order; a decoder may leave its lanes in another
#ifndef LOWBIT_DECODE_H_
#define LOWBIT_DECODE_H_

#include "simd.h"

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

struct Int8 {
  static constexpr int kPerByte = 1;

  static float level(uint8_t byte, int) { return static_cast<float>(static_cast<int8_t>(byte)); }
};

struct Nf4 {
  static constexpr int kPerByte = 2;

  static float level(uint8_t byte, int i) { return kNf4Levels[byte >> (4 - 4 * i) & 15]; }
};

struct Ternary {
  static constexpr int kPerByte = 4;

  static float level(uint8_t byte, int i) { return static_cast<float>((byte >> (6 - 2 * i) & 3) - 1); }
};

struct Binary {
  static constexpr int kPerByte = 8;

  static float level(uint8_t byte, int i) { return static_cast<float>((byte >> (7 - i) & 1) * 2 - 1); }
};

// run(functor) for the functor of a format.
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

  // out[i] = the stored scale (row, col + i)
  void scales(int64_t row, int64_t col, int64_t count, float* out) const {
    const int64_t start = row * w.scale_cols + col;
    const int64_t matrix = scale_layer * w.scale_rows * w.scale_cols;
    if (w.scales != nullptr) {
      memcpy(out, w.scales + matrix + start, static_cast<size_t>(count) * 4);
      return;
    }
    const float* tops = w.group_absmax + scale_layer * w.groups;
    const float offset = w.offset[scale_layer];
    for (int64_t i = 0; i < count; ++i) {
      out[i] = w.scale_map[w.scale_codes[matrix + start + i]] * tops[(start + i) / kScaleGroup] + offset;
    }
  }
};

}  // namespace lowbit::LOWBIT_ISA

#endif  // LOWBIT_DECODE_H_
