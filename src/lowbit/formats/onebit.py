"""Ternary and binary: 2 bits and 1 bit a weight.

    ternary: value = (code - 1) * scale, code in 0, 1, 2     the sign where |w| > threshold, else 0
    binary:  value = (2 * code - 1) * scale, code in 0, 1    the sign, +1 for 0

Components: `weight` uint8, four (ternary) or eight (binary) codes a byte along the last stored axis, the first in the
highest bits; `scale` float32, size 1 along the axes that share a scale, or one for each block.
The threshold is half the standard deviation of the elements that share a scale, and the scale the one with the least
squared error: the mean |w| of the elements that are not 0. `absmean` is the ternary of BitNet b1.58 (arXiv:2402.17764):
the scale is the mean |w| of all elements and the threshold half of it, so levels are round(w / scale), clipped to 1.
"""

from functools import partial
from typing import Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from lowbit.runtime import aux_field

from ._encode import encode
from ._inputs import (
    checked_block_size,
    checked_dtype,
    checked_input,
    checked_scale,
    finite_or_nan,
    raise_if_not_finite,
    spans_of_input,
)
from .blocks import block_count, block_max, block_sum, pack, spread
from .levels import exponent_of, power_of_two
from .quantized import QuantizedArray, stored
from .table import Format, register_format

Kind = Literal["ternary", "binary"]
_PER_BYTE: dict[str, int] = {"ternary": 4, "binary": 8}
_TABLES = {"ternary": np.array([-1, 0, 1, 2], np.float32), "binary": np.array([-1, 1], np.float32)}


@stored
class Array1B(QuantizedArray):
    """An array of {-1, 0, 1} (ternary) or {-1, 1} (binary), scaled.

    `Array1B(w)` quantizes; `Array1B(weight=..., scale=..., kind=...)` takes the components.

    >>> import jax.numpy as jnp, lowbit
    >>> lowbit.Array1B.quantize(jnp.array([[-1, 0, 1, 1], [1, -1, 0, 0]], jnp.int8)).materialize()
    Array([[-1,  0,  1,  1],
           [ 1, -1,  0,  0]], dtype=int8)
    """

    kind: Kind = aux_field(default="ternary")

    code_dtypes: ClassVar[tuple[np.dtype, ...]] = (np.dtype(np.uint8),)
    component_names: ClassVar[dict[str, str]] = {"weight": "codes", "scale": "scales"}

    @classmethod
    def quantize(
        cls,
        array: Any,
        *,
        axis: Any = None,
        dtype: Any = None,
        kind: Kind = "ternary",
        threshold: float | None = None,
        scale: Any = True,
        block_size: int | None = None,
        absmean: bool = False,
    ) -> Self:
        """Quantize a dense array.

        - `axis`: the axis or axes along which one scale is shared; default -2, the one that `x @ w` contracts.
        - `block_size`: one scale for each block of that many elements of the (single) axis.
        - `threshold`: elements up to it become 0; default half the standard deviation.
        - `scale`: False for codes without a scale; or the scales to round by, with half a scale as the threshold.
        - `absmean`: the scale is mean |w|, and half of it the threshold.
        - `dtype`: the dtype of the array; default that of the input.

        Integers must be in {-1, 0, 1} ({-1, 1} for binary) and are kept exactly. Under `jit`, where values
        cannot be checked, other integers give undefined codes.
        """
        if kind not in _PER_BYTE:
            raise ValueError(f"Unknown kind {kind!r} of Array1B: it must be 'ternary' or 'binary'.")
        if threshold is not None and kind == "binary":
            raise ValueError(f"threshold={threshold} is for kind='ternary': binary keeps every sign.")
        array = checked_input(array, kind, integers=True)
        spans = spans_of_input(array, axis, checked_block_size(block_size))
        exact = not jnp.issubdtype(array.dtype, jnp.floating)
        given = None if scale is None or isinstance(scale, bool) else checked_scale(scale, array.shape, spans, kind)
        scaled = scale is None or (scale is True and not exact)
        dtype = np.dtype(dtype or array.dtype) if scale is False else checked_dtype(dtype, array, kind)
        if absmean and (kind == "binary" or exact or threshold is not None or not scaled):
            raise ValueError("absmean=True sets scale and threshold of floating-point weights of kind='ternary'.")
        if given is not None and (exact or threshold is not None):
            raise ValueError("scale= of scales sets the threshold too, and is for floating-point weights.")
        if exact:
            _check_integers(array, kind)
        limit = given / 2 if given is not None else 0.0 if exact else threshold
        codes, scales = _encode(array, spans, kind, limit, scaled, absmean)
        scales = scales if given is None else scales * given  # 1, or NaN
        raise_if_not_finite(array, scales, kind)
        return cls.build(
            codes=codes,
            scales=scales,
            shape=array.shape,
            dtype=dtype,
            spans=spans,
            kind=kind,
        )

    @property
    def packing(self) -> dict[str, int]:
        return {"codes": _PER_BYTE[self.kind]}

    @property
    def code_range(self) -> tuple[int, int] | None:
        return (0, 2) if self.kind == "ternary" else None

    @property
    def int8_multiplier(self) -> int | None:
        return 1

    @property
    def decoder(self) -> np.ndarray:
        return _TABLES[self.kind]

    def levels(self, *codes: jax.Array) -> jax.Array:
        values = codes[0].astype(jnp.float32)
        return values - 1 if self.kind == "ternary" else 2 * values - 1


def _check_integers(array: jax.Array, kind: Kind) -> None:
    if isinstance(array, Tracer):
        return
    allowed = (-1, 0, 1) if kind == "ternary" else (-1, 1)
    wrong = ~np.isin(np.asarray(array), allowed)
    if wrong.any():
        first = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(
            f"Cannot store integers as {kind!r}: {int(wrong.sum())} of {array.size} values are not in {allowed}, "
            f"the first is {int(array[first])} at {first}. Pass floating-point weights to have them rounded."
        )


@partial(jax.jit, static_argnums=(1, 2, 4, 5))
def _encode(
    array: jax.Array,
    spans: tuple[int, ...],
    kind: Kind,
    threshold: jax.Array | float | None,
    scaled: bool,
    absmean: bool,
) -> tuple[jax.Array, jax.Array]:
    by_jax = partial(_by_jax, spans=spans, kind=kind, threshold=threshold, scaled=scaled, absmean=absmean)
    if threshold is None and scaled:
        return encode("encode", by_jax, array, spans=spans, format="absmean" if absmean else kind)
    return by_jax(jax.lax.stop_gradient(array))


def _by_jax(
    array: jax.Array,
    spans: tuple[int, ...],
    kind: Kind,
    threshold: jax.Array | float | None,
    scaled: bool,
    absmean: bool,
) -> tuple[jax.Array, jax.Array]:
    array = array.astype(jnp.float32)
    top = finite_or_nan(block_max(array, spans))
    positive = array >= 0
    exponent = _unit_exponent(top) if scaled or threshold is None else jnp.zeros(top.shape, jnp.int32)
    array = array * spread(power_of_two(-exponent), spans, array.shape)
    inverse_count = 1 / np.maximum(block_count(array.shape, spans), np.float32(1))
    size = jnp.abs(array)
    if kind == "binary":
        codes, scales = positive, block_sum(size, spans) * inverse_count
    elif absmean:
        scales = block_sum(size, spans) * inverse_count
        codes, _ = _signs(array, 0.5 * scales, spans)
    else:
        limit = threshold * power_of_two(-exponent) if threshold is not None else _half_std(array, spans, inverse_count)
        codes, nonzero = _signs(array, limit, spans)
        kept_count = block_sum(nonzero.astype(jnp.int32), spans).astype(jnp.float32)
        scales = block_sum(size * nonzero, spans) / jnp.maximum(kept_count, 1)
    scales = jnp.where(jnp.isnan(top), jnp.nan, scales * power_of_two(exponent) if scaled else 1)
    return pack(codes.astype(jnp.uint8), _PER_BYTE[kind]), scales


def _unit_exponent(top: jax.Array) -> jax.Array:
    """The exponent of the unit of a block: 0, or near the exponent of its maximum if squares or sums might overflow."""
    exponent = exponent_of(top)
    return jnp.where(jnp.abs(exponent) <= 30, 0, jnp.clip(exponent, -100, 100))


def _half_std(array: jax.Array, spans: tuple[int, ...], inverse_count: np.ndarray) -> jax.Array:
    mean = spread(block_sum(array, spans) * inverse_count, spans, array.shape)
    # The maximum keeps the compiler from fusing square and addition (see `ordered_sum`).
    return 0.5 * jnp.sqrt(block_sum(jnp.maximum((array - mean) ** 2, 0), spans) * inverse_count)


def _signs(array: jax.Array, limit: jax.Array, spans: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """The codes of the signs, 1 for elements up to the limit, and which elements are beyond it."""
    nonzero = jnp.abs(array) > spread(limit, spans, array.shape)
    return jnp.where(nonzero, jnp.where(array > 0, 2, 0), 1), nonzero


_ternary, _binary = (partial(Array1B.quantize, kind=kind) for kind in ("ternary", "binary"))
TERNARY = register_format(
    Format("ternary", _ternary, error=0.444, bits=2.0, blocked=False, options=frozenset({"absmean"}), top=1)
)
BINARY = register_format(Format("binary", _binary, error=0.603, bits=1.0, blocked=False, top=1))
