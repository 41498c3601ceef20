"""Which program runs an operation: a kernel where there is one for the platform, the reference elsewhere."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jax import lax


def first(*choices: Any) -> Any:
    """The first choice that was made."""
    return next(choice for choice in choices if choice is not None)


def by_platform(
    kernels: Mapping[str, Callable[..., Any]], reference: Callable[..., Any], *operands: Any, **params: Any
) -> Any:
    """The kernel of the platform for which the program is lowered, the reference on others."""
    if not kernels:
        return reference(*operands, **params)
    chosen = {platform: partial(kernel, **params) for platform, kernel in kernels.items()}
    return lax.platform_dependent(*operands, default=partial(reference, **params), **chosen)
