"""Which program runs an operation: a kernel where there is one for the platform, the reference elsewhere."""

from collections.abc import Callable
from functools import partial
from typing import Any

from jax import lax

from lowbit.kernels._table import find_kernels


def first(*choices: Any) -> Any:
    """The first choice that was made."""
    return next(choice for choice in choices if choice is not None)


def run(operation: str, default: Callable[..., Any], *operands: Any, kernel: bool, **params: Any) -> Any:
    """`default(*operands)`, or if `kernel` the one for the platform for which the program is lowered."""
    kernels = find_kernels(operation, *operands, **params) if kernel else {}
    if not kernels:
        return default(*operands)
    by_platform = {platform: partial(kernel, **params) for platform, kernel in kernels.items()}
    return lax.platform_dependent(*operands, default=default, **by_platform)
