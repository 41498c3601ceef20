"""Products: rewrite any contraction as x[*batch, *rows, k] against one stored axis of the weight."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from lowbit.formats.blocks import span_of
from lowbit.formats.quantized import QuantizedArray
from lowbit.kernels.product import Product
from lowbit.ops.matmul import matmul
from lowbit.runtime import register

from .structural import permuted, reshaped, untransposed


@register("dot_general")
def _(x: jax.Array, w: QuantizedArray, *, dimension_numbers: Any, **params: Any) -> Any:
    (x_sum, w_sum), (x_batch, w_batch) = dimension_numbers
    return product(x, w, (x_sum, w_sum), (x_batch, w_batch), **params)


@register("dot_general")
def _(w: QuantizedArray, x: jax.Array, *, dimension_numbers: Any, **params: Any) -> Any:
    (w_sum, x_sum), (w_batch, x_batch) = dimension_numbers
    # The free axes of the weight come first in the result.
    return product(x, w, (x_sum, w_sum), (x_batch, w_batch), weight_first=True, **params)


def product(
    x: jax.Array,
    w: QuantizedArray,
    summed: tuple[Sequence[int], Sequence[int]],
    batch: tuple[Sequence[int], Sequence[int]],
    *,
    precision: Any,
    preferred_element_type: Any,
    out_sharding: Any = None,
    weight_first: bool = False,
    groups: Any = None,
    **params: Any,
) -> Any:
    if any(value is not None for value in params.values()):
        return NotImplemented
    dtype = preferred_element_type or jnp.promote_types(x.dtype, w.dtype)
    layers = 0 if w.index is None else w.index.ndim
    group = [] if groups is None else [groups.axis]
    if sorted([*batch[1], *group])[:layers] != list(range(layers)):
        w = w.resolved()
    # Axes in stored order, so that the weight is not moved.
    stored = [w.swapped(a - w.ndim) + w.ndim for a in range(w.ndim)]
    partner = dict(zip((*batch[1], *summed[1]), (*batch[0], *summed[0]), strict=True))
    w_batch = [a for a in stored if a in batch[1]]
    w_sum = [a for a in stored if a in summed[1]]
    w_free = [a for a in stored if a not in (*partner, *group)]
    matrix, contract = _as_matrix(w, stored, [*w_batch, *group], w_sum, w_free)
    if matrix is NotImplemented:
        # Axes can be merged only if those that share a scale come last.
        def covered(a: int) -> float:
            length = max(w.shape[a], 1)
            return min(span_of(w.spans, w.swapped(a - w.ndim)) or length, length) / length

        w_sum, w_free = sorted(w_sum, key=covered), sorted(w_free, key=covered)
        matrix, contract = _as_matrix(w, stored, [*w_batch, *group], w_sum, w_free)
    if matrix is NotImplemented or (groups and any(span != 1 for span in matrix.spans[:-2])):
        return NotImplemented
    x_batch, x_sum = ([partner[a] for a in axes] for axes in (w_batch, w_sum))
    kept = [a for a in range(x.ndim) if a not in (*x_batch, *x_sum)]
    x_free = kept if groups is None else sorted(kept, key=lambda a: a != groups.rows)
    free_shape = [w.shape[a] for a in w_free]

    rows = lax.transpose(x, [*x_batch, *x_free, *x_sum])
    rows = rows.reshape(*rows.shape[: rows.ndim - len(x_sum)], matrix.shape[contract])
    # Positions of the result's axes in (batch, rows, free).
    found = {("w", a): i for i, a in enumerate(w_batch)}
    found |= {("x", a): len(w_batch) + i for i, a in enumerate(x_free)}
    found |= {("w", a): len(w_batch) + len(x_free) + i for i, a in enumerate(w_free)}
    of_x, of_w = [("x", a) for a in kept], [("w", a) for a in sorted(w_free)]
    wanted = [*(("w", a) for a in batch[1]), *(of_w + of_x if weight_first else of_x + of_w)]
    order = [found[axis] for axis in wanted]
    if out_sharding is not None:
        if len(w_free) > 1:
            return NotImplemented
        out_sharding = _unordered(out_sharding, order, 1 - len(w_free))
    sizes = None if groups is None else groups.ordered([batch[1].index(a) for a in w_batch], rows.shape)
    y = matmul(Product(rows, matrix, contract, dtype, precision, out_sharding, sizes=sizes))
    if len(w_free) != 1:
        y = y.reshape(*y.shape[:-1], *free_shape)
    return lax.transpose(y, order)


def _unordered(sharding: NamedSharding, order: Sequence[int], more: int) -> NamedSharding:
    """A sharding of the result, for its axes before they are put in this order, and for so many more behind them."""
    spec = [*sharding.spec, *[None] * (len(order) - len(sharding.spec))]
    spec = [spec[order.index(i)] for i in range(len(order))] + [None] * more
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))


def _as_matrix(
    w: QuantizedArray, stored: list[int], batch: list[int], summed: list[int], free: list[int]
) -> tuple[Any, int]:
    """The weight stored as (*batch, k, n) or (*batch, n, k), whichever it is already, and the axis of k."""
    contract = -1 if summed and stored == [*batch, *free, *summed] else -2
    order = [*batch, *free, *summed] if contract == -1 else [*batch, *summed, *free]
    matrix = w.replace(transposed=False) if stored == order else untransposed(permuted(w, order))
    if len(summed) == len(free) == 1:
        return matrix, contract
    k, n = (math.prod(w.shape[a] for a in axes) for axes in (summed, free))
    matrix = reshaped(matrix, [*(w.shape[a] for a in batch), *((n, k) if contract == -1 else (k, n))])
    return matrix if matrix is NotImplemented else untransposed(matrix), contract


@dataclass(frozen=True)
class Groups:
    """Groups of rows, each with its own matrix: the axis of x that is grouped, that of the matrices in w, and sizes."""

    rows: int
    axis: int
    sizes: jax.Array

    def ordered(self, batch: Sequence[int], shape: Sequence[int]) -> jax.Array:
        """The sizes for each entry of the batch, its axes in this order; all entries may share them."""
        if self.sizes.ndim == 1:
            return jnp.broadcast_to(self.sizes, (*shape[: len(batch)], *self.sizes.shape))
        return lax.transpose(self.sizes, [*batch, len(batch)])


@register("ragged_dot_general")
def _(
    x: jax.Array,
    w: QuantizedArray,
    group_sizes: jax.Array,
    *,
    ragged_dot_dimension_numbers: Any,
    group_offset: Any = None,
    **params: Any,
) -> Any:
    dims = ragged_dot_dimension_numbers
    summed, batch = dims.dot_dimension_numbers
    (rows,), axes = dims.lhs_ragged_dimensions, dims.rhs_group_dimensions
    sizes = jnp.asarray(group_sizes)
    # Without an axis of groups in w, the summed or a batch axis is ragged.
    if len(axes) != 1 or sizes.ndim not in (1, len(batch[0]) + 1) or group_offset is not None:
        return NotImplemented
    return product(x, w, summed, batch, groups=Groups(rows, axes[0], sizes), **params)
