"""The runtime alone, with arrays that know nothing of quantization."""

import dataclasses
import functools
import pickle
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive, primitives

import lowbit
from lowbit import ImplicitArray, aux_field, implicit, materialization, register


@dataclasses.dataclass
class LowRank(ImplicitArray):
    """a @ b, with components that are trained."""

    a: jax.Array
    b: jax.Array

    def materialize(self):
        return self.a @ self.b


@dataclasses.dataclass
class Base(ImplicitArray, warn_on_materialize=False):
    value: jax.Array
    tag: str = aux_field(default="base")

    def materialize(self):
        return self.value


@dataclasses.dataclass
class Derived(Base):
    pass


@dataclasses.dataclass
class Other(ImplicitArray, warn_on_materialize=False, commute_ops=False):
    value: jax.Array

    def materialize(self):
        return self.value


@register("dot_general")
def _(x: jax.Array, w: LowRank, **params: Any):
    if params["dimension_numbers"] != (((x.ndim - 1,), (0,)), ((), ())):
        return NotImplemented
    return lax.dot_general(lax.dot_general(x, w.a, **params), w.b, **params)


@pytest.fixture
def low_rank() -> LowRank:
    return LowRank(jnp.arange(12.0).reshape(6, 2), jnp.arange(10.0).reshape(2, 5))


def test_shape_and_dtype_come_from_materialize(low_rank: LowRank) -> None:
    assert (low_rank.shape, low_rank.dtype, low_rank.ndim, low_rank.size) == ((6, 5), jnp.float32, 2, 30)
    assert low_rank.nbytes == 4 * (12 + 10)
    assert len(low_rank) == 6


def test_a_subclass_may_store_its_shape() -> None:
    @dataclasses.dataclass
    class Zeros(ImplicitArray):
        shape: tuple[int, ...] = aux_field()
        dtype: Any = aux_field()

        def materialize(self):
            return jnp.zeros(self.shape, self.dtype)

    z = Zeros((2, 3), np.dtype(np.float32))
    assert z.shape == (2, 3)
    with materialization("allow"):
        assert (z + 1).sum() == 6
        assert implicit(lambda z: jnp.dot(jnp.ones((4, 2)), z))(z).shape == (4, 3)


def test_repr_has_no_numbers(low_rank: LowRank) -> None:
    assert repr(low_rank) == "LowRank(shape=(6, 5), dtype=float32, 88 bytes\n  a float32[6,2], b float32[2,5])"
    # JAX prints trees with anything in the place of the components.
    assert "LowRank" in repr(jax.tree.map(lambda _: None, low_rank))
    assert "LowRank" in repr(jax.tree.structure(low_rank))


def test_gradients_reach_the_parts(low_rank: LowRank) -> None:
    x = jnp.ones((3, 6))

    def loss(w):
        return jnp.sin(implicit(jnp.dot)(x, w)).sum()

    with materialization("error"):
        got = jax.grad(loss)(low_rank)
    a, b = jax.grad(lambda a, b: jnp.sin(x @ (a @ b)).sum(), (0, 1))(low_rank.a, low_rank.b)
    np.testing.assert_allclose(got.a, a, rtol=1e-5)
    np.testing.assert_allclose(got.b, b, rtol=1e-5)


def test_gradients_reach_the_parts_through_custom_rules(low_rank: LowRank) -> None:
    x = jnp.ones((3, 6)) / 9

    @jax.custom_vjp
    def linear(x, w):
        return x @ w

    linear.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, 2 * kept[0].T @ g))

    @jax.custom_jvp
    def sine(w):
        return jnp.sin(w)

    sine.defjvp(lambda p, t: (sine(*p), 3 * t[0]))
    materialization.set("allow")
    plain = jax.grad(lambda w: (x @ (w.a @ w.b)).sum())(low_rank)
    for fn, scale in ((lambda w: linear(x, w).sum(), 2), (lambda w: (x @ sine(w)).sum(), 3)):
        got = jax.grad(implicit(fn))(low_rank)
        want = jax.tree.map(lambda component, scale=scale: scale * component, plain)
        np.testing.assert_allclose(got.a, want.a, rtol=1e-5)
        np.testing.assert_allclose(got.b, want.b, rtol=1e-5)


def test_captures_inside_grad_and_vmap_inside_implicit(low_rank: LowRank) -> None:
    materialization.set("allow")
    x = jnp.ones((3, 6))

    def through_closure(scale):
        return jax.grad(lambda a: jnp.dot(x, LowRank(a, low_rank.b)).sum())(low_rank.a * scale)

    want = jax.grad(lambda a: (x @ a @ low_rank.b).sum())(low_rank.a)
    np.testing.assert_allclose(implicit(through_closure)(jnp.ones(())), want, rtol=1e-6)
    stack = jax.tree.map(lambda component: jnp.stack([component, 2 * component]), low_rank)
    got = implicit(lambda x: jax.vmap(lambda w: jnp.dot(x, w))(stack))(x)
    np.testing.assert_allclose(got, jnp.einsum("bk,ekr,ern->ebn", x, stack.a, stack.b), rtol=1e-6)


# --- register


def test_the_most_specific_rule_wins_then_precedence_then_the_later() -> None:
    x, base, derived, other = jnp.ones(2), Base(jnp.ones(2)), Derived(jnp.ones(2)), Other(jnp.ones(2))
    said = []

    def rule(name: str, **options: Any):
        def add(fn):
            @functools.wraps(fn)  # annotations too, by which it is chosen
            def noted(*args: Any, **params: Any):
                said.append(name)
                return fn(*args, **params)

            return register("atan2", **options)(noted)

        return add

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


def test_a_rule_is_passed_by_when_a_parameter_it_does_not_name_is_set() -> None:
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


def test_a_rule_that_comes_later_is_heard() -> None:
    @dataclasses.dataclass
    class Late(Base):
        pass

    late = Late(jnp.ones(3))
    assert isinstance(late - 1, jax.Array)

    @register("sub")
    def _(a: Late, b: jax.Array, accuracy=None):  # a default makes it a parameter, which this primitive has not
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


def test_primitives_of_others_pass_untouched() -> None:
    double = Primitive("double")
    double.def_impl(lambda x: 2 * x)
    double.def_abstract_eval(lambda x: x)
    got = implicit(lambda x, b: double.bind(x) + 1)(jnp.ones(2), Base(jnp.ones(2)))
    np.testing.assert_array_equal(got, [3, 3])


# --- policy


def test_the_policy_warns_once_for_a_primitive_and_class(low_rank: LowRank) -> None:
    with pytest.warns(lowbit.MaterializationWarning, match=r"sin has no rule for LowRank of shape \(6, 5\)"):
        implicit(jnp.sin)(low_rank)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        implicit(jnp.sin)(low_rank)
        implicit(jnp.sin)(Base(jnp.ones(2)))  # warn_on_materialize=False
    with pytest.warns(lowbit.MaterializationWarning, match="cos"):
        implicit(jnp.cos)(low_rank)
    with pytest.warns(lowbit.MaterializationWarning, match="__array__"):
        np.asarray(low_rank)


def test_switching_the_policy_after_compiling_takes_effect(low_rank: LowRank) -> None:
    f = jax.jit(implicit(jnp.tanh))
    with materialization("allow"):
        f(low_rank)
    with materialization("error"), pytest.raises(TypeError, match=r"tanh has no rule for LowRank .*forbids"):
        f(low_rank)
    assert materialization.value == "warn"
    materialization.set("allow")
    assert materialization.value == "allow"
    f(low_rank)
    materialization.set("error")
    with pytest.raises(TypeError):
        f(low_rank)
    with pytest.raises(ValueError, match=r"materialization\('no'\): the value must be one of 'allow', 'warn', 'error'"):
        materialization("no")


SETTINGS: list[tuple[Any, Any, Any]] = [
    (materialization, "error", "allow"),
    (lowbit.use_kernel, False, True),
    (lowbit.compute, "fast", "exact"),
]


def elsewhere(setting: Any) -> Any:
    """The value of a setting in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: setting.value).result()


@pytest.mark.parametrize(("setting", "one", "other"), SETTINGS, ids=lambda x: getattr(x, "name", str(x)))
def test_a_with_statement_holds_in_its_block_and_thread_only(setting: Any, one: Any, other: Any) -> None:
    default = setting.value
    outer, inner = setting(one), setting(other)
    assert (setting.value, elsewhere(setting)) == (default, default)  # the call alone changes nothing
    with outer:
        assert (setting.value, elsewhere(setting)) == (one, default)
        with inner, pytest.raises(KeyError), outer:
            assert setting.value == one
            raise KeyError
        assert setting.value == one
    assert (setting.value, elsewhere(setting)) == (default, default)
    with outer:  # once more
        assert setting.value == one
    assert setting.value == default


@pytest.mark.parametrize(("setting", "one", "other"), SETTINGS, ids=lambda x: getattr(x, "name", str(x)))
@pytest.mark.parametrize("order", ["ab", "ba"])
def test_settings_made_before_they_are_entered_leave_nothing_behind(order, setting, one, other) -> None:
    default, switches = setting.value, {"a": setting(one), "b": setting(one)}
    for name in "ab":
        switches[name].__enter__()
    for name in order:
        assert setting.value == one
        switches[name].__exit__(None, None, None)
    assert (setting.value, elsewhere(setting)) == (default, default)
    with pytest.raises(RuntimeError, match=rf"{setting.name}.* in a thread that did not enter it"):
        switches["a"].__exit__(None, None, None)


@pytest.mark.parametrize(("setting", "one", "other"), SETTINGS, ids=lambda x: getattr(x, "name", str(x)))
def test_the_value_of_the_process_is_set_by_a_call_of_another_name(setting: Any, one: Any, other: Any) -> None:
    default = setting.value
    try:
        with setting(other):
            setting.set(one)
            assert (setting.value, elsewhere(setting)) == (other, one)
        assert setting.value == one
    finally:
        setting.set(default)
    with pytest.raises(ValueError, match=rf"{setting.name}\.set\('no'\): the value must be one of "):
        setting.set("no")


def test_threads_share_a_switch() -> None:
    switch, entered, left = materialization("error"), threading.Event(), threading.Event()

    def holds() -> list[str]:
        with switch:
            entered.set()
            assert left.wait(60)
            return [materialization.value]

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(holds)
        assert entered.wait(60) and materialization.value == "warn"
        with switch:
            assert materialization.value == "error"
        left.set()
        assert other.result() == ["error"]  # what this thread left holds on there


def test_a_setting_that_is_called_and_dropped_says_that_it_did_nothing() -> None:
    with pytest.warns(UserWarning, match=r"materialization\('error'\) was called and never entered.*\.set\('error'\)"):
        materialization("error")
    assert materialization.value == "warn"
    with lowbit.use_kernel(None) as nothing:  # entered, and so without a warning
        assert nothing is None
    switch = lowbit.compute("fast")
    assert "compute.set('fast')" in repr(switch)
    with switch:
        pass


def test_a_block_traces_again_and_the_next_one_does_not() -> None:
    traced = []

    @jax.jit
    def f(x: jax.Array) -> jax.Array:
        traced.append(materialization.value)
        return x + 1

    f(jnp.ones(3))
    for _ in range(2):
        with materialization("allow"):
            f(jnp.ones(3))
        f(jnp.ones(3))
    assert traced == ["warn", "allow"]


def test_captures_in_programs_without_a_rule_obey_the_policy(low_rank: LowRank) -> None:
    def solve(b):
        return lax.custom_linear_solve(lambda x: jnp.dot(low_rank, x)[:5] * 0 + x, b, lambda f, b: b, symmetric=True)

    with materialization("error"), pytest.raises(TypeError, match="custom_linear_solve"):
        implicit(solve)(jnp.ones(5))
    with materialization("allow"):
        np.testing.assert_array_equal(jax.jit(implicit(solve))(jnp.ones(5)), np.ones(5))


# --- what arrays do


def test_scalars_convert_and_large_arrays_refuse() -> None:
    assert float(Base(jnp.full((1, 1), 2.5))) == 2.5
    assert bool(Base(jnp.ones(1))) and int(Base(jnp.ones(()))) == 1
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        bool(Base(jnp.ones(2)))
    with pytest.raises(TypeError):
        len(Base(jnp.ones(())))


def test_comparisons_are_elementwise_and_arrays_unhashable() -> None:
    base = Base(jnp.arange(3.0))
    assert (base == base).all() and (base != 1).sum() == 2 and (base >= 1).sum() == 2
    assert (base == "text") is False and base is not None
    with pytest.raises(TypeError):
        hash(base)


def test_indexing() -> None:
    base, value = Base(jnp.arange(24.0).reshape(4, 6)), jnp.arange(24.0).reshape(4, 6)
    mask = np.array([True, False, True, False])
    for index in (
        0,
        -1,
        slice(1, 3),
        (0, 1),
        (..., 2),
        None,
        (slice(None), None, 3),
        np.array([0, 2]),
        mask,
        (mask, slice(0, 2)),
        value > 5,
        (jnp.int32(2), slice(None, None, 2)),
    ):
        np.testing.assert_array_equal(base[index], value[index])
    for mask in (np.ones(6, bool), np.ones((4, 5), bool), (slice(None), np.ones(4, bool))):
        with pytest.raises(IndexError):
            base[mask]
    with pytest.raises(TypeError, match="Cannot index with 'a'"):
        base["a"]
    with pytest.raises(TypeError, match=r"Cannot index with \[0, 1\]"):
        base[[0, 1]]


def test_materialize_and_pickle(low_rank: LowRank) -> None:
    tree = lowbit.materialize({"w": low_rank, "b": [1, None]})
    np.testing.assert_array_equal(tree["w"], low_rank.a @ low_rank.b)
    assert tree["b"] == [1, None]
    again = pickle.loads(pickle.dumps(low_rank))
    np.testing.assert_array_equal(again.a, low_rank.a)


def test_a_class_that_is_no_dataclass_says_so() -> None:
    class Forgot(ImplicitArray):
        pass

    with pytest.raises(TypeError, match="Forgot must be a dataclass"):
        jax.tree.leaves(Forgot())


def test_nothing_private_of_jax_is_imported() -> None:
    from pathlib import Path

    sources = Path(lowbit.__file__).parent.rglob("*.py")
    assert not [path for path in sources if "jax._src" in path.read_text()]


def test_ste_refuses_another_shape() -> None:
    with pytest.raises(ValueError, match=r"ste\(sum\) got an array of shape \(3,\) and returned \(\)"):
        lowbit.ste(jnp.sum)(jnp.ones(3))


def test_ste_with_other_arguments_has_zero_gradient_for_them() -> None:
    def scaled(x, scale, *, n):
        return jnp.round(x * scale) * n

    def f(x, s):
        return lowbit.ste(scaled)(x, s, n=2).sum()

    dx, ds = jax.grad(f, (0, 1))(jnp.array([0.4, 1.6]), jnp.float32(2.0))
    np.testing.assert_array_equal(dx, [1, 1])
    assert ds == 0


def test_one_inner_function_called_often_is_compiled_once(low_rank: LowRank) -> None:
    @jax.jit
    def layer(x, w):
        return jnp.tanh(x @ w)

    def model(x, w):
        for _ in range(6):
            x = layer(x, w)
        return x

    square = LowRank(low_rank.a, low_rank.a.T)
    text = jax.jit(implicit(model)).lower(jnp.ones((3, 6)), square).as_text()
    assert text.count("func.func private @layer") == 1
