"""Reading safetensors files, and directories of them as Hugging Face has them.

Such files have no checksum, so nothing in them is believed: what does not fit is one `ValueError` that names the file
and the tensor. Tensors are read when asked for, from a memory map. Those that bitsandbytes saved in NF4 appear as the
one tensor that they are.

The `safetensors` package says what is a valid file. Before it does, the header is read here, since the package takes
35 times a header's size for a hostile one, believes the last of two entries of the same name, and does not name the
tensor in every error.
"""

import difflib
import math
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from lowbit.formats import QuantizedArray

from ._checks import are_counts, bad_tensor, can_be_a_shape, checked_field, checked_json
from ._maps import mapped
from .bitsandbytes import DequantizedWarning, SavedNF4, saved_parts

_DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
_MOST_AXES = 64  # of numpy
WEIGHTS, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")


class _Tensors(ABC):
    """What both readers are: tensors by name, of which some are saved in parts.

    - `dequantized`: of each tensor that `array` could not give as it is stored, the reason.
    """

    path: Path
    metadata: dict[str, Any]
    dequantized: dict[str, str]

    def __init__(self, path: Path, names: Iterable[str], metadata: dict[str, Any], strict: bool):
        self.path, self.metadata, self.dequantized = path, metadata, {}
        self._strict = strict
        names = tuple(names)
        self._parts = saved_parts(names, path)
        hidden = {part for name, parts in self._parts.items() for part in parts.values() if part != name}
        self._names = dict.fromkeys(name for name in names if name not in hidden)
        self._saved: dict[str, SavedNF4] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors."""
        return tuple(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}, {len(self)} tensors)"

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, as it is when dequantized."""
        return saved.shape if (saved := self._nf4(name)) else self._shard(name).entries[name].shape

    def nbytes(self, name: str) -> int:
        """How many bytes a tensor takes as it is stored, with the parts that belong to it."""
        stored = self._parts[name].values() if self._known(name) in self._parts else (name,)
        return sum(self._shard(part).view(part).nbytes for part in stored)

    def type(self, name: str) -> str:
        """What a tensor is stored as: `"nf4"`, or a dtype as safetensors names them, such as `"BF16"`."""
        return "nf4" if name in self._parts else self._shard(self._known(name)).entries[name].type

    def dense(self, name: str, dtype: Any = np.float32) -> np.ndarray:
        """The numbers of a tensor, decoded. Where nothing has to be decoded or cast, a read-only view of the file."""
        if saved := self._nf4(name):
            return saved.dense(dtype)
        with np.errstate(all="ignore"):  # what the dtype cannot hold becomes infinite
            return self._shard(name).view(name).astype(dtype, copy=False)

    def array(self, name: str) -> QuantizedArray | np.ndarray:
        """A tensor as it is stored, and never quantized again.

        - NF4: an `ArrayNF4` with blocks along the last axis. If blocks cross the rows there is none: a numpy array of
          the dtype that was quantized, a `DequantizedWarning`, and an entry in `dequantized`; `strict` makes it an
          error.
        - All others: a numpy array of that dtype, a read-only view of the file.
        """
        saved = self._nf4(name)
        if saved is None:
            return self._shard(name).view(name)
        if not saved.crosses_rows:
            return saved.array()
        reason = f"its blocks of {saved.block_size} cross its rows of {saved.shape[-1]}"
        if self._strict:
            raise ValueError(f"{self.path}: tensor {name!r} cannot be kept as it is stored: {reason}.")
        self.dequantized[name] = reason
        warnings.warn(
            f"{self.path}: tensor {name!r} is dequantized: {reason}.", category=DequantizedWarning, stacklevel=2
        )
        return saved.dense(saved.dtype)

    def _nf4(self, name: str) -> SavedNF4 | None:
        """A tensor that bitsandbytes saved, or None for any other."""
        if self._known(name) not in self._parts:
            return None
        if name not in self._saved:
            parts = {part: self._shard(stored).view(stored) for part, stored in self._parts[name].items()}
            self._saved[name] = SavedNF4.read(name, parts, self._shard(name).path)
        return self._saved[name]

    def _known(self, name: str) -> str:
        if name not in self._names:
            near = difflib.get_close_matches(name, self._names)
            raise KeyError(f"{self.path} has no tensor {name!r}." + (f" Near it: {', '.join(near)}." if near else ""))
        return name

    @abstractmethod
    def _shard(self, name: str) -> "_Shard":
        """The file that holds a tensor or a part of one."""


class SafetensorsFile(_Tensors):
    """A safetensors file: its metadata, and its tensors by name, each read when asked for.

        file = SafetensorsFile("model.safetensors")
        file.type("model.layers.0.mlp.up_proj.weight")      # 'nf4'
        file.array("model.layers.0.mlp.up_proj.weight")     # an ArrayNF4 with the file's own codes and scales
        file.dense("model.norm.weight")                     # float32, whatever the file stores

    Opening it reads the header and checks all of it. `strict`: what cannot be kept as it is stored is an error.
    """

    def __init__(self, path: str | os.PathLike[str], *, strict: bool = False):
        self._file = _Shard(Path(path))
        super().__init__(self._file.path, self._file.entries, self._file.metadata, strict)

    def _shard(self, name: str) -> "_Shard":
        return self._file


class HuggingFaceDir(_Tensors):
    """A directory with a model: `model.safetensors`, or a `model.safetensors.index.json` and the files it names.

        model = HuggingFaceDir("SmolLM2-135M")
        model.metadata["config"]["hidden_size"]             # 576
        model.dense("model.embed_tokens.weight")
        model.other_files                                   # (Path('config.json'), Path('tokenizer.json'), ...)

    A file with weights is opened when the first of its tensors is asked for, and held against the index then.
    """

    def __init__(self, path: str | os.PathLike[str], *, strict: bool = False):
        path = Path(path)
        # Names are looked up here and never given to the system: no name in an index can lead out of the directory.
        with os.scandir(path) as files:
            self._sizes = {file.name: file.stat().st_size for file in files if file.is_file()}
        self._shards: dict[str, _Shard] = {}
        metadata: dict[str, Any] = {}
        if "config.json" in self._sizes:
            metadata["config"] = self._json(path / "config.json")
        if WEIGHTS in self._sizes and INDEX_FILE in self._sizes:
            raise ValueError(f"{path} has both {WEIGHTS} and {INDEX_FILE}. Remove the one that is not the model.")
        if WEIGHTS in self._sizes:
            self._shards[WEIGHTS] = _Shard(path / WEIGHTS)
            self._files = dict.fromkeys(self._shards[WEIGHTS].entries, WEIGHTS)
        elif INDEX_FILE in self._sizes:
            index = self._json(path / INDEX_FILE)
            metadata["index"] = index.get("metadata")
            self._files = self._weight_map(path / INDEX_FILE, index)
        else:
            raise ValueError(f"{path} has neither {WEIGHTS} nor {INDEX_FILE}.")
        super().__init__(path, self._files, metadata, strict)

    @property
    def other_files(self) -> tuple[Path, ...]:
        """The files that are not weights, relative to the directory, without hidden ones."""
        return other_files(self.path)

    def _json(self, path: Path) -> dict[str, Any]:
        def bad(problem: str) -> ValueError:
            return ValueError(f"{path} {problem}. Fetch it once more.")

        return checked_json(path.read_bytes(), sum(self._sizes.values()), bad)

    def _weight_map(self, path: Path, index: dict[str, Any]) -> dict[str, str]:
        files = index.get("weight_map")
        if type(files) is not dict:
            raise ValueError(f"{path} has no weight_map from tensors to files.")
        for name, file in files.items():
            if type(file) is not str or file not in self._sizes:
                raise ValueError(f"{path} has tensor {name!r} in {file!r}, and there is no such file beside it.")
        return files

    def _shard(self, name: str) -> "_Shard":
        file = self._files[name]
        if file not in self._shards:
            shard, index = _Shard(self.path / file), self.path / INDEX_FILE
            listed = {tensor for tensor in self._files if self._files[tensor] == file}
            for tensor in sorted(listed ^ shard.entries.keys()):
                place = f"in {self._files[tensor]!r}" if tensor in self._files else "nowhere"
                has = "has" if tensor in shard.entries else "has no"
                raise ValueError(f"{shard.path} {has} tensor {tensor!r}, and {index} has it {place}.")
            self._shards[file] = shard
        return self._shards[file]


def other_files(path: Path) -> tuple[Path, ...]:
    """The files of a directory that are not weights, relative to it, without hidden ones."""
    found: list[Path] = []
    for folder, folders, files in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(folder, name) for name in files if not name.startswith(".") and not name.endswith(_WEIGHT_FILES)]
    return tuple(sorted(file.relative_to(path) for file in found))


class _Entry(NamedTuple):
    """Where a tensor lies in the file."""

    type: str
    shape: tuple[int, ...]
    start: int
    stop: int


class _Shard:
    """The tensors of one file as it has them."""

    def __init__(self, path: Path):
        def bad(problem: str) -> ValueError:
            return ValueError(f"{path} cannot be read as safetensors: it {problem}. Fetch or convert it once more.")

        self.path = path
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise bad(f"has {size} bytes, and a header of {length}")
            header = checked_json(file.read(length), size, bad)
        header.pop("__metadata__", None)
        self.entries = {name: _entry(path, name, entry, 8 + length, size) for name, entry in header.items()}
        try:
            with safe_open(path, framework="np") as opened:
                self.metadata: dict[str, Any] = opened.metadata() or {}
        except SafetensorError as error:
            raise bad(f"is refused by the safetensors package ({error})") from None
        self._data = mapped(path)

    def view(self, name: str) -> np.ndarray:
        entry = self.entries[name]
        stored = self._data[entry.start : entry.stop]
        if entry.type == "BOOL" and (stored > 1).any():
            raise bad_tensor(self.path, name, "is of type BOOL and has bytes other than 0 and 1")
        return stored.view(_DTYPES[entry.type]).reshape(entry.shape)


def _entry(path: Path, name: str, entry: Any, start: int, size: int) -> _Entry:
    """What a header says of a tensor; the data begins at `start` of `size` bytes."""

    def bad(problem: str) -> ValueError:
        return bad_tensor(path, name, problem)

    if type(entry) is not dict:
        raise bad("has no dtype, shape and data_offsets")
    kind = checked_field(entry, "dtype", lambda kind: type(kind) is str and kind in _DTYPES, bad)
    shape = tuple(
        checked_field(entry, "shape", lambda shape: are_counts(shape, _MOST_AXES) and can_be_a_shape(shape), bad)
    )
    first, last = checked_field(entry, "data_offsets", lambda two: are_counts(two, 2) and len(two) == 2, bad)
    if last - first != math.prod(shape) * _DTYPES[kind].itemsize:
        raise bad(f"lies from byte {first} to {last}, which is not what {kind} of {shape} takes")
    if start + last > size:
        raise bad(f"ends at byte {start + last}, and the file has {size}")
    return _Entry(kind, shape, start + first, start + last)
