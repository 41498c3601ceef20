"""Rows by index: decode what is taken, and nothing else."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lowbit.formats.blocks import WHOLE, repeated, span_of
from lowbit.formats.quantized import QuantizedArray
from lowbit.ops.take import take
from lowbit.runtime import register

from .structural import alike, full_spans, is_packed, untransposed


def _takes_layers(w: QuantizedArray, dims: Any, sizes: Any, index_ndim: int) -> bool:
    """Whether a gather takes whole layers of a stack of at least matrices, which need not be copied."""
    return (
        w.ndim >= 3
        and w.index is None
        and full_spans(w)[0] == 1
        and (dims.start_index_map, dims.collapsed_slice_dims, dims.operand_batching_dims) == ((0,), (0,), ())
        and tuple(sizes[1:]) == w.shape[1:]
        and dims.offset_dims == tuple(range(index_ndim - 1, index_ndim + w.ndim - 2))
    )


@register("gather")
def _(
    w: QuantizedArray,
    indices: jax.Array,
    *,
    dimension_numbers: Any,
    slice_sizes: Any,
    mode: Any,
    fill_value: Any,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
) -> Any:
    del indices_are_sorted, unique_indices  # hints about the order of the indices
    dims = dimension_numbers
    if _takes_layers(w, dims, slice_sizes, indices.ndim) and mode != lax.GatherScatterMode.FILL_OR_DROP:
        return w.replace(index=jnp.clip(indices[..., 0], 0, w.shape[0] - 1))
    w = untransposed(w.resolved()) if dims.operand_batching_dims else w.resolved()
    ndim = w.ndim
    indices = indices.astype(jnp.promote_types(indices.dtype, jnp.int32))  # wide enough for any position
    stored = [w.swapped(a - ndim) + ndim for a in range(ndim)]
    shape, sizes = w.stored_shape, [slice_sizes[a] for a in stored]
    looked_up = [stored[a] for a in dims.start_index_map]
    spans = {name: [span_of(s, a) for a in range(-ndim, 0)] for name, s in w.component_spans().items()}
    for a in range(ndim):
        blocked = any(span[a] > 1 for span in spans.values())
        cut = sizes[a] != shape[a]
        if blocked and cut and sizes[a] != 1:
            return NotImplemented
    if any(span[stored[a]] != 1 for a in dims.operand_batching_dims for span in spans.values()):
        return NotImplemented

    # The axes of a row keep their order, but the weight may be stored with its last two swapped.
    dropped = {stored[a] for a in (*dims.collapsed_slice_dims, *dims.operand_batching_dims)}
    kept = [a for a in range(ndim) if a not in dropped]
    if is_packed(w) and (ndim - 1 in dropped or sizes[-1] != shape[-1]):
        return NotImplemented  # bytes hold neighbours of the last axis
    place = dict(zip(kept, dims.offset_dims, strict=True))  # stored axis -> axis of the result
    stored_dims = lax.GatherDimensionNumbers(
        offset_dims=dims.offset_dims,
        collapsed_slice_dims=tuple(sorted(stored[a] for a in dims.collapsed_slice_dims)),
        start_index_map=tuple(looked_up),
        operand_batching_dims=tuple(stored[a] for a in dims.operand_batching_dims),
        start_indices_batching_dims=dims.start_indices_batching_dims,
    )
    last = jnp.asarray([shape[a] - sizes[a] for a in looked_up], indices.dtype)

    def decoded(w: QuantizedArray, inside: jax.Array) -> jax.Array:
        scales = rows(lax.stop_gradient(w.scale_values()), spans["scales"], inside)
        for a in kept:
            span = spans["scales"][a]
            if span > 1 and sizes[a] == shape[a]:
                scales = repeated(scales, place[a] - scales.ndim, span, shape[a])
        codes = [rows(getattr(w, name), spans[name], inside) for name in w.packing]
        if ndim - 1 in place:  # codes unpack along the last axis
            at = place[ndim - 1]
            values = w.unpacked_levels(*(jnp.moveaxis(component, at, -1) for component in codes), length=sizes[-1])
            values = jnp.moveaxis(values, -1, at)
        else:
            values = w.levels(*codes)
        return (values * scales).astype(w.dtype)

    def rows(component: jax.Array, spans: list[int], inside: jax.Array) -> jax.Array:
        step = jnp.asarray([spans[a] if spans[a] != WHOLE else shape[a] for a in looked_up], indices.dtype)
        counts = [component.shape[a] if sizes[a] == shape[a] or spans[a] == WHOLE else sizes[a] for a in range(ndim)]
        # A whole axis starts at 0 whatever its span.
        return lax.gather(component, inside // jnp.maximum(step, 1), stored_dims, counts, mode="promise_in_bounds")

    inside = jnp.clip(indices, 0, last)
    whole_rows = ndim == 2 and looked_up == [0] and kept == [1] and dims.offset_dims == (indices.ndim - 1,)
    y = take(w, inside) if whole_rows else decoded(w, inside)
    if mode == lax.GatherScatterMode.FILL_OR_DROP:
        outside = jnp.any((indices < 0) | (indices > last), axis=-1)
        batch = [a for a in range(y.ndim) if a not in dims.offset_dims]
        outside = outside.reshape([y.shape[a] if a in batch else 1 for a in range(y.ndim)])
        y = jnp.where(outside, jnp.asarray(jnp.nan if fill_value is None else fill_value, y.dtype), y)
    if w.transposed and ndim - 1 in place and ndim - 2 in place:
        y = jnp.swapaxes(y, place[ndim - 1], place[ndim - 2])
    return y


@register("scatter")
def _(w: QuantizedArray, indices: jax.Array, update: QuantizedArray, *, dimension_numbers: Any, **params: Any) -> Any:
    dims = dimension_numbers
    arrays = alike([w, update], but_for=("lengths", "spans"))
    if arrays is None or arrays[0].transposed or params.pop("update_jaxpr", None) is not None:
        return NotImplemented
    params.pop("update_consts", None)
    w, update = arrays
    # Every component is updated at the same indices. So the update, and each axis along which it may start anywhere,
    # must have one stored element per array element; only axes that are written whole may share scales or bytes.
    single = [
        all(span_of(spans, axis) == 1 for spans in w.component_spans().values())
        for axis in range(-len(w.stored_shape), 0)
    ]
    placed = {*dims.inserted_window_dims, *dims.operand_batching_dims}
    window = [axis for axis in range(w.ndim) if axis not in placed]
    pairs = list(zip(window, dims.update_window_dims, strict=True))
    spans, new_spans = full_spans(w), full_spans(update)
    if (
        not all(single[axis] for axis in placed)
        or not all(single[axis] or update.shape[at] == w.shape[axis] for axis, at in pairs)
        or not all(spans[axis] == new_spans[at] for axis, at in pairs)
        or not all(span == 1 for at, span in enumerate(new_spans) if at not in dims.update_window_dims)
        or (is_packed(w) and pairs[-1:] != [(w.ndim - 1, update.ndim - 1)])  # bytes hold neighbours of the last axis
    ):
        return NotImplemented
    new = {
        name: lax.scatter(getattr(w, name), indices, getattr(update, name), dims, **params)
        for name in w.component_spans()
    }
    return w.replace(**new)
