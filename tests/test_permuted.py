"""Arrays stored in another order along one axis: equal to the dense array in every program, bits kept."""

import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from features import ALL, FUSED, arguments
from files_helpers import signed, split
from helpers import LAYERS, ROWS, K, N, activations, assert_close, assert_same_bits, gaussian, layouts
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_transforms import DENSE, TOLERANCE

import lowbit
from lowbit import PermutedArray, implicit
from lowbit.models.histogram import histogram
from lowbit.testing import dense_weights

KEY = jax.random.key(3)


def orders(*shape: int) -> jax.Array:
    """Permutations, one for each layer."""
    numbers = jnp.broadcast_to(jnp.arange(shape[-1], dtype=jnp.int32), shape)
    return jax.random.permutation(KEY, numbers, axis=-1, independent=True)


def permuted(array: Any, axis: int) -> PermutedArray:
    """An array as if it had been stored in another order; each layer of the stack in its own."""
    layers = array.shape[:1] if array.shape[0] == LAYERS else ()
    return PermutedArray(array, orders(*layers, array.shape[axis]), axis)


@functools.cache
def small(axis: int = -2, dtype: Any = jnp.float32) -> PermutedArray:
    array = lowbit.quantize(gaussian(3, (K, N)), "int4", axis=axis)
    return permuted(array.astype(dtype), axis)


@functools.cache
def stacked() -> PermutedArray:
    return permuted(lowbit.quantize(gaussian(3, (LAYERS, K, N)), "int4", axis=-2), -2)


# Features for which there is a rule, or whose components enter or leave an inner program. Formats and axes alternate.
FEATURES = """
    matmul_left matmul_right square_transposed vector_times_matrix einsum_weight_first einsum_heads einsum_batched
    einsum_batch_in_the_middle tensordot_two_axes batched_weight preferred_element_type tied_head
    embedding_out_of_bounds columns_by_index slices dynamic_slices reshaped permuted casts scan_over_layers
    scan_with_the_weight_carried scan_returning_the_layers fori_loop_by_index cond_returning_it vmap_over_layers
    vmap_of_vmap value_and_grad_through_scan_and_checkpoint custom_vjp barriers ragged_dot
""".split()
LAYOUTS = [layout for layout in layouts() if layout.format in ("int8", "int4")]  # with and without offsets
AXES = {"w": (-2, -1), "square": (-1, -2), "stack": (-2, -1), "heads": (-3, -1)}
CASES = tiers.tiered(itertools.product(FEATURES, (0, 1)), [(f, i % 2) for i, f in enumerate(FEATURES)])


@pytest.mark.parametrize(("feature", "side"), CASES)
def test_a_feature_equals_the_dense_program(feature: str, side: int) -> None:
    layout = LAYOUTS[FEATURES.index(feature) // 2 % len(LAYOUTS)]
    x, p = activations(), {name: permuted(w, AXES[name][side]) for name, w in arguments(feature, layout).items()}
    want = DENSE[feature](x, lowbit.materialize(p))
    with lowbit.materialization("error" if feature in FUSED else "allow"):
        traced = jax.jit(implicit(ALL[feature])).trace(x, p)
        got = traced.lower().compile()(x, p)
    assert_close(got, want, 2 * TOLERANCE.get(feature, 1e-5))
    if feature in FUSED:
        assert dense_weights(traced.jaxpr, p) == []


# --- values


@pytest.mark.parametrize("axis", [-2, -1])
def test_it_materializes_to_the_stored_values_in_order(axis: int) -> None:
    w = small(axis, jnp.bfloat16)
    assert (w.shape, w.dtype, w.axis) == ((K, N), jnp.bfloat16, axis)
    stored = np.asarray(w.array.materialize())
    want = np.empty_like(stored)
    want[tuple(np.asarray(w.order) if a == axis else slice(None) for a in (-2, -1))] = stored
    np.testing.assert_array_equal(np.asarray(w.materialize()), want)


def test_each_layer_of_a_stack_has_its_own_order() -> None:
    w = stacked()
    for i in range(LAYERS):
        one = PermutedArray(w.array[i], w.order[i])
        np.testing.assert_array_equal(w.materialize()[i], one.materialize())
        assert_same_bits(w[i], one)  # pyright: ignore[reportArgumentType]


def test_a_product_takes_x_in_the_stored_order() -> None:
    w, x = small(), activations()
    np.testing.assert_array_equal(x @ w, x[:, w.order] @ w.array)
    np.testing.assert_array_equal((jnp.ones((2, N)) @ w.T)[:, w.order], jnp.ones((2, N)) @ w.array.T)


@pytest.mark.parametrize("transposed", [False, True])
def test_derivatives_with_respect_to_x(transposed: bool) -> None:
    w = small()
    x = gaussian(3, (ROWS, N if transposed else K))

    def loss(x: jax.Array, w: Any) -> jax.Array:
        return jnp.square(x @ (w.mT if transposed else w)).sum()

    with lowbit.materialization("error"):
        program = jax.jit(jax.value_and_grad(loss)).trace(x, w)
        assert dense_weights(program.jaxpr, x, w) == []
        assert_close(program.lower().compile()(x, w), jax.value_and_grad(loss)(x, w.materialize()))
        got = jax.jvp(lambda x: loss(x, w), (x,), (jnp.ones_like(x),))
    assert_close(got, jax.jvp(lambda x: loss(x, w.materialize()), (x,), (jnp.ones_like(x),)))


# --- structure: the result is permuted too, and has the bits of the operand

STRUCTURAL: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "T": (lambda w: w["w"].T, True),
    "mT of a stack": (lambda w: w["stack"].mT, True),
    "transpose": (lambda w: jnp.transpose(w["stack"], (0, 2, 1)), True),
    "layers not first": (lambda w: jnp.transpose(w["stack"], (1, 0, 2)), False),
    "astype": (lambda w: w["w"].astype(jnp.float16), True),
    "astype of integers": (lambda w: w["w"].astype(jnp.int32), False),
    "columns": (lambda w: w["w"][:, 32:64], True),
    "rows": (lambda w: w["w"][:32], False),
    "a row": (lambda w: w["w"][3], False),
    "a layer": (lambda w: w["stack"][1], True),
    "layers": (lambda w: w["stack"][1:], True),
    "layers by step": (lambda w: w["stack"][::2], True),
    "a layer by number": (lambda w: lax.dynamic_index_in_dim(w["stack"], jnp.int32(2), 0, keepdims=False), True),
    "layers by index": (lambda w: w["stack"][jnp.array([2, 0])], True),
    "split": (lambda w: jnp.split(w["w"], 2, axis=1)[1], True),
    "new axis": (lambda w: w["w"][None], True),
    "new last axis": (lambda w: w["w"][..., None], True),
    "new axis of a stack": (lambda w: w["stack"][:, None], True),
    "heads": (lambda w: w["w"].reshape(K, 3, 32), True),
    "flat": (lambda w: w["w"].reshape(-1), False),
    "a stack of one": (lambda w: w["w"].reshape(1, K, N), True),
    "two axes of layers": (lambda w: jnp.stack([w["stack"]] * 2).reshape(2 * LAYERS, K, N), True),
    "broadcast": (lambda w: jnp.broadcast_to(w["w"], (2, K, N)), True),
    "stack": (lambda w: jnp.stack([w["stack"][0], w["stack"][1]]), True),
    "concatenated layers": (lambda w: jnp.concatenate([w["stack"], w["stack"][:1]]), True),
    "concatenated columns": (lambda w: jnp.concatenate([w["w"], w["w"]], axis=1), True),
    "concatenated rows": (lambda w: jnp.concatenate([w["w"], w["w"]]), False),
    "added": (lambda w: w["w"] + 1, False),
}


@pytest.mark.parametrize("name", STRUCTURAL)
def test_a_structural_operation_keeps_the_bits(name: str) -> None:
    fn, keeps = STRUCTURAL[name]
    w = {"w": small(), "stack": stacked()}
    want = fn(lowbit.materialize(w))
    if keeps:
        with lowbit.materialization("error"):
            got = implicit(fn)(w)
        assert isinstance(got, PermutedArray)
        assert isinstance(got.array, lowbit.QuantizedArray)
    else:
        with lowbit.materialization("error"), pytest.raises(TypeError, match="no rule for PermutedArray"):
            implicit(fn)(w)
        with lowbit.materialization("allow"):
            got = implicit(fn)(w)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    np.testing.assert_array_equal(np.asarray(lowbit.materialize(got)), np.asarray(want))


def test_columns_in_other_orders_go_dense() -> None:
    a, b = small(), PermutedArray(small().array, jnp.arange(K))
    with lowbit.materialization("allow"):
        got = implicit(lambda a, b: jnp.concatenate([a, b], axis=1))(a, b)
    assert not lowbit.is_quantized(got)
    np.testing.assert_array_equal(got, jnp.concatenate([a.materialize(), b.materialize()], axis=1))


def test_transformations_outside_implicit() -> None:
    w, x = stacked(), gaussian(3, (LAYERS, ROWS, K))
    with lowbit.materialization("error"):
        assert_close(jax.vmap(lambda x, w: x @ w)(x, w), x @ w.materialize())
        assert_close(lax.scan(lambda c, xw: (c, xw[0] @ xw[1]), 0, (x, w))[1], x @ w.materialize())
    assert jax.eval_shape(lambda w: w, w).shape == w.shape
    assert_same_bits(jax.jit(lambda w: w)(w), w)  # pyright: ignore[reportArgumentType]
    shared = PermutedArray(w.array, orders(K))  # one order for all layers
    mapped = jax.vmap(lambda x, w: x @ w, in_axes=(0, shared.replace(array=0, order=None)))
    assert_close(mapped(x, shared), x @ shared.materialize())


# --- errors


@pytest.mark.parametrize(
    ("order", "axis", "message"),
    [
        (range(N), -2, rf"\({K}, {N}\) and axis=-2 cannot have an order of shape \({N},\)"),
        ([0] * K, -2, r"each number from 0 to 63 once; it lacks 1"),
        (range(1, K + 1), 0, r"once; it lacks 0"),
        (range(K), 2, r"axis=2 is not an axis"),
        (np.zeros((K, K), int), -2, r"cannot have an order of shape \(64, 64\)"),
        (np.zeros(K), -2, r"order must have integers"),
    ],
)
def test_an_order_must_be_a_permutation_of_the_axis(order: Any, axis: int, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        PermutedArray(small().array, np.array(order), axis)


def test_only_a_quantized_array_is_permuted() -> None:
    with pytest.raises(TypeError, match="must be a QuantizedArray"):
        PermutedArray(jnp.ones((2, 2)), jnp.arange(2))  # pyright: ignore[reportArgumentType]


# --- trees


def test_trees_see_one_quantized_array() -> None:
    w = small()
    params = {"w": w, "b": jnp.zeros(N)}
    assert lowbit.is_quantized(w) and lowbit.is_frozen(w)
    assert w.nbytes == w.array.nbytes + 4 * K
    assert repr(w).startswith(f"PermutedArray('int4', shape=({K}, {N}), dtype=float32, permuted along axis -2, ")
    assert lowbit.tree_map(lambda a: a.astype(jnp.bfloat16), params)["w"].dtype == jnp.bfloat16
    assert lowbit.trainable(params) == {"w": False, "b": True}
    assert lowbit.combine(*lowbit.partition(params))["w"] is w
    _, report = lowbit.quantize_tree({**params, "kernel": jnp.ones((K, N))}, "int8")
    assert report["w"].why == "quantized already, as PermutedArray"
    np.testing.assert_array_equal(lowbit.dequantize_tree(params)["w"], w.materialize())
    original = gaussian(9, w.shape)
    assert histogram("w", original, w) == histogram("w", original[w.order], w.array)


def test_an_adapter_on_top() -> None:
    params, x = {"w": small()}, activations()
    adapted = lowbit.lora(params, "w", rank=2, key=KEY)["w"]
    adapted = adapted.replace(b=jnp.ones_like(adapted.b))
    want = x @ adapted.materialize()
    with lowbit.materialization("error"):
        assert_close(x @ adapted, want)
        assert_close(jnp.ones((2, N)) @ adapted.T, jnp.ones((2, N)) @ adapted.materialize().T)
    np.testing.assert_array_equal(adapted.base.materialize(), params["w"].materialize())


@pytest.mark.frameworks
def test_flax_serializes_it() -> None:
    from flax import serialization

    from lowbit.compat.flax import register

    w = small()
    assert register(PermutedArray) is PermutedArray
    back = serialization.from_bytes({"w": w}, serialization.to_bytes({"w": w}))["w"]
    assert_same_bits(back, w)  # pyright: ignore[reportArgumentType]


# --- meshes


@tiers.DEVICES
def test_other_axes_are_sharded() -> None:
    mesh = jax.make_mesh((2, 2), ("e", "x"), axis_types=(AxisType.Auto,) * 2)
    array = lowbit.quantize(gaussian(3, (4, K, N)), "int8", axis=-2)
    w, x = PermutedArray(array, orders(4, K)), gaussian(3, (4, ROWS, K))
    sharding = NamedSharding(mesh, P("e", None, "x"))
    placed = jax.device_put(w, lowbit.shardings(w, sharding))
    assert placed.sharding == sharding
    assert placed.order.sharding.spec == P("e", None)
    with lowbit.materialization("error"):
        assert_close(jax.jit(implicit(jnp.matmul))(x, placed), x @ w.materialize())
    with pytest.raises(ValueError, match=r"Axis -2 of this PermutedArray of shape \(4, 64, 96\) is permuted"):
        lowbit.shardings(w, NamedSharding(mesh, P("e", "x", None)))


# --- files


def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    path, w = tmp_path / "w.safetensors", small()
    tree = {"w": w, "tied": w, "stack": [stacked(), small(-1).mT], "b": jnp.ones(3)}
    lowbit.save(path, tree)
    for like in (None, tree, jax.eval_shape(lambda: tree), jax.eval_shape(lambda: lowbit.materialize(tree))):
        back = lowbit.load(path, like)
        assert back["w"] is back["tied"]
        for got, want in zip((back["w"], *back["stack"]), (w, *tree["stack"]), strict=True):
            assert isinstance(got, PermutedArray)
            assert_same_bits(got, want)  # pyright: ignore[reportArgumentType]
    other = {**tree, "w": small().mT.mT.replace(axis=-1)}
    with pytest.raises(
        ValueError, match=r"'w' is PackedArray of shape.*, permuted along axis -2 in the file and Packed"
    ):
        lowbit.load(path, {**other, "w": PermutedArray(w.array, orders(N), -1)})


@tiers.DEVICES
def test_it_is_loaded_as_shards(tmp_path: Path) -> None:
    path, w = tmp_path / "w.safetensors", stacked()
    lowbit.save(path, {"w": w})
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    sharding = NamedSharding(mesh, P(None, None, "x"))
    back = lowbit.load(path, {"w": jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=sharding)})["w"]
    assert back.sharding == sharding
    assert_same_bits(back, w)
    permuted = jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=NamedSharding(mesh, P(None, "x")))
    with pytest.raises(ValueError, match=r"cannot shard 'w' like `like`: Axis -2 of this PermutedArray"):
        lowbit.load(path, {"w": permuted})


def test_an_order_in_a_file_must_be_a_permutation(tmp_path: Path) -> None:
    path, w = tmp_path / "w.safetensors", small()
    lowbit.save(path, {"w": w.replace(order=jnp.zeros_like(w.order))})
    with pytest.raises(ValueError, match=r"w\.safetensors: 'w': order must have each number from 0 to 63 once"):
        lowbit.load(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"axis":-2', '"axis":-1', "cannot have an order of shape"),
        ('"axis":-2', '"axis":-9', "cannot have an order of shape"),
        ('"axis":-2', '"axis":true', "is permuted along the axis True"),
        ('"axis":-2', '"axis":1e0', "is not an array, a number or a container"),
        ('"order":"w/order"', '"order":"w/codes"', "in an order of dtype uint8"),
        ('"order":"w/order"', '"order":"w/none_"', "needs tensor 'w/none_', which is missing"),
        ('"quantized":"PackedArray"', '"quantixed":"PackedArray"', "which is not a quantized array"),
        ('"w/order":{"dtype":"I32"', '"w/order":{"dtype":"F32"', "in an order of dtype float32"),
    ],
)
def test_a_forged_header_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "w.safetensors"
    array = lowbit.quantize(gaussian(3, (K, N)), "int4", axis=-2, block_size=None)
    lowbit.save(path, {"w": PermutedArray(array, orders(K))})
    header, data = split(path)
    quoted = [json.dumps(text)[1:-1] for text in (old, new)]  # the tree is JSON within JSON
    forged = header
    for a, b in (quoted, (old, new)):
        forged = forged.replace(a.encode(), b.encode().ljust(len(a)), 1)
    assert forged != header
    path.write_bytes(signed(forged, data))
    with pytest.raises(ValueError, match=message):
        lowbit.load(path)
