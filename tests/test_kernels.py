"""The table of kernels, and the product primitive around a kernel that partitions itself."""

import subprocess
import sys
import textwrap
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
import tiers
from helpers import Layout, assert_close, gaussian
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lowbit
from lowbit import dispatch
from lowbit.kernels import reference
from lowbit.kernels.product import Product


def partitioned_matmul(product):
    """A kernel that is opaque to the compiler, so that it must partition itself."""
    leaves, tree = jax.tree.flatten(product)

    def on_one_device(*leaves):
        return reference.matmul(jax.tree.unflatten(tree, leaves))

    call = custom_partitioning(on_one_device)
    scales = "b n" if product.w.scales.shape[0] > 1 else "one n"
    call.def_partition(
        partition=lambda mesh, operands, result: (
            mesh,
            on_one_device,
            result.sharding,
            tuple(operand.sharding for operand in operands),
        ),
        infer_sharding_from_operands=lambda mesh, operands, _: NamedSharding(
            mesh, P(None, operands[1].sharding.spec[-1])
        ),
        sharding_rule=f"m k, k n, {scales} -> m n",
    )
    return call(*leaves)


@pytest.fixture
def kernel(monkeypatch):
    asked = []

    def fits(product):
        asked.append(product.contract)
        matrices = product.w.ndim == product.x.ndim == 2
        return product.contract == -2 and matrices and max(product.w.packing.values()) == 1

    monkeypatch.setattr(dispatch, "_kernels", {})
    dispatch.register_kernel("matmul", "cpu", partitioned_matmul, fits)
    return asked


def test_a_kernel_is_found_by_platform_and_operands(kernel) -> None:
    w = Layout("int8", -2, None).quantize(jnp.ones((64, 96)))
    assert list(dispatch.find_kernels("matmul", Product(jnp.ones((4, 64)), w, -2, jnp.float32))) == ["cpu"]
    assert dispatch.find_kernels("matmul", Product(jnp.ones((4, 96)), w, -1, jnp.float32)) == {}
    assert dispatch.find_kernels("take", w) == {}


@tiers.DEVICES
@pytest.mark.parametrize("block_size", [None, 32])
def test_all_transformations_around_a_kernel_that_partitions_itself(kernel, block_size) -> None:
    x = gaussian(0, (8, 64))
    q = Layout("int8", -2, block_size).quantize(gaussian(1, (64, 128)))
    w = q.materialize()

    def loss(w, x):
        return jnp.sin(x @ w).sum()

    assert_close(x @ q, x @ w)
    assert_close(jax.jvp(partial(loss, q), (x,), (x,)), jax.jvp(partial(loss, w), (x,), (x,)))
    assert_close(jax.grad(partial(loss, q))(x), jax.grad(partial(loss, w))(x))
    assert_close(jax.vmap(jax.grad(partial(loss, q)))(x), jax.vmap(jax.grad(partial(loss, w)))(x))
    assert_close(jax.hessian(partial(loss, q))(x[0]), jax.hessian(partial(loss, w))(x[0]))
    assert set(kernel) == {-1, -2}

    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    shardings = jax.tree.map(partial(NamedSharding, mesh), q.component_specs(P(None, "x")))
    columns = jax.device_put(q, shardings)
    program = jax.jit(lambda x, q: x @ q)
    assert "all-gather" not in program.lower(x, columns).compile().as_text()
    assert program(x, columns).sharding.spec == P(None, "x")
    assert_close(program(x, columns), x @ w)
    assert_close(jax.jit(jax.grad(partial(loss, columns)))(x), jax.grad(partial(loss, w))(x))


@pytest.mark.parametrize(
    ("backend", "version", "known"),
    [("gpu", "PJRT C API\ncuda 13000", True), ("gpu", "rocm 6", False), ("tpu", "", True)],
)
def test_kernels_are_known_by_platform(
    backend: str, version: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimpleNamespace(client=SimpleNamespace(platform_version=version))
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert lowbit.is_kernel_available() == known


# --- lazy imports


def run(code: str) -> str:
    """The output of this code in a new process."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_program_for_cpu_imports_no_kernel_of_other_platforms() -> None:
    code = """
        import sys
        import jax.numpy as jnp, lowbit
        print(jnp.ones((2, 64)) @ lowbit.quantize(jnp.ones((64, 4)), dtype="int8"))
        print([name for name in ("triton", "tpu") if f"jax.experimental.pallas.{name}" in sys.modules])
    """
    assert run(code).endswith("[]")


def test_without_the_triton_backend_the_reference_runs_on_cuda() -> None:
    code = """
        import sys
        sys.modules["jax.experimental.pallas.triton"] = None  # as where JAX has none
        import jax, jax.numpy as jnp, lowbit
        from lowbit.kernels import gpu
        x, q = jnp.ones((2, 64)), lowbit.quantize(jnp.ones((64, 96)), dtype="int8")
        assert (x @ q)[0, 0] == 64
        text = jax.jit(lambda x, q: x @ q).trace(x, q).lower(lowering_platforms=("cuda",)).as_text()
        print(gpu.is_available(), "triton" in text, "64x96xf32" in text)
    """
    assert run(code) == "False False True"
