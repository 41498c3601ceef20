"""The error of a quantized array against the dense array that it was made from."""

import jax
import jax.numpy as jnp

from lowbit.dispatch import by_platform, find_kernels, nearest, use_kernel
from lowbit.formats.quantized import QuantizedArray
from lowbit.kernels import reference


def squares(w: QuantizedArray, array: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sums of squares of each stored row's error and of the dense row, in float32."""
    array = jnp.swapaxes(array, -1, -2) if w.transposed else array
    kernels = find_kernels("squares", w, array) if nearest(use_kernel.value, w.use_kernel) else {}
    return by_platform(kernels, reference.squares, w, array)
