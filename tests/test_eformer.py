"""Code from eformer's documentation, run with the drop-in: one test per documented use."""

import dataclasses
import importlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_same_bits
from jax import lax

import lowbit
import lowbit.compat.eformer

quantization = importlib.import_module("eformer.ops.quantization")
jaximus = importlib.import_module("eformer.jaximus")
escale = importlib.import_module("eformer.escale")
functions = importlib.import_module("eformer.ops.quantization.quantization_functions")
MODULES = {
    name: importlib.import_module(f"eformer.ops.quantization.implicit_array_{name}") for name in ("1bit", "8bit", "nf4")
}

W = jax.random.normal(jax.random.key(0), (128, 256)) / 8
X = jax.random.normal(jax.random.key(1), (32, 128))


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
def test_nan_does_not_raise_and_is_not_hidden(dtype: str) -> None:
    got = quantization.quantize(W.at[3, 5].set(jnp.nan), dtype=dtype)
    assert bool(jnp.isnan(got.materialize()[3, 5]))


def test_an_unknown_type_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'int3'.*nf4"):
        quantization.QuantizationConfig(dtype="int3")


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
    array = jax.random.normal(jax.random.key(0), (256, 64), "f2")

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


def test_rsr_operators() -> None:
    binary = jnp.array([[0, 1, 1, 0], [1, 0, 0, 1]], jnp.int32)
    v = jnp.array([1.0, 2.0])
    for operator in (
        quantization.RSROperatorBinary.from_matrix(binary, k=4),
        quantization.RSROperatorBinary.quantize(binary),
    ):
        assert_close(operator.dot(v), v @ binary.astype(jnp.float32))
        assert_close(operator.materialize(), binary.astype(jnp.float32))
    ternary = jnp.array([[-1, 0, 1], [1, -1, 0]], jnp.int32)
    assert_close(quantization.RSROperatorTernary.from_matrix(ternary, k=4).dot(v), v @ ternary.astype(jnp.float32))
    with pytest.raises(ValueError, match="RSROperatorBinary"):
        quantization.RSROperatorBinary.from_matrix(ternary)


def test_sharding_methods() -> None:
    mesh = escale.create_mesh(axis_dims=(2, -1), axis_names=("dp", "tp"))
    for q in (quantization.Array8B(W), quantization.ArrayNF4(W), quantization.Array1B(W)):
        placed = q.with_mesh_and_axis((mesh, ("dp", "tp")))
        assert placed.is_sharded and placed.sharding.spec == escale.PartitionSpec("dp", "tp")
        assert q.with_sharding(placed.sharding).reshard(placed.sharding).sharding == placed.sharding
    q = quantization.Array8B(W)
    assert quantization.Array8B(q.scale, q.weight, (-1,), placed.sharding).sharding == placed.sharding


# --- handlers


def test_every_handler_exists_and_runs_its_primitive() -> None:
    names = {
        "lt": ["xy"], "convert_element_type": ["operand_pos", "operand_kw"], "integer_pow": ["xy", "x"], "div": ["xy"],
        "sqrt": ["x"], "dot_general": ["lhs_rhs"], "add": ["xy"], "reduce": ["operand_init_value"], "mul": ["xy"],
        "transpose": ["operand"], "conv_general_dilated": ["lhs_rhs"], "max": ["xy"], "exp": ["x"], "log": ["x"],
        "reshape": ["operand"], "concatenate": ["operands"], "broadcast_in_dim": ["operand"], "gather": ["operand"],
    }  # fmt: skip
    for suffix, module in MODULES.items():
        for primitive, kinds in names.items():
            assert all(callable(getattr(module, f"{primitive}_{suffix}_{kind}")) for kind in kinds)


@pytest.mark.parametrize("suffix", MODULES)
def test_handlers(suffix: str) -> None:
    q = {"8bit": quantization.Array8B, "nf4": quantization.ArrayNF4, "1bit": quantization.Array1B}[suffix](W)
    w = q.materialize()

    def call(operation, kind, *args, **params):
        name = f"{operation}_{suffix}_{kind}"
        return getattr(MODULES[suffix], name)(getattr(lax, f"{operation}_p"), *args, **params)

    with lowbit.materialization("allow"):
        assert_close(call("lt", "xy", q, W), w < W)
        assert_close(call("max", "xy", W, q), jnp.maximum(W, w))
        assert_close(call("div", "xy", W, q + 2), W / (w + 2))
        assert_close(call("add", "xy", q, q), w + w)
        assert_close(call("exp", "x", q), jnp.exp(w))
        assert_close(call("integer_pow", "xy", q, 2), w**2)
        assert_close(call("integer_pow", "x", q, y=2), w**2)
        assert_close(call("convert_element_type", "operand_pos", q, jnp.bfloat16), w.astype(jnp.bfloat16))
        params = {"new_dtype": np.dtype(jnp.bfloat16), "weak_type": False, "sharding": None}
        assert_close(call("convert_element_type", "operand_kw", q, **params), w.astype(jnp.bfloat16))
        numbers = (((1,), (0,)), ((), ()))
        assert_close(call("dot_general", "lhs_rhs", X, q, numbers), X @ w)
        params = {"dimension_numbers": numbers, "precision": None, "preferred_element_type": np.dtype("float32")}
        assert_close(call("dot_general", "lhs_rhs", X, q, **params), X @ w)
        assert_close(call("transpose", "operand", q, (1, 0)), w.T)
        assert_close(call("reshape", "operand", q, (64, 512)), w.reshape(64, 512))
        assert_close(call("concatenate", "operands", [q, q], 0), jnp.concatenate([w, w]))
        assert_close(call("broadcast_in_dim", "operand", q, (3, 128, 256), (1, 2)), jnp.broadcast_to(w, (3, 128, 256)))
        assert_close(call("reduce", "operand_init_value", q, 0.0, lax.add, (0,)), w.sum(0), 1e-4)


# --- the functions


def test_functions() -> None:
    quants, scales = functions.quantize_int8(W, axis=-1)
    assert quants.dtype == jnp.int8 and scales.shape == (128, 1)
    assert_close(functions.dequantize_int8(quants, scales), lowbit.Array8B(W, axis=-1))
    packed, absmax = functions.single_quantize_and_pack_nf4(W, block_size=64)
    assert packed.shape == (128, 4, 32) and absmax.shape == (128, 4)
    assert_close(functions.single_dequantize_nf4(packed, absmax, block_size=64), lowbit.quantize(W, axis=-1))
    # Decoding is the table, to the bit.
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


# --- the runtime


def test_a_user_defined_array() -> None:
    @dataclasses.dataclass
    class Halved(jaximus.ImplicitArray):
        data: jax.Array
        factor: float = jaximus.aux_field({"note": "static"}, default=0.5)

        def materialize(self):
            return self.data * self.factor

    calls = []

    @jaximus.register("dot_general")
    def halved_matmul(lhs: jax.Array, rhs: Halved, **params):
        calls.append(params["dimension_numbers"])
        return lax.dot_general(lhs, rhs.data, **params) * rhs.factor

    @jaximus.register("add", precedence=10)
    def halved_add(x: Halved, y: Halved, **params):
        return Halved(x.data + y.data, x.factor)

    @jaximus.implicit
    def forward(x, w):
        return x @ (w + w)

    assert_close(forward(X, Halved(W)), X @ W)
    assert len(calls) == 1
    with jaximus.implicit:
        assert_close(X @ quantization.ArrayNF4(W), X @ quantization.ArrayNF4(W).materialize())


def test_ste_of_a_function_that_returns_an_implicit_array() -> None:
    @jaximus.ste
    def quantize_nf4(weights, block_size=64):
        return quantization.ArrayNF4.quantize(weights, block_size)

    assert_close(quantize_nf4(W), lowbit.quantize(W, axis=-1))
    assert_close(jax.grad(lambda w: (X @ quantize_nf4(w)).sum())(W), jax.grad(lambda w: (X @ w).sum())(W))


# --- meshes


def test_escale() -> None:
    P = escale.PartitionSpec
    mesh = escale.create_mesh(axis_dims=(2, 4), axis_names=("dp", "tp"))
    assert escale.create_mesh().shape["fsdp"] == jax.device_count()
    assert escale.parse_mesh_from_string("dp:2,tp:4", ["dp", "tp"]).shape == mesh.shape
    assert dict(escale.parse_mesh_from_string("2,4", ["a", "b"]).shape) == {"a": 2, "b": 4}
    with pytest.raises(ValueError, match="dp:2"):
        escale.parse_mesh_from_string("dp:2", ["tp"])
    rules = [(".*weight", P("dp", None)), (".*", P())]
    tree = {"layer": {"weight": quantization.quantize(W), "bias": jnp.zeros(5)}}
    specs = escale.match_partition_rules(rules, tree)
    assert specs == {"layer": {"weight": P("dp", None), "bias": P()}}
    assert escale.get_names_from_partition_spec(specs) == ["dp"]
    shard, gather = escale.make_shard_and_gather_fns(specs, mesh)
    placed = jax.tree.map(lambda fn, x: fn(x), shard, tree, is_leaf=callable)
    assert escale.get_partition_spec(placed)["layer"]["weight"] == P("dp", None)
    assert escale.extract_shardings(placed)["layer"]["weight"] == placed["layer"]["weight"].sharding
    assert not gather["layer"]["weight"](placed["layer"]["weight"]).is_sharded
    with jax.set_mesh(mesh):
        if hasattr(jax.sharding, "get_mesh"):  # older ones do not tell
            assert escale.get_mesh_axis_size(("dp", "tp")) == 8 and escale.names_in_current_mesh("dp")
            # 5 does not divide, so that axis stays whole.
            assert escale.get_corrected_named_sharding((4, 5), P("dp", "tp")).spec == P("dp", None)
    assert escale.with_sharding_constraint(W, P("dp")) is W  # no mesh
    assert escale.lax_reshard(W[:, :5], escale.NamedSharding(mesh, P("dp", "tp"))).sharding.spec == P("dp", None)
    with escale.cpu_context() as cpus, escale.force_cpu():
        assert cpus.size == jax.device_count("cpu")
    with pytest.raises(AttributeError, match="AutoShardingRule"):
        _ = escale.AutoShardingRule


# --- classes of your own


@dataclasses.dataclass
class LowRank(jaximus.ImplicitArray):
    a: jax.Array
    b: jax.Array

    def materialize(self):
        return self.a @ self.b


@dataclasses.dataclass
class Folded(jaximus.ImplicitArray, warn_on_materialize=False):
    """Whose values depend on the shape and the dtype that it is given."""

    data: jax.Array
    scale: float = jaximus.aux_field(default=1.0)

    def materialize(self):
        return (self.data * self.scale).reshape(self.shape).astype(self.dtype)


def test_shape_and_dtype_are_fields_of_user_defined_classes() -> None:
    a, b = W[:, :4], W[:4]
    array = LowRank(a, b, shape=(128, 256), dtype=jnp.float32)
    assert (array.shape, array.dtype, array.aval.shape) == ((128, 256), jnp.float32, (128, 256))
    assert [field.name for field in dataclasses.fields(array)] == ["shape", "dtype", "a", "b"]
    with lowbit.materialization("allow"):
        for same in (array, LowRank(a, b), LowRank(a=a, b=b, shape=[128, 256]), LowRank(a, b, dtype="float32")):
            assert (same.shape, same.dtype) == ((128, 256), np.dtype("float32"))
            assert_close(X @ same, X @ (a @ b))
            assert_close(jax.jit(jaximus.implicit(lambda x, w: x @ w))(X, same), X @ (a @ b))
    assert [leaf.shape for leaf in jax.tree.leaves(array)] == [(128, 4), (4, 256)]
    assert jax.tree.map(lambda leaf: None, array, is_leaf=lambda x: x is None).a is None  # whatever JAX puts there
    other = dataclasses.replace(array, a=2 * a)
    assert_close(other.materialize(), 2 * (a @ b), 1e-6)
    # What is not given follows from the fields, also in a loop over layers.
    stack = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), LowRank(a, b))
    assert stack.shape == (2, 128, 256)
    with lowbit.materialization("allow"):
        assert_close(jax.vmap(lambda w: X @ w)(stack)[1], 4 * (X @ (a @ b)))


def test_materialize_may_use_a_given_shape() -> None:
    array = Folded(W.reshape(-1), shape=(256, 128), dtype=jnp.bfloat16, scale=2.0)
    assert array.dtype == jnp.bfloat16
    with lowbit.materialization("allow"):
        assert_close(array.T, (2 * W).reshape(256, 128).astype(jnp.bfloat16).T)
    with pytest.raises(AttributeError, match=r"materialize\(\) of Folded asks for shape.*pass shape="):
        _ = Folded(W, dtype=jnp.float32)
    with pytest.raises(ValueError, match=r"LowRank has shape=\(128, 25\), but its .* gives \(128, 256\)"):
        LowRank(W[:, :4], W[:4], shape=(128, 25))
    with pytest.raises(ValueError, match=r"LowRank has dtype=bfloat16, but its .* gives float32"):
        LowRank(W[:, :4], W[:4], dtype=jnp.bfloat16)

    @dataclasses.dataclass
    class Square(jaximus.ImplicitArray):
        diagonal: jax.Array

        default_dtype = jnp.float32

        def compute_shape(self):
            return (self.diagonal.shape[0],) * 2

        def materialize(self):
            return jnp.zeros(self.shape, self.dtype) + jnp.diag(self.diagonal)

    assert (Square(X[0]).shape, Square(X[0]).dtype) == ((128, 128), jnp.float32)


def test_rules_for_every_implicit_array() -> None:
    arrays = [quantization.Array8B(W), quantization.ArrayNF4(W), quantization.Array1B(W), LowRank(W[:, :4], W[:4])]
    assert all(isinstance(array, jaximus.ImplicitArray) for array in arrays)
    assert not isinstance(W, jaximus.ImplicitArray) and not isinstance(arrays[0], LowRank)

    @jaximus.register("erf_inv")
    def _(x: jaximus.ImplicitArray, **params):
        return jnp.full(x.shape, 7, x.dtype)

    for array in arrays:
        assert float(jaximus.implicit(lax.erf_inv)(array)[0, 0]) == 7


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


@pytest.mark.parametrize("suffix", MODULES)
def test_handlers_without_their_parameters(suffix: str) -> None:
    q = {"8bit": quantization.Array8B, "nf4": quantization.ArrayNF4, "1bit": quantization.Array1B}[suffix](W)
    w = q.materialize()
    power = {kind: getattr(MODULES[suffix], f"integer_pow_{suffix}_{kind}") for kind in ("x", "xy")}
    cast = getattr(MODULES[suffix], f"convert_element_type_{suffix}_operand_kw")
    with lowbit.materialization("allow"):
        assert_close(power["x"](lax.integer_pow_p, q), w**2)
        assert_close(power["x"](lax.integer_pow_p, q, y=3), w**3)
        assert_close(power["xy"](lax.integer_pow_p, q, jnp.full(w.shape, 2.0)), w**2, 1e-4)
        assert_close(cast(lax.convert_element_type_p, q), w.astype(jnp.bfloat16))


def test_every_function_has_a_docstring() -> None:
    for module in (quantization, jaximus, escale, functions, *MODULES.values()):
        for name in module.__all__:
            value = getattr(module, name)
            assert not callable(value) or value.__doc__, f"{module.__name__}.{name}"
