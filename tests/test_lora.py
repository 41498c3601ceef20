"""Adapters over frozen weights: equal to the dense sum in every program, fused, and trained alone."""

import functools
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from features import ALL, FUSED, used
from helpers import LAYERS, ROWS, K, Layout, N, activations, assert_close, assert_same_bits, gaussian, layouts, weights
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_transforms import DENSE, TOLERANCE

import lowbit
from lowbit import LoraArray, implicit
from lowbit.models.patterns import leaf_path
from lowbit.testing import dense_weights, equations

KEY = jax.random.key(7)


def adapted(params: Any, rules: Any = "*", rank: int = 3, **options: Any) -> Any:
    """Add adapters whose factors are not zero."""
    params = lowbit.lora(params, rules, rank=rank, alpha=2 * rank, key=KEY, **options)
    return jax.tree.map(
        lambda w: w.replace(b=gaussian(7, w.b.shape) / 8) if isinstance(w, LoraArray) else w,
        params,
        is_leaf=lambda w: isinstance(w, LoraArray),
    )


@functools.cache
def adapted_weight(layout: Layout, name: str) -> LoraArray:
    return adapted({name: weights(layout)[name]})[name]


# Features for which adapters have a rule, or whose components enter or leave an inner program. In the second tier,
# formats alternate.
FEATURES = """
    matmul_left matmul_right einsum_weight_first einsum_heads einsum_batched einsum_batch_in_the_middle
    tensordot_two_axes preferred_element_type tied_head embedding_out_of_bounds columns_by_index slices dynamic_slices
    reshaped permuted casts scan_over_layers scan_with_the_weight_carried scan_returning_the_layers fori_loop_by_index
    cond_returning_it vmap_over_layers vmap_of_vmap value_and_grad_through_scan_and_checkpoint custom_vjp barriers
    grad_of_the_weight ragged_dot
""".split()


ONE = [(feature, tiers.ONE) for feature in FEATURES]
ALTERNATING = zip(FEATURES, itertools.cycle(layouts()), strict=False)
WAYS = tiers.tiered([*ONE, *(row for row in ALTERNATING if row not in ONE)], ONE)


@pytest.mark.parametrize(("feature", "way"), WAYS, ids=str)
def test_a_feature_equals_the_dense_program(feature: str, way: Layout) -> None:
    x, p = activations(), {name: adapted_weight(way, name) for name in used(feature)}
    want = DENSE[feature](x, lowbit.materialize(p))
    with lowbit.materialization("error" if feature in FUSED else "allow"):
        traced = jax.jit(implicit(ALL[feature])).trace(x, p)
        got = traced.lower().compile()(x, p)
    assert_close(got, want, 2 * TOLERANCE.get(feature, 1e-5))
    if feature in FUSED:
        assert dense_weights(traced.jaxpr, p) == []


def test_a_new_adapter_does_not_change_the_output() -> None:
    x, base = activations(), weights(layouts()[0])["w"]
    w = lowbit.lora({"w": base}, "w", key=KEY)["w"]
    assert w.base is base and w.rank == 8 and w.scale == 1.0
    assert np.std(w.a) == pytest.approx(K**-0.5, rel=0.1) and not np.any(w.b)
    np.testing.assert_array_equal(x @ w, x @ base)
    np.testing.assert_array_equal(w.materialize(), base.materialize())


def test_a_product_from_either_side_is_that_of_base_and_factors() -> None:
    p = {name: adapted_weight(layouts()[0], name) for name in ("w", "stack")}
    x, y = activations(), jnp.ones((ROWS, N))
    stacked = jnp.stack([x] * LAYERS)
    for fn, arg, name in (
        (lambda w, x: x @ w, x, "w"),
        (lambda w, y: y @ w.T, y, "w"),
        (lambda w, y: w @ y.T, y, "w"),
        (lambda w, xs: jnp.einsum("ebn,ekn->bk", xs, w), stacked, "stack"),  # layers are summed over too
    ):
        program = jax.make_jaxpr(implicit(fn))(p[name], arg)
        made = [v.aval for e in equations(program.jaxpr) for v in e.outvars if v.aval.dtype == jnp.float32]
        assert max(a.size for a in made) <= LAYERS * ROWS * K
        assert_close(implicit(fn)(p[name], arg), fn(p[name].materialize(), arg))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_dtype_is_that_of_the_base(dtype: Any) -> None:
    x = activations().astype(dtype)
    w = adapted({"w": lowbit.quantize(gaussian(7, (K, N)).astype(dtype), "int8")})["w"]
    assert w.dtype == w.materialize().dtype == (x @ w).dtype == dtype and w.a.dtype == jnp.float32
    assert_close(x @ w, x @ w.materialize(), 2e-2)
    want = w.replace(base=w.base.astype(jnp.float32))
    assert_close(w.astype(jnp.float32), want)
    assert_close(w, want.materialize().astype(dtype), 0)  # rounded only once


# --- which axes are inputs


def test_the_axes_of_a_stack_and_of_heads_follow_the_program() -> None:
    shapes = {"stack": (LAYERS, K, N), "q": (K, 4, 32), "o": (4, 32, K), "weight": (N, K), "qkv": (LAYERS, K, 3, 4, 16)}
    params = {name: gaussian(7, shape) for name, shape in shapes.items()}
    params["position"] = jnp.ones((ROWS, 128))  # it is added, so an adapter has no effect

    def fn(p: Any, x: jax.Array) -> Any:
        heads = jnp.einsum("bd,dhk->bhk", x, p["q"])
        mixed = jnp.einsum("bhk,hkd->bd", heads, p["o"])
        layers = lax.map(lambda p: (x @ p[0], jnp.einsum("bd,dthk->bthk", x, p[1])), (p["stack"], p["qkv"]))
        return mixed, layers, x @ p["weight"].T, jnp.tile(x, 2) + p["position"]

    x = activations()
    for quantized in (False, True):
        p = lowbit.quantize_tree(params, "int8", fn=fn, args=(x,))[0] if quantized else params
        with pytest.warns(UserWarning, match=r"to 1 weights .*: position \(fn uses it in add at .*:\d+ only\)"):
            p = adapted(p, fn=fn, args=(x,))
        assert {name: (w.a.shape, w.b.shape) for name, w in p.items() if isinstance(w, LoraArray)} == {
            "stack": ((LAYERS, K, 3), (LAYERS, 3, N)),
            "q": ((K, 3), (3, 4, 32)),
            "o": ((4, 32, 3), (3, K)),
            "weight": ((N, 3), (3, K)),
            "qkv": ((LAYERS, K, 3), (LAYERS, 3, 3, 4, 16)),
        }
        with lowbit.materialization("error"):
            traced = jax.jit(implicit(fn)).trace(p, x)
        if quantized:
            assert dense_weights(traced.jaxpr, p) == []
            assert_close(traced.lower().compile()(p, x), jax.jit(fn)(lowbit.materialize(p), x))
    # Without a program, a quantized array has the axis of its scales; axes of others may be layers, heads or windows.
    q = lowbit.quantize(params["q"], lowbit.QuantizationConfig("int8", axis=-3))
    assert lowbit.lora({"q": q}, "q", key=KEY)["q"].a.shape == (K, 8)
    with pytest.raises(ValueError, match=r"stack: 3 axes: pass fn= to tell layers, inputs and heads apart"):
        lowbit.lora(params, "stack", key=KEY)


def test_the_pattern_for_all_leaves_out_what_is_no_product() -> None:
    shapes = {
        "up/kernel": (64, 64),
        "conv/kernel": (3, 3, 16, 16),
        "window/kernel": (256, 4),
        "heads/kernel": (64, 4, 8),
    }
    params = {name: jnp.ones(shape) for name, shape in shapes.items()} | {"cache": jnp.ones((2, 16, 8, 16))}

    def fn(p: Any, x: jax.Array) -> Any:
        image, dims = x.reshape(1, 4, 16, 16), ("NHWC", "HWIO", "NHWC")
        conv = lax.conv_general_dilated(image, p["conv/kernel"], (1, 1), "SAME", dimension_numbers=dims)
        return conv, jnp.einsum("bd,dhk->bhk", x @ p["up/kernel"], p["heads/kernel"]), jnp.tanh(p["window/kernel"])

    with pytest.warns(UserWarning, match=r"to 4 weights .*conv/kernel \(4 axes: pass fn=.*rank=8 must be at"):
        found = lowbit.lora(params, "*", key=KEY)
    assert [name for name, w in found.items() if isinstance(w, LoraArray)] == ["up/kernel"]
    with pytest.warns(UserWarning, match=r"conv/kernel \(fn uses it in a convolution at .*\); window/kernel"):
        found = lowbit.lora(params, "*", key=KEY, fn=fn, args=(jnp.ones((16, 64)),))
    assert found["heads/kernel"].b.shape == (8, 4, 8) and not isinstance(found["conv/kernel"], LoraArray)


def test_gradients_of_the_factors_of_a_bfloat16_model_are_not_rounded() -> None:
    x = gaussian(7, (ROWS, K)).astype(jnp.bfloat16)
    w = adapted({"w": lowbit.quantize(gaussian(7, (K, N)).astype(jnp.bfloat16), "int8")})["w"]
    base = w.base.astype(jnp.float32).materialize()

    def rounded(y: jax.Array) -> jax.Array:
        return jnp.sin(y.astype(jnp.bfloat16).astype(jnp.float32) / 8).sum()

    got = jax.grad(lambda a, b: rounded(x @ w.replace(a=a, b=b)), (0, 1))(w.a, w.b)
    wide = x.astype(jnp.float32)
    want = jax.grad(lambda a, b: rounded(wide @ base + w.scale * (wide @ a) @ b), (0, 1))(w.a, w.b)
    assert_close(got, want, 1e-4)


# --- training: scanned and rematerialized layers


def deep(params: Any, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, p: Any) -> Any:
        return x + jnp.tanh((x * p["norm"]) @ p["up"]) @ p["down"], None

    return lax.scan(jax.checkpoint(layer), x, params)[0]


def deep_params() -> Any:
    up, down = (gaussian(7, (LAYERS, *shape)) / 8 for shape in ((K, N), (N, K)))
    return {"up": up, "down": down, "norm": jnp.ones((LAYERS, K))}


def loss(trainable: Any, frozen: Any, x: jax.Array) -> jax.Array:
    return jnp.sum(implicit(deep)(lowbit.combine(trainable, frozen), x) ** 2)


NF4 = lowbit.QuantizationConfig("nf4", double_quant=True)


def test_only_the_adapters_have_gradients_and_no_base_is_built() -> None:
    x = activations()
    params, _ = lowbit.quantize_tree(deep_params(), NF4, fn=deep, args=(x,))
    params = adapted(params)
    trainable, frozen = lowbit.partition(params)
    dense = lowbit.materialize({name: getattr(w, "base", w) for name, w in params.items()})
    dense = {name: params[name].replace(base=w) if name != "norm" else w for name, w in dense.items()}
    gradient = jax.jit(jax.value_and_grad(loss))
    with lowbit.materialization("error"):
        traced = gradient.trace(trainable, frozen, x)
    compiled, wanted = (t.lower().compile() for t in (traced, gradient.trace(*lowbit.partition(dense), x)))
    value, grads = compiled(trainable, frozen, x)
    assert [g.shape for g in jax.tree.leaves(grads)] == [w.shape for w in jax.tree.leaves(trainable)]
    assert grads["norm"] is None and grads["up"].base is None
    # Lists, since the gradient of an adapter cannot be made dense.
    want_value, want = wanted(*lowbit.partition(dense), x)
    assert_close([value, *jax.tree.leaves(grads)], [want_value, *jax.tree.leaves(want)], 1e-4)
    assert dense_weights(traced.jaxpr, params) == []
    # Two products of each layer in the forward pass, one recomputed and two for gradients in the backward pass.
    assert [e.primitive.name for e in equations(traced.jaxpr.jaxpr)].count("lowbit_matmul") == 5
    # Each step of the loop makes the gradient of its own layer only.
    for eqn in equations(traced.jaxpr.jaxpr):
        if eqn.primitive.name == "scan":
            inside = [v.aval.shape for e in equations(eqn.params["jaxpr"].jaxpr) for v in e.outvars]
            assert not {w.shape for w in jax.tree.leaves(trainable)} & set(inside)
    memory, of_dense = compiled.memory_analysis(), wanted.memory_analysis()
    assert memory.argument_size_in_bytes == sum(a.nbytes for a in jax.tree.leaves((trainable, frozen, x)))
    assert memory.temp_size_in_bytes <= of_dense.temp_size_in_bytes + 2**16


def test_slicing_layers_and_rows_outside_implicit() -> None:
    x = activations()
    square, stack = (adapted_weight(layouts()[0], name) for name in ("square", "stack"))
    got = jax.vmap(lambda w: x @ w)(stack)  # JAX slices every component
    assert_close(got, x @ stack.materialize())
    rows = implicit(lambda w: lax.scan(lambda c, row: (c, row * 2), 0.0, w)[1])
    with lowbit.materialization("allow"):
        assert_close(rows(square), square.materialize() * 2)


# --- trainable leaves


def test_partition_takes_the_adapters_alone() -> None:
    params = {**weights(layouts()[0]), "norm": jnp.ones(8), "dense": jnp.ones((K, N)), "step": jnp.int32(3)}
    params = lowbit.lora(params, ["w", "dense"], rank=2, key=KEY)
    trainable, frozen = lowbit.partition(params)
    assert sorted(x.shape for x in jax.tree.leaves(trainable)) == [(2, N), (2, N), (K, 2), (K, 2)]
    assert trainable["dense"].base is None and frozen["dense"].a is None and frozen["norm"] is params["norm"]
    again = lowbit.combine(trainable, frozen)
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (again, params)), strict=True))
    assert jax.tree.structure(again) == jax.tree.structure(params)
    mask = lowbit.trainable(params)
    assert (mask["norm"], mask["square"], mask["step"]) == (False, False, False)
    assert (mask["w"].base, mask["w"].a, mask["w"].b) == (False, True, True)
    with_norms, _ = lowbit.partition(params, train=["norm"])
    assert with_norms["norm"] is params["norm"] and with_norms["w"].a is params["w"].a
    with pytest.raises(ValueError, match=r"train='square' matches square, which is Array.* and cannot be trained"):
        lowbit.partition(params, train="square")
    with pytest.raises(ValueError, match="train='step' matches step, which is an array of int32"):
        lowbit.partition(params, train="step")
    with pytest.raises(ValueError, match=r"No leaf matches 'nrm'.*The paths are dense, heads, norm"):
        lowbit.partition(params, train="nrm")


# --- which leaves have adapters


def test_patterns_choose_the_leaves() -> None:
    params = {
        "attn": {"q": jnp.ones((K, K)), "norm": jnp.ones((LAYERS, K))},
        "up": jnp.ones((K, N)),
        "bias": jnp.ones(N),
    }
    params["tiny"] = jnp.ones((4, 4))

    def ranks(rules: Any) -> dict[str, int]:
        found = jax.tree_util.tree_leaves_with_path(
            lowbit.lora(params, rules, key=KEY), is_leaf=lambda x: isinstance(x, LoraArray)
        )
        return {leaf_path(path): w.rank for path, w in found if isinstance(w, LoraArray)}

    assert ranks("*") == {"attn/q": 8, "up": 8}
    assert ranks("attn/*") == {"attn/q": 8}
    assert ranks({"up": None, "tiny": 2, "*": 4}) == {"attn/q": 4, "tiny": 2}
    assert ranks([lowbit.Rule("*", "nf4", where=lambda x: x.size > K * K)]) == {"up": 8}
    assert ranks([lowbit.Rule("up", None), "*"]) == {"attn/q": 8}
    for rules, message in {
        "*kernel": r"No leaf matches '\*kernel'.*attn/norm, attn/q, bias",
        "bias": "The pattern 'bias' matches bias, but no leaf that can have an adapter",
        ("up", "tiny"): r"rank=8 must be at most min\(in, out\) = 4 for tiny of shape \(4, 4\)\.",
    }.items():
        with pytest.raises(ValueError, match=message):
            lowbit.lora(params, rules, key=KEY)
    with pytest.raises(ValueError, match="The rank 0 of the pattern 'up' must be an integer >= 1"):
        lowbit.lora(params, {"up": 0}, key=KEY)
    once = lowbit.lora(params, "up", key=KEY)
    with pytest.raises(ValueError, match="up has an adapter already: merge it first"):
        lowbit.lora(once, "up", key=KEY)
    assert lowbit.quantize_tree(once, "int8")[1]["up"].why == "it has an adapter"
    # The random numbers of a leaf do not depend on other leaves.
    np.testing.assert_array_equal(once["up"].a, lowbit.lora({"up": params["up"]}, "*", key=KEY)["up"].a)
    assert np.any(once["up"].a[:K] != lowbit.lora(params, "*", key=KEY)["attn"]["q"].a)
    with pytest.raises(ValueError, match=r"base of shape \(64, 96\) .* \(64, 2\) and \(3, 96\)"):
        LoraArray(params["up"], jnp.ones((K, 2)), jnp.ones((3, N)))


# --- merging


def test_merge_adds_and_quantizes_only_if_asked() -> None:
    params = {**weights(layouts()[0]), "dense": gaussian(7, (K, N)), "norm": jnp.ones(K)}
    params = adapted(params, {"w": 3, "stack": 3, "dense": 3})
    merged = lowbit.merge(params)
    for name in ("w", "stack", "dense"):
        w = params[name]
        assert type(merged[name]) is type(params["norm"])
        want = lowbit.materialize(w.base) + w.scale * jnp.einsum("...ir,...ro->...io", w.a, w.b)
        assert_close(merged[name], want)
    assert merged["square"] is params["square"] and merged["norm"] is params["norm"]
    again = lowbit.merge(params, {"dense": None, "*": "int8"})
    assert again["square"] is params["square"] and type(again["dense"]) is type(merged["dense"])
    for name in ("w", "stack"):
        assert_same_bits(again[name], lowbit.Array8B.quantize(merged[name], axis=params[name].base.axis))
    with pytest.raises(ValueError, match="No leaf matches 'square'"):
        lowbit.merge(params, {"square": "int8"})


# --- files


def test_adapters_alone_are_saved_and_loaded(tmp_path: Path) -> None:
    params = adapted({"layers": [weights(layouts()[0])["w"]], "norm": jnp.ones(K)})
    trainable, frozen = lowbit.partition(params)
    file = tmp_path / "adapters.safetensors"
    lowbit.save(file, trainable)
    assert file.stat().st_size < 10_000
    fresh = lowbit.lora({"layers": [weights(layouts()[0])["w"]], "norm": jnp.ones(K)}, "*", rank=3, alpha=6, key=KEY)
    like, frozen = lowbit.partition(fresh)
    again = lowbit.combine(lowbit.load(file, like=like), frozen)
    np.testing.assert_array_equal(again["layers"][0].materialize(), params["layers"][0].materialize())
    other = lowbit.lora({"layers": [weights(layouts()[0])["w"]], "norm": jnp.ones(K)}, "*", rank=4, key=KEY)
    with pytest.raises(ValueError, match=r"layers/0/a' is .* shape \(64, 3\) .* in the file and .* \(64, 4\)"):
        lowbit.load(file, like=lowbit.partition(other)[0])
    with pytest.raises(ValueError, match=r"'layers/1' is in `like` and not in the file"):
        lowbit.load(file, like={**like, "layers": like["layers"] * 2})


# --- meshes


@tiers.DEVICES
def test_adapters_are_sharded_like_the_base() -> None:
    mesh = jax.make_mesh((2, 2), ("e", "x"), axis_types=(AxisType.Auto,) * 2)
    experts, k, n = 4, 128, 64
    q = lowbit.Array8B.quantize(gaussian(7, (experts, k, n)), axis=-2)
    x = gaussian(7, (experts, 8, k))
    for spec in (P("e", None, "x"), P("e", "x", None)):
        w = adapted({"w": q.with_sharding(NamedSharding(mesh, spec))})["w"]
        a, b = w.component_specs(spec).a, w.component_specs(spec).b
        assert (a, b) == (P("e", spec[1], None), P("e", None, spec[2]))
        assert w.a.sharding == NamedSharding(mesh, a)
        want = jnp.einsum("ebk,ekn->ebn", x, w.materialize())
        assert_close(jax.jit(implicit(lambda x, w: jnp.einsum("ebk,ekn->ebn", x, w)))(x, w), want)
        constrained = implicit(lambda w, spec=spec: lax.with_sharding_constraint(w, NamedSharding(mesh, spec)))
        assert jax.jit(constrained)(w).a.sharding.is_equivalent_to(NamedSharding(mesh, a), 3)
        inside = jax.shard_map(
            (lambda x, w: lax.psum(x @ w, "x")) if spec[1] else jnp.matmul,
            mesh=mesh,
            in_specs=(P("e", None, spec[1]), spec),
            out_specs=P("e", None, spec[2]),
        )
        program = jax.jit(implicit(inside))
        with lowbit.materialization("error"):
            assert_close(program(x, w), want)
        assert "all-gather" not in program.lower(x, w).compile().as_text()


def test_experts_in_groups_of_rows() -> None:
    w = adapted_weight(layouts()[0], "stack")
    x, sizes = jnp.tile(activations(), (2, 1)), jnp.array([3, 0, 2 * ROWS - 3])
    with lowbit.materialization("error"):
        got = implicit(lax.ragged_dot)(x, w, sizes)
    assert_close(got, lax.ragged_dot(x, w.materialize(), sizes))


def test_experts_with_gate_and_up_in_one_array_are_transposed() -> None:
    """(experts, 2, out, in), as in Gemma 4: the second axis is one of the outputs, not of a stack."""
    sizes, x = jnp.array([1, ROWS - 3, 2]), activations()

    def fn(w: Any, x: jax.Array) -> jax.Array:
        return lax.ragged_dot(x, jnp.transpose(w, (0, 3, 1, 2)).reshape(len(sizes), K, -1), sizes)

    w = lowbit.quantize_tree(gaussian(7, (3, 2, 16, K)), "int8", fn=fn, args=(x,))[0]
    w = adapted(w, fn=fn, args=(x,))
    assert (w.a.shape, w.b.shape) == ((3, 2, 16, 3), (3, 3, K))
    with lowbit.materialization("error"):
        got = jax.jit(implicit(fn))(w, x)
    assert_close(got, fn(w.materialize(), x))


@pytest.mark.parametrize(("shape", "axis"), [((64, 96), (-2, -1)), ((3, 64, 96), (-3, -2, -1))])
def test_a_base_with_one_scale_for_all_of_its_axes(shape: tuple[int, ...], axis: tuple[int, ...]) -> None:
    w, x = gaussian(7, shape), gaussian(1, (*shape[:-2], 5, 64))
    base = lowbit.quantize(w, "int8", axis=axis)
    assert base.scale.size == 1
    params = adapted({"up": base})
    assert params["up"].a.shape == (*shape[:-1], 3) and params["up"].b.shape == (*shape[:-2], 3, 96)
    assert_close(x @ params["up"], x @ params["up"].materialize())
    merged = lowbit.merge(params, "int8")["up"]
    assert merged.axis == axis and merged.shape == shape


@pytest.mark.parametrize("base", ["quantized", "dense"])
@pytest.mark.parametrize(
    "scaled",
    [lambda w: w * 2.5, lambda w: np.float32(2.5) * w, lambda w: w / 2.5, lambda w: -w],
    ids=["times", "number_first", "divided", "negative"],
)
def test_a_weight_times_a_number_is_still_adapted(scaled: Any, base: str) -> None:
    """levanter multiplies weights by a factor before the product."""
    w, x = adapted_weight(layouts()[0], "w"), activations()
    w = w.replace(base=w.base.materialize()) if base == "dense" else w

    def gradient(product: Any, read: Any) -> Any:
        def loss(a: jax.Array, b: jax.Array, w: LoraArray) -> jax.Array:
            return jnp.sin(product(read(w.replace(a=a, b=b)))).sum()

        return jax.jit(jax.value_and_grad(loss, (0, 1)))

    def product(w: Any) -> jax.Array:
        return x @ scaled(w)

    with lowbit.materialization("error"):
        traced = gradient(implicit(product), lambda w: w).trace(w.a, w.b, w)
        assert isinstance(implicit(scaled)(w), LoraArray)
    want = gradient(product, lowbit.materialize)(w.a, w.b, w)
    assert_close(traced.lower().compile()(w.a, w.b, w), want, 1e-4)
    assert base == "dense" or dense_weights(traced.jaxpr, w) == []


def test_a_number_that_is_trained_with_the_adapter_has_its_gradient() -> None:
    w, x = adapted_weight(layouts()[0], "w"), activations()

    def loss(number: Any, w: Any) -> Any:
        return jnp.sin(x @ (w * number)).sum()

    with lowbit.materialization("allow"):  # gradients stop at the scales, so the base goes dense
        got = jax.jit(jax.value_and_grad(implicit(loss)))(1.5, w)
    assert_close(got, jax.value_and_grad(loss)(1.5, w.materialize()), 1e-4)


def test_a_table_of_matrices_is_looked_up_by_row() -> None:
    """Gemma 3n has one: (vocabulary, layers, features), scaled by a traced number and added."""
    ids, x = jnp.array([[3, 0, 127]]), jnp.ones((1, 3, 4, 16))

    def model(p: Any, ids: jax.Array) -> jax.Array:
        return x + p["table"][(ids,)] * jnp.sqrt(jnp.float32(16))

    table = {"table": gaussian(7, (128, 4, 16))}
    params, report = lowbit.quantize_tree(table, "int8", fn=model, args=(ids,))
    assert report["table"].axis == -1
    for p in (params, adapted(params, fn=model, args=(ids,))):
        with lowbit.materialization("error"):
            assert_close(jax.jit(implicit(model))(p, ids), model(lowbit.materialize(p), ids))
    assert (p["table"].a.shape, p["table"].b.shape) == ((128, 3), (3, 4, 16))
