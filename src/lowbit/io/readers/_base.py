"""What every reader of a file or a directory has in common."""

import difflib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lowbit.formats import FORMATS, PermutedArray, QuantizedArray
from lowbit.formats.blocks import WHOLE, span_of
from lowbit.formats.file_layouts import FILE_LAYOUTS

from .._chunks import Chunked, struct_of
from .._dtypes import DTYPES
from .._gguf_blocks import BLOCK_TYPES
from .._maps import located, release
from .._regions import Region
from ._file_regions import region_reader


class Reader(ABC):
    """Named tensors of a file or a directory, each read on request.

    - Opening one reads and checks the headers; a file that is damaged there raises a `ValueError` that names the file
      and the tensor. Numbers are read from a memory map when a method asks for them.
    - It is a collection of names: `for name in reader`, `name in reader`, `len(reader)`, `reader.names`.
    - `path`: the file or directory. `metadata`: what it says about itself, as a dict.
    - `refusal`: why a model cannot be loaded although its tensors can be listed; empty if it can be.
    - A method that gets an unknown name raises a `KeyError` with similar names.

    A subclass passes its entries by name to `__init__` and implements `shape`, `nbytes`, `type`, `array` and `dense`.
    `chunks` needs an implementation only where a quantized tensor can be read in chunks.
    """

    path: Path
    metadata: dict[str, Any]
    refusal: str = ""

    def __init__(self, path: Path, metadata: dict[str, Any], entries: Mapping[str, Any]):
        self.path, self.metadata, self._entries = path, metadata, entries

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors, in the order of the file."""
        return tuple(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}, {len(self)} tensors)"

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, also of a quantized one, as the dequantized array has it. Reads no numbers."""

    @abstractmethod
    def nbytes(self, name: str) -> int:
        """The number of bytes that a tensor takes in the file, with all its components."""

    @abstractmethod
    def type(self, name: str) -> str:
        """How a tensor is stored: the name of a lowbit format (`"nf4"`), a dtype as safetensors names it (`"BF16"`), or
        the file's own name for anything else (`"Q4_1"`).
        """

    @abstractmethod
    def array(self, name: str) -> QuantizedArray | np.ndarray:
        """A tensor with the bits that the file stores: a quantized array if there is a lowbit format for them, a
        read-only view of the file for plain numbers. Never quantized again. Anything else is `dense(name)`.
        """

    @abstractmethod
    def dense(self, name: str, dtype: Any = np.float32) -> np.ndarray:
        """A tensor dequantized to `dtype`. A read-only view of the file where nothing has to be decoded or cast."""

    def chunks(self, name: str, *, as_stored: bool) -> Chunked:
        """A tensor that can be read in chunks: with the stored bits, or as numbers that can be quantized."""
        shape = self.shape(name)
        if self.type(name) in DTYPES:
            view = np.asarray(self.array(name))
            return Chunked(struct_of(view), [1] * len(shape), region_reader(located(view), view))
        whole = [WHOLE] * len(shape)
        if not as_stored:
            return Chunked(jax.ShapeDtypeStruct(shape, np.float32), whole, _read_whole(self.dense, name))
        like = jax.tree.map(struct_of, self.array(name))
        release()
        return Chunked(like, whole, _read_whole(self.array, name))

    def blocks(self, name: str) -> dict[int, int | None]:
        """The axes along which elements of a quantized tensor share a scale, from the end, and how many; None for all.

        Empty for a tensor that is not quantized. Reads no codes.
        """
        if self.type(name) in DTYPES or not is_stored(self.type(name)):
            return {}
        like: Any = self.chunks(name, as_stored=True).like
        like = like.array if isinstance(like, PermutedArray) else like
        return {axis: span_of(like.spans, like.swapped(axis)) or None for axis in like.scale_axes}

    def _entry(self, name: str) -> Any:
        if name not in self._entries:
            near = difflib.get_close_matches(name, self._entries)
            raise KeyError(
                f"{self.path} has no tensor {name!r}." + (f" Did you mean {' or '.join(near)}?" if near else "")
            )
        return self._entries[name]


def _read_whole(read: Callable[[str], Any], name: str) -> Callable[[Region], Any]:
    """Reads a tensor that cannot be split, for its one chunk."""

    def whole(_: Region) -> Any:
        array = read(name)
        release()
        return array

    return whole


def is_stored(kind: str) -> bool:
    """Whether tensors of a type are quantized arrays: of a lowbit format or a file's, or of a user's class.

    >>> is_stored("nf4"), is_stored("Q4_K"), is_stored("IQ2_XS"), is_stored("BF16")
    (True, True, False, False)
    """
    return any(kind in names for names in (FORMATS, FILE_LAYOUTS, BLOCK_TYPES)) or kind in _class_names(QuantizedArray)


def decoded_types(file: Reader) -> str | None:
    """A sentence on the tensors that are dequantized when they are read; None if there are none."""
    kinds = Counter(file.type(name) for name in file)
    which = ", ".join(f"{n} of type {kind}" for kind, n in kinds.items() if kind not in DTYPES and not is_stored(kind))
    told = f"{file.path}: tensors are dequantized to float32, since lowbit has no format for them: {which}."
    return told if which else None


def _class_names(cls: type) -> set[str]:
    return {cls.__name__}.union(*map(_class_names, cls.__subclasses__()))


def check_method(file: Reader) -> None:
    """Raise if a model was quantized by a method that cannot be read: its integers mean nothing without it."""
    if file.refusal:
        raise ValueError(file.refusal)
