"""Every operation by decoding: right on every platform, and what each kernel is tested against."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lowbit.formats._blocks import WHOLE, span_of, spread
from lowbit.formats._quantized import QuantizedArray


def matmul(
    x: jax.Array,
    w: QuantizedArray,
    *,
    contract: int,
    dtype: Any,
    precision: Any = None,
    out_sharding: Any = None,
    arithmetic: str = "exact",
) -> jax.Array:
    """y[*batch, *rows, n] = sum_k x[*batch, *rows, k] * w[*batch, k, n] for contract = -2, w[*batch, n, k] for -1.

    Multiplied and summed in float32 (float64 for a float64 result), rounded once; integers in their own type.
    """
    del arithmetic  # always exact
    wide = dtype if jnp.issubdtype(dtype, jnp.integer) else jnp.promote_types(dtype, jnp.float32)
    batch = tuple(range(w.ndim - 2))
    dims = (((x.ndim - 1,), (w.ndim + contract,)), (batch, batch))
    y = lax.dot_general(
        x.astype(wide),
        w.decode().astype(wide),
        dims,
        precision=precision,
        preferred_element_type=wide,
        out_sharding=out_sharding,
    )
    return y.astype(dtype)


def take(w: QuantizedArray, rows: jax.Array) -> jax.Array:
    """The rows of a matrix as stored, for row numbers of shape (..., 1) that are all inside of it."""

    def chosen(part: jax.Array, spans: tuple[int, ...]) -> jax.Array:
        span = span_of(spans, -2)
        return part[0] if span == WHOLE else jnp.take(part, rows[..., 0] // span, axis=0, mode="clip")

    spans = w.part_spans()
    columns = w.stored_shape[-1]
    values = w.unpacked_levels(*(chosen(getattr(w, name), spans[name]) for name in w.packing), length=columns)
    scales = spread(chosen(lax.stop_gradient(w.scale_values()), w.spans), w.spans[-1:], (columns,))
    return (values * scales).astype(w.dtype)


def squares(w: QuantizedArray, array: jax.Array) -> tuple[jax.Array, jax.Array]:
    """For each row, the sums of the squares of what was lost and of what it was, in float32."""
    array = array.astype(jnp.float32)
    return jnp.sum((w.decode() - array) ** 2, -1), jnp.sum(array**2, -1)
