"""The staging file: written chunk by chunk next to its target, which it replaces when it is complete."""

import contextlib
import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lowbit.formats.blocks import covered

from .._chunks import chunks_of, spans_of_scales, units_of
from .._maps import release
from .._regions import Region, contiguous_runs, full_region, region_shape, region_size
from ..container._layout import Layout
from ..readers._file_regions import MAPPED, read_into
from ._journal import journal_path, read_lines
from ._work import Work

SYNCED = 1 << 26  # elements between two lines of the journal
_CHECKED = 1 << 21  # bytes that are read at a time for a checksum

Note = Callable[[str], None]

# Two functions, since each step on many scales needs memory.
_coded = jax.jit(lambda array: array.with_coded_scales())
_values = jax.jit(lambda array: array.scale_values())


class StagingFile:
    """A file that is being written, and its journal, which this process has locked.

    Values that depend on a whole tensor are staged past the end of the file; `finish` truncates them.
    """

    def __init__(self, target: Path, layout: Layout, works: Sequence[Work], journal: int):
        self.path, self.journal_path = staging_path(target), journal_path(target)
        self.layout, self.journal = layout, journal
        self.tensors, self.offsets, self.size = dict(layout.tensors), dict(layout.offsets), layout.size
        for work in works:
            for field, struct in work.staged().items():
                name = _staged_name(work.name, field)
                self.tensors[name], self.offsets[name] = struct, self.size
                self.size += math.prod(struct.shape) * struct.dtype.itemsize
        self.file = -1
        self.done = 0  # steps
        self.crc32: dict[str, tuple[int, int]] = {}  # for each tensor, the checksum of its first bytes and their number
        self.squares: dict[str, tuple[float, ...]] = {}
        self.changed: set[str] = set()  # names that the next line of the journal covers
        self.unsynced = 0

    @classmethod
    @contextlib.contextmanager
    def opened(
        cls, target: Path, layout: Layout, works: Sequence[Work], journal: int, key: str, note: Note
    ) -> Iterator["StagingFile"]:
        staging = cls(target, layout, works, journal)
        try:
            staging.open(key, note)
            yield staging
        finally:
            if staging.file >= 0:
                os.close(staging.file)

    def open(self, key: str, note: Note) -> None:
        lines = read_lines(self.journal)
        # A journal without its staging file belongs to a run that finished.
        if lines and self.path.is_file():
            if lines[0].get("key") == key and self.path.stat().st_size in (self.size, self.layout.size):
                self.file = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
                for line in lines[1:]:
                    self.done = line["done"]
                    self.crc32 |= {name: tuple(found) for name, found in line["crc32"].items()}
                    self.squares |= {name: tuple(found) for name, found in line["squares"].items()}
                return
            note(f"{self.path.name} is of another source or other patterns: starting over.")
        os.ftruncate(self.journal, 0)
        _to_disk(self.journal)
        self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        os.ftruncate(self.file, self.size)
        self.append({"key": key})

    def append(self, line: dict[str, Any]) -> None:
        """Append a line to the journal, after everything that it covers is on the disk."""
        _to_disk(self.file)
        os.write(self.journal, json.dumps(line).encode() + b"\n")
        _to_disk(self.journal)

    def write(self, work: Work, step: int, stored: dict[str, Any], lost: tuple[float, ...]) -> None:
        """Write the result of a step, and from time to time a line of the journal."""
        chunk, components = work.chunk(step), self.layout.components[work.name]
        names = components | {field: _staged_name(work.name, field) for field in work.staged()}
        if work.finds_maxima(step):
            known = self.read_staged(work, "maxima", chunk)
            stored = {"maxima": np.maximum(known, stored["maxima"])}
        for field, spans in work.spans().items():
            if field in stored:
                self.put(names[field], chunk, spans, stored[field])
        before = self.squares.get(work.name, (0,) * len(lost))
        self.squares[work.name] = tuple(a + b for a, b in zip(before, lost, strict=True))
        self.changed |= {work.name, *components.values()}
        self.done += 1
        self.unsynced += region_size(chunk)
        if step == work.steps - 1:
            self.put_scales(work)
            for name in components.values():
                self.check(name)
        if self.unsynced >= SYNCED or work.moments is not None:  # calibrated chunks take long
            self.sync()

    def put(self, name: str, region: Region, spans: Sequence[int], component: Any) -> None:
        """Write the component of a region of an array; `spans`: how many elements one of the component covers."""
        tensor = self.tensors[name]
        data = np.ascontiguousarray(component).reshape(-1).view(np.uint8)
        region = region[len(region) - len(tensor.shape) :]  # an order has the last axis only
        starts, length = contiguous_runs(tensor.shape, covered(region, spans, tensor.shape))
        length *= tensor.dtype.itemsize
        crc32, known = self.crc32.get(name, (0, 0))
        follows = name in self.layout.tensors and len(starts) == 1 and starts[0] * tensor.dtype.itemsize == known
        for i, start in enumerate(starts):
            at = self.offsets[name] + start * tensor.dtype.itemsize
            for first in range(i * length, (i + 1) * length, MAPPED):
                run = data[first : min(first + MAPPED, (i + 1) * length)]
                written = 0
                while written < run.size:
                    written += os.pwrite(self.file, run[written:].data, at + first - i * length + written)
                if follows:
                    crc32 = zlib.crc32(run.data, crc32)
                if run.size == MAPPED:
                    release()  # in case it is a view of a mapped file
        if follows:
            self.crc32[name] = crc32, known + length

    def read_staged(self, work: Work, field: str, region: Region) -> np.ndarray:
        """The staged values of a region of the array."""
        name = _staged_name(work.name, field)
        tensor = self.tensors[name]
        wanted = covered(region, work.spans()[field], tensor.shape)
        starts, length = contiguous_runs(tensor.shape, wanted)
        found = np.empty((len(starts), length), tensor.dtype)
        for run, start in zip(found, starts, strict=True):
            read_into(self.file, run.view(np.uint8), self.offsets[name] + start * tensor.dtype.itemsize, self.path)
        return found.reshape(region_shape(wanted))

    def maxima(self, work: Work, step: int) -> np.ndarray | None:
        """The maxima for the scales of a chunk, in the second of two passes."""
        second = work.two_pass and not work.finds_maxima(step)
        return self.read_staged(work, "maxima", work.chunk(step)) if second else None

    def put_scales(self, work: Work) -> None:
        """Write the scales that depend on the whole tensor, from the values that were staged."""
        shape, names, spans = work.like.shape, self.layout.components[work.name], spans_of_scales(work.like)
        if work.two_pass:
            scales = work.scale_of(self.read_staged(work, "maxima", full_region(shape)))
            self.put(names["scales"], full_region(shape), spans["scales"], scales)
        if work.stages_scales:
            lost, size = self.squares[work.name]
            for index in np.ndindex(*shape[:-2]):
                matrix = (*((i, i + 1) for i in index), *full_region(shape[-2:]))
                coded = _coded(work.made.replace(codes=None, scales=self.read_staged(work, "scales", matrix)))
                for field in ("scales", *coded.scale_components):
                    self.put(names[field], matrix, spans[field], getattr(coded, field))
                lost += self.error_change(work, matrix, np.asarray(_values(coded)))
            self.squares[work.name] = lost, size

    def error_change(self, work: Work, matrix: Region, values: np.ndarray) -> float:
        """The squared error of a matrix with these decoded scales, minus the sum of squares of its values."""
        change, spans, last = 0.0, work.spans()["scales"], values.shape[-2:]
        for chunk in chunks_of(work.like.shape[-2:], units_of(work.made)[-2:]):
            region = (*matrix[:-2], *chunk)
            scales, squares, products = (self.read_staged(work, field, region) for field in work.staged())
            now = values[(..., *(slice(*ends) for ends in covered(chunk, spans, last)))]
            with np.errstate(all="ignore"):
                ratio = np.nan_to_num(now / scales)
            change += float(np.sum(ratio * (ratio * squares - 2 * products), dtype=np.float64))
        return change

    def check(self, name: str) -> None:
        """Complete the checksum of a tensor, reading back what was not written in order."""
        tensor, (crc32, at) = self.tensors[name], self.crc32.get(name, (0, 0))
        size = math.prod(tensor.shape) * tensor.dtype.itemsize
        while at < size:
            data = np.empty(min(size - at, _CHECKED), np.uint8)
            read_into(self.file, data, self.offsets[name] + at, self.path)
            crc32, at = zlib.crc32(data.data, crc32), at + data.size
        self.crc32[name] = crc32, at

    def sync(self) -> None:
        changed = {
            what: {name: known[name] for name in known if name in self.changed}
            for what, known in (("crc32", self.crc32), ("squares", self.squares))
        }
        self.append({"done": self.done, **changed})
        self.changed, self.unsynced = set(), 0

    def keep(self) -> None:
        with contextlib.suppress(OSError):
            self.sync()

    def finish(self) -> None:
        start, end = self.layout.ends({name: crc32 for name, (crc32, _) in self.crc32.items()})
        for data, at in ((start, 0), (end, self.layout.size - len(end))):
            if os.pwrite(self.file, data, at) < len(data):
                raise OSError("The header could not be written in full.")
        if self.size > self.layout.size:
            self.sync()  # a resumed run must not need the staged values
            os.ftruncate(self.file, self.layout.size)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self.journal_path.unlink(missing_ok=True)


def _to_disk(file: int) -> None:
    getattr(os, "fdatasync", os.fsync)(file)  # macOS lacks fdatasync


def _staged_name(name: str, field: str) -> str:
    """The name of a staged value, which no tensor has."""
    return f"{name}\0{field}"


def staging_path(target: Path) -> Path:
    """The staging file of a target."""
    return target.parent / f".lowbit-{target.name}.part"
