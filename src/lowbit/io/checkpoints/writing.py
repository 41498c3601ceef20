"""Write quantized arrays as other projects store them. The readers beside this module describe the layouts."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from lowbit.formats import Array8B, PackedArray, QuantizedArray, unpack
from lowbit.formats.levels import Integers

from .._checks import OptionNeeded
from .._dtypes import DTYPES
from ..bitsandbytes import bitsandbytes_tensors
from ..bitsandbytes import misfit as bitsandbytes_misfit
from ..bitsandbytes import quantization_config as bitsandbytes_config

_CHUNK = 1 << 20  # codes that are packed at a time
_NARROW = (DTYPES["F16"], DTYPES["BF16"])
_BITS = {"compressed-tensors": (2, 3, 4, 5, 6), "mlx": (2, 3, 4, 5, 6, 8)}
_MLX_GROUPS = (16, 32, 64, 128)

Facts = dict[str, Any]  # what the config says about a weight


@dataclasses.dataclass(frozen=True)
class Writer:
    """A kind of checkpoint that can be written.

    - `holds`: a sentence on the formats that it holds. `formats`: their names.
    - `misfit`: why an array cannot be written with its stored bits; empty if it can be.
    - `tensors`: the tensors of an array by their names in the file, and what the config says about it.
    - `default`: the format of the command if none is given. `linear_only`: embeddings stay dense.
    - `requantizes`: arrays that do not fit can be quantized again. `needs_config`: tensors alone do not say what they
      mean, so that only a directory with a config.json can be written.
    - `config`: the entries of config.json for the weights of a file.
    """

    holds: str
    formats: tuple[str, ...]
    misfit: Callable[[Any], str]
    tensors: Callable[[str, Any], tuple[dict[str, np.ndarray], Facts]]
    config: Callable[[Mapping[str, Facts]], dict[str, Any]]
    default: str
    linear_only: bool = False
    requantizes: bool = False
    needs_config: bool = True


def _codes(array: Any) -> np.ndarray:
    """The unsigned codes of an array, one in each byte, in its axis order."""
    array = array.resolved()
    if isinstance(array, Array8B):
        return np.asarray(array.logical_view(array.codes)).view(np.uint8) ^ np.uint8(128)
    codes, shift = np.zeros(array.stored_shape, np.uint8), 0
    for name, per_byte in array.packing.items():
        found = np.asarray(unpack(getattr(array, name), per_byte))[..., : array.stored_shape[-1]]
        codes |= found << np.uint8(shift)
        shift += 8 // per_byte
    return np.asarray(array.logical_view(codes))


def words_of(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes along the last axis as a continuous stream in uint32 words, the first in the lowest bits.

    >>> [hex(word) for word in words_of(np.array([1, 2, 3], np.uint8), 4)]
    ['0x321']
    """
    *lead, length = codes.shape
    width = -(-length * bits // 32)
    flat = np.ascontiguousarray(codes).reshape(math.prod(lead), length)
    found = np.zeros((len(flat), 4 * width), np.uint8)
    step = max(_CHUNK // max(length, 1), 1)
    for start in range(0, len(flat), step):
        rows = flat[start : start + step]
        each = np.unpackbits(rows[..., None], axis=-1, bitorder="little")[..., :bits]
        stream = np.packbits(each.reshape(len(rows), length * bits), axis=-1, bitorder="little")
        found[start : start + step, : stream.shape[-1]] = stream
    return found.view("<u4").reshape(*lead, width)


def _integers(array: Any, target: str) -> str:
    """Why an array is not one of integers with scales along its last axis, in the bits of the target."""
    levels = getattr(array, "layout", None) and array.layout.levels
    bits = 8 if isinstance(array, Array8B) else levels.bits if isinstance(levels, Integers) else 0
    label = getattr(array, "format_label", None) or type(array).__name__
    if not isinstance(array, Array8B | PackedArray) or bits not in _BITS[target]:
        return f"it is {label}, not integers of {', '.join(map(str, _BITS[target]))} bits"
    if array.scale_codec is not None or array.scales.dtype not in (*_NARROW, DTYPES["F32"]):
        return f"the scales of {label} are codes, not floats"
    if array.ndim < 2 or array.scale_axes != (-1,):
        return f"its scales lie along axis {array.axis}, not the last one, which {target} has as the inputs"
    if array.block_size and array.shape[-1] % array.block_size:
        return f"its rows of {array.shape[-1]} are not a multiple of its blocks of {array.block_size}"
    return ""


def _has_zero_points(array: Any) -> bool:
    return array.offsets is not None and array.offsets.dtype == np.uint8


def _compressed_misfit(array: Any) -> str:
    if problem := _integers(array, "compressed-tensors"):
        return problem
    if array.offsets is not None and not _has_zero_points(array):
        return "it has offsets that are floats, not zero points"
    return ""


def _compressed_tensors(name: str, array: Any) -> tuple[dict[str, np.ndarray], Facts]:
    base, bits = name.removesuffix(".weight"), array.layout.levels.bits
    scales = np.asarray(array.logical_view(array.scales))
    tensors = {
        "weight_packed": words_of(_codes(array), bits).view(np.int32),
        "weight_scale": scales,
        "weight_shape": np.array(array.shape, np.int64),
    }
    if _has_zero_points(array):
        zeros = np.asarray(array.logical_view(array.offsets))
        tensors["weight_zero_point"] = np.swapaxes(words_of(np.swapaxes(zeros, -1, -2), bits), -1, -2).view(np.int32)
    facts = {"num_bits": bits, "symmetric": not _has_zero_points(array), "group_size": array.block_size}
    return {f"{base}.{key}": np.ascontiguousarray(tensor) for key, tensor in tensors.items()}, facts


def _compressed_config(weights: Mapping[str, Facts]) -> dict[str, Any]:
    kinds: dict[tuple[Any, ...], list[str]] = {}
    for name, facts in weights.items():
        kinds.setdefault(tuple(facts.items()), []).append(name.removesuffix(".weight"))
    groups = {}
    for i, (kind, modules) in enumerate(kinds.items()):
        facts = dict(kind)
        strategy = "group" if facts["group_size"] else "channel"
        weight = {"type": "int", "strategy": strategy, "actorder": None, "dynamic": False, **facts}
        groups[f"group_{i}"] = {
            "targets": modules,  # by name, since a linear layer that is not quantized would be one of "Linear" too
            "weights": weight,
            "input_activations": None,
            "output_activations": None,
        }
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": [],
        }
    }


def _mlx_misfit(array: Any) -> str:
    if problem := _integers(array, "mlx"):
        return problem
    if array.block_size not in _MLX_GROUPS:
        return f"its blocks of {array.block_size} are not one of {', '.join(map(str, _MLX_GROUPS))}"
    offsets = getattr(array, "offsets", None)
    if offsets is not None and _has_zero_points(array):
        return "it has zero points, and MLX stores a bias in the dtype of the scales"
    if offsets is None and array.scales.dtype not in _NARROW:
        return "its scales are float32, with which the bias of MLX would be rounded: quantize with scale_dtype=float16"
    if offsets is not None and offsets.dtype != array.scales.dtype:
        return f"its scales are {array.scales.dtype} and its offsets {offsets.dtype}"
    return ""


def _mlx_tensors(name: str, array: Any) -> tuple[dict[str, np.ndarray], Facts]:
    base = name.removesuffix(".weight")
    bits = 8 if isinstance(array, Array8B) else array.layout.levels.bits
    scales = np.asarray(array.logical_view(array.scales))
    offsets = getattr(array, "offsets", None)
    if offsets is None:
        zero = 2 ** (bits - 1)  # a power of two, so that the product is exact
        with np.errstate(over="ignore"):
            biases = -scales * scales.dtype.type(zero)
        if not np.isfinite(biases[np.isfinite(scales)]).all():
            raise ValueError(f"Cannot write {name!r} for mlx: {zero} times a scale is beyond the range of float16.")
    else:
        biases = np.asarray(array.logical_view(offsets))
    tensors = {"weight": words_of(_codes(array), bits), "scales": scales, "biases": biases}
    stored = {f"{base}.{key}": np.ascontiguousarray(tensor) for key, tensor in tensors.items()}
    return stored, {"group_size": array.block_size, "bits": bits}


def _mlx_config(weights: Mapping[str, Facts]) -> dict[str, Any]:
    kinds = list(weights.values())
    common = max(kinds, key=kinds.count, default={"group_size": 64, "bits": 4})
    own = {name.removesuffix(".weight"): facts for name, facts in weights.items() if facts != common}
    return {"quantization": {**common, "mode": "affine", **own}}


def _bitsandbytes_tensors(name: str, array: Any) -> tuple[dict[str, np.ndarray], Facts]:
    tensors = bitsandbytes_tensors(name, array, requantize=True)  # `checkpoint_tensors` has refused what does not fit
    return tensors, {"nested": any(key.endswith(".nested_absmax") for key in tensors)}


def _bitsandbytes_entries(weights: Mapping[str, Facts]) -> dict[str, Any]:
    nested = any(facts["nested"] for facts in weights.values())
    return {"quantization_config": bitsandbytes_config(double_quant=nested)}


_INTEGERS = tuple(f"int{bits}" for bits in (2, 3, 4, 5, 6))
WRITERS = {
    "bitsandbytes": Writer(
        "a bitsandbytes file holds nf4 and dense tensors",
        ("nf4",),
        bitsandbytes_misfit,
        _bitsandbytes_tensors,
        _bitsandbytes_entries,
        default="nf4",
        linear_only=True,
        requantizes=True,
        needs_config=False,
    ),
    "compressed-tensors": Writer(
        "a compressed-tensors file holds integers of 2 to 6 bits with scales along the last axis, and dense tensors",
        _INTEGERS,
        _compressed_misfit,
        _compressed_tensors,
        _compressed_config,
        default="int4",
        linear_only=True,
    ),
    "mlx": Writer(
        "an MLX file holds integers of 2 to 6 and 8 bits in groups of 16 to 128 along the last axis, with offsets or "
        "with scales of 16 bits (int4:scale_dtype=float16), and dense tensors",
        (*_INTEGERS, "int8", "uint8"),
        _mlx_misfit,
        _mlx_tensors,
        _mlx_config,
        default="int4:offset=true,scale_dtype=float16",
    ),
}
"""The kinds of checkpoints in safetensors that can be written, by the name of the project."""


def checkpoint_tensors(
    target: str, name: str, array: QuantizedArray, *, requantize: bool = False
) -> tuple[dict[str, np.ndarray], Facts]:
    """The tensors that a project would save for an array, by their names in a checkpoint, and what its config says.

    `requantize`: quantize an array again that bitsandbytes cannot store unchanged.

    >>> import jax.numpy as jnp, lowbit
    >>> w = lowbit.quantize(jnp.ones((8, 64)), "int4", axis=-1, scale_dtype=jnp.float16)
    >>> tensors, facts = checkpoint_tensors("mlx", "up.weight", w)
    >>> {key: (x.dtype.name, x.shape) for key, x in tensors.items()}, facts
    ({'up.weight': ('uint32', (8, 8)), 'up.scales': ('float16', (8, 2)), 'up.biases': ('float16', (8, 2))}, \
{'group_size': 32, 'bits': 4})
    """
    writer = WRITERS[target]
    problem = writer.misfit(array)
    if problem and not (requantize and writer.requantizes):
        option, does = ("dequantize", "writes it dequantized, with its quantization error")
        if writer.requantizes:
            option, does = ("requantize", f"quantizes it in blocks that {target} supports")
        raise OptionNeeded(f"Cannot write {name!r} for {target} with its stored bits: {problem}.", option, does)
    return writer.tensors(name, array)
