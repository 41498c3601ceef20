"""Quantize the weight matrices of a transformer layer and print what each format costs and loses."""

import math

import jax
import jax.numpy as jnp

from lowbit.formats import FORMATS

# The linear layers of a transformer block 1024 wide.
SHAPES = {"attention q, k, v, o": (1024, 1024), "mlp up, gate": (1024, 4096), "mlp down": (4096, 1024)}


def relative(got: jax.Array, want: jax.Array) -> float:
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def main() -> None:
    keys = jax.random.split(jax.random.key(0), len(SHAPES))
    print(f"{'weight':22}{'format':>9}{'bits/weight':>13}{'bytes':>12}{'error of w':>12}{'error of x @ w':>16}")
    for key, (name, (k, n)) in zip(keys, SHAPES.items(), strict=True):
        w_key, x_key = jax.random.split(key)
        w = jax.random.normal(w_key, (k, n)) / math.sqrt(k)
        x = jax.random.normal(x_key, (16, k))
        print(f"{name:22}{'float32':>9}{32:13.2f}{w.nbytes:12,}{0:12.5f}{0:16.5f}")
        for format in FORMATS.values():
            q = format.quantize(w, axis=-2)
            bits, error = 8 * q.nbytes / q.size, relative(q.materialize(), w)
            print(f"{'':22}{format.name:>9}{bits:13.2f}{q.nbytes:12,}{error:12.5f}{relative(x @ q, x @ w):16.5f}")


if __name__ == "__main__":
    main()
