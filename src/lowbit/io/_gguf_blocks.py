"""The blocks of GGUF's quantized types (ggml-common.h), and the lowbit arrays that have the same bits.

A type is declared by the fields of a block in the file and by the components that they hold, so one table serves
reading and writing. Codes are in another order there: `Planes` says which. Blocks are converted a few at a time.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import jax
import numpy as np

from lowbit.formats import Array1B, Array8B, PackedArray, QuantizedArray
from lowbit.formats.packed import layout_of

CHUNK = 1 << 18  # elements that are decoded at a time, few enough to stay in the cache
_F16 = np.dtype(np.float16)


class Codec(Protocol):
    """How a field of a block holds codes: `unpack` gives them as (blocks, codes), `pack` is its inverse."""

    @property
    def bits(self) -> int: ...

    def unpack(self, stored: np.ndarray) -> np.ndarray: ...

    def pack(self, codes: np.ndarray) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class Planes:
    """Codes of 1, 2, 4 or 8 bits: of every `width` bytes, first the lowest bits of all of them, then the next ones.

    `flipped` bits are inverted, which makes an integer with a sign a code in ascending order.

    >>> Planes(4, 2).unpack(np.array([[0x21, 0x43]], np.uint8)).tolist()
    [[1, 3, 2, 4]]
    """

    bits: int
    width: int = 1
    flipped: int = 0

    @property
    def _shifts(self) -> np.ndarray:
        return np.arange(0, 8, self.bits, dtype=np.uint8)[:, None]

    def unpack(self, stored: np.ndarray) -> np.ndarray:
        wide = (stored ^ np.uint8(self.flipped)).reshape(len(stored), -1, 1, self.width)
        return (wide >> self._shifts & np.uint8(2**self.bits - 1)).reshape(len(stored), -1)

    def pack(self, codes: np.ndarray) -> np.ndarray:
        planes = codes.reshape(len(codes), -1, 8 // self.bits, self.width)
        stored = np.bitwise_or.reduce(planes << self._shifts, axis=2)
        return stored.reshape(len(codes), -1) ^ np.uint8(self.flipped)


@dataclasses.dataclass(frozen=True)
class Sixes:
    """The scales and offsets of Q4_K and Q5_K: eight of each, of 6 bits, in 12 bytes.

    The first four of each are the low 6 bits of a byte; of the others, the low 4 bits are in the last four bytes, and
    the upper 2 bits above those of the first four.
    """

    bits: int = 6

    def unpack(self, stored: np.ndarray) -> np.ndarray:
        first, nibbles = stored[:, :8].reshape(-1, 2, 4), stored[:, None, 8:]
        low = nibbles >> np.array([[0], [4]], np.uint8) & np.uint8(15)
        return np.concatenate([first & np.uint8(63), low | first >> np.uint8(6) << np.uint8(4)], -1).reshape(-1, 16)

    def pack(self, codes: np.ndarray) -> np.ndarray:
        first, second = np.split(codes.reshape(-1, 2, 8), 2, axis=-1)
        high = first | second >> np.uint8(4) << np.uint8(6)
        low = second[:, 0] & np.uint8(15) | second[:, 1] << np.uint8(4)
        return np.concatenate([high.reshape(-1, 8), low], -1)


@dataclasses.dataclass(frozen=True)
class Trits:
    """The codes 0, 1 and 2 of TQ1_0, five in a byte: digit i of a byte is the first one of the byte times 3 ** i.

    Of the first 32 bytes and of the next 16, all first digits come first, then all second ones; the last four bytes
    have four digits each.
    """

    bits: int = 2
    runs: ClassVar[tuple[tuple[int, int, int], ...]] = ((0, 32, 5), (32, 48, 5), (48, 52, 4))

    def unpack(self, stored: np.ndarray) -> np.ndarray:
        found = []
        for start, stop, digits in self.runs:
            turned = stored[:, None, start:stop] * (3 ** np.arange(digits)).astype(np.uint8)[:, None]
            found.append((turned.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(len(stored), -1))
        return np.concatenate(found, -1)

    def pack(self, codes: np.ndarray) -> np.ndarray:
        found, first = [], 0
        for start, stop, digits in self.runs:
            of_run = codes[:, first : (first := first + digits * (stop - start))].reshape(len(codes), digits, -1)
            number = (of_run * (3 ** np.arange(4, 4 - digits, -1))[:, None]).sum(axis=1)
            found.append(((number * 256 + 242) // 243).astype(np.uint8))
        return np.concatenate(found, -1)


Fields = tuple[tuple[str, Codec], ...]  # the fields that hold a component, the lowest bits first
Components = dict[str, np.ndarray]
_FLOATS = ("scales", "offsets", "group_scales", "group_offsets")


@dataclasses.dataclass(frozen=True)
class BlockType:
    """A quantized type of GGUF.

    - `format`: of the array. `affine`: with offsets. `block_size`: how many elements share a scale.
    - `elements`: in a block of the file. `dtype`: of such a block; a field with the name of a component is its float16.
    - `coded`: the fields of components that are codes; "scales, offsets" are in one field, one after the other.
    - `most`: the largest code of a component that means in the format what it means in GGUF.
    """

    format: str
    block_size: int
    elements: int
    dtype: np.dtype
    coded: dict[str, Fields]
    affine: bool = False
    most: dict[str, int] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def packing(self) -> dict[str, int]:
        """How many codes each stored element of a code component holds."""
        return {"int8": {"codes": 1}, "ternary": {"codes": 4}}.get(self.format) or layout_of(self.format).packing

    @functools.cached_property
    def floats(self) -> tuple[str, ...]:
        """The components that are stored as float16."""
        return tuple(name for name in _FLOATS if name in (self.dtype.names or ()))

    def unpacked(self, blocks: np.ndarray) -> Components:
        """The components of blocks, as (blocks, elements), with all bits of a code in one byte."""
        found = {name: blocks[name][:, None] for name in self.floats}
        for names, fields in self.coded.items():
            codes, shift = np.zeros((), np.uint8), 0
            for field, codec in fields:
                codes, shift = codes | codec.unpack(blocks[field]) << np.uint8(shift), shift + codec.bits
            several = names.split(", ")
            found |= zip(several, np.split(codes, len(several), axis=-1), strict=True)
        return found

    def packed(self, components: Mapping[str, np.ndarray]) -> np.ndarray:
        """The blocks of components: the inverse of `unpacked`."""
        blocks = np.empty(len(components["codes"]), self.dtype)
        for name in self.floats:
            blocks[name] = components[name][:, 0]
        for names, fields in self.coded.items():
            codes = np.concatenate([components[name] for name in names.split(", ")], axis=-1)
            for field, codec in fields:
                blocks[field] = codec.pack(codes & np.uint8(2**codec.bits - 1))
                codes = codes >> np.uint8(codec.bits % 8)
        return blocks

    def like(self, shape: Sequence[int]) -> QuantizedArray:
        """An array of this type with `jax.ShapeDtypeStruct`s for its components."""
        one = self._stored(self.unpacked(np.zeros(1, self.dtype)))
        row = shape[-1] // self.elements
        structs = {name: jax.ShapeDtypeStruct((*shape[:-1], row * x.shape[-1]), x.dtype) for name, x in one.items()}
        return self._array(shape, structs)

    def read(self, blocks: np.ndarray, shape: Sequence[int]) -> QuantizedArray:
        """The array of blocks of a file, with numpy arrays for its components. Raises for codes without a meaning."""
        like, flat = self.like(shape), blocks.reshape(-1)
        into = {name: np.empty(x.shape, x.dtype) for name, x in like.components().items()}
        rows = {name: x.reshape(len(flat), -1) if x.size else x for name, x in into.items()}
        step = max(CHUNK // self.elements, 1)
        for start in range(0, len(flat), step):
            found = self.unpacked(flat[start : start + step])
            for name, most in self.most.items():
                if (largest := found[name].max(initial=0)) > most:
                    raise ValueError(f"has {name} with the code {largest}, and the codes go up to {most}")
            for name, values in self._stored(found).items():
                rows[name][start : start + step] = values
        return self._array(shape, into)

    def write(self, array: QuantizedArray) -> np.ndarray:
        """The bytes of an array of this type, of which `holds` is true."""
        components = {name: np.asarray(x) for name, x in array.components().items()}
        if array.transposed:
            components = {name: self._turned(name, x, array.shape[-2]) for name, x in components.items()}
        count = math.prod(array.shape) // self.elements
        rows = {name: x.reshape(count, -1) if x.size else x for name, x in components.items()}
        out = np.empty(count, self.dtype)
        step = max(CHUNK // self.elements, 1)
        for start in range(0, count, step):
            chunk = {name: x[start : start + step] for name, x in rows.items()}
            out[start : start + step] = self.packed(self._joined(chunk))
        return out.view(np.uint8)

    def holds(self, array: Any) -> bool:
        """Whether an array has the bits of this type: its codes and blocks, and scales that are float16 numbers."""
        like = self.like((1, self.elements))
        if type(array) is not type(like) or not array.shape or array.shape[-1] % self.elements:
            return False
        static = ("kind",) if self.format == "ternary" else ("format_name", "affine") if self.format != "int8" else ()
        if any(getattr(array, name) != getattr(like, name) for name in static) or array.axis != -1:
            return False
        if array.block_size != self.block_size or array.index is not None:
            return False
        given, wanted = array.components(), like.components()
        if given.keys() != wanted.keys():
            return False
        return all(x.dtype == wanted[name].dtype or _is_float16(x) for name, x in given.items())

    def _array(self, shape: Sequence[int], components: Mapping[str, Any]) -> QuantizedArray:
        fields: dict[str, Any] = {"shape": shape, "dtype": np.float32, "spans": (self.block_size,), **components}
        if self.format == "int8":
            return Array8B.build(**fields)
        if self.format == "ternary":
            return Array1B.build(kind="ternary", **fields)
        return PackedArray.build(**fields, format_name=self.format, affine=self.affine)

    def _stored(self, components: Components) -> Components:
        """Components as an array stores them, with packed codes, from those of `unpacked`."""
        codes = components["codes"]
        if self.format == "int8":
            return {**components, "codes": codes.view(np.int8)}
        found, shift = dict(components), 0
        for name, per_byte in self.packing.items():
            bits = 8 // per_byte
            found[name] = _pack(codes >> np.uint8(shift) & np.uint8(2**bits - 1), per_byte)
            shift += bits
        return found

    def _joined(self, components: Components) -> Components:
        """The inverse of `_stored`."""
        if self.format == "int8":
            return {**components, "codes": components["codes"].view(np.uint8)}
        found, shift = dict(components), 0
        for name, per_byte in self.packing.items():
            codes = _unpack(found.pop(name), per_byte) << np.uint8(shift)
            found["codes"] = found["codes"] | codes if shift else codes
            shift += 8 // per_byte
        return found

    def _turned(self, name: str, component: np.ndarray, rows: int) -> np.ndarray:
        """A component of a transposed array with so many rows, in the order of the array."""
        per_byte = self.packing.get(name, 1)
        codes = _unpack(component, per_byte)[..., :rows]  # without the rest of the last byte
        return _pack(np.ascontiguousarray(np.swapaxes(codes, -1, -2)), per_byte)


def _pack(codes: np.ndarray, per_byte: int) -> np.ndarray:
    """`formats.blocks.pack` in numpy, for lengths that fill their bytes."""
    if per_byte == 1:
        return codes
    groups, bits = codes.reshape(*codes.shape[:-1], -1, per_byte), 8 // per_byte
    return np.bitwise_or.reduce(groups << np.arange(8 - bits, -1, -bits, dtype=np.uint8), axis=-1)


def _unpack(packed: np.ndarray, per_byte: int) -> np.ndarray:
    if per_byte == 1:
        return packed
    bits = 8 // per_byte
    codes = packed[..., None] >> np.arange(8 - bits, -1, -bits, dtype=np.uint8) & np.uint8(2**bits - 1)
    return codes.reshape(*packed.shape[:-1], -1)


def _is_float16(values: Any) -> bool:
    """Whether scales are float16 numbers, in whatever dtype they are."""
    if values.dtype.kind != "f" or isinstance(values, jax.ShapeDtypeStruct):
        return False
    wide = np.asarray(values, np.float32)
    with np.errstate(over="ignore"):
        return np.array_equal(wide.astype(np.float16).astype(np.float32).view(np.uint32), wide.view(np.uint32))


def _type(
    format: str, block_size: int, elements: int, fields: str, coded: dict[str, Fields], **options: Any
) -> BlockType:
    """A type by the fields of a block in their order: `name` for a float16, `name:bytes` for codes."""
    pairs = [field.partition(":") for field in fields.split()]
    dtype = np.dtype([(name, "u1", int(size)) if size else (name, "<f2") for name, _, size in pairs])
    return BlockType(format, block_size, elements, dtype, coded, **options)


_HALVES = ("low", Planes(4, 16))  # the low nibbles of 16 bytes, then the high ones
_FIFTH = ("high", Planes(1))
BLOCK_TYPES = {
    "Q4_0": _type("int4", 32, 32, "scales low:16", {"codes": (_HALVES,)}),
    "Q4_1": _type("int4", 32, 32, "scales offsets low:16", {"codes": (_HALVES,)}, affine=True),
    "Q5_0": _type("int5", 32, 32, "scales high:4 low:16", {"codes": (_HALVES, _FIFTH)}),
    "Q5_1": _type("int5", 32, 32, "scales offsets high:4 low:16", {"codes": (_HALVES, _FIFTH)}, affine=True),
    "Q8_0": _type("int8", 32, 32, "scales low:32", {"codes": (("low", Planes(8)),)}),
    "MXFP4": _type(
        *("mxfp4", 32, 32, "powers:1 low:16", {"codes": (_HALVES,), "scales": (("powers", Planes(8)),)}),
        most={"scales": 254},
    ),
    "NVFP4": _type(
        *("nvfp4_gguf", 16, 64, "floats:4 low:32"),
        {"codes": (("low", Planes(4, 8)),), "scales": (("floats", Planes(8)),)},
        most={"scales": 126},
    ),
    "Q2_K": _type(
        *("q2_k", 16, 256, "both:16 low:64 group_scales group_offsets"),
        {"codes": (("low", Planes(2, 32)),), "scales, offsets": (("both", Planes(4, 16)),)},
    ),
    "Q3_K": _type(
        *("q3_k", 16, 256, "high:32 low:64 fours:8 twos:4 group_scales"),
        {
            "codes": (("low", Planes(2, 32)), ("high", Planes(1, 32))),
            "scales": (("fours", Planes(4, 8)), ("twos", Planes(2, 4))),
        },
    ),
    "Q4_K": _type(
        *("q4_k", 32, 256, "group_scales group_offsets both:12 low:128"),
        {"codes": (("low", Planes(4, 32)),), "scales, offsets": (("both", Sixes()),)},
    ),
    "Q5_K": _type(
        *("q5_k", 32, 256, "group_scales group_offsets both:12 high:32 low:128"),
        {"codes": (("low", Planes(4, 32)), ("high", Planes(1, 32))), "scales, offsets": (("both", Sixes()),)},
    ),
    "Q6_K": _type(
        *("q6_k", 16, 256, "low:128 high:64 signed:16 group_scales"),
        {
            "codes": (("low", Planes(4, 64)), ("high", Planes(2, 32))),
            "scales": (("signed", Planes(8, flipped=128)),),
        },
    ),
    "IQ4_NL": _type("iq4_nl", 32, 32, "scales low:16", {"codes": (_HALVES,)}),
    "IQ4_XS": _type(
        *("iq4_xs", 32, 256, "group_scales twos:2 fours:4 low:128"),
        {"codes": (_HALVES,), "scales": (("fours", Planes(4)), ("twos", Planes(2)))},
    ),
    # Of the two ternary types, an array is written as the first one.
    "TQ2_0": _type("ternary", 256, 256, "low:64 scales", {"codes": (("low", Planes(2, 32)),)}, most={"codes": 2}),
    "TQ1_0": _type("ternary", 256, 256, "low:52 scales", {"codes": (("low", Trits()),)}),
}
"""The types whose bits a lowbit array keeps, by their names in GGUF."""


def type_of(array: Any) -> str | None:
    """The name of the GGUF type that has the bits of an array; None if there is none."""
    return next((name for name, kind in BLOCK_TYPES.items() if kind.holds(array)), None)
