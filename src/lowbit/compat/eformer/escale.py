"""eformer.escale: the functions that place arrays on meshes. Its automatic sharding strategies are not provided."""

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lowbit import QuantizedArray
from lowbit.runtime._compat import mesh_in_context

__all__ = (
    "NamedSharding",
    "PartitionSpec",
    "cpu_context",
    "create_cpu_mesh",
    "create_mesh",
    "extract_shardings",
    "force_cpu",
    "get_axes_size_in_mesh",
    "get_corrected_named_sharding",
    "get_incontext_mesh",
    "get_mesh_axis_names",
    "get_mesh_axis_size",
    "get_names_from_partition_spec",
    "get_partition_spec",
    "lax_reshard",
    "make_shard_and_gather_fns",
    "match_partition_rules",
    "names_in_current_mesh",
    "parse_mesh_from_string",
    "with_sharding_constraint",
)

_DIMS, _NAMES = (1, -1, 1, 1, 1), ("dp", "fsdp", "ep", "tp", "sp")


def __getattr__(name: str) -> Any:
    raise AttributeError(f"lowbit.compat.eformer does not provide eformer.escale.{name}; it has {', '.join(__all__)}.")


# --- meshes


def create_mesh(
    axis_dims: Sequence[int] = _DIMS,
    axis_names: Sequence[str] = _NAMES,
    *,
    backend: str | None = None,
    axis_types: Any = None,
    **hints: Any,
) -> Mesh:
    """A mesh of all devices; one dimension may be -1, for the remaining devices. Network hints are ignored."""
    del hints
    devices = jax.devices(backend) if backend else jax.devices()
    known = math.prod(n for n in axis_dims if n != -1)
    dims = tuple(len(devices) // known if n == -1 else n for n in axis_dims)
    if math.prod(dims) > len(devices) or len(dims) != len(axis_names):
        raise ValueError(f"A mesh of {tuple(axis_dims)} named {tuple(axis_names)} does not fit {len(devices)} devices.")
    kinds = axis_types if isinstance(axis_types, (tuple, list)) else [axis_types] * len(dims)
    named: Any = {None: AxisType.Auto, "auto": AxisType.Auto, "explicit": AxisType.Explicit, "manual": AxisType.Manual}
    types = tuple(named.get(kind, kind) for kind in kinds)
    return jax.make_mesh(dims, tuple(axis_names), axis_types=types, devices=devices[: math.prod(dims)])


def create_cpu_mesh(axis_dims: Sequence[int] = _DIMS, axis_names: Sequence[str] = _NAMES) -> Mesh:
    """A mesh of CPU devices."""
    return create_mesh(axis_dims, axis_names, backend="cpu")


def parse_mesh_from_string(axis_dims: str, names: Sequence[str]) -> Mesh:
    """A mesh from "dp:2,tp:4", or from "2,4" and the names."""
    pairs = [part.split(":") for part in axis_dims.split(",")]
    if all(len(pair) == 2 for pair in pairs):
        dims = {name: int(n) for name, n in pairs}
        if set(dims) != set(names):
            raise ValueError(f"The mesh {axis_dims!r} has the axes {list(dims)}, but {list(names)} are asked for.")
        return create_mesh([dims[name] for name in names], names)
    if len(pairs) != len(names) or any(len(pair) != 1 for pair in pairs):
        raise ValueError(f"The mesh {axis_dims!r} does not have the {len(names)} axes {list(names)}.")
    return create_mesh([int(pair[0]) for pair in pairs], names)


@contextlib.contextmanager
def force_cpu() -> Iterator[Any]:
    """Run computations on the first CPU device."""
    device = jax.devices("cpu")[0]
    with jax.default_device(device):
        yield device


@contextlib.contextmanager
def cpu_context() -> Iterator[Mesh]:
    """`force_cpu`, with a mesh of CPU devices."""
    mesh = create_cpu_mesh()
    with force_cpu(), jax.set_mesh(mesh):
        yield mesh


def get_incontext_mesh(raise_error: bool = True) -> Mesh:
    """The mesh of `jax.set_mesh` or of `with mesh:`."""
    mesh = mesh_in_context()
    if mesh is None:
        # JAX has no public way to read the mesh of `with mesh:`, but resolves a bare spec by it.
        with contextlib.suppress(RuntimeError):
            constrain = jax.make_jaxpr(lambda x: lax.with_sharding_constraint(x, PartitionSpec()))
            mesh = constrain(0.0).eqns[0].params["sharding"].mesh
    if mesh is None and raise_error:
        raise AssertionError("No mesh is active: use `with jax.set_mesh(mesh):`.")
    return mesh if mesh is not None else Mesh(np.empty((), object), ())


def get_mesh_axis_names(mesh: Mesh | None = None) -> list[str]:
    """The axis names of a mesh, by default the active one."""
    return list((mesh or get_incontext_mesh()).axis_names)


def get_axes_size_in_mesh(axis_names: str | Sequence[str], mesh: Mesh | None = None) -> int:
    """The number of devices along these axes together."""
    names = (axis_names,) if isinstance(axis_names, str) else axis_names
    return math.prod((mesh or get_incontext_mesh()).shape[name] for name in names)


def get_mesh_axis_size(axis_names: str | Sequence[str]) -> int:
    """`get_axes_size_in_mesh` of the active mesh."""
    return get_axes_size_in_mesh(axis_names)


def names_in_current_mesh(*names: str) -> bool:
    """Whether the active mesh has all these axes."""
    return set(names) <= set(get_incontext_mesh(raise_error=False).axis_names)


# --- specs


def get_corrected_named_sharding(
    shape: Sequence[int], partition_spec: PartitionSpec, raise_mesh_error: bool = True
) -> NamedSharding:
    """The sharding on the active mesh, without axes that the mesh lacks or that do not divide the array."""
    return _corrected(shape, get_incontext_mesh(raise_mesh_error), partition_spec)


def _corrected(shape: Sequence[int], mesh: Any, spec: PartitionSpec) -> NamedSharding:
    def kept(entry: Any, length: int) -> Any:
        names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        known = all(name in mesh.axis_names for name in names)
        return entry if known and length % math.prod(mesh.shape[name] for name in names) == 0 else None

    return NamedSharding(mesh, PartitionSpec(*(kept(e, n) for e, n in zip(spec, shape, strict=False))))


def with_sharding_constraint(arr: Any, sharding: PartitionSpec | NamedSharding) -> Any:
    """Constrain each array of a tree, as far as mesh and shape allow; unchanged where no mesh is active."""

    named = isinstance(sharding, NamedSharding)
    mesh = sharding.mesh if named else get_incontext_mesh(raise_error=False)
    spec = sharding.spec if named else sharding

    def constrained(x: Any) -> Any:
        if mesh.empty:
            return x
        target = _corrected(x.shape, mesh, spec)
        return x.with_sharding(target) if isinstance(x, QuantizedArray) else lax.with_sharding_constraint(x, target)

    return jax.tree.map(constrained, arr, is_leaf=_is_quantized)


lax_reshard = with_sharding_constraint


def match_partition_rules(
    rules: Sequence[tuple[str, PartitionSpec]], tree: Any, min_size: int | None = 0, strict: bool = True
) -> Any:
    """The spec of the first pattern found in the path of each leaf; empty for scalars and small arrays."""

    def match(path: Any, leaf: Any) -> PartitionSpec:
        name = "/".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)
        size = math.prod(getattr(leaf, "shape", ()))
        if strict and hasattr(leaf, "shape") and (size <= 1 or size < (min_size or 0)):
            return PartitionSpec()
        for pattern, spec in rules:
            if re.search(pattern, name):
                return spec
        raise ValueError(f"No pattern matches {name!r}: the patterns are {[pattern for pattern, _ in rules]}.")

    return jax.tree_util.tree_map_with_path(match, tree, is_leaf=_is_quantized)


def make_shard_and_gather_fns(partition_specs: Any, mesh: Mesh | None = None) -> tuple[Any, Any]:
    """For each spec a function that shards an array by it, and one that gathers the array."""
    on = mesh or get_incontext_mesh()

    def place(spec: PartitionSpec) -> Callable[[Any], Any]:
        def put(x: Any) -> Any:
            target = _corrected(x.shape, on, spec)
            return x.with_sharding(target) if isinstance(x, QuantizedArray) else jax.device_put(x, target)

        return put

    def is_spec(x: Any) -> bool:
        return isinstance(x, PartitionSpec)

    shard = jax.tree.map(place, partition_specs, is_leaf=is_spec)
    gather = jax.tree.map(lambda _: place(PartitionSpec()), partition_specs, is_leaf=is_spec)
    return shard, gather


def get_names_from_partition_spec(partition_specs: Any) -> list[str]:
    """Every mesh axis that the specs name."""
    specs = jax.tree.leaves(partition_specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    names = [n for spec in specs for e in spec if e is not None for n in (e if isinstance(e, tuple) else (e,))]
    return list(dict.fromkeys(names))


def extract_shardings(tree: Any, mesh: Mesh | None = None) -> Any:
    """The NamedSharding of each array, None for others."""
    del mesh

    def sharding(leaf: Any) -> Any:
        found = getattr(leaf, "sharding", None)
        return found if isinstance(found, NamedSharding) else None

    return jax.tree.map(sharding, tree, is_leaf=_is_quantized)


def get_partition_spec(tree: Any) -> Any:
    """The spec of each array; empty for numbers."""

    def spec(leaf: Any) -> PartitionSpec:
        if isinstance(leaf, (int, float)):
            return PartitionSpec()
        if not hasattr(leaf, "sharding"):
            raise ValueError(f"{type(leaf).__name__} is not an array and has no sharding.")
        return getattr(leaf.sharding, "spec", PartitionSpec())

    return jax.tree.map(spec, tree, is_leaf=_is_quantized)


def _is_quantized(x: Any) -> bool:
    return isinstance(x, QuantizedArray)
