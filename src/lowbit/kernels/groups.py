"""Products of groups of rows, each with its own matrix: the experts of a mixture.

Rows are divided into tiles, and a tile that has rows of several groups is visited once for each of them. A *step* is
one visit: it multiplies a tile by one matrix and keeps the rows of that group. There are at most as many steps as
tiles and groups, which a compiled program can know; which tile and which matrix a step has depends on the sizes.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lowbit.runtime._compat import match_varying

from .product import Product


class Steps(NamedTuple):
    """For each step: its tile, its matrix (-1 if these rows are in no group), and its first row and the one behind."""

    tile: jax.Array
    matrix: jax.Array
    begin: jax.Array
    end: jax.Array


def group_sizes(product: Product) -> jax.Array:
    """How many rows each group has, of shape (matrices of the batch, groups), where all rows are one axis."""
    sizes = jnp.asarray(product.sizes).astype(jnp.int32) * math.prod(product.rows[1:])
    return sizes.reshape(math.prod(product.batch), product.w.shape[-3])


def _ends(product: Product) -> tuple[jax.Array, jax.Array]:
    """The row behind each group in all rows of the batch, and its matrix. The rows in no group are a group with -1."""
    sizes, rows = group_sizes(product), math.prod(product.rows)
    batch, groups = sizes.shape
    ends = jnp.minimum(jnp.cumsum(jnp.maximum(sizes, 0), axis=1), rows)
    ends = jnp.pad(ends, ((0, 0), (0, 1)), constant_values=rows) + rows * jnp.arange(batch, dtype=jnp.int32)[:, None]
    numbers = jnp.arange(batch * groups, dtype=jnp.int32).reshape(batch, groups)
    return ends.reshape(-1), jnp.pad(numbers, ((0, 0), (0, 1)), constant_values=-1).reshape(-1)


def _count_below(bounds: jax.Array, values: jax.Array) -> jax.Array:
    """For each value, how many bounds are at most as large. A primitive cannot hold `searchsorted` in every JAX."""
    return jnp.sum(bounds <= values[:, None], axis=1, dtype=jnp.int32)


def step_count(product: Product, tile: int) -> int:
    """How many steps there are at most: one for each tile, and one more for each change of the group."""
    batch = math.prod(product.batch)
    return -(-batch * math.prod(product.rows) // tile) + batch * (product.w.shape[-3] + 1) - 1


def steps_of(product: Product, tile: int) -> Steps:
    """The steps of a product, for tiles of so many rows of the whole batch. The last steps may be empty."""
    ends, numbers = _ends(product)
    begins = jnp.concatenate([jnp.zeros(1, ends.dtype), ends[:-1]])
    first = begins // tile
    visits = jnp.where(ends > begins, (ends - 1) // tile - first + 1, 0)
    visited = jnp.cumsum(visits)
    tiles = -(-math.prod(product.batch) * math.prod(product.rows) // tile)
    step = jnp.arange(step_count(product, tile), dtype=jnp.int32)
    group = jnp.minimum(_count_below(visited, step), ends.size - 1)
    at = jnp.minimum(first[group] + step - (visited - visits)[group], tiles - 1)
    is_real = step < visited[-1]
    begin = jnp.maximum(begins[group], at * tile)
    end = jnp.minimum(ends[group], (at + 1) * tile)
    return Steps(at, numbers[group], begin, jnp.where(is_real, end, begin))


def matrix_of_rows(product: Product) -> jax.Array:
    """The number of each row's matrix; some matrix for a row that is in no group."""
    ends, numbers = _ends(product)
    rows = jnp.arange(math.prod(product.batch) * math.prod(product.rows), dtype=jnp.int32)
    return jnp.maximum(numbers[_count_below(ends, rows)], 0)


def ragged(x: jax.Array, w: jax.Array, product: Product, **options: Any) -> jax.Array:
    """A product with dense matrices and the groups of `product`, in JAX's own primitive."""
    batch = len(product.batch)
    lead = tuple(range(batch))
    dims = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((x.ndim - 1,), (w.ndim + product.contract,)), (lead, lead)),
        lhs_ragged_dimensions=[batch],
        rhs_group_dimensions=[batch],
    )
    return lax.ragged_dot_general(x, w, jnp.asarray(product.sizes), dims, **options)


def by_groups(
    multiply: Callable[[jax.Array, Any], jax.Array], x: jax.Array, n: int, dtype: Any, product: Product
) -> jax.Array:
    """A product in plain JAX, step by step, with the groups of `product`.

    `multiply(rows, i)` multiplies some rows of x, which has two axes, by matrix i, and gives n columns.
    """
    rows, groups = x.shape[0], product.w.shape[-3]
    if rows * groups * n == 0:
        return jnp.zeros((rows, n), dtype)
    # About as many tiles as groups: a matrix is read twice on average.
    tile = min(-(-rows // groups) + 7 & ~7, rows)
    steps = steps_of(product, tile)
    short = -rows % tile
    x = jnp.pad(x, ((0, short), (0, 0)))

    def step(y: jax.Array, step: Steps) -> tuple[jax.Array, None]:
        start = step.tile * tile
        some = multiply(lax.dynamic_slice_in_dim(x, start, tile), jnp.maximum(step.matrix, 0))
        row = start + jnp.arange(tile, dtype=jnp.int32)[:, None]
        mine = (row >= step.begin) & (row < step.end) & (step.matrix >= 0)
        kept = lax.dynamic_slice_in_dim(y, start, tile)
        return lax.dynamic_update_slice_in_dim(y, jnp.where(mine, some, kept), start, 0), None

    zeros = jnp.zeros((rows + short, n), dtype)
    zeros, *_ = match_varying([zeros, x, *jax.tree.leaves(product)])
    return lax.scan(step, zeros, steps)[0][:rows]
