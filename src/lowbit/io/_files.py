"""Saving a tree of arrays to a lowbit file, and loading arrays from any file that can be read."""

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from lowbit.formats import PermutedArray, QuantizedArray
from lowbit.formats.permuted import check_order
from lowbit.models.partition import is_quantized
from lowbit.models.patterns import is_array, leaf_path
from lowbit.models.sharding import shardings
from lowbit.runtime._compat import mesh_in_context

from ._checks import short
from ._mapping import Source, Target, sources
from .bitsandbytes import DequantizedWarning
from .container._header import (
    KEY_DATA,
    OWN,
    RANDOM_KEY,
    Container,
    Key,
    Tensor,
    children_of,
    class_name,
    is_random_key,
    is_static,
    open_contents,
    path_name,
)
from .container._layout import index_files, outlined, remove_shard_files
from .container._write import save_together, write_file
from .readers import LowbitFile, Reader, is_lowbit_file, open_tensors
from .readers._base import check_method, decoded_types
from .readers.lowbit import on_device


def save(path: str | os.PathLike[str], tree: Any, *, metadata: dict[str, Any] | None = None) -> None:
    """Write a tree of arrays to a lowbit file, bit for bit.

    - Leaves: quantized arrays; jax and numpy arrays of the dtypes that safetensors has; typed random keys; Python
      numbers and strings; None. An array that occurs several times is stored once, and is one array again after `load`.
      Functions, classes, dtypes and members of enums are not stored: `load` takes them from `like`.
    - Containers: dicts with string or integer keys, lists and tuples are restored by `load`. For others only the
      leaves are stored, and `load` needs a tree of the same structure as `like`.
    - `metadata`: a dict that JSON can represent.

    The file is written to a temporary file, which replaces `path` once it is on the disk: `path` is always the whole
    old file or the whole new one.

    With several processes (`jax.distributed`) all of them must call `save`, with the same tree and the
    same path on a shared file system. Each writes its shards of the arrays to a file next to `path`, and `path` is an
    index of these files. Arrays that are local to each process are saved from process 0. If one process fails, all
    raise an `OSError`, and the old file stays.

    >>> import tempfile, jax.numpy as jnp, lowbit
    >>> params = {"w": lowbit.quantize(jnp.ones((64, 32))), "b": jnp.zeros(32)}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     lowbit.save(f"{folder}/model.safetensors", params, metadata={"step": 100})
    ...     lowbit.load(f"{folder}/model.safetensors")["w"].packed.shape
    (64, 16)
    """
    target = Path(os.path.realpath(path))
    if jax.process_count() > 1:
        return save_together(target, tree, metadata)
    old = index_files(target)
    write_file(target, *outlined(target, tree, metadata))
    remove_shard_files(target, old)


def load(path: str | os.PathLike[str], like: Any = None, *, mapping: Mapping[str, Target] | None = None) -> Any:
    """Load the arrays of a file or a directory, with the bits that it stores.

    - A lowbit file gives the tree that was saved: dicts, lists and tuples of its arrays.
    - A GGUF file, another safetensors file, or a Hugging Face directory gives a dict of its arrays by name. Tensors
      stored in a lowbit format (GPTQ, AWQ and others; most types of GGUF) stay quantized. Other types that have to be
      decoded are dequantized to float32, with a `DequantizedWarning`.
    - `like`: a tree of the same structure, for containers other than dicts, lists and tuples, which are taken from it.
      Its leaves, arrays or `jax.ShapeDtypeStruct`s, must match the file in shape and dtype, and quantized ones also in
      format. A numpy leaf gives a numpy array.
    - A `NamedSharding` of a leaf in `like` is applied; of a quantized leaf, to its logical axes. A process reads only
      the bytes for its own devices. The checksum of a tensor that is not read in full is not checked.
    - `mapping`: how the arrays of the file, by name, make the arrays of `like`: a dict from regular expressions, which
      match whole names, to paths in `like`, with `\\1` for a group. See below.
    - Arrays are jax arrays, or numpy arrays where JAX would narrow them to 32 bits (without `jax_enable_x64`).

    With a `mapping`, every array of the file must match one pattern, and every array of `like` must get its values:

    - `"layers/\\1/up/kernel"`: the array goes there. Its last two axes are swapped if the shape in `like` says so, and
      those of a square matrix if the path ends in `kernel`. Of a quantized array only a flag changes.
    - `("head/kernel", "T")` swaps them, and `("head/kernel", None)` does not, whatever the shape.
    - `"layers/up/kernel[\\1]"`: the array is that layer of a stack, counted from 0; `[\\1,\\2]` for two leading axes.
      The layers must be stored alike. Their components are stacked, and nothing is decoded.
    - None leaves the array out.
    - A floating-point dtype may differ from that of `like`, which the arrays get: quantized ones read as it, others are
      cast if that is exact.

    On CPU the arrays are memory-mapped. Replace such a file, as `save` does, rather than write into it.

    >>> import tempfile, jax, jax.numpy as jnp, lowbit
    >>> init = lambda: {"w": jnp.ones((64, 32)), "scale": (jnp.zeros(32), 1.5)}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     lowbit.save(f"{folder}/model.safetensors", lowbit.quantize_tree(init(), "int8")[0])
    ...     params = lowbit.load(f"{folder}/model.safetensors", like=jax.eval_shape(init))
    >>> type(params["w"]).__name__, params["scale"][1]
    ('Array8B', 1.5)

    Names of Hugging Face, with the layers stacked for `scan`:

    >>> model = {"up": jax.ShapeDtypeStruct((3, 64, 32), jnp.float32)}  # (layers, in, out)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     weights = {f"model.{i}.up.weight": lowbit.quantize(jnp.ones((32, 64)), axis=-1) for i in range(3)}
    ...     lowbit.save(f"{folder}/model.safetensors", weights)
    ...     mapping = {r"model\\.(\\d+)\\.up\\.weight": r"up[\\1]"}
    ...     lowbit.load(f"{folder}/model.safetensors", like=model, mapping=mapping)["up"].shape
    (3, 64, 32)
    """
    if mapping is not None and like is None:
        raise ValueError("load needs `like`, the tree that `mapping` gives paths of.")
    file = open_tensors(path)
    loader = _Loader(file)
    if mapping is not None:
        nodes = (
            {name: file._entry(name) for name in file} if isinstance(file, LowbitFile) else _flat_tree(file).children
        )
        return loader.mapped(mapping, like, nodes)
    tree = file.tree if isinstance(file, LowbitFile) else _flat_tree(file)
    return loader.plain(tree, ()) if like is None else loader.filled(tree, like, ())


def load_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The metadata of a file, without reading an array.

    Of a lowbit file, the `metadata` that was given to `save`, or an empty dict; of other files and of directories, what
    they say about themselves: the fields of a GGUF file, `config.json` as `"config"`.

    >>> import tempfile, jax.numpy as jnp, lowbit
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     lowbit.save(f"{folder}/model.safetensors", {"b": jnp.zeros(32)}, metadata={"step": 100})
    ...     lowbit.load_metadata(f"{folder}/model.safetensors")
    {'step': 100}
    """
    path = Path(path)
    if path.is_file() and is_lowbit_file(path):
        return open_contents(path)[1].metadata
    return open_tensors(path).metadata


def _flat_tree(file: Reader) -> Container:
    """The arrays of a file of another library, by name."""
    check_method(file)
    if decoded := decoded_types(file):
        warnings.warn(decoded, category=DequantizedWarning, stacklevel=3)
    return Container("dict", {name: file.array(name) for name in file})


class _Loader:
    """Makes arrays from the nodes of a file: a `Tensor` or an array, or a quantized array with these as components."""

    def __init__(self, file: Reader):
        self.file = file
        self.made: dict[Any, Any] = {}  # so that an array that was stored once is one array again

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    def view(self, node: Any) -> np.ndarray:
        if isinstance(self.file, LowbitFile) and isinstance(node, Tensor):
            return self.file.view(node)
        return np.asarray(node)

    def component(self, node: Any, sharding: NamedSharding | None) -> Any:
        if isinstance(node, jax.Array) and sharding is None:
            return node
        make = (lambda: on_device(self.view(node))) if sharding is None else (lambda: self.sharded(node, sharding))
        return self.once((id(node), sharding), make)

    def sharded(self, node: Any, sharding: NamedSharding) -> Any:
        if isinstance(self.file, LowbitFile) and isinstance(node, Tensor):
            return self.file.sharded(node, sharding)
        view = self.view(node)
        if jax.dtypes.canonicalize_dtype(view.dtype) != view.dtype:
            return view  # as `on_device` does
        return jax.make_array_from_callback(view.shape, sharding, lambda index: view[index], dtype=view.dtype)

    def array(self, node: Any, path: tuple[Key, ...], like: Any = None) -> Any:
        if not is_quantized(node) and not isinstance(node, Tensor | np.ndarray):
            return node
        if not is_quantized(node) and isinstance(like, np.ndarray | np.generic):
            return self.once((id(node), np.ndarray), lambda: self.view(node))
        if (sharding := _sharding_of(like)) is None:
            return self.once((id(node), "whole"), lambda: self.whole(node, path))
        try:
            components = shardings(node, sharding)
        except ValueError as error:
            raise ValueError(f"{self.file.path}: cannot shard {path_name(path)} like `like`: {error}") from None
        return self.once((id(node), "sharded", sharding), lambda: jax.tree.map(self.component, node, components))

    def whole(self, node: Any, path: tuple[Key, ...]) -> Any:
        self.check(node, path_name(path))
        return jax.tree.map(lambda x: self.component(x, None), node)

    def check(self, node: Any, name: str) -> None:
        """Raise a ValueError if a stored code is out of the range of its format, or an order is not a permutation."""
        is_tensor = [isinstance(component, Tensor) for component in jax.tree.leaves(node)]
        if not isinstance(self.file, LowbitFile) or not any(is_tensor):
            return
        if isinstance(node, PermutedArray):
            try:
                check_order(self.view(node.order))
            except ValueError as error:
                raise ValueError(f"{self.file.path}: {name}: {error}") from None
            node = node.array
        self.file.check_codes(node, name)

    def plain(self, node: Any, path: tuple[Key, ...]) -> Any:
        """A node as dicts, lists and tuples."""
        if not isinstance(node, Container):
            return self.array(node, path)
        if node.kind.startswith(RANDOM_KEY):
            return self.random_key(node, path)
        if node.kind not in OWN:
            raise ValueError(
                f"{self.file.path}: {path_name(path)} is of the class {short(node.kind)}, not a dict, list or tuple. "
                "Pass a tree of the same structure as `like`, for instance the jax.eval_shape of its constructor."
            )
        children = {key: self.plain(child, (*path, key)) for key, child in node.children.items()}
        return children if node.kind == "dict" else OWN[node.kind](children.values())

    def filled(self, node: Any, like: Any, path: tuple[Key, ...]) -> Any:
        """A node in the containers of `like`."""
        if isinstance(node, Container) and node.kind.startswith(RANDOM_KEY) and is_random_key(like):
            return self.random_key(node, path, like)
        opened = children_of(like)
        if opened is None and is_static(like) and isinstance(node, Container) and node.kind == class_name(like):
            return like
        if opened is None or not isinstance(node, Container):
            if opened or isinstance(node, Container) or not _agree(node, like):
                here, there = _described(node), _described(like)
                raise ValueError(f"{self.file.path}: {path_name(path)} is {here} in the file and {there} in `like`.")
            return self.array(node, path, like)
        found, rebuilt = opened
        keys = dict.fromkeys(key for key, _ in found)
        for key in {**node.children, **keys}:
            if key not in keys or key not in node.children:
                where = "`like` and not in the file" if key in keys else "the file and not in `like`"
                raise ValueError(f"{self.file.path}: {path_name((*path, key))} is in {where}.")
        return rebuilt([self.filled(node.children[key], child, (*path, key)) for key, child in found])

    def random_key(self, node: Container, path: tuple[Key, ...], like: Any = None) -> Any:
        """Typed random keys, from the numbers that a file stores of them."""
        implementation = node.kind.removeprefix(RANDOM_KEY)
        data = self.array(node.children.get(KEY_DATA), (*path, KEY_DATA))
        try:
            keys = jax.random.wrap_key_data(data, impl=implementation)
        except (ValueError, TypeError) as error:
            raise self.bad(f"{path_name(path)} is not a random key of {short(implementation)}: {error}") from None
        if like is not None and (keys.shape, keys.dtype) != (tuple(like.shape), like.dtype):
            here, there = _described(keys), _described(like)
            raise self.bad(f"{path_name(path)} is {here} in the file and {there} in `like`.")
        return keys

    # --- other names than those of `like`

    def mapped(self, mapping: Mapping[str, Target], like: Any, nodes: Mapping[Any, Any]) -> Any:
        """The containers of `like`, with the arrays of the file, `nodes` by name, as `mapping` says."""
        found, structure = jax.tree_util.tree_flatten_with_path(like, is_leaf=is_quantized)
        leaves = {leaf_path(path): leaf for path, leaf in found if is_array(leaf)}
        made: list[Any] = []  # arrays that are made of a node are known by its id, so it must stay
        shapes = {path: tuple(leaf.shape) for path, leaf in leaves.items()}
        for path, parts in sources(mapping, list(map(str, nodes)), shapes, self.bad).items():
            made.append(node := self.assembled(path, leaves[path], {part: nodes[part.name] for part in parts}))
            leaves[path] = self.filled(node, leaves[path], (path,))
        return jax.tree.unflatten(structure, [leaves.get(leaf_path(path), leaf) for path, leaf in found])

    def bad(self, problem: str) -> ValueError:
        return ValueError(f"{self.file.path}: {problem}")

    def assembled(self, path: str, leaf: Any, parts: Mapping[Source, Any]) -> Any:
        """The node of a leaf, made of one tensor or of the layers of a stack."""
        dims = tuple(leaf.shape[: len(next(iter(parts)).index)])
        nodes = [self.fitted(path, leaf, dims, part, node) for part, node in parts.items()]
        if not dims:
            return nodes[0]
        for part, node in zip(parts, nodes, strict=True):
            if _stored_type(node) != _stored_type(nodes[0]):
                first = next(iter(parts)).name
                raise self.bad(
                    f"{first!r} is {_described(nodes[0])} and {part.name!r} is {_described(node)}: the layers of a "
                    f"stack, {path!r} of `like`, must be stored alike. Map them to leaves of their own."
                )
            self.check(node, repr(part.name))

        def stacked(*components: Any) -> np.ndarray:
            return np.stack([self.view(c) for c in components]).reshape(*dims, *components[0].shape)

        return jax.tree.map(stacked, *nodes)

    def fitted(self, path: str, leaf: Any, dims: tuple[int, ...], part: Source, node: Any) -> Any:
        """A tensor in the shape and dtype of a leaf, or of a layer of it."""
        shape, wanted = tuple(node.shape), tuple(leaf.shape[len(dims) :])
        swapped = (*shape[:-2], *shape[:-3:-1])
        flip = part.transposed
        if flip is None:
            flip = len(shape) > 1 and swapped == wanted and (shape != wanted or path.endswith("kernel"))
        if (swapped if flip else shape) != wanted or (flip and len(shape) < 2):
            where = f"{path!r} of shape {tuple(leaf.shape)}" + f", a stack of {dims}," * bool(dims)
            raise self.bad(
                f"{part.name!r} of shape {shape}{', transposed,' * bool(flip)} does not fit {where} in `like`."
            )
        if flip:
            node = node.mT if is_quantized(node) else np.swapaxes(self.view(node), -1, -2)
        if node.dtype == leaf.dtype or not all(jnp.issubdtype(x.dtype, jnp.floating) for x in (node, leaf)):
            return node
        if isinstance(node, PermutedArray):
            return node.replace(array=node.array.replace(dtype=np.dtype(leaf.dtype)))
        if isinstance(node, QuantizedArray):
            return node.replace(dtype=np.dtype(leaf.dtype))
        exact = jnp.promote_types(node.dtype, leaf.dtype) == leaf.dtype
        return self.view(node).astype(leaf.dtype) if exact else node


def _stored_type(node: Any) -> Any:
    """What equal layers have in common."""
    return jax.tree.structure(node), [(tuple(x.shape), np.dtype(x.dtype)) for x in jax.tree.leaves(node)]


def _agree(node: Any, like: Any) -> bool:
    """Whether a leaf of a file matches a leaf of `like`."""
    if not hasattr(like, "dtype"):
        return type(node) is type(like)
    if type(node) in (bool, int, float, complex):
        return like.shape == () and like.dtype == jnp.result_type(type(node))
    if not hasattr(node, "dtype") or tuple(like.shape) != node.shape or like.dtype != node.dtype:
        return False
    return not is_quantized(like) or _format(like) == _format(node)


def _format(array: Any) -> Any:
    if isinstance(array, PermutedArray):
        return array.axis, tuple(array.order.shape), _format(array.array)
    if not isinstance(array, QuantizedArray):
        return None
    # Neither settings of products nor the width of scales are part of a format.
    static = [getattr(array, name) for name in array._fields()[1] if name not in ("use_kernel", "compute")]
    components = {
        name: (tuple(component.shape), component.dtype.kind in "iu") for name, component in array.components().items()
    }
    return type(array), static, components


def _described(x: Any) -> str:
    if not hasattr(x, "dtype"):
        return f"a {short(x.kind)[1:-1] if isinstance(x, Container) else type(x).__name__}"
    if isinstance(x, PermutedArray):
        return f"{_described(x.array)}, permuted along axis {x.axis}"
    layout = f", spans {x.spans}{', transposed' * x.transposed}" if isinstance(x, QuantizedArray) else ""
    return f"{type(x).__name__ if layout else 'an array'} of shape {tuple(x.shape)} and dtype {x.dtype}{layout}"


def _sharding_of(like: Any) -> NamedSharding | None:
    sharding = getattr(like, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return None
    if isinstance(sharding.mesh, Mesh):
        return sharding
    # jax.eval_shape gives an abstract mesh; the devices are those of the mesh in context.
    mesh = mesh_in_context()
    return None if mesh is None else NamedSharding(mesh, sharding.spec)
