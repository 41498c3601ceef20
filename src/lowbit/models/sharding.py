"""Shardings of whole trees, given for the arrays as they read."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from lowbit.formats._quantized import check_pieces
from lowbit.runtime import is_implicit
from lowbit.runtime._compat import mesh_in_context

from .patterns import leaf_path


def specs(tree: Any, logical: Any) -> Any:
    """The PartitionSpec of every stored part, for `in_specs` and `out_specs` of `jax.shard_map`.

    `logical` has a PartitionSpec (or a NamedSharding) for each array of `tree`, or for a subtree with all in it; None
    is for arrays that every device has. JAX itself would apply a bare PartitionSpec to each part: one scale for an
    axis cannot be cut along it.

    >>> import jax.numpy as jnp, lowbit
    >>> from jax.sharding import PartitionSpec as P
    >>> params = {"kernel": lowbit.Array8B(jnp.ones((64, 32)), axis=-2), "bias": jnp.ones(32)}
    >>> lowbit.specs(params, {"kernel": P("model", None), "bias": P()})["kernel"].scales == P(None, None)
    True
    """

    def leaf(array: Any, given: Any) -> Any:
        spec = PartitionSpec() if given is None else given if isinstance(given, PartitionSpec) else given.spec
        if is_implicit(array):
            return array.part_specs(spec, getattr(given, "mesh", mesh_in_context()))
        return spec

    return _map(leaf, tree, logical)


def shardings(tree: Any, logical: Any) -> Any:
    """The sharding of every stored part, for `jax.device_put`, and for `in_shardings` and `out_shardings` of `jax.jit`.

    - `tree`: arrays or `jax.ShapeDtypeStruct`s, dense or quantized.
    - `logical`: a sharding for each array of `tree`, given for the array as it reads, or for a subtree with all in it.
      A PartitionSpec is one of the mesh of `jax.set_mesh`; None leaves it to JAX.

    JAX itself would apply a bare sharding to each part: one scale for an axis cannot be cut along it. What would cut a
    block or does not divide an axis is a `ValueError` that names the array and says what would do.

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
                raise ValueError(f"{given} needs a mesh: pass a NamedSharding, or set one by jax.set_mesh.")
            given = NamedSharding(mesh, given)
        if is_implicit(array):
            return None if given is None else array.part_shardings(given)
        if isinstance(given, NamedSharding):
            check_pieces(jnp.shape(array), given.spec, given.mesh)
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
