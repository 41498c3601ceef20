"""Layouts of other projects' files: group scales of superblocks, offsets in codes, zero points."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from helpers import assert_close, assert_same_bits, together

import lowbit
from lowbit.formats import pack
from lowbit.formats.file_layouts import FILE_LAYOUTS
from lowbit.formats.packed import PackedArray

OFFSETS = ("q2_k", "q4_k", "q5_k")
K, N = 512, 24
RNG = np.random.default_rng(0)


def codes_of(layout: Any, *shape: int) -> tuple[np.ndarray, dict[str, jax.Array]]:
    """Random codes, and the components that store them."""
    codes = RNG.integers(0, 2**layout.levels.bits, shape).astype(np.uint8)
    low = 8 // layout.packing["codes"]
    split = {"codes": codes & (2**low - 1), "high": codes >> low}
    return codes, {name: pack(jnp.asarray(split[name]), n) for name, n in layout.packing.items()}


def a_file_array(name: str, *lead: int) -> tuple[PackedArray, np.ndarray]:
    """An array of a layout, stored (n, k) with blocks along k, and its values by plain numpy in float32."""
    layout = FILE_LAYOUTS[name]
    shape = (*lead, N, K)
    codes, components = codes_of(layout, *shape)
    blocks = (*shape[:-1], K // (layout.block_size or K))

    def spread(x: np.ndarray) -> np.ndarray:
        return np.repeat(x, K // x.shape[-1], -1)

    def group() -> np.ndarray:
        length = {"matrix": (*lead, 1, 1), None: ()}.get(layout.group, (*shape[:-1], K // 256))
        return (RNG.random(length) + 0.5).astype(np.float16)

    levels = layout.levels.table[codes]
    if layout.scales is None:
        scales = RNG.standard_normal(blocks).astype(np.float16)
        values = levels * spread(scales.astype(np.float32))
        return built(name, shape, **components, scales=scales), values
    stored = RNG.integers(0, 2 ** min(layout.scales.bits, 6), blocks).astype(np.uint8)
    scales, found = layout.scales.table[stored], {"scales": stored}
    if layout.group is not None:
        found["group_scales"] = group()
        wide = found["group_scales"].astype(np.float32)
        wide = np.repeat(wide, scales.shape[-1] // wide.shape[-1], -1)
        scales = scales / wide if layout.group_divides else scales * wide
    values = levels * spread(scales)
    if name in OFFSETS:
        found["offsets"] = RNG.integers(0, 2**layout.scales.bits, blocks).astype(np.uint8)
        found["group_offsets"] = group()
        wide = np.repeat(found["group_offsets"].astype(np.float32), blocks[-1] // (K // 256), -1)
        values = values - spread(wide * found["offsets"])
    return built(name, shape, **components, **found), values


def built(name: str, shape: tuple[int, ...], *, spans: tuple[int, int] | None = None, **fields: Any) -> PackedArray:
    layout = FILE_LAYOUTS.get(name)
    spans = spans or (1, layout.block_size if layout and layout.block_size else 32)
    affine = fields.pop("affine", False)
    fields = {key: jnp.asarray(value) for key, value in fields.items()}
    return PackedArray.build(shape=shape, dtype=jnp.float32, spans=spans, format_name=name, affine=affine, **fields)


def zero_points(dtype: Any, name: str = "int4") -> tuple[PackedArray, np.ndarray]:
    """Integers with zero points, as GPTQ and AWQ store them."""
    layout = lowbit.FORMATS[name].layout or FILE_LAYOUTS["uint8"]
    codes, components = codes_of(layout, N, K)
    scales = jnp.asarray(RNG.standard_normal((N, K // 64)), dtype)
    zeros = RNG.integers(0, 2**layout.levels.bits, (N, K // 64)).astype(np.uint8)
    wide = (np.repeat(x, 64, -1) for x in (zeros.astype(np.float32), np.asarray(scales, np.float32)))
    zero, scale = wide
    q = built(name, (N, K), spans=(1, 64), affine=True, **components, scales=scales, offsets=zeros)
    return q, (codes.astype(np.float32) - zero) * scale


CASES = [*FILE_LAYOUTS, "zeros"]


def case(name: str) -> tuple[PackedArray, np.ndarray]:
    return zero_points(jnp.float16) if name == "zeros" else a_file_array(name)


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_formula_to_the_bit(name: str) -> None:
    q, want = case(name)
    np.testing.assert_array_equal(q.materialize(), want)
    np.testing.assert_array_equal(q[jnp.array([3, 0, 3])], want[[3, 0, 3]])
    assert q.T.shape == (K, N) and repr(q.format_name) in repr(q)


ZEROS = [*itertools.product(["int2", "int3", "int4"], [jnp.float32, jnp.float16, jnp.bfloat16])]


@pytest.mark.parametrize(("name", "dtype"), tiers.tiered(ZEROS, ZEROS[::4]))  # each name and each dtype once
def test_zero_points(name: str, dtype: Any) -> None:
    q, want = zero_points(dtype, name)
    np.testing.assert_array_equal(q.materialize(), want)
    np.testing.assert_array_equal(q[jnp.array([3, 0])], want[[3, 0]])
    np.testing.assert_array_equal((q * 2).materialize(), 2 * want)
    assert q.nbytes == q.codes.nbytes + (q.high.nbytes if q.high is not None else 0) + q.scales.nbytes + N * K // 64


@pytest.mark.parametrize("name", CASES)
def test_products_slices_and_gradients_agree_with_the_dense_array(name: str) -> None:
    q, w = case(name)
    x, y = (jnp.asarray(RNG.standard_normal((3, n)), jnp.float32) for n in (K, N))
    cotangents = [jnp.asarray(RNG.standard_normal(along), jnp.float32) for along in ((3, N), (N, 3))]

    @jax.jit
    @lowbit.implicit
    def products(w: Any, x: jax.Array, y: jax.Array, cotangents: Any) -> Any:
        fns = (lambda x: x @ w.T, lambda x: jnp.einsum("nk,bk->nb", w, x))
        backward = [jax.vjp(fn, x)[1](cotangent) for fn, cotangent in zip(fns, cotangents, strict=True)]
        return x @ w.T, y @ w, backward

    moved = (
        lambda w: w[4:8],
        lambda w: w[:, 256:],
        lambda w: w[:, 128:384],
        lambda w: w.reshape(4, N // 4, K),
        lambda w: jnp.concatenate([w, w]),
        lambda w: w[:, None].transpose(1, 2, 0),
    )
    with lowbit.materialization("error"):
        assert_close(products(q, x, y, cotangents), products(w, x, y, cotangents))
        for got, fn in zip(together(*moved)(q), moved, strict=True):
            np.testing.assert_array_equal(got, fn(w))


@pytest.mark.parametrize("name", ["q4_k", "iq4_xs"])
def test_layers_of_a_stack(name: str) -> None:
    q, w = a_file_array(name, 3)
    x = jnp.asarray(RNG.standard_normal((2, K)), jnp.float32)

    def run(w: Any, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (x, jnp.tanh(x @ w.T)), x, w)[1]

    with lowbit.materialization("error"):
        assert_close(lowbit.implicit(run)(q, x), run(jnp.asarray(w), x))


@pytest.mark.parametrize("name", CASES)
def test_files_keep_the_bits(name: str, tmp_path: Any) -> None:
    q, _ = case(name)
    lowbit.save(tmp_path / "a.safetensors", {"w": q})
    assert_same_bits(lowbit.load(tmp_path / "a.safetensors")["w"], q)


def test_zero_points_do_not_join_float_offsets() -> None:
    zeros, w = zero_points(jnp.float32)
    floats = zeros.replace(offsets=zeros.offset_values())
    joined = lowbit.implicit(lambda a, b: jnp.concatenate([a, b]))
    with lowbit.materialization("allow"):
        assert_close(joined(zeros, floats), np.concatenate([w, w]))
    np.testing.assert_array_equal(joined(zeros, zeros).materialize(), np.concatenate([w, w]))


@pytest.mark.parametrize("name", ["q4_k", "iq4_xs", "zeros", "q4", "nvfp4", "nf4"])
def test_moves_that_keep_groups_together_keep_their_codes(name: str) -> None:
    if name in lowbit.FORMATS:
        double = {"double_quant": True} if name == "nf4" else {}
        q: Any = lowbit.quantize(jnp.asarray(RNG.standard_normal((N, K)), jnp.float32), name, axis=-1, **double)
    else:
        q, _ = case(name)
    w, scales = np.asarray(q.materialize()), q.scales.dtype

    @jax.jit
    @lowbit.implicit
    def stacked(*layers: Any) -> Any:
        return jnp.stack([layer.T for layer in layers])

    with lowbit.materialization("error"):
        stack = stacked(q, q, q)
        np.testing.assert_array_equal(stack.materialize(), np.stack([w.T] * 3))
        assert stack.nbytes == 3 * q.nbytes and stack.scales.dtype == scales
        for fn in (lambda w: w[1], lambda w: w[1:], lambda w: w.reshape(3, 1, *w.shape[1:]), lambda w: w[::2]):
            moved = jax.jit(lowbit.implicit(fn))(stack)
            np.testing.assert_array_equal(moved.materialize(), fn(np.stack([w.T] * 3)))
        assert jax.eval_shape(lowbit.implicit(lambda w: w[1:]), stack).scales.dtype == scales
        turned = jax.jit(lowbit.implicit(lambda w: jnp.swapaxes(w.reshape(4, 2, N // 8, K), 1, 2).reshape(N, K)))
        heads = turned(q)
        want = np.swapaxes(w.reshape(4, 2, N // 8, K), 1, 2).reshape(N, K)
        np.testing.assert_array_equal(heads.materialize(), want)
        if name not in ("nvfp4", "nf4"):  # their groups are of the whole matrix
            assert heads.nbytes == q.nbytes
