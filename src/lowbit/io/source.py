"""Named tensors in a file or a directory, whatever its kind."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lowbit.formats import QuantizedArray


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

    def type(self, name: str) -> str:
        """What it is stored as, by the name that the file's own kind has for it."""
        ...

    def array(self, name: str) -> QuantizedArray | np.ndarray:
        """The tensor with the bits that the file stores, where we have a format for them."""
        ...

    def dense(self, name: str, dtype: Any = np.float32) -> np.ndarray:
        """The numbers of the tensor."""
        ...
