"""AWQ: integers of 4 bits with zero points, packed along the output axis (AutoAWQ, "gemm").

The tensors of a linear layer `m`:

    m.qweight  int32 (in, out / 8): nibble i of a word, from the lowest, holds output (0, 2, 4, 6, 1, 3, 5, 7)[i] of 8
    m.qzeros   int32 (groups, out / 8): likewise
    m.scales   float16 (groups, out)

    weight[o, i] = scales[g, o] * (qweight[i, o] - zero[g, o])
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from ._base import FLOATS, WORDS, Found, Method, Settings, Tensors, Weight, dtype_of, group_spans, grouped, integers

_ROLES = {"qweight": ".qweight", "qzeros": ".qzeros", "scales": ".scales"}


def _find(names: Mapping[str, Any], settings: Settings) -> Iterator[Found]:
    settings.option("bits", (4,))
    settings.option("version", ("gemm", "GEMM"), "gemm")
    for name, stored in grouped(names, ".qweight", _ROLES, path=settings.path, optional=("qzeros",)):
        yield Found(name, stored, partial(_read, settings=settings))


def _read(tensors: Tensors, settings: Settings) -> Weight:
    scales = tensors.get("scales", FLOATS, (None, None))
    groups, out = scales.shape
    words = tensors.get("qweight", WORDS, (None, out // 8)).view(np.uint32)
    length = words.shape[0]
    if out % 8 or not groups:
        raise tensors.bad(f"has scales of shape {scales.shape}, and 8 outputs are in a word")
    zeros = None
    if "qzeros" in tensors:
        pairs = _bytes(tensors.get("qzeros", WORDS, (groups, out // 8)).view(np.uint32))
        zeros = np.stack([pairs >> 4, pairs & 15], -1).reshape(groups, out)
    elif settings.options.get("zero_point", True):
        raise tensors.bad("lacks its qzeros")
    return integers(
        bits=4,
        shape=(length, out),
        spans=(group_spans(tensors, length, groups, settings.options.get("group_size")), 1),
        dtype=dtype_of(scales, settings),
        codes=lambda start, stop: _bytes(words[start:stop]),
        scales=scales,
        zeros=zeros,
        ready=True,
        transposed=True,
    )


def _bytes(words: np.ndarray) -> np.ndarray:
    """The codes in the order of the outputs, two in a byte, the first in its high nibble."""
    shifts = np.arange(0, 16, 4, dtype=np.uint32)
    first, second = (words[..., None] >> more + shifts & np.uint32(15) for more in (np.uint32(0), np.uint32(16)))
    return (first << np.uint32(4) | second).astype(np.uint8).reshape(*words.shape[:-1], -1)


AWQ = Method("AWQ", ("awq",), _find, mark=".qweight")
