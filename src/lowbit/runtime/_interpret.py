"""implicit(fn): trace a function with dense stand-ins, then run its equations on the implicit arrays."""

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive
from jax.interpreters import ad, batching, mlir

from . import _compat
from ._array import ImplicitArray, dense, is_implicit
from ._indexing import DENSE_TYPES
from ._nnx import holds_nnx_objects, run_with_objects
from ._register import apply_rules, describe
from ._settings import Setting

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def implicit(fn: Callable[P, R]) -> Callable[P, R]:
    """Let `fn` take implicit arrays: in its arguments, in closures, globals and attributes, and in its results.

    `fn` is traced once with a dense stand-in for each implicit array. Its equations are then run in order: those with
    an implicit operand by the rules (see `register`), all others untouched. It works inside and outside of `jax.jit`.
    Outside, each call traces `fn` again, which takes milliseconds to seconds: compile what is called more than once.
    Changes that `fn` makes to Flax NNX modules among its arguments are applied after the call.

    >>> import jax, jax.numpy as jnp, lowbit
    >>> q = lowbit.Array8B.quantize(jnp.ones((4, 3)))
    >>> jax.jit(lowbit.implicit(lambda x, w: jnp.einsum("bd,dn->bn", x, w)))(jnp.ones((2, 4)), q).shape
    (2, 3)
    """

    @functools.wraps(fn)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        return jax.tree.map(
            lambda x: x.resolved() if is_implicit(x) else x,
            run(fn, *args, **kwargs),
            is_leaf=is_implicit,
        )

    return wrapped


use_implicit = implicit
"""eformer's name for `implicit`."""


def run(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`implicit(fn)(*args, **kwargs)`, but results may have deferred work (`ImplicitArray.resolved`)."""
    if holds_nnx_objects((args, kwargs)):
        return run_with_objects(_traced_and_run, fn, args, kwargs)
    return _traced_and_run(fn, *args, **kwargs)


def _traced_and_run(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    found, tree = jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=is_implicit)
    leaves = [leaf for _, leaf in found]
    # The first two keys name the argument.
    paths = [jax.tree_util.keystr(path[2:], simple=True, separator="/") for path, _ in found]
    traced_at = [i for i, leaf in enumerate(leaves) if is_implicit(leaf) or _is_dense(leaf)]
    out_tree, static_outs, dense_at = None, [], []

    def on_stand_ins(traced: list[Any]) -> list[Any]:
        nonlocal out_tree, static_outs, dense_at
        full = list(leaves)
        for i, x in zip(traced_at, traced, strict=True):
            full[i] = capture(x, paths[i]) if is_implicit(x) else x
        args, kwargs = jax.tree.unflatten(tree, full)
        with _tracing(True):
            outs, out_tree = jax.tree.flatten(fn(*args, **kwargs))
        dense_at = [i for i, out in enumerate(outs) if _is_dense(out)]
        static_outs = [None if i in dense_at else out for i, out in enumerate(outs)]
        return [outs[i] for i in dense_at]

    traced = [leaves[i] for i in traced_at]
    closed = jax.make_jaxpr(on_stand_ins)(traced)
    with _set(_operand_origins, ()):
        results = interpret(_compat.opened(closed), jax.tree.leaves(traced))
    outs = list(static_outs)
    for i, result in zip(dense_at, results, strict=True):
        outs[i] = result
    assert out_tree is not None
    return jax.tree.unflatten(out_tree, outs)


def _is_dense(x: Any) -> bool:
    """Whether `x` is traced. Python numbers are not: they may be axes or lengths, and keep their weak type."""
    return isinstance(x, DENSE_TYPES) and getattr(x.dtype, "kind", "V") not in "OSUM"


def interpret(program: _compat.Program, args: Sequence[Any]) -> list[Any]:
    """Run a program on values, some of them implicit."""
    jaxpr, consts = program
    values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    last_use = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if not isinstance(v, Literal)}
    kept = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    origins = _origins_of(jaxpr.invars)

    def read(v: Any) -> Any:
        return v.val if isinstance(v, Literal) else values[v]

    for i, eqn in enumerate(jaxpr.eqns):
        operands = [read(v) for v in eqn.invars]
        if _is_untouched(eqn, operands):
            with _compat.context_of(eqn):
                outs = _compat.rebind(eqn, operands)
        else:
            given = [None if isinstance(v, Literal) else origins.get(v) for v in eqn.invars]
            with _set(_equation, eqn), _set(_operand_origins, given):
                outs = _evaluate(eqn, operands)
            if (origin := _origin(eqn, given)) is not None:
                origins.update((v, origin) for v, out in zip(eqn.outvars, outs, strict=True) if is_implicit(out))
        values.update(zip(eqn.outvars, outs, strict=True))
        # Drop activations after their last use, as eager execution would.
        for v in {v for v in eqn.invars if not isinstance(v, Literal)} - kept:
            if last_use[v] == i:
                del values[v]
    return [read(v) for v in jaxpr.outvars]


def _is_untouched(eqn: JaxprEqn, operands: list[Any]) -> bool:
    """Whether no implicit array takes part in an equation, as an operand or inside of it."""
    if eqn.primitive is capture_p or any(map(is_implicit, operands)):
        return False
    return not any(True for inner in _compat.subjaxprs(eqn.params) for _ in _captured(inner))


def _evaluate(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    if eqn.primitive is capture_p:
        return [jax.tree.unflatten(eqn.params["tree"], operands)]
    captured = [array for inner in _compat.subjaxprs(eqn.params) for array in _captured(inner)]
    with _compat.context_of(eqn):
        outs = apply_rules(eqn.primitive, operands, eqn.params)
        if outs is NotImplemented:
            for array in captured:  # it is dequantized when it is lowered
                _ask_policy(array, eqn.primitive)
            at = zip(operands, _operand_origins.get(), strict=True)
            return _compat.rebind(eqn, [go_dense(x, eqn.primitive, origin) for x, origin in at])
    outs = list(outs) if eqn.primitive.multiple_results else [outs]
    for out, var in zip(outs, eqn.outvars, strict=True):
        aval: Any = var.aval
        if np.shape(out) != aval.shape or _dtype(out) != aval.dtype:
            kinds = ", ".join(map(describe, operands))
            raise TypeError(
                f"A rule for {eqn.primitive} of ({kinds}) returned {describe(out)} instead of {aval.str_short()}."
            )
    return outs


def _dtype(x: Any) -> Any:
    return x.dtype if hasattr(x, "dtype") else jax.dtypes.result_type(x)


# --- stand-ins: how an implicit array enters a trace

_tracing = jax.make_user_context(False)
capture_p = Primitive("implicit_array")


def is_tracing() -> bool:
    """Whether `implicit` is tracing, that is, whether a stand-in will be turned back into its array."""
    return _tracing.value


def capture(array: ImplicitArray, path: str = "") -> jax.Array:
    """A dense stand-in, which `interpret` turns back into the array; `path` is its path in an argument."""
    components, tree = jax.tree.flatten(array)
    return capture_p.bind(*_compat.match_varying(components), tree=tree, path=path)


def _materialize_components(*components: Any, tree: Any, path: str) -> jax.Array:
    del path
    return dense(jax.tree.unflatten(tree, components))


@capture_p.def_abstract_eval
def _(*components: Any, tree: Any, path: str) -> Any:
    array = jax.tree.unflatten(tree, components)
    if not components:
        return ShapedArray(array.shape, array.dtype)
    aval = components[0]  # all vary over the same axes
    spec = array.logical_spec() or jax.sharding.PartitionSpec(*[None] * array.ndim)
    sharding = aval.sharding.update(spec=spec)
    return aval.update(shape=array.shape, dtype=array.dtype, weak_type=False, sharding=sharding)


def _capture_jvp(components: Any, tangents: Any, **params: Any) -> Any:
    live = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]

    def at(*varied: Any) -> jax.Array:
        moved = list(components)
        for i, component in zip(live, varied, strict=True):
            moved[i] = component
        return _materialize_components(*moved, **params)

    _, tangent = jax.jvp(at, [components[i] for i in live], [tangents[i] for i in live])
    return capture_p.bind(*components, **params), tangent


def _capture_batched(components: Any, dims: Any, **params: Any) -> Any:
    size = next(p.shape[d] for p, d in zip(components, dims, strict=True) if d is not None)
    return capture_p.bind(
        *(batching.bdim_at_front(p, d, size) for p, d in zip(components, dims, strict=True)), **params
    ), 0


capture_p.def_impl(_materialize_components)
ad.primitive_jvps[capture_p] = _capture_jvp
batching.primitive_batchers[capture_p] = _capture_batched
mlir.register_lowering(capture_p, mlir.lower_fun(_materialize_components, multiple_results=False))


def _captured(jaxpr: Jaxpr) -> Iterator[ImplicitArray]:
    """The arrays captured by a program, with types as components."""
    for eqn in jaxpr.eqns:
        if eqn.primitive is capture_p:
            yield jax.tree.unflatten(eqn.params["tree"], [v.aval for v in eqn.invars])
        for inner in _compat.subjaxprs(eqn.params):
            yield from _captured(inner)


# --- going dense


class MaterializationWarning(UserWarning):
    """An implicit array was made dense because no rule fits."""


materialization: Setting[str] = Setting("materialization", "warn", ("allow", "warn", "error"))
"""What happens where no rule fits and an implicit array is made dense: "warn" once for each primitive and class,
"error", or "allow". In a `with` statement it holds in the block and its thread; `materialization.set` sets it for the
process.

>>> import jax.numpy as jnp, lowbit
>>> q = lowbit.Array8B.quantize(jnp.ones((64, 32)))
>>> with lowbit.materialization("error"):
...     q + 1
Traceback (most recent call last):
TypeError: add has no rule for Array8B of shape (64, 32) (float32), so the whole array is made dense at ...
"""


class Origin(NamedTuple):
    """The parameter that a value holds elements of: its path, and whether they are rows that were looked up."""

    path: str = ""
    rows: bool = False


# The equation being run, and the origin of each of its operands.
_equation: ContextVar[JaxprEqn | None] = ContextVar("equation", default=None)
_operand_origins: ContextVar[Sequence[Origin | None]] = ContextVar("operand_origins", default=())


@contextmanager
def _set(variable: ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def _origins_of(invars: Sequence[Any]) -> dict[Any, Origin]:
    """The origins of a program's inputs, which are the operands of its equation."""
    given = _operand_origins.get()
    given = given[1:] if len(given) == len(invars) + 1 else given  # `cond` has a predicate before them
    return {v: origin for v, origin in zip(invars, given, strict=True) if origin} if len(given) == len(invars) else {}


def _origin(eqn: JaxprEqn, given: Sequence[Origin | None]) -> Origin | None:
    """The origin of what an equation returns: a transposed or cast parameter keeps its own."""
    if eqn.primitive is capture_p:
        return Origin(eqn.params["path"])
    known = next((origin for origin in given if origin is not None), None)
    return (known or Origin())._replace(rows=True) if takes_rows(eqn) else known


def takes_rows(eqn: JaxprEqn) -> bool:
    """Whether an equation looks up rows of a table: by a slice along the axis before the last, or by an index array.

    Where no rule takes such rows they are decoded without a warning, as the rows of an embedding are. Selecting a layer
    of a stack does not count: a layer is a weight.
    """
    if eqn.primitive.name not in ("slice", "dynamic_slice", "gather"):
        return False
    table, rows = (tuple(getattr(v.aval, "shape", ())) for v in (eqn.invars[0], eqn.outvars[0]))
    if eqn.primitive.name == "gather":
        indices: Any = eqn.invars[1].aval
        return len(indices.shape) > 1 and math.prod(rows) <= math.prod(table)
    return [a - len(table) for a, (n, size) in enumerate(zip(table, rows, strict=True)) if n != size] == [-2]


_warned: set[tuple[str, type]] = set()


def go_dense(x: Any, primitive: Primitive | str, origin: Origin | None = None) -> Any:
    """Make `x` dense, under the policy, because `primitive` has no rule for it. Dense values pass unchanged."""
    if not isinstance(x, ImplicitArray):
        return x
    if origin is None or not origin.rows:
        _ask_policy(x, primitive, origin.path if origin else "")
    return dense(x)


def _ask_policy(x: ImplicitArray, primitive: Primitive | str, path: str = "") -> None:
    policy, key = materialization.value, (str(primitive), type(x))
    warns = policy == "warn" and x.warn_on_materialize and key not in _warned
    if policy != "error" and not warns:
        return
    line = _compat.user_line(_equation.get())  # walks the stack, so only if there is a message
    at = f" at {line[0]}:{line[1]}, in {line[2]}" if line else ""
    message = (
        f"{primitive} has no rule for {type(x).__name__} of shape {x.shape} ({np.dtype(x.dtype).name})"
        f"{f', the parameter {path}' if path else ''}, so the whole array is made dense{at}."
    )
    if policy == "error":
        raise TypeError(
            f"{message} The policy materialization('error') forbids that: call .materialize() where it is meant, "
            "or register a rule."
        )
    _warned.add(key)
    message += " `with lowbit.materialization('allow'):` silences this warning, 'error' makes it an error."
    if line:  # shown at the user's line
        warnings.warn_explicit(message, MaterializationWarning, line[0], line[1])
    else:
        warnings.warn(message, MaterializationWarning, stacklevel=3)
