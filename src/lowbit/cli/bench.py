"""Timing matrix products in several formats."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from lowbit import QuantizationConfig, quantize

# Total size of the copies of a weight, which are used in rotation: more than a cache holds.
ROTATED = 128 << 20


class Timing(NamedTuple):
    """One product: the rows of x, the minimum time, and the speedup over float32."""

    rows: int
    product: str
    microseconds: float
    speedup: float


def products(size: int, rows: Sequence[int], repeat: int, formats: Sequence[str]) -> Iterator[Timing]:
    """The minimum times of `x @ w` with square weights, over interleaved repeats."""
    key = jax.random.key(0)
    w = jax.random.normal(key, (size, size)) / size**0.5
    weights: dict[str, Any] = {"float32": w}
    for name in formats:
        for arithmetic in ("exact", "fast"):
            weights[f"{name} {arithmetic}"] = quantize(w, QuantizationConfig(name, axis=-2, compute=arithmetic))
    copies = {name: [jax.tree.map(lambda x: x + 0, w) for _ in range(_copies(w))] for name, w in weights.items()}
    multiply = jax.jit(lambda x, w: x @ w)
    for m in rows:
        x = jax.random.normal(key, (m, size))
        best = dict.fromkeys(weights, float("inf"))
        for turn in range(repeat + 1):
            for name, own in copies.items():
                took = _timed(multiply, x, own[turn % len(own)])
                best[name] = min(best[name], took) if turn else best[name]  # the first compiles
        for name, seconds in best.items():
            yield Timing(m, name, 1e6 * seconds, best["float32"] / seconds)


def _copies(w: Any) -> int:
    return min(max(2, ROTATED // sum(x.nbytes for x in jax.tree.leaves(w))), 64)


def _timed(work: Callable[..., Any], *operands: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(work(*operands))
    return time.perf_counter() - start
