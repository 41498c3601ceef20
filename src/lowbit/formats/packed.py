"""Formats by declaration: a `Layout` says what the stored bits mean, and one class stores them all.

    value = level(code) * scale + offset,  scale = level(scale code) * group scale

Offset, scale codes and group scales are optional. Offsets that are stored as integers are zero points, in units of the
scale, or codes in units of a group offset:

    value = (level(code) - zero point) * scale,  value = level(code) * scale - offset code * group offset

A new format is a `Layout` and a row in the table.
"""

import functools
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from lowbit.runtime import aux_field

from ._inputs import (
    checked_block_size,
    checked_dtype,
    checked_input,
    checked_scale,
    raise_if_not_finite,
    spans_of_input,
)
from .blocks import span_of, spread
from .components import SCALE_DTYPES, checked_scale_dtype
from .file_layouts import E2M1, E4M3, E5M2, E8M0, FILE_LAYOUTS
from .layout import Layout, Options, encode_blocks, encode_scales
from .levels import Floats, Integers, Levels, Table
from .quantized import KEEP, QuantizedArray, stored
from .table import FORMATS, Format, register_format

SIGNED8 = Floats(8, exponent=3, mantissa=4, negative_zero_is_nan=True)
"""Scales as signed floats of 1 + 3 + 4 bits. A negative scale mirrors a table that is not symmetric."""
_NATIVE: dict[Levels | None, str] = {SIGNED8: "signed8", E8M0: "e8m0", E4M3: "e4m3", E5M2: "e5m2"}


@stored
class PackedArray(QuantizedArray):
    """An array of a declared format (see `declare`): `value = level(code) * scale + offset`."""

    high: jax.Array | None = None
    offsets: jax.Array | None = None
    group_scales: jax.Array | None = None
    group_offsets: jax.Array | None = None
    format_name: str = aux_field()
    affine: bool = aux_field(default=False)  # integers from 0, with an offset

    component_names: ClassVar[dict[str, str]] = {"weight": "codes", "scale": "scales"}
    code_dtypes: ClassVar[tuple[np.dtype, ...]] = (np.dtype(np.uint8),)

    @classmethod
    def quantize(
        cls,
        array: Any,
        block_size: int | None = None,
        *,
        format_name: str,
        axis: Any = None,
        dtype: Any = None,
        offset: bool = False,
        search: bool | None = None,
        scale_dtype: Any = None,
        scale: Any = None,
        importance: Any = None,
    ) -> Self:
        """Quantize a dense array.

        - `block_size`: how many elements along `axis` share a scale; -1 for all. Default that of the format.
        - `axis`: default -2, the one that `x @ w` contracts, or -1 for an array with one axis. With several, blocks
          have `block_size` elements along each: 128 x 128 for `axis=(-2, -1), block_size=128`.
        - `offset`: store the smallest value of each block too, for integers from 0.
        - `search`: search for the scale with the least error; False takes the largest magnitude. Default what the
          format declares, along a single axis.
        - `scale_dtype`: of scales that are floats: float32, bfloat16 or float16.
        - `scale`: the scales to round by instead; values beyond them are clipped.
        - `importance`: weights of squared errors in the search, with the number of axes of the array and size 1 along
          its outputs; 0 for the default.
        """
        layout = layout_of(format_name)
        array = checked_input(array, format_name)
        dtype = checked_dtype(dtype, array, format_name)
        block_size = layout.block_size if block_size is None else block_size
        spans = spans_of_input(array, axis, None if block_size == -1 else checked_block_size(block_size))
        given = checked_scale(scale, array.shape, spans, format_name, signed=layout.is_signed)
        single = sum(span != 1 for span in spans) == 1
        searches = layout.weighting is not None and single and scale is None
        if search and not searches:
            raise ValueError(f"search=True for {format_name!r} needs a format that searches, one axis, and no scale=.")
        if offset and (scale is not None or not single):
            raise ValueError(f"offset=True for {format_name!r} needs a single axis, and does not take scale=.")
        options = Options(
            offset, searches and search is not False, checked_scale_dtype(scale_dtype or np.float32, format_name)
        )
        options.check(layout, format_name)
        components = encode_blocks(array, spans, layout, options, given, importance)
        quantized = cls.build(
            shape=array.shape, dtype=dtype, spans=spans, format_name=format_name, affine=offset, **components
        )
        if not isinstance(quantized.scales, Tracer):
            decoded = _decoded(quantized) if quantized._has_scale_codes() else quantized.scales
            raise_if_not_finite(array, decoded, format_name, options.scale_dtype)
        return quantized

    @property
    def layout(self) -> Layout:
        return layout_of(self.format_name)

    @property
    def packing(self) -> dict[str, int]:
        return self.layout.packing

    @property
    def int8_multiplier(self) -> int | None:
        return self.layout.levels.int8_multiplier

    @property
    def decoder(self) -> str | np.ndarray | None:
        levels = self.layout.levels
        if levels.bits > 6:
            return _NATIVE.get(levels)
        if "high" in self.packing and self.int8_multiplier is None:
            return None
        return Integers(levels.bits).table if self.affine else levels.table

    @property
    def scale_codec(self) -> str | None:
        known = self._has_scale_codes() and not isinstance(self.layout.group, int) and not self.layout.group_divides
        return _NATIVE.get(self.layout.scales) if known else None

    def levels(self, *codes: jax.Array) -> jax.Array:
        low, *high = codes
        for more in high:
            low = low | more << (8 // self.packing["codes"])
        levels = self.layout.levels
        return Integers(levels.bits).decode(low) if self.affine else levels.decode(low)

    def component_spans(self) -> dict[str, tuple[int, ...]]:
        missing = [name for name in self.packing if getattr(self, name) is None]
        missing += ["group_scales"] * (
            self.layout.group is not None and self.group_scales is None and self._has_scale_codes()
        )
        if missing:
            raise ValueError(f"A PackedArray of the format {self.format_name!r} needs the components {missing} too.")
        spans = super().component_spans()
        if self.offsets is not None:
            spans["offsets"] = self.spans
        groups = [name for name in ("group_scales", "group_offsets") if getattr(self, name) is not None]
        return spans | dict.fromkeys(groups, self.layout.group_spans(self.spans, len(self.codes.shape)))

    def component_dtypes(self) -> dict[str, tuple[np.dtype, ...]]:
        scales = (np.dtype(np.uint8),) if self._has_scale_codes() else SCALE_DTYPES
        floats = {name: SCALE_DTYPES for name in ("group_scales", "group_offsets") if getattr(self, name) is not None}
        offsets = (*self.code_dtypes, *SCALE_DTYPES) if self.group_offsets is None else self.code_dtypes
        found = {**dict.fromkeys(self.packing, self.code_dtypes), "scales": scales, **floats}
        return found if self.offsets is None else found | {"offsets": offsets}

    def _has_scale_codes(self) -> bool:
        return self.layout.scales is not None and getattr(self.scales, "dtype", None) not in SCALE_DTYPES

    def scale_values(self) -> jax.Array:
        if not self._has_scale_codes():
            return super().scale_values()
        codec = self.layout.scales
        assert codec is not None
        scales = codec.decode(self.scales)
        if self.group_scales is None:
            return scales
        group = self._by_block(self.group_scales)
        if not self.layout.group_divides:
            return scales * group
        # A divisor for each scale: by one number the compiler would multiply with its rounded reciprocal.
        return scales / jnp.where(jnp.isnan(scales), 1, group)

    def with_scales(self, scales: jax.Array) -> Self:
        if self._has_offset_codes():
            raise ValueError(
                f"A {self.format_name!r} array with offsets stored as codes cannot have other scales: {KEEP}."
            )
        if not self._has_scale_codes():
            return super().with_scales(scales)
        if isinstance(self.layout.group, int) or self.layout.group_divides:
            raise ValueError(
                f"The scale codes of {self.format_name!r} are those of a file, and cannot be changed: {KEEP}."
            )
        scales = self.checked_scales(scales)
        return self.replace(**encode_scales(self.layout, self.spans, scales, self.group_scales, self._by_block))

    def _by_block(self, group: jax.Array) -> jax.Array:
        """Values of groups as float32, one for each block, or one for the whole axis."""
        groups = self.layout.group_spans(self.spans, group.ndim)
        ratios = [span // (span_of(self.spans, axis - len(groups)) or 1) for axis, span in enumerate(groups)]
        return spread(group.astype(jnp.float32), ratios, self.scales.shape[-len(groups) :])

    def _has_offset_codes(self) -> bool:
        return getattr(self.offsets, "dtype", None) in self.code_dtypes

    def offset_values(self) -> jax.Array | None:
        if self.offsets is None:
            return None
        offsets = self.offsets.astype(jnp.float32)
        if not self._has_offset_codes():
            return offsets
        unit = self.scale_values() if self.group_offsets is None else self._by_block(self.group_offsets)
        return -offsets * unit

    def scaled(self, levels: jax.Array, spread: Callable[[jax.Array], jax.Array]) -> jax.Array:
        if self._has_offset_codes() and self.group_offsets is None:
            # The difference of integers is exact, where that of two products with a float32 scale would not be.
            array = self.without_offsets()
            assert self.offsets is not None
            return array.scaled(levels - spread(self.offsets.astype(jnp.float32)), spread)
        return super().scaled(levels, spread)

    def without_offsets(self) -> Self:
        return self.replace(offsets=None, group_offsets=None)

    @property
    def format_label(self) -> str:
        return self.format_name

    def plain(self) -> Self:
        changes: dict[str, Any] = {}
        if self._has_scale_codes():
            changes = {"scales": self.scale_values(), "group_scales": None}
        if self.group_offsets is not None:
            changes |= {"offsets": self.offset_values(), "group_offsets": None}
        return self.replace(**changes) if changes else self


# One program: scale codes are decoded in about twenty operations, each of which would be compiled for each shape.
_decoded = jax.jit(PackedArray.scale_values)


def layout_of(name: str) -> Layout:
    layout = FORMATS[name].layout if name in FORMATS else FILE_LAYOUTS.get(name)
    if layout is None:
        known = ", ".join(row.name for row in FORMATS.values() if row.layout is not None) or "none so far"
        raise ValueError(f"{name!r} is not a declared format ({known}): declare it with lowbit.formats.declare first.")
    return layout


def declare(name: str, layout: Layout, *, error: float) -> Format:
    """Add a format of a layout to the table, and return its row; `error` is its RMS error on N(0, 1).

    Declaring the same layout again returns the row that is there.

    >>> import jax.numpy as jnp, lowbit
    >>> from lowbit.formats import Layout, declare, levels
    >>> _ = declare("halves", Layout(levels.Table(2, (-2, -1, 1, 2)), block_size=16), error=0.33)
    >>> lowbit.quantize(jnp.ones((16, 8)), "halves").materialize().shape
    (16, 8)
    >>> _ = lowbit.FORMATS.pop("halves")
    """
    known = FORMATS.get(name)
    if known is not None and known.layout == layout:
        return known
    return register_format(
        Format(
            name,
            functools.partial(PackedArray.quantize, format_name=name),
            error=error,
            bits=float(layout.levels.bits),
            blocked=layout.block_size is not None,
            options=layout.options,
            top=layout.levels.largest,
            layout=layout,
        )
    )


_Q4 = (-19, -15, -12, -9, -7, -5, -3, -1, 1, 3, 5, 7, 9, 12, 16, 21)
_Q3 = (-13, -8, -4, -1, 2, 5, 9, 16)
# Weightings are chosen by the KL of a language model where it says something (docs/formats.md, "The search").
LAYOUTS = {
    "q4": Layout(Table(4, _Q4), 32, SIGNED8, "axis"),
    "q3": Layout(Table(3, _Q3), 32, SIGNED8, "axis"),
    "q2": Layout(Table(2, (-6, -1, 3, 9)), 32, SIGNED8, "axis", weighting="plain"),
    **{f"int{bits}": Layout(Integers(bits, 2 ** (bits - 1)), 32, weighting="plain") for bits in range(2, 7)},
    "fp8": Layout(E4M3, None, weighting=None),
    "fp8_e5m2": Layout(E5M2, None, weighting=None),
    "mxfp4": Layout(E2M1, 32, E8M0, weighting=None),
    "nvfp4": Layout(E2M1, 16, E4M3, "matrix", weighting=None),
}
"""The layouts of the built-in formats that are declared, by name."""

_ERRORS = {
    "q4": 0.0753,
    "q3": 0.1541,
    "q2": 0.3102,
    "int2": 0.3320,
    "int3": 0.1625,
    "int4": 0.0811,
    "int5": 0.0414,
    "int6": 0.0211,
    "fp8": 0.0264,
    "fp8_e5m2": 0.0526,
    "mxfp4": 0.1148,
    "nvfp4": 0.0949,
}
for _name, _layout in LAYOUTS.items():
    declare(_name, _layout, error=_ERRORS[_name])
