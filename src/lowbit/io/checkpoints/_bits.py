"""Unpack the codes of other projects' files, and pack them as a lowbit array stores them."""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np


def stream(words: np.ndarray, bits: int, index: np.ndarray, axis: int) -> np.ndarray:
    """Codes number `index` of a continuous stream along an axis of uint32 words, the first in the lowest bits.

    >>> stream(np.array([0x321], np.uint32), 4, np.arange(3), 0)
    array([1, 2, 3], dtype=uint8)
    """
    first = index.astype(np.int64) * bits
    shape = [1] * words.ndim
    shape[axis] = -1
    offset = (first % 32).astype(np.uint32)
    codes = np.take(words, first // 32, axis) >> offset.reshape(shape)
    if (split := offset + bits > 32).any():
        following = np.minimum(first // 32 + 1, words.shape[axis] - 1)
        more = np.take(words, following, axis) << np.where(split, 32 - offset, 0).astype(np.uint32).reshape(shape)
        codes |= np.where(split.reshape(shape), more, np.uint32(0))
    return (codes & np.uint32(2**bits - 1)).astype(np.uint8)


def by_word(words: np.ndarray, bits: int, index: np.ndarray, axis: int) -> np.ndarray:
    """As `stream`, where each word holds 32 // bits codes and no code is split."""
    per_word = 32 // bits
    shape = [1] * words.ndim
    shape[axis] = -1
    codes = np.take(words, index // per_word, axis) >> (index % per_word * bits).astype(np.uint32).reshape(shape)
    return (codes & np.uint32(2**bits - 1)).astype(np.uint8)


def reversed_bytes(stored: np.ndarray, bits: int) -> np.ndarray:
    """Bytes whose codes of 1, 2, 4 or 8 bits are in the opposite order.

    >>> [hex(byte) for byte in reversed_bytes(np.array([0x21], np.uint8), 4)]
    ['0x12']
    """
    return stored if bits == 8 else _reversed(bits)[stored]


@functools.cache
def _reversed(bits: int) -> np.ndarray:
    byte = np.arange(256)
    codes = (byte >> at & 2**bits - 1 for at in range(0, 8, bits))
    return functools.reduce(lambda found, code: found << bits | code, codes).astype(np.uint8)


def packed(codes: np.ndarray, packing: Mapping[str, int]) -> dict[str, Any]:
    """The code components of a lowbit array: the lowest bits of the codes in the first, higher ones in the next.

    >>> {name: x.tolist() for name, x in packed(np.array([1, 7, 4], np.uint8), {"codes": 4, "high": 8}).items()}
    {'codes': [112], 'high': [96]}
    """
    found: dict[str, np.ndarray] = {}
    for name, per_byte in packing.items():
        bits = 8 // per_byte
        if per_byte == 1:
            return {name: codes}
        out = np.zeros((*codes.shape[:-1], -(-codes.shape[-1] // per_byte)), np.uint8)
        for i in range(per_byte):
            part = codes[..., i::per_byte]
            out[..., : part.shape[-1]] |= (part & np.uint8(2**bits - 1)) << np.uint8(8 - bits * (i + 1))
        found[name], codes = out, codes >> np.uint8(bits)
    return found
