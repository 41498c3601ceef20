"""Compile the TPU kernels with the compiler of TPU, which needs no chip: `make test-tpu-aot`."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import lowbit
from lowbit import FORMATS, QuantizedArray
from lowbit.formats import packed
from lowbit.kernels.product import Product
from lowbit.kernels.tpu import kernel, tiling

P = PartitionSpec
TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v5p": "v5p:2x2x1", "tpu7x": "tpu7x:2x2x1"}
for name, layout in packed.LAYOUTS.items():
    if name not in FORMATS:
        packed.declare(name, layout, error=1.0)


def mesh_of(chip: str, devices: int, kind: AxisType = AxisType.Auto) -> Mesh:
    found = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip]).devices
    return Mesh(np.array(found[:devices]), ("x",), axis_types=(kind,))


def shaped(mesh: Mesh, tree: Any, spec: Any = None) -> Any:
    """Shapes with shardings over the chips of a mesh."""
    spec = jax.tree.map(lambda leaf: P(*[None] * len(leaf.shape)), tree) if spec is None else spec

    def place(leaf: Any, spec: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(place, tree, spec)


def weight(format: str, shape: tuple[int, ...], axis: int, dtype: Any = jnp.bfloat16, **options: Any) -> QuantizedArray:
    dense = jax.ShapeDtypeStruct(shape, dtype)
    return jax.eval_shape(lambda w: FORMATS[format].quantize(w, axis=axis, **options), dense)


def compiled(fn: Any, *operands: Any) -> str:
    """The program compiled for the chips of its operands, without a mesh in context."""
    return jax.jit(lowbit.implicit(fn)).lower(*operands).compile().as_text()


def multiply(x: Any, w: Any) -> Any:
    return x @ w


def product(mesh: Mesh, format: str, contract: int, m: int, k: int, n: int, dtype: Any, **options: Any) -> str:
    """The compiled program of a product, summed over the axis that has the scales."""
    w = weight(format, (k, n) if contract == -2 else (n, k), contract, dtype, **options)
    fn = multiply if contract == -2 else lambda x, w: x @ w.T
    return compiled(fn, shaped(mesh, jax.ShapeDtypeStruct((m, k), dtype)), shaped(mesh, w))


def assert_in_the_kernel(text: str, k: int, n: int) -> None:
    assert 'custom_call_target="tpu_custom_call"' in text and "lowbit_matmul" in text
    dense = rf"(?:f32|bf16)\[(?:\d+,)?(?:{k},{n}|{n},{k})\]"
    assert not re.search(dense, text), re.search(dense, text)


@pytest.mark.parametrize("contract", [-2, -1])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_every_format_and_direction(chip: str, format: str, contract: int) -> None:
    mesh = mesh_of(chip, 1)
    for m, dtype in ((16, jnp.bfloat16), (16, jnp.float32), (256, jnp.float32)):
        assert_in_the_kernel(product(mesh, format, contract, m, 4096, 11008, dtype), 4096, 11008)
    for m, k, n in ((1, 576, 1536), (3, 77, 130), (1000, 11008, 4096)):
        assert_in_the_kernel(product(mesh, format, contract, m, k, n, jnp.bfloat16), k, n)


@pytest.mark.parametrize("contract", [-2, -1])
@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_offsets_and_scale_codes(chip: str, contract: int) -> None:
    mesh = mesh_of(chip, 1)
    text = product(mesh, "int4", contract, 16, 4096, 11008, jnp.bfloat16, offset=True, scale_dtype=jnp.bfloat16)
    assert_in_the_kernel(text, 4096, 11008)
    text = product(mesh, "q4", contract, 16, 4096, 11008, jnp.bfloat16, block_size=16)
    assert_in_the_kernel(text, 4096, 11008)
    if jax.device_count() == 1:  # no decoded scales
        assert not re.search(r"f32\[(?:\d+,)?(?:256,11008|11008,256)\]", text)
    # Scales across the summed axis, as in the gradient of a product.
    w = weight("q3", (4096, 11008) if contract == -2 else (11008, 4096), -3 - contract)
    fn = multiply if contract == -2 else lambda x, w: x @ w.T
    text = compiled(fn, shaped(mesh, jax.ShapeDtypeStruct((16, 4096), jnp.bfloat16)), shaped(mesh, w))
    assert_in_the_kernel(text, 4096, 11008)


@pytest.mark.parametrize("chip", ["v5e", "v6e", "v5p"])
def test_integers_on_the_matrix_unit(chip: str) -> None:
    with lowbit.compute("fast"):
        for format in ("int8", "nf4", "q4"):
            text = product(mesh_of(chip, 1), format, -2, 16, 4096, 4096, jnp.bfloat16)
            assert_in_the_kernel(text, 4096, 4096)
            assert "s8[1,16,4096]" in text  # the activations


@pytest.mark.parametrize("spec", [P(None, "x"), P("x", None)], ids=str)
@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_four_chips(chip: str, spec: Any) -> None:
    """Each chip runs the kernel on its own shard; the only collective is the sum over a sharded contracted axis."""
    w = weight("nf4", (4096, 4096), -2)
    summed = spec[0] is not None

    explicit = mesh_of(chip, 4, AxisType.Explicit)
    x = shaped(explicit, jax.ShapeDtypeStruct((16, 4096), jnp.bfloat16), P(None, spec[0]))
    typed = partial(jnp.einsum, "mk,kn->mn", out_sharding=P(None, spec[1]))
    with jax.set_mesh(explicit):
        text = compiled(typed, x, shaped(explicit, w, w.component_specs(spec, explicit)))
    assert_in_the_kernel(text, 4096, 4096)
    assert set(re.findall(r" (all-\w+|reduce-scatter|collective-permute)(?:-start)?\(", text)) == (
        {"all-reduce"} if summed else set()
    )

    auto = mesh_of(chip, 4)
    add = (lambda y: lax.psum(y, "x")) if summed else (lambda y: y)
    mapped = jax.shard_map(
        lambda x, w: add(x @ w),
        mesh=auto,
        in_specs=(P(None, spec[0]), w.component_specs(spec, auto)),
        out_specs=P(None, spec[1]),
        check_vma=False,
    )
    x = shaped(auto, jax.ShapeDtypeStruct((16, 4096), jnp.bfloat16), P(None, spec[0]))
    text = jax.jit(mapped).lower(x, shaped(auto, w, w.component_specs(spec, auto))).compile().as_text()
    assert_in_the_kernel(text, 4096, 4096)


def test_automatic_axes_over_several_chips_decode_with_a_warning() -> None:
    mesh, spec = mesh_of("v5e", 4), P(None, "x")
    w = weight("int8", (512, 1024), -2)
    x = shaped(mesh, jax.ShapeDtypeStruct((16, 512), jnp.bfloat16))
    with pytest.warns(RuntimeWarning, match=r"4 TPU v5 lite with automatic axes.* explicit axes or shard_map"):
        text = compiled(multiply, x, shaped(mesh, w, w.component_specs(spec, mesh)))
    assert "lowbit_matmul" not in text and "all-gather" not in text


def test_a_single_device_says_which_chip_it_is() -> None:
    place = jax.sharding.SingleDeviceSharding(mesh_of("v6e", 1).devices[0])
    operands = jax.ShapeDtypeStruct((16, 512), jnp.bfloat16), weight("nf4", (512, 1024), -2)
    x, w = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), operands)
    assert_in_the_kernel(compiled(multiply, x, w), 512, 1024)


@pytest.mark.parametrize("format", FORMATS)
def test_a_scan_reads_its_layers_in_place(format: str) -> None:
    mesh = mesh_of("v5e", 1)
    w = weight(format, (12, 1024, 2048), -2)
    back = weight(format, (12, 2048, 1024), -2)

    def net(x: Any, w: Any, back: Any) -> Any:
        return lax.scan(lambda x, w: (jnp.tanh(x @ w[0]) @ w[1], None), x, (w, back))[0]

    x = shaped(mesh, jax.ShapeDtypeStruct((16, 1024), jnp.bfloat16))
    text = compiled(net, x, shaped(mesh, w), shaped(mesh, back))
    assert_in_the_kernel(text, 1024, 2048)
    # No instruction makes a copy of the codes of one layer or of all.
    for line in text.splitlines():
        found = re.match(r"\s*(?:ROOT )?%\S+ = [us]8\[(?:\d+,)?(?:1024|2048),\d+\]\S* (\S+?)\(", line)
        assert not found or found[1] in ("parameter", "get-tuple-element", "bitcast"), line


@pytest.mark.parametrize("contract", [-2, -1])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_each_expert_on_its_own_rows(chip: str, format: str, contract: int) -> None:
    mesh, (k, n) = mesh_of(chip, 1), (2048, 1408)
    w = weight(format, (8, k, n) if contract == -2 else (8, n, k), contract)
    experts = (lambda w: w) if contract == -2 else (lambda w: w.mT)
    for rows in (512, 24):
        x, sizes = shaped(mesh, (jax.ShapeDtypeStruct((rows, k), jnp.bfloat16), jax.ShapeDtypeStruct((8,), jnp.int32)))
        text = compiled(lambda x, w, sizes: lax.ragged_dot(x, experts(w), sizes), x, shaped(mesh, w), sizes)
        assert_in_the_kernel(text, k, n)


def test_a_tile_that_is_too_large_is_refused() -> None:
    m, k, n = 16, 1 << 20, 512
    mesh = mesh_of("v5e", 1)
    x, w = shaped(mesh, (jax.ShapeDtypeStruct((m, k), jnp.bfloat16), weight("nf4", (k, n), -2)))
    sizes = tiling.Sizes(m=m, n=256, k=k, chunk=128)

    def too_large(x: Any, w: Any) -> Any:
        return kernel.matmul(Product(x, w, -2, x.dtype), "TPU v5 lite", sizes=sizes)

    with jax.set_mesh(mesh), pytest.raises(Exception, match=r"(?i)vmem|RESOURCE_EXHAUSTED"):
        jax.jit(too_large).lower(x, w).compile()
    # With the sizes of `sizes_for` it compiles.
    assert_in_the_kernel(product(mesh, "nf4", -2, m, k, n, jnp.bfloat16), k, n)
