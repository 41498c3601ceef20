"""Replacing a file atomically, so that it is always the whole old one or the whole new one."""

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def replaceable(path: str | os.PathLike[str]) -> Path:
    """The file that a path refers to, with links resolved so that replacing the file keeps the link."""
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file() and not path.is_dir():  # replacing a directory fails anyway
        raise ValueError(f"{path} is a device or a pipe, which cannot be replaced. Give the name of a file.")
    return path


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path to write to; it replaces `path` when the block ends, and is removed if the block fails.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.txt"
    >>> with atomic_write(path) as staged:
    ...     _ = staged.write_text("whole")
    >>> path.read_text(), os.listdir(path.parent)
    ('whole', ['a.txt'])
    """
    path = replaceable(path)
    # In the same directory, since a rename is atomic only within a file system.
    staged = path.parent / f".lowbit-{secrets.token_hex(8)}.part"
    try:
        yield staged
        put_in_place(staged, path)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise


def put_in_place(staged: Path, path: Path) -> None:
    """Sync a file to the disk, then rename it to `path`, which it replaces atomically."""
    sync(staged)
    if path.exists():
        shutil.copymode(path, staged)
    os.replace(staged, path)
    # Sync the new name too. If the directory cannot be synced, the file is complete nevertheless.
    with suppress(OSError):
        sync(path.parent, os.O_RDONLY)


def sync_directory(path: Path) -> None:
    """Sync the entries of a directory to the disk, if the file system supports it."""
    try:
        sync(path, os.O_RDONLY)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise


def sync(path: Path, flags: int = os.O_RDWR) -> None:
    """Sync a file to the disk."""
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
