"""Writing GGUF files, the format of llama.cpp, in F16 and Q8_0.

The header is written here rather than by `gguf.GGUFWriter`, which refuses an empty array and guesses the types inside
of arrays of arrays: a file that was read could not be written again. Where that can write a file, this writes the
same bytes. How numbers are quantized is the `gguf` package's to say.
"""

import math
import os
import struct
from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from lowbit.formats import Array8B, QuantizedArray

from ._atomic import written_aside
from .gguf import ARRAY, NUMBERS, Q8_0, STRING, TYPES, GGUFField, package

_VERSION = 3
_MOST_AXES, _LONGEST_NAME = 4, 63  # GGML_MAX_DIMS; GGML_MAX_NAME with the zero at the end
_BLOCK = Q8_0["codes"].shape[0]
_KINDS = {name: kind for kind, name in TYPES.items()}
_INTEGERS = {"int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64"}


def write_gguf(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    metadata: Mapping[str, Any],
    *,
    type: Literal["F16", "Q8_0"] = "F16",
) -> None:
    """Write a GGUF file with its matrices in `type`.

        file = GGUFFile("model.gguf")
        write_gguf("other.gguf", {name: file.array(name) for name in file}, file.fields, type="Q8_0")

    - `metadata`: the `fields` of a file are written with the types they had in it. Of values without a type, whole
      numbers become UINT32 where they can and arrays of them INT32, as llama.cpp wants them, and others FLOAT32.
    - Q8_0: an `Array8B` as read from Q8_0 is written as the same bytes. Other arrays are dequantized and quantized by
      the gguf package; rows that are no multiple of 32 are written in F16.
    - Vectors are written in F32, as llama.cpp wants them, and integers as they are.
    - Each tensor is taken from the mapping twice, to see what it is and to write it, and none is kept.

    The file is written aside and takes the place of `path` when all of it is on the disk.
    """
    if type not in ("F16", "Q8_0"):
        raise ValueError(f"type={type!r} cannot be written. Known types: F16, Q8_0.")
    gguf = package()
    fields = {key: _field(key, value) for key, value in metadata.items()}
    kinds = {name: gguf.GGMLQuantizationType[_kind(name, tensors[name], type)] for name in tensors}
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
    with written_aside(path) as aside, open(aside, "wb") as file:
        file.write(header + bytes(-len(header) % alignment))
        for name, kind in kinds.items():
            data = _data(gguf, name, tensors[name], kind)
            file.write(data.data)
            file.write(bytes(-data.nbytes % alignment))


def _text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


# --- metadata


def _alignment(fields: Mapping[str, GGUFField]) -> int:
    alignment = fields["general.alignment"].value if "general.alignment" in fields else 32
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"The field 'general.alignment' is {alignment!r}, and must be a power of two.")
    return alignment


def _field(key: str, value: Any) -> GGUFField:
    """A value with the type that it is to have: of the whole numbers, the first in which it fits."""
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
            f"The field {key!r} is {'an array ' * several}of {what}, for which GGUF has no one type. "
            "Pass text, numbers, a list of either, or a GGUFField."
        )
    return GGUFField(f"[{names[0]}]" if several else names[0], value)


def _packed(key: str, field: GGUFField) -> bytes:
    """A field as it lies in the file: the number of its type, and the value."""
    several = field.type.startswith("[")
    kind = _KINDS.get(field.type.strip("[]"))
    if kind is None or (kind == ARRAY) > several:
        raise ValueError(f"The field {key!r} is of the type {field.type!r}, which GGUF does not have.")
    values = field.value if several else [field.value]
    start = struct.pack("<IIQ", ARRAY, kind, len(values)) if several else struct.pack("<I", kind)
    if kind == STRING:
        return start + b"".join(map(_text, values))
    if kind == ARRAY:
        # As elements they go without the number that says that each is an array.
        return start + b"".join(_packed(key, GGUFField(*element))[4:] for element in values)
    try:
        return start + struct.pack(f"<{len(values)}{NUMBERS[kind]}", *values)
    except (struct.error, OverflowError) as error:
        raise ValueError(f"The field {key!r} does not fit its type {field.type}: {error}.") from None


# --- tensors


def _kind(name: str, array: Any, type: str) -> str:
    """The name of the type in which a tensor is written."""
    if len(name.encode()) > _LONGEST_NAME:
        raise ValueError(f"Tensor {name!r}: llama.cpp knows no names longer than {_LONGEST_NAME} bytes.")
    if len(array.shape) > _MOST_AXES:
        raise ValueError(f"Tensor {name!r} has the shape {tuple(array.shape)}; GGUF has at most {_MOST_AXES} axes.")
    if type == "Q8_0" and is_q8_0(array):
        return "Q8_0"
    if array.dtype.name in _INTEGERS:
        return _INTEGERS[array.dtype.name]
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"Tensor {name!r} is of dtype {array.dtype}, which GGUF does not have.")
    if len(array.shape) < 2:
        return "F32"
    return type if array.shape[-1] % _BLOCK == 0 else "F16"


def is_q8_0(array: Any) -> bool:
    """Whether its codes and scales are those of Q8_0, as are all that were read from there."""
    if not isinstance(array, Array8B) or array.axis != -1 or array.block_size != _BLOCK:
        return False
    scales = np.asarray(array.scale, np.float32)
    with np.errstate(over="ignore"):
        same = scales.astype(np.float16).astype(np.float32).view(np.uint32) == scales.view(np.uint32)
    return array.shape[-1] % _BLOCK == 0 and bool(same.all())


def _data(gguf: Any, name: str, array: Any, kind: Any) -> np.ndarray:
    """The bytes of a tensor."""
    if kind.name == "Q8_0" and is_q8_0(array):
        blocks = np.empty(math.prod(array.shape) // _BLOCK, Q8_0)
        blocks["scale"] = np.asarray(array.scale).reshape(-1)
        blocks["codes"] = np.asarray(array.weight).reshape(-1, _BLOCK)
        return blocks.view(np.uint8)
    if isinstance(array, QuantizedArray):
        array = array.replace(dtype=np.dtype(np.float32)).materialize()  # without rounding to its dtype in between
    array = np.asarray(array)
    if kind.name not in ("F32", "F16", "Q8_0") or not array.size:
        return np.asarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8)
    with np.errstate(all="ignore"):
        stored = gguf.quantize(np.asarray(array, np.float32, order="C"), kind)
    if kind.name == "Q8_0":
        lost = not np.isfinite(stored.view(Q8_0)["scale"]).all()
    else:
        lost = not np.array_equal(np.isfinite(stored), np.isfinite(array))
    if lost:
        finite = array[np.isfinite(array)]
        raise ValueError(
            f"Tensor {name!r} has values that {kind.name} cannot hold: {array.size - finite.size} of {array.size} are "
            f"NaN or infinite, the others go up to {np.abs(finite).max(initial=0)}."
        )
    return stored.reshape(-1).view(np.uint8)
