"""Check in tests whether a program ever builds a dense weight."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from .kernels.product import Product
from .ops.conv import conv_p
from .ops.matmul import matmul_p
from .runtime import is_implicit
from .runtime._compat import is_jaxpr, opened, subjaxprs, user_line

__all__ = ["DenseWeight", "dense_weights", "equations"]


class DenseWeight(NamedTuple):
    """A value with the shape of a weight, the primitive that computes it, and the user's file and line."""

    primitive: str
    shape: tuple[int, ...]
    dtype: str
    line: str


def dense_weights(fn_or_jaxpr: Callable[..., Any] | Any, *args: Any) -> list[DenseWeight]:
    """List the floating-point values with the logical shape of a weight that a program computes.

    Weights are the implicit arrays in `args` and those that the program multiplies by, whole, by layer of a stack, and
    transposed. Values inside the primitives of products and convolutions do not count: a weight is decoded there.

    >>> import jax.numpy as jnp, lowbit
    >>> x, q = jnp.ones((2, 64)), lowbit.Array8B.quantize(jnp.ones((64, 32)))
    >>> lowbit.testing.dense_weights(lambda x, q: x @ q, x, q)
    []
    >>> lowbit.testing.dense_weights(lambda x, q: x @ q.materialize(), x, q)[-1]
    DenseWeight(primitive='mul', shape=(64, 32), dtype='float32', line='...')
    """
    program: Any = fn_or_jaxpr if is_jaxpr(fn_or_jaxpr) else jax.make_jaxpr(lambda *args: fn_or_jaxpr(*args))(*args)
    jaxpr = opened(program).jaxpr
    weights = [leaf.shape for leaf in jax.tree.leaves(args, is_leaf=is_implicit) if is_implicit(leaf)]
    found = list(equations(jaxpr))
    for eqn in found:
        if eqn.primitive is matmul_p:
            product: Product = jax.tree.unflatten(eqn.params["tree"], [v.aval for v in eqn.invars])
            weights.append(product.w.shape)
    shapes = {shape for weight in weights for shape in _forms(weight)}
    return [
        DenseWeight(str(eqn.primitive), aval.shape, str(aval.dtype), _line(eqn))
        for eqn in found
        if eqn.primitive not in (matmul_p, conv_p)
        for aval in (v.aval for v in eqn.outvars)
        if getattr(aval, "shape", None) in shapes and jnp.issubdtype(aval.dtype, jnp.floating)
    ]


def _line(eqn: Any) -> str:
    found = user_line(eqn)
    return f"{found[0]}:{found[1]}, in {found[2]}" if found else "unknown"


def _forms(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The shape of a weight and of its layers, each also transposed; not a single row, which is an activation."""
    for first in range(max(len(shape) - 1, 1)):
        layer = shape[first:]
        if math.prod(layer) > max(layer):
            yield layer
            yield (*layer[:-2], layer[-1], layer[-2])


def equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """All equations of a program and of its inner programs, except inside products and convolutions."""
    for eqn in jaxpr.eqns:
        yield eqn
        if eqn.primitive not in (matmul_p, conv_p):
            for inner in subjaxprs(eqn.params):
                yield from equations(inner)
