"""MLX: integers of 2, 3, 4, 5, 6 and 8 bits with a scale and a bias for each group, and the MX formats.

    m.weight  uint32 (out, in * bits / 32): codes along `in`, the first in the lowest bits, without gaps
    m.scales  (out, in / group) in the dtype of the model; uint8 in the modes mxfp4, mxfp8 and nvfp4
    m.biases  (out, in / group), in the mode affine

    weight = code * scale + bias

The config has `group_size`, `bits` and `mode`, for all modules and by name for some.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from ._base import (
    BYTES,
    FLOATS,
    WORDS,
    Found,
    Method,
    Settings,
    Tensors,
    Weight,
    bytes_of,
    grouped,
    integers,
    nibbles,
    wide_scales,
)
from ._bits import reversed_bytes, stream

_ROLES = {"weight": ".weight", "scales": ".scales", "biases": ".biases"}
_MODES = {"affine": (64, 4), "mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}  # with their group sizes and bits


def _find(names: Mapping[str, Any], settings: Settings) -> Iterator[Found]:
    for name, stored in grouped(names, ".scales", _ROLES, path=settings.path, optional=("biases",)):
        own = settings.options.get(name.removesuffix(".weight"))
        options = {**settings.options, **(own if type(own) is dict else {})}
        here = Settings(settings.path, settings.method, options, settings.dtype)
        mode = here.option("mode", tuple(_MODES), "affine")
        group, bits = _MODES[mode]
        if mode == "affine":
            bits = here.option("bits", (2, 3, 4, 5, 6, 8), bits)
            group = here.option("group_size", (16, 32, 64, 128), group)
        read = (
            partial(_read_affine, bits=bits) if mode == "affine" else partial(_read_floats, mode=mode, dtype=here.dtype)
        )
        yield Found(name, stored, partial(read, group=group))


def _length(tensors: Tensors, bits: int, group: int) -> tuple[np.ndarray, int]:
    """The words of a weight, and its number of inputs."""
    words = tensors.views["weight"]
    words = tensors.get("weight", WORDS[1:], [None] * max(words.ndim, 2))
    length = words.shape[-1] * 32 // bits
    if length * bits != words.shape[-1] * 32 or length % group:
        raise tensors.bad(f"has {words.shape[-1]} words in a row, which are not groups of {group} codes of {bits} bits")
    return words, length


def _read_affine(tensors: Tensors, *, bits: int, group: int) -> Weight:
    words, length = _length(tensors, bits, group)
    if "biases" not in tensors:
        raise tensors.bad("lacks its biases")
    scales = tensors.get("scales", FLOATS, (*words.shape[:-1], length // group))
    biases = tensors.get("biases", (scales.dtype,), scales.shape)
    ready = bits in (2, 4, 8)

    def codes(start: int, stop: int) -> np.ndarray:
        rows = words[start:stop]
        if ready:
            return reversed_bytes(np.ascontiguousarray(rows).view(np.uint8), bits)
        return stream(rows, bits, np.arange(length), axis=-1)

    return integers(
        bits=bits,
        shape=(*words.shape[:-1], length),
        spans=(1, group),
        dtype=scales.dtype,
        codes=codes,
        scales=scales,
        offsets=biases,
        ready=ready,
    )


def _read_floats(tensors: Tensors, *, mode: str, group: int, dtype: np.dtype | None) -> Weight:
    words, length = _length(tensors, _MODES[mode][1], group)
    scales = tensors.get("scales", BYTES, (*words.shape[:-1], length // group))
    stored, dtype = np.ascontiguousarray(words).view(np.uint8), dtype or np.dtype(np.float32)
    if mode == "mxfp8":
        return bytes_of("fp8", stored, wide_scales(scales), (1, group), dtype)
    return nibbles({"mxfp4": "mxfp4", "nvfp4": "nvfp4_gguf"}[mode], stored, scales, dtype, group)


MLX = Method("MLX", ("mlx",), _find, mark=".biases")
