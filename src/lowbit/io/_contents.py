"""What a file of ours says of itself: its header, its tree and its tensors, held against each other and the bytes.

A file is read as if somebody had written it to do harm: what its header says is held against the bytes that are there
and against the classes it names before an array is made, and what does not fit is one `ValueError` that names the file
and the tensor. Classes are found by name among the subclasses of `QuantizedArray` that are imported; nothing is
imported or run for a file. The header is read here rather than by the `safetensors` package, which copies each tensor
and lets a name be there twice.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from lowbit.formats import QuantizedArray

from ._checks import are_counts, checked_json
from ._maps import mapped
from ._processes import Box

VERSION, INDEX = 1, 2  # a file, and one that says in which others the pieces of its tensors lie
# fmt: off
DTYPES: dict[str, np.dtype] = {name: np.dtype(dtype) for name, dtype in {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8",
    "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8", "C64": "<c8", "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz, "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
}.items()}
# fmt: on
# fmt: on
TYPES: dict[Any, str] = {dtype: name for name, dtype in DTYPES.items()}
# Numbers are stored as Python writes them, which loses nothing and has words for infinity and NaN.
_NUMBERS: dict[str, Any] = {"bool": lambda text: text == "True", "int": int, "float": float, "complex": complex}
_START = re.compile(rb'\{"__metadata__":\{"lowbit\.version":"(\d{1,9})"')
TEXTS = ("lowbit.version", "lowbit.tree", "lowbit.crc32", "lowbit.metadata")
_INDEX_TEXTS = (*TEXTS, "lowbit.files", "lowbit.pieces")
_PART = re.compile(r"[^/\\\0]*-[0-9a-f]{16}-\d{5,}-of-\d{5,}\.safetensors")  # a plain name, and no other file's
SHA256, DIGEST = "lowbit.sha256", 32
_MOST_HEADER = 100_000_000  # as in the safetensors package
_MOST_AXES = 64  # numpy's
DEEPEST = 64  # containers in containers
_WIDEST = 1 << 20  # span, where the array is smaller than that
Key = str | int
OWN: dict[str, Any] = {"dict": dict, "list": list, "tuple": tuple}


@dataclasses.dataclass(frozen=True)
class Container:
    """A container of a file: `kind` is a dict, list, tuple, or the name of another class."""

    kind: str
    children: dict[Key, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """A tensor of one file: all of an array or of its part, or a piece of it."""

    path: Path
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    data: np.ndarray
    crc32: str

    def bad(self, problem: str) -> ValueError:
        return ValueError(f"{self.path}: tensor {short(self.name)} {problem}.")


@dataclasses.dataclass(frozen=True, eq=False)
class Tensor:
    """What a file has in the place of an array or of its part: the pieces, by where in it they lie."""

    dtype: np.dtype
    shape: tuple[int, ...]
    pieces: dict[Box, Piece]

    def read(self, wanted: Box) -> np.ndarray:
        """The numbers of a box: a view of the file where one piece has them all."""
        shape = tuple(stop - start for start, stop in wanted)
        whole: np.ndarray | None = None
        for there, piece in self.pieces.items():
            if not volume(both := common_box(wanted, there)):
                continue
            found = piece.data.view(piece.dtype).reshape(piece.shape)[_slices(both, there)]
            if piece.dtype == np.bool_ and (found.view(np.uint8) > 1).any():
                raise piece.bad("has bytes that are neither 0 nor 1")
            if found.shape == shape:
                return found
            whole = np.empty(shape, self.dtype) if whole is None else whole
            whole[_slices(both, wanted)] = found
        return np.empty(shape, self.dtype) if whole is None else whole


def whole_box(shape: tuple[int, ...]) -> Box:
    return tuple((0, n) for n in shape)


def common_box(a: Box, b: Box) -> Box:
    return tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))


def volume(box: Box) -> int:
    return math.prod(max(stop - start, 0) for start, stop in box)


def _slices(box: Box, within: Box) -> Any:
    # The dots keep what has no axes an array.
    return (..., *(slice(a - first, b - first) for (a, b), (first, _) in zip(box, within, strict=True)))


def children_of(tree: Any) -> tuple[list[tuple[Any, Any]], Callable[[list[Any]], Any]] | None:
    """The keys and children of a container, and what makes one like it of other children; None for a leaf."""
    if tree is None or isinstance(tree, QuantizedArray):
        return None
    if type(tree) is dict:  # in its own order, which JAX would change
        return list(tree.items()), lambda children: dict(zip(tree, children, strict=True))
    root = iter([False])  # the first that JAX asks about; all within is a leaf, were it the container itself
    found, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda _: next(root, True))
    if len(found) == 1 and not found[0][0]:
        return None
    return [(_key(path[0]), child) for path, child in found], functools.partial(jax.tree.unflatten, structure)


def _key(entry: Any) -> Any:
    return next((getattr(entry, name) for name in ("key", "idx", "name") if hasattr(entry, name)), str(entry))


def unique_name(path: tuple[Key, ...], taken: dict[str, int]) -> str:
    """A path as a name of its own: the second `a/b` is `a/b~2`."""
    name = found = "/".join(map(str, path))
    while found in taken:
        taken[name] += 1
        found = f"{name}~{taken[name]}"
    taken[found] = 1
    return found


def path_name(path: tuple[Any, ...]) -> str:
    return short("/".join(map(str, path))) if path else "the tree"


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def piece_name(name: str, corner: tuple[int, ...]) -> str:
    return f"{name}@{','.join(map(str, corner))}"


def version_of(path: str | os.PathLike[str]) -> int | None:
    """The version of a file by its first bytes, if it is one of ours."""
    with open(path, "rb") as file:
        start = _START.match(file.read(64), 8)
    return start and int(start[1])


def open_contents(path: Path, versions: tuple[int, ...] = (VERSION, INDEX)) -> tuple[np.ndarray, "Contents"]:
    """The bytes of a file, and what its header says."""
    size = path.stat().st_size
    if size < 8:
        raise ValueError(f"{path} is no safetensors file: it has {size} bytes.")
    data = mapped(path)
    end = 8 + int.from_bytes(data[:8].tobytes(), "little")
    if end > min(size, 8 + _MOST_HEADER):
        raise ValueError(
            f"{path} is no safetensors file, or is cut off: its header would end at byte {end}, and the file at {size}."
        )
    header = data[:end].tobytes()
    if (start := _START.match(header, 8)) is None:
        raise ValueError(
            f"{path} is not a lowbit file: it has none of the metadata that lowbit.save writes. "
            "If it is a model of another library, `lowbit convert` makes a lowbit file of it."
        )
    if (version := int(start[1])) not in versions:
        if version == INDEX:
            raise ValueError(f"{path} is an index, where a file with pieces should be.")
        raise ValueError(
            f"{path} is a lowbit file of version {version}, and this lowbit reads versions {VERSION} and {INDEX}: "
            "install a newer."
        )
    if hashlib.sha256(header).digest() != data[-DIGEST:].tobytes():
        raise ValueError(f"{path} is damaged or cut off: its header does not match its checksum.")
    return data, Contents(path, header, size, data)


class Contents:
    """What a header says, each word of it held against the others and against the size of the file."""

    def __init__(self, path: Path, header: bytes, size: int, data: np.ndarray | None = None):
        self.path, self.size = path, size
        self.data = np.empty(0, np.uint8) if data is None else data  # of what is not written yet, no piece is read
        if len(header) > 8 + _MOST_HEADER:
            raise self.bad("its header", f"has {len(header)} bytes, more than {_MOST_HEADER}")
        entries = self.parsed("its header", header[8:])
        texts = entries.pop("__metadata__", None)
        is_index = isinstance(texts, dict) and texts.get("lowbit.version") == str(INDEX)
        names = _INDEX_TEXTS if is_index else TEXTS
        if not isinstance(texts, dict) or tuple(texts) != names or not all(isinstance(t, str) for t in texts.values()):
            raise self.bad("its metadata", f"must be the texts {', '.join(names)}")
        self.stored = self.placed(entries, self.parsed("lowbit.crc32", texts["lowbit.crc32"]), len(header))
        self.files: dict[str, Any] = {}
        self.pieces: dict[str, Any] | None = None
        if is_index:
            if self.stored:
                raise self.bad(f"tensor {short(min(self.stored))}", "lies in an index")
            self.files = self.parsed("lowbit.files", texts["lowbit.files"])
            for name in self.files:
                if not _PART.fullmatch(name):
                    raise self.bad("lowbit.files", f"names {short(name)}, which is no name of a file with pieces")
                if (part := path.parent / name).is_file():
                    self.size += part.stat().st_size
            self.pieces = self.parsed("lowbit.pieces", texts["lowbit.pieces"])
        self.metadata = self.parsed("lowbit.metadata", texts["lowbit.metadata"])
        self.outline = self.parsed("lowbit.tree", f'{{"tree":{texts["lowbit.tree"]}}}')
        self.arrays: dict[str, Any] = {}
        self.names: dict[str, int] = {}
        # Tensors are named by their paths, so names that are much longer in all are there to fill the memory.
        self.names_left = 4 * len(header)
        self.quantized: dict[Any, QuantizedArray] = {}

    def bad(self, where: str, problem: str) -> ValueError:
        return ValueError(f"{self.path}: {where} {problem}.")

    def parsed(self, where: str, text: str | bytes) -> dict[str, Any]:
        text = text.encode("utf-8", "replace") if isinstance(text, str) else text
        return checked_json(text, self.size, lambda problem: self.bad(where, problem))

    def placed(self, entries: dict[str, Any], crc32: dict[str, Any], start: int) -> dict[str, Piece]:
        """The tensors where they lie: one after the other, from the end of the header to the end of the file."""
        if [*crc32, SHA256] != [*entries]:
            odd = short(sorted({*crc32, SHA256} ^ {*entries}))
            raise self.bad("lowbit.crc32", f"does not have the tensors of the file in their order: {odd}")
        tensors: dict[str, Piece] = {}
        end = start
        for name, entry in entries.items():
            where, code = f"tensor {short(name)}", crc32.get(name, "0" * 8)
            dtype, shape, offsets = self.declared(where, entry, "data_offsets")
            first, end = end, end + math.prod(shape) * dtype.itemsize
            if offsets != [first - start, end - start] or not are_counts(offsets, 2):
                raise self.bad(where, f"of shape {short(shape)} lies at {short(offsets)}")
            if not isinstance(code, str) or not re.fullmatch("[0-9a-f]{8}", code):
                raise self.bad(where, f"has the checksum {short(code)}, which is not eight hexadecimal digits")
            tensors[name] = Piece(self.path, name, dtype, tuple(shape), self.data[first:end], code)
        if end != self.size:
            raise self.bad("its last tensor", f"ends at byte {end}, and the file has {self.size}")
        del tensors[SHA256]
        return tensors

    def declared(self, where: str, entry: Any, third: str) -> tuple[np.dtype, list[int], list[Any]]:
        """The dtype and the shape of a tensor, and what else is said of it."""
        match entry:
            case {"dtype": str(kind), "shape": list(shape), **rest} if {*rest} == {third} and type(rest[third]) is list:
                dtype = DTYPES.get(kind)
            case _:
                raise self.bad(where, f"is {short(entry)}, and not a dtype, a shape and {third}")
        if dtype is None:
            raise self.bad(where, f"has the dtype {short(kind)}, which is none of {', '.join(DTYPES)}")
        # Also of an empty tensor the other axes must be such that numpy and XLA can count its bytes.
        if not are_counts(shape, _MOST_AXES) or math.prod(n or 1 for n in shape) > max(self.size, 1 << 40):
            raise self.bad(where, f"has the shape {short(shape)}")
        return dtype, shape, rest[third]

    def part(self, name: str, digest: Any) -> "Contents":
        """What a file says that the index names."""
        try:
            data, contents = open_contents(self.path.parent / name, (VERSION,))
        except (OSError, UnicodeError) as error:
            raise self.bad(f"its part {short(name)}", f"cannot be read: {error}") from error
        if data[-DIGEST:].tobytes().hex() != digest:
            raise self.bad(f"its part {short(name)}", "is not the file that was saved with it")
        return contents

    def joined(self, tensors: dict[str, Any]) -> dict[str, Tensor]:
        """The tensors of an index. Their pieces must be the cells of a grid, so none overlap and nothing is missing."""
        parts = [self.part(name, digest) for name, digest in self.files.items()]
        found: dict[str, Tensor] = {}
        for name, entry in tensors.items():
            where = f"tensor {short(name)}"
            dtype, shape, given = self.declared(where, entry, "pieces")
            corners: dict[tuple[int, ...], int] = {}
            for item in given:
                match item:
                    case [int(number), list(corner)] if (
                        are_counts([number, *corner], 1 + _MOST_AXES)
                        and number < len(parts)
                        and len(corner) == len(shape)
                        and all(first < max(n, 1) for first, n in zip(corner, shape, strict=True))
                    ):
                        corners[tuple(corner)] = number
                    case _:
                        raise self.bad(where, f"has the piece {short(item)}")
            cuts = [[*sorted({corner[axis] for corner in corners}), n] for axis, n in enumerate(shape)]
            cells = [dict(itertools.pairwise(axis)) for axis in cuts]
            if any(axis[0] for axis in cuts) or not math.prod(map(len, cells)) == len(corners) == len(given) > 0:
                raise self.bad(where, "has pieces that overlap or leave something out")
            pieces: dict[Box, Piece] = {}
            for corner, number in corners.items():
                there = tuple((first, cell[first]) for first, cell in zip(corner, cells, strict=True))
                piece = parts[number].stored.get(piece_name(name, corner))
                if piece is None or (piece.dtype, piece.shape) != (dtype, tuple(b - a for a, b in there)):
                    part = short(parts[number].path.name)
                    raise self.bad(where, f"has a piece at {corner} that is not what is in {part}")
                pieces[there] = piece
            found[name] = Tensor(dtype, tuple(shape), pieces)
        return found

    def read(self) -> tuple[Any, dict[str, Any]]:
        """The tree, with tensors in the place of arrays and of parts, and its arrays by name."""
        whole = {name: Tensor(p.dtype, p.shape, {whole_box(p.shape): p}) for name, p in self.stored.items()}
        self.tensors = whole if self.pieces is None else self.joined(self.pieces)
        self.unused = set(self.tensors)
        try:
            tree = self.node(self.outline["tree"], ())
        except RecursionError:
            raise self.bad("lowbit.tree", "is nested too deep") from None
        if self.unused:
            raise self.bad(f"tensor {short(min(self.unused))}", "belongs to no array")
        return tree, self.arrays

    def node(self, given: Any, path: tuple[Key, ...]) -> Any:
        match given:
            case None:
                return None
            case {"array": str(name), **rest} if not rest:
                return self.named(self.tensor(name, path), path)
            case {"quantized": str(name), "static": dict(static), "parts": dict(parts), **rest} if not rest:
                return self.named(self.array(self.known(name, path), static, parts, path), path)
            case [str(kind), list(pairs)] if len(path) < DEEPEST:
                return Container(kind, self.children(kind, pairs, path))
            case {"str": str(value), **rest} if not rest:
                return value
            case dict() if len(given) == 1 and (kind := next(iter(given))) in _NUMBERS:
                with contextlib.suppress(TypeError, ValueError):
                    if repr(value := _NUMBERS[kind](given[kind])) == given[kind]:
                        return value
        raise self.bad(path_name(path), f"is {short(given)}, which is no array, number or container")

    def children(self, kind: str, pairs: list[Any], path: tuple[Key, ...]) -> dict[Key, Any]:
        children: dict[Key, Any] = {}
        for i, pair in enumerate(pairs):
            match pair:
                case [str(key) | int(key), child] if type(key) is not bool and key not in children:
                    if kind in ("list", "tuple") and key != i:
                        raise self.bad(path_name((*path, key)), f"is number {i} of a {kind}")
                    if isinstance(key, str) and re.search("[\ud800-\udfff]", key):
                        raise self.bad(path_name((*path, key)), "has half a character in its key")
                    children[key] = self.node(child, (*path, key))
                case _:
                    raise self.bad(path_name(path), f"has the child {short(pair)}, which has no key of its own")
        return children

    def named(self, array: Any, path: tuple[Key, ...]) -> Any:
        name = unique_name(path, self.names)
        self.names_left -= len(name)
        if self.names_left < 0:
            raise self.bad(path_name(path), "and those before it have longer names than the header")
        self.arrays[name] = array
        return array

    def tensor(self, name: Any, path: tuple[Key, ...]) -> Tensor:
        if not isinstance(name, str) or name not in self.tensors:
            raise self.bad(path_name(path), f"needs tensor {short(name)}, which is missing")
        self.unused.discard(name)
        return self.tensors[name]

    def known(self, name: str, path: tuple[Key, ...]) -> type[QuantizedArray]:
        found: dict[str, type[QuantizedArray]] = {}
        waiting = QuantizedArray.__subclasses__()
        for cls in waiting:
            waiting += cls.__subclasses__()
            if cls.__name__ == name:  # of those that were defined again, as in a notebook, the last
                found[f"{cls.__module__}.{cls.__qualname__}"] = cls
        # A class that gives another one of the same name other manners, as a drop-in does, stores what that one stores.
        found = {key: cls for key, cls in found.items() if not any(base.__name__ == name for base in cls.__mro__[1:])}
        if len(found) != 1:
            which = f"there are {' and '.join(found)}" if found else "import the module that defines it"
            raise self.bad(path_name(path), f"is of the class {short(name)}: {which}")
        return next(iter(found.values()))

    def array(
        self, cls: type[QuantizedArray], static: dict[str, Any], parts: dict[str, Any], path: tuple[Key, ...]
    ) -> QuantizedArray:
        fields, names = cls._fields()
        if {*static} != {*names} or {*parts} != {*fields}:
            odd = short(sorted({*static, *parts} ^ {*names, *fields}))
            raise self.bad(path_name(path), f"and the class {cls.__name__} do not have the same fields: {odd}")
        values = tuple(self.static(static[name], path) for name in names)
        tensors = [None if parts[name] is None else self.tensor(parts[name], path) for name in fields]
        if (key := (cls, values, *tensors)) not in self.quantized:
            self.quantized[key] = cls._unflatten(values, tensors)
            self.check(self.quantized[key], path_name(path))
        return self.quantized[key]

    def static(self, given: Any, path: tuple[Key, ...]) -> Any:
        match given:
            case list():
                return tuple(self.static(item, path) for item in given)
            case {"dtype": str(name), **rest} if not rest and name in DTYPES:
                return DTYPES[name]
            case dict():
                raise self.bad(
                    path_name(path), f"has {short(given)} in a static field, which is no dtype of safetensors"
                )
        return given

    def check(self, array: QuantizedArray, where: str) -> None:
        """Whether it is an array: what JAX unflattens, no class has checked."""
        kind = type(array).__name__
        axes = range(-len(getattr(array.codes, "shape", ())), 0)
        spans, lengths = array.spans, array.lengths
        flags = (array.transposed, array.use_kernel)
        if (
            not isinstance(array.dtype, np.dtype)
            or {*map(type, flags)} != {bool}
            or array.compute not in ("exact", "fast")
        ):
            told = (array.dtype, *flags, array.compute)
            raise self.bad(where, f"has {short(told)} for dtype, transposed, use_kernel and compute")
        widest = max(_WIDEST, 8 * math.prod(getattr(array.codes, "shape", ())))
        if not _integers(spans) or len(spans) > len(axes) or not all(0 <= span <= widest for span in spans):
            raise self.bad(where, f"has the spans {short(spans)} on {len(axes)} axes")
        paired = isinstance(lengths, tuple) and all(_integers(pair) and len(pair) == 2 for pair in lengths)
        if not paired or any(axis not in axes or n < 0 for axis, n in lengths) or len(dict(lengths)) < len(lengths):
            raise self.bad(where, f"has the lengths {short(lengths)} on {len(axes)} axes")
        try:
            _, shape = array.shape, array.stored_shape
            parts = jax.tree.map(lambda part: jax.ShapeDtypeStruct(part.shape, part.dtype), array)
            decoded = jax.eval_shape(_decoded, parts)
        except Exception as error:  # whatever a format's own code meets with in what the file says
            raise self.bad(where, f"is no {kind}: {str(error)[:500]}") from error
        if decoded.shape != shape or decoded.dtype != np.float32 or array.index is not None:
            raise self.bad(where, f"is no {kind} of stored shape {shape}: it decodes to {decoded}")


def _integers(given: Any) -> bool:
    return isinstance(given, tuple) and all(type(n) is int for n in given)


@jax.jit  # traced once for all that are alike
def _decoded(array: QuantizedArray) -> jax.Array:
    return array.decode()
