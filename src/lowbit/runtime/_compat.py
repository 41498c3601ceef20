"""What differs between JAX versions: how to call it, and which parameters its primitives have.

Each function names the versions it bridges, so that it can go when the older one does. A JAX that is newer than this
module may have other parameters: their readers then return None, and the caller falls back to dense arrays.
"""

import re
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core, source_info_util
from jax.extend.core import Jaxpr, JaxprEqn
from jax.interpreters import ad

# --- the parameters of primitives that hold other programs

Params = Mapping[str, Any]


class Program(NamedTuple):
    """A jaxpr with the values of its constants."""

    jaxpr: Jaxpr
    consts: Sequence[Any]


def opened(jaxpr: Any) -> Program:
    """A jaxpr and its constants, whether it is closed or not."""
    # 0.12 merges ClosedJaxpr into Jaxpr; `.jaxpr` and `.consts` are its names for the old two halves.
    return Program(getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ()))


def is_jaxpr(value: Any) -> bool:
    """Whether it is a jaxpr, closed or not."""
    return isinstance(value, (Jaxpr, getattr(core, "ClosedJaxpr", Jaxpr)))


def _has(params: Params, needed: str, unused: str = "") -> bool:
    """Whether the parameters are those named, and perhaps others that are not set."""
    known = {*needed.split(), *unused.split()}
    others = [value for name, value in params.items() if name not in known]
    return all(name in params for name in needed.split()) and not any(map(_is_set, others))


def _is_set(value: Any) -> bool:
    """Whether a parameter has an effect; one without may be left out."""
    empty = isinstance(value, tuple | list | dict | frozenset) and not value
    return not (value is None or value is False or empty)


class Scan(NamedTuple):
    body: Program
    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    unroll: Any
    options: dict[str, Any]


def scan(params: Params) -> Scan | None:
    if "ft_in" in params:  # from 0.11 on; before it, two numbers
        if not _has(params, "jaxpr ft_in ft_out length reverse unroll"):
            return None
        groups = params["ft_in"].unpack() if hasattr(params["ft_in"], "unpack") else ()
        if len(groups) != 3:
            return None
        num_consts, num_carry = len(groups[0]), len(groups[1])
    elif _has(params, "jaxpr num_consts num_carry length reverse unroll", "linear _split_transpose"):
        num_consts, num_carry = params["num_consts"], params["num_carry"]
    else:
        return None
    options = {"_split_transpose": True} if params.get("_split_transpose") else {}
    length, reverse, unroll = params["length"], params["reverse"], params["unroll"]
    return Scan(opened(params["jaxpr"]), num_consts, num_carry, length, reverse, unroll, options)


class While(NamedTuple):
    condition: Program
    condition_consts: int
    body: Program
    body_consts: int


def while_loop(params: Params) -> While | None:
    if not _has(params, "cond_jaxpr cond_nconsts body_jaxpr body_nconsts"):
        return None
    condition, body = opened(params["cond_jaxpr"]), opened(params["body_jaxpr"])
    return While(condition, params["cond_nconsts"], body, params["body_nconsts"])


def branches(params: Params) -> list[Program] | None:
    return [opened(branch) for branch in params["branches"]] if _has(params, "branches", "linear") else None


class Jit(NamedTuple):
    key: Any  # identifies the program: the same object at every call of the same function
    in_shardings: tuple[Any, ...]
    out_shardings: tuple[Any, ...]
    donated: tuple[int, ...]
    name: str
    keep_unused: bool
    inline: Any


def jit(params: Params) -> Jit | None:
    needed = "jaxpr name in_shardings out_shardings donated_invars keep_unused inline"
    # Layouts and compiler options belong to the outermost jit; the mesh is in the equation's context.
    if not _has(params, needed, "in_layouts out_layouts ctx_mesh compiler_options_kvs"):
        return None
    return Jit(
        params["jaxpr"],
        tuple(params["in_shardings"]),
        tuple(params["out_shardings"]),
        tuple(i for i, donated in enumerate(params["donated_invars"]) if donated),
        params["name"],
        params["keep_unused"],
        params["inline"],
    )


def closed_call(params: Params) -> Program | None:
    return opened(params["call_jaxpr"]) if _has(params, "call_jaxpr") else None


class Checkpoint(NamedTuple):
    body: Program
    prevent_cse: Any
    differentiated: bool
    policy: Any


def checkpoint(params: Params) -> Checkpoint | None:
    if not _has(params, "jaxpr prevent_cse differentiated policy"):
        return None
    return Checkpoint(opened(params["jaxpr"]), params["prevent_cse"], params["differentiated"], params["policy"])


def marked_as_differentiated(program: Any) -> Any:
    """The program with its checkpoints marked as belonging to a backward pass."""
    eqns = [
        e.replace(params={**e.params, "differentiated": True}) if "differentiated" in e.params else e
        for e in program.jaxpr.eqns
    ]
    return program.replace(jaxpr=program.jaxpr.replace(eqns=eqns))


class ShardMap(NamedTuple):
    body: Program
    mesh: Any
    in_specs: Any
    out_specs: Any
    axis_names: set[str]
    check_vma: bool


def shard_map(params: Params) -> ShardMap | None:
    manual = "newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"  # up to 0.10
    if not _has(params, f"jaxpr mesh in_specs out_specs check_vma {manual}"):
        return None
    mesh, in_specs, out_specs = params["mesh"], params["in_specs"], params["out_specs"]
    return ShardMap(opened(params["jaxpr"]), mesh, in_specs, out_specs, set(params[manual]), params["check_vma"])


class CustomJvp(NamedTuple):
    call: Program
    num_consts: int
    # For each operand whether its tangent is zero -> the rule's program, and which of its tangents are zero.
    rule: Callable[..., tuple[Program, Sequence[bool]]]


def custom_jvp(params: Params) -> CustomJvp | None:
    if not _has(params, "call_jaxpr jvp_jaxpr_fun num_consts", "symbolic_zeros"):
        return None

    def rule(*zeros: bool) -> tuple[Program, Sequence[bool]]:
        jaxpr, consts, out_zeros = params["jvp_jaxpr_fun"].call_wrapped(*zeros)
        return Program(jaxpr, consts), out_zeros

    return CustomJvp(opened(params["call_jaxpr"]), params["num_consts"], rule)


class CustomVjp(NamedTuple):
    call: Program
    num_consts: int
    # For each operand whether it is differentiated -> the program of the residuals and results.
    forward: Callable[..., Program]
    # Which residuals are operands, by their number; None for those that `forward` returns, before the results.
    forwarded: Callable[[], Sequence[int | None]]
    # Residuals and cotangents -> cotangents of the operands, None for zero.
    backward: Callable[..., list[Any]]


def custom_vjp(params: Params) -> CustomVjp | None:
    if not _has(params, "call_jaxpr fwd_jaxpr_thunk bwd num_consts out_trees", "symbolic_zeros"):
        return None

    def backward(*values: Any) -> list[Any]:
        grads = params["bwd"].call_wrapped(*values)
        if len(grads) == 2 and isinstance(grads[0], list):  # from 0.12 on, with a log
            grads, _ = grads
        # Zeros are objects of JAX's own, which no trace returns.
        return [None if type(g) is ad.Zero else g for g in grads]

    return CustomVjp(
        opened(params["call_jaxpr"]),
        params["num_consts"],
        lambda *live: Program(*params["fwd_jaxpr_thunk"].call_wrapped(*live)),
        lambda: params["out_trees"]()[2],
        backward,
    )


def sharding_constraint(params: Params) -> Any:
    """The sharding that is asked for."""
    return params["sharding"] if _has(params, "sharding", "layout context_mesh unconstrained_dims") else None


def reshard(params: Params) -> Any:
    """The sharding that is asked for."""
    return params["dst_sharding"] if _has(params, "dst_sharding", "concrete_mesh") else None


def device_put(params: Params) -> Sequence[Any] | None:
    """The device or sharding for each operand."""
    # Whether the result may share memory with the operand does not matter inside of a program.
    return params["devices"] if _has(params, "devices", "srcs copy_semantics") else None


def warn_of_unknown_parameters(primitive: Any, names: Sequence[str]) -> None:
    """Warn that a primitive of the installed JAX has unknown parameters."""
    warnings.warn(
        f"lowbit does not know the parameters of the primitive {primitive} in JAX {jax.__version__} "
        f"({', '.join(names)}), so low-bit operands of it go dense. Please upgrade lowbit.",
        RuntimeWarning,
        stacklevel=2,
    )


# --- where the user wrote it

_HERE = str(Path(__file__).parents[1])
_OURS = (_HERE, str(Path(jax.__file__).parent), "<frozen")
# JAX then takes the first frame outside of lowbit for the user's.
source_info_util.register_exclusion(_HERE)


def line_of(eqn: JaxprEqn | None) -> tuple[str, int, str] | None:
    """File, line and function in which the user wrote what became an equation, as far as JAX knows."""
    # JAX summarizes it as "file.py:12:34 (function)".
    known = "" if eqn is None else source_info_util.summarize(eqn.source_info)
    found = re.fullmatch(r"(.+?):(\d+)(?::\d+)? \((.*)\)", known)
    return (found[1], int(found[2]), found[3]) if found else None


def user_line(eqn: JaxprEqn | None) -> tuple[str, int, str] | None:
    """The line of an equation; for an operator outside of `implicit`, the line that called it."""
    if found := line_of(eqn):
        return found
    for frame in reversed(traceback.extract_stack()):
        of_python = frame.filename.startswith(sysconfig.get_path("stdlib")) and "site-packages" not in frame.filename
        if not of_python and not frame.filename.startswith(_OURS):
            return frame.filename, frame.lineno or 0, frame.name
    return None


# --- calls


@contextmanager
def context_of(eqn: JaxprEqn) -> Iterator[None]:
    """The context in which an equation was traced: its settings, its name scopes, and the user's line."""
    info: Any = eqn.source_info
    stack = source_info_util.current_name_stack() + info.name_stack
    with source_info_util.user_context(info.traceback, name_stack=stack), eqn.ctx.manager:
        yield


def asks_for_type() -> bool:
    """Whether the caller's caller is where JAX finds the type of an argument. Only an error message depends on it."""
    package, _, module = sys._getframe(2).f_globals.get("__name__", "").rpartition(".")
    return package.startswith("jax") and module in ("core", "dtypes")


def rebind(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Run an equation as JAX would, on other values."""
    # Up to 0.9, functions inside an equation are separate from its parameters.
    bound: Any = eqn.primitive.get_bind_params(eqn.params)
    functions, params = ((), bound) if isinstance(bound, dict) else bound
    outs = eqn.primitive.bind(*functions, *values, **params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


def subjaxprs(params: dict[str, Any]) -> Iterator[Jaxpr]:
    """The jaxprs among an equation's parameters."""
    for param in params.values():
        for item in param if isinstance(param, (tuple, list)) else (param,):
            if is_jaxpr(item):
                yield opened(item).jaxpr


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes of an enclosing shard_map over which a value differs."""
    aval: Any = jax.typeof(x)
    # 0.7 has `vma`, 0.10 a `manual_axis_type` with more kinds of axes.
    kinds = getattr(aval, "manual_axis_type", None)
    return aval.vma if kinds is None else kinds.varying


def varying_like(x: Any, shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    """The type of a result that varies over the axes that `x` does, for calls that are opaque to JAX."""
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
    # 0.7 has the method on an inner object.
    (context if hasattr(context, "set_global") else context._obj).set_global(value)


def mesh_in_context() -> Any:
    """The mesh of `jax.set_mesh`, if there is one."""
    # 0.7 gives its abstract mesh only.
    get_mesh = getattr(jax.sharding, "get_mesh", None)
    mesh = get_mesh() if get_mesh else None
    return None if mesh is None or mesh.empty else mesh


def meshes_of(*values: Any) -> list[Any]:
    """The meshes that a program is traced for: those of its values, and the one in context."""
    types: list[Any] = [jax.typeof(value) for value in values]
    return [*(type.sharding.mesh for type in types), jax.sharding.get_abstract_mesh()]


def device_kind(*values: Any) -> str:
    """The kind of device that a program is traced for: of its values' mesh, of the mesh in context, or the default."""
    found = next((mesh.abstract_device for mesh in meshes_of(*values) if mesh.abstract_device is not None), None)
    return (found or jax.devices()[0]).device_kind


class Device(NamedTuple):
    """The device that a kernel is compiled for, as far as kernels depend on it."""

    kind: str
    platform: str
    cores: int | None = None


def device_of(ctx: Any, platform: str) -> Device | None:
    """The device that a program is lowered for: that of the mesh in context, or of the backend that compiles it.

    None if both are of another platform, as for a program that is exported.
    """
    around: Any = jax.sharding.get_abstract_mesh()
    # Pallas identifies GPUs by name, and a GPU that is only described to the compiler may have any name.
    backend = ctx.module_context.backend if platform == "tpu" else None
    for device in (around.abstract_device, (backend or jax).devices()[0]):
        kind = getattr(device, "device_kind", "cpu")
        if kind != "cpu" and kind.startswith("TPU") == (platform == "tpu"):
            return Device(kind, "tpu" if platform == "tpu" else "gpu", getattr(device, "num_cores", None))
    return None


@contextmanager
def lowering_for(device: Device) -> Iterator[None]:
    """Set the device that Pallas lowers for; by default it is that of the mesh in context, or the default device."""
    # The platform is a field from 0.10 on.
    values = {"device_kind": device.kind, "num_cores": device.cores, "platform": device.platform}
    known = {field.name: values[field.name] for field in fields(jax.sharding.AbstractDevice)}
    mesh: Any = jax.sharding.get_abstract_mesh()
    with jax.sharding.use_abstract_mesh(mesh.update(abstract_device=jax.sharding.AbstractDevice(**known))):
        yield


def can_partition_calls(*values: Any) -> bool:
    """Whether the compiler supports custom partitioning for a call on these values."""
    # The TPU compiler does not (jax-ml/jax#38196, open at 0.10).
    return not device_kind(*values).startswith("TPU")
