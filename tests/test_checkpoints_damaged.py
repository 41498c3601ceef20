"""Quantized checkpoints that are inconsistent, in several files, overridden by layer, or of unknown methods."""

import json
import random
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_helpers import EACH_METHOD, checkpoint, metadata, tensors_of
from exchange_helpers import FIRST, INDEX, SECOND, same_bits
from files_helpers import mutated
from safetensors.numpy import save_file

import lowbit
from lowbit.io import HuggingFaceDir, SafetensorsFile, checkpoints, open_tensors

MODULE = "model.layers.0.mlp.up_proj"
Change = Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]


def without(role: str) -> Change:
    return lambda tensors: {name: x for name, x in tensors.items() if not name.endswith(f".{role}")}


def instead(role: str, change: Callable[[np.ndarray], Any]) -> Change:
    return lambda tensors: {n: np.asarray(change(x)) if n.endswith(f".{role}") else x for n, x in tensors.items()}


def beside(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {**tensors, f"{MODULE}.weight": np.zeros((2, 2), np.float32)}


def numbers(x: np.ndarray, *values: int) -> np.ndarray:
    found = x.copy()
    found[: len(values)] = values
    return found


INCONSISTENT: dict[str, tuple[str, Change, str]] = {
    "gptq lacks": ("gptq_4", without("scales"), "lacks 'model.*up_proj.scales'"),
    "gptq beside": ("gptq_4", beside, "is there beside 'model.*qweight'"),
    "gptq short": (
        "gptq_4",
        instead("qweight", lambda x: x[:, :31]),
        r"has qweight of shape \(16, 31\), not \(any, 32\)",
    ),
    "gptq rows": ("gptq_3", instead("qweight", lambda x: x[:11]), r"has g_idx of shape \(128,\), not \(117\)"),
    "gptq dtype": ("gptq_4", instead("qweight", lambda x: x.astype(np.int64)), "has qweight of int64, not int32"),
    "gptq zeros": ("gptq_4", instead("qzeros", lambda x: x[:, :1]), "has 1 words of zero points for 32 outputs"),
    "gptq groups": ("gptq_4", instead("qzeros", lambda x: x[:3]), r"has qzeros of shape \(3, 4\), not \(4, any\)"),
    "gptq no groups": ("gptq_4", instead("scales", lambda x: x[:0]), r"has qzeros of shape \(4, 4\), not \(0, any\)"),
    "gptq vector": ("gptq_4", instead("scales", lambda x: x[0]), r"has scales of shape \(32,\)"),
    "gptq g_idx": ("gptq_4", instead("g_idx", lambda x: numbers(x, 4)), "has a g_idx from 0 to 4, and 4 groups"),
    "gptq g_idx low": ("gptq_4", instead("g_idx", lambda x: numbers(x, -5)), "has a g_idx from -1 to 3"),
    "gptq g_idx uneven": ("gptq_4", instead("g_idx", lambda x: numbers(x, 3)), "whose groups are not of 32 inputs"),
    "gptq g_idx short": ("gptq_4", instead("g_idx", lambda x: x[1:]), r"has g_idx of shape \(127,\), not \(128\)"),
    "awq": ("awq", instead("qweight", lambda x: x[:, 1:]), r"has qweight of shape \(128, 3\), not \(any, 4\)"),
    "awq groups": ("awq", instead("qweight", lambda x: x[:2]), "has 4 groups along 2 elements"),
    "packed width": ("compressed_pack_4", instead("weight_packed", lambda x: x[:, 1:]), "has 15 words for 128 inputs"),
    "packed shape": ("compressed_pack_4", instead("weight_shape", lambda x: x + 1), r"its weight_shape is \[33, 129\]"),
    "packed huge": (
        "compressed_pack_4",
        instead("weight_shape", lambda x: np.array([32, 1 << 62])),
        "has 16 words for 4611686018427387904 inputs",
    ),
    "packed negative": ("compressed_pack_4", instead("weight_shape", lambda x: -x), r"weight_shape is \[-32, -128\]"),
    "packed no shape": ("compressed_pack_4", without("weight_shape"), "lacks its weight_shape"),
    "packed no scale": ("compressed_pack_4", without("weight_scale"), "lacks its weight_scale"),
    "packed scale": (
        "compressed_pack_4",
        instead("weight_scale", lambda x: x[:, :3]),
        "has 3 groups along 128 elements",
    ),
    "packed zeros": (
        "compressed_pack_4_zero",
        instead("weight_zero_point", lambda x: x[1:]),
        r"has weight_zero_point of shape \(3, 4\), not \(4, 4\)",
    ),
    "fp8 scales": ("fp8_block", instead("weight_scale_inv", lambda x: x[:, :1]), r"has scales of shape \(2, 1\) for"),
    "fp8 dtype": ("fp8_block", instead("weight", lambda x: x.view(np.uint8)), "has weight of uint8, not float8_e4m3fn"),
    "nvfp4 scales": (
        "compressed_nvfp4",
        instead("weight_scale", lambda x: x[:, :2]),
        r"has weight_scale of shape \(32, 2\), not \(32, 4\)",
    ),
    "nvfp4 global": (
        "compressed_nvfp4",
        instead("weight_global_scale", lambda x: np.ones(3, np.float32)),
        "has 3 global",
    ),
    "modelopt": ("modelopt_nvfp4", instead("weight_scale_2", lambda x: np.ones(2, np.float32)), "has 2 numbers as"),
    "mlx": ("mlx_affine_3", instead("scales", lambda x: x[:, 1:]), r"has scales of shape \(32, 3\), not \(32, 4\)"),
    "mlx words": ("mlx_affine_3", instead("weight", lambda x: x[:, 1:]), "has 11 words in a row, which are not groups"),
    "mlx biases": ("mlx_affine_3", without("biases"), "lacks its biases"),
    "torchao": ("torchao_int4_zero", instead("_weight_scale", lambda x: x[1:]), r"has scales of shape \(31, 4\)"),
    "torchao codes": (
        "torchao_int3",
        instead("_weight_qdata", lambda x: x * 0 + 9),
        "codes that are not integers of 3",
    ),
    "int8": ("bitsandbytes_int8", instead("SCB", lambda x: x[1:]), r"has SCB of shape \(31,\), not \(32\)"),
    "int8 order": ("bitsandbytes_int8", instead("weight_format", lambda x: x + 1), "has the weight_format 1"),
}


@pytest.mark.parametrize("case", INCONSISTENT)
def test_an_inconsistent_checkpoint_raises_one_error(case: str, tmp_path: Path) -> None:
    name, change, message = INCONSISTENT[case]
    checkpoint(name, tmp_path)
    tensors = {key: np.array(x, order="C") for key, x in change(tensors_of(name)[0]).items()}
    own = {key: value for key, value in metadata(name).items() if not key.endswith(".json")}
    save_file(tensors, tmp_path / "model.safetensors", own)
    tracemalloc.start()
    with pytest.raises(ValueError) as error:
        HuggingFaceDir(tmp_path).array(f"{MODULE}.weight")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert re.search(f"{tmp_path}.* cannot be read: tensor '{MODULE}.weight' .*{message}", str(error.value)), (
        error.value
    )
    assert peak < 1 << 20


OPTIONS: dict[str, tuple[str, dict[str, Any], str]] = {
    "gptq bits": ("gptq_4", {"bits": 5}, "is quantized by gptq with bits 5, and only 2, 3, 4, 8"),
    "gptq text": ("gptq_4", {"bits": "4"}, "with bits '4'"),
    "gptq planes": ("gptq_4", {"checkpoint_format": "gptq_p"}, "with checkpoint_format 'gptq_p'"),
    "gptq marlin": ("gptq_4", {"is_marlin_format": True}, "with codes in the order of the Marlin kernel"),
    "gptq words": ("gptq_4", {"pack_dtype": "int16"}, "with pack_dtype 'int16'"),
    "awq version": ("awq", {"version": "gemv"}, "is quantized by awq with version 'gemv', and only 'gemm'"),
    "sparse": ("compressed_int", {"format": "marlin-24"}, "with the format 'marlin-24', and only pack-quantized"),
    "e5m2": ("fp8_block", {"fmt": "e5m2"}, "with fmt 'e5m2'"),
    "modelopt": ("modelopt_fp8", {"quant_algo": "W4A8_AWQ"}, "with quant_algo 'W4A8_AWQ'"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_that_cannot_be_read_are_refused_by_name(case: str, tmp_path: Path) -> None:
    name, options, message = OPTIONS[case]
    checkpoint(name, tmp_path, **options)
    with pytest.raises(ValueError) as error:
        HuggingFaceDir(tmp_path)
    assert re.search(f"{tmp_path} .*{message}", str(error.value)), error.value


@pytest.mark.parametrize("method", ["hqq", "aqlm", "vptq", "spqr", "auto-round", "quark", "something"])
def test_methods_that_cannot_be_read_are_refused_before_anything_is_read(method: str, tmp_path: Path) -> None:
    checkpoint("gptq_4", tmp_path, quant_method=method)
    model = HuggingFaceDir(tmp_path)
    assert f"{MODULE}.qweight" in model  # its tensors can be listed
    with pytest.raises(ValueError, match=f"{tmp_path} was quantized by {method}, which cannot be read: "):
        lowbit.load(tmp_path)


def test_a_file_without_its_config_is_refused_where_the_tensors_do_not_say_enough(tmp_path: Path) -> None:
    for name in ("gptq_4", "compressed_pack_4", "mlx_affine_4", "modelopt_nvfp4"):
        checkpoint(name, tmp_path)
        with pytest.raises(ValueError, match=r"model.safetensors has the tensor .* no config .* Open the directory"):
            lowbit.load(tmp_path / "model.safetensors")
    for name in ("fp8_block", "gpt_oss", "bitsandbytes_int8", "bitsandbytes_fp4", "torchao_int8"):
        for weight, want in checkpoint(name, tmp_path).items():
            array = SafetensorsFile(tmp_path / "model.safetensors").array(weight)
            np.testing.assert_allclose(np.asarray(array.materialize(), np.float32), want.astype(np.float32), rtol=1e-2)


def test_pickled_weights_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(ValueError, match=r"pytorch_model.bin may run any code when it is opened"):
        open_tensors(tmp_path)
    for start in (b"\x80\x04", b"PK\x03\x04"):
        (tmp_path / "pytorch_model.bin").write_bytes(start + bytes(64))
        with pytest.raises(ValueError, match=r"pytorch_model.bin is a pickle"):
            open_tensors(tmp_path / "pytorch_model.bin")


@pytest.mark.parametrize("name", ["gptq_4", "compressed_nvfp4", "gpt_oss", "torchao_int4_zero"])
def test_the_tensors_of_a_weight_may_be_in_several_files(name: str, tmp_path: Path) -> None:
    expected = checkpoint(name, tmp_path)
    tensors = tensors_of(name)[0]
    own = {key: value for key, value in metadata(name).items() if not key.endswith(".json")}
    (tmp_path / "model.safetensors").unlink()
    halves = {FIRST: list(tensors)[::2], SECOND: list(tensors)[1::2]}
    for file, names in halves.items():
        save_file({key: np.array(tensors[key], order="C") for key in names}, tmp_path / file, own)
    index = {"weight_map": {key: file for file, names in halves.items() for key in names}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    for weight, want in expected.items():
        np.testing.assert_array_equal(lowbit.load(tmp_path)[weight].materialize(), want)


def test_bits_and_groups_that_are_overridden_for_a_layer_are_seen_from_its_tensors(tmp_path: Path) -> None:
    first, second = "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"
    expected = checkpoint("gptq_3", tmp_path, dynamic={r"+:.*\.1\..*": {"bits": 8}, "-:lm_head": {}})
    tensors = tensors_of("gptq_3")[0] | {"lm_head.weight": np.ones((4, 128), np.float16)}
    other, wanted = tensors_of("gptq_8_sym")
    tensors |= {key.replace(first, second): x for key, x in other.items()}
    save_file({key: np.array(x, order="C") for key, x in tensors.items()}, tmp_path / "model.safetensors")
    model = HuggingFaceDir(tmp_path)
    assert [model.type(f"{m}.weight") for m in (first, second, "lm_head")] == ["int3", "int8", "F16"]
    # The zero points of the second layer are stored in the other version, minus one.
    for module, want in ((first, expected), (second, wanted)):
        np.testing.assert_array_equal(model.array(f"{module}.weight").materialize(), want[f"{first}.weight"])


def test_places_of_the_config(tmp_path: Path) -> None:
    """MLX writes its options twice, models for images and text in an inner config, AutoGPTQ in a file of its own."""
    cases = {"mlx_affine_4": lambda found: found | {"quantization_config": found["quantization"]}}
    cases["gptq_4"] = lambda found: {"text_config": found}
    for name, change in cases.items():
        [(weight, want)] = checkpoint(name, tmp_path).items()
        config = tmp_path / "config.json"
        config.write_text(json.dumps(change(json.loads(config.read_text()))))
        np.testing.assert_array_equal(HuggingFaceDir(tmp_path).array(weight).materialize(), want)
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 32}))
    config.write_text("{}")
    np.testing.assert_array_equal(HuggingFaceDir(tmp_path).array(weight).materialize(), want)


def test_names_that_end_as_those_of_a_method_are_dense_tensors_in_other_models(tmp_path: Path) -> None:
    tensors = {"down.blocks": np.ones(3, np.float32), "up_blocks": np.ones(3, np.float32), "a.scales": np.ones(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    for reader in (SafetensorsFile(tmp_path / "model.safetensors"), HuggingFaceDir(tmp_path)):
        assert set(reader) == set(tensors) and not reader.refusal


def test_weights_of_deepseek_v4_are_refused(tmp_path: Path) -> None:
    checkpoint("fp8_block", tmp_path)
    tensors = {"e.weight": np.ones((4, 4), np.int8), "e.scale": np.ones((4, 1), np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"is quantized by fp8 with 'e.scale': .* cannot be read"):
        HuggingFaceDir(tmp_path)


@pytest.mark.parametrize("name", EACH_METHOD)
def test_changed_files_are_read_or_refused(name: str, tmp_path: Path) -> None:
    checkpoint(name, tmp_path)
    dice = random.Random(name)
    for path in (tmp_path / "model.safetensors", tmp_path / "config.json"):
        contents = path.read_bytes()
        for _ in range(20):
            path.write_bytes(mutated(contents, dice))
            try:
                model = HuggingFaceDir(tmp_path)
                for tensor in model:
                    assert model.array(tensor).shape == model.shape(tensor) and model.type(tensor)
            except ValueError as error:
                assert str(tmp_path) in str(error)
        path.write_bytes(contents)
    assert same_bits(*(HuggingFaceDir(tmp_path).dense(next(iter(tensors_of(name)[1]))) for _ in range(2)))


def test_every_method_is_in_the_table_of_the_page() -> None:
    page = (Path(__file__).parent.parent / "docs" / "checkpoints.md").read_text("utf-8")
    for method in checkpoints.METHODS:
        assert f"| {method.title}" in page, method.title
