"""Lowbit files and several devices: sharded arrays are saved whole, and each device reads its own shards."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from files_helpers import assert_same, saved, weights
from jax.sharding import NamedSharding, PartitionSpec

from lowbit import Array8B, ArrayNF4
from lowbit.io import load
from lowbit.io.container import _header

pytestmark = tiers.DEVICES


def test_arrays_on_several_devices_are_gathered_and_laid_out_as_like_is(tmp_path):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec("x", "y"))
    w = weights(64, 128)
    tree = {"q": Array8B.quantize(w, axis=-1, block_size=32).with_sharding(sharding), "w": jax.device_put(w, sharding)}
    path = saved(tmp_path, tree)
    assert_same(load(path), tree)
    assert load(path)["w"].is_fully_replicated
    described = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
    dense = jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=sharding)
    for like in (tree, described, {"q": dense, "w": dense}):
        got = load(path, like=like)
        assert_same(got, tree)
        assert got["w"].sharding == sharding
        assert got["q"].sharding == sharding and got["q"].codes.sharding == tree["q"].codes.sharding


def test_devices_read_their_own_shards(tmp_path, monkeypatch):
    tree = {"q": ArrayNF4.quantize(weights(64, 256), axis=-1).T, "w": weights(8, 6), "wide": np.arange(8)}
    path, taken, read = saved(tmp_path, tree), [], _header.Tensor.read

    def counting(self: Any, wanted: Any) -> np.ndarray:
        taken.append(read(self, wanted).nbytes)
        return read(self, wanted)

    def like(devices: int, *spec: Any) -> Any:
        auto = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((devices,), ("x",), axis_types=auto, devices=jax.devices()[:devices])
        rows, given = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec(*spec))
        arrays = {"q": (rows, (256, 64), np.float32), "w": (given, (8, 6), np.float32), "wide": (rows, (8,), np.int64)}
        return {
            name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
            for name, (sharding, shape, dtype) in arrays.items()
        }

    monkeypatch.setattr(_header.Tensor, "read", counting)
    got = load(path, like(2, "x"))
    assert got["q"].sharding.spec == PartitionSpec("x", None)
    assert got["q"].codes.sharding.spec == PartitionSpec(None, "x")
    assert type(got["wide"]) is np.ndarray and got["wide"].dtype == np.int64  # which JAX would narrow to 32 bits
    assert sorted(taken) == sorted([64 * 64] * 2 + [64 * 2 * 4] * 2 + [4 * 6 * 4] * 2 + [8 * 8])
    assert_same(got["q"], tree["q"])
    assert_same(got["w"], jnp.asarray(tree["w"]))
    with pytest.raises(
        ValueError, match=r"a.safetensors: cannot shard 'q' .*: Axis -2 of length 256 .* 4 devices would"
    ):
        load(path, like(8, "x"))
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):  # shapes then have a mesh without devices
        shapes = jax.eval_shape(lambda: {**tree, "w": jax.device_put(jnp.asarray(tree["w"]), PartitionSpec("x"))})
        shapes["wide"] = like(2, "x")["wide"]
        assert load(path, shapes)["w"].sharding == NamedSharding(mesh, PartitionSpec("x", None))
    wrong = r"a.safetensors: cannot shard 'w' like `like`: Axis -1 of length 6 .* 4 devices"
    with pytest.raises(ValueError, match=wrong):
        load(path, like(4, None, "x"))
