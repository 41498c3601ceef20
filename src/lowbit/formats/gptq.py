"""GPTQ (arXiv:2210.17323): round a weight so that its product with the calibration data changes least.

Inputs are rounded one after the other, those with the largest second moment first. The error of each is compensated by
the inputs that are still to be rounded, as the second moments tell. Scales are then fitted to these codes, and each
input is rounded again for the errors of all others (coordinate descent).
"""

import dataclasses
import functools
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .blocks import pack, span_of, spread
from .levels import Levels
from .moments import Moments
from .quantized import QuantizedArray
from .search import reciprocal

BLOCK = 32  # inputs that are rounded before the rest is updated
COLUMNS = 1024  # outputs that are rounded together
_FEW = 64  # levels
_HIGHEST = lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class SortedLevels(Levels):
    """The levels of any format in ascending order, each with its code. `nearest` gives positions instead of codes."""

    values: tuple[float, ...] = ()
    codes: tuple[int, ...] = ()

    @classmethod
    def of(cls, array: QuantizedArray) -> "SortedLevels":
        """The levels of the format of an array, from its `levels`."""
        low, *high = array.packing.items()
        bits = sum(8 // per_byte for _, per_byte in (low, *high))
        signed = any(np.issubdtype(dtype, np.signedinteger) for dtype in array.code_dtypes)
        # Codes of integers are symmetric around 0.
        first, last = array.code_range or ((-127, 127) if signed else (0, 2**bits - 1))
        codes = np.arange(first, last + 1).astype(np.int8 if signed else np.uint8)
        with jax.ensure_compile_time_eval():
            levels = np.asarray(array.levels(*_split(jnp.asarray(codes), array.packing)))
        finite = np.flatnonzero(np.isfinite(levels))
        values, place = np.unique(levels[finite], return_index=True)
        return cls(bits, tuple(values.tolist()), tuple(codes[finite][place].tolist()))

    @property
    def middle(self) -> np.ndarray:
        """Where the nearest level changes."""
        values = np.array(self.values, np.float32)
        return (values[:-1] + values[1:]) / np.float32(2)

    def decode(self, codes: jax.Array) -> jax.Array:
        if len(self.values) > _FEW:
            return jnp.take(self.table, codes.astype(jnp.int32), mode="clip")
        found = jnp.full(codes.shape, self.table[0])
        for place, value in enumerate(self.table[1:], 1):
            found = jnp.where(codes >= place, value, found)
        return found

    def nearest(self, values: jax.Array) -> jax.Array:
        if len(self.values) > _FEW:
            return jnp.searchsorted(self.middle, values, method="scan_unrolled").astype(jnp.uint8)
        # A comparison for each level, which is vectorized, where a search is not.
        return functools.reduce(jnp.add, [(values > m).astype(jnp.uint8) for m in self.middle])

    @functools.cached_property
    def table(self) -> np.ndarray:
        return np.array(self.values, np.float32)


def _split(codes: jax.Array, packing: dict[str, int]) -> list[jax.Array]:
    """Codes as one array for each code component."""
    if len(packing) == 1:
        return [codes]
    low = 8 // next(iter(packing.values()))
    return [codes & np.uint8(2**low - 1), codes >> np.uint8(low)]


def with_positions(array: QuantizedArray, levels: SortedLevels, positions: jax.Array) -> QuantizedArray:
    """The array with other codes: those at these positions among the levels, in its shape."""
    codes = jnp.take(np.array(levels.codes, array.codes.dtype), positions.astype(jnp.int32), mode="clip")
    split = zip(array.packing.items(), _split(codes, array.packing), strict=True)
    return array.replace(**{name: pack(component, per_byte) for (name, per_byte), component in split})


class Rounded(NamedTuple):
    """An array with the codes of GPTQ.

    - `positions`: of its codes among the sorted levels, in the shape of the array.
    - `lost`: tr(E^T H E) of the errors E of each output of each layer, (stack, N). Outputs are rounded independently.
    """

    array: QuantizedArray
    positions: jax.Array
    lost: jax.Array


@jax.jit
def round_by_moments(
    weight: jax.Array, array: QuantizedArray, moments: Moments, start: jax.Array | None = None
) -> Rounded:
    """The array, which is the weight quantized, with the codes of GPTQ in each output where they lose less.

    With `start`, positions of codes that were found with other scales, each input is rounded once more from there.
    """
    levels = SortedLevels.of(array)
    shape = array.stored_shape
    w = moments.as_matrices(weight.astype(jnp.float32))
    scales = moments.as_matrices(spread(array.scale_values(), array.spans, shape))
    stored = array.offset_values()
    offsets = None if stored is None else moments.as_matrices(spread(stored, array.spans, shape))
    before = moments.as_matrices(array.decode())
    hessians = jnp.asarray(moments.hessian).reshape(-1, moments.k, moments.k)

    def layer(given: Any) -> Any:
        w, scales, offsets, before, start, h, damping = given
        found = gptq(w, scales, offsets, start, h, levels, damping)
        after = levels.decode(found) * scales + (0 if offsets is None else offsets)
        return found, lost(w - after, h), lost(w - before, h)

    first = None if start is None else moments.as_matrices(start)
    found, now, then = lax.map(layer, (w, scales, offsets, before, first, hessians, moments.damping.reshape(-1)))
    kept = levels.nearest((before - (0 if offsets is None else offsets)) * reciprocal(scales))
    positions = moments.as_weight(jnp.where((now < then)[:, None], found, kept))
    return Rounded(with_positions(array, levels, positions), positions, jnp.minimum(now, then))


@jax.jit
def better_outputs(first: Rounded, second: Rounded, moments: Moments) -> Rounded:
    """Of two roundings of a weight with scales along its inputs, the one of each output that loses less.

    No output depends on another, so that layers and columns alone give the same bits as all together.
    """
    (axis,) = moments.inputs
    better = second.lost < first.lost
    wide = moments.as_weight(jnp.broadcast_to(better[:, None], (len(better), moments.k, better.shape[-1])))
    outputs = lax.slice_in_dim(wide, 0, 1, axis=wide.ndim + axis)
    positions = jnp.where(outputs, second.positions, first.positions)
    scales = {
        name: jnp.where(outputs, getattr(second.array, name), component)
        for name, component in first.array.components().items()
        if name not in first.array.packing
    }
    array = with_positions(first.array.replace(**scales), SortedLevels.of(first.array), positions)
    return Rounded(array, positions, jnp.minimum(first.lost, second.lost))


def lost(error: jax.Array, h: jax.Array) -> jax.Array:
    """tr(E^T H E) of each column of E: the squared error of the products with the data."""
    return jnp.sum(error * jnp.matmul(h, error, precision=_HIGHEST), 0)


@jax.jit
def uncompensated(moments: Moments) -> jax.Array:
    """What is left of the second moment of each input if inputs that are rounded after it compensate its error.

    It has the shape of `diag`, and weights the squared errors of rounding in the expected tr(E^T H E) of GPTQ, as the
    diagonal does without it.
    """

    def layer(given: Any) -> jax.Array:
        h, damping = given
        diag = jnp.diag(h)
        order, mean = jnp.argsort(-diag), jnp.mean(diag)
        factor = _factor(_relative(h[order][:, order], mean), damping)
        return jnp.zeros_like(diag).at[order].set(jnp.where(diag[order] > 0, jnp.diag(factor) ** 2 * mean, 0))

    hessians = jnp.asarray(moments.hessian).reshape(-1, moments.k, moments.k)
    return lax.map(layer, (hessians, moments.damping.reshape(-1))).reshape(moments.diag.shape)


def gptq(
    w: jax.Array,
    scales: jax.Array,
    offsets: Any,
    start: jax.Array | None,
    h: jax.Array,
    levels: SortedLevels,
    damping: jax.Array,
) -> jax.Array:
    """The positions of the levels of a matrix (K, N) with these scales and second moments (K, K).

    With H = V V^T and V upper triangular, |X E|^2 is the sum over i of (V_ii E_i + sum over j < i of V_ji E_j)^2: the
    best level of input i depends on the errors of those before it. This needs no inverse of H. From positions to start
    with, the best level depends on the errors of all others, by the row of H.
    """
    k, n = w.shape
    diag = jnp.diag(h)
    order = jnp.argsort(-diag)
    short, wide = -k % BLOCK, min(n, COLUMNS)
    h = _relative(jnp.pad(h[order][:, order], ((0, short), (0, short))), jnp.mean(diag))
    if start is None:
        factor = _factor(h, damping)
        feedback = (factor / jnp.diag(factor)).T
    else:
        h = h + damping * jnp.eye(len(h))
        feedback = h / jnp.diag(h)[:, None]

    def chunks(x: jax.Array) -> jax.Array:
        """Columns are independent: as many at a time as stay in a cache, in (chunk, block, input, column)."""
        x = jnp.pad(x[order], ((0, short), (0, -n % wide))).reshape(-1, BLOCK, -(-n // wide), wide)
        return jnp.moveaxis(x, 2, 0)

    given = [None if x is None else chunks(x) for x in (w, scales, offsets, start)]
    found = jnp.moveaxis(lax.map(partial(_rounded_columns, feedback, levels), given), 0, 2)
    return jnp.zeros(w.shape, jnp.uint8).at[order].set(found.reshape(k + short, -1)[:k, :n])


def _rounded_columns(feedback: jax.Array, levels: SortedLevels, given: Any) -> jax.Array:
    """The positions of the levels of some columns, in blocks of inputs: a product for each, then one by one.

    `feedback` has a row for each input with what the error of each other one adds to the weight, and ones on the
    diagonal. Inputs without a position to start with have no error until they are rounded.
    """
    w, scales, offsets, start = given
    offsets = jnp.zeros_like(w) if offsets is None else offsets
    errors = jnp.zeros_like(w) if start is None else w - (levels.decode(start) * scales + offsets)

    def block(errors: jax.Array, given: Any) -> Any:
        start, w, scales, offsets = given
        rows = lax.dynamic_slice_in_dim(feedback, start, BLOCK)
        before = lax.dynamic_slice_in_dim(errors, start, BLOCK)
        wanted = w + jnp.matmul(rows, errors, precision=_HIGHEST)
        corner = lax.dynamic_slice_in_dim(rows, start, BLOCK, 1)
        inverse = reciprocal(scales)

        def step(i: Any, state: Any) -> Any:
            wanted, errors, found = state
            position = levels.nearest((wanted[i] - before[i] - offsets[i]) * inverse[i])
            error = w[i] - (levels.decode(position) * scales[i] + offsets[i])
            # Without the barrier XLA computes the error anew for every row of the outer product: three times the time.
            position, error = lax.optimization_barrier((position, error))
            # Row i itself is done: what its own entry of the corner, 1, adds to it does not matter.
            wanted = wanted + jnp.outer(corner[:, i], error - before[i])
            return wanted, errors.at[i].set(error), found.at[i].set(position)

        _, own, found = lax.fori_loop(0, BLOCK, step, (wanted, before, jnp.zeros(w.shape, jnp.uint8)))
        return lax.dynamic_update_slice_in_dim(errors, own, start, 0), found

    errors = errors.reshape(-1, w.shape[-1])
    return lax.scan(block, errors, (BLOCK * jnp.arange(len(w)), w, scales, offsets))[1]


@jax.jit
def refitted_scales(weight: jax.Array, array: QuantizedArray, moments: Moments) -> jax.Array:
    """The scales with the least tr(E^T H E) for the codes of an array without offsets, in the shape of its scales.

    Its blocks lie along the only axis of inputs. Block after block, each scale is chosen for the errors of the others.
    A scale that would change its sign stays.
    """
    (axis,) = moments.inputs
    shape, span = array.stored_shape, span_of(array.spans, axis) or moments.k
    w = moments.as_matrices(weight.astype(jnp.float32))
    wide = spread(array.scale_values(), array.spans, shape)
    level = moments.as_matrices(array.decode()) * reciprocal(moments.as_matrices(wide))
    blocks, short = -(-moments.k // span), -moments.k % span
    hessians = jnp.asarray(moments.hessian).reshape(-1, moments.k, moments.k)

    def layer(given: Any) -> jax.Array:
        w, level, scales, h, damping = given
        padded = ((0, short), (0, 0))
        h = _relative(jnp.pad(h, ((0, short), (0, short))), jnp.mean(jnp.diag(h)))
        h = h + damping * jnp.eye(len(h))
        w, level = jnp.pad(w, padded), jnp.pad(level, padded)

        def block(state: Any, start: jax.Array) -> Any:
            errors, scales = state
            own, scale = lax.dynamic_slice_in_dim(level, start, span), scales[start // span]
            rows = lax.dynamic_slice_in_dim(h, start, span)
            slope = jnp.sum(own * jnp.matmul(rows, errors, precision=_HIGHEST), 0)
            corner = lax.dynamic_slice_in_dim(rows, start, span, 1)
            step = slope * reciprocal(jnp.sum(own * jnp.matmul(corner, own, precision=_HIGHEST), 0))
            step = jnp.where((scale + step) * scale > 0, step, 0)
            left = lax.dynamic_slice_in_dim(errors, start, span) - own * step
            errors = lax.dynamic_update_slice_in_dim(errors, left, start, 0)
            return (errors, scales.at[start // span].add(step)), None

        state = w - level * jnp.pad(jnp.repeat(scales, span, 0)[: moments.k], padded), scales
        return lax.scan(block, state, span * jnp.arange(blocks))[0][1]

    each = moments.as_matrices(wide)[:, ::span]
    found = lax.map(layer, (w, level, each, hessians, moments.damping.reshape(-1)))
    everywhere = moments.as_weight(jnp.repeat(found, span, 1)[:, : moments.k])
    return lax.slice_in_dim(everywhere, 0, None, span, everywhere.ndim + axis)


def _relative(h: jax.Array, mean: jax.Array) -> jax.Array:
    """Second moments in units of the mean; inputs that were always 0 are independent of all others."""
    h = h / jnp.where(mean > 0, mean, 1)
    return h + jnp.diag(jnp.where(jnp.diag(h) <= 0, 1.0, 0.0))


def _factor(h: jax.Array, damping: jax.Array) -> jax.Array:
    """The upper triangular V with V V^T = h + damping, which grows until there is one."""
    eye = jnp.eye(h.shape[0], dtype=h.dtype)
    flipped = h[::-1, ::-1]  # so that the factor is upper triangular

    def attempt(damping: jax.Array) -> jax.Array:
        return jnp.linalg.cholesky(flipped + damping * eye)

    def fails(state: tuple[jax.Array, jax.Array]) -> jax.Array:
        return ~jnp.isfinite(state[1]).all() & (state[0] < 1e6)

    def again(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return state[0] * 10, attempt(state[0] * 10)

    lower = lax.while_loop(fails, again, (damping, attempt(damping)))[1]
    return lower[::-1, ::-1]
