"""Directories that the command writes: foreign files stay, and an interrupted run loses nothing."""

import hashlib
import json
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tiers
from cli_helpers import huggingface_dir, left_over, run

from lowbit.io import _convert as converting
from lowbit.io import _directory, open_tensors


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of every file in a directory, without lowbit's manifest."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != _directory.MANIFEST]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def put(folder: Path, files: dict[str, str]) -> dict[str, bytes]:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return {name: text.encode() for name, text in files.items()}


FOREIGN = {"thesis.txt": "mine", "notes/day.md": "1", ".hidden": "h", "weights.bin": "w", "onnx/model.onnx": "o"}


@pytest.mark.parametrize("to", tiers.tiered(["lowbit", "bitsandbytes", "safetensors"], ["lowbit"]))
def test_foreign_files_stay_in_a_directory_that_is_replaced(to: str, tiny: Path, tmp_path: Path) -> None:
    source, target = huggingface_dir(tiny, tmp_path / "hf"), tmp_path / "out"
    put(source, {"onnx/config.json": "{}"})
    given = ("quantize", source, target, "--to", to, "--requantize", "--dequantize", "--force")
    run(*given)
    first = contents(target)
    foreign = put(target, FOREIGN)
    (target / "link").symlink_to(tmp_path / "hf")
    (source / "README.md").unlink()
    put(source, {"LICENSE": "new", "onnx/config.json": "[]"})
    run(*given)
    now = contents(target)
    assert {name: now[name] for name in foreign} == foreign and (target / "link").is_symlink()
    assert now["LICENSE"] == b"new" and now["onnx/config.json"] == b"[]"
    # Files of the previous run that are no longer written are removed.
    assert now.keys() - foreign.keys() - {"LICENSE"} == first.keys() - {"README.md"}
    assert left_over(tmp_path) == [] and left_over(target) == [".hidden", ".lowbit.json"]


def test_a_foreign_directory_is_filled_and_its_files_do_not_change(tiny: Path, tmp_path: Path) -> None:
    source, target = huggingface_dir(tiny, tmp_path / "hf"), tmp_path / "out"
    foreign = put(target, {**FOREIGN, "README.md": "tiny"})  # the last is that of the source
    run("quantize", source, target, "--force")
    assert {name: contents(target)[name] for name in foreign} == foreign
    manifest = json.loads((target / ".lowbit.json").read_text())["files"]
    assert "README.md" not in manifest and "model.safetensors" in manifest
    (source / "README.md").unlink()
    run("quantize", source, target, "--force")
    assert {name: contents(target)[name] for name in foreign} == foreign


def test_files_that_a_user_has_changed_are_not_removed(tiny: Path, tmp_path: Path) -> None:
    source, target = huggingface_dir(tiny, tmp_path / "hf"), tmp_path / "out"
    put(source, {"LICENSE": "l"})
    run("quantize", source, target)
    put(target, {"README.md": "mine"})
    for name in ("README.md", "LICENSE"):
        (source / name).unlink()
    run("quantize", source, target, "--force")
    assert (target / "README.md").read_text() == "mine" and not (target / "LICENSE").exists()


IN_THE_WAY = {
    "foreign": lambda target: put(target, {"tokenizer.json": "mine"}),
    "weights": lambda target: put(target, {"model.safetensors": "mine"}),
    "edited": lambda target: put(target, {"config.json": '{"model_type": "mine"}'}),
    "manifest": lambda target: put(target, {".lowbit.json": "mine"}),
    "directory": lambda target: ((target / "README.md").unlink(), put(target, {"README.md/mine": "mine"})),
    "index": lambda target: put(target, {"model.safetensors.index.json": "{}"}),
    "link": lambda target: ((target / "README.md").unlink(), (target / "README.md").symlink_to("config.json")),
    "linked": lambda target: (target / "onnx").symlink_to(target.parent),
}


@pytest.mark.parametrize("case", IN_THE_WAY)
def test_foreign_files_are_never_replaced(case: str, tiny: Path, tmp_path: Path) -> None:
    source, target = huggingface_dir(tiny, tmp_path / "hf"), tmp_path / "out"
    run("quantize", source, target)
    IN_THE_WAY[case](target)
    put(source, {"onnx/new.json": "{}", "README.md": "other"})
    before = contents(tmp_path)
    told = run("quantize", source, target, "--force", "--format", "int8", code=1).stderr
    assert "Move" in told and "--force" not in told and told.count("\n") == 1
    assert contents(tmp_path) == before and left_over(tmp_path) == []


def test_a_manifest_cannot_name_files_outside_of_its_directory(tiny: Path, tmp_path: Path) -> None:
    source, target = huggingface_dir(tiny, tmp_path / "hf"), tmp_path / "out"
    run("quantize", source, target)
    put(tmp_path, {"thesis.txt": "mine"})
    proof = {"bytes": 4, "sha256": hashlib.sha256(b"mine").hexdigest()}
    for name in ("../thesis.txt", str(tmp_path / "thesis.txt"), "a/../../thesis.txt"):
        put(target, {".lowbit.json": json.dumps({"lowbit.manifest": 1, "files": {name: proof}})})
        assert ".lowbit.json" in run("quantize", source, target, "--force", code=1).stderr
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_the_home_working_and_source_directories_are_refused_as_targets(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = huggingface_dir(tiny, tmp_path / "models" / "hf")
    for name in ("home/me", "work/here"):
        put(tmp_path, {f"{name}/thesis.txt": "mine"})
    monkeypatch.setenv("HOME", str(tmp_path / "home" / "me"))
    monkeypatch.chdir(tmp_path / "work" / "here")
    before = contents(tmp_path)
    for target, told in {
        ".": ". is the working directory",
        "..": ".. contains the working directory",
        tmp_path / "home" / "me": "is your home directory",
        tmp_path / "home": "contains your home directory",
        source: "is the source itself",
        source.parent: f"is the directory of {source}",
        source / "out": f"is inside {source}",
    }.items():
        assert told in run("quantize", source, target, "--force", code=1).stderr
        with pytest.raises(ValueError, match=re.escape(told)):
            converting.convert(open_tensors(source), Path(target))
    for target, told in {"/": "/ is the root directory", "/dev/shm": "/dev/shm is a mount point"}.items():
        with pytest.raises(ValueError, match=told):  # only the checks that come before any work
            converting.check_target(source, Path(target), force=True)
    assert contents(tmp_path) == before and left_over(tmp_path) == []


def test_a_directory_is_on_the_disk_before_the_old_state_goes(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = huggingface_dir(tiny, tmp_path / "hf"), tmp_path / "out"
    run("quantize", source, target)
    (source / "README.md").unlink()
    done: list[tuple[str, str]] = []

    def record(name: str, shown: Any) -> None:
        real = getattr(os, name)

        def call(*args: Any, **options: Any) -> Any:
            path = Path(shown(*args))
            if path.is_relative_to(tmp_path):
                done.append((name, path.relative_to(tmp_path).as_posix()))
            return real(*args, **options)

        monkeypatch.setattr(os, name, call)

    record("fsync", lambda file: os.readlink(f"/proc/self/fd/{file}"))
    for name in ("replace", "rename"):
        record(name, lambda new, path: path)
    for name in ("unlink", "rmdir"):
        record(name, lambda path: path)
    run("quantize", source, target, "--force", "--format", "int8")
    places = {event: i for i, event in enumerate(done)}  # the last call for each
    first = {event: i for i, event in reversed(list(enumerate(done)))}
    commit = places["rename", "out/.lowbit-new"]
    files = ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
    for name in (*files, ".lowbit.json.part", "."):
        assert first["fsync", f".lowbit-out.new/{name}".removesuffix("/.")] < commit
    moved = [places["replace", f"out/{name}"] for name in files]
    assert commit < first["fsync", "out"] < min(moved) and moved == sorted(moved)  # the weights last
    synced = [i for i, event in enumerate(done) if event == ("fsync", "out")]
    gone = [
        places["unlink", "out/README.md"],
        places["replace", "out/.lowbit.json"],
        places["rmdir", "out/.lowbit-new"],
    ]
    assert gone == sorted(gone) and all(any(a < i < b for i in synced) for a, b in pairwise([max(moved), *gone]))
    assert gone[-1] < synced[-1] < places["unlink", ".lowbit-out.journal"]
