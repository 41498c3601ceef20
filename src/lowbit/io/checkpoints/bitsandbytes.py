"""bitsandbytes, which says by the names of its tensors alone what it stores.

NF4 and FP4 are those of `lowbit.io.bitsandbytes`. LLM.int8:

    m.weight         int8 (out, in), with m.weight_format uint8: 0, for rows in order
    m.SCB            float32 (out): the largest magnitude of each row

    weight = int8 * SCB / 127
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from lowbit.formats.blocks import WHOLE

from ..bitsandbytes import Saved4Bit, saved_components
from ._base import BYTES, FLOATS, Found, Method, Settings, Tensors, Weight, bytes_of, grouped

_ROLES = {"weight": ".weight", "SCB": ".SCB", "weight_format": ".weight_format"}


def _find(names: Mapping[str, Any], settings: Settings) -> Iterator[Found]:
    for name, stored in saved_components(names, settings.path).items():
        yield Found(name, stored, partial(_read_4bit, kind=stored["quant_state"].rpartition("__")[2]))
    for name, stored in grouped(names, ".SCB", _ROLES, path=settings.path, optional=("weight_format",)):
        yield Found(name, stored, partial(_read_int8, settings=settings))


def _read_4bit(tensors: Tensors, kind: str) -> Saved4Bit:
    return Saved4Bit.read(tensors.name, tensors.views, tensors.path, kind)


def _read_int8(tensors: Tensors, settings: Settings) -> Weight:
    codes = tensors.get("weight", (np.dtype(np.int8),), (None, None))
    largest = tensors.get("SCB", FLOATS[:1], codes.shape[:1])
    if "weight_format" in tensors and (order := tensors.get("weight_format", BYTES, ())) != 0:
        raise tensors.bad(f"has the weight_format {order}, which is an order of rows for GPUs; only 0 can be read")
    with np.errstate(all="ignore"):
        scales = largest[:, None] * np.float32(1 / 127)
    return bytes_of("int8", codes, scales, (1, WHOLE), settings.dtype or np.dtype(np.float32))


BITSANDBYTES = Method("bitsandbytes", ("bitsandbytes",), _find, mark=".SCB", needs_config=False)
