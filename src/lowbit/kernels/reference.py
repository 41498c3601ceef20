"""Every operation by decoding: right on every platform, and what each kernel is tested against."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lowbit.formats._quantized import QuantizedArray


def matmul(
    x: jax.Array,
    w: QuantizedArray,
    *,
    contract: int,
    dtype: Any,
    precision: Any = None,
    out_sharding: Any = None,
    arithmetic: str = "exact",
) -> jax.Array:
    """y[*batch, *rows, n] = sum_k x[*batch, *rows, k] * w[*batch, k, n] for contract = -2, w[*batch, n, k] for -1.

    Multiplied and summed in float32 (float64 for a float64 result), rounded once; integers in their own type.
    """
    del arithmetic  # always exact
    wide = dtype if jnp.issubdtype(dtype, jnp.integer) else jnp.promote_types(dtype, jnp.float32)
    batch = tuple(range(w.ndim - 2))
    dims = (((x.ndim - 1,), (w.ndim + contract,)), (batch, batch))
    y = lax.dot_general(
        x.astype(wide),
        w.decode().astype(wide),
        dims,
        precision=precision,
        preferred_element_type=wide,
        out_sharding=out_sharding,
    )
    return y.astype(dtype)
