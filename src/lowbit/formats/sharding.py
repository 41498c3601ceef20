"""Sharding of quantized arrays: from that of the array to that of its components, and back."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from lowbit.runtime import ImplicitArray
from lowbit.runtime._compat import mesh_in_context

from .blocks import WHOLE, span_of, stored_length


class ShardedArray(ImplicitArray):
    """Sharding in terms of the array's logical axes."""

    codes: jax.Array
    index: jax.Array | None
    transposed: bool
    component_spans: Callable[[], dict[str, tuple[int, ...]]]
    map_components: Callable[..., Any]
    swapped: Callable[[int], int]

    @property
    def sharding(self) -> Any:
        """The sharding of the array, as `jax.Array.sharding`."""
        stored: Any = self.codes.sharding
        spec = self.logical_spec()
        return stored if spec is None else NamedSharding(stored.mesh, spec)

    @property
    def is_sharded(self) -> bool:
        """Whether devices hold different shards of it."""
        return not self.sharding.is_fully_replicated

    def with_sharding(self, sharding: NamedSharding | PartitionSpec | None) -> Self:
        """Shard the array by its own axes. A PartitionSpec refers to the mesh in context; None changes nothing.

        >>> import jax, jax.numpy as jnp, lowbit
        >>> mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))
        >>> lowbit.Array8B(jnp.ones((64, 32))).with_sharding(sharding).sharding == sharding
        True
        """
        if sharding is None:
            return self
        traced = isinstance(self.codes, Tracer)
        if isinstance(sharding, PartitionSpec):
            mesh = None if traced else mesh_in_context()
            if mesh is None:  # JAX resolves the mesh of `with mesh:`, or raises if there is none
                specs = self.component_specs(sharding, jax.sharding.get_abstract_mesh())
                return jax.tree.map(lax.with_sharding_constraint, self, specs)
            sharding = NamedSharding(mesh, sharding)
        place = lax.with_sharding_constraint if traced else jax.device_put
        return jax.tree.map(place, self, self.component_shardings(sharding))

    def reshard(self, sharding: NamedSharding | PartitionSpec | None) -> Self:
        """An alias of `with_sharding`."""
        return self.with_sharding(sharding)

    def with_mesh_and_axis(self, mesh_and_axis: tuple[Any, Any]) -> Self:
        """Shard over a mesh by a PartitionSpec, its entries, a single name for the first axis, or None."""
        mesh, axis = mesh_and_axis
        entries = () if axis is None else (axis,) if isinstance(axis, str) else axis
        return self.with_sharding(NamedSharding(mesh, PartitionSpec(*entries)))

    def _elements(self, axis: int) -> list[int]:
        """The number of array elements that one element of each component covers along an axis."""
        spans = (span_of(spans, self.swapped(axis)) for spans in self.component_spans().values())
        return [span for span in spans if span != WHOLE]

    def component_specs(self, spec: PartitionSpec, mesh: Any = None) -> Any:
        if mesh is not None:
            check_shards(self.shape, spec, mesh, self._elements)
        entries = [*spec, *[None] * (self.ndim - len(spec))]
        if self.transposed:
            entries[-2:] = entries[:-3:-1]
        if self.index is not None:
            entries[: self.index.ndim] = [None]

        def along(_: Any, spans: tuple[int, ...]) -> PartitionSpec:
            first = -len(entries)
            return PartitionSpec(*(None if span_of(spans, first + i) == WHOLE else e for i, e in enumerate(entries)))

        return self.map_components(along, index=None if self.index is None else PartitionSpec())

    def logical_spec(self) -> PartitionSpec | None:
        sharding: Any = getattr(self.codes, "sharding", None)
        if not hasattr(sharding, "spec"):
            return None
        if self.transposed and len(self.codes.shape) < 2:
            return None  # `shape` says what is wrong
        spec = (*sharding.spec, *[None] * (len(self.codes.shape) - len(sharding.spec)))
        if self.index is not None:
            spec = (*[None] * self.index.ndim, *spec[1:])
        return PartitionSpec(*spec[:-2], spec[-1], spec[-2]) if self.transposed else PartitionSpec(*spec)


def check_shards(
    shape: Sequence[int], spec: PartitionSpec, mesh: Any, elements: Callable[[int], Sequence[int]] = lambda axis: (1,)
) -> None:
    """Raise a ValueError unless every device gets an equal shard of whole blocks and bytes.

    `elements(axis)`: the number of array elements that each stored element covers.
    """
    if len(spec) > len(shape):
        raise ValueError(
            f"{spec} has {len(spec)} entries, and the array of shape {tuple(shape)} has {len(shape)} axes."
        )
    sizes = dict(mesh.shape)
    for axis, entry in enumerate(spec, -len(shape)):
        names = () if entry is None or entry is PartitionSpec.UNCONSTRAINED else entry
        names = names if isinstance(names, tuple) else (names,)
        shards = math.prod(sizes.get(name, 1) for name in names)
        counts = [stored_length(shape[axis], span) for span in elements(axis)]
        if shards > 1 and any(n % shards for n in counts):
            fits = next(d for d in range(shards, 0, -1) if not any(n % d for n in counts))
            block = math.lcm(*elements(axis))
            raise ValueError(
                f"Axis {axis} of length {shape[axis]} cannot be sharded over the {shards} devices of {names}: "
                f"each shard must hold {f'whole blocks of {block} elements' if block > 1 else 'as many elements'}. "
                f"{fits} {'device' if fits == 1 else 'devices'} would do."
            )


def explicit_axes(*types: Any) -> tuple[str, ...]:
    """The explicit axes of the mesh."""
    mesh = next((mesh for type in types if not (mesh := type.sharding.mesh).empty), None)
    if mesh is None:
        return ()
    return tuple(name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit)
