"""The kernel for TPU, in Pallas: one tiled product for every format.

A step of the grid holds a tile of stored bytes over the whole summed axis (if that is not very long), the activations
and a tile of the result. It decodes a chunk of bytes at a time, plane by plane, and multiplies it on the matrix unit.
Activations stay where they are from step to step, so that weight, x and y cross the memory bus once.

The matrix unit multiplies bfloat16. What has more digits goes through it in pieces of eight bits each, so that a
product is as exact as its float32 sum: a float32 in three; a decoded weight in two beside activations of bfloat16;
levels that are integers in one, where one scale covers an axis and can be multiplied into x or y.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lowbit.formats._blocks import WHOLE, span_of, spread
from lowbit.formats._quantized import QuantizedArray
from lowbit.runtime._compat import device_kind

from ._table import register_kernel
from ._tiles import layer_numbers, planes

_LANES, _SUBLANES = 128, 8
_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)


# --- how large the tiles are


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Rows of x and columns of y in a step, how much of the summed axis, and how much of that at a time."""

    m: int
    n: int
    k: int
    chunk: int


VMEM = {"TPU v5 lite": 128 << 20, "TPU v6 lite": 128 << 20}
"""Bytes of fast memory by the name of the chip; others have 64 MB."""

_NO_INT8 = ("TPU v4", "TPU7")  # chips whose matrix unit does not multiply integers

EXCEPTIONS: dict[tuple[Any, ...], Tiles] = {}
"""Tiles for (m, k, n, codes in a byte, summed axis, chip) that are better than those of the rule."""


def vmem(chip: str) -> int:
    """How much of the fast memory a step may use: what the compiler needs for itself is left to it."""
    return VMEM.get(chip, 64 << 20) * 3 // 4


def tiles(
    m: int, k: int, n: int, *, per_byte: int, contract: int, span: int = 1, item: int = 4, chip: str = ""
) -> Tiles:
    """The rule.

    - All rows of x up to 512, so that the weight is read and decoded once.
    - The whole summed axis, unless x would take half of the memory, or the weight a quarter; then what fits.
    - About 1 MB of the weight, enough to hide the start of a copy, in four steps at least, so that copies and
      arithmetic overlap.
    - A chunk of about 128 thousand weights, whose planes stay near the registers, and of whole blocks (`span`) of rows.
    """
    if found := EXCEPTIONS.get((m, k, n, per_byte, contract, chip)):
        return found
    m = m if m <= 512 else 256
    block = math.lcm(span, _LANES)
    block = block if block <= 1024 else _LANES
    unit_n, unit_k = (_LANES * per_byte, block) if contract == -2 else (block, _LANES * per_byte)
    tile_n = unit_n * _power_below(min((per_byte << 20) // (k * unit_n), n // (4 * unit_n)))
    chunk = unit_k * _power_below(min((1 << 17) // (tile_n * unit_k), -(-k // unit_k)))
    # Two of each: one is copied while the other is used.
    room = min(vmem(chip) // 4 // (_round_up(m, 16) * item), vmem(chip) // 8 * per_byte // tile_n)
    return Tiles(m, tile_n, _round_up(k, chunk) if k <= room else max(chunk, room // chunk * chunk), chunk)


def _is_power(number: int) -> bool:
    return number & (number - 1) == 0


def _power_below(number: int) -> int:
    return 1 << max(number, 1).bit_length() - 1


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


# --- what it takes


def matmul_fits(x: jax.Array, w: QuantizedArray, *, contract: int, dtype: Any, **params: Any) -> bool:
    """One part of codes, matrices that share no scales, blocks that fill chunks evenly; and a chip to trace for."""
    if len(w.packing) > 1 or x.dtype not in _FLOATS or dtype not in _FLOATS or 0 in (*x.shape, *w.shape):
        return False
    rows, columns = span_of(w.spans, -2), span_of(w.spans, -1)
    apart = all(span_of(w.spans, axis) == 1 for axis in range(-len(w.spans), -2))
    even = rows == 1 or (rows % _SUBLANES == 0 and (math.lcm(rows, _LANES) <= 1024 or _is_power(rows)))
    return apart and device_kind().startswith("TPU") and (WHOLE in (rows, columns) or (even and _is_power(columns)))


# --- the product


def matmul(
    x: jax.Array,
    w: QuantizedArray,
    *,
    contract: int,
    dtype: Any,
    precision: Any = None,
    out_sharding: Any = None,
    arithmetic: str = "exact",
    chip: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """As `reference.matmul`; float32 sums are as exact as any `precision` asks for."""
    del precision, out_sharding
    w = w.plain()
    batch, rows = w.shape[:-2], x.shape[w.ndim - 2 : -1]
    x = x.reshape(math.prod(batch), math.prod(rows), x.shape[-1])
    x = x.astype(jnp.float32) if x.dtype == jnp.float16 else x  # which the chip does not have
    plan = Plan(w, contract, x, dtype, arithmetic == "fast", device_kind() if chip is None else chip)
    return plan.call(x, interpret=interpret).reshape(*batch, *rows, plan.n).astype(dtype)


class Plan:
    """A product of known shapes: its tiles, where scales are multiplied in, and what a step of the grid does."""

    def __init__(self, w: QuantizedArray, contract: int, x: Any, dtype: Any, fast: bool, chip: str):
        self.w, self.contract, self.chip = w, contract, chip
        self.dtype = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
        self.per_byte = w.packing["codes"]
        (self.batch, self.m, self.k), self.n = x.shape, w.shape[-3 - contract]
        self.spans = span_of(w.spans, -2), span_of(w.spans, -1)
        self.tiles = tiles(
            self.m, self.k, self.n, per_byte=self.per_byte, contract=contract, span=max(self.spans[0], 1), chip=chip
        )
        self.grid = (
            self.batch,
            *(-(-a // b) for a, b in ((self.m, self.tiles.m), (self.n, self.tiles.n), (self.k, self.tiles.k))),
        )
        # A scale that covers one axis depends on the other alone: it multiplies x or y.
        whole = [axis for axis, span in zip((-2, -1), self.spans, strict=True) if span == WHOLE]
        self.folded = None if not whole else "y" if contract in whole else "x"
        narrow = x.dtype == jnp.bfloat16
        self.x_pieces = 3 if not narrow else 2 if self.folded == "x" else 1
        # Round a bfloat16 weight to bfloat16 only if the result is bfloat16 too.
        rounded = narrow and w.dtype == jnp.bfloat16 and self.dtype == jnp.bfloat16
        exact = rounded or (self.folded and w.in_int8 == 1)
        self.w_pieces = 1 if exact else 2 if narrow else 3
        # Integers are summed where one scale covers the sum, or block by block of rows.
        sums = self.folded is not None or (contract == -2 and self.spans[1] == 1)
        self.fast = fast and sums and w.in_int8 is not None and not chip.startswith(_NO_INT8)

    # The tile of bytes, as stored: rows and columns of the matrix, of which a byte holds several.

    @property
    def tile(self) -> tuple[int, int]:
        t = self.tiles
        return (t.k, t.n) if self.contract == -2 else (t.n, t.k)

    @property
    def chunk(self) -> tuple[int, int]:
        t = self.tiles
        return (t.chunk, t.n) if self.contract == -2 else (t.n, t.chunk)

    @property
    def blocks(self) -> int:
        """How many blocks of rows in a chunk are summed in integers, each for itself; 0 if there are none."""
        return max(self.chunk[0] // self.spans[0], 1) if self.fast and not self.folded else 0

    def stored(self, n: Any, k: Any) -> tuple[Any, Any]:
        """Something of columns of y and of the summed axis, in the order of storage."""
        return (k, n) if self.contract == -2 else (n, k)

    def call(self, x: jax.Array, *, interpret: bool = False) -> jax.Array:
        w, t = self.w, self.tiles
        codes = w.codes.reshape(-1, *w.codes.shape[-2:])
        scales = w.scale_values().reshape(-1, *w.scales.shape[-2:])
        if self.folded:
            scales = spread(scales, self.spans, w.stored_shape[-2:]).reshape(scales.shape[0], 1, -1)
            if scales.shape[-1] == 1:  # one for all
                scales = jnp.broadcast_to(scales, (scales.shape[0], 1, self.n))
        activations = self.in_int8(x, scales) if self.fast else (x,)
        kernel = pl.pallas_call(
            self.step,
            out_shape=jax.ShapeDtypeStruct((self.batch, self.m, self.n), self.dtype),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=self.grid,
                in_specs=self.in_specs(),
                out_specs=pl.BlockSpec((1, t.m, t.n), lambda b, m, n, k, layers: (b, m, n)),
                scratch_shapes=[pltpu.VMEM((t.m, t.n), jnp.int32 if self.fast and self.folded else jnp.float32)],
            ),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"), vmem_limit_bytes=vmem(self.chip)
            ),
            interpret=interpret,
            name="lowbit_matmul",
        )
        return kernel(layer_numbers(w), codes, scales, *activations)

    def in_specs(self) -> list[pl.BlockSpec]:
        """Of codes, scales and x; and, where x is in 8 bits, of the factors of its rows."""
        t = self.tiles

        def codes(b: Any, m: Any, n: Any, k: Any, layers: Any) -> Any:
            return layers[b], *self.stored(n, k)

        specs = [
            pl.BlockSpec((1, self.tile[0], self.tile[1] // self.per_byte), codes),
            self.scale_spec(),
            pl.BlockSpec((1, t.m, t.k), lambda b, m, n, k, layers: (b, m, k)),
        ]
        return [*specs, pl.BlockSpec((1, t.m, 1), lambda b, m, n, k, layers: (b, m, 0))] if self.fast else specs

    def in_int8(self, x: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Activations in 8 bits, and what to multiply each row of the result by."""
        x = x.astype(jnp.float32)
        if self.folded == "x":
            x = x * scales[layer_numbers(self.w)]
        tops = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 127
        codes = jnp.round(x / jnp.where(tops > 0, tops, 1)).astype(jnp.int8)
        return codes, tops / (self.w.in_int8 or 1)

    # --- scales

    def scale_windows(self) -> list[tuple[int, Callable[[Any], Any], Callable[[Any], Any]]]:
        """For rows and columns: how many scales a step holds, which, and how far behind their start its tile lies."""
        steps = self.stored(self.grid[2], self.grid[3])
        found = []
        for tile, span, count, unit in zip(self.tile, self.spans, steps, (_SUBLANES, _LANES), strict=True):
            cover = span * unit
            if count == 1 or tile % cover == 0:
                found.append((_round_up(-(-tile // span), unit), lambda i: i, lambda i: 0))
            elif cover % tile == 0:  # several tiles in a row look into the same window
                found.append((unit, lambda i, n=cover // tile: i // n, lambda i, n=cover // tile, t=tile: i % n * t))
            else:
                found.append((_round_up(-(-tile * count // span), unit), lambda i: 0, lambda i, t=tile: i * t))
        return found

    def scale_spec(self) -> pl.BlockSpec:
        t = self.tiles
        if self.folded == "x":
            return pl.BlockSpec((1, 1, t.k), lambda b, m, n, k, layers: (layers[b], 0, k))
        if self.folded == "y":
            return pl.BlockSpec((1, 1, t.n), lambda b, m, n, k, layers: (layers[b], 0, n))
        (rows, row, _), (columns, column, _) = self.scale_windows()

        def index(b: Any, m: Any, n: Any, k: Any, layers: Any) -> Any:
            i, j = self.stored(n, k)
            return layers[b], row(i), column(j)

        return pl.BlockSpec((1, rows, columns), index)

    def chunk_scales(self, scales: Any, i: Any, at: tuple[Any, Any], by_row: bool = True) -> list[jax.Array]:
        """The scales of a chunk, for each plane: by row, or one row for each block; one where a block covers all."""
        (_, _, row_behind), (_, _, column_behind) = self.scale_windows()
        row, column = self.stored(*at)
        row, column = row_behind(row), column_behind(column)
        row, column = (
            (row + i * self.tiles.chunk, column) if self.contract == -2 else (row, column + i * self.tiles.chunk)
        )
        (rows, columns), (row_span, column_span) = self.chunk, self.spans
        # All lanes that the chunk needs, from a whole row of lanes on.
        cover = column_span * _LANES
        first = column // cover
        count = max(rows // row_span, 1)
        lanes = pl.ds(_aligned(first * _LANES, _LANES), -(-columns // cover) * _LANES)
        window = _rows(scales, row // row_span, count, lanes)
        behind = column - first * cover

        def plane(j: int) -> jax.Array:
            groups = []
            for g in range(columns // self.per_byte // _LANES):
                lane = lax.broadcasted_iota(jnp.int32, (1, _LANES), 1)
                groups.append(_lanes(window, (behind + (lane + g * _LANES) * self.per_byte + j) // column_span))
            return _joined(groups)

        found = (
            [plane(0)] * self.per_byte if column_span % self.per_byte == 0 else [plane(j) for j in range(self.per_byte)]
        )
        return [_repeated_rows(x, rows // count) if by_row and count > 1 else x for x in found]

    # --- a step

    def step(self, layers: Any, codes: Any, scales: Any, x: Any, *rest: Any) -> None:
        del layers
        *factors, y, total = rest
        t, last = self.tiles, self.grid[3] - 1
        at = pl.program_id(2), pl.program_id(3)  # not known inside of the loop
        k = at[1]

        @pl.when(k == 0)
        def _() -> None:
            total[...] = jnp.zeros_like(total)

        def add_chunk(i: Any, _: Any) -> None:
            inside = self.k - k * t.k - i * t.chunk
            left, right = self.activations(x, scales, i, inside), self.weights(codes, scales, i, at, inside)
            total[...] += (
                self.by_block(left, right, scales, i, at, inside) if self.blocks else self.multiply(left, right)
            )

        lax.fori_loop(0, t.k // t.chunk, add_chunk, None)

        @pl.when(k == last)
        def _() -> None:
            result = total[...].astype(jnp.float32) * factors[0][0] if factors else total[...]
            if self.contract == -2:
                result = _interleaved(result, self.per_byte)
            y[0] = (result * scales[0] if self.folded == "y" else result).astype(y.dtype)

    def masked(self, x: jax.Array, axis: int, inside: Any) -> jax.Array:
        """Zero where a chunk reaches beyond the summed axis, of which it has `inside`."""
        if self.k % self.tiles.chunk == 0 and self.k % self.tiles.k == 0:
            return x
        return jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, axis) < inside, x, 0)

    def activations(self, x: Any, scales: Any, i: Any, inside: Any) -> list[jax.Array]:
        """A chunk of x in pieces, in the order of the planes that it meets."""
        t = self.tiles
        at = pl.ds(_aligned(i * t.chunk, _LANES), t.chunk)
        values = x[0, :, at].astype(jnp.float32)
        if self.folded == "x" and not self.fast:
            values = values * scales[0, :, at]
        values = self.masked(values, 1, inside)
        if self.contract == -1:
            values = _deinterleaved(values, self.per_byte)
        return [values.astype(jnp.int8)] if self.fast else _pieces(values, self.x_pieces)

    def weights(self, codes: Any, scales: Any, i: Any, at: tuple[Any, Any], inside: Any) -> list[jax.Array]:
        """A chunk of the weight in pieces, its planes side by side."""
        t = self.tiles
        if self.contract == -2:
            tile = codes[0, pl.ds(_aligned(i * t.chunk, _LANES), t.chunk), :]
        else:
            size = t.chunk // self.per_byte
            tile = codes[0, :, pl.ds(_aligned(i * size, _LANES), size)]
        values = [self.levels(plane) for plane in planes(tile, self.per_byte)]
        if self.fast:
            unit = self.w.in_int8 or 1
            return [(_joined(values) if unit == 1 else jnp.round(_joined(values) * unit)).astype(jnp.int8)]
        if self.folded is None:
            values = [a * b for a, b in zip(values, self.chunk_scales(scales, i, at), strict=True)]
            # x is zero out there, but a scale may be NaN.
            axis = 0 if self.contract == -2 else 1
            values = [
                self.masked(a, axis, inside if axis == 0 else (inside - j + self.per_byte - 1) // self.per_byte)
                for j, a in enumerate(values)
            ]
        return _pieces(_joined(values), self.w_pieces)

    def levels(self, codes: jax.Array) -> jax.Array:
        """The format's levels of codes: by arithmetic if they are integers, else looked up among those of all codes."""
        if self.w.in_int8 == 1 or self.per_byte == 1:
            return self.w.levels(codes)
        table = self.w.levels(lax.broadcasted_iota(jnp.int32, (_SUBLANES, _LANES), 1) & (1 << 8 // self.per_byte) - 1)
        table = jnp.broadcast_to(table[:1], (codes.shape[0], _LANES))
        found = [
            jnp.take_along_axis(table, codes[:, at : at + _LANES], axis=1, mode="promise_in_bounds")
            for at in range(0, codes.shape[1], _LANES)
        ]
        return _joined(found)

    def multiply(self, x: list[jax.Array], w: list[jax.Array]) -> jax.Array:
        """The sum of the products of pieces, without those that are smaller than the last bit."""
        dims = (((1,), (0 if self.contract == -2 else 1,)), ((), ()))
        most = max(len(x), len(w))
        terms = [
            lax.dot_general(a, b, dims, preferred_element_type=jnp.int32 if self.fast else jnp.float32)
            for i, a in enumerate(x)
            for j, b in enumerate(w)
            if i + j < most
        ]
        return sum(terms[1:], terms[0])

    def by_block(self, x: Any, w: Any, scales: Any, i: Any, at: tuple[Any, Any], inside: Any) -> jax.Array:
        """Products of integers, each block of rows multiplied by its scales."""
        size = self.chunk[0] // self.blocks
        factors = _joined(self.chunk_scales(scales, i, at, by_row=False))
        factors = self.masked(factors, 0, -(-inside // size))

        def block(b: int) -> jax.Array:
            rows = slice(b * size, (b + 1) * size)
            return self.multiply([x[0][:, rows]], [w[0][rows]]).astype(jnp.float32) * factors[b : b + 1]

        return sum((block(b) for b in range(1, self.blocks)), block(0))


def _aligned(start: Any, unit: int) -> Any:
    return start if isinstance(start, int) else pl.multiple_of(start, unit)


def _rows(ref: Any, start: Any, count: int, lanes: Any) -> jax.Array:
    """Rows of a tile of scales: some of eight, or a multiple of eight. What is loaded must start at one of these."""
    first = _aligned(start // _SUBLANES * _SUBLANES, _SUBLANES)
    rows = ref[0, pl.ds(first, _round_up(count, _SUBLANES)), lanes]
    return rows if count % _SUBLANES == 0 else pltpu.roll(rows, (_SUBLANES - start % _SUBLANES) % _SUBLANES, 0)[:count]


def _pieces(x: jax.Array, count: int) -> list[jax.Array]:
    """Numbers in bfloat16 whose sum is x to 8 bits for each of them."""
    found = []
    for _ in range(count - 1):
        found.append(x.astype(jnp.bfloat16))
        x = x - found[-1].astype(jnp.float32)
    return [*found, x.astype(jnp.bfloat16)]


def _joined(parts: list[jax.Array]) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


def _repeated_rows(x: jax.Array, times: int) -> jax.Array:
    wide = jnp.broadcast_to(x[:, None, :], (x.shape[0], times, x.shape[1]))
    return wide.reshape(x.shape[0] * times, x.shape[1])


def _lanes(x: jax.Array, index: jax.Array) -> jax.Array:
    """`x[:, index]` for an index of 128 lanes. The chip looks up inside of 128 lanes, so each 128 are asked."""
    rows = x.shape[0]
    if rows == 1:  # which would be another kind of look-up
        x = jnp.broadcast_to(x, (_SUBLANES, x.shape[1]))
    lane, group = (jnp.broadcast_to(part, (x.shape[0], _LANES)) for part in (index & _LANES - 1, index >> 7))
    found = None
    for start in range(0, x.shape[1], _LANES):
        here = jnp.take_along_axis(x[:, start : start + _LANES], lane, axis=1, mode="promise_in_bounds")
        found = here if found is None else jnp.where(group == start // _LANES, here, found)
    assert found is not None
    return found[:rows]


def _interleaved(x: jax.Array, count: int) -> jax.Array:
    """Planes side by side, to the order of columns."""
    if count == 1:
        return x
    size, lane = x.shape[1] // count, lax.broadcasted_iota(jnp.int32, (1, _LANES), 1)
    groups = []
    for start in range(0, x.shape[1], _LANES):
        # 128 columns lie in 128 lanes of each plane.
        first = start // count // _LANES * _LANES
        found = jnp.zeros((x.shape[0], _LANES), x.dtype)
        for j in range(count):
            plane = x[:, j * size + first : j * size + first + _LANES]
            found = jnp.where(lane % count == j, _lanes(plane, (start + lane) // count - first), found)
        groups.append(found)
    return _joined(groups)


def _deinterleaved(x: jax.Array, count: int) -> jax.Array:
    """Columns in their order, to planes side by side."""
    if count == 1:
        return x
    lane = lax.broadcasted_iota(jnp.int32, (1, _LANES), 1)
    groups = []
    for j in range(count):
        for start in range(0, x.shape[1], count * _LANES):
            groups.append(_lanes(x[:, start : start + count * _LANES], lane * count + j))
    return _joined(groups)


def register() -> None:
    """Add the kernel to the table."""
    register_kernel("matmul", "tpu", matmul, matmul_fits)
