"""GPTQ (arXiv:2210.17323): round a weight so that its product with the calibration data changes least.

Inputs are rounded one after the other, those with the largest second moment first. The error of each is compensated by
the inputs that are still to be rounded, as the second moments tell. Scales are given and stay.
"""

import dataclasses
import functools
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .blocks import pack, spread
from .levels import Levels
from .moments import DAMPING, Moments
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
    """An array with the codes of GPTQ, and tr(E^T H E) of its errors, summed over layers."""

    array: QuantizedArray
    lost: jax.Array


@jax.jit
def round_by_moments(weight: jax.Array, array: QuantizedArray, moments: Moments) -> Rounded:
    """The array, which is the weight quantized, with the codes of GPTQ in each layer where they lose less."""
    levels = SortedLevels.of(array)
    shape = array.stored_shape
    w = moments.as_matrices(weight.astype(jnp.float32))
    scales = moments.as_matrices(spread(array.scale_values(), array.spans, shape))
    stored = array.offset_values()
    offsets = None if stored is None else moments.as_matrices(spread(stored, array.spans, shape))
    before = moments.as_matrices(array.decode())
    hessians = jnp.asarray(moments.hessian).reshape(-1, moments.k, moments.k)

    def layer(given: Any) -> Any:
        w, scales, offsets, before, h = given
        found = gptq(w, scales, offsets, h, levels)
        after = levels.decode(found) * scales + (0 if offsets is None else offsets)
        return found, lost(w - after, h), lost(w - before, h)

    found, now, then = lax.map(layer, (w, scales, offsets, before, hessians))
    kept = levels.nearest((before - (0 if offsets is None else offsets)) * reciprocal(scales))
    codes = moments.as_weight(jnp.where((now < then)[:, None, None], found, kept))
    return Rounded(with_positions(array, levels, codes), jnp.sum(jnp.minimum(now, then)))


def lost(error: jax.Array, h: jax.Array) -> jax.Array:
    """tr(E^T H E): the squared error of the products with the data."""
    return jnp.sum(error * jnp.matmul(h, error, precision=_HIGHEST))


def uncompensated(h: jax.Array) -> jax.Array:
    """What is left of the second moment of each input if inputs that are rounded after it compensate its error.

    It weights the squared errors of rounding in the expected tr(E^T H E) of GPTQ, as the diagonal of H does without it.
    """
    diag = jnp.diag(h)
    order = jnp.argsort(-diag)
    factor = _factor(h[order][:, order], jnp.mean(diag))
    return jnp.zeros_like(diag).at[order].set(jnp.diag(factor) ** 2 * jnp.mean(diag))


def gptq(w: jax.Array, scales: jax.Array, offsets: Any, h: jax.Array, levels: SortedLevels) -> jax.Array:
    """The positions of the levels of a matrix (K, N) with these scales and second moments (K, K).

    With H = V V^T and V upper triangular, |X E|^2 is the sum over i of (V_ii E_i + sum over j < i of V_ji E_j)^2: the
    best level of input i depends on the errors of those before it. This needs no inverse of H.
    """
    k, n = w.shape
    diag = jnp.diag(h)
    order = jnp.argsort(-diag)
    short, wide = -k % BLOCK, min(n, COLUMNS)
    factor = _factor(jnp.pad(h[order][:, order], ((0, short), (0, short))), jnp.mean(diag))
    feedback = (factor / jnp.diag(factor)).T

    def chunks(x: jax.Array) -> jax.Array:
        """Columns are independent: as many at a time as stay in a cache, in (chunk, block, input, column)."""
        x = jnp.pad(x[order], ((0, short), (0, -n % wide))).reshape(-1, BLOCK, -(-n // wide), wide)
        return jnp.moveaxis(x, 2, 0)

    given = chunks(w), chunks(scales), None if offsets is None else chunks(offsets)
    found = jnp.moveaxis(lax.map(partial(_rounded_columns, feedback, levels), given), 0, 2)
    return jnp.zeros(w.shape, jnp.uint8).at[order].set(found.reshape(k + short, -1)[:k, :n])


def _rounded_columns(feedback: jax.Array, levels: SortedLevels, given: Any) -> jax.Array:
    """The positions of the levels of some columns, in blocks of inputs: a product for each, then one by one."""
    w, scales, offsets = given
    offsets = jnp.zeros_like(w) if offsets is None else offsets

    def block(errors: jax.Array, given: Any) -> Any:
        start, w, scales, offsets = given
        rows = lax.dynamic_slice_in_dim(feedback, start, BLOCK)
        wanted = w + jnp.matmul(rows, errors, precision=_HIGHEST)
        corner = lax.dynamic_slice_in_dim(rows, start, BLOCK, 1)
        inverse = reciprocal(scales)

        def step(i: Any, state: Any) -> Any:
            wanted, errors, found = state
            position = levels.nearest((wanted[i] - offsets[i]) * inverse[i])
            error = w[i] - (levels.decode(position) * scales[i] + offsets[i])
            # Without the barrier XLA computes the error anew for every row of the outer product: three times the time.
            position, error = lax.optimization_barrier((position, error))
            # Row i itself is done: what its own entry of the corner, 1, adds to it does not matter.
            return wanted + jnp.outer(corner[:, i], error), errors.at[i].set(error), found.at[i].set(position)

        state = wanted, jnp.zeros_like(w), jnp.zeros(w.shape, jnp.uint8)
        _, own, found = lax.fori_loop(0, BLOCK, step, state)
        return lax.dynamic_update_slice_in_dim(errors, own, start, 0), found

    blocks, _, n = w.shape
    nothing = jnp.zeros((blocks * BLOCK, n), jnp.float32)
    return lax.scan(block, nothing, (BLOCK * jnp.arange(blocks), w, scales, offsets))[1]


def _factor(h: jax.Array, mean: jax.Array) -> jax.Array:
    """The upper triangular V with V V^T = h + damping. Inputs that were always 0 are independent of all others."""
    h = h / jnp.where(mean > 0, mean, 1)
    eye = jnp.eye(h.shape[0], dtype=h.dtype)
    h = h + eye * (jnp.diag(h) <= 0)
    flipped = h[::-1, ::-1]  # so that the factor is upper triangular

    def attempt(damping: jax.Array) -> jax.Array:
        return jnp.linalg.cholesky(flipped + damping * eye)

    def fails(state: tuple[jax.Array, jax.Array]) -> jax.Array:
        return ~jnp.isfinite(state[1]).all() & (state[0] < 1e6)

    def again(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return state[0] * 10, attempt(state[0] * 10)

    start = jnp.float32(DAMPING)
    lower = lax.while_loop(fails, again, (start, attempt(start)))[1]
    return lower[::-1, ::-1]
