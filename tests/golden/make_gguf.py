"""Make gguf_blocks.npz: blocks of every GGUF type whose bits lowbit keeps, quantized by llama.cpp itself.

    pip install --no-deps xllamacpp==2026.10.11549 gguf numpy
    python tests/golden/make_gguf.py

For each type `{type}/blocks` has the bytes of 4 rows of 512 weights, and `{type}/crc32` the CRC-32 of the float32
numbers that llama.cpp decodes them to. It is compiled C that the tests need not install.
"""

import ctypes
import importlib.util
import zlib
from pathlib import Path
from typing import Any

import numpy as np

TYPES = "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS TQ1_0 TQ2_0 MXFP4 NVFP4".split()
ROWS, COLUMNS = 4, 512


class _Traits(ctypes.Structure):
    """The start of ggml's `struct ggml_type_traits`."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("block", ctypes.c_int64),
        ("interleaved", ctypes.c_int64),
        ("size", ctypes.c_size_t),
        ("quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    )


def library() -> Any:
    spec = importlib.util.find_spec("xllamacpp")
    if spec is None or spec.origin is None:
        raise SystemExit("llama.cpp is not installed: pip install --no-deps xllamacpp")
    return ctypes.CDLL(str(next(Path(spec.origin).parent.glob("*.so"))))


def weights() -> np.ndarray:
    w = np.random.default_rng(0).standard_normal((ROWS, COLUMNS), dtype=np.float32) * np.float32(0.02)
    w[0, :64] = 0  # blocks of zeros
    w[1] += np.float32(0.05)  # far from symmetric
    w[2, 300] = 3  # a far outlier
    return w


def main() -> None:
    import gguf  # here, so that pytest can collect this module without it

    ggml, w = library(), weights()
    wide, pointer = ctypes.c_int64, ctypes.c_void_p
    ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
    ggml.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, wide, wide, wide, pointer]
    ggml.ggml_get_type_traits.restype = ctypes.POINTER(_Traits)
    importance, found = np.ones(COLUMNS, np.float32), {}
    for name in TYPES:
        kind = gguf.GGMLQuantizationType[name]
        block, size = gguf.GGML_QUANT_SIZES[kind]
        traits = ggml.ggml_get_type_traits(int(kind)).contents
        assert (traits.block, traits.size) == (block, size), name
        blocks, back = np.zeros((ROWS, COLUMNS // block * size), np.uint8), np.empty_like(w)
        args = (w.ctypes.data, blocks.ctypes.data, 0, ROWS, COLUMNS, importance.ctypes.data)
        assert ggml.ggml_quantize_chunk(int(kind), *args) == blocks.nbytes, name
        traits.to_float(blocks.ctypes.data, back.ctypes.data, back.size)
        found |= {f"{name}/blocks": blocks, f"{name}/crc32": np.uint32(zlib.crc32(back.tobytes()))}
        print(f"{name:7} {blocks.nbytes:5} bytes, RMS error {np.sqrt(np.mean((back - w) ** 2) / np.mean(w**2)):.4f}")
    np.savez_compressed(Path(__file__).parent / "gguf_blocks.npz", **found)


if __name__ == "__main__":
    main()
