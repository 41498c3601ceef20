import math
import random
import re
import struct
import sys
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from files_helpers import refused
from gguf import GGMLQuantizationType as Type
from gguf_helpers import same_bits, stored, weights, write

from lowbit.io import GGUFFile
from lowbit.io.readers import gguf as reader

DECODED = [t for t in gguf.GGML_QUANT_SIZES if t.name in vars(gguf.quants) or t in (Type.F32, Type.F16)]
UNDECODED = [Type.Q8_1, Type.Q8_K]


# --- contents of a file


def test_metadata_is_plain_python_and_what_the_package_reads(tmp_path):
    tokens = ["a", "ünï", "", "long" * 100]
    given = {"text": "é\n", "number": -3, "float": 0.25, "tokens": tokens, "types": [1, 2, 3], "flags": [True, False]}
    file = write(tmp_path / "a.gguf", {}, **given)
    assert file.metadata == {"general.architecture": "llama", **given}
    assert {type(v) for v in file.metadata.values()} == {str, int, float, list}
    assert {type(v) for v in file.metadata["flags"]} == {bool}
    fields = gguf.GGUFReader(file.path).fields
    assert file.metadata == {key: field.contents() for key, field in fields.items() if not key.startswith("GGUF.")}


def test_every_type_of_number_is_read(tmp_path):
    values = {"uint8": 255, "int8": -128, "uint16": 65535, "int16": -32768, "uint32": 2**32 - 1, "int32": -(2**31)}
    values |= {"uint64": 2**64 - 1, "int64": -(2**63), "float32": 0.5, "float64": 0.1, "bool": True}
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(kind, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = GGUFFile(tmp_path / "a.gguf").metadata
    assert {kind: metadata[kind] for kind in values} == values


def test_nested_arrays_are_read(tmp_path):
    inner = [struct.pack("<IQ", 5, len(row)) + struct.pack(f"<{len(row)}i", *row) for row in ([1, 2], [], [3])]
    path = raw_file(tmp_path, keys=[("a", 9, struct.pack("<IQ", 9, 3) + b"".join(inner))])
    assert GGUFFile(path).metadata == {"a": [[1, 2], [], [3]]}


def test_tensors_have_names_shapes_and_types(tmp_path):
    tensors = {"b": (stored(Type.Q4_1), Type.Q4_1), "a": (weights(2, 3, 4), Type.F32), "scalar": (weights(), Type.F32)}
    file = write(tmp_path / "a.gguf", tensors)
    assert list(file) == ["b", "a", "scalar"] == list(file.names) and len(file) == 3
    assert "a" in file and "c" not in file
    assert [file.shape(name) for name in file] == [(6, 512), (2, 3, 4), ()]
    assert [file.type(name) for name in file] == ["Q4_1", "F32", "F32"]
    assert same_bits(file.array("a"), tensors["a"][0]) and same_bits(file.array("scalar"), tensors["scalar"][0])
    with pytest.raises(KeyError, match=r"a.gguf has no tensor 'scala'. Did you mean scalar"):
        file.shape("scala")


def test_another_alignment_is_obeyed(tmp_path):
    data = struct.pack("<4f", 1, 2, 3, 4)
    keys = [("general.alignment", 4, struct.pack("<I", 128))]
    path = raw_file(tmp_path, keys=keys, tensors=[("a", (4,), 0, 128)], data=bytes(128) + data, alignment=128)
    assert GGUFFile(path).array("a").tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("kind", DECODED, ids=lambda t: t.name)
def test_every_type_decodes_as_the_package_does(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "CHUNK", 1024)  # six rows of 512 are three chunks
    data = stored(kind)
    file = write(tmp_path / "a.gguf", {"w": (data, kind)})
    with np.errstate(all="ignore"):
        want = gguf.dequantize(data, kind)
        assert file.type("w") == kind.name and file.shape("w") == (6, 512)
        assert same_bits(file.dense("w"), want)
        assert same_bits(file.dense("w", np.float16), want.astype(np.float16))


@pytest.mark.parametrize("kind", UNDECODED, ids=lambda t: t.name)
def test_a_type_that_the_package_cannot_decode_is_named(kind, tmp_path):
    file = write(tmp_path / "a.gguf", {"w": (stored(kind), kind)})
    with pytest.raises(ValueError, match=f"a.gguf: tensor 'w' is of type {kind.name}, which the installed gguf"):
        file.array("w")


# --- numbers


NUMBERS = [(Type.F32, np.float32), (Type.F16, np.float16), (Type.BF16, ml_dtypes.bfloat16), (Type.F64, np.float64)]
NUMBERS += [(Type.I8, np.int8), (Type.I16, np.int16), (Type.I32, np.int32), (Type.I64, np.int64)]


@pytest.mark.parametrize(("kind", "dtype"), NUMBERS, ids=lambda p: getattr(p, "name", ""))
def test_numbers_are_views_of_the_file(kind, dtype, tmp_path):
    want = (100 * weights(3, 64)).astype(dtype)
    path = raw_file(tmp_path, tensors=[("w", (64, 3), kind, 0)], data=want.tobytes())
    array = GGUFFile(path).array("w")
    assert same_bits(array, want) and not array.flags.writeable and not array.flags.owndata
    assert same_bits(GGUFFile(path).dense("w"), want.astype(np.float32))


# --- inconsistent files

F32, Q8_0 = 0, 8


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def raw_file(
    folder: Path,
    *,
    keys: Sequence[tuple[str, int, bytes]] = (),
    tensors: Sequence[tuple[str, tuple[int, ...], int, int]] = (),
    data: bytes = bytes(64),
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
    start: bytes = b"GGUF" + struct.pack("<I", 3),
) -> Path:
    """A file with any contents; dimensions are in the order of the file."""
    header = start + struct.pack("<QQ", *(counts or (len(tensors), len(keys))))
    for key, kind, value in keys:
        header += text(key.encode()) + struct.pack("<I", kind) + value
    for name, dims, kind, offset in tensors:
        header += text(name.encode()) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    path = folder / "hostile.gguf"
    path.write_bytes(header + bytes(-len(header) % alignment) + data)
    return path


def array_of(kind: int, count: int, payload: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + payload


def nested(depth: int) -> bytes:
    return b"".join(array_of(9, 1) for _ in range(depth)) + array_of(0, 0)


def alignment(value: int) -> list[tuple[str, int, bytes]]:
    return [("general.alignment", 4, struct.pack("<I", value))]


W = "tensor 'w'"
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "magic": ({"start": b"GGML" + struct.pack("<I", 3)}, "starts with b'GGML'"),
    "version 1": ({"start": b"GGUF" + struct.pack("<I", 1)}, "version 1; versions 2 and 3"),
    "version 4": ({"start": b"GGUF" + struct.pack("<I", 4)}, "version 4; versions 2 and 3"),
    "big-endian": ({"start": b"GGUF" + struct.pack(">I", 3)}, "big-endian.*gguf-convert-endian"),
    "all tensors there are": ({"counts": (2**64 - 1, 0)}, "exceeds 4194304"),
    "all keys there are": ({"counts": (0, 2**64 - 1)}, "exceeds 4194304"),
    "too many tensors": ({"counts": (9, 0), "data": b""}, "tensor '' extends to byte"),
    "too many keys": ({"counts": (0, 9), "data": b""}, "metadata key '' extends to byte"),
    "long string": ({"keys": [("k", 8, struct.pack("<Q", 2**63))]}, "key 'k' extends to byte 9223372036854775"),
    "long array": ({"keys": [("k", 9, array_of(0, 2**62))]}, "key 'k' exceeds 4194304"),
    "array beyond the end": ({"keys": [("k", 9, array_of(12, 2**20))]}, "key 'k' extends to byte"),
    "strings beyond the end": ({"keys": [("k", 9, array_of(8, 2**20))]}, "key 'k' extends to byte"),
    "deep array": ({"keys": [("k", 9, nested(5000))]}, "key 'k' has arrays nested more than 4 deep"),
    "value type": ({"keys": [("k", 13, b"")]}, "key 'k' has a value of the type 13"),
    "element type": ({"keys": [("k", 9, array_of(13, 1))]}, "key 'k' has a value of the type 13"),
    "text": ({"keys": [("k", 8, text(b"\xff"))]}, "key 'k' has text that is not UTF-8"),
    "same key": ({"keys": [("k", 0, b"\1"), ("k", 0, b"\1")]}, "key 'k' is a duplicate"),
    "alignment 0": ({"keys": alignment(0)}, "general.alignment' is 0, not a power of two"),
    "alignment 48": ({"keys": alignment(48)}, "general.alignment' is 48, not a power of two"),
    "alignment text": ({"keys": [("general.alignment", 8, text(b"32"))]}, "general.alignment' is '32'"),
    "alignment flag": ({"keys": [("general.alignment", 7, b"\1")]}, "general.alignment' is True"),
    "same name": ({"tensors": [("w", (8,), F32, 0), ("w", (8,), F32, 32)]}, f"{W} is a duplicate"),
    "five axes": ({"tensors": [("w", (1,) * 5, F32, 0)]}, f"{W} has 5 axes, more than 4"),
    "type": ({"tensors": [("w", (8,), 36, 0)]}, f"{W} has the type 36"),
    "rows": ({"tensors": [("w", (16, 2), Q8_0, 0)]}, f"{W} has rows of 16 elements, and Q8_0 .* blocks of 32"),
    "a scalar in blocks": ({"tensors": [("w", (), Q8_0, 0)]}, f"{W} has rows of 1 elements"),
    "more than there is": ({"tensors": [("w", (17,), F32, 0)]}, f"{W} ends at byte 132 of a file of 128"),
    "overflow": ({"tensors": [("w", (2**32, 2**32), F32, 0)]}, f"{W} has the shape"),
    "overflow to 4": ({"tensors": [("w", (2**33, 2**31 + 1), F32, 0)]}, f"{W} has the shape"),
    "huge and empty": ({"tensors": [("w", (2**62, 0), F32, 0)]}, f"{W} has the shape"),
    "offset": ({"tensors": [("w", (8,), F32, 4)]}, f"{W} is at offset 4, .* alignment 32"),
    "offset beyond": ({"tensors": [("w", (8,), F32, 64)]}, f"{W} ends at byte 160 of a file of 128"),
    "offset around": ({"tensors": [("w", (8,), F32, 2**64 - 32)]}, f"{W} ends at byte"),
    "overlap": ({"tensors": [("v", (9,), F32, 0), ("w", (8,), F32, 32)]}, f"{W} overlaps tensor 'v'"),
    "same place": ({"tensors": [("v", (8,), F32, 0), ("w", (8,), F32, 0)]}, "tensor '.' overlaps tensor '.'"),
    "large alignment": ({"tensors": [("w", (8,), F32, 0)], "keys": alignment(2**31)}, f"{W} ends at byte"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_forged_file_raises_one_error(case, tmp_path):
    contents, message = HOSTILE[case]
    path = raw_file(tmp_path, **contents)
    error, peak = refused(path, GGUFFile)
    assert re.search(f"hostile.gguf.*{message}", error), error
    assert peak < 1 << 16


def test_an_empty_file_is_an_error_and_a_missing_one_is_missing(tmp_path):
    (tmp_path / "a.gguf").touch()
    with pytest.raises(ValueError, match=r"a.gguf is not a GGUF file: it is empty"):
        GGUFFile(tmp_path / "a.gguf")
    with pytest.raises(FileNotFoundError):
        GGUFFile(tmp_path / "b.gguf")


def test_more_values_than_any_model_has_are_refused_before_they_are_made(tmp_path):
    count = 5 << 20
    path = raw_file(tmp_path, keys=[("k", 9, array_of(0, count, bytes(count)))])
    error, peak = refused(path, GGUFFile)
    assert "hostile.gguf" in error and "key 'k' exceeds 4194304" in error
    assert peak < 1 << 16


def small_file(path: Path) -> int:
    """A file with values of many types, and the offset of its data."""
    tensors = {"norm": (weights(5), Type.F32)}
    for kind in (Type.Q8_0, Type.TQ2_0, Type.Q4_1, Type.BF16, Type.IQ2_XS):
        tensors[f"blk.0.{kind.name}.weight"] = (stored(kind, 2, 256), kind)
    file = write(path, tensors, name="small", layers=3, eps=1e-5, tokens=["a", "b", "é"], types=[1, 3, 3])
    return min(file._entries[name].start for name in file)


def test_every_truncation_raises_an_error_that_names_the_file(tmp_path):
    small_file(tmp_path / "a.gguf")
    contents = (tmp_path / "a.gguf").read_bytes()
    end = max(tensor.stop for tensor in GGUFFile(tmp_path / "a.gguf")._entries.values())
    assert len(contents) - 32 < end < 3500
    for size in [*range(0, end, 6), end - 1]:
        (tmp_path / "b.gguf").write_bytes(contents[:size])
        with pytest.raises(ValueError, match=r"b\.gguf"):
            GGUFFile(tmp_path / "b.gguf")
    (tmp_path / "b.gguf").write_bytes(contents[:end])
    assert len(GGUFFile(tmp_path / "b.gguf")) == 6


def test_changed_bytes_in_the_header_are_read_or_raise_one_error(tmp_path):
    start = small_file(tmp_path / "a.gguf")
    contents = (tmp_path / "a.gguf").read_bytes()
    dice = random.Random(0)
    outcomes = {"opened": 0, "refused": 0}
    tracemalloc.start()
    for _ in range(400):
        changed = bytearray(contents)
        for _ in range(dice.choice([1, 1, 1, 4])):
            changed[dice.randrange(start)] = dice.choice([0, 1, 2, 127, 128, 255, dice.randrange(256)])
        (tmp_path / "b.gguf").write_bytes(changed)
        try:
            file = GGUFFile(tmp_path / "b.gguf")
        except ValueError as error:
            assert "b.gguf" in str(error)
            outcomes["refused"] += 1
            continue
        outcomes["opened"] += 1
        for name in file:
            try:
                assert file.dense(name).shape == file.shape(name)
            except ValueError as error:
                assert "b.gguf" in str(error) and repr(name) in str(error)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert min(outcomes.values()) > 60, outcomes
    assert peak < 1 << 20


@pytest.mark.parametrize("kind", DECODED, ids=lambda t: t.name)
def test_any_bytes_of_a_tensor_decode(kind, tmp_path):
    block, size = gguf.GGML_QUANT_SIZES[kind]
    columns = math.lcm(block, 32)
    data = np.random.default_rng(2).integers(0, 256, 64 * columns // block * size, np.uint8)
    data[: columns // block * size] = 255
    path = raw_file(tmp_path, tensors=[("w", (columns, 64), kind, 0)], data=data.tobytes())
    assert GGUFFile(path).dense("w").shape == (64, columns)


# --- the package


def test_the_package_is_asked_for_when_a_file_is_opened(tmp_path, monkeypatch):
    path = raw_file(tmp_path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"pip install 'lowbit\[gguf\]'"):
        GGUFFile(path)
