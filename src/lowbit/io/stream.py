"""Convert checkpoints larger than memory to lowbit files; interrupted runs resume.

Shapes and rules determine all of the file but its numbers, so the place of every tensor is known before a weight is
read (`Layout`). A tensor is split into *chunks* where no scale is split. Some threads read and encode a chunk each, and
another writes them in order.

Chunks are written to `.lowbit-NAME.part` beside the target, and progress to `.lowbit-NAME.journal`: a line of JSON for
each time that the part was synced to the disk. A line says how many chunks are done, in the order of the plan, and
what is known of their tensors so far. The first line is a hash of the source's files, of the rules and of the layout,
so that the part of another source is never resumed. The process that writes holds a lock on the journal.

Values that depend on the whole tensor are staged past the end of the file, such as scales that are coded together
(`double_quant`). Where scales cover the rows of a matrix and come from the maximum alone (int8), its chunks are read
twice: once for the maximum, and once to be encoded.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lowbit.models.plan import Plan
from lowbit.models.report import Row, relative_error, row

from . import _boxes
from ._contents import volume
from ._part import Note, Part
from ._work import Work
from ._writing import Layout, index_parts
from .source import Tensors

WORKERS = 3  # that read and encode a chunk each: while one waits for the disk, another has the cores
QUEUE = 6  # chunks in flight; two, of those that take more memory

Progress = Callable[[int, int], None]


@contextlib.contextmanager
def streamed(
    source: Tensors,
    plans: Mapping[str, Plan],
    target: Path,
    *,
    journal: int,
    metadata: dict[str, Any],
    progress: Progress,
    note: Note,
) -> Iterator[tuple[Path, list[Row]]]:
    """Write the tensors of a source as planned to a file beside `target`, to be moved away within the block.

    - `target`: without links. `journal`: that of the target, locked.
    - `progress`: called with the bytes of the source that are done, and with all of them.
    - `note`: called with a sentence for the user, such as that an earlier run is resumed.

    A failure outside of the data, such as a full disk or Ctrl-C, leaves what is done to resume from.
    """
    before = _identity(source.path)
    works = [Work.planned(source, name, plans[name]) for name in source]
    layout = Layout(target, {work.name: work.like for work in works}, metadata)
    asked = [[work.name, repr(work.config), work.steps] for work in works]
    key = hashlib.sha256(
        json.dumps([_boxes.PIECE, _boxes.STRIPE, before, asked, repr(layout.ends({}))]).encode()
    ).hexdigest()
    for work in works:
        if (most := max(map(volume, work.boxes))) > _boxes.STRIPE:
            note(f"{most:,} numbers of {work.name} are in memory at a time: they share a scale, or are stored as one.")
    with Part.opened(target, layout, works, journal, key, note) as part:
        try:
            _run(works, part, progress, note)
            if _identity(source.path) != before:
                raise ValueError(f"{source.path} was changed while it was read. Start over when it is whole.")
            part.finish()
            yield part.path, [_row(source, work, plans[work.name], part.squares) for work in works]
            layout.tidy(target)
        except (OSError, KeyboardInterrupt, MemoryError) as error:
            part.keep()
            if part.done and part.path.exists():
                note(f"what is done of {target} stays beside it; the same command goes on from there.")
            if isinstance(error, OSError) and error.errno is not None and error.filename is None:
                raise OSError(error.errno, f"Cannot save to {target}: {error.strerror}") from error
            raise
        except BaseException:
            part.remove()
            raise
        part.remove()


def _run(works: Sequence[Work], part: Part, progress: Progress, note: Note) -> None:
    steps = [(work, step) for work in works for step in range(work.steps)]
    ends = list(itertools.accumulate(work.bytes_of(step) for work, step in steps))
    total = sum(work.nbytes for work in works)
    ends[-1:] = [total] * len(ends[-1:])  # what was lost by rounding
    done = ends[part.done - 1] if part.done else 0
    if part.done:
        note(f"going on with {part.path.name}: {done:,} of {total:,} bytes are done.")
    progress(done, total)

    def made(work: Work, step: int) -> Any:
        return work.encoded(work.read(work.box(step)), step, part.largest(work, step))

    # What is being written is not cut short by Ctrl-C, which only the main thread hears.
    with ThreadPoolExecutor(WORKERS) as workers, ThreadPoolExecutor(1) as writer:
        making: deque[tuple[int, Future[Any]]] = deque()

        def write(left: int = 0) -> None:
            """Write chunks in order, until so many are left."""
            while len(making) > left:
                number, chunk = making.popleft()
                writer.submit(part.write, *steps[number], *chunk.result()).result()
                progress(ends[number], total)

        for number, (work, step) in enumerate(steps[part.done :], part.done):
            if work.twice and step == len(work.boxes):
                write()  # now all of it was looked at
            light = volume(work.box(step)) <= _boxes.PIECE and not work.waits
            write(left=QUEUE - 1 if light else 1)
            making.append((number, workers.submit(made, work, step)))
        write()


def _row(source: Tensors, work: Work, planned: Plan, sums: Mapping[str, Sequence[float]]) -> Row:
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
