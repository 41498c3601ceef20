"""Arithmetic on blocks and packed bytes, shared by all formats.

*Spans* say how many array elements one stored element covers along each of the last axes: 1 for one each, 64 for
blocks of 64 (the last may be short), `WHOLE` for one on the whole axis. Axes before them have span 1.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

WHOLE = 0
"""The span of a scale that covers a whole axis."""
_RUN = 64  # elements that are added at a time


def is_table(shape: Sequence[int]) -> bool:
    """Whether an array is a table of rows to look up rather than a stack of layers: its rows outnumber their elements.

    >>> is_table((262_144, 30, 256)), is_table((64, 1024, 4096))
    (True, False)
    """
    return shape[0] > math.prod(shape[1:])


def span_of(spans: Sequence[int], axis: int) -> int:
    """The span along `axis`, counted from the end."""
    return spans[axis] if -axis <= len(spans) else 1


def trimmed(spans: Sequence[int]) -> tuple[int, ...]:
    """Drop leading ones, so that equal spans are equal tuples."""
    found = [i for i, span in enumerate(spans) if span != 1]
    return tuple(spans[found[0] :]) if found else ()


def stored_length(length: int, span: int) -> int:
    return 1 if span == WHOLE else -(-length // span)


def axis_slice(x: jax.Array, axis: int, start: int, stop: int) -> jax.Array:
    return x if (start, stop) == (0, x.shape[axis]) else lax.slice_in_dim(x, start, stop, axis=axis)


def repeated(x: jax.Array, axis: int, times: int, length: int) -> jax.Array:
    """Repeat each element `times` times along `axis` (from the end), truncated to `length`."""
    if times == 1:
        return axis_slice(x, axis, 0, length)
    at = x.ndim + axis
    # Broadcast and reshape rather than `jnp.repeat`, which cannot infer the sharding on an explicit mesh.
    wide = lax.broadcast_in_dim(
        x, (*x.shape[: at + 1], times, *x.shape[at + 1 :]), [i + (i > at) for i in range(x.ndim)]
    )
    return axis_slice(wide.reshape(*x.shape[:at], x.shape[at] * times, *x.shape[at + 1 :]), axis, 0, length)


def spread(x: jax.Array, spans: Sequence[int], shape: Sequence[int]) -> jax.Array:
    """Broadcast to one element per array element; axes covered by a single element keep size 1."""
    for axis in range(-len(spans), 0):
        if spans[axis] != WHOLE:
            x = repeated(x, axis, spans[axis], shape[axis])
    return x


def _extended(x: jax.Array, axis: int, zeros: int) -> jax.Array:
    return jnp.pad(x, [(0, zeros if i == axis else 0) for i in range(x.ndim)]) if zeros else x


def _reduce(fn: Callable[..., jax.Array], x: jax.Array, spans: Sequence[int]) -> jax.Array:
    for axis in range(-len(spans), 0):
        span = spans[axis]
        if span == WHOLE:
            x = fn(x, axis=axis, keepdims=True)
        elif span > 1:
            at, length = x.ndim + axis, x.shape[axis]
            short = -length % span
            x = _extended(x, at, short)
            x = fn(x.reshape(*x.shape[:at], (length + short) // span, span, *x.shape[at + 1 :]), axis=at + 1)
    return x


def block_max(x: jax.Array, spans: Sequence[int]) -> jax.Array:
    """The largest |x| of each block; infinite if one is NaN, since not every backend's maximum propagates NaN."""
    size = jnp.where(jnp.isnan(x), jnp.inf, jnp.abs(x))
    return _reduce(partial(jnp.max, initial=0), size, spans)


def block_sum(x: jax.Array, spans: Sequence[int]) -> jax.Array:
    """The sum of each block, bit for bit the same however the other axes are sliced or sharded."""
    return _reduce(ordered_sum, x, spans)


def ordered_sum(x: jax.Array, axis: int, *, keepdims: bool = False) -> jax.Array:
    """The sum along an axis in a fixed pairwise order; the compiler would choose one for each shape.

    Along the last axis runs of elements are added, which is as fast as adding rows. `x` must not be a product of two
    variables, since the compiler may fuse it with the addition and skip a rounding.
    """
    at = axis % x.ndim
    if jax.typeof(x).sharding.spec[at] is not None:  # sharded over explicit axes: each device adds its own shard
        return jnp.sum(x, axis=at, keepdims=keepdims)
    lead, n, tail = x.shape[:at], x.shape[at], x.shape[at + 1 :]
    run = 1 if tail else _RUN
    while n > run:
        half = -(-n // (2 * run))
        x = _extended(x, at, 2 * run * half - n).reshape(*lead, half, 2, run, *tail)
        x = (lax.index_in_dim(x, 0, at + 1, False) + lax.index_in_dim(x, 1, at + 1, False)).reshape(
            *lead, n := half * run, *tail
        )
    while n > 1:
        half = -(-n // 2)
        x = axis_slice(x, at, 0, half) + _extended(axis_slice(x, at, half, n), at, 2 * half - n)
        n = half
    return x if keepdims and n else jnp.sum(x, axis=at, keepdims=keepdims)  # of one element, or of none


def unfused(product: jax.Array) -> jax.Array:
    """A product that the compiler cannot fuse with an addition, which would skip its rounding."""
    return jnp.maximum(product, np.float32(-3.4e38))


def block_count(shape: Sequence[int], spans: Sequence[int]) -> np.ndarray:
    """The number of elements in each block, with size 1 on axes along which it is constant."""
    count = np.ones([1] * len(shape), np.float32)
    for axis in range(-len(spans), 0):
        length, span = shape[axis], spans[axis] or max(shape[axis], 1)
        starts = np.arange(0, max(length, 1), span)
        sizes = np.minimum(span, length - starts).astype(np.float32)
        if span > 1:
            count = count * sizes.reshape([-1 if i == axis else 1 for i in range(-len(shape), 0)])
    return count


def covered(box: Sequence[tuple[int, int]], spans: Sequence[int], shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The range along each axis of the elements of a component that cover a box of the array."""
    covers = [span_of(spans, axis) for axis in range(-len(box), 0)]
    return tuple(
        (0, n) if span == WHOLE else (start // span, -(-stop // span))
        for (start, stop), span, n in zip(box, covers, shape, strict=True)
    )


def pack(codes: jax.Array, per_byte: int) -> jax.Array:
    """Pack `per_byte` codes into each uint8 along the last axis, the first in the highest bits, padded with zeros."""
    if per_byte == 1:
        return codes
    bits = 8 // per_byte
    short = -codes.shape[-1] % per_byte
    codes = jnp.pad(codes.astype(jnp.uint8), [(0, 0)] * (codes.ndim - 1) + [(0, short)])
    groups = codes.reshape(*codes.shape[:-1], codes.shape[-1] // per_byte, per_byte)
    packed = jnp.zeros(groups.shape[:-1], jnp.uint8)
    for i in range(per_byte):
        packed = packed | (groups[..., i] << np.uint8(8 - bits * (i + 1)))
    return packed


def unpack(packed: jax.Array, per_byte: int) -> jax.Array:
    """Unpack the codes of `pack`, padding included."""
    if per_byte == 1:
        return packed
    bits = 8 // per_byte
    shifts = (8 - bits * (np.arange(per_byte) + 1)).astype(np.uint8)
    codes = (packed[..., None] >> shifts) & np.uint8(2**bits - 1)
    return codes.reshape(*packed.shape[:-1], packed.shape[-1] * per_byte)
