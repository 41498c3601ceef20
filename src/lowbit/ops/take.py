"""Rows of a quantized matrix, decoded: the look-up of an embedding."""

from collections.abc import Callable

import jax

from lowbit.formats._quantized import QuantizedArray
from lowbit.kernels._table import find_kernels, use_kernel

from .choice import by_platform, first


def take(default: Callable[..., jax.Array], w: QuantizedArray, rows: jax.Array) -> jax.Array:
    """`default(w, rows)`, the rows of a matrix as stored, by a kernel where there is one."""
    kernels = find_kernels("take", w, rows) if first(use_kernel.value, w.use_kernel) else {}
    return by_platform(kernels, default, w, rows)
