"""The example of training through quantization, over three seeds: what each format loses, and what a step costs.

python benchmarks/qat.py [--save qat]      needs pip install 'lowbit[frameworks]'
"""

import importlib.util
from functools import partial
from pathlib import Path

import jax
import measure

STEPS = 20  # of which a run is timed


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.set_defaults(repeat=8)
    args = parser.parse_args()
    spec = importlib.util.spec_from_file_location("qat", Path(__file__).parent.parent / "examples" / "qat.py")
    assert spec and spec.loader
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    rows = example.main(args.seeds)
    text = example.windows(0, 1000)
    steps = {f: [partial(example.train, jax.random.key(0), text, f, STEPS)] for f in example.FORMATS}
    times = measure.least(steps, args.repeat)
    report = measure.Report(args, (*example.COLUMNS, "ms a step"))
    for row in rows:
        report.row(row[0], *(None if x != x else x for x in row[1:]), 1e3 * times[row[0]] / STEPS)
    report.save()


if __name__ == "__main__":
    main()
