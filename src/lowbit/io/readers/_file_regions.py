"""Reading regions of an array from a file, without holding more than a region in memory."""

import contextlib
import ctypes
import math
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .._regions import Region, contiguous_runs, region_shape, region_size

MAPPED = 1 << 26  # bytes of a mapped file that are accessed before its pages are released
_PAGE = 4096


def region_reader(location: tuple[Path, int] | None, like: Any) -> Callable[[Region], np.ndarray]:
    """A function that reads regions of an array `like` this one, which starts at an offset in a file.

    `location` may be None for an empty array.
    """
    assert location is not None or not math.prod(like.shape)
    path, first = location or (Path(), 0)
    dtype, bits = like.dtype, np.dtype(f"V{like.dtype.itemsize}")

    def read(region: Region) -> np.ndarray:
        shape = region_shape(region)
        starts, length = contiguous_runs(like.shape, region)
        if len(starts) == 1 and length:
            data = _read_run(path, first + starts[0] * dtype.itemsize, length * dtype.itemsize)
        else:
            data = _aligned(region_size(region) * dtype.itemsize, 64)
            if data.size:
                _copy(path, first, like.shape, region, data.view(bits).reshape(shape))
        return data.view(dtype).reshape(shape)

    return read


def _aligned(size: int, step: int) -> np.ndarray:
    """Uninitialized bytes at a multiple of `step`. JAX uses arrays that are aligned to 64 bytes without a copy."""
    raw = np.empty(size + step, np.uint8)
    return raw[-raw.ctypes.data % step :][:size]


_thread = threading.local()
_libc = ctypes.CDLL(None)


def _read_run(path: Path, at: int, length: int) -> np.ndarray:
    """Read bytes of a file: from the page cache if they are there, otherwise directly from the disk.

    Reading through the cache copies each byte once more, which on a virtual machine may take longer than the disk.
    """
    data = _aligned(length, 64)
    first = at // _PAGE * _PAGE
    size = -(-(at + length - first) // _PAGE) * _PAGE
    with open(path, "rb", buffering=0) as file:
        done = 0
        if not _is_cached(file.fileno(), first, at + length - first):
            if getattr(_thread, "pages", np.empty(0)).size < size:
                _thread.pages = _aligned(size, _PAGE)  # allocating costs as much as reading
            pages = _thread.pages[:size]
            with contextlib.suppress(OSError):  # not every file system supports it; macOS has no O_DIRECT
                direct = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0) | os.O_CLOEXEC)
                try:
                    if os.preadv(direct, [pages.data], first) >= at + length - first:
                        data[:], done = pages[at - first :][:length], length
                finally:
                    os.close(direct)
        read_into(file.fileno(), data[done:], at + done, path)
    return data


def _is_cached(file: int, first: int, length: int) -> bool:
    """Whether the pages of a file are in the page cache, without causing them to be read."""
    if first + length > os.fstat(file).st_size:
        return True  # truncated, which `read_into` reports
    skipped = first % mmap.ALLOCATIONGRANULARITY
    with mmap.mmap(file, length + skipped, prot=mmap.PROT_READ, offset=first - skipped) as pages:
        view = np.frombuffer(pages, np.uint8)
        resident = np.zeros(-(-view.size // _PAGE), np.uint8)
        failed = _libc.mincore(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(view.size), resident.ctypes)
        del view
    return not failed and bool((resident & 1).all())


def _copy(path: Path, first: int, shape: Sequence[int], region: Region, into: np.ndarray) -> None:
    """Copy a region of many short runs from a file.

    The file is read ahead in long stretches, since the bytes between the runs belong to the next regions.
    """
    with open(path, "rb", buffering=0) as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
        whole = np.frombuffer(pages, into.dtype, math.prod(shape), first).reshape(shape)
        source = whole[tuple(slice(a, b) for a, b in region)]
        at = first + source.ctypes.data - whole.ctypes.data
        while len(source) == 1:
            source, into = source[0], into[0]
        stride, step = source.strides[0], max(MAPPED // source.strides[0], 1)
        for i in range(0, len(source), step):
            if hasattr(os, "posix_fadvise"):  # not on macOS
                os.posix_fadvise(file.fileno(), at + (i + step) * stride, step * stride, os.POSIX_FADV_WILLNEED)
            into[i : i + step] = source[i : i + step]
            pages.madvise(mmap.MADV_DONTNEED)
        del whole, source


def read_into(file: int, into: np.ndarray, at: int, path: Path) -> None:
    """Fill an array with the bytes of an open file from an offset on; `path` is for the error."""
    done = 0
    while done < into.size:
        count = os.preadv(file, [into[done:].data], at + done)
        if count == 0:
            raise ValueError(f"{path} was truncated while it was read.")
        done += count
