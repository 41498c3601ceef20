"""Code from eformer's documentation, run with the drop-in: one test per documented use."""

import dataclasses
import importlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from eformer_helpers import MODULES, W, X, escale, functions, jaximus, quantization
from helpers import assert_close, assert_same_bits, gaussian

import lowbit


def test_paths_and_names() -> None:
    from eformer.jaximus import ImplicitArray, OrginArray, aux_field, implicit, register, ste, use_implicit
    from eformer.ops.quantization import (
        Array1B,
        Array8B,
        ArrayNF4,
        QuantizationConfig,
        QuantizationType,
        RSROperatorBinary,
        RSROperatorTernary,
        is_kernel_available,
        nf4_use_kernel,
        quantize,
        straight_through,
        straight_through_1bit,
        straight_through_8bit,
        straight_through_nf4,
    )
    from eformer.ops.quantization._config import QuantizationConfig as Same
    from eformer.ops.quantization.implicit_array_8bit import matmul_bf16_int8_weight_only
    from eformer.ops.quantization.implicit_array_nf4 import safe_delete, safe_materialize

    assert Same is QuantizationConfig and importlib.import_module("eformer.ops").quantize is quantize
    names = [ImplicitArray, OrginArray, aux_field, implicit, register, ste, use_implicit, Array1B, Array8B, ArrayNF4]
    names += [QuantizationType, quantize, RSROperatorBinary, RSROperatorTernary, is_kernel_available, nf4_use_kernel]
    names += [straight_through, straight_through_1bit, straight_through_8bit, straight_through_nf4]
    assert all(callable(name) for name in (*names, matmul_bf16_int8_weight_only, safe_materialize))
    assert safe_delete(W, True) is None
    assert issubclass(ArrayNF4, (lowbit.ArrayNF4, OrginArray))
    with pytest.raises(ImportError):
        importlib.import_module("eformer.optimizers")


def test_importing_after_the_real_eformer_raises() -> None:
    code = "import sys, types; sys.modules['eformer'] = types.ModuleType('eformer'); import lowbit.compat.eformer"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode and "eformer is imported already" in run.stderr and "import it first" in run.stderr


# --- quantize


def test_the_unified_interface() -> None:
    config = quantization.QuantizationConfig(dtype=quantization.QuantizationType.NF4, block_size=64)
    quantized = quantization.quantize(W, config=config)
    assert_close(X @ quantized, X @ lowbit.quantize(W, axis=-1).materialize())
    assert_same_bits(quantization.quantize(W, dtype="nf4", block_size=64), quantized)
    assert_close(quantization.quantize(W, dtype=quantization.QuantizationType.NF4, simulate=True), quantized)
    int8 = quantization.QuantizationConfig(dtype=quantization.QuantizationType.INT8, block_size=64)
    assert_close(quantization.quantize(W, int8), lowbit.Array8B.quantize(W, axis=-1))


def test_inference_and_training_as_in_the_readme() -> None:
    @jaximus.implicit
    def linear(x, w):
        return x @ w

    config = quantization.QuantizationConfig(dtype=quantization.QuantizationType.NF4, block_size=64)
    assert linear(X, quantization.quantize(W, config=config)).shape == (32, 256)

    def loss(w):
        return jnp.mean((linear(X, quantization.straight_through(w, config=config)) - 1) ** 2)

    value, grads = jax.value_and_grad(loss)(W)
    at = lowbit.quantize(W, axis=-1).materialize()
    want = jax.value_and_grad(lambda w: jnp.mean((X @ w - 1) ** 2))(at)
    assert_close((value, grads), want)


@pytest.mark.parametrize("dtype", ["binary", "ternary"])
def test_codes_without_a_scale_have_one_threshold(dtype: str) -> None:
    w = W.at[0, :3].set(0)
    got = quantization.quantize(w, dtype=dtype)
    half = 0.5 * np.std(np.asarray(w))
    want = np.where(w >= 0, 1, -1) if dtype == "binary" else np.where(w > half, 1, np.where(w < -half, -1, 0))
    np.testing.assert_array_equal(np.asarray(got.materialize()), want)
    assert isinstance(got, quantization.Array1B)
    np.testing.assert_array_equal(np.asarray(quantization.straight_through(w, dtype=dtype)), want)
    np.testing.assert_array_equal(np.asarray(quantization.quantize(w, dtype=dtype, simulate=True)), want)
    grad = jax.jit(jax.grad(lambda w: (X @ quantization.straight_through(w, dtype=dtype)).sum()))(w)
    assert_close(grad, jax.grad(lambda w: (X @ w).sum())(w))


@pytest.mark.parametrize("dtype", ["nf4", "int8", "ternary", "binary"])
def test_nan_does_not_raise_and_reads_as_nan(dtype: str) -> None:
    got = quantization.quantize(W.at[3, 5].set(jnp.nan), dtype=dtype)
    assert bool(jnp.isnan(got.materialize()[3, 5]))


def test_an_unknown_type_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'int7'.*nf4"):
        quantization.QuantizationConfig(dtype="int7")


# --- arrays


def test_int8_with_bfloat16_inputs() -> None:
    quantized = quantization.Array8B.quantize(W, axis=(-1,))
    output = X.astype(jnp.bfloat16) @ quantized
    assert output.dtype == jnp.float32  # as for the dense array
    assert_close(output, X.astype(jnp.bfloat16).astype(jnp.float32) @ quantized.materialize())


def test_components_by_position() -> None:
    q = quantization.Array8B.quantize(W, axis=0)
    assert_same_bits(quantization.Array8B(q.scale, q.weight, (0,)), q)
    assert_same_bits(quantization.Array8B(scale=q.scale, weight=q.weight), q)
    nf4 = quantization.ArrayNF4.quantize(W, block_size=32)
    assert_same_bits(quantization.ArrayNF4(nf4.packed, nf4.absmax, 32), nf4)
    packed, absmax = functions.quantize_and_pack_nf4(W, block_size=32)
    assert_same_bits(quantization.ArrayNF4(packed, absmax, 32), nf4)
    codes = jnp.sign(jnp.round(4 * W)).astype(jnp.int8)
    assert_close(quantization.Array1B(weight=functions.pack_weights_1bit(codes)), codes)
    assert_close(quantization.Array1B(codes), codes)
    with pytest.raises(TypeError, match="packed, absmax, block_size, sharding"):
        quantization.ArrayNF4(1, 2, 3, 4, 5)


def test_half_precision_arrays_under_implicit() -> None:
    array = gaussian(0, (256, 64), "f2")

    def power(x):
        return x**2

    with lowbit.materialization("allow"):
        for q in (quantization.Array1B(array), quantization.ArrayNF4(array), quantization.Array8B(array)):
            assert_close(jax.jit(jaximus.implicit(power))(q), q.materialize() ** 2, 1e-3)
            assert repr(q)


def test_ternary_weights_of_two_rows() -> None:
    weights = jnp.array([[-1, 0, 1, 1], [1, -1, 0, 0]])
    assert_close(quantization.Array1B.quantize(weights.astype(jnp.int8)), weights.astype(jnp.int8))
    with pytest.raises(ValueError, match="the first is 5"):
        quantization.Array1B.quantize(jnp.array([[1, 5, 0, 0]], jnp.int8))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("straight_through_nf4", {"block_size": 64}),
        ("straight_through_8bit", {"axis": -1}),
        ("straight_through_1bit", {}),
    ],
)
def test_straight_through_in_a_training_step(name: str, options: dict) -> None:
    @jax.jit
    def forward(params, x):
        return x @ getattr(quantization, name)(params["weight"], **options)

    grads = jax.grad(lambda p, x: forward(p, x).sum())({"weight": W}, X)
    assert_close(grads["weight"], jax.grad(lambda w: (X @ w).sum())(W))
    classes = {"nf4": quantization.ArrayNF4, "8bit": quantization.Array8B, "1bit": quantization.Array1B}
    want = classes[name.removeprefix("straight_through_")].quantize(W, **options)
    assert_close(getattr(quantization, name)(W, **options), want)


@pytest.mark.parametrize("name", ["RSROperatorBinary", "RSROperatorTernary"])
def test_rsr_operators(name: str) -> None:
    cls = getattr(quantization, name)
    matrix = jax.random.randint(jax.random.key(0), (24, 20), *((0, 2) if name.endswith("Binary") else (-1, 2)))
    v, rows = jnp.arange(24.0) / 8, gaussian(1, (3, 24))
    operators = [cls.from_matrix(matrix, k=4), jax.jit(cls.from_matrix)(matrix)]
    if name.endswith("Binary"):
        operators.append(cls.quantize(matrix))
    for operator in operators:
        assert operator.nbytes < matrix.size  # 2 bits a value and one scale a row, not a byte
        assert_same_bits(operator.materialize(), matrix)
        with lowbit.materialization("error"):
            for program in (operator.dot, jax.jit(lambda v, operator=operator: operator.dot(v))):
                assert_close(program(v), v @ matrix.astype(jnp.float32))
            assert_close(rows @ operator, rows @ matrix.astype(jnp.float32))
            assert_close(jax.grad(lambda v, operator=operator: operator.dot(v).sum())(v), matrix.sum(1).astype(v.dtype))


def test_rsr_operators_refuse_other_matrices_and_vectors() -> None:
    matrix = jnp.array([[-1, 0, 1], [1, -1, 0]], jnp.int32)
    for cls in (quantization.RSROperatorBinary, quantization.RSROperatorTernary):
        with pytest.raises(TypeError, match=rf"{cls.__name__}.from_matrix needs an integer matrix, but A is float32"):
            cls.from_matrix(abs(matrix).astype(jnp.float32))
        with pytest.raises(ValueError, match=rf"{cls.__name__} needs a matrix of values"):
            cls.from_matrix(3 * matrix)
        with pytest.raises(ValueError, match=r"dot needs a vector of shape \(2,\), but v has shape \(3,\)"):
            cls.from_matrix(abs(matrix)).dot(jnp.ones(3))
    with pytest.raises(ValueError, match="RSROperatorBinary needs"):
        quantization.RSROperatorBinary.from_matrix(matrix)


@tiers.DEVICES
def test_sharding_methods() -> None:
    mesh = escale.create_mesh(axis_dims=(2, -1), axis_names=("dp", "tp"))
    for q in (quantization.Array8B(W), quantization.ArrayNF4(W), quantization.Array1B(W)):
        placed = q.with_mesh_and_axis((mesh, ("dp", "tp")))
        assert placed.is_sharded and placed.sharding.spec == escale.PartitionSpec("dp", "tp")
        assert q.with_sharding(placed.sharding).reshard(placed.sharding).sharding == placed.sharding
    q = quantization.Array8B(W)
    assert quantization.Array8B(q.scale, q.weight, (-1,), placed.sharding).sharding == placed.sharding


# --- the functions


def test_functions() -> None:
    quants, scales = functions.quantize_int8(W, axis=-1)
    assert quants.dtype == jnp.int8 and scales.shape == (128, 1)
    assert_close(functions.dequantize_int8(quants, scales), lowbit.Array8B(W, axis=-1))
    packed, absmax = functions.single_quantize_and_pack_nf4(W, block_size=64)
    assert packed.shape == (128, 4, 32) and absmax.shape == (128, 4)
    assert_close(functions.single_dequantize_nf4(packed, absmax, block_size=64), lowbit.quantize(W, axis=-1))
    # Decoding gives the table, to the bit.
    np.testing.assert_array_equal(functions.nf4xf32_to_f32(jnp.arange(16)), functions.get_nf4())
    assert functions.get_nf4()[0] == -1 and functions.get_nf4()[7] == 0 and functions.get_nf4()[15] == 1
    np.testing.assert_array_equal(functions.i8tou8(jnp.array([-1, 0, 127], jnp.int8)), [255, 0, 127])
    np.testing.assert_array_equal(functions.u4toi4(jnp.array([0, 7, 8, 15])), [0, 7, -8, -1])
    np.testing.assert_array_equal(functions.i4tou4(jnp.array([-8, -1, 0, 7])), [8, 15, 0, 7])
    codes = jax.random.randint(jax.random.key(3), (8, 5), -1, 2, jnp.int8)
    assert functions.pack_weights_1bit(codes).shape == (2, 5)
    assert_close(functions.unpack_weights_1bit(functions.pack_weights_1bit(codes), jnp.int8), codes)
    with quantization.nf4_use_kernel(True):
        assert (X @ lowbit.quantize(W)).shape == (32, 256)
    assert quantization.is_kernel_available() == lowbit.is_kernel_available()


def test_documented_fields() -> None:
    fields = {
        quantization.Array8B: ["shape", "dtype", "scale", "weight", "axis", "sharding"],
        quantization.ArrayNF4: ["shape", "dtype", "packed", "absmax", "block_size", "sharding"],
        quantization.Array1B: ["shape", "dtype", "weight", "scale", "kind"],
    }
    for cls, names in fields.items():
        q = cls(W)
        assert [field.name for field in dataclasses.fields(q)] == names
        assert all(getattr(q, name) is not None for name in names)
        assert_same_bits(dataclasses.replace(q), q)
        assert dataclasses.replace(q, dtype=jnp.bfloat16).dtype == jnp.bfloat16
        assert_same_bits(jax.tree.map(lambda x: x, q), q)
        assert_same_bits(q.replace(use_kernel=False).replace(use_kernel=True), q)

    @lowbit.formats.stored
    class Named(quantization.Array8B):
        extra: jax.Array

    arrays, static = Named._fields()
    assert arrays == ("codes", "scales", "index", "extra") and static == lowbit.Array8B._fields()[1]
    config = quantization.QuantizationConfig("int8")
    assert (config.block_size, config.simulate, config.use_kernel) == (64, False, True)


def test_a_config_takes_precedence_and_blocks_are_for_nf4_alone() -> None:
    nf4 = quantization.QuantizationConfig("nf4", block_size=32)
    got = quantization.quantize(W, nf4, dtype="int8", block_size=16, simulate=True)
    assert isinstance(got, quantization.ArrayNF4) and got.block_size == 32
    for int8 in (
        quantization.quantize(W, dtype="int8", block_size=32),
        quantization.quantize(W, quantization.QuantizationConfig("int8", block_size=32)),
        quantization.quantize(W, lowbit.QuantizationConfig("int8", block_size=32)),
    ):
        assert_same_bits(int8, quantization.Array8B.quantize(W))
    assert_close(quantization.straight_through(W, dtype="int8", block_size=32), lowbit.Array8B.quantize(W, axis=-1))
    for dtype in ("binary", "ternary"):
        assert quantization.quantize(W, dtype=dtype, block_size=32).scale.shape == (1, 1)


def test_every_function_has_a_docstring() -> None:
    for module in (quantization, jaximus, escale, functions, *MODULES.values()):
        for name in module.__all__:
            value = getattr(module, name)
            assert not callable(value) or value.__doc__, f"{module.__name__}.{name}"
