"""Products with quantized weights compared with JAX's float32 product, interleaved, on weights too large for a cache.

    python benchmarks/matmul.py                        contract the first axis, scales along it: the table in the docs
    python benchmarks/matmul.py --case last-along      x @ w.T, as in gradients, tied heads and torch-shaped weights
    python benchmarks/matmul.py --peers                also other libraries, if installed
    python benchmarks/matmul.py --save NAME            also to benchmarks/results/NAME.json
    LOWBIT_ISA=avx2 python benchmarks/matmul.py        the kernels of another instruction set that the machine has

Each time is the minimum of all repeats. One repeat calls every product once, so that noise affects all equally. GB/s
counts the stored weight, read once. Weights are those that `quantize` returns: their codes lie in huge pages, where
Linux gives them on request.
"""

import itertools
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import measure

import lowbit
from lowbit import QuantizationConfig
from lowbit.cli import peers

FORMATS = ("q4", "nf4", "int4", "int8", "ternary", "binary")
# The stored axis that is contracted, and the axis along which scales are shared.
CASES = {
    "first-along": (-2, -2),
    "last-along": (-1, -1),
    "first-across": (-2, -1),
    "last-across": (-1, -2),
}


def product(contract: int) -> Any:
    return jax.jit((lambda x, w: x @ w) if contract == -2 else (lambda x, w: x @ w.T))


def copies(make: Callable[[], Any], total: int) -> list[Any]:
    """As many of the same weight as fill `total` bytes."""
    first = make()
    return [first, *(make() for _ in range(max(2, -(-total // first.nbytes)) - 1))]


def kinds(shape: tuple[int, int], m: int, case: str, args: Any) -> dict[str, tuple[list[Any], int]]:
    """Name -> the calls to time, each on a different copy of the weight, and the bytes of one copy."""
    contract, along = CASES[case]
    k, n = shape
    w = jax.random.normal(jax.random.key(0), (k, n) if contract == -2 else (n, k)) / k**0.5
    x = jax.random.normal(jax.random.key(1), (m, k))

    def calls(make: Callable[[], Any], contract: int = contract) -> tuple[list[Any], int]:
        times, weights = product(contract), copies(make, args.bytes)
        return [partial(times, x, weight) for weight in weights], weights[0].nbytes

    # Always in the order that is fastest in JAX: with one row, its x @ w.T is ten times slower.
    dense = w if contract == -2 else w.T
    found = {"JAX float32": calls(lambda: jnp.array(dense, copy=True), -2)}
    for format, arithmetic in itertools.product(args.formats, args.compute):
        if arithmetic == "fast" and case not in ("first-along", "last-along"):
            continue  # runs as exact
        config = QuantizationConfig(format, axis=along, compute=arithmetic)
        found[f"{format} {arithmetic}"] = calls(partial(lowbit.quantize, w, config))
    if args.peers and case == "first-along":
        for name, peer in peers.products(w, x, args.bytes, say).items():
            found[name] = (peer.calls, peer.nbytes)
    return found


@cache  # each text once
def say(text: str) -> None:
    print(text, file=sys.stderr)


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--shapes", default="4096x4096,4096x11008,2048x8192")
    parser.add_argument("--rows", default="1,4,16,64,256", help="M, the rows of x")
    parser.add_argument("--case", default="first-along", choices=CASES)
    parser.add_argument("--formats", default=FORMATS, type=lambda text: text.split(","))
    parser.add_argument("--compute", default=("exact", "fast"), type=lambda text: text.split(","))
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--bytes", type=int, default=192 << 20, help="bytes of weights to rotate over")
    args = parser.parse_args()
    for text in peers.missing() if args.peers else ():
        say(text)
    report = measure.Report(args, ["K x N", "M", "product", "us", "GB/s", "x JAX float32"])
    for shape, m in itertools.product(args.shapes.split(","), map(int, args.rows.split(","))):
        k, n = map(int, shape.split("x"))
        runs = kinds((k, n), m, args.case, args)
        best = measure.least({name: calls for name, (calls, _) in runs.items()}, args.repeat)
        for name, seconds in best.items():
            nbytes = runs[name][1]
            report.row(shape, m, name, 1e6 * seconds, nbytes / seconds / 1e9, best["JAX float32"] / seconds)
    report.save()


if __name__ == "__main__":
    main()
