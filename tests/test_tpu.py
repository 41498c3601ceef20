"""The kernel for TPU without one: its numbers in interpret mode, and when it is chosen. See also tpu_aot.py."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from helpers import Layout, assert_close, gaussian
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import lowbit
from lowbit import FORMATS
from lowbit.formats import packed
from lowbit.kernels import reference, tpu
from lowbit.kernels.product import Product
from lowbit.kernels.tpu import kernel, tiling
from lowbit.ops import partition

CHIP = "TPU v5"
CHIP_FIELDS = {"device_kind": CHIP, "num_cores": 1, "platform": "tpu"}
P = PartitionSpec


multiply = jax.jit(partial(kernel.matmul, chip=CHIP, interpret=True), static_argnames="sizes")


right = jax.jit(reference.matmul)


def run(x: Any, w: Any, contract: int, dtype: Any = jnp.float32, arithmetic: str = "exact", sizes: Any = None) -> Any:
    return multiply(Product(x, w, contract, dtype, arithmetic=arithmetic), sizes=sizes)


def product(layout: Layout, contract: int, m: int, k: int, n: int, dtype: Any, lead: Any = ()) -> tuple[Any, Any]:
    w = gaussian(0, (*lead, *((k, n) if contract == -2 else (n, k))))
    return gaussian(1, (*lead, m, k), dtype), layout.quantize(w)


def assert_as_reference(x: Any, w: Any, contract: int, dtype: Any, sizes: Any = None) -> None:
    """Assert equality up to half of the last bit of the result plus the error of a float32 sum."""
    w = w.without_offsets()  # a product of their own, outside of the kernel
    y = run(x, w, contract, dtype, sizes=sizes)
    want = right(Product(x, w, contract, jnp.float32))
    assert y.dtype == dtype
    off = np.abs(np.asarray(y, np.float64) - np.asarray(want, np.float64))
    size = np.abs(np.asarray(want)) * float(jnp.finfo(dtype).eps) / 2 + 1e-5 * np.abs(np.asarray(want)).max()
    assert (off <= size).all(), (off / size).max()


@pytest.fixture
def declared() -> Iterator[None]:
    """Every layout in the table of formats."""
    missing = [name for name in packed.LAYOUTS if name not in FORMATS]
    for name in missing:
        packed.declare(name, packed.LAYOUTS[name], error=1.0)
    yield
    for name in missing:
        del FORMATS[name]


# Codes in one component and in two, small integers, tables and floats, scales as floats and as codes with a group scale
# for an axis or for the matrix; the axis of the scales, the summed axis, the dtype, and options.
DECLARED = [
    ("q4", -1, -2, jnp.bfloat16, {"block_size": 16}),
    ("q3", -2, -2, jnp.float32, {}),
    ("q2", -2, -1, jnp.bfloat16, {}),
    ("int4", -2, -2, jnp.bfloat16, {"offset": True}),
    ("int5", -1, -1, jnp.float32, {"offset": True, "scale_dtype": jnp.float16}),
    ("int6", -2, -1, jnp.bfloat16, {}),
    ("fp8", -1, -2, jnp.float32, {"block_size": 128}),
    ("fp8_e5m2", -1, -1, jnp.bfloat16, {}),
    ("mxfp4", -2, -2, jnp.float32, {}),
    ("nvfp4", -2, -2, jnp.bfloat16, {}),
]
MORE_OF_THEM = [
    ("q4", -2, -2, jnp.bfloat16, {}),
    ("q4", -2, -1, jnp.float32, {}),
    ("q4", -1, -1, jnp.bfloat16, {}),
    ("q4", -2, -2, jnp.float32, {"block_size": -1}),
    ("q3", -1, -1, jnp.bfloat16, {}),
    ("int4", -1, -1, jnp.float32, {"scale_dtype": jnp.bfloat16}),
    ("int5", -2, -2, jnp.bfloat16, {}),
    ("fp8", -2, -2, jnp.bfloat16, {}),
    ("nvfp4", -1, -1, jnp.float32, {}),
]


@pytest.mark.usefixtures("declared")
@pytest.mark.parametrize(
    ("format", "axis", "contract", "dtype", "options"),
    tiers.tiered(DECLARED + MORE_OF_THEM, [DECLARED[i] for i in (0, 1, 4, 6, 8, 9)]),
)
def test_declared_formats_equal_the_reference(format: str, axis: Any, contract: int, dtype: Any, options: Any) -> None:
    k, n = 330, 200
    w = gaussian(0, (k, n) if contract == -2 else (n, k))
    w = FORMATS[format].quantize(w, axis=axis, search=False, **options)
    w = w.without_offsets()  # which are a product of their own
    x = gaussian(1, (5, k), dtype)
    assert tpu.matmul_fits(Product(x, w, contract, dtype))
    assert_as_reference(x, w, contract, dtype)


@pytest.mark.usefixtures("declared")
def test_blocks_along_two_axes() -> None:
    k, n = 330, 200
    w = FORMATS["fp8"].quantize(gaussian(0, (k, n)), axis=-2)
    scales = jnp.array([[1.0, -2.0], [0.5, 3.0], [1.5, 0.1]])
    w = w.reshaped((k, n), (128, 128), scales=scales)
    assert_as_reference(gaussian(1, (5, k), jnp.bfloat16), w, -2, jnp.bfloat16)


@pytest.mark.usefixtures("declared")
def test_a_format_of_integers_has_fast_products_by_blocks() -> None:
    w = FORMATS["q4"].quantize(gaussian(0, (330, 200)), axis=-2, search=False)
    x = gaussian(1, (5, 330))
    tops = jnp.abs(x).max(-1, keepdims=True) / 127
    want = right(Product(jnp.round(x / tops) * tops, w, -2, jnp.float32))
    assert_close(run(x, w, -2, arithmetic="fast"), want, 1e-5)


EVERY = [(-2, jnp.bfloat16), (-2, jnp.float32), (-1, jnp.float32), (-1, jnp.bfloat16)]


@pytest.mark.parametrize(("contract", "dtype"), tiers.tiered(EVERY, EVERY[:1]))
def test_odd_shapes_equal_the_reference(any_layout: Layout, contract: int, dtype: Any) -> None:
    x, w = product(any_layout, contract, 5, 330, 200, dtype)
    assert_as_reference(x, w, contract, dtype)


@pytest.mark.parametrize("contract", [-2, -1])
def test_many_tiles_with_edges_in_all_axes(contract: int) -> None:
    layout = Layout("nf4", contract, 64)
    x, w = product(layout, contract, 20, 700, 600, jnp.bfloat16)
    assert_as_reference(x, w, contract, jnp.bfloat16, sizes=tiling.Sizes(m=16, n=256, k=512, chunk=256))


@pytest.mark.parametrize(("axis", "block"), [(-2, 8), (-2, 48), (-1, 2048), (-2, 2048)])
def test_blocks_of_other_sizes(axis: int, block: int) -> None:
    x, w = product(Layout("int8", axis, block), -2, 3, 2100, 140, jnp.bfloat16)
    assert_as_reference(x, w, -2, jnp.float32)


@pytest.mark.parametrize("blocks", [Layout("nf4", -2, 64), Layout("int8", -1, 32), Layout("nf4", -1, 64)], ids=str)
@pytest.mark.parametrize("contract", tiers.tiered([-2, -1], [-2]))
def test_a_bfloat16_weight_is_not_rounded_where_the_result_is_float32(blocks: Layout, contract: int) -> None:
    x, w = product(blocks, contract, 5, 330, 200, jnp.bfloat16)
    assert_as_reference(x, w.astype(jnp.bfloat16), contract, jnp.float32)


def test_stacks_and_chosen_layers() -> None:
    x, w = product(Layout("int8", -2, 64), -2, 4, 128, 256, jnp.bfloat16, lead=(3,))
    assert_as_reference(x, w, -2, jnp.float32)
    assert_as_reference(x[:2], w.replace(index=jnp.array([2, 0])), -2, jnp.float32)
    assert_as_reference(x[0], w.replace(index=jnp.int32(1)), -2, jnp.float32)


@pytest.mark.parametrize("along", [Layout(f, a, None) for f in ("int8", "ternary") for a in (-2, -1)], ids=str)
def test_fast_is_exact_on_activations_of_8_bits(along: Layout) -> None:
    x, w = product(along, -2, 5, 330, 200, jnp.float32)
    scaled = x if along.axis == -2 else x * w.scales[:, 0]  # these scales are multiplied into x before it is rounded
    tops = jnp.abs(scaled).max(-1, keepdims=True) / 127
    rounded = jnp.round(scaled / tops) * tops / (1 if along.axis == -2 else w.scales[:, 0])
    y = run(x, w, -2, arithmetic="fast")
    assert_close(y, reference.matmul(Product(rounded, w, -2, jnp.float32)), 1e-5)
    assert 1e-4 < float(jnp.abs(y - x @ w).max() / jnp.abs(y).max()) < 3e-2


@pytest.mark.parametrize("format", ["nf4", "binary"])
def test_fast_by_blocks(format: str) -> None:
    x, w = product(Layout(format, -2, 64), -2, 5, 700, 200, jnp.float32)
    y = run(x, w, -2, arithmetic="fast")
    assert 1e-4 < float(jnp.abs(y - x @ w).max() / jnp.abs(y).max()) < 3e-2


@tiers.DEVICES
def test_each_device_runs_its_shard_in_shard_map() -> None:
    x, w = product(Layout("nf4", -2, 64), -2, 4, 128, 8 * 256, jnp.float32)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    specs = (P(), w.component_specs(P(None, "x"), mesh))
    fn = partial(run, contract=-2)
    y = jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=P(None, "x"), check_vma=False)(x, w)
    assert_close(y, reference.matmul(Product(x, w, -2, jnp.float32)))


# --- choice of the kernel


def test_tiles_cover_every_row_and_the_whole_sum() -> None:
    for m in (1, 16, 256):
        for k, n in ((4096, 4096), (4096, 11008), (11008, 4096), (576, 1536)):
            for per_byte in (1, 2, 4, 8):
                for contract in (-2, -1):
                    t = tiling.sizes_for(m, k, n, per_byte=per_byte, contract=contract)
                    assert t.m == m and k <= t.k < k + t.chunk and t.k % t.chunk == 0
                    assert t.n % (128 * (per_byte if contract == -2 else 1)) == 0
    far = tiling.sizes_for(256, 128256, 4096, per_byte=2, contract=-2)
    assert far.k * 256 * 4 * 2 <= tiling.vmem("") and far.k % far.chunk == 0


def test_the_program_for_a_tpu_has_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def has_kernel(n: int, use_kernel: bool = True) -> bool:  # a new n each time, since traces are cached
        w = FORMATS["int8"].quantize(jnp.ones((512, n)), axis=-2).replace(use_kernel=use_kernel)
        program = export.export(jax.jit(lambda x, w: x @ w), platforms=["tpu"])(jnp.ones((16, 512)), w)
        return "tpu_custom_call" in program.mlir_module()

    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert not has_kernel(128)  # the chip is unknown
    chip = jax.sharding.AbstractMesh((), (), abstract_device=jax.sharding.AbstractDevice(**CHIP_FIELDS))
    with jax.sharding.use_abstract_mesh(chip):
        assert has_kernel(256)
        assert not has_kernel(384, use_kernel=False)
        with lowbit.use_kernel(False):
            assert not has_kernel(512)


def test_operands_that_the_kernel_does_not_support_run_by_the_reference() -> None:
    def fits(x: Any, w: Any) -> bool:
        return tpu.matmul_fits(Product(x, w, -2, jnp.float32))

    x = jnp.ones((2, 60))
    assert fits(x, lowbit.Array8B.quantize(jnp.ones((60, 128)), axis=-2))
    assert not fits(x, lowbit.Array8B.quantize(jnp.ones((60, 128)), axis=-2, block_size=10))
    assert not fits(x, lowbit.Array8B.quantize(jnp.ones((60, 128)), axis=-1, block_size=48))
    assert not fits(x.astype(jnp.int32), lowbit.Array8B.quantize(jnp.ones((60, 128)), axis=-2))


@tiers.DEVICES
@pytest.mark.parametrize("spec", [P(None, "x"), P("x", None)], ids=str)
def test_explicit_axes_partition_products_without_the_compiler(spec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "can_partition_calls", lambda *operands: False)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        dense = jax.device_put(gaussian(0, (512, 256)), NamedSharding(mesh, spec))
        w = lowbit.ArrayNF4.quantize(dense, axis=-2)
        x = jax.device_put(gaussian(1, (16, 512)), NamedSharding(mesh, P(None, spec[0])))
        multiply = jax.jit(lowbit.implicit(partial(jnp.einsum, "mk,kn->mn", out_sharding=P(None, spec[1]))))
        y, text = multiply(x, w), multiply.lower(x, w).compile().as_text()
        want = multiply(x, w.materialize())
    assert jax.typeof(y) == jax.typeof(want)
    assert_close(y, want)
    assert "lowbit_matmul" in text and "f32[512,256]" not in text and "all-gather" not in text


@tiers.DEVICES
def test_automatic_axes_decode_with_a_warning_where_the_compiler_does_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "can_partition_calls", lambda *operands: False)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    w = lowbit.Array8B.quantize(gaussian(0, (136, 264)), axis=-2)
    x = gaussian(1, (7, 136))
    multiply = jax.jit(lambda x, w: x @ w)
    assert "lowbit_matmul" in multiply.lower(x, w).compile().as_text()  # nothing to partition on one device
    assert_close(multiply(x, w), x @ w.materialize())
    sharded = w.with_sharding(NamedSharding(mesh, P(None, "x")))
    with pytest.warns(RuntimeWarning, match="8 .* with automatic axes.* explicit axes or shard_map"):
        text = multiply.lower(x, sharded).compile().as_text()
    assert "lowbit_matmul" not in text and "all-gather" not in text
    assert_close(multiply(x, sharded), x @ w.materialize())
