"""Throughput and peak memory of `lowbit quantize` on a file that may be larger than memory.

python benchmarks/stream.py [--gigabytes 4] [--folder DIR] [--formats nf4,int8] [--runs 2] [--save NAME]

- `tensors`: many of 8 million weights, one, or one whose scales are along its columns (as for a JAX kernel).
- `disk`: the bytes of the source over the seconds to read them, not cached, and to write those of the result, with or
  without the page cache, whichever is faster. int8 with scales along columns needs the largest magnitude of a column
  before it can encode it, so the source is read twice, here too.
- `encode`: throughput of quantizing arrays of the size of a chunk that are already in memory.
- `stream`: throughput of the whole conversion, from the opened source to the finished result.
- `share`: of the slower of disk and encode, which bounds the conversion.
- `cores`: the number of cores that the conversion used.
- `command`: the seconds of the whole command, including imports and compilation.
- `peak`: peak memory of the command (as `ru_maxrss` counts it), including mapped pages. Over 1 GB is an error.

Disk and stream runs are interleaved, and the best of each counts. The files hold random numbers and are removed.
"""

import itertools
import json
import math
import mmap
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import measure
import numpy as np

import lowbit
from lowbit.io import _chunks

SIZES = {"F32": 4, "F16": 2, "BF16": 2}
DTYPES = {"F32": jnp.float32, "F16": jnp.float16, "BF16": jnp.bfloat16}
LIMIT = 1e9
WAYS = (os.O_DIRECT, 0)  # without the page cache, and with it
CHUNK = 1 << 22
# Not ru_maxrss, which a child inherits from the process that started it.
PEAK = """
import atexit
from pathlib import Path
atexit.register(lambda: print("peak", Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]))
"""
COMMAND = """
from lowbit.cli import main
main()
"""
# What the command runs, timed.
TIMED = """
import sys, time
from pathlib import Path
from lowbit.io import convert
from lowbit.io import open_tensors
source, start, used = open_tensors(sys.argv[1]), time.perf_counter(), time.process_time()
convert(source, Path(sys.argv[2]), rules=sys.argv[3])
taken = time.perf_counter() - start
print("seconds", taken)
print("cores", (time.process_time() - used) / taken)
"""


def make(path: Path, size: int, dtype: str, one: bool) -> int:
    """Write a safetensors file of about this many bytes, in chunks; returns the bytes of its tensors."""
    columns, row = (1 << 14, SIZES[dtype] << 14) if one else (4096, SIZES[dtype] << 12)
    rows = size // row // 64 * 64 if one else 2048
    count = 1 if one else max(size // (rows * row), 1)
    header = {
        f"layers.{i}.weight": {
            "dtype": dtype,
            "shape": [rows, columns],
            "data_offsets": [i * rows * row, (i + 1) * rows * row],
        }
        for i in range(count)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    numbers = jax.random.normal(jax.random.key(0), (1 << 22,), DTYPES[dtype])
    data, left = np.asarray(numbers).tobytes(), count * rows * row
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        while left:
            left -= file.write(data[:left])
        os.fsync(file.fileno())
    return count * rows * row


def along_columns(path: Path) -> None:
    """Rename the weights of a file to kernels, which are stored as (in, out)."""
    with path.open("r+b") as file:
        header = file.read(8 + int.from_bytes(file.read(8), "little"))[:-8]
        file.seek(8)
        file.write(header.replace(b".weight", b".kernel"))


def forget(path: Path) -> None:
    """Evict a file from the page cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk(path: Path, passes: int, result: int, folder: Path) -> float:
    """Seconds to read a file and then to write another: without the page cache, or with it if that is faster."""
    reading = passes * min(read(path, flags) for flags in WAYS)
    return reading + min(write(folder / "disk", result, flags) for flags in WAYS)


def read(path: Path, flags: int) -> float:
    forget(path)
    buffer = np.frombuffer(mmap.mmap(-1, CHUNK), np.uint8)
    start = time.perf_counter()
    file, at = os.open(path, os.O_RDONLY | flags), 0
    while count := os.preadv(file, [buffer.data], at):
        at += count
    os.close(file)
    return time.perf_counter() - start


def write(path: Path, size: int, flags: int) -> float:
    buffer = np.frombuffer(mmap.mmap(-1, CHUNK), np.uint8)
    start = time.perf_counter()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | flags)
    for at in range(0, size, CHUNK):
        os.pwrite(file, buffer.data, at)
    os.fsync(file)
    os.close(file)
    taken = time.perf_counter() - start
    path.unlink()
    return taken


def encode(dtype: str, format: str, axis: int, repeat: int) -> float:
    """Seconds per byte."""
    w = jax.random.normal(jax.random.key(0), (_chunks.CHUNK >> 12, 1 << 12), DTYPES[dtype])
    config = lowbit.QuantizationConfig(format, axis=axis)
    compiled = jax.jit(partial(lowbit.quantize, config=config)).lower(w).compile()
    return measure.least({"": [partial(compiled, w)]}, repeat)[""] / w.nbytes


def run(code: str, *args: str | Path) -> tuple[float, dict[str, float]]:
    """Seconds of a program, and the values that it printed."""
    start = time.perf_counter()
    result = subprocess.run((sys.executable, "-c", PEAK + code, *args), stdout=subprocess.PIPE, text=True, check=True)
    seconds = time.perf_counter() - start
    printed = dict(
        line.split() for line in result.stdout.splitlines() if line.startswith(("peak ", "seconds ", "cores "))
    )
    return seconds, {name: float(value) for name, value in printed.items()}


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--gigabytes", type=float, default=4)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--formats", default="nf4,int8")
    parser.add_argument("--runs", type=int, default=2)
    args = parser.parse_args()
    columns = ["tensors", "dtype", "format", "GB", "disk GB/s", "encode GB/s", "stream GB/s", "share", "cores"]
    report = measure.Report(args, [*columns, "command s", "peak MB"])
    most = 0.0
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        source, target = folder / "in.safetensors", folder / "out.safetensors"
        size = 0
        for dtype, tensors in itertools.product(SIZES, ("many", "one", "columns")):
            if tensors == "columns":
                along_columns(source)
            else:
                size = make(source, int(args.gigabytes * 1e9), dtype, tensors == "one")
            for format in args.formats.split(","):
                forget(source)
                taken, printed = run(COMMAND, "quantize", source, target, "--format", format, "--force")
                peak, result = printed["peak"] * 1024, target.stat().st_size
                best_disk = best = cores = math.inf
                passes = 2 if (tensors, format) == ("columns", "int8") else 1
                for _ in range(args.runs):
                    best_disk = min(best_disk, disk(source, passes, result, folder))
                    forget(source)
                    target.unlink()
                    _, printed = run(TIMED, source, target, format)
                    (best, cores), peak = (
                        min((best, cores), (printed["seconds"], printed["cores"])),
                        max(peak, printed["peak"] * 1024),
                    )
                rates = [size / best_disk, 1 / encode(dtype, format, -2 if tensors == "columns" else -1, args.repeat)]
                shown = [r / 1e9 for r in (*rates, size / best)]
                case = (tensors, dtype, format, size / 1e9)
                report.row(*case, *shown, size / best / min(rates), cores, taken, peak / 1e6)
                most = max(most, peak)
    report.save()
    if most > LIMIT:
        raise SystemExit(f"Peak memory was {most / 1e6:.0f} MB, and it must stay under {LIMIT / 1e6:.0f}.")


if __name__ == "__main__":
    main()
