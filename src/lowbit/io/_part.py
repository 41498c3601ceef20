"""A file that grows beside its target, and the journal of what is done of it."""

import contextlib
import fcntl
import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lowbit.formats._blocks import covered

from ._boxes import boxes_of, part_spans_of, runs, units_of
from ._contents import volume, whole_box
from ._maps import release
from ._processes import Box
from ._reading import MAPPED, read_into
from ._work import Work
from ._writing import Layout

SYNCED = 1 << 26  # elements between two lines of the journal
_CHECKED = 1 << 21  # bytes of the file that are read at a time for a checksum

Note = Callable[[str], None]

# Of many scales each step takes memory, so these are two.
_coded = jax.jit(lambda array: array.with_coded_scales())
_values = jax.jit(lambda array: array.scale_values())


class Part:
    """A file that is being written, and the journal of what is done; `journal` is locked."""

    def __init__(self, target: Path, layout: Layout, works: Sequence[Work], journal: int):
        self.path, self.journal_path = part_of(target), _journal_of(target)
        self.layout, self.journal = layout, journal
        self.tensors, self.offsets, self.size = dict(layout.tensors), dict(layout.offsets), layout.size
        for work in works:
            for field, struct in work.aside().items():
                name = _waiting(work.name, field)
                self.tensors[name], self.offsets[name] = struct, self.size
                self.size += math.prod(struct.shape) * struct.dtype.itemsize
        self.file = -1
        self.done = 0  # pieces
        self.crc32: dict[str, tuple[int, int]] = {}  # of each tensor that of its first bytes, and how many those are
        self.squares: dict[str, tuple[float, float]] = {}
        self.since: set[str] = set()  # what the next line will speak of
        self.unsynced = 0

    @classmethod
    @contextlib.contextmanager
    def opened(
        cls, target: Path, layout: Layout, works: Sequence[Work], journal: int, key: str, note: Note
    ) -> Iterator["Part"]:
        part = cls(target, layout, works, journal)
        try:
            part.open(key, note)
            yield part
        finally:
            if part.file >= 0:
                os.close(part.file)

    def open(self, key: str, note: Note) -> None:
        lines = _lines(self.journal)
        # Of a journal without its part, the file was finished and has taken its place, and nothing is left to do.
        if lines and self.path.is_file():
            if lines[0].get("key") == key and self.path.stat().st_size in (self.size, self.layout.size):
                self.file = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
                for line in lines[1:]:
                    self.done = line["done"]
                    self.crc32 |= {name: tuple(found) for name, found in line["crc32"].items()}
                    self.squares |= {name: tuple(found) for name, found in line["squares"].items()}
                return
            note(f"{self.path.name} is of another source or other rules: starting over.")
        os.ftruncate(self.journal, 0)
        _to_disk(self.journal)
        self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        os.ftruncate(self.file, self.size)
        self.append({"key": key})

    def append(self, line: dict[str, Any]) -> None:
        """What the journal says is on the disk, is on the disk."""
        _to_disk(self.file)
        os.write(self.journal, json.dumps(line).encode() + b"\n")
        _to_disk(self.journal)

    def write(self, work: Work, step: int, stored: dict[str, Any], lost: tuple[float, float]) -> None:
        """Write what a step gave, and now and then a line of the journal."""
        box, parts = work.box(step), self.layout.parts[work.name]
        aside = {field: _waiting(work.name, field) for field in work.aside()}
        if work.looks(step):
            known = self.waiting(work, "largest", box)
            stored = {"largest": np.maximum(known, stored["largest"])}
        for field, spans in work.spans().items():
            if field in stored:
                self.put((parts | aside)[field], box, spans, stored[field])
        before = self.squares.get(work.name, (0, 0))
        self.squares[work.name] = before[0] + lost[0], before[1] + lost[1]
        self.since |= {work.name, *parts.values()}
        self.done += 1
        self.unsynced += volume(box)
        if step == work.steps - 1:
            self.put_scales(work)
            for name in parts.values():
                self.check(name)
        if self.unsynced >= SYNCED:
            self.sync()

    def put(self, name: str, box: Box, spans: Sequence[int], part: Any) -> None:
        """Write a part, of which an element covers so many of the array, to the place of a box of the array."""
        tensor = self.tensors[name]
        data = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
        starts, length = runs(tensor.shape, covered(box, spans, tensor.shape))
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
                    release()  # if it is of a file
        if follows:
            self.crc32[name] = crc32, known + length

    def waiting(self, work: Work, field: str, box: Box) -> np.ndarray:
        """What waits of a box of the array."""
        name = _waiting(work.name, field)
        tensor = self.tensors[name]
        there = covered(box, work.spans()[field], tensor.shape)
        starts, length = runs(tensor.shape, there)
        found = np.empty((len(starts), length), tensor.dtype)
        for run, start in zip(found, starts, strict=True):
            read_into(self.file, run.view(np.uint8), self.offsets[name] + start * tensor.dtype.itemsize, self.path)
        return found.reshape([stop - start for start, stop in there])

    def largest(self, work: Work, step: int) -> np.ndarray | None:
        """The largest numbers that the scales of a piece come from, once all were looked at."""
        return self.waiting(work, "largest", work.box(step)) if work.twice and not work.looks(step) else None

    def put_scales(self, work: Work) -> None:
        """Write the scales that have waited for all of a tensor."""
        shape, parts, spans = work.like.shape, self.layout.parts[work.name], part_spans_of(work.like)
        if work.twice:
            scales = work.scale_of(self.waiting(work, "largest", whole_box(shape)))
            self.put(parts["scales"], whole_box(shape), spans["scales"], scales)
        if work.waits:
            lost, size = self.squares[work.name]
            for index in np.ndindex(*shape[:-2]):
                box = (*((i, i + 1) for i in index), *whole_box(shape[-2:]))
                coded = _coded(work.made.replace(codes=None, scales=self.waiting(work, "scales", box)))
                for field in ("scales", *coded.scale_parts):
                    self.put(parts[field], box, spans[field], getattr(coded, field))
                lost += self.change(work, box, np.asarray(_values(coded)))
            self.squares[work.name] = lost, size

    def change(self, work: Work, box: Box, values: np.ndarray) -> float:
        """What the squares of a matrix's error differ by from those of its numbers, if it reads by these scales."""
        change, spans, last = 0.0, work.spans()["scales"], values.shape[-2:]
        for piece in boxes_of(work.like.shape[-2:], units_of(work.made)[-2:]):
            scales, squares, products = (self.waiting(work, field, (*box[:-2], *piece)) for field in work.aside())
            now = values[(..., *(slice(*ends) for ends in covered(piece, spans, last)))]
            with np.errstate(all="ignore"):
                ratio = np.nan_to_num(now / scales)
            change += float(np.sum(ratio * (ratio * squares - 2 * products), dtype=np.float64))
        return change

    def check(self, name: str) -> None:
        """The checksum of a tensor that is done, from the file where it was not written from its start to its end."""
        tensor, (crc32, at) = self.tensors[name], self.crc32.get(name, (0, 0))
        size = math.prod(tensor.shape) * tensor.dtype.itemsize
        while at < size:
            data = np.empty(min(size - at, _CHECKED), np.uint8)
            read_into(self.file, data, self.offsets[name] + at, self.path)
            crc32, at = zlib.crc32(data.data, crc32), at + data.size
        self.crc32[name] = crc32, at

    def sync(self) -> None:
        changed = {
            what: {name: known[name] for name in known if name in self.since}
            for what, known in (("crc32", self.crc32), ("squares", self.squares))
        }
        self.append({"done": self.done, **changed})
        self.since, self.unsynced = set(), 0

    def keep(self) -> None:
        with contextlib.suppress(OSError):
            self.sync()

    def finish(self) -> None:
        start, end = self.layout.ends({name: crc32 for name, (crc32, _) in self.crc32.items()})
        for data, at in ((start, 0), (end, self.layout.size - len(end))):
            if os.pwrite(self.file, data, at) < len(data):
                raise OSError("Not all of the header could be written.")
        if self.size > self.layout.size:
            self.sync()  # what has waited is needed no more
            os.ftruncate(self.file, self.layout.size)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self.journal_path.unlink(missing_ok=True)


def _to_disk(file: int) -> None:
    getattr(os, "fdatasync", os.fsync)(file)  # macOS has the latter only


def _waiting(name: str, field: str) -> str:
    """What waits goes by a name that no tensor has."""
    return f"{name}\0{field}"


def part_of(target: Path) -> Path:
    """The file that grows beside a target until it is whole."""
    return target.parent / f".lowbit-{target.name}.part"


def _journal_of(target: Path) -> Path:
    return target.parent / f".lowbit-{target.name}.journal"


@contextlib.contextmanager
def locked(target: Path) -> Iterator[int]:
    """The journal of a target, locked by this process. An empty one is removed again."""
    journal, path = lock(target), _journal_of(target)
    try:
        yield journal
    finally:
        with contextlib.suppress(FileNotFoundError):
            # Where a journal was removed, that of another process may have its name.
            if os.fstat(journal).st_size == 0 and os.path.samestat(os.fstat(journal), os.stat(path)):
                path.unlink()
        os.close(journal)  # and with it the lock is gone


def lock(target: Path) -> int:
    """The journal, for this process alone."""
    path = _journal_of(target)
    while True:
        journal = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Who had the lock may have finished meanwhile, and removed the file that this one has opened.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(journal), os.stat(path)):
                    return journal
        except BlockingIOError:
            os.close(journal)
            raise ValueError(
                f"{target} is being written by another process. Wait for it, or give another name."
            ) from None
        except BaseException:
            os.close(journal)
            raise
        os.close(journal)


def _lines(journal: int) -> list[dict[str, Any]]:
    """The lines of a journal; one that was cut off counts as not written."""
    text = os.pread(journal, os.fstat(journal).st_size, 0)
    whole = text[: text.rfind(b"\n") + 1]
    os.ftruncate(journal, len(whole))  # or else the next would go on with it
    return [json.loads(line) for line in whole.splitlines()]
