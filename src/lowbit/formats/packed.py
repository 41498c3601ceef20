"""Formats by declaration: a `Layout` says what the stored bits mean, and one class stores them all.

    value = level(code) * scale + offset,  scale = level(scale code) * group scale

Offset, scale codes and group scales are optional. A new format is a `Layout` and a row in the table.
"""

import functools
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from lowbit.runtime import aux_field

from ._inputs import axis_spans, checked_dtype, checked_input, checked_scale, raise_if_not_finite
from .components import SCALE_DTYPES
from .layout import Layout, Options, encode_blocks
from .levels import Floats, Integers, Powers, Table
from .quantized import QuantizedArray, stored
from .table import FORMATS, Format, register_format

# Scales as signed floats of 1 + 3 + 4 bits: a sign mirrors a table that is not symmetric.
SIGNED8 = Floats(8, exponent=3, mantissa=4, negative_zero_is_nan=True)
E8M0 = Powers(8)
E4M3 = Floats(8, exponent=4, mantissa=3, reserved=1)
E5M2 = Floats(8, exponent=5, mantissa=2, reserved=4)
E2M1 = Floats(4, exponent=2, mantissa=1)


@stored
class PackedArray(QuantizedArray):
    """An array of a declared format. `lowbit.quantize(w, "q4")` makes one.

    >>> import jax, jax.numpy as jnp, lowbit
    >>> q = lowbit.quantize(jax.random.normal(jax.random.key(0), (256, 128)), "q4")
    >>> q.format.name, q.nbytes * 8 / q.size, (jnp.ones((2, 256)) @ q).shape
    ('q4', 4.375, (2, 128))
    """

    high: jax.Array | None
    offsets: jax.Array | None
    group_scales: jax.Array | None
    format_name: str = aux_field()

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
        search: bool = True,
        scale_dtype: Any = None,
        scale: Any = None,
    ) -> Self:
        """Quantize a dense array.

        - `block_size`: how many elements along `axis` share a scale; default that of the format.
        - `axis`: default -2, the one that `x @ w` contracts, or -1 for an array with one axis.
        - `offset`: store the smallest value of each block too, for integers from 0.
        - `search`: search for the scale with the least error; False takes the largest magnitude.
        - `scale_dtype`: of scales that are floats: float32, bfloat16 or float16.
        - `scale`: the scales to round by instead; values beyond them are clipped.
        """
        layout = layout_of(format_name)
        array = checked_input(array, format_name)
        dtype = checked_dtype(dtype, array, format_name)
        spans = axis_spans(array.shape, axis, layout.block_size if block_size is None else block_size)
        given = checked_scale(scale, array.shape, spans, format_name)
        options = Options(offset, search and layout.weighting is not None, np.dtype(scale_dtype or np.float32))
        options.check(layout, format_name)
        components = dict.fromkeys(("high", "offsets", "group_scales")) | encode_blocks(
            array, spans, layout, options, given
        )
        quantized = cls.build(shape=array.shape, dtype=dtype, spans=spans, format_name=format_name, **components)
        raise_if_not_finite(array, quantized.scale_values(), format_name)
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

    def levels(self, *codes: jax.Array) -> jax.Array:
        low, *high = codes
        for more in high:
            low = low | more << (8 // self.packing["codes"])
        levels = self.layout.levels
        return Integers(levels.bits).decode(low) if self.offsets is not None else levels.decode(low)

    def component_spans(self) -> dict[str, tuple[int, ...]]:
        spans = super().component_spans()
        if self.offsets is not None:
            spans["offsets"] = self.spans
        if self.group_scales is not None:
            spans["group_scales"] = self.layout.group_spans(self.spans, len(self.codes.shape))
        return spans

    def component_dtypes(self) -> dict[str, tuple[np.dtype, ...]]:
        scales = (np.dtype(np.uint8),) if self._has_scale_codes() else SCALE_DTYPES
        floats = {name: SCALE_DTYPES for name in ("offsets", "group_scales") if getattr(self, name) is not None}
        return {**dict.fromkeys(self.packing, self.code_dtypes), "scales": scales, **floats}

    def _has_scale_codes(self) -> bool:
        return self.layout.scales is not None and getattr(self.scales, "dtype", None) not in SCALE_DTYPES

    def scale_values(self) -> jax.Array:
        if not self._has_scale_codes():
            return super().scale_values()
        codec = self.layout.scales
        assert codec is not None
        scales = codec.decode(self.scales)
        return scales if self.group_scales is None else scales * self.group_scales.astype(jnp.float32)

    def offset_values(self) -> jax.Array | None:
        return None if self.offsets is None else self.offsets.astype(jnp.float32)

    def plain(self) -> Self:
        if not self._has_scale_codes():
            return self
        return self.replace(scales=self.scale_values(), group_scales=None)


def layout_of(name: str) -> Layout:
    layout = FORMATS[name].layout if name in FORMATS else None
    if layout is None:
        known = ", ".join(row.name for row in FORMATS.values() if row.layout is not None)
        raise ValueError(f"{name!r} is not a declared format: those are {known}. register_format adds to them.")
    return layout


def declare(name: str, layout: Layout, *, error: float, options: frozenset[str] = frozenset()) -> Format:
    """Add a format of a layout to the table, and return its row.

    - `error`: root mean square error on N(0, 1).
    - `options`: the fields of a `QuantizationConfig` that apply to it, beside axis and block size.
    """
    return register_format(
        Format(
            name,
            functools.partial(PackedArray.quantize, format_name=name),
            error=error,
            bits=float(layout.levels.bits),
            blocked=layout.block_size is not None,
            options=options | ({"search"} if layout.weighting else frozenset()),
            top=layout.levels.largest,
            layout=layout,
        )
    )


_Q4 = (-19, -15, -12, -9, -7, -5, -3, -1, 1, 3, 5, 7, 9, 12, 16, 21)
_Q3 = (-13, -8, -4, -1, 2, 5, 9, 16)
Q4 = declare("q4", Layout(Table(4, _Q4), 32, SIGNED8, "axis"), error=0.0751)
Q3 = declare("q3", Layout(Table(3, _Q3), 32, SIGNED8, "axis"), error=0.154)
Q2 = declare("q2", Layout(Table(2, (-6, -1, 3, 9)), 32, SIGNED8, "axis", weighting="plain"), error=0.310)
_AFFINE = frozenset({"offset", "scale_dtype"})
for _bits, _error in ((2, 0.33), (3, 0.16), (4, 0.08), (5, 0.04), (6, 0.02)):
    declare(f"int{_bits}", Layout(Integers(_bits, 2 ** (_bits - 1)), 32), error=_error, options=_AFFINE)
FP8 = declare("fp8", Layout(E4M3, None, weighting=None), error=0.026, options=frozenset({"scale_dtype"}))
FP8_E5M2 = declare("fp8_e5m2", Layout(E5M2, None, weighting=None), error=0.05, options=frozenset({"scale_dtype"}))
MXFP4 = declare("mxfp4", Layout(E2M1, 32, E8M0, weighting=None), error=0.115)
NVFP4 = declare("nvfp4", Layout(E2M1, 16, E4M3, "matrix", weighting=None), error=0.095)
