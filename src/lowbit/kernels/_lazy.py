"""Kernels that are traced when a program is lowered for their platform.

JAX traces a product for every platform, since it is compiled for one of them later. Tracing a kernel takes longer than
all the rest of a product, and most programs never need those of other platforms. And in a program for several platforms
JAX lowers every branch for all of them, which a kernel in Pallas refuses: there stands what runs everywhere instead.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

_kernel_p = Primitive("lowbit_kernel")


def when_lowered(
    kernel: Callable[..., jax.Array],
    elsewhere: Callable[..., jax.Array],
    shape: tuple[int, ...],
    *operands: Any,
    **params: Any,
) -> jax.Array:
    """`kernel(*operands, **params)`, of this shape and of `dtype`, which is one of the parameters."""
    leaves, tree = jax.tree.flatten(operands)
    return _kernel_p.bind(*leaves, kernel=kernel, elsewhere=elsewhere, tree=tree, shape=shape, **params)


@_kernel_p.def_abstract_eval
def _(*leaves: Any, shape: tuple[int, ...], dtype: Any, **params: Any) -> ShapedArray:
    return ShapedArray(shape, dtype)


def _run(*leaves: Any, kernel: Any, elsewhere: Any, tree: Any, shape: Any, **params: Any) -> jax.Array:
    return kernel(*jax.tree.unflatten(tree, leaves), **params)


def _run_elsewhere(*leaves: Any, elsewhere: Any, **params: Any) -> jax.Array:
    return _run(*leaves, **params | {"kernel": elsewhere, "elsewhere": None})


mlir.register_lowering(_kernel_p, mlir.lower_fun(_run_elsewhere, multiple_results=False))
for _platform in ("cuda", "tpu"):
    mlir.register_lowering(_kernel_p, mlir.lower_fun(_run, multiple_results=False), platform=_platform)
