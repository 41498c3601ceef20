"""The native CPU kernels as the library uses them. Their own arithmetic is tested in test_native.py."""

import itertools
import os
import platform
import shutil
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from helpers import QUICK_COMPILE, Layout, assert_close, gaussian

import lowbit
from lowbit import dispatch, implicit
from lowbit.kernels import cpu, reference
from lowbit.kernels.product import Product

MACHINE, SUPPORTED = platform.machine(), ("x86_64", "aarch64", "arm64")
native = pytest.mark.skipif(
    cpu.instruction_set() is None, reason="installed without a C++ compiler, or LOWBIT_NATIVE=0"
)


def run(code: str, **env: str) -> subprocess.CompletedProcess:
    """A process of its own, with one device."""
    clean = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "LOWBIT_ISA")}
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    return subprocess.run(command, env=clean | {"XLA_FLAGS": QUICK_COMPILE} | env, capture_output=True, text=True)


def test_the_library_is_there_where_it_can_be_built() -> None:
    if os.environ.get("LOWBIT_NATIVE") != "0" and MACHINE in SUPPORTED and shutil.which("c++"):
        assert cpu.instruction_set() is not None


def test_a_missing_library_warns_and_runs_the_reference(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("LOWBIT_NATIVE", raising=False)
    wanted = (
        r"no native CPU kernels.*C\+\+ compiler.*LOWBIT_NATIVE=0" if MACHINE in SUPPORTED else "no native CPU kernels"
    )
    with pytest.warns(RuntimeWarning, match=wanted):
        assert cpu._load([str(tmp_path)]) is None
    (tmp_path / "lowbit_native.so").write_bytes(b"a library of another machine")
    with pytest.warns(RuntimeWarning, match=r"does not load here: .*lowbit_native.so.*LOWBIT_NATIVE=0"):
        assert cpu._load([str(tmp_path)]) is None
    monkeypatch.setenv("LOWBIT_NATIVE", "0")
    assert cpu._load([str(tmp_path)]) is None  # no output


def test_the_warning_says_what_would_help_on_each_platform() -> None:
    for system, machine, words in [
        ("linux", "x86_64", ["apt-get install g++", "for x86_64"]),
        ("linux", "aarch64", ["apt-get install g++", "for aarch64"]),
        ("darwin", "arm64", ["xcode-select --install", "for arm64"]),
        ("win32", "AMD64", ["none for win32", "WSL"]),
        ("linux", "riscv64", ["none for riscv64", "does not help"]),
    ]:
        why = cpu.why_not_built(system, machine)
        assert all(word in why for word in words), why


def test_environment_variables_choose_the_instruction_set() -> None:
    code = """
        import jax.numpy as jnp, lowbit
        from lowbit.kernels import cpu
        y = jnp.ones((2, 64)) @ lowbit.quantize(jnp.ones((64, 4)))
        print(lowbit.is_kernel_available(), cpu.instruction_set(), y[0, 0])
    """
    assert run(code, LOWBIT_NATIVE="0").stdout.split() == ["False", "None", "64.0"]
    if cpu.instruction_set():
        assert run(code, LOWBIT_ISA="generic").stdout.split() == ["True", "generic", "64.0"]
        wrong = run(code, LOWBIT_ISA="sse9")
        assert wrong.returncode and "LOWBIT_ISA=sse9 must be one of" in wrong.stderr


@native
@pytest.mark.first(*tiers.EACH_MECHANISM)
def test_products_call_the_kernel_and_build_no_dense_weight(layout: Layout) -> None:
    k, n = 256, 512
    x, q = jnp.ones((8, k)), layout.quantize(gaussian(0, (k, n)))
    for program in (jax.jit(lambda x, q: x @ q), jax.jit(jax.grad(lambda x, q: jnp.sin(x @ q).sum()))):
        compiled = program.lower(x, q).compile()
        assert 'custom_call_target="lowbit_matmul"' in compiled.as_text()
        assert not any(f"{dtype}[{k},{n}]" in compiled.as_text() for dtype in ("f32", "bf16", "f16"))
        assert compiled.memory_analysis().temp_size_in_bytes < q.size


@native
def test_a_scanned_stack_of_layers_has_no_temporary_of_the_size_of_one() -> None:
    layers, width = 12, 256
    keys = jax.random.split(jax.random.key(0), 2)
    config = lowbit.QuantizationConfig("nf4", axis=-2)
    up, down = (lowbit.quantize(jax.random.normal(key, (layers, width, width)) / 16, config) for key in keys)

    def model(x, up, down):
        def layer(x, w):
            return x + jnp.tanh(x @ w[0]) @ w[1], None

        return jax.lax.scan(layer, x, (up, down))[0]

    x = jnp.ones((4, width))
    compiled = jax.jit(implicit(model)).lower(x, up, down).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < up.nbytes // layers
    assert_close(compiled(x, up, down), jax.jit(model)(x, up.materialize(), down.materialize()))


# Relative root mean square errors, as documented in docs/formats.md.
FAST = {"int8": 0.01, "nf4": 0.011, "ternary": 0.01, "binary": 0.01}


@native
@pytest.mark.parametrize("format", FAST)
@pytest.mark.parametrize("axis", [-2, -1])
def test_fast_products_are_near(format: str, axis: int) -> None:
    w = gaussian(0, (1024, 320)) if axis == -2 else gaussian(0, (320, 1024))
    x = gaussian(1, (24, 1024))
    q = lowbit.quantize(w, lowbit.QuantizationConfig(format, axis=axis, compute="fast"))
    q = q if axis == -2 else q.T
    want = np.asarray(x, np.float64) @ np.asarray(q.materialize(), np.float64)
    error = np.linalg.norm(np.asarray(x @ q) - want) / np.linalg.norm(want)
    assert 1e-4 < error < FAST[format]
    with lowbit.compute("exact"):
        assert np.linalg.norm(np.asarray(x @ q) - want) / np.linalg.norm(want) < 1e-6
    # Gradients are exact.
    grad, dense = (jax.grad(lambda x, w: (x @ w).sum())(x, w) for w in (q, q.materialize()))
    assert_close(grad, dense)


# Scales along the last axis and along the one before alternate; all formats along both in the second tier.
ALTERNATING = [*zip(tiers.MECHANISMS, itertools.cycle((-1, -2)), strict=False)]
LAYOUTS = {"each mechanism": ALTERNATING, "all": [*itertools.product(lowbit.FORMATS, (-1, -2))]}


@native
@pytest.mark.parametrize("which", tiers.tiered(LAYOUTS, ["each mechanism"]))
def test_on_one_device_rows_and_codes_come_from_the_library(which: str) -> None:
    code = """
        import jax, jax.numpy as jnp, numpy as np, lowbit
        from lowbit.ops.squares import squares
        assert jax.device_count() == 1 and lowbit.is_kernel_available()
        w = jax.random.normal(jax.random.key(0), (192, 200))
        ids = jnp.array([[3, 191, 0], [5, 5, -1]])
        values = np.asarray(w)
        for format, axis in layouts:
            config = lowbit.QuantizationConfig(format, axis=axis)
            q = lowbit.quantize(w, config)
            with lowbit.use_kernel(False):
                other = lowbit.quantize(w, config)
            for a, b in zip(jax.tree.leaves(q), jax.tree.leaves(other), strict=True):
                np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
            dense = np.asarray(q.materialize())
            look_up = jax.jit(lambda q, ids: q[ids]).lower(q, ids).compile()
            assert "lowbit_take" in look_up.as_text()
            np.testing.assert_array_equal(np.asarray(look_up(q, ids)), dense[np.asarray(ids)])
            each = jax.jit(jax.vmap(lambda q, i: q[i], (None, 0)))
            np.testing.assert_array_equal(np.asarray(each(q, ids)), np.asarray(look_up(q, ids)))
            measure = jax.jit(squares).lower(q, w).compile()
            assert "lowbit_squares" in measure.as_text()
            lost, size = map(np.asarray, measure(q, w))
            np.testing.assert_allclose(lost, np.sum((dense - values) ** 2, -1), rtol=1e-4)
            np.testing.assert_allclose(size, np.sum(values**2, -1), rtol=1e-5)
            np.testing.assert_allclose(np.sum(jax.jit(squares)(q.T, w.T)[0]), np.sum(lost), rtol=1e-5)
        assert "lowbit_encode" in jax.jit(lowbit.quantize).lower(w).compile().as_text()
        for format in ("q4", "q3", "q2", "int4", "int6"):
            searched = jax.jit(lambda w, format=format: lowbit.quantize(w, format)).lower(w).compile()
            assert "lowbit_search" in searched.as_text(), format
        # Scales in 8 bits are decoded inside of the product.
        q = lowbit.ArrayNF4.quantize(w, axis=-2, double_quant=True)
        x = jax.random.normal(jax.random.key(1), (3, 192))
        np.testing.assert_allclose(x @ q, x @ q.materialize(), atol=1e-4)
        np.testing.assert_allclose((x @ q) @ q.T, (x @ q.materialize()) @ q.materialize().T, atol=1e-2)
        stack = jax.vmap(lambda w: lowbit.ArrayNF4.quantize(w, double_quant=True))(jnp.stack([w, 2 * w]))
        got = lowbit.implicit(lambda x, s: jax.lax.scan(lambda c, q: (c, x @ q), 0, s)[1])(x, stack)
        np.testing.assert_allclose(got, x @ stack.materialize(), atol=1e-4)
        print("done")
    """
    done = run(f"layouts = {LAYOUTS[which]}\n" + textwrap.dedent(code))
    assert done.stdout.strip() == "done", done.stderr


NAMES = {"all": [*lowbit.FORMATS], "each mechanism": tiers.MECHANISMS}
NARROW = [*itertools.product((jnp.bfloat16, jnp.float16), ("each mechanism", "all"))]


@native
@pytest.mark.parametrize(("dtype", "which"), tiers.tiered(NARROW, NARROW[::2], NARROW[:1]))
def test_narrow_activations_and_results(dtype, which: str) -> None:
    x = gaussian(0, (6, 128)).astype(dtype)
    w = (gaussian(1, (128, 72)) / 8).astype(dtype)
    right = jax.jit(reference.matmul)
    for format in NAMES[which]:
        q = lowbit.quantize(w, lowbit.QuantizationConfig(format, axis=-2))
        assert q.dtype == dtype
        y = x @ q
        exact = right(Product(x, q, -2, jnp.float32))
        assert y.dtype == dtype
        assert_close(y, exact.astype(dtype), 2 * float(jnp.finfo(dtype).eps))
    assert {"matmul", "take", "encode"} <= set(dispatch._kernels)
