"""torchao: tensors of a class, whose attributes are JSON in the metadata of the safetensors file.

The weight `m.weight` is `m._weight_qdata`, `m._weight_scale` and `m._weight_zero_point`, by its `_type`:

    Int4Tensor                 qdata (out, in / 2): two signed codes in a byte, the first in the low nibble; scale and
                               zero_point (in / group, out), floats: weight = code * scale + zero_point
    Int8Tensor                 qdata int8 (out, in), scale, zero_point: weight = (code - zero_point) * scale
    IntxUnpackedToInt8Tensor   likewise, with codes of fewer bits
    Float8Tensor               qdata float8_e4m3fn (out, in), scale
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from .._checks import checked_json, short
from .._dtypes import DTYPES
from ._base import (
    FLOAT8,
    FLOATS,
    Found,
    Method,
    Settings,
    Tensors,
    Weight,
    bytes_of,
    grouped,
    integers,
    scale_spans,
)
from ._bits import reversed_bytes

_ROLES = {"qdata": "._weight_qdata", "scale": "._weight_scale", "zero_point": "._weight_zero_point"}
_INT8 = np.dtype(np.int8)
_DTYPES = {DTYPES[kind].name: DTYPES[kind] for kind in ("F32", "F16", "BF16")}


def _find(names: Mapping[str, Any], settings: Settings) -> Iterator[Found]:
    for name, stored in grouped(names, "._weight_qdata", _ROLES, path=settings.path, optional=("zero_point",)):
        yield Found(name, stored, partial(_read, text=settings.metadata.get(name)))


def _read(tensors: Tensors, text: Any) -> Weight:
    data = text.encode() if type(text) is str else b"{}"
    about = checked_json(data, len(data), tensors.bad)
    kind, given = about.get("_type"), about.get("_data")
    if kind not in _CLASSES or type(given) is not dict:
        raise tensors.bad(f"is of torchao's class {short(kind)}, and only {', '.join(_CLASSES)} can be read")
    return _CLASSES[kind](tensors, given)


def _dtype(given: Mapping[str, Any], key: str = "dtype") -> str:
    value = given.get(key)
    return str(value.get("_data")) if type(value) is dict else ""


def _read_int4(tensors: Tensors, given: Mapping[str, Any]) -> Weight:
    stored = tensors.views["qdata"]
    stored = tensors.get("qdata", (_INT8, np.dtype(np.uint8)), [None] * max(stored.ndim, 2)).view(np.uint8)
    *lead, out, half = stored.shape
    if "zero_point" not in tensors:
        raise tensors.bad("lacks its zero_point")
    scales = tensors.get("scale", FLOATS, (*lead, None, out))
    zeros = tensors.get("zero_point", (scales.dtype,), scales.shape)
    shape = (*lead, out, 2 * half)
    block = given.get("block_size")
    scales, zeros = (np.ascontiguousarray(np.swapaxes(x, -1, -2)) for x in (scales, zeros))
    scales, spans = scale_spans(tensors, scales, shape, groups=block[-1:] if type(block) is list else ())
    return Weight(
        "int4",
        shape,
        spans,
        scales.dtype,
        lambda start, stop: {"codes": reversed_bytes(stored[start:stop], 4) ^ np.uint8(0x88)},
        {"scales": scales, "offsets": zeros},
    )


def _read_int8(tensors: Tensors, given: Mapping[str, Any]) -> Weight:
    codes = tensors.views["qdata"]
    codes = tensors.get("qdata", (_INT8,), [None] * max(codes.ndim, 2))
    scales, spans = _scales(tensors, given, codes.shape)
    dtype = _DTYPES.get(_dtype(given), np.dtype(np.float32))
    target = _dtype(given, "target_dtype").removeprefix("int")
    bits = int(target) if target in ("2", "3", "4", "5", "6") else 8
    zeros = _zeros(tensors, bits, scales.shape)
    if bits == 8 and (zeros is None or (zeros == 128).all()):
        return bytes_of("int8", codes, scales, spans, dtype)

    def unsigned(start: int, stop: int) -> np.ndarray:
        found = codes[start:stop].view(np.uint8) + np.uint8(2 ** (bits - 1))
        if bits < 8 and (found >= 2**bits).any():
            raise tensors.bad(f"has codes that are not integers of {bits} bits")
        return found

    fields = {"bits": bits, "shape": codes.shape, "spans": spans, "dtype": dtype}
    return integers(**fields, codes=unsigned, scales=scales, zeros=zeros)


def _zeros(tensors: Tensors, bits: int, shape: tuple[int, ...]) -> np.ndarray | None:
    """Zero points, unsigned as the codes are."""
    if "zero_point" not in tensors:
        return None
    signed = tensors.views["zero_point"]
    signed = tensors.get("zero_point", (_INT8, *FLOATS), signed.shape)
    with np.errstate(all="ignore"):
        unsigned = signed.astype(np.float32) + 2 ** (bits - 1)
        zeros = unsigned.astype(np.uint8)
    if zeros.size != np.prod(shape) or not (zeros == unsigned).all() or (zeros >= 2**bits).any():
        raise tensors.bad(f"has zero points that are not {shape} integers of {bits} bits")
    return zeros.reshape(shape)


def _read_float8(tensors: Tensors, given: Mapping[str, Any]) -> Weight:
    codes = tensors.views["qdata"]
    codes = tensors.get("qdata", FLOAT8, [None] * max(codes.ndim, 2))
    scales, spans = _scales(tensors, given, codes.shape)
    dtype = _DTYPES.get(_dtype(given), np.dtype(np.float32))
    return bytes_of("fp8", codes.view(np.uint8), scales, spans, dtype)


def _scales(tensors: Tensors, given: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[np.ndarray, tuple[int, int]]:
    block = given.get("block_size")
    sizes = {"groups": block[-1:], "blocks": [block[-2:]]} if type(block) is list else {}
    scales = tensors.get("scale", FLOATS, tensors.views["scale"].shape)
    return scale_spans(tensors, scales, shape, **sizes)


_CLASSES: dict[str, Callable[[Tensors, Mapping[str, Any]], Weight]] = {
    "Int4Tensor": _read_int4,
    "Int8Tensor": _read_int8,
    "IntxUnpackedToInt8Tensor": _read_int8,
    "Float8Tensor": _read_float8,
}

TORCHAO = Method("torchao", ("torchao",), _find, mark="._weight_qdata", needs_config=False)
