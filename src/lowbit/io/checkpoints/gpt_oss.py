"""MXFP4 of gpt-oss: the experts of a layer in one tensor.

    m_blocks  uint8 (experts, out, in / 32, 16): two E2M1 codes in a byte, the first in the low nibble
    m_scales  uint8 (experts, out, in / 32): exponents

    weight = level * 2 ** (scale - 127)

In the files of transformers `m` ends in `_proj`, whose dense tensor is (experts, in, out). In those of OpenAI the names
are `m.blocks` and `m.scales`, and the dense tensor is (experts, out, in).
"""

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from ._base import BYTES, Found, Method, Settings, Tensors, Weight, grouped, nibbles

_OWN = re.compile(r"(\.experts\.\w+_proj_|\.mlp\.mlp\d_weight\.)(blocks|scales)$")


def _find(names: Mapping[str, Any], settings: Settings) -> Iterator[Found]:
    if not settings.method:  # other models may have tensors with these endings
        names = dict.fromkeys(name for name in names if _OWN.search(name))
    for dot, transposed in (("_", True), (".", False)):
        roles = {"blocks": f"{dot}blocks", "scales": f"{dot}scales"}
        for name, stored in grouped(names, roles["blocks"], roles, path=settings.path, suffix=""):
            yield Found(name, stored, partial(_read, settings=settings, transposed=transposed))


def _read(tensors: Tensors, settings: Settings, *, transposed: bool) -> Weight:
    blocks = tensors.get("blocks", BYTES, (*[None] * (tensors.views["blocks"].ndim - 1), 16))
    if blocks.ndim < 3:
        raise tensors.bad(f"has blocks of shape {blocks.shape}, not (experts, out, in / 32, 16)")
    scales = tensors.get("scales", BYTES, blocks.shape[:-1])
    stored = blocks.reshape(*blocks.shape[:-2], -1)
    return nibbles("mxfp4", stored, scales, settings.dtype or np.dtype(np.float32), 32, transposed=transposed)


GPT_OSS = Method("MXFP4 of gpt-oss", ("mxfp4",), _find, mark="_blocks", needs_config=False)
