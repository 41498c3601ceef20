"""Comparing outputs, and choosing formats for a size."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from helpers import gaussian

import lowbit
from lowbit import allocate, compare_outputs

K = 64


def normal(seed: int, *shape: int) -> jax.Array:
    return gaussian(seed, shape)


# --- comparing outputs


def test_errors_and_divergences_are_those_by_hand() -> None:
    a, b, x = normal(0, K, 10), normal(1, K, 10), normal(2, 3, 5, K) / 8
    got = compare_outputs(lambda w, x: x @ w, a, a + b / 10, x, logits=True)
    one, other = (np.asarray(x @ w, np.float64).reshape(-1, 10) for w in (a, a + b / 10))
    np.testing.assert_allclose(got.error, np.sum((one - other) ** 2) / np.sum(one**2), rtol=1e-4)
    norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    np.testing.assert_allclose(got.cosine, np.mean(np.sum(one * other, 1) / norms), rtol=1e-5)
    p, q = (np.exp(z) / np.exp(z).sum(1, keepdims=True) for z in (one, other))
    kl = np.sum(p * np.log(p / q), 1)
    found: Any = [got.kl, got.kl_99, got.kl_error]
    np.testing.assert_allclose(found, [kl.mean(), np.quantile(kl, 0.99), kl.std(ddof=1) / 15**0.5], rtol=1e-3)
    assert got.rows == 15 and got.top1 == np.mean(one.argmax(1) == other.argmax(1))
    assert "KL" in str(got)


def test_equal_parameters_have_no_difference() -> None:
    w, x = normal(0, K, 10), normal(2, 3, 5, K)
    got = compare_outputs(lambda w, x: {"y": x @ w, "n": jnp.argmax(x)}, w, w, x)
    assert (got.error, got.cosine, got.rows, got.kl) == (0, 1, 15, None) and "KL" not in str(got)
    with pytest.raises(ValueError, match="one array"):
        compare_outputs(lambda w, x: (x @ w, x), w, w, x, logits=True)
    with pytest.raises(ValueError, match="no batch"):
        compare_outputs(lambda w, x: x @ w, w, w, [])
    with pytest.raises(ValueError, match=r"Batch 0 gives floating-point results of shapes"):
        compare_outputs(lambda w, x: x @ w, w, w[:, :3], x)


# --- formats for a size

PARAMS = {f"w{i}": normal(i, K, K) / 8 * scale for i, scale in enumerate((1, 30, 0.1, 1))} | {"norm": jnp.ones(K)}
BATCHES = normal(9, 2, 20, K)


def model(params: Any, x: jax.Array) -> jax.Array:
    return sum((jnp.tanh(x * params["norm"] @ params[f"w{i}"]) * 10.0 ** (i - 2) for i in range(4)), jnp.zeros(()))


@pytest.mark.parametrize("bits", tiers.tiered([3.0, 4.0, 5.0], [4.0]))
def test_it_keeps_to_the_bits_and_beats_one_format(bits: float) -> None:
    rules = allocate(PARAMS, fn=model, batches=BATCHES, bits=bits, formats=("q2", "q3", "q4", "int8"))
    quantized, report = lowbit.quantize_tree(PARAMS, rules)
    stored = 8 * sum(row.after for row in report.quantized) / sum(row.size for row in report.quantized)
    assert stored <= bits and len(report.quantized) == 4
    best = min(
        compare_outputs(model, PARAMS, uniform, BATCHES).error
        for format in ("q2", "q3", "q4", "int8")
        for uniform, own in [lowbit.quantize_tree(PARAMS, format, fn=model, args=(BATCHES[0],))]
        if 8 * sum(row.after for row in own.quantized) / sum(row.size for row in own.quantized) <= bits
    )
    assert compare_outputs(model, PARAMS, quantized, BATCHES).error < best


def test_a_size_counts_the_whole_model() -> None:
    rules = allocate(PARAMS, fn=model, batches=BATCHES, size="9kB", formats=("q2", "q4", "int8"))
    _, report = lowbit.quantize_tree(PARAMS, rules)
    assert 7_000 < report.after <= 9_000
    assert list(rules)[-1] == "*" and rules["*"] is None
    with pytest.raises(ValueError, match="more than size=1kB allows"):
        allocate(PARAMS, fn=model, batches=BATCHES, size="1kB")
    with pytest.raises(ValueError, match="bits= or size="):
        allocate(PARAMS, fn=model, batches=BATCHES)


def test_weights_without_a_statistic_get_the_best_format() -> None:
    hidden = jax.custom_vjp(jnp.matmul)  # its own derivative hides the product
    hidden.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))
    params = PARAMS | {"hidden": normal(5, K, K)}

    def with_hidden(params: Any, x: jax.Array) -> jax.Array:
        return model(params, hidden(x, params["hidden"]))

    rules = allocate(params, fn=with_hidden, batches=BATCHES, bits=4.5, formats=("q2", "int8"))
    assert rules["hidden"] is not None and rules["hidden"].dtype == "int8"


def test_a_table_counts_by_the_rows_that_are_looked_up() -> None:
    params = PARAMS | {"embed": normal(5, K, K)}

    def chosen(size: float) -> str:
        def with_table(params: Any, x: jax.Array) -> jax.Array:
            return model(params, x) + size * params["embed"][jnp.arange(20)]

        rule = allocate(params, fn=with_table, batches=BATCHES, bits=4.8, formats=("q2", "int8"))["embed"]
        return str(rule and rule.dtype)

    assert (chosen(1e3), chosen(1e-4)) == ("int8", "q2")


def test_second_moments_predict_what_calibration_leaves() -> None:
    # The inputs of one weight are nearly the same number: its errors compensate each other.
    params = {"alike": normal(0, K, K), "apart": normal(1, K, K)}
    noise = normal(2, 100, K)
    batch = noise[:, :1] + 0.1 * noise, noise

    def two(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.concatenate([x @ params["alike"], y @ params["apart"]])

    def loss(out: jax.Array, *batch: jax.Array) -> jax.Array:
        return jnp.sum(out * jnp.sign(normal(3, *out.shape)))

    found = lowbit.calibrate(two, params, [batch], loss=loss)
    rules = allocate(params, fn=two, batches=[batch], bits=3.8, formats=("q2", "q4"), calibration=found)
    assert {path: str(rule.dtype) for path, rule in rules.items() if rule} == {"alike": "q2", "apart": "q4"}
    with pytest.raises(ValueError, match=r"calibrate\(..., loss=\)"):
        allocate(params, fn=two, batches=[batch], bits=4, calibration=lowbit.calibrate(two, params, [batch]))
