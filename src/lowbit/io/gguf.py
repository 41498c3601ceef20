"""Reading GGUF files, the format of llama.cpp.

A GGUF file has no checksum, so nothing in it is believed: every count, length, offset, shape and type is held against
the bytes that are there before it is used, and what does not fit is one `ValueError` that names the file and the
tensor. Tensors are read when asked for, from a memory map.

The header is read here rather than by `gguf.GGUFReader`, which makes an object of half a kilobyte for each number of
an array: a file of 300 kB can cost it 200 MB, and no check beforehand would help. What the types of tensors are and
how they are decoded is the `gguf` package's to say.
"""

import difflib
import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from lowbit.formats import Array1B, Array8B, QuantizedArray

from ._checks import can_be_a_shape
from ._maps import mapped

# The types of metadata values by their numbers in the GGUF specification (ggml/docs/gguf.md), and the numbers among
# them as `struct` and numpy both write them.
STRING, ARRAY = 8, 9
TYPES = {0: "UINT8", 1: "INT8", 2: "UINT16", 3: "INT16", 4: "UINT32", 5: "INT32", 6: "FLOAT32", 7: "BOOL"}
TYPES |= {STRING: "STRING", ARRAY: "ARRAY", 10: "UINT64", 11: "INT64", 12: "FLOAT64"}
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_ARRAYS = {kind: f"[{name}]" for kind, name in TYPES.items()}

# The types of tensors that numpy can view as they are.
_DTYPES: dict[str, Any] = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": ml_dtypes.bfloat16,
    "I8": "i1",
    "I16": "<i2",
    "I32": "<i4",
    "I64": "<i8",
}
# Blocks as they lie in the file (ggml-common.h). Byte 4 m + k of each half of a TQ2_0 block has in its bits 2 l the
# code of value 32 l + 4 m + k of that half.
Q8_0 = np.dtype([("scale", "<f2"), ("codes", "i1", 32)])
_TQ2_0 = np.dtype([("codes", "u1", (2, 8, 4)), ("scale", "<f2")])

# Keys, tensors and array elements of a header altogether. The largest vocabularies need a third of it; as Python
# objects this many take less than half a gigabyte.
_MOST_VALUES = 1 << 22
_MOST_AXES = 4  # GGML_MAX_DIMS
_DEEPEST = 4  # arrays in arrays
_CHUNK = 1 << 18  # elements decoded at a time, which stay in the cache


class GGUFField(NamedTuple):
    """A value of a file's metadata with its type there, such as `"UINT32"`, or `"[STRING]"` for an array.

    The elements of an `"[ARRAY]"` are fields themselves.
    """

    type: str
    value: Any


class GGUFFile:
    """A GGUF file: its metadata, and its tensors by name, each read when asked for.

        file = GGUFFile("model.gguf")
        file.metadata["general.architecture"]       # 'llama'
        file.type("token_embd.weight")              # 'Q8_0'
        file.array("token_embd.weight")             # an Array8B with the file's own codes and scales
        file.dense("blk.0.attn_q.weight")           # float32, whatever the file stores

    Opening it reads the header and checks all of it, so that a file that is cut off or damaged there is a `ValueError`
    at once. What the numbers of a tensor are, no check can tell. `fields` is the metadata with the types that it has in
    the file, for `write_gguf`.
    """

    path: Path
    metadata: dict[str, Any]
    fields: dict[str, GGUFField]

    def __init__(self, path: str | os.PathLike[str]):
        self._gguf = package()
        self.path = Path(path)
        if self.path.stat().st_size == 0:
            raise ValueError(f"{self.path} is no GGUF file: it is empty.")
        self._data = mapped(self.path)
        self.fields, self._tensors = _Header(self.path, self._data, self._gguf).read()
        self.metadata = {key: without_types(field) for key, field in self.fields.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors, in the order of the file."""
        return tuple(self._tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __repr__(self) -> str:
        return f"GGUFFile({str(self.path)!r}, {len(self)} tensors)"

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor in the usual order, the last axis contiguous: `(out, in)` for a linear layer."""
        return self._tensor(name).shape

    def nbytes(self, name: str) -> int:
        """How many bytes a tensor takes in the file."""
        return self._bytes(self._tensor(name)).nbytes

    def type(self, name: str) -> str:
        """The name of the type that a tensor is stored in, such as `"Q4_1"`."""
        return self._tensor(name).type.name

    def dense(self, name: str, dtype: Any = np.float32) -> np.ndarray:
        """The numbers of a tensor, decoded. Where nothing has to be decoded or cast, a read-only view of the file."""
        tensor = self._tensor(name)
        if tensor.type.name in _DTYPES:
            return self._plain(tensor).astype(dtype, copy=False)
        return self.values(name, 0, math.prod(tensor.shape), dtype).reshape(tensor.shape)

    def values(self, name: str, start: int, stop: int, dtype: Any = np.float32) -> np.ndarray:
        """Some rows of a tensor that has to be decoded, from one element to another of all in a row."""
        tensor = self._tensor(name)
        block, size = self._gguf.GGML_QUANT_SIZES[tensor.type]
        stored, out = self._bytes(tensor)[start // block * size : stop // block * size], np.empty(stop - start, dtype)
        step = max(1, _CHUNK // block)
        for first in range(0, out.size // block, step):
            chunk = stored[first * size : (first + step) * size]
            try:
                with np.errstate(all="ignore"):  # a scale may be infinite, and then its block reads so
                    values = self._gguf.dequantize(chunk, tensor.type)
            except NotImplementedError:
                raise ValueError(
                    f"{self.path}: tensor {name!r} is of type {tensor.type.name}, which the installed gguf package "
                    "cannot decode. Convert the file to another type, or install a newer gguf."
                ) from None
            out[first * block : (first + step) * block] = values
        return out

    def array(self, name: str) -> QuantizedArray | np.ndarray:
        """A tensor as it is stored, if there is an array for its type, and never quantized again.

        - Q8_0: an `Array8B` with blocks of 32 along the last axis.
        - TQ2_0: a ternary `Array1B` with blocks of 256 along the last axis.
        - Floating-point numbers and integers: a numpy array of that dtype, a read-only view of the file.
        - All others: `dense(name)`.
        """
        tensor = self._tensor(name)
        if tensor.type.name in _DTYPES:
            return self._plain(tensor)
        if tensor.type.name == "Q8_0":
            blocks = self._bytes(tensor).view(Q8_0)
            weight = blocks["codes"].reshape(tensor.shape)
            return Array8B(weight=weight, scale=_scales(blocks, tensor.shape, 32), axis=-1, block_size=32)
        if tensor.type.name == "TQ2_0":
            blocks = self._bytes(tensor).view(_TQ2_0)
            weight = _ternary(blocks["codes"]).reshape(*tensor.shape[:-1], tensor.shape[-1] // 4)
            if (weight & weight >> 1 & 0b01010101).any():
                raise ValueError(
                    f"{self.path}: tensor {name!r} is of type TQ2_0 and has codes other than -1, 0 and 1. "
                    "`dense` decodes them as they are."
                )
            scale = _scales(blocks, tensor.shape, 256)
            return Array1B(weight=weight, scale=scale, kind="ternary", axis=-1, block_size=256)
        return self.dense(name)

    def _tensor(self, name: str) -> "_Tensor":
        if name not in self._tensors:
            near = difflib.get_close_matches(name, self._tensors)
            raise KeyError(f"{self.path} has no tensor {name!r}." + (f" Near it: {', '.join(near)}." if near else ""))
        return self._tensors[name]

    def _bytes(self, tensor: "_Tensor") -> np.ndarray:
        return self._data[tensor.start : tensor.stop]

    def _plain(self, tensor: "_Tensor") -> np.ndarray:
        return self._bytes(tensor).view(_DTYPES[tensor.type.name]).reshape(tensor.shape)


def package() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ImportError("GGUF files take the gguf package: pip install 'lowbit[gguf]'") from error
    return gguf


def without_types(field: GGUFField) -> Any:
    """The value of a field, as plain Python has it."""
    return [without_types(element) for element in field.value] if field.type == "[ARRAY]" else field.value


def _scales(blocks: np.ndarray, shape: tuple[int, ...], block: int) -> np.ndarray:
    return blocks["scale"].astype(np.float32).reshape(*shape[:-1], shape[-1] // block)


def _ternary(codes: np.ndarray) -> np.ndarray:
    """The codes of TQ2_0 blocks as `Array1B` packs them: four neighbours a byte, the first in the highest bits."""
    bits = np.array([0, 2, 4, 6], np.uint8)[:, None]
    packed = np.zeros((len(codes), 2, 4, 8), np.uint8)
    for k in range(4):
        packed |= (codes[:, :, None, :, k] >> bits & 3) << (6 - 2 * k)
    return packed


class _Tensor(NamedTuple):
    """Where a tensor lies in the file; `type` is a `gguf.GGMLQuantizationType`."""

    shape: tuple[int, ...]
    type: Any
    start: int
    stop: int


class _Header:
    """Reads a header from its beginning to its end, never past the end of the file.

    Each step takes bytes from the file, so no count can make it run for longer than the file is.
    """

    def __init__(self, path: Path, data: np.ndarray, gguf: Any):
        self.path, self.data, self.gguf = path, data.data, gguf
        self.at = 0
        self.values_left = _MOST_VALUES
        self.part = "its header"

    def read(self) -> tuple[dict[str, GGUFField], dict[str, _Tensor]]:
        if (magic := bytes(self.take(4))) != b"GGUF":
            raise ValueError(f"{self.path} is no GGUF file: it begins with {magic!r}, not with b'GGUF'.")
        version = self.number("I")
        if version & 0xFFFF == 0:
            raise ValueError(
                f"{self.path} is a big-endian GGUF file, which cannot be read. "
                "The command gguf-convert-endian of the gguf package makes it little-endian."
            )
        if version not in (2, 3):
            raise ValueError(f"{self.path} is a GGUF file of version {version}; versions 2 and 3 can be read.")
        tensor_count, key_count = self.number("Q"), self.number("Q")
        self.spend(8 * (tensor_count + key_count))  # each takes as much memory as eight elements
        fields: dict[str, GGUFField] = {}
        for i in range(key_count):
            self.part = f"metadata key {i}"
            key = self.string()
            self.part = f"metadata key {key!r}"
            if key in fields:
                raise self.bad("is there twice")
            fields[key] = self.value(self.number("I"))
        found: dict[str, tuple[tuple[int, ...], Any, int, int]] = {}
        for i in range(tensor_count):
            self.part = f"tensor {i}"
            name = self.string()
            self.part = f"tensor {name!r}"
            if name in found:
                raise self.bad("is there twice")
            found[name] = self.tensor()
        self.part = "metadata key 'general.alignment'"
        alignment = fields["general.alignment"].value if "general.alignment" in fields else 32
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self.bad(f"is {alignment!r}, and no power of two")
        return fields, self.placed(found, self.at + -self.at % alignment, alignment)

    def tensor(self) -> tuple[tuple[int, ...], Any, int, int]:
        """Shape, type, offset and size of the next tensor."""
        axes = self.number("I")
        if axes > _MOST_AXES:
            raise self.bad(f"has {axes} axes, more than {_MOST_AXES}")
        shape = tuple(self.numbers("Q", axes))[::-1]
        number, offset = self.number("I"), self.number("Q")
        if not can_be_a_shape(shape):
            raise self.bad(f"has the shape {shape}, more than any file can hold")
        try:
            kind = self.gguf.GGMLQuantizationType(number)
            block, size = self.gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise self.bad(f"has the type {number}, which the installed gguf package does not know") from None
        row = shape[-1] if shape else 1
        if row % block:
            raise self.bad(f"has rows of {row} elements, and {kind.name} stores them in blocks of {block}")
        return shape, kind, offset, math.prod(shape) // block * size

    def placed(
        self, found: dict[str, tuple[tuple[int, ...], Any, int, int]], start: int, alignment: int
    ) -> dict[str, _Tensor]:
        """The tensors where they lie: in the file, aligned, no two in the same place."""
        tensors: dict[str, _Tensor] = {}
        for name, (shape, kind, offset, size) in found.items():
            self.part = f"tensor {name!r}"
            if offset % alignment:
                raise self.bad(f"lies at offset {offset}, which is no multiple of the alignment {alignment}")
            tensor = _Tensor(shape, kind, start + offset, start + offset + size)
            if tensor.stop > len(self.data):
                raise self.bad(f"ends at byte {tensor.stop}, and the file has {len(self.data)}")
            tensors[name] = tensor
        last, end = "", 0
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1][2:]):
            self.part = f"tensor {name!r}"
            if tensor.start < end:
                raise self.bad(f"lies over tensor {last!r}")
            last, end = name, tensor.stop
        return tensors

    def bad(self, problem: str) -> ValueError:
        return ValueError(f"{self.path} cannot be read as GGUF: {self.part} {problem}. Fetch or convert it once more.")

    def spend(self, count: int) -> None:
        self.values_left -= count
        if self.values_left < 0:
            raise self.bad(f"would make it more than {_MOST_VALUES} keys, tensors and array elements")

    def take(self, size: int) -> memoryview:
        first, self.at = self.at, self.at + size
        if self.at > len(self.data):
            raise self.bad(f"goes on to byte {self.at}, and the file has {len(self.data)}")
        return self.data[first : self.at]

    def numbers(self, dtype: str, count: int) -> list[Any]:
        return np.frombuffer(self.take(np.dtype(dtype).itemsize * count), f"<{dtype}").tolist()

    def number(self, dtype: str) -> Any:
        return self.numbers(dtype, 1)[0]

    def string(self) -> str:
        (size,) = struct.unpack("<Q", self.take(8))
        try:
            return str(self.take(size), "utf-8")
        except UnicodeDecodeError as error:
            raise self.bad(f"has text that is no UTF-8 ({error})") from None

    def value(self, kind: int, depth: int = 0) -> GGUFField:
        if kind not in TYPES:
            raise self.bad(f"has a value of the type {kind}, which GGUF does not have")
        if kind in NUMBERS:
            return GGUFField(TYPES[kind], self.number(NUMBERS[kind]))
        if kind == STRING:
            return GGUFField(TYPES[kind], self.string())
        if depth == _DEEPEST:
            raise self.bad(f"has arrays nested more than {_DEEPEST} deep")
        kind, count = self.number("I"), self.number("Q")
        self.spend(count + 1)
        if kind in NUMBERS:
            return GGUFField(_ARRAYS[kind], self.numbers(NUMBERS[kind], count))
        if kind == STRING:
            return GGUFField(_ARRAYS[kind], [self.string() for _ in range(count)])
        elements = [self.value(kind, depth + 1) for _ in range(count)]
        return GGUFField(_ARRAYS[ARRAY], elements)
