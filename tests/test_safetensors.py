"""Plain safetensors files: tensors are views of the file, and inconsistent headers are one error."""

import json
import re
import struct
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from exchange_helpers import entry, plain_tensors, raw_file, same_bits
from safetensors.numpy import save_file

from lowbit.io import HuggingFaceDir, SafetensorsFile


def test_plain_tensors_are_views_of_the_file(tmp_path):
    tensors = plain_tensors()
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "np"})
    file = SafetensorsFile(tmp_path / "a.safetensors")
    assert sorted(file) == sorted(file.names) == sorted(tensors) and len(file) == len(tensors)
    assert file.metadata == {"format": "np"} and file.path == tmp_path / "a.safetensors"
    assert "bool" in file and "absent" not in file
    for name, want in tensors.items():
        got = file.array(name)
        assert isinstance(got, np.ndarray) and same_bits(got, want) and file.shape(name) == want.shape
        assert not got.flags.writeable and not got.flags.owndata
        assert same_bits(file.dense(name), want.astype(np.float32))
        assert same_bits(file.dense(name, np.float64), want.astype(np.float64))
    assert [file.type(name) for name in ("bfloat16", "float8_e4m3fn", "uint16")] == ["BF16", "F8_E4M3", "U16"]
    with pytest.raises(KeyError, match=r"a.safetensors has no tensor 'float33'. Did you mean float32"):
        file.type("float33")


def test_tensors_need_not_be_aligned(tmp_path):
    header = {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    header |= {"b": {"dtype": "BF16", "shape": [2], "data_offsets": [1, 5]}}
    want = np.array([1.5, -2], ml_dtypes.bfloat16)
    file = SafetensorsFile(raw_file(tmp_path / "a.safetensors", header, b"\0" + want.tobytes()))
    assert same_bits(file.array("b"), want) and same_bits(file.dense("b"), want.astype(np.float32))


W = "tensor 'w'"
HEADERS: dict[str, tuple[Any, bytes, str]] = {
    "no JSON": (b"{", b"", "JSON that cannot be read"),
    "no UTF-8": (b'{"\xff":{}}', b"", "JSON that cannot be read"),
    "list": ([], b"", "JSON that is not an object"),
    "deep": (b'{"w":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b"", "JSON that cannot be read .maximum recursion"),
    "many axes of one tensor": (b'{"w":{"shape":[' + b"1," * 200_000 + b"1]}}", b"", "JSON of 200003 values"),
    "much metadata": ({"__metadata__": {str(i): "" for i in range(200_000)}}, b"", "JSON of 200001 values"),
    "same tensor": (b'{"w":%b,"w":%b}' % ((json.dumps(entry()).encode(),) * 2), bytes(4), "'w' is a duplicate key"),
    "same escaped": (b'{"w":%b,"\\u0077":%b}' % ((json.dumps(entry()).encode(),) * 2), bytes(4), "is a duplicate"),
    "metadata": ({"__metadata__": {"a": 1}}, b"", "rejected by the safetensors package"),
    "entry": ({"w": [1]}, b"", f"{W} has no dtype, shape and data_offsets"),
    "dtype": ({"w": entry("F99")}, bytes(4), f"{W} has the dtype 'F99'"),
    "dtype list": ({"w": entry(["F32"])}, bytes(4), f"{W} has the dtype"),
    "bits": ({"w": entry("F4", [8])}, bytes(4), f"{W} has the dtype 'F4'"),
    "no shape": ({"w": {"dtype": "F32", "data_offsets": [0, 4]}}, bytes(4), f"{W} has the shape None"),
    "negative": ({"w": entry(shape=[-1])}, bytes(4), rf"{W} has the shape \[-1\]"),
    "flag": ({"w": entry(shape=[True])}, bytes(4), rf"{W} has the shape \[True\]"),
    "65 axes": ({"w": entry(shape=[1] * 65)}, bytes(4), rf"{W} has the shape \[1, 1"),
    "overflow": ({"w": entry(shape=[1 << 62, 1 << 62])}, bytes(4), f"{W} has the shape"),
    "huge and empty": ({"w": entry(shape=[1 << 40, 0], offsets=[0, 0])}, b"", f"{W} has the shape"),
    "size": ({"w": entry(shape=[2])}, bytes(4), f"{W} spans bytes 0 to 4, which is not the size of F32 .2,."),
    "backwards": ({"w": entry(offsets=[4, 0])}, bytes(4), f"{W} spans bytes 4 to 0"),
    "one offset": ({"w": entry(offsets=[4])}, bytes(4), rf"{W} has the data_offsets \[4\]"),
    "huge offset": ({"w": entry(offsets=[0, 10**4299])}, bytes(4), f"{W} has the data_offsets"),
    "beyond": ({"w": entry(shape=[2], offsets=[0, 8])}, bytes(4), rf"{W} ends at byte \d+ of a file of"),
    "overlap": ({"v": entry(), "w": entry()}, bytes(4), "invalid offset for tensor `[vw]`"),
    "hole": ({"w": entry(offsets=[4, 8])}, bytes(8), "invalid offset for tensor `w`"),
    "rest": ({"w": entry()}, bytes(5), "not fully covered"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_an_inconsistent_header_raises_one_error(case, tmp_path):
    header, data, message = HEADERS[case]
    path = raw_file(tmp_path / "hostile.safetensors", header, data)
    tracemalloc.start()
    with pytest.raises(ValueError) as error:
        SafetensorsFile(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert re.search(f"hostile.safetensors cannot be read.*{message}", str(error.value)), error.value
    assert len(str(error.value)) < 1000 and peak < 2 * path.stat().st_size + (1 << 20)


def test_short_and_missing_files_raise(tmp_path):
    path = tmp_path / "a.safetensors"
    for contents in (b"", b"1234567", b"\xff" * 8, struct.pack("<Q", 3) + b"{}"):
        path.write_bytes(contents)
        with pytest.raises(
            ValueError, match=rf"a.safetensors cannot be read as safetensors: it has {len(contents)} byt"
        ):
            SafetensorsFile(path)
    with pytest.raises(FileNotFoundError):
        SafetensorsFile(tmp_path / "b.safetensors")
    with pytest.raises(FileNotFoundError):
        HuggingFaceDir(tmp_path / "b")


def test_bytes_that_are_not_booleans_are_refused(tmp_path):
    header = {"w": entry("BOOL", [2], [0, 2])}
    file = SafetensorsFile(raw_file(tmp_path / "a.safetensors", header, b"\1\2"))
    for read in (file.array, file.dense):
        with pytest.raises(ValueError, match=r"a.safetensors cannot be read: tensor 'w' is of type BOOL and has bytes"):
            read("w")
