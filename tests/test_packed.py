"""Declared formats: what codes mean, how scales are found, and every operation on codes, scale codes and offsets."""

import itertools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiers
from helpers import assert_close, assert_same_bits, gaussian, together
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lowbit
from lowbit import FORMATS, implicit
from lowbit.formats import Layout, declare, levels, packed

AFFINE = ("int4", {"offset": True})
EVERY = [*((name, {}) for name in packed.LAYOUTS), AFFINE, ("int3", {"offset": True, "scale_dtype": jnp.bfloat16})]
WAYS = tiers.tiered(EVERY, [way for way in EVERY if way[0] in tiers.MECHANISMS or way[1]])


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return gaussian(seed, shape)


def relative_mse(name: str, w: jax.Array, **options: Any) -> float:
    q = FORMATS[name].quantize(w, **options)
    w = np.asarray(w)
    return float(np.sum((np.asarray(q.materialize()) - w) ** 2) / np.sum(w**2))


@pytest.mark.parametrize(
    ("floats", "dtype"),
    [(packed.E4M3, ml_dtypes.float8_e4m3fn), (packed.E5M2, ml_dtypes.float8_e5m2), (packed.E2M1, None)],
)
def test_small_floats_are_those_of_the_standard(floats: levels.Floats, dtype: Any) -> None:
    if dtype is None:
        want = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
        np.testing.assert_array_equal(floats.table, [*want, *-want])
        x = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 9], np.float32)  # ties go to the even code
        np.testing.assert_array_equal(floats.table[np.asarray(floats.nearest(x))], [0, 1, 1, 2, 2, 4, 4, 6])
        return
    want = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    known = np.isfinite(want)
    np.testing.assert_array_equal(floats.table[known], want[known])
    assert np.isnan(floats.table[~known]).all()
    x = np.clip(np.asarray(normal(20000)) * np.float32(3.0) ** np.arange(-10, 10).repeat(1000), -448, 448)
    got = floats.table[np.asarray(floats.nearest(jnp.asarray(x)))]
    np.testing.assert_array_equal(got, x.astype(dtype).astype(np.float32))


@pytest.mark.parametrize(
    "known", [packed.SIGNED8, packed.E8M0, packed.E4M3, packed.E5M2, packed.E2M1, packed.LAYOUTS["q3"].levels]
)
def test_the_table_of_levels_is_what_codes_decode_to(known: levels.Levels) -> None:
    codes = np.arange(2**known.bits, dtype=np.uint8)
    np.testing.assert_array_equal(known.table, np.asarray(known.decode(jnp.asarray(codes))))


def test_a_value_halfway_between_two_levels_takes_the_upper_one() -> None:
    table = levels.Table(2, (-2, -1, 1, 2))
    assert table.nearest(jnp.array([-1.5, 0.0, 1.5])).tolist() == [1, 2, 3]


TABLES = [name for name, layout in packed.LAYOUTS.items() if isinstance(layout.levels, levels.Table)]


@pytest.mark.parametrize("name", TABLES)
def test_the_levels_of_the_formats_do_not_change(name: str) -> None:
    """Files store codes. A table with other levels would read them as other weights."""
    page = (Path(__file__).parent.parent / "docs" / "formats.md").read_text()
    rows = re.findall(rf"^{name} +([-\d. ]+)$", page, re.MULTILINE)
    assert len(rows) == 1, f"docs/formats.md needs one line of {name!r} and its levels, and has {len(rows)}"
    np.testing.assert_array_equal(packed.LAYOUTS[name].levels.table, np.array(rows[0].split(), np.float32))


def test_tables_that_mean_nothing_raise() -> None:
    for values, message in [
        ((0, 1, 1, 2), "level 1 is 1 and level 2 is 1"),
        ((0, float("nan"), 1, 2), "level 0 is 0 and level 1 is nan"),
        ((1, 2, 3), "2-bit codes has 4 levels, not 3"),
    ]:
        with pytest.raises(ValueError, match=message):
            levels.Table(2, values)


# Relative squared error on N(0, 1), with blocks of 32 and of 16.
@pytest.mark.parametrize(
    ("name", "options", "bound", "bits"),
    [
        ("q4", {}, 0.0058, 4.28125),
        ("q4", {"block_size": 16}, 0.0046, 4.53125),
        ("q3", {}, 0.0240, 3.28125),
        ("q2", {}, 0.0990, 2.28125),
        ("int4", {}, 0.0068, 5.0),
        ("int4", {"scale_dtype": jnp.float16}, 0.0068, 4.5),
        ("int4", {"offset": True}, 0.0055, 6.0),
        ("mxfp4", {}, 0.0134, 4.25),
        ("nvfp4", {}, 0.0092, 4.501953125),
        ("fp8", {}, 0.00072, 8.03125),
    ],
)
def test_errors_and_bits(name: str, options: Any, bound: float, bits: float) -> None:
    w = normal(1024, 16)
    assert relative_mse(name, w, **options) < bound
    q = FORMATS[name].quantize(w, **options)
    assert 8 * q.nbytes / q.size == bits


def test_the_search_is_better_than_the_largest_magnitude() -> None:
    w = normal(512, 16)
    for name, options in (("q4", {}), ("q2", {}), ("int3", {}), AFFINE):
        assert relative_mse(name, w, **options) < 0.9 * relative_mse(name, w, search=False, **options)


@pytest.mark.parametrize(("name", "options"), EVERY, ids=str)
def test_products_and_rows_agree_with_the_dense_array(name: str, options: Any) -> None:
    q, x, ids = FORMATS[name].quantize(normal(64, 48), **options), normal(4, 64, seed=1), jnp.array([3, 60, 3])
    w = np.asarray(q.materialize())
    with lowbit.materialization("error"):
        assert_close(x @ q, np.asarray(x) @ w)
        np.testing.assert_array_equal(q[ids], w[np.asarray(ids)])


@pytest.mark.parametrize(("name", "options"), WAYS, ids=str)
def test_operations_agree_with_the_dense_array(name: str, options: Any) -> None:
    q = FORMATS[name].quantize(normal(64, 48), **options)
    stack = FORMATS[name].quantize(normal(3, 64, 32), **options)
    w, x = q.materialize(), normal(4, 64, seed=1)
    ids = jnp.array([3, 60, 3])
    products = together(
        lambda w, x, y, stack: x @ w,
        lambda w, x, y, stack: y @ w.T,
        lambda w, x, y, stack: jax.grad(lambda x: jnp.sin(x @ w).sum())(x),
        lambda w, x, y, stack: jax.lax.scan(lambda x, w: (x, x @ w), x, stack)[1],
    )
    moves = together(
        lambda w: w[ids],
        lambda w: w[:, 5:9],
        lambda w: w.reshape(64, 6, 8),
        lambda w: -w,
        lambda w: jnp.concatenate([w, w], 1),
        lambda w: w[None].astype(jnp.bfloat16),
    )
    with lowbit.materialization("error"):
        y = normal(4, 48, seed=2)
        assert_close(products(q, x, y, stack), products(w, x, y, stack.materialize()))
        for got, want in zip(moves(q), moves(w), strict=True):
            np.testing.assert_array_equal(got, want)
        assert_close(2.5 * q, 2.5 * w, 1e-6)  # the scales are rounded once more


@pytest.mark.parametrize(("name", "options"), WAYS, ids=str)
def test_short_blocks_zeros_and_nan(name: str, options: Any) -> None:
    small = np.asarray(normal(50, 6))
    w = small.copy()
    w[:, 2], w[7, 4] = 0, np.inf
    w = jnp.asarray(w)
    with pytest.raises(ValueError, match=rf"quantize to '{name}': 1 of 300 values are NaN or infinite"):
        FORMATS[name].quantize(w, **options)
    got = np.asarray(jax.jit(lambda w: FORMATS[name].quantize(w, **options).materialize())(w))
    if name != "nvfp4" and FORMATS[name].blocked:
        assert got.shape == w.shape and not np.isnan(np.delete(got, 4, 1)).any()
    assert np.isnan(got[7, 4]) and (got[:, 2] == 0).all() and not np.isnan(got[:, :2]).any()
    tiny = np.asarray(FORMATS[name].quantize(jnp.asarray(small * np.float32(1e-30)), **options).materialize())
    assert np.linalg.norm(tiny * np.float32(1e30) - small) / np.linalg.norm(small) < 0.4


def test_options_that_do_not_apply_raise() -> None:
    w = normal(64, 8)
    for name, options, message in [
        ("q4", {"offset": True}, "offset=True is for integers, and 'q4'"),
        ("q4", {"scale_dtype": jnp.float16}, "those of 'q4' are codes"),
        ("int4", {"scale_dtype": jnp.int8}, "must be one of float32, bfloat16, float16"),
        ("int4", {"block_size": 0}, "block_size=0 must be at least 1"),
        ("int4", {"offset": True, "scale": jnp.ones((2, 8))}, "needs a single axis, and does not take scale="),
        ("int4", {"offset": True, "axis": (0, 1), "block_size": -1}, "needs a single axis"),
    ]:
        with pytest.raises(ValueError, match=message):
            FORMATS[name].quantize(w, **options)
    with pytest.raises(ValueError, match=r"'nf4' is not a declared format \(q4, q3"):
        packed.layout_of("nf4")


def test_scales_that_their_dtype_cannot_hold_raise() -> None:
    for size in (1e7, 1e-9):
        for offset in (False, True) if size > 1 else (False,):
            with pytest.raises(
                ValueError, match=r"scale_dtype=float16 cannot hold the scales of 'int4' .* values up to"
            ):
                FORMATS["int4"].quantize(size * normal(64, 8), scale_dtype=jnp.float16, offset=offset)


def test_a_search_that_cannot_be_done_raises_when_asked_for() -> None:
    for name, options in [
        ("mxfp4", {}),
        ("int4", {"axis": (0, 1), "block_size": -1}),
        ("int4", {"scale": jnp.ones((2, 8))}),
    ]:
        FORMATS[name].quantize(normal(64, 8), **options)
        with pytest.raises(ValueError, match=f"search=True for '{name}' needs"):
            FORMATS[name].quantize(normal(64, 8), search=True, **options)


COLUMNS, ROWS = P(None, "x"), P("x", None)
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
SHARDED = [("q4", {}), ("nvfp4", {}), ("int3", {}), AFFINE]
PLACED = [(*way, spec, kind) for way, spec, kind in itertools.product(SHARDED, (COLUMNS, ROWS), (AUTO, EXPLICIT))]
# Each format once, and each pair of sharding and kind of axis.
PLACES = [(COLUMNS, AUTO), (ROWS, EXPLICIT), (ROWS, AUTO), (COLUMNS, EXPLICIT)]
FIRST_PLACED = [(*way, *place) for way, place in zip(SHARDED, PLACES, strict=True)]


@tiers.DEVICES
@pytest.mark.parametrize(("name", "options", "spec", "kind"), tiers.tiered(PLACED, FIRST_PLACED), ids=str)
def test_sharded_products(name: str, options: Any, spec: P, kind: AxisType) -> None:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,), devices=jax.devices()[:4])
    w, x = normal(128, 64), normal(8, 128, seed=1)
    q = FORMATS[name].quantize(w, **options)
    with jax.set_mesh(mesh):
        placed = q.with_sharding(NamedSharding(mesh, spec))
        assert placed.sharding.spec == spec and placed.is_sharded
        with lowbit.materialization("error"):
            y = jax.jit(lambda x, q: x @ q)(jax.device_put(x, NamedSharding(mesh, P())), placed)
    assert_close(np.asarray(y), np.asarray(x @ q))


ALONG = [*itertools.product([256, 80], [ROWS, COLUMNS, P()], [P(), COLUMNS])]
# Blocks that are cut by the sharding of x and blocks that are not, each sharding of the weight and of the result.
FIRST_ALONG = [(256, ROWS, P()), (80, COLUMNS, COLUMNS), (80, P(), P()), (80, ROWS, P())]


@tiers.DEVICES
@pytest.mark.parametrize(("k", "spec", "out"), tiers.tiered(ALONG, FIRST_ALONG), ids=str)
def test_offsets_where_activations_are_sharded_along_the_blocks(k: int, spec: P, out: P) -> None:
    explicit = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    auto = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    q, x = FORMATS["int4"].quantize(normal(k, 64), offset=True), normal(8, k, seed=1)
    want = np.asarray(x) @ np.asarray(q.materialize())
    if spec == P("x", None) and k % (8 * 32):
        with pytest.raises(ValueError, match="each shard must hold whole blocks of 32 elements"):
            q.with_sharding(NamedSharding(auto, spec))
        return
    for mesh in (explicit, auto):

        def product(x: Any, q: Any, mesh: Any = mesh) -> Any:
            return jnp.dot(x, q, out_sharding=out) if mesh is explicit else x @ q

        with jax.set_mesh(mesh), lowbit.materialization("error"):
            placed = q.with_sharding(NamedSharding(mesh, spec))
            y, back = jax.jit(
                implicit(
                    lambda x, q, product=product: (product(x, q), jax.grad(lambda x: jnp.sum(product(x, q) ** 2))(x))
                )
            )(jax.device_put(x, NamedSharding(mesh, P(None, "x"))), placed)
        assert mesh is auto or y.sharding.is_equivalent_to(NamedSharding(mesh, out), 2)
        assert_close(np.asarray(y), want)
        assert_close(np.asarray(back), 2 * want @ np.asarray(q.materialize()).T)


SQUARES = [("int8", 128), ("fp8", 128), ("q4", 32), ("nvfp4", 16)]


@pytest.mark.parametrize(("name", "size"), tiers.tiered(SQUARES, [("fp8", 128), ("q4", 32)]))
def test_blocks_in_two_dimensions(name: str, size: int, tmp_path: Any) -> None:
    w, x = normal(200, 3 * size), normal(4, 200, seed=1)
    q = lowbit.quantize(w, name, axis=(-2, -1), block_size=size)
    dense = np.asarray(q.materialize())
    assert q.spans == (size, size) and q.block_size == size and q.axis == (-2, -1)
    assert q.scales.shape == (-(-200 // size), 3) and f"axis=(-2, -1), block_size={size}, " in repr(q)
    # One scale for all of a square.
    np.testing.assert_array_equal(lowbit.quantize(w[:size, :size], name, axis=(-2, -1)).shape, (size, size))
    assert relative_mse(name, w, axis=(-2, -1), block_size=size) < 2 * FORMATS[name].error ** 2
    with lowbit.materialization("error"):
        assert_close(x @ q, x @ dense)
        assert_close(normal(2, 3 * size) @ q.T, np.asarray(normal(2, 3 * size)) @ dense.T)
        for fn in (
            lambda w: w[jnp.array([3, 130])],
            lambda w: w[size:, :size],
            lambda w: jnp.concatenate([w, w], 1),
            lambda w: w[None],
        ):
            np.testing.assert_array_equal(lowbit.materialize(implicit(fn)(q)), fn(dense))
    lowbit.save(tmp_path / "a.safetensors", {"w": q})
    assert_same_bits(lowbit.load(tmp_path / "a.safetensors")["w"], q)
    simulated = lowbit.straight_through(w, name, axis=(-2, -1), block_size=size)
    np.testing.assert_array_equal(np.asarray(simulated), dense)
    with pytest.raises(ValueError, match=r"needs a single axis, and does not take scale="):
        FORMATS["int4"].quantize(w, axis=(-2, -1), offset=True)


IN_TWO = [*itertools.product(["int8", "fp8"], [AUTO, EXPLICIT])]


@tiers.DEVICES
@pytest.mark.parametrize(("name", "kind"), tiers.tiered(IN_TWO, [("int8", AUTO), ("fp8", EXPLICIT)]), ids=str)
def test_blocks_in_two_dimensions_over_devices(name: str, kind: AxisType) -> None:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,), devices=jax.devices()[:4])
    q, x = lowbit.quantize(normal(128, 256), name, axis=(-2, -1), block_size=32), normal(8, 128, seed=1)
    with jax.set_mesh(mesh):
        for spec in (P("x", None), P(None, "x")):
            placed = q.with_sharding(NamedSharding(mesh, spec))
            assert placed.scales.sharding.spec == spec
            with lowbit.materialization("error"):
                y = jax.jit(lambda x, q: x @ q)(jax.device_put(x, NamedSharding(mesh, P())), placed)
            assert_close(np.asarray(y), np.asarray(x @ q))
        with pytest.raises(
            ValueError, match=r"Axis -2 of length 96 cannot be sharded over the 4 devices.* blocks of 32"
        ):
            lowbit.quantize(normal(96, 64), name, axis=(-2, -1), block_size=32).with_sharding(
                NamedSharding(mesh, P("x", None))
            )


def test_given_scales_are_the_ones_that_are_stored() -> None:
    w = normal(64, 8)
    scale = jnp.abs(FORMATS["int4"].quantize(w).scales)
    np.testing.assert_array_equal(FORMATS["int4"].quantize(w, scale=2 * scale).scales, 2 * scale)
    coded = FORMATS["q4"].quantize(w, scale=scale)
    assert_close(coded.scale_values(), scale, 0.05)


def test_a_file_keeps_every_component(tmp_path: Any) -> None:
    tree = {str(way): FORMATS[way[0]].quantize(normal(64, 48), **way[1]) for way in EVERY}
    lowbit.save(tmp_path / "a.safetensors", tree)
    back = lowbit.load(tmp_path / "a.safetensors")
    for name, q in tree.items():
        assert jax.tree.structure(back[name]) == jax.tree.structure(q)
        for a, b in zip(jax.tree.leaves(q), jax.tree.leaves(back[name]), strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_layout_of_your_own() -> None:
    declare("own", Layout(levels.Table(2, (-2, -1, 1, 2)), block_size=16), error=0.33)
    try:
        q = lowbit.quantize(normal(64, 8), "own")
        assert declare("own", q.layout, error=0.33) is FORMATS["own"]
        assert lowbit.quantize(normal(64, 8), lowbit.QuantizationConfig("own"), block_size=16).block_size == 16
        assert q.format is FORMATS["own"] and "PackedArray('own', shape=(64, 8)" in repr(q)
    finally:
        del FORMATS["own"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_int8_with_narrow_scales_rounds_by_the_scales_that_it_stores(dtype: str) -> None:
    w = normal(256, 512)
    q = lowbit.quantize(w, "int8", block_size=32, scale_dtype=dtype)
    assert q.scales.dtype == dtype and 8 * q.nbytes / q.size == 8.5
    assert float(jnp.sum((q.materialize() - w) ** 2) / jnp.sum(w**2)) <= 3e-5
    values = np.asarray(q.scale_values()).repeat(32, 0)
    np.testing.assert_array_equal(q.codes, np.clip(np.rint(np.asarray(w) / values), -127, 127))
    assert_close(normal(3, 256, seed=1) @ q, normal(3, 256, seed=1) @ q.materialize())
    if dtype == "float16":
        with pytest.raises(ValueError, match=r"scale_dtype=float16 cannot hold the scales of 'int8' .* pass scale"):
            lowbit.quantize(w * 1e8, "int8", scale_dtype=dtype)
