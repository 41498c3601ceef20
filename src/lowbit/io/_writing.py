"""Writing files of ours: the tree as JSON, where each tensor lies, and the file itself, from one process or several.

Where several processes save one tree, each writes a file with its pieces of the arrays, and the file that `save` was
asked for is the index that puts them together.
"""

import contextlib
import hashlib
import itertools
import json
import math
import os
import secrets
import shutil
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from lowbit.formats import QuantizedArray

from ._atomic import written_aside
from ._contents import (
    DEEPEST,
    DIGEST,
    DTYPES,
    INDEX,
    OWN,
    SHA256,
    TEXTS,
    TYPES,
    VERSION,
    Contents,
    children_of,
    open_contents,
    path_name,
    piece_name,
    short,
    unique_name,
    version_of,
)
from ._processes import pieces_of, together

_ALIGNMENT = 64  # where JAX takes memory of the host as it is, without a copy


class _Outline:
    """The tree as JSON, and the tensors that it speaks of."""

    def __init__(self, target: Path, shapes: bool):
        self.target = target
        self.arrays = (jax.ShapeDtypeStruct,) if shapes else (jax.Array, np.ndarray, np.generic)
        self.tensors: dict[str, Any] = {}
        self.names = {"__metadata__": 1, SHA256: 1}
        self.tied: dict[int, str] = {}

    def node(self, tree: Any, path: tuple[Any, ...]) -> Any:
        kind = type(tree).__name__
        if isinstance(tree, self.arrays):
            return {"array": self.tensor(tree, path)}
        if isinstance(tree, QuantizedArray):
            array = tree.resolved()
            fields, names = array._fields()
            static = {name: self.static(getattr(array, name), (*path, name)) for name in names}
            return {"quantized": kind, "static": static, "parts": {n: self.part(array, n, path) for n in fields}}
        if (opened := children_of(tree)) is not None:
            if len(path) >= DEEPEST:
                raise self.bad(path, "is too deep", f"at most {DEEPEST} containers lie in each other", ValueError)
            if wrong := [key for key, _ in opened[0] if type(key) not in (str, int)]:
                raise self.bad(path, f"has the key {short(wrong[0])}", "keys are strings or integers")
            kind = kind if type(tree) is OWN.get(kind) else f"{type(tree).__module__}.{kind}"
            return [kind, [[key, self.node(child, (*path, key))] for key, child in opened[0]]]
        if type(tree) not in (str, bool, int, float, complex, type(None)):
            raise self.bad(path, f"is a {kind}", "leaves are arrays, numbers, strings and None")
        return None if tree is None else {kind: tree if kind == "str" else repr(tree)}

    def static(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, tuple):
            return [self.static(item, path) for item in value]
        if isinstance(value, np.dtype):
            return {"dtype": TYPES.get(value, value.name)}
        value = value.item() if isinstance(value, np.generic) else value
        if isinstance(value, bool | int | str | None) or (isinstance(value, float) and math.isfinite(value)):
            return value
        raise self.bad(path, f"is {short(value)}", "static fields are of finite numbers, strings and dtypes")

    def part(self, array: QuantizedArray, name: str, path: tuple[Any, ...]) -> str | None:
        part = getattr(array, name)
        return None if part is None else self.tensor(part, (*path, name))

    def tensor(self, array: Any, path: tuple[Any, ...]) -> str:
        if (key := id(array)) in self.tied:
            return self.tied[key]
        dtype = getattr(array, "dtype", None)
        if isinstance(array, Tracer):
            raise self.bad(path, "is traced", "call save outside of jit")
        if isinstance(dtype, np.dtype) and not dtype.isnative:
            array = array.astype(dtype := dtype.newbyteorder("="))
        if dtype not in TYPES:
            raise self.bad(path, f"is a {type(array).__name__} of dtype {dtype}", f"files have {', '.join(DTYPES)}")
        self.tied[key] = name = unique_name(path, self.names)
        self.tensors[name] = array
        return name

    def bad(self, path: tuple[Any, ...], problem: str, but: str, error: type[Exception] = TypeError) -> Exception:
        return error(f"Cannot save to {self.target}: {path_name(path)} {problem}; {but}.")


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _told(metadata: Any) -> str:
    try:
        told = _json(metadata)
        if isinstance(metadata, dict) and json.loads(told) == metadata:
            return told
    except (TypeError, ValueError, RecursionError):
        pass
    raise TypeError(
        "metadata must come back from JSON as it is: a dict with strings for keys, and in it such dicts, lists (not "
        f"tuples), strings, finite numbers, True, False and None. It is {short(metadata)}."
    )


def byte_size(array: Any) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


def _header(texts: dict[str, str], tensors: dict[str, Any], crc32: dict[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": texts | {"lowbit.crc32": _json(crc32)}}
    end = 0
    for name, array in {**tensors, SHA256: np.zeros(DIGEST, np.uint8)}.items():
        start, end = end, end + byte_size(array)
        entries[name] = {"dtype": TYPES[array.dtype], "shape": list(array.shape), "data_offsets": [start, end]}
    text = _json(entries).encode("ascii")
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def check_is_file(target: Path) -> None:
    """Raise where no file can be put."""
    if not target.parent.is_dir():
        raise FileNotFoundError(f"Cannot save to {target}: there is no directory {target.parent}.")
    if target.exists() and not target.is_file():
        raise IsADirectoryError(f"Cannot save to {target}: it is a directory or a device, not a file.")


def outlined(target: Path, tree: Any, metadata: Any, *, shapes: bool = False) -> tuple[dict[str, str], dict[str, Any]]:
    """The texts and the tensors of a file, which can be read if it is written. `shapes`: the tree has these alone."""
    outline = _Outline(target, shapes)
    told = [str(VERSION), _json(outline.node(tree, ())), "", _told({} if metadata is None else metadata)]
    texts: dict[str, str] = dict(zip(TEXTS, told, strict=True))
    # Those of whole cache lines first, then by the size of their elements, so that each lies on a multiple of it.
    tensors = dict(
        sorted(outline.tensors.items(), key=lambda t: (byte_size(t[1]) % _ALIGNMENT > 0, -t[1].dtype.itemsize))
    )
    start = _header(texts, tensors, dict.fromkeys(tensors, "0" * 8))
    Contents(target, start, len(start) + sum(map(byte_size, tensors.values())) + DIGEST).read()
    if not shapes:
        check_is_file(target)
    return texts, tensors


class Layout:
    """A file that `save` would write of a dict of arrays, from their shapes alone: where each tensor lies in it.

    - `parts`: of each array the names of its tensors, by its fields; of one that is not quantized, by "".
    - `tensors`: the shape and dtype of each. `offsets`: where it begins. `size`: of the file.
    """

    def __init__(self, target: Path, arrays: dict[str, Any], metadata: dict[str, Any]):
        self._texts, self.tensors = outlined(target, arrays, metadata, shapes=True)
        nodes = dict(json.loads(self._texts["lowbit.tree"])[1])
        self.parts: dict[str, dict[str, str]] = {
            name: {"": node["array"]} if "array" in node else {k: t for k, t in node["parts"].items() if t is not None}
            for name, node in nodes.items()
        }
        start = len(self._start({}))
        ends = list(itertools.accumulate(map(byte_size, self.tensors.values()), initial=start))
        self.offsets = dict(zip(self.tensors, ends, strict=False))
        self.size = ends[-1] + DIGEST
        self.replaces = index_parts(target)

    def _start(self, crc32: dict[str, int]) -> bytes:
        return _header(self._texts, self.tensors, {name: f"{crc32.get(name, 0):08x}" for name in self.tensors})

    def ends(self, crc32: dict[str, int]) -> tuple[bytes, bytes]:
        """The first and the last bytes of the file, given the checksums of all tensors."""
        start = self._start(crc32)
        return start, hashlib.sha256(start).digest()

    def tidy(self, target: Path) -> None:
        """Remove the parts that the file before was the index of."""
        remove_parts(target, self.replaces)


def write_file(target: Path, texts: dict[str, str], tensors: dict[str, Any]) -> bytes:
    """Write a file, and have the SHA-256 of its header."""
    crc32 = dict.fromkeys(tensors, "0" * 8)
    try:
        with written_aside(target) as aside, open(aside, "xb") as file:
            file.write(bytes(len(_header(texts, tensors, crc32))))
            for name, array in tensors.items():
                data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
                crc32[name] = f"{zlib.crc32(data):08x}"
                file.write(data)
            start = _header(texts, tensors, crc32)
            digest = hashlib.sha256(start).digest()
            file.write(digest)
            file.seek(0)
            file.write(start)
    except OSError as error:
        raise OSError(error.errno, f"Cannot save to {target}: {error.strerror or error}") from error
    return digest


def save_together(target: Path, tree: Any, metadata: Any) -> None:
    """Every process writes a file with its pieces, and then the first one the index that names these files."""
    here, doing = jax.process_index(), f"Cannot save to {target}"
    texts: dict[str, str] = {}
    tensors: dict[str, Any] = {}
    pieces: dict[str, Any] = {}

    def plan() -> bytes:
        found, arrays = outlined(target, tree, metadata)
        texts.update(found)
        for name, array in arrays.items():
            pieces[name] = pieces_of(array)
            placed = [[process, corner] for corner, (process, _) in pieces[name].items()]
            tensors[name] = {"dtype": TYPES[array.dtype], "shape": list(array.shape), "pieces": placed}
        return secrets.token_bytes(8) + hashlib.sha256(_json([target.name, tensors]).encode()).digest()

    plans = together(doing, plan)
    if other := [process for process, told in enumerate(plans) if told[8:] != plans[0][8:]]:
        raise ValueError(
            f"{doing}: process {other[0]} has another file name or other arrays than process 0. "
            "All must save the same tree, of arrays that lie on the same devices."
        )
    # Fresh names, so that the files of the old index stay as they are until the new one has taken its place.
    names = [f"{target.stem}-{plans[0][:8].hex()}-{i + 1:05}-of-{len(plans):05}.safetensors" for i in range(len(plans))]
    part = target.parent / names[here]
    written: dict[str, str] = {}

    def write() -> bytes:
        own = {
            piece_name(name, corner): piece
            for name, found in pieces.items()
            for corner, (process, piece) in found.items()
            if process == here
        }
        digest = write_file(part, *outlined(part, own, {}))
        written[part.name] = digest.hex()
        if target.exists():
            shutil.copymode(target, part)
        return digest

    def publish() -> bytes:
        if here == 0:
            old = index_parts(target)
            files = {name: digest.hex() for name, digest in zip(names, digests, strict=True)}
            index = texts | {
                "lowbit.version": str(INDEX),
                "lowbit.files": _json(files),
                "lowbit.pieces": _json(tensors),
            }
            start = _header(index, {}, {})
            # Reads the files of all processes: also those of another machine must be here.
            Contents(target, start, len(start) + DIGEST).read()
            write_file(target, index, {})
            remove_parts(target, old)
        return b""

    try:
        digests = together(doing, write)
        together(doing, publish)
    except BaseException:
        remove_parts(target, written)
        raise


def index_parts(target: Path) -> dict[str, str]:
    """The files that the index there names, with their digests; none without an index that can be read."""
    with contextlib.suppress(OSError, ValueError):
        if target.is_file() and version_of(target) == INDEX:  # opening a pipe would block
            return open_contents(target)[1].files
    return {}


def remove_parts(target: Path, parts: dict[str, str]) -> None:
    """Remove parts that have the digests of the index, unless the file there names them still.

    What cannot be removed stays; the checkpoint is whole.
    """
    for name in parts.keys() - index_parts(target):
        with contextlib.suppress(OSError):
            path = target.parent / name
            with path.open("rb") as file:
                file.seek(-DIGEST, os.SEEK_END)
                is_part = version_of(path) is not None and file.read().hex() == parts[name]
            if is_part and not path.is_symlink():
                path.unlink()
