"""Operations on tiles of 8 sublanes x 128 lanes: loads at any row, gathers of lanes, (de)interleaving of planes."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .tiling import LANES, SUBLANES, round_up


def aligned(start: Any, unit: int) -> Any:
    return start if isinstance(start, int) else pl.multiple_of(start, unit)


def rows(ref: Any, start: Any, count: int, lanes: Any) -> jax.Array:
    """Rows of a tile of scales: some of eight, or a multiple of eight. A load must start at a multiple of eight."""
    first = aligned(start // SUBLANES * SUBLANES, SUBLANES)
    found = ref[0, pl.ds(first, round_up(count, SUBLANES)), lanes]
    return found if count % SUBLANES == 0 else pltpu.roll(found, (SUBLANES - start % SUBLANES) % SUBLANES, 0)[:count]


def terms(x: jax.Array, count: int) -> list[jax.Array]:
    """bfloat16 terms whose sum is x, to 8 bits for each of them."""
    found = []
    for _ in range(count - 1):
        found.append(x.astype(jnp.bfloat16))
        x = x - found[-1].astype(jnp.float32)
    return [*found, x.astype(jnp.bfloat16)]


def joined(planes: list[jax.Array]) -> jax.Array:
    return planes[0] if len(planes) == 1 else jnp.concatenate(planes, axis=-1)


def repeated_rows(x: jax.Array, times: int) -> jax.Array:
    wide = jnp.broadcast_to(x[:, None, :], (x.shape[0], times, x.shape[1]))
    return wide.reshape(x.shape[0] * times, x.shape[1])


_ALONG_LANES = lax.GatherDimensionNumbers(
    offset_dims=(),
    collapsed_slice_dims=(1,),
    start_index_map=(1,),
    operand_batching_dims=(0,),
    start_indices_batching_dims=(0,),
)


def gathered(x: jax.Array, lane: jax.Array) -> jax.Array:
    """`jnp.take_along_axis` for 128 lanes, without its care for negative indices, which takes as many bundles."""
    return lax.gather(x, lane[..., None], _ALONG_LANES, (1, 1), mode="promise_in_bounds")


_ALONG_SUBLANES = lax.GatherDimensionNumbers(
    offset_dims=(),
    collapsed_slice_dims=(1,),
    start_index_map=(1,),
    operand_batching_dims=(0, 2),
    start_indices_batching_dims=(0, 2),
)


def from_sublanes(table: jax.Array, index: jax.Array) -> jax.Array:
    """`table[index]` for a table of 8 words, each the same in all lanes."""
    index = index.reshape(index.shape[0] // SUBLANES, SUBLANES, index.shape[1])
    tables = jnp.broadcast_to(jnp.concatenate([table] * (index.shape[2] // LANES), axis=1), index.shape)
    found = lax.gather(tables, index[..., None], _ALONG_SUBLANES, (1, 1, 1), mode="promise_in_bounds")
    return found.reshape(-1, index.shape[2])


def repeated_lanes(x: jax.Array, times: int) -> jax.Array:
    """Repeat each lane, for a power of two."""
    if times == 1:
        return x
    lane = lax.broadcasted_iota(jnp.int32, (x.shape[0], LANES), 1) // times
    groups = range(x.shape[1] * times // LANES)
    return joined(
        [
            gathered(x[:, g // times * LANES : (g // times + 1) * LANES], lane + g % times * (LANES // times))
            for g in groups
        ]
    )


def lanes(x: jax.Array, index: jax.Array) -> jax.Array:
    """`x[:, index]` for an index of 128 lanes. The chip gathers inside of 128 lanes, so each 128 are tried."""
    count = x.shape[0]
    if count == 1:  # which would be another kind of gather
        x = jnp.broadcast_to(x, (SUBLANES, x.shape[1]))
    lane, group = (jnp.broadcast_to(i, (x.shape[0], LANES)) for i in (index & LANES - 1, index >> 7))
    found = None
    for start in range(0, x.shape[1], LANES):
        here = gathered(x[:, start : start + LANES], lane)
        found = here if found is None else jnp.where(group == start // LANES, here, found)
    assert found is not None
    return found[:count]


def interleaved(x: jax.Array, count: int) -> jax.Array:
    """Reorder planes that lie side by side to the order of columns."""
    if count == 1:
        return x
    size, lane = x.shape[1] // count, lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
    groups = []
    for start in range(0, x.shape[1], LANES):
        # 128 columns lie in 128 lanes of each plane.
        first = start // count // LANES * LANES
        found = jnp.zeros((x.shape[0], LANES), x.dtype)
        for j in range(count):
            plane = x[:, j * size + first : j * size + first + LANES]
            found = jnp.where(lane % count == j, lanes(plane, (start + lane) // count - first), found)
        groups.append(found)
    return joined(groups)


def deinterleaved(x: jax.Array, count: int) -> jax.Array:
    """Reorder columns to planes side by side."""
    if count == 1:
        return x
    lane = lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
    groups = []
    for j in range(count):
        for start in range(0, x.shape[1], count * LANES):
            groups.append(lanes(x[:, start : start + count * LANES], lane * count + j))
    return joined(groups)
