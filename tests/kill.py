"""`lowbit quantize` killed at random moments: the target is the old file or the new one, and the next run goes on.

python tests/kill.py [--kills 200] [--seed 0] [--folder FOLDER]

Every sixth time it is interrupted as by Ctrl-C rather than killed. Two sources take turns, so that the old file and the
new one differ. Processes are forked before JAX has started, which saves each of them the imports, and share what
is compiled.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
import safetensors.numpy

from lowbit.cli.app import app
from lowbit.io import _boxes, _part


def make(path: Path, seed: int) -> Path:
    rng = np.random.default_rng(seed)
    # Kernels are gone through twice.
    shapes = {"weight": (64, 512), "kernel": (64, 256)}
    tensors = {
        f"layers.{i}.{name}": rng.standard_normal(shape).astype(np.float32)
        for i in range(8)
        for name, shape in shapes.items()
    }
    tensors |= {f"layers.{i}.norm": rng.standard_normal(512).astype(np.float32) for i in range(12)}
    safetensors.numpy.save_file(tensors, path)
    return path


def start(source: Path, target: Path, log: Path) -> int:
    """The number of a process that quantizes."""
    if child := os.fork():
        return child
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    _boxes.PIECE, _part.SYNCED = 4096, 8192
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let what runs behind them ignore it
    try:
        code = app(["quantize", str(source), str(target), "--format", "int8", "--force"], standalone_mode=False)
    except BaseException as error:  # this process must never run on
        print(repr(error), flush=True)
        os._exit(1)
    os._exit(code or 0)


def whole(source: Path, target: Path, log: Path) -> bytes:
    """The file that a run makes which nobody interrupts."""
    _, status = os.waitpid(start(source, target, log), 0)
    assert status == 0, log.read_text()
    return target.read_bytes()


def lines(journal: Path) -> int:
    try:
        return journal.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 1


def begun(child: int, journal: Path, known: int = 1) -> bool:
    """Wait until the first pieces of a run are on the disk; False if it has ended before."""
    while lines(journal) <= known:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG):
            return False
        time.sleep(0.001)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp())
    target, log, moments = folder / "out", folder / "log", random.Random(args.seed)
    jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    sources = [make(folder / f"in{i}", i) for i in range(2)]
    wanted = [whole(source, target, log) for source in sources]
    journal, times = folder / ".lowbit-out.journal", [time.monotonic()]
    child = start(sources[1], target, log)
    assert begun(child, journal)
    times.append(time.monotonic())
    os.waitpid(child, 0)
    times.append(time.monotonic())
    assert target.read_bytes() == wanted[1] != wanted[0]
    counts = dict.fromkeys(("killed", "interrupted", "finished", "resumed", "part", "replaced"), 0)
    new = 0  # which of the two is being written over the other
    done = 0
    while done < args.kills:
        known = max(lines(journal), 1)
        child = start(sources[new], target, log)
        before = done % 4 == 3 or not begun(child, journal, known)  # most of the time of a run is that of its start
        time.sleep(moments.uniform(0, times[1] - times[0] if before else times[2] - times[1]))
        how = signal.SIGINT if done % 6 == 5 else signal.SIGKILL
        os.kill(child, how)  # it may have ended, but nobody has waited for it yet
        _, status = os.waitpid(child, 0)
        beside = sorted(name for name in os.listdir(folder) if name.startswith("."))
        found, said = target.read_bytes(), log.read_text()
        assert found in wanted, f"after {done} kills the target is neither the old file nor the new one"
        assert set(beside) <= {".lowbit-out.journal", ".lowbit-out.part"}, beside
        assert "starting over" not in said, said
        counts["resumed"] += "going on with" in said
        counts["part"] += len(beside) == 2
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
            assert found == wanted[new] and not beside, beside
            counts["finished"] += 1
            assert counts["finished"] < 20 + 5 * args.kills, f"runs end before they are killed: {counts}"
        else:
            done += 1
            counts["killed" if how == signal.SIGKILL else "interrupted"] += 1
        if found == wanted[new]:
            counts["replaced"] += 1
            new = 1 - new
            # Killed after the new file took its place, there is a journal of nothing, which the next run cleans.
            assert set(beside) <= {".lowbit-out.journal"}, beside
    assert whole(sources[new], target, log) == wanted[new]
    assert not [name for name in os.listdir(folder) if name.startswith(".")]
    print(json.dumps(counts))


if __name__ == "__main__":
    sys.exit(main())
