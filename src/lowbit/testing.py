"""For tests, ours and yours: see whether a program ever builds a dense weight."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from .kernels._product import Product
from .ops.matmul import matmul_p
from .runtime import is_implicit
from .runtime._compat import is_jaxpr, opened, subjaxprs


class DenseWeight(NamedTuple):
    """A value with the shape of a weight, and the primitive that made it."""

    primitive: str
    shape: tuple[int, ...]
    dtype: str


def dense_weights(fn_or_jaxpr: Callable[..., Any] | Any, *args: Any) -> list[DenseWeight]:
    """Every floating-point value of a weight's logical shape that a program makes outside the product primitive.

    Weights are the implicit arrays in `args`, and those that the program multiplies with. A layer of a stack and a
    transposed weight count too. Inside the product a kernel may decode as it likes.

    >>> import jax.numpy as jnp, lowbit
    >>> from lowbit.testing import dense_weights
    >>> x, q = jnp.ones((2, 64)), lowbit.Array8B.quantize(jnp.ones((64, 32)))
    >>> dense_weights(lambda x, q: x @ q, x, q)
    []
    >>> dense_weights(lambda x, q: x @ q.materialize(), x, q)[-1]
    DenseWeight(primitive='mul', shape=(64, 32), dtype='float32')
    """
    program: Any = fn_or_jaxpr if is_jaxpr(fn_or_jaxpr) else jax.make_jaxpr(fn_or_jaxpr)(*args)
    jaxpr = opened(program).jaxpr
    weights = [leaf.shape for leaf in jax.tree.leaves(args, is_leaf=is_implicit) if is_implicit(leaf)]
    found = list(equations(jaxpr))
    for eqn in found:
        if eqn.primitive is matmul_p:
            product: Product = jax.tree.unflatten(eqn.params["tree"], [v.aval for v in eqn.invars])
            weights.append(product.w.shape)
    shapes = {shape for weight in weights for shape in _forms(weight)}
    return [
        DenseWeight(str(eqn.primitive), aval.shape, str(aval.dtype))
        for eqn in found
        if eqn.primitive is not matmul_p
        for aval in (v.aval for v in eqn.outvars)
        if getattr(aval, "shape", None) in shapes and jnp.issubdtype(aval.dtype, jnp.floating)
    ]


def _forms(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """A weight's shape, those of its layers, and each transposed; no matrix of a single row, which is an activation."""
    for first in range(max(len(shape) - 1, 1)):
        layer = shape[first:]
        if math.prod(layer) > max(layer):
            yield layer
            yield (*layer[:-2], layer[-1], layer[-2])


def equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """All equations of a program and of those inside it, but for the inside of a product."""
    for eqn in jaxpr.eqns:
        yield eqn
        if eqn.primitive is not matmul_p:
            for inner in subjaxprs(eqn.params):
                yield from equations(inner)
