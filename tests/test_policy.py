"""The materialization policy and the other settings: where they hold, and what is traced again."""

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from runtime_helpers import Base, LowRank

import lowbit
from lowbit import implicit, materialization


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


def test_rows_that_are_looked_up_by_a_slice_are_no_dense_weight() -> None:
    table, x = lowbit.quantize(jnp.ones((64, 32)), "int8", axis=-1), jnp.ones((4, 32))
    with materialization("error"):
        got = implicit(lambda table: x + lax.cond(x[0, 0] > 0, jnp.tanh, jnp.sin, table[8:12]))(table)
        assert jnp.allclose(got, 1 + jnp.tanh(1.0))
        with pytest.raises(TypeError, match=r"add has no rule for .* shape \(64, 16\)"):
            implicit(lambda table: table[:, :16] + 1)(table)  # columns are a smaller weight
        with pytest.raises(TypeError, match=r"add has no rule for .* shape \(64, 32\)"):
            implicit(lambda stack: stack[1] + 1)(lowbit.quantize(jnp.ones((2, 64, 32)), "int8", axis=-1))


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
    assert (setting.value, elsewhere(setting)) == (default, default)  # a call alone changes nothing
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
def test_set_changes_the_value_of_the_whole_process(setting: Any, one: Any, other: Any) -> None:
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
        assert other.result() == ["error"]  # leaving it in this thread does not end it there


def test_a_setting_that_is_called_and_never_entered_warns() -> None:
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
