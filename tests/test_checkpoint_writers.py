"""Checkpoints of other projects that lowbit writes: their own readers, and ours, get the same bits."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tiers
from cli_helpers import run
from helpers import assert_same_bits

import lowbit
from lowbit.io import convert, open_tensors
from lowbit.io.checkpoints.writing import checkpoint_tensors, words_of

HALF = {"scale_dtype": jnp.float16}
AFFINE = {"offset": True, **HALF}


def weight(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    folder = tmp_path / "dense"
    folder.mkdir()
    tensors = {
        "model.embed_tokens.weight": weight(96, 64),
        "model.layers.0.mlp.up_proj.weight": weight(48, 64),
        "model.layers.0.mlp.down_proj.weight": weight(64, 128),
        "model.norm.weight": weight(64),
    }
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization": None}))
    return folder


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_words_are_a_stream_of_bits(bits: int) -> None:
    codes = np.random.default_rng(0).integers(0, 2**bits, (3, 67)).astype(np.uint8)
    words = words_of(codes, bits)
    assert words.shape == (3, -(-67 * bits // 32))
    for row, stored in zip(codes, words, strict=True):
        number = sum(int(word) << 32 * i for i, word in enumerate(stored))
        assert [number >> bits * i & 2**bits - 1 for i in range(67)] == row.tolist()


WAYS = [
    *(("compressed-tensors", f"int{bits}", {}) for bits in (2, 3, 4, 5, 6)),
    ("compressed-tensors", "int4", HALF | {"block_size": -1}),
    *(("mlx", f"int{bits}", AFFINE) for bits in (2, 3, 4, 5, 6)),
    ("mlx", "int4", HALF | {"block_size": 64}),
    ("mlx", "int8", HALF | {"block_size": 32}),
]


# Each number of bits in one of the two, and each layout of blocks; how bits become words is tested above for all.
FIRST_WAYS = [WAYS[i] for i in (0, 1, 5, 9, 10, 11, 12)]


@pytest.mark.parametrize(("to", "format", "options"), tiers.tiered(WAYS, FIRST_WAYS), ids=str)
def test_what_is_written_is_read_with_the_same_values(
    to: str, format: str, options: Any, dense: Path, tmp_path: Path
) -> None:
    rules = {"*proj*": lowbit.QuantizationConfig(format, axis=-1, **options)}
    convert(dense, tmp_path / "lowbit", rules=rules)
    convert(tmp_path / "lowbit", tmp_path / "other", to=to)
    stored, other = open_tensors(tmp_path / "lowbit"), open_tensors(tmp_path / "other")
    assert {*stored} == {*other}
    for name in stored:
        np.testing.assert_array_equal(other.dense(name), stored.dense(name), err_msg=name)
        assert other.type(name) == stored.type(name) or (format, to) == ("int8", "mlx"), name
    # And back: the bits of a checkpoint are those of a lowbit file.
    convert(tmp_path / "other", tmp_path / "again")
    again = open_tensors(tmp_path / "again")
    for name in stored:
        if lowbit.is_quantized(other.array(name)):
            assert_same_bits(again.array(name), other.array(name))


@pytest.mark.parametrize("to", ["compressed-tensors", "mlx"])
def test_the_command_quantizes_to_what_the_target_holds(to: str, dense: Path, tmp_path: Path) -> None:
    run("quantize", dense, tmp_path / "other", "--to", to)
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    reader = open_tensors(tmp_path / "other")
    assert reader.type("model.layers.0.mlp.up_proj.weight") == "int4"
    if to == "mlx":
        assert config["quantization"] == {"group_size": 32, "bits": 4, "mode": "affine"}
        assert "quantization_config" not in config
    else:
        groups = config["quantization_config"]["config_groups"]
        modules = ["model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"]
        assert sorted(groups["group_0"]["targets"]) == sorted(modules)
        assert groups["group_0"]["weights"]["num_bits"] == 4
        assert reader.type("model.embed_tokens.weight") == "F32"


def test_a_dense_linear_layer_is_no_target(dense: Path, tmp_path: Path) -> None:
    rules = {"*up_proj*": lowbit.QuantizationConfig("int4", axis=-1)}
    convert(dense, tmp_path / "other", rules=rules, to="compressed-tensors")
    config = json.loads((tmp_path / "other" / "config.json").read_text())["quantization_config"]
    assert [group["targets"] for group in config["config_groups"].values()] == [["model.layers.0.mlp.up_proj"]]


def test_several_schemes_name_their_modules(dense: Path, tmp_path: Path) -> None:
    rules = {
        "*up_proj*": lowbit.QuantizationConfig("int4", axis=-1),
        "*down*": lowbit.QuantizationConfig("int3", axis=-1),
    }
    convert(dense, tmp_path / "other", rules=rules, to="compressed-tensors")
    config = json.loads((tmp_path / "other" / "config.json").read_text())["quantization_config"]
    targets = {group["weights"]["num_bits"]: group["targets"] for group in config["config_groups"].values()}
    assert targets == {4: ["model.layers.0.mlp.up_proj"], 3: ["model.layers.0.mlp.down_proj"]}
    assert open_tensors(tmp_path / "other").type("model.layers.0.mlp.down_proj.weight") == "int3"


@pytest.mark.parametrize(
    ("to", "format", "options", "message"),
    [
        ("compressed-tensors", "nf4", {}, "it is nf4, not integers of 2, 3, 4, 5, 6 bits"),
        ("compressed-tensors", "int4", AFFINE, "it has offsets that are floats, not zero points"),
        ("compressed-tensors", "int4", {"axis": -2}, "its scales lie along axis -2, not the last one"),
        ("mlx", "q4", {}, "it is q4, not integers"),
        ("mlx", "int4", {}, "its scales are float32, .* scale_dtype=float16"),
        ("mlx", "int4", AFFINE | {"block_size": 24}, "its blocks of 24 are not one of 16, 32, 64, 128"),
    ],
)
def test_what_a_target_cannot_hold_is_refused(to: str, format: str, options: Any, message: str) -> None:
    array: Any = lowbit.quantize(jnp.asarray(weight(48, 96)), format, **({"axis": -1} | options))
    with pytest.raises(ValueError, match=f"Cannot write 'w' for {to} with its stored bits: {message}"):
        checkpoint_tensors(to, "w", array)


def test_a_format_that_does_not_fit_is_refused_before_anything_is_read(dense: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot hold .* as q4: an MLX file holds integers"):
        convert(dense, tmp_path / "other", rules="q4", to="mlx")
    assert not (tmp_path / "other").exists()
    with pytest.raises(ValueError, match="is a file, and mlx stores weights in a directory"):
        convert(dense / "model.safetensors", tmp_path / "other", rules="int4", to="mlx")
