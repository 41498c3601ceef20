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


def write(
    name: str, tensors: dict[str, Any], config: dict[str, Any], maker: str, dtype: str = "", **files: Any
) -> None:
    """Save tensors of torch or numpy; `config` is that of the quantization, `files` are other config files."""
    import torch
    from safetensors.torch import save_file

    def as_torch(x: Any) -> torch.Tensor:
        return (x if isinstance(x, torch.Tensor) else torch.from_numpy(np.array(x, order="C"))).contiguous()

    version = "" if maker == "script" else f" {importlib.metadata.version(maker)}"
    model = {"quantization_config": config} | ({"torch_dtype": dtype} if dtype else {})
    about = {"config.json": json.dumps(model if config else {}), "maker": maker + version}
    about |= {key: value if isinstance(value, str) else json.dumps(value) for key, value in files.items()}
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


LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def float4(seed: int, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Random E2M1 codes, two in a byte, the first in the low nibble, and their levels."""
    codes = np.random.default_rng(seed).integers(0, 16, shape)
    return (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8), LEVELS[codes]


def make_fp8() -> None:
    """DeepSeek-V3, with short blocks at both edges; compressed-tensors reads it back."""
    import torch
    from compressed_tensors.entrypoints.convert import FP8BlockDequantizer

    weight = torch.from_numpy(draw(5, 150, 140) * 5000).to(torch.float8_e4m3fn)
    scales = torch.from_numpy(np.abs(draw(6, 2, 2)))
    stored = {f"{MODULE}.weight": weight, f"{MODULE}.weight_scale_inv": scales}
    converter = FP8BlockDequantizer(targets=["re:.*up_proj"], weight_block_size=(128, 128))
    expected = converter.process(dict(stored))[f"{MODULE}.weight"]
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    write("fp8_block", stored | {f"expected.{MODULE}.weight": expected}, config, "compressed-tensors", "bfloat16")


def make_gpt_oss() -> None:
    """As transformers and OpenAI store it; the exponents reach beyond those of float16."""
    stored, levels = float4(7, 2, 6, 64)
    scales = np.random.default_rng(8).integers(100, 140, (2, 6, 2)).astype(np.uint8)
    weight = levels * np.exp2(np.repeat(scales, 32, -1).astype(np.float32) - 127)
    blocks, name = stored.reshape(2, 6, 2, 16), "model.layers.0.mlp.experts.gate_up_proj"
    tensors = {f"{name}_blocks": blocks, f"{name}_scales": scales, f"{name}_bias": draw(9, 2, 6)}
    tensors |= {f"expected.{name}": weight.swapaxes(1, 2)}
    write("gpt_oss", tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, "script")
    name = "block.0.mlp.mlp1_weight"
    write(
        "gpt_oss_openai", {f"{name}.blocks": blocks, f"{name}.scales": scales, f"expected.{name}": weight}, {}, "script"
    )


def make_modelopt() -> None:
    import torch

    stored, levels = float4(10, 32, 64)
    scales = torch.from_numpy(np.abs(draw(11, 32, 4)) * 1000).to(torch.float8_e4m3fn)
    second = np.float32(0.0123)
    weight = levels * np.repeat(scales.to(torch.float32).numpy() * second, 16, -1)
    tensors = {f"{MODULE}.weight": stored, f"{MODULE}.weight_scale": scales, f"{MODULE}.weight_scale_2": second[...]}
    tensors |= {f"{MODULE}.input_scale": np.float32(0.5)[...], f"expected.{MODULE}.weight": weight}
    about = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16}}
    write("modelopt_nvfp4", tensors, {}, "script", **{"hf_quant_config.json": about})
    codes = torch.from_numpy(draw(12, 32, 64) * 5000).to(torch.float8_e4m3fn)
    tensors = {f"{MODULE}.weight": codes, f"{MODULE}.weight_scale": second[...]}
    tensors |= {f"expected.{MODULE}.weight": codes.to(torch.float32).numpy() * second}
    write("modelopt_fp8", tensors, {"quant_method": "modelopt", "quant_algo": "FP8"}, "script")


# --- by compressed-tensors


def scheme_of(bits: int, kind: str = "int", **weights: Any) -> dict[str, Any]:
    """The options of weights in a config."""
    return {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": False, **weights}


def compress(
    name: str, format: str, shape: tuple[int, int], scales: Any, weights: dict[str, Any], **state: Any
) -> None:
    """Compress random weights by these scales, and save them with what they decompress to."""
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    weight = torch.from_numpy(draw(len(name), *shape)).to(scales.dtype)
    kept = {"weight": weight, "weight_scale": scales, **state}
    packer = BaseCompressor.get_value_from_registry(format)
    stored = packer.compress(kept, scheme)
    expected = packer.decompress(stored, scheme)["weight"]
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "format": format}
    config = {"quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"]}
    config |= {"config_groups": {"group_0": group}, "quantization_status": "compressed"}
    tensors = {f"{MODULE}.{key}": value for key, value in stored.items()} | {f"expected.{MODULE}.weight": expected}
    write(name, tensors, config, "compressed-tensors", dtype=str(expected.dtype).removeprefix("torch."))


def make_compressed() -> None:
    import torch

    def scales(dtype: str, *shape: int) -> torch.Tensor:
        return (torch.from_numpy(np.abs(draw(1, *shape))) * 0.3 + 0.002).to(getattr(torch, dtype))

    def zeros(bits: int, *shape: int) -> torch.Tensor:
        low = -(2 ** (bits - 1))
        return torch.from_numpy(np.random.default_rng(bits).integers(low, -low, shape).astype(np.int8))

    group = {"strategy": "group", "group_size": 32}
    for bits in (2, 3, 4, 5, 6, 8):
        compress(
            f"compressed_pack_{bits}", "pack-quantized", (32, 128), scales("float16", 32, 4), scheme_of(bits, **group)
        )
    for bits in (3, 4, 8):
        options = {"weight_zero_point": zeros(bits, 32, 4)}
        scheme = scheme_of(bits, **group) | {"symmetric": False}
        compress(
            f"compressed_pack_{bits}_zero", "pack-quantized", (32, 128), scales("bfloat16", 32, 4), scheme, **options
        )
    channel = {"strategy": "channel"}
    compress("compressed_pack_channel", "pack-quantized", (30, 70), scales("float32", 30, 1), scheme_of(4, **channel))
    compress(
        "compressed_pack_channel_zero",
        "pack-quantized",
        (30, 70),
        scales("float32", 30, 1),
        scheme_of(4, **channel) | {"symmetric": False},
        weight_zero_point=zeros(4, 30, 1),
    )
    compress("compressed_int", "int-quantized", (32, 64), scales("bfloat16", 32, 1), scheme_of(8, **channel))
    compress(
        "compressed_int_zero",
        "int-quantized",
        (32, 64),
        scales("float32", 32, 1),
        scheme_of(8, **channel) | {"symmetric": False},
        weight_zero_point=zeros(8, 32, 1),
    )
    floats = {"kind": "float", "bits": 8}
    block = scheme_of(**floats, strategy="block", block_structure=[16, 16])
    compress("compressed_fp8", "float-quantized", (32, 64), scales("bfloat16", 32, 1), scheme_of(**floats, **channel))
    compress(
        "compressed_fp8_tensor",
        "float-quantized",
        (32, 64),
        scales("float32", 1),
        scheme_of(**floats, strategy="tensor"),
    )
    compress("compressed_fp8_block", "float-quantized", (40, 72), scales("float32", 3, 5), block)
    make_compressed_float4(scales)


def make_compressed_float4(scales: Any) -> None:
    import torch

    float4 = {"kind": "float", "bits": 4}
    compress(
        "compressed_nvfp4",
        "nvfp4-pack-quantized",
        (32, 64),
        (scales("float32", 32, 4) * 700).to(torch.float8_e4m3fn).to(torch.float32),
        scheme_of(**float4, strategy="tensor_group", group_size=16),
        weight_global_scale=torch.tensor([700.0]),
    )
    powers = 2.0 ** torch.floor(torch.log2(scales("float32", 32, 2)))
    mx = {"strategy": "group", "group_size": 32}
    compress("compressed_mxfp4", "mxfp4-pack-quantized", (32, 64), powers, scheme_of(**float4, **mx))
    compress(
        "compressed_mxfp8",
        "mxfp8-quantized",
        (32, 64),
        powers,
        scheme_of(8, "float", **mx) | {"scale_dtype": "torch.uint8"},
    )


def make_compressed_by_hand() -> None:
    """What the present version does not write: the packing before 2026-05, and activation order."""
    for name, bits, old in (("compressed_pack_3_old", 3, True), ("compressed_pack_4_order", 4, False)):
        codes, _, scales = integers(bits, bits, 32, sym=True)
        codes, scales = codes.T, scales.T
        g_idx = np.arange(128, dtype=np.int32) // 32
        if old:
            padded = np.pad(codes, ((0, 0), (0, -128 % 10))).reshape(32, -1, 10)
            packed = (padded << bits * np.arange(10)).sum(-1).astype(np.int32)
        else:
            packed, g_idx = words(codes, bits, 1), np.random.default_rng(0).permutation(g_idx)
        weight = scales[:, g_idx] * (codes - 2 ** (bits - 1)).astype(np.float16)
        stored = {"weight_packed": packed, "weight_scale": scales, "weight_shape": np.array([32, 128])}
        stored |= {} if old else {"weight_g_idx": g_idx}
        group = {"targets": ["Linear"], "weights": scheme_of(bits, strategy="group", group_size=32)}
        config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
        tensors = {f"{MODULE}.{key}": value for key, value in stored.items()}
        write(name, tensors | {f"expected.{MODULE}.weight": weight}, config, "script")


# --- by torchao


def make_torchao() -> None:
    import torch
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerGroup,
        quantize_,
    )
    from torchao.quantization.quant_primitives import MappingType
    from torchao.quantization.quantize_.workflows import Int4Tensor

    def save(name: str, weight: Any, expected: Any, maker: str = "torchao") -> None:
        tensors, about = flatten_tensor_state_dict({f"{MODULE}.weight": weight})
        tensors |= {f"expected.{MODULE}.weight": expected}
        write(name, tensors, {"quant_method": "torchao"}, maker, **about)

    intx = {f"int{bits}": IntxWeightOnlyConfig(getattr(torch, f"int{bits}"), PerGroup(32)) for bits in (3, 4)}
    configs = {"int8": Int8WeightOnlyConfig(), "fp8": Float8WeightOnlyConfig(), **intx}
    configs["int4_zero"] = IntxWeightOnlyConfig(torch.int4, PerGroup(32), mapping_type=MappingType.ASYMMETRIC)
    for seed, (name, config) in enumerate(configs.items()):
        linear = torch.nn.Linear(128, 32, bias=False, dtype=torch.bfloat16)
        linear.weight.data = torch.from_numpy(draw(seed, 32, 128)).to(torch.bfloat16)
        quantize_(linear, config)
        save(f"torchao_{name}", linear.weight, linear.weight.dequantize())
    # The quantizer of this class runs on GPUs only.
    codes, _, scales = integers(1, 4, 32, sym=True)
    packed = (codes.T[:, ::2] - 8 & 15 | (codes.T[:, 1::2] - 8 & 15) << 4).astype(np.uint8).view(np.int8)
    zeros = draw(2, 4, 32)
    scales = scales.astype(np.float32)
    weight = (codes - 8) * np.repeat(scales, 32, 0) + np.repeat(zeros, 32, 0)
    parts = (torch.from_numpy(x) for x in (packed, scales, zeros))
    save("torchao_int4", Int4Tensor(*parts, [1, 32], torch.Size([32, 128])), weight.T.astype(np.float32), "script")


# --- by bitsandbytes


def make_bitsandbytes() -> None:
    """FP4 and LLM.int8; NF4 has files of its own."""
    import torch
    from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant, int8_vectorwise_quant, quantize_4bit

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}
    name = f"{MODULE}.weight"
    for nested in (False, True):
        weight = torch.from_numpy(draw(3, 32, 128)).to(torch.bfloat16)
        codes, state = quantize_4bit(weight, blocksize=64, quant_type="fp4", compress_statistics=nested)
        codes[:2] = torch.tensor([[0x08], [0x80]], dtype=torch.uint8)  # both codes of 0
        tensors = {f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()}
        tensors |= {name: codes, f"expected.{name}": dequantize_4bit(codes, state)}
        write("bitsandbytes_fp4" + "_nested" * nested, tensors, config, "bitsandbytes")
    codes, largest, _ = int8_vectorwise_quant(torch.from_numpy(draw(4, 32, 64)).to(torch.float16))
    tensors = {name: codes, f"{MODULE}.SCB": largest, f"{MODULE}.weight_format": torch.tensor(0, dtype=torch.uint8)}
    tensors |= {f"expected.{name}": int8_vectorwise_dequant(codes, largest)}
    write("bitsandbytes_int8", tensors, {"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes")


MAKERS = {
    "bitsandbytes": make_bitsandbytes,
    "torchao": make_torchao,
    "gptq": make_gptq,
    "awq": make_awq,
    "fp8": make_fp8,
    "gpt_oss": make_gpt_oss,
    "modelopt": make_modelopt,
    "compressed": make_compressed,
    "compressed by hand": make_compressed_by_hand,
}

if __name__ == "__main__":
    import sys

    OUT.mkdir(exist_ok=True)
    for method in sys.argv[1:] or MAKERS:
        MAKERS[method]()
    print(f"{len(list(OUT.iterdir()))} files, {sum(file.stat().st_size for file in OUT.iterdir())} bytes")
