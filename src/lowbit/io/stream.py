"""Files of ours from sources that are larger than memory: written piece by piece, and gone on with if interrupted.

Shapes and rules say all of the file but its numbers, so the place of every tensor is known before a weight is read
(`Layout`). A tensor is cut into *pieces* where no scale is cut. Some threads read and encode a piece each, and another
writes them in their order.

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
import hashlib
import itertools
import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lowbit.report import Row
from lowbit.tree import Plan, relative_error, row

from . import _boxes
from ._atomic import replaceable
from ._contents import volume
from ._part import Note, Part
from ._work import Work
from ._writing import Layout, index_parts
from .source import Tensors

WORKERS = 3  # that read and encode, a piece each: while one waits for the disk, another has the cores
QUEUE = 6  # pieces that are on their way at a time; two, of those that take more memory

Progress = Callable[[int, int], None]


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
    works = [Work.planned(source, name, plans[name]) for name in source]
    layout = Layout(target, {work.name: work.like for work in works}, metadata)
    asked = [[work.name, repr(work.config), work.steps] for work in works]
    key = hashlib.sha256(
        json.dumps([_boxes.PIECE, _boxes.STRIPE, before, asked, repr(layout.ends({}))]).encode()
    ).hexdigest()
    for work in works:
        if (most := max(map(volume, work.boxes))) > _boxes.STRIPE:
            note(f"{most:,} numbers of {work.name} are in memory at a time: they share a scale, or are stored as one.")
    with Part.locked(target, layout, works, key, note) as part:
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
            """Write pieces in their order, until so many are left."""
            while len(making) > left:
                number, piece = making.popleft()
                writer.submit(part.write, *steps[number], *piece.result()).result()
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
