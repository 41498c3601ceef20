"""Rules of ObservedArray: products are observed, and a structural operation acts on the weight and on its probes.

A primitive without a rule gets the dense weight, and the weight no statistic from it.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax import lax

from lowbit.runtime import register, run

from .observed import IN, OUT, STACK, ObservedArray, observed_look_up, observed_product, observed_rows

# --- products


@register("dot_general")
def _(x: jax.Array, w: ObservedArray, *, dimension_numbers: Any, **params: Any) -> Any:
    summed, batch = dimension_numbers
    return observed_product(x, w, lax.dot_general(x, w.base, dimension_numbers, **params), summed, batch)


@register("dot_general")
def _(w: ObservedArray, x: jax.Array, *, dimension_numbers: Any, **params: Any) -> Any:
    summed, batch = (side[::-1] for side in dimension_numbers)
    y = lax.dot_general(w.base, x, dimension_numbers, **params)
    return observed_product(x, w, y, summed, batch, weight_first=True)


@register("ragged_dot_general")
def _(
    x: jax.Array, w: ObservedArray, group_sizes: jax.Array, *, ragged_dot_dimension_numbers: Any, **params: Any
) -> Any:
    dims = ragged_dot_dimension_numbers
    summed, batch = dims.dot_dimension_numbers
    (rows,), groups = dims.lhs_ragged_dimensions, tuple(dims.rhs_group_dimensions)
    if groups != (0,) or tuple(map(tuple, batch)) != ((), ()) or rows in summed[0] or w.axes(STACK) != [0]:
        return NotImplemented
    y = lax.ragged_dot_general(x, w.base, group_sizes, dims, **params)
    return observed_product(x, w, y, summed, batch, sizes=group_sizes, groups=rows)


# --- structural operations

_Move = Callable[[jax.Array, list[int]], jax.Array]


def _moved(w: ObservedArray, base: jax.Array, roles: str, move: _Move) -> ObservedArray:
    """The array with this base, and each probe as `move(probe, the axes of the weight that it has)`."""
    stack, inputs = w.axes(STACK), w.axes(IN)
    moment = move(w.moment, [*stack, *inputs, *(inputs if w.full else ())])
    return dataclasses.replace(w, base=base, moment=moment, count=move(w.count, stack), roles=roles)


@register("transpose")
def _(w: ObservedArray, *, permutation: Sequence[int]) -> Any:
    place = {a: i for i, a in enumerate(permutation)}
    roles = "".join(w.axis_roles[a] for a in permutation)

    def move(probe: jax.Array, axes: list[int]) -> jax.Array:
        first = [axes.index(a) == i for i, a in enumerate(axes)]  # the second inputs of pairs come last
        key = [(not first[i], w.axis_roles[a] == IN, place[a]) for i, a in enumerate(axes)]
        return lax.transpose(probe, sorted(range(len(axes)), key=key.__getitem__))

    return _moved(w, lax.transpose(w.base, permutation), roles, move)


@register("squeeze")
def _(w: ObservedArray, *, dimensions: Sequence[int]) -> Any:
    roles = "".join(role for a, role in enumerate(w.axis_roles) if a not in dimensions)

    def move(probe: jax.Array, axes: list[int]) -> jax.Array:
        return lax.squeeze(probe, [i for i, a in enumerate(axes) if a in dimensions])

    return _moved(w, lax.squeeze(w.base, dimensions), roles, move)


@register("broadcast_in_dim")
def _(w: ObservedArray, *, shape: Sequence[int], broadcast_dimensions: Sequence[int], sharding: Any = None) -> Any:
    del sharding  # it follows from the components
    place = dict(zip(broadcast_dimensions, range(w.ndim), strict=True))
    if any(w.shape[a] != shape[to] and w.axis_roles[a] != OUT for to, a in place.items()):
        return NotImplemented
    roles = "".join(w.axis_roles[place[i]] if i in place else OUT for i in range(len(shape)))
    return _moved(w, lax.broadcast_in_dim(w.base, shape, broadcast_dimensions), roles, lambda probe, axes: probe)


@register("reshape")
def _(w: ObservedArray, *, new_sizes: Sequence[int], dimensions: Any = None, sharding: Any = None) -> Any:
    del sharding  # it follows from the components
    roles = _roles_after(w.shape, w.axis_roles, new_sizes) if dimensions is None and w.size else None
    if roles is None:
        return NotImplemented
    sizes = {role: [n for n, own in zip(new_sizes, roles, strict=True) if own == role] for role in (STACK, IN)}

    def move(probe: jax.Array, axes: list[int]) -> jax.Array:
        inputs = sizes[IN] * (axes.count(axes[-1]) if axes and w.axis_roles[axes[-1]] == IN else 0)
        return probe.reshape(*sizes[STACK], *inputs)

    return _moved(w, lax.reshape(w.base, new_sizes), roles, move)


def _roles_after(before: Sequence[int], roles: str, after: Sequence[int]) -> str | None:
    """The roles of the axes of a reshaped array; None if an axis would have several. Axes of size 1 are outputs."""
    found = [OUT] * len(after)
    old = [(n, role) for n, role in zip(before, roles, strict=True) if n > 1]
    new = [i for i, n in enumerate(after) if n > 1]
    while old and new:
        group, places = [old.pop(0)], [new.pop(0)]
        while (have := math.prod(n for n, _ in group)) != (want := math.prod(after[i] for i in places)):
            if have < want:
                group.append(old.pop(0))
            else:
                places.append(new.pop(0))
        if len({role for _, role in group}) > 1:
            return None
        for i in places:
            found[i] = group[0][1]
    return "".join(found)


@register("slice")
def _(w: ObservedArray, *, start_indices: Any, limit_indices: Any, strides: Any) -> Any:
    bounds = start_indices, limit_indices, strides or [1] * w.ndim

    def move(probe: jax.Array, axes: list[int]) -> jax.Array:
        return lax.slice(probe, *([bound[a] for a in axes] for bound in bounds))

    return _moved(w, lax.slice(w.base, *bounds), w.axis_roles, move)


@register("dynamic_slice")
def _(w: ObservedArray, *starts: jax.Array, slice_sizes: Sequence[int]) -> Any:
    def move(probe: jax.Array, axes: list[int]) -> jax.Array:
        return lax.dynamic_slice(probe, [starts[a] for a in axes], [slice_sizes[a] for a in axes]) if axes else probe

    return _moved(w, lax.dynamic_slice(w.base, starts, slice_sizes), w.axis_roles, move)


@register("split")
def _(w: ObservedArray, *, sizes: Sequence[int], axis: int) -> Any:
    def sections() -> Iterator[Any]:
        start = 0
        for size in sizes:
            limits = [start + size if a == axis else n for a, n in enumerate(w.shape)]
            begin = [start if a == axis else 0 for a in range(w.ndim)]
            yield run(lambda w, begin=begin, limits=limits: lax.slice(w, begin, limits), w)
            start += size

    return list(sections())


@register("gather")
def _(w: ObservedArray, indices: jax.Array, *, dimension_numbers: Any, slice_sizes: Any, **params: Any) -> Any:
    """Whole layers of a stack, no more than it has; and rows of a table, which are counted or weighted by gradients."""
    many = indices.ndim - 1
    plain = lax.GatherDimensionNumbers(tuple(range(many, many + w.ndim - 1)), (0,), (0,))
    rows = dimension_numbers.start_index_map == (0,) and dimension_numbers.collapsed_slice_dims == (0,)
    rows &= not dimension_numbers.operand_batching_dims and tuple(slice_sizes[1:]) == w.shape[1:]
    if rows and w.axis_roles == IN + OUT:
        y = lax.gather(w.base, indices, dimension_numbers, slice_sizes, **params)
        return observed_rows(indices, w, y, dimension_numbers.offset_dims[0])
    if rows and w.axis_roles == OUT + IN and w.guided:
        y = lax.gather(w.base, indices, dimension_numbers, slice_sizes, **params)
        return observed_look_up(w, y, dimension_numbers.offset_dims[0])
    whole = dimension_numbers == plain and rows
    if not whole or w.axis_roles[0] != STACK or math.prod(indices.shape[:-1]) > w.shape[0]:
        return NotImplemented

    def taken(array: jax.Array) -> jax.Array:
        dims = lax.GatherDimensionNumbers(tuple(range(many, many + array.ndim - 1)), (0,), (0,))
        return lax.gather(array, indices, dims, (1, *array.shape[1:]), **params)

    return _moved(w, taken(w.base), STACK * many + w.axis_roles[1:], lambda probe, axes: taken(probe))


# --- the same inputs: the values of the weight do not matter to its statistic


def _unary(primitive: Any, w: ObservedArray, **params: Any) -> Any:
    return dataclasses.replace(w, base=primitive.bind(w.base, **params))


for _name in ("convert_element_type", "neg", "reduce_precision", "stop_gradient"):
    register(_name)(_unary)


def _by_number(primitive: Any, w: ObservedArray, number: jax.Array, **params: Any) -> Any:
    if number.size != 1 or number.ndim > w.ndim:
        return NotImplemented
    return dataclasses.replace(w, base=primitive.bind(w.base, number, **params))


for _name in ("mul", "div"):
    register(_name)(_by_number)


@register("pvary")
def _(primitive: Any, w: ObservedArray, **params: Any) -> Any:
    # Each component by itself: JAX 0.7 cannot transpose one call on the weight, a constant, and its probes.
    if not primitive.multiple_results:
        return jax.tree.map(lambda component: primitive.bind(component, **params), w)
    return [jax.tree.map(lambda component: primitive.bind(component, **params)[0], w)]
