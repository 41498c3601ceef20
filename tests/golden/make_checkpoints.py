"""Make checkpoints/*.safetensors: one weight of each method and layout, with what its own decoder gives.

Run in an environment of its own (the tests read only the files):

    pip install torch==2.13.0 compressed-tensors==0.20.0 torchao==0.18.0 bitsandbytes==0.50.2 safetensors==0.8.0
    python tests/golden/make_checkpoints.py

A file has the stored tensors, `expected.NAME` for each weight, and in its metadata the config files of the model, by
name, and `maker`: the package that packed and decoded it, or "script" for what no package here can do, which is packed
below from the description of the layout.
"""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import numpy as np

OUT = Path(__file__).with_name("checkpoints")
MODULE = "model.layers.0.mlp.up_proj"


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32) * np.float32(0.02)


def write(name: str, tensors: dict[str, Any], config: dict[str, Any], maker: str, **files: Any) -> None:
    """Save tensors of torch or numpy; `config` is that of the quantization, `files` are other config files."""
    import torch
    from safetensors.torch import save_file

    def as_torch(x: Any) -> torch.Tensor:
        return (x if isinstance(x, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(x))).contiguous()

    version = "" if maker == "script" else f" {importlib.metadata.version(maker)}"
    about = {"config.json": json.dumps({"quantization_config": config} if config else {}), "maker": maker + version}
    about |= {key: json.dumps(value) for key, value in files.items()}
    save_file({key: as_torch(value) for key, value in tensors.items()}, OUT / f"{name}.safetensors", metadata=about)
    (OUT / f"{name}.safetensors").chmod(0o644)


def words(codes: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Codes as a continuous stream of bits in int32 words along an axis, the first code in the lowest bits."""
    moved = np.moveaxis(codes, axis, -1)
    places = moved[..., None] >> np.arange(bits) & 1
    stream = places.reshape(*moved.shape[:-1], -1).astype(np.uint8)
    packed = np.packbits(stream, axis=-1, bitorder="little").copy().view("<i4")
    return np.moveaxis(packed, -1, axis)


# --- packed by this script


def integers(seed: int, bits: int, group: int, *, sym: bool, out: int = 32, length: int = 128) -> tuple[Any, ...]:
    """Codes (in, out), zero points (groups, out) and float16 scales (groups, out) of random weights."""
    dice = np.random.default_rng(seed)
    groups = length // (length if group == -1 else group)
    codes = dice.integers(0, 2**bits, (length, out))
    zeros = np.full((groups, out), 2 ** (bits - 1)) if sym else dice.integers(0, 2**bits, (groups, out))
    scales = (np.abs(draw(seed, groups, out)) + 0.001).astype(np.float16)
    return codes, zeros, scales


def make_gptq() -> None:
    cases = [(bits, sym, version) for bits in (2, 3, 4, 8) for sym, version in ((True, "gptq"), (False, "gptq_v2"))]
    cases += [(4, False, "gptq"), (3, False, "gptq"), (4, True, "gptq_v2")]
    for seed, (bits, sym, version) in enumerate(cases):
        gptq(f"gptq_{bits}{'_sym' if sym else ''}{'_v2' if version == 'gptq_v2' else ''}", seed, bits, 32, sym, version)
    gptq("gptq_4_channel", 20, 4, -1, True, "gptq")
    gptq("gptq_4_sym_order", 21, 4, 32, True, "gptq", order=True)
    gptq("gptq_3_order", 22, 3, 32, False, "gptq", order=True)


def gptq(name: str, seed: int, bits: int, group: int, sym: bool, version: str, *, order: bool = False) -> None:
    codes, zeros, scales = integers(seed, bits, group, sym=sym)
    length = len(codes)
    g_idx = (np.arange(length) // (length if group == -1 else group)).astype(np.int32)
    if order:
        g_idx = np.random.default_rng(seed).permutation(g_idx).astype(np.int32)
    stored = zeros if version == "gptq_v2" else (zeros - 1) % 2**bits
    weight = scales[g_idx] * (codes - zeros[g_idx]).astype(np.float16)  # in float16, as the packages decode
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": order}
    config |= {"checkpoint_format": version} if version != "gptq" or sym else {}  # missing in older files
    write(
        name,
        {
            f"{MODULE}.qweight": words(codes, bits, 0),
            f"{MODULE}.qzeros": words(stored, bits, 1),
            f"{MODULE}.scales": scales,
            f"{MODULE}.g_idx": g_idx,
            f"{MODULE}.bias": draw(seed, 32).astype(np.float16),
            f"expected.{MODULE}.weight": weight.T,
        },
        config,
        "script",
    )


def make_awq() -> None:
    for name, group, sym in (("awq", 32, False), ("awq_channel", -1, False), ("awq_sym", 64, True)):
        codes, zeros, scales = integers(len(name), 4, group, sym=sym)
        columns = np.array([0, 2, 4, 6, 1, 3, 5, 7])

        def packed(values: np.ndarray, columns: np.ndarray = columns) -> np.ndarray:
            return words(values.reshape(len(values), -1, 8)[..., columns].reshape(values.shape), 4, 1)

        spread = len(codes) // len(scales)
        weight = np.repeat(scales, spread, 0) * (codes - np.repeat(zeros, spread, 0)).astype(np.float16)
        tensors = {
            f"{MODULE}.qweight": packed(codes),
            f"{MODULE}.qzeros": packed(zeros),
            f"{MODULE}.scales": scales,
            f"expected.{MODULE}.weight": weight.T,
        }
        config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
        write(name, tensors, config, "script")


MAKERS = {"gptq": make_gptq, "awq": make_awq}

if __name__ == "__main__":
    import sys

    OUT.mkdir(exist_ok=True)
    for method in sys.argv[1:] or MAKERS:
        for old in OUT.glob(f"{method}_*.safetensors"):
            old.unlink()
        MAKERS[method]()
    print(f"{len(list(OUT.iterdir()))} files, {sum(file.stat().st_size for file in OUT.iterdir())} bytes")
