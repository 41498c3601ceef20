"""Quantized checkpoints of other projects, one module for each method: which tensors are a weight, and what they mean.

A method is a `Method` in `METHODS`: the names that configs have for it, and a function that finds its weights among the
names of tensors. What is found is read to a `Weight`, which gives the array with the stored bits, or dense values.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._checks import bad_tensor, short
from .._dtypes import DTYPES
from ._base import Found, Method, Settings, Tensors, Weight
from .awq import AWQ
from .bitsandbytes import BITSANDBYTES
from .compressed_tensors import COMPRESSED_TENSORS
from .fp8 import FP8
from .gpt_oss import GPT_OSS
from .gptq import GPTQ
from .mlx import MLX
from .modelopt import MODELOPT
from .torchao import TORCHAO

__all__ = ["CONFIGS", "METHODS", "Found", "Settings", "Tensors", "Weight", "detect", "refusal", "settings_of"]

METHODS: tuple[Method, ...] = (GPTQ, AWQ, COMPRESSED_TENSORS, FP8, GPT_OSS, MODELOPT, MLX, BITSANDBYTES, TORCHAO)
"""The methods whose weights can be read."""

CONFIGS = ("config.json", "quantize_config.json", "hf_quant_config.json")
"""The files that may say how a model is quantized."""

_REFUSED = {
    "hqq": "its tensors are in the order of its own GPU kernels, with the layout in pickled or encoded metadata",
    "aqlm": "its codes choose vectors from codebooks",
    "vptq": "its codes choose vectors from codebooks",
    "quip": "its codes choose vectors from codebooks, in a rotated basis",
    "higgs": "its codes choose vectors from codebooks, in a rotated basis",
    "spqr": "it keeps outliers in a sparse matrix",
    "bitnet": "its rows are interleaved for its own kernels",
    "eetq": "its codes are in the order of a GPU kernel",
    "quark": "its layouts are not documented",
    "auto-round": "save it with the format auto_gptq, auto_awq or llm_compressor",
}
"""Methods that are known and cannot be read, and why."""

_DTYPES = {DTYPES[kind].name: DTYPES[kind] for kind in ("F32", "F16", "BF16")}


def settings_of(path: Path, configs: Mapping[str, Any], metadata: Mapping[str, Any]) -> Settings:
    """What `CONFIGS`, by name, and the metadata of safetensors files say about how a model is quantized."""
    model = configs.get("config.json", {})
    inner = model.get("text_config")  # models for images and text have the config of the language model in here
    places = [model, inner if type(inner) is dict else {}]
    named = (place.get("torch_dtype", place.get("dtype")) for place in places)
    dtype = next((_DTYPES[name] for name in named if type(name) is str and name in _DTYPES), None)

    def settings(method: Any, options: Any) -> Settings:
        if type(options) is not dict:
            raise ValueError(f"{path} has the quantization config {short(options)}, which is not an object.")
        return Settings(path, str(method or "").lower().replace("_", "-"), options, dtype, metadata)

    for place in places:
        for key in ("quantization_config", "compression_config"):
            if place.get(key) is not None:
                options = place[key]
                # MLX writes its options under this name too.
                unnamed = "mlx" if "quantization" in model else None
                return settings(options.get("quant_method", unnamed) if type(options) is dict else None, options)
    if "quantize_config.json" in configs:
        found = configs["quantize_config.json"]
        return settings(found.get("quant_method", "gptq"), found)
    if "hf_quant_config.json" in configs:
        return settings("modelopt", configs["hf_quant_config.json"].get("quantization"))
    if model.get("quantization") is not None:
        return settings("mlx", model["quantization"])
    return settings("", {})


def refusal(settings: Settings, names: Mapping[str, Any]) -> str:
    """Why a checkpoint cannot be read; empty if it can be."""
    if settings.method:
        if any(settings.method in method.names for method in METHODS):
            return ""
        known = ", ".join(method.title for method in METHODS)
        reason = _REFUSED.get(settings.method, f"lowbit reads {known}, and dense models")
        return f"{settings.path} was quantized by {settings.method}, which cannot be read: {reason}."
    for method in METHODS:
        if method.needs_config and (found := next((name for name in names if name.endswith(method.mark)), None)):
            return (
                f"{settings.path} has the tensor {short(found)}, as {method.title} stores it, and no config that says "
                "how it is quantized. Open the directory with its config.json."
            )
    return ""


def detect(settings: Settings, names: Mapping[str, Any]) -> dict[str, Found]:
    """The quantized weights of a checkpoint by name, from the names of its tensors. Empty if it cannot be read."""
    weights: dict[str, Found] = {}
    owners: dict[str, str] = {}
    for method in METHODS:
        if settings.method in method.names if settings.method else not method.needs_config:
            for found in method.find(names, settings):
                weights[found.name] = found
                for stored in found.stored.values():
                    if owners.setdefault(stored, found.name) != found.name:
                        raise bad_tensor(settings.path, stored, f"belongs to {owners[stored]!r} and {found.name!r}")
    for name in weights:
        if name in names and owners.get(name) != name:
            raise bad_tensor(settings.path, name, f"is there beside {next(iter(weights[name].stored.values()))!r}")
    return weights
