"""The product on NVIDIA GPUs, Ampere and later. Nothing here imports Pallas, which only a program for CUDA needs."""

import math
from importlib.util import find_spec

import jax
import jax.numpy as jnp

from lowbit.formats.blocks import span_of
from lowbit.runtime._compat import Device

from .. import reference
from ..lazy import when_lowered
from ..product import Product

ANY_GPU = Device("NVIDIA A100", "gpu")
"""The device to lower for if none is known: it has what every GPU has that the kernel runs on."""

_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)


def matmul_fits(product: Product) -> bool:
    """Whether the kernel takes this product: codes in bytes, and matrices that do not share scales."""
    x, w = product.x, product.w
    return (
        all(getattr(w, name).dtype in (jnp.int8, jnp.uint8) for name in w.packing)
        and x.dtype in _FLOATS
        and product.dtype in _FLOATS
        and x.size > 0
        and w.size > 0
        # Pallas counts in 32 bits up to 4 GiB, where the index of a byte has 33 with its sign.
        and not 2**31 <= math.prod(w.codes.shape) <= 2**32
        and all(span_of(w.spans, axis) == 1 for axis in range(-len(w.spans), -2))
    )


def matmul(product: Product) -> jax.Array:
    """As `reference.matmul`; always exact, and as precise as any `precision` asks for."""
    return when_lowered(_matmul, product, "cuda", default=ANY_GPU)


def is_available() -> bool:
    """Whether this JAX has the Triton backend of Pallas, which 0.12 deprecates."""
    return find_spec("jax.experimental.pallas") is not None and find_spec("jax.experimental.pallas.triton") is not None


def _matmul(product: Product, device: Device) -> jax.Array:
    del device  # one tiling for all
    if not is_available():
        return reference.matmul(product)
    from .kernel import matmul

    return matmul(product)
