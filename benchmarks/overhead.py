"""Overhead of a small product inside a compiled program: a chain of products, one row, weights that stay in the cache.

python benchmarks/overhead.py [--width 576] [--save NAME]
"""

import jax
import jax.numpy as jnp
import measure

import lowbit
from lowbit import QuantizationConfig

CHAIN = 64


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--width", type=int, default=576)
    args = parser.parse_args()
    n = args.width
    w = jax.random.normal(jax.random.key(0), (n, n)) / n**0.5
    x = jnp.ones((1, n))

    @jax.jit
    def chain(x, w):
        for _ in range(CHAIN):
            x = jax.lax.optimization_barrier(x @ w)
        return x

    weights = {"JAX float32": w}
    for format in ("nf4", "int8", "ternary", "binary"):
        for arithmetic in ("exact", "fast"):
            config = QuantizationConfig(format, axis=-2, compute=arithmetic)
            weights[f"{format} {arithmetic}"] = lowbit.quantize(w, config)
    report = measure.Report(args, ["K x N", "M", "product", "us", "x JAX float32"])
    best = measure.least({name: [lambda q=q: chain(x, q)] for name, q in weights.items()}, args.repeat)
    for name, seconds in best.items():
        report.row(f"{n}x{n}", 1, name, 1e6 * seconds / CHAIN, best["JAX float32"] / seconds)
    report.save()


if __name__ == "__main__":
    main()
