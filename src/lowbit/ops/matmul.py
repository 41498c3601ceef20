"""The product of a dense and a quantized matrix: one primitive, linear in the dense one.

    y[*batch, *rows, n] = sum_k x[*batch, *rows, k] * w[*batch, k, n]

`contract` is the stored axis of `w` that is summed over: -2 as written, -1 for w[*batch, n, k]. Each is the gradient of
the other. The primitive holds the program that computes it, traced when it is bound, so that the program may use what
cannot be used inside a lowering rule, and its type (sharding, varying axes) is that of the program's result.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from lowbit.formats._quantized import QuantizedArray
from lowbit.formats._sharding import explicit_axes
from lowbit.kernels import reference
from lowbit.kernels._table import compute, find_kernels, use_kernel
from lowbit.runtime._compat import match_varying

from .choice import by_platform, first
from .pieces import Product, devices_in_use, over_devices

matmul_p = Primitive("lowbit_matmul")
_STATIC = ("contract", "dtype", "precision", "out_sharding", "arithmetic")


def matmul(
    x: jax.Array,
    w: QuantizedArray,
    *,
    contract: int,
    dtype: Any,
    precision: Any = None,
    out_sharding: Any = None,
    kernel: bool | None = None,
    arithmetic: str | None = None,
) -> jax.Array:
    """y of shape (*batch, *rows, n) for x of shape (*batch, *rows, k), where w has the shape (*batch, two axes)."""
    batch, k = w.shape[:-2], w.shape[contract]
    if w.transposed or x.shape[: len(batch)] != batch or x.shape[-1] != k or x.ndim <= len(batch):
        raise ValueError(
            f"matmul: x of shape {x.shape} does not fit w of shape {w.shape} contracted along axis {contract}."
        )
    parts, tree = jax.tree.flatten(w)
    operands = match_varying([x, *parts])
    # The nearest to the call decides: the call itself, the setting around it, the array.
    fused: bool = first(kernel, use_kernel.value, w.use_kernel)
    arithmetic = first(arithmetic, compute.value, w.compute)
    params = {
        "contract": contract,
        "dtype": jnp.dtype(dtype),
        "precision": precision,
        "out_sharding": out_sharding,
        "arithmetic": arithmetic,
    }
    kernels = find_kernels("matmul", x, w, **params) if fused else {}
    program = _program.trace(*operands, tree=tree, kernels=tuple(kernels.items()), **params).jaxpr
    return matmul_p.bind(*operands, tree=tree, program=program, kernel=fused, **params)


# A compiled function remembers its traces, so a product of the same kind is not traced again.
@partial(jax.jit, static_argnames=("tree", "kernels", *_STATIC))
def _program(x: jax.Array, *parts: jax.Array, tree: Any, kernels: Any, dtype: Any, **params: Any) -> jax.Array:
    w = jax.tree.unflatten(tree, parts)
    if not kernels:
        return reference.matmul(x, w, dtype=dtype, **params)
    # Scales in 8 bits know their place in the whole matrix, which a piece of it does not.
    w = w if devices_in_use() == 1 else w.plain()
    multiply = partial(by_platform, dict(kernels), reference.matmul, **params | {"out_sharding": None})
    product = Product(multiply, x, w, params["contract"], dtype)

    def like(x: jax.Array, *parts: jax.Array) -> jax.Array:
        return reference.matmul(x, jax.tree.unflatten(product.tree, parts), dtype=dtype, **params)

    return over_devices(product, x, *jax.tree.leaves(w), like=like)


@matmul_p.def_abstract_eval
def _(*operands: Any, program: Any, **params: Any) -> Any:
    return program.out_avals[0]


def _run_program(*operands: Any, program: Any, **params: Any) -> Any:
    return jaxpr_as_fun(program)(*operands)[0]


# Compiled once for each kind of operands; the parameters without the program say all.
_compiled = partial(jax.jit, static_argnames=("kernel", *_STATIC))(matmul)


@matmul_p.def_impl
def _(x: Any, *parts: Any, tree: Any, program: Any, **params: Any) -> Any:
    return _compiled(x, jax.tree.unflatten(tree, parts), **params)


mlir.register_lowering(matmul_p, mlir.lower_fun(_run_program, multiple_results=False))


def _jvp(primals: Any, tangents: Any, *, tree: Any, program: Any, **params: Any) -> Any:
    x, *parts = primals
    w = jax.tree.unflatten(tree, parts)
    y = matmul(x, w, **params)
    exact: dict[str, Any] = {**params, "arithmetic": "exact"}
    # The parts of w are constants, whatever tangent they carry.
    if type(tangents[0]) is ad.Zero:
        return y, ad.Zero(jax.typeof(y).to_tangent_aval())
    return y, matmul(tangents[0], w, **exact)


def _transpose(cotangent: Any, x: Any, *parts: Any, tree: Any, program: Any, contract: int, **params: Any) -> Any:
    if type(cotangent) is ad.Zero:
        return [None] * (1 + len(parts))
    params |= {"dtype": x.aval.dtype, "arithmetic": "exact"}
    if params["out_sharding"] is not None or explicit_axes(x.aval):
        params |= {"out_sharding": x.aval.sharding}
    w = jax.tree.unflatten(tree, parts)
    return [matmul(cotangent, w, contract=-3 - contract, **params), *[None] * len(parts)]


def _batched(operands: Any, dims: Any, *, tree: Any, program: Any, out_sharding: Any, **params: Any) -> Any:
    x, *parts = operands
    x_dim, *part_dims = dims
    # A sharding asked for speaks of axes without the mapped one; with it, JAX infers.
    del out_sharding
    w = jax.tree.unflatten(tree, parts)
    if all(d is None for d in part_dims):
        row = w.ndim - 2  # the mapped axis becomes rows of x, after the batch
        return matmul(jnp.moveaxis(x, x_dim, row), w, **params), row
    size = next(o.shape[d] for o, d in zip(operands, dims, strict=True) if d is not None)
    front = partial(batching.bdim_at_front, size=size)
    w_dims = jax.tree.unflatten(tree, part_dims)
    if w.index is not None and all(d is None for d in w_dims.parts().values()):
        # Another layer of the same stack for each: one more axis of the index.
        w = w.replace(index=front(w.index, w_dims.index))
    elif w.index is not None:
        w = jax.vmap(lambda *parts: jax.tree.unflatten(tree, parts).resolved(), part_dims)(*parts)
    else:
        w = jax.tree.unflatten(tree, list(map(front, parts, part_dims)))
    return matmul(front(x, x_dim), w, **params), 0


ad.primitive_jvps[matmul_p] = _jvp
ad.primitive_transposes[matmul_p] = _transpose
batching.primitive_batchers[matmul_p] = _batched
