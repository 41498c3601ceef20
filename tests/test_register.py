"""`register`: which rule is chosen, what it may take and return, and what its errors name."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive, primitives
from runtime_helpers import Base, Derived, Other

from lowbit import implicit, register


def rules_that_note_their_name(said: list[str]) -> Callable[..., Any]:
    def rule(name: str, **options: Any):
        def add(fn):
            @functools.wraps(fn)  # keeps the annotations, which choose the rule
            def noted(*args: Any, **params: Any):
                said.append(name)
                return fn(*args, **params)

            return register("atan2", **options)(noted)

        return add

    return rule


def test_the_most_specific_rule_wins_then_precedence_then_the_later() -> None:
    x, base, derived, other = jnp.ones(2), Base(jnp.ones(2)), Derived(jnp.ones(2)), Other(jnp.ones(2))
    said: list[str] = []
    rule = rules_that_note_their_name(said)

    @rule("any")
    def _(a, b):
        return jnp.zeros(2)

    @rule("base")
    def _(a: Base, b: Any):
        return jnp.zeros(2)

    @rule("base, dense or other")
    def _(a: Base, b: jax.Array | Other):
        return jnp.zeros(2)

    @rule("derived")
    def _(a: Derived, b: jax.Array):
        return jnp.zeros(2)

    def which(a, b):
        said.clear()
        implicit(lax.atan2)(a, b)
        return said[-1]

    assert which(base, x) == which(base, np.ones(2, np.float32)) == "base, dense or other"
    assert which(base, other) == "base, dense or other"
    assert which(base, base) == "base"
    assert which(derived, x) == "derived"
    assert which(derived, other) == "base, dense or other"
    assert which(x, base) == which(other, x) == "any"

    @rule("later")
    def _(a: Derived, b: jax.Array):
        return jnp.zeros(2)

    assert which(derived, x) == "later"

    @rule("preferred", precedence=1)
    def _(a: Derived, b: jax.Array):
        return jnp.zeros(2)

    @rule("later still")
    def _(a: Derived, b: jax.Array):
        return NotImplemented

    assert which(derived, x) == "preferred"

    @rule("passes", precedence=2)
    def _(a: Derived, b: jax.Array):
        return NotImplemented

    said.clear()
    implicit(lax.atan2)(derived, x)
    assert said == ["passes", "preferred"]


def test_rules_take_primitives_names_and_parameters() -> None:
    seen = {}

    @register(primitives.cumsum_p)
    def _(primitive, operand: Base, *, axis, reverse):
        seen.update(primitive=primitive, axis=axis, reverse=reverse)
        return operand

    @register("concatenate")
    def _(*operands: Base, dimension: int):
        seen.update(count=len(operands), dimension=dimension)
        return NotImplemented

    base = Base(jnp.ones((2, 3)))
    assert type(implicit(lambda b: lax.cumsum(b, 1))(base)) is Base
    assert (seen["primitive"], seen["axis"], seen["reverse"]) == (primitives.cumsum_p, 1, False)
    assert implicit(lambda b: jnp.concatenate([b, b, b], 1))(base).shape == (2, 9)
    assert (seen["count"], seen["dimension"]) == (3, 1)


def test_a_rule_is_skipped_if_it_does_not_name_a_parameter_that_is_set() -> None:
    @register("cumprod")
    def _(operand: Base, *, axis):
        return operand

    base = Base(jnp.ones((2, 3)))  # `reverse` is set, to False
    assert isinstance(implicit(lambda b: lax.cumprod(b, 1))(base), jax.Array)

    @register("mul")
    def _(a: Base, b: jax.Array):  # newer versions of JAX have options here, which are None
        return a

    assert type(base * jnp.ones(())) is Base


def test_rules_for_one_order_serve_both_when_the_operation_commutes() -> None:
    @register("max")
    def _(a: Base, b: jax.Array):
        return a

    @register("max")
    def _(a: Other, b: jax.Array):
        return a

    base, other, x = Base(jnp.ones(2)), Other(jnp.ones(2)), jnp.zeros(2)
    assert type(implicit(jnp.maximum)(x, base)) is Base
    assert type(implicit(jnp.maximum)(other, x)) is Other
    assert isinstance(implicit(jnp.maximum)(x, other), jax.Array)  # commute_ops=False


def test_a_rule_registered_after_compilation_takes_effect() -> None:
    @dataclasses.dataclass
    class Late(Base):
        pass

    late = Late(jnp.ones(3))
    assert isinstance(late - 1, jax.Array)

    @register("sub")
    def _(a: Late, b: jax.Array, accuracy=None):  # a default makes it a parameter, which this primitive lacks
        return a

    assert type(late - 1) is Late


def test_an_unknown_primitive_and_a_bad_annotation_are_errors() -> None:
    with pytest.raises(ValueError, match="Unknown primitive 'dot_generel'"):
        register("dot_generel")
    with pytest.raises(TypeError, match="Cannot dispatch on the annotation"):

        @register("add")
        def _(a: "list[int] | Any", b: Any): ...

    for alias in ("pjit", "remat", "pvary"):
        register(alias)


def test_an_exception_in_a_rule_names_primitive_and_operands() -> None:
    @register("erf")
    def _(a: Base):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as error:
        implicit(lax.erf)(Base(jnp.ones((2, 3))))
    assert any("primitive erf of (Base float32[2, 3])" in note for note in error.value.__notes__)


def test_a_rule_that_returns_another_type_is_an_error() -> None:
    @register("erfc")
    def _(a: Base):
        return jnp.zeros(7)

    with pytest.raises(TypeError, match=r"A rule for erfc of \(Base float32\[2\]\) returned float32\[7\]"):
        implicit(lax.erfc)(Base(jnp.ones(2)))

    @register("lgamma")
    def _(a: Base):
        return jnp.zeros(2, jnp.bfloat16)

    with pytest.raises(TypeError, match=r"A rule for lgamma of \(Base float32\[2\]\) returned bfloat16\[2\]"):
        implicit(lax.lgamma)(Base(jnp.ones(2)))


def test_a_primitive_without_implicit_operands_runs_unchanged() -> None:
    double = Primitive("double")
    double.def_impl(lambda x: 2 * x)
    double.def_abstract_eval(lambda x: x)
    got = implicit(lambda x, b: double.bind(x) + 1)(jnp.ones(2), Base(jnp.ones(2)))
    np.testing.assert_array_equal(got, [3, 3])
