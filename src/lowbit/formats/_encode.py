"""Encode a dense array: the step of `quantize` that has a kernel."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from lowbit.dispatch import by_platform, find_kernels, nearest, use_kernel


def encode(operation: str, reference: Callable[[jax.Array], Any], array: jax.Array, **params: Any) -> Any:
    """Compute `reference(array)`, codes and scales, in a kernel that gives the same bits where there is one."""
    array = lax.stop_gradient(array)
    params["like"] = jax.eval_shape(reference, array)
    kernels = find_kernels(operation, array, **params) if nearest(use_kernel.value, True) else {}
    return by_platform(kernels, lambda array, **_: reference(array), array, **params)
