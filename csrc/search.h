// Codes and scales by a search for the least weighted squared error, bit for bit equal to `formats/search.py` as XLA
// runs it on CPU. Lanes are blocks: a tile has kLanes of them, and an element of each in every vector.
#ifndef LOWBIT_SEARCH_H_
#define LOWBIT_SEARCH_H_

#include "nearest.h"
#include "small_floats.h"

namespace lowbit::LOWBIT_ISA {

// ---- How scales are stored

struct Stored8 {
  F group, inverse;

  explicit Stored8(F group) : group(group), inverse(reciprocal(group)) {}

  // The code of signed8: to nearest even, clipped.
  LOWBIT_INLINE I code(F scale) const {
    const F relative = scale * inverse;
    F size = as_floats(as_ints(relative) & 0x7fffffff);
    size = select(size > broadcast(31.0f), broadcast(31.0f), size);
    const I exponent = max((as_ints(size) >> 23) - 127, I{} - 2);
    const I steps = round_to_int(size * as_floats((4 - exponent + 127) << 23));
    I found = steps + ((exponent + 2) << 4);
    found = found > 127 ? I{} + 127 : found;
    return found | ((as_ints(relative) < 0) & (found > 0) & 128);
  }
  LOWBIT_INLINE F round(F scale) const {
    const I found = code(scale);
    const I magnitude = found & 127, exponent = max(magnitude >> 4, I{} + 1);
    const I fraction = (magnitude & 15) + ((magnitude > 15) & 16);
    const F value = to_float(fraction) * as_floats((exponent - 7 + 127) << 23);
    return as_floats(as_ints(value) ^ ((found > 127) & static_cast<int32_t>(0x80000000))) * group;
  }
};

struct StoredFloat {
  Float type;

  LOWBIT_INLINE F round(F scale) const {
    if (type == Float::f16) {
      uint16_t half[kLanes];
      store_f16(half, scale);
      return load_f16(half);
    }
    if (type == Float::bf16) {
      for (int i = 0; i < kLanes; ++i) scale[i] = f32_of_bf16(bf16_of_f32(scale[i]));
    }
    return scale;
  }
};

// ---- A tile of blocks

// Buffers of `size` vectors, with zeros from the end of the blocks to a multiple of kChunk.
struct SearchTile {
  float *values, *weights, *weighted;
  int64_t size;   // of a block, rounded up
  int64_t count;  // of elements that are there
};

struct FitSums {
  F along, across;
};

// The sums of kCount products, added in adjacent pairs.
template <int kCount>
LOWBIT_INLINE FitSums pair_sums(const SearchTile& t, const F* levels, int64_t at) {
  if constexpr (kCount == 1) {
    return {load(t.weighted + at * kLanes) * *levels, load(t.weights + at * kLanes) * (*levels * *levels)};
  } else {
    const FitSums a = pair_sums<kCount / 2>(t, levels, at);
    const FitSums b = pair_sums<kCount / 2>(t, levels + kCount / 2, at + kCount / 2);
    return {a.along + b.along, a.across + b.across};
  }
}

// sums[0] = the sum of `count` vectors in adjacent pairs; they are overwritten.
LOWBIT_INLINE F pairwise(F* sums, int64_t count) {
  for (; count > 1; count = ceil_div(count, 2)) {
    for (int64_t i = 0; i < count / 2; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
    if (count % 2 == 1) sums[count / 2] = sums[count - 1] + zero();
  }
  return sums[0];
}

constexpr int64_t kMostChunks = kSearchBlock / kChunk;

// Weights of the squared errors: 1, mean(w^2) + w^2, or the root of that.
inline void set_weights(const Search& p, const SearchTile& t) {
  const F inverse = broadcast(1.0f / static_cast<float>(t.count));
  F sums[kSearchBlock];
  sums[0] = zero();
  if (p.weighting != Weighting::plain) {
    for (int64_t i = 0; i < t.size; ++i) sums[i] = load(t.values + i * kLanes) * load(t.values + i * kLanes);
  }
  const F mean = p.weighting != Weighting::plain ? pairwise(sums, t.size) * inverse : zero();
  for (int64_t i = 0; i < t.size; ++i) {
    const F value = load(t.values + i * kLanes);
    F weight = broadcast(1.0f);
    if (p.weighting != Weighting::plain) weight = mean + value * value;
    if (p.weighting == Weighting::root) weight = square_root(weight);
    if (i >= t.count) weight = zero();
    store(t.weights + i * kLanes, weight);
    store(t.weighted + i * kLanes, weight * value);
  }
}

// The scale of each block, as it is read back.
template <typename N, typename S>
F search_scale(const Search& p, const N& shared, const S& stored, const SearchTile& tile, F largest) {
  const N nearest = shared;
  const SearchTile t = tile;
  const F start = largest * broadcast(p.inverse_top);
  F best = broadcast(__builtin_inff()), found = zero();
  for (int64_t f = 0; f < p.factor_count; ++f) {
    const F inverse = reciprocal(broadcast(p.factors[f]) * start);
    F along[kMostChunks], across[kMostChunks];
    along[0] = across[0] = zero();  // a block has at least one chunk
    for (int64_t chunk = 0; chunk < t.size / kChunk; ++chunk) {
      F levels[kChunk];
      nearest.levels(t.values + chunk * kChunk * kLanes, inverse, levels);
      const FitSums sums = pair_sums<kChunk>(t, levels, chunk * kChunk);
      along[chunk] = sums.along;
      across[chunk] = sums.across;
    }
    const F product = pairwise(along, t.size / kChunk), norm = pairwise(across, t.size / kChunk);
    const F fitted = stored.round(product * reciprocal(norm));
    const F lost = fitted * (fitted * norm - broadcast(2.0f) * product);
    const I better = lost < best;
    best = select(better, lost, best);
    found = select(better, fitted, found);
  }
  return found;
}

// The power of two at or below a magnitude.
LOWBIT_INLINE F unit_of(F size) {
  I exponent = (as_ints(size) >> 23 & 255) - 127;
  exponent = exponent < -120 ? I{} - 120 : exponent > 120 ? I{} + 120 : exponent;
  return as_floats((exponent + 127) << 23);
}

// ---- Blocks of an array

constexpr int64_t kTaskLines = 32;  // rows or columns: whole bytes of codes, and whole cache lines of float32

// The elements [0, length) of the lines of a task, as vectors, kLanes lines after each other; zeros for lines that are
// not there. Rows are often whole pages apart, so each is visited once.
inline void load_lines(const Search& p, int64_t layer, int64_t line, int64_t lines, int64_t length, float* out) {
  if (lines % kLanes != 0 || !p.along_rows) memset(out, 0, static_cast<size_t>(length * round_up(lines, kLanes)) * 4);
  for (int64_t i = 0; p.along_rows && i < length; ++i) {
    const int64_t at = (layer * p.rows + i) * p.columns + line;
    const int64_t size = p.x_type == Float::f32 ? 4 : 2;
    const char* ahead = static_cast<const char*>(p.x) + (at + 8 * p.columns) * size;
    for (int64_t byte = 0; byte < lines * size; byte += 64) prefetch(ahead + byte);
    for (int64_t l = 0; l < lines; l += kLanes) {
      float* to = out + (l * length + i * kLanes);
      if (p.x_type == Float::f32 && l + kLanes <= lines) {
        store(to, load(static_cast<const float*>(p.x) + at + l));
      } else {
        to_f32(p.x, p.x_type, at + l, min(kLanes, lines - l), to);
      }
    }
  }
  // kLanes rows at a time are transposed in registers.
  const bool in_place = !p.along_rows && p.x_type == Float::f32;
  const int64_t squares = in_place ? lines / kLanes : 0, square_length = length / kLanes * kLanes;
  for (int64_t l = 0; l < squares * kLanes; l += kLanes) {
    const float* x = static_cast<const float*>(p.x) + (layer * p.rows + line + l) * p.columns;
    for (int64_t i = 0; i < square_length; i += kLanes) {
      Bytes square[kLanes];
      for (int j = 0; j < kLanes; ++j) square[j] = load_as<Bytes>(x + j * p.columns + i);
      transpose_dwords(square);
      for (int j = 0; j < kLanes; ++j) store_as(out + l * length + (i + j) * kLanes, square[j]);
    }
  }
  for (int64_t l = 0; !p.along_rows && l < lines; ++l) {
    float some[64], *to = out + l / kLanes * kLanes * length + l % kLanes;
    for (int64_t i = l < squares * kLanes ? square_length : 0; i < length; i += 64) {
      const int64_t count = min(64, length - i);
      to_f32(p.x, p.x_type, (layer * p.rows + line + l) * p.columns + i, count, some);
      for (int64_t j = 0; j < count; ++j) to[(i + j) * kLanes] = some[j];
    }
  }
}

// The largest magnitude of each block, and of all blocks without NaN or infinity.
inline I find_tops(const Search& p, const float* x, int64_t length, I* tops) {
  I reach{};
  for (int64_t begin = 0; begin < length; begin += p.span) {
    I top{};
    for (int64_t i = begin; i < min(begin + p.span, length); ++i) top = max(top, magnitude(load(x + i * kLanes)));
    tops[begin / p.span] = top;
    reach = max(reach, top >= 0x7f800000 ? I{} : top);
  }
  return reach;
}

// The stored scales of one block of each line: NaN where it has NaN or infinity, or the type cannot hold the scale.
inline void store_scales(const Search& p, const StoredFloat& stored, F scale, F unit, I is_finite, int64_t at,
                         int64_t step, int64_t lines) {
  const F wide = scale * unit;
  F held = stored.round(wide);
  const I fits = (held - held == zero()) & ((held != zero()) | (wide == zero())) & is_finite;
  held = as_floats(as_ints(held) & (wide != zero()));  // zero without a sign
  held = select(fits, held, broadcast(__builtin_nanf("")));
  uint16_t half[kLanes] = {};
  if (p.scale_type == Float::f16) store_f16(half, held);
  for (int64_t l = 0; l < lines; ++l) {
    if (p.scale_type == Float::f32) {
      static_cast<float*>(p.scales)[at + l * step] = held[l];
    } else {
      static_cast<uint16_t*>(p.scales)[at + l * step] = p.scale_type == Float::f16 ? half[l] : bf16_of_f32(held[l]);
    }
  }
}
inline void store_scales(const Search& p, const Stored8& stored, F scale, F, I is_finite, int64_t at, int64_t step,
                         int64_t lines) {
  const I codes = stored.code(scale);
  for (int64_t l = 0; l < lines; ++l) {
    static_cast<uint8_t*>(p.scales)[at + l * step] = static_cast<uint8_t>(is_finite[l] ? codes[l] : 128);
  }
}

// Scales and codes of kLanes lines, in units of their group, or of each block if there are no groups; `codes` has one
// byte for each element, with these steps.
template <typename N, typename S>
void search_lines(const Search& p, const N& nearest, const S& stored, F group_unit, const I* tops, int64_t layer,
                  int64_t line, int64_t lines, int64_t length, const float* x, float* tile, uint8_t* codes,
                  int64_t line_step, int64_t element_step) {
  const int64_t size = round_up(p.span, kChunk), scale_step = p.along_rows ? 1 : p.scale_cols;
  SearchTile t{tile, tile + size * kLanes, tile + 2 * size * kLanes, size, 0};
  for (int64_t begin = 0; begin < length; begin += p.span) {
    const int64_t block = begin / p.span;
    const I is_finite = tops[block] < 0x7f800000;
    const F largest = as_floats(as_ints(top_or_zero(tops[block])) & is_finite);
    const F unit = p.group_scales == nullptr ? unit_of(largest) : group_unit, inverse_unit = broadcast(1.0f) / unit;
    t.count = min(p.span, length - begin);
    for (int64_t i = 0; i < size; ++i) {
      F value = zero();
      if (i < t.count) value = as_floats(as_ints(load(x + (begin + i) * kLanes)) & is_finite) * inverse_unit;
      store(t.values + i * kLanes, value);
    }
    set_weights(p, t);
    const F scale = search_scale(p, nearest, stored, t, largest * inverse_unit), inverse = reciprocal(scale);
    I found[kChunk] = {};
    for (int64_t i = 0; i < t.count; ++i) {
      if (i % kChunk == 0) nearest.codes(t.values + i * kLanes, inverse, found);
      if (codes == nullptr) {
        const int64_t row = layer * p.rows + begin + i;
        pack_codes<2>(found[i % kChunk], p.codes + row * p.low_bytes + line / 2);
        continue;
      }
      if (element_step == 1 && i % 4 == 0 && i + 4 <= t.count) {
        const I* next = found + i % kChunk;
        const I four = next[0] | next[1] << 8 | next[2] << 16 | next[3] << 24;
        for (int64_t l = 0; l < lines; ++l) {
          const int32_t bytes = four[l];
          memcpy(codes + begin + i + l * line_step, &bytes, 4);
        }
        i += 3;
        continue;
      }
      uint8_t* out = codes + (begin + i) * element_step;
      for (int64_t l = 0; l < lines; ++l) out[l * line_step] = static_cast<uint8_t>(found[i % kChunk][l]);
    }
    const int64_t at = p.along_rows ? block * p.scale_cols + line : line * p.scale_cols + block;
    store_scales(p, stored, scale, unit, is_finite, layer * p.scale_rows * p.scale_cols + at, scale_step, lines);
  }
}

// Packs `bits` of each code, from bit `shift` on, the first code in the highest bits of a byte.
template <int kBits>
void pack_bits_of(const uint8_t* codes, int64_t count, int shift, uint8_t* out) {
  constexpr int kPer = 8 / kBits, kMask = (1 << kBits) - 1;
  const int64_t whole = count / kPer;
  for (int64_t i = 0; i < whole; ++i) {
    int byte = 0;
    for (int j = 0; j < kPer; ++j) byte |= (codes[i * kPer + j] >> shift & kMask) << (8 - kBits * (j + 1));
    out[i] = static_cast<uint8_t>(byte);
  }
  int last = 0;
  for (int64_t j = whole * kPer; j < count; ++j) {
    last |= (codes[j] >> shift & kMask) << (8 - kBits * (j - whole * kPer + 1));
  }
  if (whole * kPer < count) out[whole] = static_cast<uint8_t>(last);
}

inline void pack_bits(const uint8_t* codes, int64_t count, int bits, int shift, uint8_t* out) {
  if (bits == 4) return pack_bits_of<4>(codes, count, shift, out);
  if (bits == 2) return pack_bits_of<2>(codes, count, shift, out);
  return pack_bits_of<1>(codes, count, shift, out);
}

// Packs the codes of the lines of a task into their components.
inline void pack_lines(const Search& p, const uint8_t* codes, int64_t layer, int64_t line, int64_t lines,
                       int64_t length) {
  const int low = low_bits(p.bits), high = p.bits - low;
  const int64_t rows = p.along_rows ? length : lines, count = p.along_rows ? lines : length;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t row = layer * p.rows + (p.along_rows ? r : line + r), column = p.along_rows ? line : 0;
    const uint8_t* from = codes + r * (p.along_rows ? kTaskLines : length);
    pack_bits(from, count, low, 0, p.codes + row * p.low_bytes + column * low / 8);
    if (high > 0) pack_bits(from, count, high, low, p.high + row * p.high_bytes + column * high / 8);
  }
}

// Up to kTaskLines columns or rows of a layer.
template <typename N>
bool search_task(const Search& p, const N& nearest, int64_t layer, int64_t line) {
  const FlushDenormals flush;
  const int64_t length = p.along_rows ? p.rows : p.columns, all = p.along_rows ? p.columns : p.rows;
  const int64_t count = min(kTaskLines, all - line), blocks = ceil_div(length, p.span);
  const int64_t line_step = p.along_rows ? 1 : length, element_step = p.along_rows ? kTaskLines : 1;
  const int64_t size = round_up(p.span, kChunk);
  float* x = static_cast<float*>(scratch(Scratch::task_panel, static_cast<size_t>(length * kTaskLines) * 4));
  float* tile = static_cast<float*>(scratch(Scratch::task_sums, static_cast<size_t>(3 * size * kLanes) * 4));
  uint8_t* codes = static_cast<uint8_t*>(scratch(Scratch::task_codes, static_cast<size_t>(kTaskLines * length)));
  I* tops = static_cast<I*>(scratch(Scratch::task_scales, static_cast<size_t>(blocks) * sizeof(I)));
  if (x == nullptr || tile == nullptr || codes == nullptr || tops == nullptr) return false;
  const bool at_once = p.along_rows && p.bits == 4 && count % kLanes == 0;
  load_lines(p, layer, line, count, length, x);
  for (int64_t l = 0; l < count; l += kLanes) {
    const int64_t lines = min(kLanes, count - l);
    const float* here = x + l * length;
    const F reach = top_or_zero(find_tops(p, here, length, tops));
    uint8_t* out = at_once ? nullptr : codes + l * line_step;
    if (p.group_scales != nullptr) {
      const F unit = unit_of(reach), group = reach / unit * broadcast(p.group_factor);
      store(p.group_scales + layer * all + line + l, group * unit, lines);
      search_lines(p, nearest, Stored8(group), unit, tops, layer, line + l, lines, length, here, tile, out, line_step,
                   element_step);
    } else {
      search_lines(p, nearest, StoredFloat{p.scale_type}, zero(), tops, layer, line + l, lines, length, here, tile, out,
                   line_step, element_step);
    }
  }
  if (!at_once) pack_lines(p, codes, layer, line, count, length);
  return true;
}

template <typename N>
bool search_as(const Search& p, const N& nearest, const Parallel& parallel) {
  const int64_t tasks = ceil_div(p.along_rows ? p.columns : p.rows, kTaskLines);
  bool done = true;
  parallel.each(p.layers * tasks, [&](int64_t i) {
    if (!search_task(p, nearest, i / tasks, i % tasks * kTaskLines)) __atomic_store_n(&done, false, __ATOMIC_RELAXED);
  });
  return done;
}

template <int kBits>
bool search_table(const Search& p, const Parallel& parallel) {
#if defined(LOWBIT_AVX2)
  if (const NearestSmall<kBits> nearest(p); nearest.fits) return search_as(p, nearest, parallel);
#endif
  return search_as(p, NearestInTable<kBits>(p), parallel);
}

inline bool search(const Search& p, const Parallel& parallel) {
  if (p.levels == nullptr) return search_as(p, NearestInteger(p), parallel);
  if (p.bits == 4) return search_table<4>(p, parallel);
  if (p.bits == 3) return search_table<3>(p, parallel);
  if (p.bits == 2) return search_table<2>(p, parallel);
  return search_table<1>(p, parallel);
}

}  // namespace lowbit::LOWBIT_ISA

#endif  // LOWBIT_SEARCH_H_
