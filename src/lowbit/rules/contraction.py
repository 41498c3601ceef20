"""Products: bring any contraction to x[*batch, *rows, k] against one stored axis of the weight."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from lowbit.formats._quantized import QuantizedArray
from lowbit.ops.matmul import matmul
from lowbit.runtime import register

from .structural import permuted, reshaped, untransposed


@register("dot_general")
def _(x: jax.Array, w: QuantizedArray, *, dimension_numbers: Any, **params: Any) -> Any:
    (x_sum, w_sum), (x_batch, w_batch) = dimension_numbers
    return _product(x, w, (x_sum, w_sum), (x_batch, w_batch), **params)


@register("dot_general")
def _(w: QuantizedArray, x: jax.Array, *, dimension_numbers: Any, **params: Any) -> Any:
    (w_sum, x_sum), (w_batch, x_batch) = dimension_numbers
    # The free axes of the weight come first in the result.
    return _product(x, w, (x_sum, w_sum), (x_batch, w_batch), weight_first=True, **params)


def _product(
    x: jax.Array,
    w: QuantizedArray,
    summed: tuple[Sequence[int], Sequence[int]],
    batch: tuple[Sequence[int], Sequence[int]],
    *,
    precision: Any,
    preferred_element_type: Any,
    out_sharding: Any = None,
    weight_first: bool = False,
    **params: Any,
) -> Any:
    if any(value is not None for value in params.values()):
        return NotImplemented
    dtype = preferred_element_type or jnp.promote_types(x.dtype, w.dtype)
    layers = 0 if w.index is None else w.index.ndim
    if sorted(batch[1])[:layers] != list(range(layers)):
        w, layers = w.resolved(), 0
    # All axes in stored order: the weight is the one that should not move.
    stored = [w.swapped(a - w.ndim) + w.ndim for a in range(w.ndim)]
    pairs = sorted(zip(batch[1], batch[0]), key=lambda pair: stored.index(pair[0]))
    w_batch, x_batch = ([p[i] for p in pairs] for i in (0, 1))
    pairs = sorted(zip(summed[1], summed[0]), key=lambda pair: stored.index(pair[0]))
    w_sum, x_sum = ([p[i] for p in pairs] for i in (0, 1))
    w_free = [a for a in stored if a not in (*w_batch, *w_sum)]
    x_free = [a for a in range(x.ndim) if a not in (*x_batch, *x_sum)]

    batch_shape = [w.shape[a] for a in w_batch]
    k = math.prod(w.shape[a] for a in w_sum)
    free_shape = [w.shape[a] for a in w_free]
    if stored == [*w_batch, *w_free, *w_sum] and w_sum:
        contract, shape = -1, [*batch_shape, math.prod(free_shape), k]
        matrix = w.replace(transposed=False)
    else:
        contract, shape = -2, [*batch_shape, k, math.prod(free_shape)]
        order = [*w_batch, *w_sum, *w_free]
        matrix = w.replace(transposed=False) if stored == order else untransposed(permuted(w, order))
    if len(w_sum) != 1 or len(w_free) != 1:
        matrix = reshaped(matrix, shape)
        if matrix is NotImplemented:
            return NotImplemented
        assert isinstance(matrix, QuantizedArray)
        matrix = untransposed(matrix)

    rows = lax.transpose(x, [*x_batch, *x_free, *x_sum])
    rows = rows.reshape(*rows.shape[: rows.ndim - len(x_sum)], k)
    # Positions of the result's axes in (batch, rows, free) as they lie here.
    found = {("w", a): i for i, a in enumerate(w_batch)}
    found |= {("x", a): len(w_batch) + i for i, a in enumerate(x_free)}
    found |= {("w", a): len(w_batch) + len(x_free) + i for i, a in enumerate(w_free)}
    of_x, of_w = [("x", a) for a in x_free], [("w", a) for a in sorted(w_free)]
    wanted = [*(("w", a) for a in batch[1]), *(of_w + of_x if weight_first else of_x + of_w)]
    order = [found[axis] for axis in wanted]
    if out_sharding is not None:
        if len(w_free) > 1:
            return NotImplemented
        spec = [*out_sharding.spec, *[None] * (len(order) - len(out_sharding.spec))]
        spec = [spec[order.index(i)] for i in range(len(order))] + [None] * (1 - len(w_free))
        out_sharding = NamedSharding(out_sharding.mesh, PartitionSpec(*spec))
    y = matmul(rows, matrix, contract=contract, dtype=dtype, precision=precision, out_sharding=out_sharding)
    if len(w_free) != 1:
        y = y.reshape(*y.shape[:-1], *free_shape)
    return lax.transpose(y, order)
