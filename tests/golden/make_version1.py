"""Make version1.safetensors, a lowbit file of version 1 that uses everything in the format.

    python tests/golden/make_version1.py

Made once, with lowbit 0.1.0. Do not make it again: every later version must read the stored file. The
components of its arrays are given here and not quantized, so that `contents()` says what the file holds whatever else
changes.
"""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from lowbit import Array1B, Array8B, ArrayNF4
from lowbit.io import save

OUT = Path(__file__).with_name("version1.safetensors")
METADATA = {"step": 12, "name": "gold ☉", "nested": {"list": [1, 2.5, None, True, "x"]}}
DTYPES = "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 float32 float64 complex64 bfloat16 "
DTYPES += "float8_e4m3fn float8_e5m2 float8_e8m0fnu float8_e4m3fnuz float8_e5m2fnuz"


def numbers(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Small numbers that every dtype can hold: 1 and 2 alternating, 1 and 0 for booleans."""
    values = (np.arange(np.prod(shape, dtype=int)) % 2).reshape(shape)
    return (values if dtype == np.bool_ else values + 1).astype(dtype)


def codes(*shape: int) -> jnp.ndarray:
    """The bytes 0, 7, 14, ... as far as they go."""
    return jnp.asarray((7 * np.arange(np.prod(shape, dtype=int)) % 256).reshape(shape).astype(np.uint8))


def contents() -> Any:
    """The tree of the file."""
    int8 = Array8B(weight=codes(6, 70).astype(jnp.int8), scale=jnp.asarray(numbers(6, 5)), axis=-1, block_size=16)
    nested = ArrayNF4.build(
        shape=(2, 3, 64),
        dtype=jnp.bfloat16,
        spans=(1, 1, 16),
        codes=codes(2, 3, 32),
        scales=codes(2, 3, 4),
        group_absmax=jnp.asarray(numbers(2, 1, 1)),
        offset=jnp.asarray(numbers(2, 1, 1)),
    )
    ternary = jnp.asarray(np.array([[0x92, 0x40], [0x15, 0x80]], np.uint8))
    return {
        "layers": [
            {"kernel": int8, "transposed": int8.T, "tied": int8},
            (ArrayNF4(packed=codes(3, 33), absmax=jnp.asarray(numbers(3, 2)), shape=(3, 65), block_size=64), nested),
        ],
        "ternary": Array1B(weight=ternary, scale=jnp.ones((2, 1)), shape=(2, 5), dtype=jnp.int8),
        "binary": Array1B(weight=codes(8, 2), scale=jnp.asarray(numbers(1, 16)), kind="binary").replace(
            use_kernel=False, compute="fast"
        ),
        "dtypes": {n: numbers(2, 3, dtype=np.dtype(getattr(ml_dtypes, n, n))) for n in DTYPES.split()},
        "shapes": [numbers(), numbers(0, 3), numbers(1), numbers(2, 1, 3)],
        "values": [True, False, 0, -(2**70), 0.1, -0.0, 1e300, float("inf"), 1 - 2j, "", "é\n", None],
        "empty": [{}, [], ()],
        "a/b": numbers(1),
        "a": {"b": numbers(2), 3: numbers(3), "": numbers(4), "ключ ☉": numbers(5)},
        "__metadata__": numbers(6),
    }


if __name__ == "__main__":
    save(OUT, contents(), metadata=METADATA)
    print(OUT, OUT.stat().st_size)
