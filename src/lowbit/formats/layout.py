"""Encode arrays of declared formats: what a `Layout` means, and codes and scales by it."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._encode import encode
from .blocks import WHOLE, block_max, pack, span_of, spread
from .levels import Integers, Levels, Powers
from .search import (
    FACTORS,
    by_blocks,
    flushed,
    joined,
    reciprocal,
    search_affine,
    search_scale,
    unit_of,
    weights_of,
    weights_of_inputs,
)


@dataclasses.dataclass(frozen=True)
class Layout:
    """What the bits of a format mean.

    - `levels`: what a code means before scaling.
    - `block_size`: how many elements share a scale by default; None for the whole axis.
    - `scales`: what a scale code means; None for floats.
    - `group`: what one group scale covers: "axis" for all blocks along the axis, "matrix", a number of elements along
      the axis, or None.
    - `group_divides`: scale codes are divided by the group scale instead of multiplied.
    - `weighting`: of squared errors in the search (see `search.weights_of`); None if scales are not searched for.
    """

    levels: Levels
    block_size: int | None
    scales: Levels | None = None
    group: str | int | None = None
    group_divides: bool = False
    weighting: str | None = "root"

    @property
    def packing(self) -> dict[str, int]:
        """How many codes each byte of a code component holds: 3, 5 and 6 bits are in two components."""
        low, high = {3: (2, 1), 5: (4, 1), 6: (4, 2)}.get(self.levels.bits, (self.levels.bits, 0))
        return {"codes": 8 // low} | ({"high": 8 // high} if high else {})

    @property
    def anchor(self) -> float:
        """The level that the largest magnitude of a block takes if scales are not searched for."""
        # The OCP rule for powers of two: the largest exponent of a level, so that magnitudes above it are clipped.
        largest = self.levels.largest
        return 2.0 ** math.floor(math.log2(largest)) if isinstance(self.scales, Powers) else largest

    @property
    def is_signed(self) -> bool:
        """Whether scales may be negative."""
        return self.scales is None or self.scales.is_signed

    @property
    def options(self) -> frozenset[str]:
        """The options of `PackedArray.quantize` that the layout has a use for."""
        able = {
            "offset": isinstance(self.levels, Integers),
            "search": self.weighting is not None,
            "scale_dtype": self.scales is None,
        }
        return frozenset(name for name, has_use in able.items() if has_use)

    @property
    def group_factor(self) -> np.float32:
        """The group scale in units of the largest magnitude: the largest scale that a search may try is the largest
        scale code."""
        assert self.scales is not None
        return np.float32((FACTORS[-1] if self.weighting else 1) / (self.levels.largest * self.scales.largest))

    def group_spans(self, spans: Sequence[int], ndim: int) -> tuple[int, ...]:
        """The spans of group scales, for scales with these spans."""
        if self.group == "matrix":  # and all blocks along the axes of the scales, if these are others
            axes = range(-max(min(ndim, 2), len(spans)), 0)
            return tuple(WHOLE if axis >= -2 or span_of(spans, axis) != 1 else 1 for axis in axes)
        group = self.group if isinstance(self.group, int) else WHOLE
        return tuple(span if span == 1 else group for span in spans)


class Options(NamedTuple):
    """How to encode; the arguments of the same names of `PackedArray.quantize`."""

    offset: bool
    search: bool
    scale_dtype: np.dtype

    def check(self, layout: Layout, name: str) -> None:
        if self.offset and not isinstance(layout.levels, Integers):
            raise ValueError(f"offset=True is for integers, and {name!r} has other levels.")
        if layout.scales is not None and self.scale_dtype != np.float32:
            raise ValueError(
                f"scale_dtype={self.scale_dtype} is for scales that are floats; those of {name!r} are codes."
            )


@dataclasses.dataclass(frozen=True)
class _Store:
    """How scales are stored: as floats, or as codes in units of a group scale."""

    codec: Levels | None
    dtype: np.dtype
    group: jax.Array

    def stored(self, scales: jax.Array) -> jax.Array:
        return scales.astype(self.dtype) if self.codec is None else self.codec.nearest(scales * reciprocal(self.group))

    def round(self, scales: jax.Array) -> jax.Array:
        """The scales that are read back."""
        stored = self.stored(scales)
        return stored.astype(jnp.float32) if self.codec is None else self.codec.decode(stored) * self.group


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def encode_blocks(
    array: jax.Array,
    spans: tuple[int, ...],
    layout: Layout,
    options: Options,
    given: jax.Array | None,
    importance: jax.Array | None = None,
) -> dict[str, Any]:
    """The components of an array of this layout.

    `given` are scales to round by, `importance` the weights of squared errors in the search (see `weights_of_inputs`).
    """
    array = lax.stop_gradient(array)
    by_jax = functools.partial(_by_jax, spans=spans, layout=layout, options=options, given=given, importance=importance)
    if options.search and not options.offset and importance is None:
        return encode("search", by_jax, array, spans=spans, layout=layout, options=options)
    return by_jax(array)


def _by_jax(
    array: jax.Array,
    spans: tuple[int, ...],
    layout: Layout,
    options: Options,
    given: jax.Array | None = None,
    importance: jax.Array | None = None,
) -> dict[str, Any]:
    array = array.astype(jnp.float32)
    largest = block_max(array, spans)
    finite = jnp.isfinite(largest) if given is None else jnp.isfinite(largest) & jnp.isfinite(given)
    array = jnp.where(spread(finite, spans, array.shape), array, 0)
    largest = jnp.where(finite, largest, 0)
    if options.offset:
        found = _affine(array, spans, layout, options, largest, importance)
    else:
        found = _symmetric(array, spans, layout, options, largest, given, importance)
    codes = found.pop("codes")
    if layout.scales is None:
        found["scales"] = jnp.where(finite, found["scales"], jnp.nan)
    else:
        found["scales"] = jnp.where(finite, found["scales"], np.uint8(layout.scales.nan_code or 0))
    low = 8 // layout.packing["codes"]
    split = {"codes": codes & np.uint8(2**low - 1), "high": codes >> np.uint8(low)}
    return {name: pack(split[name], per_byte) for name, per_byte in layout.packing.items()} | found


def _symmetric(
    array: jax.Array,
    spans: tuple[int, ...],
    layout: Layout,
    options: Options,
    largest: jax.Array,
    given: Any,
    importance: Any,
) -> dict[str, jax.Array]:
    group_spans = layout.group_spans(spans, array.ndim) if layout.group else spans
    top = np.float32(layout.levels.largest)
    reach = block_max(array if given is None else jnp.nan_to_num(given) * top, group_spans if given is None else ())
    if given is not None and layout.group:
        reach = _group_max(reach, spans, group_spans)
    # Relative to a power of two near the largest, so that nothing overflows or underflows on the way.
    unit = unit_of(reach)
    array = array / spread(unit, group_spans, array.shape)
    group = 1 / unit  # codes that stand alone are in units of 1
    if layout.scales is not None and layout.group:
        group = reach / unit * layout.group_factor
    store = _Store(layout.scales, options.scale_dtype, group)
    if given is not None:
        scales = store.round(given / unit)
    elif options.search and sum(span != 1 for span in spans) == 1:
        scales = _searched(array, spans, largest / unit, layout, store, importance)
    else:
        scales = store.round(largest / unit * np.float32(1 / layout.anchor))
    codes = layout.levels.nearest(array * spread(reciprocal(scales), spans, array.shape))
    if layout.scales is None:
        # A scale below the range of float32 is 0, and so are its weights; one below a narrow range would lose weights
        # that matter.
        wide = flushed(scales * unit)
        stored = wide.astype(options.scale_dtype)
        fits = jnp.isfinite(stored) & ((stored != 0) | (wide == 0))
        return {"codes": codes, "scales": jnp.where(fits, stored, jnp.nan)}
    return {"codes": codes, "scales": store.stored(scales)} | ({"group_scales": group * unit} if layout.group else {})


def _group_max(values: jax.Array, spans: Sequence[int], group_spans: Sequence[int]) -> jax.Array:
    """The largest of the scales in each group."""
    axes = [a for a in range(-len(group_spans), 0) if group_spans[a] == WHOLE and span_of(spans, a) != WHOLE]
    return jnp.max(values, axis=tuple(axes), keepdims=True)


def encode_scales(
    layout: Layout, spans: Sequence[int], scales: jax.Array, group: jax.Array | None, by_block: Callable[[Any], Any]
) -> dict[str, jax.Array]:
    """Codes for scales in float32, in units of their group scales, which grow where a scale exceeds their range.

    `by_block` gives each block the value of its group.
    """
    assert layout.scales is not None
    if group is None:
        unit, changed = 1, {}
    else:
        largest = _group_max(jnp.abs(scales), spans, layout.group_spans(spans, scales.ndim))
        needed = largest * np.float32(1 / layout.scales.largest)
        exceeded = needed > group * np.float32(1 + 1e-6)  # the largest may be one ulp beyond
        group = jnp.where(exceeded, needed, group).astype(group.dtype)
        unit, changed = by_block(group), {"group_scales": group}
    codes = layout.scales.nearest(scales * reciprocal(jnp.asarray(unit, jnp.float32)))
    finite = jnp.isfinite(scales)
    return {"scales": jnp.where(finite, codes, np.uint8(layout.scales.nan_code or 0)), **changed}


def _searched(
    array: jax.Array, spans: tuple[int, ...], largest: jax.Array, layout: Layout, store: _Store, importance: Any
) -> jax.Array:
    axis = next(a for a in range(-len(spans), 0) if spans[a] != 1)
    blocks, mask, count = by_blocks(array, axis, spans[axis])

    def moved(scales: jax.Array) -> jax.Array:
        return jnp.moveaxis(scales, axis, -1)[..., None, None]

    weights = weights_of(blocks, mask, count, layout.weighting or "plain")
    if importance is not None:
        weights = weights_of_inputs(blocks, importance, axis, spans[axis], weights)
    store = dataclasses.replace(store, group=moved(store.group))
    scales = search_scale(blocks, weights, moved(largest), layout.levels, store.round, layout.is_signed)
    return joined(scales, axis, scales.shape[-3])


def _affine(
    array: jax.Array, spans: tuple[int, ...], layout: Layout, options: Options, largest: jax.Array, importance: Any
) -> dict[str, jax.Array]:
    unit = unit_of(largest)
    axis = next(a for a in range(-len(spans), 0) if spans[a] != 1)
    blocks, mask, count = by_blocks(array / spread(unit, spans, array.shape), axis, spans[axis])
    outside = 0 if mask is None else jnp.where(mask > 0, 0, jnp.inf)
    bounds = jnp.min(blocks + outside, -2, keepdims=True), jnp.max(blocks - outside, -2, keepdims=True)
    levels = Integers(layout.levels.bits)

    def rounded(values: jax.Array) -> jax.Array:
        return values.astype(options.scale_dtype).astype(jnp.float32)

    if options.search:
        weights = weights_of(blocks, mask, count, layout.weighting or "plain")
        if importance is not None:
            weights = weights_of_inputs(blocks, importance, axis, spans[axis], weights)
        scales, offsets = search_affine(blocks, weights, bounds, levels, rounded)
    else:
        scales, offsets = rounded((bounds[1] - bounds[0]) / (2**levels.bits - 1)), rounded(bounds[0])
    codes = levels.nearest((blocks - offsets) * reciprocal(scales))
    both = {"scales": scales, "offsets": offsets}
    stored = {name: (joined(x, axis, x.shape[-3]) * unit).astype(options.scale_dtype) for name, x in both.items()}
    fits = jnp.isfinite(stored["scales"]) & jnp.isfinite(stored["offsets"])
    stored["scales"] = jnp.where(fits, stored["scales"], jnp.nan)
    return {"codes": joined(codes, axis, array.shape[axis]), **stored}
