"""Operations over several devices: each runs the operation on its own piece of what is stored.

The compiler cannot look into a kernel, and left to itself it would move codes and scales one by one. So an operation
says which axes of its operands are one and the same, and what to do where an axis is cut that it sums over.
"""

import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lowbit.formats._blocks import WHOLE, span_of
from lowbit.formats._quantized import QuantizedArray
from lowbit.formats._sharding import explicit_axes
from lowbit.runtime._compat import can_cut_calls, device_kind

Entry = Any  # of a PartitionSpec: None, a name, or a tuple of names


class Pieces(Protocol):
    """An operation that can be cut."""

    def __call__(self, *operands: jax.Array) -> jax.Array:
        """The operation on what one device has."""
        ...

    def rule(self) -> tuple[str, dict[str, Any]]:
        """Which axes are one and the same, in the notation of Shardy, and the sizes of those it cannot see."""
        ...

    def cut(self, mesh: Mesh, operands: Any) -> tuple[tuple[Any, ...], Any, Callable[..., jax.Array]]:
        """How the operands must lie for it, how the result does then, and what each device runs."""
        ...


def devices_in_use() -> int:
    """How many devices a program may run on: those that are here, or those of the mesh that it is traced for."""
    return max(jax.device_count(), jax.sharding.get_abstract_mesh().size)


def over_devices(operation: Pieces, *operands: jax.Array, like: Callable[..., jax.Array]) -> jax.Array:
    """The operation, each device on its own piece. `like` is the same in operations that JAX can cut by itself."""
    kinds = {kind for type in map(jax.typeof, operands) for kind in type.sharding.mesh.axis_types}
    if devices_in_use() == 1 or kinds == {AxisType.Manual}:  # in shard_map the operands are a device's own
        return operation(*operands)
    explicit = explicit_axes(*map(jax.typeof, operands))
    # In a shard_map over some axes of the mesh JAX knows no call that is cut.
    if AxisType.Manual in kinds:
        return like(*operands)
    if not can_cut_calls():
        return (_by_types if kinds == {AxisType.Explicit} else _on_one)(operation, *operands, like=like)
    # Compiled for itself, since what is cut may not hold constants, and the reference of a format may.
    call = custom_partitioning(jax.jit(lambda *operands: operation(*operands)))
    rule, sizes = operation.rule()

    def partition(mesh: Mesh, operands: Any, result: Any) -> Any:
        shardings, out, on_each_device = operation.cut(mesh, operands)
        return mesh, _without_mesh(on_each_device), out, shardings

    call.def_partition(
        partition=partition,
        infer_sharding_from_operands=lambda mesh, operands, result: operation.cut(mesh, operands)[1],
        sharding_rule=rule,
        **sizes,
    )
    if not explicit:
        return call(*operands)
    automatic: Any = jax.sharding.auto_axes(call, axes=explicit, out_sharding=_type_of(like, *operands).sharding)
    return automatic(*operands)


def _type_of(like: Callable[..., jax.Array], *operands: jax.Array) -> Any:
    """The type of a result. Where shardings are in types, it has the one that JAX's own operations give it."""
    return jax.make_jaxpr(like)(*operands).out_avals[0]


def _without_mesh(fn: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`fn` for one device. Arrays that it makes would else have shardings over the mesh around in their types."""

    def call(*operands: jax.Array) -> jax.Array:
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return fn(*operands)

    return call


def _by_types(operation: Pieces, *operands: jax.Array, like: Callable[..., jax.Array]) -> jax.Array:
    """The same where all shardings are types, so that they are known before the compiler is asked."""
    types: Any = [jax.typeof(operand) for operand in operands]
    mesh = next(type.sharding.mesh for type in types if not type.sharding.mesh.empty)
    shardings, out, on_each_device = operation.cut(mesh, types)
    operands = tuple(jax.sharding.reshard(x, sharding) for x, sharding in zip(operands, shardings, strict=True))
    specs = tuple(sharding.spec for sharding in shardings)
    y = jax.shard_map(on_each_device, mesh=mesh, in_specs=specs, out_specs=out.spec, check_vma=False)(*operands)
    return jax.sharding.reshard(y, _type_of(like, *operands).sharding)


_on_one_p = Primitive("lowbit_on_one_device")


def _on_one(operation: Pieces, *operands: jax.Array, like: Callable[..., jax.Array]) -> jax.Array:
    """The operation if the program turns out to be one for a single device, which is known when it is lowered."""
    one, many = (jax.make_jaxpr(fn)(*operands) for fn in (operation, like))
    return _on_one_p.bind(*operands, one=one, many=many)


@_on_one_p.def_abstract_eval
def _(*operands: Any, many: Any, **params: Any) -> Any:
    return many.out_avals[0]


@partial(mlir.register_lowering, _on_one_p)
def _(ctx: Any, *operands: Any, one: Any, many: Any) -> Any:
    devices = getattr(ctx.module_context.axis_context, "num_devices", 1)
    if devices > 1:
        warnings.warn(
            f"A product of a low-bit array was compiled for {devices} {device_kind()} with automatic axes, where "
            "JAX cannot cut a kernel: each device decodes its piece. Use explicit axes or shard_map.",
            RuntimeWarning,
            stacklevel=2,
        )
    return mlir.lower_fun(jaxpr_as_fun(one if devices == 1 else many), multiple_results=True)(ctx, *operands)


def entries(operand: Any) -> list[Entry]:
    """How each axis of an operand is cut."""
    spec = getattr(operand.sharding, "spec", ())
    return [*spec, *[None] * (len(operand.shape) - len(spec))]


def names_in(entry: Entry) -> tuple[str, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


class Taken:
    """Mesh axes that are taken: an axis cuts one axis of the operation, and only into whole pieces."""

    def __init__(self, mesh: Mesh):
        self.mesh, self.names = mesh, set[str]()

    def take(self, entry: Entry, counts: Sequence[int]) -> Entry:
        names = names_in(entry)
        pieces = math.prod(self.mesh.shape[name] for name in names)
        if not names or self.names & set(names) or any(count % pieces for count in counts):
            return None
        self.names.update(names)
        return entry

    def stored(self, w: QuantizedArray, axis: int, entry: Entry) -> Entry:
        """An axis of a stored array, of which no block and no byte is cut."""
        spans = w.part_spans()
        return self.take(entry, [getattr(w, part).shape[axis] for part in spans if span_of(spans[part], axis) != WHOLE])

    def place(self, *spec: Entry) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*spec))


class Factors:
    """The names of axes in a rule of Shardy.

    The codes say how an array is cut, and the other parts follow: each of their axes is one of its own in the rule.
    """

    def __init__(self) -> None:
        self.names = (f"f{i}" for i in itertools.count())
        self.sizes: dict[str, Any] = {}

    def new(self, count: int) -> list[str]:
        return list(itertools.islice(self.names, count))

    def axis(self, w: QuantizedArray, axis: int) -> tuple[str, str]:
        """An axis as the codes have it, and as the array has it: bytes, and bytes times the codes in a byte."""
        (stored,) = self.new(1)
        packing = span_of(w.part_spans()["codes"], axis)
        if packing == 1:
            return stored, stored
        (inner,) = self.new(1)
        if w.stored_shape[axis] % packing or w.stored_shape[axis] == packing:
            return stored, inner  # the last byte, or the only one, belongs to one device, and so does the axis
        self.sizes[inner] = packing
        return stored, f"({stored} {inner})"

    def parts(self, w: QuantizedArray, codes: Sequence[str], index: Sequence[str] = ()) -> list[str]:
        """The parts of an array whose codes have these axes."""

        def part(part: Any, _: Any) -> str:
            return " ".join(codes if part is w.codes else self.new(len(part.shape)))

        return jax.tree.leaves(w.map_parts(part, index=None if w.index is None else " ".join(index)))


class Product:
    """y[*batch, *rows, n] = sum_k x[*batch, *rows, k] * w[*batch, k, n], or w[*batch, n, k] for contract = -1."""

    def __init__(self, multiply: Callable[..., jax.Array], x: jax.Array, w: QuantizedArray, contract: int, dtype: Any):
        self.multiply, self.contract, self.dtype = multiply, contract, dtype
        self.tree = jax.tree.structure(w)
        self.x, self.w = jax.eval_shape(lambda x, w: (x, w), x, w)

    def __call__(self, x: jax.Array, *parts: jax.Array) -> jax.Array:
        return self.multiply(x, jax.tree.unflatten(self.tree, parts), dtype=self.dtype)

    def rule(self) -> tuple[str, dict[str, Any]]:
        factors = Factors()
        layers = 0 if self.w.index is None else 1
        index = factors.new(0 if self.w.index is None else self.w.index.ndim)
        lead = factors.new(len(self.w.stored_shape) - 2 - layers)
        rows = factors.new(len(self.x.shape) - len(index) - len(lead) - 1)
        stack = factors.new(layers)
        # What is summed over is not tied to the weight: a batch over the same devices as the weight should stay one.
        k, summed = factors.new(2)
        stored, n = factors.axis(self.w, -3 - self.contract)
        matrix = [stored, summed] if self.contract == -1 else [summed, stored]
        parts = factors.parts(self.w, [*stack, *lead, *matrix], index)
        operands = [" ".join([*index, *lead, *rows, k]), *parts]
        return ", ".join(operands) + " -> " + " ".join([*index, *lead, *rows, n]), factors.sizes

    def cut(self, mesh: Mesh, operands: Any) -> tuple[tuple[Any, ...], Any, Callable[..., jax.Array]]:
        """Rows stay where they are, and the weight too. Cut over the same devices, its layer is gathered."""
        w, stays, moves = self.w, Taken(mesh), Taken(mesh)
        x, codes = entries(operands[0]), entries(operands[1])
        batch, layers = len(w.shape) - 2, 0 if w.index is None else 1
        rows = [moves.take(x[axis], [self.x.shape[axis]]) for axis in range(batch, len(self.x.shape) - 1)]
        axes = range(-len(w.stored_shape) + layers, 0)  # of one layer
        held = {axis: stays.stored(w, axis, codes[axis]) for axis in reversed(axes)}
        used = {axis: None if moves.names & {*names_in(held[axis])} else held[axis] for axis in axes}
        moves.names |= {name for entry in used.values() for name in names_in(entry)}
        index = [moves.take(x[axis], [self.x.shape[axis]]) for axis in range(batch - len(axes) + 2)]
        gathered = {axis: names_in(held[axis]) for axis in axes if held[axis] != used[axis]}
        summed = names_in(used[self.contract])

        def whole(part: jax.Array, spans: tuple[int, ...]) -> jax.Array:
            for axis, names in gathered.items():
                if span_of(spans, axis) != WHOLE:
                    part = lax.all_gather(part, names, axis=part.ndim + axis, tiled=True)
            return part

        def on_each_device(x: jax.Array, *parts: jax.Array) -> jax.Array:
            array: QuantizedArray = jax.tree.unflatten(self.tree, parts)
            if gathered:
                array = array.resolved().map_parts(whole)
            if not summed:
                return self.multiply(x, array, dtype=self.dtype)
            y = self.multiply(x, array, dtype=jnp.promote_types(self.dtype, jnp.float32))
            return lax.psum(y, summed).astype(self.dtype)

        def part(_: Any, spans: tuple[int, ...]) -> NamedSharding:
            own = (None if span_of(spans, axis) == WHOLE else held[axis] for axis in axes)
            return stays.place(*[None] * layers, *own)

        lead = [used[axis] for axis in axes[:-2]]
        parts = w.map_parts(part, index=None if w.index is None else moves.place(*index))
        shardings = (moves.place(*index, *lead, *rows, used[self.contract]), *jax.tree.leaves(parts))
        return shardings, moves.place(*index, *lead, *rows, used[-3 - self.contract]), on_each_device


class Rows:
    """Rows of a stored matrix, for row numbers of shape (..., 1)."""

    def __init__(self, look_up: Callable[..., jax.Array], w: QuantizedArray, rows: jax.Array):
        self.look_up = look_up
        self.tree = jax.tree.structure(w)
        self.w, self.rows = jax.eval_shape(lambda w, rows: (w, rows), w, rows)

    def __call__(self, rows: jax.Array, *parts: jax.Array) -> jax.Array:
        return self.look_up(jax.tree.unflatten(self.tree, parts), rows)

    def rule(self) -> tuple[str, dict[str, Any]]:
        factors = Factors()
        lead, (one, row) = factors.new(len(self.rows.shape) - 1), factors.new(2)
        stored, column = factors.axis(self.w, -1)
        operands = [" ".join([*lead, one]), *factors.parts(self.w, [row, stored])]
        return ", ".join(operands) + " -> " + " ".join([*lead, column]), factors.sizes

    def cut(self, mesh: Mesh, operands: Any) -> tuple[tuple[Any, ...], Any, Callable[..., jax.Array]]:
        """The matrix stays where it is; each device looks up the rows that it has, and they are added up."""
        w, taken = self.w, Taken(mesh)
        codes, rows = entries(operands[1]), entries(operands[0])
        matrix = {axis: taken.stored(w, axis, codes[axis]) for axis in (-2, -1)}
        lead = [taken.take(rows[axis], [self.rows.shape[axis]]) for axis in range(len(self.rows.shape) - 1)]
        holders = names_in(matrix[-2])
        held = w.stored_shape[-2] // math.prod(mesh.shape[name] for name in holders)

        def on_each_device(rows: jax.Array, *parts: jax.Array) -> jax.Array:
            if not holders:
                return self(rows, *parts)
            here = rows - lax.axis_index(holders) * held
            found = self(jnp.clip(here, 0, held - 1), *parts)
            return lax.psum(jnp.where((here >= 0) & (here < held), found, 0), holders)

        def part(_: Any, spans: tuple[int, ...]) -> NamedSharding:
            return taken.place(*(None if span_of(spans, axis) == WHOLE else matrix[axis] for axis in (-2, -1)))

        shardings = (taken.place(*lead, None), *jax.tree.leaves(w.map_parts(part)))
        return shardings, taken.place(*lead, matrix[-1]), on_each_device
