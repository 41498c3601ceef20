"""The error of a quantized array against the dense array that it was made from."""

import jax
import jax.numpy as jnp

from lowbit.formats._quantized import QuantizedArray
from lowbit.kernels import reference
from lowbit.kernels._table import find_kernels, use_kernel

from .choice import by_platform, nearest


def squares(w: QuantizedArray, array: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sums of squares of each stored row's error and of the dense row, in float32."""
    array = jnp.swapaxes(array, -1, -2) if w.transposed else array
    kernels = find_kernels("squares", w, array) if nearest(use_kernel.value, w.use_kernel) else {}
    return by_platform(kernels, reference.squares, w, array)
