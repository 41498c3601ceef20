"""What the kernels on tiles share: how a stored stack is indexed, and how packed codes come apart.

A byte holds neighbours of the last axis, and putting them side by side again would move them between lanes. So a tile
of codes is taken apart into *planes*: plane j has the columns j, j + n, j + 2n, ... for n codes in a byte, each where
its byte lies. What meets the planes, activations or results, is small, and is (de)interleaved instead.
"""

import math

import jax
import jax.numpy as jnp

from lowbit.formats._quantized import QuantizedArray


def layer_numbers(w: QuantizedArray) -> jax.Array:
    """For each matrix of the batch, its place in the stack as stored."""
    inner = w.stored_shape[1:-2] if w.index is not None else w.stored_shape[:-2]
    own = jnp.arange(math.prod(inner), dtype=jnp.int32)
    if w.index is None:
        return own
    chosen = jnp.clip(w.index.astype(jnp.int32), 0, w.stored_shape[0] - 1)
    return (chosen.reshape(-1, 1) * own.size + own).reshape(-1)


def planes(w: QuantizedArray, codes: jax.Array) -> list[jax.Array]:
    """The levels of a tile of codes, plane by plane."""
    return [w.levels(plane) for plane in code_planes(w, codes)]


def code_planes(w: QuantizedArray, codes: jax.Array) -> list[jax.Array]:
    """The codes themselves. Bytes are widened first: tiles have no arithmetic in 8 bits."""
    per_byte, codes = w.packing["codes"], codes.astype(jnp.int32)
    if per_byte == 1:
        return [codes]
    bits = 8 // per_byte
    return [codes >> (8 - bits * (j + 1)) & (1 << bits) - 1 for j in range(per_byte)]
