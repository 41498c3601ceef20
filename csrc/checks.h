// Checks of the operands and attributes that JAX passes, for all targets.
#ifndef LOWBIT_CHECKS_H_
#define LOWBIT_CHECKS_H_

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>

#include "kernels.h"
#include "xla/ffi/api/ffi.h"

namespace lowbit {

namespace ffi = xla::ffi;

inline ffi::Error invalid(const std::string& text) { return ffi::Error::InvalidArgument("lowbit: " + text); }

inline std::string text_of(const ffi::AnyBuffer& b) {
  std::string text = "[";
  for (int64_t d : b.dimensions()) text += (text.size() > 1 ? ", " : "") + std::to_string(d);
  return text + "]";
}

inline bool has_shape(const ffi::AnyBuffer& b, std::initializer_list<int64_t> shape) {
  auto dims = b.dimensions();
  return dims.size() == shape.size() && std::equal(dims.begin(), dims.end(), shape.begin());
}

// A stack of matrices, with any number of leading axes. It is not reshaped in JAX: reshaping a value that is updated in
// place would make XLA update a copy of it.
struct Matrices {
  int64_t count, rows, columns;
};

inline std::optional<Matrices> matrices_of(const ffi::AnyBuffer& b) {
  auto dims = b.dimensions();
  if (dims.size() < 2) return std::nullopt;
  Matrices m{1, dims[dims.size() - 2], dims[dims.size() - 1]};
  for (size_t i = 0; i + 2 < dims.size(); ++i) m.count *= dims[i];
  return m;
}

inline std::optional<Float> float_of(ffi::DataType type) {
  if (type == ffi::DataType::F32) return Float::f32;
  if (type == ffi::DataType::BF16) return Float::bf16;
  if (type == ffi::DataType::F16) return Float::f16;
  return std::nullopt;
}

inline std::optional<Format> format_of(std::string_view name) {
  if (name == "int8") return Format::int8;
  if (name == "table") return Format::table;
  if (name == "e4m3") return Format::e4m3;
  if (name == "e5m2") return Format::e5m2;
  return std::nullopt;
}

// The type of scales that are codes.
inline std::optional<ScaleType> codec_of(std::string_view name) {
  if (name == "dynamic") return ScaleType::dynamic;
  if (name == "signed8") return ScaleType::signed8;
  if (name == "e4m3") return ScaleType::e4m3;
  if (name == "e8m0") return ScaleType::e8m0;
  return std::nullopt;
}

inline int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

// The fields that Weights and Encode share: spans and the sizes that follow from them.
template <typename Stored>
ffi::Error set_spans(int64_t layers, int64_t rows, int64_t columns, int64_t row_span, int64_t col_span, Stored& w) {
  if (row_span < 0 || col_span < 0 || columns < 0) {
    return invalid("columns, row_span and col_span must not be negative.");
  }
  w.layers = layers;
  w.rows = rows;
  w.columns = columns;
  w.row_span = row_span == 0 ? std::max<int64_t>(rows, 1) : row_span;
  w.col_span = col_span == 0 ? std::max<int64_t>(columns, 1) : col_span;
  w.scale_rows = row_span == 0 ? 1 : ceil_div(rows, row_span);
  w.scale_cols = col_span == 0 ? 1 : ceil_div(columns, col_span);
  return ffi::Error::Success();
}

// The operands and attributes of a stored stack of matrices, as JAX passes them. Empty operands are not there.
struct Stored {
  ffi::AnyBuffer codes, high, levels, scales, group_scales, offset, scale_map;
  std::string_view format, codec;
  int64_t columns, row_span, col_span;
};

inline const float* floats_of(const ffi::AnyBuffer& b) { return static_cast<const float*>(b.untyped_data()); }

// Codes of NF4's dynamic map, with groups in the order of the scales.
inline ffi::Error set_dynamic_scales(const Stored& s, Weights& w) {
  const int64_t groups = ceil_div(w.scale_rows * w.scale_cols, kScaleGroup);
  if (s.group_scales.element_type() != ffi::DataType::F32 || !has_shape(s.group_scales, {w.scale_layers, groups}) ||
      s.offset.element_type() != ffi::DataType::F32 || !has_shape(s.offset, {w.scale_layers, 1}) ||
      s.scale_map.element_type() != ffi::DataType::F32 || !has_shape(s.scale_map, {256})) {
    return invalid("group_scales " + text_of(s.group_scales) + ", offset " + text_of(s.offset) + " and scale_map " +
                   text_of(s.scale_map) + " do not fit scales " + text_of(s.scales) + " in u8.");
  }
  w.group_scales = floats_of(s.group_scales);
  w.group_layer_step = groups;
  w.offset = floats_of(s.offset);
  w.scale_map = floats_of(s.scale_map);
  return ffi::Error::Success();
}

// The scales, or their codes and the values to decode them.
inline ffi::Error set_scales(const Stored& s, Weights& w) {
  w.scales = s.scales.untyped_data();
  w.group_scales = w.offset = w.scale_map = nullptr;
  w.group_layer_step = w.group_row_step = w.group_col_step = 0;
  if (auto type = float_of(s.scales.element_type())) {
    if (s.group_scales.element_count() != 0 || s.offset.element_count() != 0) {
      return invalid("group_scales and offset belong to scales in u8.");
    }
    w.scale_type = *type == Float::f32 ? ScaleType::f32 : *type == Float::f16 ? ScaleType::f16 : ScaleType::bf16;
    return ffi::Error::Success();
  }
  if (s.scales.element_type() != ffi::DataType::U8) return invalid("scales must be f32, bf16, f16 or u8.");
  auto codec = codec_of(s.codec);
  if (!codec) return invalid("unknown codec '" + std::string(s.codec) + "' of scales in u8.");
  w.scale_type = *codec;
  if (*codec == ScaleType::dynamic) return set_dynamic_scales(s, w);
  if (s.group_scales.element_count() == 0) return ffi::Error::Success();
  const auto groups = matrices_of(s.group_scales);
  if (!groups || s.group_scales.element_type() != ffi::DataType::F32 || groups->count != w.scale_layers ||
      (groups->rows != w.scale_rows && groups->rows != 1) ||
      (groups->columns != w.scale_cols && groups->columns != 1)) {
    return invalid("group_scales " + text_of(s.group_scales) + " do not fit scales " + text_of(s.scales) + ".");
  }
  w.group_scales = floats_of(s.group_scales);
  w.group_layer_step = groups->rows * groups->columns;
  w.group_row_step = groups->rows == 1 ? 0 : groups->columns;
  w.group_col_step = groups->columns == 1 ? 0 : 1;
  return ffi::Error::Success();
}

// The levels of a table, and the number of bits of a code.
inline ffi::Error set_levels(const Stored& s, Weights& w) {
  w.bits = 8;
  w.levels = nullptr;
  if (w.format != Format::table) {
    return s.levels.element_count() == 0 ? ffi::Error::Success() : invalid("levels belong to the format 'table'.");
  }
  const auto dims = s.levels.dimensions();
  const int64_t count = dims.size() == 1 && s.levels.element_type() == ffi::DataType::F32 ? dims[0] : 0;
  for (w.bits = 1; w.bits <= 6 && count != 1 << w.bits;) ++w.bits;
  if (w.bits > 6) return invalid("levels " + text_of(s.levels) + " must be f32, 2 to 64 of them, a power of two.");
  w.levels = floats_of(s.levels);
  if (low_bits(w.bits) == w.bits) return ffi::Error::Success();
  for (int64_t i = 0; i < count; ++i) {
    const float level = w.levels[i];
    if (!(level >= -127 && level <= 127 && level == static_cast<float>(static_cast<int>(level)))) {
      return invalid("levels of codes in two components must be integers within +-127.");
    }
  }
  return ffi::Error::Success();
}

// The codes, in one component or two.
inline ffi::Error set_codes(const Stored& s, const Matrices& stored, Weights& w) {
  const int low = low_bits(w.bits), high = w.bits - low;
  const bool is_signed = w.format == Format::int8;
  w.low_bytes = ceil_div(w.columns, 8 / low);
  w.row_bytes = high == 0 ? w.low_bytes : w.columns;
  w.high_bytes = high == 0 ? 0 : ceil_div(w.columns, 8 / high);
  if (s.codes.element_type() != (is_signed ? ffi::DataType::S8 : ffi::DataType::U8) || stored.columns != w.low_bytes) {
    return invalid("codes " + text_of(s.codes) + " must be " + (is_signed ? "s8" : "u8") + " with " +
                   std::to_string(w.low_bytes) + " bytes for " + std::to_string(w.columns) + " columns.");
  }
  w.codes = static_cast<const uint8_t*>(s.codes.untyped_data());
  w.high = nullptr;
  if (high == 0) {
    return s.high.element_count() == 0 ? ffi::Error::Success() : invalid("high belongs to codes of 3, 5 or 6 bits.");
  }
  const auto above = matrices_of(s.high);
  if (!above || s.high.element_type() != ffi::DataType::U8 || above->count != w.layers || above->rows != w.rows ||
      above->columns != w.high_bytes) {
    return invalid("high " + text_of(s.high) + " must be u8 with " + std::to_string(w.high_bytes) +
                   " bytes for each row of codes " + text_of(s.codes) + ".");
  }
  w.high = static_cast<const uint8_t*>(s.high.untyped_data());
  return ffi::Error::Success();
}

inline ffi::Error set_weights(const Stored& s, Weights& w) {
  const auto stored = matrices_of(s.codes), scaled = matrices_of(s.scales);
  if (!stored) return invalid("codes " + text_of(s.codes) + " must have at least two axes.");
  if (!scaled) return invalid("scales " + text_of(s.scales) + " must have at least two axes.");
  auto format = format_of(s.format);
  if (!format) return invalid("unknown format '" + std::string(s.format) + "'.");
  w.format = *format;
  if (auto error = set_spans(stored->count, stored->rows, s.columns, s.row_span, s.col_span, w); error.failure()) {
    return error;
  }
  if (auto error = set_levels(s, w); error.failure()) return error;
  if (auto error = set_codes(s, *stored, w); error.failure()) return error;
  w.scale_layers = scaled->count;
  if ((w.scale_layers != w.layers && w.scale_layers != 1) || scaled->rows != w.scale_rows ||
      scaled->columns != w.scale_cols) {
    return invalid("scales " + text_of(s.scales) + " do not fit codes " + text_of(s.codes) + " with row_span " +
                   std::to_string(s.row_span) + " and col_span " + std::to_string(s.col_span) + ".");
  }
  return set_scales(s, w);
}

}  // namespace lowbit

#endif  // LOWBIT_CHECKS_H_
