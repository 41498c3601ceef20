"""Checks of the arguments and inputs of `quantize`, shared by all formats."""

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from lowbit.runtime import ImplicitArray

from .blocks import WHOLE, span_of, stored_length
from .sharding import check_shards


def axis_spans(shape: Sequence[int], axis: Any, block_size: int | None) -> tuple[int, ...]:
    """Spans for one scale along `axis` (an int or several), or for each block.

    With several axes, each has blocks of `block_size`: `axis=(-2, -1), block_size=128` gives blocks of 128 x 128.
    None is the axis that `x @ w` contracts: -2, or -1 for an array with one axis.
    """
    ndim = len(shape)
    axis = (-2 if ndim > 1 else -1) if axis is None else axis
    axes = tuple(operator.index(a) for a in (axis if isinstance(axis, (tuple, list)) else (axis,)))
    for a in axes:
        if not -ndim <= a < ndim:
            raise ValueError(f"axis {a} is out of range for an array of shape {tuple(shape)}.")
    spans = [1] * ndim
    for a in axes:
        spans[a] = WHOLE if block_size is None else block_size
    return tuple(spans)


def spans_of_input(array: jax.Array, axis: Any, block_size: int | None) -> tuple[int, ...]:
    """The spans of `axis_spans`, for an array whose shards hold whole blocks.

    On an explicit mesh JAX itself would refuse to split a shard into blocks, without naming them.
    """
    spans = axis_spans(array.shape, axis, block_size)
    where: Any = jax.typeof(array).sharding
    check_shards(
        array.shape, where.spec, where.mesh, lambda axis: [span for span in (span_of(spans, axis),) if span != WHOLE]
    )
    return spans


def checked_dtype(dtype: Any, array: jax.Array, format: str) -> np.dtype:
    """The dtype of the quantized array, by default that of the input."""
    dtype = np.dtype(array.dtype if dtype is None else dtype)
    if jnp.issubdtype(array.dtype, jnp.floating) and not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"dtype={dtype} for {format!r}: a scaled array must have a floating-point dtype.")
    return dtype


def checked_block_size(block_size: int | None) -> int | None:
    if block_size is not None and block_size < 1:
        raise ValueError(f"block_size={block_size} must be at least 1, or None for one scale along the whole axis.")
    return block_size


def checked_input(array: Any, format: str, *, integers: bool = False) -> jax.Array:
    """The dense array to be quantized, or an error that says what to pass instead."""
    if isinstance(array, ImplicitArray):
        raise TypeError(
            f"Cannot quantize a {type(array).__name__} to {format!r}: it is quantized already. "
            "Pass its .materialize() to quantize it again."
        )
    array = jnp.asarray(array)
    if not jnp.issubdtype(array.dtype, jnp.floating) and not (
        integers and jnp.issubdtype(array.dtype, jnp.signedinteger)
    ):
        raise TypeError(
            f"Cannot quantize an array of dtype {array.dtype} to {format!r}: pass a floating-point array, "
            "for instance array.astype(jnp.float32)."
        )
    if array.ndim == 0:
        raise ValueError(f"Cannot quantize a scalar to {format!r}: pass an array with at least one axis.")
    return array


def checked_scale(
    scale: Any, shape: Sequence[int], spans: Sequence[int], format: str, *, signed: bool = False
) -> jax.Array | None:
    """Check scales given by the user against the shape that the format stores. Unusable ones become NaN under jit.

    `signed`: whether scales may be negative.
    """
    if scale is None:
        return None
    scale = lax.stop_gradient(jnp.asarray(scale, jnp.float32))
    want = tuple(stored_length(length, span) for length, span in zip(shape, spans, strict=True))
    if scale.shape != want:
        raise ValueError(f"scale= for {format!r} has the shape {scale.shape}, and the array needs scales of {want}.")
    usable = ((scale != 0) if signed else (scale > 0)) & jnp.isfinite(scale)
    if not isinstance(scale, Tracer) and not bool(usable.all()):
        first = tuple(int(i) for i in np.argwhere(~np.asarray(usable))[0])
        wanted = "finite and other than 0" if signed else "positive"
        raise ValueError(
            f"scale= for {format!r} must be {wanted}: {int((~usable).sum())} of {scale.size} are not, "
            f"the first is {scale[first]} at {first}."
        )
    return jnp.where(usable, scale, jnp.nan)


def finite_or_nan(scales: jax.Array) -> jax.Array:
    """Replace infinite scales by NaN, so that a block with NaN or infinity decodes to NaN."""
    scales = scales.astype(jnp.float32)
    return jnp.where(jnp.isfinite(scales), scales, jnp.nan)


_has_nan = jax.jit(lambda values: jnp.isnan(values).any())  # one program


def raise_if_not_finite(array: jax.Array, scales: jax.Array, format: str, scale_dtype: Any = np.float32) -> None:
    """Outside of a trace, raise if a scale is NaN, with the position of the first bad value.

    NaN scales of a finite array are those that `scale_dtype` cannot hold.
    """
    if isinstance(scales, Tracer) or not bool(_has_nan(scales)):
        return
    if scale_dtype != np.float32 and bool(jnp.isfinite(array).all()):
        raise ValueError(
            f"scale_dtype={scale_dtype} cannot hold the scales of {format!r} for an array with values up to "
            f"{float(jnp.abs(array).max()):g}: pass scale_dtype='float32'."
        )
    # A float64 value beyond the range of float32 is finite, but its scale is not.
    with np.errstate(over="ignore"):
        bad = ~np.isfinite(np.asarray(array).astype(np.float32))
    if not bad.any():
        raise ValueError(f"Cannot quantize to {format!r}: values up to {np.abs(array).max()} overflow float32 sums.")
    first = tuple(int(i) for i in np.argwhere(bad)[0])
    raise ValueError(
        f"Cannot quantize to {format!r}: {int(bad.sum())} of {array.size} values are NaN or infinite in float32, "
        f"the first is {array[first]} at {first}."
    )
