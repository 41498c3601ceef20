"""`quantize` and `straight_through`, the settings of products, and `partition` into frozen and trainable leaves."""

import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from helpers import assert_close, assert_same_bits, gaussian

import lowbit
from lowbit import QuantizationConfig, QuantizationType, dispatch, quantize, straight_through
from lowbit.kernels import reference
from lowbit.testing import equations

FIRST = [QuantizationType(name) for name in tiers.KINDS_OF_FORMATS]
TYPES = tiers.tiered(QuantizationType, FIRST)
BLOCKS = {"nf4": 64, "nvfp4": 16, **dict.fromkeys(("int8", "ternary", "binary", "fp8", "fp8_e5m2"))}
W = gaussian(0, (48, 80)) / 4
X = gaussian(1, (8, 48))


# --- quantize and its config


@pytest.mark.parametrize("dtype", TYPES)
def test_every_type_by_name_by_config_and_by_class(dtype: QuantizationType) -> None:
    want = lowbit.FORMATS[dtype.value].quantize(W)
    assert_same_bits(quantize(W, dtype=dtype), want)
    assert_same_bits(quantize(W, dtype=dtype.value), want)
    assert_same_bits(quantize(W, dtype.value), want)
    assert_same_bits(quantize(W, QuantizationConfig(dtype.value)), want)
    assert_same_bits(jax.jit(lambda w: quantize(w, dtype=dtype))(W), want)


def test_the_names_are_those_of_the_table() -> None:
    assert {*QuantizationType} == {*lowbit.FORMATS}


def test_options_reach_the_format_and_are_refused_where_it_has_no_use_for_them() -> None:
    want = lowbit.FORMATS["int4"].quantize(W, offset=True, scale_dtype=jnp.float16, search=False)
    given = {"offset": True, "scale_dtype": "float16", "search": False}
    assert_same_bits(quantize(W, "int4", **given), want)
    assert_same_bits(quantize(W, QuantizationConfig("int4", **given), scale_dtype=jnp.float16), want)
    np.testing.assert_array_equal(np.asarray(straight_through(W, "int4", **given)), np.asarray(want.materialize()))
    assert QuantizationConfig("int4", scale_dtype=jnp.bfloat16) == QuantizationConfig("int4", scale_dtype="bfloat16")
    searched = [name for name, row in lowbit.FORMATS.items() if row.layout and row.layout.weighting]
    assert {"q4", "int2", "int6"} <= {*searched} and "mxfp4" not in searched
    for format, options, message in [
        ("q4", {"double_quant": True}, "double_quant=True is for nf4, not for 'q4'; its scales are in 8 bits already."),
        ("int4", {"double_quant": True}, "double_quant=True is for nf4, not for 'int4'."),
        ("q4", {"offset": True}, "offset=True is for int2, int3, int4, int5, int6, not for 'q4'."),
        ("int8", {"offset": True}, "offset=True is for int2, int3, int4, int5, int6, not for 'int8'."),
        (
            "mxfp4",
            {"search": False},
            f"search=False is for {', '.join(searched)}, not for 'mxfp4'.",
        ),
        (
            "nvfp4",
            {"scale_dtype": "float16"},
            "scale_dtype='float16' is for int8, int2, int3, int4, int5, int6, fp8, fp8_e5m2, not for 'nvfp4'; its "
            "scales are stored as 8-bit codes.",
        ),
        (
            "int4",
            {"scale_dtype": "float8"},
            "scale_dtype='float8' for 'int4' must be one of float32, bfloat16, float16.",
        ),
        ("int4", {"scale_dtype": "int8"}, "scale_dtype=int8 for 'int4' must be one of float32, bfloat16, float16."),
    ]:
        with pytest.raises(ValueError) as error:
            QuantizationConfig(format, **options)
        assert str(error.value) == message
    with pytest.raises(ValueError, match=r"offset=True contradicts the config, which has offset=False"):
        quantize(W, QuantizationConfig("int4"), offset=True)


def test_the_default_is_nf4_in_blocks_of_64() -> None:
    assert_same_bits(quantize(W), lowbit.ArrayNF4.quantize(W, block_size=64))
    assert quantize(W, block_size=16).block_size == 16


def test_the_default_axis_is_the_one_that_a_product_contracts() -> None:
    by_class = [lowbit.Array8B.quantize, lowbit.ArrayNF4.quantize, lowbit.Array1B.quantize, lowbit.Array8B]
    by_name = [functools.partial(quantize, dtype=dtype) for dtype in FIRST]
    for fn in (*by_class, *by_name):
        for shape, axis in (((64,), -1), ((64, 96), -2), ((3, 64, 96), -2), ((2, 3, 64, 96), -2)):
            w = gaussian(0, shape)
            assert jax.eval_shape(fn, w).axis == axis, (fn, shape)
            if len(shape) != 3:  # a stack of stacks shows the same
                assert fn(w).axis == axis
                assert_same_bits(fn(w), fn(w, axis=axis))


def test_the_default_axis_keeps_uneven_columns_apart() -> None:
    columns = jnp.exp(jax.random.normal(jax.random.key(1), (256,)))
    w = jax.random.normal(jax.random.key(2), (512, 256)) * columns

    def error(q: lowbit.QuantizedArray) -> float:
        each = jnp.linalg.norm(q.materialize() - w, axis=0) / jnp.linalg.norm(w, axis=0)
        return float(jnp.median(each))

    assert error(quantize(w)) == error(lowbit.ArrayNF4.quantize(w)) == pytest.approx(0.09, abs=0.005)
    assert error(quantize(w, axis=-1)) > 0.3


@pytest.mark.parametrize("dtype", TYPES)
def test_a_block_size_holds_for_every_format(dtype: QuantizationType) -> None:
    for got in (
        quantize(W, dtype, block_size=16),
        quantize(W, QuantizationConfig(dtype, block_size=16)),
        quantize(W, QuantizationConfig(dtype, 16), block_size=16),
    ):
        assert_same_bits(got, lowbit.FORMATS[dtype.value].quantize(W, block_size=16))
        assert (got.block_size, got.scales.shape) == (16, (3, 80))
    want = np.asarray(lowbit.FORMATS[dtype.value].quantize(W, block_size=16).materialize())
    np.testing.assert_array_equal(np.asarray(straight_through(W, dtype, block_size=16)), want)
    np.testing.assert_array_equal(np.asarray(quantize(W, dtype, block_size=16, simulate=True)), want)
    assert quantize(W, dtype).block_size == BLOCKS.get(dtype, 32)


def test_fields_of_a_config_may_be_given_by_keyword() -> None:
    want = QuantizationConfig("nf4", 32, axis=-2, double_quant=True, use_kernel=False, compute="fast")
    got = quantize(W, "nf4", block_size=32, axis=-2, double_quant=True, use_kernel=False, compute="fast")
    assert_same_bits(got, quantize(W, want))
    # Repeating a value of the config, or its default, is no contradiction.
    assert_same_bits(quantize(W, want, "nf4", 32, False, axis=-2, double_quant=True, compute="fast"), got)
    assert_same_bits(quantize(W, QuantizationConfig(), block_size=64), quantize(W))
    assert_same_bits(quantize(W, "ternary", absmean=True), quantize(W, QuantizationConfig("ternary", absmean=True)))
    simulated = straight_through(W, "nf4", block_size=32, axis=[-2], double_quant=True)
    np.testing.assert_array_equal(np.asarray(simulated), np.asarray(got.materialize()))


@pytest.mark.parametrize(
    ("config", "given", "match"),
    [
        (QuantizationConfig("nf4"), {"dtype": "int8"}, r"dtype='int8' contradicts the config, which has dtype='nf4'"),
        ("nf4", {"dtype": QuantizationType.INT8}, r"dtype='int8' contradicts .* dtype='nf4'"),
        (QuantizationConfig("nf4", 32), {"block_size": 16}, r"block_size=16 contradicts .* block_size=32: .*replace"),
        (QuantizationConfig("nf4"), {"block_size": 16}, r"block_size=16 contradicts .* block_size=64"),
        (QuantizationConfig("int8"), {"block_size": 16}, r"block_size=16 contradicts .* block_size=None"),
        (QuantizationConfig(), {"simulate": True}, r"simulate=True contradicts .* simulate=False"),
        (QuantizationConfig(simulate=True), {"simulate": False}, r"simulate=False contradicts .* simulate=True"),
        (QuantizationConfig(axis=-2), {"axis": -1}, r"axis=-1 contradicts .* axis=-2"),
        (QuantizationConfig(), {"double_quant": True}, r"double_quant=True contradicts .* double_quant=False"),
        (QuantizationConfig(), {"use_kernel": False}, r"use_kernel=False contradicts .* use_kernel=True"),
        (QuantizationConfig(), {"compute": "fast"}, r"compute='fast' contradicts .* compute='exact'"),
    ],
)
def test_arguments_that_contradict_the_config_raise(config, given, match) -> None:
    with pytest.raises(ValueError, match=match):
        quantize(W, config, **given)
    if not {"simulate", "use_kernel", "compute"} & {*given}:
        with pytest.raises(ValueError, match=match):
            straight_through(W, config, **given)


def test_blocks_of_scales_and_axes() -> None:
    assert quantize(W, QuantizationConfig("int8", axis=-2, block_size=16)).scale.shape == (3, 80)
    assert quantize(W, QuantizationConfig("int8", axis=(0, 1))).scale.shape == (1, 1)
    assert quantize(W, QuantizationConfig("binary", axis=0)).scale.shape == (1, 80)
    assert quantize(W, QuantizationConfig("int8", axis=(0, 1), block_size=16)).scale.shape == (3, 5)


def test_the_config_is_a_frozen_value() -> None:
    config = QuantizationConfig("int8", axis=[0, 1])
    assert config == QuantizationConfig(QuantizationType.INT8, axis=(0, 1))
    assert len({config, QuantizationConfig("int8", axis=(0, 1)), QuantizationConfig()}) == 2
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.dtype = "nf4"
    assert jax.jit(quantize, static_argnums=1)(W, config).shape == W.shape


def test_errors_name_what_was_asked() -> None:
    with pytest.raises(ValueError, match=r"'nf5'.*nf4, .*int8.*ternary, binary|'nf5'.*int8, nf4, ternary, binary"):
        quantize(W, dtype="nf5")
    with pytest.raises(ValueError, match=r"compute='quick'.*'exact', 'fast'"):
        QuantizationConfig(compute="quick")
    with pytest.raises(ValueError, match=r"double_quant=True is for nf4, not for 'int8'"):
        QuantizationConfig("int8", double_quant=True)
    with pytest.raises(ValueError, match=r"double_quant=True is for nf4, not for 'int8'"):
        quantize(W, "int8", double_quant=True)
    with pytest.raises(TypeError, match="scale_block"):
        QuantizationConfig("int8", **{"scale_block": 32})
    with pytest.raises(TypeError, match=r"config must be a QuantizationConfig or the name of a format, not 4"):
        quantize(W, 4)
    with pytest.raises(ValueError, match="block_size=48"):
        quantize(W, block_size=48)


# --- straight through

DOUBLE = QuantizationConfig("nf4", 16, axis=-2, double_quant=True)
EVERY, FIRST_CONFIGS = ([*map(QuantizationConfig, types), DOUBLE] for types in (QuantizationType, FIRST))


@pytest.mark.parametrize("config", tiers.tiered(EVERY, FIRST_CONFIGS), ids=str)
def test_simulated_materialized_and_straight_through_are_equal_to_the_bit(config: QuantizationConfig) -> None:
    want = np.asarray(quantize(W, config).materialize())
    simulated = dataclasses.replace(config, simulate=True)
    for got in (
        quantize(W, simulated),
        straight_through(W, config),
        jax.jit(lambda w: quantize(w, simulated))(W),
        jax.jit(lambda w: straight_through(w, config))(W),
        jax.jit(lambda w: quantize(w, config).materialize())(W),
    ):
        assert isinstance(got, jax.Array)
        np.testing.assert_array_equal(np.asarray(got), want)


def test_straight_through_by_the_names_of_eformer() -> None:
    def equal(got: jax.Array, want: lowbit.QuantizedArray) -> None:
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want.materialize()))

    equal(lowbit.straight_through_nf4(W, 32), lowbit.ArrayNF4.quantize(W, 32, axis=-1))
    equal(lowbit.straight_through_nf4(W, block_size=16, axis=0), lowbit.ArrayNF4.quantize(W, 16, axis=0))
    equal(lowbit.straight_through_8bit(W), lowbit.Array8B.quantize(W, axis=-1))
    equal(lowbit.straight_through_8bit(W, axis=0), lowbit.Array8B.quantize(W, axis=0))
    equal(lowbit.straight_through_1bit(W), lowbit.Array1B.quantize(W, axis=-1))
    equal(lowbit.straight_through_1bit(W, kind="binary"), lowbit.Array1B.quantize(W, axis=-1, kind="binary"))
    assert set(np.unique(lowbit.straight_through_1bit(W, kind="binary", scale=False))) == {-1, 1}


@pytest.mark.parametrize("dtype", tiers.tiered(QuantizationType, [QuantizationType.NF4]))
def test_straight_through_has_the_dense_gradient_in_every_transformation(dtype: QuantizationType) -> None:
    def quantized(w: jax.Array) -> jax.Array:
        return straight_through(w, dtype=dtype)

    def product(w: jax.Array, x: jax.Array) -> jax.Array:
        return (x @ quantized(w)).sum()

    want = jax.grad(lambda w, x: (x @ w).sum())(W, X)
    grad = jax.grad(product)
    assert_close(grad(W, X), want)
    assert_close(jax.jit(grad)(W, X), want)
    assert_close(jax.grad(jax.jit(product))(W, X), want)
    assert_close(jax.grad(jax.checkpoint(product))(W, X), want)
    assert_close(jax.vmap(grad, (None, 0))(W, X[:, None]).sum(0), want)
    stack = jnp.stack([W, 2 * W, -W])
    assert_close(jax.vmap(grad, (0, None))(stack, X), jnp.stack([want] * 3))

    def layers(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda y, w: (y + jax.checkpoint(product)(w, x), None), 0.0, w)[0]

    assert_close(jax.jit(jax.grad(layers))(stack, X), jnp.stack([want] * 3))

    # Second order: the outer function is evaluated at the quantized weights.
    def curved(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sin(x @ w).sum()

    direction = gaussian(2, W.shape)
    at = quantized(W)
    second = jax.jvp(jax.grad(lambda w: curved(quantized(w), X)), (W,), (direction,))
    assert_close(second, jax.jvp(jax.grad(lambda w: curved(w, X)), (at,), (direction,)))
    reverse = jax.grad(lambda w: (jax.grad(lambda w: curved(quantized(w), X))(w) * direction).sum())(W)
    assert_close(reverse, jax.grad(lambda w: (jax.grad(lambda w: curved(w, X))(w) * direction).sum())(at))


# --- how products run


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """A kernel that records the arithmetic it is called with."""
    calls = []

    def kernel(product):
        calls.append(product.arithmetic)
        return reference.matmul(product)

    monkeypatch.setattr(dispatch, "_kernels", {})
    dispatch.register_kernel("matmul", jax.default_backend(), kernel, lambda product: True)
    return calls


def told(asked: list[str], fn, *args) -> set[str]:
    """The arithmetics that a call of `fn` traces."""
    asked.clear()
    fn(*args)
    return set(asked)


def test_a_setting_wins_over_the_array_also_when_compiled_before(asked) -> None:
    fast = quantize(W, QuantizationConfig("int8", compute="fast"))
    plain = quantize(W, QuantizationConfig("int8"))
    without = quantize(W, QuantizationConfig("int8", use_kernel=False))
    program = jax.jit(lambda x, q: x @ q)
    assert told(asked, program, X, fast) == {"fast"}
    assert told(asked, program, X, plain) == {"exact"}
    assert told(asked, program, X, without) == set()
    with lowbit.compute("exact"):
        assert told(asked, program, X, fast) == {"exact"}
    with lowbit.compute("fast"):
        assert told(asked, program, X, plain) == {"fast"}
        assert told(asked, program, X, without) == set()
    with lowbit.use_kernel(True):
        assert told(asked, program, X, without) == {"exact"}
    with lowbit.use_kernel(False):
        assert told(asked, program, X, fast) == set()
    for q in (fast, plain, without):
        assert_close(program(X, q), X @ q.materialize())
        # Compiled already, so nothing is traced.
        assert told(asked, program, X, q) == set()


def test_gradients_are_exact(asked) -> None:
    q = quantize(W, QuantizationConfig("int8", compute="fast"))

    def products(fn, x=X) -> list[tuple[int, str]]:
        found = [eqn for eqn in equations(jax.make_jaxpr(fn)(x)) if eqn.primitive.name == "lowbit_matmul"]
        described = [jax.tree.unflatten(eqn.params["tree"], eqn.invars) for eqn in found]
        return sorted((product.contract, product.arithmetic) for product in described)

    def loss(x):
        return jnp.sin(x @ q).sum()

    # The value is computed fast, its derivatives in both modes exactly.
    assert products(jax.value_and_grad(loss)) == [(-2, "fast"), (-1, "exact")]
    assert products(lambda x: jax.jvp(loss, (x,), (x,))) == [(-2, "exact"), (-2, "fast")]
    assert products(jax.linear_transpose(lambda x: x @ q, X), X @ q) == [(-1, "exact")]


def test_the_settings_travel_with_the_array(asked) -> None:
    q = quantize(W, QuantizationConfig("int8", compute="fast", use_kernel=False))
    for moved in (q.T, q[2:8], q.astype(jnp.bfloat16), jax.jit(lambda q: q)(q), pickle.loads(pickle.dumps(q)), q * 2.0):
        assert (moved.compute, moved.use_kernel) == ("fast", False)


def test_settings_are_known_by_name() -> None:
    with pytest.raises(ValueError, match=r"compute\('slow'\).*'exact', 'fast', None"):
        lowbit.compute("slow")
    assert lowbit.is_kernel_available() == ("cpu" in dispatch._kernels.get("matmul", {}))


# --- small functions


@pytest.mark.parametrize(
    ("shape", "scale"),
    [((2, 48), (1, 80)), ((3, 2, 48), (48, 1)), ((48,), (1, 80)), ((2, 48), (48, 80)), ((2, 48), (80,))],
)
def test_matmul_of_codes_and_scales(shape: tuple[int, ...], scale: tuple[int, ...]) -> None:
    lhs = gaussian(3, shape, jnp.bfloat16)
    weight = jax.random.randint(jax.random.key(4), W.shape, -127, 128, jnp.int8)
    scales = jax.random.uniform(jax.random.key(5), scale)
    got = lowbit.matmul_bf16_int8_weight_only(lhs, weight, scales)
    assert got.dtype == jnp.bfloat16
    want = np.asarray(lhs, np.float64) @ (np.asarray(weight, np.float64) * np.asarray(scales, np.float64))
    assert_close(got.astype(jnp.float32), jnp.asarray(want, jnp.float32), 2**-8)


def test_matmul_of_codes_and_scales_names_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"\(2, 47\).*\(48, 80\)"):
        lowbit.matmul_bf16_int8_weight_only(X[:2, :47], jnp.zeros((48, 80), jnp.int8), jnp.ones((1, 80)))
    with pytest.raises(TypeError, match="int8, not float32"):
        lowbit.matmul_bf16_int8_weight_only(X, W, jnp.ones((1, 80)))


def test_safe_materialize() -> None:
    q = quantize(W)
    got, was = lowbit.safe_materialize(q)
    assert was and isinstance(got, jax.Array)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(q.materialize()))
    got, was = lowbit.safe_materialize(W)
    assert not was and got is W


# --- frozen and trainable


def test_partition_and_combine() -> None:
    q = quantize(W)
    tree = {"q": q, "w": W, "more": [jnp.arange(3), None, "name", jnp.float16(2), jax.random.key(0)], "f": jnp.sin}
    trainable, frozen = lowbit.partition(tree)
    assert jax.tree.map(jnp.shape, trainable) == {
        "q": None,
        "w": W.shape,
        "more": [None, None, None, (), None],
        "f": None,
    }
    assert frozen["q"] is q and frozen["w"] is None and frozen["f"] is jnp.sin and frozen["more"][2] == "name"
    back = lowbit.combine(trainable, frozen)
    assert back["q"] is q and back["w"] is W and back["more"][1:3] == [None, "name"] and back["f"] is jnp.sin
    moved = lowbit.combine(jax.tree.map(lambda t: t + 1, trainable), frozen)
    assert moved["q"] is q
    assert_close(moved["w"], W + 1)
    with pytest.raises(ValueError, match=r"\['w'\] is in both"):
        lowbit.combine({"q": None, "w": W}, {"q": q, "w": W})


def test_gradients_of_the_trainable_leaves_only() -> None:
    tree = {"q": quantize(W), "b": jnp.zeros(80), "step": jnp.int32(3)}
    trainable, frozen = lowbit.partition(tree)

    def loss(trainable, frozen, x):
        tree = lowbit.combine(trainable, frozen)
        return jnp.sin(x @ tree["q"] + tree["b"]).sum()

    got = jax.jit(jax.grad(loss))(trainable, frozen, X)
    assert got.keys() == tree.keys() and got["q"] is None and got["step"] is None
    assert_close(got["b"], jax.grad(lambda b: jnp.sin(X @ tree["q"].materialize() + b).sum())(tree["b"]))


def test_partition_of_shapes() -> None:
    shapes = jax.eval_shape(lambda w: {"q": quantize(w), "w": w}, W)
    trainable, frozen = lowbit.partition(shapes)
    assert trainable["w"] is shapes["w"] and frozen["q"] is shapes["q"] and frozen["w"] is None
