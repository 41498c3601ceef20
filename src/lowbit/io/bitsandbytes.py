"""NF4 checkpoints of bitsandbytes, as it and transformers save them.

bitsandbytes quantizes the numbers of a tensor in a row, whatever its shape. A tensor `w` of n numbers is saved as

    w                                uint8 (n / 2, 1): two codes a byte, the first in the high nibble
    w.absmax                         float32, one for each block; nested: uint8, codes of these
    w.quant_map                      float32 (16,): the levels
    w.nested_absmax                  float32, one for each 256 codes of scales
    w.nested_quant_map               float32 (256,): the dynamic map
    w.quant_state.bitsandbytes__nf4  JSON in uint8: quant_type, blocksize, dtype, shape; nested_blocksize,
                                     nested_dtype, nested_offset

Where no block goes on in the next row, these are the parts of an `ArrayNF4` with blocks along its last axis.
"""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from lowbit.formats import ArrayNF4, QuantizedArray, pack, unpack
from lowbit.formats.nf4 import GROUP, LEVELS, dynamic_map

from ._checks import OptionNeeded, are_counts, bad_tensor, can_be_a_shape, checked_field, checked_json

_STATE = ".quant_state.bitsandbytes__"
_NESTED = ("nested_absmax", "nested_quant_map")
_PARTS = ("absmax", "quant_map", *_NESTED)
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # those that bitsandbytes has
_DTYPES = {np.dtype(d).name: np.dtype(d) for d in (np.float32, np.float16, ml_dtypes.bfloat16)}
_MOST_AXES = 8
_LARGEST = float(np.finfo(np.float32).max)
_CHUNK = 1 << 18  # elements decoded at a time, which stay in the cache
_PAIRS = LEVELS[np.arange(256)[:, None] >> np.array([4, 0]) & 15]  # the two levels of each byte


class DequantizedWarning(UserWarning):
    """A tensor was dequantized where its stored bits were asked for, since there is no array that could hold them."""


def saved_parts(names: Iterable[str], path: str | os.PathLike[str]) -> dict[str, dict[str, str]]:
    """Of each tensor that bitsandbytes saved, the names under which its parts are among `names`, the codes as `""`.

    >>> saved_parts(["b", "w", "w.absmax", "w.quant_map", "w.quant_state.bitsandbytes__nf4"], "model.safetensors")
    {'w': {'quant_state': 'w.quant_state.bitsandbytes__nf4', '': 'w', 'absmax': 'w.absmax', 'quant_map': 'w.quant_map'}}
    """
    every = dict.fromkeys(names)
    saved: dict[str, dict[str, str]] = {}
    for name in every:
        base, found, kind = name.rpartition(_STATE)
        if not found:
            continue
        if kind != "nf4":
            raise bad_tensor(path, base, f"is of bitsandbytes' type {kind!r}, and 'nf4' is the one that can be read")
        parts = {"": base} | {part: f"{base}.{part}" for part in _PARTS}
        saved[base] = {"quant_state": name} | {part: name for part, name in parts.items() if name in every}
        needed = parts if any(part in saved[base] for part in _NESTED) else parts.keys() - _NESTED
        if missing := sorted(parts[part] for part in needed if part not in saved[base]):
            raise bad_tensor(path, base, f"lacks {', '.join(map(repr, missing))}")
    for name in every:
        base, _, part = name.rpartition(".")
        if part in _PARTS and base in every and base not in saved:
            raise bad_tensor(path, base, f"lacks {base + _STATE + 'nf4'!r}, and {name!r} is there")
    return saved


class _Nested(NamedTuple):
    """What the codes of scales are decoded with."""

    absmax: np.ndarray
    quant_map: np.ndarray
    offset: np.float32


@dataclasses.dataclass(frozen=True)
class SavedNF4:
    """A tensor as bitsandbytes saved it, all in a row.

    - `packed` holds ceil(n / 2) bytes, `absmax` one scale for each block of `block_size`, the last of which may be
      short, for the n numbers of `shape`.
    - `nested`: `absmax` is codes, and `nested.absmax` has one scale for each 256 of them.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    block_size: int
    packed: np.ndarray
    absmax: np.ndarray
    nested: _Nested | None

    @classmethod
    def read(cls, name: str, parts: Mapping[str, np.ndarray], path: str | os.PathLike[str]) -> Self:
        """From the parts by the names in `saved_parts`, each held against all others."""

        def bad(problem: str) -> ValueError:
            return bad_tensor(path, name, problem)

        def checked(part: str, dtype: Any, size: int) -> np.ndarray:
            array = parts[part]
            if array.dtype != dtype or array.size != size:
                raise bad(f"has as {part} {array.size} elements of {array.dtype}, not {size} of {np.dtype(dtype)}")
            return array.reshape(-1)

        def field(key: str, fits: Callable[[Any], bool]) -> Any:
            return checked_field(state, key, fits, lambda problem: bad(f"{problem} in its quant_state"))

        text = parts["quant_state"]
        state = checked_json(checked("quant_state", np.uint8, text.size).tobytes(), text.size, bad)
        field("quant_type", lambda kind: kind == "nf4")
        block = field("blocksize", lambda block: type(block) is int and block in _BLOCKS)
        dtype = _DTYPES[field("dtype", lambda dtype: type(dtype) is str and dtype in _DTYPES)]
        shape = tuple(field("shape", lambda shape: are_counts(shape, _MOST_AXES) and shape and can_be_a_shape(shape)))
        size = math.prod(shape)
        # Stored as another dtype (bnb_4bit_quant_storage), the bytes are the same.
        packed = parts[""].reshape(-1).view(np.uint8)
        if packed.size != -(-size // 2):
            raise bad(f"has {packed.size} bytes of codes, and its shape {shape} takes {-(-size // 2)}")
        if checked("quant_map", np.float32, 16).tobytes() != LEVELS.tobytes():
            raise bad("has a quant_map other than the levels of NF4")
        blocks = -(-size // block)
        nested = None
        if "nested_absmax" in parts:
            field("nested_blocksize", lambda block: type(block) is int and block == GROUP)
            field("nested_dtype", lambda dtype: dtype == "float32")
            offset = field("nested_offset", lambda x: type(x) in (int, float) and not abs(x) > _LARGEST)
            quant_map = checked("nested_quant_map", np.float32, 256)
            # Other processors space it a few ulps apart.
            if not np.allclose(quant_map, dynamic_map(), rtol=1e-6, atol=0):
                raise bad("has a nested_quant_map other than the dynamic map of bitsandbytes")
            nested = _Nested(checked("nested_absmax", np.float32, -(-blocks // GROUP)), quant_map, np.float32(offset))
        elif "nested_offset" in state:
            raise bad(f"has a nested_offset in its quant_state, and lacks {name + '.nested_absmax'!r}")
        absmax = checked("absmax", np.uint8 if nested else np.float32, blocks)
        return cls(shape, dtype, block, packed, absmax, nested)

    @property
    def crosses_rows(self) -> bool:
        """Whether a block begins in one row and ends in another."""
        return _crosses_rows(self.shape, self.block_size)

    def scales(self) -> np.ndarray:
        """The scale of each block in float32."""
        if self.nested is None:
            return self.absmax
        tops = np.repeat(self.nested.absmax, GROUP)[: self.absmax.size]
        return self.nested.quant_map[self.absmax] * tops + self.nested.offset

    def array(self) -> ArrayNF4:
        """The array with these codes and scales; there is none if a block crosses rows."""
        *lead, row = self.shape
        parts: dict[str, Any] = {"packed": self.packed.reshape(*lead, -(-row // 2)), "absmax": self.absmax}
        if self.nested is not None and math.prod(lead[:-1]) == 1:
            own = [1] * len(lead)
            parts["group_absmax"] = self.nested.absmax.reshape(*own, self.nested.absmax.size)
            parts["offset"] = self.nested.offset.reshape(*own, 1)
        elif self.nested is not None:
            parts["absmax"] = self.scales()  # an array has an offset for each matrix, and here is one for all
        parts["absmax"] = parts["absmax"].reshape(*lead, -(-row // self.block_size))
        return ArrayNF4(**parts, shape=self.shape, dtype=self.dtype, axis=-1, block_size=self.block_size)

    def dense(self, dtype: Any) -> np.ndarray:
        """The numbers, decoded in float32 and rounded once. In its own dtype they are those of bitsandbytes."""
        block, out = self.block_size, np.empty(math.prod(self.shape), dtype)
        step = _CHUNK // block
        with np.errstate(all="ignore"):  # a scale may be infinite, and then its block reads so
            scales = self.scales()
            for first in range(0, scales.size, step):
                here = out[first * block : (first + step) * block]
                levels = _PAIRS[self.packed[first * block // 2 : (first + step) * block // 2]].reshape(-1)
                here[:] = levels[: here.size] * np.repeat(scales[first : first + step], block)[: here.size]
        return out.reshape(self.shape)


def bitsandbytes_tensors(name: str, array: Any, *, requantize: bool = False) -> dict[str, np.ndarray]:
    """The tensors as which bitsandbytes saves `array`, by the names of a checkpoint.

    An `ArrayNF4` with full blocks along its last axis keeps its codes and scales. Any other array is an error, or with
    `requantize` made dense and quantized in the blocks of bitsandbytes.

    >>> import jax.numpy as jnp, lowbit
    >>> tensors = bitsandbytes_tensors("w", lowbit.ArrayNF4(jnp.ones((4, 128))))
    >>> {name: tensor.shape for name, tensor in tensors.items()}
    {'w': (256, 1), 'w.absmax': (8,), 'w.quant_map': (16,), 'w.quant_state.bitsandbytes__nf4': (77,)}
    """
    shape = tuple(array.shape)
    if problem := misfit(array):
        if not requantize:
            raise OptionNeeded(
                f"Cannot write {name!r} for bitsandbytes as it is: {problem}.",
                "requantize",
                "quantizes it in blocks that bitsandbytes has",
            )
        array = _requantized(array)
    dtype, block = array.dtype, array.block_size
    array = array.resolved()
    codes = array.codes
    if array.transposed:
        codes = pack(array.logical_view(unpack(codes, 2)[..., : array.stored_shape[-1]]), 2)
    # Groups of scales that lie in another order, or that each matrix has for itself, bitsandbytes does not know.
    if array.transposed or math.prod(array.shape[:-2]) != 1:
        array = array.plain()
    scales, *nested = array.coded_scales() or (array.scale_values(),)  # in float32, however wide they are stored
    tensors = {
        "": np.asarray(codes).reshape(-1, 1),
        ".absmax": np.asarray(array.logical_view(scales)).reshape(-1),
        ".quant_map": LEVELS.copy(),
    }
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": dtype.name, "shape": shape}
    if nested:
        groups, offset, _ = nested
        tensors[".nested_absmax"] = np.asarray(groups).reshape(-1)
        tensors[".nested_quant_map"] = dynamic_map().copy()
        state |= {"nested_blocksize": GROUP, "nested_dtype": "float32", "nested_offset": offset.item()}
    tensors[f"{_STATE}nf4"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return {name + part: tensor for part, tensor in tensors.items()}


def quantization_config(
    *, double_quant: bool = False, compute_dtype: Any = np.float32, skip: Sequence[str] = ()
) -> dict[str, Any]:
    """The `"quantization_config"` in config.json by which transformers knows such a checkpoint.

    - `compute_dtype`: of the products, as transformers runs them.
    - `skip`: modules whose weights are not quantized, by the ends of their names.

    >>> quantization_config(double_quant=True)["bnb_4bit_quant_type"]
    'nf4'
    """
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": double_quant,
        "bnb_4bit_compute_dtype": np.dtype(compute_dtype).name,
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": list(skip) or None,
    }


def _crosses_rows(shape: Sequence[int], block: int) -> bool:
    return math.prod(shape[:-1]) > 1 and shape[-1] % block > 0


def misfit(array: Any) -> str:
    """Why bitsandbytes cannot store an array as it is; empty if it can."""
    if not isinstance(array, ArrayNF4):
        return f"it is no ArrayNF4, but {type(array).__name__}"
    if array.dtype not in _DTYPES.values():
        return f"its dtype is {array.dtype}, which is none of {', '.join(_DTYPES)}"
    if array.axis != -1:
        return f"its blocks lie along axis {array.axis}, not along the last"
    if array.block_size not in _BLOCKS:
        return f"its blocks of {array.block_size} are none of {', '.join(map(str, _BLOCKS))}"
    if _crosses_rows(array.shape, array.block_size):
        return f"its rows of {array.shape[-1]} are no multiple of its blocks of {array.block_size}"
    return ""


def _requantized(array: Any) -> ArrayNF4:
    options: dict[str, Any] = {}
    if isinstance(array, ArrayNF4):
        options = {"block_size": max(array.block_size or 0, _BLOCKS[0]), "double_quant": array.group_absmax is not None}
    dtype = array.dtype if array.dtype in _DTYPES.values() else np.dtype(np.float32)
    if isinstance(array, QuantizedArray):
        array = array.replace(dtype=np.dtype(np.float32)).materialize()  # without rounding to its dtype in between
    return ArrayNF4.quantize(jnp.asarray(array).reshape(-1), dtype=dtype, **options)
