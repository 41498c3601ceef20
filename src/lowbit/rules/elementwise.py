"""Arithmetic that acts on the scales alone. All other elementwise primitives go dense."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from lowbit.formats.quantized import QuantizedArray
from lowbit.runtime import register


def _scaled(w: QuantizedArray, by: Any, divide: bool = False) -> Any:
    # A traced number may be differentiated, and gradients stop at the scales.
    if isinstance(by, Tracer) or np.ndim(by) or not jnp.issubdtype(w.dtype, jnp.floating):
        return NotImplemented
    return w.divided_by(by) if divide else w.times(by)


@register("mul")
def _(w: QuantizedArray, number: jax.Array) -> Any:
    return _scaled(w, number)


@register("div")
def _(w: QuantizedArray, number: jax.Array) -> Any:
    return _scaled(w, number, divide=True)


@register("neg")
def _(w: QuantizedArray) -> Any:
    return _scaled(w, -1)
