"""Convert checkpoints larger than memory to lowbit files; interrupted runs resume.

Shapes and patterns determine the layout of the file, so the offset of every tensor is known before a weight is
read (`Layout`). A tensor is split into *chunks* so that no scale is split. Threads read and encode a chunk each,
and another writes them in order.

Chunks are written to the staging file `.lowbit-NAME.part` next to the target, and progress to `.lowbit-NAME.journal`:
a line of JSON each time that the staging file was synced to the disk. A line has the number of steps that are done, and
the checksums and errors so far. The first line is a hash of the source's files, of the plans and of the layout, so that
the staging file of another source is never resumed. The process that writes holds a lock on the journal.

Values that depend on the whole tensor are staged past the end of the file, such as scales that are encoded together
(`double_quant`). If a scale covers many rows of a matrix and depends only on the maximum (int8), the chunks are read
in two passes: one for the maximum, and one to encode them.
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

import numpy as np

from lowbit.formats.moments import Moments
from lowbit.models.plan import Plan
from lowbit.models.report import NO_STATISTIC, NOT_CALIBRATED, Row, calibrated_by, relative_error, row

from .. import _chunks
from .._regions import region_size
from ..container._layout import Layout, index_files
from ..readers import Reader
from ._staging import Note, StagingFile
from ._work import Work

WORKERS = 3  # threads that read and encode a chunk each, so that reads overlap with encoding
QUEUE = 6  # chunks in flight; two of those that need more memory

Progress = Callable[[int, int], None]


@contextlib.contextmanager
def streamed(
    source: Reader,
    plans: Mapping[str, Plan],
    target: Path,
    *,
    journal: int,
    metadata: dict[str, Any],
    progress: Progress,
    note: Note,
    calibration: Mapping[str, Moments] | None = None,
) -> Iterator[tuple[Path, list[Row]]]:
    """Write the tensors of a source as planned to a staging file next to `target`, to be moved within the block.

    - `target`: with links resolved. `journal`: the locked journal of the target.
    - `progress`: called with the number of bytes of the source that are done, and their total.
    - `note`: called with a sentence for the user, such as that an earlier run is resumed.
    - `calibration`: moments of the inputs of tensors, which are quantized in its order, after all others.

    After a failure that is not in the data, such as a full disk or Ctrl-C, the run can be resumed.
    """
    before = _identity(source.path)
    works = [Work.planned(source, name, plans[name], calibration) for name in source]
    layout = Layout(target, {work.name: work.like for work in works}, metadata)
    order = {name: i for i, name in enumerate(calibration or ())}
    works.sort(key=lambda work: order[work.name] if work.moments is not None else -1)
    asked = [[work.name, repr(work.config), work.steps] for work in works]
    given = [_chunks.CHUNK, _chunks.STRIPE, before, asked, repr(layout.ends({})), _digest(calibration)]
    key = hashlib.sha256(json.dumps(given).encode()).hexdigest()
    for work in works:
        if (most := max(map(region_size, work.chunks))) > _chunks.STRIPE:
            note(f"{work.name} needs {most:,} elements in memory at a time, which share a scale or cannot be split.")
    with StagingFile.opened(target, layout, works, journal, key, note) as staging:
        try:
            _run(works, staging, progress, note)
            if _identity(source.path) != before:
                raise ValueError(f"{source.path} changed while it was read. Convert it again when it is complete.")
            staging.finish()
            by_name = {work.name: work for work in works}
            calibrated = calibration is not None
            yield staging.path, [_row(source, by_name[n], plans[n], staging.squares, calibrated) for n in source]
            layout.tidy(target)
        except (OSError, KeyboardInterrupt, MemoryError) as error:
            staging.keep()
            if staging.done and staging.path.exists():
                note(f"{target} is incomplete. Repeat the same conversion to resume it.")
            if isinstance(error, OSError) and error.errno is not None and error.filename is None:
                raise OSError(error.errno, f"Cannot save to {target}: {error.strerror}") from error
            raise
        except BaseException:
            staging.remove()
            raise
        staging.remove()


def _run(works: Sequence[Work], staging: StagingFile, progress: Progress, note: Note) -> None:
    steps = [(work, step) for work in works for step in range(work.steps)]
    ends = list(itertools.accumulate(work.bytes_of(step) for work, step in steps))
    total = sum(work.nbytes for work in works)
    ends[-1:] = [total] * len(ends[-1:])  # make up for rounding
    done = ends[staging.done - 1] if staging.done else 0
    if staging.done:
        note(f"resuming {staging.path.name}: {done:,} of {total:,} bytes are done.")
    progress(done, total)

    def made(work: Work, step: int) -> Any:
        return work.encoded(work.read(work.chunk(step)), step, staging.maxima(work, step))

    # A separate thread, since Ctrl-C would interrupt a write in the main thread.
    with ThreadPoolExecutor(WORKERS) as workers, ThreadPoolExecutor(1) as writer:
        making: deque[tuple[int, Future[Any]]] = deque()

        def write(left: int = 0) -> None:
            """Write chunks in order until `left` are in flight."""
            while len(making) > left:
                number, chunk = making.popleft()
                writer.submit(staging.write, *steps[number], *chunk.result()).result()
                progress(ends[number], total)

        for number, (work, step) in enumerate(steps[staging.done :], staging.done):
            if work.two_pass and step == len(work.chunks):
                write()  # all maxima must be known before the second pass
            light = region_size(work.chunk(step)) <= _chunks.CHUNK and not work.stages_scales
            write(left=0 if work.moments is not None else QUEUE - 1 if light else 1)
            making.append((number, workers.submit(made, work, step)))
        write()


def _row(source: Reader, work: Work, planned: Plan, sums: Mapping[str, Sequence[float]], calibrated: bool) -> Row:
    error, outputs = None, NOT_CALIBRATED
    if work.config is not None:
        error, outputs = relative_error(*sums[work.name][:2]), NO_STATISTIC if calibrated else NOT_CALIBRATED
    if work.moments is not None:
        *_, without, given, size, full = sums[work.name]
        outputs = calibrated_by(without / (size or 1), given / (size or 1), bool(full))
    found = row(work.name, work.like, work.like, planned, error, outputs)
    return dataclasses.replace(found, dtype=source.type(work.name), before=source.nbytes(work.name))


def _digest(calibration: Mapping[str, Moments] | None) -> str | None:
    """What tells one calibration from another."""
    if calibration is None or hasattr(calibration, "digest"):
        return getattr(calibration, "digest", None)
    digest = hashlib.sha256()
    for name, moments in calibration.items():
        digest.update(f"{name} {moments.hessian is None}".encode())
        digest.update(np.ascontiguousarray(moments.diag).tobytes())
    return digest.hexdigest()


def _identity(path: Path) -> list[Any]:
    """The files of a source with their sizes and times; if these differ, so may the bytes."""
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.is_file())
    else:
        files = [path, *(path.parent / name for name in index_files(path))]
    stats = [(os.path.realpath(file), file.stat()) for file in files]
    return [[name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino] for name, stat in stats]
