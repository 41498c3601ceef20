"""eformer.ops.quantization.quantization_functions: the steps of quantization as functions of plain arrays."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import lowbit
from lowbit import is_kernel_available as is_kernel_available
from lowbit import use_kernel as nf4_use_kernel
from lowbit.formats.nf4 import LEVELS

__all__ = (
    "ba",
    "dequantize_int8",
    "dequantize_nf4",
    "get_nf4",
    "i4tou4",
    "i8tou8",
    "is_kernel_available",
    "nf4_use_kernel",
    "nf4xf32_to_f32",
    "pack_weights_1bit",
    "quantize_and_pack_nf4",
    "quantize_int8",
    "single_dequantize_nf4",
    "single_quantize_and_pack_nf4",
    "sl",
    "sr",
    "u4toi4",
    "unpack_weights_1bit",
)

sr = lax.shift_right_logical
sl = lax.shift_left
ba = lax.bitwise_and


def get_nf4() -> jax.Array:
    """The sixteen levels."""
    return jnp.asarray(LEVELS)


def nf4xf32_to_f32(x: jax.Array) -> jax.Array:
    """The levels of codes 0 to 15, from the table."""
    return jnp.take(get_nf4(), jnp.asarray(x).astype(jnp.int32), axis=0)


def i8tou8(x: jax.Array) -> jax.Array:
    """Signed bytes as numbers from 0 to 255."""
    return jnp.asarray(x).astype(jnp.int32) & 255


def i4tou4(x: jax.Array) -> jax.Array:
    """Signed nibbles as numbers from 0 to 15."""
    return jnp.asarray(x).astype(jnp.int32) & 15


def u4toi4(x: jax.Array) -> jax.Array:
    """Numbers from 0 to 15 as signed nibbles."""
    x = jnp.asarray(x).astype(jnp.int32)
    return jnp.where(x >= 8, x - 16, x)


# Compiled, since only an eager call raises for NaN.
_int8 = jax.jit(lowbit.Array8B.quantize, static_argnames="axis")
_nf4 = jax.jit(lowbit.ArrayNF4.quantize, static_argnames=("block_size", "axis"))


def quantize_int8(x: jax.Array, axis: Any = -1) -> tuple[jax.Array, jax.Array]:
    """Quantize to codes and scales; the scales have size 1 along `axis`."""
    q = _int8(jnp.asarray(x), axis=-1 if axis is None else axis)
    return q.weight, q.scale


def dequantize_int8(quants: jax.Array, scales: jax.Array) -> jax.Array:
    """Codes times scales."""
    return jnp.asarray(quants).astype(jnp.result_type(scales)) * scales


def joined(packed: jax.Array) -> jax.Array:
    """Packed bytes of shape (..., blocks, bytes per block) as whole rows."""
    packed = jnp.asarray(packed)
    return packed.reshape(*packed.shape[:-2], packed.shape[-2] * packed.shape[-1])


def quantize_and_pack_nf4(blocks: jax.Array, block_size: int = 64) -> tuple[jax.Array, jax.Array]:
    """Bytes of shape (..., blocks, block_size / 2), the first code in the high nibble, and scales (..., blocks)."""
    blocks = jnp.asarray(blocks)
    if blocks.shape[-1] % block_size:
        raise ValueError(f"The last axis of {blocks.shape} is not a multiple of block_size={block_size}.")
    q = _nf4(blocks, block_size=block_size, axis=-1)
    return q.packed.reshape(*q.absmax.shape, block_size // 2), q.absmax


def dequantize_nf4(packed_values: jax.Array, absmax: jax.Array, block_size: int) -> jax.Array:
    """The float32 array from the output of `quantize_and_pack_nf4`."""
    return lowbit.ArrayNF4(packed=joined(packed_values), absmax=absmax, block_size=block_size).materialize()


single_quantize_and_pack_nf4 = quantize_and_pack_nf4
single_dequantize_nf4 = dequantize_nf4


def pack_weights_1bit(quantized_weights: jax.Array) -> jax.Array:
    """Pack four values of {-1, 0, 1} per byte: quarter i of the first axis in bits 2i and 2i + 1."""
    codes = jnp.asarray(quantized_weights)
    if codes.shape[0] % 4:
        raise ValueError(f"The first axis of {codes.shape} is not a multiple of 4.")
    quarters = jnp.split((codes + 1).astype(jnp.uint8), 4)
    return sum((quarter << jnp.uint8(2 * i) for i, quarter in enumerate(quarters)), jnp.zeros_like(quarters[0]))


def unpack_weights_1bit(packed: jax.Array, dtype: Any) -> jax.Array:
    """Unpack the output of `pack_weights_1bit`."""
    packed = jnp.asarray(packed)
    quarters = [(packed >> jnp.uint8(2 * i)) & jnp.uint8(3) for i in range(4)]
    return jnp.concatenate(quarters).astype(dtype) - jnp.ones((), dtype)
