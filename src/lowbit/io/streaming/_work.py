"""The work on one tensor: its chunks, and how each of them is encoded."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lowbit.config import QuantizationConfig, quantize, quantize_calibrated
from lowbit.formats import QuantizedArray
from lowbit.formats.blocks import WHOLE, block_max, block_sum
from lowbit.formats.moments import Moments
from lowbit.models.partition import is_quantized
from lowbit.models.patterns import naming
from lowbit.models.plan import Plan
from lowbit.ops.squares import squares
from lowbit.ops.take import take

from .. import _chunks
from .._chunks import chunks_of, common_units, spans_of_scales, units_of
from .._regions import Region, region_size
from ..readers import Reader

SUMS = ("squares", "products")  # sums over each block: decoded * decoded, and decoded * array


@dataclasses.dataclass(frozen=True)
class Work:
    """A tensor of the source: its result, its chunks, and a function that reads one of them.

    - `like`: the result, with shapes and dtypes only.
    - `made`: what a chunk is encoded to. It differs from `like` if that has scales that are encoded together.
    - `two_pass`: a first pass over the chunks finds the maximum of each scale, a second one encodes them.
    - `moments`: gives the moments of its inputs, to quantize it for them; None without calibration.
    """

    name: str
    config: QuantizationConfig | None
    like: Any
    made: Any
    two_pass: bool
    chunks: list[Region]
    read: Callable[[Region], Any]
    nbytes: int
    moments: Callable[[], Moments] | None = None

    @classmethod
    def planned(
        cls, source: Reader, name: str, planned: Plan, calibration: Mapping[str, Moments] | None = None
    ) -> "Work":
        shape, config = source.shape(name), planned.config
        given = source.chunks(name, as_stored=config is None)
        like = made = given.like
        if config is not None:
            dense = jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(given.like.dtype))
            with naming(name):
                like = made = jax.eval_shape(partial(quantize, config=config), dense)
            if calibration is not None and name in calibration:
                # All inputs of an output are rounded together; outputs can be split.
                units = common_units(given.units, units_of(like))
                units = [WHOLE if a - len(shape) in inputs_of(calibration, name) else n for a, n in enumerate(units)]
                chunks = chunks_of(shape, units, most=_chunks.STRIPE)
                moments = partial(calibration.__getitem__, name)
                return cls(name, config, like, like, False, chunks, given.read, source.nbytes(name), moments)
            if any(getattr(like, component) is not None for component in like.scale_components):
                config = dataclasses.replace(config, double_quant=False)
                made = jax.eval_shape(partial(quantize, config=config), dense)
        shape = getattr(made, "stored_shape", shape)
        chunks = chunks_of(shape, common_units(given.units, units_of(made)))
        able = config is not None and config.format.scale_of_max is not None and given.like.dtype.itemsize <= 4
        two_pass = able and len(chunks) * _chunks.CHUNK < math.prod(shape)
        if two_pass:
            split = [1 if span == WHOLE else span for span in units_of(made)]
            chunks = chunks_of(shape, common_units(given.units, split))
        return cls(name, config, like, made, two_pass, chunks, given.read, source.nbytes(name))

    @property
    def stages_scales(self) -> bool:
        """Whether scales are staged until all of them are known, to be encoded together."""
        return self.made is not self.like

    @property
    def steps(self) -> int:
        """The number of steps: one for each chunk, or two."""
        return len(self.chunks) * (1 + self.two_pass)

    def chunk(self, step: int) -> Region:
        return self.chunks[step % len(self.chunks)]

    def finds_maxima(self, step: int) -> bool:
        """Whether a step belongs to the pass that only finds the maxima."""
        return self.two_pass and step < len(self.chunks)

    def bytes_of(self, step: int) -> int:
        """The bytes of the source that a step counts for: half of the chunk's in each of two passes."""
        size = math.prod(self.like.shape) * (1 + self.two_pass)
        return self.nbytes * region_size(self.chunk(step)) // size if size else 0

    def encoded(self, data: Any, step: int, maxima: np.ndarray | None) -> tuple[dict[str, Any], tuple[float, ...]]:
        """The components of a chunk, and the sums of squares of its error and of its values.

        With calibration, also those of the errors of its outputs without and with it and of its outputs, and whether
        there were second moments.
        """
        if self.config is None:
            return data.components() if is_quantized(data) else {"": data}, (0, 0)
        if self.moments is not None:
            return self.calibrated(self.config, data, self.chunk(step))
        if self.finds_maxima(step):
            stored, sums = {"maxima": np.asarray(_maxima(data, self.made.spans))}, (0, 0)
            finite = bool(np.isfinite(stored["maxima"]).all())
        else:
            scale = None if maxima is None else self.scale_of(maxima)
            array, lost, size, block_sums = _encoded(data, self.config, self.stages_scales, scale)
            sums = float(np.asarray(lost).sum(dtype=np.float64)), float(np.asarray(size).sum(dtype=np.float64))
            stored, finite = array.components() | block_sums, math.isfinite(sums[0])
            if self.two_pass:
                del stored["scales"]
        if not finite:
            # Outside of jit this raises an error about NaN or infinity; if it does not, only the squares overflow.
            where = "" if len(self.chunks) == 1 else f"[{', '.join(f'{a}:{b}' for a, b in self.chunk(step))}]"
            with naming(f"{self.name}{where}"):
                quantize(data, self.config)
        return stored, (sums[1], sums[1]) if self.stages_scales else sums

    def calibrated(self, config: QuantizationConfig, data: Any, chunk: Region) -> tuple[Any, tuple[float, ...]]:
        """A chunk, quantized for the inputs that it is multiplied with."""
        assert self.moments is not None
        with naming(self.name):
            moments = self.moments().of_region(chunk)
            found = quantize_calibrated(jnp.asarray(data), config, moments)  # raises if a value is not finite
        sums = (float(np.asarray(x).sum(dtype=np.float64)) for x in _squares(found.array, jnp.asarray(data)))
        outputs = (float(x) for x in (found.before * found.size, found.after * found.size, found.size))
        return found.array.components(), (*sums, *outputs, float(moments.hessian is not None))

    def spans(self) -> dict[str, tuple[int, ...]]:
        """The spans of each component of a chunk, and of each value that is staged."""
        spans = spans_of_scales(self.made)
        return spans | dict.fromkeys(self.staged(), spans.get("scales", ()))

    def staged(self) -> dict[str, Any]:
        """Values that are staged until the whole tensor is read: maxima, or scales and the sums over each block.

        The sums give the error of the tensor after its scales are encoded.
        """
        fields = ("scales", *SUMS) if self.stages_scales else ("maxima",) if self.two_pass else ()
        return dict.fromkeys(fields, getattr(self.made, "scales", None))

    def scale_of(self, maxima: np.ndarray) -> jax.Array:
        assert self.config is not None and self.config.format.scale_of_max is not None
        return self.config.format.scale_of_max(jnp.asarray(maxima))


_maxima = jax.jit(block_max, static_argnums=1)
_squares = jax.jit(squares)


def inputs_of(calibration: Mapping[str, Moments], name: str) -> tuple[int, ...]:
    """The axes of the inputs of a tensor, without its moments if the calibration computes them when asked."""
    known = getattr(calibration, "inputs_of", None)
    return calibration[name].inputs if known is None else known(name)


@partial(jax.jit, static_argnums=(1, 2))
def _encoded(
    array: jax.Array, config: QuantizationConfig, by_block: bool, scale: jax.Array | None
) -> tuple[QuantizedArray, jax.Array, jax.Array, dict[str, jax.Array]]:
    """A quantized chunk, and the sums of squares of its error and of its values, by row.

    `by_block`: also `SUMS`, for each scale. `scale`: the scales, if they are known from a first pass.
    """
    scale = None if scale is None else jnp.where(scale == 0, 1, scale)  # any scale encodes zeros as 0
    # The barrier keeps the measurement from changing how the compiler rounds.
    stored = lax.optimization_barrier(quantize(array, config, scale=scale))
    lost, size = squares(stored, array)
    if not by_block:
        return stored, lost, size, {}
    # A matrix is decoded by the kernel for rows.
    full = stored.replace(dtype=np.dtype(np.float32))
    read = take(full, jnp.arange(full.shape[0])[:, None]) if full.ndim == 2 else full.decode()
    sums = (block_sum(read * x, stored.spans) for x in (read, array.astype(jnp.float32)))
    return stored, lost, size, dict(zip(SUMS, sums, strict=True))
