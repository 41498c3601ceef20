"""Times lowbit_matmul beside JAX's plain float32 product, in turns, on weights that do not fit the caches.

python csrc/tune/time_matmul.py build/lowbit_native.so --formats nf4,int8 --m 1,4 --case 0along --shape 4096,4096
"""

import argparse
import ctypes
import time

import jax
import jax.numpy as jnp
import numpy as np

PER_BYTE = {"int8": 1, "nf4": 2, "ternary": 4, "binary": 8}
SPANS = {  # (row_span, col_span) for each case: the contracted stored axis, and how the scales lie to it
    "0along": lambda format: (64 if format == "nf4" else 0, 1),
    "0across": lambda format: (1, 64 if format == "nf4" else 0),
    "1along": lambda format: (1, 64 if format == "nf4" else 0),
    "1across": lambda format: (64 if format == "nf4" else 0, 1),
}


def prepared(args, format, m, case, rng):
    """One call for each copy of the weights, which together fill the given number of bytes."""
    k, n = args.shape
    contract = int(case[0])
    rows, columns = (n, k) if contract else (k, n)
    row_span, col_span = SPANS[case](format)
    row_bytes = columns // PER_BYTE[format]
    scale_shape = (1, -(-rows // row_span) if row_span else 1, -(-columns // col_span) if col_span else 1)
    copies = max(2, -(-args.bytes // (rows * row_bytes)))
    none, index = np.zeros((1, 0), np.float32), np.zeros(1, np.int32)
    call = jax.ffi.ffi_call("lowbit_matmul", jax.ShapeDtypeStruct((1, m, n), jnp.float32))

    @jax.jit
    def product(x, codes, scales):
        return call(
            x, codes, scales, none, none, np.zeros(0, np.float32), index, format=format, columns=np.int64(columns),
            row_span=np.int64(row_span), col_span=np.int64(col_span), contract=np.int64(contract), fast=args.fast,
        )  # fmt: skip

    x = jnp.asarray(rng.standard_normal((1, m, k)), jnp.float32)
    parts = []
    for _ in range(copies):
        codes = rng.integers(0, 256, (1, rows, row_bytes), np.uint8)
        if format == "ternary":
            codes &= ~(codes << 1) & 0xAA | 0x55
        codes = codes.view(np.int8) if format == "int8" else codes
        parts.append((jnp.asarray(codes), jnp.asarray(rng.uniform(0.5, 1, scale_shape), jnp.float32)))
    return [lambda p=p: product(x, *p) for p in parts]


def dense(args, m, rng):
    k, n = args.shape
    x = jnp.asarray(rng.standard_normal((m, k)), jnp.float32)
    product = jax.jit(lambda x, w: x @ w)
    weights = [jnp.asarray(rng.random((k, n), np.float32)) for _ in range(max(2, -(-args.bytes // (4 * k * n))))]
    return [lambda w=w: product(x, w) for w in weights]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library")
    parser.add_argument("--formats", default="nf4,int8,ternary,binary")
    parser.add_argument("--m", default="1,4,16,64,256")
    parser.add_argument("--case", default="0along")
    parser.add_argument("--shape", default="4096,4096", type=lambda s: tuple(map(int, s.split(","))))
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--bytes", type=int, default=192 << 20)
    args = parser.parse_args()
    library = ctypes.CDLL(args.library)
    jax.ffi.register_ffi_target("lowbit_matmul", jax.ffi.pycapsule(library.lowbit_matmul), platform="cpu")
    rng = np.random.default_rng(0)
    formats = args.formats.split(",")
    for m in map(int, args.m.split(",")):
        calls = {"f32": dense(args, m, rng)}
        for case in args.case.split(","):
            calls |= {f"{case} {format}": prepared(args, format, m, case, rng) for format in formats}
        best = dict.fromkeys(calls, np.inf)
        for _ in range(2):
            for runs in calls.values():
                runs[0]().block_until_ready()
        for i in range(args.repeat):
            for name, runs in calls.items():
                run = runs[i % len(runs)]
                start = time.perf_counter()
                run().block_until_ready()
                best[name] = min(best[name], time.perf_counter() - start)
        times = [f"{name} {t * 1e6:.0f} us x{best['f32'] / t:.2f}" for name, t in best.items()]
        print(f"{m=}: " + "; ".join(times), flush=True)


main()
