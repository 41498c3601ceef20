"""How the weights of a tensor lie between the levels of its format."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowbit.formats import QuantizedArray
from lowbit.formats._blocks import spread

BINS = 64
_SAMPLE = 1 << 20  # levels are read off so many weights


@dataclasses.dataclass(frozen=True)
class Histogram:
    """Counts of weight / scale, and the levels that weights are rounded to.

    - `counts`: in bins of one width from -`limit` to `limit`; weights beyond it, few and far out, are in none.
    - `levels`: those in use; none for an array that is no array of ours. Then the weights are counted as they are.
    """

    path: str
    limit: float
    counts: tuple[int, ...]
    levels: tuple[float, ...]


def histogram(path: str, original: Any, stored: Any) -> Histogram:
    """The histogram of an array in the unit of the scales it is stored with.

    >>> import jax.numpy as jnp, lowbit
    >>> w = jnp.array([[-3.0, -1.0, 0.5, 3.0]])
    >>> found = histogram("w", w, lowbit.quantize(w, "ternary"))
    >>> found.levels, sum(found.counts)
    ((-1.0, 0.0, 1.0), 4)
    """
    levels: tuple[float, ...] = ()
    if isinstance(stored, QuantizedArray):
        weights, rounded = map(np.asarray, _in_scales(stored, original))
        # An odd step: an even one may meet one column only.
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
    """The weights in the unit of their scales, and the levels they were rounded to, both as stored."""
    stored, shape = stored.resolved(), stored.stored_shape
    scales = spread(stored.scale_values(), stored.spans, shape)
    levels = stored.unpacked_levels(*(getattr(stored, name) for name in stored.packing), length=shape[-1])
    weights = stored.logical_view(jnp.asarray(original)).astype(jnp.float32)
    return weights / jnp.where(scales == 0, 1, scales), levels
