"""Which block of each operand a step of the grid holds.

The index maps take the place in the grid (matrix of the batch, rows, columns, step of the summed axis) and the numbers
of the layers in the stack, which are prefetched.
"""

from dataclasses import dataclass
from typing import Any

from jax.experimental import pallas as pl

from .tiling import LANES, SUBLANES, Tiling, round_up


def in_specs(tiling: Tiling) -> list[pl.BlockSpec]:
    """Of codes, scales and x; and, where x is in 8 bits, of the factors of its rows."""
    sizes, (rows, columns) = tiling.sizes, tiling.tile

    def codes(b: Any, m: Any, n: Any, k: Any, layers: Any) -> Any:
        return layers[b], *tiling.stored(n, k)

    specs = [
        pl.BlockSpec((1, rows, columns // tiling.per_byte), codes),
        _scale_spec(tiling),
        pl.BlockSpec((1, sizes.m, sizes.k), lambda b, m, n, k, layers: (b, m, k)),
    ]
    factors = pl.BlockSpec((1, sizes.m, 1), lambda b, m, n, k, layers: (b, m, 0))
    return [*specs, factors] if tiling.fast else specs


def out_spec(tiling: Tiling) -> pl.BlockSpec:
    return pl.BlockSpec((1, tiling.sizes.m, tiling.sizes.n), lambda b, m, n, k, layers: (b, m, n))


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

    rows, columns = map(window, tiling.tile, tiling.spans, steps, (SUBLANES, LANES))
    return rows, columns


def _scale_spec(tiling: Tiling) -> pl.BlockSpec:
    sizes = tiling.sizes
    if tiling.folded == "x":
        return pl.BlockSpec((1, 1, sizes.k), lambda b, m, n, k, layers: (layers[b], 0, k))
    if tiling.folded == "y":
        return pl.BlockSpec((1, 1, sizes.n), lambda b, m, n, k, layers: (layers[b], 0, n))
    rows, columns = scale_windows(tiling)

    def index(b: Any, m: Any, n: Any, k: Any, layers: Any) -> Any:
        row, column = tiling.stored(n, k)
        return layers[b], rows.index(row), columns.index(column)

    return pl.BlockSpec((1, rows.length, columns.length), index)
