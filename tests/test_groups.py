"""Products of groups of rows, each with its own matrix: `ragged_dot` with quantized experts."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from helpers import Layout, assert_close, gaussian
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lowbit
from lowbit import implicit
from lowbit.kernels import groups, reference
from lowbit.kernels.gpu import kernel as gpu
from lowbit.kernels.product import Product
from lowbit.kernels.tpu import kernel as tpu

E, K, N, ROWS = 4, 64, 48, 20
SIZES = [[3, 0, 9, 5], [20, 0, 0, 0], [0, 0, 0, 0], [2, 5, 6, 7]]


def normal(seed: int, *shape: int) -> jax.Array:
    return gaussian(seed, shape)


def experts(layout: Layout | None = None) -> tuple[Any, jax.Array]:
    w = (layout or Layout("nf4", -2, 32)).quantize(normal(0, E, K, N))
    return w, w.materialize()


ragged = implicit(lax.ragged_dot)


@jax.jit
def forward_and_backward(w: Any, x: Any, sizes: Any) -> Any:
    y, back = jax.vjp(lambda x: ragged(x, w, sizes), x)
    return y, back(jnp.cos(y))[0]


def by_loop(dense: Any, x: Any, sizes: Any) -> Any:
    """The same in float64, one expert after the other."""
    dense, x = np.asarray(dense, np.float64), np.asarray(x, np.float64)
    y, back = np.zeros((len(x), dense.shape[-1])), np.zeros(x.shape)
    ends = np.cumsum(sizes)
    for w, begin, end in zip(dense, [0, *ends], ends, strict=False):
        y[begin:end] = x[begin:end] @ w
        back[begin:end] = np.cos(y[begin:end]) @ w.T
    return y.astype(np.float32), back.astype(np.float32)


def test_every_layout_forward_and_backward(layout: Layout) -> None:
    w, dense = experts(layout)
    x = normal(1, ROWS, K)
    for sizes in SIZES:
        assert_close(forward_and_backward(w, x, jnp.array(sizes)), by_loop(dense, x, sizes))


@pytest.mark.parametrize("format", ["nf4", "q3"])
def test_the_reference_decodes_one_expert_at_a_time(format: str) -> None:
    w, dense = experts(Layout(format, -1, 16))
    x = normal(1, ROWS, K)
    with lowbit.use_kernel(False):
        for sizes in SIZES:
            assert_close(forward_and_backward(w, x, jnp.array(sizes)), by_loop(dense, x, sizes))
        text = forward_and_backward.lower(w, x, jnp.array(SIZES[0])).as_text()
    assert f"tensor<{K}x{N}xf32>" in text and f"tensor<{E}x{K}x{N}xf32>" not in text


def test_fast_arithmetic_rounds_x_alone() -> None:
    w, dense = experts()
    x, sizes = normal(1, ROWS, K), jnp.array([3, 0, 9, 5])
    with lowbit.compute("fast"):
        y = jax.jit(ragged)(x, w, sizes)
    off = jnp.abs(y - lax.ragged_dot(x, dense, sizes)).max()
    assert 1e-4 < float(off) < 0.3 and (y[17:] == 0).all()


def test_mapped_axes() -> None:
    w, dense = experts()
    x, sizes = normal(1, 3, ROWS, K), jnp.array(SIZES[:3])
    layers = jax.tree.map(lambda a: jnp.stack([a, a[::-1], a]), w)  # another stack of experts for each

    def check(w: Any, dense: Any, *axes: Any) -> None:
        mapped = jax.vmap(lambda w, x, sizes: ragged(x, w, sizes), axes)
        operands = [x if axes[1] is not None else x[0], sizes if axes[2] is not None else sizes[0]]
        got = jax.jit(mapped)(w, *operands)
        pick = [lambda a, i, axis=axis: a if axis is None else a[i] for axis in axes]
        want = [lax.ragged_dot(pick[1](operands[0], i), pick[0](dense, i), pick[2](operands[1], i)) for i in range(3)]
        assert_close(got, jnp.stack(want))

    check(w, dense, None, 0, 0)
    check(w, dense, None, None, 0)
    check(w, dense, None, 0, None)
    check(layers, layers.materialize(), 0, 0, 0)
    check(layers, layers.materialize(), 0, None, None)
    inside = implicit(jax.vmap(lax.ragged_dot))
    assert_close(jax.jit(inside)(x, layers, sizes), inside(x, layers.materialize(), sizes))
    # Experts that all share are not repeated.
    text = jax.jit(jax.vmap(ragged, (0, None, 0))).lower(x, w, sizes).as_text()
    assert f"tensor<3x{E}x{K}x" not in text


@pytest.mark.parametrize("offset", [False, True])
def test_a_scan_over_layers_of_experts(offset: bool) -> None:
    w = Layout("int4", -2, 32, (("offset", True),) if offset else ()).quantize(normal(0, 3, E, K, K))
    x, sizes = normal(1, ROWS, K), jnp.array([3, 0, 9, 5])

    @jax.jit
    @partial(implicit)
    def net(w: Any, x: Any) -> Any:
        def loss(x: Any) -> Any:
            return lax.scan(lambda x, w: (jnp.tanh(lax.ragged_dot(x, w, sizes)), None), x, w)[0].sum()

        return jax.value_and_grad(loss)(x)

    assert_close(net(w, x), net(w.materialize(), x), 1e-4)


def test_any_dimension_numbers() -> None:
    w, dense = experts(Layout("int8", -1, None))
    w, dense = w.mT, jnp.matrix_transpose(dense)  # (E, N, K)
    dims = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[2], rhs_group_dimensions=[0]
    )
    general = implicit(partial(lax.ragged_dot_general, ragged_dot_dimension_numbers=dims))
    x, sizes = normal(1, 5, K, ROWS), jnp.array([3, 0, 9, 5])
    assert_close(general(x, w, sizes), general(x, dense, sizes))


def test_more_rows_in_groups_than_there_are() -> None:
    w, dense = experts()
    x, sizes = normal(1, 7, K), jnp.array([3, 9, 2, 5])
    for kernel in (True, False):
        with lowbit.use_kernel(kernel):
            assert_close(ragged(x, w, sizes), lax.ragged_dot(x, dense, sizes))


def test_experts_that_share_scales_are_right() -> None:
    w: Any = lowbit.Array8B.quantize(normal(0, E, K, N), axis=0)
    x, sizes = normal(1, ROWS, K), jnp.array([3, 0, 9, 5])
    with lowbit.materialization("allow"):
        assert_close(ragged(x, w, sizes), lax.ragged_dot(x, w.materialize(), sizes))


# --- over devices

SHARDINGS = {
    "columns": (P(), P(None, None, "x")),
    "summed": (P(None, "x"), P(None, "x", None)),
    "experts": (P(), P("x")),
    "rows": (P("x"), P()),
    "rows and experts": (P("x"), P("y")),
    "rows and experts over the same devices": (P("x"), P("x")),
}


@tiers.DEVICES
@pytest.mark.parametrize("name", SHARDINGS)
def test_each_device_has_its_shard(name: str) -> None:
    of_x, of_w = SHARDINGS[name]
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    w = Layout("nf4", -2, 16).quantize(normal(0, E, K, N))
    x = jax.device_put(normal(1, ROWS, K), NamedSharding(mesh, of_x))
    placed = w.with_sharding(NamedSharding(mesh, of_w))
    multiply = jax.jit(ragged)
    for sizes in map(jnp.array, SIZES):
        assert_close(multiply(x, placed, sizes), lax.ragged_dot(x, w.materialize(), sizes))
    text = str(multiply.lower(x, placed, jnp.array(SIZES[0])).compile().as_text())
    assert "lowbit_matmul" in text
    assert ("all-gather(" in text) == ("same" in name)


@tiers.DEVICES
def test_inside_shard_map() -> None:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    w, dense = experts()
    x, sizes = normal(1, 4, ROWS, K), jnp.array(SIZES)

    def loss(w: Any, x: Any, sizes: Any) -> Any:
        return lax.psum(jnp.sin(ragged(x[0], w, sizes[0])).sum(), "x")

    specs = (P(), P("x"), P("x"))
    mapped = jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=P())
    got = jax.jit(jax.grad(mapped, 1))(w, x, sizes)
    assert_close(got, jax.jit(jax.grad(mapped, 1))(dense, x, sizes))


# --- steps


def test_steps_visit_every_row_once() -> None:
    w, _ = experts()
    steps_of = jax.jit(groups.steps_of, static_argnums=1)
    for sizes in [*SIZES, [5, 9, 9, 9]]:
        product = Product(normal(1, ROWS, K), w, -2, jnp.float32, sizes=jnp.array(sizes))
        ends = np.minimum(np.cumsum(sizes), ROWS)
        want = [int(np.searchsorted(ends, row, side="right")) for row in range(ROWS)]
        for tile in (1, 3, 8, 20, 64):
            found: list[Any] = [None] * ROWS
            steps = steps_of(product, tile)
            assert len(steps.tile) == groups.step_count(product, tile)
            assert (np.diff(steps.tile) >= 0).all()  # visits of a tile follow each other
            for at, matrix, begin, end in zip(*map(np.asarray, steps), strict=True):
                assert begin == end or at * tile <= begin < end <= (at + 1) * tile
                for row in range(begin, end):
                    assert found[row] is None
                    found[row] = E if matrix < 0 else matrix
            assert found == want


# Scales along the sum and across it; the first tier has scale codes and group scales too.
KERNELS = [(Layout("nf4", -2, 64), -2), (Layout("int8", -1, None), -2), (Layout("q4", -1, 32), -1)]


@pytest.mark.parametrize(("blocks", "contract"), tiers.tiered(KERNELS, KERNELS[::2], KERNELS[:1]))
def test_kernels_of_accelerators(blocks: Layout, contract: int) -> None:
    k, n = 128, 256
    w = blocks.quantize(normal(0, 2, E, *((k, n) if contract == -2 else (n, k)))).replace(index=jnp.int32(1))
    on_gpu = jax.jit(partial(gpu.matmul, interpret=True))
    on_tpu = jax.jit(partial(tpu.matmul, chip="TPU v5", interpret=True))
    x = normal(1, 150, k)
    for sizes in ([3, 0, 130, 5], [0, 0, 0, 150]):
        product = Product(x, w, contract, jnp.float32, arithmetic="exact", sizes=jnp.array(sizes))
        want = jax.jit(reference.matmul)(product)
        assert_close(on_gpu(product), want, 1e-5)
        assert_close(on_tpu(product), want, 1e-5)
