"""A JAX that lowbit does not know: primitives whose parameters have other names, or more of them.

Programs must still give the right numbers, with a warning, and must not raise.
"""

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import tiers
from features import ALL, arguments
from helpers import activations, assert_close, layouts, weights
from jax import lax
from test_transforms import DENSE

import lowbit
from lowbit import implicit
from lowbit.runtime import _interpret

Change = Callable[[dict[str, Any]], dict[str, Any]]
CHANGES: dict[str, Change] = {
    "renamed": lambda params: {f"{name}_renamed": value for name, value in params.items()},
    "one more": lambda params: {**params, "a_new_parameter": "set"} if params else params,
}


def change_parameters(monkeypatch: pytest.MonkeyPatch, change: Change, only: str | None = None) -> None:
    """Give rules other parameters than those of this JAX."""
    apply_rules = _interpret.apply_rules

    def changed(primitive: Any, operands: Any, params: dict[str, Any]) -> Any:
        return apply_rules(primitive, operands, change(params) if only in (None, primitive.name) else params)

    monkeypatch.setattr(_interpret, "apply_rules", changed)


# One feature for each kind of rule: products, lookups, moves, loops, branches, calls and custom derivatives.
FIRST = """
    matmul_left embedding slices reshaped concatenated jit_inside scan_over_layers while_loop cond custom_vjp barriers
    value_and_grad_through_scan_and_checkpoint
""".split()


@pytest.mark.parametrize(
    ("feature", "change"), tiers.tiered(itertools.product(ALL, CHANGES), [(name, "renamed") for name in FIRST])
)
def test_programs_give_the_right_numbers(feature: str, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, p = activations(), arguments(feature, layouts()[0])
    want = DENSE[feature](x, lowbit.materialize(p))
    change_parameters(monkeypatch, CHANGES[change])
    with lowbit.materialization("allow"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        # A new function each time, since JAX caches traces.
        assert_close(implicit(lambda x, p: ALL[feature](x, p))(x, p), want, 2e-5)


def test_the_warning_names_the_primitive_and_the_version_and_asks_for_an_upgrade(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, p = activations(), {"stack": weights(layouts()[0])["stack"]}
    change_parameters(monkeypatch, CHANGES["renamed"], only="scan")

    def model(x: Any, p: Any) -> Any:
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["stack"])[0]

    with pytest.warns() as caught:
        y = implicit(model)(x, p)
    assert_close(y, model(x, lowbit.materialize(p)))
    messages = [(w.category, str(w.message)) for w in caught]
    unknown = [text for kind, text in messages if kind is RuntimeWarning]
    assert len(unknown) == 1
    assert f"the primitive scan in JAX {jax.__version__}" in unknown[0] and "upgrade lowbit" in unknown[0]
    assert any(kind is lowbit.MaterializationWarning and "scan" in text for kind, text in messages)


def test_the_policy_decides_whether_an_unknown_primitive_may_go_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    x, p = activations(), weights(layouts()[0])
    change_parameters(monkeypatch, CHANGES["renamed"], only="transpose")
    with lowbit.materialization("error"), pytest.warns(RuntimeWarning, match="primitive transpose"):
        with pytest.raises(TypeError, match="transpose has no rule for"):
            implicit(lambda x, w: x @ jnp.swapaxes(w, 0, 1))(x, p["square"])
