"""Operations over several devices: each device runs the operation on its own shards of the components.

A kernel is opaque to the compiler, which would move codes and scales one by one. So an operation states which axes of
its operands correspond, and what to do if the axis that it sums over is sharded.
"""

import hashlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lowbit.dispatch import by_platform
from lowbit.formats.blocks import WHOLE, span_of
from lowbit.formats.quantized import QuantizedArray
from lowbit.formats.sharding import explicit_axes
from lowbit.kernels.lazy import warn_not_partitioned
from lowbit.kernels.product import Product
from lowbit.runtime._compat import can_partition_calls, device_kind, meshes_of

Entry = Any  # of a PartitionSpec: None, a name, or a tuple of names
Kernels = Mapping[str, Callable[..., jax.Array]]  # by platform


class Sharded(Protocol):
    """An operation that can be partitioned over devices."""

    def __call__(self, *operands: jax.Array) -> jax.Array:
        """Run the operation on the shards of one device."""
        ...

    def description(self) -> str:
        """All that the result depends on beside the operands: equal for equal operations, also in another process."""
        ...

    def rule(self) -> tuple[str, dict[str, Any]]:
        """The sharding rule in Shardy's notation, and the sizes of factors that it cannot infer."""
        ...

    def partition(self, mesh: Mesh, operands: Any) -> tuple[tuple[Any, ...], Any, Callable[..., jax.Array]]:
        """The shardings that the operands must have, that of the result, and what each device runs."""
        ...


def devices_in_use(*operands: jax.Array) -> int:
    """How many devices a program may run on: all that JAX has, or those of a mesh that it is traced for."""
    return max(jax.device_count(), *(mesh.size for mesh in meshes_of(*operands)))


def over_devices(operation: Sharded, *operands: jax.Array, like: Callable[..., jax.Array]) -> jax.Array:
    """Run the operation on each device's shards. `like` is the same in operations that JAX partitions by itself."""
    kinds = {kind for type in map(jax.typeof, operands) for kind in type.sharding.mesh.axis_types}
    if devices_in_use(*operands) == 1 or kinds == {AxisType.Manual}:  # the operands are shards already
        return operation(*operands)
    explicit = explicit_axes(*map(jax.typeof, operands))
    # In a shard_map over some axes of the mesh JAX has no custom partitioning.
    if AxisType.Manual in kinds:
        return like(*operands)
    if not can_partition_calls(*operands):
        return (_by_types if kinds == {AxisType.Explicit} else _on_one)(operation, *operands, like=like)
    # In a jit of its own: a partitioned call may not have constants, and the reference of a format may.
    call = custom_partitioning(jax.jit(lambda *operands: operation(*operands)))
    rule, sizes = operation.rule()

    def partition(mesh: Mesh, operands: Any, result: Any) -> Any:
        shardings, out, on_each_device = operation.partition(mesh, operands)
        return mesh, _without_mesh(on_each_device), out, shardings

    call.def_partition(
        partition=partition,
        infer_sharding_from_operands=lambda mesh, operands, result: operation.partition(mesh, operands)[1],
        sharding_rule=rule,
        **sizes,
    )
    named = _named(call, operation)
    if not explicit:
        return named(*operands)
    automatic: Any = jax.sharding.auto_axes(named, axes=explicit, out_sharding=_type_of(like, *operands).sharding)
    return automatic(*operands)


def _named(call: Callable[..., jax.Array], operation: Sharded) -> Callable[..., jax.Array]:
    """`call` under a name that says what it computes.

    A program has only the address of a partitioned call, which another one may get later, and
    `jax_remove_custom_partitioning_ptr_from_cache_key` leaves out even that. Without the name, JAX's compilation cache
    takes programs of two formats whose components have equal shapes and dtypes for the same.
    """

    def named(*operands: jax.Array) -> jax.Array:
        return call(*operands)

    digest = hashlib.sha256(operation.description().encode()).hexdigest()
    named.__name__ = f"lowbit_{type(operation).__name__}_{digest[:32]}"
    return jax.jit(named)


def _description(kernels: Kernels, tree: Any, w: QuantizedArray) -> str:
    """The platforms with a kernel, the class and static metadata of the array, and the layout of a declared format."""
    return f"{sorted(kernels)} {type(w).__module__} {tree} {w.format and w.format.layout}"


def _type_of(like: Callable[..., jax.Array], *operands: jax.Array) -> Any:
    """The type of a result, with the sharding that JAX's own operations give it on explicit axes."""
    return jax.make_jaxpr(like)(*operands).out_avals[0]


def _without_mesh(fn: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`fn` for one device: arrays that it creates have no sharding over the mesh around."""

    def call(*operands: jax.Array) -> jax.Array:
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return fn(*operands)

    return call


def _by_types(operation: Sharded, *operands: jax.Array, like: Callable[..., jax.Array]) -> jax.Array:
    """The same on explicit axes only, where shardings are types and known before compilation."""
    types: Any = [jax.typeof(operand) for operand in operands]
    mesh = next(type.sharding.mesh for type in types if not type.sharding.mesh.empty)
    shardings, out, on_each_device = operation.partition(mesh, types)
    operands = tuple(jax.sharding.reshard(x, sharding) for x, sharding in zip(operands, shardings, strict=True))
    specs = tuple(sharding.spec for sharding in shardings)
    y = jax.shard_map(on_each_device, mesh=mesh, in_specs=specs, out_specs=out.spec, check_vma=False)(*operands)
    return jax.sharding.reshard(y, _type_of(like, *operands).sharding)


_on_one_p = Primitive("lowbit_on_one_device")


def _on_one(operation: Sharded, *operands: jax.Array, like: Callable[..., jax.Array]) -> jax.Array:
    """The operation if the program is lowered for a single device, else `like`."""
    one, many = (jax.make_jaxpr(fn)(*operands) for fn in (operation, like))
    return _on_one_p.bind(*operands, one=one, many=many, kind=device_kind(*operands))


@_on_one_p.def_abstract_eval
def _(*operands: Any, many: Any, **params: Any) -> Any:
    return many.out_avals[0]


@partial(mlir.register_lowering, _on_one_p)
def _(ctx: Any, *operands: Any, one: Any, many: Any, kind: str) -> Any:
    devices = getattr(ctx.module_context.axis_context, "num_devices", 1)
    if devices > 1:
        warn_not_partitioned(devices, kind)
    return mlir.lower_fun(jaxpr_as_fun(one if devices == 1 else many), multiple_results=True)(ctx, *operands)


def entries(operand: Any) -> list[Entry]:
    """The mesh axes over which each axis of an operand is sharded."""
    spec = getattr(operand.sharding, "spec", ())
    return [*spec, *[None] * (len(operand.shape) - len(spec))]


def names_in(entry: Entry) -> tuple[str, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


class MeshAxes:
    """The mesh axes in use: each shards one axis of the operation, and evenly."""

    def __init__(self, mesh: Mesh):
        self.mesh, self.names = mesh, set[str]()

    def take(self, entry: Entry, counts: Sequence[int]) -> Entry:
        names = names_in(entry)
        shards = math.prod(self.mesh.shape[name] for name in names)
        if not names or self.names & set(names) or any(count % shards for count in counts):
            return None
        self.names.update(names)
        return entry

    def stored(self, w: QuantizedArray, axis: int, entry: Entry) -> Entry:
        """The same for an axis of a stored array; a shard has whole blocks and bytes."""
        spans = w.component_spans()
        return self.take(
            entry,
            [getattr(w, component).shape[axis] for component in spans if span_of(spans[component], axis) != WHOLE],
        )

    def place(self, *spec: Entry) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*spec))


class Factors:
    """The names of factors in a Shardy rule.

    The sharding of the codes decides, and the other components follow: each of their axes is a factor of its own.
    """

    def __init__(self) -> None:
        self.names = (f"f{i}" for i in itertools.count())
        self.sizes: dict[str, Any] = {}

    def new(self, count: int) -> list[str]:
        return list(itertools.islice(self.names, count))

    def axis(self, w: QuantizedArray, axis: int) -> tuple[str, str]:
        """The factors of an axis of the codes and of the same axis of the array, which counts codes, not bytes."""
        (stored,) = self.new(1)
        packing = span_of(w.component_spans()["codes"], axis)
        if packing == 1:
            return stored, stored
        (inner,) = self.new(1)
        if w.stored_shape[axis] % packing or w.stored_shape[axis] == packing:
            return stored, inner  # the last byte is not full, or there is one byte only: the axis is not sharded
        self.sizes[inner] = packing
        return stored, f"({stored} {inner})"

    def components(self, w: QuantizedArray, codes: Sequence[str], index: Sequence[str] = ()) -> list[str]:
        """The factors of each component of an array whose codes have these."""

        def named(component: Any, _: Any) -> str:
            return " ".join(codes if component is w.codes else self.new(len(component.shape)))

        return jax.tree.leaves(w.map_components(named, index=None if w.index is None else " ".join(index)))


class ShardedProduct:
    """A product of x and w, each device with its rows of x and its shard of w."""

    def __init__(self, kernels: Kernels, reference: Callable[[Product], jax.Array], product: Product):
        self.kernels, self.multiply = kernels, partial(by_platform, kernels, reference)
        self.contract, self.dtype = product.contract, product.dtype
        described: Product = jax.eval_shape(lambda product: product, replace(product, out_sharding=None))
        self.tree = jax.tree.structure(described)
        self.x, self.w, self.sizes = described.x, described.w, described.sizes

    def __call__(self, *leaves: jax.Array) -> jax.Array:
        return self.multiply(jax.tree.unflatten(self.tree, leaves))

    def description(self) -> str:
        return _description(self.kernels, self.tree, self.w)

    def rule(self) -> tuple[str, dict[str, Any]]:
        factors = Factors()
        layers = 0 if self.w.index is None else 1
        index = factors.new(0 if self.w.index is None else self.w.index.ndim)
        lead = factors.new(len(self.w.stored_shape) - 2 - layers)
        # The groups of rows are an axis of w alone.
        group = [] if self.sizes is None else [lead.pop()]
        rows = factors.new(len(self.x.shape) - len(index) - len(lead) - 1)
        stack = factors.new(layers)
        # The summed axes of x and w are separate factors: a batch sharded over the devices of the weight stays so.
        k, summed = factors.new(2)
        stored, n = factors.axis(self.w, -3 - self.contract)
        matrix = [stored, summed] if self.contract == -1 else [summed, stored]
        components = factors.components(self.w, [*stack, *lead, *group, *matrix], index)
        sizes = [] if self.sizes is None else [" ".join(factors.new(len(self.sizes.shape)))]
        operands = [" ".join([*index, *lead, *rows, k]), *components, *sizes]
        return ", ".join(operands) + " -> " + " ".join([*index, *lead, *rows, n]), factors.sizes

    def partition(self, mesh: Mesh, operands: Any) -> tuple[tuple[Any, ...], Any, Callable[..., jax.Array]]:
        """Rows and weight stay where they are. Where both are sharded over the same devices, a layer is gathered."""
        w, stays, moves = self.w, MeshAxes(mesh), MeshAxes(mesh)
        x, codes = entries(operands[0]), entries(operands[1])
        grouped = 0 if self.sizes is None else 1
        batch, layers = len(w.shape) - 2 - grouped, 0 if w.index is None else 1
        rows = [moves.take(x[axis], [self.x.shape[axis]]) for axis in range(batch, len(self.x.shape) - 1)]
        axes = range(-len(w.stored_shape) + layers, 0)  # of one layer
        held = {axis: stays.stored(w, axis, codes[axis]) for axis in reversed(axes)}
        used = {axis: None if moves.names & {*names_in(held[axis])} else held[axis] for axis in axes}
        moves.names |= {name for entry in used.values() for name in names_in(entry)}
        index = [moves.take(x[axis], [self.x.shape[axis]]) for axis in range(batch + grouped - len(axes) + 2)]
        gathered = {axis: names_in(held[axis]) for axis in axes if held[axis] != used[axis]}
        groups = names_in(used[-3]) if grouped else ()
        summed = (*names_in(used[self.contract]), *groups)

        def gather(component: jax.Array, spans: tuple[int, ...]) -> jax.Array:
            for axis, names in gathered.items():
                if span_of(spans, axis) != WHOLE:
                    component = lax.all_gather(component, names, axis=component.ndim + axis, tiled=True)
            return component

        def on_each_device(*leaves: jax.Array) -> jax.Array:
            product: Product = jax.tree.unflatten(self.tree, leaves)
            if gathered:
                product = replace(product, w=product.w.resolved().map_components(gather))
            product, before = own_groups(product, names_in(rows[0]), groups) if grouped else (product, None)
            if not summed:
                return self.multiply(product)
            y = self.multiply(replace(product, dtype=jnp.promote_types(self.dtype, jnp.float32)))
            y = y if before is None else _shifted(y, before, batch)
            return lax.psum(y, summed).astype(self.dtype)

        def place(_: Any, spans: tuple[int, ...]) -> NamedSharding:
            own = (None if span_of(spans, axis) == WHOLE else held[axis] for axis in axes)
            return stays.place(*[None] * layers, *own)

        lead = [used[axis] for axis in axes[: -2 - grouped]]
        components = w.map_components(place, index=None if w.index is None else moves.place(*index))
        sizes = [moves.place()] if grouped else []
        shardings = (moves.place(*index, *lead, *rows, used[self.contract]), *jax.tree.leaves(components), *sizes)
        return shardings, moves.place(*index, *lead, *rows, used[-3 - self.contract]), on_each_device


def own_groups(product: Product, of_rows: Sequence[str], of_groups: Sequence[str]) -> tuple[Product, Any]:
    """The product of a device that has its shards of x and w, with the sizes of all groups in all rows.

    Where the groups are sharded, x starts at the first group of the device: by how many rows it is shifted is returned.
    """
    row, held = len(product.batch), product.rows[0]
    sizes = jnp.asarray(product.sizes)
    ends = jnp.cumsum(sizes, axis=-1) - (lax.axis_index(of_rows) * held if of_rows else 0)
    starts, ends = (jnp.clip(at, 0, held) for at in (ends - sizes, ends))
    sizes = ends - starts
    if not of_groups:
        return replace(product, sizes=sizes), None
    groups = product.w.shape[-3]
    own = lax.axis_index(of_groups) * groups
    before = lax.dynamic_index_in_dim(starts, own, starts.ndim - 1, keepdims=False)
    sizes = lax.dynamic_slice_in_dim(sizes, own, groups, sizes.ndim - 1)
    return replace(product, x=_shifted(product.x, -before, row), sizes=sizes), before


def _shifted(x: jax.Array, by: jax.Array, axis: int) -> jax.Array:
    """Roll an axis, by another number of entries for each entry of the axes before it."""
    length = x.shape[axis]
    at = (jnp.arange(length) - by[..., None]) % length
    return jnp.take_along_axis(x, at.reshape(*at.shape, *[1] * (x.ndim - axis - 1)), axis=axis)


class ShardedRows:
    """Rows of a stored matrix, for row numbers of shape (..., 1); each device has its shard of the matrix."""

    def __init__(self, kernels: Kernels, reference: Callable[..., jax.Array], w: QuantizedArray, rows: jax.Array):
        self.kernels, self.look_up = kernels, partial(by_platform, kernels, reference)
        self.tree = jax.tree.structure(w)
        self.w, self.rows = jax.eval_shape(lambda w, rows: (w, rows), w, rows)

    def __call__(self, rows: jax.Array, *components: jax.Array) -> jax.Array:
        return self.look_up(jax.tree.unflatten(self.tree, components), rows)

    def description(self) -> str:
        return _description(self.kernels, self.tree, self.w)

    def rule(self) -> tuple[str, dict[str, Any]]:
        factors = Factors()
        lead, (one, row) = factors.new(len(self.rows.shape) - 1), factors.new(2)
        stored, column = factors.axis(self.w, -1)
        operands = [" ".join([*lead, one]), *factors.components(self.w, [row, stored])]
        return ", ".join(operands) + " -> " + " ".join([*lead, column]), factors.sizes

    def partition(self, mesh: Mesh, operands: Any) -> tuple[tuple[Any, ...], Any, Callable[..., jax.Array]]:
        """The matrix stays where it is; each device looks up the rows that it holds, and the results are summed."""
        w, axes = self.w, MeshAxes(mesh)
        codes, rows = entries(operands[1]), entries(operands[0])
        matrix = {axis: axes.stored(w, axis, codes[axis]) for axis in (-2, -1)}
        lead = [axes.take(rows[axis], [self.rows.shape[axis]]) for axis in range(len(self.rows.shape) - 1)]
        holders = names_in(matrix[-2])
        held = w.stored_shape[-2] // math.prod(mesh.shape[name] for name in holders)

        def on_each_device(rows: jax.Array, *components: jax.Array) -> jax.Array:
            if not holders:
                return self(rows, *components)
            here = rows - lax.axis_index(holders) * held
            found = self(jnp.clip(here, 0, held - 1), *components)
            return lax.psum(jnp.where((here >= 0) & (here < held), found, 0), holders)

        def place(_: Any, spans: tuple[int, ...]) -> NamedSharding:
            return axes.place(*(None if span_of(spans, axis) == WHOLE else matrix[axis] for axis in (-2, -1)))

        shardings = (axes.place(*lead, None), *jax.tree.leaves(w.map_components(place)))
        return shardings, axes.place(*lead, matrix[-1]), on_each_device
