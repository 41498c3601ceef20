"""A mixture of experts: the product of routed rows with quantized experts, `ragged_dot`.

python benchmarks/experts.py [--experts 64] [--shape 2048x1408] [--tokens 256] [--top 2] [--save experts]

- *even*: every expert has as many rows. *routed*: each token has `top` experts at random. *two*: all rows are in two.
- *x one product*: against one product of as many rows as an expert in use has, on average, with one matrix that has the
  bytes of all experts in use. It does the same multiplications.
- *x ragged_dot*: how many times faster than JAX's `ragged_dot` of dense float32 experts, which multiplies all rows by
  all experts.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import measure
import numpy as np
from jax import lax

import lowbit
from lowbit import QuantizationConfig


@jax.jit
@lowbit.implicit
def backward(x: Any, w: Any, sizes: Any) -> Any:
    """The gradient with respect to x."""
    y, back = jax.vjp(lambda x: lax.ragged_dot(x, w, sizes), x)
    return back(jnp.ones_like(y))


def groups(count: int, tokens: int, top: int) -> dict[str, jax.Array]:
    """The rows of each expert."""
    rng = np.random.default_rng(0)
    chosen = np.stack([rng.choice(count, top, replace=False) for _ in range(tokens)]).reshape(-1)
    even, two = np.full(count, chosen.size // count), np.zeros(count)
    two[[1, count // 2]] = chosen.size // 2
    found = {"even": even, "routed": np.bincount(chosen, minlength=count), "two": two}
    return {name: jnp.asarray(sizes, jnp.int32) for name, sizes in found.items()}


def side_by_side(q: Any, count: int) -> Any:
    """The first `count` experts as one matrix."""
    return jax.tree.map(lambda a: jnp.moveaxis(a[:count], 0, 1).reshape(a.shape[1], -1), q)


def main() -> None:
    parser = measure.parser(__doc__)
    parser.set_defaults(repeat=8)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--shape", default="2048x1408")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--top", type=int, default=2)
    parser.add_argument("--formats", default="nf4,q4,int8")
    args = parser.parse_args()
    (k, n), count, rows = map(int, args.shape.split("x")), args.experts, args.tokens * args.top
    sizes = groups(count, args.tokens, args.top)
    x = jax.random.normal(jax.random.key(0), (rows, k))
    w = jax.random.normal(jax.random.key(1), (count, k, n)) / k**0.5
    multiply, ragged = jax.jit(lambda x, w: x @ w), jax.jit(lowbit.implicit(lax.ragged_dot))
    dense = measure.least({"JAX": [lambda: lax.ragged_dot(x, w, sizes["routed"])]}, 3)["JAX"]
    batched = jax.jit(lambda x, w: jnp.einsum("ebk,ekn->ebn", x, w))
    calls: dict[str, Sequence[Any]] = {"JAX float32, batched, even": [partial(batched, x.reshape(count, -1, k), w)]}
    base = {}
    for format in args.formats.split(","):
        for arithmetic in ("exact", "fast"):
            q, name = (
                lowbit.quantize(w, QuantizationConfig(format, axis=-2, compute=arithmetic)),
                f"{format} {arithmetic}",
            )
            for kind, of in sizes.items():
                used = 2 if kind == "two" else count
                one = f"{name}, one product of {rows // used} rows"
                calls[one] = [partial(multiply, x[: rows // used], side_by_side(q, used))]
                calls[f"{name}, {kind}"] = [partial(ragged, x, q, of)]
                base[f"{name}, {kind}"] = one
            if arithmetic == "exact":
                calls[f"{name}, routed, gradient"] = [partial(backward, x, q, sizes["routed"])]
                base[f"{name}, routed, gradient"] = base[f"{name}, routed"]
    best = measure.least(calls, args.repeat)
    report = measure.Report(args, ["experts", "K x N, rows", "product", "ms", "x one product", "x ragged_dot"])
    report.row(count, f"{args.shape}, {rows}", "JAX float32, ragged_dot", 1e3 * dense, "", 1.0)
    for name, seconds in best.items():
        ratio = seconds / best[base[name]] if name in base else ""
        report.row(count, f"{args.shape}, {rows}", name, 1e3 * seconds, ratio, dense / seconds)
    report.save()


if __name__ == "__main__":
    main()
