"""What the components of an array may hold: `jax.tree.map` calls its function on each, and may give them anything."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

SCALE_DTYPES = tuple(map(np.dtype, (jnp.float32, jnp.bfloat16, jnp.float16)))
CODE_DTYPES = tuple(map(np.dtype, (jnp.uint8, jnp.int8)))
_CHUNK = 1 << 16  # bytes that are checked at a time, few enough for the cache


def check_dtypes(array: Any) -> None:
    """Raise a TypeError where a component has a dtype that the format does not store.

    JAX unflattens with objects of its own in the place of components: what has no dtype passes, and so do the tangents
    of integers.
    """
    for name, wanted in array.part_dtypes().items():
        dtype = getattr(getattr(array, name), "dtype", None)
        if dtype is not None and dtype not in wanted and dtype != jax.dtypes.float0:
            kind, names = type(array).__name__, " or ".join(d.name for d in wanted)
            raise TypeError(
                f"The {name} of this {kind} are {dtype}, and the format stores {names}. A function mapped over a tree "
                "gets each component by itself: to map the array as a whole, use lowbit.tree_map, or jax.tree.map with "
                "is_leaf=lowbit.is_quantized."
            )


def check_codes(array: Any) -> None:
    """Raise a ValueError where a code is out of the format's range; codes that are traced or elsewhere pass."""
    if array.code_range is None:
        return
    lowest, highest = array.code_range
    for name, per_byte in array.packing.items():
        given = getattr(array, name)
        if isinstance(given, Tracer) or not getattr(given, "is_fully_addressable", True):
            continue
        stored = np.asarray(given)
        flat = stored.reshape(-1)
        for start in range(0, flat.size, _CHUNK):
            fields = _fields(flat[start : start + _CHUNK], per_byte)
            if min(field.min() for field in fields) < lowest or max(field.max() for field in fields) > highest:
                codes = np.stack(_fields(stored, per_byte), -1).reshape(*stored.shape[:-1], -1)
                bad = (codes < lowest) | (codes > highest)
                first = tuple(int(i) for i in np.argwhere(bad)[0])
                raise ValueError(
                    f"{int(bad.sum())} of {bad.size} {name} of this {type(array).__name__} are out of the range "
                    f"{lowest} to {highest}: the first is {codes[first]} at {first}."
                )


def _fields(stored: np.ndarray, per_byte: int) -> list[np.ndarray]:
    """The codes of each position in a byte."""
    if per_byte == 1:
        return [stored]
    bits = 8 // per_byte
    return [(stored >> np.uint8(8 - bits * (i + 1))) & np.uint8(2**bits - 1) for i in range(per_byte)]
