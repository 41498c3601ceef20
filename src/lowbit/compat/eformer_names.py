"""eformer's own functions, for code that is moving to lowbit. They are importable from `lowbit` itself.

`lowbit.compat.eformer` serves eformer's module paths; importing it takes the place of eformer, importing this does not.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lowbit.formats import Array1B, Array8B, ArrayNF4
from lowbit.formats.onebit import Kind
from lowbit.runtime import ImplicitArray, dense, ste


def _last(axis: Any) -> Any:
    """eformer's default axis."""
    return -1 if axis is None else axis


def straight_through_nf4(
    weights: Any, block_size: int = 64, *, axis: int = -1, double_quant: bool = False
) -> jax.Array:
    """eformer's name for `straight_through` in NF4: `ArrayNF4.quantize(weights, ...)` dense, with identity gradient.

    >>> import jax.numpy as jnp, lowbit
    >>> lowbit.straight_through_nf4(jnp.array([0.5, 1.0, 0.0, -1.0]))
    Array([ 0.44070983,  1.        ,  0.        , -1.        ], dtype=float32)
    """
    return ste(ArrayNF4.quantize)(weights, block_size=block_size, axis=axis, double_quant=double_quant)


def straight_through_8bit(weights: Any, axis: Any = None, *, block_size: int | None = None) -> jax.Array:
    """eformer's name for `straight_through` in int8: `Array8B.quantize(weights, ...)` dense, with identity gradient.

    >>> import jax.numpy as jnp, lowbit
    >>> lowbit.straight_through_8bit(jnp.array([0.5, 1.27, 0.004]))
    Array([0.5 , 1.27, 0.  ], dtype=float32)
    """
    return ste(Array8B.quantize)(weights, axis=_last(axis), block_size=block_size)


def straight_through_1bit(
    weights: Any, axis: Any = None, *, kind: Kind = "ternary", scale: bool = True, block_size: int | None = None
) -> jax.Array:
    """eformer's name for `straight_through` in `kind`: `Array1B.quantize(weights, ...)` dense, with identity gradient.

    >>> import jax.numpy as jnp, lowbit
    >>> lowbit.straight_through_1bit(jnp.array([0.5, -1.5, 0.0, 2.0]), kind="binary")
    Array([ 1., -1.,  1.,  1.], dtype=float32)
    """
    return ste(Array1B.quantize)(weights, axis=_last(axis), kind=kind, scale=scale, block_size=block_size)


def matmul_bf16_int8_weight_only(lhs: jax.Array, weight: jax.Array, scale: jax.Array) -> jax.Array:
    """eformer's product with the components of an int8 weight: `lhs @ (weight * scale)`, (..., M, K) by (K, N).

    A scale of shape (1, N) is applied after the product and one of (K, 1) before it; with any other shape the weight is
    dequantized. Sums are in float32, the result is bfloat16. In new code, `lhs @ Array8B(...)` does the same.

    >>> import jax.numpy as jnp, lowbit
    >>> q = lowbit.Array8B.quantize(jnp.ones((64, 32)), axis=0)
    >>> lowbit.matmul_bf16_int8_weight_only(jnp.ones((2, 64)), q.weight, q.scale)[0, 0]
    Array(64, dtype=bfloat16)
    """
    lhs, weight, scale = jnp.asarray(lhs), jnp.asarray(weight), jnp.asarray(scale)
    if weight.ndim != 2 or lhs.ndim < 1 or lhs.shape[-1] != weight.shape[0]:
        raise ValueError(f"lhs of shape {lhs.shape} cannot be multiplied by a weight of shape {weight.shape}.")
    if weight.dtype != jnp.int8:
        raise TypeError(f"The weight must be int8, not {weight.dtype}.")
    lhs, scale = lhs.astype(jnp.float32), scale.astype(jnp.float32)
    k, n = weight.shape
    if scale.shape in ((1, n), (k, 1)):
        q = Array8B(weight=weight, scale=scale, axis=-2 if scale.shape == (1, n) else -1)
        return (lhs @ q).astype(jnp.bfloat16)
    return jnp.matmul(lhs, weight * scale, precision=lax.Precision.HIGHEST).astype(jnp.bfloat16)


def safe_materialize(x: Any) -> tuple[Any, bool]:
    """eformer's `materialize` of one value: its dense form, and whether it was an implicit array.

    >>> import jax.numpy as jnp, lowbit
    >>> lowbit.safe_materialize(lowbit.Array8B(jnp.ones(3))), lowbit.safe_materialize(2.5)
    ((Array([1., 1., 1.], dtype=float32), True), (2.5, False))
    """
    return dense(x), isinstance(x, ImplicitArray)
