"""Rules for the primitives that hold other programs, rebuilt through JAX's public functions.

An implicit array crosses their border as its parts. Where a value must have one type on all ways (a loop's carry,
the results of branches) and would not, it becomes dense.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jax.interpreters import ad
from jax.sharding import PartitionSpec

from ._array import ImplicitArray, dense, is_implicit
from ._interpret import go_dense, interpret, run
from ._register import register, rule_count

# --- leaf by leaf: what these do to an array they do to its parts


def _leafwise(primitive: Any, *operands: Any, **params: Any) -> Any:
    parts, tree = jax.tree.flatten(operands)
    if primitive.multiple_results:
        return jax.tree.unflatten(tree, primitive.bind(*parts, **params))
    return jax.tree.unflatten(tree, [primitive.bind(part, **params) for part in parts])[0]


for _name in ("copy", "pvary", "optimization_barrier", "stop_gradient"):
    register(_name)(_leafwise)


# --- shardings speak of the array, and its parts are laid out accordingly


@register("sharding_constraint")
def _(primitive: Any, operand: ImplicitArray, *, sharding: Any, **params: Any) -> Any:
    del primitive, params
    return _constrained(operand, sharding)


@register("reshard")
def _(primitive: Any, operand: ImplicitArray, *, dst_sharding: Any, **params: Any) -> Any:
    return jax.tree.map(
        lambda part, sharding: primitive.bind(part, dst_sharding=sharding, **params),
        operand,
        operand.part_shardings(dst_sharding),
    )


@register("device_put")
def _(*operands: Any, devices: Sequence[Any], **params: Any) -> Any:
    del params  # whether it may share memory is no matter inside of a program
    targets = [x.part_shardings(to) if is_implicit(x) else to for x, to in zip(operands, devices, strict=True)]
    return [jax.device_put(x, to) for x, to in zip(operands, targets, strict=True)]


def _constrained(value: Any, sharding: Any) -> Any:
    if not is_implicit(value):
        return lax.with_sharding_constraint(value, sharding)
    return jax.tree.map(lax.with_sharding_constraint, value, value.part_shardings(sharding))


# --- calls

_compiled_calls: weakref.WeakKeyDictionary[Any, dict[Any, Callable[..., Any]]] = weakref.WeakKeyDictionary()


@register("jit")
def _(
    *operands: Any,
    jaxpr: ClosedJaxpr,
    name: str,
    in_shardings: Sequence[Any],
    out_shardings: Sequence[Any],
    donated_invars: Sequence[bool],
    keep_unused: bool,
    inline: bool,
    **params: Any,
) -> Any:
    del params  # layouts and compiler options belong to the outermost jit; the mesh is in the equation's context
    key = (rule_count(), name, tuple(in_shardings), tuple(out_shardings), tuple(donated_invars), keep_unused, inline)
    # A function that is called ten times is compiled once: the same jaxpr gives the same jit.
    # The call holds its jaxpr weakly, so that it does not keep its own key alive.
    cache = _compiled_calls.setdefault(jaxpr, {})
    if key not in cache:
        program = weakref.ref(jaxpr)

        def call(*values: Any) -> list[Any]:
            body = program()
            assert body is not None
            values = tuple(map(_constrained_if_given, values, in_shardings))
            outs = interpret(body.jaxpr, body.consts, values)
            return list(map(_constrained_if_given, outs, out_shardings))

        call.__name__ = name
        donate = tuple(i for i, given in enumerate(donated_invars) if given)
        cache[key] = jax.jit(call, donate_argnums=donate, keep_unused=keep_unused, inline=inline)
    return cache[key](*operands)


def _constrained_if_given(value: Any, sharding: Any) -> Any:
    return _constrained(value, sharding) if isinstance(sharding, jax.sharding.Sharding) else value


@register("closed_call")
def _(*operands: Any, call_jaxpr: Any, **params: Any) -> Any:
    del params
    return interpret(getattr(call_jaxpr, "jaxpr", call_jaxpr), getattr(call_jaxpr, "consts", ()), operands)


@register("checkpoint")
def _(*operands: Any, jaxpr: Jaxpr, prevent_cse: Any, differentiated: bool, policy: Any) -> Any:
    call = jax.checkpoint(lambda *values: interpret(jaxpr, (), values), prevent_cse=prevent_cse, policy=policy)
    if not differentiated:
        return call(*operands)
    # The backward pass of a gradient taken inside. Only JAX's own differentiation marks a checkpoint so,
    # and unmarked it would be merged with the forward pass.
    closed, shapes = jax.make_jaxpr(call, return_shape=True)(*operands)
    eqns = [
        e.replace(params={**e.params, "differentiated": True}) if "differentiated" in e.params else e
        for e in closed.jaxpr.eqns
    ]
    marked = closed.replace(jaxpr=closed.jaxpr.replace(eqns=eqns))
    return jax.tree.unflatten(jax.tree.structure(shapes), jaxpr_as_fun(marked)(*jax.tree.leaves(operands)))


@register("shard_map")
def _(*operands: Any, jaxpr: Jaxpr, mesh: Any, in_specs: Any, out_specs: Any, check_vma: bool, **axes: Any) -> Any:
    operands = tuple(x.plain() if is_implicit(x) else x for x in operands)

    def on_shards(fn: Callable[..., Any], out_specs: Any) -> Callable[..., Any]:
        manual = axes["newly_manual_axes" if "newly_manual_axes" in axes else "manual_axes"]
        specs = tuple(_part_specs(x, spec, mesh) for x, spec in zip(operands, in_specs, strict=True))
        return jax.shard_map(
            fn, mesh=mesh, in_specs=specs, out_specs=out_specs, axis_names=set(manual), check_vma=check_vma
        )

    found: list[Any] = []

    def probe(*values: Any) -> None:
        outs = interpret(jaxpr, (), values)
        found[:] = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), outs)

    # Which results are implicit is known only inside, but their specs are asked for outside.
    jax.eval_shape(on_shards(probe, None), *operands)
    call = on_shards(lambda *values: interpret(jaxpr, (), values), list(map(_part_specs, found, out_specs)))
    return call(*operands)


def _part_specs(value: Any, spec: PartitionSpec, mesh: Any = None) -> Any:
    """The specs of the parts. With the mesh, a spec that would cut a block raises; results are cut already."""
    return value.part_specs(spec, mesh) if is_implicit(value) else spec


# --- loops and branches


@register("scan")
def _(
    *operands: Any,
    jaxpr: ClosedJaxpr,
    num_consts: int,
    num_carry: int,
    length: int,
    reverse: bool,
    unroll: int,
    **params: Any,
) -> Any:
    split = params.get("_split_transpose", False)
    consts = operands[:num_consts]
    init = list(operands[num_consts : num_consts + num_carry])
    xs = operands[num_consts + num_carry :]
    sliced = list(map(_sliced, xs))

    def step(carry: Any, x: Any) -> tuple[list[Any], list[Any]]:
        i, slices = x
        layers = [_layer(stack, i, s) for stack, s in zip(xs, slices, strict=True)]
        outs = interpret(jaxpr.jaxpr, jaxpr.consts, [*consts, *carry, *layers])
        return outs[:num_carry], [_resolved(y) for y in outs[num_carry:]]

    if length == 0:
        ys = [jnp.zeros((0, *v.aval.shape), v.aval.dtype) for v in jaxpr.jaxpr.outvars[num_carry:]]
        return [*init, *ys]
    walked = (jnp.arange(length), sliced)
    first = jax.eval_shape(lambda: jax.tree.map(lambda a: a[0], walked))
    init = _settled_carry(lambda carry, x: step(carry, x)[0], init, "scan", first)

    def body(carry: Any, x: Any) -> tuple[Any, Any]:
        after, ys = step(carry, x)
        return _conform(after, carry, "scan"), ys

    options = {"_split_transpose": split} if split else {}
    carry, ys = lax.scan(body, init, walked, length, reverse=reverse, unroll=unroll, **options)
    return [*carry, *ys]


def _sliced(stack: Any) -> Any:
    """What JAX slices of a stack. It would copy each layer, so that an implicit one goes in whole, with its number."""
    if not is_implicit(stack):
        return stack
    return list(map(_sliced, stack._flatten()[0])) if stack.is_stack else None


def _layer(stack: Any, i: Any, slices: Any) -> Any:
    """The layer of a stack, of which JAX has sliced `slices`."""
    if not is_implicit(stack):
        return slices
    if stack.is_stack:
        fields, static = stack._flatten()
        return stack._unflatten(static, [_layer(field, i, s) for field, s in zip(fields, slices, strict=True)])

    def take(dense_stack: jax.Array, i: Any) -> jax.Array:
        starts = [i] + [jnp.zeros_like(i)] * (dense_stack.ndim - 1)
        return lax.squeeze(lax.dynamic_slice(dense_stack, starts, (1, *dense_stack.shape[1:])), (0,))

    return run(take, stack, i)


@register("while")
def _(
    *operands: Any,
    cond_jaxpr: ClosedJaxpr,
    cond_nconsts: int,
    body_jaxpr: ClosedJaxpr,
    body_nconsts: int,
) -> Any:
    cond_consts = operands[:cond_nconsts]
    body_consts = operands[cond_nconsts : cond_nconsts + body_nconsts]

    def step(carry: Any) -> list[Any]:
        return interpret(body_jaxpr.jaxpr, body_jaxpr.consts, [*body_consts, *carry])

    def go_on(carry: Any) -> Any:
        return dense(interpret(cond_jaxpr.jaxpr, cond_jaxpr.consts, [*cond_consts, *carry])[0])

    init = _settled_carry(step, operands[cond_nconsts + body_nconsts :], "while")
    return lax.while_loop(go_on, lambda carry: _conform(step(carry), carry, "while"), init)


@register("cond")
def _(index: Any, *operands: Any, branches: Sequence[ClosedJaxpr], **params: Any) -> Any:
    del params

    def results(branch: ClosedJaxpr, *values: Any) -> list[Any]:
        return [_resolved(y) for y in interpret(branch.jaxpr, branch.consts, values)]

    outs = [jax.eval_shape(partial(results, branch), *operands) for branch in branches]
    wanted = [
        slot[0] if all(_same_type(slot[0], other) for other in slot) else None for slot in zip(*outs, strict=True)
    ]

    def way(branch: ClosedJaxpr, *values: Any) -> list[Any]:
        return _conform(results(branch, *values), wanted, "cond")

    return lax.switch(dense(index), [partial(way, branch) for branch in branches], *operands)


def _resolved(x: Any) -> Any:
    return x.resolved() if is_implicit(x) else x


def _conform(values: Sequence[Any], wanted: Sequence[Any], primitive: str) -> list[Any]:
    return [_resolved(v) if is_implicit(w) else go_dense(v, primitive) for v, w in zip(values, wanted, strict=True)]


def _settled_carry(step: Callable[..., Any], carry: Sequence[Any], primitive: str, *x: Any) -> list[Any]:
    """The carry with every slot dense that does not come out of `step(carry, *x)` as it went in."""
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


def _dense_results(call_jaxpr: ClosedJaxpr, name: str) -> Callable[..., list[Any]]:
    def call(*values: Any) -> list[Any]:
        return [go_dense(y, name) for y in interpret(call_jaxpr.jaxpr, call_jaxpr.consts, values)]

    return call


def _is_zero(tangent: Any) -> bool:
    return all(isinstance(leaf, SymbolicZero) for leaf in jax.tree.leaves(tangent))


@register("custom_jvp_call")
def _(*operands: Any, call_jaxpr: ClosedJaxpr, jvp_jaxpr_fun: Any, num_consts: int, **params: Any) -> Any:
    del params
    call = jax.custom_jvp(_dense_results(call_jaxpr, "custom_jvp_call"))

    def jvp(primals: Any, tangents: Any) -> Any:
        moved = [_dense_tangent(p, t) for p, t in zip(primals[num_consts:], tangents[num_consts:], strict=True)]
        rule, consts, out_zeros = jvp_jaxpr_fun.call_wrapped(*(t is None for t in moved))
        outs = interpret(rule, consts, [*primals[num_consts:], *(t for t in moved if t is not None)])
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


@register("custom_vjp_call")
def _(
    *operands: Any,
    call_jaxpr: ClosedJaxpr,
    fwd_jaxpr_thunk: Any,
    bwd: Any,
    num_consts: int,
    out_trees: Callable[[], Any],
    **params: Any,
) -> Any:
    del params
    consts, args = operands[:num_consts], operands[num_consts:]

    @jax.custom_vjp
    def call(*args: Any) -> list[Any]:
        return _dense_results(call_jaxpr, "custom_vjp_call")(*consts, *args)

    def forward(*args: Any) -> Any:
        program, program_consts = fwd_jaxpr_thunk.call_wrapped(*(True for _ in args))
        outs = interpret(program, program_consts, args)
        # Residuals that are arguments unchanged are not among the results, but named by position.
        _, _, forwarded = out_trees()
        count = sum(f is None for f in forwarded)
        new = iter(outs[:count])
        given = [*consts, *args]
        residuals = [next(new) if f is None else given[f] for f in forwarded]
        return [go_dense(y, "custom_vjp_call") for y in outs[count:]], (residuals, args)

    def backward(kept: Any, cotangents: Any) -> Any:
        residuals, args = kept
        grads = run(lambda *values: _without_zeros(bwd.call_wrapped(*values)), *residuals, *cotangents)
        return tuple(map(_part_cotangent, args, grads))

    call.defvjp(forward, backward)
    return call(*args)


def _without_zeros(grads: Sequence[Any]) -> list[Any]:
    """None for the zeros that are objects of JAX's own, which no trace returns."""
    return [None if type(g) is ad.Zero else g for g in grads]


def _part_cotangent(primal: Any, cotangent: Any) -> Any:
    if cotangent is None or not is_implicit(primal):
        return cotangent
    _, pull = jax.vjp(dense, primal)
    return pull(dense(cotangent))[0]
