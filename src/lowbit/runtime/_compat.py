"""What differs between the JAX versions we support, and nothing else.

Each function names the versions it bridges, so that it can go when the older one does.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn


def rebind(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Run an equation as JAX would, on other values."""
    # Up to 0.9 the functions inside an equation came apart from its parameters.
    bound: Any = eqn.primitive.get_bind_params(eqn.params)
    functions, params = ((), bound) if isinstance(bound, dict) else bound
    outs = eqn.primitive.bind(*functions, *values, **params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


def subjaxprs(params: dict[str, Any]) -> Iterator[Jaxpr]:
    """The jaxprs among an equation's parameters."""
    for param in params.values():
        for item in param if isinstance(param, (tuple, list)) else (param,):
            # 0.12 merges ClosedJaxpr into Jaxpr.
            if isinstance(item, (Jaxpr, ClosedJaxpr)):
                jaxpr: Any = getattr(item, "jaxpr", item)
                yield jaxpr


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes of an enclosing shard_map over which a value differs."""
    aval: Any = jax.typeof(x)
    # 0.7 has `vma`, 0.10 a `manual_axis_type` with more kinds of axes.
    kinds = getattr(aval, "manual_axis_type", None)
    return aval.vma if kinds is None else kinds.varying


def varying_like(x: Any, shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    """The type of a result that varies over the axes that `x` does, for calls that JAX does not look into."""
    aval: Any = jax.typeof(x)
    struct: Any = jax.ShapeDtypeStruct
    kinds = getattr(aval, "manual_axis_type", None)
    return struct(shape, dtype, vma=aval.vma) if kinds is None else struct(shape, dtype, manual_axis_type=kinds)


def match_varying(values: Sequence[Any]) -> list[Any]:
    """Let all values vary over the union of their axes, as JAX's own operations do."""
    axes = frozenset[str]().union(*map(varying_axes, values))

    def vary(x: Any) -> Any:
        missing = tuple(sorted(axes - varying_axes(x)))
        if not missing:
            return x
        # 0.7 has `pvary` only, which later became `pcast`.
        any_lax: Any = lax
        return any_lax.pcast(x, missing, to="varying") if hasattr(lax, "pcast") else any_lax.pvary(x, missing)

    return [vary(x) for x in values]


def set_globally(context: Any, value: Any) -> None:
    """Give a user context another value in every thread."""
    # 0.7 has the same method one object deeper.
    (context if hasattr(context, "set_global") else context._obj).set_global(value)


def mesh_in_context() -> Any:
    """The mesh of `jax.set_mesh`, if there is one."""
    # 0.7 tells its abstract mesh only.
    get_mesh = getattr(jax.sharding, "get_mesh", None)
    mesh = get_mesh() if get_mesh else None
    return None if mesh is None or mesh.empty else mesh


def can_cut_explicit_axes() -> bool:
    """Whether a call that says how it is cut compiles under a mesh whose axes are part of the types."""
    # Up to 0.9 its pieces carry shardings that the compiler does not know.
    return jax.__version_info__ >= (0, 10)


def device_kind() -> str:
    """What a program is traced for: the device of the mesh around, or the default one."""
    # 0.7 knows no devices of an abstract mesh.
    device: Any = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return (device or jax.devices()[0]).device_kind


def can_cut_calls() -> bool:
    """Whether the compiler asks how a call is cut over devices."""
    # That of TPU does not (jax-ml/jax#38196, open at 0.10).
    return not device_kind().startswith("TPU")
