"""What an NNX module changes while it runs inside `implicit` comes out, as from a dense model."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from flax import nnx
from helpers import assert_close, gaussian

import lowbit
from lowbit import implicit

pytestmark = pytest.mark.frameworks
X = gaussian(1, (4, 32))
TRAINED = nnx.All(nnx.Param, lambda path, param: "kernel" not in path)


class Block(nnx.Module):
    """A running mean, the count of a random stream, and a counter that may be shared."""

    def __init__(self, rngs: nnx.Rngs, count: Any = None):
        self.linear = nnx.Linear(32, 32, use_bias=False, rngs=rngs)  # the norm removes a bias
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.count = nnx.Variable(jnp.int32(0)) if count is None else count

    def __call__(self, x: jax.Array) -> jax.Array:
        self.count.set_value(self.count.get_value() + 1)
        return self.dropout(self.norm(self.linear(x))) * self.count.get_value()


class Twice(nnx.Module):
    def __init__(self) -> None:
        count = nnx.Variable(jnp.int32(0))
        self.first, self.second = Block(nnx.Rngs(0), count), Block(nnx.Rngs(1), count)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(self.first(x))


class Stack(nnx.Module):
    def __init__(self) -> None:
        self.blocks = nnx.split_rngs(splits=3)(nnx.vmap(Block))(nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)


def quantized(model: Any) -> tuple[Any, Any]:
    """The model with quantized kernels, and one with the values that these read as."""
    is_kernel = nnx.All(nnx.Param, lambda path, _: "kernel" in path)
    dense = nnx.clone(model)
    state = jax.tree.map(lambda w: lowbit.quantize(w, "int8", axis=-2), nnx.state(model, is_kernel))
    nnx.update(model, state)
    nnx.update(dense, lowbit.materialize(state))
    return model, dense


def changing(model: Any) -> list[jax.Array]:
    """Running means, counts of streams, counters: all but the parameters and the random keys."""
    leaves = jax.tree.leaves(nnx.state(model, nnx.Not(nnx.Any(nnx.Param, nnx.RngKey))))
    assert any(np.any(leaf) for leaf in leaves)
    return leaves


def call(model: Any, x: jax.Array) -> jax.Array:
    return model(x)


def gradient(forward: Callable[..., jax.Array]) -> Callable[..., Any]:
    return nnx.grad(lambda model, x: jnp.sin(forward(model, x)).sum(), argnums=nnx.DiffState(0, TRAINED))


@pytest.mark.parametrize("make", tiers.tiered([Twice, Stack], [Stack]))
@pytest.mark.parametrize("way", ["implicit", "nnx.jit", "nnx.grad", "implicit of nnx.grad"])
def test_changes_come_out(make: type, way: str) -> None:
    model, dense = quantized(make())
    program, plain = {
        "implicit": (implicit(call), call),
        "nnx.jit": (nnx.jit(implicit(call)), call),
        "nnx.grad": (nnx.jit(gradient(implicit(call))), gradient(call)),
        "implicit of nnx.grad": (implicit(gradient(call)), gradient(call)),
    }[way]
    with lowbit.materialization("error"):
        for _ in range(2):
            assert_close(program(model, X), plain(dense, X), 1e-4)
    assert_close(changing(model), changing(dense), 1e-4)


class Grows(nnx.Module):
    def __init__(self) -> None:
        self.linear = nnx.Linear(32, 32, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.hidden = nnx.Intermediate(x)
        return self.linear(x)


def test_what_cannot_come_out_raises() -> None:
    model, _ = quantized(Grows())
    with pytest.raises(ValueError, match=r"adds or removes a variable of an NNX object.*nnx\.pop"):
        implicit(call)(model, X)

    @implicit
    def popped(model: Grows, x: jax.Array) -> Any:
        y = model(x)
        return y, nnx.pop(model, nnx.Intermediate)

    assert_close(popped(model, X)[1]["hidden"].get_value(), X)


@pytest.mark.parametrize("around", [jax.jit, eqx.filter_jit])
def test_changes_that_a_transformation_of_jax_would_lose_raise(around: Any) -> None:
    model, dense = quantized(Block(nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"lose that change\. Use those of NNX, nnx\.jit\(lowbit\.implicit\(fn\)\)"):
        around(implicit(call))(model, X)

    @jax.jit
    def returned(state: Any, x: jax.Array) -> Any:
        model = nnx.merge(graph, state)
        y = implicit(call)(model, x)
        return y, nnx.state(model)

    graph, state = nnx.split(model)
    y, state = returned(state, X)
    nnx.update(model, state)
    assert_close(y, call(dense, X), 1e-4)
    assert_close(changing(model), changing(dense), 1e-4)
