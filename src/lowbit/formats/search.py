"""Find scales and codes of blocks: by the largest magnitude, or by a search for the least weighted squared error.

The search tries both signs and several sizes of the scale. For each it rounds the block, refits the scale by weighted
least squares, and rounds the scale as it will be stored; the least error wins. Sums are in a fixed order, and no
product is fused with an addition, so that a native encoder can give the same bits.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .blocks import ordered_sum, unfused
from .levels import Integers, Levels, exponent_of, power_of_two

# Sizes to try, in units of (largest magnitude of the block) / (largest level).
FACTORS = tuple(float(f) for f in np.linspace(0.72, 1.1, 6, dtype=np.float32))


def factors_to_try(signed: bool) -> np.ndarray:
    return np.array([*FACTORS, *(-f for f in FACTORS)] if signed else FACTORS, np.float32)


def inverse_top(levels: Levels) -> np.float32:
    """1 / the largest level; the compiler would replace a division by it."""
    return np.float32(1 / levels.largest)


def weights_of(blocks: jax.Array, mask: jax.Array | None, count: np.ndarray, weighting: str) -> jax.Array:
    """The weight of each squared error.

    - "plain": 1.
    - "root": sqrt(mean(w^2) + w^2), which favours large weights.
    - "square": mean(w^2) + w^2, which favours them more.
    """
    if weighting == "plain":
        weights = jnp.ones_like(blocks)
    else:
        squares = unfused(blocks * blocks)
        weights = unfused(ordered_sum(squares, -2, keepdims=True) * (1 / count)) + squares
        weights = weights if weighting == "square" else jnp.sqrt(weights)
    return weights if mask is None else weights * mask


def weights_of_inputs(
    blocks: jax.Array, importance: jax.Array, axis: int, span: int, otherwise: jax.Array
) -> jax.Array:
    """The weight of each squared error from the importance of inputs; `otherwise` where that is 0.

    `importance` has the number of axes of the array, and size 1 along its outputs. Blocks are those of `by_blocks`.
    """
    split, mask, _ = by_blocks(importance, axis, span)
    split = jnp.broadcast_to(split, blocks.shape)
    return jnp.where(split > 0, split, otherwise) * (1 if mask is None else mask)


def search_scale(
    blocks: jax.Array,
    weights: jax.Array,
    largest: jax.Array,
    levels: Levels,
    rounding: Callable[[jax.Array], jax.Array],
    signed: bool,
) -> jax.Array:
    """The scale of each block of shape (..., block, column), as it is stored; 0 for blocks of zeros.

    - `largest`: the largest magnitude of each block, with size 1 on the axis of the block.
    - `rounding`: the value that is read back for a scale.
    - `signed`: whether scales may be negative.
    """
    weighted = weights * blocks
    start = largest * inverse_top(levels)
    factors = factors_to_try(signed)

    def attempt(i: Any, best: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        error, scale = best
        level = levels.decode(levels.nearest(blocks * reciprocal(jnp.asarray(factors)[i] * start)))
        along = ordered_sum(unfused(weighted * level), -2, keepdims=True)
        across = ordered_sum(unfused(weights * unfused(level * level)), -2, keepdims=True)
        fitted = rounding(along * reciprocal(across))
        # The squared error, without the sum of squares of the block itself.
        lost = fitted * (unfused(fitted * across) - 2 * along)
        better = lost < error
        return jnp.where(better, lost, error), jnp.where(better, fitted, scale)

    nothing = jnp.full_like(largest, jnp.inf), jnp.zeros_like(largest)
    return lax.fori_loop(0, len(factors), attempt, nothing)[1]


def search_affine(
    blocks: jax.Array,
    weights: jax.Array,
    bounds: tuple[jax.Array, jax.Array],
    levels: Integers,
    rounding: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """The scale and the offset of each block, as they are stored, for codes from 0; `bounds` are its extremes."""
    low, high = bounds
    top = np.float32(2**levels.bits - 1)
    middle, width = (low + high) / 2, high - low
    total = ordered_sum(weights, -2, keepdims=True)
    weighted = weights * blocks
    sums = ordered_sum(weighted, -2, keepdims=True)
    factors = jnp.asarray(np.linspace(0.7, 1.0, 10, dtype=np.float32))

    def attempt(i: Any, best: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        error, scale, offset = best
        size = factors[i] * width
        tried = rounding(size / top)
        start = rounding(middle - size / 2)
        codes = levels.decode(levels.nearest((blocks - start) * reciprocal(tried)))
        moment = ordered_sum(weights * codes, -2, keepdims=True)
        spread = ordered_sum(unfused(weights * unfused(codes * codes)), -2, keepdims=True)
        mixed = ordered_sum(unfused(weighted * codes), -2, keepdims=True)
        slope = (total * mixed - moment * sums) * reciprocal(total * spread - moment * moment)
        slope = rounding(jnp.where(slope > 0, slope, tried))
        shift = rounding((sums - slope * moment) * reciprocal(total))
        codes = levels.decode(levels.nearest((blocks - shift) * reciprocal(slope)))
        lost = ordered_sum(weights * (blocks - (unfused(slope * codes) + shift)) ** 2, -2, keepdims=True)
        better = lost < error
        return tuple(jnp.where(better, new, old) for new, old in ((lost, error), (slope, scale), (shift, offset)))

    plain = rounding(width / top), rounding(low)
    return lax.fori_loop(0, len(factors), attempt, (jnp.full_like(low, jnp.inf), *plain))[1:]


def reciprocal(values: jax.Array) -> jax.Array:
    """1 / x, and 0 where x is 0."""
    return jnp.where(values == 0, 0, 1 / jnp.where(values == 0, 1, values))


def flushed(values: jax.Array) -> jax.Array:
    """Subnormal numbers as zero, also where the compiler would keep them."""
    return jnp.where(jnp.abs(values) < np.finfo(np.float32).tiny, 0, values)


def unit_of(largest: jax.Array) -> jax.Array:
    """The power of two at or below a magnitude, so that dividing by it is exact and leaves neither huge nor tiny."""
    return power_of_two(jnp.clip(exponent_of(largest), -120, 120))


def by_blocks(array: jax.Array, axis: int, span: int) -> tuple[jax.Array, jax.Array | None, np.ndarray]:
    """The array as (..., blocks, block, column): `axis` split, and moved before the last.

    Also a mask of the elements that are there, None if all are, and the number of them in each block.
    """
    moved = jnp.moveaxis(array, axis, -1)
    length = moved.shape[-1]
    size = span or max(length, 1)
    short = -length % size
    padded = jnp.pad(moved, [(0, 0)] * (moved.ndim - 1) + [(0, short)]) if short else moved
    split = padded.reshape(*moved.shape[:-1], (length + short) // size, size)
    inside = np.arange(length + short).reshape(-1, size) < length
    count = np.maximum(inside.sum(-1), 1).astype(np.float32)
    mask = jnp.asarray(inside.astype(np.float32)) if short else None
    # One column: the order of sums is the same however the other axes are sliced or sharded.
    return split[..., None], None if mask is None else mask[..., None], count[:, None, None]


def joined(blocks: jax.Array, axis: int, length: int) -> jax.Array:
    """Undo `by_blocks`: for arrays with a value for each element, or for each block if the block has size 1."""
    flat = blocks[..., 0].reshape(*blocks.shape[:-3], blocks.shape[-3] * blocks.shape[-2])
    return jnp.moveaxis(flat[..., :length], -1, axis)
