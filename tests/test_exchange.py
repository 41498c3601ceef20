"""Files of others: safetensors, NF4 checkpoints of bitsandbytes, Hugging Face directories, and GGUF out.

`seeds` and `reads` are also what a longer search for files that break a reader starts from.
"""

import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType as ValueType
from safetensors.numpy import save_file

from lowbit import Array1B, Array8B, ArrayNF4
from lowbit.demo.model_file import demo_model_path
from lowbit.formats.nf4 import LEVELS, dynamic_map
from lowbit.io import GGUFField, GGUFFile, HuggingFaceDir, SafetensorsFile, bitsandbytes, gguf_writer, write_gguf
from lowbit.io._atomic import atomic_write
from lowbit.io.bitsandbytes import DequantizedWarning, bitsandbytes_tensors, quantization_config
from lowbit.io.readers.safetensors import _File

GOLDEN = {path.stem: path for path in sorted((Path(__file__).parent / "golden" / "bitsandbytes").iterdir())}
KEPT = [name for name in GOLDEN if not name.startswith("crossing")]
CROSSING = [name for name in GOLDEN if name.startswith("crossing")]
STATE = ".quant_state.bitsandbytes__nf4"


def weights(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32) * np.float32(0.02)


def same_bits(got: Any, want: Any) -> bool:
    got, want = np.asarray(got), np.asarray(want)
    return got.dtype == want.dtype and got.shape == want.shape and got.tobytes() == want.tobytes()


def stored(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a file as it has them, whatever they are parts of."""
    file = _File(path)
    return {name: file.view(name) for name in file.entries}


# --- plain tensors

PLAIN = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
PLAIN += [ml_dtypes.float8_e8m0fnu, np.int64, np.int32, np.int16, np.int8, np.uint64, np.uint32, np.uint16, np.uint8]


def plain_tensors() -> dict[str, np.ndarray]:
    values = 64 * np.abs(weights(3, 5)) + 1
    tensors = {np.dtype(dtype).name: values.astype(dtype) for dtype in PLAIN}
    return tensors | {"bool": values > 2, "scalar": values[0, 0, ...], "empty": values[:0], "row": values[:, 0].copy()}


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


def raw_file(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    """A file with whatever in it; a header that is no bytes is written as JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def test_tensors_need_not_be_aligned(tmp_path):
    header = {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    header |= {"b": {"dtype": "BF16", "shape": [2], "data_offsets": [1, 5]}}
    want = np.array([1.5, -2], ml_dtypes.bfloat16)
    file = SafetensorsFile(raw_file(tmp_path / "a.safetensors", header, b"\0" + want.tobytes()))
    assert same_bits(file.array("b"), want) and same_bits(file.dense("b"), want.astype(np.float32))


# --- what bitsandbytes saved


@pytest.mark.parametrize("name", KEPT)
def test_codes_and_scales_of_bitsandbytes_are_kept(name):
    file, parts = SafetensorsFile(GOLDEN[name]), stored(GOLDEN[name])
    assert sorted(file) == ["bias", "expected.w", "w"] and file.type("w") == "nf4"
    array = file.array("w")
    assert isinstance(array, ArrayNF4) and array.axis == -1
    assert array.shape == file.shape("w") == parts["expected.w"].shape and array.dtype == parts["expected.w"].dtype
    assert np.asarray(array.packed).tobytes() == parts["w"].tobytes()
    assert np.asarray(array.scales).tobytes() == parts["w.absmax"].tobytes()
    assert array.scales.dtype == (np.uint8 if "w.nested_absmax" in parts else np.float32)
    # What bitsandbytes itself dequantizes them to.
    assert same_bits(array.materialize(), parts["expected.w"])
    assert same_bits(file.dense("w", array.dtype), parts["expected.w"])
    assert same_bits(file.dense("w"), array.astype(np.float32).materialize())
    assert not file.dequantized


def test_golden_files_are_of_blocks_dtypes_and_kinds():
    found = set()
    for name in KEPT:
        array: Any = SafetensorsFile(GOLDEN[name]).array("w")
        found.add((array.block_size, array.dtype.name, array.group_absmax is not None))
    assert found >= {(b, d, n) for b in (64, 128) for d in ("float16", "bfloat16") for n in (False, True)}
    assert sum(path.stat().st_size for path in GOLDEN.values()) < 150_000


@pytest.mark.parametrize("name", CROSSING)
def test_blocks_that_cross_rows_are_dequantized_with_a_warning(name, monkeypatch):
    monkeypatch.setattr(bitsandbytes, "_CHUNK", 256)  # 1089 elements are five chunks
    file, want = SafetensorsFile(GOLDEN[name]), stored(GOLDEN[name])["expected.w"]
    assert file.type("w") == "nf4" and file.shape("w") == (11, 99)
    assert same_bits(file.dense("w", want.dtype), want) and not file.dequantized
    reason = "its blocks of 64 cross its rows of 99"
    with pytest.warns(DequantizedWarning, match=f"{name}.safetensors: tensor 'w' is dequantized: {reason}"):
        array = file.array("w")
    assert isinstance(array, np.ndarray) and same_bits(array, want)
    assert file.dequantized == {"w": reason}


@pytest.mark.parametrize("name", CROSSING)
def test_strict_keeps_or_raises(name, tmp_path):
    with pytest.raises(ValueError, match=f"{name}.safetensors: tensor 'w' cannot keep .* cross its rows of 99"):
        SafetensorsFile(GOLDEN[name], strict=True).array("w")
    shutil.copy(GOLDEN[name], tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"tensor 'w' cannot keep"):
        HuggingFaceDir(tmp_path, strict=True).array("w")
    assert isinstance(SafetensorsFile(GOLDEN[KEPT[0]], strict=True).array("w"), ArrayNF4)


def test_a_nested_map_a_few_ulps_apart_is_read(tmp_path):
    tensors = stored(GOLDEN["block64_float16_nested"])
    shifted = tensors["w.nested_quant_map"] * np.float32(1 + 2**-23)
    save_file(tensors | {"w.nested_quant_map": shifted}, tmp_path / "a.safetensors")
    file = SafetensorsFile(tmp_path / "a.safetensors")
    array: Any = file.array("w")
    assert same_bits(np.asarray(array.scales).reshape(-1), tensors["w.absmax"])
    # The numbers are those of the file's own map.
    scales = shifted[tensors["w.absmax"]] * tensors["w.nested_absmax"] + np.asarray(array.offset).reshape(-1)
    codes = np.stack([tensors["w"] >> 4, tensors["w"] & 15], -1).reshape(-1, 64)
    assert same_bits(file.dense("w"), (LEVELS[codes] * scales[:, None]).reshape(8, 256))


@pytest.mark.parametrize("name", KEPT)
def test_what_was_read_is_written_as_bitsandbytes_wrote_it(name):
    want = {key: part for key, part in stored(GOLDEN[name]).items() if key.partition(".")[0] == "w"}
    got = bitsandbytes_tensors("w", SafetensorsFile(GOLDEN[name]).array("w"))
    if name == "storage_bfloat16":  # written as uint8, in which all else is the same
        want["w"] = want["w"].reshape(-1).view(np.uint8).reshape(-1, 1)
    assert got.keys() == want.keys()
    for key in want:
        assert same_bits(got[key], want[key]), key


@pytest.mark.parametrize("name", ["float32", "crossing", "block128_bfloat16"])
def test_dense_weights_are_requantized_as_bitsandbytes_quantizes(name):
    file, want = SafetensorsFile(GOLDEN[name]), stored(GOLDEN[name])
    dense = weights(*file.shape("w"), seed=int(file.metadata["seed"])).astype(want["expected.w"].dtype)
    block = 128 if name.startswith("block128") else 64
    array = ArrayNF4.quantize(dense, block) if block == 128 else dense
    got = bitsandbytes_tensors("w", array, requantize=True)
    if name == "crossing":  # what fills up the last byte differs, and is not read
        got["w"] = np.concatenate([got["w"][:-1], got["w"][-1:] & 0xF0 | want["w"][-1:] & 0x0F])
    for key in got:
        assert same_bits(got[key], want[key]), key


def written(path: Path, array: Any, **options: Any) -> SafetensorsFile:
    save_file(bitsandbytes_tensors("w", array, **options), path)
    return SafetensorsFile(path)


@pytest.mark.parametrize(
    ("shape", "double_quant"),
    [
        ((33,), False),
        ((1, 100), True),
        ((3, 4, 64), False),
        ((2, 512, 64), True),
        ((1, 1, 4, 64), True),
        ((0, 64), False),
    ],
)
def test_arrays_come_back_from_what_is_written(shape, double_quant, tmp_path):
    array = ArrayNF4.quantize(weights(*shape), double_quant=double_quant, dtype=jnp.bfloat16)
    got = written(tmp_path / "a.safetensors", array).array("w")
    assert isinstance(got, ArrayNF4) and got.dtype == array.dtype and got.shape == shape
    assert same_bits(got.packed, array.packed)
    assert same_bits(got.absmax, array.absmax)
    assert (got.group_absmax is not None) == (double_quant and shape[0] == 1)  # of a stack decoded


@pytest.mark.parametrize("double_quant", [False, True])
def test_blocks_of_a_transposed_array_are_repacked_not_requantized(double_quant, tmp_path):
    array = ArrayNF4.quantize(weights(128, 300), axis=-2, double_quant=double_quant).T
    got = written(tmp_path / "a.safetensors", array).array("w")
    assert isinstance(got, ArrayNF4) and got.shape == (300, 128)
    assert same_bits(got.absmax, array.absmax) and same_bits(got.materialize(), array.materialize())


def test_a_stack_that_bitsandbytes_nested_has_its_scales_decoded(tmp_path):
    flat = bitsandbytes_tensors("w", ArrayNF4.quantize(weights(6, 128), double_quant=True))
    state = json.loads(flat["w" + STATE].tobytes()) | {"shape": [2, 3, 128]}
    flat["w" + STATE] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    save_file(flat, tmp_path / "a.safetensors")
    file = SafetensorsFile(tmp_path / "a.safetensors")
    array: Any = file.array("w")
    assert array.shape == (2, 3, 128) and array.group_absmax is None
    assert same_bits(array.materialize(), file.dense("w"))


MISFITS: dict[str, tuple[Callable[[], Any], str]] = {
    "dense": (lambda: jnp.asarray(weights(4, 64)), "it is ArrayImpl, not ArrayNF4"),
    "int8": (lambda: Array8B.quantize(weights(4, 64)), "it is Array8B, not ArrayNF4"),
    "axis": (lambda: ArrayNF4.quantize(weights(64, 4), axis=-2), "its blocks lie along axis -2"),
    "transposed": (lambda: ArrayNF4.quantize(weights(64, 64)).T, "its blocks lie along axis -2"),
    "rows": (lambda: ArrayNF4.quantize(weights(4, 100)), "its rows of 100 are not a multiple of its blocks of 64"),
    "block": (lambda: ArrayNF4.quantize(weights(4, 64), 16), "its blocks of 16 are not one of 32, 64"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_other_arrays_are_requantized_only_when_asked(case, tmp_path):
    make, message = MISFITS[case]
    array = make()
    with pytest.raises(ValueError, match=f"Cannot write 'w' for bitsandbytes .*: {message}.*requantize=True"):
        bitsandbytes_tensors("w", array)
    file = written(tmp_path / "a.safetensors", array, requantize=True)
    dense = np.asarray(array.materialize() if hasattr(array, "materialize") else array)
    block = 32 if case == "block" else 64
    want = ArrayNF4.quantize(dense.reshape(-1), block).materialize().reshape(dense.shape)
    assert file.shape("w") == dense.shape and same_bits(file.dense("w"), want)


def test_other_dtypes_are_written_as_float32_only_when_asked(tmp_path):
    array = ArrayNF4.quantize(weights(4, 64)).replace(dtype=np.dtype(np.float64))
    with pytest.raises(ValueError, match="its dtype is float64, not one of float32, float16, bfloat16"):
        bitsandbytes_tensors("w", array)
    got = written(tmp_path / "a.safetensors", array, requantize=True).array("w")
    assert got.dtype == np.float32 and got.shape == (4, 64)


def test_the_config_is_what_transformers_writes():
    config = quantization_config(double_quant=True, compute_dtype=ml_dtypes.bfloat16, skip=["lm_head"])
    assert config == {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": ["lm_head"],
    }
    assert json.loads(json.dumps(quantization_config()))["llm_int8_skip_modules"] is None


# --- checkpoints that lie


def without(*names: str) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def instead(**parts: Any) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """The tensors with some parts of `w` changed."""
    changed = {"w" if part == "codes" else f"w.{part}": np.asarray(value) for part, value in parts.items()}
    return lambda tensors: tensors | changed


def state(text: bytes | None = None, **fields: Any) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """The tensors with other JSON, or with some fields of it changed; those that are Ellipsis are left out."""

    def changed(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        found = json.loads(tensors["w" + STATE].tobytes()) | fields
        new = json.dumps({key: value for key, value in found.items() if value is not ...}).encode()
        return tensors | {"w" + STATE: np.frombuffer(text or new, np.uint8)}

    return changed


def renamed(old: str, new: str) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    return lambda tensors: {new if name == old else name: tensor for name, tensor in tensors.items()}


F32 = np.float32
LIES: dict[str, tuple[Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]], str]] = {
    "no codes": (without("w"), "lacks 'w'"),
    "no absmax": (without("w.absmax"), "lacks 'w.absmax'"),
    "no quant_map": (without("w.quant_map"), "lacks 'w.quant_map'"),
    "no nested_absmax": (without("w.nested_absmax"), "lacks 'w.nested_absmax'"),
    "no nested_quant_map": (without("w.nested_quant_map"), "lacks 'w.nested_quant_map'"),
    "not nested": (without("w.nested_absmax", "w.nested_quant_map"), "lacks 'w.nested_absmax'"),
    "no quant_state": (without("w" + STATE), f"lacks 'w{STATE}'"),
    "fp4": (renamed("w" + STATE, "w.quant_state.bitsandbytes__fp4"), "type 'fp4', and only 'nf4' can"),
    "fp4 inside": (state(quant_type="fp4"), "quant_type 'fp4' in its quant_state"),
    "other levels": (instead(quant_map=LEVELS[::-1]), "quant_map other than the levels of NF4"),
    "NaN level": (instead(quant_map=np.where(LEVELS == 0, F32(np.nan), LEVELS)), "quant_map other than"),
    "short quant_map": (instead(quant_map=LEVELS[:15]), "has 15 elements of float32 as quant_map, not 16 of float32"),
    "dtype of quant_map": (instead(quant_map=LEVELS.astype(np.float16)), "has 16 elements of float16 as quant_map"),
    "short codes": (instead(codes=np.zeros((1023, 1), np.uint8)), "1023 bytes of codes, and its shape .* takes 1024"),
    "long codes": (instead(codes=np.zeros((1025, 1), np.uint8)), "1025 bytes of codes"),
    "short absmax": (instead(absmax=np.zeros(31, np.uint8)), "has 31 elements of uint8 as absmax, not 32 of uint8"),
    "dtype of absmax": (instead(absmax=np.zeros(32, F32)), "has 32 elements of float32 as absmax, not 32 of uint8"),
    "nested_absmax": (instead(nested_absmax=np.zeros(2, F32)), "has 2 elements of float32 as nested_absmax, not 1"),
    "short nested map": (
        instead(nested_quant_map=dynamic_map()[:255]),
        "has 255 elements .* as nested_quant_map",
    ),
    "other nested map": (instead(nested_quant_map=dynamic_map()[::-1].copy()), "nested_quant_map other than"),
    "NaN in nested map": (instead(nested_quant_map=dynamic_map() * F32(np.nan)), "nested_quant_map other than"),
    "no JSON": (state(b"nf4"), "JSON that cannot be read"),
    "no UTF-8": (state(b'{"\xff": 1}'), "JSON that cannot be read"),
    "JSON list": (state(b"[]"), "JSON that is not an object"),
    "deep JSON": (state(b'{"a":' + b"[" * 100_000), "JSON that cannot be read"),
    "long number": (state(b'{"blocksize":' + b"9" * 5000 + b"}"), "JSON that cannot be read"),
    "same key": (state(b'{"shape": [8, 256], "shape": [8, 256]}'), "'shape' is a duplicate key"),
    "much JSON": (state(b'{"a":[' + b"[]," * 300_000 + b"[]]}"), "JSON of 600003 values"),
    "JSON of another dtype": (instead(**{STATE[1:]: np.zeros(9, np.int8)}), "has 9 elements of int8 as quant_state"),
    "no blocksize": (state(blocksize=...), "blocksize None"),
    "blocksize 0": (state(blocksize=0), "blocksize 0"),
    "blocksize 48": (state(blocksize=48), "blocksize 48"),
    "blocksize text": (state(blocksize="64"), "blocksize '64'"),
    "blocksize float": (state(blocksize=64.0), "blocksize 64.0"),
    "another blocksize": (state(blocksize=128), "has 32 elements of uint8 as absmax, not 16"),
    "dtype": (state(dtype="float64"), "dtype 'float64'"),
    "dtype list": (state(dtype=["float16"]), r"dtype \['float16'\]"),
    "no shape": (state(shape=None), "shape None"),
    "scalar": (state(shape=[]), r"shape \[\]"),
    "another shape": (state(shape=[8, 257]), "1024 bytes of codes, and its shape .8, 257. takes 1028"),
    "negative shape": (state(shape=[-8, -256]), r"shape \[-8, -256\]"),
    "shape of floats": (state(shape=[8.0, 256]), r"shape \[8.0, 256\]"),
    "shape of flags": (state(shape=[True, 2048]), r"shape \[True, 2048\]"),
    "hostile shape": (state(shape=[1 << 62, 1 << 62]), "shape"),
    "huge shape": (state(shape=[10**4000, 8]), "shape"),
    "huge and empty": (state(shape=[1 << 31, 0]), "shape"),
    "many axes": (state(shape=[1] * 70 + [2048]), r"shape \[1, 1"),
    "nested_blocksize": (state(nested_blocksize=128), "nested_blocksize 128"),
    "nested_blocksize float": (state(nested_blocksize=256.0), "nested_blocksize 256.0"),
    "nested_dtype": (state(nested_dtype="float16"), "nested_dtype 'float16'"),
    "no offset": (state(nested_offset=...), "nested_offset None"),
    "offset text": (state(nested_offset="0"), "nested_offset '0'"),
    "offset too large": (state(nested_offset=10**400), "nested_offset 1000"),
}


@pytest.mark.parametrize("case", LIES)
def test_a_checkpoint_that_lies_is_one_error(case, tmp_path):
    change, message = LIES[case]
    tensors = change(stored(GOLDEN["block64_float16_nested"]))
    path = tmp_path / "hostile.safetensors"
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, path)
    for read in (lambda f: f.array("w"), lambda f: f.dense("w"), lambda f: f.shape("w")):
        tracemalloc.start()
        with pytest.raises(ValueError) as error:
            read(SafetensorsFile(path))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert re.search(f"hostile.safetensors cannot be read: tensor 'w' .*{message}", str(error.value)), error.value
        assert len(str(error.value)) < 1000 and peak < 2 * path.stat().st_size + (1 << 20)


def test_codes_in_another_dtype_are_the_same_bytes(tmp_path):
    tensors = stored(GOLDEN["block64_float16_nested"])
    for dtype in (np.float32, np.int16, ml_dtypes.bfloat16):
        codes = tensors["w"].reshape(-1).view(dtype).reshape(-1, 1)
        save_file(tensors | {"w": codes}, tmp_path / "a.safetensors")
        file = SafetensorsFile(tmp_path / "a.safetensors")
        assert same_bits(file.dense("w", np.float16), tensors["expected.w"])


def entry(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


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
def test_a_header_that_lies_is_one_error(case, tmp_path):
    header, data, message = HEADERS[case]
    path = raw_file(tmp_path / "hostile.safetensors", header, data)
    tracemalloc.start()
    with pytest.raises(ValueError) as error:
        SafetensorsFile(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert re.search(f"hostile.safetensors cannot be read.*{message}", str(error.value)), error.value
    assert len(str(error.value)) < 1000 and peak < 2 * path.stat().st_size + (1 << 20)


def test_short_files_and_missing_ones(tmp_path):
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


def test_bytes_that_are_no_bool_are_refused(tmp_path):
    header = {"w": entry("BOOL", [2], [0, 2])}
    file = SafetensorsFile(raw_file(tmp_path / "a.safetensors", header, b"\1\2"))
    for read in (file.array, file.dense):
        with pytest.raises(ValueError, match=r"a.safetensors cannot be read: tensor 'w' is of type BOOL and has bytes"):
            read("w")


def test_reading_takes_little_more_than_what_is_read(tmp_path):
    array = ArrayNF4.quantize(jnp.ones((4096, 2048)), double_quant=True)
    save_file(bitsandbytes_tensors("w", array), tmp_path / "a.safetensors")
    size = (tmp_path / "a.safetensors").stat().st_size
    file = SafetensorsFile(tmp_path / "a.safetensors")
    tracemalloc.start()
    file.array("w")
    kept = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    dense = file.dense("w", np.float16)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert kept < size and peak < dense.nbytes + (8 << 20)


# --- Hugging Face directories


def model_dir(path: Path) -> dict[str, np.ndarray]:
    """A sharded model, one of whose tensors has its parts in two files; its dense values."""
    path.mkdir(exist_ok=True)
    nf4 = stored(GOLDEN["block64_float16_nested"])
    dense = {"norm": weights(8), "embed": weights(16, 8).astype(ml_dtypes.bfloat16), "w": nf4.pop("expected.w")}
    first = {"norm": dense["norm"], "w": nf4["w"], "w.quant_map": nf4["w.quant_map"]}
    second = {"embed": dense["embed"], **{name: part for name, part in nf4.items() if name[:2] == "w."}}
    del second["w.quant_map"]
    files = {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": second}
    for name, tensors in files.items():
        save_file(tensors, path / name)
    index = {"metadata": {"total_size": 1}, "weight_map": {t: name for name in files for t in files[name]}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text(json.dumps({"hidden_size": 8, "model_type": "llama"}))
    return dense


def test_a_sharded_model_reads_as_one(tmp_path):
    dense = model_dir(tmp_path)
    model = HuggingFaceDir(tmp_path)
    assert not model._opened, "opened before it was asked for"
    assert list(model) == ["norm", "w", "embed"] and len(model) == 3 and "w.absmax" not in model
    assert model.metadata == {"config": {"hidden_size": 8, "model_type": "llama"}, "index": {"total_size": 1}}
    assert same_bits(model.array("norm"), dense["norm"])
    assert list(model._opened) == ["model-00001-of-00002.safetensors"]
    assert [model.type(name) for name in model] == ["F32", "nf4", "BF16"]
    assert [model.shape(name) for name in model] == [(8,), (8, 256), (16, 8)]
    array = model.array("w")
    assert isinstance(array, ArrayNF4) and same_bits(array.materialize(), dense["w"])
    for name, want in dense.items():
        assert same_bits(model.dense(name, want.dtype), want)


def test_a_model_in_one_file_and_the_files_beside_it(tmp_path):
    others = ["config.json", "tokenizer.json", "README.md", "1_Pooling/config.json", "sub/vocab.txt"]
    weights_and_hidden = ["pytorch_model.bin", "x.gguf", "onnx/model.onnx", "pytorch_model.bin.index.json", ".git/HEAD"]
    for name in [*others, *weights_and_hidden, ".gitattributes"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    save_file({"a": weights(3)}, tmp_path / "model.safetensors")
    model = HuggingFaceDir(tmp_path)
    assert model.metadata == {"config": {}} and same_bits(model.array("a"), weights(3))
    assert model.other_files == tuple(sorted(map(Path, others)))
    (tmp_path / "config.json").unlink()
    assert HuggingFaceDir(tmp_path).metadata == {}


def test_files_may_be_links(tmp_path):
    dense = model_dir(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    assert same_bits(HuggingFaceDir(tmp_path / "snapshot").array("norm"), dense["norm"])


FIRST, SECOND, INDEX = (
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
)


def mapped(**files: Any) -> Callable[[Path], None]:
    """Changes the index; Ellipsis leaves a tensor out of it."""

    def change(path: Path) -> None:
        index = json.loads((path / INDEX).read_text())
        index["weight_map"] |= files
        index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file is not ...}
        (path / INDEX).write_text(json.dumps(index))

    return change


def text(name: str, contents: str) -> Callable[[Path], Any]:
    return lambda path: (path / name).write_text(contents)


DIRECTORIES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing shard": (
        lambda path: (path / SECOND).unlink(),
        f"{INDEX} has tensor 'embed' in '{SECOND}', which does not exist",
    ),
    "not in its shard": (mapped(norm=SECOND), f"{SECOND} has no tensor 'norm', but .*{INDEX} lists it in '{SECOND}'"),
    "nowhere": (mapped(other=FIRST), f"{FIRST} has no tensor 'other', but .*{INDEX} lists it in '{FIRST}'"),
    "unknown": (mapped(norm=...), f"{FIRST} has tensor 'norm', but .*{INDEX} lists it nowhere"),
    "in two shards": (
        lambda path: save_file(stored(path / SECOND) | {"norm": weights(8)}, path / SECOND),
        f"{SECOND} has tensor 'norm', but .*{INDEX} lists it in '{FIRST}'",
    ),
    "twice in the index": (
        text(INDEX, '{"weight_map": {"a": "b", "a": "c"}}'),
        f"{INDEX} has JSON.*'a' is a duplicate key",
    ),
    "absolute path": (mapped(norm="/etc/passwd"), f"{INDEX} has tensor 'norm' in '/etc/passwd', which does not exist"),
    "path upwards": (mapped(norm=f"../model/{FIRST}"), f"{INDEX} has tensor 'norm' in '../model/"),
    "path around": (mapped(norm=f"./{FIRST}"), f"{INDEX} has tensor 'norm' in './model"),
    "zero byte": (mapped(norm="a\0b"), f"{INDEX} has tensor 'norm' in 'a"),
    "long name": (mapped(norm="a" * 5000), f"{INDEX} has tensor 'norm' in 'aaaa"),
    "no text": (mapped(norm=[FIRST]), rf"{INDEX} has tensor 'norm' in \['model"),
    "no safetensors": (mapped(norm="config.json"), "config.json cannot be read as safetensors"),
    "missing part": (mapped(**{"w.absmax": ...}), "tensor 'w' lacks 'w.absmax'"),
    "no weight_map": (text(INDEX, "{}"), f"{INDEX} has no weight_map"),
    "list": (text(INDEX, '{"weight_map": []}'), f"{INDEX} has no weight_map"),
    "index no JSON": (text(INDEX, "{"), f"{INDEX} has JSON that cannot be read"),
    "index no object": (text(INDEX, "[]"), f"{INDEX} has JSON that is not an object"),
    "config no JSON": (text("config.json", "{'a': 1}"), "config.json has JSON that cannot be read"),
    "config no object": (text("config.json", "3"), "config.json has JSON that is not an object"),
    "much config": (text("config.json", '{"a": [%s0]}' % ("0," * 200_000)), "config.json has JSON of 200002 values"),
    "both": (text("model.safetensors", ""), f"has both model.safetensors and {INDEX}"),
    "neither": (lambda path: (path / INDEX).unlink(), f"has neither model.safetensors nor {INDEX}"),
    "cut off": (lambda path: os.truncate(path / SECOND, 1500), rf"{SECOND} cannot be read: tensor '.*' ends at byte"),
}


@pytest.mark.parametrize("case", DIRECTORIES)
def test_a_directory_that_does_not_fit_together_is_one_error(case, tmp_path):
    change, message = DIRECTORIES[case]
    model_dir(tmp_path / "model")
    change(tmp_path / "model")
    with pytest.raises(ValueError) as error:
        reads(tmp_path / "model" / INDEX)
    assert re.search(f"{tmp_path / 'model'}.*{message}", str(error.value)), error.value


# --- GGUF out


def gguf_fields() -> dict[str, GGUFField]:
    numbers = {"UINT8": 255, "INT8": -128, "UINT16": 65535, "INT16": -32768, "UINT32": 2**32 - 1, "INT32": -(2**31)}
    numbers |= {"UINT64": 2**64 - 1, "INT64": -(2**63), "FLOAT32": 0.5, "FLOAT64": 0.1, "BOOL": True}
    fields = {"general.architecture": GGUFField("STRING", "llama"), "text": GGUFField("STRING", "é\n")}
    fields |= {f"a.{name}": GGUFField(name, value) for name, value in numbers.items()}
    fields |= {f"several.{name}": GGUFField(f"[{name}]", [value] * 3) for name, value in numbers.items()}
    return fields | {"tokens": GGUFField("[STRING]", ["a", "", "ü"])}


def q8_0(*shape: int) -> np.ndarray:
    return gguf.quantize(weights(*shape), Type.Q8_0)


def bytes_of(file: GGUFFile, name: str) -> bytes:
    return file._bytes(file._entries[name]).tobytes()


def by_the_package(path: Path) -> GGUFFile:
    """A file all in Q8_0 as gguf.GGUFWriter writes it, with a vector and fields of every type."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, (kind, value) in gguf_fields().items():
        array = kind.startswith("[")
        types = (ValueType.ARRAY, ValueType[kind.strip("[]")]) if array else (ValueType[kind], None)
        if key != "general.architecture":
            writer.add_key_value(key, value, *types)
    writer.add_tensor("norm.weight", weights(5))
    for name, shape in {"a.weight": (6, 96), "b.weight": (2, 3, 64), "c.weight": (32,)}.items():
        writer.add_tensor(name, q8_0(*shape), raw_dtype=Type.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(path)


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
    # All that numpy does not make quiet: the largest, infinite, negative, zero, subnormal.
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
    # As they are after a way through JSON.
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
    assert not gguf_writer.is_q8_0(arrays["int8"])
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


def test_blocks_of_q8_0_are_dequantized_for_f16(tmp_path):
    file = by_the_package(tmp_path / "a.gguf")
    write_gguf(tmp_path / "b.gguf", {"a": file.array("a.weight")}, {}, type="F16")
    assert same_bits(GGUFFile(tmp_path / "b.gguf").array("a"), file.dense("a.weight", np.float16))


UNWRITABLE: dict[str, tuple[dict[str, Any], dict[str, Any], Any, str]] = {
    "type": ({}, {}, "Q4_0", "type='Q4_0' cannot be written. Known types: F16, Q8_0"),
    "five axes": ({"w": weights(1, 1, 1, 1, 32)}, {}, "F16", "'w' has the shape .*up to 4 axes"),
    "long name": ({"w" * 64: weights(3)}, {}, "F16", "names of up to 63 bytes"),
    "complex": ({"w": weights(2, 2).astype(np.complex64)}, {}, "F16", "'w' is of dtype complex64"),
    "unsigned": ({"w": np.zeros((2, 2), np.uint8)}, {}, "F16", "'w' is of dtype uint8"),
    "F16 range": ({"w": weights(2, 32) * F32(1e9)}, {}, "F16", "'w' has values that F16 cannot hold: 0 of 64 .* up to"),
    "F16 beside NaN": (
        {"w": np.array([[1e9, np.nan]], F32)},
        {},
        "F16",
        "cannot hold: 1 of 2 are NaN.*up to 1000000000",
    ),
    "F32 range": ({"w": np.array([1e300])}, {}, "F16", "'w' has values that F32 cannot hold: .*up to 1e.300"),
    "Q8_0 range": ({"w": weights(2, 32) * F32(1e12)}, {}, "Q8_0", "'w' has values that Q8_0 cannot hold: 0 of 64"),
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
def test_what_cannot_be_written_is_an_error_and_leaves_nothing(case, tmp_path):
    tensors, metadata, kind, message = UNWRITABLE[case]
    (tmp_path / "a.gguf").write_text("old")
    with pytest.raises(ValueError, match=message):
        write_gguf(tmp_path / "a.gguf", tensors, metadata, type=kind)
    assert [file.name for file in tmp_path.iterdir()] == ["a.gguf"]
    assert (tmp_path / "a.gguf").read_text() == "old"


def test_empty_rows_without_end_are_refused(tmp_path):
    # JAX would go through all of them.
    write_gguf(tmp_path / "a.gguf", {"w": np.empty((1 << 30, 0), F32)}, {}, type="Q8_0")
    with pytest.raises(ValueError, match=r"a.gguf cannot be read as GGUF: tensor 'w' has the shape \(1073741824, 0\)"):
        GGUFFile(tmp_path / "a.gguf")


def test_infinite_numbers_stay_infinite_where_there_is_a_number_for_them(tmp_path):
    numbers = np.array([[np.inf, -np.inf, np.nan, 1]], F32)
    write_gguf(tmp_path / "a.gguf", {"m": numbers, "v": numbers[0]}, {})
    file = GGUFFile(tmp_path / "a.gguf")
    assert same_bits(file.dense("m"), numbers) and same_bits(file.dense("v"), numbers[0])


# --- nothing half-written


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OSError])
def test_a_file_that_fails_was_never_there(error, tmp_path):
    path = tmp_path / "a"
    for old in (None, "old"):
        if old:
            path.write_text(old)
        with pytest.raises(error), atomic_write(path) as aside:
            aside.write_text("half")
            assert aside.parent == tmp_path and (path.read_text() if old else not path.exists())
            raise error
        assert [file.name for file in tmp_path.iterdir()] == ([path.name] if old else [])
    assert path.read_text() == "old"


def test_a_file_is_synced_before_it_is_renamed_and_its_directory_after(tmp_path, monkeypatch):
    done: list[Any] = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(Path(os.readlink(f"/proc/self/fd/{fd}"))), sync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("renamed"), replace(a, b)))
    with atomic_write(tmp_path / "a") as aside:
        aside.write_text("whole")
    assert done == [aside, "renamed", tmp_path]
    assert (tmp_path / "a").read_text() == "whole" and list(tmp_path.iterdir()) == [tmp_path / "a"]


def test_links_and_permissions_stay(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "real").chmod(0o640)
    (tmp_path / "link").symlink_to("real")
    with atomic_write(tmp_path / "link") as aside:
        aside.write_text("new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o640


def test_a_directory_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_gguf(tmp_path / "no" / "a.gguf", {}, {})
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        write_gguf(tmp_path / "folder", {}, {})
    assert [file.name for file in tmp_path.iterdir()] == ["folder"]


# --- changed bytes


def seeds(tmp_path: Path) -> list[Path]:
    """Files of every kind, to be changed in place one at a time and read by `reads`."""
    save_file(plain_tensors(), tmp_path / "plain.safetensors", metadata={"format": "np"})
    for name in ("block64_float16_nested", "crossing"):
        shutil.copyfile(GOLDEN[name], tmp_path / f"{name}.safetensors")
    model_dir(tmp_path / "model")
    by_the_package(tmp_path / "model.gguf")
    files = ["plain.safetensors", "block64_float16_nested.safetensors", "crossing.safetensors", "model.gguf"]
    files += [f"model/{name}" for name in ("config.json", INDEX, FIRST, SECOND)]
    return [tmp_path / name for name in files]


def reads(path: Path) -> Any:
    """Everything in a file, or in the directory that it belongs to, both as it is stored and dense."""
    if (path.parent / INDEX).exists() or path.name == INDEX:
        file: Any = HuggingFaceDir(path.parent)
    else:
        file = GGUFFile(path) if path.suffix == ".gguf" else SafetensorsFile(path)
    found = {}
    for name in file:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DequantizedWarning)
            array, dense = file.array(name), file.dense(name)
        assert array.shape == dense.shape == file.shape(name) and file.type(name)
        found[name] = array, dense
    return file.metadata, found


SEEDS = ["plain", "block64_float16_nested", "crossing", "gguf", "config", "index", "first", "second"]


@pytest.fixture(params=range(len(SEEDS)), ids=SEEDS)
def seed(request, tmp_path):
    return seeds(tmp_path)[request.param]


def test_every_cut_is_one_error_that_names_the_file(seed):
    contents = seed.read_bytes()
    reads(seed)
    needed = len(contents) - 32 if seed.suffix == ".gguf" else len(contents)  # GGUF ends in padding
    for size in {*range(0, needed, max(1, needed // 60)), needed - 1}:
        seed.write_bytes(contents[:size])
        with pytest.raises(ValueError, match=re.escape(str(seed.parent))):
            reads(seed)


def test_changed_bytes_read_or_are_one_error_that_names_the_file(seed):
    contents = seed.read_bytes()
    dice = random.Random(0)
    outcomes = {"read": 0, "refused": 0}
    reads(seed)
    tracemalloc.start()
    for _ in range(200):
        changed = bytearray(contents)
        for _ in range(dice.choice([1, 1, 1, 4])):
            at = dice.randrange(min(len(changed), dice.choice([100, 1500, len(changed)])))
            changed[at] = dice.choice([0, 1, 127, 128, 255, *b'0129"{[,:', dice.randrange(256)])
        seed.write_bytes(changed)
        try:
            reads(seed)
            outcomes["read"] += 1
        except ValueError as error:
            assert str(seed.parent) in str(error)
            outcomes["refused"] += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert min(outcomes.values()) > 8, outcomes
    assert peak < 2 << 20


def test_whatever_bytes_scales_and_codes_have_they_decode(tmp_path):
    for name in ("block64_bfloat16_nested", "block64_float16", "crossing_nested"):
        tensors = stored(GOLDEN[name])
        dice = np.random.default_rng(0)
        for part in ("w", "w.absmax", "w.nested_absmax"):
            if part in tensors:
                old = tensors[part]
                tensors[part] = np.frombuffer(dice.bytes(old.nbytes), old.dtype).reshape(old.shape)
        save_file(tensors, tmp_path / "a.safetensors")
        _, found = reads(tmp_path / "a.safetensors")
        assert found["w"][1].dtype == np.float32


# --- the packages


def test_importing_the_modules_imports_no_extra():
    code = "import sys, lowbit.io as _\n"
    code += "assert not {'gguf', 'torch', 'bitsandbytes'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_package_is_asked_for_when_a_file_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"pip install 'lowbit\[gguf\]'"):
        write_gguf(tmp_path / "a.gguf", {}, {})
    assert not list(tmp_path.iterdir())
