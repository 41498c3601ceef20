"""Kernels, and the reference beside them, that are traced when a program is lowered for their platform.

JAX traces a product for every platform, since it is compiled for one of them later. Tracing a kernel takes longer than
the rest of a product, importing Pallas longer still, and most programs never need the kernels of other platforms. The
device is known only then, too. In a program for several platforms JAX lowers every branch for all of them, which Pallas
refuses: there the reference takes the place of the kernel.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from lowbit.runtime._compat import Device, device_of, lowering_for

from . import reference
from .product import Product

_kernel_p = Primitive("lowbit_kernel")


def when_lowered(
    kernel: Callable[..., jax.Array], product: Product, platform: str, default: Device | None = None
) -> jax.Array:
    """Run `kernel(product, device)` for the device that the program is lowered for, if that is of the platform.

    `default` is the device to lower for if none is known. Without one, and on other platforms, the reference runs.
    """
    leaves, tree = jax.tree.flatten(product)
    return _kernel_p.bind(*leaves, kernel=kernel, tree=tree, platform=platform, default=default)


def reference_when_lowered(product: Product) -> jax.Array:
    """As `reference.matmul`, which takes longer to trace than everything else of a product that has a kernel."""
    return when_lowered(_no_kernel, product, "")


def _no_kernel(product: Product, device: Device) -> jax.Array:
    raise AssertionError("No program is lowered for this platform.")


@_kernel_p.def_abstract_eval
def _(*leaves: Any, tree: Any, **params: Any) -> ShapedArray:
    product: Product = jax.tree.unflatten(tree, leaves)
    return ShapedArray(product.shape, product.dtype)


def _lower(ctx: Any, *operands: Any, kernel: Any, tree: Any, **params: Any) -> Any:
    """Lower what runs everywhere."""

    def run(*leaves: jax.Array) -> jax.Array:
        return kernel(jax.tree.unflatten(tree, leaves))

    return mlir.lower_fun(run, multiple_results=False)(ctx, *operands)


def _lower_kernel(
    lowered_for: str, ctx: Any, *operands: Any, kernel: Any, platform: str, default: Any, tree: Any
) -> Any:
    device = device_of(ctx, platform) or default
    if platform != lowered_for or device is None:
        return _lower(ctx, *operands, kernel=reference.matmul, tree=tree)
    devices = getattr(ctx.module_context.axis_context, "num_devices", 1)  # inside a shard_map there is one
    if devices > 1:
        warn_not_partitioned(devices, device.kind)
        return _lower(ctx, *operands, kernel=reference.matmul, tree=tree)
    with lowering_for(device):
        return _lower(ctx, *operands, kernel=partial(kernel, device=device), tree=tree)


mlir.register_lowering(_kernel_p, lambda *args, **params: _lower(*args, **params | {"kernel": reference.matmul}))
for _platform in ("cuda", "tpu"):
    mlir.register_lowering(_kernel_p, partial(_lower_kernel, _platform), platform=_platform)


def warn_not_partitioned(devices: int, kind: str) -> None:
    """Say that a product over several devices runs without its kernel."""
    warnings.warn(
        f"A product of a low-bit array was compiled for {devices} {kind} with automatic axes, where JAX cannot "
        "partition a kernel: each device decodes its shard. Use explicit axes or shard_map.",
        RuntimeWarning,
        stacklevel=2,
    )
