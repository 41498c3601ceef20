"""Reading safetensors files, and Hugging Face directories of them.

Such files have no checksums and are not trusted: whatever is inconsistent raises one `ValueError` that names the file
and the tensor. Tensors are read on request, from a memory map. The tensors of a quantized weight (`io.checkpoints`)
appear as one, under the name and shape that the weight has in a dense checkpoint.

The `safetensors` package decides what a valid file is. The header is parsed here first, since the package needs 35
times the size of a hostile header, accepts duplicate names, and does not name the tensor in every error.
"""

import dataclasses
import math
import os
import warnings
from abc import abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from .._checks import are_counts, bad_tensor, can_be_a_shape, checked_field, checked_json
from .._chunks import Chunked
from .._directory import INDEX_FILE, WEIGHTS
from .._dtypes import DTYPES
from .._maps import mapped
from ..bitsandbytes import DequantizedWarning, Saved4Bit
from ..checkpoints import CONFIGS, Settings, Tensors, Weight, detect, refusal, settings_of
from ..container._header import SHA256
from ._base import Reader
from ._weights import weight_chunks

_MOST_AXES = 64  # the limit of numpy
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")


class _SafetensorsReader(Reader):
    """Tensors of safetensors files. The tensors of a quantized weight appear as one.

    - `dequantized`: for each tensor that `array` could not give with its stored bits, the reason.
    """

    dequantized: dict[str, str]

    def __init__(self, path: Path, names: Iterable[str], metadata: dict[str, Any], strict: bool, settings: Settings):
        listed = dict.fromkeys(names)
        self.dequantized, self._strict = {}, strict
        self.refusal = refusal(settings, listed)
        self._weights = {} if self.refusal else detect(settings, listed)
        self._read: dict[str, Weight | Saved4Bit] = {}
        owners = {stored: name for name, found in self._weights.items() for stored in found.stored.values()}
        super().__init__(path, metadata, dict.fromkeys(owners.get(name, name) for name in listed))

    @abstractmethod
    def _file(self, name: str) -> "_File":
        """The file that holds a tensor or a component of one."""

    def shape(self, name: str) -> tuple[int, ...]:
        return weight.shape if (weight := self._weight(name)) else self._file(name).entries[name].shape

    def nbytes(self, name: str) -> int:
        self._entry(name)
        stored = self._weights[name].stored.values() if name in self._weights else (name,)
        return sum(self._file(tensor).view(tensor).nbytes for tensor in stored)

    def type(self, name: str) -> str:
        return weight.format if (weight := self._weight(name)) else self._file(name).entries[name].type

    def dense(self, name: str, dtype: Any = np.float32) -> np.ndarray:
        if weight := self._weight(name):
            return weight.dense(dtype)
        with np.errstate(all="ignore"):  # values beyond the range of the dtype become infinite
            return self._file(name).view(name).astype(dtype, copy=False)

    def array(self, name: str) -> Any:
        """A tensor with the bits that the file stores.

        - A quantized weight: an array of its format. If no format has its bits, such as those of NF4 whose blocks cross
          rows, it is dequantized to the dtype that was quantized, with a `DequantizedWarning` and an entry in
          `dequantized`; with `strict` that raises.
        - All others: a numpy array, a read-only view of the file.
        """
        weight = self._weight(name)
        if weight is None:
            return self._file(name).view(name)
        if not weight.problem:
            return weight.array()
        if self._strict:
            raise ValueError(f"{self.path}: tensor {name!r} cannot keep its stored bits: {weight.problem}.")
        self.dequantized[name] = weight.problem
        warnings.warn(
            f"{self.path}: tensor {name!r} is dequantized: {weight.problem}.", category=DequantizedWarning, stacklevel=2
        )
        return weight.dense(weight.dtype)

    def chunks(self, name: str, *, as_stored: bool) -> Chunked:
        weight = self._weight(name)
        if not isinstance(weight, Weight) or (as_stored and weight.order is not None):
            return super().chunks(name, as_stored=as_stored)
        return weight_chunks(weight, as_stored=as_stored)

    def _weight(self, name: str) -> Weight | Saved4Bit | None:
        """A quantized weight, or None for any other tensor."""
        self._entry(name)
        if name not in self._weights:
            return None
        if name not in self._read:
            stored = self._weights[name].stored
            views = {role: self._file(tensor).view(tensor) for role, tensor in stored.items()}
            path = self._file(next(iter(stored.values()))).path
            self._read[name] = self._weights[name].read(Tensors(path, name, views))
        return self._read[name]


class SafetensorsFile(_SafetensorsReader):
    """A safetensors file: its metadata, and its tensors by name, each read on request.

        file = SafetensorsFile("model.safetensors")
        file.type("model.layers.0.mlp.up_proj.weight")      # 'nf4'
        file.array("model.layers.0.mlp.up_proj.weight")     # an ArrayNF4 with the file's own codes and scales
        file.dense("model.norm.weight")                     # float32, whatever the file stores

    Opening it reads and checks its header. `strict`: raise if a tensor cannot be kept with its stored bits.
    """

    def __init__(self, path: str | os.PathLike[str], *, strict: bool = False):
        self._only = _File(Path(path))
        path, metadata = self._only.path, self._only.metadata
        super().__init__(path, self._only.entries, metadata, strict, settings_of(path, {}, metadata))

    def _file(self, name: str) -> "_File":
        return self._only


class HuggingFaceDir(_SafetensorsReader):
    """A directory with a model: `model.safetensors`, or a `model.safetensors.index.json` and the files it names.

        model = HuggingFaceDir("SmolLM2-135M")
        model.metadata["config"]["hidden_size"]             # 576
        model.dense("model.embed_tokens.weight")
        model.other_files                                   # (Path('config.json'), Path('tokenizer.json'), ...)

    A file with weights is opened and checked against the index when the first of its tensors is requested.
    """

    def __init__(self, path: str | os.PathLike[str], *, strict: bool = False):
        path = Path(path)
        # Names in an index are looked up in this listing, so none can lead out of the directory.
        with os.scandir(path) as files:
            self._sizes = {file.name: file.stat().st_size for file in files if file.is_file()}
        self._opened: dict[str, _File] = {}
        metadata: dict[str, Any] = {}
        configs = {name: self._json(path / name) for name in CONFIGS if name in self._sizes}
        if "config.json" in configs:
            metadata["config"] = configs["config.json"]
        if WEIGHTS in self._sizes and INDEX_FILE in self._sizes:
            raise ValueError(f"{path} has both {WEIGHTS} and {INDEX_FILE}. Remove the one that is not the model.")
        if WEIGHTS in self._sizes:
            self._opened[WEIGHTS] = _File(path / WEIGHTS)
            self._file_of = dict.fromkeys(self._opened[WEIGHTS].entries, WEIGHTS)
        elif INDEX_FILE in self._sizes:
            index = self._json(path / INDEX_FILE)
            metadata["index"] = index.get("metadata")
            self._file_of = self._weight_map(path / INDEX_FILE, index)
        else:
            others = sorted(name for name in self._sizes if name.endswith(_PICKLES))
            advice = (
                f" {others[0]} may run any code when it is opened: save the model as safetensors." if others else ""
            )
            raise ValueError(f"{path} has neither {WEIGHTS} nor {INDEX_FILE}.{advice}")
        settings = settings_of(path, configs, {})
        if settings.method == "torchao":  # which says in its files what each tensor is
            self.path = path
            files = {file: name for name, file in self._file_of.items()}
            about = {key: value for name in files.values() for key, value in self._file(name).metadata.items()}
            settings = dataclasses.replace(settings, metadata=about)
        super().__init__(path, self._file_of, metadata, strict, settings)

    @property
    def other_files(self) -> tuple[Path, ...]:
        """The files that are not weights, relative to the directory, without hidden ones."""
        return other_files(self.path)

    def _json(self, path: Path) -> dict[str, Any]:
        def bad(problem: str) -> ValueError:
            return ValueError(f"{path} {problem}. Download it again.")

        return checked_json(path.read_bytes(), sum(self._sizes.values()), bad)

    def _weight_map(self, path: Path, index: dict[str, Any]) -> dict[str, str]:
        files = index.get("weight_map")
        if type(files) is not dict:
            raise ValueError(f"{path} has no weight_map from tensors to files.")
        for name, file in files.items():
            if type(file) is not str or file not in self._sizes:
                raise ValueError(f"{path} has tensor {name!r} in {file!r}, which does not exist in the same directory.")
        return files

    def _file(self, name: str) -> "_File":
        file = self._file_of[name]
        if file not in self._opened:
            opened, index = _File(self.path / file), self.path / INDEX_FILE
            listed = {tensor for tensor in self._file_of if self._file_of[tensor] == file}
            for tensor in sorted(listed ^ opened.entries.keys()):
                place = f"in {self._file_of[tensor]!r}" if tensor in self._file_of else "nowhere"
                has = "has" if tensor in opened.entries else "has no"
                raise ValueError(f"{opened.path} {has} tensor {tensor!r}, but {index} lists it {place}.")
            self._opened[file] = opened
        return self._opened[file]


def other_files(path: Path) -> tuple[Path, ...]:
    """The files of a directory that are not weights, relative to it, without hidden ones."""
    found: list[Path] = []
    for folder, folders, files in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(folder, name) for name in files if not name.startswith(".") and not name.endswith(_WEIGHT_FILES)]
    return tuple(sorted(file.relative_to(path) for file in found))


class _Entry(NamedTuple):
    """A tensor in the header of a file: bytes `start` to `stop` of the file."""

    type: str
    shape: tuple[int, ...]
    start: int
    stop: int


class _File:
    """One safetensors file: its header, and views of its tensors."""

    def __init__(self, path: Path):
        def bad(problem: str) -> ValueError:
            return ValueError(f"{path} cannot be read as safetensors: it {problem}. Download or convert it again.")

        self.path = path
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise bad(f"has {size} bytes, and its header would have {length}")
            header = checked_json(file.read(length), size, bad)
        header.pop("__metadata__", None)
        self.entries = {name: _entry(path, name, entry, 8 + length, size) for name, entry in header.items()}
        try:
            with safe_open(path, framework="np") as opened:
                self.metadata: dict[str, Any] = opened.metadata() or {}
        except SafetensorError as error:
            raise bad(f"is rejected by the safetensors package ({error})") from None
        # Without this check a damaged lowbit file would open as plain safetensors, with a tensor for each component.
        if SHA256 in self.entries or any(key.startswith("lowbit.") for key in self.metadata):
            raise ValueError(f"{path} is a damaged lowbit file: its header was changed. Download or convert it again.")
        self._data = mapped(path)

    def view(self, name: str) -> np.ndarray:
        entry = self.entries[name]
        stored = self._data[entry.start : entry.stop]
        if entry.type == "BOOL" and (stored > 1).any():
            raise bad_tensor(self.path, name, "is of type BOOL and has bytes other than 0 and 1")
        return stored.view(DTYPES[entry.type]).reshape(entry.shape)


def _entry(path: Path, name: str, entry: Any, start: int, size: int) -> _Entry:
    """The checked entry of a tensor; the data begins at byte `start` of a file of `size` bytes."""

    def bad(problem: str) -> ValueError:
        return bad_tensor(path, name, problem)

    if type(entry) is not dict:
        raise bad("has no dtype, shape and data_offsets")
    kind = checked_field(entry, "dtype", lambda kind: type(kind) is str and kind in DTYPES, bad)
    shape = tuple(
        checked_field(entry, "shape", lambda shape: are_counts(shape, _MOST_AXES) and can_be_a_shape(shape), bad)
    )
    first, last = checked_field(entry, "data_offsets", lambda two: are_counts(two, 2) and len(two) == 2, bad)
    if last - first != math.prod(shape) * DTYPES[kind].itemsize:
        raise bad(f"spans bytes {first} to {last}, which is not the size of {kind} {shape}")
    if start + last > size:
        raise bad(f"ends at byte {start + last} of a file of {size}")
    return _Entry(kind, shape, start + first, start + last)
