"""ModelOpt (NVIDIA): NVFP4 and float8.

The tensors of a linear layer `m`:

    NVFP4  m.weight uint8 (out, in / 2): two E2M1 codes in a byte, the first in the low nibble
           m.weight_scale float8_e4m3fn (out, in / 16), m.weight_scale_2 float32
    FP8    m.weight float8_e4m3fn (out, in), m.weight_scale float32

    weight = level * weight_scale * weight_scale_2
"""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from ._base import BYTES, FLOAT8, FLOATS, Found, Method, Settings, Tensors, Weight, grouped, nibbles
from .fp8 import read_float8

_ALGORITHMS = ("NVFP4", "FP8", "MIXED_PRECISION", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN")
_ROLES = {"weight": ".weight", "scale": ".weight_scale", "scale_2": ".weight_scale_2"}


def _find(names: Mapping[str, Any], settings: Settings) -> Iterator[Found]:
    settings.option("quant_algo", _ALGORITHMS)
    for name, stored in grouped(names, ".weight_scale", _ROLES, path=settings.path, optional=("scale_2",)):
        yield Found(name, stored, partial(_read if "scale_2" in stored else read_float8, settings=settings))


def _read(tensors: Tensors, settings: Settings) -> Weight:
    stored = tensors.views["weight"]
    stored = tensors.get("weight", BYTES, [None] * max(stored.ndim, 2))
    *lead, half = stored.shape
    if half % 8:
        raise tensors.bad(f"has codes of shape {stored.shape}, which are not blocks of 16")
    scales = tensors.get("scale", FLOAT8, (*lead, half // 8)).view(np.uint8)
    second = tensors.get("scale_2", FLOATS[:1], tensors.views["scale_2"].shape)
    if second.size not in (1, math.prod(lead[:-1])):
        raise tensors.bad(f"has {second.size} numbers as weight_scale_2, not {math.prod(lead[:-1])}")
    group = np.resize(second, (*lead[:-1], 1, 1))
    return nibbles("nvfp4", stored, scales, settings.dtype or np.dtype(np.float32), 16, group)


MODELOPT = Method("ModelOpt", ("modelopt", "modelopt-fp4"), _find, mark=".weight_scale_2")
