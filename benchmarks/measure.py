"""Shared by the benchmarks: interleaved repeats, a table, and a results file with the origin of its numbers."""

import argparse
import datetime
import hashlib
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from lowbit.kernels import cpu

RESULTS = Path(__file__).parent / "results"
SOURCES = Path(__file__).parent.parent / "csrc"


def parser(doc: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--repeat", type=int, default=30)
    made.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.json")
    return made


# Calls of one product in a row, on different weights. The first is not timed.
IN_A_ROW = 5


def least(calls: dict[str, Sequence[Callable[[], Any]]], repeat: int) -> dict[str, float]:
    """The minimum time of each, in seconds, over interleaved repeats.

    A repeat makes several calls of the same product, as programs do. After calls of another library, threads have to
    wake up and the code has to return to the caches, which takes 100 us and more and depends on which library that was.
    """
    best = dict.fromkeys(calls, float("inf"))
    for i in range(repeat + 1):
        for name, runs in calls.items():
            for j in range(IN_A_ROW):
                run = runs[(IN_A_ROW * i + j) % len(runs)]
                start = time.perf_counter()
                jax.block_until_ready(run())
                if i > 0 and j > 0:  # the first repeat compiles
                    best[name] = min(best[name], time.perf_counter() - start)
    return best


def kernels_digest() -> str:
    """A digest of the sources of the native kernels: speeds of other sources are out of date."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def machine() -> dict[str, Any]:
    packages = ("jax", "numpy", "onnxruntime", "openvino", "llama_cpp_python", "xllamacpp")
    versions = {name: metadata.version(name) for name in packages if _installed(name)}
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "instruction set of lowbit": cpu.instruction_set(),
        "kernels": kernels_digest(),
        "python": platform.python_version(),
        **versions,
    }


def processor() -> str:
    """The name of the processor, which virtual machines shorten, and its family and model."""
    lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    of_first: dict[str, str] = {}
    for key, _, value in lines:
        of_first.setdefault(key.strip(), value.strip())
    if "model name" not in of_first:
        return platform.processor()
    return f"{of_first['model name']} (family {of_first['cpu family']} model {of_first['model']})"


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


class Report:
    """Rows, printed as they are added and kept for a file."""

    def __init__(self, args: argparse.Namespace, columns: Sequence[str]):
        self.name, self.columns, self.rows = args.save, list(columns), []
        settings = [f"{name}={os.environ[name]}" for name in ("XLA_FLAGS", "LOWBIT_ISA") if name in os.environ]
        if "LOWBIT_WITHOUT_AVX512" in os.environ:  # benchmarks/avx2.py
            settings = ["python", "benchmarks/avx2.py"]
        else:
            settings.append("python")
        self.command = shlex.join([*settings, os.path.relpath(sys.argv[0]), *sys.argv[1:]])
        print(" | ".join(f"{name:>24}" if i == 2 else f"{name:>10}" for i, name in enumerate(columns)), flush=True)

    def row(self, *values: Any) -> None:
        self.rows.append([float(f"{v:.6g}") if isinstance(v, float) else v for v in values])
        shown = (str(v) if not isinstance(v, float) else f"{v:.2f}" if abs(v) >= 0.1 else f"{v:.2g}" for v in values)
        print(" | ".join(f"{v:>24}" if i == 2 else f"{v:>10}" for i, v in enumerate(shown)), flush=True)

    def save(self) -> None:
        if not self.name:
            return
        RESULTS.mkdir(exist_ok=True)
        found = {
            "command": self.command,
            "date": datetime.date.today().isoformat(),
            "machine": machine(),
            "columns": self.columns,
            "rows": self.rows,
        }
        (RESULTS / f"{self.name}.json").write_text(json.dumps(found, indent=1) + "\n")
