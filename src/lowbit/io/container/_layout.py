"""The layout of a lowbit file: its tree as JSON, its header, and where each tensor goes."""

import contextlib
import hashlib
import itertools
import json
import math
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from lowbit.formats import PermutedArray, QuantizedArray

from .._checks import short
from .._dtypes import DTYPES, NAMES
from ._header import (
    DEEPEST,
    DIGEST,
    INDEX,
    KEY_DATA,
    OWN,
    RANDOM_KEY,
    SHA256,
    TEXTS,
    VERSION,
    Contents,
    children_of,
    class_name,
    is_random_key,
    is_static,
    open_contents,
    path_name,
    unique_name,
    version_of,
)

_ALIGNMENT = 64  # bytes, at which JAX uses host memory without a copy


class _Outline:
    """Converts a tree to JSON and collects its tensors by name."""

    def __init__(self, target: Path, shapes: bool):
        self.target = target
        self.arrays = (jax.ShapeDtypeStruct,) if shapes else (jax.Array, np.ndarray, np.generic)
        self.tensors: dict[str, Any] = {}
        self.names = {"__metadata__": 1, SHA256: 1}
        self.tied: dict[int, str] = {}

    def node(self, tree: Any, path: tuple[Any, ...]) -> Any:
        kind = type(tree).__name__
        if is_random_key(tree) and isinstance(tree, self.arrays):
            keys: Any = tree
            shapes = isinstance(keys, jax.ShapeDtypeStruct)
            data = jax.eval_shape(jax.random.key_data, keys) if shapes else jax.random.key_data(keys)
            name = f"{RANDOM_KEY}{jax.random.key_impl(keys)}"
            return [name, [[KEY_DATA, {"array": self.tensor(data, (*path, KEY_DATA))}]]]
        if isinstance(tree, self.arrays):
            return {"array": self.tensor(tree, path)}
        if isinstance(tree, QuantizedArray):
            array = tree.resolved()
            fields, names = array._fields()
            static = {name: self.static(getattr(array, name), (*path, name)) for name in names}
            return {"quantized": kind, "static": static, "parts": {n: self.component(array, n, path) for n in fields}}
        if isinstance(tree, PermutedArray):
            order = self.component(tree, "order", path)
            return {"permuted": self.node(tree.array, path), "axis": tree.axis, "order": order}
        if (opened := children_of(tree)) is not None:
            if len(path) >= DEEPEST:
                raise self.bad(path, "is nested too deep", f"containers nest at most {DEEPEST} deep", ValueError)
            if wrong := [key for key, _ in opened[0] if type(key) not in (str, int)]:
                raise self.bad(path, f"has the key {short(wrong[0])}", "keys are strings or integers")
            kind = kind if type(tree) is OWN.get(kind) else class_name(tree)
            return [kind, [[key, self.node(child, (*path, key))] for key, child in opened[0]]]
        if is_static(tree):  # `load` takes it from `like`
            return [class_name(tree), []]
        if type(tree) not in (str, bool, int, float, complex, type(None)):
            raise self.bad(path, f"is a {kind}", "leaves are arrays, numbers, strings, None and functions")
        return None if tree is None else {kind: tree if kind == "str" else repr(tree)}

    def static(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, tuple):
            return [self.static(item, path) for item in value]
        if isinstance(value, np.dtype):
            return {"dtype": NAMES.get(value, value.name)}
        value = value.item() if isinstance(value, np.generic) else value
        if isinstance(value, bool | int | str | None) or (isinstance(value, float) and math.isfinite(value)):
            return value
        raise self.bad(path, f"is {short(value)}", "static fields are finite numbers, strings and dtypes")

    def component(self, array: Any, name: str, path: tuple[Any, ...]) -> str | None:
        component = getattr(array, name)
        return None if component is None else self.tensor(component, (*path, name))

    def tensor(self, array: Any, path: tuple[Any, ...]) -> str:
        if (key := id(array)) in self.tied:
            return self.tied[key]
        dtype = getattr(array, "dtype", None)
        if isinstance(array, Tracer):
            raise self.bad(path, "is traced", "call save outside of jit")
        if isinstance(dtype, np.dtype) and not dtype.isnative:
            array = array.astype(dtype := dtype.newbyteorder("="))
        if dtype not in NAMES:
            raise self.bad(path, f"is a {type(array).__name__} of dtype {dtype}", f"files hold {', '.join(DTYPES)}")
        self.tied[key] = name = unique_name(path, self.names)
        self.tensors[name] = array
        return name

    def bad(self, path: tuple[Any, ...], problem: str, but: str, error: type[Exception] = TypeError) -> Exception:
        return error(f"Cannot save to {self.target}: {path_name(path)} {problem}; {but}.")


def as_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _metadata_json(metadata: Any) -> str:
    try:
        text = as_json(metadata)
        if isinstance(metadata, dict) and json.loads(text) == metadata:
            return text
    except (TypeError, ValueError, RecursionError):
        pass
    raise TypeError(
        "metadata must survive a round trip through JSON: a dict with string keys, of such dicts, lists (not tuples), "
        f"strings, finite numbers, booleans and None. It is {short(metadata)}."
    )


def byte_size(array: Any) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


def header_bytes(texts: dict[str, str], tensors: dict[str, Any], crc32: dict[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": texts | {"lowbit.crc32": as_json(crc32)}}
    end = 0
    for name, array in {**tensors, SHA256: np.zeros(DIGEST, np.uint8)}.items():
        start, end = end, end + byte_size(array)
        entries[name] = {"dtype": NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [start, end]}
    text = as_json(entries).encode("ascii")
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def check_is_file(target: Path) -> None:
    """Raise if a file cannot be written to a path."""
    if not target.parent.is_dir():
        raise FileNotFoundError(f"Cannot save to {target}: there is no directory {target.parent}.")
    if target.exists() and not target.is_file():
        raise IsADirectoryError(f"Cannot save to {target}: it is a directory or a device.")


def outlined(target: Path, tree: Any, metadata: Any, *, shapes: bool = False) -> tuple[dict[str, str], dict[str, Any]]:
    """The metadata texts and the tensors of a file for a tree; raises if the file could not be read back.

    `shapes`: the leaves are `jax.ShapeDtypeStruct`s.
    """
    outline = _Outline(target, shapes)
    values = [str(VERSION), as_json(outline.node(tree, ())), "", _metadata_json({} if metadata is None else metadata)]
    texts: dict[str, str] = dict(zip(TEXTS, values, strict=True))
    # Tensors of whole cache lines first, then by the size of their elements, so that each is aligned to it.
    tensors = dict(
        sorted(outline.tensors.items(), key=lambda t: (byte_size(t[1]) % _ALIGNMENT > 0, -t[1].dtype.itemsize))
    )
    start = header_bytes(texts, tensors, dict.fromkeys(tensors, "0" * 8))
    Contents(target, start, len(start) + sum(map(byte_size, tensors.values())) + DIGEST).read()
    if not shapes:
        check_is_file(target)
    return texts, tensors


class Layout:
    """The layout of the file that `save` would write for a dict of arrays, from their shapes only.

    - `components`: for each array, the names of its tensors by component; "" for an array that is not quantized.
    - `tensors`: the shape and dtype of each tensor. `offsets`: where it starts. `size`: of the file.
    """

    def __init__(self, target: Path, arrays: dict[str, Any], metadata: dict[str, Any]):
        self._texts, self.tensors = outlined(target, arrays, metadata, shapes=True)
        nodes = dict(json.loads(self._texts["lowbit.tree"])[1])
        self.components: dict[str, dict[str, str]] = {name: _components(node) for name, node in nodes.items()}
        start = len(self._start({}))
        ends = list(itertools.accumulate(map(byte_size, self.tensors.values()), initial=start))
        self.offsets = dict(zip(self.tensors, ends, strict=False))
        self.size = ends[-1] + DIGEST
        self.replaces = index_files(target)

    def _start(self, crc32: dict[str, int]) -> bytes:
        return header_bytes(self._texts, self.tensors, {name: f"{crc32.get(name, 0):08x}" for name in self.tensors})

    def ends(self, crc32: dict[str, int]) -> tuple[bytes, bytes]:
        """The first and the last bytes of the file, given the checksums of all tensors."""
        start = self._start(crc32)
        return start, hashlib.sha256(start).digest()

    def tidy(self, target: Path) -> None:
        """Remove the shard files of the index that the file has replaced."""
        remove_shard_files(target, self.replaces)


def _components(node: dict[str, Any]) -> dict[str, str]:
    """The names of the tensors of an array, by component."""
    if "permuted" in node:
        return _components(node["permuted"]) | {"order": node["order"]}
    return {"": node["array"]} if "array" in node else {k: t for k, t in node["parts"].items() if t is not None}


def index_files(target: Path) -> dict[str, str]:
    """The shard files that an index lists, with their digests; empty if there is no readable index."""
    with contextlib.suppress(OSError, ValueError):
        if target.is_file() and version_of(target) == INDEX:  # opening a pipe would block
            return open_contents(target)[1].files
    return {}


def remove_shard_files(target: Path, files: dict[str, str]) -> None:
    """Remove shard files that have these digests, unless the index at `target` lists them.

    A file that cannot be removed stays, which does no harm to the checkpoint.
    """
    for name in files.keys() - index_files(target):
        with contextlib.suppress(OSError):
            path = target.parent / name
            with path.open("rb") as file:
                file.seek(-DIGEST, os.SEEK_END)
                same = version_of(path) is not None and file.read().hex() == files[name]
            if same and not path.is_symlink():
                path.unlink()
