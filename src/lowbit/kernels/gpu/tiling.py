"""How the kernel for GPUs divides a product: sizes of tiles, the dtype that is multiplied, and in how many terms.

Tensor cores multiply bfloat16, float16, or the upper 11 bits of float32, and add in float32. So what is multiplied with
x must be exact in the dtype of x:

- Scales multiply sums, not weights, where each result has one scale for a whole step along k.
- Levels of few bits are exact. Others, and weights that had to be scaled, are split into *terms* that are exact, and x
  is multiplied by each. A weight rounded to bfloat16 would double the error of the rounded result.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lowbit.formats.blocks import span_of
from lowbit.formats.quantized import QuantizedArray

from .._tiles import constant, level_table
from ..product import Product


@dataclass(frozen=True)
class Tile:
    """What a program computes: `rows` x `columns` results, `depth` of k in a step, one of `splits` shares of k."""

    rows: int
    columns: int
    depth: int
    splits: int = 1
    warps: int = 4
    stages: int = 3


def tile_for(m: int, w: QuantizedArray, contract: int, unit: Any, terms: int) -> Tile:
    """Sizes for a product of m x k with w. They fit the smallest chip, A100.

    - Codes along the packed axis fill a sector of 32 bytes, the unit in which memory is read, if a block has as many.
    - What a thread holds of results and of weights fits its 255 registers.
    - Where tiles are too few to keep memory busy, programs share k, if their sums weigh little beside the codes.
    """
    n, k, per_byte = w.shape[-3 - contract], w.shape[contract], min(w.packing.values())
    rows = min(max(1 << (m - 1).bit_length(), 16), 256)
    span = span_of(w.spans, contract)
    wide = unit == jnp.float32 or span % 32  # more registers for a weight: float32, or scaled and split
    if rows <= 32:
        along = max(64, (16 if wide else 32) * per_byte)
        across = 64 if along <= 128 else 32
    else:
        along = across = 32 if wide else 64
    columns, depth = (along, across) if contract == -2 else (across, along)
    if rows > 128 and terms > 1:
        columns = 32
    if span % 32 == 0:
        depth = math.gcd(span, depth)
    programs = math.prod(w.shape[:-2]) * -(-m // rows) * -(-n // columns)
    splits = 1
    while programs * splits < 256 and 2 * splits * max(8 * depth, 128 * m) <= k:
        splits *= 2
    return Tile(rows, columns, depth, splits, warps=4 if rows <= 64 else 8)


@dataclass(frozen=True)
class Tiling:
    """How a product is computed.

    - `unit`: the dtype that is multiplied.
    - `after`: whether scales multiply sums rather than weights.
    - `terms`: into how many terms a weight is split.
    - `table`: the levels of all codes where looking them up costs less than computing them, else None.
    """

    tile: Tile
    unit: Any
    after: bool
    terms: int
    table: Any


def tiling_for(product: Product, tile: Tile | None = None) -> Tiling:
    """The tiling of a product; `tile` overrides the sizes."""
    w, contract, unit = product.w, product.contract, product.x.dtype
    levels = level_table(w)
    # Decoding of many operations costs more than a look into the first-level cache.
    codes = [jax.ShapeDtypeStruct((1, 1), jnp.int32)] * len(w.packing)
    long = len(jax.make_jaxpr(w.levels)(*codes).eqns) > 8
    # One scale for a step, of any depth that `tile_for` gives. WHOLE is 0.
    after = span_of(w.spans, contract) % (tile.depth if tile else 32) == 0
    terms = _terms_needed(levels, unit, product.dtype, after)
    if not terms:
        unit, terms = jnp.dtype(jnp.float32), 1
    rows = math.prod(product.rows)
    if product.sizes is not None:  # tiles of about as many rows as a group has
        rows = min(-(-rows // w.shape[-3]), 32)
    tile = tile or tile_for(rows, w, contract, unit, terms)
    return Tiling(tile, unit, after, terms, levels if long else None)


def _terms_needed(levels: np.ndarray, unit: Any, dtype: Any, bare: bool) -> int:
    """How many terms give a weight to a sixteenth of the result's rounding; 0 if no number of them does."""
    if unit == jnp.float32:
        return 1
    limit = float(jnp.finfo(dtype).eps) / 16
    if not bare:  # a weight of any size, which float16 may not have
        return 0 if unit == jnp.float16 else 2 if limit > 2**-16 else 3
    known = np.isfinite(levels)

    def is_near(count: int) -> bool:
        near = sum(np.asarray(term, np.float64) for term in split(jnp.asarray(levels), unit, count))
        return bool(np.all(np.abs(near - levels)[known] <= limit * np.abs(levels[known])))

    return constant(lambda: next((count for count in (1, 2, 3) if is_near(count)), 0))


def split(values: jax.Array, unit: Any, count: int) -> list[jax.Array]:
    """`count` terms, exact in `unit`, that add up to float32 `values` as far as so many can."""
    terms = []
    keep = np.int32(-1 << 23 - jnp.finfo(unit).nmant)
    for _ in range(count - 1):
        # Mask the bits: compilers remove a conversion there and back.
        term = lax.bitcast_convert_type(lax.bitcast_convert_type(values, jnp.int32) & keep, jnp.float32)
        terms.append(term.astype(unit))
        values = values - term
    return [*terms, values.astype(unit)]
