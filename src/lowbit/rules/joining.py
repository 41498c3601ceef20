"""Rules that join arrays, or write one into another, without changing their bits."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lowbit.formats.blocks import WHOLE, pack
from lowbit.formats.quantized import QuantizedArray
from lowbit.runtime import register

from .structural import expanded, full_spans, is_packed, sliced, squeezed, unpacked, untransposed


def alike(
    arrays: Sequence[Any], axes: Sequence[int] | None = None, *, but_for: Sequence[str] = ("lengths",)
) -> list[QuantizedArray] | None:
    """The arrays in one storage order, or None if their codes or scales have different meanings.

    `axes`: those along which elements are moved; default all.

    Scales of several dtypes are promoted, so that no value changes. Static fields named by `but_for` may differ.
    """
    if not all(type(a) is type(arrays[0]) for a in arrays):
        return None
    arrays = [a.resolved() for a in arrays]
    if len({a.transposed for a in arrays}) > 1:
        arrays = [untransposed(a) for a in arrays]
    touched = range(arrays[0].ndim) if axes is None else axes
    moved = [a.movable([a.swapped(axis - a.ndim) + a.ndim for axis in touched]) for a in arrays]
    # One array may have its scales decoded already.
    stored = {tuple((name, _is_float(x)) for name, x in a.components().items()) for a in moved}
    arrays = moved if len(stored) == 1 else [a.plain() for a in arrays]
    kinds = {jax.tree.structure(a.replace(**dict.fromkeys(but_for))) for a in arrays}
    if len(kinds) > 1:
        return None
    # Offsets may be floats in one array and zero points in units of the scale in another.
    if any(len({_is_float(getattr(a, name)) for a in arrays}) > 1 for name in arrays[0].components()):
        return None
    dtypes = {name: jnp.result_type(*(getattr(a, name).dtype for a in arrays)) for name in arrays[0].components()}
    return [
        a.replace(**{name: component.astype(dtypes[name]) for name, component in a.components().items()})
        for a in arrays
    ]


def _is_float(component: Any) -> bool:
    return bool(jnp.issubdtype(component.dtype, jnp.floating))


@register("concatenate")
def _(*operands: QuantizedArray, dimension: int) -> Any:
    return _concatenated(operands, dimension)


def _concatenated(operands: Sequence[QuantizedArray], dimension: int) -> Any:
    arrays = alike(operands, [dimension])
    if arrays is None:
        return NotImplemented
    first = arrays[0]
    axis = first.swapped(dimension - first.ndim) + first.ndim
    spans, shape = full_spans(first), list(first.stored_shape)
    lengths = [a.stored_shape[axis] for a in arrays]
    if spans[axis] == WHOLE or (spans[axis] > 1 and any(n % spans[axis] for n in lengths[:-1])):
        return NotImplemented
    shape[axis] = sum(lengths)
    aligned = axis != len(shape) - 1 or not any(n % p for n in lengths[:-1] for p in first.packing.values())
    if aligned:
        codes = {name: lax.concatenate([getattr(a, name) for a in arrays], axis) for name in first.packing}
    else:
        apart = [unpacked(a) for a in arrays]
        codes = {name: pack(lax.concatenate([a[name] for a in apart], axis), n) for name, n in first.packing.items()}
    others = [name for name in first.components() if name not in first.packing]
    scales = {name: lax.concatenate([getattr(a, name) for a in arrays], axis) for name in others}
    return first.reshaped(shape, spans, **scales, **codes)


@register("tile")
def _(w: QuantizedArray, *, reps: Sequence[int]) -> Any:
    for axis, count in enumerate(reps):
        w = w if count == 1 or w is NotImplemented else _concatenated([w] * count, axis)
    return w


@register("select_n")
def _(which: jax.Array, *cases: QuantizedArray) -> Any:
    arrays = None if jnp.ndim(which) else alike(cases, but_for=())
    if arrays is None or len({tuple(component.shape for component in jax.tree.leaves(a)) for a in arrays}) > 1:
        return NotImplemented
    return jax.tree.map(lambda *components: lax.select_n(which, *components), *arrays)


@register("stack")
def _(*operands: QuantizedArray, axis: int) -> Any:
    return _concatenated([expanded(w, [axis]) for w in operands], axis)


@register("unstack")
def _(w: QuantizedArray, *, axis: int) -> Any:
    sizes = [1 if a == axis else n for a, n in enumerate(w.shape)]
    rows = [sliced(w, [i if a == axis else 0 for a in range(w.ndim)], sizes) for i in range(w.shape[axis])]
    return NotImplemented if w.ndim == 1 else [squeezed(row, [axis]) for row in rows]


@register("dynamic_update_slice")
def _(w: QuantizedArray, update: QuantizedArray, *starts: Any) -> Any:
    arrays = alike([w, update])
    if arrays is None:
        return NotImplemented
    w, update = arrays
    ndim, spans = w.ndim, full_spans(w)
    stored_starts = [starts[w.swapped(a - ndim) + ndim] for a in range(ndim)]
    partial = [a for a in range(ndim) if update.stored_shape[a] != w.stored_shape[a]]
    if any(spans[a] != 1 for a in partial) or (is_packed(w) and ndim - 1 in partial):
        return NotImplemented
    at = [jnp.asarray(start if a in partial else 0, jnp.int32) for a, start in enumerate(stored_starts)]
    new = {name: lax.dynamic_update_slice(getattr(w, name), getattr(update, name), at) for name in w.components()}
    return w.replace(**new)
