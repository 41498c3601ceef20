"""Parameters of scan, checkpoint and jit reach the program that JAX compiles, beside quantized operands."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import lowbit
from lowbit import implicit
from lowbit.testing import equations

Q = lowbit.Array8B.quantize(jnp.ones((4, 8, 8)))


def parameters(fn: Callable[..., Any], *names: str) -> dict[str, Any]:
    """These parameters of the first equation of `implicit(fn)` that has them all."""
    jaxpr = jax.make_jaxpr(implicit(fn))(jnp.ones((2, 8)), Q)
    found = (eqn.params for eqn in equations(jaxpr.jaxpr) if {*names} <= {*eqn.params})
    params = next(found)
    return {name: params[name] for name in names}


def test_parameters_of_a_scan_are_kept() -> None:
    def program(x: Any, w: Any) -> Any:
        return lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, w, reverse=True, unroll=2)[0]

    assert parameters(program, "reverse", "unroll") == {"reverse": True, "unroll": 2}


def test_the_policy_of_a_checkpoint_is_kept() -> None:
    policy = jax.checkpoint_policies.nothing_saveable

    def program(x: Any, w: Any) -> Any:
        return jax.checkpoint(lambda x: x @ w[0], policy=policy, prevent_cse=False)(x)

    assert parameters(program, "policy", "prevent_cse") == {"policy": policy, "prevent_cse": False}


def test_parameters_of_a_jit_are_kept() -> None:
    @partial(jax.jit, donate_argnums=0, keep_unused=True)
    def layer(x: Any, w: Any) -> Any:
        return x + 1, x @ w

    jaxpr = jax.make_jaxpr(implicit(lambda x, w: layer(x, w[0])))(jnp.ones((2, 8)), Q)
    (found,) = (eqn.params for eqn in equations(jaxpr.jaxpr) if eqn.params.get("name") == "layer")
    # The first operand is x, the others are components of w.
    assert found["donated_invars"][0] and not any(found["donated_invars"][1:]) and found["keep_unused"]
