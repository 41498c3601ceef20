"""Convolutions with a quantized kernel.

A convolution is a product of patches of x with the kernel as a matrix. That is how it runs if its window has one
element, and on CPU if it has few patches, where the native product is faster than decoding the kernel for a dense
convolution (benchmarks/convolutions.py). Others decode the kernel inside one operation.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lowbit.formats.quantized import QuantizedArray
from lowbit.ops.conv import conv
from lowbit.ops.matmul import arithmetic_of
from lowbit.runtime import register

from .contraction import product
from .structural import cut_blocks

# Patches for each output feature, up to which the product is faster, or equally fast.
FEW_PATCHES = {"exact": 1, "fast": 4}


@dataclass(frozen=True)
class _Convolution:
    """The parameters of `lax.conv_general_dilated`, hashable."""

    window_strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    dimension_numbers: Any
    feature_group_count: int
    batch_group_count: int
    precision: Any

    def __call__(self, x: jax.Array, w: QuantizedArray, dtype: Any) -> jax.Array:
        return conv(x, w, dtype, **{field.name: getattr(self, field.name) for field in fields(self)})

    def places(self, x: jax.Array, w: QuantizedArray) -> list[int]:
        """The number of patches along each axis of the window."""
        sizes = zip(self.dimension_numbers.lhs_spec[2:], self.dimension_numbers.rhs_spec[2:], strict=True)
        return [
            max((sum(pads) + max((x.shape[a] - 1) * grown + 1, 0) - ((w.shape[b] - 1) * apart + 1)) // step + 1, 0)
            for (a, b), pads, grown, apart, step in zip(
                sizes, self.padding, self.lhs_dilation, self.rhs_dilation, self.window_strides, strict=True
            )
        ]

    def as_product(self, x: jax.Array, w: QuantizedArray, dtype: Any) -> Any:
        """The product of the patches with the kernel, or NotImplemented if it cannot be stored as one matrix."""
        numbers, count = self.dimension_numbers, x.ndim - 2
        places, window = self.places(x, w), [w.shape[a] for a in numbers.rhs_spec[2:]]
        batch, features, *axes = numbers.lhs_spec
        x = lax.transpose(x, [batch, *axes, features])
        borders = [(low, high, grown - 1) for (low, high), grown in zip(self.padding, self.lhs_dilation, strict=True)]
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *borders, (0, 0, 0)])
        for a, (length, size, step, apart) in enumerate(
            zip(places, window, self.window_strides, self.rhs_dilation, strict=True), start=1
        ):
            ends = [i * apart + (length - 1) * step + 1 for i in range(size)]
            slices = [lax.slice_in_dim(x, i * apart, end, step, a) for i, end in enumerate(ends)]
            x = jnp.stack(slices, -2)  # (batch, *places, *window, features)
        _, inputs, *spots = numbers.rhs_spec
        y = product(
            x,
            w,
            (tuple(range(count + 1, x.ndim)), (*spots, inputs)),
            ((), ()),
            precision=self.precision,
            preferred_element_type=dtype,
        )
        if y is NotImplemented:
            return y
        wanted = dict(zip(numbers.out_spec, (0, count + 1, *range(1, count + 1)), strict=True))
        return lax.transpose(y, [wanted[a] for a in range(count + 2)])


def few_patches(convolution: _Convolution, x: jax.Array, w: QuantizedArray) -> bool:
    """Whether the product of patches is faster on CPU than a convolution with the decoded kernel."""
    outputs, batch = convolution.dimension_numbers.rhs_spec[0], convolution.dimension_numbers.lhs_spec[0]
    if any(grown > 1 for grown in convolution.lhs_dilation):  # most elements of the patches are zeros
        return False
    if cut_blocks(w, range(len(w.stored_shape))):  # the gradient of such a product is slow
        return False
    patches = x.shape[batch] * math.prod(convolution.places(x, w))
    return patches <= FEW_PATCHES[arithmetic_of(w)] * w.shape[outputs]


# Compiled, so that the branches of an eager call are traced once.
@functools.partial(jax.jit, static_argnames=("convolution", "dtype"))
def _by_platform(x: jax.Array, w: QuantizedArray, *, convolution: _Convolution, dtype: Any) -> jax.Array:
    def as_product(x: jax.Array, w: QuantizedArray) -> jax.Array:
        y = convolution.as_product(x, w, dtype)
        return convolution(x, w, dtype) if y is NotImplemented else y

    return lax.platform_dependent(x, w, cpu=as_product, default=lambda x, w: convolution(x, w, dtype))


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
    dtype = jnp.dtype(preferred_element_type or jnp.promote_types(x.dtype, w.dtype))
    if not jnp.issubdtype(dtype, jnp.floating):
        return NotImplemented
    convolution = _Convolution(
        tuple(window_strides),
        tuple((low, high) for low, high in padding),
        tuple(lhs_dilation),
        tuple(rhs_dilation),
        dimension_numbers,
        feature_group_count,
        batch_group_count,
        precision,
    )
    _, _, *window = dimension_numbers.rhs_spec
    if feature_group_count == batch_group_count == 1:
        if all(w.shape[a] == 1 for a in window):
            return convolution.as_product(x, w, dtype)
        if few_patches(convolution, x, w):
            return _by_platform(x, w.resolved(), convolution=convolution, dtype=dtype)
    return convolution(x, w, dtype)
