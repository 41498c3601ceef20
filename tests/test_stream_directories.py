"""Directories that are converted in chunks: an interrupted run resumes, and foreign files stay."""

import errno
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy
from cli_helpers import left_over, run
from stream_helpers import INT8, STAGING, stopped, tensors
from typer.testing import CliRunner

from lowbit.cli.app import app
from lowbit.io import open_tensors
from lowbit.io._directory import is_pending
from lowbit.io.streaming import _journal, _staging

pytestmark = pytest.mark.usefixtures("small_chunks")


def test_an_interrupted_directory_conversion_resumes(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("quantize", directory, tmp_path / "out", *INT8)
    with monkeypatch.context() as patch:
        written = stopped(patch, KeyboardInterrupt())
        assert "Repeat the same conversion to resume it" in run(*given, code=130).stderr
        first = written()
    assert not (tmp_path / "out").exists() and left_over(tmp_path) == STAGING
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
    # The finished weights are kept.
    assert left_over(tmp_path) == STAGING
    (target / "config.json").unlink()
    assert "resuming" in run("quantize", directory, target, *INT8, "--force").stderr


def test_a_second_writer_of_a_directory_is_refused(directory: Path, tmp_path: Path) -> None:
    lock = _journal.lock(tmp_path / "out")
    for to in ("lowbit", "safetensors"):
        told = run("convert", directory, tmp_path / "out", "--to", to, code=1).stderr
        assert "is being written by another process" in told
    os.close(lock)
    run("convert", directory, tmp_path / "out", "--to", "safetensors")
    assert left_over(tmp_path) == []


def test_foreign_files_under_reserved_names_are_not_removed(directory: Path, tmp_path: Path) -> None:
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
