"""The kernel for TPU, in Pallas: one tiled product for every format.

A step of the grid holds a tile of stored bytes over the whole summed axis (if that is not very long), the activations
and a tile of the result. It decodes a chunk of bytes at a time, plane by plane, and multiplies it on the matrix unit.
Activations stay where they are from step to step, so that weight, x and y cross the memory bus once.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lowbit.formats.blocks import spread
from lowbit.formats.quantized import QuantizedArray
from lowbit.runtime._compat import varying_like

from .._tiles import layer_numbers, matrices
from ..groups import matrix_of_rows, steps_of
from ..product import Product
from .blocks import grid_of, in_specs, out_spec, scale_windows
from .decode import decode, lookup_table
from .tiling import LANES, Sizes, Tiling, tiling_for, vmem
from .vector import aligned, deinterleaved, interleaved, joined, lanes, repeated_lanes, repeated_rows, rows, terms


def matmul(product: Product, chip: str, *, sizes: Sizes | None = None, interpret: bool = False) -> jax.Array:
    """Run the product on a chip of this kind. `interpret` runs it in JAX on any platform."""
    x = product.x
    x = x.astype(jnp.float32) if x.dtype == jnp.float16 else x  # which the chip does not have
    tiling = tiling_for(product, chip, sizes)
    x = x.reshape(*tiling.shape[:2], product.k)
    return Kernel(product, tiling).call(x, interpret=interpret).reshape(product.shape).astype(product.dtype)


class Visit(NamedTuple):
    """A step for one group of rows: whether there is something to multiply, the first row and the one behind."""

    has_rows: Any
    begin: Any
    end: Any

    @classmethod
    def of_step(cls, steps: Any, step: Any, rows: int) -> Self:
        """The visit of a step, with its rows counted from the first one of the tile."""
        tile, matrix, begin, end = (of[step] for of in steps)
        return cls((matrix >= 0) & (begin < end), begin - tile * rows, end - tile * rows)

    def kept(self, result: jax.Array, before: jax.Array) -> jax.Array:
        """The rows of the group, and the others as they were; each is in one group, or in the rest, which is zero."""
        row = lax.broadcasted_iota(jnp.int32, result.shape, 0)
        return jnp.where((row >= self.begin) & (row < self.end), result, before)


@dataclass(frozen=True, eq=False)
class Kernel:
    """A product, divided by a tiling."""

    product: Product
    tiling: Tiling

    @property
    def w(self) -> QuantizedArray:
        return self.product.w

    def call(self, x: jax.Array, *, interpret: bool) -> jax.Array:
        """The product with x of shape (batch, m, k)."""
        tiling = self.tiling
        (batch, m, n, _), sizes = tiling.shape, tiling.sizes
        prefetched = self.prefetched()
        # The visits of a tile of rows by several groups follow each other on one core.
        by_rows = "arbitrary" if tiling.steps else "parallel"
        decoded = [pltpu.VMEM((1, *(w.length for w in scale_windows(tiling))), jnp.float32)] if tiling.coded else []
        kernel = pl.pallas_call(
            self.step,
            out_shape=varying_like(x, (batch, m, n), tiling.dtype),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(prefetched),
                grid=grid_of(tiling),
                in_specs=in_specs(tiling),
                out_specs=out_spec(tiling),
                scratch_shapes=[
                    pltpu.VMEM((sizes.m, sizes.n), jnp.int32 if tiling.fast and tiling.folded else jnp.float32),
                    *decoded,
                ],
            ),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", by_rows, "arbitrary"),
                vmem_limit_bytes=vmem(tiling.chip),
            ),
            interpret=interpret,
            name="lowbit_matmul",
        )
        return kernel(*prefetched, *self.operands(x))

    def prefetched(self) -> list[jax.Array]:
        """The layer of each matrix of the batch; or of each step, with its tile, matrix, first row and row behind."""
        layers = layer_numbers(self.w)
        if not self.tiling.steps:
            return [layers]
        steps = steps_of(self.product, self.tiling.sizes.m)
        return [layers[jnp.maximum(steps.matrix, 0)], *steps]

    def operands(self, x: jax.Array) -> list[jax.Array]:
        """What the kernel reads, in the order of `in_specs`."""
        w, tiling = self.w, self.tiling
        codes = [matrices(getattr(w, name)) for name in w.packing]
        if tiling.coded:
            scales = [matrices(getattr(w, name)) for name in tiling.coded]
        else:
            scales = [matrices(w.scale_values())]
        if tiling.folded:
            (of,) = scales
            of = spread(of, tiling.spans, w.stored_shape[-2:]).reshape(of.shape[0], 1, -1)
            scales = [jnp.broadcast_to(of, (*of.shape[:2], tiling.shape[2])) if of.shape[-1] == 1 else of]
        table = lookup_table(tiling)
        table = [] if table is None else [jnp.asarray(table)]
        return [*codes, *scales, *table, *(self.quantized(x, scales[0]) if tiling.fast else (x,))]

    def quantized(self, x: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Activations in 8 bits, and what to multiply each row of the result by."""
        x = x.astype(jnp.float32)
        if self.tiling.folded == "x":
            layers = layer_numbers(self.w)
            of_x = layers[matrix_of_rows(self.product)] if self.tiling.steps else layers
            x = (x.reshape(of_x.size, -1, x.shape[-1]) * scales[of_x]).reshape(x.shape)
        tops = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 127
        codes = jnp.round(x / jnp.where(tops > 0, tops, 1)).astype(jnp.int8)
        return codes, tops / (self.tiling.fast or 1)

    # --- scales

    def chunk_scales(self, scales: Any, i: Any, at: tuple[Any, Any], by_row: bool = True) -> list[jax.Array]:
        """The scales of a chunk, for each plane: by row, or one row for each block; one where a block covers all."""
        tiling = self.tiling
        in_rows, in_columns = scale_windows(tiling)
        row, column = tiling.stored(*at)
        row, column = in_rows.offset(row), in_columns.offset(column)
        behind = i * tiling.sizes.chunk
        row, column = (row + behind, column) if tiling.contract == -2 else (row, column + behind)
        (height, columns), (row_span, column_span), per_byte = tiling.chunk, tiling.spans, tiling.planes
        # All lanes that the chunk needs, from a whole row of lanes on.
        cover = column_span * LANES
        first = column // cover
        count = max(height // row_span, 1)
        needed = pl.ds(aligned(first * LANES, LANES), -(-columns // cover) * LANES)
        window = rows(scales, row // row_span, count, needed)
        behind = column - first * cover

        def plane(j: int) -> jax.Array:
            groups = []
            for g in range(columns // per_byte // LANES):
                lane = lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
                groups.append(lanes(window, (behind + (lane + g * LANES) * per_byte + j) // column_span))
            return joined(groups)

        found = [plane(0)] * per_byte if column_span % per_byte == 0 else [plane(j) for j in range(per_byte)]
        return [repeated_rows(x, height // count) if by_row and count > 1 else x for x in found]

    # --- a step

    def decode_scales(self, refs: list[Any], scratch: Any) -> Any:
        """The scales of a step: as they come, or decoded by the format from the codes of its window."""
        if not self.tiling.coded:
            return refs[0]
        names = self.tiling.coded
        scratch[0] = self.w.replace(**{name: ref[0] for name, ref in zip(names, refs, strict=True)}).scale_values()
        return scratch

    def step(self, *refs: Any) -> None:
        grouped = bool(self.tiling.steps)
        rest = list(refs[5 if grouped else 1 :])
        codes = [rest.pop(0) for _ in self.tiling.packing]
        scales = [rest.pop(0) for _ in self.tiling.coded or "1"]
        table = None if lookup_table(self.tiling) is None else rest.pop(0)
        scratch = rest.pop() if self.tiling.coded else None
        x, *factors, y, total = rest
        scales = self.decode_scales(scales, scratch)
        tiling, sizes = self.tiling, self.tiling.sizes
        at = pl.program_id(1 if grouped else 2), pl.program_id(3)  # not known inside of the loop
        k = at[1]
        visit = Visit.of_step(refs[1:5], pl.program_id(2), sizes.m) if grouped else None

        @pl.when(k == 0)
        def _() -> None:
            total[...] = jnp.zeros_like(total)

        def add_chunk(i: Any, _: Any) -> None:
            inside = tiling.shape[3] - k * sizes.k - i * sizes.chunk
            left, right = self.activations(x, scales, i, inside), self.weights(codes, table, scales, i, at, inside)
            blocks = tiling.blocks
            total[...] += self.by_block(left, right, scales, i, at, inside) if blocks else self.multiply(left, right)

        def add_all() -> None:
            lax.fori_loop(0, sizes.k // sizes.chunk, add_chunk, None)

        add_all() if visit is None else pl.when(visit.has_rows)(add_all)

        @pl.when(k == tiling.grid[3] - 1)
        def _() -> None:
            result = total[...].astype(jnp.float32) * factors[0][0] if factors else total[...]
            if tiling.contract == -2:
                result = interleaved(result, tiling.planes)
            result = (result * scales[0] if tiling.folded == "y" else result).astype(y.dtype)
            y[0] = result if visit is None else visit.kept(result, y[0])

    def masked(self, x: jax.Array, axis: int, inside: Any) -> jax.Array:
        """Zero where a chunk reaches beyond the end of the summed axis; `inside` of it are before the end."""
        k, sizes = self.tiling.shape[3], self.tiling.sizes
        if k % sizes.chunk == 0 and k % sizes.k == 0:
            return x
        return jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, axis) < inside, x, 0)

    def activations(self, x: Any, scales: Any, i: Any, inside: Any) -> list[jax.Array]:
        """A chunk of x in bfloat16 terms or int8, in the order of the planes that it is multiplied with."""
        tiling, size = self.tiling, self.tiling.sizes.chunk
        at = pl.ds(aligned(i * size, LANES), size)
        values = x[0, :, at].astype(jnp.float32)
        if tiling.folded == "x" and not tiling.fast:
            values = values * scales[0, :, at]
        values = self.masked(values, 1, inside)
        if tiling.contract == -1:
            values = deinterleaved(values, tiling.planes)
        return [values.astype(jnp.int8)] if tiling.fast else terms(values, tiling.x_terms)

    def weights(
        self, codes: list[Any], table: Any, scales: Any, i: Any, at: tuple[Any, Any], inside: Any
    ) -> list[jax.Array]:
        """A chunk of the weight in bfloat16 terms or int8, its planes side by side."""
        tiling = self.tiling
        tiles = [self.chunk_bytes(*component, i) for component in zip(codes, tiling.packing, strict=True)]
        values = decode(self.w, tiling, tiles, table)
        if tiling.fast:
            return [(joined(values) if tiling.fast == 1 else jnp.round(joined(values) * tiling.fast)).astype(jnp.int8)]
        if tiling.folded is None:
            values = [a * b for a, b in zip(values, self.chunk_scales(scales, i, at), strict=True)]
        if tiling.folded is None or not np.isfinite(tiling.levels).all():
            # x is zero there, but a scale or a level may be NaN.
            axis, count = 0 if tiling.contract == -2 else 1, tiling.planes
            values = [
                self.masked(a, axis, inside if axis == 0 else (inside - j + count - 1) // count)
                for j, a in enumerate(values)
            ]
        return terms(joined(values), tiling.w_terms)

    def chunk_bytes(self, ref: Any, per_byte: int, i: Any) -> jax.Array:
        """The bytes of a chunk of one component, repeated where others need more of them."""
        tiling, size = self.tiling, self.tiling.sizes.chunk
        if tiling.contract == -2:
            tile = ref[0, pl.ds(aligned(i * size, LANES), size), :]
        else:
            tile = ref[0, :, pl.ds(aligned(i * (size // per_byte), LANES), size // per_byte)]
        times = per_byte // tiling.planes
        return repeated_lanes(tile.astype(jnp.int32), times) if times > 1 else tile

    def multiply(self, x: list[jax.Array], w: list[jax.Array]) -> jax.Array:
        """The sum of the products of terms, without those that are smaller than the last bit."""
        dims = (((1,), (0 if self.tiling.contract == -2 else 1,)), ((), ()))
        most = max(len(x), len(w))
        products = [
            lax.dot_general(a, b, dims, preferred_element_type=jnp.int32 if self.tiling.fast else jnp.float32)
            for i, a in enumerate(x)
            for j, b in enumerate(w)
            if i + j < most
        ]
        return sum(products[1:], products[0])

    def by_block(self, x: Any, w: Any, scales: Any, i: Any, at: tuple[Any, Any], inside: Any) -> jax.Array:
        """Products of integers, each block of rows multiplied by its scales."""
        size = self.tiling.chunk[0] // self.tiling.blocks
        factors = joined(self.chunk_scales(scales, i, at, by_row=False))
        factors = self.masked(factors, 0, -(-inside // size))

        def block(b: int) -> jax.Array:
            within = slice(b * size, (b + 1) * size)
            return self.multiply([x[0][:, within]], [w[0][within]]).astype(jnp.float32) * factors[b : b + 1]

        return sum((block(b) for b in range(1, self.tiling.blocks)), block(0))
