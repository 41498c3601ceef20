"""Arrays in boxes: where one can be cut, and where the elements of a box lie."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from lowbit.formats import QuantizedArray
from lowbit.formats._blocks import WHOLE, span_of

from ._contents import volume
from ._processes import Box

PIECE = 1 << 22  # elements that are read and encoded at a time, if no scale covers more
STRIPE = 1 << 25  # the same where rows are cut, since short runs are slow to read and to write


def struct_of(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def part_spans_of(like: Any) -> dict[str, tuple[int, ...]]:
    if not isinstance(like, QuantizedArray):
        return {"": ()}
    coded = [name for name in like.scale_parts if getattr(like, name) is not None]
    return like.part_spans() | dict.fromkeys(coded, (WHOLE, WHOLE))


def units_of(like: Any) -> list[int]:
    """In steps of how many elements each axis can be cut; `WHOLE` for not at all."""
    axes = range(-len(like.shape), 0)
    return [math.lcm(*(span_of(spans, axis) for spans in part_spans_of(like).values())) for axis in axes]


def common_units(units: Sequence[int], others: Sequence[int]) -> list[int]:
    return [WHOLE if WHOLE in pair else math.lcm(*pair) for pair in zip(units, others, strict=True)]


def boxes_of(shape: Sequence[int], units: Sequence[int]) -> list[Box]:
    """An array in boxes of about `PIECE` elements, cut along the first axes that can be."""
    cuts: list[list[tuple[int, int]]] = []
    left = STRIPE if any(n > 1 and unit == WHOLE for n, unit in zip(shape[:-1], units, strict=False)) else PIECE
    for axis, (n, unit) in enumerate(zip(shape, units, strict=True)):
        step = n
        if unit != WHOLE:
            step = max(left // max(math.prod(shape[axis + 1 :]), 1) // unit * unit, unit)
            count = -(-n // step)
            step = -(-n // max(count, 1) // unit) * unit if count > 1 else n  # all of about the same size
        cuts.append([(i, min(i + step, n)) for i in range(0, n, step)] if n else [(0, 0)])
        left = max(left // max(step, 1), 1)
    return list(itertools.product(*cuts))


def runs(shape: Sequence[int], box: Box) -> tuple[list[int], int]:
    """Where the elements of a box lie in an array: the beginnings of the runs without a gap, and how long one is."""
    cut = [axis for axis, n in enumerate(shape) if box[axis] != (0, n)]
    last = cut[-1] if cut else 0
    starts = np.zeros((), np.int64)
    for axis, (start, stop) in enumerate(box[: last + 1]):
        places = np.arange(start, start + 1 if axis == last else stop) * math.prod(shape[axis + 1 :])
        starts = starts[..., None] + places
    return starts.ravel().tolist(), volume(box[last:])
