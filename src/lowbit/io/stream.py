"""Files of ours from sources that are larger than memory: written piece by piece, and gone on with if interrupted.

Shapes and rules say all of the file but its numbers, so the place of every tensor is known before a weight is read
(`Layout`). A tensor is cut into *pieces* where no scale is cut. One piece is read while the one before it is encoded
and the one before that is written.

The pieces go to `.lowbit-NAME.part` beside the target, and what is done to `.lowbit-NAME.journal`, a line of JSON for
each time that the part was brought to the disk. A line says how many pieces are done, in the order of the plan, and
what is known of their tensors so far. Its first line is a hash of the source's files, of the rules and of the layout:
of another source nothing is used. Whoever writes holds a lock on the journal.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lowbit.config import QuantizationConfig, quantize
from lowbit.formats import QuantizedArray
from lowbit.formats._blocks import WHOLE, span_of
from lowbit.ops.take import take
from lowbit.report import Row
from lowbit.tree import Plan, naming, relative_error, row

from ._atomic import replaceable
from ._maps import located, release
from ._processes import Box
from .gguf import GGUFFile
from .safetensors import DTYPES, Layout, index_parts
from .source import Tensors, is_stored

PIECE = 1 << 21  # elements that are read and encoded at a time, if no scale covers more: they stay in the cache
STRIPE = 1 << 23  # the same where rows are cut, since short runs are slow to read
SYNCED = 1 << 26  # elements between two lines of the journal

Progress = Callable[[int, int], None]
Note = Callable[[str], None]


@contextlib.contextmanager
def streamed(
    source: Tensors,
    plans: Mapping[str, Plan],
    target: Path,
    *,
    metadata: dict[str, Any],
    progress: Progress,
    note: Note,
) -> Iterator[tuple[Path, list[Row]]]:
    """The tensors of a source as planned, in a whole file beside `target`, to be moved away within the block.

    - `progress`: told the bytes of the source that are done, and those that there are.
    - `note`: told what a user may want to know, such as that earlier work goes on.

    What fails for a reason outside of the data, as a full disk or Ctrl-C, leaves what is done to go on with.
    """
    target = replaceable(target)
    before = _identity(source.path)
    works = [_Work.planned(source, name, plans[name]) for name in source]
    layout = Layout(target, {work.name: work.like for work in works}, metadata)
    asked = [[work.name, repr(work.config)] for work in works]
    key = hashlib.sha256(json.dumps([PIECE, STRIPE, before, asked, repr(layout.ends({}))]).encode()).hexdigest()
    with _Part.locked(target, layout, key, note) as part:
        try:
            _run(works, part, progress, note)
            if _identity(source.path) != before:
                raise ValueError(f"{source.path} was changed while it was read. Start over when it is whole.")
            part.finish()
            yield part.path, [_row(source, work, plans[work.name], part.squares) for work in works]
            layout.tidy(target)
        except (OSError, KeyboardInterrupt, MemoryError) as error:
            part.keep()
            if part.done:
                note(f"what is done of {target} stays beside it; the same command goes on from there.")
            if isinstance(error, OSError) and error.filename is None:
                raise OSError(error.errno, f"Cannot save to {target}: {error.strerror or error}") from error
            raise
        except BaseException:
            part.remove()
            raise
        part.remove()


def _run(works: Sequence["_Work"], part: "_Part", progress: Progress, note: Note) -> None:
    pieces = [(work, i) for work in works for i in range(len(work.boxes))]
    ends = list(itertools.accumulate(work.bytes_of(i) for work, i in pieces))
    done, total = (ends[part.done - 1] if part.done else 0), sum(ends[-1:])
    if part.done:
        note(f"going on with {part.path.name}: {done:,} of {total:,} bytes are done.")
    progress(done, total)
    left, ends = pieces[part.done :], ends[part.done :]
    with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(1) as writer:
        reading = [reader.submit(work.read, work.boxes[i]) for work, i in left[:1]]
        writing = []
        for n, ((work, i), end) in enumerate(zip(left, ends, strict=True)):
            data = reading.pop().result()
            reading = [reader.submit(work.read, work.boxes[i]) for work, i in left[n + 1 : n + 2]]
            stored, lost = work.encoded(data, work.boxes[i])
            for earlier, there in writing:
                earlier.result()
                progress(there, total)
            writing = [(writer.submit(part.write, work, i, stored, lost), end)]
        for last, there in writing:
            last.result()
            progress(there, total)


def _row(source: Tensors, work: "_Work", planned: Plan, sums: Mapping[str, Sequence[float]]) -> Row:
    error = None if work.config is None else relative_error(*sums[work.name])
    found = row(work.name, work.like, work.like, planned, error)
    return dataclasses.replace(found, dtype=source.type(work.name), before=source.nbytes(work.name))


def _identity(path: Path) -> list[Any]:
    """What the files of a source were when they were looked at: another size or time means other bytes."""
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.is_file())
    else:
        files = [path, *(path.parent / name for name in index_parts(path))]
    stats = [(os.path.realpath(file), file.stat()) for file in files]
    return [[name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino] for name, stat in stats]


# --- pieces


@dataclasses.dataclass(frozen=True)
class _Work:
    """A tensor of the source: what it becomes, the boxes in which it is cut, and what reads one of them."""

    name: str
    config: QuantizationConfig | None
    like: Any
    boxes: list[Box]
    read: Callable[[Box], Any]
    nbytes: int

    @classmethod
    def planned(cls, source: Tensors, name: str, planned: Plan) -> "_Work":
        kind, shape, config = source.type(name), source.shape(name), planned.config
        if config is None and is_stored(kind):
            like = jax.tree.map(_struct, source.array(name))
            release()
            return cls(name, config, like, [_whole(shape)], _held(source.array, name), source.nbytes(name))
        plain = kind in DTYPES
        dense = source.array(name) if plain else jax.ShapeDtypeStruct(shape, np.float32)
        like = _struct(dense)
        if config is not None:
            with naming(name):
                dtype = jax.dtypes.canonicalize_dtype(like.dtype)
                given = jax.ShapeDtypeStruct(shape, dtype)
                like = jax.eval_shape(lambda array: quantize(array, config), given)
        units = _units(like)
        if isinstance(dense, np.ndarray):
            read = _from_file(dense)
        elif isinstance(source, GGUFFile) and not is_stored(kind) and len(shape) > 1:
            units[-1], read = WHOLE, _decoded(source, name)  # rows are of whole blocks
        else:
            units, read = [WHOLE] * len(shape), _held(source.dense, name)
        return cls(name, config, like, _boxes(shape, units), read, source.nbytes(name))

    def bytes_of(self, piece: int) -> int:
        """How many bytes of the source a piece is."""
        size = math.prod(self.like.shape)
        return self.nbytes * _volume(self.boxes[piece]) // size if size else 0

    def encoded(self, data: Any, box: Box) -> tuple[Any, tuple[float, float]]:
        """A piece as it is stored, and the squares of what it lost and was."""
        if self.config is None:
            return data, (0, 0)
        stored, lost, size = _encoded(data, self.config)
        sums = float(np.asarray(lost).sum(dtype=np.float64)), float(np.asarray(size).sum(dtype=np.float64))
        if not math.isfinite(sums[0]):
            # Outside of jit it says what is wrong with the numbers, if it is not only that their squares overflow.
            cut = "" if len(self.boxes) == 1 else f"[{', '.join(f'{a}:{b}' for a, b in box)}]"
            with naming(f"{self.name}{cut}"):
                quantize(data, self.config)
        return stored, sums

    def spans(self) -> dict[str, tuple[int, ...]]:
        return _part_spans(self.like)


@partial(jax.jit, static_argnums=1)
def _encoded(array: jax.Array, config: QuantizationConfig) -> tuple[QuantizedArray, jax.Array, jax.Array]:
    """A piece as it is stored, and the squares of what it lost and of what it was: of each row, for all cores."""
    # What is measured must not change how the compiler rounds.
    stored = lax.optimization_barrier(quantize(array, config))
    # Matrices are decoded by the kernel for rows.
    read = take(stored, jnp.arange(stored.shape[0])[:, None]) if stored.ndim == 2 else stored.materialize()
    array = array.astype(jnp.float32)
    return stored, jnp.sum((read.astype(jnp.float32) - array) ** 2, -1), jnp.sum(array**2, -1)


def _struct(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _part_spans(like: Any) -> dict[str, tuple[int, ...]]:
    """How many elements one of each part covers, along the last axes."""
    if not isinstance(like, QuantizedArray):
        return {"": ()}
    coded = [name for name in like.scale_parts if getattr(like, name) is not None]
    return like.part_spans() | dict.fromkeys(coded, (WHOLE, WHOLE))


def _units(like: Any) -> list[int]:
    """In steps of how many elements each axis can be cut; `WHOLE` for not at all."""
    axes = range(-len(like.shape), 0)
    return [math.lcm(*(span_of(spans, axis) for spans in _part_spans(like).values())) for axis in axes]


def _boxes(shape: Sequence[int], units: Sequence[int]) -> list[Box]:
    """An array in boxes of about `PIECE` elements, cut along the first axes that can be."""
    cuts: list[list[tuple[int, int]]] = []
    left = STRIPE if any(n > 1 and unit == WHOLE for n, unit in zip(shape[:-1], units, strict=False)) else PIECE
    for axis, (n, unit) in enumerate(zip(shape, units, strict=True)):
        step = n
        if unit != WHOLE:
            step = max(left // max(math.prod(shape[axis + 1 :]), 1) // unit * unit, unit)
            count = -(-n // step)
            step = -(-n // max(count, 1) // unit) * unit if count > 1 else n  # all of about the same size
        cuts.append([(i, min(i + step, n)) for i in range(0, n, step)] if n else [(0, 0)])
        left = max(left // max(step, 1), 1)
    return list(itertools.product(*cuts))


def _whole(shape: Sequence[int]) -> Box:
    return tuple((0, n) for n in shape)


def _volume(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def _runs(shape: Sequence[int], box: Box) -> tuple[list[int], int]:
    """Where the elements of a box lie in an array: the beginnings of the runs without a gap, and how long one is."""
    cut = [axis for axis, n in enumerate(shape) if box[axis] != (0, n)]
    last = cut[-1] if cut else 0
    starts = np.zeros((), np.int64)
    for axis, (start, stop) in enumerate(box[: last + 1]):
        places = np.arange(start, start + 1 if axis == last else stop) * math.prod(shape[axis + 1 :])
        starts = starts[..., None] + places
    return starts.ravel().tolist(), _volume(box[last:])


def _held(read: Callable[[str], Any], name: str) -> Callable[[Box], Any]:
    """Reads what cannot be cut."""

    def whole(_: Box) -> Any:
        array = read(name)
        release()
        return array

    return whole


def _decoded(source: GGUFFile, name: str) -> Callable[[Box], Any]:
    def rows(box: Box) -> np.ndarray:
        (start, *others), length = _runs(source.shape(name), box)
        assert not others
        values = source.values(name, start, start + length).reshape([b - a for a, b in box])
        release()
        return values

    return rows


def _from_file(view: np.ndarray) -> Callable[[Box], Any]:
    """Reads from the file that an array is a view of, since mapped pages would count as memory."""
    place = located(view) if view.size else None

    def box_of(box: Box) -> np.ndarray:
        if place is None:
            return view[(..., *(slice(a, b) for a, b in box))]
        path, start = place
        raw = np.empty(_volume(box) * view.itemsize + 64, np.uint8)
        data = raw[-raw.ctypes.data % 64 :][: raw.size - 64]  # where JAX takes it without a copy
        starts, length = _runs(view.shape, box)
        length *= view.itemsize
        with open(path, "rb", buffering=0) as file:
            if len(starts) == 1:  # what follows is wanted next
                os.posix_fadvise(
                    file.fileno(), start + starts[0] * view.itemsize + length, length, os.POSIX_FADV_WILLNEED
                )
            for i, at in enumerate(starts):
                _read(file.fileno(), data[i * length : (i + 1) * length], start + at * view.itemsize, path)
        return data.view(view.dtype).reshape([b - a for a, b in box])

    return box_of


def _read(file: int, into: np.ndarray, at: int, path: Path) -> None:
    done = 0
    while done < into.size:
        count = os.preadv(file, [into[done:].data], at + done)
        if count == 0:
            raise ValueError(f"{path} was cut off while it was read.")
        done += count


# --- what is written


class _Part:
    """A file on its way, and the journal of what is done. Only who holds the lock has one."""

    def __init__(self, target: Path, layout: Layout, journal: int):
        self.path, self.journal_path = _beside(target)
        self.layout, self.journal = layout, journal
        self.file = -1
        self.done = 0  # pieces
        self.crc32: dict[str, tuple[int, int]] = {}  # of each tensor that of its first bytes, and how many those are
        self.squares: dict[str, tuple[float, float]] = {}
        self.since: set[str] = set()  # what the next line will speak of
        self.unsynced = 0

    @classmethod
    @contextlib.contextmanager
    def locked(cls, target: Path, layout: Layout, key: str, note: Note) -> Iterator["_Part"]:
        part = cls(target, layout, _lock(target))
        try:
            part.open(key, note)
            yield part
        finally:
            if part.file >= 0:
                os.close(part.file)
            os.close(part.journal)  # and with it the lock is gone

    def open(self, key: str, note: Note) -> None:
        lines = _lines(self.journal)
        if lines:
            known = lines[0].get("key") == key and self.path.is_file() and self.path.stat().st_size == self.layout.size
            if known:
                self.file = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
                for line in lines[1:]:
                    self.done = line["done"]
                    self.crc32 |= {name: tuple(found) for name, found in line["crc32"].items()}
                    self.squares |= {name: tuple(found) for name, found in line["squares"].items()}
                return
            note(f"{self.path.name} is of another source or other rules: starting over.")
        os.ftruncate(self.journal, 0)
        os.fdatasync(self.journal)
        self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        os.ftruncate(self.file, self.layout.size)
        self.append({"key": key})

    def append(self, line: dict[str, Any]) -> None:
        """What the journal says is on the disk, is on the disk."""
        os.fdatasync(self.file)
        os.write(self.journal, json.dumps(line).encode() + b"\n")
        os.fdatasync(self.journal)

    def write(self, work: _Work, piece: int, stored: Any, lost: tuple[float, float]) -> None:
        """Write a piece, and now and then a line of the journal."""
        box, parts = work.boxes[piece], self.layout.parts[work.name]
        for field, spans in work.spans().items():
            if field not in parts:
                continue
            tensor = self.layout.tensors[parts[field]]
            data = np.ascontiguousarray(getattr(stored, field) if field else stored).reshape(-1).view(np.uint8)
            covers = [span_of(spans, axis) for axis in range(-len(box), 0)]
            there = tuple(
                (0, n) if span == WHOLE else (start // span, -(-stop // span))
                for (start, stop), span, n in zip(box, covers, tensor.shape, strict=True)
            )
            self.put(parts[field], tensor, there, data)
        if piece == len(work.boxes) - 1:
            for name in parts.values():
                self.check(name)
        before = self.squares.get(work.name, (0, 0))
        self.squares[work.name] = before[0] + lost[0], before[1] + lost[1]
        self.since |= {work.name, *parts.values()}
        self.done += 1
        self.unsynced += _volume(box)
        if self.unsynced >= SYNCED:
            self.sync()

    def put(self, name: str, tensor: Any, box: Box, data: np.ndarray) -> None:
        starts, length = _runs(tensor.shape, box)
        length *= tensor.dtype.itemsize
        for i, start in enumerate(starts):
            run, at = data[i * length : (i + 1) * length], self.layout.offsets[name] + start * tensor.dtype.itemsize
            written = 0
            while written < length:
                written += os.pwrite(self.file, run[written:].data, at + written)
        crc32, known = self.crc32.get(name, (0, 0))
        if len(starts) == 1 and starts[0] * tensor.dtype.itemsize == known:
            self.crc32[name] = zlib.crc32(data.data, crc32), known + length

    def check(self, name: str) -> None:
        """The checksum of a tensor that is done, from the file where it was not written from its start to its end."""
        tensor, (crc32, at) = self.layout.tensors[name], self.crc32.get(name, (0, 0))
        size = math.prod(tensor.shape) * tensor.dtype.itemsize
        while at < size:
            data = np.empty(min(size - at, PIECE), np.uint8)
            _read(self.file, data, self.layout.offsets[name] + at, self.path)
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

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self.journal_path.unlink(missing_ok=True)


def _beside(target: Path) -> tuple[Path, Path]:
    part, journal = (target.parent / f".lowbit-{target.name}.{end}" for end in ("part", "journal"))
    return part, journal


def _lock(target: Path) -> int:
    """The journal, for this process alone."""
    path = _beside(target)[1]
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
