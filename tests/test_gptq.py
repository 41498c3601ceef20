"""GPTQ: equal to a loop in NumPy, better than rounding to nearest, in every format; and inputs that are hard."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers

import lowbit
from lowbit import FORMATS, QuantizedArray, quantize
from lowbit.formats.gptq import BLOCK, SortedLevels, _factor, round_by_moments, uncompensated, with_positions
from lowbit.formats.moments import DAMPING, Moments

K, N = 96, 24


# Numbers and sums come from NumPy, which compiles nothing for each shape.
def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def inputs(seed: int, rows: int, k: int = K) -> np.ndarray:
    """Rows whose inputs depend on each other and differ in size."""
    mix = normal(seed, k, k) * np.exp(normal(seed + 1, k))
    return normal(seed + 2, rows, k) @ mix / np.float32(k**0.5)


def lost(x: Any, w: Any, q: QuantizedArray) -> float:
    """|X (W - Q)|^2"""
    return float(np.sum((np.asarray(x, np.float64) @ np.asarray(w - np.asarray(q.materialize()), np.float64)) ** 2))


def dense(q: Any) -> np.ndarray:
    return np.asarray(q.materialize())


def moments_of(w: np.ndarray, x: np.ndarray) -> Moments:
    h = x.T @ x
    return Moments(w.shape, (-2,), (), jnp.asarray(np.diag(h)), jnp.asarray(h), jnp.float32(len(x)))


def by_loop(w: np.ndarray, scales: np.ndarray, h: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """The values of GPTQ, one input after the other, with the inverse of what is left computed anew for each."""
    w, h = w.astype(np.float64), h.astype(np.float64)
    mean = np.diag(h).mean()
    h = h + np.diag(np.where(np.diag(h) > 0, 0, mean)) + DAMPING * mean * np.eye(len(h))
    result, left = np.zeros_like(w), [*np.argsort(-np.diag(h), kind="stable")]
    while left:
        i, inverse = left[0], np.linalg.inv(h[np.ix_(left, left)])
        result[i] = levels[np.abs(w[i, :, None] / scales[i, :, None] - levels).argmin(-1)] * scales[i]
        w[left] -= np.outer(inverse[:, 0], (w[i] - result[i]) / inverse[0, 0])
        left = left[1:]
    return result


LOOPS = [("q4", BLOCK + 32), ("nf4", 128), ("q2", 40), ("int8", 40), ("ternary", 40)]


@pytest.mark.parametrize(("format", "k"), tiers.tiered(LOOPS, LOOPS[:2]))
def test_it_is_the_loop(format: str, k: int) -> None:
    w, x = normal(0, k, N), inputs(1, 300, k)
    x[:, 7] = 0
    array, moments = quantize(w, format), moments_of(w, x)
    got, now = round_by_moments(w, array, moments)
    np.testing.assert_allclose(now, lost(x, w, got), rtol=1e-3)
    spread = np.broadcast_to(np.asarray(lowbit.formats.spread(array.scale_values(), array.spans, w.shape)), w.shape)
    want = by_loop(np.asarray(w), spread, np.asarray(moments.hessian), SortedLevels.of(array).table)
    same = np.isclose(got.materialize(), want, rtol=1e-5, atol=1e-6)
    # A value in the middle between two levels may be rounded to either, and then all later ones differ.
    assert same.mean() > 0.98
    assert lost(x, w, got) < lost(x, w, array)
    for name, component in got.components().items():
        assert component.dtype == getattr(array, name).dtype and component.shape == getattr(array, name).shape


def test_what_is_left_of_the_moments_predicts_the_loss() -> None:
    w, x = normal(0, K, 4 * N), inputs(1, 400)
    moments = moments_of(w, x)
    h = np.asarray(moments.hessian, np.float64)
    left = np.asarray(uncompensated(jnp.asarray(moments.hessian)))
    damped, order = h + DAMPING * np.diag(h).mean() * np.eye(K), np.argsort(-np.diag(h))
    want = [1 / np.linalg.inv(damped[np.ix_(order[i:], order[i:])])[0, 0] for i in range(K)]
    np.testing.assert_allclose(left[order], want, rtol=1e-3)
    array = quantize(w, "int4")
    rounding = np.sum((w - np.asarray(array.materialize())) ** 2, 1)
    got = lost(x, w, round_by_moments(w, array, moments).array)
    assert 0.7 < got / np.sum(left * rounding) < 1.3
    assert np.sum(np.diag(h) * rounding) > 2 * got


@pytest.mark.parametrize("format", tiers.tiered(lowbit.FORMATS, ["int8", "q3"]))
def test_every_format_loses_less(format: str) -> None:
    w, x = normal(0, K, N), inputs(1, 400)
    h = x.T @ x
    plain, rounded = quantize(w, format), quantize(w, format, hessian=h)
    assert type(rounded) is type(plain) and jax.tree.structure(rounded) == jax.tree.structure(plain)
    assert lost(x, w, rounded) < 0.9 * lost(x, w, plain)


@pytest.mark.parametrize("format", tiers.tiered(["q4", "nf4", "ternary"], ["q4"]))
def test_a_diagonal_weights_the_search(format: str) -> None:
    w, size = normal(0, K, N), np.exp(2 * normal(1, K))
    plain, weighted = quantize(w, format), quantize(w, format, hessian=size**2)
    independent = np.diag(size)
    assert lost(independent, w, weighted) < 0.97 * lost(independent, w, plain)
    assert lost(np.eye(K), w, weighted) > lost(np.eye(K), w, plain)


OFFSET = lowbit.QuantizationConfig("int4", offset=True, scale_dtype="float16")


@pytest.mark.parametrize(
    ("config", "shape", "axis"),
    [(OFFSET, (K, N), -2), (lowbit.QuantizationConfig("nf4", double_quant=True), (K, N), -2), ("q3", (N, K), -1)],
)
def test_options_and_axes(config: Any, shape: tuple[int, int], axis: int) -> None:
    config = lowbit.QuantizationConfig(config) if isinstance(config, str) else config
    config = dataclasses.replace(config, axis=axis)
    w, x = normal(0, *shape), inputs(1, 400)
    plain, rounded = quantize(w, config), quantize(w, config, hessian=x.T @ x)
    errors = [w - np.asarray(q.materialize()) for q in (rounded, plain)]
    got, before = (np.sum((x @ (e if axis == -2 else e.T)) ** 2) for e in errors)
    assert rounded.axis == axis and got < 0.9 * before


# --- inputs that are hard


@pytest.mark.parametrize("rows", [1, 5])
def test_few_rows(rows: int) -> None:
    w, x = normal(0, K, N), inputs(1, rows)
    plain, rounded = quantize(w, "q2"), quantize(w, "q2", hessian=x.T @ x)
    assert np.isfinite(rounded.materialize()).all()
    assert lost(x, w, rounded) < 0.1 * lost(x, w, plain)


def test_dead_inputs_are_rounded_to_nearest() -> None:
    w, x = normal(0, K, N), inputs(1, 400)
    x[:, 10:20] = 0
    moments = moments_of(w, x)
    array = quantize(w, "int4")
    got = round_by_moments(w, array, moments).array
    np.testing.assert_array_equal(dense(got)[10:20], dense(array)[10:20])
    assert lost(x, w, got) < 0.9 * lost(x, w, array)


def test_no_rows_change_nothing() -> None:
    w = normal(0, K, N)
    got = quantize(w, "q4", hessian=jnp.zeros((K, K)))
    np.testing.assert_array_equal(got.materialize(), quantize(w, "q4").materialize())


def test_damping_grows_until_a_factor_exists() -> None:
    # One eigenvalue is far below zero, as no x^T x has it; rounding errors make such sums.
    h = np.diag(np.ones(K)).astype(np.float32)
    h[0, 1] = h[1, 0] = 5
    upper = np.asarray(_factor(jnp.asarray(h), jnp.float32(1)))
    assert np.isfinite(upper).all()
    np.testing.assert_allclose(upper @ upper.T, h + 10 * np.eye(K), atol=1e-3)
    w = normal(0, K, N)
    assert np.isfinite(quantize(w, "q4", hessian=h).materialize()).all()


def test_layers_and_experts_are_rounded_by_their_own_inputs() -> None:
    w = normal(0, 3, K, N)
    xs = [inputs(1, 300), np.zeros((0, K), np.float32), inputs(7, 4)]
    h = np.stack([x.T @ x for x in xs])
    got = quantize(w, "q3", hessian=h)
    plain = quantize(w, "q3")
    np.testing.assert_array_equal(dense(got)[1], dense(plain)[1])
    for i, x in enumerate(xs):
        alone = quantize(w[i], "q3", hessian=h[i])
        np.testing.assert_array_equal(dense(got)[i], dense(alone))
        assert not len(x) or lost(x, w[i], alone) < 0.9 * lost(x, w[i], quantize(w[i], "q3"))
    shared = quantize(w, "q3", hessian=h[0])
    np.testing.assert_array_equal(dense(shared)[0], dense(got)[0])


def test_experts_without_a_token_keep_their_rounding() -> None:
    params = {"experts": jnp.asarray(normal(0, 3, K, N))}
    x = inputs(1, 40)
    sizes = jnp.array([25, 0, 15])
    calibration = lowbit.calibrate(lambda p, x: jax.lax.ragged_dot(x, p["experts"], sizes), params, [x])
    config = lowbit.QuantizationConfig("q3", axis=-2)
    quantized, report = lowbit.quantize_tree(params, {"experts": config}, calibration=calibration)
    got: Any = quantized["experts"]
    plain: Any = quantize(params["experts"], config)
    np.testing.assert_array_equal(dense(got)[1], dense(plain)[1])
    for i, rows in ((0, x[:25]), (2, x[25:])):
        one, other = (lost(rows, np.asarray(params["experts"])[i], q[i]) for q in (got, plain))
        assert one < 0.9 * other
    assert report["experts"].why.endswith("; GPTQ")


@pytest.mark.parametrize("format", tiers.tiered(["q3", "nf4"], ["q3"]))
def test_scales_along_another_axis_than_the_inputs(format: str) -> None:
    w, x = normal(0, K, 70), inputs(1, 300)
    for hessian, limit in ((x.T @ x, 0.9), (np.sum(x * x, 0), 1.0001)):
        diagonal = np.diag(hessian) if hessian.ndim == 2 else hessian
        full = jnp.asarray(hessian) if hessian.ndim == 2 else None
        moments = Moments(w.shape, (-2,), (), jnp.asarray(diagonal), full, jnp.float32(1))
        config = lowbit.QuantizationConfig(format, axis=-1)
        got = lowbit.config.quantize_calibrated(w, config, moments)
        assert got.array.axis == -1 and float(got.after) < limit * float(got.before)


def test_codes_of_every_format_are_restored() -> None:
    @functools.partial(jax.jit, static_argnames="format")
    def restored(w: jax.Array, format: str) -> tuple[jax.Array, jax.Array]:
        array = quantize(w, format)
        levels = SortedLevels.of(array)
        positions = levels.nearest(array.decode() / lowbit.formats.spread(array.scale_values(), array.spans, (K, N)))
        return with_positions(array, levels, positions).materialize(), array.materialize()

    for format in FORMATS:
        np.testing.assert_array_equal(*restored(normal(0, K, N), format))


def test_wrong_moments() -> None:
    w = normal(0, K, N)
    with pytest.raises(ValueError, match=r"shape \(5, 5\)|shape \(5,\)"):
        quantize(w, "q4", hessian=jnp.ones((5, 5)))
    with pytest.raises(ValueError, match="NaN or infinite"):
        quantize(w, "q4", hessian=jnp.full((K, K), jnp.nan))
    with pytest.raises(ValueError, match="leave out scale="):
        quantize(w, "q4", hessian=jnp.eye(K), scale=jnp.ones((3, N)))
    with pytest.raises(ValueError, match="single axis"):
        quantize(w, "int8", axis=(-2, -1), hessian=jnp.eye(K))


# --- whole models

PARAMS = {
    "up": {"kernel": jnp.asarray(normal(0, K, 64))},
    "down": {"kernel": jnp.asarray(normal(1, 64, K))},
    "norm": jnp.asarray(np.ones(K, np.float32)),
}


def model(params: Any, x: Any) -> jax.Array:
    return jax.nn.gelu(x * params["norm"] @ params["up"]["kernel"]) @ params["down"]["kernel"]


def test_quantize_tree_uses_a_calibration() -> None:
    x = inputs(1, 400)
    calibration = lowbit.calibrate(model, PARAMS, [x], rules={"up*": "full", "down*": "diag"})
    before, plain = lowbit.quantize_tree(PARAMS, "q3")
    after, report = lowbit.quantize_tree(PARAMS, "q3", calibration=calibration)
    up = report["up/kernel"]
    assert up.output_before is not None and up.output_after is not None and plain["up/kernel"].output_after is None
    np.testing.assert_allclose(up.output_before, relative(x, PARAMS, before), rtol=1e-3)
    np.testing.assert_allclose(up.output_after, relative(x, PARAMS, after), rtol=1e-3)
    assert up.output_after < 0.8 * up.output_before
    down = report["down/kernel"]
    assert down.output_before is not None and down.output_after is not None and down.output_after < down.output_before
    assert up.why.endswith("; GPTQ") and down.why.endswith("; weighted search")
    assert f"{up.output_before:.6f} -> {up.output_after:.6f}" in str(report) and "output error" in str(report)
    assert "output error" not in str(plain) and '"output_after":null' in report.to_html()
    want = model(PARAMS, x)
    errors = [np.linalg.norm(np.asarray(lowbit.implicit(model)(q, x) - want)) for q in (before, after)]
    assert errors[1] < 0.85 * errors[0]


def relative(x: np.ndarray, params: Any, quantized: Any) -> float:
    w = np.asarray(params["up"]["kernel"])
    return lost(x, w, quantized["up"]["kernel"]) / float(np.sum((x @ w) ** 2))


def test_leaves_that_do_not_gain_and_leaves_without_a_statistic() -> None:
    x = inputs(1, 50)
    calibration = lowbit.calibrate(model, PARAMS, [x], rules={"up*": "full", "down*": None})
    # All weights are on the levels of the format already: nothing can be better.
    exact = PARAMS | {"up": {"kernel": quantize(PARAMS["up"]["kernel"], "int8").materialize()}}
    _, report = lowbit.quantize_tree(exact, "int8", calibration=calibration)
    assert report["up/kernel"].output_after == report["up/kernel"].output_before
    assert report["down/kernel"].why.endswith("no statistic in the calibration")
    other = PARAMS | {"up": {"kernel": jnp.ones((K, 128))}}
    with pytest.raises(ValueError, match="up/kernel: A weight of shape"):
        lowbit.quantize_tree(other, "q4", calibration=calibration)
    tied = {"kernel": PARAMS["up"]["kernel"], "head": {"kernel": PARAMS["up"]["kernel"]}}
    moments = {"head/kernel": calibration["up/kernel"]}
    quantized, report = lowbit.quantize_tree(tied, "q3", calibration=lowbit.Calibration(moments))
    assert quantized["kernel"] is quantized["head"]["kernel"] and report["kernel"].output_after is not None


def test_under_jit() -> None:
    w, x = normal(0, K, N), inputs(1, 400)
    got = jax.jit(lambda w, h: quantize(w, "q4", hessian=h))(w, x.T @ x)
    np.testing.assert_allclose(lost(x, w, got), lost(x, w, quantize(w, "q4", hessian=x.T @ x)), rtol=0.02)
