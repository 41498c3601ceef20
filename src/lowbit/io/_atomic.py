"""Files that are there whole or not at all."""

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def replaceable(path: str | os.PathLike[str]) -> Path:
    """The file that a link leads to, so that the link itself stays."""
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file() and not path.is_dir():  # a device; the system itself refuses a directory
        raise ValueError(f"{path} is a device or a pipe, and not a file that can be replaced.")
    return path


@contextmanager
def written_aside(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path to write to, which takes the place of `path` when the block ends, and is gone if it fails.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.txt"
    >>> with written_aside(path) as aside:
    ...     _ = aside.write_text("whole")
    >>> path.read_text(), os.listdir(path.parent)
    ('whole', ['a.txt'])
    """
    path = replaceable(path)
    # In the same directory, since a file is renamed in one step only where it lies.
    aside = path.parent / f".lowbit-{secrets.token_hex(8)}.part"
    try:
        yield aside
        put_in_place(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def put_in_place(aside: Path, path: Path) -> None:
    """Have a file on the disk, whole, and then under the name of another, which it replaces in one step."""
    synced(aside)
    if path.exists():
        shutil.copymode(path, aside)
    os.replace(aside, path)
    # The name too should outlive a crash. Where a directory cannot be synced, the file is whole all the same.
    with suppress(OSError):
        synced(path.parent, os.O_RDONLY)


def synced_folder(path: Path) -> None:
    """Have the names in a directory on the disk, where the file system can do that."""
    try:
        synced(path, os.O_RDONLY)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise


def synced(path: Path, flags: int = os.O_RDWR) -> None:
    """Have the bytes of a file on the disk."""
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
