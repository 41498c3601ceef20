"""Reading GGUF files, the format of llama.cpp.

A GGUF file has no checksums and is not trusted: every count, length, offset, shape and type is checked against the size
of the file before it is used, and whatever is inconsistent raises one `ValueError` that names the file and the tensor.
Tensors are read on request, from a memory map.

The header is not read by `gguf.GGUFReader`, which creates an object of half a kilobyte for each number of an array: a
file of 300 kB can take 200 MB there. The `gguf` package defines the types of tensors and decodes them to float32.
"""

import math
import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lowbit.formats import QuantizedArray

from .._checks import can_be_a_shape
from .._chunks import Chunked
from .._dtypes import DTYPES, GGUF_DTYPES
from .._gguf_blocks import BLOCK_TYPES, CHUNK
from .._maps import mapped, release
from .._regions import Region, full_region, region_shape
from ._base import Reader

# The types of metadata values by their numbers in the GGUF specification (ggml/docs/gguf.md), and for those that are
# numbers their codes in `struct` and numpy.
STRING, ARRAY = 8, 9
TYPES = {0: "UINT8", 1: "INT8", 2: "UINT16", 3: "INT16", 4: "UINT32", 5: "INT32", 6: "FLOAT32", 7: "BOOL"}
TYPES |= {STRING: "STRING", ARRAY: "ARRAY", 10: "UINT64", 11: "INT64", 12: "FLOAT64"}
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_ARRAYS = {kind: f"[{name}]" for kind, name in TYPES.items()}

# The total of keys, tensors and array elements in a header. The largest vocabularies need a third of it; as Python
# objects this many take less than half a gigabyte.
_MOST_VALUES = 1 << 22
_MOST_AXES = 4  # GGML_MAX_DIMS
_DEEPEST = 4  # levels of nested arrays


class GGUFField(NamedTuple):
    """A value of a file's metadata with its type there, such as `"UINT32"`, or `"[STRING]"` for an array.

    The elements of an `"[ARRAY]"` are fields themselves.
    """

    type: str
    value: Any


class GGUFFile(Reader):
    """A GGUF file: its metadata, and its tensors by name, each read on request.

        file = GGUFFile("model.gguf")
        file.metadata["general.architecture"]       # 'llama'
        file.type("token_embd.weight")              # 'Q4_K'
        file.array("token_embd.weight")             # a PackedArray with the file's own codes and scales
        file.dense("blk.0.attn_q.weight")           # float32, whatever the file stores

    Opening it reads and checks the whole header; a file that is truncated or damaged there raises a `ValueError`. The
    numbers of a tensor have no checksum. `fields` is the metadata with its types in the file, for `write_gguf`.
    `strict`: `array` raises for a tensor whose type lowbit has no format for, instead of dequantizing it.
    """

    fields: dict[str, GGUFField]

    def __init__(self, path: str | os.PathLike[str], *, strict: bool = False):
        self._gguf = package()
        path, self._strict = Path(path), strict
        if path.stat().st_size == 0:
            raise ValueError(f"{path} is not a GGUF file: it is empty.")
        self._data = mapped(path)
        self.fields, tensors = _Header(path, self._data, self._gguf).read()
        super().__init__(path, {key: without_types(field) for key, field in self.fields.items()}, tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor in C order: `(out, in)` for a linear layer."""
        return self._entry(name).shape

    def nbytes(self, name: str) -> int:
        return self._bytes(self._entry(name)).nbytes

    def type(self, name: str) -> str:
        return self._entry(name).type.name

    def dense(self, name: str, dtype: Any = np.float32) -> np.ndarray:
        tensor = self._entry(name)
        if tensor.type.name in GGUF_DTYPES:
            return self._plain(tensor).astype(dtype, copy=False)
        return self._decoded(name, full_region(tensor.shape), dtype)

    def array(self, name: str) -> QuantizedArray | np.ndarray:
        """A tensor with the bits that the file stores, if lowbit has a format for them. Never quantized again.

        - Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K to Q6_K, IQ4_NL, IQ4_XS, TQ1_0, TQ2_0, MXFP4 and NVFP4: a quantized array
          with blocks along the last axis. Scales are float16 or codes, as in the file.
        - Floating-point numbers and integers: a numpy array, a read-only view of the file.
        - All others, whose codes refer to a codebook: `dense(name)`. With `strict` that raises.
        """
        tensor = self._entry(name)
        if tensor.type.name in GGUF_DTYPES:
            return self._plain(tensor)
        if tensor.type.name in BLOCK_TYPES:
            return jax.tree.map(jnp.asarray, self._stored(name, full_region(tensor.shape)))
        self._check_strict(name)
        return self.dense(name)

    def chunks(self, name: str, *, as_stored: bool) -> Chunked:
        shape, kind = self.shape(name), self.type(name)
        if kind in GGUF_DTYPES:
            return super().chunks(name, as_stored=as_stored)
        stored = as_stored and kind in BLOCK_TYPES
        if as_stored and not stored:
            self._check_strict(name)

        def read(region: Region) -> Any:
            found = self._stored(name, region) if stored else self._decoded(name, region)
            release()
            return found

        like = BLOCK_TYPES[kind].like(shape) if stored else jax.ShapeDtypeStruct(shape, np.float32)
        block = self._gguf.GGML_QUANT_SIZES[self._entry(name).type][0]
        return Chunked(like, [1] * (len(shape) - 1) + [block], read)

    def _stored(self, name: str, region: Region) -> QuantizedArray:
        """A region of whole blocks with the bits that the file stores, in numpy."""
        kind = BLOCK_TYPES[self.type(name)]
        blocks = self._blocks(name, region).view(kind.dtype)
        try:
            return kind.read(blocks, region_shape(region))
        except ValueError as error:
            raise ValueError(
                f"{self.path}: tensor {name!r} of type {self.type(name)} {error}. `dense` decodes it as llama.cpp does."
            ) from None

    def _decoded(self, name: str, region: Region, dtype: Any = np.float32) -> np.ndarray:
        """A region of whole blocks, dequantized by the gguf package."""
        tensor, blocks = self._entry(name), self._blocks(name, region)
        block = self._gguf.GGML_QUANT_SIZES[tensor.type][0]
        out, step = np.empty((len(blocks), block), dtype), max(1, CHUNK // block)
        for first in range(0, len(blocks), step):
            try:
                with np.errstate(all="ignore"):  # an infinite scale makes its block infinite
                    out[first : first + step] = self._gguf.dequantize(blocks[first : first + step], tensor.type)
            except NotImplementedError:
                raise ValueError(
                    f"{self.path}: tensor {name!r} is of type {tensor.type.name}, which the installed gguf package "
                    "cannot decode. Convert the file to another type, or install a newer gguf."
                ) from None
        return out.reshape(region_shape(region))

    def _blocks(self, name: str, region: Region) -> np.ndarray:
        """The bytes of a region of whole blocks, one block in each row."""
        tensor = self._entry(name)
        block, size = self._gguf.GGML_QUANT_SIZES[tensor.type]
        stored = self._bytes(tensor).reshape(*tensor.shape[:-1], tensor.shape[-1] // block, size)
        start, stop = region[-1]
        rows = (slice(*bounds) for bounds in region[:-1])
        return stored[(*rows, slice(start // block, stop // block))].reshape(-1, size)

    def _check_strict(self, name: str) -> None:
        if self._strict:
            raise ValueError(
                f"{self.path}: tensor {name!r} cannot keep its stored bits: lowbit has no format for the codebook of "
                f"{self.type(name)}. Without strict it is dequantized to float32."
            )

    def _bytes(self, tensor: "_Tensor") -> np.ndarray:
        return self._data[tensor.start : tensor.stop]

    def _plain(self, tensor: "_Tensor") -> np.ndarray:
        return self._bytes(tensor).view(DTYPES[tensor.type.name]).reshape(tensor.shape)


def package() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ImportError("GGUF files need the gguf package: pip install 'lowbit[gguf]'") from error
    return gguf


def without_types(field: GGUFField) -> Any:
    """The value of a field as a plain Python object."""
    return [without_types(element) for element in field.value] if field.type == "[ARRAY]" else field.value


class _Tensor(NamedTuple):
    """A tensor in the header: bytes `start` to `stop` of the file; `type` is a `gguf.GGMLQuantizationType`."""

    shape: tuple[int, ...]
    type: Any
    start: int
    stop: int


class _Header:
    """Parses a header, never past the end of the file.

    Each step consumes bytes of the file, so no count in it can make parsing run longer than the file.
    """

    def __init__(self, path: Path, data: np.ndarray, gguf: Any):
        self.path, self.data, self.gguf = path, data.data, gguf
        self.at = 0
        self.values_left = _MOST_VALUES
        self.where = "its header"

    def read(self) -> tuple[dict[str, GGUFField], dict[str, _Tensor]]:
        if (magic := bytes(self.take(4))) != b"GGUF":
            raise ValueError(f"{self.path} is not a GGUF file: it starts with {magic!r}, not b'GGUF'.")
        version = self.number("I")
        if version & 0xFFFF == 0:
            raise ValueError(
                f"{self.path} is a big-endian GGUF file, which cannot be read. "
                "The gguf-convert-endian script of the gguf package makes it little-endian."
            )
        if version not in (2, 3):
            raise ValueError(f"{self.path} is a GGUF file of version {version}; versions 2 and 3 can be read.")
        tensor_count, key_count = self.number("Q"), self.number("Q")
        self.spend(8 * (tensor_count + key_count))  # each needs the memory of eight elements
        fields: dict[str, GGUFField] = {}
        for i in range(key_count):
            self.where = f"metadata key {i}"
            key = self.string()
            self.where = f"metadata key {key!r}"
            if key in fields:
                raise self.bad("is a duplicate")
            fields[key] = self.value(self.number("I"))
        found: dict[str, tuple[tuple[int, ...], Any, int, int]] = {}
        for i in range(tensor_count):
            self.where = f"tensor {i}"
            name = self.string()
            self.where = f"tensor {name!r}"
            if name in found:
                raise self.bad("is a duplicate")
            found[name] = self.tensor()
        self.where = "metadata key 'general.alignment'"
        alignment = fields["general.alignment"].value if "general.alignment" in fields else 32
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self.bad(f"is {alignment!r}, not a power of two")
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
        """The tensors, which must be inside the file, aligned, and not overlap."""
        tensors: dict[str, _Tensor] = {}
        for name, (shape, kind, offset, size) in found.items():
            self.where = f"tensor {name!r}"
            if offset % alignment:
                raise self.bad(f"is at offset {offset}, which is not a multiple of the alignment {alignment}")
            tensor = _Tensor(shape, kind, start + offset, start + offset + size)
            if tensor.stop > len(self.data):
                raise self.bad(f"ends at byte {tensor.stop} of a file of {len(self.data)}")
            tensors[name] = tensor
        last, end = "", 0
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1][2:]):
            self.where = f"tensor {name!r}"
            if tensor.start < end:
                raise self.bad(f"overlaps tensor {last!r}")
            last, end = name, tensor.stop
        return tensors

    def bad(self, problem: str) -> ValueError:
        return ValueError(f"{self.path} cannot be read as GGUF: {self.where} {problem}. Download or convert it again.")

    def spend(self, count: int) -> None:
        self.values_left -= count
        if self.values_left < 0:
            raise self.bad(f"exceeds {_MOST_VALUES} keys, tensors and array elements in total")

    def take(self, size: int) -> memoryview:
        first, self.at = self.at, self.at + size
        if self.at > len(self.data):
            raise self.bad(f"extends to byte {self.at} of a file of {len(self.data)}")
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
            raise self.bad(f"has text that is not UTF-8 ({error})") from None

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
