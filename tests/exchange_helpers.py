"""What the tests of foreign files share: tensors, checkpoints, a Hugging Face directory and a GGUF file.

`fuzz.py` mutates the files of `seeds` too.
"""

import json
import shutil
import struct
import warnings
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType as ValueType
from gguf_helpers import KEPT as KEPT_TYPES
from gguf_helpers import golden, write
from safetensors.numpy import save_file

from lowbit.io import GGUFField, GGUFFile, HuggingFaceDir, SafetensorsFile
from lowbit.io.bitsandbytes import DequantizedWarning
from lowbit.io.readers.safetensors import _File

GOLDEN = {path.stem: path for path in sorted((Path(__file__).parent / "golden" / "bitsandbytes").iterdir())}
KEPT = [name for name in GOLDEN if not name.startswith("crossing")]
CROSSING = [name for name in GOLDEN if name.startswith("crossing")]
STATE = ".quant_state.bitsandbytes__nf4"


def weights(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32) * np.float32(0.02)


def same_bits(got: Any, want: Any) -> bool:
    got, want = np.asarray(got), np.asarray(want)
    return got.dtype == want.dtype and got.shape == want.shape and got.tobytes() == want.tobytes()


def stored(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a file as stored, with the components of quantized ones as tensors."""
    file = _File(path)
    return {name: file.view(name) for name in file.entries}


PLAIN = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
PLAIN += [ml_dtypes.float8_e8m0fnu, np.int64, np.int32, np.int16, np.int8, np.uint64, np.uint32, np.uint16, np.uint8]


def plain_tensors() -> dict[str, np.ndarray]:
    values = 64 * np.abs(weights(3, 5)) + 1
    tensors = {np.dtype(dtype).name: values.astype(dtype) for dtype in PLAIN}
    return tensors | {"bool": values > 2, "scalar": values[0, 0, ...], "empty": values[:0], "row": values[:, 0].copy()}


def raw_file(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    """A file with any contents; a header that is not bytes is written as JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


FIRST, SECOND, INDEX = (
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
)


FIRST, SECOND, INDEX = (
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
)


FIRST, SECOND, INDEX = (
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
)


def model_dir(path: Path) -> dict[str, np.ndarray]:
    """Write a sharded model, one of whose tensors has its components in two files; returns its dense values."""
    path.mkdir(exist_ok=True)
    nf4 = stored(GOLDEN["block64_float16_nested"])
    dense = {"norm": weights(8), "embed": weights(16, 8).astype(ml_dtypes.bfloat16), "w": nf4.pop("expected.w")}
    first = {"norm": dense["norm"], "w": nf4["w"], "w.quant_map": nf4["w.quant_map"]}
    second = {"embed": dense["embed"], **{name: component for name, component in nf4.items() if name[:2] == "w."}}
    del second["w.quant_map"]
    files = {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": second}
    for name, tensors in files.items():
        save_file(tensors, path / name)
    index = {"metadata": {"total_size": 1}, "weight_map": {t: name for name in files for t in files[name]}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text(json.dumps({"hidden_size": 8, "model_type": "llama"}))
    return dense


def gguf_fields() -> dict[str, GGUFField]:
    numbers = {"UINT8": 255, "INT8": -128, "UINT16": 65535, "INT16": -32768, "UINT32": 2**32 - 1, "INT32": -(2**31)}
    numbers |= {"UINT64": 2**64 - 1, "INT64": -(2**63), "FLOAT32": 0.5, "FLOAT64": 0.1, "BOOL": True}
    fields = {"general.architecture": GGUFField("STRING", "llama"), "text": GGUFField("STRING", "é\n")}
    fields |= {f"a.{name}": GGUFField(name, value) for name, value in numbers.items()}
    fields |= {f"several.{name}": GGUFField(f"[{name}]", [value] * 3) for name, value in numbers.items()}
    return fields | {"tokens": GGUFField("[STRING]", ["a", "", "ü"])}


def q8_0(*shape: int) -> np.ndarray:
    return gguf.quantize(weights(*shape), Type.Q8_0)


def bytes_of(file: GGUFFile, name: str) -> bytes:
    return file._bytes(file._entries[name]).tobytes()


def by_the_package(path: Path) -> GGUFFile:
    """A file in Q8_0 by gguf.GGUFWriter, with a vector and fields of every type."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, (kind, value) in gguf_fields().items():
        array = kind.startswith("[")
        types = (ValueType.ARRAY, ValueType[kind.strip("[]")]) if array else (ValueType[kind], None)
        if key != "general.architecture":
            writer.add_key_value(key, value, *types)
    writer.add_tensor("norm.weight", weights(5))
    for name, shape in {"a.weight": (6, 96), "b.weight": (2, 3, 64), "c.weight": (32,)}.items():
        writer.add_tensor(name, q8_0(*shape), raw_dtype=Type.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(path)


def seeds(tmp_path: Path) -> list[Path]:
    """Write files of every kind, which tests change in place one at a time and read with `reads`."""
    save_file(plain_tensors(), tmp_path / "plain.safetensors", metadata={"format": "np"})
    for name in ("block64_float16_nested", "crossing"):
        shutil.copyfile(GOLDEN[name], tmp_path / f"{name}.safetensors")
    model_dir(tmp_path / "model")
    by_the_package(tmp_path / "model.gguf")
    write(tmp_path / "types.gguf", {kind.name: (golden(kind)[:1], kind) for kind in KEPT_TYPES})
    files = ["plain.safetensors", "block64_float16_nested.safetensors", "crossing.safetensors"]
    files += ["model.gguf", "types.gguf"]
    files += [f"model/{name}" for name in ("config.json", INDEX, FIRST, SECOND)]
    return [tmp_path / name for name in files] + checkpoint_files(tmp_path)


def checkpoint_files(tmp_path: Path) -> list[Path]:
    """Write golden checkpoints of other projects, a directory each; returns their weights and configs."""
    from checkpoint_helpers import CHECKPOINTS, checkpoint  # which imports this module

    for name in CHECKPOINTS:
        checkpoint(name, tmp_path / name)
    return [tmp_path / name / file for name in CHECKPOINTS for file in ("model.safetensors", "config.json")]


def reads(path: Path) -> Any:
    """Everything in a file, or in its directory, both as stored and dense."""
    if path.name == INDEX or any((path.parent / name).exists() for name in (INDEX, "config.json")):
        file: Any = HuggingFaceDir(path.parent)
    else:
        file = GGUFFile(path) if path.suffix == ".gguf" else SafetensorsFile(path)
    found = {}
    for name in file:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DequantizedWarning)
            array, dense = file.array(name), file.dense(name)
        assert array.shape == dense.shape == file.shape(name) and file.type(name)
        found[name] = array, dense
    return file.metadata, found
