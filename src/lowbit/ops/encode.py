"""Codes and scales of a dense array: the step of `quantize` that is worth a kernel."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import lax

from lowbit.kernels._table import use_kernel

from .choice import first, run


def encode(reference: Callable[..., Any], array: jax.Array, spans: tuple[int, ...], format: str) -> Any:
    """`reference(array, spans)`, the codes and scales, by a kernel that gives the same bits where there is one."""
    default = partial(reference, spans=spans)
    like = jax.eval_shape(default, array)
    kernel = first(use_kernel.value, True)
    return run("encode", default, lax.stop_gradient(array), kernel=kernel, spans=spans, format=format, like=like)
