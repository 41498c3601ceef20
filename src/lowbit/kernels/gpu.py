"""The product on NVIDIA GPUs: one tiled kernel in Pallas (Triton) for every format, on Ampere and later.

A program has a tile of results in registers and walks along k: it loads a tile of x and the codes that meet it, takes
the bytes apart, decodes them by the format's own `levels`, and multiplies on the tensor cores. A tile has all rows of
x, up to 256 of them, so that the stored weight is read once.

The result is the reference's to the rounding of its dtype. Tensor cores multiply bfloat16, float16, or the upper 11
bits of float32, and add in float32. So what meets x must be exact in the type of x:

- Scales multiply sums, not weights, where each result has one scale for a whole step along k.
- Levels of few bits are exact. Others, and weights that had to be scaled, are cut into *pieces* that are exact, and x
  is multiplied by each. A weight rounded to bfloat16 would be as wrong as the rounded result again.
- float32 is multiplied in upper and lower bits, three products for one (TF32x3), never in the upper bits alone.
"""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from lowbit.formats._blocks import WHOLE, span_of
from lowbit.formats._quantized import QuantizedArray
from lowbit.runtime._compat import some_gpu, varying_like

from . import reference
from ._lazy import when_lowered
from ._table import register_kernel
from ._tiles import layer_numbers, planes

_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)

# --- sizes


@dataclasses.dataclass(frozen=True)
class Tile:
    """What a program computes: `rows` x `columns` results, `depth` of k in a step, its `splits`-th part of k."""

    rows: int
    columns: int
    depth: int
    splits: int = 1
    warps: int = 4
    stages: int = 3


# Sizes that were found better than those of `tile_for`, by (rows of x, n, k, codes in a byte, contract).
TILES: dict[tuple[int, int, int, int, int], Tile] = {}


def tile_for(m: int, w: QuantizedArray, contract: int, unit: Any, pieces: int) -> Tile:
    """Sizes for a product of m x k with w. The chip is not known when a program is traced: they fit the smallest, A100.

    - Codes along the packed axis fill a sector of 32 bytes at least, the unit in which memory is read.
    - What a thread holds of results and of weights fits its 255 registers.
    - Where tiles are too few to keep memory busy, programs share k, if their sums weigh little beside the codes.
    """
    n, k, per_byte = w.shape[-3 - contract], w.shape[contract], w.packing["codes"]
    rows = min(max(pl.next_power_of_2(m), 16), 256)
    span = span_of(w.spans, contract)
    wide = unit == jnp.float32 or span % 32  # more registers for a weight: float32 itself, or scaled and cut
    if rows <= 32:
        along = max(64, (16 if wide else 32) * per_byte)
        across = 64 if along <= 128 else 32
    else:
        along = across = 32 if wide else 64
    columns, depth = (along, across) if contract == -2 else (across, along)
    if rows > 128 and pieces > 1:
        columns = 32
    if span % 32 == 0:
        depth = math.gcd(span, depth)
    programs = math.prod(w.shape[:-2]) * -(-m // rows) * -(-n // columns)
    splits = 1
    while programs * splits < 256 and 2 * splits * max(8 * depth, 128 * m) <= k:
        splits *= 2
    return Tile(rows, columns, depth, splits, warps=4 if rows <= 64 else 8)


# --- numbers


def _cut(values: jax.Array, unit: Any, count: int) -> list[jax.Array]:
    """`count` numbers, exact in `unit`, that add up to float32 `values` as far as so many can."""
    pieces = []
    keep = np.int32(-1 << 23 - jnp.finfo(unit).nmant)
    for _ in range(count - 1):
        # By its bits: a conversion there and back is one that compilers leave out.
        piece = lax.bitcast_convert_type(lax.bitcast_convert_type(values, jnp.int32) & keep, jnp.float32)
        pieces.append(piece.astype(unit))
        values = values - piece
    return [*pieces, values.astype(unit)]


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a product is computed: in which unit, whether scaled after it, in how many pieces, by which table."""

    tile: Tile
    unit: Any
    after: bool
    pieces: int
    table: Any


def _plan(w: QuantizedArray, m: int, contract: int, unit: Any, dtype: Any, tile: Tile | None) -> Plan:
    """The plan for m rows of x in `unit` and a result in `dtype`."""
    codes = np.arange(2 ** (8 // w.packing["codes"]), dtype=np.int32)
    codes = np.where(codes < 128, codes, codes - 256) if w.codes.dtype == jnp.int8 else codes
    with jax.ensure_compile_time_eval():
        levels = np.asarray(w.levels(jnp.asarray(codes)))
    # Decoding of many operations costs more than a look into the first-level cache.
    long = len(jax.make_jaxpr(w.levels)(codes).eqns) > 8
    tile = tile or TILES.get((m, w.shape[-3 - contract], w.shape[contract], w.packing["codes"], contract))
    # One scale for a step, of any depth that `tile_for` gives. WHOLE is 0.
    after = span_of(w.spans, contract) % (tile.depth if tile else 32) == 0
    pieces = _pieces(levels, unit, dtype, after)
    if not pieces:
        unit, pieces = jnp.dtype(jnp.float32), 1
    tile = tile or tile_for(m, w, contract, unit, pieces)
    return Plan(tile, unit, after, pieces, levels if long else None)


def _pieces(levels: np.ndarray, unit: Any, dtype: Any, bare: bool) -> int:
    """How many pieces of a weight are right to a sixteenth of the result's rounding; 0 if no number of them is."""
    if unit == jnp.float32:
        return 1
    limit = float(jnp.finfo(dtype).eps) / 16
    if not bare:  # a weight of any size, which float16 may not have
        return 0 if unit == jnp.float16 else 2 if limit > 2**-16 else 3
    with jax.ensure_compile_time_eval():
        for count in (1, 2, 3):
            near = sum(np.asarray(piece, np.float64) for piece in _cut(jnp.asarray(levels), unit, count))
            if np.all(np.abs(near - levels) <= limit * np.abs(levels)):
                return count
    return 0


def _side_by_side(planes: list[jax.Array]) -> jax.Array:
    """Planes of a tile as columns in order: those of a byte are in one thread already, and none moves."""
    rows, width = planes[0].shape[0], len(planes) * planes[0].shape[1]
    while len(planes) > 1:  # first those that are half of all apart, since the last axis varies fastest
        half = len(planes) // 2
        planes = [jnp.stack(pair, -1) for pair in zip(planes[:half], planes[half:], strict=True)]
    return planes[0].reshape(rows, width)


# --- the kernel


def _kernel(
    layers: Any,
    x: Any,
    codes: Any,
    scales: Any,
    *refs: Any,
    w: QuantizedArray,
    contract: int,
    plan: Plan,
    precision: Any,
) -> None:
    (*table, y), tile = refs, plan.tile
    (_, m, k), n, per_byte = x.shape, y.shape[-1], w.packing["codes"]
    place, of = pl.program_id(0), (-(-m // tile.rows), -(-n // tile.columns), tile.splits)
    # Rows vary fastest: programs that share codes run at the same time.
    row, column = place % of[0], place // of[0] % of[1]
    split, batch = place // (of[0] * of[1]) % of[2], place // (of[0] * of[1] * of[2])
    layer = layers[batch]
    rows = row * tile.rows + jnp.arange(tile.rows)
    columns = column * tile.columns + jnp.arange(tile.columns)
    spans = span_of(w.spans, -2), span_of(w.spans, -1)

    def load(ref: Any, lead: Any, r: Any, c: Any) -> Any:
        """What of a matrix has these rows and columns, 0 where it has none."""
        inside = (r < ref.shape[1])[:, None] & (c < ref.shape[2])[None, :]
        return triton.load(ref.at[lead, r[:, None], c[None, :]], mask=inside, other=0)

    def scale(r: Any, c: Any) -> Any:
        """The scales of these stored rows and columns, with size 1 on the axes that share one."""
        r, c = (jnp.zeros((1,), jnp.int32) if s == WHOLE else i // s for i, s in zip((r, c), spans, strict=True))
        return load(scales, layer, r, c)

    def of_columns(first: Any) -> Any:
        """The scale of each result, from this k on."""
        k = first + jnp.arange(1)
        found = scale(k, columns) if contract == -2 else scale(columns, k)
        return found.reshape(1, found.size)

    def step(i: Any, sums: Any) -> Any:
        ks = i * tile.depth + jnp.arange(tile.depth)
        r, c = (ks, columns) if contract == -2 else (columns, ks)
        bytes_ = c.size // per_byte
        packed = load(codes, layer, r, (column if contract == -2 else i) * bytes_ + jnp.arange(bytes_))
        tiles = planes(packed, per_byte)
        if table:
            tiles = [triton.load(table[0].at[plane & table[0].shape[0] - 1]) for plane in tiles]
        else:
            tiles = [w.levels(plane) for plane in tiles]
        weights = _side_by_side(tiles)
        if not plan.after:
            weights = weights * scale(r, c)
        some = load(x, batch, rows, ks).astype(plan.unit)
        dims = (((1,), (contract + 2,)), ((), ()))
        product = sum(
            lax.dot_general(some, piece, dims, precision=precision, preferred_element_type=jnp.float32)
            for piece in _cut(weights, plan.unit, plan.pieces)
        )
        return sums + (product * of_columns(i * tile.depth) if plan.after and spans[contract] != WHOLE else product)

    steps = -(-k // tile.depth)
    share = -(-steps // tile.splits)
    zero = jnp.zeros((tile.rows, tile.columns), jnp.float32)
    sums = lax.fori_loop(split * share, jnp.minimum((split + 1) * share, steps), step, zero)
    if plan.after and spans[contract] == WHOLE:
        sums = sums * of_columns(0)
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    triton.store(y.at[split, batch, rows[:, None], columns[None, :]], sums.astype(y.dtype), mask=inside)


# --- the product


def matmul_fits(x: jax.Array, w: QuantizedArray, *, contract: int, dtype: Any, **params: Any) -> bool:
    """Whether the kernel takes this product: one part of codes in bytes, and matrices that do not share scales."""
    return (
        [*w.packing] == ["codes"]
        and w.codes.dtype in (jnp.int8, jnp.uint8)
        and x.dtype in _FLOATS
        and dtype in _FLOATS
        and x.size > 0
        and w.size > 0
        # Pallas counts in 32 bits up to 4 GiB, where a byte's number has 33 with its sign.
        and not 2**31 <= math.prod(w.codes.shape) <= 2**32
        and all(span_of(w.spans, axis) == 1 for axis in range(-len(w.spans), -2))
    )


def matmul(
    x: jax.Array,
    w: QuantizedArray,
    *,
    contract: int,
    dtype: Any,
    precision: Any,
    out_sharding: Any,
    arithmetic: str,
) -> jax.Array:
    """As `reference.matmul`; always exact, and as precise as any `precision` asks for."""
    del precision, out_sharding, arithmetic
    shape = (*x.shape[:-1], w.shape[-3 - contract])
    return when_lowered(product, reference.matmul, shape, x, w.plain(), contract=contract, dtype=dtype)


def product(
    x: jax.Array, w: QuantizedArray, *, contract: int, dtype: Any, tile: Tile | None = None, interpret: bool = False
) -> jax.Array:
    """The call of the kernel. `interpret` runs it in JAX on any platform."""
    batch, n, k = w.shape[:-2], w.shape[-3 - contract], w.shape[contract]
    count, m = math.prod(batch), math.prod(x.shape[len(batch) : -1])
    plan = _plan(w, m, contract, x.dtype, dtype, tile)
    tile = plan.tile
    three = lax.Precision.HIGHEST if interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3  # CPU has no TF32
    precision = three if plan.unit == jnp.float32 else None
    call = pl.pallas_call(
        partial(_kernel, w=w, contract=contract, plan=plan, precision=precision),
        out_shape=varying_like(x, (tile.splits, count, m, n), dtype if tile.splits == 1 else jnp.float32),
        grid=(count * tile.splits * -(-n // tile.columns) * -(-m // tile.rows),),
        compiler_params=triton.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="lowbit_matmul",
    )
    with some_gpu():
        y = call(
            layer_numbers(w),
            x.reshape(count, m, k),
            w.codes.reshape(-1, *w.codes.shape[-2:]),
            lax.stop_gradient(w.scale_values()).reshape(-1, *w.scales.shape[-2:]),
            *([] if plan.table is None else [jnp.asarray(plan.table)]),
        )
    return (y[0] if tile.splits == 1 else y.sum(0).astype(dtype)).reshape(*x.shape[:-1], n)


def register() -> None:
    """Add the kernel to the table."""
    register_kernel("matmul", "cuda", matmul, matmul_fits)
