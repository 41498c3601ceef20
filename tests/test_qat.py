"""Quantization-aware training: simulated values equal stored ones, and gradients pass straight through."""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from helpers import assert_close, assert_same_bits, gaussian
from jax import lax

import lowbit
from lowbit import FORMATS, QuantizationConfig, learned_scales, quantize_tree, straight_through, straight_through_tree

WITH_A_TOP = [name for name in FORMATS if FORMATS[name].top is not None]
LEARNED = tiers.tiered(WITH_A_TOP, ["int8", "q3"])


def normal(*shape: int) -> jax.Array:
    return gaussian(sum(shape), shape) * 0.05


def model() -> dict[str, Any]:
    """Parameters whose names do not tell their axes: a tied embedding, a stack, heads, a matrix (out, in)."""
    layers = {"a": normal(2, 32, 2, 16), "b": normal(2, 48, 32), "norm": jnp.ones((2, 32))}
    return {"table": normal(50, 32), "layers": layers, "out": normal(32, 33), "shift": normal(33), "step": jnp.int32(3)}


def forward(params: dict[str, Any], ids: jax.Array) -> jax.Array:
    def layer(x: jax.Array, p: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        x = x * p["norm"] + jnp.einsum("si,iho->sho", x, p["a"]).reshape(x.shape)
        return x + jnp.tanh(x @ p["b"].T)[:, :32], None

    x, _ = lax.scan(layer, params["table"][ids], params["layers"])
    return x @ params["out"] + params["shift"] + (x @ params["table"].T)[:, :33]


IDS = jnp.arange(8)
PROGRAM: dict[str, Any] = {"fn": forward, "args": (IDS,)}


def loss(params: dict[str, Any], target: float = 1.0) -> jax.Array:
    return jnp.mean((forward(params, IDS) - target) ** 2)


def assert_equal(got: Any, want: Any) -> None:
    """Assert equal bits."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_array_equal(np.asarray(g), np.asarray(w))


def by_hand(name: str) -> dict[str, Any]:
    """Scales along each axis, for the whole of it and in blocks."""
    return {
        "table": QuantizationConfig(name, axis=-1),
        "out": QuantizationConfig(name, axis=-2),
        "*/a": QuantizationConfig(name, axis=-3, block_size=16),
        "*/b": QuantizationConfig(name, axis=-1, block_size=16),
    }


CHOSEN: dict[str, Any] = {name: {"table": "int8", "*": name} for name in FORMATS}
BY_HAND: dict[str, Any] = {
    **{f"{name} by hand": by_hand(name) for name in FORMATS},
    "options": {
        "table": QuantizationConfig("nf4", 16, double_quant=True),
        "out": None,
        "*/a": QuantizationConfig("ternary", absmean=True),
        "*/b": QuantizationConfig("ternary", absmean=True, block_size=16),
        "shift": "int8",
    },
}
RULES = CHOSEN | BY_HAND


# The axes that the program tells are among the options, and codes in bytes and in nibbles.
@pytest.mark.parametrize("name", tiers.tiered(RULES, ("options", "q3 by hand")))
def test_simulated_values_equal_stored_ones(name: str) -> None:
    rules = RULES[name]

    @jax.jit
    def trained(params: Any) -> tuple[Any, Any]:
        trainable, frozen = lowbit.partition(params)

        def simulated(trainable: Any) -> Any:
            return straight_through_tree(lowbit.combine(trainable, frozen), rules, **PROGRAM)

        def step(trainable: Any, _: Any) -> tuple[Any, None]:
            grads = jax.grad(lambda trainable: loss(simulated(trainable)))(trainable)
            return jax.tree.map(lambda p, g: p - 0.1 * g, trainable, grads), None

        trainable, _ = lax.scan(step, trainable, length=2)
        return lowbit.combine(trainable, frozen), simulated(trainable)

    params, inside = trained(model())
    stored, report = quantize_tree(params, rules, strict=True, **PROGRAM)
    want = lowbit.dequantize_tree(stored)
    assert_equal(inside, want)
    outside = functools.partial(straight_through_tree, rules=rules, **PROGRAM)
    assert_equal((outside if name == "options" else jax.jit(outside))(params), want)  # one without jit
    leaves = (map(np.asarray, jax.tree.leaves(tree)) for tree in (params, want))
    for row, before, after in zip(report, *leaves, strict=True):
        assert bool(np.any(before != after)) == (row.format is not None), row.path
    if name in FORMATS:  # the stored model computes what the trained one did
        assert_close(jax.jit(lowbit.implicit(loss))(stored), jax.jit(loss)(inside), 1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_simulated_half_precision_weights_equal_stored_ones(dtype: Any) -> None:
    params = {"kernel": normal(64, 32).astype(dtype)}
    for rules in ("ternary", "int8", "nf4"):
        stored, _ = quantize_tree(params, rules)
        assert_equal(
            jax.jit(lambda p, rules=rules: straight_through_tree(p, rules))(params), lowbit.materialize(stored)
        )


def test_tied_leaves_and_stacks_under_vmap() -> None:
    w = normal(32, 64)
    tied = straight_through_tree({"embed": w, "a": {"kernel": w}, "b": {"kernel": w}}, "ternary")
    stored, _ = quantize_tree({"embed": w, "a": {"kernel": w}, "b": {"kernel": w}}, "ternary")
    assert_equal(tied, lowbit.materialize(stored))
    assert_equal(tied["a"], tied["b"])
    assert bool(jnp.any(tied["embed"] != tied["a"]["kernel"]))  # by row
    stack = jnp.stack([w, 2 * w, -w])
    mapped = jax.vmap(lambda w: straight_through_tree({"kernel": w}, "nf4"))(stack)["kernel"]
    assert_equal(
        mapped, jnp.stack([lowbit.quantize(w, QuantizationConfig("nf4", axis=-2)).materialize() for w in stack])
    )


@pytest.mark.parametrize("format", tiers.formats())
def test_the_gradient_goes_straight_through(format: str) -> None:
    params, frozen = lowbit.partition(model())

    def through(params: Any) -> Any:
        simulated = straight_through_tree(lowbit.combine(params, frozen), {"*": format}, **PROGRAM)
        return lowbit.partition(simulated)[0]

    def pulled_back(params: Any, cotangent: Any) -> Any:
        return jax.vjp(jax.checkpoint(through), params)[1](cotangent)[0]

    cotangent = jax.tree.map(lambda x: jnp.sin(1 / x), params)
    assert_equal(jax.jit(pulled_back)(params, cotangent), cotangent)
    assert_equal(jax.jit(lambda p, t: jax.jvp(through, (p,), (t,))[1])(params, cotangent), cotangent)


def test_amount_is_a_warm_up() -> None:
    params, rules = {"kernel": normal(64, 32), "bias": normal(32)}, "ternary"
    whole = straight_through_tree(params, rules)["kernel"]

    @jax.jit
    def at(step: Any) -> tuple[Any, Any]:
        def value(kernel: Any) -> Any:
            return straight_through_tree({**params, "kernel": kernel}, rules, amount=step)["kernel"]

        return value(params["kernel"]), jax.grad(lambda kernel: (3 * value(kernel)).sum())(params["kernel"])

    for amount, want in (
        (0.0, params["kernel"]),
        (False, params["kernel"]),
        (True, whole),
        (1.0, whole),
        (1, whole),
    ):
        value, grad = at(amount)
        assert_equal(value, want)
        assert_equal(grad, jnp.full_like(whole, 3))
        assert_equal(straight_through_tree(params, rules, amount=amount)["kernel"], want)
    value, grad = at(0.25)
    assert_close(value, 0.75 * params["kernel"] + 0.25 * whole, 1e-6)
    assert_close(grad, jnp.full_like(whole, 3), 1e-6)
    # `amount` is a setting and has no gradient.
    assert jax.grad(lambda a: straight_through(whole * 2.1, "int8", amount=a).sum())(0.5) == 0


@pytest.mark.parametrize("format", LEARNED)
def test_clip_stops_the_gradient_beyond_the_largest_code(format: str) -> None:
    w = normal(64, 32)
    config = QuantizationConfig(format, axis=-2)
    top = config.format.top * lowbit.quantize(w, config).scale_values()
    top = jnp.repeat(jnp.abs(top), 64 // top.shape[0], axis=0)
    for clip in (0.5, 1.5):
        grad = jax.grad(lambda w, clip=clip: straight_through_tree({"kernel": w}, config, clip=clip)["kernel"].sum())(w)
        assert_equal(grad, (jnp.abs(w) <= clip * top).astype(w.dtype))
        assert 0 < grad.mean() < 1 or clip > 1
    value = straight_through(w, config, clip=0.5)
    assert_equal(value, straight_through(w, config))
    # Scales that are made from the largest weight clip none; those of a search may.
    made_for = jax.grad(lambda w: straight_through(w, config, clip=1.0).sum())(w)
    layout = config.format.layout
    exact = layout is None or (layout.scales is None and layout.weighting is None)
    if exact and bool((jnp.abs(w) <= top * 1.1).all()):
        assert_equal(made_for, jnp.ones_like(w))


def test_absmean_is_round_of_w_over_its_mean() -> None:
    w = normal(64, 32)
    q = lowbit.quantize(w, QuantizationConfig("ternary", axis=-2, absmean=True))
    mean = jnp.mean(jnp.abs(w), axis=0, keepdims=True)
    assert_close(q.scale, mean, 1e-6)
    assert_equal(q.materialize(), jnp.clip(jnp.round(w / q.scale), -1, 1) * q.scale)
    assert_same_bits(q, lowbit.Array1B.quantize(w, axis=-2, absmean=True).replace(use_kernel=True))
    tiny = lowbit.Array1B.quantize(w * 1e-30, axis=-2, absmean=True)
    assert_equal(tiny.weight, q.weight)
    assert not lowbit.Array1B.quantize(jnp.zeros((4, 8)), absmean=True).materialize().any()
    with pytest.raises(ValueError, match="absmean=True is for ternary, not for 'nf4'"):
        QuantizationConfig("nf4", absmean=True)
    for options in ({"kind": "binary"}, {"threshold": 0.1}, {"scale": False}):
        with pytest.raises(ValueError, match="absmean=True sets scale and threshold"):
            lowbit.Array1B.quantize(w, absmean=True, **options)


@pytest.mark.parametrize("format", LEARNED)
def test_learned_scales_are_trained_and_stored(format: str) -> None:
    rules = {"embed": "int8", "*": format}
    params = {"embed": normal(50, 64), "kernel": normal(3, 64, 32), "bias": normal(32)}
    program: dict[str, Any] = {"fn": lambda p, i: jnp.einsum("si,lio->lso", p["embed"][i], p["kernel"]), "args": (IDS,)}
    scales = learned_scales(params, rules, **program)
    assert scales["bias"] is None
    first, _ = quantize_tree(params, rules, **program)
    layout = FORMATS[format].layout
    # A scale that is stored in 8 bits is rounded: by half of the last of 3 or 4 bits, or down to a power of two.
    rounded = 0 if layout is None or layout.scales is None else 0.5 if format == "mxfp4" else 1 / 15
    np.testing.assert_allclose(scales["kernel"], first["kernel"].scale_values(), rtol=rounded)

    @jax.jit
    def trained(both: Any) -> tuple[Any, Any]:
        def simulated(both: Any) -> Any:
            return straight_through_tree(both[0], rules, scales=both[1], **program)

        def step(both: Any, _: Any) -> tuple[Any, None]:
            grads = jax.grad(lambda both: jnp.mean((program["fn"](simulated(both), IDS) - 1) ** 2))(both)
            return jax.tree.map(lambda p, g: p - 1e-3 * g, both, grads), None

        both, _ = lax.scan(step, both, length=2)
        return both, simulated(both)

    (params, after), inside = trained((params, scales))
    stored, _ = quantize_tree(params, rules, scales=after, **program)
    assert_equal(inside, lowbit.dequantize_tree(stored))
    for name in ("embed", "kernel"):
        np.testing.assert_allclose(stored[name].scale_values(), after[name], rtol=rounded)
        assert bool(jnp.any(after[name] != scales[name]))


@pytest.mark.parametrize("format", LEARNED)
def test_the_gradient_of_a_learned_scale_is_that_of_a_step_size(format: str) -> None:
    w, g = normal(32, 4), normal(32, 4)
    config = QuantizationConfig(format, 16, axis=-2)
    scale = 0.6 * lowbit.quantize(w, config).scale_values()  # some weights are beyond it
    wide = np.repeat(np.asarray(scale, np.float64), 32 // scale.shape[0], axis=0)
    stored = lowbit.quantize(w, config, scale=scale)
    value = np.asarray(stored.materialize(), np.float64)
    inside = np.abs(np.asarray(w)) <= config.format.top * np.abs(wide)
    assert 0 < inside.mean() < 1
    of_w, of_scale = jax.grad(lambda w, s: (g * straight_through(w, config, scale=s)).sum(), argnums=(0, 1))(w, scale)
    assert_equal(of_w, jnp.where(inside, g, 0))
    want = np.asarray(g) * (value - inside * np.asarray(w)) / wide
    want = want.reshape(scale.shape[0], -1, 4).sum(axis=1)
    np.testing.assert_allclose(of_scale, want, rtol=1e-3, atol=1e-3 * np.abs(want).max())
    # Rounding by given scales, as they are stored, gives the nearest representable value.
    wide = np.repeat(np.asarray(stored.scale_values(), np.float64), 32 // scale.shape[0], axis=0)
    levels = np.unique(np.round(value / wide, 5))
    nearest = np.abs(np.asarray(w)[None] - levels[:, None, None] * wide).min(axis=0)
    np.testing.assert_allclose(np.abs(np.asarray(w) - value), nearest, atol=1e-5)


@pytest.mark.parametrize("format", LEARNED)
def test_scales_of_quantized_leaves_are_trained_with_frozen_codes(format: str) -> None:
    config = QuantizationConfig(format, 16, axis=-2)
    params = {"a": lowbit.quantize(normal(2, 32, 8), config), "b": lowbit.quantize(normal(32, 8), config).T}
    params["norm"] = normal(8)
    scales = learned_scales(params)
    assert_equal(scales, {name: None if name == "norm" else params[name].scale_values() for name in params})
    assert_equal(straight_through_tree(params, scales=scales), lowbit.dequantize_tree(params))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a pattern that names a quantized leaf asks for nothing more
        straight_through_tree(params, {"[ab]": format, "*": None}, scales=scales)
    other = jax.tree.map(lambda s: 1.3 * s, scales)
    stored, report = quantize_tree(params, scales=other)
    assert [row.path for row in report] == ["a", "b", "norm"]
    assert_equal(jax.jit(lambda s: straight_through_tree(params, scales=s))(other), lowbit.dequantize_tree(stored))

    g = {name: normal(*params[name].shape) for name in ("a", "b")}

    def products(scales: Any) -> Any:
        dense = straight_through_tree(params, scales=scales)
        return sum(jnp.sum(g[name] * dense[name]) for name in g)

    grads = jax.grad(products)(other)
    for name, array in g.items():
        assert jax.tree.structure(stored[name]) == jax.tree.structure(params[name])
        for component in params[name].packing:
            assert_equal(getattr(stored[name], component), getattr(params[name], component))
        rounded = 0 if params[name].scales.dtype == jnp.float32 else 0.5 if format == "mxfp4" else 1 / 15
        np.testing.assert_allclose(stored[name].scale_values(), other[name], rtol=rounded)
        # The gradient of a scale is the sum of gradient times level in its block.
        turned = np.asarray(array if name == "a" else array.T, np.float64)
        start = params[name] if name == "a" else params[name].T
        wide = np.repeat(np.asarray(start.scale_values(), np.float64), 32 // start.scales.shape[-2], axis=-2)
        levels = np.divide(start.materialize(), wide, out=np.zeros_like(wide), where=wide != 0)
        want = (turned * levels).reshape(*start.scales.shape[:-1], -1, 8).sum(axis=-2)
        np.testing.assert_allclose(grads[name], want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


def test_offsets_stay_while_scales_are_trained() -> None:
    params = {"kernel": lowbit.quantize(normal(64, 8), "int4", offset=True)}
    other = {"kernel": 2 * learned_scales(params)["kernel"]}
    stored, _ = quantize_tree(params, scales=other)
    before, after, offsets = params["kernel"], stored["kernel"], params["kernel"].offset_values()
    wide = jnp.repeat(offsets, 32, axis=0)
    assert_equal(after.offset_values(), offsets)
    assert_close(after.materialize() - wide, 2 * (before.materialize() - wide))


def test_weights_left_in_full_precision_warn() -> None:
    params = {"kernel": normal(64, 32), "theta": normal(64, 32)}
    with pytest.warns(UserWarning, match=r"in full precision.*No leaf matches '\*kernle'.*strict=True") as caught:
        assert straight_through_tree(params, {"*kernle": "int8"}) == params
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match=r"in full precision.*theta: name not known: pass fn=.*strict=True"):
        through = straight_through_tree(params, "ternary")
    assert through["theta"] is params["theta"] and through["kernel"] is not params["kernel"]


def test_errors_name_what_was_asked() -> None:
    w = normal(64, 32)
    params = {"kernel": w, "other": {"kernel": w}}
    with pytest.raises(ValueError, match=r"No leaf matches '\*kernle'"):
        straight_through_tree(params, {"*kernle": "int8"}, strict=True)
    with pytest.raises(ValueError, match="theta: name not known: pass fn="):
        straight_through_tree({"theta": w}, "ternary", strict=True)
    for function in (straight_through_tree, learned_scales):
        with pytest.raises(ValueError, match="kernel: 3 axes"):
            function({"kernel": normal(4, 64, 32)}, "ternary", strict=True)
    stored, _ = quantize_tree(params, {"kernel": "int8"})
    with pytest.raises(ValueError, match="kernel: quantized already, as Array8B"):
        straight_through_tree(stored, {"*kernel": "int8"}, strict=True)
    # A default skips leaves that it cannot quantize.
    assert straight_through_tree(stored, "int8")["kernel"] is stored["kernel"]
    with pytest.raises(ValueError, match=r"other/kernel: Cannot quantize to 'int8': 1 of 2048 values are NaN"):
        learned_scales({"other": {"kernel": w.at[0, 1].set(jnp.nan)}}, "int8")
    with pytest.raises(ValueError, match=r"kernel: clip=-1 must be positive"):
        straight_through_tree({"kernel": w}, "int8", clip=-1)
    with pytest.raises(ValueError, match=r"double_quant=True stores other scales"):
        learned_scales(params, QuantizationConfig("nf4", double_quant=True))
    double = {"kernel": lowbit.quantize(w, double_quant=True)}
    with pytest.raises(ValueError, match=r"kernel: ArrayNF4 has double-quantized scales.* a pattern to None"):
        learned_scales(double)
    assert learned_scales(double | params, {"kernel": None, "*": "int8"})["kernel"] is None
    with pytest.raises(ValueError, match=r"kernel: 32 of 32 scales are NaN or infinite"):
        spoiled = {"kernel": jnp.full((1, 32), jnp.nan), "other": {"kernel": None}}
        quantize_tree(stored, {"kernel": "int8"}, scales=spoiled)
    with pytest.raises(ValueError, match=r"kernel: Scales of shape \(3,\) do not fit .* whose scales are \(1, 32\)"):
        quantize_tree(stored, {"kernel": "int8"}, scales={"kernel": jnp.ones(3), "other": {"kernel": None}})
    with pytest.raises(
        ValueError, match=r"kernel: scale= for 'int8' must be positive: 1 of 32 are not.* 0.0 at \(0, 3\)"
    ):
        learned_scales({"kernel": w.at[:, 3].set(0)}, "int8")
    with pytest.raises(ValueError, match=r"scale= for 'nf4' has the shape \(32,\).* needs scales of \(1, 32\)"):
        lowbit.quantize(w, scale=jnp.ones(32))
    with pytest.raises(ValueError, match=r"scales lacks kernel, which .* quantize: create it with learned_scales"):
        quantize_tree(params, "int8", scales={"kernel": None, "other": {"kernel": None}})
    negative = jax.jit(lambda w, s: straight_through(w, "int8", scale=s))(w, jnp.full((1, 32), -1.0))
    assert bool(jnp.isnan(negative).all())


def test_clip_raises_for_a_format_without_a_largest_level(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = lowbit.Format("plain", lowbit.Array8B.quantize, error=0.0087, bits=8.0, blocked=False)
    monkeypatch.setitem(FORMATS, "plain", plain)
    w = normal(64, 32)
    assert_equal(straight_through(w, "plain"), straight_through(w, "int8"))
    with pytest.raises(ValueError, match="clip=2 needs the largest level of 'plain'"):
        straight_through(w, "plain", clip=2)
    with pytest.raises(ValueError, match="The format 'plain' computes its scales itself"):
        lowbit.quantize(w, "plain", scale=jnp.ones((64, 1)))
