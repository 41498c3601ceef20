"""Unmodified models of Flax and Equinox with quantized leaves in every format: equal to dense ones, and fused."""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiers
from flax import nnx
from helpers import LAYERS, K, N, activations, assert_close, assert_same_bits, gaussian

import lowbit
from lowbit import QuantizedArray, implicit
from lowbit.testing import dense_weights

# A framework sees an array and not its format, so the first tier has one.
pytestmark = [pytest.mark.frameworks, pytest.mark.parametrize("format", tiers.tiered(lowbit.FORMATS, ("nf4",)))]

HEADS, HEAD, VOCABULARY, OUT = 4, 16, 128, 40
IDS = jnp.array([[3, 0, 127, 9, 9], [64, 1, 2, 77, 5]])


def is_quantized(x: Any) -> bool:
    return isinstance(x, QuantizedArray)


# Equinox does not count a quantized array as inexact, so its own filters find the trained leaves.
split = partial(eqx.partition, is_leaf=is_quantized)
join = partial(eqx.combine, is_leaf=is_quantized)


def quantized_leaves(tree: Any) -> list[QuantizedArray]:
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_quantized) if is_quantized(leaf)]


def quantize(w: jax.Array, format: str, axis: int = -2) -> QuantizedArray:
    return lowbit.FORMATS[format].quantize(w, axis=axis)


def quantize_named(params: Any, format: str, **axes: int) -> Any:
    """Quantize the parameters whose path has one of these names, along the axis of the first such name."""

    def leaf(path: Any, w: jax.Array) -> Any:
        names = [key.key for key in path]
        axis = next((axis for name, axis in axes.items() if name in names), None)
        return w if axis is None else quantize(w, format, axis)

    return jax.tree_util.tree_map_with_path(leaf, params)


def check(fn: Callable[..., jax.Array], *args: Any) -> None:
    """Assert that `fn(*args)` and its gradients, outside and inside `implicit`, are fused and equal to dense ones."""
    varied, fixed = split(args, eqx.is_inexact_array)
    fixed, static = split(fixed, lambda leaf: is_quantized(leaf) or eqx.is_array(leaf))
    assert jax.tree.leaves(varied) and quantized_leaves(fixed)

    def forward(fn: Any) -> Any:
        return lambda varied, fixed: fn(*join(varied, fixed, static))

    def gradient(fn: Any) -> Any:
        def loss(varied: Any, fixed: Any) -> Any:
            y = forward(fn)(varied, fixed)
            return jnp.sin(y).sum(), y

        return jax.grad(loss, has_aux=True)

    grads, y = jax.jit(gradient(fn))(varied, lowbit.materialize(fixed))
    assert all(np.any(grad) for grad in jax.tree.leaves(grads))
    for program, want in (
        (forward(implicit(fn)), y),
        (gradient(implicit(fn)), (grads, y)),
        (implicit(gradient(fn)), (grads, y)),
    ):
        with lowbit.materialization("error"):
            program = jax.jit(program)
            assert dense_weights(program.trace(varied, fixed).jaxpr, varied, fixed) == []
            assert_close(program(varied, fixed), want)


# --- Flax linen


class LinenMLP(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        return nn.Dense(OUT, dtype=self.dtype)(nn.gelu(nn.Dense(N, dtype=self.dtype)(x)))


def test_linen_mlp(format: str) -> None:
    x, model = activations(), LinenMLP()
    params = quantize_named(model.init(jax.random.key(0), x), format, kernel=-2)
    assert len(quantized_leaves(params)) == 2
    check(model.apply, params, x)


def test_linen_mlp_in_bfloat16(format: str) -> None:
    x, model = activations(), LinenMLP(jnp.bfloat16)
    params = quantize_named(model.init(jax.random.key(0), x), format, kernel=-2)
    with lowbit.materialization("error"):
        got = jax.jit(implicit(model.apply))(params, x)
        assert dense_weights(implicit(model.apply), params, x) == []
    # The dense model rounds the weights to bfloat16, the fused product does not.
    assert_close(got, model.apply(lowbit.materialize(params), x), 2e-2)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.tanh(nn.Dense(K)(nn.LayerNorm()(x))), None


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            nn.remat(Block, prevent_cse=False), variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS
        )
        return layers(name="layers")(x, None)[0]


def test_linen_scan_of_remat(format: str) -> None:
    x, model = activations(), Stack()
    params = quantize_named(model.init(jax.random.key(0), x), format, kernel=-2)
    (kernel,) = quantized_leaves(params)
    assert kernel.shape == (LAYERS, K, K)
    check(model.apply, params, x)


class TiedHead(nn.Module):
    @nn.compact
    def __call__(self, ids):
        embed = nn.Embed(VOCABULARY, K)
        return embed.attend(nn.LayerNorm()(embed(ids)))


def test_linen_embed_and_tied_head(format: str) -> None:
    model = TiedHead()
    check(model.apply, quantize_named(model.init(jax.random.key(0), IDS), format, embedding=-1), IDS)


QKV = nn.DenseGeneral((3, HEADS, HEAD), use_bias=False)
ATTENTION = nn.MultiHeadDotProductAttention(HEADS, qkv_features=HEADS * HEAD, out_features=OUT, use_bias=False)


# Without biases, and no scale shared by the heads of the last projection: either would have the shape of a layer of a
# kernel, which `dense_weights` takes for one.
@pytest.mark.parametrize(
    "model, axis",
    [(QKV, -1), (QKV, -4), (ATTENTION, -1), (ATTENTION, -3)],
    ids=["dense_general-axis-1", "dense_general-axis-4", "attention-axis-1", "attention-axis-3"],
)
def test_linen_heads(format: str, model: nn.Module, axis: int) -> None:
    x = gaussian(2, (2, 5, K))
    check(model.apply, quantize_named(model.init(jax.random.key(0), x), format, out=max(axis, -2), kernel=axis), x)


def test_linen_recurrent(format: str) -> None:
    x, model = gaussian(2, (2, 5, K)), nn.RNN(nn.SimpleCell(OUT))
    check(model.apply, quantize_named(model.init(jax.random.key(0), x), format, kernel=-2), x)


# --- Flax NNX


class NnxMLP(nnx.Module):
    def __init__(self, **options: Any):
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(K, N, rngs=rngs, **options)
        self.norm = nnx.LayerNorm(N, rngs=rngs)
        self.head = nnx.Linear(N, OUT, rngs=rngs, **options)

    def __call__(self, x):
        return self.head(nnx.gelu(self.norm(self.linear(x))))

    def quantize(self, format: str) -> "NnxMLP":
        for layer in (self.linear, self.head):
            layer.kernel = nnx.Param(quantize(layer.kernel[...], format))
        return self


def dense_nnx(model: NnxMLP) -> NnxMLP:
    graph, state = nnx.split(model)
    return nnx.merge(graph, lowbit.materialize(state))


# All parameters but the quantized ones, as a filter of NNX.
NNX_TRAINED = nnx.All(nnx.Param, lambda path, param: "kernel" not in path)


def nnx_loss(model: NnxMLP, x: jax.Array) -> jax.Array:
    return jnp.sin(implicit(lambda model, x: model(x))(model, x)).sum()


nnx_gradient = nnx.grad(nnx_loss, argnums=nnx.DiffState(0, NNX_TRAINED))


def test_nnx_split_and_merge(format: str) -> None:
    graph, state = nnx.split(NnxMLP())
    state = jax.tree.map(lambda w: quantize(w, format) if w.ndim == 2 else w, state)
    assert is_quantized(state["linear"]["kernel"].get_value())
    check(lambda state, x: nnx.merge(graph, state)(x), state, activations())


def test_nnx_param_set_in_place(format: str) -> None:
    model, x = NnxMLP().quantize(format), activations()
    check(lambda model, x: model(x), model, x)
    want = dense_nnx(model)(x)
    with lowbit.materialization("error"):
        assert_close(jax.jit(implicit(lambda x: model(x)))(x), want)
        assert_close(nnx.jit(implicit(lambda model, x: model(x)))(model, x), want)


def test_nnx_grad(format: str) -> None:
    model, x = NnxMLP().quantize(format), activations()
    with lowbit.materialization("error"):
        got = nnx.jit(nnx_gradient)(model, x)
    assert_close(got, nnx.jit(nnx_gradient)(dense_nnx(model), x))


def test_nnx_dot_general(format: str) -> None:
    """Only the product is implicit; the model is not wrapped."""
    # The default promote_dtype calls jnp.asarray(kernel), which outside of `implicit` makes it dense.
    model = NnxMLP(dot_general=implicit(jax.lax.dot_general), promote_dtype=lambda arrays, dtype: arrays)
    model, x = model.quantize(format), activations()

    def forward(x, model):
        return model(x)

    for program in (forward, jax.grad(lambda x, model: jnp.sin(model(x)).sum())):
        with lowbit.materialization("error"):
            assert_close(jax.jit(program)(x, model), jax.jit(program)(x, dense_nnx(model)))
            assert dense_weights(program, x, model) == []


def test_nnx_lora(format: str) -> None:
    rngs = nnx.Rngs(0)
    model = nnx.LoRA(
        K, 4, N, base_module=nnx.Linear(K, N, rngs=rngs), rngs=rngs, b_initializer=nnx.initializers.normal()
    )
    model.base_module.kernel = nnx.Param(quantize(model.base_module.kernel[...], format))
    check(lambda model, x: model(x), model, activations())


# --- Equinox


def batched(model: Callable[..., Any], x: jax.Array) -> Any:
    return jax.vmap(model)(x)


def equinox_mlp(format: str) -> eqx.nn.MLP:
    model = eqx.nn.MLP(K, OUT, N, 2, key=jax.random.key(0))

    def weights(model):
        return [layer.weight for layer in model.layers]

    return eqx.tree_at(weights, model, [quantize(w, format, -1) for w in weights(model)])


def test_equinox_mlp(format: str) -> None:
    model, x = equinox_mlp(format), activations()
    assert len(quantized_leaves(model)) == 3
    check(batched, model, x)
    want = batched(lowbit.materialize(model), x)
    with lowbit.materialization("error"):
        assert_close(eqx.filter_jit(implicit(batched))(model, x), want)
        assert_close(implicit(jax.vmap(model))(x), want)


def test_equinox_linear_needs_no_decorator(format: str) -> None:
    model, x = eqx.nn.Linear(K, N, key=jax.random.key(0)), activations()
    model = eqx.tree_at(lambda model: model.weight, model, quantize(model.weight, format, -1))
    with lowbit.materialization("error"):
        assert_close(eqx.filter_jit(batched)(model, x), batched(lowbit.materialize(model), x))
        assert dense_weights(batched, model, x) == []


def test_equinox_filter_grad(format: str) -> None:
    x = activations()
    trained, frozen = split(equinox_mlp(format), eqx.is_inexact_array)

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(trained, frozen, x):
        return jnp.sin(implicit(batched)(join(trained, frozen), x)).sum()

    with lowbit.materialization("error"):
        got = gradient(trained, frozen, x)
    assert [grad.shape for grad in jax.tree.leaves(got)] == [(N,), (N,), (OUT,)]
    assert_close(got, gradient(trained, lowbit.materialize(frozen), x))


def test_equinox_scan_over_layers(format: str) -> None:
    keys = jax.random.split(jax.random.key(0), LAYERS)
    layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(K, K, key=key))(keys)
    layers = eqx.tree_at(lambda layers: layers.weight, layers, quantize(layers.weight, format, -1))

    def model(layers, x):
        arrays, static = eqx.partition(layers, eqx.is_array)
        return jax.lax.scan(lambda x, layer: (jnp.tanh(batched(eqx.combine(layer, static), x)), None), x, arrays)[0]

    check(model, layers, activations())


# --- optax: no step changes stored components, nor does weight decay


def assert_only_the_rest_moved(after: Any, before: Any) -> None:
    assert jax.tree.structure(after) == jax.tree.structure(before)
    for a, b in zip(*(jax.tree.leaves(tree, is_leaf=is_quantized) for tree in (after, before)), strict=True):
        if is_quantized(b):
            assert_same_bits(a, b)
        else:
            assert np.all(a != b)


ADAMW = optax.adamw(1e-2, weight_decay=0.1)
STEPS = 3


def linen_training(format: str) -> tuple[Any, Callable[[Any], Any]]:
    """Parameters, and the gradient with respect to those that are not quantized; None for the others."""
    x, model = activations(), LinenMLP()
    params = quantize_named(model.init(jax.random.key(0), x), format, kernel=-2)

    def gradient(params: Any) -> Any:
        trained, frozen = lowbit.partition(params)

        def loss(trained):
            return jnp.sin(implicit(model.apply)(lowbit.combine(trained, frozen), x)).sum()

        return jax.grad(loss)(trained)

    return params, gradient


def test_adamw_on_the_trainable_leaves(format: str) -> None:
    params, gradient = linen_training(format)

    @jax.jit
    def train(params):
        trained, frozen = lowbit.partition(params)
        state = ADAMW.init(trained)
        for _ in range(STEPS):
            updates, state = ADAMW.update(gradient(lowbit.combine(trained, frozen)), state, trained)
            trained = optax.apply_updates(trained, updates)
        return lowbit.combine(trained, frozen)

    with lowbit.materialization("error"):
        after = train(params)
    assert_only_the_rest_moved(after, params)


def test_equinox_filter_grad_with_adamw(format: str) -> None:
    x, before = activations(), equinox_mlp(format)

    @eqx.filter_jit
    def step(model, state):
        trained, frozen = lowbit.partition(model)

        def loss(trained):
            return jnp.sin(implicit(batched)(lowbit.combine(trained, frozen), x)).sum()

        updates, state = ADAMW.update(eqx.filter_grad(loss)(trained), state, trained)
        return lowbit.combine(eqx.apply_updates(trained, updates), frozen), state

    model, state = before, ADAMW.init(lowbit.partition(before)[0])
    with lowbit.materialization("error"):
        for _ in range(STEPS):
            model, state = step(model, state)
    assert_only_the_rest_moved(
        *(eqx.filter(m, lambda x: is_quantized(x) or eqx.is_array(x), is_leaf=is_quantized) for m in (model, before))
    )


@pytest.mark.parametrize("kind", ["masked", "partition"])
def test_adamw_on_the_whole_tree(format: str, kind: str) -> None:
    params, gradient = linen_training(format)
    is_trained = jax.tree.map(lambda leaf: not lowbit.is_frozen(leaf), params, is_leaf=lowbit.is_frozen)
    optimizer = {
        "masked": optax.masked(ADAMW, is_trained),
        "partition": optax.partition({True: ADAMW, False: optax.set_to_zero()}, is_trained),
    }[kind]
    zeros = jax.tree.map(jnp.zeros_like, split(params, is_quantized)[0])

    @jax.jit
    def train(params):
        state = optimizer.init(params)
        for _ in range(STEPS):
            # optax adds an update to each component, so the frozen ones get zeros.
            updates, state = optimizer.update(join(gradient(params), zeros), state, params)
            params = optax.apply_updates(params, updates)
        return params

    with lowbit.materialization("error"):
        assert_only_the_rest_moved(train(params), params)


def test_nnx_optimizer(format: str) -> None:
    model, x = NnxMLP().quantize(format), activations()
    before = jax.tree.map(jnp.copy, nnx.state(model))  # the state itself changes with the model
    optimizer = nnx.Optimizer(model, ADAMW, wrt=NNX_TRAINED)

    @nnx.jit
    def step(model, optimizer, x):
        optimizer.update(model, nnx_gradient(model, x))

    with lowbit.materialization("error"):
        for _ in range(STEPS):
            step(model, optimizer, x)
    assert_only_the_rest_moved(nnx.state(model), before)
