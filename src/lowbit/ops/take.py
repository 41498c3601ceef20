"""Rows of a quantized matrix, decoded: the look-up of an embedding."""

from collections.abc import Callable

import jax

from lowbit.formats._quantized import QuantizedArray
from lowbit.kernels._table import use_kernel

from .choice import first, run


def take(default: Callable[..., jax.Array], w: QuantizedArray, rows: jax.Array) -> jax.Array:
    """`default(w, rows)`, the rows of a matrix as stored, by a kernel where there is one."""
    return run("take", default, w, rows, kernel=first(use_kernel.value, w.use_kernel))
