"""Regions of an array: a start and a stop along each axis."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Region = tuple[tuple[int, int], ...]


def region_of(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Region:
    """The region of an index in the form that `jax.sharding.Sharding.devices_indices_map` returns."""
    return tuple(s.indices(n)[:2] for s, n in zip(index or (), shape, strict=True))


def full_region(shape: Sequence[int]) -> Region:
    return tuple((0, n) for n in shape)


def intersection(a: Region, b: Region) -> Region:
    return tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))


def region_shape(region: Region) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in region)


def region_size(region: Region) -> int:
    return math.prod(max(stop - start, 0) for start, stop in region)


def slices(region: Region, within: Region) -> Any:
    """The index of a region in an array that holds the region `within`."""
    # The ellipsis makes the result an array even if it has no axes.
    return (..., *(slice(a - first, b - first) for (a, b), (first, _) in zip(region, within, strict=True)))


def contiguous_runs(shape: Sequence[int], region: Region) -> tuple[list[int], int]:
    """The contiguous runs of a region in a C-ordered array: where each starts, in elements, and their length.

    >>> contiguous_runs((4, 6), ((1, 3), (0, 6)))
    ([6], 12)
    >>> contiguous_runs((4, 6), ((1, 3), (2, 4)))
    ([8, 14], 2)
    """
    partial = [axis for axis, n in enumerate(shape) if region[axis] != (0, n)]
    last = partial[-1] if partial else 0
    starts = np.zeros((), np.int64)
    for axis, (start, stop) in enumerate(region[: last + 1]):
        indices = np.arange(start, start + 1 if axis == last else stop) * math.prod(shape[axis + 1 :])
        starts = starts[..., None] + indices
    return starts.ravel().tolist(), region_size(region[last:])
