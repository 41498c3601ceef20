"""How the kernel for TPU divides a product: sizes of tiles, the grid, where scales multiply, and in how many terms.

The matrix unit multiplies bfloat16. What has more bits is split into *terms* of eight bits each, so that a product is
as exact as its float32 sum: a float32 into three; a decoded weight into two beside activations of bfloat16; levels that
have eight bits are one, where one scale covers an axis and can be multiplied into x or y.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lowbit.formats.blocks import WHOLE, span_of
from lowbit.formats.quantized import QuantizedArray

from .._tiles import level_table, scale_components
from ..groups import step_count
from ..product import Product

LANES, SUBLANES = 128, 8
VMEM = {"TPU v5 lite": 128 << 20, "TPU v6 lite": 128 << 20}
"""Bytes of fast memory by the kind of the chip; others have 64 MB."""

_NO_INT8 = ("TPU v4", "TPU7")  # chips whose matrix unit does not multiply integers
GROUPED_ROWS = 128  # of a tile: the matrix unit takes as long for fewer
_FEW = 6  # operations that take less than a lookup


class Sizes(NamedTuple):
    """Rows of x and columns of y in a step, how much of the summed axis, and how much of that at a time."""

    m: int
    n: int
    k: int
    chunk: int


def vmem(chip: str) -> int:
    """How much of the fast memory a step may use: the compiler needs the rest."""
    return VMEM.get(chip, 64 << 20) * 3 // 4


def sizes_for(m: int, k: int, n: int, *, per_byte: int, contract: int, span: int = 1, chip: str = "") -> Sizes:
    """Sizes for a product of m x k with k x n.

    - All rows of x up to 512, so that the weight is read and decoded once.
    - The whole summed axis, unless x would take half of the memory, or the weight a quarter; then what fits.
    - About 1 MB of the weight, enough to hide the start of a copy, in four steps at least, so that copies and
      arithmetic overlap.
    - A chunk of about 128 thousand weights, whose planes stay near the registers, and of whole blocks (`span`) of rows.
    """
    m = m if m <= 512 else 256
    block = math.lcm(span, LANES)
    block = block if block <= 1024 else LANES
    unit_n, unit_k = (LANES * per_byte, block) if contract == -2 else (block, LANES * per_byte)
    tile_n = unit_n * _power_below(min((per_byte << 20) // (k * unit_n), n // (4 * unit_n)))
    chunk = unit_k * _power_below(min((1 << 17) // (tile_n * unit_k), -(-k // unit_k)))
    # Two of each: one is copied while the other is used.
    room = min(vmem(chip) // 4 // (round_up(m, 16) * 4), vmem(chip) // 8 * per_byte // tile_n)
    return Sizes(m, tile_n, round_up(k, chunk) if k <= room else max(chunk, room // chunk * chunk), chunk)


def _power_below(number: int) -> int:
    return 1 << max(number, 1).bit_length() - 1


def round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


@dataclass(frozen=True)
class Tiling:
    """How a product of known shapes is divided.

    - `shape`: matrices in the batch, rows of x, columns of y, length of the summed axis. Where rows are grouped, the
      batch is one, and all rows are in x.
    - `steps`: how many visits of tiles of rows there are (groups.py); 0 if rows are not grouped.
    - `packing`: how many codes a byte of each code component holds.
    - `levels`: of all codes, as `level_table` has them.
    - `decoding`: how a tile gets its levels; see decode.py.
    - `spans`: of the scales, along stored rows and columns.
    - `coded`: the components that scales are decoded from in a step (`scale_components`); none if they are float32.
    - `folded`: "x" or "y" if scales cover one axis and multiply these instead of the weight; None otherwise.
    - `x_terms`, `w_terms`: into how many bfloat16 terms x and w are split.
    - `fast`: by what levels are multiplied to be integers, which are then multiplied; None for floats.
    """

    sizes: Sizes
    shape: tuple[int, int, int, int]
    contract: int
    packing: tuple[int, ...]
    levels: np.ndarray
    decoding: str
    spans: tuple[int, int]
    coded: dict[str, tuple[bool, bool]]
    folded: str | None
    x_terms: int
    w_terms: int
    fast: int | None
    dtype: Any
    chip: str
    steps: int = 0

    @property
    def planes(self) -> int:
        """How many planes a tile of codes is split into."""
        return min(self.packing)

    @property
    def grid(self) -> tuple[int, int, int, int]:
        """Matrices of the batch, tiles of rows (or visits of them), tiles of columns, steps of the summed axis."""
        batch, *shape = self.shape
        m, n, k = (-(-a // b) for a, b in zip(shape, self.sizes[:3], strict=True))
        return batch, self.steps or m, n, k

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of the stored matrix in a step."""
        return self.stored(self.sizes.n, self.sizes.k)

    @property
    def chunk(self) -> tuple[int, int]:
        """Rows and columns of the stored matrix that are decoded at a time."""
        return self.stored(self.sizes.n, self.sizes.chunk)

    @property
    def blocks(self) -> int:
        """How many blocks of rows in a chunk have an integer sum each; 0 if one scale covers the sum."""
        return max(self.chunk[0] // self.spans[0], 1) if self.fast and not self.folded else 0

    def stored(self, n: Any, k: Any) -> tuple[Any, Any]:
        """A value for the columns of y and one for the summed axis, in the order in which w is stored."""
        return (k, n) if self.contract == -2 else (n, k)


def tiling_for(product: Product, chip: str, sizes: Sizes | None = None) -> Tiling:
    """The tiling of a product on a chip. x of float16 counts as float32, which it is converted to."""
    w, contract = product.w, product.contract
    batch, m = math.prod(product.batch), math.prod(product.rows)
    grouped = product.sizes is not None
    batch, m = (1, batch * m) if grouped else (batch, m)
    dtype = jnp.bfloat16 if product.dtype == jnp.bfloat16 else jnp.float32
    packing, spans = tuple(w.packing.values()), (span_of(w.spans, -2), span_of(w.spans, -1))
    # A scale that covers one axis depends on the other alone: it multiplies x or y.
    whole = [axis for axis, span in zip((-2, -1), spans, strict=True) if span == WHOLE]
    folded = None if not whole else "y" if contract in whole else "x"
    narrow = product.x.dtype == jnp.bfloat16
    # Round a bfloat16 weight to bfloat16 only if the result is bfloat16 too.
    rounded = narrow and w.dtype == jnp.bfloat16 and dtype == jnp.bfloat16
    levels = level_table(w)
    exact = rounded or (folded and _is_bfloat16(levels))
    # Integers are summed where one scale covers the sum, or block by block of rows.
    sums = folded is not None or (contract == -2 and spans[1] == 1)
    fast = product.arithmetic == "fast" and sums and not chip.startswith(_NO_INT8)
    n, k, unit = product.n, product.k, max(packing)
    tile = min(m, GROUPED_ROWS) if grouped else m
    sizes = sizes or sizes_for(tile, k, n, per_byte=unit, contract=contract, span=max(spans[0], 1), chip=chip)
    return Tiling(
        sizes=sizes,
        shape=(batch, m, n, k),
        contract=contract,
        packing=packing,
        levels=levels,
        decoding=_decoding(w, packing, levels),
        spans=spans,
        coded={} if folded else _coded(w),
        folded=folded,
        x_terms=3 if not narrow else 2 if folded == "x" else 1,
        w_terms=1 if exact else 2 if narrow else 3,
        fast=w.int8_multiplier if fast else None,
        dtype=dtype,
        chip=chip,
        steps=step_count(product, sizes.m) if grouped else 0,
    )


def _decoding(w: QuantizedArray, packing: tuple[int, ...], levels: np.ndarray) -> str:
    """The way of decode.py that takes the fewest bundles."""
    codes = [jax.ShapeDtypeStruct((1, 1), jnp.int32)] * len(packing)
    if len(jax.make_jaxpr(w.levels)(*codes).eqns) <= _FEW or levels.size > LANES:
        return "arithmetic"
    if levels.size > 16:
        return "lanes"
    if levels.size <= SUBLANES:
        return "sublanes"
    return "halves" if packing == (2,) and _is_bfloat16(levels) else "two"


def _is_bfloat16(levels: np.ndarray) -> bool:
    return np.array_equal(levels, levels.astype(jnp.bfloat16), equal_nan=True)


def _coded(w: QuantizedArray) -> dict[str, tuple[bool, bool]]:
    """The components to decode scales from in a step, where they take less memory than float32."""
    return scale_components(w) if w.scales.dtype in (jnp.uint8, jnp.bfloat16) else {}
