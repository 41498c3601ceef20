"""lowbit's own files: safetensors whose metadata holds the tree, its quantized arrays, and a checksum of every byte.

`docs/file-format.md` is the specification. In short: the tensors are the parts of the arrays, `lowbit.tree` says what
they are the parts of, `lowbit.crc32` has a checksum for each, and the last tensor is the SHA-256 of the whole header.

A file is read as if somebody had written it to do harm: what its header says is held against the bytes that are there
and against the classes it names before an array is made, and what does not fit is one `ValueError` that names the file
and the tensor. Classes are found by name among the subclasses of `QuantizedArray` that are imported; nothing is
imported or run for a file. The header is read here rather than by the `safetensors` package, which copies each tensor
and lets a name be there twice.
"""

import contextlib
import dataclasses
import difflib
import functools
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import types
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal, Union, get_args, get_origin

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.core import Tracer

from lowbit.formats import QuantizedArray

VERSION = 1

_DTYPES: dict[str, np.dtype] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "BOOL": np.bool_,
        "U8": np.uint8,
        "I8": np.int8,
        "U16": np.uint16,
        "I16": np.int16,
        "U32": np.uint32,
        "I32": np.int32,
        "U64": np.uint64,
        "I64": np.int64,
        "F16": np.float16,
        "F32": np.float32,
        "F64": np.float64,
        "C64": np.complex64,
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
        "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    }.items()
}
_TYPES: dict[Any, str] = {dtype: name for name, dtype in _DTYPES.items()}

_START = re.compile(rb'\{"__metadata__":\{"lowbit\.version":"(\d{1,9})"')
_TEXTS = ("lowbit.version", "lowbit.tree", "lowbit.crc32", "lowbit.metadata")
_SHA256 = "lowbit.sha256"
_DIGEST = 32
# JAX takes host memory that lies so as it is, without a copy.
_ALIGNMENT = 64

_MOST_HEADER = 100_000_000  # as in the safetensors package
# Keys, numbers and containers of a header; as Python objects this many take less than half a gigabyte.
_MOST_VALUES = 1 << 22
_MOST_AXES = 64  # numpy's
_DEEPEST = 64  # containers in containers
# How an array's products run is its own, and no matter of its format.
_NOT_FORMAT = ("use_kernel", "compute")

Key = str | int


def save(path: str | os.PathLike[str], tree: Any, *, metadata: Mapping[str, Any] | None = None) -> None:
    """Write a tree of arrays to a file, to the bit.

    - Leaves: quantized arrays; jax and numpy arrays of the dtypes that safetensors has; Python's numbers and strings;
      None. An array that is there twice is stored once, and is one array again after `load`.
    - Containers: dicts with strings or integers for keys, lists and tuples come back by themselves; of all others the
      leaves are stored, and `load` wants a tree `like` it.
    - `metadata`: a dict of whatever JSON holds.

    The file is written beside `path` and put in its place when all of it is on the disk: whatever happens, `path` is
    the old file or the new one.

    >>> import tempfile, jax.numpy as jnp, lowbit
    >>> from lowbit.io.safetensors import load, save
    >>> params = {"w": lowbit.quantize(jnp.ones((64, 32))), "b": jnp.zeros(32)}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/model.safetensors", params, metadata={"step": 100})
    ...     load(f"{folder}/model.safetensors")["w"].packed.shape
    (64, 16)
    """
    target = Path(os.path.realpath(path))
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict):
        raise TypeError(f"metadata must be a dict, not {_short(metadata)}.")
    try:
        told = _json(metadata)
        same = json.loads(told) == metadata
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"metadata must be what JSON holds: {error}.") from None
    if not same:
        raise TypeError(
            "metadata would not come back from JSON as it is: it must be of dicts with strings for keys, lists, strings, "
            "numbers, True, False and None. Write tuples as lists."
        )
    outline = _Outline(target)
    node = _json(outline.node(tree, ()))
    # Those of whole cache lines first, then by the size of their elements, so that each lies on a multiple of it.
    order = sorted(outline.tensors, key=lambda name: _order(outline.tensors[name]))
    tensors = {name: outline.tensors[name] for name in order}

    def header(crc32: dict[str, str]) -> bytes:
        return _header(dict(zip(_TEXTS, (str(VERSION), node, _json(crc32), told), strict=True)), tensors)

    start = header(dict.fromkeys(tensors, "0" * 8))
    # What could not be read is not written.
    _ = _Contents(target, start, len(start) + sum(map(_size, tensors.values())) + _DIGEST).tree
    with _replacing(target) as file:
        file.write(bytes(len(start)))
        crc32 = {}
        for name, array in tensors.items():
            data = _bytes(array)
            crc32[name] = f"{zlib.crc32(data):08x}"
            file.write(data)
        start = header(crc32)
        file.write(hashlib.sha256(start).digest())
        file.seek(0)
        file.write(start)


def load(path: str | os.PathLike[str], like: Any = None) -> Any:
    """The tree of a file that `save` wrote: quantized arrays as they were stored, not a bit changed.

    - `like`: a tree of the same keys, for containers other than dicts, lists and tuples, whose containers are taken.
      Its leaves, arrays or `jax.ShapeDtypeStruct`s, must agree with the file in shape and dtype, and where they are
      quantized also in format. Where one says how it is sharded, the array is put there; a numpy array gives one.
    - Arrays come as jax arrays; as numpy arrays where JAX could not hold them as they are (64 bits without
      `jax_enable_x64`).

    On a CPU the arrays read from the file itself, mapped into memory. Replace such a file, as `save` does, rather than
    write into it.

    >>> import tempfile, jax, jax.numpy as jnp, lowbit
    >>> from lowbit.io.safetensors import load, save
    >>> init = lambda: {"w": jnp.ones((64, 32)), "scale": (jnp.zeros(32), 1.5)}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/model.safetensors", lowbit.quantize_tree(init(), "int8")[0])
    ...     params = load(f"{folder}/model.safetensors", like=jax.eval_shape(init))
    >>> type(params["w"]).__name__, params["scale"][1]
    ('Array8B', 1.5)
    """
    file = LowbitFile(path)
    arrays: dict[Any, Any] = {}

    def array(node: Any, place: Any = None) -> Any:
        """The array of a node, the same one for the same node."""
        if isinstance(node, QuantizedArray):
            places = place if isinstance(place, QuantizedArray) else node.map_parts(lambda *_: None)
            parts = {name: array(part, getattr(places, name)) for name, part in node.parts().items()}
            key = (id(node), *map(id, parts.values()))
            return arrays.setdefault(key, node.replace(**parts))
        if not isinstance(node, _Tensor):
            return node
        as_numpy, sharding = isinstance(place, np.ndarray | np.generic), _sharding(place)
        if (key := (node, as_numpy, sharding)) not in arrays:
            view = file._view(node)
            arrays[key] = view if as_numpy else _on_device(view, sharding)
        return arrays[key]

    def filled(node: Any, like: Any, path: tuple[Key, ...]) -> Any:
        inside, opened = _children(node), _opened(like)
        if inside is None or opened is None:
            if inside is not None or opened is not None or not _agree(node, like):
                raise ValueError(
                    f"{file.path}: {_name(path)} is {_described(node)} in the file and {_described(like)} in `like`."
                )
            return array(node, like)
        found, rebuilt = opened
        keys = {key for key, _ in found}
        for key in (*(k for k in inside if k not in keys), *(k for k in keys if k not in inside)):
            there, missing = ("the file", "`like`") if key in inside else ("`like`", "the file")
            raise ValueError(f"{file.path}: {_name((*path, key))} is in {there} and not in {missing}.")
        return rebuilt([filled(inside[key], child, (*path, key)) for key, child in found])

    def plain(node: Any, path: tuple[Key, ...]) -> Any:
        inside = _children(node)
        if inside is None:
            return array(node)
        if isinstance(node, _Other):
            raise ValueError(
                f"{file.path}: {_name(path)} is a {node.name}, which is no dict, list or tuple. "
                "Pass a tree of the same structure as `like`, for instance jax.eval_shape of what makes it."
            )
        children = {key: plain(child, (*path, key)) for key, child in inside.items()}
        return children if isinstance(node, dict) else type(node)(children.values())

    return plain(file._contents.tree, ()) if like is None else filled(file._contents.tree, like, ())


def load_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The `metadata` that was given to `save`, an empty dict if there was none. No array is read.

    >>> import tempfile, jax.numpy as jnp
    >>> from lowbit.io.safetensors import load_metadata, save
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/model.safetensors", {"b": jnp.zeros(32)}, metadata={"step": 100})
    ...     load_metadata(f"{folder}/model.safetensors")
    {'step': 100}
    """
    return _opened_file(Path(path))[1].metadata


class LowbitFile:
    """A file that `save` wrote: its metadata, and its arrays by name, each read and checked when asked for.

        file = LowbitFile("model.safetensors")
        file.metadata                           # what was given to `save`
        file.type("layers/0/kernel")            # 'nf4', or 'F32' for an array that is not quantized
        file.array("layers/0/kernel")           # an ArrayNF4 with the file's own codes and scales
        file.dense("layers/0/kernel")           # float32, whatever the file stores

    A name is the path of an array, joined by `/`; where two come out the same, the later one gets `~2`. Opening the
    file checks all of its header. The bytes of an array are held against their checksums when it is read.
    """

    path: Path
    metadata: dict[str, Any]

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._data, self._contents = _opened_file(self.path)
        self.metadata, self._arrays = self._contents.metadata, self._contents.arrays
        self._checked: set[str] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the arrays, in the order of the tree."""
        return tuple(self._arrays)

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __contains__(self, name: object) -> bool:
        return name in self._arrays

    def __repr__(self) -> str:
        return f"LowbitFile({str(self.path)!r}, {len(self)} arrays)"

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an array; of a quantized one, that of what was quantized."""
        return self._array(name).shape

    def type(self, name: str) -> str:
        """The format of a quantized array, such as `"nf4"`; the type of any other, such as `"BF16"`."""
        array = self._array(name)
        return array.decoder or type(array).__name__ if isinstance(array, QuantizedArray) else _TYPES[array.dtype]

    def array(self, name: str) -> QuantizedArray | np.ndarray:
        """An array as it is stored: quantized, or a numpy array that is a read-only view of the file."""
        array = self._array(name)
        if isinstance(array, QuantizedArray):
            return jax.tree.map(lambda part: _on_device(self._view(part)), array)
        return self._view(array)

    def dense(self, name: str, dtype: Any = np.float32) -> np.ndarray:
        """The numbers of an array, decoded. Where nothing has to be decoded or cast, a read-only view of the file."""
        array = self.array(name)
        return np.asarray(array.materialize() if isinstance(array, QuantizedArray) else array).astype(dtype, copy=False)

    def _array(self, name: str) -> Any:
        if name not in self._arrays:
            near = difflib.get_close_matches(name, self._arrays)
            raise KeyError(f"{self.path} has no array {name!r}." + (f" Near it: {', '.join(near)}." if near else ""))
        return self._arrays[name]

    def _view(self, tensor: "_Tensor") -> np.ndarray:
        data = self._data[tensor.start : tensor.stop]
        if tensor.name not in self._checked:
            if f"{zlib.crc32(data):08x}" != tensor.crc32:
                raise ValueError(f"{self.path}: tensor {_short(tensor.name)} is not what was saved: it is damaged.")
            if tensor.dtype == np.bool_ and (data > 1).any():
                raise ValueError(f"{self.path}: tensor {_short(tensor.name)} has bytes that are neither 0 nor 1.")
            self._checked.add(tensor.name)
        return data.view(tensor.dtype).reshape(tensor.shape)


# --- trees: what is in a container, and what a leaf of it is


@dataclasses.dataclass(frozen=True, eq=False)
class _Tensor:
    """A tensor of a file, in the place of the array that it will be."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    stop: int
    crc32: str


@dataclasses.dataclass(frozen=True)
class _Other:
    """A container of a class that a file cannot make."""

    name: str
    children: dict[Key, Any]


def _opened(tree: Any) -> tuple[list[tuple[Any, Any]], Callable[[list[Any]], Any]] | None:
    """The keys and children of a container, and what makes one like it of other children; None for a leaf."""
    if tree is None or isinstance(tree, QuantizedArray):
        return None
    if type(tree) is dict:  # in their order, of which JAX makes another
        return list(tree.items()), lambda children: dict(zip(tree, children, strict=True))
    found, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    if len(found) == 1 and not found[0][0]:
        return None
    return [(_key(path[0]), child) for path, child in found], functools.partial(jax.tree.unflatten, structure)


def _key(entry: Any) -> Any:
    return next((getattr(entry, name) for name in ("key", "idx", "name") if hasattr(entry, name)), str(entry))


def _children(node: Any) -> dict[Key, Any] | None:
    """The same for what `_Contents` made of a file."""
    if isinstance(node, list | tuple):
        return dict(enumerate(node))
    return node.children if isinstance(node, _Other) else node if isinstance(node, dict) else None


def _agree(node: Any, like: Any) -> bool:
    """Whether a leaf of a file is what a leaf of `like` says."""
    typed = hasattr(like, "shape") and hasattr(like, "dtype")
    if not isinstance(node, _Tensor | QuantizedArray):
        number = isinstance(node, bool | int | float | complex)
        return like.shape == () and like.dtype == jnp.result_type(node) if typed and number else type(like) is type(node)
    if not typed or tuple(like.shape) != node.shape or like.dtype != node.dtype:
        return False
    return not isinstance(like, QuantizedArray) or _format(like) == _format(node)


def _format(array: Any) -> Any:
    if not isinstance(array, QuantizedArray):
        return None
    static = {name: value for name in array._fields()[1] if (value := getattr(array, name)) and name not in _NOT_FORMAT}
    return type(array), static, {name: (tuple(part.shape), part.dtype) for name, part in array.parts().items()}


def _described(x: Any) -> str:
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        return f"a {x.name if isinstance(x, _Other) else type(x).__name__}"
    kind = type(x).__name__ if isinstance(x, QuantizedArray) else "array"
    layout = f", spans {x.spans}{', transposed' * x.transposed}" if isinstance(x, QuantizedArray) else ""
    return f"an {kind} of shape {tuple(x.shape)} and dtype {x.dtype}{layout}"


def _sharding(place: Any) -> Any:
    committed = isinstance(place, jax.ShapeDtypeStruct) or (isinstance(place, jax.Array) and place.committed)
    return getattr(place, "sharding", None) if committed else None


def _on_device(view: np.ndarray, sharding: Any = None) -> Any:
    if jax.dtypes.canonicalize_dtype(view.dtype) != view.dtype:
        return view  # JAX would cut it to 32 bits
    return jax.device_put(view, sharding)


def _name(path: tuple[Key, ...]) -> str:
    return _short("/".join(map(str, path))) if path else "the tree"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


class _Names:
    """Names that are all different: the second `a` is `a~2`."""

    def __init__(self, *taken: str):
        self.taken = set(taken)
        self.count: dict[str, int] = {}

    def unique(self, path: tuple[Key, ...]) -> str:
        found = name = "/".join(map(str, path))
        while found in self.taken:
            self.count[name] = self.count.get(name, 1) + 1
            found = f"{name}~{self.count[name]}"
        self.taken.add(found)
        return found


def _class_named(name: Any) -> type[QuantizedArray]:
    found: dict[str, type[QuantizedArray]] = {}
    waiting: list[type[QuantizedArray]] = [QuantizedArray]
    while waiting:
        cls = waiting.pop(0)
        if cls.__name__ == name and cls is not QuantizedArray:
            found[f"{cls.__module__}.{cls.__qualname__}"] = cls  # of one that was defined again, the last
        waiting += cls.__subclasses__()
    if len(found) != 1:
        known = f"there are {' and '.join(found)}" if found else "import the module that defines it"
        raise ValueError(f"is of the class {_short(name)}: {known}")
    return next(iter(found.values()))


# --- writing


class _Outline:
    """The tree as JSON, and the tensors that it speaks of."""

    def __init__(self, target: Path):
        self.target = target
        self.names = _Names("__metadata__", _SHA256)
        self.tensors: dict[str, Any] = {}
        self.tied: dict[int, str] = {}

    def node(self, tree: Any, path: tuple[Any, ...]) -> Any:
        if len(path) > _DEEPEST:
            raise ValueError(f"Cannot save to {self.target}: the tree is more than {_DEEPEST} containers deep.")
        if isinstance(tree, QuantizedArray):
            return self.quantized(tree.resolved(), path)
        if isinstance(tree, jax.Array | np.ndarray | np.generic):
            return {"array": self.tensor(tree, path)}
        if (opened := _opened(tree)) is None:
            return self.value(tree, path)
        for key, _ in opened[0]:
            if type(key) not in (str, int):
                raise self.bad(path, f"has the key {_short(key)}", "keys are strings or integers")
        children = [[key, self.node(child, (*path, key))] for key, child in opened[0]]
        if type(tree) is dict:
            return {"dict": children}
        if type(tree) in (list, tuple):
            return {type(tree).__name__: [child for _, child in children]}
        return {"other": type(tree).__name__, "children": children}

    def value(self, value: Any, path: tuple[Any, ...]) -> Any:
        if type(value) not in (bool, int, float, complex, str, type(None)):
            raise self.bad(path, f"is a {type(value).__name__}", "leaves are arrays, numbers, strings and None")
        numbers = {"float": _float, "complex": lambda z: [_float(z.real), _float(z.imag)]}
        kind = type(value).__name__
        return None if value is None else {kind: numbers.get(kind, lambda plain: plain)(value)}

    def quantized(self, array: QuantizedArray, path: tuple[Any, ...]) -> Any:
        fields, static = array._fields()
        try:
            values = {name: _static(getattr(array, name)) for name in static}
        except TypeError as error:
            raise self.bad(path, f"is an {type(array).__name__} with {error}", "its static fields are numbers") from None
        parts = {name: getattr(array, name) for name in fields}
        stored = {name: None if part is None else self.tensor(part, (*path, name)) for name, part in parts.items()}
        return {"quantized": type(array).__name__, "static": values, "parts": stored}

    def tensor(self, array: Any, path: tuple[Any, ...]) -> str:
        if (tied := self.tied.get(id(array))) is not None:
            return tied
        dtype = getattr(array, "dtype", None)
        if isinstance(array, Tracer):
            raise self.bad(path, "is traced", "call save outside of jit")
        if isinstance(array, jax.Array) and not array.is_fully_addressable:
            raise self.bad(path, "lies on devices of other processes", "gather it first")
        if _native(dtype) not in _TYPES:
            known = ", ".join(map(str, _DTYPES.values()))
            raise self.bad(path, f"is a {type(array).__name__} of dtype {dtype}", f"safetensors has {known}")
        self.tied[id(array)] = name = self.names.unique(path)
        self.tensors[name] = array  # which also keeps its id
        return name

    def bad(self, path: tuple[Any, ...], problem: str, instead: str) -> TypeError:
        return TypeError(f"Cannot save to {self.target}: {_name(path)} {problem}; {instead}.")


def _float(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _static(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.dtype):
        return {"dtype": _TYPES.get(value, str(value))}
    if isinstance(value, tuple):
        return [_static(item) for item in value]
    if value is not None and not isinstance(value, bool | int | float | str):
        raise TypeError(f"a static {type(value).__name__}")
    return value


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _native(dtype: Any) -> Any:
    return dtype.newbyteorder("=") if isinstance(dtype, np.dtype) else dtype


def _size(array: Any) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


def _order(array: Any) -> tuple[bool, int]:
    return _size(array) % _ALIGNMENT != 0, -array.dtype.itemsize


def _header(texts: dict[str, str], tensors: dict[str, Any]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": texts}
    end = 0
    for name, array in {**tensors, _SHA256: np.zeros(_DIGEST, np.uint8)}.items():
        start, end = end, end + _size(array)
        kind = _TYPES[_native(array.dtype)]
        entries[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [start, end]}
    text = _json(entries).encode("ascii")
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _bytes(array: Any) -> np.ndarray:
    host = np.asarray(array)
    return np.ascontiguousarray(host, host.dtype.newbyteorder("<")).reshape(-1).view(np.uint8)


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[BinaryIO]:
    """A file that becomes `target` when all of it is on the disk, and else was never there."""
    if not target.parent.is_dir():
        raise FileNotFoundError(f"Cannot save to {target}: there is no directory {target.parent}.")
    if target.exists() and not target.is_file():
        raise IsADirectoryError(f"Cannot save to {target}: it is a directory or a device, not a file.")
    aside = target.with_name(f".lowbit-{secrets.token_hex(8)}")
    try:
        with open(aside, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, aside)
        os.replace(aside, target)
    except BaseException as error:
        aside.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, f"Cannot save to {target}: {error.strerror or error}") from error
        raise
    # The file is whole in either case; where a directory cannot be synced, only when its name will last is not known.
    with contextlib.suppress(OSError):
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


# --- reading


def _opened_file(path: Path) -> tuple[np.ndarray, "_Contents"]:
    size = path.stat().st_size
    if size < 8:
        raise ValueError(f"{path} is no safetensors file: it has {size} bytes.")
    data = np.asarray(np.memmap(path, np.uint8, mode="r"))
    end = 8 + int.from_bytes(data[:8].tobytes(), "little")
    if end > size or end > 8 + _MOST_HEADER:
        raise ValueError(
            f"{path} is no safetensors file, or is cut off: its header would end at byte {end}, and the file at {size}."
        )
    header = data[:end].tobytes()
    if (start := _START.match(header, 8)) is None:
        raise ValueError(
            f"{path} is not a lowbit file: it has none of the metadata that lowbit.save writes. "
            "If it is a model of another library's, `lowbit convert` makes a lowbit file of it."
        )
    if (version := int(start[1])) != VERSION:
        raise ValueError(
            f"{path} is a lowbit file of version {version}, and this lowbit reads version {VERSION}. Install a newer one."
        )
    if size < end + _DIGEST or hashlib.sha256(header).digest() != data[-_DIGEST:].tobytes():
        raise ValueError(f"{path} is damaged or cut off: its header does not match its checksum.")
    return data, _Contents(path, header, size)


class _Contents:
    """What a header says, each word of it held against the others and against the size of the file."""

    def __init__(self, path: Path, header: bytes, size: int):
        self.path = path
        self.names_left = 4 * len(header)
        if len(header) > 8 + _MOST_HEADER:
            raise self.bad("the header", f"has {len(header)} bytes, more than {_MOST_HEADER}")
        entries = self.parsed("the header", header[8:])
        texts = entries.pop("__metadata__", None)
        if not isinstance(texts, dict) or tuple(texts) != _TEXTS or not all(isinstance(t, str) for t in texts.values()):
            raise self.bad("its metadata", f"must be {', '.join(_TEXTS)}, all of them texts")
        self.metadata: dict[str, Any] = self.parsed("lowbit.metadata", texts["lowbit.metadata"])
        self.outline = self.parsed("lowbit.tree", '{"tree":' + texts["lowbit.tree"] + "}")
        self.tensors = self.placed(entries, self.parsed("lowbit.crc32", texts["lowbit.crc32"]), len(header), size)

    def bad(self, where: str, problem: str) -> ValueError:
        return ValueError(f"{self.path}: {where} {problem}.")

    def parsed(self, where: str, text: str | bytes) -> dict[str, Any]:
        """A JSON object. No key may be there twice, and it may not have more values than memory is meant for them."""

        def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            found = dict(pairs)
            if len(found) != len(pairs):
                twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
                raise ValueError(f"has {_short(twice)} twice")
            return found

        def constant(name: str) -> Any:
            raise ValueError(f"has {name}, which JSON has not")

        try:
            text = text.decode("ascii") if isinstance(text, bytes) else text
            if sum(map(text.count, ",[{")) > _MOST_VALUES:
                raise ValueError(f"has more than {_MOST_VALUES} values")
            found = json.loads(text, object_pairs_hook=unique, parse_constant=constant)
        except UnicodeDecodeError:
            raise self.bad(where, "is not in ASCII") from None
        except json.JSONDecodeError as error:
            raise self.bad(where, f"is no JSON ({error})") from None
        except ValueError as error:
            raise self.bad(where, str(error)) from None
        except RecursionError:
            raise self.bad(where, "is nested too deep") from None
        if not isinstance(found, dict):
            raise self.bad(where, "is no JSON object")
        return found

    def placed(self, entries: dict[str, Any], crc32: dict[str, Any], start: int, size: int) -> dict[str, _Tensor]:
        """The tensors where they lie: one after the other, from the end of the header to the end of the file."""
        if list(crc32) != list(entries)[:-1] or list(entries)[-1] != _SHA256:
            missing = ", ".join(_short(name) for name in {*entries, _SHA256} ^ {*crc32, _SHA256})
            raise self.bad("lowbit.crc32", f"and the tensors are not the same, in the same order: {missing or 'order'}")
        tensors: dict[str, _Tensor] = {}
        at = start
        for name, entry in entries.items():
            where = f"tensor {_short(name)}"
            if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
                raise self.bad(where, "must have dtype, shape and data_offsets")
            dtype = _DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
            if dtype is None:
                raise self.bad(where, f"has the dtype {_short(entry['dtype'])}, which is none of {', '.join(_DTYPES)}")
            shape, offsets = entry["shape"], entry["data_offsets"]
            if not _naturals(shape) or len(shape) > _MOST_AXES or math.prod(n or 1 for n in shape) >= 1 << 59:
                raise self.bad(where, f"has the shape {_short(shape)}")
            stop = at + math.prod(shape) * dtype.itemsize
            if not _naturals(offsets) or offsets != [at - start, stop - start]:
                raise self.bad(where, f"lies at {_short(offsets)} and should at {[at - start, stop - start]}")
            code = crc32.get(name, "")
            if name != _SHA256 and (not isinstance(code, str) or not re.fullmatch("[0-9a-f]{8}", code)):
                raise self.bad(where, f"has the checksum {_short(code)}, not eight hexadecimal digits")
            tensors[name] = _Tensor(name, dtype, tuple(shape), at, stop, code)
            at = stop
        if at != size:
            raise self.bad("its last tensor", f"ends at byte {at}, and the file has {size}")
        del tensors[_SHA256]
        return tensors

    # --- the tree

    @functools.cached_property
    def tree(self) -> Any:
        """Dicts, lists, tuples and others of numbers, tensors, and quantized arrays with tensors for their parts."""
        self.arrays: dict[str, Any] = {}
        self.names, self.unused, self.same = _Names(), set(self.tensors), {}
        try:
            tree = self.node(self.outline["tree"], ())
        except RecursionError:
            raise self.bad("lowbit.tree", "is nested too deep") from None
        if self.unused:
            raise self.bad(f"tensor {_short(min(self.unused))}", "belongs to no array")
        return tree
