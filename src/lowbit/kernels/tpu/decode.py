"""The levels of a tile of bytes, in few bundles.

A chip computes 32 bits at a time. It looks up one of the 8 sublanes of a table in one operation, and one of 128 lanes
in more time than all other steps take. So:

- *arithmetic*: the format's own `levels`, where that is a few operations, as for integers, or where nothing else fits.
- *sublanes*: up to eight levels, one in each sublane.
- *halves*: sixteen levels that bfloat16 has, two in a word; the lowest or the highest bit of a code says which half.
- *two*: sixteen other levels, in two tables.
- *lanes*: up to 128 levels.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from lowbit.formats.quantized import QuantizedArray

from .._tiles import joined_codes, planes
from .tiling import LANES, SUBLANES, Tiling
from .vector import from_sublanes, gathered, joined

_UPPER = np.int32(-1 << 16)


def lookup_table(tiling: Tiling) -> np.ndarray | None:
    """The tables to look levels up in, one below the other; None if there are none."""
    levels = tiling.levels.astype(np.float32)
    if tiling.decoding == "arithmetic":
        return None
    if tiling.decoding == "lanes":
        return np.broadcast_to(np.resize(levels, LANES), (SUBLANES, LANES))
    if tiling.decoding == "halves":
        bits = levels.view(np.uint32)
        # By the lowest bit, for the upper code of a byte; by the highest, for the lower.
        words = np.concatenate([bits[::2] | bits[1::2] >> 16, bits[:8] | bits[8:] >> 16]).view(np.int32)
    else:
        words = np.resize(levels, max(levels.size, SUBLANES))
    return np.broadcast_to(words[:, None], (words.size, LANES))


def decode(w: QuantizedArray, tiling: Tiling, tiles: list[jax.Array], table: Any) -> list[jax.Array]:
    """The float32 levels of a tile of bytes, plane by plane; one tile of int32 for each component of codes."""
    if tiling.decoding == "halves":
        return _halves(tiles[0], table)
    unpacked = planes(tiles, tiling.packing)
    if tiling.decoding == "arithmetic":
        return [w.levels(*codes) for codes in unpacked]
    return [_looked_up(joined_codes(codes, tiling.packing), tiling.decoding, table) for codes in unpacked]


def _looked_up(index: jax.Array, decoding: str, table: Any) -> jax.Array:
    if decoding == "lanes":
        table = jnp.broadcast_to(table[:1], (index.shape[0], LANES))
        return joined([gathered(table, index[:, at : at + LANES]) for at in range(0, index.shape[1], LANES)])
    if decoding == "sublanes":
        return from_sublanes(table[...], index)
    low, high = (from_sublanes(table[at : at + SUBLANES], index & SUBLANES - 1) for at in (0, SUBLANES))
    return jnp.where(index >= SUBLANES, high, low)


def _halves(tile: jax.Array, table: Any) -> list[jax.Array]:
    """The levels of the upper and of the lower four bits of each byte: shift the right half of a word up."""
    # Four bytes at a time, which are widened after.
    four = pltpu.bitcast(tile, jnp.int32)

    def field(shifted: jax.Array, mask: int) -> jax.Array:
        return pltpu.bitcast(shifted & np.int32(mask * 0x01010101), jnp.int8).astype(jnp.int32)

    upper = from_sublanes(table[:SUBLANES], field(four >> 5, 7)) << field(four, 16)
    lower = from_sublanes(table[SUBLANES:], field(four, 7)) << field(four << 1, 16)
    return [jax.lax.bitcast_convert_type(word & _UPPER, jnp.float32) for word in (upper, lower)]
