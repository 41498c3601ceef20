"""Rules for the primitives that contain other programs, rebuilt through JAX's public functions.

An implicit array is passed in and out as its components. A value that must have one type on every path (a loop's carry,
the results of branches) and would not becomes dense.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec

from . import _compat
from ._array import ImplicitArray, dense, is_implicit
from ._interpret import go_dense, interpret, run
from ._register import register, rule_count

P = TypeVar("P")


def _control(
    primitive: str, read: Callable[[_compat.Params], P | None]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register `fn(parameters, *operands)`. If `read` does not know the parameters, the fallback runs."""

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        @register(primitive)
        def _(primitive: Any, *operands: Any, **params: Any) -> Any:
            known = read(params)
            if known is None:
                _compat.warn_of_unknown_parameters(primitive, list(params))
                return NotImplemented
            return fn(known, *operands)

        return fn

    return decorate


# --- component by component


def _leafwise(primitive: Any, *operands: Any, **params: Any) -> Any:
    components, tree = jax.tree.flatten(operands)
    if primitive.multiple_results:
        return jax.tree.unflatten(tree, primitive.bind(*components, **params))
    return jax.tree.unflatten(tree, [primitive.bind(component, **params) for component in components])[0]


for _name in ("copy", "name", "pvary", "optimization_barrier", "stop_gradient"):
    register(_name)(_leafwise)


# --- shardings: given for the array, applied to its components


@_control("sharding_constraint", _compat.sharding_constraint)
def _(sharding: Any, operand: ImplicitArray) -> Any:
    return _constrained(operand, sharding)


@_control("reshard", _compat.reshard)
def _(sharding: Any, operand: ImplicitArray) -> Any:
    return jax.tree.map(jax.sharding.reshard, operand, operand.component_shardings(sharding))


@_control("device_put", _compat.device_put)
def _(devices: Sequence[Any], *operands: Any) -> Any:
    targets = [x.component_shardings(to) if is_implicit(x) else to for x, to in zip(operands, devices, strict=True)]
    return [jax.device_put(x, to) for x, to in zip(operands, targets, strict=True)]


def _constrained(value: Any, sharding: Any) -> Any:
    if not is_implicit(value):
        return lax.with_sharding_constraint(value, sharding)
    return jax.tree.map(lax.with_sharding_constraint, value, value.component_shardings(sharding))


# --- calls

_compiled_calls: weakref.WeakKeyDictionary[Any, dict[Any, Callable[..., Any]]] = weakref.WeakKeyDictionary()


@_control("jit", _compat.jit)
def _(jit: _compat.Jit, *operands: Any) -> Any:
    # The same jaxpr gives the same jit, so a function that is called ten times is compiled once.
    # The call holds its jaxpr weakly, so that it does not keep its own key alive.
    cache = _compiled_calls.setdefault(jit.key, {})
    key = (rule_count(), jit[1:])
    if key not in cache:
        program = weakref.ref(jit.key)

        def call(*values: Any) -> list[Any]:
            body = program()
            assert body is not None
            values = tuple(map(_constrained_if_given, values, jit.in_shardings))
            outs = interpret(_compat.opened(body), values)
            return list(map(_constrained_if_given, outs, jit.out_shardings))

        call.__name__ = jit.name
        jit = jit._replace(key=None)
        cache[key] = jax.jit(call, donate_argnums=jit.donated, keep_unused=jit.keep_unused, inline=jit.inline)
    return cache[key](*operands)


def _constrained_if_given(value: Any, sharding: Any) -> Any:
    return _constrained(value, sharding) if isinstance(sharding, jax.sharding.Sharding) else value


@_control("closed_call", _compat.closed_call)
def _(program: _compat.Program, *operands: Any) -> Any:
    return interpret(program, operands)


@_control("checkpoint", _compat.checkpoint)
def _(checkpoint: _compat.Checkpoint, *operands: Any) -> Any:
    call = jax.checkpoint(
        lambda *values: interpret(checkpoint.body, values),
        prevent_cse=checkpoint.prevent_cse,
        policy=checkpoint.policy,
    )
    if not checkpoint.differentiated:
        return call(*operands)
    # The backward pass of a gradient taken inside. Only JAX's own differentiation marks a checkpoint so,
    # and unmarked it would be merged with the forward pass.
    closed, shapes = jax.make_jaxpr(call, return_shape=True)(*operands)
    marked = _compat.marked_as_differentiated(closed)
    return jax.tree.unflatten(jax.tree.structure(shapes), jaxpr_as_fun(marked)(*jax.tree.leaves(operands)))


@_control("shard_map", _compat.shard_map)
def _(given: _compat.ShardMap, *operands: Any) -> Any:
    operands = tuple(x.plain() if is_implicit(x) else x for x in operands)

    def on_shards(fn: Callable[..., Any], out_specs: Any) -> Callable[..., Any]:
        specs = tuple(_component_specs(x, spec, given.mesh) for x, spec in zip(operands, given.in_specs, strict=True))
        return jax.shard_map(
            fn,
            mesh=given.mesh,
            in_specs=specs,
            out_specs=out_specs,
            axis_names=given.axis_names,
            check_vma=given.check_vma,
        )

    found: list[Any] = []

    def probe(*values: Any) -> None:
        outs = interpret(given.body, values)
        found[:] = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), outs)

    # Which results are implicit is known only inside, but their specs are needed outside.
    jax.eval_shape(on_shards(probe, None), *operands)
    call = on_shards(lambda *values: interpret(given.body, values), list(map(_component_specs, found, given.out_specs)))
    return call(*operands)


def _component_specs(value: Any, spec: PartitionSpec, mesh: Any = None) -> Any:
    """The specs of the components. With a mesh, a spec that would split a block raises; results are shards already."""
    return value.component_specs(spec, mesh) if is_implicit(value) else spec


# --- loops and branches


@_control("scan", _compat.scan)
def _(scan: _compat.Scan, *operands: Any) -> Any:
    start = scan.num_consts + scan.num_carry
    consts, init, xs = operands[: scan.num_consts], list(operands[scan.num_consts : start]), operands[start:]
    sliced = list(map(_sliced, xs))

    def step(carry: Any, x: Any) -> tuple[list[Any], list[Any]]:
        i, slices = x
        layers = [_layer(stack, i, s) for stack, s in zip(xs, slices, strict=True)]
        outs = interpret(scan.body, [*consts, *carry, *layers])
        return outs[: scan.num_carry], [_resolved(y) for y in outs[scan.num_carry :]]

    if scan.length == 0:
        types: list[Any] = [v.aval for v in scan.body.jaxpr.outvars[scan.num_carry :]]
        ys = [jnp.zeros((0, *type.shape), type.dtype) for type in types]
        return [*init, *ys]
    walked = (jnp.arange(scan.length), sliced)
    first = jax.eval_shape(lambda: jax.tree.map(lambda a: a[0], walked))
    init = _settled_carry(lambda carry, x: step(carry, x)[0], init, "scan", first)

    def body(carry: Any, x: Any) -> tuple[Any, Any]:
        after, ys = step(carry, x)
        return _conform(after, carry, "scan"), ys

    carry, ys = lax.scan(body, init, walked, scan.length, reverse=scan.reverse, unroll=scan.unroll, **scan.options)
    return [*carry, *ys]


def _sliced(stack: Any) -> Any:
    """What `scan` slices. Slicing copies each layer, so an implicit stack is passed whole, with the layer's number."""
    if not is_implicit(stack):
        return stack
    return list(map(_sliced, stack._flatten()[0])) if stack.is_stack else None


def _layer(stack: Any, i: Any, slices: Any) -> Any:
    """The layer of a stack, given what `scan` sliced."""
    if not is_implicit(stack):
        return slices
    if stack.is_stack:
        fields, static = stack._flatten()
        return stack._unflatten(static, [_layer(field, i, s) for field, s in zip(fields, slices, strict=True)])

    def take(dense_stack: jax.Array, i: Any) -> jax.Array:
        starts = [i] + [jnp.zeros_like(i)] * (dense_stack.ndim - 1)
        return lax.squeeze(lax.dynamic_slice(dense_stack, starts, (1, *dense_stack.shape[1:])), (0,))

    return run(take, stack, i)


@_control("while", _compat.while_loop)
def _(loop: _compat.While, *operands: Any) -> Any:
    start = loop.condition_consts + loop.body_consts
    condition_consts, body_consts = operands[: loop.condition_consts], operands[loop.condition_consts : start]

    def step(carry: Any) -> list[Any]:
        return interpret(loop.body, [*body_consts, *carry])

    def go_on(carry: Any) -> Any:
        return dense(interpret(loop.condition, [*condition_consts, *carry])[0])

    init = _settled_carry(step, operands[start:], "while")
    return lax.while_loop(go_on, lambda carry: _conform(step(carry), carry, "while"), init)


@_control("cond", _compat.branches)
def _(branches: list[_compat.Program], index: Any, *operands: Any) -> Any:
    def results(branch: _compat.Program, *values: Any) -> list[Any]:
        return [_resolved(y) for y in interpret(branch, values)]

    outs = [jax.eval_shape(partial(results, branch), *operands) for branch in branches]
    wanted = [
        slot[0] if all(_same_type(slot[0], other) for other in slot) else None for slot in zip(*outs, strict=True)
    ]

    def way(branch: _compat.Program, *values: Any) -> list[Any]:
        return _conform(results(branch, *values), wanted, "cond")

    return lax.switch(dense(index), [partial(way, branch) for branch in branches], *operands)


def _resolved(x: Any) -> Any:
    return x.resolved() if is_implicit(x) else x


def _conform(values: Sequence[Any], wanted: Sequence[Any], primitive: str) -> list[Any]:
    return [_resolved(v) if is_implicit(w) else go_dense(v, primitive) for v, w in zip(values, wanted, strict=True)]


def _settled_carry(step: Callable[..., Any], carry: Sequence[Any], primitive: str, *x: Any) -> list[Any]:
    """The carry with every slot dense that `step(carry, *x)` returns with another type."""
    carry = [_resolved(slot) for slot in carry]
    while any(map(is_implicit, carry)):
        after = jax.eval_shape(lambda carry, *x: [_resolved(slot) for slot in step(carry, *x)], carry, *x)
        kept = [not is_implicit(x) or _same_type(x, y) for x, y in zip(carry, after, strict=True)]
        if all(kept):
            break
        carry = [x if keep else go_dense(x, primitive) for x, keep in zip(carry, kept, strict=True)]
    return carry


def _same_type(x: Any, y: Any) -> bool:
    (a, tree_a), (b, tree_b) = jax.tree.flatten(x), jax.tree.flatten(y)
    return tree_a == tree_b and all(p.shape == q.shape and p.dtype == q.dtype for p, q in zip(a, b, strict=True))


# --- custom derivatives: the function's own rule, run with the implicit operands


def _dense_results(program: _compat.Program, name: str) -> Callable[..., list[Any]]:
    def call(*values: Any) -> list[Any]:
        return [go_dense(y, name) for y in interpret(program, values)]

    return call


def _is_zero(tangent: Any) -> bool:
    return all(isinstance(leaf, SymbolicZero) for leaf in jax.tree.leaves(tangent))


@_control("custom_jvp_call", _compat.custom_jvp)
def _(given: _compat.CustomJvp, *operands: Any) -> Any:
    call = jax.custom_jvp(_dense_results(given.call, "custom_jvp_call"))

    def jvp(primals: Any, tangents: Any) -> Any:
        values = primals[given.num_consts :]
        moved = [_dense_tangent(p, t) for p, t in zip(values, tangents[given.num_consts :], strict=True)]
        rule, out_zeros = given.rule(*(t is None for t in moved))
        outs = interpret(rule, [*values, *(t for t in moved if t is not None)])
        outs = [go_dense(y, "custom_jvp_call") for y in outs]
        values, live = outs[: len(out_zeros)], iter(outs[len(out_zeros) :])
        return values, [jnp.zeros_like(y) if zero else next(live) for y, zero in zip(values, out_zeros, strict=True)]

    call.defjvp(jvp, symbolic_zeros=True)
    return call(*operands)


def _zeros(tangent: Any) -> jax.Array:
    return jnp.zeros(tangent.shape, tangent.dtype)


def _dense_tangent(primal: Any, tangent: Any) -> Any:
    """The tangent of the logical array, or None for zero."""
    if _is_zero(tangent):
        return None
    if not is_implicit(primal):
        return tangent
    leaves, tree = jax.tree.flatten(tangent)
    zeros = (_zeros(t) if isinstance(t, SymbolicZero) else t for t in leaves)
    tangent = jax.tree.unflatten(tree, list(zeros))
    return jax.jvp(dense, (primal,), (tangent,))[1]


@_control("custom_vjp_call", _compat.custom_vjp)
def _(given: _compat.CustomVjp, *operands: Any) -> Any:
    consts, args = operands[: given.num_consts], operands[given.num_consts :]

    @jax.custom_vjp
    def call(*args: Any) -> list[Any]:
        return _dense_results(given.call, "custom_vjp_call")(*consts, *args)

    def forward(*args: Any) -> Any:
        outs = interpret(given.forward(*(True for _ in args)), args)
        # Residuals that are unchanged arguments are not results; they are named by position.
        forwarded = given.forwarded()
        count = sum(f is None for f in forwarded)
        new = iter(outs[:count])
        values = [*consts, *args]
        residuals = [next(new) if f is None else values[f] for f in forwarded]
        return [go_dense(y, "custom_vjp_call") for y in outs[count:]], (residuals, args)

    def backward(kept: Any, cotangents: Any) -> Any:
        residuals, args = kept
        grads = run(given.backward, *residuals, *cotangents)
        return tuple(map(_component_cotangent, args, grads))

    call.defvjp(forward, backward)
    return call(*args)


def _component_cotangent(primal: Any, cotangent: Any) -> Any:
    if cotangent is None or not is_implicit(primal):
        return cotangent
    _, pull = jax.vjp(dense, primal)
    return pull(dense(cotangent))[0]
