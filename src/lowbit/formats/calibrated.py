"""Quantize a weight for the inputs that it is multiplied with: by a weighted search for scales, and by GPTQ."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from .blocks import span_of
from .gptq import SortedLevels, lost, round_by_moments
from .moments import Moments
from .quantized import QuantizedArray
from .search import by_blocks, joined, search_scale, weights_of_inputs
from .table import Format


class Calibrated(NamedTuple):
    """A weight quantized with calibration data.

    - `before`, `after`: the output error |X (W - Q)|^2 / |X W|^2 without the data and with it. With diagonals only,
      products of different inputs are taken to cancel.
    - `kept`: whether the data did not help, and `array` is the one without.
    - `size`: |X W|^2, of which the errors are fractions.
    """

    array: QuantizedArray
    before: jax.Array
    after: jax.Array
    kept: jax.Array
    size: jax.Array


def calibrated(format: Format, options: Mapping[str, Any], weight: jax.Array, moments: Moments) -> Calibrated:
    """Quantize a weight to a format with these options: GPTQ if there are second moments, a weighted search if not."""
    if tuple(weight.shape) != moments.shape:
        raise ValueError(f"A weight of shape {tuple(weight.shape)} does not fit moments of one of {moments.shape}.")
    quantize = partial(format.quantize, **options)
    plain = quantize(weight)
    chooses = options.get("search") is not False and not options.get("absmean")
    found = _searched(format, quantize, weight, plain, moments) if chooses else plain
    size = _squared(weight, None, moments)
    before = _squared(weight, plain, moments)
    if moments.hessian is None:
        after = _squared(weight, found, moments)
    else:
        found, after = round_by_moments(weight, found, moments)
    before, after = (_relative(lost, size) for lost in (before, after))
    worse = ~(after <= before)
    if not isinstance(worse, Tracer):
        array = plain if worse else found
    else:
        array = jax.tree.map(partial(jnp.where, worse), plain, found)
    return Calibrated(array, before, jnp.where(worse, before, after), worse, size)


def _searched(
    format: Format, quantize: Callable[..., QuantizedArray], weight: jax.Array, plain: QuantizedArray, moments: Moments
) -> QuantizedArray:
    """The weight with the scales of the least error weighted by the inputs; as it is where scales are not chosen."""
    axes = plain.scale_axes
    if format.layout is not None:
        searches = format.layout.weighting is not None and len(axes) == 1
        return quantize(weight, importance=_along(axes[0], moments)) if searches else plain
    if format.top is None or len(axes) != 1 or plain.coded_scales() is not None:
        return plain
    levels, (axis,) = SortedLevels.of(plain), axes
    scales = _scales(weight, plain.scale_values(), levels, moments, axis, span_of(plain.spans, axis))
    return quantize(weight, scale=scales)


def _along(axis: int, moments: Moments) -> jax.Array:
    """The importance of inputs, with the size of the weight along the axis of its blocks, whatever the inputs' axis."""
    found = moments.importance()
    shape = list(found.shape)
    shape[axis] = moments.shape[axis]
    return jnp.broadcast_to(found, shape)


@partial(jax.jit, static_argnums=(2, 4, 5))
def _scales(
    weight: jax.Array, start: jax.Array, levels: SortedLevels, moments: Moments, axis: int, span: int
) -> jax.Array:
    """The scales near those at the start with the least weighted error."""
    blocks, _, _ = by_blocks(weight.astype(jnp.float32), axis, span)
    weights = weights_of_inputs(blocks, _along(axis, moments), axis, span, jnp.ones_like(blocks))
    largest = jnp.moveaxis(start, axis, -1)[..., None, None] * levels.largest
    scales = search_scale(blocks, weights, largest, levels, lambda scales: scales, signed=False)
    # A scale must be positive, also of a block of zeros.
    return jnp.maximum(joined(scales, axis, scales.shape[-3]), 1e-30)


def output_error(weight: jax.Array, array: QuantizedArray, moments: Moments) -> jax.Array:
    """|X (W - Q)|^2 / |X W|^2 of the rows X that the moments were collected from."""
    return _relative(_squared(weight, array, moments), _squared(weight, None, moments))


def _relative(error: jax.Array, size: jax.Array) -> jax.Array:
    return error / jnp.where(size > 0, size, 1)


@jax.jit
def _squared(weight: jax.Array, array: QuantizedArray | None, moments: Moments) -> jax.Array:
    """|X (W - Q)|^2, or |X W|^2 without Q."""
    wide = weight.astype(jnp.float32)
    error = moments.as_matrices(wide if array is None else wide - array.materialize().astype(jnp.float32))
    if moments.hessian is None:
        return jnp.sum(jnp.asarray(moments.diag).reshape(-1, moments.k, 1) * error * error)
    h = jnp.asarray(moments.hessian).reshape(-1, moments.k, moments.k)
    return jnp.sum(lax.map(lambda given: lost(*given), (error, h)))
