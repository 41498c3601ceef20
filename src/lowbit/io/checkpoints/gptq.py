"""GPTQ: integers of 2, 3, 4 and 8 bits with zero points, packed along the input axis (AutoGPTQ, GPTQModel).

    m.qweight  int32 (in * bits / 32, out): codes along `in`, the first in the lowest bits; 3 bits cross words
    m.qzeros   int32 (groups, out * bits / 32): zero points along `out`
    m.scales   float16 (groups, out)
    m.g_idx    int32 (in): the group of each input; a negative one counts from the end

    weight[o, i] = scales[g_idx[i], o] * (qweight[i, o] - zero[g_idx[i], o])

In the checkpoint format "gptq" a zero point is stored minus one, modulo 2 ** bits; in "gptq_v2" as it is. Bits and
group sizes that `dynamic` overrides for a layer are those of its tensors' shapes.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from ._base import (
    FLOATS,
    WORDS,
    Found,
    Method,
    Settings,
    Tensors,
    Weight,
    dtype_of,
    group_spans,
    grouped,
    integers,
    order_of,
)
from ._bits import stream

_ROLES = {"qweight": ".qweight", "qzeros": ".qzeros", "scales": ".scales", "g_idx": ".g_idx"}


def _find(names: Mapping[str, Any], settings: Settings) -> Iterator[Found]:
    settings.option("bits", (2, 3, 4, 8))
    if settings.options.get("is_marlin_format"):
        raise settings.bad("codes in the order of the Marlin kernel, which depends on the GPU kernel's version")
    version = settings.option("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    settings.option("pack_dtype", ("int32",), "int32")
    for name, stored in grouped(names, ".qweight", _ROLES, path=settings.path, optional=("g_idx",)):
        yield Found(name, stored, partial(_read, settings=settings, shift=version == "gptq"))


def _read(tensors: Tensors, settings: Settings, *, shift: bool) -> Weight:
    scales = tensors.get("scales", FLOATS, (None, None))
    groups, out = scales.shape
    zeros = tensors.get("qzeros", WORDS, (groups, None)).view(np.uint32)
    bits = zeros.shape[1] * 32 // out if out else 0
    if bits not in (2, 3, 4, 8) or zeros.shape[1] != -(-out * bits // 32):
        raise tensors.bad(f"has {zeros.shape[1]} words of zero points for {out} outputs, not of 2, 3, 4 or 8 bits each")
    words = tensors.get("qweight", WORDS, (None, out)).view(np.uint32)
    length = words.shape[0] * 32 // bits
    if words.shape[0] != -(-length * bits // 32) or not groups:
        raise tensors.bad(f"has {words.shape[0]} rows of words, which do not hold codes of {bits} bits")
    span = group_spans(tensors, length, groups, settings.options.get("group_size"))
    order = order_of(tensors, "g_idx", length, groups, span)
    index = np.arange(length) if order is None else order
    zero = stream(zeros, bits, np.arange(out), axis=1)
    if shift:
        zero = zero + np.uint8(1) & np.uint8(2**bits - 1)
    return integers(
        bits=bits,
        shape=(length, out),
        spans=(span, 1),
        dtype=dtype_of(scales, settings),
        codes=lambda start, stop: stream(words, bits, index[start:stop], axis=0),
        scales=scales,
        zeros=zero,
        transposed=True,
        order=order,
    )


GPTQ = Method("GPTQ", ("gptq",), _find, mark=".qweight")
