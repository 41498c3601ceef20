"""Throughput of quantizing arrays, in GB/s of float32 read, with and without the native kernels.

python benchmarks/encode.py [--save NAME]
"""

from functools import partial

import jax
import measure

import lowbit
from lowbit import FORMATS, QuantizationConfig


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--shape", default="4096x12288")
    args = parser.parse_args()
    rows, columns = map(int, args.shape.split("x"))
    w = jax.random.normal(jax.random.key(0), (rows, columns))
    report = measure.Report(args, ["shape", "axis", "format", "ms", "GB/s", "x without kernels"])
    for format in ("nf4", "int8", "ternary", "binary", "q4", "q3", "int4"):
        for axis in (-2, -1):
            config = QuantizationConfig(format, axis=axis)
            runs = {}
            searches = FORMATS[format].layout is not None  # which takes a minute and more without the kernels
            for name, kernel in (("native", None),) if searches else (("native", None), ("JAX", False)):
                with lowbit.use_kernel(kernel):
                    compiled = jax.jit(partial(lowbit.quantize, config=config)).lower(w).compile()
                runs[name] = [partial(compiled, w)]
            best = measure.least(runs, args.repeat)
            seconds = best["native"]
            report.row(
                args.shape,
                axis,
                format,
                1e3 * seconds,
                w.nbytes / seconds / 1e9,
                best["JAX"] / seconds if "JAX" in best else "-",
            )
    report.save()


if __name__ == "__main__":
    main()
