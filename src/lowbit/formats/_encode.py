"""Encode a dense array: the step of `quantize` that has a kernel."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import lax

from lowbit.dispatch import by_platform, find_kernels, nearest, use_kernel


def encode(reference: Callable[..., Any], array: jax.Array, spans: tuple[int, ...], format: str) -> Any:
    """Compute `reference(array, spans)`, codes and scales, in a kernel that gives the same bits where there is one."""
    array = lax.stop_gradient(array)
    like = jax.eval_shape(partial(reference, spans=spans), array)
    params = {"spans": spans, "format": format, "like": like}
    kernels = find_kernels("encode", array, **params) if nearest(use_kernel.value, True) else {}
    return by_platform(kernels, lambda array, **_: reference(array, spans), array, **params)
