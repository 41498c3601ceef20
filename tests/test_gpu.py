"""The kernel for NVIDIA GPUs: its results in interpret mode, and programs lowered for CUDA. See gpu_aot.py too."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from helpers import Layout, gaussian, layouts, more_layouts
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lowbit
from lowbit import dispatch, formats
from lowbit.formats import packed
from lowbit.formats.blocks import span_of
from lowbit.kernels import gpu, reference
from lowbit.kernels.gpu import kernel, tiling
from lowbit.kernels.product import Product
from lowbit.ops.matmul import matmul

CALL = "__gpu$xla.gpu.triton"
FLOATS = (jnp.bfloat16, jnp.float32, jnp.float16)
product = jax.jit(partial(kernel.matmul, interpret=True), static_argnames="tile")
right = jax.jit(reference.matmul)


def normal(seed, *shape, dtype=jnp.float32):
    return gaussian(seed, shape).astype(dtype)


def assert_rounded(got, want, dtype):
    """Assert equality up to the rounding of the result: sums differ in their order."""
    assert got.shape == want.shape and got.dtype == dtype
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert np.array_equal(np.isnan(got), np.isnan(want))
    eps, top = float(jnp.finfo(dtype).eps), np.nanmax(np.abs(want))
    assert np.nanmax(np.abs(got - want) - 0.51 * eps * np.abs(want)) <= max(2e-6, eps / 1000) * top


def check(x, w, contract, dtype, **options):
    want = right(Product(x, w, contract, jnp.float32))
    assert_rounded(product(Product(x, w, contract, dtype), **options), want, dtype)


@pytest.mark.first(*tiers.KINDS, Layout("ternary", -2, None), Layout("fp8", -1, 16))
def test_every_layout_at_odd_sizes(any_layout) -> None:
    number = (layouts() + more_layouts()).index(any_layout)
    contract = (-2, -1)[number // 2 % 2]
    m, k, n = 5, 150, 90
    w = any_layout.quantize(normal(0, *((k, n) if contract == -2 else (n, k))))
    w = w.without_offsets()  # which are a product of their own
    check(normal(1, m, k, dtype=FLOATS[number % 3]), w, contract, FLOATS[number % 3])


@pytest.mark.parametrize("axis", [-2, -1])  # scales applied after the product, and before it
def test_every_dtype(axis) -> None:
    w = lowbit.ArrayNF4.quantize(normal(0, 64, 32), axis=axis, double_quant=True).plain()
    wide, short, half = jnp.float32, jnp.bfloat16, jnp.float16
    mixed = ((short, wide), (half, half)) if axis == -1 else ((short, wide), (half, half), (half, wide), (wide, short))
    for x_dtype, dtype in mixed:
        check(normal(1, 3, 64, dtype=x_dtype), w, -2, dtype)


def test_a_weight_is_not_rounded_to_bfloat16() -> None:
    w = lowbit.ArrayNF4.quantize(jnp.full((64, 32), 0.7).at[0].set(1.0), axis=-2)  # a level with all its bits
    y = product(Product(jnp.ones((1, 64), jnp.bfloat16), w, -2, jnp.float32))
    want = np.asarray(w.materialize(), np.float64).sum(0)
    assert np.max(np.abs(y - want)) < 1e-6 * want[0]


@pytest.mark.parametrize(
    ("spans", "contract"), [((24, 1), -2), ((24, 1), -1), ((1, 40), -2), ((0, 0), -1), ((96, 16), -2)]
)
def test_scales_of_any_span(spans, contract) -> None:
    k, n = 120, 72
    counts = [1 if s == 0 else -(-size // s) for s, size in zip(spans, (k, n), strict=True)]
    scales = jnp.abs(normal(2, *counts)).at[-1, -1].set(jnp.nan)
    codes = jax.random.randint(jax.random.key(0), (k, n), -127, 128).astype(jnp.int8)
    w = lowbit.Array8B.build(shape=(k, n), dtype=jnp.float32, spans=spans, codes=codes, scales=scales)
    if spans == (0, 0):
        w = w.replace(scales=jnp.full((1, 1), 0.3))
    check(normal(1, 4, w.shape[contract], dtype=jnp.bfloat16), w, contract, jnp.bfloat16)


def test_stacks_and_chosen_layers() -> None:
    stack = Layout("ternary", -2, None).quantize(normal(0, 4, 40, 24))
    check(normal(1, 4, 2, 3, 40), stack, -2, jnp.float32)
    chosen = stack.replace(index=jnp.array([2, 0, 9]))  # an index past the end is the last layer, as in the reference
    check(normal(1, 3, 5, 24), chosen, -1, jnp.float32)
    check(normal(1, 5, 40), stack.replace(index=jnp.array(1)), -2, jnp.float32)


@pytest.mark.parametrize("contract", [-2, -1])
def test_tiles_of_rows_and_shares_of_k(contract) -> None:
    w = Layout("nf4", contract, 32).quantize(normal(0, 200, 200))
    check(normal(1, 40, 200), w, contract, jnp.float32, tile=tiling.Tile(16, 64, 32, splits=3))


def test_tile_sizes_are_powers_of_two_that_read_each_weight_once() -> None:
    for layout in layouts() + more_layouts():
        for m in (1, 16, 17, 256, 300):
            for contract in (-2, -1):
                w = jax.eval_shape(layout.quantize, jax.ShapeDtypeStruct((4096, 11008), jnp.float32))
                tile = tiling.tile_for(m, w, contract, jnp.dtype(jnp.bfloat16), 2)
                assert tile.rows >= min(m, 256), "each weight must be read once"
                span = span_of(w.spans, contract)
                assert span % 32 or span % tile.depth == 0, "a step must have one scale"
                # Every size of a tile is a power of two, and at least 16 for the tensor cores.
                assert all(size >= 16 and size & size - 1 == 0 for size in (tile.rows, tile.columns, tile.depth))


def test_a_step_deeper_than_a_block() -> None:
    x, w = normal(1, 3, 128, dtype=jnp.bfloat16), Layout("nf4", -2, 32).quantize(normal(0, 128, 64))
    deep = tiling.Tile(16, 32, 64)
    assert not tiling.tiling_for(Product(x, w, -2, jnp.bfloat16), deep).after  # so scales multiply the weights
    check(x, w, -2, jnp.bfloat16, tile=deep)


# --- user-defined formats


@formats.stored
class Array4B(lowbit.QuantizedArray):
    packing = {"codes": 2}  # noqa: RUF012

    def levels(self, codes):
        return codes.astype(jnp.float32) - 8


def test_a_user_defined_format() -> None:
    codes = jax.random.randint(jax.random.key(0), (64, 20), 0, 256).astype(jnp.uint8)
    w = Array4B.build(shape=(64, 40), dtype=jnp.float32, spans=(32, 1), codes=codes, scales=normal(1, 2, 40))
    check(normal(2, 3, 64, dtype=jnp.bfloat16), w, -2, jnp.bfloat16)
    assert gpu.matmul_fits(Product(normal(2, 3, 64), w, -2, jnp.float32))


@formats.stored
class ArrayOfTwoComponents(lowbit.QuantizedArray):
    high: jax.Array
    packing = {"codes": 2, "high": 4}  # noqa: RUF012

    def levels(self, low, high):
        return (low | high << 4).astype(jnp.float32) - 32


@pytest.mark.parametrize("contract", [-2, -1])
def test_a_user_defined_format_of_two_components(contract) -> None:
    low, high = (
        jax.random.randint(jax.random.key(i), (64, n), 0, 256).astype(jnp.uint8) for i, n in enumerate((20, 10))
    )
    w = ArrayOfTwoComponents.build(
        shape=(64, 40), dtype=jnp.float32, spans=(32, 1), codes=low, high=high, scales=normal(1, 2, 40)
    )
    check(normal(2, 3, w.shape[contract], dtype=jnp.bfloat16), w, contract, jnp.bfloat16)


def test_operands_that_the_kernel_does_not_support_run_without_it() -> None:
    x, w = normal(0, 3, 64), lowbit.Array8B.quantize(normal(1, 64, 32))
    shared = lowbit.Array8B.quantize(normal(1, 2, 64, 32), axis=(0, 1))
    assert not gpu.matmul_fits(Product(normal(0, 2, 3, 64), shared, -2, jnp.float32))
    assert CALL not in program_for_cuda(lambda x, w: x @ w, normal(0, 2, 3, 64), shared)
    assert not gpu.matmul_fits(Product(x.astype(jnp.int32), w, -2, jnp.int32))
    assert not gpu.matmul_fits(Product(x[:0], w, -2, jnp.float32))


# --- declared formats


@pytest.fixture
def declared():
    """Every layout in the table of formats."""
    missing = [name for name in packed.LAYOUTS if name not in lowbit.FORMATS]
    for name in missing:
        packed.declare(name, packed.LAYOUTS[name], error=1.0)
    yield
    for name in missing:
        del lowbit.FORMATS[name]


# Codes in one component and in two, small integers, tables and floats, scales as floats and as codes with a group scale
# for an axis or for the matrix; the axis of the scales, the summed axis, the dtype, and options.
DECLARED = [
    ("q4", -2, -2, jnp.bfloat16, {}),
    ("q4", -1, -2, jnp.float32, {"block_size": 16}),
    ("q3", -1, -1, jnp.float16, {}),
    ("q2", -2, -1, jnp.bfloat16, {}),
    ("int4", -2, -2, jnp.bfloat16, {"offset": True, "scale_dtype": jnp.bfloat16}),
    ("int5", -2, -2, jnp.bfloat16, {}),
    ("int6", -2, -1, jnp.float32, {}),
    ("fp8", -2, -2, jnp.bfloat16, {}),
    ("fp8_e5m2", -1, -1, jnp.float16, {"block_size": 64}),
    ("mxfp4", -1, -1, jnp.bfloat16, {}),
    ("nvfp4", -2, -2, jnp.bfloat16, {}),
]


@pytest.mark.usefixtures("declared")
# The first tier has layouts of each mechanism in `test_every_layout_at_odd_sizes`.
@pytest.mark.parametrize(
    ("format", "axis", "contract", "dtype", "options"), tiers.tiered(DECLARED, [DECLARED[i] for i in (1, 4, 8, 9)])
)
def test_declared_formats(format, axis, contract, dtype, options) -> None:
    k, n = 150, 90
    w = normal(0, *((k, n) if contract == -2 else (n, k)))
    w = lowbit.FORMATS[format].quantize(w, axis=axis, search=False, **options)
    w = w.without_offsets()  # which are a product of their own
    x = normal(1, 5, k, dtype=dtype)
    assert gpu.matmul_fits(Product(x, w, contract, dtype))
    check(x, w, contract, dtype)


@pytest.mark.usefixtures("declared")
def test_a_program_for_cuda_reads_scale_codes_and_adds_offsets() -> None:
    x, w = normal(0, 4, 192, dtype=jnp.bfloat16), normal(1, 192, 320)
    q = lowbit.FORMATS["q3"].quantize(w, search=False)
    text = program_for_cuda(lambda x, q: x @ q, x, q)
    assert text.count(f"custom_call @{CALL}") == 1 and "192x320x" not in text
    inside = str(jax.make_jaxpr(kernel.matmul)(Product(x, q, -2, x.dtype)))
    assert "u8[1,6,320]" in inside and "f32[6,320]" not in inside and "f32[1,6,320]" not in inside  # scales
    affine = lowbit.FORMATS["int4"].quantize(w, offset=True, search=False)
    text = program_for_cuda(lambda x, q: x @ q, x, affine)
    assert text.count(f"custom_call @{CALL}") == 1 and "192x320x" not in text


# --- programs


def program_for_cuda(fn, *args):
    return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("format", tiers.formats())
def test_a_program_for_cuda_holds_the_kernel(format) -> None:
    x, w = normal(0, 4, 192, dtype=jnp.bfloat16), normal(1, 192, 320, dtype=jnp.bfloat16)
    directions = (
        (lambda x, q: x @ q, Layout(format, -2, None).quantize(w), "192x320x"),
        (lambda x, q: x @ q.T, Layout(format, -1, None).quantize(w.T), "320x192x"),
    )
    for fn, q, dense in directions:
        text = program_for_cuda(fn, x, q)
        assert text.count(f"custom_call @{CALL}") == 1 and f"{dense}f32" not in text and f"{dense}bf16" not in text


def test_a_program_for_cuda_without_the_kernel_goes_dense() -> None:
    x, w = normal(0, 4, 192, dtype=jnp.bfloat16), normal(1, 320, 192, dtype=jnp.bfloat16)
    q = Layout("nf4", -1, None).quantize(w)
    with lowbit.use_kernel(False):
        text = program_for_cuda(lambda x, q: x @ q.T, x, q)
    assert CALL not in text and "320x192xf32" in text


def test_a_gradient_for_cuda_holds_the_kernel() -> None:
    x, q = normal(0, 4, 192), Layout("nf4", -2, None).quantize(normal(1, 192, 320))
    text = program_for_cuda(jax.grad(lambda x: (x @ q).sum()), x)
    assert text.count(f"custom_call @{CALL}") == 1 and "192x320xf32" not in text


def test_a_layer_of_a_stack_is_not_copied() -> None:
    stack = Layout("nf4", -2, 64).quantize(normal(0, 5, 128, 128))

    def layers(x, stack):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, stack)[0]

    text = program_for_cuda(lowbit.implicit(layers), normal(1, 2, 128), stack)
    assert text.count(f"custom_call @{CALL}") == 1
    assert "tensor<128x64xui8>" not in text and "tensor<1x128x64xui8>" not in text


def test_export_names_the_call_and_serves_several_platforms() -> None:
    x, q = normal(0, 4, 64), Layout("int8", -2, None).quantize(normal(1, 64, 32))
    checks = lowbit.export_checks()
    product = export.export(jax.jit(lambda x, q: x @ q), platforms=["cuda"], disabled_checks=checks)
    assert f"@{CALL}" in product(x, *[q]).mlir_module()
    text = jax.jit(lambda x, q: x @ q).trace(x, q).lower(lowering_platforms=("cpu", "cuda")).as_text()
    assert f"@{CALL}" in text


def test_float32_is_multiplied_in_three_products() -> None:
    x, w = normal(0, 4, 64), Layout("int8", -2, None).quantize(normal(1, 64, 32))

    def text(x):
        return str(jax.make_jaxpr(kernel.matmul)(Product(x, w, -2, x.dtype)))

    assert "TF32_TF32_F32_X3" in text(x) and "TF32" not in text(x.astype(jnp.bfloat16))


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(dispatch, "_kernels", {})
    dispatch.register_kernel("matmul", "cpu", product, gpu.matmul_fits)
    jax.clear_caches()
    yield
    jax.clear_caches()


ROUNDED = [(-2, jnp.float16), (-1, jnp.bfloat16), (-1, jnp.float32)]


@pytest.mark.parametrize(("contract", "dtype"), tiers.tiered(ROUNDED, ROUNDED[1:2]))
def test_offsets_are_added_before_the_only_rounding(contract, dtype, interpreted) -> None:
    x, w = normal(0, 5, 150, dtype=dtype), normal(1, *((150, 90) if contract == -2 else (90, 150)))
    q = lowbit.FORMATS["int4"].quantize(w, axis=-2, offset=True, scale_dtype="float16")
    y = matmul(Product(x, q, contract, dtype))
    assert_rounded(y, right(Product(x, q, contract, jnp.float32)), dtype)


@tiers.DEVICES
def test_on_eight_devices(interpreted) -> None:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    x, q = normal(0, 8, 512), Layout("nf4", -2, 64).quantize(normal(1, 512, 128))
    want = reference.matmul(Product(x, q, -2, jnp.float32))
    options = {
        "mesh": mesh,
        "in_specs": (P(None, "x"), q.component_specs(P("x"))),
        "out_specs": P(),
        "check_vma": False,
    }
    summed = jax.shard_map(lambda x, q: jax.lax.psum(x @ q, "x"), **options)
    assert_rounded(jax.jit(summed)(x, q), want, jnp.float32)
    columns = jax.device_put(q, jax.tree.map(partial(NamedSharding, mesh), q.component_specs(P(None, "x"))))
    y = jax.jit(lambda x, q: x @ q)(x, columns)
    assert y.sharding.spec == P(None, "x")
    assert_rounded(y, want, jnp.float32)


@tiers.DEVICES
def test_shard_map_that_checks_what_varies() -> None:
    # From JAX 0.12 on a mesh has a description of its devices.
    known = getattr(jax.sharding, "AbstractDevice", None)
    device = {"abstract_device": known(device_kind="NVIDIA H100", num_cores=None, platform="gpu")} if known else {}
    mesh = jax.sharding.AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,), **device)
    x, q = normal(0, 8, 64), Layout("int8", -2, None).quantize(normal(1, 64, 128))
    rows = jax.shard_map(lambda x, q: x @ q, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))
    assert CALL in program_for_cuda(rows, x, q)
