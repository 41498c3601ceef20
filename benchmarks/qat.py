"""Quantization-aware training of the example: the loss of each format over three seeds, or the time of a step.

python benchmarks/qat.py [--save qat]
python benchmarks/qat.py --steps [--save qat_steps]      both need pip install 'lowbit[frameworks]'
"""

import argparse
import importlib.util
from functools import partial
from pathlib import Path
from types import ModuleType

import jax
import measure

# Steps of a timed run; windows in a batch.
STEPS, BATCHES = 5, (16, 64)


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--steps", action="store_true", help="time steps instead of training")
    args = parser.parse_args()
    report = step_times(args) if args.steps else losses(args)
    report.save()


def example() -> ModuleType:
    """A fresh copy of the example, since compiled functions depend on its sizes."""
    spec = importlib.util.spec_from_file_location("qat", Path(__file__).parent.parent / "examples" / "qat.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def losses(args: argparse.Namespace) -> measure.Report:
    qat = example()
    rows = qat.main()
    report = measure.Report(args, qat.COLUMNS)
    for row in rows:
        report.row(*(None if x != x else x for x in row))
    return report


def step_times(args: argparse.Namespace) -> measure.Report:
    calls = {}
    for batch in BATCHES:
        qat = example()
        qat.BATCH = batch
        text = qat.windows(0, 1000)
        for format in qat.FORMATS:
            calls[batch, format] = [partial(qat.train, jax.random.key(0), text, format, STEPS)]
    times = measure.least(calls, args.repeat)
    report = measure.Report(args, ("letters", "format", "ms a step", "times float32"))
    for (batch, format), time in times.items():
        report.row(batch * qat.LENGTH, format, 1e3 * time / STEPS, time / times[batch, "float32"])
    return report


if __name__ == "__main__":
    main()
