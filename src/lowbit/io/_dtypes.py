"""The dtypes of files: their names in safetensors and GGUF, and what they are in numpy."""

import ml_dtypes
import numpy as np

# numpy dtypes by their safetensors names. GGUF has the same names for the dtypes that it has.
# fmt: off
DTYPES: dict[str, np.dtype] = {name: np.dtype(dtype) for name, dtype in {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8",
    "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8", "C64": "<c8", "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz, "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
}.items()}
# fmt: on
# The safetensors name of each numpy dtype.
NAMES: dict[np.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
# The tensor types of GGUF that numpy can view without decoding.
GGUF_DTYPES = frozenset({"F64", "F32", "F16", "BF16", "I8", "I16", "I32", "I64"})


def dense_dtype(kind: str) -> np.dtype:
    """The dtype in which a tensor is planned and quantized: its own, or float32 if it is decoded or narrower.

    >>> dense_dtype("BF16").name, dense_dtype("nf4").name, dense_dtype("F8_E4M3").name
    ('bfloat16', 'float32', 'float32')
    """
    narrow = kind.startswith("F8_") or kind == "C64"
    return DTYPES["F32"] if narrow else DTYPES.get(kind, DTYPES["F32"])
