"""A custom format with six bits per weight, defined outside the package.

    value = (code - 32) * scale,  scale = max |w| / 31 of each block

The low four bits of two codes share a byte, and the high two bits of four. Run it: python examples/new_format.py
"""

from typing import ClassVar

import jax
import jax.numpy as jnp

import lowbit
from lowbit import formats


@formats.stored
class Array6B(lowbit.QuantizedArray):
    high: jax.Array  # one more component, in addition to `codes` and `scales`

    packing: ClassVar = {"codes": 2, "high": 4}  # codes per byte

    @classmethod
    def quantize(cls, array, block_size=64, *, axis=None, dtype=None):
        array = formats.checked_input(array, "int6")
        spans = formats.axis_spans(array.shape, axis, block_size)
        values = array.astype(jnp.float32)
        scales = formats.finite_or_nan(formats.block_max(values, spans) / 31)
        usable = jnp.where(scales > 0, scales, 1)
        codes = jnp.round(values / formats.spread(usable, spans, array.shape)) + 32
        codes = jnp.nan_to_num(codes).astype(jnp.uint8)
        components = {"codes": formats.pack(codes & 15, 2), "high": formats.pack(codes >> 4, 4), "scales": scales}
        return cls.build(shape=array.shape, dtype=dtype or array.dtype, spans=spans, **components)

    def levels(self, low, high):
        return (low | high << 4).astype(jnp.float32) - 32


INT6 = lowbit.Format("int6", Array6B.quantize, error=0.0243, bits=6.0)


def main():
    lowbit.register_format(INT6)
    w = jax.random.normal(jax.random.key(0), (4096, 512))
    q = lowbit.FORMATS["int6"].quantize(w)
    x = jax.random.normal(jax.random.key(1), (4, 4096))
    print(q)
    print(f"{8 * q.nbytes / q.size} bits per weight, rms error {jnp.std(q.materialize() - w):.4f}")
    # The base class provides products, gradients, scans and slices.
    print("x @ q:", jnp.linalg.norm(x @ q - x @ w) / jnp.linalg.norm(x @ w))
    print("gradient:", jax.grad(lambda x: (x @ q).sum())(x).shape, "transposed:", q.T.shape, "row:", q[5].shape)


if __name__ == "__main__":
    main()
