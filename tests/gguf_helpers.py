"""What the tests of GGUF files share: tensors of every type, files with them, and blocks that llama.cpp made."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from lowbit.io import GGUFFile

GOLDEN = dict(np.load(Path(__file__).parent / "golden" / "gguf_blocks.npz"))
KEPT = [Type[name.removesuffix("/blocks")] for name in GOLDEN if name.endswith("/blocks")]


def weights(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def stored(type: Type, rows: int = 6, columns: int = 512) -> np.ndarray:
    """A tensor of a type: quantized weights, or arbitrary bytes if the package cannot quantize to it."""
    try:
        return gguf.quantize(weights(rows, columns), type)
    except NotImplementedError:
        block, size = gguf.GGML_QUANT_SIZES[type]
        return np.random.default_rng(1).integers(0, 256, (rows, columns // block * size), np.uint8)


def write(path: Path, tensors: dict[str, tuple[np.ndarray, Type]], **fields: Any) -> GGUFFile:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in fields.items():
        add = {str: writer.add_string, int: writer.add_int32, list: writer.add_array, float: writer.add_float32}
        add[type(value)](key, value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=None if data.dtype == np.float32 else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(path)


def with_codebook(rows: int, columns: int) -> np.ndarray:
    """A tensor of IQ2_XS, whose codes refer to a codebook, with small numbers."""
    data = stored(Type.IQ2_XS, rows, columns)
    data.reshape(-1, 74)[:, :2] = np.float16(0.01).reshape(1).view(np.uint8)
    return data


def golden(type: Type) -> np.ndarray:
    """Four rows of 512 weights that llama.cpp quantized."""
    return GOLDEN[f"{type.name}/blocks"]


def same_bits(got: Any, want: Any) -> bool:
    got, want = np.ascontiguousarray(got), np.ascontiguousarray(want)
    return got.dtype == want.dtype and got.shape == want.shape and got.tobytes() == want.tobytes()
