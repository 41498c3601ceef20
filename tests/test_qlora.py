"""QLoRA end to end: the example, its memory and gradients, resuming, and unmodified models of each framework."""

import json
from collections.abc import Callable
from pathlib import Path
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
from helpers import K, N, activations, assert_close
from test_examples import load

import lowbit
from lowbit import LoraArray, implicit
from lowbit.testing import dense_weights

pytestmark = pytest.mark.frameworks

OPTIMIZER = optax.adamw(1e-2, weight_decay=0.1)


def factors(tree: Any) -> list[jax.Array]:
    """The adapters of a model, as the optimizer sees them."""
    found = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, LoraArray))
    return [component for w in found if isinstance(w, LoraArray) for component in (w.a, w.b)]


def on_dense_base(tree: Any) -> Any:
    """The same adapters over bases that are dense."""
    return jax.tree.map(
        lambda w: w.replace(base=lowbit.materialize(w.base)) if isinstance(w, LoraArray) else lowbit.materialize(w),
        tree,
        is_leaf=lambda x: isinstance(x, (LoraArray, lowbit.QuantizedArray)),
    )


def bytes_of(*trees: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(trees))


# --- the example

EXAMPLE = load("qlora")
CONFIG = EXAMPLE.small_model().config
TOKENS = jnp.arange(258, dtype=jnp.int32).reshape(2, 129) % 128


@pytest.fixture(scope="module")
def trained() -> tuple[Any, Any, list[float]]:
    with lowbit.materialization("error"):
        return EXAMPLE.main(small=True, steps=8)


@tiers.MORE  # the models of the frameworks below learn in the first tier
def test_the_example_learns_a_new_kind_of_text(trained: Any) -> None:
    params, _, losses = trained
    assert losses[1] < 0.9 * losses[0]
    weights = {name: w for name, w in params["layers"].items() if isinstance(w, LoraArray)}
    assert set(weights) == set("qkvo") | {"gate", "up", "down"}
    assert all(w.base.group_absmax is not None for w in weights.values())  # scales in 8 bits
    assert all(np.any(w) for w in factors(params))


@tiers.MORE
def test_a_step_of_the_example(trained: Any, tmp_path: Path) -> None:
    """Its memory, its gradients, and the same bits after a resume."""
    params = trained[0]
    trainable, frozen = lowbit.partition(params)
    state = OPTIMIZER.init(trainable)
    assert len(jax.tree.leaves(trainable)) == 14  # of the seven weights of a layer
    compiled = []
    for p in (params, on_dense_base(params)):
        with lowbit.materialization("error"):
            program = EXAMPLE.step.trace(*lowbit.partition(p), state, CONFIG, TOKENS)
        if p is params:
            assert dense_weights(program.jaxpr, params) == []
        compiled.append(program.lower().compile())
    stored, dense = (program.memory_analysis() for program in compiled)
    assert stored.argument_size_in_bytes == bytes_of(trainable, frozen, state, TOKENS)
    assert bytes_of(state) == 2 * bytes_of(trainable) + 4
    assert stored.temp_size_in_bytes <= dense.temp_size_in_bytes + 1_000_000

    def step(program: Any, p: Any, trainable: Any, state: Any) -> Any:
        trainable, state = jax.tree.map(jnp.copy, (trainable, state))  # the step donates its arguments
        return program(trainable, lowbit.partition(p)[1], state, TOKENS)

    # Adam's first mean is a tenth of the first gradient.
    after = step(compiled[0], params, trainable, state)
    want = step(compiled[1], on_dense_base(params), trainable, state)
    got, want = ([10 * g for g in jax.tree.leaves(s[0].mu)] for s in (after[1], want[1]))
    assert len(got) == 14 and all(np.any(g) for g in got)
    assert_close(got, want, 1e-4)

    lowbit.save(tmp_path / "stopped.safetensors", after[:2], metadata={"step": 1})
    again = lowbit.load(tmp_path / "stopped.safetensors", like=jax.eval_shape(lambda: after[:2]))
    at_once, later = (step(compiled[0], params, *both) for both in (after[:2], again))
    assert jax.tree.structure(at_once) == jax.tree.structure(later)
    for a, b in zip(*map(jax.tree.leaves, (at_once, later)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert all(np.any(a != b) for a, b in zip(*map(factors, (at_once, after)), strict=True))


def test_measured_memory_adds_up() -> None:
    results = Path(__file__).parent.parent / "benchmarks/results/qlora_memory.json"
    found = json.loads(results.read_text())
    rows = {}
    for row in found["rows"]:
        measured = dict(zip(found["columns"], row, strict=True))
        way = measured.pop("MB")
        rows[way] = measured
        held = sum(measured[name] for name in ("frozen", "trained", "optimizer"))
        assert measured["arguments"] == pytest.approx(held, abs=0.01)  # and the tokens
    assert rows["QLoRA on NF4"]["temporaries"] <= rows["LoRA on float32"]["temporaries"] + 1


# --- frameworks: the same step with unmodified models


def check(model: Any, call: Callable[[Any, jax.Array], jax.Array], fn: Any) -> None:
    """One step over NF4 equals that over its dense weights, and changes the adapters only."""
    x = activations()
    model, report = lowbit.quantize_tree(model, lowbit.QuantizationConfig("nf4", double_quant=True), fn=fn, args=(x,))
    assert len(report.quantized) == 2
    model = lowbit.lora(model, "*", rank=4, alpha=8, key=jax.random.key(0))

    @eqx.filter_jit
    def step(trainable: Any, frozen: Any, state: Any) -> Any:
        def loss(trainable: Any) -> jax.Array:
            return jnp.sum((implicit(call)(lowbit.combine(trainable, frozen), x) - 1) ** 2)

        value, grads = jax.value_and_grad(loss)(trainable)
        updates, state = OPTIMIZER.update(grads, state, trainable)
        return optax.apply_updates(trainable, updates), state, value

    results = []
    for start in (model, on_dense_base(model)):
        trainable, frozen = lowbit.partition(start)
        assert [leaf.ndim for leaf in jax.tree.leaves(trainable)] == [2] * 4
        state, values = OPTIMIZER.init(trainable), []
        with lowbit.materialization("error"):
            if not results:
                program, *_ = eqx.filter_make_jaxpr(step)(trainable, frozen, state)
                assert dense_weights(program, model) == []
            for _ in range(4):
                trainable, state, value = step(trainable, frozen, state)
                values.append(value)
        assert values[-1] < values[0]
        results.append((values, factors(trainable)))
    assert_close(*results, 1e-3)  # Adam divides by the size of a gradient, however small that is


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(48)(nn.LayerNorm()(nn.gelu(nn.Dense(N)(x))))


class Nnx(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.up, self.norm = nnx.Linear(K, N, rngs=rngs), nnx.LayerNorm(N, rngs=rngs)
        self.down = nnx.Linear(N, 48, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.norm(nnx.gelu(self.up(x))))


class Equinox(eqx.Module):
    up: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    down: eqx.nn.Linear

    def __init__(self) -> None:
        keys = jax.random.split(jax.random.key(0))
        self.up, self.norm = eqx.nn.Linear(K, N, key=keys[0]), eqx.nn.LayerNorm(N)
        self.down = eqx.nn.Linear(N, 48, key=keys[1])

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.norm(jax.nn.gelu(self.up(x))))


def test_a_linen_model() -> None:
    model = Linen()
    check(model.init(jax.random.key(0), activations()), model.apply, model.apply)


def test_an_nnx_model() -> None:
    def call(model: Nnx, x: jax.Array) -> jax.Array:
        return model(x)

    check(Nnx(), call, call)


@tiers.MORE  # test_frameworks has Equinox models
def test_an_equinox_model() -> None:
    def call(model: Equinox, x: jax.Array) -> jax.Array:
        return jax.vmap(model)(x)

    check(Equinox(), call, call)


def test_masks_and_filters_agree_with_partition() -> None:
    params = {"w": lowbit.quantize(jnp.ones((K, N)), "int8"), "dense": jnp.ones((K, N)), "norm": jnp.ones(N)}
    params = lowbit.lora(params, ["w", "dense"], rank=2, key=jax.random.key(0))
    mask, (trainable, frozen) = lowbit.trainable(params), lowbit.partition(params)
    by_filter = eqx.partition(params, mask)
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (by_filter, (trainable, frozen))), strict=True))
    masked = optax.masked(OPTIMIZER, mask)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = masked.update(zeros, masked.init(params), params)  # weight decay changes every trainable leaf
    after = optax.apply_updates(params, updates)
    moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), after, params)
    assert moved["norm"] is False and moved["dense"].base is False and not any(jax.tree.leaves(moved["w"].base))
    assert moved["w"].a and moved["dense"].a
