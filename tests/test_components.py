"""Components whose dtypes were changed by a cast of the whole tree, and dtypes and codes that no format allows."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from helpers import AFFINE, Layout, assert_close, assert_same_bits, gaussian
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_rules import MOVES

import lowbit
import lowbit.kernels.gpu.kernel
import lowbit.kernels.tpu.kernel
from lowbit import implicit
from lowbit.io import GGUFFile
from lowbit.io.bitsandbytes import bitsandbytes_tensors
from lowbit.io.gguf_writer import write_gguf
from lowbit.io.readers import LowbitFile
from lowbit.kernels import gpu, tpu
from lowbit.kernels.product import Product
from lowbit.ops.squares import squares

NARROW = [jnp.bfloat16, jnp.float16]


def cast(tree: Any, dtype: Any) -> Any:
    """Cast every floating-point component, as models are cast."""
    return jax.tree.map(lambda a: a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a, tree)


def pair(layout: Layout, dtype: Any, shape: tuple[int, ...] = (64, 96)) -> tuple[Any, Any]:
    """An array whose scales are narrow, and one with the same scales in float32."""
    narrow = cast(layout.quantize(gaussian(0, shape)), dtype)
    return narrow, cast(narrow, jnp.float32)


def float_scales(array: Any) -> jax.Array:
    """The component that a cast makes narrow: the scales, or the group scales if scales are codes."""
    groups = getattr(array, "group_scales", None)
    return array.scales if groups is None else groups


def expected(layout: Layout, dtype: Any) -> Any:
    """The dtype of `float_scales` after a cast. The scales of mxfp4 are codes alone, which no cast changes."""
    return jnp.uint8 if layout.format == "mxfp4" else dtype


def normal(*shape: int) -> jax.Array:
    return gaussian(7, shape)


PROGRAMS = {
    "product": lambda w: normal(8, 64) @ w,
    "fast product": lambda w: normal(8, 64) @ w.replace(compute="fast"),
    "product from the left": lambda w: w @ normal(96, 3),
    "product with the transpose": lambda w: normal(8, 96) @ w.T,
    "narrow product": lambda w: normal(8, 64).astype(jnp.bfloat16) @ w.astype(jnp.bfloat16),
    "gradient": lambda w: jax.grad(lambda x: jnp.sin(x @ w).sum())(normal(8, 64)),
    "batched product": lambda w: jax.vmap(lambda x: x @ w)(normal(3, 8, 64)),
    "rows": lambda w: w[jnp.array([3, 60])],
    "rows of the transpose": lambda w: w.T[jnp.array([3, 60])],
    "values": lambda w: w.materialize(),
    "times a number": lambda w: (w * 3).materialize(),
    "divided by a number": lambda w: (w / 3).materialize(),
    "negative": lambda w: (-w).materialize(),
    "error": lambda w: squares(w, normal(64, 96)),
    "adapted product": lambda w: normal(8, 64) @ lowbit.LoraArray(w, normal(64, 2), normal(2, 96)),
}


# Scales, group scales, offsets.
@pytest.mark.first(Layout("int8", -2, None), tiers.ONE, Layout("int4", -2, None, AFFINE))
@pytest.mark.parametrize("dtype", tiers.tiered(NARROW, NARROW[:1]), ids=lambda dtype: dtype.__name__)
def test_narrow_scales_give_the_numbers_of_the_same_scales_in_float32(any_layout: Layout, dtype: Any) -> None:
    narrow, wide = pair(any_layout, dtype)
    assert float_scales(narrow).dtype == expected(any_layout, dtype)
    assert narrow.scale_values().dtype == jnp.float32
    run = jax.jit(lambda w: {name: program(w) for name, program in PROGRAMS.items()})
    with lowbit.materialization("allow"):  # packed rows of a transpose
        got, want = run(narrow), run(wide)
    for path, value in jax.tree_util.tree_leaves_with_path(jax.tree.map(lambda a, b: a.dtype == b.dtype, got, want)):
        assert value, path
    # A compiler may add squares in another order in another program.
    np.testing.assert_allclose(got.pop("error"), want.pop("error"), rtol=1e-6)
    jax.tree_util.tree_map_with_path(
        lambda path, a, b: np.testing.assert_array_equal(a, b, err_msg=str(path)), got, want
    )


def test_a_product_with_narrow_scales_runs_in_the_kernel() -> None:
    narrow, _ = pair(Layout("nf4", -2, 64), jnp.bfloat16, (64, 4096))
    text = jax.jit(lambda x, w: x @ w).lower(normal(8, 64), narrow).compile().as_text()
    assert "lowbit_matmul" in text and "f32[64,4096]" not in text


@pytest.mark.parametrize("move", MOVES, ids=str)
def test_moving_keeps_the_dtype_of_the_scales(move: str, layout: Layout) -> None:
    narrow, wide = pair(layout, jnp.bfloat16)
    rows = narrow.block_size == 64 and move in ("slice_of_rows", "split")  # not on the border of a block
    moved = MOVES["slice_of_columns" if rows else move]
    with lowbit.materialization("error"):
        got, want = (jax.jit(implicit(moved))(w) for w in (narrow, wide))
    # Scale codes of declared formats are decoded where they cannot be moved with their group scales, or are repeated.
    decoded = narrow.scales.dtype == jnp.uint8 and got.scales.dtype != jnp.uint8
    assert float_scales(got).dtype == (jnp.float32 if decoded else expected(layout, jnp.bfloat16))
    assert_same_bits(cast(got, jnp.float32), want)


def test_scales_of_different_dtypes_meet_in_the_wider(layout: Layout) -> None:
    a, b = (cast(layout.quantize(gaussian(i, (3, 64, 64))), jnp.float32) for i in range(2))
    narrow, half = cast(b, jnp.bfloat16), cast(b, jnp.float16)

    @jax.jit
    @implicit
    def meet(a: Any, b: Any) -> Any:
        return jnp.concatenate([a, b]), lax.dynamic_update_slice(a, b[:1], (1, 0, 0))

    with lowbit.materialization("error"):
        for other in (narrow, half):
            joined, written = meet(a, other)
            dense, added = (np.asarray(w.materialize()) for w in (a, other))
            assert_close(joined, np.concatenate([dense, added]), 0)
            assert_close(written, np.stack([dense[0], added[0], dense[2]]), 0)
            assert float_scales(joined).dtype == float_scales(written).dtype == expected(layout, jnp.float32)
        both = jax.jit(implicit(lambda a, b: jnp.stack([a, b])))(narrow, half)
    assert_close(both, np.stack([narrow.materialize(), half.materialize()]), 0)


@pytest.mark.parametrize("dtype", tiers.tiered(NARROW, NARROW[:1]), ids=lambda dtype: dtype.__name__)
def test_scales_of_scales_may_be_narrow(dtype: Any) -> None:
    q = lowbit.ArrayNF4.quantize(gaussian(0, (2, 128, 512)), axis=-2, double_quant=True)
    narrow = cast(q, dtype)
    wide = cast(narrow, jnp.float32)
    assert narrow.scales.dtype == jnp.uint8 and narrow.group_absmax.dtype == narrow.offset.dtype == dtype
    x = normal(8, 128)

    @jax.jit
    def programs(w: Any) -> list[jax.Array]:
        rows = implicit(lambda w: w[0, :, :64])(w).materialize()
        return [x @ w, w.materialize(), w[1][jnp.array([3])], w.mT @ x.T, w.absmax, rows]

    for got, want in zip(programs(narrow), programs(wide), strict=True):
        np.testing.assert_array_equal(got, want)
    assert_same_bits(
        cast(wide.plain(), dtype).with_coded_scales(), cast(cast(wide.plain(), dtype), jnp.float32).with_coded_scales()
    )


on_tpu = partial(tpu.kernel.matmul, chip="TPU v5")


@pytest.mark.first(Layout("nf4", -1, 16))
@pytest.mark.parametrize("contract", tiers.tiered([-2, -1], [-2]))
def test_narrow_scales_in_the_kernels_of_accelerators(layout: Layout, contract: int) -> None:
    narrow, wide = pair(layout, jnp.bfloat16, (128, 256))
    x = normal(5, narrow.shape[contract])
    for kernel, arithmetic in ((on_tpu, "exact"), (on_tpu, "fast"), (gpu.kernel.matmul, "exact")):
        multiply = jax.jit(partial(kernel, interpret=True))
        products = (Product(x, w, contract, jnp.float32, arithmetic=arithmetic) for w in (narrow, wide))
        np.testing.assert_array_equal(*map(multiply, products))


@tiers.DEVICES
@pytest.mark.first(*tiers.OF_FEATURES)
def test_narrow_scales_over_devices(layout: Layout) -> None:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    narrow, wide = pair(layout, jnp.bfloat16, (128, 256))
    x = normal(8, 128)
    for spec in (P(None, "x"), P("x", None)):
        a, b = (w.with_sharding(NamedSharding(mesh, spec)) for w in (narrow, wide))
        assert float_scales(a).dtype == expected(layout, jnp.bfloat16) and a.sharding.spec == spec
        for program in (lambda x, w: x @ w, lambda x, w: w[jnp.array([1, 100])], jax.grad(lambda x, w: (x @ w).sum())):
            np.testing.assert_array_equal(jax.jit(program)(x, a), jax.jit(program)(x, b))


def test_narrow_scales_in_files(layout: Layout, tmp_path: Path) -> None:
    params = {"w": pair(layout, jnp.bfloat16)[0], "b": jnp.ones(3, jnp.bfloat16)}
    lowbit.save(tmp_path / "narrow.safetensors", params)
    same = jax.eval_shape(lambda: params)
    other = jax.eval_shape(lambda: {**params, "w": cast(params["w"], jnp.float32)})
    for like in (None, same, other):  # the dtype of the scales does not have to match
        assert_same_bits(lowbit.load(tmp_path / "narrow.safetensors", like)["w"], params["w"])


def test_narrow_scales_are_written_to_gguf_and_bitsandbytes(tmp_path: Path) -> None:
    w = gaussian(0, (4, 256))
    narrow = cast(lowbit.Array8B.quantize(w, axis=-1, block_size=32), jnp.float16)  # the scales of Q8_0
    write_gguf(tmp_path / "narrow.gguf", {"w": narrow}, {}, type="Q8_0")
    assert_same_bits(GGUFFile(tmp_path / "narrow.gguf").array("w"), narrow)
    for double_quant in (False, True):
        narrow = cast(lowbit.ArrayNF4.quantize(w, axis=-1, double_quant=double_quant), jnp.bfloat16)
        got, want = (bitsandbytes_tensors("w", a) for a in (narrow, cast(narrow, jnp.float32)))
        assert {name: tensor.dtype for name, tensor in got.items()} == {name: t.dtype for name, t in want.items()}
        for name in want:
            np.testing.assert_array_equal(got[name], want[name])


# --- dtypes that no format allows


def wrong(tree: Any, **fields: Any) -> Any:
    return tree.replace(**{name: getattr(tree, name).astype(dtype) for name, dtype in fields.items()})


USES = {
    "shape": lambda w: w.shape,
    "size": lambda w: w.size,
    "values": lambda w: w.materialize(),
    "product": lambda w: jnp.ones((2, 64)) @ w,
    "compiled product": lambda w: jax.jit(lambda x, w: x @ w)(jnp.ones((2, 64)), w),
    "transpose": lambda w: w.T,
    "cast": lambda w: w.astype(jnp.bfloat16),
    "implicit": lambda w: implicit(jnp.dot)(jnp.ones((2, 64)), w),
    "adapter": lambda w: (
        jnp.ones((2, 64)) @ lowbit.LoraArray._unflatten((1.0, 1), (w, jnp.ones((64, 2)), jnp.ones((2, 96))))
    ),
    "sharding": lambda w: lowbit.specs(w, P()),
}


@pytest.mark.parametrize("use", USES, ids=str)
def test_a_component_of_another_dtype_raises_at_the_first_use(use: str, layout: Layout) -> None:
    q = layout.quantize(jnp.ones((64, 96)))
    cases = {"codes": (jnp.int32, jnp.float32, jnp.bfloat16, bool), "scales": (jnp.int32, jnp.int8, jnp.float8_e4m3fn)}
    for component, dtypes in cases.items():
        for dtype in dtypes:
            mapped = wrong(q, **{component: dtype})
            remedy = r"lowbit\.tree_map.*is_leaf=lowbit\.is_quantized"
            with pytest.raises(TypeError, match=rf"{component} .*{type(q).__name__}.*{np.dtype(dtype).name}.*{remedy}"):
                USES[use](mapped)
            assert "and the format stores" in repr(mapped)


def test_the_usual_mistakes_raise() -> None:
    q = lowbit.quantize(jnp.ones((64, 96)), "nf4")
    for mistake in (lambda a: a.astype(jnp.bfloat16), lambda a: a / 2, lambda a: 0.5 * a, lambda a: a - a.mean()):
        with pytest.raises(TypeError, match=r"codes .*ArrayNF4.*lowbit\.tree_map"):
            jnp.ones((2, 64)) @ jax.tree.map(mistake, q)


def test_placeholders_that_jax_puts_for_components_are_accepted(layout: Layout) -> None:
    q = layout.quantize(jnp.ones((64, 96)))
    for make in (lambda a: None, lambda a: True, lambda a: P(), lambda a: a.dtype, lambda a: jax.typeof(a)):
        jax.tree.map(make, q)
    assert jax.eval_shape(lambda: q).shape == (64, 96)
    grads = jax.grad(lambda q: q.materialize().sum(), allow_int=True)(q)
    assert grads.codes.dtype == jax.dtypes.float0 and grads.shape == (64, 96)
    assert jax.tree.map(jnp.zeros_like, q).shape == (64, 96)


# --- codes that no format allows


def test_codes_out_of_range_raise_when_an_array_is_built() -> None:
    packed = jnp.array([[0b00011000, 0b10100111]], jnp.uint8)
    with pytest.raises(ValueError, match=r"1 of .* codes of this Array1B .* 0 to 2.* first is 3 at \(0, 7\)"):
        lowbit.Array1B(weight=packed, scale=jnp.ones((1, 1)))
    assert lowbit.Array1B(weight=packed, scale=jnp.ones((1, 1)), kind="binary").shape == (1, 16)
    made = jax.jit(lambda codes: lowbit.Array1B(weight=codes, scale=jnp.ones((1, 1))))(packed)  # not known when traced
    assert made.shape == (1, 8)
    # lowbit never writes -128, but Q8_0 in GGUF has it, and it is read as there.
    lowest = lowbit.Array8B(weight=jnp.full((1, 4), -128, jnp.int8), scale=jnp.ones((1, 1)))
    assert_close(lowest, jnp.full((1, 4), -128.0), 0)


def test_codes_out_of_range_in_a_file_raise(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    q = lowbit.Array1B(jnp.ones((4, 6)))
    lowbit.save(path, {"layers": [q.replace(codes=q.codes.at[3, 0].set(0b10110000))]})
    message = r"1 of 32 codes of this Array1B .* 0 to 2: the first is 3 at \(3, 1\)"
    with pytest.raises(ValueError, match=rf"model\.safetensors: 'layers/0': {message}"):
        lowbit.load(path)
    with pytest.raises(ValueError, match=message):
        LowbitFile(path).array("layers/0")


# --- trees


def params() -> dict[str, Any]:
    return {"w": lowbit.quantize(normal(64, 96), "nf4"), "norm": jnp.ones(64), "layers": [lowbit.Array8B(normal(8, 8))]}


def test_tree_map_has_quantized_arrays_for_leaves() -> None:
    tree = params()
    doubled = lowbit.tree_map(lambda a: a * 2, tree)
    assert_close(doubled, jax.tree.map(lambda a: a * 2, lowbit.materialize(tree)), 1e-6)
    assert_same_bits(doubled["w"].replace(scales=tree["w"].scales), tree["w"])
    half = lowbit.tree_map(lambda a: a.astype(jnp.bfloat16), tree)
    assert {a.dtype for a in jax.tree.leaves(half, is_leaf=lowbit.is_quantized)} == {jnp.dtype(jnp.bfloat16)}
    assert half["w"].codes.dtype == jnp.uint8
    sizes = lowbit.tree_map(lambda a, b: (a.size, b.shape), tree, lowbit.materialize(tree))
    assert sizes == {"w": (64 * 96, (64, 96)), "norm": (64, (64,)), "layers": [(64, (8, 8))]}
    pairs = lowbit.tree_map(lambda a: a, {"w": (1, 2), "q": tree["w"]}, is_leaf=lambda x: isinstance(x, tuple))
    assert pairs["w"] == (1, 2) and pairs["q"] is tree["w"]


def test_is_quantized_tells_a_quantized_array() -> None:
    tree = params()
    assert jax.tree.map(lowbit.is_quantized, tree, is_leaf=lowbit.is_quantized) == {
        "w": True,
        "norm": False,
        "layers": [True],
    }
    assert not any(map(lowbit.is_quantized, (tree, None, 3, jnp.ones(2), tree["w"].codes)))
    adapted = lowbit.lora({"w": tree["w"]}, "w", key=jax.random.key(0))["w"]
    assert not lowbit.is_quantized(adapted) and lowbit.is_quantized(adapted.base)
