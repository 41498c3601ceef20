// The operands of a product with activations in int8: x quantized and packed, and weights decoded into a panel.
#ifndef LOWBIT_FAST_PACK_H_
#define LOWBIT_FAST_PACK_H_

#include "fast_tiling.h"

namespace lowbit::LOWBIT_ISA {

// Whether levels have their offset in the panel; then sums start at minus its contribution.
template <typename D>
constexpr bool kOffsetInPanel = D::kSmall || !kSignedPanel;

// ---- x to int8

// Stores four values of x in the order that the dot products need.
template <int kBytesOfX>
LOWBIT_INLINE void put_x(int8_t a, int8_t b, int8_t c, int8_t d, uint8_t* out) {
  if constexpr (kBytesOfX == 4) {
    const int8_t bytes[4] = {a, b, c, d};
    memcpy(out, bytes, 4);
  } else {
    // As put_bytes extends four levels to words.
    const int16_t words[4] = {a, c, b, d};
    memcpy(out, words, 8);
  }
}

// The largest magnitude, as the bits of a float: without the sign they compare like the numbers, with infinity and NaN
// on top.
inline int32_t largest_bits(const float* x, int64_t count) {
  const int64_t whole = count / kLanes * kLanes;
  I tops{};
  for (int64_t i = 0; i < whole; i += kLanes) tops = max(tops, as_ints(load(x + i)) & 0x7fffffff);
  if (whole < count) tops = max(tops, as_ints(load(x + whole, count - whole)) & 0x7fffffff);
  return largest(tops);
}

// q = x * factor, rounded; returns the sum.
inline int32_t round_all(const float* x, int64_t count, F factor, int8_t* q) {
  const int64_t whole = count / kLanes * kLanes;
  I sum{};
  for (int64_t i = 0; i < whole; i += kLanes) {
    const I rounded = round_to_int(load(x + i) * factor);
    sum += rounded;
    pack_codes<1>(rounded, reinterpret_cast<uint8_t*>(q + i));
  }
  if (whole < count) {
    const I rounded = round_to_int(load(x + whole, count - whole) * factor);
    sum += rounded;
    uint8_t bytes[kLanes];
    pack_codes<1>(rounded, bytes);
    memcpy(q + whole, bytes, static_cast<size_t>(count - whole));
  }
  return sum_of(sum);
}

// Quantizes one row of x to int8, with its scales [block][row] and seeds [span][row].
template <typename D>
void quantize_row(const D& decoder, const FastTiling& tiling, const float* x, int64_t k, int64_t m, int64_t rows,
                  int8_t* q, int32_t* seeds, float* scales) {
  for (int64_t b = 0; b < tiling.blocks; ++b) {
    const int64_t begin = b * tiling.block, end = min(begin + tiling.block, k);
    const int32_t top_bits = largest_bits(x + begin, end - begin);
    float top;
    memcpy(&top, &top_bits, 4);
    const bool finite = top_bits < 0x7f800000, zero = top < 0x1p-110f;
    const F factor = broadcast(finite && !zero ? 127.0f / top : 0.0f);
    for (int64_t at = begin; at < end; at += tiling.span) {
      const int32_t sum = round_all(x + at, min(tiling.span, end - at), factor, q + at);
      seeds[at / tiling.span * rows + m] = finite && kOffsetInPanel<D> ? -decoder.offset() * sum : 0;
    }
    scales[b * rows + m] = !finite ? __builtin_nanf("") : zero ? 0 : top / 127.0f * decoder.unit();
  }
  memset(q + k, 0, static_cast<size_t>(tiling.slabs * tiling.slab - k));
}

// Writes the row to `packed`: [slab][row tile][kGroup of k][row of tile].
template <typename D>
void pack_row(const FastTiling& tiling, bool contract_last, int64_t m, int64_t rows, const int8_t* q, uint8_t* packed) {
  constexpr int kSize = 4 * value_bytes(D::kSmall), kPer = D::kPerByte;
  const int64_t tile = tiling.tile_of(m), begin = tiling.row_of(tile), tile_rows = tiling.height_of(tile),
                groups = tiling.slab / 4;
  for (int64_t s = 0; s < tiling.slabs; ++s) {
    uint8_t* first = packed + ((s * rows + begin) * groups + (m - begin) * kPair) * kSize;
    const int8_t* from = q + s * tiling.slab;
    const auto out = [&](int64_t g) { return first + (g / kPair * kPair * tile_rows + g % kPair) * kSize; };
    if (!contract_last || kPer == 1) {
      for (int64_t g = 0; kSize == 4 && g < groups; ++g) memcpy(out(g), from + 4 * g, 4);
      for (int64_t g = 0; kSize != 4 && g < groups; ++g)
        put_x<kSize>(from[4 * g], from[4 * g + 1], from[4 * g + 2], from[4 * g + 3], out(g));
      continue;
    }
    // The four bytes of a dword, then the next code of each.
    for (int64_t g = 0; g < groups; ++g) {
      const int8_t* at = from + g / kPer * 4 * kPer + g % kPer;
      put_x<kSize>(at[0], at[kPer], at[2 * kPer], at[3 * kPer], out(g));
    }
  }
}

// ---- Weights to a panel: [group of vectors][kGroup of k][vector], or two of a vector's size for words. With pairs, a
// vector is two: 8 k of two columns each.

constexpr int64_t kVectorsBytes = kFastVectors * kBytes;
// Bytes of a panel for four k.
constexpr int64_t group_bytes(bool small) { return kVectorsBytes * value_bytes(small); }

// Bytes of a panel for a group of vectors. All groups are written side by side, and L1 holds few lines that are a power
// of two apart.
template <typename D>
constexpr int64_t panel_step(int64_t depth) {
  return depth / 4 * group_bytes(D::kSmall) + 128;
}

template <typename D>
LOWBIT_INLINE uint8_t* vector_in(uint8_t* panel, int64_t depth, int64_t vector) {
  return panel + vector / kFastVectors * panel_step<D>(depth) + vector % kFastVectors * kPair * kBytes;
}

// Writes the i-th codes of the stored bytes to place(i). Words of the even k of a dword come first, then those of the
// odd ones.
template <int i = 0, typename D, typename Place>
LOWBIT_INLINE void put_bytes(const D& decoder, Bytes codes, const Place& place) {
  if constexpr (i < D::kPerByte) {
    if constexpr (value_bytes(D::kSmall) == 2) {
      const Words levels = reinterpret_cast<Words>(decoder.template bytes<i>(codes));
      store_as(place(i), levels & 255);
      store_as(place(i) + kVectorsBytes, levels >> 8);
    } else if constexpr (kOffsetInPanel<D>) {
      store_as(place(i), decoder.template bytes<i>(codes));
    } else {
      store_as(place(i), decoder.template signed_bytes<i>(codes));
    }
    put_bytes<i + 1>(decoder, codes, place);
  }
}

// From 4 columns with 4 k each in a, and 4 more k in b, to 2 columns with 8 k each.
LOWBIT_INLINE void pair_columns(Bytes& a, Bytes& b) {
  const Bytes low = low_dwords(a, b), high = high_dwords(a, b);
  a = low;
  b = high;
}

// Decodes kGroup rows of a tile.
template <typename D>
LOWBIT_INLINE void put_rows(const D& decoder, const uint8_t* const rows[kGroup], int64_t depth, uint8_t* out) {
  for (int part = 0; part < kTileBytes / kBytes; ++part) {
    Bytes v[kGroup];
    for (int i = 0; i < kGroup; ++i) v[i] = load_as<Bytes>(rows[i] + part * kBytes);
    for (int i = 0; i < kGroup; i += 4) interleave_rows<0, 4>(v + i, v + i);
    for (int j = 0; j < 4; ++j) {
      const int first = (part * 4 + j) * D::kPerByte;
      if constexpr (kPair == 2) pair_columns(v[j], v[4 + j]);
      for (int h = 0; h < kPair; ++h) {
        put_bytes(decoder, v[4 * h + j], [&](int i) { return vector_in<D>(out, depth, first + i) + h * kBytes; });
      }
    }
  }
}

// Decodes the panel of the next tile in steps of four stored rows, between the products of the tile before it: they use
// other units of the processor.
template <typename D>
class NextPanel {
 public:
  explicit NextPanel(const D& decoder) : decoder_(decoder) {}

  // Returns whether this panel can be decoded in steps.
  bool set(const Matrix& w, int64_t k, int64_t depth, int64_t tile, uint8_t* panel) {
    left_ = 0;
    if (k + depth > w.w.rows || (tile + 1) * kTileBytes > w.w.row_bytes || w.joined()) return false;
    from_ = w.codes + k * w.w.row_bytes + tile * kTileBytes;
    step_ = w.w.row_bytes;
    out_ = panel;
    left_ = depth / 4;
    later_ = panel_step<D>(depth);
    return true;
  }

  // A step in the products of kWidth vectors of columns: all products of a tile together make all steps.
  template <int kWidth, bool>
  LOWBIT_INLINE void in_group(int64_t g) {
    if (g % (D::kPerByte * kFastVectors / kWidth) == 0) decode_some();
  }
  LOWBIT_INLINE void in_span() {}
  LOWBIT_INLINE void in_tile() {}

  void finish() {
    while (left_ > 0) decode_some();
  }

 private:
  LOWBIT_INLINE void decode_some() {
    static_assert(kAheadRows == 0 || (kBytes == kTileBytes && kPair == 1));
    if (left_ == 0) return;
    Bytes v[4];
    each_constant<4>([&](auto i) LOWBIT_INLINE_LAMBDA {
      v[i.value] = load_as<Bytes>(from_);
      from_ += step_;
    });
    interleave_rows<0, 4>(v, v);
    each_constant<4>([&](auto j) LOWBIT_INLINE_LAMBDA {
      put_bytes(decoder_, v[j.value], [&](int i) LOWBIT_INLINE_LAMBDA {
        const int vector = j.value * D::kPerByte + i;
        return out_ + vector / kFastVectors * later_ + vector % kFastVectors * kBytes;
      });
    });
    out_ += group_bytes(D::kSmall);
    --left_;
  }

  D decoder_;
  const uint8_t* from_ = nullptr;
  uint8_t* out_ = nullptr;
  int64_t step_ = 0, later_ = 0;  // bytes to the next stored row, and to the next group of vectors
  int64_t left_ = 0;              // steps
};

// For contracting the first axis: kGroup stored rows at a time. Lane l of vector j * kPerByte + i is column
// (j * kLanes + l) * kPerByte + i of the tile.
template <typename D>
void panel_of_rows(const D& shared, const Matrix& w, int64_t k, int64_t depth, int64_t tile, uint8_t* panel) {
  const int64_t byte = tile * kTileBytes, bytes = min(kTileBytes, w.w.row_bytes - byte), step = w.w.row_bytes;
  const D decoder = shared;  // a copy that the stores cannot alias
  int64_t r = 0;
  if (bytes == kTileBytes && !w.joined()) {
    const uint8_t* from = w.codes + k * step + byte;
    for (; r + kGroup <= min(depth, w.w.rows - k); r += kGroup, from += kGroup * step) {
      const uint8_t* rows[kGroup];
      for (int i = 0; i < kGroup; ++i) rows[i] = from + i * step;
      put_rows(decoder, rows, depth, panel + r / 4 * group_bytes(D::kSmall));
    }
  }
  // The last rows, a short tile, and joined codes are copied.
  alignas(64) uint8_t copies[kGroup][kTileBytes] = {};
  const uint8_t* rows[kGroup];
  for (int i = 0; i < kGroup; ++i) rows[i] = copies[i];
  for (; r < depth; r += kGroup) {
    for (int i = 0; i < kGroup; ++i) {
      const uint8_t* from = w.bytes<D>(min(k + r + i, w.w.rows - 1), byte, bytes, copies[i]);
      if (from != copies[i]) memcpy(copies[i], from, static_cast<size_t>(bytes));
    }
    put_rows(decoder, rows, depth, panel + r / 4 * group_bytes(D::kSmall));
  }
}

// Decodes `count` vectors with a dword of kLanes stored rows each.
template <typename D>
LOWBIT_INLINE void put_dwords(const D& decoder, Bytes v[kLanes], int64_t count, uint8_t* out) {
  constexpr int kPer = D::kPerByte;
  if constexpr (kPair == 1) {
    for (int64_t i = 0; i < count; ++i) {
      put_bytes(decoder, v[i], [&](int j) { return out + (i * kPer + j) * group_bytes(D::kSmall); });
    }
  } else {
    // Two vectors, or two codes of the same bytes.
    Bytes levels[kLanes * kPer];
    for (int i = 0; i < kLanes; ++i) put_bytes(decoder, v[i], [&](int j) { return levels + i * kPer + j; });
    for (int64_t g = 0; g < count * kPer; g += 2, out += 2 * group_bytes(D::kSmall)) {
      pair_columns(levels[g], levels[g + 1]);
      store_as(out, levels[g]);
      store_as(out + kBytes, levels[g + 1]);
    }
  }
}

// For contracting the last axis: a dword of each of kLanes stored rows at a time.
template <typename D>
void panel_of_columns(const D& shared, const Matrix& w, int64_t k, int64_t depth, int64_t tile, uint8_t* panel) {
  const D decoder = shared;
  constexpr int64_t kUnit = 4 * D::kPerByte;
  const int64_t byte = k / D::kPerByte, dwords = depth / kUnit;
  for (int64_t vector = 0; vector < kTileBytes / kLanes; ++vector) {
    const int64_t row = tile * kTileBytes + vector * kLanes;
    uint8_t* out = vector_in<D>(panel, depth, vector);
    for (int64_t d = 0; d < dwords; d += kLanes) {
      const int64_t bytes = min(kBytes, w.w.row_bytes - byte - 4 * d);
      Bytes v[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        uint8_t joined[kBytes];
        const uint8_t* from = w.bytes<D>(min(row + i, w.w.rows - 1), byte + 4 * d, bytes, joined);
        if (bytes == kBytes) {
          v[i] = load_as<Bytes>(from);
        } else {
          v[i] = Bytes{};
          memcpy(&v[i], from, static_cast<size_t>(bytes));
        }
      }
      transpose_dwords(v);
      put_dwords(decoder, v, min(kLanes, dwords - d), out + d * D::kPerByte * group_bytes(D::kSmall));
    }
  }
}

// The columns of four vectors of stored bytes, or of as many vectors of each of their codes.
template <typename D>
constexpr int64_t kTurned = 4 * D::kPerByte * kLanes;

// out = the vectors of a tile's row in column order
template <typename D>
LOWBIT_INLINE void in_column_order(const float* values, int64_t columns, float* out) {
  constexpr int kPer = D::kPerByte;
  for (int64_t at = 0; at < columns; at += kTurned<D>, out += kTurned<D>) {
    Bytes v[4 * kPer];
    memcpy(v, values + at, sizeof(v));
    turn_parts(v, kPer);
    for (int j = 0; kPer == 2 && j < 4; ++j) {
      F a, b;
      join_pairs(reinterpret_cast<F>(v[2 * j]), reinterpret_cast<F>(v[2 * j + 1]), a, b);
      v[2 * j] = reinterpret_cast<Bytes>(a);
      v[2 * j + 1] = reinterpret_cast<Bytes>(b);
    }
    if (kPer <= 2) {
      memcpy(out, v, sizeof(v));
      continue;
    }
    float turned[kTurned<D>];
    memcpy(turned, v, sizeof(v));
    for (int i = 0; i < kTurned<D>; ++i) {
      out[i / (kPer * kLanes) * kPer * kLanes + i % kLanes * kPer + i / kLanes % kPer] = turned[i];
    }
  }
}

// Whether the panel's scales lack a factor of their column, which multiplies the sums.
template <typename D>
LOWBIT_INLINE bool scales_later(const Matrix& w, bool contract_last) {
  return D::kPerByte == 2 && !contract_last && w.has_factors(false);
}

// The scales of a tile for `spans` spans from k on, if the last axis is contracted: [span][column]. Those of kLanes
// stored rows are transposed at a time.
template <typename D>
void panel_scales_last(const FastTiling& tiling, const Matrix& w, int64_t k, int64_t spans, int64_t tile, float* out) {
  const int64_t each = tiling.scale_spans, first = k / w.w.col_span,
                count = min((spans - 1) / each + 1, w.w.scale_cols - first);
  for (int64_t i = 0; i < kTileBytes; i += kLanes) {
    for (int64_t begin = 0; begin < count; begin += kMostSpans) {
      const int64_t some = min(count - begin, kMostSpans);
      alignas(64) float held[kLanes][kMostSpans];
      for (int64_t r = 0; r < kLanes; ++r) {
        const int64_t row = min(tile * kTileBytes + i + r, w.w.rows - 1);
        const float* scales = w.scales(row, first + begin, some, held[r]);
        if (scales != held[r]) memcpy(held[r], scales, static_cast<size_t>(some) * 4);
      }
      for (int64_t from = 0; from < some; from += kLanes) {
        Bytes v[kLanes];
        for (int64_t r = 0; r < kLanes; ++r) v[r] = load_as<Bytes>(held[r] + from);
        transpose_dwords(v);
        const int64_t end = min((begin + min(from + kLanes, some)) * each, spans);
        for (int64_t b = (begin + from) * each; b < end; ++b)
          store_as(out + b * tiling.columns + i, v[b / each - begin - from]);
      }
    }
  }
}

// The scales of a tile for the span at k, in the order of the panel's columns, padded with zeros.
template <typename D>
void panel_scales(const Matrix& w, int64_t k, int64_t tile, float* out) {
  constexpr int64_t kPer = D::kPerByte, kColumns = kTileBytes * kPer;
  const int64_t row = k / w.w.row_span, column = tile * kColumns, count = min(kColumns, w.w.columns - column);
  if (scales_later<D>(w, false)) {
    const SmallFloats floats = w.small_scales();
    const uint8_t* codes = w.scale_codes(row, column);
    uint8_t ends[kColumns] = {};
    if (count < kColumns) codes = static_cast<const uint8_t*>(memcpy(ends, codes, static_cast<size_t>(count)));
    for (int64_t from = 0; from < kColumns; from += kTurned<D>) {
      uint8_t buffer[8 * kLanes];
      const uint8_t* turned = turn_bytes(codes + from, buffer);
      for (int64_t j = 0; j < kTurned<D>; j += 2 * kLanes, out += 2 * kLanes) {
        F even, odd;
        floats.pairs(turned + j, even, odd);
        store(out, even);
        store(out + kLanes, odd);
      }
    }
    return;
  }
  alignas(64) float buffer[kColumns];
  const float* scales = w.scales(row, column, count, buffer);
  if (count < kColumns) {
    if (scales != buffer) memcpy(buffer, scales, static_cast<size_t>(count) * 4);
    memset(buffer + count, 0, static_cast<size_t>(kColumns - count) * 4);
    scales = buffer;
  }
  for (int64_t j = 0; j < kColumns; j += kLanes * kPer) {
    if constexpr (kPer == 1) {
      store(out + j, load(scales + j));
    } else if constexpr (kPer == 2) {
      F even, odd;
      split_pairs(load(scales + j), load(scales + j + kLanes), even, odd);
      store(out + j, even);
      store(out + j + kLanes, odd);
    } else {
      for (int64_t i = 0; i < kLanes * kPer; ++i) out[j + i % kPer * kLanes + i / kPer] = scales[j + i];
    }
  }
  for (int64_t j = 0; j < kColumns; j += kTurned<D>) {
    Bytes v[4 * kPer];
    memcpy(v, out + j, sizeof(v));
    turn_parts(v, kPer);
    memcpy(out + j, v, sizeof(v));
  }
}

}  // namespace lowbit::LOWBIT_ISA

#endif  // LOWBIT_FAST_PACK_H_
