"""Mutate files for every reader: none may crash, hang, or give another array than the one that was saved.

python tests/fuzz.py --files 100000 [--save]

`make fuzz` runs it; the tests themselves run some thousands of such files. A file may be read, or refused by a
`ValueError` that names it. A lowbit file that is read must be the one that was written.
"""

import argparse
import datetime
import json
import os
import random
import resource
import signal
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "golden" / "fuzz.json"
LONGEST = 20  # seconds for one file


def hung(*_: Any) -> None:
    raise RuntimeError(f"A file took longer than {LONGEST} seconds.")


def fuzz(kind: str, files: int, seed: int) -> dict[str, Any]:
    """Read this many changed files, lowbit files ("ours") or foreign ones; returns how many were read and refused."""
    # Here, since pytest collects this file too, in environments that have fewer packages.
    import exchange_helpers
    import files_helpers

    dice = random.Random(seed)
    module = files_helpers if kind == "ours" else exchange_helpers
    signal.signal(signal.SIGALRM, hung)
    counts = {"read": 0, "refused": 0}
    slowest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        seeds = module.seeds(Path(folder))
        originals = {path: (path.read_bytes(), module.reads(path)) for path in seeds}
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for i in range(files):
            path = seeds[i % len(seeds)]
            contents, want = originals[path]
            changed = files_helpers.mutated(contents, dice)
            path.write_bytes(changed)
            start = time.monotonic()
            signal.alarm(LONGEST)
            try:
                got = module.reads(path)
            except ValueError as error:
                assert str(path.parent) in str(error), error
                counts["refused"] += 1
            else:
                counts["read"] += 1
                if kind == "ours":
                    files_helpers.assert_same(got, want)
                    assert changed == contents
            signal.alarm(0)
            slowest = max(slowest, time.monotonic() - start)
            path.write_bytes(contents)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"kind": kind, "files": files, "seed": seed, **counts, "slowest s": round(slowest, 3), "grown kB": grown}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="keep the result beside the golden files")
    args = parser.parse_args()
    workers = os.cpu_count() or 1
    share = -(-args.files // (2 * workers))
    jobs = [(kind, share, args.seed + i) for i in range(workers) for kind in ("ours", "foreign")]
    with get_context("spawn").Pool(workers) as pool:
        results = pool.starmap(fuzz, jobs, chunksize=1)
    for result in results:
        print(result)
    if args.save:
        found = {"command": f"python tests/fuzz.py --files {args.files}", "date": datetime.date.today().isoformat()}
        RESULT.write_text(json.dumps({**found, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
