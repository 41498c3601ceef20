"""Conversions that are interrupted: the next run resumes them and writes the same bytes."""

import dataclasses
import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import tiers
from cli_helpers import left_over, run
from stream_helpers import HERE, INT8, ONE_DEVICE, STAGING, in_memory, stopped, tensors

import lowbit
from lowbit import QuantizationConfig, Rule
from lowbit.io import _convert as converting
from lowbit.io import open_tensors
from lowbit.io.streaming import _journal, _staging

pytestmark = pytest.mark.usefixtures("small_chunks")


# Scales that are staged until the whole tensor is read, and a tensor that needs two passes.
STAGED = {
    "a.weight": QuantizationConfig("nf4", double_quant=True),
    "b.kernel": QuantizationConfig("int8"),
    "c.weight": QuantizationConfig("nf4", double_quant=True),
}


def test_staged_values_survive_a_crash_at_any_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal((96, 64)).astype(np.float32) for name in STAGED}
    monkeypatch.setattr(_staging, "SYNCED", 10_000)  # the last chunks are not in the journal yet
    safetensors.numpy.save_file(arrays, tmp_path / "in")
    rules = [Rule(name, format) for name, format in STAGED.items()]
    want = in_memory(tmp_path / "in", tmp_path / "whole", rules)
    notes: list[str] = []

    def convert() -> lowbit.Report:
        return converting.convert(open_tensors(tmp_path / "in"), tmp_path / "out", rules=rules, note=notes.append)

    def crashed(at: int) -> bool:
        steps = {name: getattr(_staging.StagingFile, name) for name in ("write", "put_scales", "sync", "finish")}
        left = at

        def step(name: str, self: Any, *args: Any) -> None:
            nonlocal left
            left -= 1
            if left >= 0:
                steps[name](self, *args)
            if left <= 0:  # so do all later steps
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            for name in steps:
                patch.setattr(_staging.StagingFile, name, lambda *args, name=name: step(name, *args))
            patch.setattr(_staging.StagingFile, "keep", lambda self: None)  # a crash adds no line to the journal
            try:
                convert()
            except KeyboardInterrupt:
                return True
        return False

    at = 1
    while crashed(at):
        report = convert()
        assert (tmp_path / "out").read_bytes() == want and left_over(tmp_path) == [], at
        at += 1
    assert at > 15 and sum("resuming" in told for told in notes) > at // 2
    assert not any("starting over" in told for told in notes)
    for name, config in STAGED.items():
        q = lowbit.quantize(arrays[name], dataclasses.replace(config, axis=-2 if name == "b.kernel" else -1))
        lost = np.linalg.norm(np.asarray(q.materialize()) - arrays[name]) / np.linalg.norm(arrays[name])
        assert report[name].error == pytest.approx(lost, rel=1e-4)


FAILURES = {
    "disk full": (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), 1, "No space left on device"),
    "interrupted": (KeyboardInterrupt(), 130, "interrupted."),
    "memory": (MemoryError(), 1, "There is not enough memory."),
}


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES.keys())
def test_a_resumed_run_does_not_repeat_finished_chunks(
    failure: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error, code, text = failure
    target = tmp_path / "out"
    target.write_text("old")
    given = ("quantize", source, target, "--force", *INT8)
    with monkeypatch.context() as patch:
        written = stopped(patch, error)
        told = run(*given, code=code).stderr
        first = written()
    assert text in told and "Repeat the same conversion to resume it" in told
    assert target.read_text() == "old" and left_over(tmp_path) == STAGING
    journal = [json.loads(line) for line in (tmp_path / STAGING[0]).read_text().splitlines()]
    assert journal[-1]["done"] > 1
    with (tmp_path / STAGING[0]).open("a") as file:
        file.write('{"done": 99')  # a line that was not finished
    with monkeypatch.context() as patch:
        written = stopped(patch)
        told = run(*given).stderr
        again = written()
    assert "resuming .lowbit-out.part" in told and left_over(tmp_path) == []
    with monkeypatch.context() as patch:
        written = stopped(patch)
        run("quantize", source, tmp_path / "new", *INT8)
        assert first + again == written() + 1  # the codes of the chunk that failed
    assert target.read_bytes() == (tmp_path / "new").read_bytes()


def test_another_source_or_other_rules_start_over(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*given: Any) -> str:
        with monkeypatch.context() as patch:
            stopped(patch, KeyboardInterrupt())
            return run("quantize", source, tmp_path / "out", *given, code=130).stderr

    times = source.stat()
    interrupt(*INT8)
    safetensors.numpy.save_file(tensors(seed=4), source)
    os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))  # with the same time and size
    assert "starting over" in interrupt(*INT8)
    assert "starting over" in interrupt("--format", "nf4", "--rule", "re:(?!nf4).*=keep")
    (tmp_path / STAGING[1]).write_bytes(b"short")
    assert "starting over" in interrupt(*INT8)
    assert "resuming" in run("quantize", source, tmp_path / "out", *INT8).stderr
    run("quantize", source, tmp_path / "new", *INT8)
    assert (tmp_path / "out").read_bytes() == (tmp_path / "new").read_bytes()


def test_values_that_cannot_be_quantized_leave_no_file(tmp_path: Path) -> None:
    w = np.ones((100, 64), np.float32)
    w[70, 3] = np.nan
    safetensors.numpy.save_file({"w.weight": w}, tmp_path / "in")
    told = run("quantize", tmp_path / "in", tmp_path / "out", code=1).stderr
    assert "w.weight[50:75, 0:64]: Cannot quantize to 'q4': 1 of 1600 values" in told and "at (20, 3)" in told
    assert os.listdir(tmp_path) == ["in"]


def test_a_source_that_changes_meanwhile_is_an_error(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = _staging.StagingFile.finish
    monkeypatch.setattr(_staging.StagingFile, "write", lambda self, *args: os.utime(source, (1, 1)))
    told = run("quantize", source, tmp_path / "out", *INT8, code=1).stderr
    assert f"{source} changed while it was read" in told and os.listdir(tmp_path) == [source.name]
    assert write is _staging.StagingFile.finish


def test_a_journal_without_its_staging_file_is_removed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        # Killed after the rename.
        patch.setattr(_staging.StagingFile, "remove", lambda self: None)
        run("quantize", source, tmp_path / "out", *INT8)
    assert left_over(tmp_path) == STAGING[:1]
    told = run("quantize", source, tmp_path / "out", "--force", *INT8).stderr
    assert told == "" and left_over(tmp_path) == []


def test_a_second_writer_is_refused(source: Path, tmp_path: Path) -> None:
    lock = _journal.lock(tmp_path / "out")
    told = run("quantize", source, tmp_path / "out", code=1).stderr
    problem = f"{tmp_path / 'out'} is being written by another process."
    assert told == f"lowbit: {problem} Wait until it is done, or give another name.\n"
    os.close(lock)
    run("quantize", source, tmp_path / "out", *INT8)
    assert left_over(tmp_path) == []


def test_a_file_that_was_finished_meanwhile_is_not_written_into(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = tmp_path / STAGING[0]
    journal.touch()
    lock = _journal.fcntl.flock

    def late(file: int, how: int) -> None:
        lock(file, how)
        monkeypatch.setattr(_journal.fcntl, "flock", lock)
        journal.unlink()  # as the other process does at its end

    monkeypatch.setattr(_journal.fcntl, "flock", late)
    descriptor = _journal.lock(tmp_path / "out")
    assert os.path.samestat(os.fstat(descriptor), journal.stat())
    os.close(descriptor)


def killed(folder: Path, *options: str) -> Any:
    command = [sys.executable, HERE / "kill.py", *options, "--folder", folder]
    result = subprocess.run(command, env=ONE_DEVICE, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(result.stdout)


@tiers.MORE  # a run that fails or is killed at each step is in the first tier
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_run_killed_at_random_moments_resumes(kind: str, tmp_path: Path) -> None:
    assert killed(tmp_path, "--kills", "8", "--kinds", kind)[kind]["resumed"] > 0


def test_a_directory_survives_a_kill_before_each_step(tmp_path: Path) -> None:
    assert all(steps > 15 for steps in killed(tmp_path, "--kinds", "steps")["steps"])
