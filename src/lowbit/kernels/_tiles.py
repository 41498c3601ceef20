"""What the tiled kernels share: the index of a layer in a stored stack, and unpacking codes.

A byte holds neighbours of the last axis, and interleaving them would move them between lanes. So a tile of codes is
split into *planes*: plane j has the columns j, j + n, j + 2n, ... for n codes in a byte, each where its byte lies. The
activations or results that go with the planes are small, and are (de)interleaved instead.
"""

import math

import jax
import jax.numpy as jnp

from lowbit.formats.quantized import QuantizedArray


def layer_numbers(w: QuantizedArray) -> jax.Array:
    """The index in the stored stack of each matrix of the batch."""
    inner = w.stored_shape[1:-2] if w.index is not None else w.stored_shape[:-2]
    own = jnp.arange(math.prod(inner), dtype=jnp.int32)
    if w.index is None:
        return own
    chosen = jnp.clip(w.index.astype(jnp.int32), 0, w.stored_shape[0] - 1)
    return (chosen.reshape(-1, 1) * own.size + own).reshape(-1)


def planes(codes: jax.Array, per_byte: int) -> list[jax.Array]:
    """Unpack the codes of a tile, plane by plane. Bytes are widened first: tiles have no 8-bit arithmetic."""
    codes = codes.astype(jnp.int32)
    if per_byte == 1:
        return [codes]
    bits = 8 // per_byte
    shifted = [codes >> (8 - bits * (j + 1)) for j in range(per_byte)]
    return [shifted[0], *(plane & (1 << bits) - 1 for plane in shifted[1:])]
