"""Which program runs an operation: a kernel where the table has one for the platform, the reference elsewhere.

The table knows neither formats nor kernels: kernels register themselves, and operations ask for those that take their
operands.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax import lax

from lowbit.runtime import Setting
from lowbit.runtime._compat import match_varying


class Kernel(NamedTuple):
    """An implementation of an operation, and which operands it takes."""

    run: Callable[..., Any]
    fits: Callable[..., bool]
    available: Callable[[], bool]


# operation -> platform ("cpu", "tpu", "cuda") -> implementation
_kernels: dict[str, dict[str, Kernel]] = {}

use_kernel: Setting[bool | None] = Setting("use_kernel", None, (True, False, None))
"""Whether products run in fused kernels where there are some; None leaves it to each array. In a `with` statement it
holds in the block and its thread; `use_kernel.set` sets it for the process.

>>> import jax.numpy as jnp, lowbit
>>> x, q = jnp.ones((2, 64)), lowbit.quantize(jnp.ones((64, 32)), dtype="int8")
>>> with lowbit.use_kernel(False):
...     y = x @ q
>>> y[0, 0]
Array(64., dtype=float32)
"""

compute: Setting[str | None] = Setting("compute", None, ("exact", "fast", None))
"""The arithmetic of products: "exact" keeps activations as they are, "fast" rounds them to 8 bits where a kernel can.
None leaves it to each array. Gradients are always exact. In a `with` statement it holds in the block and its thread;
`compute.set` sets it for the process.

>>> import jax.numpy as jnp, lowbit
>>> x, q = jnp.ones((2, 64)), lowbit.quantize(jnp.ones((64, 32)), dtype="int8")
>>> with lowbit.compute("fast"):
...     y = x @ q
>>> bool(abs(y[0, 0] - 64) < 1)
True
"""


def register_kernel(
    operation: str,
    platform: str,
    run: Callable[..., Any],
    fits: Callable[..., bool],
    available: Callable[[], bool] = lambda: True,
) -> None:
    """Add an implementation.

    `run` and `fits` take the same arguments, a `Product` for "matmul"; `fits` depends on shapes and dtypes only.
    `available` says whether the installed JAX can run it.
    """
    _kernels.setdefault(operation, {})[platform] = Kernel(run, fits, available)


def find_kernels(operation: str, *operands: Any, **params: Any) -> dict[str, Callable[..., Any]]:
    """Find the kernels that take these operands, by platform."""
    rows = _kernels.get(operation, {})
    return {platform: kernel.run for platform, kernel in rows.items() if kernel.fits(*operands, **params)}


def is_kernel_available() -> bool:
    """Whether products on the default backend run in a fused kernel.

    >>> import lowbit
    >>> lowbit.is_kernel_available() in (True, False)
    True
    """
    platform = jax.default_backend()
    if platform == "gpu":  # the name that CUDA and ROCm share
        platform = "cuda" if "cuda" in jax.devices()[0].client.platform_version.lower() else "rocm"
    kernel = _kernels.get("matmul", {}).get(platform)
    return kernel is not None and kernel.available()


def nearest(*choices: Any) -> Any:
    """The first choice that is not None: pass the argument of the call, then the setting, then the array's own."""
    return next(choice for choice in choices if choice is not None)


def by_platform(
    kernels: Mapping[str, Callable[..., Any]], reference: Callable[..., Any], *operands: Any, **params: Any
) -> Any:
    """Run the kernel of the platform for which the program is lowered, and the reference on others."""
    if not kernels:
        return reference(*operands, **params)

    # JAX cannot see into a kernel, so the mesh axes over which its result varies are stated.
    def typed(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*operands: Any) -> Any:
            results, tree = jax.tree.flatten(kernel(*operands, **params))
            return jax.tree.unflatten(tree, match_varying([*results, *jax.tree.leaves(operands)])[: len(results)])

        return call

    chosen = {platform: typed(kernel) for platform, kernel in kernels.items()}
    return lax.platform_dependent(*operands, default=typed(reference), **chosen)
