"""Named tensors in a file or a directory, whatever its kind."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lowbit.formats import FORMATS, QuantizedArray

from ._folder import check_whole
from .gguf import GGUFFile
from .safetensors import LowbitFile, is_lowbit_file
from .tensors import WEIGHTS, HuggingFaceDir, SafetensorsFile, other_files

# Types of other files that are arrays of ours, bit for bit.
_KEPT = ("Q8_0", "TQ2_0")


class Tensors(Protocol):
    """What every reader is: tensors by name, each read when asked for."""

    path: Path
    metadata: dict[str, Any]

    def __iter__(self) -> Iterator[str]: ...

    def __len__(self) -> int: ...

    def __contains__(self, name: object) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        ...

    def nbytes(self, name: str) -> int:
        """How many bytes it takes as it is stored."""
        ...

    def type(self, name: str) -> str:
        """What it is stored as, by the name that the file's own kind has for it."""
        ...

    def array(self, name: str) -> QuantizedArray | np.ndarray:
        """The tensor with the bits that the file stores, where we have a format for them."""
        ...

    def dense(self, name: str, dtype: Any = np.float32) -> np.ndarray:
        """The numbers of the tensor."""
        ...


class LowbitDir(LowbitFile):
    """A directory as Hugging Face has them, with its weights in a lowbit file."""

    def __init__(self, path: str | os.PathLike[str]):
        folder = Path(path)
        super().__init__(folder / WEIGHTS)
        self.path, self.other_files = folder, other_files(folder)
        config = folder / "config.json"
        if config.is_file():
            try:
                self.metadata = {**self.metadata, "config": json.loads(config.read_bytes())}
            except ValueError as error:
                raise ValueError(f"{config} is no JSON: {error}.") from None


def is_stored(kind: str) -> bool:
    """Whether a type of tensor is a quantized array, in a format of lowbit or of a user's class."""
    return kind in FORMATS or kind in _KEPT or kind in _class_names(QuantizedArray)


def _class_names(cls: type) -> set[str]:
    return {cls.__name__}.union(*map(_class_names, cls.__subclasses__()))


def open_tensors(path: str | os.PathLike[str], *, strict: bool = False) -> Tensors:
    """The reader for a path: a GGUF file, a lowbit file, another safetensors file, or a Hugging Face directory.

    The first bytes tell, not the name. `strict`: what cannot be read as it is stored is an error.
    """
    path = Path(path)
    if path.is_dir():
        check_whole(path)
        ours = (path / WEIGHTS).is_file() and is_lowbit_file(path / WEIGHTS)
        return LowbitDir(path) if ours else HuggingFaceDir(path, strict=strict)
    with path.open("rb") as file:
        start = file.read(4)
    if start == b"GGUF":
        return GGUFFile(path)
    return LowbitFile(path) if is_lowbit_file(path) else SafetensorsFile(path, strict=strict)
