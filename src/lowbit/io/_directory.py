"""Directories that lowbit writes into: its own files are replaced together, and all others are left untouched.

New files are staged in `.lowbit-NAME.new` next to the directory NAME, with a manifest of them. When all of them are on
the disk, one rename commits them: the staging directory becomes NAME if that does not exist, else `NAME/.lowbit-new`.
From there the files are moved to their places, the weights last; files that only the old manifest lists are removed;
and the new manifest is moved. A run that is killed before the commit leaves NAME as it was. One that is killed after it
leaves `NAME/.lowbit-new`, which `check_whole` refuses to read and which the next run completes (`finish`): every step
can be repeated.

A file is replaced or removed only if lowbit wrote it: its size and checksum are those in the manifest, or it is a
lowbit file with an intact header.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from ._atomic import sync, sync_directory
from ._checks import checked_json
from .container._header import DIGEST, version_of

WEIGHTS, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
MANIFEST, PENDING = ".lowbit.json", ".lowbit-new"
_VERSION = 1
_CHUNK = 1 << 20
_LONGEST_HEADER = 100_000_000  # as in the safetensors package

Proof = dict[str, Any]  # size and checksum of a file


def check_place(source: Path, target: Path) -> None:
    """Raise if the directory to write is, or contains, one that a user cannot intend to replace."""
    there = Path(os.path.realpath(target))
    if there == Path(there.anchor):
        raise ValueError(f"{target} is the root directory. Give the name of a new directory.")
    home, here = (Path(os.path.realpath(path)) for path in (os.path.expanduser("~"), os.curdir))
    origins = {Path(os.path.realpath(source)), source.absolute()}
    if there in origins:
        raise ValueError(f"{target} is the source itself. Give another name for the result.")
    if any(origin in there.parents for origin in origins):
        raise ValueError(f"{target} is inside {source}. Give the name of a directory next to it.")
    if there.is_dir() and there.stat().st_dev != there.parent.stat().st_dev:
        raise ValueError(
            f"{target} is a mount point, where files cannot be staged next to it. Give a directory inside it."
        )
    for what, places in (
        ("the working directory", {here}),
        ("your home directory", {home}),
        (f"the directory of {source}", {origin.parent for origin in origins}),
    ):
        if there in places:
            raise ValueError(f"{target} is {what}. Give the name of a new directory.")
        if any(there in place.parents for place in places):
            raise ValueError(f"{target} contains {what}. Give the name of a new directory.")


def check_whole(folder: Path) -> None:
    """Raise if a directory mixes files of two runs, because the second was interrupted while it moved its files."""
    if is_pending(folder):
        raise ValueError(
            f"{folder} is half replaced: lowbit was interrupted while it moved new files into place. "
            "Repeat the conversion that wrote it, which completes that first."
        )


def is_pending(folder: Path) -> bool:
    """Whether a directory has committed files of an interrupted run that are not in their places yet."""
    return (folder / PENDING / MANIFEST).is_file()


def check_names(target: Path, new: Mapping[str, Path | None]) -> None:
    """Raise if writing these names to a directory would replace files that lowbit did not write.

    `new`: for each name the file whose bytes it is to have, if there is one. A file with the same bytes may stay.
    """
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise NotADirectoryError(f"{target} is a file, and the result is a directory. Give another name.")
    known = _manifest(target)
    foreign = [
        name
        for name, file in new.items()
        if not (_may_replace(target, name, known or {}) or _same(target / name, file))
    ]
    if known is None and os.path.lexists(target / MANIFEST):
        foreign.append(MANIFEST)
    if foreign:
        shown = f"{', '.join(foreign[:5])}{', ...' if len(foreign) > 5 else ''}"
        raise FileExistsError(
            f"{target} has files that would be replaced and that lowbit did not write, or that were changed since: "
            f"{shown}. Move them away, or give another directory."
        )
    if os.path.lexists(target / INDEX_FILE):
        raise FileExistsError(
            f"{target} has {INDEX_FILE}, which refers to other weights than the {WEIGHTS} to be written. "
            "Move that model away, or give another directory."
        )


@contextlib.contextmanager
def staged(target: Path, names: Iterable[str], part: Path | None = None) -> Iterator[Path]:
    """A directory to write files of these names to; they are moved into `target` when the block ends.

    `part`: the path to which finished weights are moved back if that fails.
    """
    staging, names = _staging(target), list(names)
    discard(target, part)
    staging.mkdir()
    try:
        _write_manifest(staging, {name: {} for name in names})
        yield staging
        _commit(target, staging, names)
    except BaseException:
        discard(target, part)
        raise
    finish(target)


def discard(target: Path, part: Path | None = None) -> None:
    """Remove files that a run staged and did not commit. Finished weights are moved back to `part`, to resume from."""
    if not _is_own(staging := _staging(target)):
        return
    weights = staging / WEIGHTS
    if part is not None and not part.exists() and weights.is_file() and _is_lowbit(weights):
        os.replace(weights, part)
    names = [name for name in _manifest(staging) or () if _is_inside(staging, name)]
    leftovers = staging.glob(".tmp*")  # of the safetensors package, if it was killed
    for path in (*(staging / name for name in names), *leftovers):
        if path.is_file():
            path.unlink()
    _remove(staging, MANIFEST)


def finish(target: Path) -> None:
    """Move files that an earlier run committed to their places, if there are any."""
    if not _is_own(pending := target / PENDING):
        return
    new = _manifest(pending)
    if new is not None:
        left = [name for name in new if (pending / name).is_file()]
        check_names(target, {name: pending / name for name in left})
        for name in sorted(left, key=lambda name: name == WEIGHTS):
            _move(pending / name, target / name)
        _sync_folders(target, new)
        _sync_folders(pending, new)
        for name, proof in (_manifest(target) or {}).items():
            if name not in new and _is_inside(target, name) and _is(target / name, proof):
                (target / name).unlink()
        sync_directory(target)
        os.replace(pending / MANIFEST, target / MANIFEST)
        sync_directory(target)
    _remove(pending)
    sync_directory(target)


def _commit(target: Path, staging: Path, names: list[str]) -> None:
    check_names(target, {name: staging / name for name in names})
    known, exists = _manifest(target) or {}, target.is_dir()
    for name in names:
        # A file of the user remains the user's even if it has the same bytes.
        if exists and not _may_replace(target, name, known):
            (staging / name).unlink()
    there = [name for name in names if (staging / name).is_file()]
    for name in there:
        sync(staging / name)
    _write_manifest(staging, {name: _proof(staging / name) for name in there})
    _sync_folders(staging, there)
    os.rename(staging, target / PENDING if exists else target)
    for folder in (target, target.parent):
        sync_directory(folder)


def _sync_folders(folder: Path, names: Iterable[str]) -> None:
    """Sync a directory, and the subdirectories that hold these names."""
    for inner in {".", *(str(parent) for name in names for parent in PurePosixPath(name).parents)}:
        if (folder / inner).is_dir():
            sync_directory(folder / inner)


def _staging(target: Path) -> Path:
    return target.parent / f".lowbit-{target.name}.new"


def _is_own(folder: Path) -> bool:
    """Whether a directory with a name that lowbit reserves exists; raises if something else has that name."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise FileExistsError(f"{folder} is not a directory that lowbit made. Move it away, and try again.")
    return folder.exists()


def _move(new: Path, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file():
        shutil.copymode(path, new)
    os.replace(new, path)


def _remove(folder: Path, *files: str) -> None:
    """Remove a directory that lowbit made and these files in it; raises if it has others."""
    for name in files:
        for path in (folder / name, folder / f"{name}.part"):
            path.unlink(missing_ok=True)
    try:
        for inner, _, _ in os.walk(folder, topdown=False):
            os.rmdir(inner)
    except OSError as error:
        raise FileExistsError(
            f"{folder} has files that lowbit did not write ({error.strerror}). Move it away, and try again."
        ) from None


# --- what lowbit wrote


def _may_replace(folder: Path, name: str, known: Mapping[str, Proof]) -> bool:
    """Whether a name in a directory is free, or is a file that lowbit wrote."""
    path = folder / name
    if not _is_inside(folder, name):
        return False
    return not os.path.lexists(path) or _is(path, known.get(name)) or (_is_file(path) and _is_lowbit(path))


def _same(path: Path, new: Path | None) -> bool:
    return new is not None and _is_file(path) and new.is_file() and _proof(path) == _proof(new)


def _is(path: Path, proof: Proof | None) -> bool:
    return bool(proof) and _is_file(path) and path.stat().st_size == proof["bytes"] and _proof(path) == proof


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _is_inside(folder: Path, name: str) -> bool:
    """Whether a name leads to a place inside a directory, through directories and no links."""
    inner = [folder / parent for parent in PurePosixPath(name).parents][:-1]
    return all(path.is_dir() and not path.is_symlink() for path in inner if os.path.lexists(path))


def _proof(path: Path) -> Proof:
    """Size and SHA-256 of a file. A lowbit file is hashed by its header, which has a checksum of every tensor."""
    with path.open("rb") as file:
        left = _header_length(path) if _is_lowbit(path) else path.stat().st_size
        digest = hashlib.sha256()
        while chunk := file.read(min(left, _CHUNK)):
            digest.update(chunk)
            left -= len(chunk)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _header_length(path: Path) -> int:
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def _is_lowbit(path: Path) -> bool:
    """Whether a file is a lowbit file with an intact header."""
    size = path.stat().st_size
    if size < 8 + DIGEST or version_of(path) is None:
        return False
    length = _header_length(path)
    if length > min(size - DIGEST, _LONGEST_HEADER):
        return False
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(length)).digest()
        file.seek(size - DIGEST)
        return file.read() == digest


def _write_manifest(folder: Path, files: Mapping[str, Proof]) -> None:
    part = folder / f"{MANIFEST}.part"
    part.write_text(json.dumps({"lowbit.manifest": _VERSION, "files": files}, indent=1) + "\n", "utf-8")
    sync(part)
    os.replace(part, folder / MANIFEST)


def _manifest(folder: Path) -> dict[str, Proof] | None:
    """The files that lowbit wrote to a directory, from its manifest; None without a readable manifest."""
    path = folder / MANIFEST
    if not _is_file(path):
        return None
    try:
        read = checked_json(path.read_bytes(), 0, ValueError)
    except ValueError:
        return None
    files = read.get("files")
    if read.get("lowbit.manifest") != _VERSION or not isinstance(files, dict):
        return None
    return files if all(_is_name(n) and _is_proof(p) for n, p in files.items()) else None


def _is_name(name: str) -> bool:
    path = PurePosixPath(name)
    inside = bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name
    return inside and str(path) == name and path.parts[0] not in (MANIFEST, PENDING)


def _is_proof(proof: Any) -> bool:
    return proof == {} or (
        isinstance(proof, dict)
        and proof.keys() == {"bytes", "sha256"}
        and type(proof["bytes"]) is int
        and isinstance(proof["sha256"], str)
    )
