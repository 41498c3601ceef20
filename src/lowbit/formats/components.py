"""Checks of components, since `jax.tree.map` may replace each of them by anything."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ._inputs import axis_spans
from .blocks import WHOLE

SCALE_DTYPES = tuple(map(np.dtype, (jnp.float32, jnp.bfloat16, jnp.float16)))
CODE_DTYPES = tuple(map(np.dtype, (jnp.uint8, jnp.int8)))
_CHUNK = 1 << 16  # bytes checked at a time, to stay in the cache


def checked_scale_dtype(dtype: Any, format: str) -> np.dtype:
    """The dtype of scales that are floats."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found not in SCALE_DTYPES:
        allowed = ", ".join(dtype.name for dtype in SCALE_DTYPES)
        raise ValueError(f"scale_dtype={found or repr(dtype)} for {format!r} must be one of {allowed}.")
    return found


def check_dtypes(array: Any) -> None:
    """Raise a TypeError where a component has a dtype that the format does not store.

    JAX unflattens with placeholders: components without a dtype pass, and so do the tangents of integers.
    """
    for name, wanted in array.component_dtypes().items():
        dtype = getattr(getattr(array, name), "dtype", None)
        if dtype is not None and dtype not in wanted and dtype != jax.dtypes.float0:
            kind, names = type(array).__name__, " or ".join(d.name for d in wanted)
            raise TypeError(
                f"The {name} of this {kind} are {dtype}, and the format stores {names}. A function mapped over a tree "
                "gets each component by itself: to map the array as a whole, use lowbit.tree_map, or jax.tree.map with "
                "is_leaf=lowbit.is_quantized."
            )


def check_codes(array: Any) -> None:
    """Raise a ValueError if a code is out of the format's range. Traced codes, and those on other hosts, pass."""
    if array.code_range is None:
        return
    lowest, highest = array.code_range
    for name, per_byte in array.packing.items():
        given = getattr(array, name)
        if isinstance(given, Tracer) or not getattr(given, "is_fully_addressable", True):
            continue
        stored = np.asarray(given)
        flat = stored.reshape(-1)
        for start in range(0, flat.size, _CHUNK):
            fields = _fields(flat[start : start + _CHUNK], per_byte)
            if min(field.min() for field in fields) < lowest or max(field.max() for field in fields) > highest:
                codes = np.stack(_fields(stored, per_byte), -1).reshape(*stored.shape[:-1], -1)
                bad = (codes < lowest) | (codes > highest)
                first = tuple(int(i) for i in np.argwhere(bad)[0])
                raise ValueError(
                    f"{int(bad.sum())} of {bad.size} {name} of this {type(array).__name__} are out of the range "
                    f"{lowest} to {highest}: the first is {codes[first]} at {first}."
                )


def _fields(stored: np.ndarray, per_byte: int) -> list[np.ndarray]:
    """The codes at each position in a byte."""
    if per_byte == 1:
        return [stored]
    bits = 8 // per_byte
    return [(stored >> np.uint8(8 - bits * (i + 1))) & np.uint8(2**bits - 1) for i in range(per_byte)]


def spans_of_scales(
    cls: Any,
    shape: Sequence[int],
    scales: Sequence[int],
    axis: Any,
    block_size: int | None,
    spare: int,
) -> list[int]:
    """The spans of scales of a given shape. Raises if `block_size` is not given and more than one would fit."""
    if len(scales) != len(shape):
        raise ValueError(
            f"A {cls.__name__} of {len(shape)} axes needs scales with as many axes, not of shape {scales}."
        )
    if axis is not None:
        spans = list(axis_spans(shape, axis, block_size))
    else:
        spans = [1 if n == stored else WHOLE for n, stored in zip(shape, scales, strict=True)]
        if block_size and all(stored == 1 for span, stored in zip(spans, scales, strict=True) if span == WHOLE):
            spans = [block_size if span == WHOLE else span for span in spans]
    for i, (n, stored) in enumerate(zip(shape, scales, strict=True)):
        if spans[i] == WHOLE and stored > 1:
            at = i - len(shape)
            spans[i] = block_size or _only_block_size(cls, range(n - (spare if at == -1 else 0), n + 1), stored, at)
    return spans


def _only_block_size(cls: Any, lengths: range, scales: int, axis: int) -> int:
    """The one block size of the format that gives this many scales on an axis of one of these lengths."""
    fits = {size for n in lengths for size in range(-(-n // scales), (n - 1) // (scales - 1) + 1)}
    allowed = fits if cls.block_sizes is None else fits.intersection(cls.block_sizes)
    if len(allowed) != 1:
        found = f"every block size from {min(allowed)} to {max(allowed)}" if allowed else "no block size of the format"
        raise ValueError(
            f"{cls.__name__} has {scales} scales for the {lengths[-1]} elements of axis {axis}, which {found} would "
            "give: pass block_size=, the number of elements that share a scale."
        )
    return allowed.pop()
