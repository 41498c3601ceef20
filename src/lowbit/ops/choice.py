"""Which program runs an operation: a kernel where there is one for the platform, the reference elsewhere."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
from jax import lax

from lowbit.runtime._compat import match_varying


def nearest(*choices: Any) -> Any:
    """The value that is set nearest to the call: by the call itself, by a setting around it, by the array.

    Each is None where it leaves the choice to the next.
    """
    return next(choice for choice in choices if choice is not None)


def by_platform(
    kernels: Mapping[str, Callable[..., Any]], reference: Callable[..., Any], *operands: Any, **params: Any
) -> Any:
    """Run the kernel of the platform for which the program is lowered, and the reference on others."""
    if not kernels:
        return reference(*operands, **params)

    # JAX does not look into a kernel, so the mesh axes over which its result varies have to be stated.
    def typed(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*operands: Any) -> Any:
            results, tree = jax.tree.flatten(kernel(*operands, **params))
            return jax.tree.unflatten(tree, match_varying([*results, *jax.tree.leaves(operands)])[: len(results)])

        return call

    chosen = {platform: typed(kernel) for platform, kernel in kernels.items()}
    return lax.platform_dependent(*operands, default=partial(reference, **params), **chosen)
