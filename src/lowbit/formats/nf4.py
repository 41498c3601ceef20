"""NF4: 4 bits per weight, the sixteen levels of a normal distribution (QLoRA, arXiv:2305.14314, appendix E).

    value = LEVELS[code] * absmax[block],  absmax = max |w| of the block

Components: `packed` uint8, two codes a byte along the last stored axis, the first in the high nibble; `absmax` float32,
one for each block along `axis`; the last block and byte may be short. A block of zeros has absmax 0 and code 7.

`double_quant`: the scales of each matrix, in stored order, are stored in 8 bits per group of 256:

    absmax = DYNAMIC_MAP[code] * group_absmax[group] + offset

Where the row length is a multiple of the block, codes, blocks and scales are those of bitsandbytes.
"""

import functools
import math
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ._encode import encode
from ._inputs import checked_dtype, checked_input, checked_scale, finite_or_nan, raise_if_not_finite, spans_of_input
from .blocks import WHOLE, block_max, ordered_sum, pack, spread
from .levels import chosen
from .quantized import QuantizedArray, stored
from .sharding import explicit_axes
from .table import Format, register_format

# fmt: off
LEVELS = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
], np.float32)
# fmt: on
GROUP = 256  # scales that share a group scale
_TABLE = 65536  # steps of [-1, 1] in which bitsandbytes looks up the code of a scale


@stored
class ArrayNF4(QuantizedArray):
    """An array in 4 bits: `ArrayNF4(w)` quantizes, `ArrayNF4(packed=..., absmax=..., block_size=...)` takes components.

    >>> import jax.numpy as jnp, lowbit
    >>> q = lowbit.ArrayNF4.quantize(jnp.ones((128, 256)), axis=-2)
    >>> (jnp.ones((2, 128)) @ q)[0, 0], q.packed.shape, q.absmax.shape
    (Array(128., dtype=float32), (128, 128), (2, 256))
    """

    group_absmax: jax.Array | None
    offset: jax.Array | None

    component_names: ClassVar[dict[str, str]] = {"packed": "codes", "absmax": "scales"}
    code_dtypes: ClassVar[tuple[np.dtype, ...]] = (np.dtype(np.uint8),)
    block_sizes: ClassVar[tuple[int, ...] | None] = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
    scale_components: ClassVar[tuple[str, ...]] = ("group_absmax", "offset")

    @classmethod
    def quantize(
        cls,
        array: Any,
        block_size: int = 64,
        *,
        axis: int | None = None,
        dtype: Any = None,
        double_quant: bool = False,
        scale: Any = None,
    ) -> Self:
        """Quantize a dense array.

        - `block_size`: how many elements along `axis` share a scale; a power of two from 16 to 4096.
        - `axis`: default -2, the one that `x @ w` contracts, or -1 for an array with one axis.
        - `double_quant`: store the scales in 8 bits, 4.127 bits per weight in all.
        - `dtype`: the dtype of the array; default that of the input.
        - `scale`: the scales to round by instead of max |w|; values beyond them are clipped.
        """
        array = checked_input(array, "nf4")
        dtype = checked_dtype(dtype, array, "nf4")
        if block_size not in (cls.block_sizes or ()):
            raise ValueError(f"block_size={block_size} must be a power of two from 16 to 4096.")
        spans = spans_of_input(array, axis, block_size)
        if scale is not None and double_quant:
            raise ValueError("double_quant=True stores other scales than those given by scale=: choose one of the two.")
        components = _encode(array, spans, double_quant, checked_scale(scale, array.shape, spans, "nf4"))
        raise_if_not_finite(array, components["group_absmax" if double_quant else "scales"], "nf4")
        return cls.build(shape=array.shape, dtype=dtype, spans=spans, **components)

    @property
    def packing(self) -> dict[str, int]:
        return {"codes": 2}

    @property
    def int8_multiplier(self) -> int | None:
        return 127

    @property
    def decoder(self) -> np.ndarray:
        return LEVELS

    @property
    def scale_codec(self) -> str | None:
        return None if self.group_absmax is None else "dynamic"

    def coded_scales(self) -> tuple[Any, Any, Any, Any] | None:
        if self.group_absmax is None or self.offset is None:
            return None
        count, many = math.prod(self.scales.shape[-2:]), self.group_absmax.shape[-1]
        if many != -(-count // GROUP):
            raise ValueError(
                f"These are {count} of the 8-bit scales of an ArrayNF4, and the {many} groups of {GROUP} of all of "
                "them: a slice does not know which groups are its own. Slice .plain(), which has float32 scales."
            )
        groups, offset = (component.astype(jnp.float32) for component in (self.group_absmax, self.offset))
        return self.scales, groups, offset, jnp.asarray(dynamic_map())

    def with_coded_scales(self) -> Self:
        return self.replace(**_encode_scales(self.scale_values()))

    def levels(self, *codes: jax.Array) -> jax.Array:
        return chosen(codes[0], LEVELS)

    def scale_values(self) -> jax.Array:
        coded = self.coded_scales()
        if coded is None:
            return super().scale_values()
        codes, groups, offset, table = coded
        # Look the group of each scale up by number: repeated group scales would not be sharded as the scales are.
        matrix = codes.shape[-2:]
        number = jnp.arange(math.prod(matrix)).reshape(matrix) // GROUP
        tops = jnp.take(groups.reshape(*codes.shape[:-2], groups.shape[-1]), number, axis=-1)
        return _looked_up(table, codes) * tops + offset

    @property
    def packed(self) -> jax.Array:
        """The codes, two in each byte."""
        return self.weight

    @property
    def absmax(self) -> jax.Array:
        """The scales as float32."""
        return self.logical_view(self.resolved().scale_values())


def _looked_up(table: jax.Array, codes: jax.Array) -> jax.Array:
    """`table[codes]`, sharded as the codes are, which has to be stated on explicit axes."""
    told = {"out_sharding": jax.typeof(codes).sharding} if explicit_axes(jax.typeof(codes)) else {}
    return table.at[codes.astype(jnp.int32)].get(mode="promise_in_bounds", **told)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _encode(
    array: jax.Array, spans: tuple[int, ...], double_quant: bool, scale: jax.Array | None = None
) -> dict[str, Any]:
    if scale is None:
        codes, scales = encode("encode", functools.partial(_by_jax, spans=spans), array, spans=spans, format="nf4")
    else:
        codes, scales = _by_jax(jax.lax.stop_gradient(array), spans, scale)
    components = {"codes": codes, "scales": scales, "group_absmax": None, "offset": None}
    if not double_quant:
        return components
    explicit = explicit_axes(jax.typeof(scales))
    if not explicit:
        return components | _encode_scales(scales)
    # Groups span all scales of a matrix, on whichever device. Automatic axes spare a sharding for every step.
    where: Any = jax.typeof(scales).sharding
    groups = PartitionSpec(*where.spec[:-2], *[None] * min(scales.ndim, 2))
    out = {"scales": where, "group_absmax": where.update(spec=groups), "offset": where.update(spec=groups)}
    encode_scales: Any = jax.sharding.auto_axes(_encode_scales, axes=explicit, out_sharding=out)
    return components | encode_scales(scales)


def _by_jax(array: jax.Array, spans: tuple[int, ...], scale: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    array = array.astype(jnp.float32)
    scales = finite_or_nan(block_max(array, spans))
    scales = scales if scale is None else jnp.where(jnp.isnan(scales), jnp.nan, scale)
    # The reciprocal of a very large scale would be subnormal. Scaling by a power of two is exact.
    shrink = jnp.where(scales > 1e30, np.float32(2.0**-20), 1)
    inverse = 1 / jnp.where(scales > 0, scales * shrink, 1)
    relative = array * spread(shrink, spans, array.shape) * spread(inverse, spans, array.shape)
    # The nearest level is the number of midpoints below. A value on a midpoint takes the lower level.
    midpoints = (LEVELS[:-1] + LEVELS[1:]) / np.float32(2)
    codes = functools.reduce(jnp.add, [(relative > m).astype(jnp.uint8) for m in midpoints])
    return pack(codes, 2), scales


def _encode_scales(scales: jax.Array) -> dict[str, jax.Array]:
    lead = scales.shape[:-2]
    flat = scales.reshape(*lead, math.prod(scales.shape[len(lead) :]))
    finite = jnp.isfinite(flat)
    # The mean of the finite scales, so that a NaN affects its own group only.
    count = jnp.maximum(finite.sum(-1, keepdims=True), 1).astype(jnp.float32)
    offset = ordered_sum(jnp.where(finite, flat, 0), -1, keepdims=True) / count
    groups = jnp.pad(flat - offset, [(0, 0)] * len(lead) + [(0, -flat.shape[-1] % GROUP)])
    groups = groups.reshape(*lead, groups.shape[-1] // GROUP, GROUP)
    top = finite_or_nan(jnp.squeeze(block_max(groups, (WHOLE,)), -1))
    relative = jnp.clip(groups * (1 / jnp.where(top > 0, top, 1))[..., None], -1, 1)
    step = jnp.floor((relative + 1) * 0.5 * (_TABLE - 1) + 0.5)
    codes = jnp.take(_scale_codes(), jnp.nan_to_num(step).astype(jnp.int32), axis=0)
    codes = jnp.where(top[..., None] == 0, 0, codes).astype(jnp.uint8)
    codes = codes.reshape(*lead, math.prod(codes.shape[-2:]))[..., : flat.shape[-1]].reshape(scales.shape)
    own = [1] * (min(scales.ndim, 2) - 1)  # as many axes as the array has
    return {
        "scales": codes,
        "group_absmax": top.reshape(*lead, *own, top.shape[-1]),
        "offset": offset.reshape(*lead, *own, 1),
    }


@functools.cache
def dynamic_map() -> np.ndarray:
    """The 256 values of an 8-bit scale: 0, 1, and for e = 0..6 +-10^(e-6) times the centres of 2^e cells of [0.1, 1]"""
    low, values = np.float32(0.1), [0.0, 1.0]
    for e in range(7):
        n = 2**e
        step = float(np.float32((np.float32(1) - low) / np.float32(n)))
        # Counted from the nearer end and rounded once, as the tables in files are.
        edges = np.array(
            [float(low) + step * k if k < (n + 1) // 2 else 1 - step * (n - k) for k in range(n + 1)], np.float32
        )
        centres = np.float32(10.0 ** (e - 6)) * ((edges[:-1] + edges[1:]) / np.float32(2))
        values += [*centres, *-centres]
    return np.sort(np.array(values, np.float32))


@functools.cache
def _scale_codes() -> np.ndarray:
    """The nearest entry of the dynamic map for each step of [-1, 1]."""
    midpoints = np.float32(0.5) * (dynamic_map()[:-1] + dynamic_map()[1:])
    steps = np.float32(2) * np.arange(_TABLE, dtype=np.float32) / np.float32(_TABLE - 1) - np.float32(1)
    return np.searchsorted(midpoints, steps, side="left").astype(np.uint8)


NF4 = register_format(
    Format("nf4", ArrayNF4.quantize, error=0.0920, bits=4.0, options=frozenset({"double_quant"}), top=1)
)
