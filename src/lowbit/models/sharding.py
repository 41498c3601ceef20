"""Shardings of whole trees: from those of the logical arrays to those of their components."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from lowbit.formats.sharding import check_shards
from lowbit.runtime import is_implicit
from lowbit.runtime._compat import mesh_in_context

from .patterns import leaf_path


def specs(tree: Any, logical: Any) -> Any:
    """The PartitionSpec of every component, for `in_specs` and `out_specs` of `jax.shard_map`.

    `logical` has a PartitionSpec (or a NamedSharding) for each array of `tree`, or one for a whole subtree; None means
    replicated. JAX applies a bare PartitionSpec to every component, which fails where one scale covers a sharded axis.

    >>> import jax.numpy as jnp, lowbit
    >>> from jax.sharding import PartitionSpec as P
    >>> params = {"kernel": lowbit.Array8B(jnp.ones((64, 32)), axis=-2), "bias": jnp.ones(32)}
    >>> lowbit.specs(params, {"kernel": P("model", None), "bias": P()})["kernel"].scales == P(None, None)
    True
    """

    def leaf(array: Any, given: Any) -> Any:
        spec = PartitionSpec() if given is None else given if isinstance(given, PartitionSpec) else given.spec
        if is_implicit(array):
            return array.component_specs(spec, getattr(given, "mesh", mesh_in_context()))
        return spec

    return _map(leaf, tree, logical)


def shardings(tree: Any, logical: Any) -> Any:
    """The sharding of every component, for `jax.device_put`, and for `in_shardings` and `out_shardings` of `jax.jit`.

    - `tree`: arrays or `jax.ShapeDtypeStruct`s, dense or quantized.
    - `logical`: the sharding of each array of `tree`, in terms of its logical axes, or one for a whole subtree. A
      PartitionSpec refers to the mesh of `jax.set_mesh`; None leaves the choice to JAX.

    JAX applies a bare sharding to every component, which fails where one scale covers a sharded axis. A sharding that
    would split a block or does not divide an axis raises a `ValueError` with the array and a choice that works.

    >>> import jax, jax.numpy as jnp, lowbit
    >>> from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    >>> mesh = jax.make_mesh((1,), ("model",), axis_types=(AxisType.Auto,))
    >>> params = {"kernel": lowbit.Array8B(jnp.ones((64, 32)), axis=-2), "bias": jnp.ones(32)}
    >>> rows, all = NamedSharding(mesh, P("model", None)), NamedSharding(mesh, P())
    >>> placed = jax.device_put(params, lowbit.shardings(params, {"kernel": rows, "bias": all}))
    >>> placed["kernel"].sharding == rows
    True
    """

    def leaf(array: Any, given: Any) -> Any:
        if isinstance(given, PartitionSpec):
            mesh = mesh_in_context()
            if mesh is None:
                raise ValueError(f"{given} needs a mesh: pass a NamedSharding, or set a mesh with jax.set_mesh.")
            given = NamedSharding(mesh, given)
        if is_implicit(array):
            return None if given is None else array.component_shardings(given)
        if isinstance(given, NamedSharding):
            check_shards(jnp.shape(array), given.spec, given.mesh)
        return given

    return _map(leaf, tree, logical)


def _map(leaf: Callable[[Any, Any], Any], tree: Any, logical: Any) -> Any:
    def below(outer: Sequence[Any], given: Any, subtree: Any) -> Any:
        def named(inner: Sequence[Any], array: Any) -> Any:
            try:
                return leaf(array, given)
            except ValueError as error:
                path = leaf_path((*outer, *inner))
                raise ValueError(f"{path}: {error}" if path else str(error)) from None

        return jax.tree_util.tree_map_with_path(named, subtree, is_leaf=is_implicit)

    return jax.tree_util.tree_map_with_path(below, logical, tree, is_leaf=_says_where)


def _says_where(x: Any) -> bool:
    return x is None or isinstance(x, PartitionSpec | Sharding)
