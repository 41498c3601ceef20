"""Boxes of the tensors of a source, read without holding more than a box."""

import contextlib
import ctypes
import math
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowbit.formats._blocks import WHOLE

from ._boxes import runs, struct_of, units_of
from ._contents import DTYPES, volume
from ._maps import located, release
from ._processes import Box
from .gguf import GGUFFile
from .safetensors import LowbitFile
from .source import Tensors, is_stored

MAPPED = 1 << 26  # bytes of a file that are looked at, before their pages are let go
_PAGE = 4096


def reader(source: Tensors, name: str, keep: bool) -> tuple[Any, list[int], Callable[[Box], Any]]:
    """What a tensor of a source reads as, in which steps it can be cut, and what reads a box of it.

    `keep`: as it is stored. Otherwise numbers that can be quantized.
    """
    kind, shape = source.type(name), source.shape(name)
    if isinstance(source, LowbitFile):
        like = jax.tree.map(struct_of, source.struct(name))
        if keep or kind in DTYPES:
            place = source.located(name)  # is looked at now, and let go
            release()
            return like, units_of(like), partial(source.read, name) if place is None else _from_file(place, like)
        if not like.transposed:
            return struct_of(like), units_of(like), _decoded(source, name)
    elif kind in DTYPES:
        view = np.asarray(source.array(name))
        return struct_of(view), [1] * len(shape), _from_file(located(view), view)
    if isinstance(source, GGUFFile) and not is_stored(kind) and len(shape) > 1:
        # Rows are of whole blocks.
        return jax.ShapeDtypeStruct(shape, np.float32), [1] * (len(shape) - 1) + [WHOLE], _rows(source, name)
    if keep:
        like = jax.tree.map(struct_of, source.array(name))
        release()
        return like, [WHOLE] * len(shape), _held(source.array, name)
    return jax.ShapeDtypeStruct(shape, np.float32), [WHOLE] * len(shape), _held(source.dense, name)


def _held(read: Callable[[str], Any], name: str) -> Callable[[Box], Any]:
    """Reads what cannot be cut."""

    def whole(_: Box) -> Any:
        array = read(name)
        release()
        return array

    return whole


def _rows(source: GGUFFile, name: str) -> Callable[[Box], Any]:
    def rows(box: Box) -> np.ndarray:
        (start, *others), length = runs(source.shape(name), box)
        assert not others
        values = source.values(name, start, start + length).reshape([b - a for a, b in box])
        release()
        return values

    return rows


def _decoded(source: LowbitFile, name: str) -> Callable[[Box], Any]:
    def numbers(box: Box) -> np.ndarray:
        stored: Any = source.read(name, box)
        values = np.asarray(jax.tree.map(jnp.asarray, stored).materialize()).astype(np.float32)
        release()
        return values

    return numbers


def _from_file(place: tuple[Path, int] | None, like: Any) -> Callable[[Box], Any]:
    """Reads boxes of an array that begins somewhere in a file."""
    assert place is not None or not math.prod(like.shape)
    path, first = place or (Path(), 0)
    dtype, bits = like.dtype, np.dtype(f"V{like.dtype.itemsize}")

    def box_of(box: Box) -> np.ndarray:
        shape = [b - a for a, b in box]
        starts, length = runs(like.shape, box)
        if len(starts) == 1 and length:
            data = _run_of(path, first + starts[0] * dtype.itemsize, length * dtype.itemsize)
        else:
            data = _aligned(volume(box) * dtype.itemsize, 64)
            if data.size:
                _copy(path, first, like.shape, box, data.view(bits).reshape(shape))
        return data.view(dtype).reshape(shape)

    return box_of


def _aligned(size: int, step: int) -> np.ndarray:
    """Bytes that begin at a multiple of `step`; of 64, JAX takes them without a copy."""
    raw = np.empty(size + step, np.uint8)
    return raw[-raw.ctypes.data % step :][:size]


_own = threading.local()
_libc = ctypes.CDLL(None)


def _run_of(path: Path, at: int, length: int) -> np.ndarray:
    """Bytes of a file: from the system's cache if they are there, and otherwise from the disk past it.

    Through the cache each byte is copied once more, and on a virtual machine that may take longer than the disk does.
    """
    data = _aligned(length, 64)
    first = at // _PAGE * _PAGE
    size = -(-(at + length - first) // _PAGE) * _PAGE
    with open(path, "rb", buffering=0) as file:
        done = 0
        if not _is_cached(file.fileno(), first, at + length - first):
            if getattr(_own, "pages", np.empty(0)).size < size:
                _own.pages = _aligned(size, _PAGE)  # new memory costs as much as to read into it
            pages = _own.pages[:size]
            with contextlib.suppress(OSError):  # not every file system can, and macOS has another way
                direct = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0) | os.O_CLOEXEC)
                try:
                    if os.preadv(direct, [pages.data], first) >= at + length - first:
                        data[:], done = pages[at - first :][:length], length
                finally:
                    os.close(direct)
        read_into(file.fileno(), data[done:], at + done, path)
    return data


def _is_cached(file: int, first: int, length: int) -> bool:
    """Whether the system has the pages of a file in memory. To try and read them would make it fetch them."""
    if first + length > os.fstat(file).st_size:
        return True  # cut off, as the reader will find
    skipped = first % mmap.ALLOCATIONGRANULARITY
    with mmap.mmap(file, length + skipped, prot=mmap.PROT_READ, offset=first - skipped) as pages:
        view = np.frombuffer(pages, np.uint8)
        held = np.zeros(-(-view.size // _PAGE), np.uint8)
        failed = _libc.mincore(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(view.size), held.ctypes)
        del view
    return not failed and bool((held & 1).all())


def _copy(path: Path, first: int, shape: Sequence[int], box: Box, into: np.ndarray) -> None:
    """Copy a box of many short runs from a file, which is read in long ones: what lies between them comes next."""
    with open(path, "rb", buffering=0) as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
        whole = np.frombuffer(pages, into.dtype, math.prod(shape), first).reshape(shape)
        part = whole[tuple(slice(a, b) for a, b in box)]
        at = first + part.ctypes.data - whole.ctypes.data
        while len(part) == 1:
            part, into = part[0], into[0]
        stride, step = part.strides[0], max(MAPPED // part.strides[0], 1)
        for i in range(0, len(part), step):
            if hasattr(os, "posix_fadvise"):  # not on macOS
                os.posix_fadvise(file.fileno(), at + (i + step) * stride, step * stride, os.POSIX_FADV_WILLNEED)
            into[i : i + step] = part[i : i + step]
            pages.madvise(mmap.MADV_DONTNEED)
        del whole, part


def read_into(file: int, into: np.ndarray, at: int, path: Path) -> None:
    done = 0
    while done < into.size:
        count = os.preadv(file, [into[done:].data], at + done)
        if count == 0:
            raise ValueError(f"{path} was cut off while it was read.")
        done += count
