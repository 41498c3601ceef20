"""Rules of PermutedArray: the stored array is multiplied, moved and cast, and its order follows.

A product along the permuted axis takes x in the stored order; along another axis, the result is put back in order.
What would split the permuted axis returns NotImplemented and goes dense under the policy.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lowbit.formats.permuted import PermutedArray, inverse, taken
from lowbit.runtime import is_implicit, register, run

# --- products


@register("dot_general")
def _(x: jax.Array, w: PermutedArray, *, dimension_numbers: Any, **params: Any) -> Any:
    (x_sum, w_sum), (x_batch, w_batch) = dimension_numbers
    return _product(x, w, (x_sum, w_sum), (x_batch, w_batch), **params)


@register("dot_general")
def _(w: PermutedArray, x: jax.Array, *, dimension_numbers: Any, **params: Any) -> Any:
    (w_sum, x_sum), (w_batch, x_batch) = dimension_numbers
    return _product(x, w, (x_sum, w_sum), (x_batch, w_batch), weight_first=True, **params)


def _product(
    x: jax.Array,
    w: PermutedArray,
    summed: tuple[Sequence[int], Sequence[int]],
    batch: tuple[Sequence[int], Sequence[int]],
    *,
    weight_first: bool = False,
    **params: Any,
) -> Any:
    axis, layers = w.ndim + w.axis, range(w.layers)
    if axis in summed[1]:
        return _along(x, w, summed, batch, weight_first, params)
    axes = _result_axes(x, w, summed, batch, weight_first)
    if axis in batch[1] or any(layer in summed[1] for layer in layers):
        return NotImplemented  # a layer that is summed over would need the results of each layer apart
    y = _stored_product(x, w.array, summed, batch, weight_first, params)
    place = [axes.index(("w", a)) for a in (*layers, axis)]
    return taken(y, inverse(w.order), place[-1], place[:-1])


def _along(x: jax.Array, w: PermutedArray, summed: Any, batch: Any, weight_first: bool, params: dict[str, Any]) -> Any:
    """The product along the permuted axis: x is taken in the stored order."""
    axis, layers = w.ndim + w.axis, range(w.layers)
    wanted = _result_axes(x, w, summed, batch, weight_first)
    # A layer axis that x lacks becomes a batch axis, since x has another order in each layer.
    own = [layer for layer in layers if layer not in (*summed[1], *batch[1])]
    if own and params.get("out_sharding") is not None:
        return NotImplemented
    x = jnp.broadcast_to(x, (*(w.shape[a] for a in own), *x.shape))
    summed = [a + len(own) for a in summed[0]], summed[1]
    batch = [*range(len(own)), *(a + len(own) for a in batch[0])], [*own, *batch[1]]
    partner = dict(zip((*summed[1], *batch[1]), (*summed[0], *batch[0]), strict=True))
    x = taken(x, w.order, partner[axis], [partner[layer] for layer in layers])
    y = _stored_product(x, w.array, summed, batch, weight_first, params)
    if not own:
        return y
    # The axes of x are counted with those that it got.
    wanted = [(which, a + len(own) if which == "x" else a) for which, a in wanted]
    found = _result_axes(x, w, summed, batch, weight_first)
    return lax.transpose(y, [found.index(each) for each in wanted])


def _result_axes(x: jax.Array, w: Any, summed: Any, batch: Any, weight_first: bool) -> list[tuple[str, int]]:
    """Which axis of x or w each axis of a product is."""
    of_x = [("x", a) for a in range(x.ndim) if a not in (*summed[0], *batch[0])]
    of_w = [("w", a) for a in range(w.ndim) if a not in (*summed[1], *batch[1])]
    return [*(("w", a) for a in batch[1]), *(of_w + of_x if weight_first else of_x + of_w)]


def _stored_product(x: Any, array: Any, summed: Any, batch: Any, weight_first: bool, params: dict[str, Any]) -> Any:
    def product(x: Any, array: Any) -> Any:
        if weight_first:
            return lax.dot_general(array, x, (summed[::-1], batch[::-1]), **params)
        return lax.dot_general(x, array, (summed, batch), **params)

    return run(product, x, array)


@register("ragged_dot_general")
def _(
    x: jax.Array, w: PermutedArray, group_sizes: jax.Array, *, ragged_dot_dimension_numbers: Any, **params: Any
) -> Any:
    """Experts in groups of rows: each row is taken in the order of its expert."""
    dims = ragged_dot_dimension_numbers
    (x_sum, w_sum), batch = dims.dot_dimension_numbers
    plain = (tuple(x_sum), batch, dims.lhs_ragged_dimensions, dims.rhs_group_dimensions)
    if plain != ((1,), ((), ()), (0,), (0,)) or (x.ndim, w.ndim) != (2, 3) or params.get("group_offset") is not None:
        return NotImplemented
    expert = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(x.shape[0]), side="right")

    def product(x: Any, array: Any) -> Any:
        return lax.ragged_dot_general(x, array, group_sizes, dims, **params)

    def by_row(rows: jax.Array, order: jax.Array) -> jax.Array:
        if not w.layers:
            return taken(rows, order, 1, ())
        return taken(rows, jnp.take(order, expert, axis=0, mode="clip"), 1, (0,))

    if w.ndim + w.axis in w_sum:
        return run(product, by_row(x, w.order), w.array)
    return by_row(run(product, x, w.array), inverse(w.order))


# --- structural operations on other axes


def _moved(w: PermutedArray, fn: Callable[[Any], Any], axis: int, order: jax.Array) -> Any:
    """`fn` of the stored array, which has the permuted axis at `axis`, in this order."""
    return _with(w, run(fn, w.array), axis, order)


def _with(w: PermutedArray, array: Any, axis: int, order: jax.Array) -> Any:
    if is_implicit(array):
        return w.replace(array=array, order=order, axis=axis - array.ndim)
    return taken(array, inverse(order), axis, range(order.ndim - 1))


@register("transpose")
def _(w: PermutedArray, *, permutation: Sequence[int]) -> Any:
    front, axis = list(permutation[: w.layers]), permutation.index(w.ndim + w.axis)
    if sorted(front) != list(range(w.layers)):
        return NotImplemented
    order = lax.transpose(w.order, [*front, w.layers])
    return _moved(w, lambda array: lax.transpose(array, permutation), axis, order)


@register("squeeze")
def _(w: PermutedArray, *, dimensions: Sequence[int]) -> Any:
    axis = w.ndim + w.axis
    if axis in dimensions:
        return NotImplemented
    order = lax.squeeze(w.order, [a for a in dimensions if a < w.layers])
    axis -= sum(a < axis for a in dimensions)
    return _moved(w, lambda array: lax.squeeze(array, dimensions), axis, order)


@register("broadcast_in_dim")
def _(w: PermutedArray, *, shape: Sequence[int], broadcast_dimensions: Sequence[int], sharding: Any = None) -> Any:
    del sharding  # it follows from the components
    place, length = list(broadcast_dimensions), w.shape[w.axis]
    axis = place[w.axis]
    if shape[axis] != length:
        return NotImplemented
    layers = place[w.layers - 1] + 1 if w.layers else place[0]  # a new first axis is a layer axis
    order = lax.broadcast_in_dim(w.order, (*shape[:layers], length), (*place[: w.layers], layers))
    return _moved(w, lambda array: lax.broadcast_in_dim(array, shape, broadcast_dimensions), axis, order)


@register("reshape")
def _(w: PermutedArray, *, new_sizes: Sequence[int], dimensions: Any = None, sharding: Any = None) -> Any:
    del sharding  # it follows from the components
    length, sizes = w.shape[w.axis], [math.prod(new_sizes[:i]) for i in range(len(new_sizes))]
    before, above = math.prod(w.shape[: w.ndim + w.axis]), math.prod(w.shape[: w.layers])
    # The permuted axis stays one, and no new axis mixes layers with others.
    places = [i for i, size in enumerate(sizes) if size == before and new_sizes[i] == length]
    ends = [i for i, size in enumerate(sizes) if size == above and places and i <= places[0]]
    if dimensions is not None or not ends or not w.size:
        return NotImplemented
    order = w.order.reshape(*new_sizes[: ends[-1]], length)
    return _moved(w, lambda array: lax.reshape(array, new_sizes), places[0], order)


@register("slice")
def _(w: PermutedArray, *, start_indices: Any, limit_indices: Any, strides: Any) -> Any:
    axis, strides = w.ndim + w.axis, strides or [1] * w.ndim
    if (start_indices[axis], limit_indices[axis], strides[axis]) != (0, w.shape[axis], 1):
        return NotImplemented
    ends = zip((start_indices, limit_indices, strides), (0, w.shape[axis], 1), strict=True)
    order = lax.slice(w.order, *([*bound[: w.layers], end] for bound, end in ends))
    return _moved(w, lambda array: lax.slice(array, start_indices, limit_indices, strides), axis, order)


@register("dynamic_slice")
def _(w: PermutedArray, *starts: jax.Array, slice_sizes: Sequence[int]) -> Any:
    axis = w.ndim + w.axis
    if slice_sizes[axis] != w.shape[axis]:
        return NotImplemented
    at = [*starts[: w.layers], jnp.zeros_like(starts[0])]
    order = lax.dynamic_slice(w.order, at, [*slice_sizes[: w.layers], w.shape[axis]])
    return _moved(w, lambda array: lax.dynamic_slice(array, starts, slice_sizes), axis, order)


def _sections(w: PermutedArray, sizes: Sequence[int], axis: int, squeeze: bool = False) -> Any:
    """The array split along an axis that is not the permuted one."""
    if axis == w.ndim + w.axis:
        return NotImplemented

    def section(array: Any, i: int) -> Any:
        start = sum(sizes[:i])
        found = lax.slice_in_dim(array, start, start + sizes[i], axis=axis)
        return lax.squeeze(found, (axis,)) if squeeze else found

    return [run(partial(section, i=i), w) for i in range(len(sizes))]


@register("split")
def _(w: PermutedArray, *, sizes: Sequence[int], axis: int) -> Any:
    return _sections(w, sizes, axis)


@register("unstack")
def _(w: PermutedArray, *, axis: int) -> Any:
    return _sections(w, [1] * w.shape[axis], axis, squeeze=True)


@register("concatenate")
def _(*operands: PermutedArray, dimension: int) -> Any:
    first = operands[0]
    axis, orders = first.ndim + first.axis, [w.order for w in operands]
    if dimension == axis or any((w.axis, w.layers) != (first.axis, first.layers) for w in operands):
        return NotImplemented
    if dimension < first.layers:
        order = lax.concatenate(orders, dimension)
    elif all(order is first.order for order in orders):
        order = first.order
    else:
        return NotImplemented  # whether the orders are equal is not known
    array = run(lambda *arrays: lax.concatenate(arrays, dimension), *(w.array for w in operands))
    return _with(first, array, axis, order)


@register("stack")
def _(*operands: PermutedArray, axis: int) -> Any:
    def stacked(*arrays: Any) -> Any:
        return lax.concatenate([lax.expand_dims(array, (axis,)) for array in arrays], axis)

    return run(stacked, *operands)


# --- rows and layers by index


@register("gather")
def _(
    w: PermutedArray,
    indices: jax.Array,
    *,
    dimension_numbers: Any,
    slice_sizes: Any,
    mode: Any,
    fill_value: Any,
    **hints: Any,
) -> Any:
    many, axis = indices.ndim - 1, w.ndim + w.axis
    rows = lax.GatherDimensionNumbers(tuple(range(many, many + w.ndim - 1)), (0,), (0,))
    if dimension_numbers != rows or tuple(slice_sizes[1:]) != w.shape[1:]:
        return NotImplemented

    def taken_rows(array: Any, indices: jax.Array, fill_value: Any = fill_value) -> Any:
        dims = lax.GatherDimensionNumbers(tuple(range(many, many + array.ndim - 1)), (0,), (0,))
        sizes = (1, *array.shape[1:])
        return lax.gather(array, indices, dims, sizes, mode=mode, fill_value=fill_value, **hints)

    if axis == 0:
        length = w.shape[0]
        inside = jnp.clip(indices, 0, length - 1)
        known = (indices == inside) | (mode == lax.GatherScatterMode.CLIP)
        return run(taken_rows, w.array, jnp.where(known, inverse(w.order)[inside], indices))
    # A layer that is filled has equal elements, so that any order does.
    order = taken_rows(w.order, indices, 0) if w.layers else w.order
    return _moved(w, lambda array: taken_rows(array, indices), axis - 1 + many, order)


# --- dtype


@register("convert_element_type")
def _(w: PermutedArray, *, new_dtype: Any, weak_type: bool = False, sharding: Any = None) -> Any:
    del weak_type, sharding  # weak types are for scalars; the sharding follows from the components
    if not jnp.issubdtype(new_dtype, jnp.floating):
        return NotImplemented
    return w.replace(array=run(lambda array: lax.convert_element_type(array, new_dtype), w.array))
