"""The journal of a file that is being written: what is done, and a lock."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def journal_path(target: Path) -> Path:
    return target.parent / f".lowbit-{target.name}.journal"


@contextlib.contextmanager
def locked(target: Path) -> Iterator[int]:
    """The journal of a target as a file descriptor, locked by this process. An empty journal is removed afterwards."""
    journal, path = lock(target), journal_path(target)
    try:
        yield journal
    finally:
        with contextlib.suppress(FileNotFoundError):
            # If the journal was removed, its name may belong to that of another process.
            if os.fstat(journal).st_size == 0 and os.path.samestat(os.fstat(journal), os.stat(path)):
                path.unlink()
        os.close(journal)  # also releases the lock


def lock(target: Path) -> int:
    """Open and lock the journal of a target; raises if another process holds the lock."""
    path = journal_path(target)
    while True:
        journal = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The process that held the lock may have finished, and removed the file that was opened here.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(journal), os.stat(path)):
                    return journal
        except BlockingIOError:
            os.close(journal)
            raise ValueError(
                f"{target} is being written by another process. Wait until it is done, or give another name."
            ) from None
        except BaseException:
            os.close(journal)
            raise
        os.close(journal)


def read_lines(journal: int) -> list[dict[str, Any]]:
    """The lines of a journal, without a last one that is incomplete."""
    text = os.pread(journal, os.fstat(journal).st_size, 0)
    whole = text[: text.rfind(b"\n") + 1]
    os.ftruncate(journal, len(whole))  # or the next line would be appended to it
    return [json.loads(line) for line in whole.splitlines()]
