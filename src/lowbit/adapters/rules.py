"""Rules of LoraArray: a product becomes two, and other operations act on the base and on the factors."""

import math
import string
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from lowbit.runtime import dense, register

from .array import BOTH, OF_A, OF_B, LoraArray, apply

# --- products


@register("dot_general")
def _(x: jax.Array, w: LoraArray, **params: Any) -> Any:
    return _product(x, w, **params)


@register("dot_general")
def _(w: LoraArray, x: jax.Array, *, dimension_numbers: Any, **params: Any) -> Any:
    return _product(
        x, w, dimension_numbers=tuple(side[::-1] for side in dimension_numbers), weight_first=True, **params
    )


def _product(
    x: jax.Array,
    w: LoraArray,
    *,
    dimension_numbers: Any,
    precision: Any,
    preferred_element_type: Any,
    out_sharding: Any = None,
    weight_first: bool = False,
    **params: Any,
) -> Any:
    """`x @ base + (x @ a) @ b`, or with the factors swapped. `dimension_numbers` are those of x, then of w."""
    if any(value is not None for value in params.values()):
        return NotImplemented
    (x_sum, w_sum), (x_batch, w_batch) = dimension_numbers
    dtype = preferred_element_type or jnp.promote_types(x.dtype, w.dtype)
    wide = jnp.promote_types(dtype, jnp.float32)  # only the sum is rounded, and no gradient of a factor

    def with_base(x: Any, base: Any) -> Any:
        options: Any = {"precision": precision, "preferred_element_type": wide, "out_sharding": out_sharding}
        if weight_first:
            return lax.dot_general(base, x, tuple(side[::-1] for side in dimension_numbers), **options)
        return lax.dot_general(x, base, dimension_numbers, **options)

    # Name each axis by a letter, as in an einsum.
    letters = iter(string.ascii_letters)
    rank, of_w, of_x = next(letters), [next(letters) for _ in w.shape], [next(letters) for _ in x.shape]
    for i, j in zip((*x_sum, *x_batch), (*w_sum, *w_batch), strict=True):
        of_x[i] = of_w[j]
    summed, batch = [of_w[j] for j in w_sum], [of_w[j] for j in w_batch]
    free = [[c for c in side if c not in (*summed, *batch)] for side in (of_x, of_w)]
    out = [*batch, *(free[1] + free[0] if weight_first else free[0] + free[1])]
    factors = [
        (w.a, [*(c for c, role in zip(of_w, w.roles, strict=True) if role != OF_B), rank]),
        (w.b, [*of_w[: w.layers], rank, *of_w[w.layers + w.inputs :]]),
    ]
    # Multiply by the factor with the contracted axes first: that leaves `rank` values per row.
    roles = {w.roles[j] for j in w_sum}
    near, far = factors[::-1] if OF_B in roles and OF_A not in roles else factors
    between = [c for c in dict.fromkeys((*of_x, *near[1])) if c in far[1] or c in out]
    specs: dict[str, Any] = {}
    if out_sharding is not None:
        entry = dict(zip(out, (*out_sharding.spec, *[None] * len(out)), strict=False))
        specs["out_sharding"] = NamedSharding(out_sharding.mesh, PartitionSpec(*(entry.get(c) for c in between)))
    few = _einsum(x, near, of_x, between, wide, precision=precision, **specs) * w.scale
    if out_sharding is not None:
        specs["out_sharding"] = out_sharding
    delta = _einsum(few, far, between, out, wide, precision=precision, **specs)
    return (apply(with_base, x, w.base) + delta).astype(dtype)


def _einsum(x: Any, factor: Any, of_x: Any, out: Any, dtype: Any, **options: Any) -> jax.Array:
    array, letters = factor
    equation = f"{''.join(of_x)},{''.join(letters)}->{''.join(out)}"
    return jnp.einsum(equation, x.astype(dtype), array.astype(dtype), **options)


@register("ragged_dot_general")
def _(
    x: jax.Array,
    w: LoraArray,
    group_sizes: jax.Array,
    *,
    ragged_dot_dimension_numbers: Any,
    precision: Any,
    preferred_element_type: Any,
    group_offset: Any = None,
) -> Any:
    dims = ragged_dot_dimension_numbers
    given = dims.dot_dimension_numbers, dims.lhs_ragged_dimensions, dims.rhs_group_dimensions
    if _tuples(given) != ((((1,), (1,)), ((), ())), (0,), (0,)) or w.roles != BOTH + OF_A + OF_B:
        return NotImplemented

    dtype = preferred_element_type or jnp.promote_types(x.dtype, w.dtype)
    wide = jnp.promote_types(dtype, jnp.float32)  # as for other products

    def product(x: jax.Array, w: Any) -> jax.Array:
        options: Any = {"precision": precision, "preferred_element_type": wide, "group_offset": group_offset}
        return lax.ragged_dot_general(x, w, group_sizes, dims, **options)

    few = product(x.astype(wide), w.a.astype(wide)) * w.scale
    return (apply(product, x, w.base) + product(few, w.b.astype(wide))).astype(dtype)


@register("conv_general_dilated")
def _(
    x: jax.Array,
    w: LoraArray,
    *,
    dimension_numbers: Any,
    feature_group_count: int,
    batch_group_count: int,
    preferred_element_type: Any,
    **params: Any,
) -> Any:
    """A convolution with the base, and one with the factor that has the window, whose outputs the other one mixes."""
    outputs = dimension_numbers.rhs_spec[0]
    roles = "".join(role for i, role in enumerate(w.roles) if i != outputs)
    if batch_group_count != 1 or w.layers or w.roles[outputs] in roles:
        return NotImplemented
    dtype = preferred_element_type or jnp.promote_types(x.dtype, w.dtype)
    wide = jnp.promote_types(dtype, jnp.float32)  # as for products

    def convolved(x: jax.Array, kernel: Any) -> jax.Array:
        return lax.conv_general_dilated_p.bind(
            x,
            kernel,
            dimension_numbers=dimension_numbers,
            feature_group_count=feature_group_count,
            batch_group_count=1,
            preferred_element_type=wide,
            **params,
        )

    near, far = (w.a, w.b) if w.roles[outputs] == OF_B else (w.b, w.a.T)
    # Each group of inputs has outputs of its own, and so it has `rank` of them here.
    few = convolved(x.astype(wide), jnp.concatenate([near.astype(wide)] * feature_group_count, outputs)) * w.scale
    features = dimension_numbers.out_spec[1]
    few = jnp.moveaxis(few, features, -1)
    few = few.reshape(*few.shape[:-1], feature_group_count, w.rank)
    delta = jnp.einsum("...gr,rgo->...go", few, far.astype(wide).reshape(w.rank, feature_group_count, -1))
    delta = jnp.moveaxis(delta.reshape(*delta.shape[:-2], -1), -1, features)
    return (apply(convolved, x, w.base) + delta).astype(dtype)


def _tuples(x: Any) -> Any:
    return tuple(map(_tuples, x)) if isinstance(x, tuple | list) else x


# --- structural operations: each acts on an axis of the base and of the factors that have it


def _moved(
    w: LoraArray, roles: str, fn: Callable[[Any], Any], move: Callable[[jax.Array, list[int], list[int]], jax.Array]
) -> Any:
    """`fn(base)`, whose axes have these roles, with factors from `move(factor, axes before, axes after)`.

    The axes are those of the whole array that the factor has. The rank is the last axis of the factor.
    """
    layers, of_a, of_b = (roles.count(role) for role in (BOTH, OF_A, OF_B))
    if roles not in (BOTH * layers + OF_A * of_a + OF_B * of_b, BOTH * layers + OF_B * of_b + OF_A * of_a):
        return NotImplemented

    def after(factor: jax.Array, role: str) -> jax.Array:
        has, keeps = ([i for i, r in enumerate(old_or_new) if r in (BOTH, role)] for old_or_new in (w.roles, roles))
        return move(factor, has, keeps)

    a, b = after(w.a, OF_A), after(jnp.moveaxis(w.b, w.layers, -1), OF_B)
    base = apply(fn, w.base)
    if not roles:  # one element
        return (dense(base) + w.scale * jnp.sum(a * b)).astype(w.dtype)
    if OF_B + OF_A in roles:  # W.T = b.T @ a.T
        a, b, of_a = b, a, of_b
    return LoraArray(base, a, jnp.moveaxis(b, -1, layers), w.scale, of_a)


def _in_shape(shape: Sequence[int]) -> Callable[..., jax.Array]:
    return lambda factor, has, keeps: factor.reshape(*(shape[i] for i in keeps), factor.shape[-1])


@register("transpose")
def _(w: LoraArray, *, permutation: Sequence[int]) -> Any:
    def move(factor: jax.Array, has: list[int], keeps: list[int]) -> jax.Array:
        return lax.transpose(factor, [*(has.index(permutation[i]) for i in keeps), len(has)])

    roles = "".join(w.roles[p] for p in permutation)
    return _moved(w, roles, lambda base: lax.transpose(base, permutation), move)


@register("squeeze")
def _(w: LoraArray, *, dimensions: Sequence[int]) -> Any:
    kept = [i for i in range(w.ndim) if i not in dimensions]
    move = _in_shape([w.shape[i] for i in kept])
    return _moved(w, "".join(w.roles[i] for i in kept), lambda base: lax.squeeze(base, dimensions), move)


@register("broadcast_in_dim")
def _(w: LoraArray, *, shape: Sequence[int], broadcast_dimensions: Sequence[int], sharding: Any = None) -> Any:
    del sharding  # it follows from the components
    place, roles = dict(zip(broadcast_dimensions, w.roles, strict=True)), ""
    for i in range(len(shape)):  # a new axis has the role of the one before it; a new first axis is a layer axis
        roles += place.get(i, roles[-1:] or BOTH)

    def move(factor: jax.Array, has: list[int], keeps: list[int]) -> jax.Array:
        dims = [*(keeps.index(broadcast_dimensions[i]) for i in has), len(keeps)]
        return lax.broadcast_in_dim(factor, (*(shape[i] for i in keeps), factor.shape[-1]), dims)

    return _moved(w, roles, lambda base: lax.broadcast_in_dim(base, shape, broadcast_dimensions), move)


@register("reshape")
def _(w: LoraArray, *, new_sizes: Sequence[int], dimensions: Any = None, sharding: Any = None) -> Any:
    del sharding  # it follows from the components
    ends = [w.layers, w.layers + w.inputs, w.ndim]
    elements = [math.prod(w.shape[:end]) for end in ends]
    # No new axis may mix roles: find the new axes with as many elements before them as before the old boundaries.
    borders = [
        [i for i in range(len(new_sizes) + 1) if math.prod(new_sizes[:i]) == count][-1:] for count in elements[:2]
    ]
    if dimensions is not None or not all(borders) or not w.size:
        return NotImplemented
    (layers,), (first_of_b,) = ([0] if not w.layers else borders[0]), borders[1]
    roles = BOTH * layers + OF_A * (first_of_b - layers) + OF_B * (len(new_sizes) - first_of_b)
    return _moved(w, roles, lambda base: lax.reshape(base, new_sizes), _in_shape(new_sizes))


@register("slice")
def _(w: LoraArray, *, start_indices: Any, limit_indices: Any, strides: Any) -> Any:
    bounds = start_indices, limit_indices, strides or [1] * w.ndim

    def move(factor: jax.Array, has: list[int], keeps: list[int]) -> jax.Array:
        ends = 0, factor.shape[-1], 1
        return lax.slice(factor, *([*(bound[i] for i in has), end] for bound, end in zip(bounds, ends, strict=True)))

    return _moved(w, w.roles, lambda base: lax.slice(base, start_indices, limit_indices, strides), move)


@register("dynamic_slice")
def _(w: LoraArray, *starts: jax.Array, slice_sizes: Sequence[int]) -> Any:
    def move(factor: jax.Array, has: list[int], keeps: list[int]) -> jax.Array:
        at = [*(starts[i] for i in has), jnp.zeros_like(starts[0])]
        return lax.dynamic_slice(factor, at, [*(slice_sizes[i] for i in has), factor.shape[-1]])

    return _moved(w, w.roles, lambda base: lax.dynamic_slice(base, starts, slice_sizes), move)


@register("split")
def _(w: LoraArray, *, sizes: Sequence[int], axis: int) -> Any:
    def section(start: int, size: int) -> Any:
        limits = [start + size if i == axis else n for i, n in enumerate(w.shape)]
        return lambda w: lax.slice(w, [start if i == axis else 0 for i in range(w.ndim)], limits)

    return [apply(section(sum(sizes[:i]), size), w) for i, size in enumerate(sizes)]


@register("gather")
def _(
    w: LoraArray,
    indices: jax.Array,
    *,
    dimension_numbers: Any,
    slice_sizes: Any,
    mode: Any,
    fill_value: Any,
    **hints: Any,
) -> Any:
    """Rows by index, as in an embedding, or whole layers of a stack."""
    many, rest = indices.ndim - 1, tuple(slice_sizes[1:])
    plain = lax.GatherDimensionNumbers(tuple(range(many, many + w.ndim - 1)), (0,), (0,))
    if dimension_numbers != plain or rest != w.shape[1:] or w.roles[0] == OF_B:
        return NotImplemented

    def taken(array: Any, fill_value: Any) -> Any:
        dims = lax.GatherDimensionNumbers(tuple(range(many, many + array.ndim - 1)), (0,), (0,))
        sizes = (1, *array.shape[1:])
        return lax.gather(array, indices, dims, sizes, mode=mode, fill_value=fill_value, **hints)

    base = apply(lambda base: taken(base, fill_value), w.base)
    a = taken(w.a, 0)  # out of bounds, rows are those of the base only
    if w.is_stack:
        return LoraArray(base, a, taken(w.b, 0), w.scale, w.inputs)
    return LoraArray(base, a, w.b, w.scale, a.ndim - 1).materialize()


@register("convert_element_type")
def _(w: LoraArray, *, new_dtype: Any, weak_type: bool = False, sharding: Any = None) -> Any:
    del weak_type, sharding  # weak types are for scalars; the sharding follows from the components
    if not jnp.issubdtype(new_dtype, jnp.floating):
        return NotImplemented
    return w.replace(base=apply(lambda base: lax.convert_element_type(base, new_dtype), w.base))


# --- arithmetic with a number, which acts on the base and on one factor


def _scaled(w: LoraArray, number: jax.Array, op: Callable[[Any, Any], Any]) -> Any:
    if number.ndim:
        return NotImplemented
    return w.replace(base=apply(lambda base: op(base, number), w.base), b=op(w.b, number.astype(w.b.dtype)))


@register("mul")
def _(w: LoraArray, number: jax.Array) -> Any:
    return _scaled(w, number, lax.mul)


@register("div")
def _(w: LoraArray, number: jax.Array) -> Any:
    return _scaled(w, number, lax.div)


@register("neg")
def _(w: LoraArray) -> Any:
    return w.replace(base=apply(lax.neg, w.base), b=-w.b)
