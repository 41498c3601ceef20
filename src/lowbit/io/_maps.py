"""Memory-mapped files: which file a view belongs to, and releasing pages that were read."""

import mmap
import weakref
from pathlib import Path
from typing import Any

import numpy as np

_open: "weakref.WeakSet[mmap.mmap]" = weakref.WeakSet()


class _MappedFile(mmap.mmap):
    """A memory map that knows its file."""

    path: Path


def mapped(path: Path) -> np.ndarray:
    """The bytes of a file that is not empty, as a read-only array; pages are read when they are accessed."""
    with path.open("rb") as file:
        pages = _MappedFile(file.fileno(), 0, access=mmap.ACCESS_READ)
    pages.path = path.absolute()
    _open.add(pages)
    return np.frombuffer(pages, np.uint8)


def located(view: np.ndarray) -> tuple[Path, int] | None:
    """The file that an array is a view of and the array's offset in it; None for any other array."""
    base: Any = view
    while base is not None and not isinstance(base, _MappedFile):
        base = base.obj if isinstance(base, memoryview) else getattr(base, "base", None)
    if base is None:
        return None
    return base.path, view.ctypes.data - np.frombuffer(base, np.uint8).ctypes.data


def release() -> None:
    """Release the pages of all mapped files. They count as memory of the process, and are read again if needed."""
    for pages in list(_open):
        pages.madvise(mmap.MADV_DONTNEED)
