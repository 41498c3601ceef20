"""Files mapped into memory: where in them a view lies, and how their pages are let go."""

import mmap
import weakref
from pathlib import Path
from typing import Any

import numpy as np

_open: "weakref.WeakSet[mmap.mmap]" = weakref.WeakSet()


def mapped(path: Path) -> np.ndarray:
    """The bytes of a file, read when they are looked at."""
    data: Any = np.memmap(path, np.uint8, mode="r")
    _open.add(data._mmap)
    return np.asarray(data)


def located(view: np.ndarray) -> tuple[Path, int] | None:
    """The file that an array is a view of, and where in it the array begins; None for any other array."""
    base: Any = view
    while base is not None and not isinstance(base, np.memmap):
        base = getattr(base, "base", None)
    if base is None or base.filename is None:
        return None
    return Path(base.filename), view.ctypes.data - base.ctypes.data


def release() -> None:
    """Let go of all pages that were looked at. They count as memory of the process, and are read again if needed."""
    for pages in list(_open):
        pages.madvise(mmap.MADV_DONTNEED)
