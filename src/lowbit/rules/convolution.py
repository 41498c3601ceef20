"""Convolutions with a quantized kernel: those with a window of one element are products, others decode inside one
operation."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lowbit.formats.quantized import QuantizedArray
from lowbit.ops.conv import conv
from lowbit.runtime import register

from .contraction import product
from .structural import squeezed


@register("conv_general_dilated")
def _(
    x: jax.Array,
    w: QuantizedArray,
    *,
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    dimension_numbers: Any,
    feature_group_count: int,
    batch_group_count: int,
    precision: Any,
    preferred_element_type: Any,
) -> Any:
    dtype = preferred_element_type or jnp.promote_types(x.dtype, w.dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        return NotImplemented
    _, inputs, *window = dimension_numbers.rhs_spec
    plain = feature_group_count == batch_group_count == 1 and all(step == 1 for step in lhs_dilation)
    if plain and all(w.shape[a] == 1 for a in window) and not any(map(any, padding)):
        batch, features, *places = dimension_numbers.lhs_spec
        strides = [1] * x.ndim
        for a, step in zip(places, window_strides, strict=True):
            strides[a] = step
        x = lax.slice(x, [0] * x.ndim, x.shape, strides)
        axis = inputs - sum(a < inputs for a in window)
        y = product(
            x,
            squeezed(w, window),
            ((features,), (axis,)),
            ((), ()),
            precision=precision,
            preferred_element_type=dtype,
        )
        # The product has the axes of x without its features, and the new features last.
        found = {a: i for i, a in enumerate(a for a in range(x.ndim) if a != features)}
        order = [found[batch], x.ndim - 1, *(found[a] for a in places)]
        wanted = dict(zip(dimension_numbers.out_spec, order, strict=True))
        return y if y is NotImplemented else lax.transpose(y, [wanted[a] for a in range(x.ndim)])
    return conv(
        x,
        w,
        dtype,
        window_strides=window_strides,
        padding=tuple(map(tuple, padding)),
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
        dimension_numbers=dimension_numbers,
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
        precision=precision,
    )
