"""The kernel for NVIDIA GPUs, in Pallas (Triton): one tiled product for every format.

A program has a tile of results in registers and walks along k: it loads a tile of x and the codes that go with it,
takes the bytes apart, decodes them by the format's own `levels`, and multiplies on the tensor cores. A tile has all
rows of x, up to 256 of them, so that the stored weight is read once.

The result is the reference's to the rounding of its dtype; `tiling.py` says how weights stay exact. float32 is
multiplied in upper and lower bits, three products for one (TF32x3), never in the upper bits alone.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from lowbit.formats.blocks import WHOLE, span_of
from lowbit.formats.quantized import QuantizedArray
from lowbit.runtime._compat import varying_like

from .._tiles import joined_codes, layer_numbers, matrices, planes, scale_components
from ..groups import step_count, steps_of
from ..product import Product
from .tiling import Tile, Tiling, split, tiling_for


def matmul(product: Product, *, tile: Tile | None = None, interpret: bool = False) -> jax.Array:
    """Run the product; `tile` overrides the sizes. `interpret` runs it in JAX on any platform."""
    x, w = product.x, product.w
    # Scales are decoded where they are used, if the format can decode a tile of them.
    w = w if scale_components(w) else w.plain()
    product = replace(product, w=w)
    count, m, n, dtype = math.prod(product.batch), math.prod(product.rows), product.n, product.dtype
    grouped = product.sizes is not None
    count, m = (1, count * m) if grouped else (count, m)
    tiling = tiling_for(product, tile)
    tile = tiling.tile
    visits = steps_of(product, tile.rows) if grouped else ()
    row_tiles = step_count(product, tile.rows) if grouped else -(-m // tile.rows)
    three = lax.Precision.HIGHEST if interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3  # CPU has no TF32
    precision = three if tiling.unit == jnp.float32 else None
    call = pl.pallas_call(
        partial(_kernel, w=w, contract=product.contract, tiling=tiling, precision=precision, visits=len(visits)),
        out_shape=varying_like(x, (tile.splits, count, m, n), dtype if tile.splits == 1 else jnp.float32),
        grid=(count * tile.splits * -(-n // tile.columns) * row_tiles,),
        compiler_params=triton.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="lowbit_matmul",
    )
    y = call(
        layer_numbers(w),
        *visits,
        x.reshape(count, m, product.k),
        *(matrices(getattr(w, name)) for name in w.packing),
        *(matrices(lax.stop_gradient(getattr(w, name))) for name in scale_components(w)),
        *([] if tiling.table is None else [jnp.asarray(tiling.table)]),
    )
    return (y[0] if tile.splits == 1 else y.sum(0).astype(dtype)).reshape(product.shape)


def _side_by_side(planes: list[jax.Array]) -> jax.Array:
    """Interleave the planes of a tile. Those of a byte are in one thread already, and none moves."""
    rows, width = planes[0].shape[0], len(planes) * planes[0].shape[1]
    while len(planes) > 1:  # first those that are half of all apart, since the last axis varies fastest
        half = len(planes) // 2
        planes = [jnp.stack(pair, -1) for pair in zip(planes[:half], planes[half:], strict=True)]
    return planes[0].reshape(rows, width)


def _levels(w: QuantizedArray, tiles: list[jax.Array], table: Any = None) -> jax.Array:
    """Decode a tile of bytes by the format's arithmetic, or by a table of the levels of all codes."""
    packing = list(w.packing.values())
    unpacked = planes(tiles, packing)
    if table is None:
        return _side_by_side([w.levels(*codes) for codes in unpacked])
    return _side_by_side([triton.load(table.at[joined_codes(codes, packing)]) for codes in unpacked])


def _load(ref: Any, lead: Any, rows: Any, columns: Any) -> Any:
    """The elements of a matrix in these rows and columns, 0 beyond its edges."""
    inside = (rows < ref.shape[1])[:, None] & (columns < ref.shape[2])[None, :]
    return triton.load(ref.at[lead, rows[:, None], columns[None, :]], mask=inside, other=0)


def _scales(w: QuantizedArray, refs: Any, lead: Any, at: tuple[Any, Any]) -> Any:
    """The scales of these stored rows and columns, decoded; of size 1 on the axes that share one."""
    first = jnp.zeros((1,), jnp.int32)
    spans = span_of(w.spans, -2), span_of(w.spans, -1)
    places = [first if span == WHOLE else i // span for i, span in zip(at, spans, strict=True)]
    found = {}
    for (name, wholes), ref in zip(scale_components(w).items(), refs, strict=True):
        rows, columns = (first if whole else i for i, whole in zip(places, wholes, strict=True))
        found[name] = _load(ref, lead, rows, columns)
    return w.replace(**found).scale_values()


def _multiplied(x: jax.Array, weights: jax.Array, contract: int, tiling: Tiling, precision: Any) -> Any:
    """The product of a tile of x with decoded weights, term by term."""
    dims = (((1,), (contract + 2,)), ((), ()))
    x = x.astype(tiling.unit)
    return sum(
        lax.dot_general(x, term, dims, precision=precision, preferred_element_type=jnp.float32)
        for term in split(weights, tiling.unit, tiling.terms)
    )


def _kernel(
    layers: Any,
    *refs: Any,
    w: QuantizedArray,
    contract: int,
    tiling: Tiling,
    precision: Any,
    visits: int,
) -> None:
    tile = tiling.tile
    steps, x, refs = refs[:visits], refs[visits], refs[visits + 1 :]
    codes, scales = refs[: len(w.packing)], refs[len(w.packing) :][: len(scale_components(w))]
    *table, y = refs[len(codes) + len(scales) :]
    (_, m, k), n, per_byte = x.shape, y.shape[-1], min(w.packing.values())
    row_tiles = steps[0].shape[0] if steps else -(-m // tile.rows)
    place, of = pl.program_id(0), (row_tiles, -(-n // tile.columns), tile.splits)
    # Rows vary fastest: programs that share codes run at the same time.
    row, column = place % of[0], place // of[0] % of[1]
    share, batch = place // (of[0] * of[1]) % of[2], place // (of[0] * of[1] * of[2])
    # A visit of a tile multiplies it by the matrix of one group, if there is one, and keeps the rows of that group.
    at, matrix, begin, end = (ref[row] for ref in steps) if steps else (row, batch, 0, m)
    layer = layers[jnp.maximum(matrix, 0)]
    rows = at * tile.rows + jnp.arange(tile.rows)
    columns = column * tile.columns + jnp.arange(tile.columns)
    spans = span_of(w.spans, -2), span_of(w.spans, -1)

    def of_columns(first: Any) -> Any:
        """The scale of each result, from this k on."""
        k = first + jnp.arange(1)
        found = _scales(w, scales, layer, (k, columns) if contract == -2 else (columns, k))
        return found.reshape(1, found.size)

    def step(i: Any, sums: Any) -> Any:
        ks = i * tile.depth + jnp.arange(tile.depth)
        r, c = (ks, columns) if contract == -2 else (columns, ks)
        bytes_ = c.size // per_byte
        at = (column if contract == -2 else i) * bytes_ + jnp.arange(bytes_)
        # Where a byte of one component goes with several of another, it is loaded for each, from the cache.
        components = zip(codes, w.packing.values(), strict=True)
        tiles = [_load(ref, layer, r, at // (count // per_byte)) for ref, count in components]
        weights = _levels(w, tiles, *table)
        if not tiling.after:
            weights = weights * _scales(w, scales, layer, (r, c))
        product = _multiplied(_load(x, batch, rows, ks), weights, contract, tiling, precision)
        return sums + (product * of_columns(i * tile.depth) if tiling.after and spans[contract] != WHOLE else product)

    count = -(-k // tile.depth)
    length = -(-count // tile.splits)
    zero = jnp.zeros((tile.rows, tile.columns), jnp.float32)
    last = jnp.minimum((share + 1) * length, count)
    if steps:
        last = jnp.where((matrix >= 0) & (begin < end), last, 0)
    sums = lax.fori_loop(share * length, last, step, zero)
    if tiling.after and spans[contract] == WHOLE:
        sums = sums * of_columns(0)
    inside = ((rows >= begin) & (rows < end))[:, None] & (columns < n)[None, :]
    triton.store(y.at[share, batch, rows[:, None], columns[None, :]], sums.astype(y.dtype), mask=inside)
