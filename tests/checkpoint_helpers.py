"""Golden checkpoints of other projects, as directories of a model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import tiers
from exchange_helpers import stored
from safetensors import safe_open
from safetensors.numpy import save_file

CHECKPOINTS = {path.stem: path for path in sorted((Path(__file__).parent / "golden" / "checkpoints").iterdir())}
# One or two checkpoints of each method, those with the most components, for tests in the first tier.
FIRST = """
    awq bitsandbytes_fp4_nested bitsandbytes_int8 compressed_fp8_block compressed_int_zero compressed_mxfp4
    compressed_nvfp4 compressed_pack_3_zero compressed_pack_4_order fp8_block gpt_oss gptq_3_order gptq_4_sym_v2
    mlx_affine_6_bfloat16 mlx_nvfp4_4 modelopt_nvfp4 torchao_fp8 torchao_int4_zero
""".split()
EACH_METHOD = tiers.tiered(CHECKPOINTS, FIRST)


def metadata(name: str) -> dict[str, Any]:
    with safe_open(CHECKPOINTS[name], framework="np") as file:
        return file.metadata()


def tensors_of(name: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The stored tensors of a golden checkpoint, and the expected values of its weights by name."""
    tensors = stored(CHECKPOINTS[name])
    expected = {key.removeprefix("expected."): tensors.pop(key) for key in list(tensors) if key.startswith("expected.")}
    return tensors, expected


def checkpoint(name: str, path: Path, **changed: Any) -> dict[str, np.ndarray]:
    """Write a golden checkpoint as a directory, with options of its config changed; returns the expected values."""
    tensors, expected = tensors_of(name)
    path.mkdir(exist_ok=True)
    about = metadata(name)
    for file in (key for key in about if key.endswith(".json")):
        contents = json.loads(about[file])
        for place in contents.values():
            if isinstance(place, dict):
                place.update(changed)
        (path / file).write_text(json.dumps(contents))
    own = {key: about[key] for key in about if not key.endswith(".json") and key != "maker"}
    save_file({key: np.array(value, order="C") for key, value in tensors.items()}, path / "model.safetensors", own)
    return expected
