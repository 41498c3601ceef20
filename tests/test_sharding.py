"""Meshes of virtual devices: shard_map on either side, shardings of jit, explicit axes."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from helpers import Layout, assert_close, assert_same_bits
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lowbit
from lowbit import implicit
from lowbit.testing import dense_weights


@pytest.fixture
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))


K, N = 128, 256  # whole blocks on each device


def weight(layout: Layout) -> lowbit.QuantizedArray:
    return layout.quantize(jax.random.normal(jax.random.key(1), (K, N)))


def activations() -> jax.Array:
    return jax.random.normal(jax.random.key(2), (8, K))


def sharded(q, mesh, spec):
    return q.with_sharding(NamedSharding(mesh, spec))


def test_arrays_are_sharded_by_their_own_axes(any_layout: Layout, mesh) -> None:
    q = weight(any_layout)
    assert not q.is_sharded
    for spec in (P(None, "x"), P("x", None)):
        columns = q.with_sharding(NamedSharding(mesh, spec))
        assert columns.sharding == NamedSharding(mesh, spec) and columns.is_sharded
        assert columns.T.sharding.spec == P(spec[1], spec[0])
        assert_same_bits(columns, q)
        assert columns.codes.addressable_shards[0].data.size == q.codes.size // 2
        inside = jax.jit(lambda q, spec=spec: q.with_sharding(NamedSharding(mesh, spec)))(q)
        assert inside.sharding == NamedSharding(mesh, spec)
    assert q.reshard(None) is q
    assert q.with_mesh_and_axis((mesh, None)).sharding == NamedSharding(mesh, P(None, None))
    assert q.with_mesh_and_axis((mesh, "x")).sharding.spec == P("x", None)
    assert q.with_mesh_and_axis((mesh, (None, "x"))).sharding.spec == P(None, "x")
    with pytest.raises(RuntimeError, match="mesh"):
        q.with_sharding(P("x"))


def test_quantizing_keeps_the_sharding(layout: Layout, mesh) -> None:
    w = jax.device_put(jax.random.normal(jax.random.key(1), (K, N)), NamedSharding(mesh, P(None, "x")))
    for quantize in (layout.quantize, jax.jit(layout.quantize)):
        q = quantize(w)
        assert q.sharding == w.sharding
        assert_close(q, layout.quantize(jax.device_get(w)))


def test_a_block_is_never_cut() -> None:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    q = lowbit.quantize(jnp.ones((K, N)))
    message = r"Axis -1 of length 256 .* 8 devices of \('x',\): .* whole blocks of 64 elements. 4 devices would do."
    with pytest.raises(ValueError, match=message):
        q.with_sharding(NamedSharding(mesh, P(None, "x")))
    with pytest.raises(ValueError, match=r"Axis -2 .*whole blocks of 64"):
        q.T.with_sharding(NamedSharding(mesh, P("x")))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        jax.jit(lambda q: q.with_sharding(P(None, "x")))(q)


# Column parallel without a collective, row parallel with one sum.
@pytest.mark.parametrize("spec", [P(None, "x"), P("x", None)], ids=["columns", "rows"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_outside_and_inside(layout: Layout, mesh, spec: P, check_vma: bool) -> None:
    x, q = activations(), weight(layout)
    x_spec = P(None, "x") if spec[0] else P()
    out_spec = P() if spec[0] else P(None, "x")

    def shard(x, w):
        assert w.shape == ((K // 2, N) if spec[0] else (K, N // 2))
        y = jnp.sin(x) @ w
        return lax.psum(y, "x") if spec[0] else y

    options = {"mesh": mesh, "out_specs": out_spec, "check_vma": check_vma}
    outside = jax.shard_map(shard, in_specs=(x_spec, q.part_specs(spec)), **options)
    inside = implicit(jax.shard_map(shard, in_specs=(x_spec, spec), **options))
    want = jnp.sin(x) @ q.materialize()
    gradient = jax.grad(lambda x: (jnp.sin(x) @ q.materialize()).sum())(x)
    with lowbit.materialization("error"):
        for f in (outside, inside):
            assert_close(jax.jit(f)(x, q), want)
            assert dense_weights(f, x, q) == []
            assert_close(jax.jit(jax.grad(lambda x, f=f: f(x, q).sum()))(x), gradient)


def test_shard_map_returning_a_quantized_array(layout: Layout, mesh) -> None:
    q = weight(layout)
    f = implicit(jax.shard_map(lambda w: w.T, mesh=mesh, in_specs=P(None, "x"), out_specs=P("x", None)))
    with lowbit.materialization("error"):
        got = jax.jit(f)(q)
    assert isinstance(got, lowbit.QuantizedArray)
    assert_close(got, q.materialize().T, 0)


def test_pvary_acts_on_the_parts(layout: Layout, mesh) -> None:
    q = weight(layout)

    def shard(x, w):
        return lax.fori_loop(0, 2, lambda i, c: c + x @ w, jnp.zeros((4, N)) + lax.axis_index("x") * 0.0)

    f = implicit(jax.shard_map(shard, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x")))
    with lowbit.materialization("error"):
        assert_close(jax.jit(f)(activations(), q), 2 * activations() @ q.materialize())


def test_in_and_out_shardings(layout: Layout, mesh) -> None:
    x, q = activations(), weight(layout)
    columns = NamedSharding(mesh, P(None, "x"))
    parts = jax.tree.map(partial(NamedSharding, mesh), q.part_specs(P(None, "x")))
    f = jax.jit(implicit(lambda x, w: (x @ w, w)), in_shardings=(None, parts), out_shardings=(columns, parts))
    y, back = f(x, q)
    assert y.sharding == columns and back.codes.sharding == columns
    assert_close(y, x @ q.materialize())
    assert "all-gather" not in f.lower(x, q).compile().as_text()


def test_inner_shardings_and_constraints_speak_of_the_logical_array(layout: Layout, mesh) -> None:
    x, q = activations(), weight(layout)
    rows = NamedSharding(mesh, P("x", None))

    def model(x, w):
        w = jax.jit(lambda w: w.T, out_shardings=rows)(w)
        w = lax.with_sharding_constraint(w, rows)
        return w @ x.T, w

    with lowbit.materialization("error"):
        y, w = jax.jit(implicit(model))(x, q)
    assert_close(y, q.materialize().T @ x.T)
    assert isinstance(w, lowbit.QuantizedArray)
    # The transposed array is stored as before, so its rows are the stored columns.
    assert w.codes.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "x")), 2)


def test_products_of_sharded_arrays_need_the_collectives_of_the_dense_program(layout: Layout, mesh) -> None:
    x, q = activations(), weight(layout)
    f = jax.jit(lambda x, w: x @ w)
    columns, rows = sharded(q, mesh, P(None, "x")), sharded(q, mesh, P("x", None))
    text = f.lower(x, columns).compile().as_text()
    assert "all-gather" not in text and "all-reduce" not in text
    text = f.lower(jax.device_put(x, NamedSharding(mesh, P(None, "x"))), rows).compile().as_text()
    assert "all-gather" not in text and text.count("all-reduce(") == 1
    assert_close(f(x, columns), x @ q.materialize())
    assert_close(f(x, rows), x @ q.materialize())


def test_explicit_axes(layout: Layout) -> None:
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    x, q = activations(), weight(layout)
    want = jax.grad(lambda x: jnp.sin(x @ q.materialize()).sum())(x)
    with jax.set_mesh(mesh), lowbit.materialization("error"):
        xs = jax.device_put(x, P("data", None))
        columns = sharded(q, mesh, P(None, "model"))
        f = implicit(lambda x, w: jnp.dot(x, w))
        y = jax.jit(f)(xs, columns)
        assert jax.typeof(y).sharding.spec == P("data", "model")
        assert_close(y, x @ q.materialize())
        grad = jax.jit(jax.grad(lambda x, w: jnp.sin(x @ w).sum()))(xs, columns)
        assert jax.typeof(grad).sharding.spec == P("data", None)
        assert_close(grad, want)
        rows = sharded(q, mesh, P("model", None))
        xs = jax.device_put(x, P("data", "model"))
        f = implicit(lambda x, w: jnp.einsum("bk,kn->bn", x, w, out_sharding=P("data", None)))
        assert_close(jax.jit(f)(xs, rows), x @ q.materialize())


def test_cut_parts_are_noticed(any_layout: Layout) -> None:
    q = any_layout.quantize(jnp.ones((136, 144)))
    axis = any_layout.axis
    # Half of the blocked axis of every part, as a bare PartitionSpec would cut it.
    halves = q.map_parts(lambda part, _: jax.lax.slice_in_dim(part, 0, -(-part.shape[axis] // 2), axis=axis))
    if q.block_size is None:
        assert halves.shape[axis] == q.shape[axis] // 2  # every part has the axis in full or not at all
    else:
        with pytest.raises(ValueError, match=rf"no longer fit each other on axis {axis}: they have "):
            _ = halves.shape
    with pytest.raises(ValueError, match="no longer have the same number of axes"):
        _ = q.replace(codes=q.codes[0]).shape


def test_rows_of_a_transposed_matrix_are_taken_inside_of_implicit() -> None:
    q = lowbit.Array8B(jax.random.normal(jax.random.key(0), (64, 96)))
    with pytest.raises(ValueError, match="stored transposed, and its parts have lost an axis"):
        jax.vmap(lambda row: row @ jnp.ones(64))(q.T)
    got = implicit(lambda q: jax.vmap(lambda row: row @ jnp.ones(64))(q))(q.T)
    assert_close(got, q.T.materialize() @ jnp.ones(64))
