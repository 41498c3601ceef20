"""Two processes that load, quantize, multiply and save one model, and what they leave behind."""

import json
import os
import pickle
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiers
from files_helpers import GOLDEN, module, reads, signed, split
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from process import COLUMNS, ROWS, K, N, loaded, weight
from typer.testing import CliRunner

import lowbit
from lowbit.cli.app import app
from lowbit.io import LowbitFile, open_tensors
from lowbit.io.readers import is_lowbit_file

pytestmark = tiers.DEVICES

TESTS = Path(__file__).parent
TIMEOUT = 120  # seconds, so that a hang becomes a failure


def started(task: str, folder: Path, devices: int) -> list[Any]:
    """Run two processes with this many devices each; returns their results."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"  # the last one counts
    outputs = [folder / f"{task}-{process}.txt" for process in range(2)]
    workers = []
    for process, path in enumerate(outputs):
        command = [sys.executable, "-W", "error", TESTS / "process.py", task, str(process), str(port), folder]
        with path.open("wb") as output:
            environment = {**os.environ, "XLA_FLAGS": flags}
            workers.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
    try:
        codes = [worker.wait(TIMEOUT) for worker in workers]
    except subprocess.TimeoutExpired:
        codes = None
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert codes == [0, 0], f"{codes}\n" + "\n".join(path.read_text(errors="replace") for path in outputs)
    return [json.loads((folder / f"{task}-{process}.json").read_text()) for process in range(2)]


def damaged(path: Path, process: int) -> bytes:
    """A file of one matrix, with zeros for the rows of the other process."""
    header, data = split(path)
    half = len(data) // 2
    data = data[:half] + bytes(half) if process == 0 else bytes(half) + data[half:]
    return signed(header, data)


# Bytes, nibbles and bits; two components of codes with coded scales; a scale over the whole matrix.
WHICH = {"each way to store shards": ["int8", "nf4", "binary", "q3", "nvfp4"], "all": [*lowbit.FORMATS]}


# One test, since starting the processes takes long.
@pytest.mark.parametrize("which", tiers.tiered(WHICH, ["each way to store shards"]))
def test_two_processes_load_run_and_save_a_model_that_any_number_restores(which: str, tmp_path: Path) -> None:
    (tmp_path / "formats.json").write_text(json.dumps(WHICH[which]))
    lowbit.save(tmp_path / "dense.safetensors", {"w": weight()})
    for process in range(2):
        (tmp_path / f"damaged-{process}.safetensors").write_bytes(damaged(tmp_path / "dense.safetensors", process))
    failures = started("run", tmp_path, 4)
    for process in range(2):
        the_failure_of_one_is_an_error_in_all(tmp_path, process, *failures[process])
    want = pickle.loads((tmp_path / "want.pickle").read_bytes())
    each_process_wrote_its_own_shards_once(tmp_path, want)
    the_index_is_read_like_a_file(tmp_path / "model.safetensors", want)
    for devices in (1, 4, 8):
        one_process_restores_it(tmp_path / "model.safetensors", want, devices)
    two_processes_restore_it_with_other_shardings(tmp_path, want)


def assert_restored(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert getattr(a, "dtype", None) == getattr(b, "dtype", None)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def the_failure_of_one_is_an_error_in_all(
    folder: Path, process: int, write: str, publish: str, differing: str, wrong: str
) -> None:
    start = re.escape(f"OSError: Cannot save to {folder / 'model.safetensors'}: process")
    assert re.fullmatch(rf"{start} 1 of 2 failed: .*-00002-of-00002.safetensors: File too large", write)
    assert re.fullmatch(rf"{start} 0 of 2 failed: .*No space left on device", publish)
    assert re.match(r"ValueError: .* the file name or the arrays of process 1 differ", differing)
    assert ("OSError", "TypeError")[process] in wrong and "'w' is a bytes; leaves are arrays" in wrong


def each_process_wrote_its_own_shards_once(folder: Path, want: Any) -> None:
    files = sorted(folder.glob("model-*.safetensors"))  # the files of the previous save are gone
    assert [re.sub("[0-9a-f]{16}", "id", file.name) for file in files] == [
        f"model-id-0000{i}-of-00002.safetensors" for i in (1, 2)
    ]
    first, second = (lowbit.load(file) for file in files)
    squares = {name for name in second if name.startswith("squares")}
    assert squares == {f"squares@{i},{j}" for i in (0, 256) for j in (256, 384)}
    for name in ("replicated@0", "number@", "host@0", "columns/int8/scales@0,0", "none@0,0"):
        assert name in first and name not in second
    # Of each sharded array, each process has four of the eight shards.
    for name in ("columns/nf4/codes", "columns/nf4/scales", "rows/nf4/scales", "tuple/0"):
        assert [len([shard for shard in file if shard.startswith(f"{name}@")]) for file in (first, second)] == [4, 4]
    stored = sum(array.nbytes for file in (first, second) for array in file.values())
    assert stored == sum(array.nbytes for array in jax.tree.leaves(want) if hasattr(array, "nbytes"))


def the_index_is_read_like_a_file(path: Path, want: Any) -> None:
    assert is_lowbit_file(path) and lowbit.load_metadata(path) == {"step": 3}
    file = open_tensors(path)
    assert isinstance(file, LowbitFile) and file.metadata == {"step": 3}
    name, q = "columns/nf4", want["columns"]["nf4"]
    assert (file.shape(name), file.type(name), file.nbytes(name)) == ((K, N), "nf4", q.nbytes)
    assert_restored(file.array(name), q)
    np.testing.assert_array_equal(file.dense(name), q.materialize())
    np.testing.assert_array_equal(file.array("squares"), weight())
    assert file.type("number") == "F32" and file.dense("number") == 0
    result = CliRunner().invoke(app, ["inspect", str(path), "--json"])
    assert result.exit_code == 0, result.output
    rows = {row["name"]: row for row in json.loads(result.stdout)["tensors"]}
    blocks = [{"axis": q.axis, "size": q.block_size}]
    assert rows[name] == {"name": name, "shape": [K, N], "type": "nf4", "blocks": blocks, "bytes": q.nbytes}


def one_process_restores_it(path: Path, want: Any, devices: int) -> None:
    mesh = jax.make_mesh((devices,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    for spec in (COLUMNS, ROWS):
        got = loaded(path, want, NamedSharding(mesh, spec))
        assert_restored(got, want)
        assert got["rows"]["nf4"].sharding == got["tuple"][0].sharding == NamedSharding(mesh, spec)
    assert_restored(lowbit.load(path), want)


def two_processes_restore_it_with_other_shardings(folder: Path, want: Any) -> None:
    names = started("restart", folder, 2)[0]
    assert [re.sub("[0-9a-f]{16}", "id", name) for name in names] == [
        "again-id-00001-of-00002.safetensors",
        "again-id-00002-of-00002.safetensors",
        "again.safetensors",
    ]
    assert_restored(lowbit.load(folder / "again.safetensors"), want)


# --- the stored checkpoint, which two processes wrote

MADE = module(GOLDEN / "make_version2.py")


def test_the_index_of_version_2_is_read_as_it_was_written():
    assert_restored(lowbit.load(MADE.OUT), MADE.contents())
    assert lowbit.load_metadata(MADE.OUT) == MADE.METADATA
    file = LowbitFile(MADE.OUT)
    assert file.array("w").tolist() == np.arange(32).reshape(8, 4).tolist()
    assert file.dense("layers/0")[3:5, 2].tolist() == [-123 * 2, -116 * 3]


@pytest.fixture
def path(tmp_path) -> Path:
    """A copy of the checkpoint."""
    for file in MADE.OUT.parent.iterdir():
        shutil.copy(file, tmp_path)
    return tmp_path / MADE.OUT.name


def test_a_file_that_replaces_an_index_removes_its_shard_files_and_nothing_else(path, tmp_path):
    other = tmp_path / "version2-0123456789abcdef-00001-of-00002.safetensors"
    other.write_bytes(b"something else")
    tree = lowbit.load(path)
    lowbit.save(path, tree)
    assert sorted(tmp_path.iterdir()) == [other, path]
    assert_restored(lowbit.load(path), MADE.contents())


def test_shards_that_one_process_reads_whole_are_checked(path, tmp_path):
    file = max(tmp_path.glob("version2-*"))
    header, data = split(file)
    start = json.loads(header)["w@7,0"]["data_offsets"][0]
    file.write_bytes(signed(header, data[:start] + b"\xff" + data[start + 1 :]))
    for devices in (1, 2, 8):
        mesh = jax.make_mesh((devices,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
        w = jax.ShapeDtypeStruct((8, 4), np.int16, sharding=NamedSharding(mesh, P("x")))
        with pytest.raises(ValueError, match=rf"{file.name}: tensor 'w@7,0' is damaged: .* its checksum"):
            lowbit.load(path, {**MADE.contents(), "w": w})


# --- inconsistent indexes


def shard(number: int, value: Any) -> Callable[[Any], None]:
    def edit(texts: Any) -> None:
        texts["lowbit.pieces"]["w"]["pieces"][number] = value

    return edit


def entry(name: str, **changes: Any) -> Callable[[Any], None]:
    return lambda texts: texts["lowbit.pieces"][name].update(changes)


def named(name: str) -> Callable[[Any], None]:
    """Give the second file another name."""

    def edit(texts: Any) -> None:
        first, second = texts["lowbit.files"]
        texts["lowbit.files"] = {first: texts["lowbit.files"][first], name: texts["lowbit.files"][second]}

    return edit


def only(*shards: Any) -> Callable[[Any], None]:
    return entry("w", pieces=list(shards))


ALL = [[i // 4, [i, 0]] for i in range(8)]
HEX = "0123456789abcdef"
W = "tensor 'w' has "
LIES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "file number": (shard(7, [2, [7, 0]]), W + r"the shard \[2, \[7, 0\]\]"),
    "negative file": (shard(7, [-1, [7, 0]]), W + "the shard"),
    "true file": (shard(7, [True, [7, 0]]), W + "the shard"),
    "wrong file": (shard(7, [0, [7, 0]]), W + r"a shard at \(7, 0\) that differs .* 'version2-.*-00001-of"),
    "outside": (shard(7, [1, [8, 0]]), W + "the shard"),
    "before": (shard(0, [0, [-1, 0]]), W + "the shard"),
    "huge": (shard(7, [1, [1 << 70, 0]]), W + "the shard"),
    "fraction": (shard(7, [1, [7.0, 0]]), W + "the shard"),
    "axes": (shard(7, [1, [7]]), W + "the shard"),
    "more axes": (shard(7, [1, [7, 0, 0]]), W + "the shard"),
    "no list": (shard(7, "x"), W + "the shard 'x'"),
    "duplicate": (shard(7, [1, [6, 0]]), W + "shards that overlap or leave gaps"),
    "more than once": (only(*ALL, ALL[0]), W + "shards that overlap"),
    "first missing": (only(*ALL[1:]), W + "shards that overlap or leave gaps"),
    "middle missing": (only(*ALL[:3], *ALL[4:]), W + r"a shard at \(2, 0\) that differs"),
    "last missing": (only(*ALL[:7]), W + r"a shard at \(6, 0\) that differs"),
    "none": (only(), W + "shards that overlap or leave gaps"),
    "no grid": (shard(7, [1, [7, 1]]), W + "shards that overlap or leave gaps"),
    "longer": (entry("w", shape=[9, 4]), W + r"a shard at \(7, 0\) that differs"),
    "wider": (entry("w", shape=[8, 5]), W + r"a shard at \(0, 0\) that differs"),
    "enormous": (entry("w", shape=[8, 1 << 60]), W + "the shape"),
    "negative": (entry("w", shape=[8, -4]), W + "the shape"),
    "dtype": (entry("w", dtype="U16"), W + r"a shard at \(0, 0\) that differs"),
    "unknown dtype": (entry("w", dtype="I4"), W + "the dtype 'I4'"),
    "more fields": (entry("w", more=1), "tensor 'w' is .*, and not a dtype, a shape and pieces"),
    "no entry": (lambda texts: texts["lowbit.pieces"].update(w=[]), "tensor 'w' is .*, and not a dtype"),
    "missing tensor": (lambda texts: texts["lowbit.pieces"].pop("w"), "'w' needs tensor 'w', which is missing"),
    "other name": (lambda t: t["lowbit.pieces"].update(v=t["lowbit.pieces"].pop("w")), "tensor 'v' has a shard at"),
    "no files": (lambda texts: texts["lowbit.files"].clear(), "has the shard"),
    "up": (
        named(f"../version2-{HEX}-00002-of-00002.safetensors"),
        r"lowbit.files has '\.\./version2.*cannot be the name of a file",
    ),
    "absolute": (named(f"/tmp/version2-{HEX}-00002-of-00002.safetensors"), "lowbit.files has"),
    "windows": (named(f"a\\b-{HEX}-00002-of-00002.safetensors"), "lowbit.files has"),
    "end of text": (named(f"a\0-{HEX}-00002-of-00002.safetensors"), "lowbit.files has"),
    "any name": (named("other.safetensors"), "lowbit.files has 'other.safetensors', which cannot be the name"),
    "no such file": (named(f"x-{HEX}-00002-of-00002.safetensors"), "shard file 'x-.*' cannot be read: .*No such file"),
    "half a character": (named(f"\ud800-{HEX}-00002-of-00002.safetensors"), "its shard file .* cannot be read"),
    "other digest": (
        lambda texts: texts["lowbit.files"].update({max(texts["lowbit.files"]): "0" * 64}),
        "its shard file 'version2-.*-00002-of-00002.safetensors' is not the file that was saved with it",
    ),
    "no digest": (
        lambda texts: texts["lowbit.files"].update({max(texts["lowbit.files"]): None}),
        "its shard file 'version2-",
    ),
    "files no object": (
        lambda texts: texts.update({"lowbit.files": []}),
        "lowbit.files has JSON that is not",
    ),
    "pieces no object": (
        lambda texts: texts.update({"lowbit.pieces": 1}),
        "lowbit.pieces has JSON that is not",
    ),
    "no pieces": (lambda texts: texts.pop("lowbit.pieces"), "its metadata must be the texts .*, lowbit.pieces"),
    "version 1": (lambda texts: texts.update({"lowbit.version": 1}), "its metadata must be the texts"),
    "version 3": (
        lambda texts: texts.update({"lowbit.version": 3}),
        "version 3, and this lowbit reads versions 1 and 2",
    ),
}


def edited(path: Path, edit: Callable[[Any], Any], tensors: dict[str, Any] | None = None) -> None:
    """Change the metadata of an index and update its checksum."""
    header = json.loads(split(path)[0])
    texts = {name: json.loads(text) for name, text in header["__metadata__"].items()}
    edit(texts)
    header["__metadata__"] = {name: json.dumps(text) for name, text in texts.items()}
    path.write_bytes(signed(json.dumps({**header, **(tensors or {})}, separators=(",", ":")).encode(), b""))


def test_a_consistent_index_is_read(path):
    edited(path, lambda texts: None)
    assert_restored(reads(path)[1], MADE.contents())


@pytest.mark.parametrize("case", LIES)
def test_an_inconsistent_index_raises_one_error(case, path):
    edit, message = LIES[case]
    edited(path, edit)
    with pytest.raises(ValueError, match=f"(?s)version2.safetensors.*{message}") as error:
        reads(path)
    assert len(str(error.value)) < 2000


def test_an_index_that_names_itself_or_a_changed_file_is_refused(path, tmp_path):
    first, second = sorted(tmp_path.glob("version2-*"))
    contents = second.read_bytes()
    for wrong, message in (
        (path.read_bytes(), f"{second.name} is an index, and must be a file with shards"),
        (first.read_bytes(), f"its shard file '{second.name}' is not the file that was saved with it"),
        (contents[:-1], f"{second.name} is damaged or truncated"),
        (b"", f"{second.name} is not a safetensors file"),
    ):
        second.write_bytes(wrong)
        with pytest.raises(ValueError, match=message):
            lowbit.load(path)
        assert lowbit.load_metadata(path) == MADE.METADATA  # which opens no shard file
    second.unlink()
    with pytest.raises(
        ValueError, match=rf"version2.safetensors: its shard file '{second.name}' cannot be read: .*No such file"
    ):
        lowbit.load(path)


def test_no_changed_byte_of_an_index_is_read(path):
    contents = path.read_bytes()
    for position in range(0, len(contents), 37):
        path.write_bytes(contents[:position] + bytes([contents[position] ^ 1]) + contents[position + 1 :])
        with pytest.raises(ValueError, match=r"version2\.safetensors"):
            lowbit.load(path)
