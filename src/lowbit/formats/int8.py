"""int8: 8 bits per weight.

    value = code * scale,  scale = max |w| / 127 over the elements that share it

Components: `weight` int8 in [-127, 127], of the array's shape; `scale` float32, of size 1 along the axes that share a
scale, or one for each block. Rounding is to nearest even, so the error of an element is at most scale / 2.
A slice of zeros has scale 0 and stays zero.
"""

from functools import partial
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

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
from .blocks import block_max, spread
from .components import checked_scale_dtype
from .quantized import QuantizedArray, stored
from .table import Format, register_format


@stored
class Array8B(QuantizedArray):
    """An array in 8 bits, `weight * scale`: `Array8B(w)` quantizes, `Array8B(weight=..., scale=...)` takes components.

    >>> import jax.numpy as jnp, lowbit
    >>> q = lowbit.Array8B.quantize(jnp.ones((128, 256)), axis=-2)
    >>> (jnp.ones((32, 128)) @ q).shape, q.weight.dtype, q.scale.shape
    ((32, 256), dtype('int8'), (1, 256))
    """

    code_dtypes: ClassVar[tuple[np.dtype, ...]] = (np.dtype(np.int8),)

    @classmethod
    def quantize(
        cls,
        array: Any,
        *,
        axis: Any = None,
        dtype: Any = None,
        block_size: int | None = None,
        scale_dtype: Any = None,
        scale: Any = None,
    ) -> Self:
        """Quantize a dense array.

        - `axis`: the axis or axes along which one scale is shared; default -2, the one that `x @ w` contracts.
        - `block_size`: one scale for each block of that many elements along `axis`, along each of several.
        - `dtype`: the dtype of the array; default that of the input.
        - `scale_dtype`: of the scales: float32 (the default), bfloat16 or float16.
        - `scale`: the scales to round by instead of max |w| / 127; codes are clipped to [-127, 127].
        """
        array = checked_input(array, "int8")
        dtype = checked_dtype(dtype, array, "int8")
        spans = spans_of_input(array, axis, checked_block_size(block_size))
        narrow = checked_scale_dtype(scale_dtype or np.float32, "int8")
        codes, scales = _encode(array, spans, checked_scale(scale, array.shape, spans, "int8"), narrow)
        raise_if_not_finite(array, scales, "int8", narrow)
        return cls.build(codes=codes, scales=scales, shape=array.shape, dtype=dtype, spans=spans)

    @property
    def int8_multiplier(self) -> int | None:
        return 1

    @property
    def decoder(self) -> str:
        return "int8"

    def levels(self, *codes: jax.Array) -> jax.Array:
        return codes[0].astype(jnp.float32)


@partial(jax.jit, static_argnums=(1, 3))
def _encode(
    array: jax.Array, spans: tuple[int, ...], scale: jax.Array | None = None, scale_dtype: Any = np.float32
) -> tuple[jax.Array, jax.Array]:
    if scale_dtype != np.float32:  # round by the scales that are stored
        array = jax.lax.stop_gradient(array)
        wide = _scale_of_max(block_max(array.astype(jnp.float32), spans)) if scale is None else scale
        stored = wide.astype(scale_dtype)
        fits = jnp.isfinite(stored) & ((stored != 0) | (wide == 0))
        codes, scales = _by_jax(array, spans, jnp.where(fits, stored.astype(jnp.float32), jnp.nan))
        return codes, scales.astype(scale_dtype)
    if scale is not None:
        return _by_jax(jax.lax.stop_gradient(array), spans, scale)
    return encode("encode", partial(_by_jax, spans=spans), array, spans=spans, format="int8")


def _scale_of_max(largest: jax.Array) -> jax.Array:
    return finite_or_nan(largest / 127)


def _by_jax(array: jax.Array, spans: tuple[int, ...], scale: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    array = array.astype(jnp.promote_types(array.dtype, jnp.float32))
    scales = _scale_of_max(block_max(array, spans))
    scales = scales if scale is None else jnp.where(jnp.isnan(scales), jnp.nan, scale)
    # Codes are 0 where the scale is 0 or NaN. The reciprocal is explicit, since XLA would take it for some shapes only.
    inverse = jnp.where(scales > 0, 1 / jnp.where(scales > 0, scales, 1), 0)
    codes = jnp.round(array * spread(inverse, spans, array.shape))
    return jnp.clip(jnp.nan_to_num(codes), -127, 127).astype(jnp.int8), scales


INT8 = register_format(
    Format(
        "int8",
        Array8B.quantize,
        error=0.0087,
        bits=8.0,
        blocked=False,
        options=frozenset({"scale_dtype"}),
        top=127,
        scale_of_max=_scale_of_max,
    )
)
