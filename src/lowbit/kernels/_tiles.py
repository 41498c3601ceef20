"""What the tiled kernels share: the index of a layer in a stored stack, unpacking codes, and levels known beforehand.

A byte holds neighbours of the last axis, and interleaving them would move them between lanes. So a tile of codes is
split into *planes*: plane j has the columns j, j + n, j + 2n, ... for n codes in a byte, each where its byte lies. The
activations or results that go with the planes are small, and are (de)interleaved instead.

Where codes have several components, n is that of the component with the fewest codes in a byte. A byte of another
component then belongs to several of its bytes, and is repeated for each of them.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lowbit.formats.blocks import WHOLE, span_of
from lowbit.formats.quantized import QuantizedArray


def layer_numbers(w: QuantizedArray) -> jax.Array:
    """The index in the stored stack of each matrix of the batch."""
    inner = w.stored_shape[1:-2] if w.index is not None else w.stored_shape[:-2]
    own = jnp.arange(math.prod(inner), dtype=jnp.int32)
    if w.index is None:
        return own
    chosen = jnp.clip(w.index.astype(jnp.int32), 0, w.stored_shape[0] - 1)
    return (chosen.reshape(-1, 1) * own.size + own).reshape(-1)


def matrices(component: jax.Array) -> jax.Array:
    """A component as one stack of matrices."""
    return component.reshape(-1, *component.shape[-2:])


def planes(tiles: Sequence[jax.Array], packing: Sequence[int]) -> list[list[jax.Array]]:
    """Unpack the codes of a tile, plane by plane: for each plane, the codes of each component.

    `tiles` has a tile of bytes for each component, with a byte for each one of the component with the fewest codes in
    a byte. Bytes are widened first: tiles have no 8-bit arithmetic.
    """
    count = min(packing)
    unpacked = [
        _unpacked(tile.astype(jnp.int32), per_byte, count) for tile, per_byte in zip(tiles, packing, strict=True)
    ]
    return [list(codes) for codes in zip(*unpacked, strict=True)]


def _unpacked(tile: jax.Array, per_byte: int, count: int) -> list[jax.Array]:
    """The `count` codes of each byte; where a byte is repeated, each copy has its own share of the byte's codes."""
    if per_byte == 1:
        return [tile]
    bits, copies = 8 // per_byte, per_byte // count
    if copies > 1:
        copy = lax.broadcasted_iota(jnp.int32, tile.shape, 1) & copies - 1
        tile = tile >> (copies - 1 - copy) * (bits * count)
    shifted = [tile >> bits * (count - 1 - j) for j in range(count)]
    top = [] if copies > 1 else [shifted.pop(0)]  # nothing is above it
    return [*top, *(plane & (1 << bits) - 1 for plane in shifted)]


def joined_codes(codes: Sequence[jax.Array], packing: Sequence[int]) -> jax.Array:
    """The codes of all components in one: an index in the `level_table`."""
    first, shift = codes[0], 8 // packing[0]
    index = first & 255 if shift == 8 else first  # a signed byte was widened with its sign
    for more, per_byte in zip(codes[1:], packing[1:], strict=True):
        index, shift = index | more << shift, shift + 8 // per_byte
    return index


def level_table(w: QuantizedArray) -> np.ndarray:
    """The level of every code. Bits of the first component are the lowest of an index."""
    indices, components = np.arange(1 << sum(8 // n for n in w.packing.values()), dtype=np.int32), []
    for per_byte in w.packing.values():
        bits = 8 // per_byte
        components.append(indices & (1 << bits) - 1)
        indices = indices >> bits
    if w.codes.dtype == jnp.int8 and len(components) == 1:
        components = [np.where(components[0] < 128, components[0], components[0] - 256)]
    return constant(lambda: np.asarray(jax.jit(w.levels)(*components)))


def constant(fn: Callable[[], Any]) -> Any:
    """Run a function of constants on a device that is here.

    A mesh in context may be of devices that are described only, and the context is that of a thread.
    """
    with ThreadPoolExecutor(1) as other:
        return other.submit(fn).result()


def scale_components(w: QuantizedArray) -> dict[str, tuple[bool, bool]]:
    """The components from which `scale_values` decodes tile by tile; none if it needs whole ones.

    For each, whether one element covers all of the last two axes; a tile of it goes with a tile of the scales.
    """
    spans = w.component_spans()
    names = [name for name in spans if name not in w.packing and name != "offsets"]
    if any(getattr(w, name) is not None for name in w.scale_components):
        return {}
    found = {name: tuple(span_of(spans[name], axis) for axis in (-2, -1)) for name in names}
    if any(span not in (own, WHOLE) for of in found.values() for span, own in zip(of, found["scales"], strict=True)):
        return {}
    return {name: (rows == WHOLE, columns == WHOLE) for name, (rows, columns) in found.items()}
