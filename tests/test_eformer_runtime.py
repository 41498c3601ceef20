"""Code from eformer's documentation that uses its runtime: handlers, user-defined arrays and meshes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from eformer_helpers import MODULES, W, X, escale, jaximus, quantization
from helpers import assert_close
from jax import lax

import lowbit

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


@tiers.DEVICES
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
        if hasattr(jax.sharding, "get_mesh"):  # older versions do not expose it
            assert escale.get_mesh_axis_size(("dp", "tp")) == 8 and escale.names_in_current_mesh("dp")
            # 5 is not divisible, so that axis is not sharded.
            assert escale.get_corrected_named_sharding((4, 5), P("dp", "tp")).spec == P("dp", None)
    assert escale.with_sharding_constraint(W, P("dp")) is W  # no mesh
    assert escale.lax_reshard(W[:, :5], escale.NamedSharding(mesh, P("dp", "tp"))).sharding.spec == P("dp", None)
    with escale.cpu_context() as cpus, escale.force_cpu():
        assert cpus.size == jax.device_count("cpu")
    with pytest.raises(AttributeError, match="AutoShardingRule"):
        _ = escale.AutoShardingRule


# --- user-defined classes


@dataclasses.dataclass
class LowRank(jaximus.ImplicitArray):
    a: jax.Array
    b: jax.Array

    def materialize(self):
        return self.a @ self.b


@dataclasses.dataclass
class Folded(jaximus.ImplicitArray, warn_on_materialize=False):
    """Its values depend on the given shape and dtype."""

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
    assert jax.tree.map(lambda leaf: None, array, is_leaf=lambda x: x is None).a is None  # placeholders of JAX
    other = dataclasses.replace(array, a=2 * a)
    assert_close(other.materialize(), 2 * (a @ b), 1e-6)
    # A shape that is not given follows from the fields, also in a loop over layers.
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
