"""compressed-tensors (llm-compressor, vLLM): integers and floats of 4 and 8 bits.

    pack-quantized          m.weight_packed int32 (out, words): code + 2 ** (bits - 1), the first in the lowest bits
                            m.weight_scale (out, groups); m.weight_shape int64 [out, in]
                            m.weight_zero_point int32 (words, groups), packed along `out`, if asymmetric
                            m.weight_g_idx int32 (in), the group of each input, if in activation order
    int-quantized           m.weight int8 (out, in), m.weight_scale, m.weight_zero_point int8
    float-quantized         m.weight float8_e4m3fn (out, in), m.weight_scale
    nvfp4-pack-quantized    m.weight_packed uint8 (out, in / 2), m.weight_scale float8_e4m3fn (out, in / 16),
                            m.weight_global_scale float32 [1], a divisor
    mxfp4-pack-quantized    m.weight_packed uint8, m.weight_scale uint8 (out, in / 32): exponents
    mxfp8-quantized         m.weight float8_e4m3fn, m.weight_scale uint8 (out, in / 32): exponents

    weight = (code - zero) * scale

Since 2026-05 codes of 3, 5, 6 and 7 bits are a continuous stream; before, a word has 32 // bits of them. The width
of the tensor tells which. Which group of the config a module belongs to is seen from its tensors too.
"""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from ._base import (
    BYTES,
    FLOAT8,
    FLOATS,
    WORDS,
    Found,
    Method,
    Settings,
    Tensors,
    Weight,
    bytes_of,
    dtype_of,
    grouped,
    integers,
    nibbles,
    order_of,
    scale_spans,
    wide_scales,
)
from ._bits import by_word, reversed_bytes, stream

_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
    "dense",
)
_SCALE, _SHAPE, _ZERO, _ORDER = "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"
_GLOBAL = "weight_global_scale"
_OPTIONAL = (_SHAPE, _ZERO, _ORDER, _GLOBAL)
_INT8, _LONG = (np.dtype(np.int8),), (np.dtype(np.int64), np.dtype(np.int32))


def _find(names: Mapping[str, Any], settings: Settings) -> Iterator[Found]:
    groups = settings.options.get("config_groups")
    schemes = list(groups.values()) if type(groups) is dict else []
    for place in (settings.options, *(scheme for scheme in schemes if type(scheme) is dict)):
        if place.get("format") is not None and place["format"] not in _FORMATS:
            raise settings.bad(f"the format {place['format']!r}, and only {', '.join(_FORMATS)} can be read")
    weights = [scheme.get("weights") for scheme in schemes if type(scheme) is dict]
    schemes = [scheme for scheme in weights if type(scheme) is dict]
    for mark, read in (("weight_packed", _read_packed), ("weight", _read_bytes)):
        roles = {role: f".{role}" for role in (mark, _SCALE, *_OPTIONAL)}
        for name, stored in grouped(names, f".{mark}", roles, path=settings.path, optional=(_SCALE, *_OPTIONAL)):
            if mark == "weight_packed" or _SCALE in stored:
                yield Found(name, stored, partial(read, settings=settings, schemes=schemes))


def _read_packed(tensors: Tensors, settings: Settings, schemes: list[dict[str, Any]]) -> Weight:
    if _SCALE not in tensors:
        raise tensors.bad(f"lacks its {_SCALE}")
    if tensors.views["weight_packed"].dtype in BYTES:
        return _read_float4(tensors, settings)
    words = tensors.views["weight_packed"]
    words = tensors.get("weight_packed", WORDS, [None] * max(words.ndim, 2)).view(np.uint32)
    if _SHAPE not in tensors:
        raise tensors.bad(f"lacks its {_SHAPE}")
    shape = tensors.get(_SHAPE, _LONG, (words.ndim,)).tolist()
    *lead, length = shape
    if list(words.shape[:-1]) != lead or length <= 0:
        raise tensors.bad(f"has codes of shape {words.shape}, and its {_SHAPE} is {shape}")
    bits, unpack, group = _packing(tensors, schemes, length, words.shape[-1])
    scales = tensors.get(_SCALE, FLOATS, [None] * tensors.views[_SCALE].ndim)
    scales, spans = scale_spans(tensors, scales, shape, groups=[group])
    count = scales.shape[-1]
    order = order_of(tensors, _ORDER, length, count, spans[1])
    index = np.arange(length) if order is None else order
    ready = bits in (2, 4) and order is None
    width = -(-length * bits // 8)

    def codes(start: int, stop: int) -> np.ndarray:
        rows = words[start:stop]
        if ready:
            return reversed_bytes(np.ascontiguousarray(rows).view(np.uint8)[..., :width], bits)
        return unpack(rows, bits, index, axis=-1)

    return integers(
        bits=bits,
        shape=shape,
        spans=spans,
        dtype=dtype_of(scales, settings),
        codes=codes,
        scales=scales,
        zeros=_zeros(tensors, bits, unpack, (*lead, count)),
        ready=ready,
        order=order,
    )


def _packing(tensors: Tensors, schemes: list[dict[str, Any]], length: int, width: int) -> tuple[int, Any, int | None]:
    """The bits of a code, how codes are unpacked, and the group size, by the schemes that have this width."""
    found: dict[tuple[int, Any], Any] = {}
    for scheme in schemes:
        bits = scheme.get("num_bits")
        if type(bits) is int and bits in (2, 3, 4, 5, 6, 8):
            per_word = 32 // bits
            for unpack, fits in ((stream, -(-length * bits // 32)), (by_word, -(-length // per_word))):
                # Within one word both are the same, and for 2, 4 and 8 bits always.
                same = unpack is by_word and (length <= per_word or 32 % bits == 0)
                if fits == width and not same:
                    found.setdefault((bits, unpack), scheme.get("group_size"))
    if len(found) != 1:
        known = sorted({str(scheme.get("num_bits")) for scheme in schemes})
        problem = f"{width} words for {length} inputs, which {'several packings' if found else 'no packing'} of"
        raise tensors.bad(f"has {problem} {' or '.join(known) or 'unknown'} bits would give")
    [((bits, unpack), group)] = found.items()
    return bits, unpack, group


def _zeros(tensors: Tensors, bits: int, unpack: Any, shape: tuple[int, ...]) -> np.ndarray | None:
    """Zero points, unsigned as the codes are."""
    if _ZERO not in tensors:
        return None
    *lead, rows, count = shape
    if tensors.views[_ZERO].dtype in _INT8:  # not packed, in older files
        signed = tensors.get(_ZERO, _INT8, shape)
        return (signed.astype(np.int16) + 2 ** (bits - 1)).astype(np.uint8)
    width = -(-rows * bits // 32) if unpack is stream else -(-rows // (32 // bits))
    stored = tensors.get(_ZERO, WORDS, (*lead, width, count)).view(np.uint32)
    return unpack(stored, bits, np.arange(rows), axis=-2)


def _read_float4(tensors: Tensors, settings: Settings) -> Weight:
    stored = tensors.views["weight_packed"]
    *lead, half = stored.shape
    if _GLOBAL not in tensors:
        scales = tensors.get(_SCALE, BYTES, (*lead, half // 16))
        dtype, block, group = settings.dtype or np.dtype(np.float32), 32, None
    else:
        scales = tensors.get(_SCALE, FLOAT8, (*lead, half // 8)).view(np.uint8)
        dtype, block = settings.dtype or np.dtype(np.float32), 16
        group = tensors.get(_GLOBAL, FLOATS[:1], [None] * tensors.views[_GLOBAL].ndim)
        if group.size != math.prod(lead[:-1]):
            raise tensors.bad(f"has {group.size} global scales, not {math.prod(lead[:-1])}")
        group = group.reshape(*lead[:-1], 1, 1)
    if 2 * half % block or len(lead) < 1:
        raise tensors.bad(f"has codes of shape {stored.shape}, which are not blocks of {block}")
    name = "mxfp4" if group is None else "nvfp4_divided"
    return nibbles(name, stored, scales, dtype, block, group)


def _read_bytes(tensors: Tensors, settings: Settings, schemes: list[dict[str, Any]]) -> Weight:
    codes = tensors.views["weight"]
    codes = tensors.get("weight", (*_INT8, *FLOAT8), [None] * max(codes.ndim, 2))
    scales = wide_scales(tensors.get(_SCALE, (*FLOATS, *BYTES), [None] * tensors.views[_SCALE].ndim))
    groups, blocks = ([scheme.get(key) for scheme in schemes] for key in ("group_size", "block_structure"))
    scales, spans = scale_spans(tensors, scales, codes.shape, groups=groups, blocks=list(filter(None, blocks)))
    dtype = dtype_of(scales, settings)
    if codes.dtype in FLOAT8:
        return bytes_of("fp8", codes.view(np.uint8), scales, spans, dtype)
    if _ZERO not in tensors:
        return bytes_of("int8", codes, scales, spans, dtype)
    zeros = tensors.views[_ZERO]
    zeros = tensors.get(_ZERO, _INT8, zeros.shape if zeros.size == scales.size else scales.shape)
    return integers(
        bits=8,
        shape=codes.shape,
        spans=spans,
        dtype=dtype,
        codes=lambda start, stop: codes[start:stop].view(np.uint8) ^ np.uint8(128),
        scales=scales,
        zeros=zeros.reshape(scales.shape).view(np.uint8) ^ np.uint8(128),
    )


COMPRESSED_TENSORS = Method("compressed-tensors", ("compressed-tensors",), _find, mark=".weight_packed")
