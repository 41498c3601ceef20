"""The product on TPUs. Nothing here imports Pallas, which only a program for a TPU needs."""

import math

import jax
import jax.numpy as jnp

from lowbit.formats.blocks import WHOLE, span_of
from lowbit.runtime._compat import Device

from ..lazy import when_lowered
from ..product import Product
from .tiling import LANES, SUBLANES

_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)


def matmul_fits(product: Product) -> bool:
    """Whether the kernel takes it: matrices that share no scales, blocks that fill chunks."""
    x, w = product.x, product.w
    if x.dtype not in _FLOATS or product.dtype not in _FLOATS or 0 in (*x.shape, *w.shape):
        return False
    rows, columns = span_of(w.spans, -2), span_of(w.spans, -1)
    apart = all(span_of(w.spans, axis) == 1 for axis in range(-len(w.spans), -2))
    even = rows == 1 or (rows % SUBLANES == 0 and (math.lcm(rows, LANES) <= 1024 or _is_power(rows)))
    return apart and (WHOLE in (rows, columns) or (even and _is_power(columns)))


def _is_power(number: int) -> bool:
    return number & (number - 1) == 0


def matmul(product: Product) -> jax.Array:
    """As `reference.matmul`; float32 sums are as exact as any `precision` asks for."""
    return when_lowered(_matmul, product, "tpu")


def _matmul(product: Product, device: Device) -> jax.Array:
    from .kernel import matmul

    return matmul(product, device.kind)
