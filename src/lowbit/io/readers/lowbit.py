"""Reading lowbit files, and directories with one."""

import json
import os
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from lowbit.formats import PermutedArray, QuantizedArray
from lowbit.formats.blocks import covered
from lowbit.formats.components import check_codes
from lowbit.models.partition import is_quantized

from .._chunks import Chunked, struct_of, units_of
from .._dtypes import NAMES
from .._maps import located, release
from .._regions import Region, full_region, intersection, region_of, region_shape, region_size
from ..container._header import Shard, Tensor, open_contents, version_of
from ..container._layout import byte_size
from ._base import Reader
from ._file_regions import region_reader
from .safetensors import WEIGHTS, other_files

_CHECKED = 1 << 26  # bytes of a mapped file that are checked before its pages are released


def is_lowbit_file(path: str | os.PathLike[str]) -> bool:
    """Whether a file is a lowbit file, by its first bytes."""
    return version_of(path) is not None


class LowbitFile(Reader):
    """A lowbit file: the arrays of a tree by name, each checked when it is read.

        file = LowbitFile("model.safetensors")
        file.metadata                           # what was given to `save`
        file.type("layers/0/kernel")            # 'nf4', or 'F32' for an array that is not quantized
        file.array("layers/0/kernel")           # an ArrayNF4 with the file's own codes and scales
        file.dense("layers/0/kernel")           # float32, whatever the file stores

    A name is the path of an array, joined by `/`; if two paths give the same name, the later one gets `~2`. Opening the
    file checks its whole header. The bytes of an array are checked against their checksums when it is read.
    """

    def __init__(self, path: str | os.PathLike[str]):
        contents = open_contents(Path(path))[1]
        self.tree, arrays = contents.read()
        self._checked: set[Shard] = set()
        super().__init__(Path(path), contents.metadata, arrays)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def nbytes(self, name: str) -> int:
        return sum(map(byte_size, jax.tree.leaves(self._entry(name))))

    def type(self, name: str) -> str:
        array = self._entry(name)
        if not is_quantized(array):
            return NAMES[array.dtype]
        return array.format_label or type(array).__name__

    def array(self, name: str) -> Any:
        array = self._entry(name)
        if is_quantized(array):
            self.check_codes(array, name)
            return jax.tree.map(lambda component: on_device(self.view(component)), array)
        return self.view(array)

    def dense(self, name: str, dtype: Any = np.float32) -> np.ndarray:
        array = self.array(name)
        return np.asarray(array.materialize() if is_quantized(array) else array).astype(dtype, copy=False)

    def chunks(self, name: str, *, as_stored: bool) -> Chunked:
        like = jax.tree.map(struct_of, self._entry(name))
        if isinstance(like, PermutedArray):
            return super().chunks(name, as_stored=as_stored)
        if as_stored or not isinstance(like, QuantizedArray):
            location = self._located(name)
            release()  # its checksum was checked, which reads all of it
            read = partial(self._read, name) if location is None else region_reader(location, like)
            return Chunked(like, units_of(like), read)
        if like.transposed:
            return super().chunks(name, as_stored=as_stored)
        return Chunked(struct_of(like), units_of(like), partial(self._decode, name))

    def _read(self, name: str, region: Region) -> Any:
        """A region of an array in stored form, by its stored axes, in numpy. It must not split a scale or byte."""
        array = self._entry(name)
        for tensor in jax.tree.leaves(array):
            self._check_all(tensor)
        if not isinstance(array, QuantizedArray):
            return array.read(region)
        components = array.map_components(lambda tensor, spans: tensor.read(covered(region, spans, tensor.shape)))
        return components.reshaped(list(region_shape(region)), array.spans)

    def _decode(self, name: str, region: Region) -> np.ndarray:
        stored: Any = self._read(name, region)
        values = np.asarray(jax.tree.map(jnp.asarray, stored).materialize()).astype(np.float32)
        release()
        return values

    def _located(self, name: str) -> tuple[Path, int] | None:
        """The file and the offset of an array whose bytes are contiguous; None for any other array. Checks them."""
        array = self._entry(name)
        if isinstance(array, QuantizedArray) or len(array.shards) != 1:
            return None
        return located(self.view(array))

    def _check_all(self, tensor: Tensor) -> None:
        for shard in tensor.shards.values():
            self._check(shard)

    def check_codes(self, array: Any, name: str) -> None:
        """Raise a ValueError if a code of a quantized array is out of the range of its format."""
        if not isinstance(array, QuantizedArray) or array.code_range is None:
            return
        views = {component: self.view(getattr(array, component)) for component in array.packing}
        try:
            check_codes(array.replace(**views))
        except ValueError as error:
            raise ValueError(f"{self.path}: {name}: {error}") from None

    def view(self, tensor: Tensor) -> np.ndarray:
        """All of a tensor, checked; a view of the file if it has one shard."""
        self._check_all(tensor)
        return tensor.read(full_region(tensor.shape))

    def sharded(self, tensor: Tensor, sharding: NamedSharding) -> Any:
        """A tensor with a sharding. Only the regions of this process's devices are read."""
        if jax.dtypes.canonicalize_dtype(tensor.dtype) != tensor.dtype:
            return self.view(tensor)  # as `on_device` does
        indices = sharding.addressable_devices_indices_map(tensor.shape).values()
        wanted = {region_of(index, tensor.shape) for index in indices}
        for region, shard in tensor.shards.items():
            if sum(region_size(intersection(own, region)) for own in wanted) == region_size(region):  # read in full
                self._check(shard)
        return jax.make_array_from_callback(
            tensor.shape, sharding, lambda index: tensor.read(region_of(index, tensor.shape)), dtype=tensor.dtype
        )

    def _check(self, shard: Shard) -> None:
        if shard not in self._checked:
            if f"{_crc32(shard.data):08x}" != shard.crc32:
                raise shard.bad("is damaged: its bytes do not match its checksum")
            self._checked.add(shard)


class LowbitDir(LowbitFile):
    """A directory in the layout of Hugging Face, with its weights in a lowbit file.

    `other_files`: the files that are not weights, relative to the directory.
    """

    def __init__(self, path: str | os.PathLike[str]):
        folder = Path(path)
        super().__init__(folder / WEIGHTS)
        self.path, self.other_files = folder, other_files(folder)
        config = folder / "config.json"
        if config.is_file():
            try:
                self.metadata = {**self.metadata, "config": json.loads(config.read_bytes())}
            except ValueError as error:
                raise ValueError(f"{config} is not valid JSON: {error}.") from None


def on_device(view: np.ndarray) -> Any:
    """A jax array, or the numpy array itself if JAX would narrow it to 32 bits."""
    if jax.dtypes.canonicalize_dtype(view.dtype) != view.dtype:
        return view
    return jax.device_put(view)


def _crc32(data: np.ndarray) -> int:
    """The checksum of bytes, releasing the pages of a mapped file on the way."""
    crc32 = 0
    for start in range(0, data.size, _CHECKED):
        crc32 = zlib.crc32(data[start : start + _CHECKED].data, crc32)
        if data.size > _CHECKED:
            release()
    return crc32
