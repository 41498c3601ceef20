"""NF4 checkpoints of bitsandbytes: their bits are kept both ways, and inconsistent ones are one error."""

import json
import re
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from exchange_helpers import CROSSING, GOLDEN, KEPT, STATE, same_bits, stored, weights
from safetensors.numpy import save_file

from lowbit import Array8B, ArrayNF4
from lowbit.formats.nf4 import LEVELS, dynamic_map
from lowbit.io import HuggingFaceDir, SafetensorsFile, bitsandbytes
from lowbit.io.bitsandbytes import DequantizedWarning, bitsandbytes_tensors, quantization_config

# --- files that bitsandbytes saved


@pytest.mark.parametrize("name", KEPT)
def test_codes_and_scales_of_bitsandbytes_are_kept(name):
    file, components = SafetensorsFile(GOLDEN[name]), stored(GOLDEN[name])
    assert sorted(file) == ["bias", "expected.w", "w"] and file.type("w") == "nf4"
    array = file.array("w")
    assert isinstance(array, ArrayNF4) and array.axis == -1
    assert (
        array.shape == file.shape("w") == components["expected.w"].shape
        and array.dtype == components["expected.w"].dtype
    )
    assert np.asarray(array.packed).tobytes() == components["w"].tobytes()
    assert np.asarray(array.scales).tobytes() == components["w.absmax"].tobytes()
    assert array.scales.dtype == (np.uint8 if "w.nested_absmax" in components else np.float32)
    # The values that bitsandbytes itself dequantizes to.
    assert same_bits(array.materialize(), components["expected.w"])
    assert same_bits(file.dense("w", array.dtype), components["expected.w"])
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
    # Values are decoded by the map in the file.
    scales = shifted[tensors["w.absmax"]] * tensors["w.nested_absmax"] + np.asarray(array.offset).reshape(-1)
    codes = np.stack([tensors["w"] >> 4, tensors["w"] & 15], -1).reshape(-1, 64)
    assert same_bits(file.dense("w"), (LEVELS[codes] * scales[:, None]).reshape(8, 256))


@pytest.mark.parametrize("name", KEPT)
def test_tensors_are_written_as_bitsandbytes_wrote_them(name):
    want = {key: component for key, component in stored(GOLDEN[name]).items() if key.partition(".")[0] == "w"}
    got = bitsandbytes_tensors("w", SafetensorsFile(GOLDEN[name]).array("w"))
    if name == "storage_bfloat16":  # written as uint8; the bytes are the same
        want["w"] = want["w"].reshape(-1).view(np.uint8).reshape(-1, 1)
    assert got.keys() == want.keys()
    for key in want:
        assert same_bits(got[key], want[key]), key


@pytest.mark.parametrize("name", ["float32", "crossing", "block128_bfloat16"])
def test_dense_weights_are_requantized_as_bitsandbytes_quantizes(name):
    file, want = SafetensorsFile(GOLDEN[name]), stored(GOLDEN[name])
    dense = weights(*file.shape("w"), seed=int(file.metadata["seed"])).astype(want["expected.w"].dtype)
    block = 128 if name.startswith("block128") else 64
    array = ArrayNF4.quantize(dense, block, axis=-1) if block == 128 else dense
    got = bitsandbytes_tensors("w", array, requantize=True)
    if name == "crossing":  # the padding of the last byte differs, and is not read
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
    array = ArrayNF4.quantize(weights(*shape), axis=-1, double_quant=double_quant, dtype=jnp.bfloat16)
    got = written(tmp_path / "a.safetensors", array).array("w")
    assert isinstance(got, ArrayNF4) and got.dtype == array.dtype and got.shape == shape
    assert same_bits(got.packed, array.packed)
    assert same_bits(got.absmax, array.absmax)
    assert (got.group_absmax is not None) == (double_quant and shape[0] == 1)  # the scales of a stack are decoded


@pytest.mark.parametrize("double_quant", [False, True])
def test_blocks_of_a_transposed_array_are_repacked_not_requantized(double_quant, tmp_path):
    array = ArrayNF4.quantize(weights(128, 300), axis=-2, double_quant=double_quant).T
    got = written(tmp_path / "a.safetensors", array).array("w")
    assert isinstance(got, ArrayNF4) and got.shape == (300, 128)
    assert same_bits(got.absmax, array.absmax) and same_bits(got.materialize(), array.materialize())


def test_a_stack_that_bitsandbytes_nested_has_its_scales_decoded(tmp_path):
    flat = bitsandbytes_tensors("w", ArrayNF4.quantize(weights(6, 128), axis=-1, double_quant=True))
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
    "transposed": (lambda: ArrayNF4.quantize(weights(64, 64), axis=-1).T, "its blocks lie along axis -2"),
    "rows": (
        lambda: ArrayNF4.quantize(weights(4, 100), axis=-1),
        "its rows of 100 are not a multiple of its blocks of 64",
    ),
    "block": (lambda: ArrayNF4.quantize(weights(4, 64), 16, axis=-1), "its blocks of 16 are not one of 32, 64"),
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
    array = ArrayNF4.quantize(weights(4, 64), axis=-1).replace(dtype=np.dtype(np.float64))
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


# --- inconsistent checkpoints


def without(*names: str) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def instead(**components: Any) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """Change some components of `w`."""
    changed = {"w" if name == "codes" else f"w.{name}": np.asarray(value) for name, value in components.items()}
    return lambda tensors: tensors | changed


def state(text: bytes | None = None, **fields: Any) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """Replace the JSON, or change some of its fields; Ellipsis removes a field."""

    def changed(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        found = json.loads(tensors["w" + STATE].tobytes()) | fields
        new = json.dumps({key: value for key, value in found.items() if value is not ...}).encode()
        return tensors | {"w" + STATE: np.frombuffer(text or new, np.uint8)}

    return changed


def renamed(old: str, new: str) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    return lambda tensors: {new if name == old else name: tensor for name, tensor in tensors.items()}


F32 = np.float32
INCONSISTENT: dict[str, tuple[Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]], str]] = {
    "no codes": (without("w"), "lacks 'w'"),
    "no absmax": (without("w.absmax"), "lacks 'w.absmax'"),
    "no quant_map": (without("w.quant_map"), "lacks 'w.quant_map'"),
    "no nested_absmax": (without("w.nested_absmax"), "lacks 'w.nested_absmax'"),
    "no nested_quant_map": (without("w.nested_quant_map"), "lacks 'w.nested_quant_map'"),
    "not nested": (without("w.nested_absmax", "w.nested_quant_map"), "lacks 'w.nested_absmax'"),
    "no quant_state": (without("w" + STATE), f"lacks 'w{STATE}'"),
    "fp4": (renamed("w" + STATE, "w.quant_state.bitsandbytes__fp4"), "quant_type 'nf4' in its quant_state"),
    "another type": (
        renamed("w" + STATE, "w.quant_state.bitsandbytes__af4"),
        "type 'af4', and only 'nf4' and 'fp4' can",
    ),
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


@pytest.mark.parametrize("case", INCONSISTENT)
def test_an_inconsistent_checkpoint_raises_one_error(case, tmp_path):
    change, message = INCONSISTENT[case]
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


def test_reading_takes_little_more_than_what_is_read(tmp_path):
    array = ArrayNF4.quantize(jnp.ones((4096, 2048)), axis=-1, double_quant=True)
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
