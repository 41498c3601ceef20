"""Features that are programs: jit, loops, vmap, gradients, custom rules, effects and callbacks."""

from functools import partial

import jax
import jax.numpy as jnp
from features_registry import fused, layout_matters, may_go_dense
from helpers import LAYERS
from jax import lax

import lowbit

# --- jit


@fused
def jit_inside(x, p):
    return jax.jit(lambda x, w: x @ w)(x, p["w"])


@fused
def jit_nested_with_static_and_keyword(x, p):
    @partial(jax.jit, static_argnames="times")
    def layer(x, *, w, times):
        for _ in range(times):
            x = jnp.tanh(x @ w)
        return x

    return jax.jit(lambda x, w: layer(layer(x, w=w, times=2), w=w, times=1))(x, p["square"])


@fused
def jit_returning_it(x, p):
    return x @ jax.jit(lambda w: w.T)(p["square"])


# --- loops


@layout_matters
@fused
def scan_over_layers(x, p):
    return lax.scan(lambda c, w: (jnp.tanh(c @ w), c.sum()), x, p["stack"])


@fused
def scan_reversed_and_unrolled(x, p):
    return lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, p["stack"], reverse=True, unroll=2)[0]


@fused
def scan_with_the_weight_outside(x, p):
    return lax.scan(lambda c, _: (jnp.tanh(c @ p["square"]), None), x, None, length=4)[0]


@fused
def scan_with_the_weight_carried(x, p):
    return lax.scan(lambda c, _: ((jnp.tanh(c[0] @ c[1]), c[1]), None), (x, p["square"]), None, length=4)[0][0]


@may_go_dense
def scan_with_a_carry_that_changes(x, p):
    return lax.scan(lambda c, _: (c * 1.5 + 1, None), p["square"], None, length=2)[0]


@fused
def scan_returning_the_layers(x, p):
    return lax.scan(lambda c, w: (c, w.T), 0.0, p["stack"])[1] @ x.T


@fused
def scan_of_nothing(x, p):
    return lax.scan(lambda c, _: (c @ p["square"], None), x, None, length=0)[0]


@fused
def fori_loop_by_index(x, p):
    return lax.fori_loop(0, LAYERS, lambda i, c: jnp.tanh(c @ p["stack"][i]), x)


@fused
def fori_loop_to_a_traced_end(x, p):
    end = jnp.argmax(x[0]) * 0 + 2
    return lax.fori_loop(0, end, lambda i, c: jnp.tanh(c @ p["stack"][i]), x)


@fused
def while_loop(x, p):
    return lax.while_loop(lambda c: c[1] < 3, lambda c: (jnp.tanh(c[0] @ p["square"]), c[1] + 1), (x, 0))[0]


@fused
def while_loop_carrying_it(x, p):
    return lax.while_loop(lambda c: c[2] < 3, lambda c: (jnp.tanh(c[0] @ c[1]), c[1], c[2] + 1), (x, p["square"], 0))[0]


@fused
def while_loop_asking_it(x, p):
    return lax.while_loop(lambda c: (c[:1] @ p["square"]).sum() > 1e6, lambda c: c * 0.5, x)


@fused
def cond(x, p):
    return lax.cond(x[0, 0] > 0, lambda w: x @ w, lambda w: x @ w * 2, p["w"])


@fused
def cond_on_closures(x, p):
    return lax.cond(x[0, 0] > 0, lambda: x @ p["square"], lambda: x @ p["square"].T)


@fused
def cond_returning_it(x, p):
    return x @ lax.cond(x[0, 0] > 0, lambda w: w, lambda w: w, p["square"])


@may_go_dense
def cond_with_mixed_results(x, p):
    ways = (lambda w: w, lambda w: w * 2 + 1)
    return lax.cond(x[0, 0] > 0, *ways, p["w"]), lax.cond(x[0, 0] > 0, *ways[::-1], p["w"])


@fused
def switch(x, p):
    ways = [lambda w: x @ w, lambda w: jnp.sin(x) @ w, lambda w: x @ (w.T).T]
    return lax.switch(jnp.int32(1), ways, p["w"])


@fused
def lax_map(x, p):
    return lax.map(lambda w: x @ w, p["stack"]), lax.map(lambda row: row @ p["w"], x)


@may_go_dense
def associative_scan(x, p):
    return lax.associative_scan(jnp.matmul, p["stack"])


# --- vmap, grad and custom rules inside


@fused
def vmap_over_rows(x, p):
    return jax.vmap(lambda row: row @ p["w"])(x)


@layout_matters
@fused
def vmap_over_layers(x, p):
    return jax.vmap(lambda w: x @ w)(p["stack"]), jax.vmap(lambda x, w: x @ w.T, (None, 0))(x, p["stack"])


@fused
def vmap_of_vmap(x, p):
    return jax.vmap(lambda w: jax.vmap(lambda row: w @ row)(x))(p["stack"])


@fused
def vmap_with_collective(x, p):
    return jax.vmap(lambda row: lax.psum(row @ p["w"], "rows"), axis_name="rows")(x)


@layout_matters
@fused
def grad_of_activations(x, p):
    return jax.grad(lambda x: jnp.sin(x @ p["w"]).sum())(x)


@fused
def value_and_grad_through_scan_and_checkpoint(x, p):
    @jax.checkpoint
    def layer(c, w):
        return jnp.tanh(c @ w), None

    return jax.value_and_grad(lambda x: lax.scan(layer, x, p["stack"])[0].sum())(x)


@fused
def jvp(x, p):
    return jax.jvp(lambda x: jnp.sin(x @ p["w"]), (x,), (jnp.ones_like(x),))


@fused
def hessian(x, p):
    return jax.hessian(lambda t: jnp.sin((t @ x) @ p["w"]).sum())(jnp.ones(8))


@fused
def linearized(x, p):
    y, f = jax.linearize(lambda x: jnp.sin(x @ p["w"]), x)
    return y, f(jnp.ones_like(x))


@may_go_dense
def grad_of_the_weight(x, p):
    return jax.grad(lambda w: jnp.sin(x @ w).sum())(p["w"])


@fused
def checkpoint_with_policy(x, p):
    f = jax.checkpoint(lambda x: jnp.sin(x @ p["w"]), policy=jax.checkpoint_policies.nothing_saveable)
    return jax.grad(lambda x: f(x).sum())(x)


@jax.custom_jvp
def _scaled_sine(x, w):
    return jnp.sin(x @ w)


@_scaled_sine.defjvp
def _(primals, tangents):
    (x, w), (dx, _) = primals, tangents
    return _scaled_sine(x, w), 3 * (dx @ w)


@may_go_dense  # the custom rule gets a zero tangent of the weight's shape, as in the dense program
def custom_jvp(x, p):
    return _scaled_sine(x, p["w"]), jax.grad(lambda x: _scaled_sine(x, p["w"]).sum())(x)


@jax.custom_vjp
def _linear(x, w):
    return x @ w


_linear.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (2 * g @ kept[1].T, None))


@fused
def custom_vjp(x, p):
    return _linear(x, p["w"]), jax.grad(lambda x: _linear(x, p["w"]).sum())(x)


@may_go_dense
def custom_rules_of_the_weight_alone(x, p):
    return jax.nn.relu(p["w"]), jax.nn.gelu(p["w"]), jax.nn.silu(p["w"])


@fused
def straight_through(x, p):
    return jax.grad(lambda x: (lowbit.ste(jnp.round)(x) @ p["w"]).sum())(x)


# --- effects, callbacks, randomness


@fused
def debug_print(x, p):
    jax.debug.print("{}", (x @ p["w"]).sum() * 0)
    return x @ p["w"]


@fused
def pure_callback(x, p):
    y = x @ p["w"]
    return jax.pure_callback(lambda y: y, jax.ShapeDtypeStruct(y.shape, y.dtype), y)


@fused
def random_dropout(x, p):
    return jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), x, 0) @ p["w"]


@fused
def barriers(x, p):
    w, x = lax.optimization_barrier((p["w"], x))
    return lax.stop_gradient(x) @ lax.stop_gradient(w)


@layout_matters
@fused
def ragged_dot(x, p):
    return lax.ragged_dot(x, p["stack"], jnp.array([3, 0, 5]))
