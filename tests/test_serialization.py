"""Trees with quantized leaves through other people's serializers: the same bits come back."""

import dataclasses
from pathlib import Path
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import tiers
from flax import serialization
from flax.training.train_state import TrainState
from helpers import assert_close, assert_same_bits, gaussian
from jax import export

import lowbit
import lowbit.compat.flax
from lowbit.kernels import cpu
from lowbit.kernels.export import CUSTOM_CALLS

pytestmark = pytest.mark.frameworks

X = gaussian(1, (8, 96))


def params(format: str | lowbit.QuantizationConfig) -> Any:
    dense = {"up": {"kernel": gaussian(0, (96, 128)), "bias": jnp.ones(128)}}
    dense |= {"down": {"kernel": gaussian(1, (128, 96))}, "scale": jnp.ones(96)}
    tree, _ = lowbit.quantize_tree(dense, format)
    adapted = lowbit.lora(tree, "down/kernel", rank=2, key=jax.random.key(2))
    return adapted | {"turned": tree["down"]["kernel"].T}


FORMATS = [*lowbit.FORMATS, lowbit.QuantizationConfig("nf4", double_quant=True)]
# Serializers see components and static fields, not formats.
formats = pytest.mark.parametrize("format", tiers.tiered(FORMATS, ("nf4", "q3", "int4", FORMATS[-1])), ids=str)


def assert_same(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert_close(X @ got["up"]["kernel"], X @ want["up"]["kernel"], 0)
    assert_close(X @ got["down"]["kernel"].T, X @ want["down"]["kernel"].T, 0)


@formats
def test_flax_bytes(format: Any) -> None:
    tree = params(format)
    assert_same(serialization.from_bytes(tree, serialization.to_bytes(tree)), tree)
    like = jax.eval_shape(lambda: params(format))  # a target needs no numbers
    assert_same(serialization.from_bytes(like, serialization.to_bytes(tree)), tree)


@formats
def test_flax_state_dicts_hold_components(format: Any) -> None:
    tree = params(format)
    state = serialization.to_state_dict(tree)
    assert state["up"]["kernel"]["codes"] is tree["up"]["kernel"].codes
    assert state["down"]["kernel"]["base"]["scales"] is tree["down"]["kernel"].base.scales
    assert_same(serialization.from_state_dict(tree, state), tree)


def test_a_train_state_of_flax_with_frozen_leaves() -> None:
    trainable, frozen = lowbit.partition(params("nf4"))
    state = TrainState.create(apply_fn=None, params=trainable, tx=optax.adam(1e-3))
    back, weights = serialization.from_bytes((state, frozen), serialization.to_bytes((state, frozen)))
    assert_same(lowbit.combine(back.params, weights), lowbit.combine(trainable, frozen))


def test_flax_refuses_a_target_of_another_kind() -> None:
    w = jnp.linspace(-1, 1, 64 * 64).reshape(64, 64)
    stored = serialization.to_bytes({"w": lowbit.quantize(w, "int8", axis=-2)})
    with pytest.raises(ValueError, match=r"at path \./w was stored with Array8B\(.*the target has Array8B\("):
        serialization.from_bytes({"w": lowbit.quantize(w, "int8", axis=-1)}, stored)
    with pytest.raises(ValueError, match=r"was stored with Array8B\(.*the target has ArrayNF4\("):
        serialization.from_bytes({"w": lowbit.quantize(w, "nf4", axis=-2)}, stored)
    adapted = lowbit.lora({"w": lowbit.quantize(w, "int8", axis=-2)}, "w", key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"stores codes, scales, static, and the target.*LoraArray, has a, b, base"):
        serialization.from_bytes(adapted, stored)


@formats
def test_cloudpickle(format: Any) -> None:
    tree = params(format)
    assert_same(cloudpickle.loads(cloudpickle.dumps(tree)), tree)
    program = cloudpickle.loads(cloudpickle.dumps(lambda x: x @ tree["up"]["kernel"]))
    assert_close(program(X), X @ tree["up"]["kernel"], 0)


@formats
def test_orbax(format: Any, tmp_path: Path) -> None:
    tree = params(format)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", tree)
        checkpointer.wait_until_finished()
        for like in (tree, jax.eval_shape(lambda: params(format))):
            assert_same(checkpointer.restore(tmp_path / "step", like), tree)


@tiers.DEVICES
def test_orbax_restores_to_a_sharding(tmp_path: Path) -> None:
    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("model", None))
    w = lowbit.quantize(jnp.ones((128, 64)), "int8", axis=-2)
    like = jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), w, lowbit.shardings(w, rows)
    )
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", w)
        checkpointer.wait_until_finished()
        back = checkpointer.restore(tmp_path / "step", like)
    assert back.sharding == rows
    assert_same_bits(back, w)


@formats
def test_export_with_kernels(format: Any) -> None:
    w = params(format)["up"]["kernel"]
    components, tree = jax.tree.flatten(w)
    program = jax.jit(lambda x, *components: x @ jax.tree.unflatten(tree, components))
    with pytest.raises(ValueError, match="lowbit_matmul"):
        export.export(program)(X, *components)
    exported = export.export(program, disabled_checks=lowbit.export_checks())(X, *components)
    assert "lowbit_matmul" in exported.mlir_module()
    again = export.deserialize(exported.serialize())
    assert_close(again.call(X, *components), X @ w, 0)


def test_export_checks_name_every_native_kernel() -> None:
    library = cpu._library
    assert library is not None
    assert {*library.lowbit_targets().decode().split(",")} < {*CUSTOM_CALLS}
    w = jnp.ones((64, 32))
    quantizing = jax.jit(lambda w: lowbit.quantize(w, "nf4").codes)
    exported = export.export(quantizing, disabled_checks=lowbit.export_checks())(w)
    np.testing.assert_array_equal(export.deserialize(exported.serialize()).call(w), quantizing(w))


def test_a_format_defined_later_is_registered_by_hand() -> None:
    @dataclasses.dataclass(frozen=True, eq=False, repr=False)
    class Later(lowbit.LoraArray):
        pass

    array = Later(jnp.ones((4, 4)), jnp.ones((4, 1)), jnp.ones((1, 4)))
    with pytest.raises(TypeError, match="can not serialize 'Later' object"):
        serialization.to_bytes(array)
    lowbit.compat.flax.register(Later)
    assert isinstance(serialization.from_bytes(array, serialization.to_bytes(array)), Later)
