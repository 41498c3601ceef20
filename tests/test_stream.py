"""Files written chunk by chunk: the same bytes as those made in memory, in bounded memory."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gguf
import jax
import numpy as np
import pytest
import safetensors.numpy
from cli_helpers import left_over
from stream_helpers import CASES, HERE, ONE_DEVICE, RULES, in_memory, tensors

import lowbit
from lowbit.io import _convert as converting
from lowbit.io import open_tensors, save
from lowbit.io.readers import _file_regions

pytestmark = pytest.mark.usefixtures("small_chunks")


def test_streaming_writes_the_file_that_is_made_in_memory(source: Path, tmp_path: Path) -> None:
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


def test_systems_without_direct_io_write_the_same_file(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = in_memory(source, tmp_path / "whole", RULES)
    for name in ("O_DIRECT", "posix_fadvise", "fdatasync"):
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.setattr(_file_regions, "_libc", SimpleNamespace(mincore=lambda *args: -1))
    converting.convert(open_tensors(source), tmp_path / "out", rules=RULES)
    assert (tmp_path / "out").read_bytes() == want


def test_every_reader_is_read_in_chunks(source: Path, tmp_path: Path) -> None:
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
        for name, array, _ in converting.transformed(file, plans):
            for a, b in zip(*map(jax.tree.leaves, (got.array(name), array)), strict=True):
                assert np.array_equal(a, b), name
        assert len(told) > 12


def test_stored_tensors_are_copied_in_chunks(tmp_path: Path) -> None:
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
    # An index, whose tensors lie in several files.
    index = open_tensors(HERE / "golden" / "version2" / "version2.safetensors")
    converting.convert(index, tmp_path / "out")
    copy = open_tensors(tmp_path / "out")
    for name in index:
        for a, b in zip(*(jax.tree.leaves(file.array(name)) for file in (index, copy)), strict=True):
            assert a.dtype == b.dtype and np.array_equal(a, b), name


def test_uncached_files_are_read_past_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, data = tmp_path / "in", np.random.default_rng(0).bytes(100_000)
    path.write_bytes(data)
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
        page = 4096
    except OSError:  # as on a file system in memory, which has no direct I/O
        page = 1
    plain, ways = os.preadv, []
    monkeypatch.setattr(os, "preadv", lambda *args: ways.append(args[2:]) or plain(*args))
    for cached in (True, False):
        for at, length in ((0, 100_000), (5000, 4096), (8192, 8192), (99_999, 1), (4095, 2)):
            ways.clear()
            assert _file_regions._read_run(path, at, length).tobytes() == data[at : at + length]
            assert ways == [(at if cached else at // page * page,)]  # or one read of whole pages
        monkeypatch.setattr(_file_regions, "_libc", SimpleNamespace(mincore=lambda *args: 0))  # marks no page
    with pytest.raises(ValueError, match="was truncated while it was read"):
        _file_regions._read_run(path, 99_000, 2000)


def test_tensors_that_are_loaded_whole_are_listed(source: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    converting.convert(open_tensors(source), tmp_path / "out", rules=RULES, note=notes.append)
    # A group scale of nvfp4 is that of the whole matrix.
    assert sorted(notes) == [
        f"{name} needs 7,680 elements in memory at a time, which share a scale or cannot be split."
        for name in ("mean.weight", "nvfp4.kernel", "nvfp4.weight")
    ]


# A file of two chunks first, for the memory that a process needs in any case. Then the peak is reset.
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
