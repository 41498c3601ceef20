"""Writing lowbit files: what cannot be saved is refused, and a failure leaves the old file."""

import os
import re
import resource
import shutil
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from files_helpers import GOLDEN, saved, weights

from lowbit import ArrayNF4
from lowbit.io import _atomic, load, save
from lowbit.io.container import _write

Q = ArrayNF4.quantize(weights(64, 32), axis=-2)


WRONG = {
    "struct": (
        {"a": jax.ShapeDtypeStruct((2,), np.float32)},
        TypeError,
        "'a' is a ShapeDtypeStruct; leaves are arrays",
    ),
    "bytes": (b"x", TypeError, "the tree is a bytes; leaves are arrays"),
    "int4": ({"a": jnp.ones(2, jnp.int4)}, TypeError, "'a' is a ArrayImpl of dtype int4; files hold BOOL, U8, I8,"),
    "complex128": ({"a": np.ones(2, complex)}, TypeError, "'a' is a ndarray of dtype complex128; files hold"),
    "objects": ({"a": np.array([None])}, TypeError, "'a' is a ndarray of dtype object; files hold"),
    "text array": ({"a": np.array(["x"])}, TypeError, "'a' is a ndarray of dtype <U1; files hold"),
    "float key": ({"a": {1.5: 1}}, TypeError, "'a' has the key 1.5; keys are strings or integers"),
    "tuple key": ({(1, 2): 1}, TypeError, "the tree has the key (1, 2); keys are strings or integers"),
    "bool key": ({True: 1}, TypeError, "the tree has the key True; keys are strings or integers"),
    "half a character": (
        {"a": {"\ud800": 1}},
        ValueError,
        "a.safetensors: 'a/\\ud800' has an unpaired surrogate",
    ),
    "broken": (
        {"a": Q.replace(scales=Q.scales[:, :3])},
        ValueError,
        "'a' is not a valid ArrayNF4: The components",
    ),
    "component": ({"a": Q.replace(codes=3)}, TypeError, "'a/codes' is a int of dtype None; files hold"),
    "dtype": (
        {"a": Q.replace(dtype=np.dtype("S3"))},
        ValueError,
        "in a static field, which is not a dtype of safetensors",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_leaf_that_cannot_be_saved_raises_and_leaves_no_file(case, tmp_path):
    tree, error, message = WRONG[case]
    with pytest.raises(error, match=re.escape(message)):
        save(tmp_path / "a.safetensors", tree)
    assert not list(tmp_path.iterdir())


def test_traced_arrays_are_refused(tmp_path):
    @jax.jit
    def step(w):
        save(tmp_path / "a.safetensors", {"w": w})

    with pytest.raises(TypeError, match=r"Cannot save to .*: 'w' is traced; call save outside of jit"):
        step(jnp.ones(2))
    assert not list(tmp_path.iterdir())


# --- a failed write leaves the old file


def failing(*error: Any) -> Any:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error[0](*error[1:])

    return fail


FAILURES = {
    "sync": (_atomic.os, "fsync", failing(OSError, 5, "Input/output error"), "Input/output error"),
    "rename": (_atomic.os, "replace", failing(PermissionError, 1, "Operation not permitted"), "not permitted"),
    "directory": (_write, "open", failing(PermissionError, 13, "Permission denied"), "Permission denied"),
}


@pytest.mark.parametrize("case", FAILURES)
@pytest.mark.parametrize("existing", [True, False], ids=["over a file", "to nothing"])
def test_a_failure_leaves_the_old_file_and_nothing_else(case, existing, tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    if existing:
        save(path, {"old": weights(4)})
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    place, name, fail, message = FAILURES[case]
    monkeypatch.setattr(place, name, fail, raising=False)
    with pytest.raises(OSError, match=rf"Cannot save to {re.escape(str(path))}: .*{message}"):
        save(path, {"new": weights(400)})
    monkeypatch.undo()
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize("limit", [0, 100, 2000, 70_000])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(limit, tmp_path):
    path = saved(tmp_path, {"old": weights(4)})
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        with pytest.raises(OSError, match=r"Cannot save to .*a.safetensors: File too large"):
            save(path, {"new": weights(10_000), "more": weights(20_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [before]


def test_an_interrupt_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = saved(tmp_path, {"old": weights(4)})
    before, checksum, calls = path.read_bytes(), zlib.crc32, []

    def interrupted(data: Any) -> int:
        calls.append(len(list(tmp_path.iterdir())))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return checksum(data)

    monkeypatch.setattr(_write.zlib, "crc32", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(path, [weights(5), weights(6)])
    assert calls == [2, 2]  # the temporary file was there
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [before]


def test_the_file_is_synced_before_it_is_renamed(tmp_path, monkeypatch):
    done: list[str] = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, real=real: done.append(name) or real(*a))
    save(tmp_path / "a.safetensors", weights(3))
    assert done == ["fsync", "replace", "fsync"]


def test_targets_that_are_not_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"Cannot save to .*/b/a.safetensors: there is no directory .*/b\."):
        save(tmp_path / "b" / "a.safetensors", [])
    with pytest.raises(IsADirectoryError, match=r"Cannot save to .*: it is a directory or a device"):
        save(tmp_path, [])
    assert not list(tmp_path.iterdir())
    os.mkfifo(tmp_path / "pipe")  # stands for a device, which a failing test would replace
    with pytest.raises(IsADirectoryError, match=r"Cannot save to .*/pipe: it is a directory or a device"):
        save(tmp_path / "pipe", [])
    assert (tmp_path / "pipe").is_fifo() and len(list(tmp_path.iterdir())) == 1


def test_only_the_shard_files_of_a_replaced_index_are_removed(tmp_path):
    path = tmp_path / "version2.safetensors"
    shutil.copytree(GOLDEN / "version2", tmp_path, dirs_exist_ok=True)
    first, *others = sorted(name for name in os.listdir(tmp_path) if "-of-" in name)
    (tmp_path / first).write_text("not a shard file, but of that name")
    save(path, [1])
    assert others and sorted(os.listdir(tmp_path)) == [first, path.name] and load(path) == [1]
    assert (tmp_path / first).read_text() == "not a shard file, but of that name"


def test_links_and_permissions_are_kept(tmp_path):
    path = saved(tmp_path, [1])
    path.chmod(0o640)
    (tmp_path / "link").symlink_to(path)
    save(tmp_path / "link", [2])
    assert (tmp_path / "link").is_symlink() and load(path) == [2]
    assert path.stat().st_mode & 0o777 == 0o640
    mask = os.umask(0o027)
    try:
        save(tmp_path / "b.safetensors", [])
    finally:
        os.umask(mask)
    assert (tmp_path / "b.safetensors").stat().st_mode & 0o777 == 0o640
