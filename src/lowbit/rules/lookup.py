"""Gather and scatter: decode only the elements that are taken."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lowbit.formats.blocks import WHOLE, is_table, repeated, span_of
from lowbit.formats.quantized import QuantizedArray
from lowbit.ops.take import take
from lowbit.runtime import register

from .joining import alike
from .structural import full_spans, is_packed, untransposed


def _takes_layers(w: QuantizedArray, dims: Any, sizes: Any, index_ndim: int) -> bool:
    """Whether a gather takes whole layers of a stack of matrices, which need not be copied."""
    return (
        w.ndim >= 3
        and not is_table(w.shape)
        and w.index is None
        and full_spans(w)[0] == 1
        and (dims.start_index_map, dims.collapsed_slice_dims, dims.operand_batching_dims) == ((0,), (0,), ())
        and tuple(sizes[1:]) == w.shape[1:]
        and dims.offset_dims == tuple(range(index_ndim - 1, index_ndim + w.ndim - 2))
    )


@dataclass(frozen=True)
class _Gather:
    """A gather along the stored axes of an array, which may be stored with its last two swapped."""

    w: QuantizedArray
    dims: lax.GatherDimensionNumbers
    sizes: list[int]
    place: dict[int, int]  # stored axis -> axis of the result

    @classmethod
    def of(cls, w: QuantizedArray, dims: lax.GatherDimensionNumbers, sizes: Sequence[int]) -> "_Gather":
        stored = [w.swapped(a - w.ndim) + w.ndim for a in range(w.ndim)]
        dropped = {stored[a] for a in (*dims.collapsed_slice_dims, *dims.operand_batching_dims)}
        kept = [a for a in range(w.ndim) if a not in dropped]
        stored_dims = lax.GatherDimensionNumbers(
            offset_dims=dims.offset_dims,
            collapsed_slice_dims=tuple(sorted(stored[a] for a in dims.collapsed_slice_dims)),
            start_index_map=tuple(stored[a] for a in dims.start_index_map),
            operand_batching_dims=tuple(stored[a] for a in dims.operand_batching_dims),
            start_indices_batching_dims=dims.start_indices_batching_dims,
        )
        return cls(w, stored_dims, [sizes[a] for a in stored], dict(zip(kept, dims.offset_dims, strict=True)))

    @property
    def spans(self) -> dict[str, list[int]]:
        return {name: [span_of(s, a) for a in range(-self.w.ndim, 0)] for name, s in self.w.component_spans().items()}

    def fits(self) -> bool:
        """Whether what is taken has whole elements of each component."""
        shape, spans = self.w.stored_shape, self.spans.values()
        for a, (length, size) in enumerate(zip(shape, self.sizes, strict=True)):
            if size not in (1, length) and any(span[a] > 1 for span in spans):
                return False
        if any(span[a] != 1 for a in self.dims.operand_batching_dims for span in spans):
            return False
        last = self.w.ndim - 1  # the axis along which codes share a byte
        return not is_packed(self.w) or (last in self.place and self.sizes[last] == shape[last])

    def last_start(self, dtype: Any) -> jax.Array:
        """The largest index of each axis that is looked up."""
        shape = self.w.stored_shape
        return jnp.asarray([shape[a] - self.sizes[a] for a in self.dims.start_index_map], dtype)

    def takes_rows(self, index_ndim: int) -> bool:
        """Whether it takes whole stored rows of a matrix."""
        dims = self.dims
        return (self.w.ndim, dims.start_index_map, [*self.place]) == (2, (0,), [1]) and dims.offset_dims == (
            index_ndim - 1,
        )

    def decoded(self, inside: jax.Array) -> jax.Array:
        w, shape = self.w, self.w.stored_shape

        def wide(scales: jax.Array) -> jax.Array:
            scales = self._rows("scales", scales, inside)
            for a, at in self.place.items():
                span = self.spans["scales"][a]
                if span > 1 and self.sizes[a] == shape[a]:
                    scales = repeated(scales, at - scales.ndim, span, shape[a])
            return scales

        codes = [self._rows(name, getattr(w, name), inside) for name in w.packing]
        at = self.place.get(w.ndim - 1)
        if at is None:
            values = w.levels(*codes)
        else:  # codes unpack along the last axis
            moved = (jnp.moveaxis(component, at, -1) for component in codes)
            values = jnp.moveaxis(w.unpacked_levels(*moved, length=self.sizes[-1]), -1, at)
        return w.scaled(values, wide).astype(w.dtype)

    def _rows(self, name: str, component: jax.Array, inside: jax.Array) -> jax.Array:
        """What a component stores for the elements taken."""
        spans, shape = self.spans[name], self.w.stored_shape
        steps = [shape[a] if spans[a] == WHOLE else spans[a] for a in self.dims.start_index_map]
        counts = [
            stored if size == length or span == WHOLE else size
            for stored, size, length, span in zip(component.shape, self.sizes, shape, spans, strict=True)
        ]
        # A whole axis starts at 0 whatever its span.
        starts = inside // jnp.maximum(jnp.asarray(steps, inside.dtype), 1)
        return lax.gather(component, starts, self.dims, counts, mode="promise_in_bounds")


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
    gather = _Gather.of(w, dims, slice_sizes)
    if not gather.fits():
        return NotImplemented
    indices = indices.astype(jnp.promote_types(indices.dtype, jnp.int32))  # wide enough for any position
    last = gather.last_start(indices.dtype)
    inside = jnp.clip(indices, 0, last)
    y = take(w, inside) if gather.takes_rows(indices.ndim) else gather.decoded(inside)
    if mode == lax.GatherScatterMode.FILL_OR_DROP:
        outside = jnp.any((indices < 0) | (indices > last), axis=-1)
        outside = outside.reshape([1 if a in dims.offset_dims else n for a, n in enumerate(y.shape)])
        y = jnp.where(outside, jnp.asarray(jnp.nan if fill_value is None else fill_value, y.dtype), y)
    if w.transposed and {w.ndim - 1, w.ndim - 2} <= {*gather.place}:
        y = jnp.swapaxes(y, gather.place[w.ndim - 1], gather.place[w.ndim - 2])
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
        or (is_packed(w) and pairs[-1:] != [(w.ndim - 1, update.ndim - 1)])  # codes share a byte along the last axis
    ):
        return NotImplemented
    new = {
        name: lax.scatter(getattr(w, name), indices, getattr(update, name), dims, **params)
        for name in w.component_spans()
    }
    return w.replace(**new)
