"""A llama whose linear layers are stored by another project runs in the stored bits."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiers
from cli_helpers import huggingface_dir, run
from safetensors.numpy import load_file, save_file

import lowbit
from lowbit.demo.language_model import LanguageModel

GROUP = 32
CONFIGS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP},
    "gptq in activation order": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": GROUP}}},
    },
}


def words(codes: np.ndarray) -> np.ndarray:
    """Codes of 4 bits, eight in a word along the last axis, the first in the lowest bits."""
    eights = codes.reshape(*codes.shape[:-1], -1, 8).astype(np.uint32) << (4 * np.arange(8, dtype=np.uint32))
    return np.bitwise_or.reduce(eights, -1).view(np.int32)


def stored(module: str, weight: np.ndarray, method: str) -> dict[str, np.ndarray]:
    """The tensors of a linear layer (out, in), rounded to integers from -8 to 7."""
    out, length = weight.shape
    order = np.arange(length)
    if "order" in method:
        order = np.random.default_rng(length).permutation(length)
    blocks = weight[:, order].reshape(out, -1, GROUP)
    scales = (np.abs(blocks).max(-1) / 7).astype(np.float16)
    codes = np.empty((out, length))
    codes[:, order] = np.clip(np.rint(blocks / scales[..., None].astype(np.float32)), -8, 7).reshape(out, length) + 8
    if "gptq" in method:
        zeros = np.full((length // GROUP, out), 7)
        names = {"qweight": words(codes).T, "qzeros": words(zeros), "scales": scales.T}
        groups = np.empty(length, np.int32)
        groups[order] = np.arange(length) // GROUP
        names["g_idx"] = groups
    else:
        names = {"weight_packed": words(codes), "weight_scale": scales, "weight_shape": np.array([out, length])}
    return {f"{module}.{name}": np.array(tensor, order="C") for name, tensor in names.items()}


@pytest.mark.parametrize("method", tiers.tiered(CONFIGS, [*CONFIGS][1:2]))
def test_a_llama_runs_in_its_stored_bits(method: str, tiny: Path, tmp_path: Path) -> None:
    folder = huggingface_dir(tiny, tmp_path / "model")
    tensors = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        linear = weight.ndim == 2 and "embed" not in name
        tensors |= stored(name.removesuffix(".weight"), weight, method) if linear else {name: weight}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": CONFIGS[method]}
    (folder / "config.json").write_text(json.dumps(config))
    model, dense = LanguageModel.from_file(folder), LanguageModel.from_file(folder, "float32")
    layers = model.params["layers"]
    assert {name for name in layers if lowbit.is_quantized(layers[name])} == {"q", "k", "v", "o", "gate", "up", "down"}
    assert layers["up"].format_label == "int4"
    assert isinstance(layers["up"], lowbit.PermutedArray if "order" in method else lowbit.QuantizedArray)
    with lowbit.materialization("error"):
        assert model.logits([1, 5, 9]).shape[0] == 3
    np.testing.assert_allclose(model.logits([1, 5, 9]), dense.logits([1, 5, 9]), atol=1e-4)
    assert run("generate", "a", "--raw", "--model", folder, "--tokens", "2").output
