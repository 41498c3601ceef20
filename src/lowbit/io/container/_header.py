"""Parsing the header of a lowbit file: its tree and its tensors.

A file is not trusted: before an array is made, the header is checked against the size of the file and against the
classes that it names, and a mismatch raises one `ValueError` that names the file and the tensor. Classes are looked up
by name among the imported subclasses of `QuantizedArray`; reading a file imports and runs nothing. The `safetensors`
package is not used, since it copies each tensor and accepts duplicate names.
"""

import contextlib
import dataclasses
import enum
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
import jax.numpy as jnp
import numpy as np

from lowbit.formats import PermutedArray, QuantizedArray

from .._checks import are_counts, checked_json, short
from .._dtypes import DTYPES
from .._maps import mapped
from .._regions import Region, full_region, intersection, region_shape, region_size, slices

VERSION, INDEX = 1, 2  # a file with its tensors, and an index of files that hold shards of them
# Numbers are stored as their repr, which is lossless and can spell infinity and NaN.
_NUMBERS: dict[str, Any] = {"bool": lambda text: text == "True", "int": int, "float": float, "complex": complex}
_START = re.compile(rb'\{"__metadata__":\{"lowbit\.version":"(\d{1,9})"')
TEXTS = ("lowbit.version", "lowbit.tree", "lowbit.crc32", "lowbit.metadata")
SHARDS_TEXT, SHARDS_KEY = "lowbit.pieces", "pieces"  # what version 2 of the file format calls shards
_INDEX_TEXTS = (*TEXTS, "lowbit.files", SHARDS_TEXT)
# A name without directories, in a form that other files are unlikely to have.
_SHARD_FILE = re.compile(r"[^/\\\0]*-[0-9a-f]{16}-\d{5,}-of-\d{5,}\.safetensors")
SHA256, DIGEST = "lowbit.sha256", 32
_MOST_HEADER = 100_000_000  # as in the safetensors package
_MOST_AXES = 64  # numpy's
DEEPEST = 64  # levels of nested containers
_WIDEST = 1 << 20  # largest span of an array that is smaller than that
Key = str | int
OWN: dict[str, Any] = {"dict": dict, "list": list, "tuple": tuple}
RANDOM_KEY, KEY_DATA = "jax.random.key:", "data"  # a container of this class, with the name of its generator


@dataclasses.dataclass(frozen=True)
class Container:
    """A container in the tree of a file: `kind` is "dict", "list", "tuple", or the name of another class."""

    kind: str
    children: dict[Key, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Shard:
    """A tensor as one file stores it: an array or a component of one, or a shard of either."""

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
    """An array, or a component of one, that is not read yet: its shards by the regions that they cover."""

    dtype: np.dtype
    shape: tuple[int, ...]
    shards: dict[Region, Shard]

    def read(self, wanted: Region) -> np.ndarray:
        """The numbers of a region: a view of the file if one shard has them all."""
        shape = region_shape(wanted)
        whole: np.ndarray | None = None
        for region, shard in self.shards.items():
            if not region_size(common := intersection(wanted, region)):
                continue
            found = shard.data.view(shard.dtype).reshape(shard.shape)[slices(common, region)]
            if shard.dtype == np.bool_ and (found.view(np.uint8) > 1).any():
                raise shard.bad("has bytes that are neither 0 nor 1")
            if found.shape == shape:
                return found
            whole = np.empty(shape, self.dtype) if whole is None else whole
            whole[slices(common, wanted)] = found
        return np.empty(shape, self.dtype) if whole is None else whole


def children_of(tree: Any) -> tuple[list[tuple[Any, Any]], Callable[[list[Any]], Any]] | None:
    """The keys and children of a container, and a function that rebuilds it from new children; None for a leaf."""
    if tree is None or isinstance(tree, QuantizedArray | PermutedArray):
        return None
    if type(tree) is dict:  # keeps its order, which JAX would sort
        return list(tree.items()), lambda children: dict(zip(tree, children, strict=True))
    root = iter([False])  # JAX asks about the root first; everything below it counts as a leaf
    found, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda _: next(root, True))
    if len(found) == 1 and not found[0][0]:
        return None
    return [(_key(path[0]), child) for path, child in found], functools.partial(jax.tree.unflatten, structure)


def is_random_key(x: Any) -> bool:
    """Whether `x` is an array of typed random keys, or the type of one."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def is_static(x: Any) -> bool:
    """Whether a leaf is code or a name rather than data: a function, a class, a dtype, a member of an enum."""
    if isinstance(x, np.dtype | enum.Enum | type):
        return True
    held = (x.args, x.keywords) if isinstance(x, functools.partial) else getattr(x, "__dict__", {})
    return callable(x) and not any(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(held))


def class_name(x: Any) -> str:
    return f"{type(x).__module__}.{type(x).__name__}"


def _key(entry: Any) -> Any:
    return next((getattr(entry, name) for name in ("key", "idx", "name") if hasattr(entry, name)), str(entry))


def unique_name(path: tuple[Key, ...], taken: dict[str, int]) -> str:
    """A path as a unique name: the second `a/b` is `a/b~2`."""
    name = found = "/".join(map(str, path))
    while found in taken:
        taken[name] += 1
        found = f"{name}~{taken[name]}"
    taken[found] = 1
    return found


def path_name(path: tuple[Any, ...]) -> str:
    return short("/".join(map(str, path))) if path else "the tree"


def shard_name(name: str, corner: tuple[int, ...]) -> str:
    return f"{name}@{','.join(map(str, corner))}"


def version_of(path: str | os.PathLike[str]) -> int | None:
    """The version of a lowbit file by its first bytes; None for any other file."""
    with open(path, "rb") as file:
        start = _START.match(file.read(64), 8)
    return start and int(start[1])


def open_contents(path: Path, versions: tuple[int, ...] = (VERSION, INDEX)) -> tuple[np.ndarray, "Contents"]:
    """The bytes of a lowbit file, and its parsed header."""
    size = path.stat().st_size
    if size < 8:
        raise ValueError(f"{path} is not a safetensors file: it has {size} bytes.")
    data = mapped(path)
    end = 8 + int.from_bytes(data[:8].tobytes(), "little")
    if end > min(size, 8 + _MOST_HEADER):
        raise ValueError(
            f"{path} is not a safetensors file, or is truncated: its header would end at byte {end} of {size}."
        )
    header = data[:end].tobytes()
    if (start := _START.match(header, 8)) is None:
        raise ValueError(
            f"{path} is not a lowbit file: it lacks the metadata that lowbit.save writes. "
            "lowbit.load also reads files of other libraries."
        )
    if (version := int(start[1])) not in versions:
        if version == INDEX:
            raise ValueError(f"{path} is an index, and must be a file with shards.")
        raise ValueError(
            f"{path} is a lowbit file of version {version}, and this lowbit reads versions {VERSION} and {INDEX}. "
            "Install a newer lowbit."
        )
    if hashlib.sha256(header).digest() != data[-DIGEST:].tobytes():
        raise ValueError(f"{path} is damaged or truncated: its header does not match its checksum.")
    return data, Contents(path, header, size, data)


class Contents:
    """A parsed header, checked for consistency and against the size of the file."""

    def __init__(self, path: Path, header: bytes, size: int, data: np.ndarray | None = None):
        self.path, self.size = path, size
        self.data = np.empty(0, np.uint8) if data is None else data  # a file that is not written yet has none
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
        self.shards: dict[str, Any] | None = None
        if is_index:
            if self.stored:
                raise self.bad(f"tensor {short(min(self.stored))}", "is in an index, which must have none")
            self.files = self.parsed("lowbit.files", texts["lowbit.files"])
            for name in self.files:
                if not _SHARD_FILE.fullmatch(name):
                    raise self.bad("lowbit.files", f"has {short(name)}, which cannot be the name of a file with shards")
                if (file := path.parent / name).is_file():
                    self.size += file.stat().st_size
            self.shards = self.parsed(SHARDS_TEXT, texts[SHARDS_TEXT])
        self.metadata = self.parsed("lowbit.metadata", texts["lowbit.metadata"])
        self.outline = self.parsed("lowbit.tree", f'{{"tree":{texts["lowbit.tree"]}}}')
        self.arrays: dict[str, Any] = {}
        self.names: dict[str, int] = {}
        # Tensors are named by their paths, so names that are much longer in total are an attack on memory.
        self.names_left = 4 * len(header)
        self.quantized: dict[Any, Any] = {}

    def bad(self, where: str, problem: str) -> ValueError:
        return ValueError(f"{self.path}: {where} {problem}.")

    def parsed(self, where: str, text: str | bytes) -> dict[str, Any]:
        text = text.encode("utf-8", "replace") if isinstance(text, str) else text
        return checked_json(text, self.size, lambda problem: self.bad(where, problem))

    def placed(self, entries: dict[str, Any], crc32: dict[str, Any], start: int) -> dict[str, Shard]:
        """The tensors, which must fill the file from the end of the header to its end without gaps."""
        if [*crc32, SHA256] != [*entries]:
            odd = short(sorted({*crc32, SHA256} ^ {*entries}))
            raise self.bad("lowbit.crc32", f"does not list the tensors of the file in order: {odd}")
        tensors: dict[str, Shard] = {}
        end = start
        for name, entry in entries.items():
            where, code = f"tensor {short(name)}", crc32.get(name, "0" * 8)
            dtype, shape, offsets = self.declared(where, entry, "data_offsets")
            first, end = end, end + math.prod(shape) * dtype.itemsize
            if offsets != [first - start, end - start] or not are_counts(offsets, 2):
                raise self.bad(where, f"of shape {short(shape)} has the offsets {short(offsets)}")
            if not isinstance(code, str) or not re.fullmatch("[0-9a-f]{8}", code):
                raise self.bad(where, f"has the checksum {short(code)}, which is not eight hexadecimal digits")
            tensors[name] = Shard(self.path, name, dtype, tuple(shape), self.data[first:end], code)
        if end != self.size:
            raise self.bad("its last tensor", f"ends at byte {end}, and the file has {self.size}")
        del tensors[SHA256]
        return tensors

    def declared(self, where: str, entry: Any, third: str) -> tuple[np.dtype, list[int], list[Any]]:
        """The dtype and the shape of a tensor, and the field called `third`."""
        match entry:
            case {"dtype": str(kind), "shape": list(shape), **rest} if {*rest} == {third} and type(rest[third]) is list:
                dtype = DTYPES.get(kind)
            case _:
                raise self.bad(where, f"is {short(entry)}, and not a dtype, a shape and {third}")
        if dtype is None:
            raise self.bad(where, f"has the dtype {short(kind)}, which is not one of {', '.join(DTYPES)}")
        # The other axes of an empty tensor are limited too, so that numpy and XLA can count its bytes.
        if not are_counts(shape, _MOST_AXES) or math.prod(n or 1 for n in shape) > max(self.size, 1 << 40):
            raise self.bad(where, f"has the shape {short(shape)}")
        return dtype, shape, rest[third]

    def shard_file(self, name: str, digest: Any) -> "Contents":
        """The header of a file that the index lists."""
        where = f"its shard file {short(name)}"
        try:
            data, contents = open_contents(self.path.parent / name, (VERSION,))
        except (OSError, UnicodeError) as error:
            raise self.bad(where, f"cannot be read: {error}") from error
        if data[-DIGEST:].tobytes().hex() != digest:
            raise self.bad(where, "is not the file that was saved with it")
        return contents

    def joined(self, tensors: dict[str, Any]) -> dict[str, Tensor]:
        """The tensors of an index, from the shards in its files."""
        files = [self.shard_file(name, digest) for name, digest in self.files.items()]
        found: dict[str, Tensor] = {}
        for name, entry in tensors.items():
            where = f"tensor {short(name)}"
            dtype, shape, given = self.declared(where, entry, SHARDS_KEY)
            shards: dict[Region, Shard] = {}
            for region, number in self.grid(where, shape, given, len(files)).items():
                corner = tuple(start for start, _ in region)
                shard = files[number].stored.get(shard_name(name, corner))
                if shard is None or (shard.dtype, shard.shape) != (dtype, region_shape(region)):
                    file = short(files[number].path.name)
                    raise self.bad(where, f"has a shard at {corner} that differs from the one in {file}")
                shards[region] = shard
            found[name] = Tensor(dtype, tuple(shape), shards)
        return found

    def grid(self, where: str, shape: list[int], given: list[Any], files: int) -> dict[Region, int]:
        """The region of each shard and the number of its file.

        An index gives only the corners. Shards must be the cells of a grid, so they neither overlap nor leave gaps.
        """
        corners: dict[tuple[int, ...], int] = {}
        for item in given:
            match item:
                case [int(number), list(corner)] if (
                    are_counts([number, *corner], 1 + _MOST_AXES)
                    and number < files
                    and len(corner) == len(shape)
                    and all(first < max(n, 1) for first, n in zip(corner, shape, strict=True))
                ):
                    corners[tuple(corner)] = number
                case _:
                    raise self.bad(where, f"has the shard {short(item)}")
        starts = [[*sorted({corner[axis] for corner in corners}), n] for axis, n in enumerate(shape)]
        cells = [dict(itertools.pairwise(axis)) for axis in starts]
        if any(axis[0] for axis in starts) or not math.prod(map(len, cells)) == len(corners) == len(given) > 0:
            raise self.bad(where, "has shards that overlap or leave gaps")
        return {
            tuple((first, cell[first]) for first, cell in zip(corner, cells, strict=True)): number
            for corner, number in corners.items()
        }

    def read(self) -> tuple[Any, dict[str, Any]]:
        """The tree, with a `Tensor` for each array and component, and its arrays by name."""
        whole = {name: Tensor(s.dtype, s.shape, {full_region(s.shape): s}) for name, s in self.stored.items()}
        self.tensors = whole if self.shards is None else self.joined(self.shards)
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
            case {"permuted": dict(stored), "axis": int(axis), "order": str(name), **rest} if not rest:
                return self.named(self.permuted(stored, axis, name, path), path)
            case [str(kind), list(pairs)] if len(path) < DEEPEST:
                return Container(kind, self.children(kind, pairs, path))
            case {"str": str(value), **rest} if not rest:
                return value
            case dict() if len(given) == 1 and (kind := next(iter(given))) in _NUMBERS:
                with contextlib.suppress(TypeError, ValueError):
                    if repr(value := _NUMBERS[kind](given[kind])) == given[kind]:
                        return value
        raise self.bad(path_name(path), f"is {short(given)}, which is not an array, a number or a container")

    def children(self, kind: str, pairs: list[Any], path: tuple[Key, ...]) -> dict[Key, Any]:
        children: dict[Key, Any] = {}
        for i, pair in enumerate(pairs):
            match pair:
                case [str(key) | int(key), child] if type(key) is not bool and key not in children:
                    if kind in ("list", "tuple") and key != i:
                        raise self.bad(path_name((*path, key)), f"is item {i} of a {kind}")
                    if isinstance(key, str) and re.search("[\ud800-\udfff]", key):
                        raise self.bad(path_name((*path, key)), "has an unpaired surrogate in its key")
                    children[key] = self.node(child, (*path, key))
                case _:
                    raise self.bad(path_name(path), f"has the child {short(pair)}, which has no key of its own")
        return children

    def named(self, array: Any, path: tuple[Key, ...]) -> Any:
        name = unique_name(path, self.names)
        self.names_left -= len(name)
        if self.names_left < 0:
            raise self.bad(path_name(path), "and the arrays before it have names that are longer than the header")
        self.arrays[name] = array
        return array

    def tensor(self, name: Any, path: tuple[Key, ...]) -> Tensor:
        if not isinstance(name, str) or name not in self.tensors:
            raise self.bad(path_name(path), f"needs tensor {short(name)}, which is missing")
        self.unused.discard(name)
        return self.tensors[name]

    def known(self, name: str, path: tuple[Key, ...]) -> type[QuantizedArray]:
        found: dict[str, type[QuantizedArray]] = {}
        classes = QuantizedArray.__subclasses__()
        for cls in classes:
            classes += cls.__subclasses__()
            if cls.__name__ == name:  # the last one, if a notebook defined it again
                found[f"{cls.__module__}.{cls.__qualname__}"] = cls
        # A subclass of the same name, as the drop-in defines, stores the same components as its base.
        found = {key: cls for key, cls in found.items() if not any(base.__name__ == name for base in cls.__mro__[1:])}
        if len(found) != 1:
            which = f"there are {' and '.join(found)}" if found else "import the module that defines it"
            raise self.bad(path_name(path), f"is of the class {short(name)}: {which}")
        return next(iter(found.values()))

    def array(
        self, cls: type[QuantizedArray], static: dict[str, Any], components: dict[str, Any], path: tuple[Key, ...]
    ) -> QuantizedArray:
        fields, names = cls._fields()
        # A component that a later version added may be missing.
        components = {name: None for name in fields if getattr(cls, name, 0) is None} | components
        if {*static} != {*names} or {*components} != {*fields}:
            odd = short(sorted({*static, *components} ^ {*names, *fields}))
            raise self.bad(path_name(path), f"has other fields than the class {cls.__name__}: {odd}")
        values = tuple(self.static(static[name], path) for name in names)
        tensors = [None if components[name] is None else self.tensor(components[name], path) for name in fields]
        if (key := (cls, values, *tensors)) not in self.quantized:
            self.quantized[key] = cls._unflatten(values, tensors)
            self.check(self.quantized[key], path_name(path))
        return self.quantized[key]

    def permuted(self, stored: dict[str, Any], axis: int, name: str, path: tuple[Key, ...]) -> PermutedArray:
        match stored:
            case {"quantized": str(kind), "static": dict(static), "parts": dict(parts), **rest} if not rest:
                array = self.array(self.known(kind, path), static, parts, path)
            case _:
                raise self.bad(path_name(path), f"is a permuted {short(stored)}, which is not a quantized array")
        order = self.tensor(name, path)
        if type(axis) is not int or axis >= 0 or order.dtype != np.int32:
            raise self.bad(path_name(path), f"is permuted along the axis {axis!r} in an order of dtype {order.dtype}")
        permuted = PermutedArray._unflatten((axis,), [array, order])
        try:
            _ = permuted.shape
        except ValueError as error:
            raise self.bad(path_name(path), f"is not valid: {error}"[:500].rstrip(".")) from None
        return self.quantized.setdefault((axis, id(array), order), permuted)

    def static(self, given: Any, path: tuple[Key, ...]) -> Any:
        match given:
            case list():
                return tuple(self.static(item, path) for item in given)
            case {"dtype": str(name), **rest} if not rest and name in DTYPES:
                return DTYPES[name]
            case dict():
                raise self.bad(
                    path_name(path), f"has {short(given)} in a static field, which is not a dtype of safetensors"
                )
        return given

    def check(self, array: QuantizedArray, where: str) -> None:
        """Raise unless the metadata and the components fit: a class checks nothing when JAX unflattens it."""
        kind = type(array).__name__
        axes = range(-len(getattr(array.codes, "shape", ())), 0)
        spans, lengths = array.spans, array.lengths
        flags = (array.transposed, array.use_kernel)
        if (
            not isinstance(array.dtype, np.dtype)
            or {*map(type, flags)} != {bool}
            or array.compute not in ("exact", "fast")
        ):
            given = (array.dtype, *flags, array.compute)
            raise self.bad(where, f"has {short(given)} for dtype, transposed, use_kernel and compute")
        widest = max(_WIDEST, 8 * math.prod(getattr(array.codes, "shape", ())))
        if not _integers(spans) or len(spans) > len(axes) or not all(0 <= span <= widest for span in spans):
            raise self.bad(where, f"has the spans {short(spans)} on {len(axes)} axes")
        paired = isinstance(lengths, tuple) and all(_integers(pair) and len(pair) == 2 for pair in lengths)
        if not paired or any(axis not in axes or n < 0 for axis, n in lengths) or len(dict(lengths)) < len(lengths):
            raise self.bad(where, f"has the lengths {short(lengths)} on {len(axes)} axes")
        try:
            _, shape = array.shape, array.stored_shape
            shapes = jax.tree.map(lambda component: jax.ShapeDtypeStruct(component.shape, component.dtype), array)
            decoded = jax.eval_shape(_decoded, shapes)
        except Exception as error:  # a user's format may raise anything here
            why = str(error)[:500].removesuffix(".")
            raise self.bad(where, f"is not a valid {kind}: {why}") from error
        if decoded.shape != shape or decoded.dtype != np.float32 or array.index is not None:
            raise self.bad(where, f"is not a valid {kind} of stored shape {shape}: it decodes to {decoded}")


def _integers(given: Any) -> bool:
    return isinstance(given, tuple) and all(type(n) is int for n in given)


@jax.jit  # traced once for arrays of the same structure
def _decoded(array: QuantizedArray) -> jax.Array:
    return array.decode()
