"""What each format stores: error, bits, padding, bad values, constructors, and golden bits."""

import json
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiers
from helpers import Layout, assert_close, assert_same_bits, gaussian
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import lowbit
from lowbit import FORMATS, Array1B, Array8B, ArrayNF4
from lowbit.formats import PackedArray, blocks, nf4

GOLDEN = np.load(Path(__file__).parent / "golden" / "bitsandbytes_nf4.npz")


@pytest.fixture(params=FORMATS, ids=str)
def every_format(request: pytest.FixtureRequest) -> lowbit.Format:
    return FORMATS[request.param]


@pytest.fixture(params=tiers.formats(), ids=str)
def some_format(request: pytest.FixtureRequest) -> lowbit.Format:
    """For tests that are not about the values."""
    return FORMATS[request.param]


@pytest.fixture(params=tiers.mechanisms(), ids=str)
def format(request: pytest.FixtureRequest) -> lowbit.Format:
    return FORMATS[request.param]


def quantize_options(q: lowbit.QuantizedArray) -> dict[str, Any]:
    """What the class of an array must be told to quantize to the same format."""
    names = {Array1B: ("kind",), PackedArray: ("format_name",)}.get(type(q), ())
    return {name: getattr(q, name) for name in names}


def other_fields(q: lowbit.QuantizedArray) -> dict[str, Any]:
    """What the class must be told beside codes and scales to build the same array."""
    names = ("high", "offsets", "group_scales", "affine") if isinstance(q, PackedArray) else ()
    return {**quantize_options(q), **{name: getattr(q, name) for name in names}}


# --- fidelity


def test_error_and_bits_are_as_stated(every_format: lowbit.Format) -> None:
    w = gaussian(0, (4096, 64))
    q, layout = every_format.quantize(w), every_format.layout
    error = np.sqrt(np.mean((np.asarray(q.materialize()) - np.asarray(w)) ** 2))
    assert error == pytest.approx(every_format.error, rel=0.01)
    scales = (8 if layout and layout.scales else 32) / (q.block_size or 4096)
    groups = {"axis": 32 / 4096, "matrix": 32 / w.size, None: 0}[layout.group if layout else None]
    assert 8 * q.nbytes / q.size == pytest.approx(every_format.bits + scales + groups, rel=1e-6)


def test_double_quantization_costs_little() -> None:
    w = gaussian(0, (256, 4096))
    q, plain = ArrayNF4.quantize(w, double_quant=True), ArrayNF4.quantize(w)
    assert 8 * q.nbytes / q.size == pytest.approx(4.127, abs=5e-4)
    error, least = (float(jnp.mean((a.materialize() - w) ** 2)) for a in (q, plain))
    assert least == pytest.approx(0.00846, rel=0.01) and least <= error < 1.01 * least


SHAPES = [((100, 130),), ((7,),), ((3, 5, 77),), ((0, 64),), ((64, 0),), ((1, 1),), ((2, 3, 4, 65),)]


@pytest.mark.parametrize("shape", tiers.tiered(SHAPES, [((7,),), ((3, 5, 77),), ((0, 64),)]), ids=str)
def test_any_shape_is_kept(some_format: lowbit.Format, shape: tuple[int, ...]) -> None:
    w = gaussian(0, shape)
    for axis in (-1, -2)[: len(shape)]:
        q = some_format.quantize(w, axis=axis)
        dense = np.asarray(q.materialize())
        assert q.shape == dense.shape == shape
        transposed = q.T
        assert transposed.shape == shape[::-1]
        np.testing.assert_array_equal(transposed.materialize(), dense.T)
        assert np.linalg.norm(dense - w) <= 1.01 * np.linalg.norm(w)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_array_reads_in_its_own_dtype(some_format: lowbit.Format, dtype) -> None:
    w = gaussian(0, (64, 96), dtype)
    q = some_format.quantize(w)
    assert q.dtype == q.materialize().dtype == dtype and q.scale_values().dtype == jnp.float32
    assert some_format.quantize(w, dtype=jnp.float32).dtype == jnp.float32


@pytest.fixture
def float64():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def test_float64(float64) -> None:
    w = gaussian(0, (64, 32), jnp.float64)
    for name in tiers.KINDS_OF_FORMATS:
        q = FORMATS[name].quantize(w, axis=-2)
        x = gaussian(1, (4, 64), jnp.float64)
        assert (q.dtype, q.scale_values().dtype, (x @ q).dtype) == (jnp.float64, jnp.float32, jnp.float64)
        assert_close(x @ q, x @ q.materialize(), 1e-13)
    with pytest.raises(ValueError, match=r"1 of 2048 values are NaN or infinite in float32.*1e\+300 at \(3, 4\)"):
        Array8B.quantize(w.at[3, 4].set(1e300))


def test_small_weights_keep_their_precision(some_format: lowbit.Format) -> None:
    w = np.asarray(gaussian(0, (64, 512)))
    for scale, dtype in ((1e-4, jnp.float16), (1e-6, jnp.bfloat16), (1e-30, jnp.float32)):
        q = some_format.quantize(jnp.asarray((w * np.float32(scale)).astype(dtype)), dtype=jnp.float32)
        relative = np.linalg.norm(np.asarray(q.materialize()) / scale - w) / np.linalg.norm(w)
        assert relative < 1.1 * some_format.error + 0.01


def test_int8_error_is_at_most_half_a_scale() -> None:
    w = gaussian(0, (64, 256))
    for options in ({}, {"axis": 1}, {"axis": (0, 1)}, {"axis": 0, "block_size": 24}):
        q = Array8B.quantize(w, **options)
        scales = blocks.spread(q.scales, q.spans, w.shape)
        assert jnp.all(jnp.abs(q.materialize() - w) <= scales / 2 * (1 + 1e-5))
        assert q.weight.dtype == jnp.int8 and jnp.abs(q.weight).max() == 127
        np.testing.assert_array_equal(q.materialize(), q.weight * scales)
    assert Array8B.quantize(w, axis=0, block_size=24).scale.shape == (3, 256)
    assert Array8B.quantize(jnp.array([1.0, 2.5 / 127, 3.5 / 127, 0])).weight.tolist() == [127, 2, 4, 0]


def test_zeros_stay_zero(every_format: lowbit.Format) -> None:
    w = jnp.zeros((128, 4)).at[:, 1].set(1.0).at[:, 2].set(1e-40)  # the last is too small for a scale
    q, layout = every_format.quantize(w), every_format.layout
    dense = np.asarray(q.materialize())
    np.testing.assert_array_equal(dense[:, 0], np.zeros(128))
    np.testing.assert_allclose(dense[:, 2], np.zeros(128), atol=1e-39)
    # Four bits of a searched scale are its mantissa.
    rtol = 1 / 32 if layout and layout.scales and layout.weighting else 1e-6
    np.testing.assert_allclose(dense[:, 1], np.ones(128), rtol=rtol)


def test_scales_are_of_those_that_share_them(some_format: lowbit.Format) -> None:
    stack = gaussian(0, (3, 64, 128)) * jnp.array([1.0, 5.0, 0.1])[:, None, None]
    for axis in (-1, -2):
        each = jax.jit(jax.vmap(lambda w, axis=axis: some_format.quantize(w, axis=axis)))
        assert_same_bits(some_format.quantize(stack, axis=axis), each(stack))


def test_scales_of_scales_are_of_each_matrix() -> None:
    stack = gaussian(0, (3, 64, 128)) * jnp.array([1.0, 5.0, 0.1])[:, None, None]
    nested = ArrayNF4.quantize(stack, double_quant=True)
    each = jax.vmap(lambda w: ArrayNF4.quantize(w, double_quant=True))(stack)
    assert_close(nested, each, 1e-6)
    assert nested.shape == each.shape == stack.shape and nested[1].shape == (64, 128)


# --- NF4


GOLDEN_CASES = {case["name"]: case for case in json.loads(str(GOLDEN["info"]))["cases"]}
# Each dtype, each block size, several groups of 256 scales, and values at the edges of the levels.
FIRST_CASES = ("float32_36x576_b64", "float16_2x4096_b128", "bfloat16_4x576_b64", "edges")


@pytest.mark.parametrize("golden", tiers.tiered(GOLDEN_CASES, FIRST_CASES))
def test_nf4_bits_are_those_of_bitsandbytes(golden: str) -> None:
    case = GOLDEN_CASES[golden]

    def stored(name: str) -> np.ndarray:
        return GOLDEN[f"{case['name']}/{name}"]

    if "seed" in case:
        w = np.random.default_rng(case["seed"]).standard_normal(case["shape"], dtype=np.float32) * np.float32(0.02)
        w = w.astype(getattr(ml_dtypes, case["dtype"], case["dtype"]))
    else:
        w = stored("input")
    assert zlib.crc32(w.tobytes()) == case["input_crc32"]
    q = ArrayNF4.quantize(w, axis=-1, block_size=case["block"])
    np.testing.assert_array_equal(np.asarray(q.packed).ravel(), stored("codes"))
    np.testing.assert_array_equal(np.asarray(q.absmax).ravel(), stored("absmax"))

    nested = ArrayNF4.quantize(w, axis=-1, block_size=case["block"], double_quant=True)
    np.testing.assert_array_equal(np.asarray(nested.packed).ravel(), stored("codes"))
    np.testing.assert_array_equal(np.asarray(nested.scales).ravel(), stored("nested_absmax_codes"))
    # The mean of the scales depends on the order of its sum, by an ulp or two.
    offset = stored("nested_offset")
    np.testing.assert_allclose(nested.offset.ravel()[0], offset, rtol=3e-7)
    np.testing.assert_allclose(nested.group_absmax.ravel(), stored("nested_absmax"), atol=3e-7 * offset)
    np.testing.assert_allclose(np.asarray(nested.absmax).ravel(), stored("nested_scales"), rtol=5e-7)
    for array, name in ((q, "dequantized"), (nested, "nested_dequantized")):
        if f"{case['name']}/{name}" in GOLDEN:
            np.testing.assert_allclose(np.asarray(array.materialize(), np.float32), stored(name), rtol=8e-3, atol=1e-9)


def test_nf4_tables_are_those_of_bitsandbytes() -> None:
    np.testing.assert_array_equal(nf4.LEVELS, GOLDEN["nf4_code"])
    np.testing.assert_array_equal(nf4.dynamic_map(), GOLDEN["nested_code"])


def test_nf4_decodes_the_table_exactly() -> None:
    w = np.tile(nf4.LEVELS, 4)[None] * np.float32(3)
    np.testing.assert_array_equal(ArrayNF4.quantize(w, axis=-1).materialize(), w)
    assert (jnp.ones((32, 128)) @ ArrayNF4.quantize(jnp.ones((128, 256)), block_size=64) == 128).all()


def test_nf4_takes_the_lower_level_on_a_midpoint() -> None:
    midpoints = (nf4.LEVELS[:-1] + nf4.LEVELS[1:]) / np.float32(2)
    q = ArrayNF4.quantize(np.array([*midpoints, 1], np.float32), block_size=16)  # the scale is 1
    assert blocks.unpack(q.codes, 2).tolist() == list(range(16))


@pytest.mark.parametrize("block", [16, 32, 128, 4096])
def test_nf4_blocks(block: int) -> None:
    w = gaussian(0, (3, 5000))
    q = ArrayNF4.quantize(w, axis=-1, block_size=block)
    assert (q.block_size, q.absmax.shape, q.packed.shape) == (block, (3, -(-5000 // block)), (3, 2500))
    np.testing.assert_array_equal(q.absmax[:, 0], jnp.abs(w[:, :block]).max(1))
    np.testing.assert_array_equal(q.absmax[:, -1], jnp.abs(w[:, 5000 // block * block :]).max(1))


def test_int8_with_a_given_scale_is_clipped_on_both_sides() -> None:
    q = Array8B.quantize(jnp.array([[-10.0, 10.0, 0.1]]), axis=-1, scale=jnp.full((1, 1), 0.05))
    assert q.weight.tolist() == [[-127, 127, 2]]


# --- ternary and binary


def test_ternary_scale_has_the_least_squares() -> None:
    w = gaussian(0, (8, 512))
    q = Array1B.quantize(w, axis=-1)
    codes = jnp.round(q.materialize() / q.scale)
    assert set(np.unique(codes)) == {-1, 0, 1}
    np.testing.assert_array_equal(codes == 0, jnp.abs(w) <= 0.5 * w.std(1, keepdims=True))
    best = (w * codes).sum(1, keepdims=True) / (codes**2).sum(1, keepdims=True)
    np.testing.assert_allclose(q.scale, best, rtol=1e-6)
    assert (jnp.abs(Array1B.quantize(w, axis=-1, threshold=1.0).materialize()) > 0).mean() == (jnp.abs(w) > 1).mean()


def test_binary_is_the_sign_by_the_mean() -> None:
    w = gaussian(0, (8, 512)).at[0, 0].set(0)
    q = Array1B.quantize(w, axis=-1, kind="binary")
    np.testing.assert_allclose(q.scale, jnp.abs(w).mean(1, keepdims=True), rtol=1e-6)
    np.testing.assert_array_equal(jnp.sign(q.materialize()), jnp.where(w >= 0, 1, -1))
    bare = Array1B.quantize(w, kind="binary", scale=False)
    assert set(np.unique(bare.materialize())) == {-1, 1}


def test_integers_are_kept_exactly() -> None:
    codes = jnp.array([[-1, 0, 1, 1], [1, -1, 0, 0]], jnp.int8)
    q = Array1B.quantize(codes)
    assert q.dtype == jnp.int8
    np.testing.assert_array_equal(q.materialize(), codes)
    signs = jnp.where(codes >= 0, 1, -1).astype(jnp.int32)
    np.testing.assert_array_equal(Array1B.quantize(signs, kind="binary").materialize(), signs)
    x = jnp.arange(6.0).reshape(3, 2)
    np.testing.assert_array_equal(x @ q, x @ codes)


# --- constructors and views


def test_a_class_called_with_an_array_quantizes(any_layout: Layout) -> None:
    layout, w = any_layout, gaussian(0, (64, 96))
    q = layout.quantize(w)
    block = {} if layout.block_size is None else {"block_size": layout.block_size}
    assert_same_bits(type(q)(w, axis=layout.axis, **block, **quantize_options(q), **dict(layout.options)), q)
    options = other_fields(q)
    first, second = (getattr(q, name) for name in q.component_names)
    again = type(q)(first, second, block_size=q.block_size, **options)
    assert_same_bits(again, q)
    named = type(q)(**dict(zip(q.component_names, (first, second), strict=True)), block_size=q.block_size, **options)
    assert_same_bits(named, q)


def test_views_read_in_the_order_of_the_array(layout: Layout) -> None:
    q = layout.quantize(gaussian(0, (64, 96)))
    assert q.axis == layout.axis
    assert q.T.axis == -3 - layout.axis
    for name in q.component_names:
        np.testing.assert_array_equal(getattr(q.T, name), getattr(q, name).T)


def test_nothing_changes_its_operand(layout: Layout) -> None:
    q = layout.quantize(jnp.ones((64, 96)))
    half = q.astype(jnp.bfloat16)
    assert (half.dtype, q.dtype, half.materialize().dtype) == (jnp.bfloat16, jnp.float32, jnp.bfloat16)
    with pytest.raises(AttributeError):
        q.dtype = jnp.bfloat16
    with pytest.raises(AttributeError):
        del q.codes


def test_delete_frees_the_components(layout: Layout) -> None:
    q = layout.quantize(jnp.ones((64, 96)))
    q.delete()
    assert all(component.is_deleted() for component in jax.tree.leaves(q))


@tiers.DEVICES
def test_repr_tells_format_shape_dtype_and_bytes() -> None:
    q = ArrayNF4.quantize(jnp.ones((64, 96)), axis=0)
    assert repr(q) == (
        "ArrayNF4('nf4', shape=(64, 96), dtype=float32, axis=-2, block_size=64, 4.5 bits per weight, 3,456 bytes\n"
        "  codes uint8[64,48], scales float32[1,96])"
    )
    ternary, binary = (lowbit.quantize(jnp.ones((4, 8)), name) for name in ("ternary", "binary"))
    assert repr(ternary).startswith("Array1B('ternary'") and repr(binary).startswith("Array1B('binary'")
    types = jax.eval_shape(lambda: q)
    assert repr(types) == repr(q)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    columns = NamedSharding(mesh, PartitionSpec(None, "x"))
    assert "sharded over {'x': 2} as PartitionSpec(None, 'x')" in repr(q.with_sharding(columns)).replace(
        "P(", "PartitionSpec("
    )
    assert "codes=NamedSharding" in repr(lowbit.shardings(q, columns))


def test_components_of_ternary_need_no_kind() -> None:
    q = Array1B.quantize(gaussian(0, (4, 8)))
    assert_same_bits(Array1B(q.weight, q.scale), q)
    with pytest.raises(TypeError, match="takes one array to quantize, or its components weight, scale, and got 3"):
        Array1B(q.weight, q.scale, "ternary")


@pytest.mark.parametrize("size", tiers.tiered([1e38, 3e38, 1e-35], [3e38, 1e-35]))
def test_the_largest_and_the_smallest_floats(format: lowbit.Format, size: float) -> None:
    layout = format.layout
    # Of magnitudes below these the scale is not a normal float32.
    steps = layout.levels.largest * (layout.scales.largest if layout.group else 1) if layout else 1
    signs = np.array([[1, -1] * 32], np.float32)
    size = np.float32(max(size, 4e-38 * steps))
    # Integers of few bits are not symmetric: the best scale of int2 represents -1.2 and 0.6 for -1 and 1.
    if format.name == "int2":
        size = min(size, np.float32(2.5e38))
    values = np.asarray(format.quantize(jnp.asarray(size * signs), axis=-1).materialize()) / size
    if layout is None or (layout.scales is None and format.name not in ("int2", "int3")):
        np.testing.assert_allclose(values, signs, rtol=1e-5)
    else:
        # All weights have the same magnitude, which may lie in the middle of 4 and 6, the widest gap of mxfp4.
        most = 0.2 if format.name == "mxfp4" else format.error
        assert np.linalg.norm(values - signs) <= most * np.linalg.norm(signs)


def test_empty_with_double_quantization() -> None:
    assert ArrayNF4.quantize(jnp.zeros((0, 4, 64)), double_quant=True).materialize().shape == (0, 4, 64)


# --- bad input


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_not_finite_raises_eagerly_and_reads_as_nan_under_jit(layout: Layout, bad: float) -> None:
    w = jnp.ones((64, 96)).at[33, 5].set(bad)
    with pytest.raises(
        ValueError, match=rf"1 of 6144 values are NaN or infinite in float32, the first is {bad} at \(33, 5\)"
    ):
        layout.as_called(w)
    got = jax.jit(layout.as_called)(w).materialize()
    clean = layout.quantize(jnp.ones((64, 96))).materialize()
    block = layout.spans or 96
    spoiled = np.zeros((64, 96), bool)
    if layout.axis == -1:
        spoiled[33, 5 // block * block : 5 // block * block + block] = True
    else:
        spoiled[33 // block * block : 33 // block * block + block, 5] = True
    np.testing.assert_array_equal(jnp.isnan(got), spoiled)
    np.testing.assert_array_equal(got[~spoiled], clean[~spoiled])


def test_not_finite_with_double_quantization_spoils_its_group_only() -> None:
    w = gaussian(0, (64, 1024))
    bad = w.at[0, 0].set(jnp.nan)
    with pytest.raises(ValueError, match=r"the first is nan at \(0, 0\)"):
        ArrayNF4.quantize(bad, axis=-1, double_quant=True)
    got = jax.jit(lambda w: ArrayNF4.quantize(w, axis=-1, double_quant=True))(bad).materialize()
    assert jnp.isnan(got[:16]).all() and not jnp.isnan(got[16:]).any()  # 16 rows of 16 scales


def test_bare_codes_of_nan_raise() -> None:
    with pytest.raises(ValueError, match="1 of 4 values are NaN"):
        Array1B.quantize(jnp.array([1.0, jnp.nan, 2, 3]), scale=False)


def test_errors_say_what_to_do(some_format: lowbit.Format) -> None:
    name = some_format.name
    with pytest.raises(TypeError) as error:
        some_format.quantize(jnp.ones((2, 2), jnp.complex64))
    assert str(error.value) == (
        f"Cannot quantize an array of dtype complex64 to '{name}': pass a floating-point array, "
        "for instance array.astype(jnp.float32)."
    )
    with pytest.raises(ValueError) as error:
        some_format.quantize(jnp.float32(1))
    assert str(error.value) == f"Cannot quantize a scalar to '{name}': pass an array with at least one axis."
    with pytest.raises(ValueError) as error:
        some_format.quantize(jnp.ones((2, 3)), axis=5)
    assert str(error.value) == "axis 5 is out of range for an array of shape (2, 3)."
    q = some_format.quantize(jnp.ones((2, 3)))
    with pytest.raises(TypeError) as error:
        some_format.quantize(q)
    assert str(error.value) == (
        f"Cannot quantize a {type(q).__name__} to '{name}': it is quantized already. "
        "Pass its .materialize() to quantize it again."
    )


def test_errors_of_single_formats() -> None:
    w = jnp.ones((4, 8))
    cases = [
        (lambda: ArrayNF4.quantize(w, block_size=48), "block_size=48 must be a power of two from 16 to 4096."),
        (
            lambda: Array8B.quantize(w, block_size=0),
            "block_size=0 must be at least 1, or None for one scale along the whole axis.",
        ),
        (
            lambda: Array1B.quantize(w, kind="unary"),
            "Unknown kind 'unary' of Array1B: it must be 'ternary' or 'binary'.",
        ),
        (
            lambda: Array1B.quantize(w, kind="binary", threshold=1),
            "threshold=1 is for kind='ternary': binary keeps every sign.",
        ),
        (
            lambda: Array1B.quantize(jnp.array([0, 5, 7])),
            "Cannot store integers as 'ternary': 2 of 3 values are not in (-1, 0, 1), the first is 5 at (1,). "
            "Pass floating-point weights to have them rounded.",
        ),
        (
            lambda: Array1B.quantize(jnp.array([0, 1]), kind="binary"),
            "Cannot store integers as 'binary': 1 of 2 values are not in (-1, 1), the first is 0 at (0,). "
            "Pass floating-point weights to have them rounded.",
        ),
    ]
    for call, message in cases:
        with pytest.raises(ValueError) as error:
            call()
        assert str(error.value) == message
    with pytest.raises(TypeError) as error:
        Array8B(weight=jnp.ones((2, 2), jnp.int8), zero_point=0)
    assert str(error.value) == "Array8B is made of weight, scale: missing ['scale'], not known ['zero_point']."
    with pytest.raises(TypeError, match="dtype=int32 for 'int8': a scaled array must have a floating-point dtype"):
        Array8B.quantize(w, dtype=jnp.int32)
    with pytest.raises(TypeError, match="Cannot quantize an array of dtype int32 to 'int8'"):
        Array8B.quantize(jnp.ones((2, 2), jnp.int32))


# --- from components


@pytest.mark.parametrize("columns", tiers.tiered([100, 96, 128, 99], [128, 99]))
def test_components_that_do_not_decide_the_block_size_ask_for_it(some_format: lowbit.Format, columns: int) -> None:
    w = gaussian(0, (8, columns))
    q = some_format.quantize(w, axis=-1, block_size=64)
    components = {name: getattr(q, name) for name in q.component_names} | other_fields(q) | {"shape": w.shape}
    assert_same_bits(type(q)(**components, block_size=64), q)
    assert_same_bits(type(q)(**components, axis=-1, block_size=64), q)
    for told in ({}, {"axis": -1}):
        if some_format.name == "nf4":  # 64 is the only power of two that gives two blocks
            assert_same_bits(type(q)(**components, **told), q)
            continue
        fits = rf"from {-(-columns // 2)} to {columns - 1}"
        with pytest.raises(ValueError, match=rf"2 scales for the {columns} elements of axis -1, .*{fits}.*block_size="):
            type(q)(**components, **told)


def test_a_block_size_that_the_components_decide_need_not_be_given() -> None:
    w = gaussian(0, (12, 8))
    for block in (1, 2, 3, 12):
        q = Array8B.quantize(w, axis=0, block_size=block)
        np.testing.assert_array_equal(Array8B(weight=q.weight, scale=q.scale).materialize(), q.materialize())
    q = ArrayNF4.quantize(gaussian(1, (3, 200)), 64, axis=-1)
    assert_same_bits(ArrayNF4(packed=q.packed, absmax=q.absmax), q)
    with pytest.raises(ValueError, match="4 scales for the 24 elements of axis -1, which no block size of the format"):
        ArrayNF4(packed=q.packed[:, :12], absmax=q.absmax)


def test_a_last_byte_that_may_not_be_full_leaves_the_block_size_open() -> None:
    q = Array1B.quantize(jnp.linspace(-1, 1, 12)[None], axis=-1, kind="binary", block_size=2)
    assert_same_bits(Array1B(weight=q.weight, scale=q.scale, kind="binary", shape=(1, 12)), q)
    with pytest.raises(ValueError, match="6 scales for the 16 elements of axis -1"):
        Array1B(weight=q.weight, scale=q.scale, kind="binary")
