"""A warning or an error about going dense names the user's line and the parameter."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import lowbit
from lowbit import MaterializationWarning, implicit
from lowbit.testing import dense_weights


def params() -> dict[str, Any]:
    kernel = lowbit.quantize(jnp.ones((64, 64)), "int8")
    return {"layers": [{"kernel": kernel}], "stack": lowbit.quantize(jnp.ones((3, 64, 64)))}


def line_of(fn: Any, text: str) -> int:
    lines, first = inspect.getsourcelines(fn)
    return first + next(i for i, line in enumerate(lines) if text in line)


def moved(p: Any, x: jax.Array) -> jax.Array:
    w = p["layers"][0]["kernel"].T
    return x @ jnp.exp(w)


def scanned(p: Any, x: jax.Array) -> jax.Array:
    def step(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return x @ jnp.exp(w), None

    return lax.scan(step, x, p["stack"])[0]


@pytest.mark.parametrize(("model", "path"), [(moved, "layers/0/kernel"), (scanned, "stack")])
def test_the_warning_has_the_line_and_the_path_of_the_parameter(model: Any, path: str) -> None:
    line = line_of(model, "jnp.exp")
    with pytest.warns(
        MaterializationWarning, match=rf"the parameter {path}, .*dense at {__file__}:{line}, in"
    ) as caught:
        implicit(model)(params(), jnp.ones((2, 64)))
    assert [(w.filename, w.lineno) for w in caught] == [(__file__, line)]


def test_the_error_names_line_and_parameter_under_jit() -> None:
    line = line_of(moved, "jnp.exp")
    with lowbit.materialization("error"), pytest.raises(TypeError, match=rf"layers/0/kernel, .*{__file__}:{line}, in"):
        jax.jit(implicit(moved))(params(), jnp.ones((2, 64)))


def test_an_operator_outside_of_implicit_has_the_line_of_its_call() -> None:
    q = lowbit.quantize(jnp.ones((64, 64)), "int8")
    line = inspect.currentframe().f_lineno + 2
    with pytest.warns(MaterializationWarning, match=rf"{__file__}:{line}, in") as caught:
        q + 3
    assert caught[0].lineno == line


def test_dense_weights_have_the_line_that_builds_them() -> None:
    with lowbit.materialization("allow"):
        found = dense_weights(jax.jit(implicit(moved)), params(), jnp.ones((2, 64)))
        (exp,) = [weight for weight in found if weight.primitive == "exp"]
    assert exp.line == f"{__file__}:{line_of(moved, 'jnp.exp')}, in moved"


def test_name_scopes_of_the_model_are_kept() -> None:
    def model(p: Any, x: jax.Array) -> jax.Array:
        with jax.named_scope("attention"):
            return jnp.tanh(x @ p["layers"][0]["kernel"])

    jaxpr = jax.make_jaxpr(implicit(model))(params(), jnp.ones((2, 64)))
    scopes = {str(eqn.source_info.name_stack) for eqn in jaxpr.eqns if str(eqn.primitive) in ("lowbit_matmul", "tanh")}
    assert scopes == {"attention"}
