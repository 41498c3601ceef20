"""ste: the straight-through estimator."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ._array import dense
from ._interpret import implicit


def ste(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Straight-through estimator: the dense value of `fn(x, ...)` with the derivative of `x`.

    For rounding and other steps whose own derivative is zero: `d ste(fn)(x) = dx`, and zero for other arguments.

    >>> import jax, jax.numpy as jnp, lowbit
    >>> x = jnp.array([0.2, 1.7])
    >>> lowbit.ste(jnp.round)(x), jax.grad(lambda x: 3 * lowbit.ste(jnp.round)(x).sum())(x)
    (Array([0., 2.], dtype=float32), Array([3., 3.], dtype=float32))
    """

    @functools.wraps(fn)
    def wrapped(x: Any, *args: Any, **kwargs: Any) -> jax.Array:
        x = jnp.asarray(dense(x))
        # No gradient flows through `fn`, so it need not be differentiable.
        value = dense(implicit(fn)(*_stop((x, *args)), **_stop(kwargs)))
        if jnp.shape(value) != x.shape:
            raise ValueError(
                f"ste({getattr(fn, '__name__', fn)}) got an array of shape {x.shape} and returned {jnp.shape(value)}: "
                "a straight-through function must keep the shape."
            )
        return _replace(x, jnp.asarray(value, x.dtype))

    return wrapped


def _stop(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.lax.stop_gradient(x) if isinstance(x, jax.Array) else x, tree)


@jax.custom_jvp
def _replace(x: jax.Array, value: jax.Array) -> jax.Array:
    del x
    return value


@_replace.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return _replace(*primals), tangents[0]
