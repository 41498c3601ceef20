"""Quantized checkpoints of other projects: every stored bit is kept, and values are those of their own decoders."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_helpers import CHECKPOINTS, EACH_METHOD, checkpoint, tensors_of
from cli_helpers import run
from exchange_helpers import same_bits

import lowbit
from lowbit.io import HuggingFaceDir, _chunks, checkpoints, convert

# The project's decoder rounds in another order: the largest difference in units of the largest weight.
ROUNDED = {"mlx_affine_4_float16": 2.0**-10, "mlx_affine_6_bfloat16": 2.0**-7, "bitsandbytes_int8": 2.0**-23}
ORDERED = [name for name in CHECKPOINTS if name.endswith("_order")]


def assert_values(got: np.ndarray, want: np.ndarray, name: str) -> None:
    got = np.asarray(got)
    assert got.shape == want.shape and got.dtype == want.dtype
    if name not in ROUNDED:
        return np.testing.assert_array_equal(got, want)
    wide = [x.astype(np.float32) for x in (got, want)]
    assert 0 < abs(np.subtract(*wide)).max() <= ROUNDED[name] * abs(wide[1]).max()


def wide(array: Any) -> np.ndarray:
    """The values in float32, without rounding to the dtype of the array."""
    if isinstance(array, lowbit.PermutedArray):
        return np.asarray(array.replace(array=array.array.replace(dtype=np.dtype(np.float32))).materialize())
    return np.asarray(array.replace(dtype=np.dtype(np.float32)).materialize())


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_values_are_those_of_the_own_decoder(name: str, tmp_path: Path) -> None:
    expected = checkpoint(name, tmp_path)
    model, tensors = HuggingFaceDir(tmp_path), tensors_of(name)[0]
    assert expected and not model.refusal
    for weight, want in expected.items():
        assert weight in model and model.shape(weight) == want.shape
        assert model.type(weight) not in ("I32", "U8", "U32", "I8")
        array = model.array(weight)
        assert isinstance(array, lowbit.QuantizedArray | lowbit.PermutedArray) and array.dtype == want.dtype
        assert_values(array.materialize(), want, name)
        assert_values(model.dense(weight, want.dtype), want, name)
        assert same_bits(model.dense(weight), wide(array))
        assert array.nbytes < 1.1 * model.nbytes(weight) <= 1.1 * sum(t.nbytes for t in tensors.values())
    # What is not quantized is there as it is stored.
    for other in set(model) - set(expected):
        assert same_bits(model.array(other), tensors[other])


@pytest.mark.parametrize("name", EACH_METHOD)
def test_products_and_files_keep_the_bits(name: str, tmp_path: Path) -> None:
    expected = checkpoint(name, tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "ours")
    loaded, saved = lowbit.load(tmp_path / "model"), lowbit.load(tmp_path / "ours")
    for weight, want in expected.items():
        assert_values(saved[weight].materialize(), want, name)
        np.testing.assert_array_equal(saved[weight].materialize(), loaded[weight].materialize())
        dense = HuggingFaceDir(tmp_path / "model").dense(weight)
        x = np.random.default_rng(0).standard_normal((3, want.shape[-1]), np.float32)
        got = lowbit.implicit(lambda w, x=x: x @ w.mT)(loaded[weight])
        # Codes with zero points lose digits where the product of the codes and that of the offsets cancel.
        np.testing.assert_allclose(got, x @ np.swapaxes(dense, -1, -2), rtol=1e-4, atol=4e-4 * abs(dense).max())


@pytest.mark.parametrize("name", EACH_METHOD)
def test_reading_in_chunks_gives_the_same_bits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = checkpoint(name, tmp_path / "model")
    whole = {weight: HuggingFaceDir(tmp_path / "model").array(weight) for weight in expected}
    for module, chunk in ((checkpoints._base, "_CHUNK"), (_chunks, "CHUNK")):
        monkeypatch.setattr(module, chunk, 1024)
    model = HuggingFaceDir(tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "ours")
    convert(
        tmp_path / "model", tmp_path / "again", rules={"re:.*(weight|proj)": lowbit.QuantizationConfig("int8", axis=-1)}
    )
    saved, again = lowbit.load(tmp_path / "ours"), lowbit.load(tmp_path / "again")
    for weight in expected:
        for array in (model.array(weight), saved[weight]):
            for component, want in whole[weight].components().items():
                assert same_bits(array.components()[component], want), component
        assert same_bits(model.dense(weight), wide(whole[weight]))
        dense = jnp.asarray(model.dense(weight))
        assert same_bits(again[weight].codes, lowbit.quantize(dense, "int8", axis=-1).codes)


@pytest.mark.parametrize("name", ORDERED)
def test_activation_order_is_a_permutation_of_the_inputs(name: str, tmp_path: Path) -> None:
    [(weight, want)] = checkpoint(name, tmp_path).items()
    model = HuggingFaceDir(tmp_path)
    found = model._weight(weight)
    assert isinstance(found, checkpoints.Weight) and found.order is not None
    assert_values(found.stored().materialize(), want[:, found.order], name)
    assert_values(model.dense(weight, want.dtype), want, name)
    array = model.array(weight)
    assert isinstance(array, lowbit.PermutedArray) and array.array.nbytes < want.nbytes / 2


@pytest.mark.parametrize("name", [name for name in ROUNDED if name.startswith("mlx")])
def test_the_stored_numbers_rounded_as_mlx_rounds_give_its_values(name: str, tmp_path: Path) -> None:
    [(weight, want)] = checkpoint(name, tmp_path).items()
    array = HuggingFaceDir(tmp_path).array(weight)
    scales, offsets = (np.repeat(array.components()[x], array.block_size, -1) for x in ("scales", "offsets"))
    plain = array.replace(scales=np.ones_like(array.scales), offsets=None, dtype=np.dtype(np.float32))
    assert same_bits(np.asarray(plain.materialize()).astype(want.dtype) * scales + offsets, want)


BLOCKS: dict[str, dict[int, int | None]] = {
    "gptq_4_sym_order": {-1: 32},
    "gptq_4_channel": {-1: None},
    "compressed_fp8_block": {-2: 16, -1: 16},
    "compressed_fp8_tensor": {-2: None, -1: None},
    "gpt_oss": {-2: 32},
    "bitsandbytes_fp4": {-1: 64},
}


@pytest.mark.parametrize("name", BLOCKS)
def test_inspect_shows_format_blocks_and_bits(name: str, tmp_path: Path) -> None:
    [weight] = checkpoint(name, tmp_path)
    model = HuggingFaceDir(tmp_path)
    assert model.blocks(weight) == BLOCKS[name] and not any(model.blocks(other) for other in set(model) - {weight})
    line = next(line.split() for line in run("inspect", tmp_path).output.splitlines() if line.startswith(f"{weight} "))
    blocks = [f"{size or 'all'}@{axis}" for axis, size in BLOCKS[name].items()]
    bits = 8 * model.nbytes(weight) / np.prod(model.shape(weight))
    assert line[2:] == [model.type(weight), *blocks, f"{model.nbytes(weight):,}", f"{bits:.2f}"]
