"""Rows of a quantized matrix, decoded: the lookup of an embedding."""

from typing import Any

import jax
from jax import lax
from jax.custom_batching import custom_vmap

from lowbit.dispatch import find_kernels, nearest, use_kernel
from lowbit.formats.quantized import QuantizedArray
from lowbit.kernels import reference

from .partition import ShardedRows, devices_in_use, over_devices


def take(w: QuantizedArray, rows: jax.Array) -> jax.Array:
    """Decode rows of a matrix as stored, for row numbers of shape (..., 1) that are all in range."""
    kernels = find_kernels("take", w, rows) if nearest(use_kernel.value, w.use_kernel) else {}

    @custom_vmap
    def call(w: QuantizedArray, rows: jax.Array) -> jax.Array:
        # Scales in 8 bits depend on their position in the whole matrix, which a shard does not know.
        w = w.plain() if w.scale_components and devices_in_use(rows, *jax.tree.leaves(w)) > 1 else w
        like = ShardedRows({}, reference.take, w, rows)
        return over_devices(ShardedRows(kernels, reference.take, w, rows), rows, *jax.tree.leaves(w), like=like)

    @call.def_vmap
    def _(size: int, mapped: Any, w: QuantizedArray, rows: jax.Array) -> tuple[jax.Array, bool]:
        del size
        if not any(jax.tree.leaves(mapped[0])):
            return call(w, rows), True  # more rows of the same matrix
        axes = jax.tree.map(lambda is_mapped: 0 if is_mapped else None, mapped)
        return jax.vmap(reference.take, axes)(w, rows), True

    return call(lax.stop_gradient(w), rows)
