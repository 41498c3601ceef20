"""NF4 and FP4 tensors of bitsandbytes, as it and transformers save them: reading both, and writing NF4.

bitsandbytes quantizes the flattened tensor, whatever its shape. A tensor `w` of n elements is saved as

    w                                uint8 (n / 2, 1): two codes per byte, the first in the high nibble
    w.absmax                         float32, one for each block; if nested, uint8 codes of these
    w.quant_map                      float32 (16,): the levels
    w.nested_absmax                  float32, one for each 256 codes of scales
    w.nested_quant_map               float32 (256,): the dynamic map
    w.quant_state.bitsandbytes__nf4  JSON in uint8: quant_type, blocksize, dtype, shape; nested_blocksize,
                                     nested_dtype, nested_offset

and FP4 with its own levels and `w.quant_state.bitsandbytes__fp4`. If no block crosses rows, these are the components of
an array with blocks along its last axis.
"""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
import numpy as np

from lowbit.formats import ArrayNF4, PackedArray, QuantizedArray, pack, unpack
from lowbit.formats.nf4 import GROUP, LEVELS, dynamic_map
from lowbit.formats.packed import layout_of

from ._checks import OptionNeeded, are_counts, bad_tensor, can_be_a_shape, checked_field, checked_json
from ._dtypes import DTYPES

_STATE = ".quant_state.bitsandbytes__"
_NESTED = ("nested_absmax", "nested_quant_map")
_COMPONENTS = ("absmax", "quant_map", *_NESTED)
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # block sizes that bitsandbytes supports
_DTYPES = {DTYPES[kind].name: DTYPES[kind] for kind in ("F32", "F16", "BF16")}
_MOST_AXES = 8
_LARGEST = float(np.finfo(np.float32).max)
_CHUNK = 1 << 18  # elements decoded at a time, few enough to stay in the cache
_NIBBLES = np.arange(256)[:, None] >> np.array([4, 0]) & 15  # the two codes of each byte
# The levels of each type by code. Those of FP4 are a sign and a code of three bits.
_FP4 = np.array([0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4], np.float32)
_LEVELS = {"nf4": LEVELS, "fp4": np.concatenate([_FP4, 0 - _FP4])}
_FORMATS = {"nf4": "nf4", "fp4": "fp4_bnb"}


class DequantizedWarning(UserWarning):
    """A tensor was dequantized although its stored bits were requested, since no lowbit format can hold them."""


def saved_components(names: Iterable[str], path: str | os.PathLike[str]) -> dict[str, dict[str, str]]:
    """For each tensor that bitsandbytes saved, the names of its components among `names`; the codes are `""`.

    >>> saved_components(["b", "w", "w.absmax", "w.quant_map", "w.quant_state.bitsandbytes__nf4"], "model.safetensors")
    {'w': {'quant_state': 'w.quant_state.bitsandbytes__nf4', '': 'w', 'absmax': 'w.absmax', 'quant_map': 'w.quant_map'}}
    """
    every = dict.fromkeys(names)
    saved: dict[str, dict[str, str]] = {}
    for name in every:
        base, found, kind = name.rpartition(_STATE)
        if not found:
            continue
        if kind not in _LEVELS:
            raise bad_tensor(path, base, f"is of bitsandbytes' type {kind!r}, and only 'nf4' and 'fp4' can be read")
        names_of = {"": base} | {key: f"{base}.{key}" for key in _COMPONENTS}
        saved[base] = {"quant_state": name} | {key: name for key, name in names_of.items() if name in every}
        needed = names_of if any(key in saved[base] for key in _NESTED) else names_of.keys() - _NESTED
        if missing := sorted(names_of[key] for key in needed if key not in saved[base]):
            raise bad_tensor(path, base, f"lacks {', '.join(map(repr, missing))}")
    for name in every:
        base, _, key = name.rpartition(".")
        if key in _COMPONENTS and base in every and base not in saved:
            raise bad_tensor(path, base, f"lacks {base + _STATE + 'nf4'!r}, which {name!r} belongs to")
    return saved


class _Nested(NamedTuple):
    """What the 8-bit codes of the scales are decoded with."""

    absmax: np.ndarray
    quant_map: np.ndarray
    offset: np.float32


@dataclasses.dataclass(frozen=True)
class Saved4Bit:
    """A tensor as bitsandbytes saved it, flattened to n elements.

    - `packed` holds ceil(n / 2) bytes, `absmax` one scale for each block of `block_size`; the last block may be short.
    - `nested`: `absmax` holds codes, and `nested.absmax` has one scale for each 256 of them.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    block_size: int
    packed: np.ndarray
    absmax: np.ndarray
    nested: _Nested | None
    kind: str = "nf4"

    @classmethod
    def read(cls, name: str, components: Mapping[str, np.ndarray], path: str | os.PathLike[str], kind: str) -> Self:
        """Read a tensor of a kind, nf4 or fp4, and check that its components fit together.

        They have the keys of `saved_components`.
        """

        def bad(problem: str) -> ValueError:
            return bad_tensor(path, name, problem)

        def checked(key: str, dtype: Any, size: int) -> np.ndarray:
            array = components[key]
            if array.dtype != dtype or array.size != size:
                raise bad(f"has {array.size} elements of {array.dtype} as {key}, not {size} of {np.dtype(dtype)}")
            return array.reshape(-1)

        def field(key: str, fits: Callable[[Any], bool]) -> Any:
            return checked_field(state, key, fits, lambda problem: bad(f"{problem} in its quant_state"))

        text = components["quant_state"]
        state = checked_json(checked("quant_state", np.uint8, text.size).tobytes(), text.size, bad)
        field("quant_type", lambda found: found == kind)
        block = field("blocksize", lambda block: type(block) is int and block in _BLOCKS)
        dtype = _DTYPES[field("dtype", lambda dtype: type(dtype) is str and dtype in _DTYPES)]
        shape = tuple(field("shape", lambda shape: are_counts(shape, _MOST_AXES) and shape and can_be_a_shape(shape)))
        size = math.prod(shape)
        # bnb_4bit_quant_storage changes the dtype and not the bytes.
        packed = components[""].reshape(-1).view(np.uint8)
        if packed.size != -(-size // 2):
            raise bad(f"has {packed.size} bytes of codes, and its shape {shape} takes {-(-size // 2)}")
        if checked("quant_map", np.float32, 16).tobytes() != _LEVELS[kind].tobytes():
            raise bad(f"has a quant_map other than the levels of {kind.upper()}")
        blocks = -(-size // block)
        nested = None
        if "nested_absmax" in components:
            field("nested_blocksize", lambda block: type(block) is int and block == GROUP)
            field("nested_dtype", lambda dtype: dtype == "float32")
            offset = field("nested_offset", lambda x: type(x) in (int, float) and not abs(x) > _LARGEST)
            quant_map = checked("nested_quant_map", np.float32, 256)
            # It differs by a few ulps between processors.
            if not np.allclose(quant_map, dynamic_map(), rtol=1e-6, atol=0):
                raise bad("has a nested_quant_map other than the dynamic map of bitsandbytes")
            nested = _Nested(checked("nested_absmax", np.float32, -(-blocks // GROUP)), quant_map, np.float32(offset))
        elif "nested_offset" in state:
            raise bad(f"has a nested_offset in its quant_state but lacks {name + '.nested_absmax'!r}")
        absmax = checked("absmax", np.uint8 if nested else np.float32, blocks)
        return cls(shape, dtype, block, packed, absmax, nested, kind)

    @property
    def format(self) -> str:
        """The name of its layout in lowbit."""
        return _FORMATS[self.kind]

    @property
    def problem(self) -> str:
        """Why no lowbit array has these bits: a block begins in one row and ends in another. Empty if one has."""
        crosses = _crosses_rows(self.shape, self.block_size)
        return f"its blocks of {self.block_size} cross its rows of {self.shape[-1]}" if crosses else ""

    def scales(self) -> np.ndarray:
        """The scale of each block in float32."""
        if self.nested is None:
            return self.absmax
        tops = np.repeat(self.nested.absmax, GROUP)[: self.absmax.size]
        return self.nested.quant_map[self.absmax] * tops + self.nested.offset

    def array(self) -> ArrayNF4 | PackedArray:
        """The array with these codes and scales; undefined if a block crosses rows."""
        *lead, row = self.shape
        if self.kind != "nf4":
            codes = _bytes_by_level(self.kind)[self.packed].reshape(*lead, -(-row // 2))
            scales = self.scales().reshape(*lead, -(-row // self.block_size))
            fields = {"shape": self.shape, "dtype": self.dtype, "spans": (self.block_size,)}
            return PackedArray.build(**fields, format_name=self.format, codes=codes, scales=scales)
        components: dict[str, Any] = {"packed": self.packed.reshape(*lead, -(-row // 2)), "absmax": self.absmax}
        if self.nested is not None and math.prod(lead[:-1]) == 1:
            own = [1] * len(lead)
            components["group_absmax"] = self.nested.absmax.reshape(*own, self.nested.absmax.size)
            components["offset"] = self.nested.offset.reshape(*own, 1)
        elif self.nested is not None:
            # An ArrayNF4 has an offset for each matrix, bitsandbytes one for the whole stack.
            components["absmax"] = self.scales()
        components["absmax"] = components["absmax"].reshape(*lead, -(-row // self.block_size))
        return ArrayNF4(**components, shape=self.shape, dtype=self.dtype, axis=-1, block_size=self.block_size)

    def dense(self, dtype: Any) -> np.ndarray:
        """Dequantize in float32 and round once. In the tensor's own dtype the result is that of bitsandbytes."""
        block, out = self.block_size, np.empty(math.prod(self.shape), dtype)
        step, pairs = _CHUNK // block, _LEVELS[self.kind][_NIBBLES]
        with np.errstate(all="ignore"):  # an infinite scale makes its block infinite
            scales = self.scales()
            for first in range(0, scales.size, step):
                here = out[first * block : (first + step) * block]
                levels = pairs[self.packed[first * block // 2 : (first + step) * block // 2]].reshape(-1)
                here[:] = levels[: here.size] * np.repeat(scales[first : first + step], block)[: here.size]
        return out.reshape(self.shape)


def bitsandbytes_tensors(name: str, array: Any, *, requantize: bool = False) -> dict[str, np.ndarray]:
    """The tensors that bitsandbytes would save for `array`, by their names in a checkpoint.

    An `ArrayNF4` with full blocks along its last axis keeps its codes and scales. Any other array raises, or with
    `requantize` is dequantized and quantized in the blocks of bitsandbytes.

    >>> import jax.numpy as jnp, lowbit
    >>> tensors = bitsandbytes_tensors("w", lowbit.ArrayNF4(jnp.ones((4, 128)), axis=-1))
    >>> {name: tensor.shape for name, tensor in tensors.items()}
    {'w': (256, 1), 'w.absmax': (8,), 'w.quant_map': (16,), 'w.quant_state.bitsandbytes__nf4': (77,)}
    """
    shape = tuple(array.shape)
    if problem := misfit(array):
        if not requantize:
            raise OptionNeeded(
                f"Cannot write {name!r} for bitsandbytes with its stored bits: {problem}.",
                "requantize",
                "quantizes it in blocks that bitsandbytes supports",
            )
        array = _requantized(array)
    dtype, block = array.dtype, array.block_size
    array = array.resolved()
    codes = array.codes
    if array.transposed:
        codes = pack(array.logical_view(unpack(codes, 2)[..., : array.stored_shape[-1]]), 2)
    # bitsandbytes has no groups of scales in another order, or for each matrix of a stack.
    if array.transposed or math.prod(array.shape[:-2]) != 1:
        array = array.plain()
    scales, *nested = array.coded_scales() or (array.scale_values(),)  # in float32, whatever dtype they are stored in
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
    return {name + suffix: tensor for suffix, tensor in tensors.items()}


def quantization_config(
    *, double_quant: bool = False, compute_dtype: Any = np.float32, skip: Sequence[str] = ()
) -> dict[str, Any]:
    """The `"quantization_config"` of config.json that makes transformers load such a checkpoint.

    - `compute_dtype`: the dtype in which transformers runs products.
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


def _bytes_by_level(kind: str) -> np.ndarray:
    """Each byte with its two codes as those of the same levels in lowbit's layout."""
    table = layout_of(_FORMATS[kind]).levels.table
    high, low = np.searchsorted(table, _LEVELS[kind][_NIBBLES]).astype(np.uint8).T
    return high << np.uint8(4) | low


def _crosses_rows(shape: Sequence[int], block: int) -> bool:
    return math.prod(shape[:-1]) > 1 and shape[-1] % block > 0


def misfit(array: Any) -> str:
    """Why bitsandbytes cannot store an array unchanged; empty if it can."""
    if not isinstance(array, ArrayNF4):
        return f"it is {type(array).__name__}, not ArrayNF4"
    if array.dtype not in _DTYPES.values():
        return f"its dtype is {array.dtype}, not one of {', '.join(_DTYPES)}"
    if array.axis != -1:
        return f"its blocks lie along axis {array.axis}, not the last"
    if array.block_size not in _BLOCKS:
        return f"its blocks of {array.block_size} are not one of {', '.join(map(str, _BLOCKS))}"
    if _crosses_rows(array.shape, array.block_size):
        return f"its rows of {array.shape[-1]} are not a multiple of its blocks of {array.block_size}"
    return ""


def _requantized(array: Any) -> ArrayNF4:
    options: dict[str, Any] = {}
    if isinstance(array, ArrayNF4):
        options = {"block_size": max(array.block_size or 0, _BLOCKS[0]), "double_quant": array.group_absmax is not None}
    dtype = array.dtype if array.dtype in _DTYPES.values() else np.dtype(np.float32)
    if isinstance(array, QuantizedArray):
        array = array.replace(dtype=np.dtype(np.float32)).materialize()  # without rounding to its dtype first
    return ArrayNF4.quantize(jnp.asarray(array).reshape(-1), dtype=dtype, **options)
