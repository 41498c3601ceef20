"""Histograms of weights in units of their scales, with the levels of the format."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowbit.formats import PermutedArray, QuantizedArray
from lowbit.formats.blocks import spread

BINS = 64
_SAMPLE = 1 << 20  # the number of weights from which the levels in use are read


@dataclasses.dataclass(frozen=True)
class Histogram:
    """Counts of weight / scale, and the levels that the weights are rounded to.

    - `counts`: in bins of equal width from -`limit` to `limit`; the few outliers beyond it are not counted.
    - `levels`: the levels in use; empty for an array that is not quantized, whose weights are counted unscaled.
    """

    path: str
    limit: float
    counts: tuple[int, ...]
    levels: tuple[float, ...]


def histogram(path: str, original: Any, stored: Any) -> Histogram:
    """The histogram of an array in units of the scales that it is stored with.

    >>> import jax.numpy as jnp, lowbit
    >>> w = jnp.array([[-3.0, -1.0, 0.5, 3.0]])
    >>> found = histogram("w", w, lowbit.quantize(w, "ternary", axis=-1))
    >>> found.levels, sum(found.counts)
    ((-1.0, 0.0, 1.0), 4)
    """
    levels: tuple[float, ...] = ()
    if isinstance(stored, PermutedArray):
        original, stored = stored.in_stored_order(original), stored.array
    if isinstance(stored, QuantizedArray):
        weights, rounded = map(np.asarray, _in_scales(stored, original))
        # The step is odd, since an even one may sample a single column.
        levels = tuple(np.unique(rounded.ravel()[:: rounded.size // _SAMPLE | 1]).tolist())
    else:
        weights = np.asarray(original).astype(np.float32)
    weights = weights[np.isfinite(weights)]
    largest = float(np.abs(weights).max(initial=0))
    usual = 6 * math.sqrt(np.square(weights, dtype=np.float64).mean()) if weights.size else 0.0
    limit = min(largest, max(usual, *map(abs, levels), 0.0)) or 1.0
    counts, _ = np.histogram(weights, BINS, (-limit, limit))
    return Histogram(path, limit, tuple(counts.tolist()), levels)


@jax.jit
def _in_scales(stored: QuantizedArray, original: Any) -> tuple[jax.Array, jax.Array]:
    """The weights in units of their scales, and the levels that they were rounded to, both in stored order."""
    stored, shape = stored.resolved(), stored.stored_shape
    scales = spread(stored.scale_values(), stored.spans, shape)
    levels = stored.unpacked_levels(*(getattr(stored, name) for name in stored.packing), length=shape[-1])
    weights = stored.logical_view(jnp.asarray(original)).astype(jnp.float32)
    return weights / jnp.where(scales == 0, 1, scales), levels
