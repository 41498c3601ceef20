"""The pieces of a tensor: how it is cut, and what each of them becomes."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lowbit.config import QuantizationConfig, quantize
from lowbit.formats import QuantizedArray
from lowbit.formats._blocks import WHOLE, block_max, block_sum
from lowbit.models.patterns import naming
from lowbit.models.plan import Plan
from lowbit.ops.squares import squares
from lowbit.ops.take import take

from . import _boxes
from ._boxes import boxes_of, common_units, part_spans_of, units_of
from ._contents import volume
from ._processes import Box
from ._reading import reader
from .source import Tensors

SUMS = ("squares", "products")  # of each block: read * read, and read * array


@dataclasses.dataclass(frozen=True)
class Work:
    """A tensor of the source: what it becomes, the boxes in which it is cut, and what reads one of them.

    - `made`: what a piece is made into. It differs from `like` where that has its scales coded all together.
    - `twice`: the pieces are gone through once before, for the largest numbers.
    """

    name: str
    config: QuantizationConfig | None
    like: Any
    made: Any
    twice: bool
    boxes: list[Box]
    read: Callable[[Box], Any]
    nbytes: int

    @classmethod
    def planned(cls, source: Tensors, name: str, planned: Plan) -> "Work":
        shape, config = source.shape(name), planned.config
        given, units, read = reader(source, name, config is None)
        like = made = given
        if config is not None:
            dense = jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(given.dtype))
            with naming(name):
                like = made = jax.eval_shape(partial(quantize, config=config), dense)
            if any(getattr(like, part) is not None for part in like.scale_parts):
                config = dataclasses.replace(config, double_quant=False)
                made = jax.eval_shape(partial(quantize, config=config), dense)
        shape = getattr(made, "stored_shape", shape)
        boxes = boxes_of(shape, common_units(units, units_of(made)))
        able = config is not None and config.format.scale_of_max is not None and given.dtype.itemsize <= 4
        twice = able and len(boxes) * _boxes.PIECE < math.prod(shape)
        if twice:
            boxes = boxes_of(shape, common_units(units, [1 if span == WHOLE else span for span in units_of(made)]))
        return cls(name, config, like, made, twice, boxes, read, source.nbytes(name))

    @property
    def waits(self) -> bool:
        """Whether scales wait until all are there."""
        return self.made is not self.like

    @property
    def steps(self) -> int:
        """In how many steps it is done: one for each piece, or two."""
        return len(self.boxes) * (1 + self.twice)

    def box(self, step: int) -> Box:
        return self.boxes[step % len(self.boxes)]

    def looks(self, step: int) -> bool:
        """Whether a step looks for the largest numbers only."""
        return self.twice and step < len(self.boxes)

    def bytes_of(self, step: int) -> int:
        """How many bytes of the source a step is; half of them if it takes two steps."""
        size = math.prod(self.like.shape) * (1 + self.twice)
        return self.nbytes * volume(self.box(step)) // size if size else 0

    def encoded(self, data: Any, step: int, largest: np.ndarray | None) -> tuple[dict[str, Any], tuple[float, float]]:
        """The parts of a piece as they are stored, and the squares of what it lost and was."""
        if self.config is None:
            return {field: getattr(data, field) if field else data for field in self.spans()}, (0, 0)
        if self.looks(step):
            stored, sums = {"largest": np.asarray(_largest(data, self.made.spans))}, (0, 0)
            finite = bool(np.isfinite(stored["largest"]).all())
        else:
            scale = None if largest is None else self.scale_of(largest)
            array, lost, size, aside = _encoded(data, self.config, self.waits, scale)
            sums = float(np.asarray(lost).sum(dtype=np.float64)), float(np.asarray(size).sum(dtype=np.float64))
            stored, finite = array.parts() | aside, math.isfinite(sums[0])
            if self.twice:
                del stored["scales"]
        if not finite:
            # Outside of jit it says what is wrong with the numbers, if it is not only that their squares overflow.
            cut = "" if len(self.boxes) == 1 else f"[{', '.join(f'{a}:{b}' for a, b in self.box(step))}]"
            with naming(f"{self.name}{cut}"):
                quantize(data, self.config)
        return stored, (sums[1], sums[1]) if self.waits else sums

    def spans(self) -> dict[str, tuple[int, ...]]:
        """How many elements one of each part of a piece covers, along the last axes."""
        spans = part_spans_of(self.made)
        return spans | dict.fromkeys(self.aside(), spans.get("scales", ()))

    def aside(self) -> dict[str, Any]:
        """What waits: the scales, and the sums of each block by which the error is known when they are others."""
        fields = ("scales", *SUMS) if self.waits else ("largest",) if self.twice else ()
        return dict.fromkeys(fields, getattr(self.made, "scales", None))

    def scale_of(self, largest: np.ndarray) -> jax.Array:
        assert self.config is not None and self.config.format.scale_of_max is not None
        return self.config.format.scale_of_max(jnp.asarray(largest))


_largest = jax.jit(block_max, static_argnums=1)


@partial(jax.jit, static_argnums=(1, 2))
def _encoded(
    array: jax.Array, config: QuantizationConfig, by_block: bool, scale: jax.Array | None
) -> tuple[QuantizedArray, jax.Array, jax.Array, dict[str, jax.Array]]:
    """A piece as it is stored, and the squares of what it lost and of what it was: of each row, for all cores.

    `by_block`: also `SUMS`, for each scale. `scale`: where it is known before.
    """
    scale = None if scale is None else jnp.where(scale == 0, 1, scale)  # of zeros all codes are 0, by any scale
    # What is measured must not change how the compiler rounds.
    stored = lax.optimization_barrier(quantize(array, config, scale=scale))
    lost, size = squares(stored, array)
    if not by_block:
        return stored, lost, size, {}
    # Matrices are decoded by the kernel for rows.
    full = stored.replace(dtype=np.dtype(np.float32))
    read = take(full, jnp.arange(full.shape[0])[:, None]) if full.ndim == 2 else full.decode()
    sums = (block_sum(read * x, stored.spans) for x in (read, array.astype(jnp.float32)))
    return stored, lost, size, dict(zip(SUMS, sums, strict=True))
