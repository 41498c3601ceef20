"""Kill `lowbit quantize` at random moments: the target must be the old or the new one, and the next run resumes.

python tests/kill.py [--kills 200] [--seed 0] [--folder FOLDER] [--kinds file,directory,steps]

Every sixth run is interrupted as by Ctrl-C instead. Two sources alternate, so that the old and the new target differ.
The directory has foreign files in it, which must not change. Processes are forked after the imports and before JAX
starts, and share a compilation cache.

`steps` is not random: the files of a directory are replaced, without quantizing, by a process that ends before each of
its calls to the file system in turn.
"""

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors.numpy

import lowbit
from lowbit.cli.app import app
from lowbit.io import _chunks, _directory
from lowbit.io.streaming import _staging

FOREIGN = {"thesis.txt": b"mine", "notes/day.md": b"1" * 5000, ".hidden": b"", "weights.bin": bytes(range(256))}
OWN = {".lowbit-out.journal", ".lowbit-out.part", ".lowbit-out.new"}


def make(path: Path, seed: int, kind: str) -> Path:
    rng = np.random.default_rng(seed)
    # A kernel needs two passes: its maxima, then its codes.
    shapes = {"weight": (64, 512), "kernel": (64, 256)}
    tensors = {
        f"layers.{i}.{name}": rng.standard_normal(shape).astype(np.float32)
        for i in range(8)
        for name, shape in shapes.items()
    }
    tensors |= {f"layers.{i}.norm": rng.standard_normal(512).astype(np.float32) for i in range(12)}
    if kind == "file":
        safetensors.numpy.save_file(tensors, path)
        return path
    path.mkdir()
    safetensors.numpy.save_file(tensors, path / "model.safetensors")
    for i in range(4):  # some names are in both
        file = path / f"more{seed * (i % 2)}" / f"{i}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(seed))
    (path / "config.json").write_text(json.dumps({"seed": seed}))
    return path


def start(source: Path, target: Path, log: Path) -> int:
    """Start a process that quantizes; returns its id."""
    if child := os.fork():
        return child
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    _chunks.CHUNK, _staging.SYNCED = 4096, 8192
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes of a shell ignore it
    try:
        code = app(["quantize", str(source), str(target), "--format", "int8", "--force"], standalone_mode=False)
    except BaseException as error:  # the forked process must not return
        print(repr(error), flush=True)
        os._exit(1)
    os._exit(code or 0)


def contents(target: Path) -> dict[str, bytes]:
    """The bytes of the target: of a file, or of each file of a directory except those that are still to be moved."""
    if target.is_file():
        return {"": target.read_bytes()}
    names = [path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()]
    return {name: (target / name).read_bytes() for name in names if not name.startswith(_directory.PENDING)}


def whole(source: Path, target: Path, log: Path) -> dict[str, bytes]:
    """The result of an uninterrupted run."""
    _, status = os.waitpid(start(source, target, log), 0)
    assert status == 0, log.read_text()
    return contents(target)


def lines(journal: Path) -> int:
    try:
        return journal.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 1


def begun(child: int, journal: Path, known: int = 1) -> bool:
    """Wait until the first chunks of a run are on the disk; False if the run ends before that."""
    while lines(journal) <= known:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG):
            return False
        time.sleep(0.001)
    return True


def is_mixed(target: Path, found: dict[str, bytes], wanted: list[dict[str, bytes]]) -> bool:
    """Whether a directory was left half replaced. lowbit must detect that; any other mixture is an error."""
    if found in wanted:
        return False
    assert target.is_dir(), "the target is neither the old file nor the new one"
    weights = "model.safetensors"
    assert found[weights] in [old[weights] for old in wanted], "the weights are neither the old ones nor the new ones"
    for name, data in FOREIGN.items():
        assert found[name] == data, f"{name} of another program has changed"
    for name, data in found.items():
        assert data in [old.get(name) for old in wanted], f"{name} is neither the old file nor the new one"
    assert _directory.is_pending(target), "the directory is mixed, and readers cannot tell"
    return True


def tortured(folder: Path, kind: str, kills: int, seed: int) -> dict[str, int]:
    target, log, moments = folder / "out", folder / "log", random.Random(seed)
    sources = [make(folder / f"in{i}", i, kind) for i in range(2)]
    if kind == "directory":
        for name, data in FOREIGN.items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes(data)
    wanted = [whole(source, target, log) for source in sources]
    journal, times = folder / ".lowbit-out.journal", [time.monotonic()]
    child = start(sources[1], target, log)
    assert begun(child, journal)
    times.append(time.monotonic())
    os.waitpid(child, 0)
    times.append(time.monotonic())
    assert contents(target) == wanted[1] != wanted[0]
    counts = dict.fromkeys(("killed", "interrupted", "finished", "resumed", "part", "mixed", "replaced"), 0)
    new = done = 0  # which source is being written; how many runs were stopped
    repeated = False  # whether a run began by completing the directory of a killed one, and then writes the same again
    while done < kills:
        known, repeated = max(lines(journal), 1), repeated or _directory.is_pending(target)
        child = start(sources[new], target, log)
        before = done % 4 == 3 or not begun(child, journal, known)  # most of the time of a run is its start
        last = times[1] - times[0] if before else times[2] - times[1]
        time.sleep(moments.uniform(0, last))
        how = signal.SIGINT if done % 6 == 5 else signal.SIGKILL
        os.kill(child, how)  # it may have ended and not been reaped
        _, status = os.waitpid(child, 0)
        beside = {name for name in os.listdir(folder) if name.startswith(".")}
        found, said = contents(target), log.read_text()
        counts["mixed"] += is_mixed(target, found, wanted)
        assert beside <= OWN, beside
        assert "starting over" not in said, said
        counts["resumed"] += "resuming" in said
        counts["part"] += ".lowbit-out.part" in beside
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
            assert found == wanted[new] and not beside, beside
            counts["finished"] += 1
            assert counts["finished"] < 20 + 5 * kills, f"runs end before they are killed: {counts}"
        else:
            done += 1
            counts["killed" if how == signal.SIGKILL else "interrupted"] += 1
        # A run that is killed after the rename leaves a journal without a staging file, which the next run removes.
        if found == wanted[new] and not (repeated and ".lowbit-out.part" in beside):
            assert beside <= {".lowbit-out.journal"}, beside
            counts["replaced"] += 1
            new, repeated = 1 - new, False
    assert whole(sources[new], target, log) == wanted[new]
    assert not [name for name in os.listdir(folder) if name.startswith(".")]
    return counts


OLD = {"config.json": b"old", "stale.json": b"old", "more/0.json": b"old", "model.safetensors": b"old weights"}
NEW = {"config.json": b"new", "more/0.json": b"new", "more/new/1.json": b"new", "model.safetensors": b""}
CALLS = ("mkdir", "replace", "rename", "unlink", "rmdir", "fsync")


def forked(work: Callable[[], None], calls: int | None = None) -> int:
    """The exit code of a process that calls `work`, or ends after `calls` calls to the file system."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        if calls is not None:
            ends_after(calls)
        work()
    except BaseException:  # the forked process must not return
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def ends_after(left: int) -> None:
    """End this process, as if it were killed, after this many calls to the file system."""

    def counted(real: Callable[..., Any], *args: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            os._exit(9)
        return real(*args, **options)

    for name in CALLS:
        setattr(os, name, partial(counted, getattr(os, name)))


def write(target: Path, files: dict[str, bytes], part: Path) -> None:
    """Replace a directory as `convert` does when the weights are finished."""
    _directory.finish(target)
    _directory.discard(target, part)
    if not part.exists():  # an earlier run has moved the weights already
        return
    with _directory.staged(target, files, part) as folder:
        for name, data in files.items():
            if name != "model.safetensors":
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(data)
        os.replace(part, folder / "model.safetensors")


def stepped(folder: Path, *, fresh: bool) -> int:
    """Replace a directory, killed before each step; returns the number of steps."""
    weights, target, part = folder / "weights", folder / "out", folder / ".lowbit-out.part"
    assert forked(lambda: lowbit.save(weights, {"w": np.ones(64, np.float32)})) == 0
    new = NEW | {"model.safetensors": weights.read_bytes()}
    foreign = {} if fresh else FOREIGN
    for call in itertools.count():
        shutil.rmtree(target, ignore_errors=True)
        if not fresh:
            part.write_bytes(OLD["model.safetensors"])
            write(target, OLD, part)
            for name, data in FOREIGN.items():
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                (target / name).write_bytes(data)
        shutil.copyfile(weights, part)
        code = forked(partial(write, target, new, part), calls=call)
        assert code in (0, 9), code
        found = {name: data for name, data in contents(target).items() if name != _directory.MANIFEST}
        assert {name: found.pop(name) for name in foreign} == foreign, call
        if not _directory.is_pending(target):
            assert found in (new, {} if fresh else OLD), call
        else:
            assert not fresh and found["model.safetensors"] in (OLD["model.safetensors"], weights.read_bytes()), call
        assert {name for name in os.listdir(folder) if name.startswith(".")} <= OWN
        assert forked(lambda: write(target, new, part)) == 0, call
        assert {n: d for n, d in contents(target).items() if n != _directory.MANIFEST} == {**new, **foreign}, call
        assert sorted(os.listdir(folder)) == ["out", "weights"] and not (target / _directory.PENDING).exists(), call
        if code == 0:
            return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--kinds", default="file,directory")
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp())
    jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    counts: dict[str, Any] = {}
    for kind in args.kinds.split(","):
        (folder / kind).mkdir()
        if kind == "steps":
            counts[kind] = [stepped(folder / kind, fresh=fresh) for fresh in (False, True)]
        else:
            counts[kind] = tortured(folder / kind, kind, args.kills, args.seed)
    print(json.dumps(counts))


if __name__ == "__main__":
    sys.exit(main())
