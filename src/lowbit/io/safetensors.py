"""lowbit's own files: safetensors whose metadata holds the tree, its quantized arrays, and a checksum of every byte.

`docs/file-format.md` is the specification. In short: the tensors are the parts of the arrays, `lowbit.tree` says what
they are the parts of, `lowbit.crc32` has a checksum for each, and the last tensor is the SHA-256 of the whole header.
What a header says is read in `_contents`, and files are written in `_writing`.
"""

import difflib
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from lowbit.formats import QuantizedArray
from lowbit.formats._blocks import covered
from lowbit.formats._components import check_codes
from lowbit.models.sharding import shardings
from lowbit.runtime._compat import mesh_in_context

from ._contents import (
    OWN,
    TYPES,
    Container,
    Key,
    Piece,
    Tensor,
    children_of,
    common_box,
    open_contents,
    path_name,
    short,
    version_of,
    volume,
    whole_box,
)
from ._maps import located, release
from ._processes import Box, box
from ._writing import byte_size, index_parts, outlined, remove_parts, save_together, write_file

_CHUNK = 1 << 26  # bytes that are looked at at a time


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
        return save_together(target, tree, metadata)
    old = index_parts(target)
    write_file(target, *outlined(target, tree, metadata))
    remove_parts(target, old)


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

    def tensor(node: Tensor, sharding: NamedSharding | None) -> Any:
        if sharding is None:
            return once((id(node), None), lambda: _on_device(file._view(node)))
        return once((id(node), sharding), lambda: file._sharded(node, sharding))

    def whole(node: Any, path: tuple[Key, ...]) -> Any:
        file._check_codes(node, path_name(path))
        return jax.tree.map(lambda part: tensor(part, None), node)

    def array(node: Any, path: tuple[Key, ...], like: Any = None) -> Any:
        if not isinstance(node, Tensor | QuantizedArray):
            return node
        if isinstance(node, Tensor) and isinstance(like, np.ndarray | np.generic):
            return once((id(node), np.ndarray), lambda: file._view(node))
        if (sharding := _sharding_of(like)) is None:
            return once((id(node), "whole"), lambda: whole(node, path))
        try:
            parts = shardings(node, sharding)
        except ValueError as error:
            raise ValueError(f"{file.path}: {path_name(path)} cannot be laid out as `like` is: {error}") from None
        return once((id(node), "cut", sharding), lambda: jax.tree.map(tensor, node, parts))

    def plain(node: Any, path: tuple[Key, ...]) -> Any:
        if not isinstance(node, Container):
            return array(node, path)
        if node.kind not in OWN:
            raise ValueError(
                f"{file.path}: {path_name(path)} is of the class {short(node.kind)}, and no dict, list or tuple: "
                "pass a tree of the same structure as `like`, for instance jax.eval_shape of what makes it."
            )
        children = {key: plain(child, (*path, key)) for key, child in node.children.items()}
        return children if node.kind == "dict" else OWN[node.kind](children.values())

    def filled(node: Any, like: Any, path: tuple[Key, ...]) -> Any:
        opened = children_of(like)
        if opened is None or not isinstance(node, Container):
            if opened or isinstance(node, Container) or not _agree(node, like):
                here, there = _described(node), _described(like)
                raise ValueError(f"{file.path}: {path_name(path)} is {here} in the file and {there} in `like`.")
            return array(node, path, like)
        found, rebuilt = opened
        keys = dict.fromkeys(key for key, _ in found)
        for key in {**node.children, **keys}:
            if key not in keys or key not in node.children:
                where = "`like` and not in the file" if key in keys else "the file and not in `like`"
                raise ValueError(f"{file.path}: {path_name((*path, key))} is in {where}.")
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
    return open_contents(Path(path))[1].metadata


def is_lowbit_file(path: str | os.PathLike[str]) -> bool:
    """Whether `save` wrote a file, by its first bytes."""
    return version_of(path) is not None


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
        contents = open_contents(self.path)[1]
        self.metadata = contents.metadata
        self._tree, self._arrays = contents.read()
        self._checked: set[Piece] = set()

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
        return sum(map(byte_size, jax.tree.leaves(self._array(name))))

    def type(self, name: str) -> str:
        """The format of a quantized array, such as `"nf4"`; the type of any other, such as `"BF16"`."""
        array = self._array(name)
        return array.decoder or type(array).__name__ if isinstance(array, QuantizedArray) else TYPES[array.dtype]

    def array(self, name: str) -> QuantizedArray | np.ndarray:
        """An array as it is stored: quantized, or a numpy array that is a read-only view of the file."""
        array = self._array(name)
        if isinstance(array, QuantizedArray):
            self._check_codes(array, name)
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

    def _check_all(self, tensor: "Tensor") -> None:
        for piece in tensor.pieces.values():
            self._check(piece)

    def _check_codes(self, array: Any, name: str) -> None:
        """Whether each code of a quantized array is one of its format."""
        if not isinstance(array, QuantizedArray) or array.code_range is None:
            return
        views = {part: self._view(getattr(array, part)) for part in array.packing}
        try:
            check_codes(array.replace(**views))
        except ValueError as error:
            raise ValueError(f"{self.path}: {name}: {error}") from None

    def _view(self, tensor: "Tensor") -> np.ndarray:
        self._check_all(tensor)
        return tensor.read(whole_box(tensor.shape))

    def _sharded(self, tensor: "Tensor", sharding: NamedSharding) -> Any:
        if jax.dtypes.canonicalize_dtype(tensor.dtype) != tensor.dtype:
            return self._view(tensor)  # as `_on_device` has it
        indices = sharding.addressable_devices_indices_map(tensor.shape).values()
        wanted = {box(index, tensor.shape) for index in indices}
        for there, piece in tensor.pieces.items():
            if sum(volume(common_box(here, there)) for here in wanted) == volume(there):  # all of it is read
                self._check(piece)
        return jax.make_array_from_callback(
            tensor.shape, sharding, lambda index: tensor.read(box(index, tensor.shape)), dtype=tensor.dtype
        )

    def _check(self, piece: "Piece") -> None:
        if piece not in self._checked:
            if f"{_crc32(piece.data):08x}" != piece.crc32:
                raise piece.bad("is damaged: its checksum is another")
            self._checked.add(piece)


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
    # Nor is how wide its scales are stored.
    parts = {name: (tuple(part.shape), part.dtype.kind in "iu") for name, part in array.parts().items()}
    return type(array), static, parts


def _described(x: Any) -> str:
    if not hasattr(x, "dtype"):
        return f"a {short(x.kind)[1:-1] if isinstance(x, Container) else type(x).__name__}"
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


def _crc32(data: np.ndarray) -> int:
    """The checksum of bytes, of which no more are in memory at a time than need be if they are those of a file."""
    crc32 = 0
    for start in range(0, data.size, _CHUNK):
        crc32 = zlib.crc32(data[start : start + _CHUNK].data, crc32)
        if data.size > _CHUNK:
            release()
    return crc32
