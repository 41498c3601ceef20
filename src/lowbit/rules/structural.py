"""Rules that move elements without changing their bits: each component is moved, with positions divided by its spans.

What would split a block, or need two scales for one element, returns NotImplemented and goes dense under the policy.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lowbit.formats.blocks import WHOLE, axis_slice, pack, repeated, span_of, stored_length, unpack
from lowbit.formats.quantized import QuantizedArray
from lowbit.runtime import register

# Splitting a block further would store more bytes of scales than of codes.
SMALLEST_SPLIT_BLOCK = 16


def full_spans(w: QuantizedArray) -> list[int]:
    """The spans of the scales, one for each stored axis."""
    ndim = len(w.stored_shape)
    return [span_of(w.spans, axis) for axis in range(-ndim, 0)]


def cut_blocks(w: QuantizedArray, axes: Sequence[int]) -> bool:
    """Whether the last of several blocks is not full along one of these stored axes."""
    shape, spans = w.stored_shape, full_spans(w)
    return any(spans[a] != WHOLE and shape[a] > spans[a] and shape[a] % spans[a] for a in axes)


def moved_codes(
    w: QuantizedArray, fn: Callable[[jax.Array], jax.Array], *, along_last: bool = True
) -> dict[str, jax.Array]:
    """The code components as `fn` moves them, unpacked for it if it moves along the packed axis."""
    if is_packed(w) and along_last:
        return {name: pack(fn(codes), w.packing[name]) for name, codes in unpacked(w).items()}
    return {name: fn(getattr(w, name)) for name in w.packing}


def moved_scales(w: QuantizedArray, fn: Callable[[jax.Array], jax.Array]) -> dict[str, jax.Array]:
    """The scales as `fn` moves them, and whatever else an array has beside its codes: offsets, scales of groups."""
    return {name: fn(component) for name, component in w.components().items() if name not in w.packing}


def unpacked(w: QuantizedArray) -> dict[str, jax.Array]:
    """The code components, unpacked to one code per element."""
    length = w.stored_shape[-1]
    return {name: axis_slice(unpack(getattr(w, name), n), -1, 0, length) for name, n in w.packing.items()}


def is_packed(w: QuantizedArray) -> bool:
    return max(w.packing.values()) > 1


def _layers_kept(w: QuantizedArray, axes: Sequence[int]) -> bool:
    """Whether these axes are not those of the layer index."""
    return w.index is not None and all(axis >= w.index.ndim for axis in axes)


def _under_index(w: QuantizedArray, fn: Callable[[QuantizedArray], Any]) -> Any:
    """Apply `fn` to the whole stack; the result has the same layer index."""
    result = fn(w.replace(index=None))
    return result if result is NotImplemented else result.replace(index=w.index)


# --- order of the axes


def permuted(w: QuantizedArray, permutation: Sequence[int]) -> QuantizedArray:
    """The array with its axes in another order."""
    ndim = w.ndim
    if w.index is not None:
        layers = w.index.ndim
        if tuple(permutation[:layers]) != tuple(range(layers)):
            return permuted(w.resolved(), permutation)
        rest = [p - layers + 1 for p in permutation[layers:]]
        return _under_index(w, lambda stack: permuted(stack, [0, *rest]))
    order = [w.swapped(p - ndim) + ndim for p in permutation]
    if ndim == 1:
        return w
    flipped = [*order[:-2], order[-1], order[-2]]
    stay = list(range(ndim))
    # Codes share bytes along the last stored axis, so that axis stays last where `transposed` can express the order.
    if flipped == stay or (order != stay and is_packed(w) and flipped[-1] == ndim - 1):
        return stored_permuted(w, flipped, transposed=True)
    return stored_permuted(w, order, transposed=False)


def stored_permuted(w: QuantizedArray, order: Sequence[int], transposed: bool) -> QuantizedArray:
    if list(order) == list(range(len(order))):
        return w.replace(transposed=transposed)
    last_moves = order[-1] != len(order) - 1
    codes = moved_codes(w, lambda codes: lax.transpose(codes, order), along_last=last_moves)
    w = w.movable([a for i, a in enumerate(order) if i != a])
    shape, spans = w.stored_shape, full_spans(w)
    return w.reshaped(
        [shape[a] for a in order],
        [spans[a] for a in order],
        transposed=transposed,
        **moved_scales(w, lambda scales: lax.transpose(scales, order)),
        **codes,
    )


def untransposed(w: QuantizedArray) -> QuantizedArray:
    """The array stored in its logical axis order; moves bytes if it was stored transposed."""
    if not w.transposed:
        return w
    ndim = len(w.stored_shape)
    return stored_permuted(w, [*range(ndim - 2), ndim - 1, ndim - 2], transposed=False)


@register("transpose")
def _(w: QuantizedArray, *, permutation: Sequence[int]) -> Any:
    return permuted(w, permutation)


# --- axes of size one


def squeezed(w: QuantizedArray, axes: Sequence[int]) -> QuantizedArray:
    """The array without these axes of size one."""
    if not axes:
        return w
    if w.index is not None:
        layers = w.index.ndim
        index = lax.squeeze(w.index, [a for a in axes if a < layers])
        rest = [a - layers + 1 for a in axes if a >= layers]
        return squeezed(w.replace(index=None), rest).replace(index=index)
    ndim = w.ndim
    gone = [w.swapped(a - ndim) + ndim for a in axes]
    w = _movable_in_rank(w, ndim, gone)
    kept = [a for a in range(ndim) if a not in gone]
    shape, spans = w.stored_shape, full_spans(w)
    flag = w.transposed and not any(a >= ndim - 2 for a in gone)
    codes = moved_codes(w, lambda codes: lax.squeeze(codes, gone), along_last=ndim - 1 in gone)
    return w.reshaped(
        [shape[a] for a in kept],
        [spans[a] for a in kept],
        transposed=flag,
        **moved_scales(w, lambda scales: lax.squeeze(scales, gone)),
        **codes,
    )


def _movable_in_rank(w: QuantizedArray, ndim: int, axes: Sequence[int]) -> QuantizedArray:
    """The array for adding or removing these axes, of `ndim`: a group scale may be that of the last two axes."""
    last = range(w.ndim - min(w.ndim, 2), w.ndim)
    return w.movable(last if any(axis >= ndim - 2 for axis in axes) else ())


def expanded(w: QuantizedArray, axes: Sequence[int]) -> QuantizedArray:
    """The array with axes of size one at these positions of the result."""
    if not axes:
        return w
    if w.index is not None:
        if _layers_kept(w, axes):
            shift = 1 - w.index.ndim
            return _under_index(w, lambda stack: expanded(stack, [a + shift for a in axes]))
        return expanded(w.resolved(), axes)
    ndim = w.ndim + len(axes)
    w = _movable_in_rank(w, ndim, axes)
    if any(a >= ndim - 2 for a in axes):
        w = untransposed(w)
    old = iter(zip(w.stored_shape, full_spans(w), strict=True))
    sizes = [(1, 1) if a in axes else next(old) for a in range(ndim)]
    codes = moved_codes(w, lambda codes: lax.expand_dims(codes, axes), along_last=ndim - 1 in axes)
    shape, spans = zip(*sizes, strict=True)
    return w.reshaped(shape, spans, **moved_scales(w, lambda scales: lax.expand_dims(scales, axes)), **codes)


@register("squeeze")
def _(w: QuantizedArray, *, dimensions: Sequence[int]) -> Any:
    if len(dimensions) == w.ndim:  # a single element has no axis to be stored along
        return lax.squeeze(w.materialize(), dimensions)
    return squeezed(w, dimensions)


@register("broadcast_in_dim")
def _(w: QuantizedArray, *, shape: Sequence[int], broadcast_dimensions: Sequence[int], sharding: Any = None) -> Any:
    del sharding  # the sharding follows from the components
    new = [a for a in range(len(shape)) if a not in broadcast_dimensions]
    w = expanded(w, new)
    grown = [a for a in range(len(shape)) if w.shape[a] != shape[a]]
    if not grown:
        return w
    w = untransposed(w.resolved().plain())
    spans = full_spans(w)
    if any(spans[a] > 1 for a in grown):
        return NotImplemented  # each block would be repeated
    last = shape[-1] if len(shape) - 1 in grown or not is_packed(w) else None

    def grow(codes: jax.Array) -> jax.Array:
        return jnp.broadcast_to(codes, (*shape[:-1], codes.shape[-1] if last is None else last))

    codes = moved_codes(w, grow, along_last=last is not None)
    scales = [n if spans[a] == WHOLE else stored_length(shape[a], spans[a]) for a, n in enumerate(w.scales.shape)]
    return w.reshaped(shape, spans, **moved_scales(w, lambda x: jnp.broadcast_to(x, scales)), **codes)


# --- reshape


def reshaped(w: QuantizedArray, shape: Sequence[int]) -> Any:
    """The array in another shape, or NotImplemented if elements that share a scale would be separated."""
    if w.index is not None:
        layers = w.index.ndim
        if tuple(shape[:layers]) != w.shape[:layers]:
            return reshaped(w.resolved(), shape)
        stack = w.stored_shape[0]
        return _under_index(w, lambda whole: reshaped(whole, [stack, *shape[layers:]]))
    if w.size == 0:
        return NotImplemented
    ones = [a for a, n in enumerate(w.shape) if n == 1]
    new_ones = [a for a, n in enumerate(shape) if n == 1]
    core = [n for n in shape if n != 1]
    w = squeezed(w, ones if core else ones[:-1])  # at least one axis is left
    w = _reshaped_core(w, core) if core else w
    if w is NotImplemented:
        return w
    return expanded(w, new_ones if core else new_ones[:-1])


def _reshaped_core(w: QuantizedArray, shape: Sequence[int]) -> Any:
    """`reshaped` where no axis has size one."""
    if tuple(shape) == w.shape:
        return w
    w = untransposed(w)
    old_shape, groups = w.stored_shape, _groups(w.stored_shape, shape)
    w = w.movable([a for old, new in groups if not _is_kept(old, new, old_shape, shape) for a in old])
    old_spans = full_spans(w)
    counts: list[list[int]] = []  # of the scales, along the axes of each group that is merged
    repeats: list[int] = []
    spans: list[int] = []
    for old, new in groups:
        lengths = [old_shape[a] for a in old]
        if _is_kept(old, new, old_shape, shape):
            counts += [[a] for a in old]
            repeats += [1] * len(old)
            spans += [old_spans[a] for a in old]
            continue
        covered = _joined_span(lengths, [old_spans[a] for a in old])
        split = None if covered is None else _split_span(covered, [shape[a] for a in new])
        if covered is None or split is None:
            return NotImplemented
        span, new_spans = split
        counts.append(old)
        repeats.append(covered // span)
        spans += new_spans

    def resized(scales: jax.Array) -> jax.Array:
        sizes = [math.prod(scales.shape[a] for a in old) for old in counts]
        same = {new[0]: scales.shape[old[0]] for old, new in groups if _is_kept(old, new, old_shape, shape)}
        scales = scales.reshape(sizes)
        for axis, times in enumerate(repeats):
            scales = repeated(scales, axis - len(sizes), times, sizes[axis] * times)
        lengths = enumerate(zip(shape, spans, strict=True))
        return scales.reshape([same[a] if a in same else stored_length(n, span) for a, (n, span) in lengths])

    if all(n % per_byte == 0 for n in (old_shape[-1], shape[-1]) for per_byte in w.packing.values()):
        codes = {name: getattr(w, name).reshape(*shape[:-1], shape[-1] // n) for name, n in w.packing.items()}
    else:
        codes = moved_codes(w, lambda codes: codes.reshape(shape))
    return w.reshaped(shape, spans, **moved_scales(w, resized), **codes)


def _is_kept(old: Sequence[int], new: Sequence[int], old_shape: Sequence[int], shape: Sequence[int]) -> bool:
    return [old_shape[a] for a in old] == [shape[a] for a in new]


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The smallest groups of axes with equal size on both sides."""
    groups, i, j = [], 0, 0
    while i < len(old):
        left, right = [i], [j]
        i, j = i + 1, j + 1
        a, b = old[left[0]], new[right[0]]
        while a != b:
            if a < b:
                a *= old[i]
                left.append(i)
                i += 1
            else:
                b *= new[j]
                right.append(j)
                j += 1
        groups.append((left, right))
    return groups


def _joined_span(lengths: Sequence[int], spans: Sequence[int]) -> int | None:
    """The span along merged axes: the trailing ones are covered whole, one partly, those before it not at all."""
    covers = [length if span == WHOLE else min(span, length) for length, span in zip(lengths, spans, strict=True)]
    joined, partial = 1, False
    for length, span in zip(reversed(lengths), reversed(covers), strict=True):
        if (partial and span != 1) or length % span:
            return None
        joined *= span
        partial = partial or span != length
    return joined


def _split_span(span: int, lengths: Sequence[int]) -> tuple[int, list[int]] | None:
    """The remaining span and the span of each axis when one axis is split into these; smaller than before if needed."""
    spans, left = [], span
    for length in reversed(lengths):
        if left % length == 0:
            spans.append(WHOLE)
            left //= length
        elif length % left == 0:
            spans.append(left)
            left = 1
        else:
            smaller = span // left * math.gcd(left, length)
            return _split_span(smaller, lengths) if smaller >= SMALLEST_SPLIT_BLOCK else None
    return span, spans[::-1]


@register("reshape")
def _(w: QuantizedArray, *, new_sizes: Sequence[int], dimensions: Any = None, sharding: Any = None) -> Any:
    del sharding  # the sharding follows from the components
    if not new_sizes:  # a single element has no axis to be stored along
        return lax.reshape(w.materialize(), ())
    return reshaped(w if dimensions is None else permuted(w, dimensions), new_sizes)


# --- slices


def layer(w: QuantizedArray, i: Any) -> QuantizedArray:
    """The layer at `i` (clamped) of the first axis, kept with size one. No component is copied."""
    i = jnp.clip(jnp.asarray(i, jnp.int32), 0, w.shape[0] - 1)[None]
    if w.index is None:
        return w.replace(index=i)
    # A layer of a layer: merge both axes, where the position is known.
    stacks, many = w.stored_shape[:2]
    merged = w.map_components(lambda component, _: component.reshape(stacks * many, *component.shape[2:]), index=None)
    return merged.replace(index=w.index * many + i)


def _is_layer(w: QuantizedArray, sizes: Sequence[int]) -> bool:
    """Whether these sizes take one layer of a stack of matrices."""
    axes = 1 if w.index is None else 2
    return (
        w.ndim >= 3
        and (w.index is None or w.index.ndim == 0)
        and sizes[0] == 1 != w.shape[0]
        and tuple(sizes[1:]) == w.shape[1:]
        and all(span == 1 for span in full_spans(w)[:axes])
    )


def sliced(w: QuantizedArray, starts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """The window of these sizes at `starts`, which may be traced and must be in bounds."""
    if _is_layer(w, sizes):
        return layer(w, starts[0])
    w = w.resolved()
    ndim = w.ndim
    axes = [w.swapped(a - ndim) + ndim for a in range(ndim)]
    starts, sizes = [starts[a] for a in axes], [sizes[a] for a in axes]
    shape = list(w.stored_shape)
    moved = [a for a in range(ndim) if sizes[a] != shape[a]]
    w = w.movable(moved)
    spans = full_spans(w)
    scales, at = moved_scales(w, lambda scales: scales), list(starts)
    for a in moved:
        if spans[a] == WHOLE:
            continue
        if sizes[a] == 1 and spans[a] > 1:
            at[a], spans[a] = starts[a] // spans[a], 1  # a single element needs only the scale of its block
        elif spans[a] > 1:
            start = starts[a]
            if not isinstance(start, (int, np.integer)) or start % spans[a]:
                return NotImplemented
            if sizes[a] % spans[a] and start + sizes[a] != shape[a]:
                return NotImplemented
            at[a] = start // spans[a]
        scales = {name: _window(x, a, at[a], stored_length(sizes[a], spans[a])) for name, x in scales.items()}

    def window(codes: jax.Array) -> jax.Array:
        for a in moved:
            codes = _window(codes, a, starts[a], sizes[a])
        return codes

    codes = moved_codes(w, window, along_last=ndim - 1 in moved)
    return w.reshaped(sizes, spans, **scales, **codes)


def _window(component: jax.Array, axis: int, start: Any, size: int) -> jax.Array:
    if isinstance(start, (int, np.integer)):
        return axis_slice(component, axis, int(start), int(start) + size)
    return lax.dynamic_slice_in_dim(component, start, size, axis)


@register("slice")
def _(w: QuantizedArray, *, start_indices: Any, limit_indices: Any, strides: Any) -> Any:
    if strides is not None and any(step != 1 for step in strides):
        return _strided(w, start_indices, limit_indices, strides)
    return sliced(w, start_indices, [b - a for a, b in zip(start_indices, limit_indices, strict=True)])


def _strided(w: QuantizedArray, starts: Any, limits: Any, strides: Any) -> Any:
    w = untransposed(w.resolved().plain())
    shape, spans = w.stored_shape, full_spans(w)
    steps = [(0, n, 1) if spans[a] == WHOLE else (starts[a], limits[a], strides[a]) for a, n in enumerate(shape)]
    if any(span > 1 and steps[a] != (0, shape[a], 1) for a, span in enumerate(spans)):
        return NotImplemented
    stored = w.scales.shape
    scale_steps = [(0, stored[a], 1) if steps[a] == (0, shape[a], 1) else steps[a] for a in range(w.ndim)]
    new_shape = [len(range(*bounds)) for bounds in zip(starts, limits, strides, strict=True)]
    codes = moved_codes(w, lambda codes: lax.slice(codes, starts, limits, strides))
    bounds = list(zip(*scale_steps, strict=True))
    return w.reshaped(new_shape, spans, **moved_scales(w, lambda scales: lax.slice(scales, *bounds)), **codes)


@register("dynamic_slice")
def _(w: QuantizedArray, *starts: jax.Array, slice_sizes: Sequence[int]) -> Any:
    def known(start: Any, length: int, size: int) -> Any:
        if length == size:
            return 0
        if isinstance(start, (int, np.integer, np.ndarray)):
            return int(np.clip(start, 0, length - size))
        return jnp.clip(start, 0, length - size)

    return sliced(w, [known(*each) for each in zip(starts, w.shape, slice_sizes, strict=True)], slice_sizes)


@register("split")
def _(w: QuantizedArray, *, sizes: Sequence[int], axis: int) -> Any:
    slices, start = [], 0
    for size in sizes:
        starts = [start if a == axis else 0 for a in range(w.ndim)]
        slices.append(sliced(w, starts, [size if a == axis else n for a, n in enumerate(w.shape)]))
        start += size
    return NotImplemented if any(w is NotImplemented for w in slices) else slices


@register("rev")
def _(w: QuantizedArray, *, dimensions: Sequence[int]) -> Any:
    w, ndim = w.resolved(), w.ndim
    axes = [w.swapped(a - ndim) + ndim for a in dimensions]
    w = w.movable(axes)
    if cut_blocks(w, axes):
        return NotImplemented
    codes = moved_codes(w, lambda codes: lax.rev(codes, axes), along_last=ndim - 1 in axes)
    return w.replace(**moved_scales(w, lambda scales: lax.rev(scales, axes)), **codes)


# --- dtype and sharding


@register("convert_element_type")
def _(w: QuantizedArray, *, new_dtype: Any, weak_type: bool = False, sharding: Any = None) -> Any:
    del weak_type, sharding  # weak types are for scalars; the sharding follows from the components
    return w.replace(dtype=np.dtype(new_dtype)) if jnp.issubdtype(new_dtype, jnp.floating) else NotImplemented
