"""Which block of each operand a step of the grid holds.

The index maps take the place in the grid and what is prefetched: the numbers of the layers in the stack, and for groups
of rows what each step visits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from jax.experimental import pallas as pl

from .decode import lookup_table
from .tiling import LANES, SUBLANES, Tiling, round_up


class Place(NamedTuple):
    """What a step of the grid holds: layer of the stack, matrix of the batch, tiles of rows, columns, summed axis."""

    layer: Any
    batch: Any
    m: Any
    n: Any
    k: Any


def grid_of(tiling: Tiling) -> tuple[int, int, int, int]:
    """The grid as the kernel walks it, the last axis fastest.

    A tile of y stays in memory from one step to the next, so visits of the same tile of rows follow each other.
    """
    batch, m, n, k = tiling.grid
    return (batch, n, m, k) if tiling.steps else (batch, m, n, k)


def place_of(tiling: Tiling, *at: Any) -> Place:
    """The place of a step, from its index in the grid and the prefetched arrays."""
    if tiling.steps:
        b, n, step, k, layers, tiles, *_ = at
        return Place(layers[step], b, tiles[step], n, k)
    b, m, n, k, layers = at
    return Place(layers[b], b, m, n, k)


def _block(tiling: Tiling, shape: tuple[int, ...], index: Callable[[Place], Any]) -> pl.BlockSpec:
    return pl.BlockSpec(shape, lambda *at: index(place_of(tiling, *at)))


def in_specs(tiling: Tiling) -> list[pl.BlockSpec]:
    """Of each component of codes, scales or what they are decoded from, a table, x, and the factors of its rows."""
    sizes, (rows, columns) = tiling.sizes, tiling.tile

    block = partial(_block, tiling)

    def codes(at: Place) -> Any:
        return at.layer, *tiling.stored(at.n, at.k)

    table = lookup_table(tiling)
    factors = block((1, sizes.m, 1), lambda at: (at.batch, at.m, 0))
    return [
        *(block((1, rows, columns // per_byte), codes) for per_byte in tiling.packing),
        *_scale_specs(tiling),
        *([] if table is None else [pl.BlockSpec(table.shape, lambda *at: (0, 0))]),
        block((1, sizes.m, sizes.k), lambda at: (at.batch, at.m, at.k)),
        *([factors] if tiling.fast else []),  # where x is in 8 bits
    ]


def out_spec(tiling: Tiling) -> pl.BlockSpec:
    return _block(tiling, (1, tiling.sizes.m, tiling.sizes.n), lambda at: (at.batch, at.m, at.n))


@dataclass(frozen=True)
class Window:
    """The scales that a step holds along an axis: `length` of them.

    The window moves on every `repeat` tiles, or never if `repeat` is 0; `tile` is the length of a tile in weights.
    """

    length: int
    repeat: int
    tile: int

    def index(self, step: Any) -> Any:
        """The number of the window that this step of the axis holds."""
        if self.repeat == 1:
            return step
        return step // self.repeat if self.repeat else 0

    def offset(self, step: Any) -> Any:
        """How many weights lie between the start of the window and the tile of this step."""
        if self.repeat == 1:
            return 0
        return (step % self.repeat if self.repeat else step) * self.tile


def scale_windows(tiling: Tiling) -> tuple[Window, Window]:
    """The windows of scales along stored rows and columns. A window is a whole number of sublanes or lanes."""
    steps = tiling.stored(tiling.grid[2], tiling.grid[3])

    def window(tile: int, span: int, count: int, unit: int) -> Window:
        cover = span * unit
        if count == 1 or tile % cover == 0:
            return Window(round_up(-(-tile // span), unit), 1, tile)
        if cover % tile == 0:
            return Window(unit, cover // tile, tile)
        return Window(round_up(-(-tile * count // span), unit), 0, tile)

    # Codes of 8 bits fill a sublane by fours.
    sublanes = 4 * SUBLANES if tiling.coded else SUBLANES
    rows, columns = map(window, tiling.tile, tiling.spans, steps, (sublanes, LANES))
    return rows, columns


def _scale_specs(tiling: Tiling) -> list[pl.BlockSpec]:
    sizes, block = tiling.sizes, partial(_block, tiling)
    if tiling.folded == "x":
        return [block((1, 1, sizes.k), lambda at: (at.layer, 0, at.k))]
    if tiling.folded == "y":
        return [block((1, 1, sizes.n), lambda at: (at.layer, 0, at.n))]
    windows = scale_windows(tiling)

    def spec(wholes: tuple[bool, bool]) -> pl.BlockSpec:
        """Of a component that has one element along some axes, for which nothing moves."""

        def index(at: Place) -> Any:
            steps = zip(windows, tiling.stored(at.n, at.k), wholes, strict=True)
            return at.layer, *(0 if whole else window.index(step) for window, step, whole in steps)

        lengths = (1 if whole else window.length for window, whole in zip(windows, wholes, strict=True))
        return block((1, *lengths), index)

    return [spec(wholes) for wholes in tiling.coded.values()] if tiling.coded else [spec((False, False))]
