"""A format declared outside the package: the 16 levels of llama.cpp's IQ4_NL, with 8-bit scales for blocks of 32.

    value = LEVELS[code] * scale,  scale = signed 8-bit float * one float32 for each column

Encoder, products on every platform, gradients, slices and files follow from the layout. Run it:
python examples/new_format.py
"""

import tempfile

import jax
import jax.numpy as jnp

import lowbit
from lowbit.formats import Layout, declare, levels, packed

LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
LAYOUT = Layout(levels.Table(4, LEVELS), block_size=32, scales=packed.SIGNED8, group="axis")


def main():
    declare("iq4", LAYOUT, error=0.0747)
    w = jax.random.normal(jax.random.key(0), (4096, 128))
    q = lowbit.quantize(w, "iq4")
    print(f"{8 * q.nbytes / q.size} bits per weight, rms error {jnp.std(q.materialize() - w):.4f}")
    x = jax.random.normal(jax.random.key(1), (4, 4096))
    print(f"x @ q: relative error {jnp.linalg.norm(x @ q - x @ w) / jnp.linalg.norm(x @ w):.4f}")
    with tempfile.TemporaryDirectory() as folder:
        lowbit.save(f"{folder}/iq4.safetensors", {"w": q})
        back = lowbit.load(f"{folder}/iq4.safetensors")["w"]
    print("read back:", back.shape, "same codes:", bool((back.codes == q.codes).all()))


if __name__ == "__main__":
    main()
