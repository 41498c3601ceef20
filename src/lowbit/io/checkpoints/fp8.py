"""float8 with a scale for each block, channel or tensor (DeepSeek-V3, Qwen, FBGEMM).

The tensors of a linear layer `m`:

    m.weight            float8_e4m3fn (out, in)
    m.weight_scale_inv  float32 (ceil(out / 128), ceil(in / 128)), or one number; `weight_scale` in some files

    weight = float8 * scale, although the name says inverse
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from ._base import (
    FLOAT8,
    FLOATS,
    POWERS,
    Found,
    Method,
    Settings,
    Tensors,
    Weight,
    bytes_of,
    dtype_of,
    grouped,
    scale_spans,
    wide_scales,
)


def _find(names: Mapping[str, Any], settings: Settings) -> Iterator[Found]:
    settings.option("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    marks = (".weight_scale_inv", ".weight_scale") if settings.method else (".weight_scale_inv",)
    for mark in marks:
        for name, stored in grouped(names, mark, {"weight": ".weight", "scale": mark}, path=settings.path):
            yield Found(name, stored, partial(read_float8, settings=settings))


def read_float8(tensors: Tensors, settings: Settings) -> Weight:
    codes = tensors.views["weight"]
    codes = tensors.get("weight", FLOAT8, [None] * max(codes.ndim, 2))
    scales = wide_scales(tensors.get("scale", (*FLOATS, POWERS), tensors.views["scale"].shape))
    blocks = [settings.options.get("weight_block_size") or [128, 128]]
    scales, spans = scale_spans(tensors, scales, codes.shape, blocks=blocks)
    return bytes_of("fp8", codes.view(np.uint8), scales, spans, dtype_of(scales, settings))


FP8 = Method("fp8 with block scales", ("fp8", "fbgemm-fp8"), _find, mark=".weight_scale_inv", needs_config=False)
