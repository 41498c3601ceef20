"""Files of ours from sources that are larger than memory: written piece by piece, and gone on with if interrupted.

Shapes and rules say all of the file but its numbers, so the place of every tensor is known before a weight is read
(`Layout`). A tensor is cut into *pieces* where no scale is cut. One piece is read while the one before it is encoded
and the one before that is written.

The pieces go to `.lowbit-NAME.part` beside the target, and what is done to `.lowbit-NAME.journal`, a line of JSON for
each time that the part was brought to the disk. A line says how many pieces are done, in the order of the plan, and
what is known of their tensors so far. Its first line is a hash of the source's files, of the rules and of the layout:
of another source nothing is used. Whoever writes holds a lock on the journal.

What a tensor needs all of itself for waits behind the end of the file until then. Scales that are coded all together
(`double_quant`) do. Where scales cover the rows of a matrix and come from the largest numbers alone (int8), its pieces
are gone through twice: once for these, and once to be encoded.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import json
import math
import mmap
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lowbit.config import QuantizationConfig, quantize
from lowbit.formats import QuantizedArray
from lowbit.formats._blocks import WHOLE, block_max, block_sum, covered, span_of
from lowbit.ops.take import take
from lowbit.report import Row
from lowbit.tree import Plan, naming, relative_error, row

from ._atomic import replaceable
from ._contents import DTYPES, volume, whole_box
from ._maps import located, release
from ._processes import Box
from ._writing import Layout, index_parts
from .gguf import GGUFFile
from .safetensors import LowbitFile
from .source import Tensors, is_stored

PIECE = 1 << 21  # elements that are read and encoded at a time, if no scale covers more: they stay in the cache
STRIPE = 1 << 25  # the same where rows are cut, since short runs are slow to read and to write
MAPPED = 1 << 26  # bytes of a file that are looked at, before their pages are let go
SYNCED = 1 << 26  # elements between two lines of the journal
_PAGE = 4096
QUEUE = 4  # pieces that are read ahead, and that wait to be written, while the disk is waited for

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
    asked = [[work.name, repr(work.config), work.steps] for work in works]
    key = hashlib.sha256(json.dumps([PIECE, STRIPE, before, asked, repr(layout.ends({}))]).encode()).hexdigest()
    for work in works:
        if (most := max(map(volume, work.boxes))) > STRIPE:
            note(f"{most:,} numbers of {work.name} are in memory at a time: they share a scale, or are stored as one.")
    with _Part.locked(target, layout, works, key, note) as part:
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
    steps = [(work, step) for work in works for step in range(work.steps)]
    ends = list(itertools.accumulate(work.bytes_of(step) for work, step in steps))
    total = sum(work.nbytes for work in works)
    ends[-1:] = [total] * len(ends[-1:])  # what was lost by rounding
    done = ends[part.done - 1] if part.done else 0
    if part.done:
        note(f"going on with {part.path.name}: {done:,} of {total:,} bytes are done.")
    progress(done, total)
    begin = part.done
    left, ends = steps[begin:], ends[begin:]
    ahead = [QUEUE if volume(work.box(step)) <= PIECE else 1 for work, step in left]
    with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(1) as writer:
        reading: list[Future[Any]] = []
        writing: list[tuple[Future[None], int]] = []

        def written(left: int = 0) -> None:
            """Wait until so many writes are left."""
            while len(writing) > left:
                earlier, there = writing.pop(0)
                earlier.result()
                progress(there, total)

        for n, ((work, step), end) in enumerate(zip(left, ends, strict=True)):
            for later, at in left[n + len(reading) : n + 1 + min(ahead[n : n + 2])]:
                reading.append(reader.submit(later.read, later.box(at)))
            data = reading.pop(0).result()
            if work.twice and step == len(work.boxes):
                written()  # now all of it was looked at
            encoded = work.encoded(data, step, part.largest(work, step))
            written(left=ahead[n] - 1)
            writing.append((writer.submit(part.write, begin + n, work, step, *encoded), end))
        written()


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
    """A tensor of the source: what it becomes, the boxes in which it is cut, and what reads one of them.

    - `made`: what a piece is made into. It differs from `like` where that has its scales coded all together.
    - `twice`: the pieces are gone through once before, for the largest numbers.
    """

    name: str
    config: QuantizationConfig | None
    like: Any
    made: Any
    twice: bool
    boxes: list[Box]
    read: Callable[[Box], Any]
    nbytes: int

    @classmethod
    def planned(cls, source: Tensors, name: str, planned: Plan) -> "_Work":
        shape, config = source.shape(name), planned.config
        given, units, read = _reader(source, name, config is None)
        like = made = given
        if config is not None:
            dense = jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(given.dtype))
            with naming(name):
                like = made = jax.eval_shape(partial(quantize, config=config), dense)
            if any(getattr(like, part) is not None for part in like.scale_parts):
                config = dataclasses.replace(config, double_quant=False)
                made = jax.eval_shape(partial(quantize, config=config), dense)
        shape = getattr(made, "stored_shape", shape)
        boxes = _boxes(shape, _common(units, _units(made)))
        able = config is not None and config.format.scale_of_max is not None and given.dtype.itemsize <= 4
        twice = able and len(boxes) * PIECE < math.prod(shape)
        if twice:
            boxes = _boxes(shape, _common(units, [1 if span == WHOLE else span for span in _units(made)]))
        return cls(name, config, like, made, twice, boxes, read, source.nbytes(name))

    @property
    def waits(self) -> bool:
        """Whether scales wait until all are there."""
        return self.made is not self.like

    @property
    def steps(self) -> int:
        """In how many steps it is done: one for each piece, or two."""
        return len(self.boxes) * (1 + self.twice)

    def box(self, step: int) -> Box:
        return self.boxes[step % len(self.boxes)]

    def looks(self, step: int) -> bool:
        """Whether a step looks for the largest numbers only."""
        return self.twice and step < len(self.boxes)

    def bytes_of(self, step: int) -> int:
        """How many bytes of the source a step is; half of them if it takes two steps."""
        size = math.prod(self.like.shape) * (1 + self.twice)
        return self.nbytes * volume(self.box(step)) // size if size else 0

    def encoded(self, data: Any, step: int, largest: np.ndarray | None) -> tuple[dict[str, Any], tuple[float, float]]:
        """The parts of a piece as they are stored, and the squares of what it lost and was."""
        if self.config is None:
            return {field: getattr(data, field) if field else data for field in self.spans()}, (0, 0)
        if self.looks(step):
            stored, sums = {"largest": np.asarray(_largest(data, self.made.spans))}, (0, 0)
            finite = bool(np.isfinite(stored["largest"]).all())
        else:
            scale = None if largest is None else self.scale_of(largest)
            array, lost, size, aside = _encoded(data, self.config, self.waits, scale)
            sums = float(np.asarray(lost).sum(dtype=np.float64)), float(np.asarray(size).sum(dtype=np.float64))
            stored, finite = array.parts() | aside, math.isfinite(sums[0])
            if self.twice:
                del stored["scales"]
        if not finite:
            # Outside of jit it says what is wrong with the numbers, if it is not only that their squares overflow.
            cut = "" if len(self.boxes) == 1 else f"[{', '.join(f'{a}:{b}' for a, b in self.box(step))}]"
            with naming(f"{self.name}{cut}"):
                quantize(data, self.config)
        return stored, (sums[1], sums[1]) if self.waits else sums

    def spans(self) -> dict[str, tuple[int, ...]]:
        """How many elements one of each part of a piece covers, along the last axes."""
        spans = _part_spans(self.made)
        return spans | dict.fromkeys(self.aside(), spans.get("scales", ()))

    def aside(self) -> dict[str, Any]:
        """What waits: the scales, and the sums of each block by which the error is known when they are others."""
        fields = ("scales", *_SUMS) if self.waits else ("largest",) if self.twice else ()
        return dict.fromkeys(fields, getattr(self.made, "scales", None))

    def scale_of(self, largest: np.ndarray) -> jax.Array:
        assert self.config is not None and self.config.format.scale_of_max is not None
        return self.config.format.scale_of_max(jnp.asarray(largest))


_SUMS = ("squares", "products")


# Of many scales each step takes memory, so these are two.
_coded = jax.jit(lambda array: array.with_coded_scales())
_values = jax.jit(lambda array: array.scale_values())
_largest = jax.jit(block_max, static_argnums=1)


@partial(jax.jit, static_argnums=(1, 2))
def _encoded(
    array: jax.Array, config: QuantizationConfig, by_block: bool, scale: jax.Array | None
) -> tuple[QuantizedArray, jax.Array, jax.Array, dict[str, jax.Array]]:
    """A piece as it is stored, and the squares of what it lost and of what it was: of each row, for all cores.

    `by_block`: also the sums of read * read and read * array, for each scale. `scale`: where it is known before.
    """
    scale = None if scale is None else jnp.where(scale == 0, 1, scale)  # of zeros all codes are 0, by any scale
    # What is measured must not change how the compiler rounds.
    stored = lax.optimization_barrier(quantize(array, config, scale=scale))
    array, full = array.astype(jnp.float32), stored.replace(dtype=np.dtype(np.float32))
    # Matrices are decoded by the kernel for rows.
    read = take(full, jnp.arange(full.shape[0])[:, None]) if full.ndim == 2 else full.materialize()
    lost, size = jnp.sum((read - array) ** 2, -1), jnp.sum(array**2, -1)
    if not by_block:
        return stored, lost, size, {}
    sums = (block_sum(read * x, stored.spans) for x in (read, array))
    return stored, lost, size, dict(zip(_SUMS, sums, strict=True))


def _struct(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _part_spans(like: Any) -> dict[str, tuple[int, ...]]:
    if not isinstance(like, QuantizedArray):
        return {"": ()}
    coded = [name for name in like.scale_parts if getattr(like, name) is not None]
    return like.part_spans() | dict.fromkeys(coded, (WHOLE, WHOLE))


def _units(like: Any) -> list[int]:
    """In steps of how many elements each axis can be cut; `WHOLE` for not at all."""
    axes = range(-len(like.shape), 0)
    return [math.lcm(*(span_of(spans, axis) for spans in _part_spans(like).values())) for axis in axes]


def _common(units: Sequence[int], others: Sequence[int]) -> list[int]:
    return [WHOLE if WHOLE in pair else math.lcm(*pair) for pair in zip(units, others, strict=True)]


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


def _runs(shape: Sequence[int], box: Box) -> tuple[list[int], int]:
    """Where the elements of a box lie in an array: the beginnings of the runs without a gap, and how long one is."""
    cut = [axis for axis, n in enumerate(shape) if box[axis] != (0, n)]
    last = cut[-1] if cut else 0
    starts = np.zeros((), np.int64)
    for axis, (start, stop) in enumerate(box[: last + 1]):
        places = np.arange(start, start + 1 if axis == last else stop) * math.prod(shape[axis + 1 :])
        starts = starts[..., None] + places
    return starts.ravel().tolist(), volume(box[last:])


def _reader(source: Tensors, name: str, keep: bool) -> tuple[Any, list[int], Callable[[Box], Any]]:
    """What a tensor of a source reads as, in which steps it can be cut, and what reads a box of it.

    `keep`: as it is stored. Otherwise numbers that can be quantized.
    """
    kind, shape = source.type(name), source.shape(name)
    if isinstance(source, LowbitFile):
        like = jax.tree.map(_struct, source.struct(name))
        if keep or kind in DTYPES:
            place = source.located(name)  # is looked at now, and let go
            release()
            return like, _units(like), partial(source.read, name) if place is None else _from_file(place, like)
        if not like.transposed:
            return _struct(like), _units(like), _decoded(source, name)
    elif kind in DTYPES:
        view = np.asarray(source.array(name))
        return _struct(view), [1] * len(shape), _from_file(located(view), view)
    if isinstance(source, GGUFFile) and not is_stored(kind) and len(shape) > 1:
        # Rows are of whole blocks.
        return jax.ShapeDtypeStruct(shape, np.float32), [1] * (len(shape) - 1) + [WHOLE], _rows(source, name)
    if keep:
        like = jax.tree.map(_struct, source.array(name))
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
        (start, *others), length = _runs(source.shape(name), box)
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
        starts, length = _runs(like.shape, box)
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


def _run_of(path: Path, at: int, length: int) -> np.ndarray:
    """Bytes of a file: from the system's cache if they are there, and otherwise from the disk past it.

    Through the cache each byte is copied once more, and on a virtual machine that may take longer than the disk does.
    """
    data = _aligned(length, 64)
    with open(path, "rb", buffering=0) as file:
        done = 0
        with contextlib.suppress(OSError):  # not there, or the system cannot tell
            done = os.preadv(file.fileno(), [data.data], at, os.RWF_NOWAIT)
        if done < length:
            first = at // _PAGE * _PAGE
            size = -(-(at + length - first) // _PAGE) * _PAGE
            if getattr(_own, "pages", np.empty(0)).size < size:
                _own.pages = _aligned(size, _PAGE)  # new memory costs as much as to read into it
            pages = _own.pages[:size]
            with contextlib.suppress(OSError):  # not every file system can
                direct = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
                try:
                    if os.preadv(direct, [pages.data], first) >= at + length - first:
                        data[:], done = pages[at - first :][:length], length
                finally:
                    os.close(direct)
        _read(file.fileno(), data[done:], at + done, path)
    return data


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
            os.posix_fadvise(file.fileno(), at + (i + step) * stride, step * stride, os.POSIX_FADV_WILLNEED)
            into[i : i + step] = part[i : i + step]
            pages.madvise(mmap.MADV_DONTNEED)
        del whole, part


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

    def __init__(self, target: Path, layout: Layout, works: Sequence[_Work], journal: int):
        self.path, self.journal_path = _beside(target)
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
    def locked(cls, target: Path, layout: Layout, works: Sequence[_Work], key: str, note: Note) -> Iterator["_Part"]:
        part = cls(target, layout, works, _lock(target))
        try:
            part.open(key, note)
            yield part
        finally:
            if part.file >= 0:
                os.close(part.file)
            os.close(part.journal)  # and with it the lock is gone

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
        os.fdatasync(self.journal)
        self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        os.ftruncate(self.file, self.size)
        self.append({"key": key})

    def append(self, line: dict[str, Any]) -> None:
        """What the journal says is on the disk, is on the disk."""
        os.fdatasync(self.file)
        os.write(self.journal, json.dumps(line).encode() + b"\n")
        os.fdatasync(self.journal)

    def write(self, number: int, work: _Work, step: int, stored: dict[str, Any], lost: tuple[float, float]) -> None:
        """Write what a step gave, of this number among all, and now and then a line of the journal."""
        if number != self.done:
            return  # one before it has failed, and all go on from there
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
        starts, length = _runs(tensor.shape, covered(box, spans, tensor.shape))
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

    def waiting(self, work: _Work, field: str, box: Box) -> np.ndarray:
        """What waits of a box of the array."""
        name = _waiting(work.name, field)
        tensor = self.tensors[name]
        there = covered(box, work.spans()[field], tensor.shape)
        starts, length = _runs(tensor.shape, there)
        found = np.empty((len(starts), length), tensor.dtype)
        for run, start in zip(found, starts, strict=True):
            _read(self.file, run.view(np.uint8), self.offsets[name] + start * tensor.dtype.itemsize, self.path)
        return found.reshape([stop - start for start, stop in there])

    def largest(self, work: _Work, step: int) -> np.ndarray | None:
        """The largest numbers that the scales of a piece come from, once all were looked at."""
        return self.waiting(work, "largest", work.box(step)) if work.twice and not work.looks(step) else None

    def put_scales(self, work: _Work) -> None:
        """Write the scales that have waited for all of a tensor."""
        shape, parts, spans = work.like.shape, self.layout.parts[work.name], _part_spans(work.like)
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

    def change(self, work: _Work, box: Box, values: np.ndarray) -> float:
        """What the squares of a matrix's error differ by from those of its numbers, if it reads by these scales."""
        change, spans, last = 0.0, work.spans()["scales"], values.shape[-2:]
        for piece in _boxes(work.like.shape[-2:], _units(work.made)[-2:]):
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
            data = np.empty(min(size - at, PIECE), np.uint8)
            _read(self.file, data, self.offsets[name] + at, self.path)
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


def _waiting(name: str, field: str) -> str:
    """What waits goes by a name that no tensor has."""
    return f"{name}\0{field}"


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
