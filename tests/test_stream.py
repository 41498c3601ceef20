"""Files written piece by piece: the bytes of those made in memory, whatever happens on the way."""

import dataclasses
import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from test_cli import left_over, run
from typer.testing import CliRunner

import lowbit
from lowbit import QuantizationConfig, Rule
from lowbit.cli.app import app
from lowbit.io import _chunks, open_tensors, save
from lowbit.io import _convert as converting
from lowbit.io._directory import is_pending
from lowbit.io.readers import _file_regions
from lowbit.io.streaming import _journal, _staging

HERE = Path(__file__).parent
ONE_DEVICE = {**os.environ, "XLA_FLAGS": ""}  # as a user has it
PART = [".lowbit-out.journal", ".lowbit-out.part"]


BOTH = QuantizationConfig("int8", axis=(-2, -1))
# Each way to cut: by rows, by rows of blocks, by columns, by layers, within a row, not at all; and what is not full.
CASES: dict[str, tuple[tuple[int, ...], Any, Any]] = {
    **{f"{format}.weight": ((40, 192), np.float32, format) for format in lowbit.FORMATS},
    **{f"{format}.kernel": ((192, 40), ml_dtypes.bfloat16, format) for format in lowbit.FORMATS},
    "layers.weight": ((3, 30, 64), np.float32, QuantizationConfig("int8", axis=-1)),
    "ragged.weight": ((70, 33), np.float32, "nf4"),
    "long.weight": ((2, 5000), np.float16, "nf4"),
    "double.weight": ((3, 30, 64), np.float32, QuantizationConfig("nf4", axis=-1, double_quant=True)),
    "blocks.kernel": ((100, 50), np.float32, QuantizationConfig("int8", block_size=32)),
    "both.weight": ((40, 192), np.float32, BOTH),
    "stack.kernel": ((3, 80, 60), np.float16, QuantizationConfig("int8", axis=-2)),
    "mean.weight": ((40, 192), np.float32, QuantizationConfig("binary", axis=(-2, -1))),
    "norm": ((4000,), np.float32, None),
    "ids": ((40, 100), np.int64, None),
    "mask": ((9,), np.bool_, None),
    "nothing": ((0, 4), np.float32, None),
    "one": ((), np.float32, None),
}
RULES = [Rule(name, format) for name, (_, _, format) in CASES.items()]


def tensors(seed: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    made = {name: np.asarray(rng.standard_normal(shape)).astype(dtype) for name, (shape, dtype, _) in CASES.items()}
    made["int8.kernel"][:, 5] = 0  # a scale of zeros
    return made


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.safetensors"
    safetensors.numpy.save_file(tensors(), path)
    return path


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_chunks, "CHUNK", 2048)
    monkeypatch.setattr(_chunks, "STRIPE", 2048)
    monkeypatch.setattr(_staging, "SYNCED", 4096)


def in_memory(source: Path, target: Path, rules: Any) -> bytes:
    """What one has by holding every tensor whole."""
    file = open_tensors(source)
    plans, _ = converting.plans_for(file, rules, strict=False)
    arrays = {name: file.array(name) for name in file}
    quantized = {name: lowbit.quantize(arrays[name], plan.config) for name, plan in plans.items() if plan.config}
    save(target, arrays | quantized, metadata=file.metadata)
    return target.read_bytes()


def test_pieces_make_the_file_that_one_makes_in_memory(source: Path, tmp_path: Path) -> None:
    want, file = in_memory(source, tmp_path / "whole", RULES), open_tensors(source)
    told: list[tuple[int, int]] = []
    report = converting.convert(file, tmp_path / "out", rules=RULES, progress=lambda *d: told.append(d))
    assert (tmp_path / "out").read_bytes() == want and left_over(tmp_path) == []
    total = sum(x.nbytes for x in tensors().values())
    assert told[0] == (0, total) and told[-1] == (total, total) and told == sorted(told) and len(told) > 60
    arrays, stored = tensors(), open_tensors(tmp_path / "out")
    for found in report:
        array = arrays[found.path]
        assert (found.before, found.after) == (array.nbytes, stored.nbytes(found.path))
        assert (found.error is None) == (CASES[found.path][2] is None)
        if found.error is not None and array.dtype == np.float32:
            lost = np.linalg.norm(stored.dense(found.path) - array) / np.linalg.norm(array)
            assert found.error == pytest.approx(lost, rel=1e-4)


def test_systems_that_have_less_make_the_same_file(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = in_memory(source, tmp_path / "whole", RULES)
    for name in ("O_DIRECT", "posix_fadvise", "fdatasync"):
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.setattr(_file_regions, "_libc", SimpleNamespace(mincore=lambda *args: -1))
    converting.convert(open_tensors(source), tmp_path / "out", rules=RULES)
    assert (tmp_path / "out").read_bytes() == want


def test_every_reader_is_read_in_pieces(source: Path, tmp_path: Path) -> None:
    w = np.random.default_rng(0).normal(size=(96, 256)).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "in.gguf", "llama")
    for kind in ("F32", "F16", "Q4_1", "Q8_0"):
        number = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(f"{kind}.weight", gguf.quants.quantize(w, number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save(tmp_path / "in.lowbit", {"a": {"kernel": w}, "b.weight": lowbit.quantize(w, "int8"), "c": w[0]})
    for path in (tmp_path / "in.gguf", tmp_path / "in.lowbit"):
        told: list[tuple[int, int]] = []
        rules = {"b.weight": "int8", "*Q8*": "nf4", "*": "nf4"}
        converting.convert(open_tensors(path), tmp_path / "out", rules=rules, progress=lambda *d: told.append(d))  # noqa: B023
        got, file = open_tensors(tmp_path / "out"), open_tensors(path)
        plans, _ = converting.plans_for(file, rules, strict=False)
        for name, array in converting.transformed(file, plans):
            for a, b in zip(*map(jax.tree.leaves, (got.array(name), array)), strict=True):
                assert np.array_equal(a, b), name
        assert len(told) > 12


def test_what_is_stored_is_copied_in_pieces(tmp_path: Path) -> None:
    w = np.random.default_rng(0).normal(size=(96, 128)).astype(np.float32)
    stored = {
        "plain": lowbit.quantize(w),
        "columns": lowbit.ArrayNF4.quantize(w, axis=-2),
        "coded": lowbit.ArrayNF4.quantize(w, double_quant=True),
        "stack": lowbit.quantize(np.stack([w, -w]), "ternary"),
        "short": lowbit.quantize(w[:, :101], "binary"),
        "turned": lowbit.quantize(w, "int8").T,
        "dense": w,
    }
    save(tmp_path / "in", stored)
    told: list[tuple[int, int]] = []
    converting.convert(open_tensors(tmp_path / "in"), tmp_path / "out", progress=lambda *d: told.append(d))
    assert (tmp_path / "out").read_bytes() == (tmp_path / "in").read_bytes()
    assert len(told) > 30
    # Of an index, whose tensors lie in several files.
    index = open_tensors(HERE / "golden" / "version2" / "version2.safetensors")
    converting.convert(index, tmp_path / "out")
    copy = open_tensors(tmp_path / "out")
    for name in index:
        for a, b in zip(*(jax.tree.leaves(file.array(name)) for file in (index, copy)), strict=True):
            assert a.dtype == b.dtype and np.array_equal(a, b), name


def test_what_is_not_in_the_cache_is_read_past_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, data = tmp_path / "in", np.random.default_rng(0).bytes(100_000)
    path.write_bytes(data)
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
        page = 4096
    except OSError:  # as in memory, where there is no disk
        page = 1
    plain, ways = os.preadv, []
    monkeypatch.setattr(os, "preadv", lambda *args: ways.append(args[2:]) or plain(*args))
    for cached in (True, False):
        for at, length in ((0, 100_000), (5000, 4096), (8192, 8192), (99_999, 1), (4095, 2)):
            ways.clear()
            assert _file_regions._read_run(path, at, length).tobytes() == data[at : at + length]
            assert ways == [(at if cached else at // page * page,)]  # or in one read of whole pages
        monkeypatch.setattr(_file_regions, "_libc", SimpleNamespace(mincore=lambda *args: 0))  # marks no page
    with pytest.raises(ValueError, match="was truncated while it was read"):
        _file_regions._read_run(path, 99_000, 2000)


def test_what_is_held_whole_is_told(source: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    converting.convert(open_tensors(source), tmp_path / "out", rules=RULES, note=notes.append)
    assert notes == ["mean.weight needs 7,680 elements in memory at a time, which share a scale or cannot be split."]


# --- what happens on the way

# What waits for all of a tensor, and what is gone through twice.
WAITING = {
    "a.weight": QuantizationConfig("nf4", double_quant=True),
    "b.kernel": QuantizationConfig("int8"),
    "c.weight": QuantizationConfig("nf4", double_quant=True),
}


def test_what_waits_survives_a_crash_at_any_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal((96, 64)).astype(np.float32) for name in WAITING}
    monkeypatch.setattr(_staging, "SYNCED", 10_000)  # not all is told when it ends
    safetensors.numpy.save_file(arrays, tmp_path / "in")
    rules = [Rule(name, format) for name, format in WAITING.items()]
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
            if left <= 0:  # and whatever comes after it
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            for name in steps:
                patch.setattr(_staging.StagingFile, name, lambda *args, name=name: step(name, *args))
            patch.setattr(_staging.StagingFile, "keep", lambda self: None)  # a crash leaves no line
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
    for name, config in WAITING.items():
        q = lowbit.quantize(arrays[name], dataclasses.replace(config, axis=-2 if name == "b.kernel" else -1))
        lost = np.linalg.norm(np.asarray(q.materialize()) - arrays[name]) / np.linalg.norm(arrays[name])
        assert report[name].error == pytest.approx(lost, rel=1e-4)


INT8 = ("--format", "int8", "--rule", "re:(?!int8).*=keep")


def stopped(monkeypatch: pytest.MonkeyPatch, error: BaseException | None = None) -> Callable[[], int]:
    """Have the third piece fail that has scales, when its codes are written; how many parts of pieces were."""
    names: list[str] = []
    write = _staging.StagingFile.put

    def put(self: Any, name: str, *args: Any) -> None:
        if error and name.endswith("scales") and sum(known.endswith("scales") for known in names) == 2:
            raise error
        names.append(name)
        write(self, name, *args)

    monkeypatch.setattr(_staging.StagingFile, "put", put)
    return lambda: len(names)


FAILURES = {
    "disk full": (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), 1, "No space left on device"),
    "interrupted": (KeyboardInterrupt(), 130, "interrupted."),
    "memory": (MemoryError(), 1, "There is not enough memory."),
}


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES.keys())
def test_what_was_done_is_not_done_again(
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
    assert target.read_text() == "old" and left_over(tmp_path) == PART
    journal = [json.loads(line) for line in (tmp_path / PART[0]).read_text().splitlines()]
    assert journal[-1]["done"] > 1
    with (tmp_path / PART[0]).open("a") as file:
        file.write('{"done": 99')  # a line that the machine did not live to finish
    with monkeypatch.context() as patch:
        written = stopped(patch)
        told = run(*given).stderr
        again = written()
    assert "resuming .lowbit-out.part" in told and left_over(tmp_path) == []
    with monkeypatch.context() as patch:
        written = stopped(patch)
        run("quantize", source, tmp_path / "new", *INT8)
        assert first + again == written() + 1  # the codes of that piece
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
    os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))  # as old as before, and as large
    assert "starting over" in interrupt(*INT8)
    assert "starting over" in interrupt("--format", "nf4", "--rule", "re:(?!nf4).*=keep")
    (tmp_path / PART[1]).write_bytes(b"short")
    assert "starting over" in interrupt(*INT8)
    assert "resuming" in run("quantize", source, tmp_path / "out", *INT8).stderr
    run("quantize", source, tmp_path / "new", *INT8)
    assert (tmp_path / "out").read_bytes() == (tmp_path / "new").read_bytes()


def test_what_the_data_makes_fail_leaves_nothing(tmp_path: Path) -> None:
    w = np.ones((100, 64), np.float32)
    w[70, 3] = np.nan
    safetensors.numpy.save_file({"w.weight": w}, tmp_path / "in")
    told = run("quantize", tmp_path / "in", tmp_path / "out", code=1).stderr
    assert "w.weight[50:75, 0:64]: Cannot quantize to 'nf4': 1 of 1600 values" in told and "at (20, 3)" in told
    assert os.listdir(tmp_path) == ["in"]


def test_a_source_that_changes_meanwhile_is_an_error(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = _staging.StagingFile.finish
    monkeypatch.setattr(_staging.StagingFile, "write", lambda self, *args: os.utime(source, (1, 1)))
    told = run("quantize", source, tmp_path / "out", *INT8, code=1).stderr
    assert f"{source} changed while it was read" in told and os.listdir(tmp_path) == [source.name]
    assert write is _staging.StagingFile.finish


def test_a_journal_without_its_part_is_cleaned(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        # Killed after the file has taken its place.
        patch.setattr(_staging.StagingFile, "remove", lambda self: None)
        run("quantize", source, tmp_path / "out", *INT8)
    assert left_over(tmp_path) == PART[:1]
    told = run("quantize", source, tmp_path / "out", "--force", *INT8).stderr
    assert told == "" and left_over(tmp_path) == []


def test_of_two_writers_one_is_told(source: Path, tmp_path: Path) -> None:
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
    journal = tmp_path / PART[0]
    journal.touch()
    lock = _journal.fcntl.flock

    def late(file: int, how: int) -> None:
        lock(file, how)
        monkeypatch.setattr(_journal.fcntl, "flock", lock)
        journal.unlink()  # as the other process does when it is done

    monkeypatch.setattr(_journal.fcntl, "flock", late)
    descriptor = _journal.lock(tmp_path / "out")
    assert os.path.samestat(os.fstat(descriptor), journal.stat())
    os.close(descriptor)


def killed(folder: Path, *options: str) -> Any:
    command = [sys.executable, HERE / "kill.py", *options, "--folder", folder]
    result = subprocess.run(command, env=ONE_DEVICE, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_killed_at_random_moments_it_goes_on(kind: str, tmp_path: Path) -> None:
    assert killed(tmp_path, "--kills", "8", "--kinds", kind)[kind]["resumed"] > 0


def test_a_directory_survives_a_kill_before_each_step(tmp_path: Path) -> None:
    assert all(steps > 15 for steps in killed(tmp_path, "--kinds", "steps")["steps"])


# --- directories


@pytest.fixture
def directory(source: Path, tmp_path: Path) -> Path:
    """A model as Hugging Face has it."""
    (tmp_path / "hf").mkdir()
    source.rename(tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_text("{}")
    return tmp_path / "hf"


def test_a_directory_goes_on_where_it_was(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("quantize", directory, tmp_path / "out", *INT8)
    with monkeypatch.context() as patch:
        written = stopped(patch, KeyboardInterrupt())
        assert "Repeat the same conversion to resume it" in run(*given, code=130).stderr
        first = written()
    assert not (tmp_path / "out").exists() and left_over(tmp_path) == PART
    with monkeypatch.context() as patch:
        written = stopped(patch)
        assert "resuming .lowbit-out.part" in run(*given).stderr
        again = written()
    assert left_over(tmp_path) == []
    with monkeypatch.context() as patch:
        written = stopped(patch)
        run("quantize", directory, tmp_path / "new", *INT8)
        assert first + again == written() + 1
    for name in ("config.json", "model.safetensors", ".lowbit.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "new" / name).read_bytes()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EIO, os.strerror(errno.EIO))])
def test_a_directory_that_fails_at_any_step_is_completed_by_the_next_run(
    error: BaseException, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, given, old, new = tmp_path / "out", (*INT8, "--force"), "{}", '{"new": 1}'
    safetensors.numpy.save_file({"int8.weight": tensors()["int8.weight"]}, directory / "model.safetensors")
    run("quantize", directory, target, "--format", "nf4")
    (target / "thesis.txt").write_text("mine")
    (directory / "config.json").write_text(new)
    nf4, told, at = (target / "model.safetensors").read_bytes(), [], 0
    while True:
        with monkeypatch.context() as patch:
            left = at

            def step(real: Any, *args: Any, **options: Any) -> Any:
                nonlocal left
                if (left := left - 1) == -1:
                    raise error
                return real(*args, **options)

            for name in ("replace", "rename", "rmdir", "fsync"):
                patch.setattr(os, name, partial(step, getattr(os, name)))
            result = CliRunner().invoke(app, ["quantize", str(directory), str(target), *given])
        assert (target / "thesis.txt").read_text() == "mine"
        if result.exit_code == 0:
            break
        told.append(result.stderr)
        is_new = (target / "model.safetensors").read_bytes() != nf4
        if is_pending(target):
            assert "is half replaced. Repeat the same conversion to complete it" in result.stderr
            with pytest.raises(ValueError, match=f"{target} is half replaced: .* Repeat the conversion"):
                open_tensors(target)
        else:
            assert (target / "config.json").read_text() == (new if is_new else old)
        run("quantize", directory, target, *given)
        assert open_tensors(target).type("int8.weight") == "int8" and (target / "config.json").read_text() == new
        assert left_over(tmp_path) == [] and left_over(target) == [".lowbit.json"]
        (directory / "config.json").write_text(old)
        run("quantize", directory, target, "--format", "nf4", "--force")
        (directory / "config.json").write_text(new)
        at += 1
    assert at > 15 and any("to resume it" in text for text in told)
    assert sum("is half replaced" in text for text in told) > 4


def test_a_file_that_arrives_meanwhile_is_not_replaced(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, finish = tmp_path / "out", _staging.StagingFile.finish

    def late(part: Any) -> None:
        finish(part)
        target.mkdir()
        (target / "config.json").write_text("mine")

    with monkeypatch.context() as patch:
        patch.setattr(_staging.StagingFile, "finish", late)
        told = run("quantize", directory, target, *INT8, code=1).stderr
    assert "config.json. Move them away" in told and (target / "config.json").read_text() == "mine"
    # Nothing that was done is lost.
    assert left_over(tmp_path) == PART
    (target / "config.json").unlink()
    assert "resuming" in run("quantize", directory, target, *INT8, "--force").stderr


def test_of_two_writers_of_a_directory_one_is_told(directory: Path, tmp_path: Path) -> None:
    lock = _journal.lock(tmp_path / "out")
    for to in ("lowbit", "safetensors"):
        told = run("convert", directory, tmp_path / "out", "--to", to, code=1).stderr
        assert "is being written by another process" in told
    os.close(lock)
    run("convert", directory, tmp_path / "out", "--to", "safetensors")
    assert left_over(tmp_path) == []


def test_what_lies_under_the_names_of_lowbit_is_not_removed(directory: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    run("convert", directory, target)
    for folder in (tmp_path / ".lowbit-out.new", target / ".lowbit-new"):
        folder.mkdir()
        (folder / "thesis.txt").write_text("mine")
        told = run("convert", directory, target, "--force", code=1).stderr
        assert f"{folder} has files that lowbit did not write" in told
        assert (folder / "thesis.txt").read_text() == "mine"
        (folder / "thesis.txt").unlink()
        folder.rmdir()
        folder.symlink_to(directory)
        assert "is not a directory that lowbit made" in run("convert", directory, target, "--force", code=1).stderr
        folder.unlink()
    run("convert", directory, target, "--force")


# Two pieces first, for all that a process needs in any case. Then the peak is counted anew, from what there is.
MEASURED = """
import sys
from pathlib import Path
from lowbit.io import _chunks
from lowbit.io import convert
from lowbit.io import open_tensors

def kilobytes(what):
    return int(Path("/proc/self/status").read_text().split(what + ":")[1].split()[0])

_chunks.CHUNK = _chunks.STRIPE = 1 << 18
folder = Path(sys.argv[1])
convert(open_tensors(folder / "small"), folder / "out", rules="nf4")
before = kilobytes("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
convert(open_tensors(folder / "large"), folder / "out", rules="nf4")
print(kilobytes("VmHWM") - before)
"""


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((512, 1024), np.float32)
    safetensors.numpy.save_file({"a.weight": rows}, tmp_path / "small")
    safetensors.numpy.save_file({"a.weight": np.tile(rows, (32, 1))}, tmp_path / "large")
    assert (tmp_path / "large").stat().st_size > 64 << 20
    command = [sys.executable, "-c", MEASURED, tmp_path]
    result = subprocess.run(command, env=ONE_DEVICE, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 16 << 10, f"{result.stdout} kB more"
