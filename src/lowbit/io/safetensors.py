"""lowbit's own files: safetensors whose metadata holds the tree, its quantized arrays, and a checksum of every byte.

`docs/file-format.md` is the specification. In short: the tensors are the parts of the arrays, `lowbit.tree` says what
they are the parts of, `lowbit.crc32` has a checksum for each, and the last tensor is the SHA-256 of the whole header.

A file is read as if somebody had written it to do harm: what its header says is held against the bytes that are there
and against the classes it names before an array is made, and what does not fit is one `ValueError` that names the file
and the tensor. Classes are found by name among the subclasses of `QuantizedArray` that are imported; nothing is
imported or run for a file. The header is read here rather than by the `safetensors` package, which copies each tensor
and lets a name be there twice.

Where several processes save one tree, each writes such a file with its pieces of the arrays, and the file that `save`
was asked for is the index that puts them together.
"""

import contextlib
import dataclasses
import difflib
import functools
import hashlib
import itertools
import json
import math
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding

from lowbit.formats import QuantizedArray
from lowbit.formats._blocks import covered
from lowbit.runtime._compat import mesh_in_context
from lowbit.sharding import shardings

from ._atomic import written_aside
from ._checks import are_counts, checked_json
from ._maps import located, mapped, release
from ._processes import Box, box, pieces_of, together

VERSION, INDEX = 1, 2  # a file, and one that says in which others the pieces of its tensors lie

# fmt: off
DTYPES: dict[str, np.dtype] = {name: np.dtype(dtype) for name, dtype in {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8",
    "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8", "C64": "<c8", "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz, "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
}.items()}
# fmt: on
_TYPES: dict[Any, str] = {dtype: name for name, dtype in DTYPES.items()}
# Numbers are stored as Python writes them, which loses nothing and has words for infinity and NaN.
_NUMBERS: dict[str, Any] = {"bool": lambda text: text == "True", "int": int, "float": float, "complex": complex}

_START = re.compile(rb'\{"__metadata__":\{"lowbit\.version":"(\d{1,9})"')
_TEXTS = ("lowbit.version", "lowbit.tree", "lowbit.crc32", "lowbit.metadata")
_INDEX_TEXTS = (*_TEXTS, "lowbit.files", "lowbit.pieces")
_PART = re.compile(r"[^/\\\0]*-[0-9a-f]{16}-\d{5,}-of-\d{5,}\.safetensors")  # a plain name, and no other file's
_SHA256, _DIGEST = "lowbit.sha256", 32
_CHUNK = 1 << 26  # bytes that are looked at at a time
_ALIGNMENT = 64  # where JAX takes memory of the host as it is, without a copy

_MOST_HEADER = 100_000_000  # as in the safetensors package
_MOST_AXES = 64  # numpy's
_DEEPEST = 64  # containers in containers
_WIDEST = 1 << 20  # span, where the array is smaller than that

Key = str | int


def save(path: str | os.PathLike[str], tree: Any, *, metadata: dict[str, Any] | None = None) -> None:
    """Write a tree of arrays to a file, to the bit.

    - Leaves: quantized arrays; jax and numpy arrays of the dtypes that safetensors has; Python's numbers and strings;
      None. An array that is there twice is stored once, and is one array again after `load`.
    - Containers: dicts with strings or integers for keys, lists and tuples come back by themselves; of all others the
      leaves are stored, and `load` wants a tree `like` it.
    - `metadata`: a dict of whatever JSON holds.

    The file is written beside `path` and put in its place when all of it is on the disk: whatever happens, `path` is
    the old file or the new one.

    In a program of several processes (`jax.distributed`) all of them must call `save`, with the same tree and the same
    path on a file system that all see. Each writes the pieces of the arrays that it has to a file of its own beside
    `path`, and `path` is the index that puts them together; arrays that each process has for itself are those of
    process 0. Where one process fails, all raise an `OSError`, and the old file is still there.

    >>> import tempfile, jax.numpy as jnp, lowbit
    >>> from lowbit.io.safetensors import load, save
    >>> params = {"w": lowbit.quantize(jnp.ones((64, 32))), "b": jnp.zeros(32)}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/model.safetensors", params, metadata={"step": 100})
    ...     load(f"{folder}/model.safetensors")["w"].packed.shape
    (64, 16)
    """
    target = Path(os.path.realpath(path))
    if jax.process_count() > 1:
        return _save_together(target, tree, metadata)
    old = index_parts(target)
    _write(target, *_outlined(target, tree, metadata))
    _remove(target, old)


def load(path: str | os.PathLike[str], like: Any = None) -> Any:
    """The tree of a file that `save` wrote: quantized arrays as they were stored, not a bit changed.

    - `like`: a tree with the same keys, for containers other than dicts, lists and tuples. Its containers are taken.
      Its leaves, arrays or `jax.ShapeDtypeStruct`s, must agree with the file in shape and dtype, and where they are
      quantized also in format. A numpy array asks for one.
    - A `NamedSharding` of a leaf is obeyed, given for the axes of the array also where it is quantized. A process reads
      the bytes for its own devices and no others. Of a tensor that it reads only in part, the checksum is not checked.
    - Arrays come as jax arrays, or as numpy arrays where JAX would cut them to 32 bits (without `jax_enable_x64`).

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
    made: dict[Any, Any] = {}  # so that what was one array is one again

    def once(key: Any, make: Callable[[], Any]) -> Any:
        if key not in made:
            made[key] = make()
        return made[key]

    def tensor(node: _Tensor, sharding: NamedSharding | None) -> Any:
        if sharding is None:
            return once((id(node), None), lambda: _on_device(file._view(node)))
        return once((id(node), sharding), lambda: file._sharded(node, sharding))

    def array(node: Any, path: tuple[Key, ...], like: Any = None) -> Any:
        if not isinstance(node, _Tensor | QuantizedArray):
            return node
        if isinstance(node, _Tensor) and isinstance(like, np.ndarray | np.generic):
            return once((id(node), np.ndarray), lambda: file._view(node))
        if (sharding := _sharding_of(like)) is None:
            return once((id(node), "whole"), lambda: jax.tree.map(lambda part: tensor(part, None), node))
        try:
            parts = shardings(node, sharding)
        except ValueError as error:
            raise ValueError(f"{file.path}: {_name(path)} cannot be laid out as `like` is: {error}") from None
        return once((id(node), "cut", sharding), lambda: jax.tree.map(tensor, node, parts))

    def plain(node: Any, path: tuple[Key, ...]) -> Any:
        if not isinstance(node, _Container):
            return array(node, path)
        if node.kind not in _OWN:
            raise ValueError(
                f"{file.path}: {_name(path)} is of the class {_short(node.kind)}, and no dict, list or tuple: "
                "pass a tree of the same structure as `like`, for instance jax.eval_shape of what makes it."
            )
        children = {key: plain(child, (*path, key)) for key, child in node.children.items()}
        return children if node.kind == "dict" else _OWN[node.kind](children.values())

    def filled(node: Any, like: Any, path: tuple[Key, ...]) -> Any:
        opened = _opened(like)
        if opened is None or not isinstance(node, _Container):
            if opened or isinstance(node, _Container) or not _agree(node, like):
                here, there = _described(node), _described(like)
                raise ValueError(f"{file.path}: {_name(path)} is {here} in the file and {there} in `like`.")
            return array(node, path, like)
        found, rebuilt = opened
        keys = dict.fromkeys(key for key, _ in found)
        for key in {**node.children, **keys}:
            if key not in keys or key not in node.children:
                where = "`like` and not in the file" if key in keys else "the file and not in `like`"
                raise ValueError(f"{file.path}: {_name((*path, key))} is in {where}.")
        return rebuilt([filled(node.children[key], child, (*path, key)) for key, child in found])

    return plain(file._tree, ()) if like is None else filled(file._tree, like, ())


def load_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The `metadata` that was given to `save`, an empty dict if there was none. No array is read.

    >>> import tempfile, jax.numpy as jnp
    >>> from lowbit.io.safetensors import load_metadata, save
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/model.safetensors", {"b": jnp.zeros(32)}, metadata={"step": 100})
    ...     load_metadata(f"{folder}/model.safetensors")
    {'step': 100}
    """
    return _mapped(Path(path))[1].metadata


def is_lowbit_file(path: str | os.PathLike[str]) -> bool:
    """Whether `save` wrote a file, by its first bytes."""
    return _version(path) is not None


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
        contents = _mapped(self.path)[1]
        self.metadata = contents.metadata
        self._tree, self._arrays = contents.read()
        self._checked: set[_Piece] = set()

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

    def nbytes(self, name: str) -> int:
        """How many bytes an array takes as it is stored."""
        return sum(map(_size, jax.tree.leaves(self._array(name))))

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

    def struct(self, name: str) -> Any:
        """An array with nothing but shapes and dtypes in the place of its numbers."""
        return self._array(name)

    def read(self, name: str, box: Box) -> Any:
        """A box of an array as it is stored, by its stored axes, in numpy arrays. It must cut no scale and no byte."""
        array = self._array(name)
        for tensor in jax.tree.leaves(array):
            self._check_all(tensor)
        if not isinstance(array, QuantizedArray):
            return array.read(box)
        parts = array.map_parts(lambda tensor, spans: tensor.read(covered(box, spans, tensor.shape)))
        return parts.reshaped([stop - start for start, stop in box], array.spans)

    def located(self, name: str) -> tuple[Path, int] | None:
        """The file in which the bytes of an array lie in a row, and where; None for any other array. Checks them."""
        array = self._array(name)
        if isinstance(array, QuantizedArray) or len(array.pieces) != 1:
            return None
        return located(self._view(array))

    def _array(self, name: str) -> Any:
        if name not in self._arrays:
            near = difflib.get_close_matches(name, self._arrays)
            raise KeyError(f"{self.path} has no array {name!r}." + (f" Near it: {', '.join(near)}." if near else ""))
        return self._arrays[name]

    def _check_all(self, tensor: "_Tensor") -> None:
        for piece in tensor.pieces.values():
            self._check(piece)

    def _view(self, tensor: "_Tensor") -> np.ndarray:
        self._check_all(tensor)
        return tensor.read(_whole(tensor.shape))

    def _sharded(self, tensor: "_Tensor", sharding: NamedSharding) -> Any:
        if jax.dtypes.canonicalize_dtype(tensor.dtype) != tensor.dtype:
            return self._view(tensor)  # as `_on_device` has it
        indices = sharding.addressable_devices_indices_map(tensor.shape).values()
        wanted = {box(index, tensor.shape) for index in indices}
        for there, piece in tensor.pieces.items():
            if sum(_volume(_common(here, there)) for here in wanted) == _volume(there):  # all of it is read
                self._check(piece)
        return jax.make_array_from_callback(
            tensor.shape, sharding, lambda index: tensor.read(box(index, tensor.shape)), dtype=tensor.dtype
        )

    def _check(self, piece: "_Piece") -> None:
        if piece not in self._checked:
            if f"{_crc32(piece.data):08x}" != piece.crc32:
                raise piece.bad("is damaged: its checksum is another")
            self._checked.add(piece)


# --- trees

_OWN: dict[str, Any] = {"dict": dict, "list": list, "tuple": tuple}


@dataclasses.dataclass(frozen=True)
class _Container:
    """A container of a file: `kind` is a dict, list, tuple, or the name of another class."""

    kind: str
    children: dict[Key, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class _Piece:
    """A tensor of one file: all of an array or of its part, or a piece of it."""

    path: Path
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    data: np.ndarray
    crc32: str

    def bad(self, problem: str) -> ValueError:
        return ValueError(f"{self.path}: tensor {_short(self.name)} {problem}.")


@dataclasses.dataclass(frozen=True, eq=False)
class _Tensor:
    """What a file has in the place of an array or of its part: the pieces, by where in it they lie."""

    dtype: np.dtype
    shape: tuple[int, ...]
    pieces: dict[Box, _Piece]

    def read(self, wanted: Box) -> np.ndarray:
        """The numbers of a box: a view of the file where one piece has them all."""
        shape = tuple(stop - start for start, stop in wanted)
        whole: np.ndarray | None = None
        for there, piece in self.pieces.items():
            if not _volume(both := _common(wanted, there)):
                continue
            found = piece.data.view(piece.dtype).reshape(piece.shape)[_slices(both, there)]
            if piece.dtype == np.bool_ and (found.view(np.uint8) > 1).any():
                raise piece.bad("has bytes that are neither 0 nor 1")
            if found.shape == shape:
                return found
            whole = np.empty(shape, self.dtype) if whole is None else whole
            whole[_slices(both, wanted)] = found
        return np.empty(shape, self.dtype) if whole is None else whole


def _whole(shape: tuple[int, ...]) -> Box:
    return tuple((0, n) for n in shape)


def _common(a: Box, b: Box) -> Box:
    return tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))


def _volume(box: Box) -> int:
    return math.prod(max(stop - start, 0) for start, stop in box)


def _slices(box: Box, within: Box) -> Any:
    # The dots keep what has no axes an array.
    return (..., *(slice(a - first, b - first) for (a, b), (first, _) in zip(box, within, strict=True)))


def _opened(tree: Any) -> tuple[list[tuple[Any, Any]], Callable[[list[Any]], Any]] | None:
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


def _agree(node: Any, like: Any) -> bool:
    """Whether a leaf of a file is what a leaf of `like` says."""
    if not hasattr(like, "dtype"):
        return type(node) is type(like)
    if type(node) in (bool, int, float, complex):
        return like.shape == () and like.dtype == jnp.result_type(type(node))
    if not hasattr(node, "dtype") or tuple(like.shape) != node.shape or like.dtype != node.dtype:
        return False
    return not isinstance(like, QuantizedArray) or _format(like) == _format(node)


def _format(array: Any) -> Any:
    if not isinstance(array, QuantizedArray):
        return None
    # How its products run is no matter of the format.
    static = [getattr(array, name) for name in array._fields()[1] if name not in ("use_kernel", "compute")]
    return type(array), static, {name: (tuple(part.shape), part.dtype) for name, part in array.parts().items()}


def _described(x: Any) -> str:
    if not hasattr(x, "dtype"):
        return f"a {_short(x.kind)[1:-1] if isinstance(x, _Container) else type(x).__name__}"
    layout = f", spans {x.spans}{', transposed' * x.transposed}" if isinstance(x, QuantizedArray) else ""
    return f"{type(x).__name__ if layout else 'an array'} of shape {tuple(x.shape)} and dtype {x.dtype}{layout}"


def _on_device(view: np.ndarray) -> Any:
    if jax.dtypes.canonicalize_dtype(view.dtype) != view.dtype:
        return view  # JAX would cut it to 32 bits
    return jax.device_put(view)


def _sharding_of(like: Any) -> NamedSharding | None:
    sharding = getattr(like, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return None
    if isinstance(sharding.mesh, Mesh):
        return sharding
    # jax.eval_shape knows of the mesh around it, but not of its devices.
    mesh = mesh_in_context()
    return None if mesh is None else NamedSharding(mesh, sharding.spec)


def _unique(path: tuple[Key, ...], taken: dict[str, int]) -> str:
    """A path as a name of its own: the second `a/b` is `a/b~2`."""
    name = found = "/".join(map(str, path))
    while found in taken:
        taken[name] += 1
        found = f"{name}~{taken[name]}"
    taken[found] = 1
    return found


def _name(path: tuple[Any, ...]) -> str:
    return _short("/".join(map(str, path))) if path else "the tree"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


# --- writing


class _Outline:
    """The tree as JSON, and the tensors that it speaks of."""

    def __init__(self, target: Path, shapes: bool):
        self.target = target
        self.arrays = (jax.ShapeDtypeStruct,) if shapes else (jax.Array, np.ndarray, np.generic)
        self.tensors: dict[str, Any] = {}
        self.names = {"__metadata__": 1, _SHA256: 1}
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
        if (opened := _opened(tree)) is not None:
            if len(path) >= _DEEPEST:
                raise self.bad(path, "is too deep", f"at most {_DEEPEST} containers lie in each other", ValueError)
            if wrong := [key for key, _ in opened[0] if type(key) not in (str, int)]:
                raise self.bad(path, f"has the key {_short(wrong[0])}", "keys are strings or integers")
            kind = kind if type(tree) is _OWN.get(kind) else f"{type(tree).__module__}.{kind}"
            return [kind, [[key, self.node(child, (*path, key))] for key, child in opened[0]]]
        if type(tree) not in (str, bool, int, float, complex, type(None)):
            raise self.bad(path, f"is a {kind}", "leaves are arrays, numbers, strings and None")
        return None if tree is None else {kind: tree if kind == "str" else repr(tree)}

    def static(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, tuple):
            return [self.static(item, path) for item in value]
        if isinstance(value, np.dtype):
            return {"dtype": _TYPES.get(value, value.name)}
        value = value.item() if isinstance(value, np.generic) else value
        if isinstance(value, bool | int | str | None) or (isinstance(value, float) and math.isfinite(value)):
            return value
        raise self.bad(path, f"is {_short(value)}", "static fields are of finite numbers, strings and dtypes")

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
        if dtype not in _TYPES:
            raise self.bad(path, f"is a {type(array).__name__} of dtype {dtype}", f"files have {', '.join(DTYPES)}")
        self.tied[key] = name = _unique(path, self.names)
        self.tensors[name] = array
        return name

    def bad(self, path: tuple[Any, ...], problem: str, but: str, error: type[Exception] = TypeError) -> Exception:
        return error(f"Cannot save to {self.target}: {_name(path)} {problem}; {but}.")


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
        f"tuples), strings, finite numbers, True, False and None. It is {_short(metadata)}."
    )


def _size(array: Any) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


def _crc32(data: np.ndarray) -> int:
    """The checksum of bytes, of which no more are in memory at a time than need be if they are those of a file."""
    crc32 = 0
    for start in range(0, data.size, _CHUNK):
        crc32 = zlib.crc32(data[start : start + _CHUNK].data, crc32)
        if data.size > _CHUNK:
            release()
    return crc32


def _header(texts: dict[str, str], tensors: dict[str, Any], crc32: dict[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": texts | {"lowbit.crc32": _json(crc32)}}
    end = 0
    for name, array in {**tensors, _SHA256: np.zeros(_DIGEST, np.uint8)}.items():
        start, end = end, end + _size(array)
        entries[name] = {"dtype": _TYPES[array.dtype], "shape": list(array.shape), "data_offsets": [start, end]}
    text = _json(entries).encode("ascii")
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def check_is_file(target: Path) -> None:
    """Raise where no file can be put."""
    if not target.parent.is_dir():
        raise FileNotFoundError(f"Cannot save to {target}: there is no directory {target.parent}.")
    if target.exists() and not target.is_file():
        raise IsADirectoryError(f"Cannot save to {target}: it is a directory or a device, not a file.")


def _outlined(target: Path, tree: Any, metadata: Any, *, shapes: bool = False) -> tuple[dict[str, str], dict[str, Any]]:
    """The texts and the tensors of a file, which can be read if it is written. `shapes`: the tree has these alone."""
    outline = _Outline(target, shapes)
    told = [str(VERSION), _json(outline.node(tree, ())), "", _told({} if metadata is None else metadata)]
    texts: dict[str, str] = dict(zip(_TEXTS, told, strict=True))
    # Those of whole cache lines first, then by the size of their elements, so that each lies on a multiple of it.
    tensors = dict(sorted(outline.tensors.items(), key=lambda t: (_size(t[1]) % _ALIGNMENT > 0, -t[1].dtype.itemsize)))
    start = _header(texts, tensors, dict.fromkeys(tensors, "0" * 8))
    _Contents(target, start, len(start) + sum(map(_size, tensors.values())) + _DIGEST).read()
    if not shapes:
        check_is_file(target)
    return texts, tensors


class Layout:
    """A file that `save` would write of a dict of arrays, from their shapes alone: where each tensor lies in it.

    - `parts`: of each array the names of its tensors, by its fields; of one that is not quantized, by "".
    - `tensors`: the shape and dtype of each. `offsets`: where it begins. `size`: of the file.
    """

    def __init__(self, target: Path, arrays: dict[str, Any], metadata: dict[str, Any]):
        self._texts, self.tensors = _outlined(target, arrays, metadata, shapes=True)
        nodes = dict(json.loads(self._texts["lowbit.tree"])[1])
        self.parts: dict[str, dict[str, str]] = {
            name: {"": node["array"]} if "array" in node else {k: t for k, t in node["parts"].items() if t is not None}
            for name, node in nodes.items()
        }
        start = len(self._start({}))
        ends = list(itertools.accumulate(map(_size, self.tensors.values()), initial=start))
        self.offsets = dict(zip(self.tensors, ends, strict=False))
        self.size = ends[-1] + _DIGEST
        self.replaces = index_parts(target)

    def _start(self, crc32: dict[str, int]) -> bytes:
        return _header(self._texts, self.tensors, {name: f"{crc32.get(name, 0):08x}" for name in self.tensors})

    def ends(self, crc32: dict[str, int]) -> tuple[bytes, bytes]:
        """The first and the last bytes of the file, given the checksums of all tensors."""
        start = self._start(crc32)
        return start, hashlib.sha256(start).digest()

    def tidy(self, target: Path) -> None:
        """Remove the parts that the file before was the index of."""
        _remove(target, self.replaces)


def _write(target: Path, texts: dict[str, str], tensors: dict[str, Any]) -> bytes:
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


def _save_together(target: Path, tree: Any, metadata: Any) -> None:
    """Every process writes a file with its pieces, and then the first one the index that names these files."""
    here, doing = jax.process_index(), f"Cannot save to {target}"
    texts: dict[str, str] = {}
    tensors: dict[str, Any] = {}
    pieces: dict[str, Any] = {}

    def plan() -> bytes:
        found, arrays = _outlined(target, tree, metadata)
        texts.update(found)
        for name, array in arrays.items():
            pieces[name] = pieces_of(array)
            placed = [[process, corner] for corner, (process, _) in pieces[name].items()]
            tensors[name] = {"dtype": _TYPES[array.dtype], "shape": list(array.shape), "pieces": placed}
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

    def write() -> bytes:
        own = {
            _piece_name(name, corner): piece
            for name, found in pieces.items()
            for corner, (process, piece) in found.items()
            if process == here
        }
        digest = _write(part, *_outlined(part, own, {}))
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
            _Contents(target, start, len(start) + _DIGEST).read()
            _write(target, index, {})
            _remove(target, old)
        return b""

    try:
        digests = together(doing, write)
        together(doing, publish)
    except BaseException:
        _remove(target, [part.name])
        raise


def _piece_name(name: str, corner: tuple[int, ...]) -> str:
    return f"{name}@{','.join(map(str, corner))}"


def index_parts(target: Path) -> list[str]:
    """The files that the index there names; none if there is no index, or none that can be read."""
    with contextlib.suppress(OSError, ValueError):
        if target.is_file() and _version(target) == INDEX:  # a pipe would have us wait
            return list(_mapped(target)[1].files)
    return []


def _remove(target: Path, names: list[str]) -> None:
    """Remove parts, unless the file there names them. What cannot be removed stays; the checkpoint is whole."""
    for name in {*names} - {*index_parts(target)}:
        with contextlib.suppress(OSError):
            (target.parent / name).unlink(missing_ok=True)


# --- reading


def _version(path: str | os.PathLike[str]) -> int | None:
    """The version of a file by its first bytes, if it is one of ours."""
    with open(path, "rb") as file:
        start = _START.match(file.read(64), 8)
    return start and int(start[1])


def _mapped(path: Path, versions: tuple[int, ...] = (VERSION, INDEX)) -> tuple[np.ndarray, "_Contents"]:
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
    if hashlib.sha256(header).digest() != data[-_DIGEST:].tobytes():
        raise ValueError(f"{path} is damaged or cut off: its header does not match its checksum.")
    return data, _Contents(path, header, size, data)


class _Contents:
    """What a header says, each word of it held against the others and against the size of the file."""

    def __init__(self, path: Path, header: bytes, size: int, data: np.ndarray | None = None):
        self.path, self.size = path, size
        self.data = np.empty(0, np.uint8) if data is None else data  # of what is not written yet, no piece is read
        if len(header) > 8 + _MOST_HEADER:
            raise self.bad("its header", f"has {len(header)} bytes, more than {_MOST_HEADER}")
        entries = self.parsed("its header", header[8:])
        texts = entries.pop("__metadata__", None)
        is_index = isinstance(texts, dict) and texts.get("lowbit.version") == str(INDEX)
        names = _INDEX_TEXTS if is_index else _TEXTS
        if not isinstance(texts, dict) or tuple(texts) != names or not all(isinstance(t, str) for t in texts.values()):
            raise self.bad("its metadata", f"must be the texts {', '.join(names)}")
        self.stored = self.placed(entries, self.parsed("lowbit.crc32", texts["lowbit.crc32"]), len(header))
        self.files: dict[str, Any] = {}
        self.pieces: dict[str, Any] | None = None
        if is_index:
            if self.stored:
                raise self.bad(f"tensor {_short(min(self.stored))}", "lies in an index")
            self.files = self.parsed("lowbit.files", texts["lowbit.files"])
            for name in self.files:
                if not _PART.fullmatch(name):
                    raise self.bad("lowbit.files", f"names {_short(name)}, which is no name of a file with pieces")
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

    def placed(self, entries: dict[str, Any], crc32: dict[str, Any], start: int) -> dict[str, _Piece]:
        """The tensors where they lie: one after the other, from the end of the header to the end of the file."""
        if [*crc32, _SHA256] != [*entries]:
            odd = _short(sorted({*crc32, _SHA256} ^ {*entries}))
            raise self.bad("lowbit.crc32", f"does not have the tensors of the file in their order: {odd}")
        tensors: dict[str, _Piece] = {}
        end = start
        for name, entry in entries.items():
            where, code = f"tensor {_short(name)}", crc32.get(name, "0" * 8)
            dtype, shape, offsets = self.declared(where, entry, "data_offsets")
            first, end = end, end + math.prod(shape) * dtype.itemsize
            if offsets != [first - start, end - start] or not are_counts(offsets, 2):
                raise self.bad(where, f"of shape {_short(shape)} lies at {_short(offsets)}")
            if not isinstance(code, str) or not re.fullmatch("[0-9a-f]{8}", code):
                raise self.bad(where, f"has the checksum {_short(code)}, which is not eight hexadecimal digits")
            tensors[name] = _Piece(self.path, name, dtype, tuple(shape), self.data[first:end], code)
        if end != self.size:
            raise self.bad("its last tensor", f"ends at byte {end}, and the file has {self.size}")
        del tensors[_SHA256]
        return tensors

    def declared(self, where: str, entry: Any, third: str) -> tuple[np.dtype, list[int], list[Any]]:
        """The dtype and the shape of a tensor, and what else is said of it."""
        match entry:
            case {"dtype": str(kind), "shape": list(shape), **rest} if {*rest} == {third} and type(rest[third]) is list:
                dtype = DTYPES.get(kind)
            case _:
                raise self.bad(where, f"is {_short(entry)}, and not a dtype, a shape and {third}")
        if dtype is None:
            raise self.bad(where, f"has the dtype {_short(kind)}, which is none of {', '.join(DTYPES)}")
        # Also of an empty tensor the other axes must be such that numpy and XLA can count its bytes.
        if not are_counts(shape, _MOST_AXES) or math.prod(n or 1 for n in shape) > max(self.size, 1 << 40):
            raise self.bad(where, f"has the shape {_short(shape)}")
        return dtype, shape, rest[third]

    def part(self, name: str, digest: Any) -> "_Contents":
        """What a file says that the index names."""
        try:
            data, contents = _mapped(self.path.parent / name, (VERSION,))
        except (OSError, UnicodeError) as error:
            raise self.bad(f"its part {_short(name)}", f"cannot be read: {error}") from error
        if data[-_DIGEST:].tobytes().hex() != digest:
            raise self.bad(f"its part {_short(name)}", "is not the file that was saved with it")
        return contents

    def joined(self, tensors: dict[str, Any]) -> dict[str, _Tensor]:
        """The tensors of an index. Their pieces must be the cells of a grid, so none overlap and nothing is missing."""
        parts = [self.part(name, digest) for name, digest in self.files.items()]
        found: dict[str, _Tensor] = {}
        for name, entry in tensors.items():
            where = f"tensor {_short(name)}"
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
                        raise self.bad(where, f"has the piece {_short(item)}")
            cuts = [[*sorted({corner[axis] for corner in corners}), n] for axis, n in enumerate(shape)]
            cells = [dict(itertools.pairwise(axis)) for axis in cuts]
            if any(axis[0] for axis in cuts) or not math.prod(map(len, cells)) == len(corners) == len(given) > 0:
                raise self.bad(where, "has pieces that overlap or leave something out")
            pieces: dict[Box, _Piece] = {}
            for corner, number in corners.items():
                there = tuple((first, cell[first]) for first, cell in zip(corner, cells, strict=True))
                piece = parts[number].stored.get(_piece_name(name, corner))
                if piece is None or (piece.dtype, piece.shape) != (dtype, tuple(b - a for a, b in there)):
                    part = _short(parts[number].path.name)
                    raise self.bad(where, f"has a piece at {corner} that is not what is in {part}")
                pieces[there] = piece
            found[name] = _Tensor(dtype, tuple(shape), pieces)
        return found

    def read(self) -> tuple[Any, dict[str, Any]]:
        """The tree, with tensors in the place of arrays and of parts, and its arrays by name."""
        whole = {name: _Tensor(p.dtype, p.shape, {_whole(p.shape): p}) for name, p in self.stored.items()}
        self.tensors = whole if self.pieces is None else self.joined(self.pieces)
        self.unused = set(self.tensors)
        try:
            tree = self.node(self.outline["tree"], ())
        except RecursionError:
            raise self.bad("lowbit.tree", "is nested too deep") from None
        if self.unused:
            raise self.bad(f"tensor {_short(min(self.unused))}", "belongs to no array")
        return tree, self.arrays

    def node(self, given: Any, path: tuple[Key, ...]) -> Any:
        match given:
            case None:
                return None
            case {"array": str(name), **rest} if not rest:
                return self.named(self.tensor(name, path), path)
            case {"quantized": str(name), "static": dict(static), "parts": dict(parts), **rest} if not rest:
                return self.named(self.array(self.known(name, path), static, parts, path), path)
            case [str(kind), list(pairs)] if len(path) < _DEEPEST:
                return _Container(kind, self.children(kind, pairs, path))
            case {"str": str(value), **rest} if not rest:
                return value
            case dict() if len(given) == 1 and (kind := next(iter(given))) in _NUMBERS:
                with contextlib.suppress(TypeError, ValueError):
                    if repr(value := _NUMBERS[kind](given[kind])) == given[kind]:
                        return value
        raise self.bad(_name(path), f"is {_short(given)}, which is no array, number or container")

    def children(self, kind: str, pairs: list[Any], path: tuple[Key, ...]) -> dict[Key, Any]:
        children: dict[Key, Any] = {}
        for i, pair in enumerate(pairs):
            match pair:
                case [str(key) | int(key), child] if type(key) is not bool and key not in children:
                    if kind in ("list", "tuple") and key != i:
                        raise self.bad(_name((*path, key)), f"is number {i} of a {kind}")
                    if isinstance(key, str) and re.search("[\ud800-\udfff]", key):
                        raise self.bad(_name((*path, key)), "has half a character in its key")
                    children[key] = self.node(child, (*path, key))
                case _:
                    raise self.bad(_name(path), f"has the child {_short(pair)}, which has no key of its own")
        return children

    def named(self, array: Any, path: tuple[Key, ...]) -> Any:
        name = _unique(path, self.names)
        self.names_left -= len(name)
        if self.names_left < 0:
            raise self.bad(_name(path), "and those before it have longer names than the header")
        self.arrays[name] = array
        return array

    def tensor(self, name: Any, path: tuple[Key, ...]) -> _Tensor:
        if not isinstance(name, str) or name not in self.tensors:
            raise self.bad(_name(path), f"needs tensor {_short(name)}, which is missing")
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
            raise self.bad(_name(path), f"is of the class {_short(name)}: {which}")
        return next(iter(found.values()))

    def array(
        self, cls: type[QuantizedArray], static: dict[str, Any], parts: dict[str, Any], path: tuple[Key, ...]
    ) -> QuantizedArray:
        fields, names = cls._fields()
        if {*static} != {*names} or {*parts} != {*fields}:
            odd = _short(sorted({*static, *parts} ^ {*names, *fields}))
            raise self.bad(_name(path), f"and the class {cls.__name__} do not have the same fields: {odd}")
        values = tuple(self.static(static[name], path) for name in names)
        tensors = [None if parts[name] is None else self.tensor(parts[name], path) for name in fields]
        if (key := (cls, values, *tensors)) not in self.quantized:
            self.quantized[key] = cls._unflatten(values, tensors)
            self.check(self.quantized[key], _name(path))
        return self.quantized[key]

    def static(self, given: Any, path: tuple[Key, ...]) -> Any:
        match given:
            case list():
                return tuple(self.static(item, path) for item in given)
            case {"dtype": str(name), **rest} if not rest and name in DTYPES:
                return DTYPES[name]
            case dict():
                raise self.bad(_name(path), f"has {_short(given)} in a static field, which is no dtype of safetensors")
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
            raise self.bad(where, f"has {_short(told)} for dtype, transposed, use_kernel and compute")
        widest = max(_WIDEST, 8 * math.prod(getattr(array.codes, "shape", ())))
        if not _integers(spans) or len(spans) > len(axes) or not all(0 <= span <= widest for span in spans):
            raise self.bad(where, f"has the spans {_short(spans)} on {len(axes)} axes")
        paired = isinstance(lengths, tuple) and all(_integers(pair) and len(pair) == 2 for pair in lengths)
        if not paired or any(axis not in axes or n < 0 for axis, n in lengths) or len(dict(lengths)) < len(lengths):
            raise self.bad(where, f"has the lengths {_short(lengths)} on {len(axes)} axes")
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
