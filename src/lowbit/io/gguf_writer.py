"""Writing GGUF files, the format of llama.cpp: arrays in a layout of GGUF with their own bits, others in F16 or Q8_0.

The header is not written by `gguf.GGUFWriter`, which rejects empty arrays and guesses the types in nested arrays, so
that some files could be read but not written again. Where it can write a file, this module writes the same bytes. The
`gguf` package quantizes the numbers.
"""

import math
import os
import struct
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from lowbit.formats import QuantizedArray

from ._atomic import atomic_write
from ._dtypes import GGUF_DTYPES, NAMES
from ._gguf_blocks import BLOCK_TYPES, type_of
from .readers.gguf import ARRAY, NUMBERS, STRING, TYPES, GGUFField, package

_VERSION = 3
_MOST_AXES, _LONGEST_NAME = 4, 63  # GGML_MAX_DIMS; GGML_MAX_NAME with the zero at the end
_Q8_0 = BLOCK_TYPES["Q8_0"]
_KINDS = {name: kind for kind, name in TYPES.items()}
# llama.cpp's numbers for a file with most matrices in a type: the usual one first.
_FILE_TYPES = {
    **{"F32": (0,), "F16": (1,), "BF16": (32,), "Q4_0": (2,), "Q4_1": (3,), "Q5_0": (8,), "Q5_1": (9,), "Q8_0": (7,)},
    **{"Q2_K": (10, 21), "Q3_K": (12, 11, 13), "Q4_K": (15, 14), "Q5_K": (17, 16), "Q6_K": (18,), "IQ4_NL": (25,)},
    **{"IQ4_XS": (30,), "TQ1_0": (36,), "TQ2_0": (37,), "MXFP4": (38,), "NVFP4": (39,)},
}


def write_gguf(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    metadata: Mapping[str, Any],
    *,
    type: Literal["F16", "Q8_0"] = "F16",
) -> None:
    """Write a GGUF file: arrays in a layout of GGUF with their own bits, other matrices in `type`.

        file = GGUFFile("model.gguf")
        write_gguf("same.gguf", {name: file.array(name) for name in file}, file.fields)

    - `metadata`: the `fields` of a file are written with the types that they had in it. Values without a type are
      written as llama.cpp expects them: integers as UINT32 if they fit, arrays of integers as INT32, floats as FLOAT32.
    - An array in the layout of a GGUF type is written with the same bytes that it was read from: Q4_0, Q4_1, Q5_0,
      Q5_1, Q8_0, Q2_K to Q6_K, IQ4_NL, IQ4_XS, TQ2_0, MXFP4 and NVFP4. TQ1_0 is read as the same array as TQ2_0, and
      written as that.
    - Other matrices are dequantized, and written in F16, or quantized to Q8_0 by the gguf package; rows that are not a
      multiple of 32 are written in F16.
    - Vectors are written in F32, as llama.cpp expects them, and integers unchanged.
    - Each tensor is taken from the mapping two times, for its type and for its bytes, and none is kept.

    The file is written to a temporary file, which replaces `path` once it is on the disk.
    """
    if type not in ("F16", "Q8_0"):
        raise ValueError(f"type={type!r} cannot be written. Known types: F16, Q8_0.")
    gguf = package()
    fields = {key: _field(key, value) for key, value in metadata.items()}
    kinds = {name: gguf.GGMLQuantizationType[written_type(name, tensors[name], type)] for name in tensors}
    alignment = _alignment(fields)
    header = bytearray(b"GGUF" + struct.pack("<IQQ", _VERSION, len(kinds), len(fields)))
    for key, field in fields.items():
        header += _text(key) + _packed(key, field)
    offset = 0
    for name, kind in kinds.items():
        shape = tensors[name].shape
        block, size = gguf.GGML_QUANT_SIZES[kind]
        header += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, offset)
        end = offset + math.prod(shape) // block * size
        offset = end + -end % alignment
    with atomic_write(path) as staged, open(staged, "wb") as file:
        file.write(header + bytes(-len(header) % alignment))
        for name, kind in kinds.items():
            data = _data(gguf, name, tensors[name], kind)
            file.write(data.data)
            file.write(bytes(-data.nbytes % alignment))


def file_type(tensors: Mapping[str, Any], type: str, known: Any = None) -> int:
    """llama.cpp's number for the type of most matrices of a file; `known` if it stands for the same type."""
    types = Counter(written_type(name, array, type) for name, array in tensors.items() if len(array.shape) > 1)
    numbers = _FILE_TYPES.get(types.most_common(1)[0][0] if types else "F32", _FILE_TYPES["F32"])
    return known if known in numbers else numbers[0]


def _text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


# --- metadata


def _alignment(fields: Mapping[str, GGUFField]) -> int:
    alignment = fields["general.alignment"].value if "general.alignment" in fields else 32
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"The field 'general.alignment' is {alignment!r}, which is not a power of two.")
    return alignment


def _field(key: str, value: Any) -> GGUFField:
    """A value with its type in the file: for integers, the first type that holds them."""
    if isinstance(value, GGUFField):
        return value
    several = isinstance(value, list | tuple)
    elements = value if several else [value]
    found = {type(element) for element in elements}
    if found == {int}:
        whole = ("INT32", "UINT32", "INT64", "UINT64") if several else ("UINT32", "INT32", "UINT64", "INT64")
        low, high = min(elements), max(elements)
        names = [name for name in whole if np.iinfo(name.lower()).min <= low and high <= np.iinfo(name.lower()).max]
    else:
        names = [name for kind, name in ((str, "STRING"), (bool, "BOOL"), (float, "FLOAT32")) if found == {kind}]
    if not names:
        what = " and ".join(sorted(kind.__name__ for kind in found)) or "nothing"
        raise ValueError(
            f"The field {key!r} is {'an array ' * several}of {what}, for which GGUF has no type. "
            "Pass a string, a number, a list of either, or a GGUFField."
        )
    return GGUFField(f"[{names[0]}]" if several else names[0], value)


def _packed(key: str, field: GGUFField) -> bytes:
    """The bytes of a field: the number of its type, and the value."""
    several = field.type.startswith("[")
    kind = _KINDS.get(field.type.strip("[]"))
    if kind is None or (kind == ARRAY) > several:
        raise ValueError(f"The field {key!r} is of the type {field.type!r}, which GGUF does not have.")
    values = field.value if several else [field.value]
    start = struct.pack("<IIQ", ARRAY, kind, len(values)) if several else struct.pack("<I", kind)
    if kind == STRING:
        return start + b"".join(map(_text, values))
    if kind == ARRAY:
        # Elements of an array omit the number of their type.
        return start + b"".join(_packed(key, GGUFField(*element))[4:] for element in values)
    try:
        return start + struct.pack(f"<{len(values)}{NUMBERS[kind]}", *values)
    except (struct.error, OverflowError) as error:
        raise ValueError(f"The field {key!r} does not fit its type {field.type}: {error}.") from None


# --- tensors


def written_type(name: str, array: Any, type: str) -> str:
    """The name of the type that a tensor is written in; `type` is that of matrices without a layout of GGUF."""
    if len(name.encode()) > _LONGEST_NAME:
        raise ValueError(f"Tensor {name!r}: llama.cpp supports names of up to {_LONGEST_NAME} bytes.")
    if len(array.shape) > _MOST_AXES:
        raise ValueError(f"Tensor {name!r} has the shape {tuple(array.shape)}; GGUF supports up to {_MOST_AXES} axes.")
    if isinstance(array, QuantizedArray) and (stored := type_of(array)):
        return stored
    if array.dtype.kind == "i" and NAMES.get(array.dtype) in GGUF_DTYPES:
        return NAMES[array.dtype]
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"Tensor {name!r} is of dtype {array.dtype}, which GGUF does not have.")
    if len(array.shape) < 2:
        return "F32"
    return type if array.shape[-1] % _Q8_0.elements == 0 else "F16"


def _data(gguf: Any, name: str, array: Any, kind: Any) -> np.ndarray:
    """The bytes of a tensor."""
    if isinstance(array, QuantizedArray):
        if type_of(array) == kind.name:
            return BLOCK_TYPES[kind.name].write(array)
        array = array.replace(dtype=np.dtype(np.float32)).materialize()  # without rounding to its dtype first
    array = np.asarray(array)
    if kind.name not in ("F32", "F16", "Q8_0") or not array.size:
        return np.asarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8)
    with np.errstate(all="ignore"):
        stored = gguf.quantize(np.asarray(array, np.float32, order="C"), kind)
    if kind.name == "Q8_0":
        lost = not np.isfinite(stored.view(_Q8_0.dtype)["scales"]).all()
    else:
        lost = not np.array_equal(np.isfinite(stored), np.isfinite(array))
    if lost:
        finite = array[np.isfinite(array)]
        raise ValueError(
            f"Tensor {name!r} has values that {kind.name} cannot hold: {array.size - finite.size} of {array.size} are "
            f"NaN or infinite, the others go up to {np.abs(finite).max(initial=0)}."
        )
    return stored.reshape(-1).view(np.uint8)
