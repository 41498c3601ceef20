"""The convolution of a dense array with a quantized kernel: one primitive, linear in the dense one.

As for products (`matmul.py`), the primitive holds the program that computes it, traced when it is bound. The program
decodes the kernel, so that the dense kernel is no value of the caller's program.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from lowbit.formats.quantized import QuantizedArray
from lowbit.runtime._compat import match_varying

conv_p = Primitive("lowbit_conv")


def conv(x: jax.Array, w: QuantizedArray, dtype: Any, **params: Any) -> jax.Array:
    """`lax.conv_general_dilated(x, w, **params)`, computed in float32 and rounded once to `dtype`."""
    leaves, tree = jax.tree.flatten((x, w.resolved()))
    static = tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in params.items())
    return _bound(_program, match_varying(leaves), tree=tree, dtype=jnp.dtype(dtype), static=static)


def _bound(fn: Any, leaves: Sequence[Any], **static: Any) -> jax.Array:
    return conv_p.bind(*leaves, program=fn.trace(*leaves, **static).jaxpr)


# A compiled function caches its traces, so a convolution of the same kind is traced once.
@functools.partial(jax.jit, static_argnames=("tree", "dtype", "static"))
def _program(*leaves: Any, tree: Any, dtype: Any, static: Any) -> jax.Array:
    x, w = jax.tree.unflatten(tree, leaves)
    wide = jnp.promote_types(dtype, jnp.float32)
    kernel = w.replace(dtype=wide).materialize()
    return lax.conv_general_dilated(x.astype(wide), kernel, **dict(static)).astype(dtype)


@functools.partial(jax.jit, static_argnames=("program", "type"))
def _transposed(cotangent: Any, *components: Any, program: Any, type: Any) -> jax.Array:
    back = jax.linear_transpose(lambda x: jaxpr_as_fun(program)(x, *components)[0], type)
    return back(cotangent)[0]


@functools.partial(jax.jit, static_argnames=("program", "dims"))
def _mapped(*leaves: Any, program: Any, dims: Any) -> jax.Array:
    return jax.vmap(lambda *leaves: jaxpr_as_fun(program)(*leaves)[0], dims)(*leaves)


@functools.lru_cache(256)
def _compiled(program: Any) -> Any:
    return jax.jit(jaxpr_as_fun(program))


@conv_p.def_abstract_eval
def _(*leaves: Any, program: Any) -> Any:
    return program.out_avals[0]


@conv_p.def_impl
def _(*leaves: Any, program: Any) -> Any:
    return _compiled(program)(*leaves)[0]


def _jvp(primals: Any, tangents: Any, *, program: Any) -> Any:
    y = conv_p.bind(*primals, program=program)
    # The components of the kernel are constants, whatever tangent they carry.
    if type(tangents[0]) is ad.Zero:
        return y, ad.Zero(jax.typeof(y).to_tangent_aval())
    return y, conv_p.bind(tangents[0], *primals[1:], program=program)


def _transpose(cotangent: Any, *leaves: Any, program: Any) -> Any:
    constants = [None] * (len(leaves) - 1)
    if type(cotangent) is ad.Zero:
        return [None, *constants]
    kind = jax.ShapeDtypeStruct(leaves[0].aval.shape, leaves[0].aval.dtype)
    return [_bound(_transposed, [cotangent, *leaves[1:]], program=program, type=kind), *constants]


def _batched(leaves: Any, dims: Any, *, program: Any) -> Any:
    return _bound(_mapped, leaves, program=program, dims=tuple(dims)), 0


ad.primitive_jvps[conv_p] = _jvp
ad.primitive_transposes[conv_p] = _transpose
batching.primitive_batchers[conv_p] = _batched
mlir.register_lowering(
    conv_p, mlir.lower_fun(lambda *leaves, program: jaxpr_as_fun(program)(*leaves)[0], multiple_results=False)
)
