"""Splitting a tensor into chunks, so that no scale and no packed byte is split."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from lowbit.formats import PermutedArray, QuantizedArray
from lowbit.formats.blocks import WHOLE, span_of

from ._regions import Region

CHUNK = 1 << 22  # elements that are read and encoded at a time, unless a scale covers more
STRIPE = 1 << 25  # the same where rows are split; larger, since short reads and writes are slow


@dataclasses.dataclass(frozen=True)
class Chunked:
    """A tensor that can be read in chunks.

    - `like`: the tensor with `jax.ShapeDtypeStruct`s for its arrays.
    - `units`: for each axis, the multiple at which it can be split; `WHOLE` if it cannot be.
    - `read`: reads a region of it.
    """

    like: Any
    units: list[int]
    read: Callable[[Region], Any]


def struct_of(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def spans_of_scales(like: Any) -> dict[str, tuple[int, ...]]:
    """The spans of each component of a quantized array; of any other array, those of the array itself as ""."""
    if isinstance(like, PermutedArray):
        return spans_of_scales(like.array) | {"order": (WHOLE,)}
    if not isinstance(like, QuantizedArray):
        return {"": ()}
    coded = [name for name in like.scale_components if getattr(like, name) is not None]
    return like.component_spans() | dict.fromkeys(coded, (WHOLE, WHOLE))


def units_of(like: Any) -> list[int]:
    """For each axis of an array, the multiple at which it can be split; `WHOLE` if it cannot be."""
    axes = range(-len(like.shape), 0)
    return [math.lcm(*(span_of(spans, axis) for spans in spans_of_scales(like).values())) for axis in axes]


def common_units(units: Sequence[int], others: Sequence[int]) -> list[int]:
    return [WHOLE if WHOLE in pair else math.lcm(*pair) for pair in zip(units, others, strict=True)]


def chunks_of(shape: Sequence[int], units: Sequence[int], most: int | None = None) -> list[Region]:
    """An array as chunks of about `CHUNK` elements, or `most`, split along the first axes that can be split."""
    ranges: list[list[tuple[int, int]]] = []
    left = STRIPE if any(n > 1 and unit == WHOLE for n, unit in zip(shape[:-1], units, strict=False)) else CHUNK
    left = left if most is None else most
    for axis, (n, unit) in enumerate(zip(shape, units, strict=True)):
        step = n
        if unit != WHOLE:
            step = max(left // max(math.prod(shape[axis + 1 :]), 1) // unit * unit, unit)
            count = -(-n // step)
            step = -(-n // max(count, 1) // unit) * unit if count > 1 else n  # chunks of about the same size
        ranges.append([(i, min(i + step, n)) for i in range(0, n, step)] if n else [(0, 0)])
        left = max(left // max(step, 1), 1)
    return list(itertools.product(*ranges))
