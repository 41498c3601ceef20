"""The product of a dense and a quantized matrix: one primitive, linear in the dense one.

Its two directions, `contract` = -2 and -1, are each other's gradient. The primitive holds the program that computes it,
traced when it is bound: the program may then use what cannot be used inside a lowering rule, and the type of the result
(sharding, varying axes) is that of the program's.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from lowbit.dispatch import compute, find_kernels, nearest, use_kernel
from lowbit.formats.blocks import WHOLE, block_sum, repeated, span_of
from lowbit.formats.quantized import QuantizedArray
from lowbit.formats.sharding import explicit_axes
from lowbit.kernels import reference
from lowbit.kernels.groups import by_groups, ragged
from lowbit.kernels.lazy import reference_when_lowered
from lowbit.kernels.product import Product
from lowbit.runtime._compat import match_varying

from .partition import ShardedProduct, devices_in_use, over_devices

matmul_p = Primitive("lowbit_matmul")


def arithmetic_of(w: QuantizedArray) -> str:
    """ "exact" or "fast": the arithmetic of products with `w`, by the setting or by the array itself."""
    return nearest(compute.value, w.compute)


def matmul(product: Product, *, kernel: bool | None = None) -> jax.Array:
    """Multiply; `kernel` says whether in a fused kernel, None leaves it to the setting or the array."""
    x, w, batch = product.x, product.w, product.batch
    if w.offset_values() is not None:
        return _with_offsets(product, kernel)
    grouped = product.sizes is not None
    if w.transposed or x.shape[: len(batch)] != batch or x.shape[-1] != product.k or x.ndim <= len(batch) + grouped:
        raise ValueError(
            f"matmul: x of shape {x.shape} does not fit w of shape {w.shape} contracted along axis {product.contract}."
        )
    fused: bool = nearest(kernel, use_kernel.value, w.use_kernel)
    arithmetic = product.arithmetic or arithmetic_of(w)
    product = replace(product, dtype=jnp.dtype(product.dtype), arithmetic=arithmetic)
    leaves, tree = jax.tree.flatten(product)
    leaves = match_varying(leaves)
    kernels = find_kernels("matmul", product) if fused else {}
    program = _program.trace(jax.tree.unflatten(tree, leaves), kernels=tuple(kernels.items())).jaxpr
    return matmul_p.bind(*leaves, tree=tree, program=program, kernel=fused)


def _with_offsets(product: Product, kernel: bool | None) -> jax.Array:
    """The product of the scaled levels, and a thin one of block sums of x with the offsets."""
    w = product.w
    wide = jnp.promote_types(product.dtype, jnp.float32)
    y = matmul(replace(product, w=w.without_offsets(), dtype=wide), kernel=kernel)
    stored: Any = w.offset_values()
    offsets = jax.lax.stop_gradient(w.selected(stored))
    contract, kept = product.contract, -3 - product.contract
    sums = _block_sums(product.x.astype(wide), span_of(w.spans, contract))
    span = span_of(w.spans, kept)
    out = product.out_sharding
    where: Any = jax.typeof(y).sharding
    if out is not None and not _holds_blocks(where, product.n, span):
        out = _without_last(where)
    thin = _dense_product(sums, offsets.astype(wide), product, out)
    if span != WHOLE:
        thin = repeated(thin, -1, span, product.n)
        thin = jax.sharding.reshard(thin, where) if explicit_axes(jax.typeof(y)) else thin
    return (y + thin).astype(product.dtype)


def _dense_product(x: jax.Array, w: jax.Array, product: Product, out_sharding: Any) -> jax.Array:
    """A product with dense matrices, of the batch and groups of `product`."""
    highest = jax.lax.Precision.HIGHEST
    batch = tuple(range(len(product.batch)))
    if product.sizes is None:
        dims = (((x.ndim - 1,), (w.ndim + product.contract,)), (batch, batch))
        return jax.lax.dot_general(x, w, dims, precision=highest, out_sharding=out_sharding)
    if out_sharding is not None:
        return ragged(x, w, product, precision=highest, out_sharding=out_sharding)
    w = w.reshape(-1, *w.shape[-2:])
    w = w if product.contract == -2 else jnp.matrix_transpose(w)

    def multiply(rows: jax.Array, i: Any) -> jax.Array:
        return jnp.matmul(rows, w[i], precision=highest)

    y = by_groups(multiply, x.reshape(-1, x.shape[-1]), w.shape[-1], x.dtype, product)
    return y.reshape(*x.shape[:-1], w.shape[-1])


def _block_sums(x: jax.Array, span: int) -> jax.Array:
    """The sums of x over the blocks of a weight. On an explicit mesh each device adds its shard, if that is blocks."""
    where: Any = jax.typeof(x).sharding
    if explicit_axes(jax.typeof(x)) and span != WHOLE and not _holds_blocks(where, x.shape[-1], span):
        x = jax.sharding.reshard(x, _without_last(where))
    return block_sum(x, (span,))


def _holds_blocks(where: Any, length: int, span: int) -> bool:
    """Whether each shard of the last axis, of this length, holds whole blocks."""
    names = where.spec[-1] if isinstance(where.spec[-1], tuple) else (where.spec[-1],)
    shards = math.prod(where.mesh.shape[name] for name in names if name is not None)
    return shards == 1 or (span != WHOLE and length % (span * shards) == 0)


def _without_last(where: Any) -> Any:
    """The sharding with the last axis on every device."""
    return where.update(spec=PartitionSpec(*where.spec[:-1], None))


# A compiled function caches its traces, so a product of the same kind is traced once.
@partial(jax.jit, static_argnames="kernels")
def _program(product: Product, *, kernels: Any) -> jax.Array:
    if not kernels:
        return reference.matmul(product)
    # Scales in 8 bits depend on their position in the whole matrix, which a shard does not know.
    if product.w.scale_components and devices_in_use(*jax.tree.leaves(product)) > 1:
        product = replace(product, w=product.w.plain())
    leaves, tree = jax.tree.flatten(product)
    sharded = ShardedProduct(dict(kernels), reference_when_lowered, product)
    return over_devices(sharded, *leaves, like=lambda *leaves: reference.matmul(jax.tree.unflatten(tree, leaves)))


@matmul_p.def_abstract_eval
def _(*leaves: Any, program: Any, **params: Any) -> Any:
    return program.out_avals[0]


def _run_program(*leaves: Any, program: Any, **params: Any) -> Any:
    return jaxpr_as_fun(program)(*leaves)[0]


# Compiled once for each kind of operands: the description and `kernel` determine the program.
_compiled = partial(jax.jit, static_argnames="kernel")(matmul)


@matmul_p.def_impl
def _(*leaves: Any, tree: Any, program: Any, kernel: bool) -> Any:
    return _compiled(jax.tree.unflatten(tree, leaves), kernel=kernel)


mlir.register_lowering(matmul_p, mlir.lower_fun(_run_program, multiple_results=False))


def _jvp(primals: Any, tangents: Any, *, tree: Any, program: Any, kernel: bool) -> Any:
    product: Product = jax.tree.unflatten(tree, primals)
    y = matmul(product, kernel=kernel)
    # The components of w are constants, whatever tangent they carry.
    if type(tangents[0]) is ad.Zero:
        return y, ad.Zero(jax.typeof(y).to_tangent_aval())
    return y, matmul(replace(product, x=tangents[0], arithmetic="exact"), kernel=kernel)


def _transpose(cotangent: Any, *leaves: Any, tree: Any, program: Any, kernel: bool) -> Any:
    constants = [None] * (len(leaves) - 1)
    if type(cotangent) is ad.Zero:
        return [None, *constants]
    product: Product = jax.tree.unflatten(tree, leaves)
    x: Any = product.x
    given = product.out_sharding is not None or explicit_axes(x.aval)
    back = replace(
        product,
        x=cotangent,
        contract=-3 - product.contract,
        dtype=x.aval.dtype,
        out_sharding=x.aval.sharding if given else None,
        arithmetic="exact",
    )
    return [matmul(back, kernel=kernel), *constants]


def _batched(leaves: Any, dims: Any, *, tree: Any, program: Any, kernel: bool) -> Any:
    product: Product = jax.tree.unflatten(tree, leaves)
    mapped: Product = jax.tree.unflatten(tree, dims)
    # A sharding that was asked for does not have the mapped axis; JAX infers the one that does.
    product = replace(product, out_sharding=None)
    x, w = product.x, product.w
    grouped = product.sizes is not None
    if all(d is None for d in dims[1:]):
        row = len(product.batch) + grouped  # the mapped axis becomes one of the rows of x, behind that of the groups
        x = jnp.moveaxis(x, dims[0], row)
        return matmul(replace(product, x=x), kernel=kernel), row
    size = next(leaf.shape[d] for leaf, d in zip(leaves, dims, strict=True) if d is not None)
    front = partial(batching.bdim_at_front, size=size)
    components, w_tree = jax.tree.flatten(w)
    of_w = dims[1 : 1 + len(components)]
    shared = all(d is None for leaf, d in zip(components, of_w, strict=True) if leaf is not w.index)
    if shared and w.index is None:
        # Other groups of rows for each, and the same matrices: a stack of one that all of them index.
        w = w.map_components(lambda component, _: component[None], index=jnp.zeros(size, jnp.int32))
    elif shared:
        # Another layer of the same stack for each: one more axis of the index.
        w = w.replace(index=front(w.index, mapped.w.index))
    elif w.index is not None:
        resolved = jax.vmap(lambda *components: jax.tree.unflatten(w_tree, components).resolved(), of_w)
        w = resolved(*components)
    else:
        w = jax.tree.unflatten(w_tree, list(map(front, components, of_w)))
    sizes = front(product.sizes, mapped.sizes) if grouped else None
    return matmul(replace(product, x=front(x, dims[0]), w=w, sizes=sizes), kernel=kernel), 0


ad.primitive_jvps[matmul_p] = _jvp
ad.primitive_transposes[matmul_p] = _transpose
batching.primitive_batchers[matmul_p] = _batched
