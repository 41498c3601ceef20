"""How fast and in how much memory `lowbit quantize` works through a file that need not fit into memory.

python benchmarks/stream.py [--gigabytes 4] [--folder DIR] [--formats nf4,int8] [--save NAME]

- `disk`: the source's bytes by the seconds that it takes to read them, not cached, and to write those of the result.
- `encode`: how fast arrays of the size of a piece are quantized when they are in memory already.
- `stream`: the same for the whole work, from the opened source to the result in its place.
- `share`: of the slower of disk and encode, which the work cannot beat.
- `command`: the seconds of the command as typed, with the imports and compilations of its start.
- `peak`: the most memory that the command had (`ru_maxrss`), mapped pages included. Over 1 GB is an error.

The files have random numbers, in many tensors or in one, and are removed.
"""

import json
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
from lowbit.io import stream

SIZES = {"F32": 4, "F16": 2, "BF16": 2}
DTYPES = {"F32": jnp.float32, "F16": jnp.float16, "BF16": jnp.bfloat16}
LIMIT = 1e9
# What the command runs, with a clock.
TIMED = """
import sys, time
from pathlib import Path
from lowbit.io.convert import convert
from lowbit.io.source import open_tensors
source, start = open_tensors(sys.argv[1]), time.perf_counter()
convert(source, Path(sys.argv[2]), rules=sys.argv[3])
print(time.perf_counter() - start)
"""


def make(path: Path, size: int, dtype: str, one: bool) -> int:
    """A safetensors file of about so many bytes, written in pieces; how many bytes its tensors have."""
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


def forget(path: Path) -> None:
    """Have the system no longer keep a file in memory."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk(path: Path, result: int, folder: Path) -> float:
    """Seconds to read a file and to write another."""
    forget(path)
    buffer = np.empty(8 << 20, np.uint8)
    start = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer.data):
            os.posix_fadvise(file.fileno(), file.tell() + buffer.size, buffer.size, os.POSIX_FADV_WILLNEED)
    with (folder / "disk").open("wb", buffering=0) as file:
        while result > 0:
            result -= file.write(buffer[:result].data)
        os.fsync(file.fileno())
    (folder / "disk").unlink()
    return time.perf_counter() - start


def encode(dtype: str, format: str, repeat: int) -> float:
    """Seconds for a byte."""
    w = jax.random.normal(jax.random.key(0), (stream.PIECE >> 12, 1 << 12), DTYPES[dtype])
    config = lowbit.QuantizationConfig(format, axis=-1)
    compiled = jax.jit(partial(lowbit.quantize, config=config)).lower(w).compile()
    return measure.least({"": [partial(compiled, w)]}, repeat)[""] / w.nbytes


def run(*command: str | Path) -> tuple[float, float, str]:
    """Seconds, the most bytes of memory, and the output of a command."""
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} failed.")
    return time.perf_counter() - start, 1024 * usage.ru_maxrss, output


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--gigabytes", type=float, default=4)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--formats", default="nf4,int8")
    args = parser.parse_args()
    columns = ["tensors", "dtype", "format", "GB", "disk GB/s", "encode GB/s", "stream GB/s", "share"]
    report = measure.Report(args, [*columns, "command s", "peak MB"])
    most = 0.0
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        source, target = folder / "in.safetensors", folder / "out.safetensors"
        for one in (False, True):
            for dtype in SIZES:
                size = make(source, int(args.gigabytes * 1e9), dtype, one)
                for format in args.formats.split(","):
                    forget(source)
                    command = (sys.executable, "-m", "lowbit", "quantize", source, target, "--format", format)
                    taken, peak, _ = run(*command, "--force")
                    forget(source)
                    _, other, output = run(sys.executable, "-c", TIMED, source, target, format)
                    peak = max(peak, other)
                    rates = [size / disk(source, target.stat().st_size, folder), 1 / encode(dtype, format, args.repeat)]
                    rate = size / float(output)
                    shown = [r / 1e9 for r in (*rates, rate)]
                    case = ("one" if one else "many", dtype, format, size / 1e9)
                    report.row(*case, *shown, rate / min(rates), taken, peak / 1e6)
                    most = max(most, peak)
    report.save()
    if most > LIMIT:
        raise SystemExit(f"The most memory was {most / 1e6:.0f} MB, and it must stay under {LIMIT / 1e6:.0f}.")


if __name__ == "__main__":
    main()
