"""GGUF files that are written: what was read is written as the same bytes, and a failure leaves nothing."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from exchange_helpers import by_the_package, bytes_of, gguf_fields, same_bits, weights
from gguf import GGMLQuantizationType as Type

from lowbit import Array1B, Array8B, ArrayNF4
from lowbit.demo.model_file import demo_model_path
from lowbit.io import GGUFField, GGUFFile, write_gguf
from lowbit.io._atomic import atomic_write
from lowbit.io._gguf_blocks import type_of


def test_a_file_that_was_read_is_written_as_the_same_bytes(tmp_path):
    file = by_the_package(tmp_path / "a.gguf")
    assert file.fields == gguf_fields() and file.metadata == {key: field.value for key, field in file.fields.items()}
    write_gguf(tmp_path / "b.gguf", {name: file.array(name) for name in file}, file.fields, type="Q8_0")
    assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()


def test_the_embedding_of_the_demo_comes_back_byte_for_byte(tmp_path):
    file, name = GGUFFile(demo_model_path()), "token_embd.weight"
    assert file.type(name) == "Q8_0"
    write_gguf(tmp_path / "a.gguf", {name: file.array(name)}, file.fields, type="Q8_0")
    got = GGUFFile(tmp_path / "a.gguf")
    assert got.type(name) == "Q8_0" and got.shape(name) == file.shape(name)
    assert bytes_of(got, name) == bytes_of(file, name)
    assert got.fields == file.fields


def test_every_scale_and_code_of_q8_0_is_kept(tmp_path):
    # Every float16 but NaN: the largest, infinite, negative, zero, subnormal.
    scales = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    scales = scales[~np.isnan(scales)]
    blocks = np.zeros(len(scales), [("scale", "<f2"), ("codes", "i1", 32)])
    blocks["scale"] = scales
    blocks["codes"] = np.resize(np.arange(-128, 128, dtype=np.int8), (len(scales), 32))
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("w", blocks.view(np.uint8).reshape(len(scales), 34), raw_dtype=Type.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    write_gguf(tmp_path / "b.gguf", {"w": GGUFFile(tmp_path / "a.gguf").array("w")}, {}, type="Q8_0")
    assert bytes_of(GGUFFile(tmp_path / "b.gguf"), "w") == blocks.tobytes()


def test_empty_and_nested_arrays_keep_their_types(tmp_path):
    inner = [
        GGUFField("[INT8]", [1, 2]),
        GGUFField("[STRING]", []),
        GGUFField("[ARRAY]", [GGUFField("[BOOL]", [True])]),
    ]
    fields = {
        "none": GGUFField("[FLOAT64]", []),
        "deep": GGUFField("[ARRAY]", inner),
        "no deep": GGUFField("[ARRAY]", []),
    }
    fields["no text"] = GGUFField("STRING", "")
    write_gguf(tmp_path / "a.gguf", {}, fields)
    file = GGUFFile(tmp_path / "a.gguf")
    assert file.fields == fields
    assert file.metadata == {"none": [], "deep": [[1, 2], [], [[True]]], "no deep": [], "no text": ""}
    # As they are after a round trip through JSON.
    again = {key: GGUFField(*field) for key, field in json.loads(json.dumps(file.fields)).items()}
    write_gguf(tmp_path / "b.gguf", {}, again)
    assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()


def test_values_without_a_type_get_the_one_that_llama_cpp_wants(tmp_path):
    values = {"a": 3, "b": -3, "c": 2**40, "d": -(2**40), "e": 2**64 - 1, "f": 0.5, "g": "x", "h": True}
    values |= {"i": [1, -2], "j": [2**32 - 1], "k": [2**40, -1], "l": [0.5], "m": ["x", "y"], "n": [True]}
    types = "UINT32 INT32 UINT64 INT64 UINT64 FLOAT32 STRING BOOL [INT32] [UINT32] [INT64] [FLOAT32] [STRING] [BOOL]"
    write_gguf(tmp_path / "a.gguf", {}, values)
    file = GGUFFile(tmp_path / "a.gguf")
    assert file.metadata == values and [field.type for field in file.fields.values()] == types.split()


def test_an_alignment_is_obeyed(tmp_path):
    write_gguf(tmp_path / "a.gguf", {"a": weights(3), "b": weights(5)}, {"general.alignment": 128})
    file = GGUFFile(tmp_path / "a.gguf")
    assert [tensor.start % 128 for tensor in file._entries.values()] == [0, 0]
    assert same_bits(file.array("b"), weights(5))


@pytest.mark.parametrize("type", ["F16", "Q8_0"])
def test_other_arrays_are_converted(type, tmp_path):
    arrays = {
        "dense": weights(4, 64),
        "bfloat16": weights(4, 64).astype(ml_dtypes.bfloat16),
        "jax": jnp.asarray(weights(2, 3, 64)),
        "nf4": ArrayNF4.quantize(weights(4, 64), dtype=jnp.float16),
        "ternary": Array1B.quantize(weights(4, 64)),
        "int8": Array8B.quantize(weights(4, 64), block_size=32),
        "ragged": weights(4, 33),
        "vector": weights(64).astype(np.float16),
        "scalar": weights(),
        "none": weights(0, 64),
        "whole": np.arange(8, dtype=np.int32).reshape(2, 4),
    }
    assert type_of(arrays["int8"]) is None
    write_gguf(tmp_path / "a.gguf", arrays, {}, type=type)
    file = GGUFFile(tmp_path / "a.gguf")
    kinds = {"ragged": "F16", "vector": "F32", "scalar": "F32", "whole": "I32"}
    assert {name: file.type(name) for name in file} == {name: kinds.get(name, type) for name in arrays}
    for name, array in arrays.items():
        dense: Any = array.astype(np.float32)
        dense = np.asarray(dense.materialize() if hasattr(dense, "materialize") else dense)
        assert file.shape(name) == dense.shape
        if name == "whole":
            assert same_bits(file.array(name), array)
        elif dense.size:
            kind = Type[kinds.get(name, type)]
            assert same_bits(file.dense(name), gguf.dequantize(gguf.quantize(dense, kind), kind)), name


def test_blocks_of_q8_0_are_kept_whatever_the_type_of_dense_matrices(tmp_path):
    file = by_the_package(tmp_path / "a.gguf")
    write_gguf(tmp_path / "b.gguf", {"a": file.array("a.weight"), "b": weights(4, 64)}, {}, type="F16")
    again = GGUFFile(tmp_path / "b.gguf")
    assert (again.type("a"), again.type("b")) == ("Q8_0", "F16")
    assert bytes_of(again, "a") == bytes_of(file, "a.weight")


UNWRITABLE: dict[str, tuple[dict[str, Any], dict[str, Any], Any, str]] = {
    "type": ({}, {}, "Q4_0", "type='Q4_0' cannot be written. Known types: F16, Q8_0"),
    "five axes": ({"w": weights(1, 1, 1, 1, 32)}, {}, "F16", "'w' has the shape .*up to 4 axes"),
    "long name": ({"w" * 64: weights(3)}, {}, "F16", "names of up to 63 bytes"),
    "complex": ({"w": weights(2, 2).astype(np.complex64)}, {}, "F16", "'w' is of dtype complex64"),
    "unsigned": ({"w": np.zeros((2, 2), np.uint8)}, {}, "F16", "'w' is of dtype uint8"),
    "F16 range": (
        {"w": weights(2, 32) * np.float32(1e9)},
        {},
        "F16",
        "'w' has values that F16 cannot hold: 0 of 64 .* up to",
    ),
    "F16 beside NaN": (
        {"w": np.array([[1e9, np.nan]], np.float32)},
        {},
        "F16",
        "cannot hold: 1 of 2 are NaN.*up to 1000000000",
    ),
    "F32 range": ({"w": np.array([1e300])}, {}, "F16", "'w' has values that F32 cannot hold: .*up to 1e.300"),
    "Q8_0 range": (
        {"w": weights(2, 32) * np.float32(1e12)},
        {},
        "Q8_0",
        "'w' has values that Q8_0 cannot hold: 0 of 64",
    ),
    "NaN": ({"w": np.full((2, 32), np.nan)}, {}, "Q8_0", "'w' has values that Q8_0 cannot hold: 64 of 64"),
    "alignment": ({}, {"general.alignment": 48}, "F16", "general.alignment' is 48"),
    "alignment flag": ({}, {"general.alignment": True}, "F16", "general.alignment' is True"),
    "mixed array": ({}, {"k": [1, "a"]}, "F16", "'k' is an array of int and str, for which GGUF has no type"),
    "empty array": ({}, {"k": []}, "F16", "'k' is an array of nothing"),
    "dict": ({}, {"k": {}}, "F16", "'k' is of dict"),
    "too large": ({}, {"k": 2**64}, "F16", "'k' is of int, for which"),
    "unknown type": ({}, {"k": GGUFField("UINT128", 1)}, "F16", "'k' is of the type 'UINT128', which GGUF does not"),
    "lone array": ({}, {"k": GGUFField("ARRAY", 1)}, "F16", "'k' is of the type 'ARRAY', which GGUF does not"),
    "does not fit": ({}, {"k": GGUFField("UINT8", 256)}, "F16", "'k' does not fit its type UINT8"),
    "float too large": ({}, {"k": GGUFField("FLOAT32", 1e300)}, "F16", "'k' does not fit its type FLOAT32"),
}


@pytest.mark.parametrize("case", UNWRITABLE)
def test_values_that_gguf_cannot_hold_raise_and_leave_no_file(case, tmp_path):
    tensors, metadata, kind, message = UNWRITABLE[case]
    (tmp_path / "a.gguf").write_text("old")
    with pytest.raises(ValueError, match=message):
        write_gguf(tmp_path / "a.gguf", tensors, metadata, type=kind)
    assert [file.name for file in tmp_path.iterdir()] == ["a.gguf"]
    assert (tmp_path / "a.gguf").read_text() == "old"


def test_too_many_empty_rows_are_refused(tmp_path):
    # JAX would loop over all of them.
    write_gguf(tmp_path / "a.gguf", {"w": np.empty((1 << 30, 0), np.float32)}, {}, type="Q8_0")
    with pytest.raises(ValueError, match=r"a.gguf cannot be read as GGUF: tensor 'w' has the shape \(1073741824, 0\)"):
        GGUFFile(tmp_path / "a.gguf")


def test_infinite_numbers_stay_infinite_where_there_is_a_number_for_them(tmp_path):
    numbers = np.array([[np.inf, -np.inf, np.nan, 1]], np.float32)
    write_gguf(tmp_path / "a.gguf", {"m": numbers, "v": numbers[0]}, {})
    file = GGUFFile(tmp_path / "a.gguf")
    assert same_bits(file.dense("m"), numbers) and same_bits(file.dense("v"), numbers[0])


# --- a failed write leaves the old file


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OSError])
def test_a_failed_write_leaves_no_file(error, tmp_path):
    path = tmp_path / "a"
    for old in (None, "old"):
        if old:
            path.write_text(old)
        with pytest.raises(error), atomic_write(path) as temporary:
            temporary.write_text("half")
            assert temporary.parent == tmp_path and (path.read_text() if old else not path.exists())
            raise error
        assert [file.name for file in tmp_path.iterdir()] == ([path.name] if old else [])
    assert path.read_text() == "old"


def test_a_file_is_synced_before_it_is_renamed_and_its_directory_after(tmp_path, monkeypatch):
    done: list[Any] = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(Path(os.readlink(f"/proc/self/fd/{fd}"))), sync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("renamed"), replace(a, b)))
    with atomic_write(tmp_path / "a") as temporary:
        temporary.write_text("whole")
    assert done == [temporary, "renamed", tmp_path]
    assert (tmp_path / "a").read_text() == "whole" and list(tmp_path.iterdir()) == [tmp_path / "a"]


def test_links_and_permissions_stay(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "real").chmod(0o640)
    (tmp_path / "link").symlink_to("real")
    with atomic_write(tmp_path / "link") as temporary:
        temporary.write_text("new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o640


def test_a_missing_directory_raises(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_gguf(tmp_path / "no" / "a.gguf", {}, {})
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        write_gguf(tmp_path / "folder", {}, {})
    assert [file.name for file in tmp_path.iterdir()] == ["folder"]


def test_the_package_is_asked_for_when_a_file_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"pip install 'lowbit\[gguf\]'"):
        write_gguf(tmp_path / "a.gguf", {}, {})
    assert not list(tmp_path.iterdir())
