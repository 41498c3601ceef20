"""PermutedArray: a quantized array whose elements along one axis are stored in another order."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec

from lowbit.runtime import ImplicitArray, aux_field

from .quantized import QuantizedArray
from .table import Format


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PermutedArray(ImplicitArray):
    """A quantized array stored in another order along one axis, as GPTQ with activation order (`g_idx`) stores it.

    - `array`: a `QuantizedArray`. Element i of its axis `axis` is element `order[i]` of the logical array.
    - `order`: int32, a permutation of that axis: one for the whole array, or with the leading axes of the array, one
      for each layer of a stack.
    - `axis`: counted from the end.

    A product along the axis permutes x, `x @ w == x[..., order] @ array`; one along another axis permutes the result.
    The weight is never made dense for it. Operations that would split the axis go dense under the policy.

    >>> import jax.numpy as jnp, lowbit
    >>> stored = lowbit.quantize(jnp.array([[3.0, 3.0], [1.0, 1.0], [2.0, 2.0]]), "int8", axis=-1)
    >>> w = lowbit.PermutedArray(stored, order=jnp.array([2, 0, 1]))
    >>> w.materialize()[:, 0], (jnp.array([[1.0, 0.0, 0.0]]) @ w)[0]
    (Array([1., 2., 3.], dtype=float32), Array([1., 1.], dtype=float32))
    """

    array: QuantizedArray
    order: Any
    axis: int = aux_field(default=-2)

    def __post_init__(self) -> None:
        if not isinstance(self.array, QuantizedArray):
            raise TypeError(f"array must be a QuantizedArray; it is a {type(self.array).__name__}.")
        ndim = self.array.ndim
        if not -ndim <= self.axis < ndim:
            raise ValueError(f"axis={self.axis} is not an axis of an array of shape {tuple(self.array.shape)}.")
        if not jnp.issubdtype(jnp.result_type(self.order), jnp.integer):
            raise TypeError(f"order must have integers; its dtype is {jnp.result_type(self.order)}.")
        object.__setattr__(self, "axis", self.axis - ndim if self.axis >= 0 else self.axis)
        object.__setattr__(self, "order", jnp.asarray(self.order, jnp.int32))
        _ = self.shape  # raises if the order does not fit the array
        check_order(self.order)

    def replace(self, **changes: Any) -> Self:
        """The same array with some fields changed, unchecked."""
        return self._unflatten((changes.get("axis", self.axis),), [changes.get(n, getattr(self, n)) for n in _FIELDS])

    # --- shape and dtype

    @property
    def layers(self) -> int:
        """The number of leading axes, stacked layers, that have an order each."""
        return len(self.order.shape) - 1

    @property
    def shape(self) -> tuple[int, ...]:
        shape, order = tuple(self.array.shape), tuple(self.order.shape)
        place = len(shape) + self.axis
        if place < 0 or not order or len(order) - 1 > place or order != (*shape[: len(order) - 1], shape[place]):
            raise ValueError(
                f"A PermutedArray with an array of shape {shape} and axis={self.axis} cannot have an order of shape "
                f"{order}: it must be the length of that axis, after none, some or all of the axes before it."
            )
        return shape

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the stored array, as stored."""
        return self.array.stored_shape

    @property
    def format_label(self) -> str | None:
        """The name of the format of the stored array."""
        return self.array.format_label

    @property
    def format(self) -> Format | None:
        """The format of the stored array."""
        return self.array.format

    @property
    def scale_axes(self) -> tuple[int, ...]:
        """The axes along which stored elements share a scale."""
        return self.array.scale_axes

    @property
    def block_size(self) -> int | None:
        """The number of stored elements along each of `scale_axes` that share a scale; None for the whole axis."""
        return self.array.block_size

    @property
    def is_stack(self) -> bool:
        return self.layers > 0

    def resolved(self) -> Self:
        return self.replace(array=self.array.resolved())

    def plain(self) -> Self:
        return self.replace(array=self.array.plain())

    def components(self) -> dict[str, Any]:
        return {**self.array.components(), "order": self.order}

    @property
    def mT(self) -> Any:
        if self.layers > self.ndim - 2:
            return super().mT
        return self.replace(array=self.array.mT, axis={-1: -2, -2: -1}.get(self.axis, self.axis))

    @property
    def T(self) -> Any:
        return self.mT if self.ndim == 2 else super().T

    # --- dense values

    def materialize(self) -> jax.Array:
        return _materialize(self)

    def dequantize(self) -> jax.Array:
        """An alias of `materialize`."""
        return self.materialize()

    def in_stored_order(self, x: Any) -> jax.Array:
        """An array of this shape with its elements in the order in which they are stored."""
        return taken(jnp.asarray(x), self.order, self.ndim + self.axis, range(self.layers))

    # --- sharding

    @property
    def sharding(self) -> Any:
        """The sharding of the array, as `jax.Array.sharding`."""
        return self.array.sharding

    def component_specs(self, spec: PartitionSpec, mesh: Any = None) -> Any:
        entries = [*spec, *[None] * (self.ndim - len(spec))]
        if mesh is not None and len(spec) <= self.ndim and _is_split(entries[self.axis], mesh):
            raise ValueError(
                f"Axis {self.axis} of this PermutedArray of shape {self.shape} is permuted and cannot be sharded over "
                f"{entries[self.axis]!r}: shard another axis."
            )
        order = PartitionSpec(*entries[: self.layers], None)
        return self.replace(array=self.array.component_specs(spec, mesh), order=order)

    def logical_spec(self) -> PartitionSpec | None:
        return self.array.logical_spec()

    def _facts(self) -> list[str]:
        name = [repr(self.array.format_label)] if self.array.format_label else []
        return [*name, *super()._facts()[:-1], f"permuted along axis {self.axis}", *super()._facts()[-1:]]


_FIELDS = PermutedArray._fields()[0]


def _is_split(entry: Any, mesh: Any) -> bool:
    names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
    return any(dict(mesh.shape).get(name, 1) > 1 for name in names)


def check_order(order: Any) -> None:
    """Raise a ValueError unless an order is a permutation. A traced one, and one on other hosts, passes."""
    if isinstance(order, Tracer) or not getattr(order, "is_fully_addressable", True):
        return
    values = np.asarray(order)
    numbers = np.broadcast_to(np.arange(values.shape[-1]), values.shape)
    if not np.array_equal(np.sort(values, axis=-1), numbers):
        lacks = np.setdiff1d(numbers, values) if values.ndim == 1 else []
        raise ValueError(
            f"order must have each number from 0 to {values.shape[-1] - 1} once"
            + (f"; it lacks {lacks[0]}." if len(lacks) else " in each layer.")
        )


def inverse(order: jax.Array) -> jax.Array:
    """The permutation that undoes another, for each layer."""
    return jnp.argsort(order, axis=-1).astype(order.dtype)


def taken(x: jax.Array, order: jax.Array, axis: int, layers: Sequence[int]) -> jax.Array:
    """x with element i of an axis taken from `order[i]`; `layers`: the axes of x that the leading ones of order are."""
    if not layers:
        # No index occurs twice, so the gradient is a scatter without collisions.
        return jnp.take(x, order, axis=axis, mode="clip", unique_indices=True)
    first, *others = layers

    def one(x: jax.Array, order: jax.Array) -> jax.Array:
        return taken(x, order, axis - (axis > first), [a - (a > first) for a in others])

    return jax.vmap(one, in_axes=(first, 0), out_axes=first)(x, order)


@partial(jax.jit, inline=True)  # compiled as one when called eagerly
def _materialize(w: PermutedArray) -> jax.Array:
    return taken(w.array.materialize(), inverse(w.order), w.ndim + w.axis, range(w.layers))
