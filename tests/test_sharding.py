"""Meshes of virtual devices: shard_map on either side, shardings of jit, explicit axes."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from helpers import Layout, assert_close, assert_same_bits, collectives, elements, gaussian, layouts
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lowbit
from lowbit import implicit
from lowbit.testing import dense_weights

# Sharding depends on the axis of the blocks, on packing and on group scales.
pytestmark = [tiers.DEVICES, pytest.mark.first(Layout("nf4", -1, 16), Layout("q3", -2, None))]


@pytest.fixture
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))


K, N = 128, 256  # whole blocks on each device


def weight(layout: Layout) -> lowbit.QuantizedArray:
    return layout.quantize(gaussian(1, (K, N)))


def activations() -> jax.Array:
    return gaussian(2, (8, K))


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
    w = jax.device_put(gaussian(1, (K, N)), NamedSharding(mesh, P(None, "x")))
    for quantize in (layout.quantize, jax.jit(layout.quantize)):
        q = quantize(w)
        assert q.sharding == w.sharding
        assert_close(q, layout.quantize(jax.device_get(w)))
        moved = collectives(jax.jit(quantize).lower(w).compile().as_text())
        assert not any("all-gather" in kind or f"{K},{N // 2}" in kind for kind in moved)


def test_shards_smaller_than_a_block_raise() -> None:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    q = lowbit.quantize(jnp.ones((K, N)), axis=-1)
    message = r"Axis -1 of length 256 .* 8 devices of \('x',\): .* whole blocks of 64 elements. 4 devices would do."
    with pytest.raises(ValueError, match=message):
        q.with_sharding(NamedSharding(mesh, P(None, "x")))
    with pytest.raises(ValueError, match=r"Axis -2 .*whole blocks of 64"):
        q.T.with_sharding(NamedSharding(mesh, P("x")))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        jax.jit(lambda q: q.with_sharding(P(None, "x")))(q)
    columns = NamedSharding(mesh, P(None, "x"))
    with pytest.raises(ValueError, match=message):
        lowbit.shardings(q, columns)
    with pytest.raises(ValueError, match=message):
        implicit(lambda q: lax.with_sharding_constraint(q, columns))(q)
    with pytest.raises(ValueError, match=message):
        implicit(lambda q: jax.device_put(q, columns))(q)
    # Also when an array with this sharding is quantized.
    with pytest.raises(ValueError, match=message):
        lowbit.quantize(jax.device_put(jnp.ones((K, N)), columns), axis=-1)
    explicit = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    for quantize in (partial(lowbit.quantize, axis=-1), jax.jit(partial(lowbit.quantize, axis=-1))):
        with jax.set_mesh(explicit), pytest.raises(ValueError, match=message):
            quantize(jax.device_put(jnp.ones((K, N)), P(None, "x")))


def test_a_shard_map_inside_implicit_over_shards_smaller_than_a_block_raises() -> None:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    q, columns = lowbit.quantize(jnp.ones((K, N)), axis=-1), P(None, "x")
    message = r"Axis -1 of length 256 .* 8 devices of \('x',\): .* whole blocks of 64 elements. 4 devices would do."
    for w in (q, lowbit.LoraArray(q, jnp.ones((K, 2)), jnp.ones((2, N)))):
        product = jax.shard_map(jnp.dot, mesh=mesh, in_specs=(P(), columns), out_specs=columns)
        with pytest.raises(ValueError, match=message):
            implicit(product)(jnp.ones((2, K)), w)
    # An output is a shard already, and may be as small as a block.
    four = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    moved = implicit(jax.shard_map(lambda w: w.T, mesh=four, in_specs=columns, out_specs=P("x", None)))
    assert_close(moved(q), q.materialize().T, 0)


FEW = [("ternary", 4), ("binary", 8), ("nf4", 2), ("nf4", 1), ("ternary", 6)]


@pytest.mark.parametrize(("format", "columns"), tiers.tiered(FEW, FEW[-2:]))  # less than a byte, and more
def test_a_packed_axis_of_few_bytes_over_devices(format: str, columns: int, mesh) -> None:
    x = jax.device_put(activations(), NamedSharding(mesh, P("x", None)))
    dense = gaussian(1, (K, columns))
    # Blocks along axis -2, so that the rows can be sharded.
    q = lowbit.FORMATS[format].quantize(dense, axis=-2, block_size=64)
    for w in (q.with_sharding(NamedSharding(mesh, P("x", None))), q.with_sharding(NamedSharding(mesh, P()))):
        assert_close(jax.jit(lambda x, w: x @ w)(x, w), activations() @ q.materialize())
        assert_close(jax.jit(lambda w: w[jnp.array([3, 100])])(w), q.materialize()[jnp.array([3, 100])], 0)
        gradient = jax.jit(jax.grad(lambda x, w: jnp.sin(x @ w).sum()))(x, w)
        assert_close(gradient, jax.grad(lambda x: jnp.sin(x @ q.materialize()).sum())(activations()))


# --- shardings of trees


def test_shardings_of_a_tree(layout: Layout) -> None:
    mesh = grid()
    params = {"mlp": [weight(layout), weight(layout).T], "norm": jnp.ones(N), "step": 3}
    columns, rows, everywhere = (NamedSharding(mesh, spec) for spec in (P(None, "model"), P("model", None), P()))
    where = {"mlp": [columns, rows], "norm": everywhere, "step": everywhere}
    placed = jax.device_put(params, lowbit.shardings(params, where))
    assert [w.sharding for w in placed["mlp"]] == [columns, rows] and placed["norm"].sharding == everywhere
    for w, before in zip(placed["mlp"], params["mlp"], strict=True):
        assert_same_bits(w, before)
        assert w.codes.addressable_shards[0].data.size == w.codes.size // 4

    # A sharding for a subtree, types instead of arrays, and both sides of jit.
    types = jax.eval_shape(lambda: params["mlp"][:1])
    components = lowbit.shardings(types, columns)
    (w,) = jax.jit(lambda ws: ws, in_shardings=(components,), out_shardings=components)(params["mlp"][:1])
    assert w.sharding == columns
    assert_same_bits(w, params["mlp"][0])

    if hasattr(jax.sharding, "get_mesh"):  # JAX 0.7 does not say which devices the mesh has
        with jax.set_mesh(mesh):
            named = lowbit.shardings(params, {"mlp": [P(None, "model"), P("model")], "norm": P(), "step": P()})
        assert named["norm"] == everywhere and named["mlp"][0].codes == columns
    assert lowbit.shardings(params, None) == {"mlp": [None, None], "norm": None, "step": None}
    assert lowbit.specs(params, where)["mlp"][0].codes == P(None, "model")


def test_shardings_name_what_is_wrong() -> None:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    params = {"layers": {"o": lowbit.quantize(jnp.ones((64, 576)), axis=-1)}, "norm": jnp.ones(36)}
    everywhere, sharded = NamedSharding(mesh, P()), NamedSharding(mesh, P("x"))
    wrong = r"^layers/o: Axis -1 of length 576 cannot be sharded over the 8 devices .* 3 devices would do.$"
    with pytest.raises(ValueError, match=wrong):
        lowbit.shardings(params, {"layers": NamedSharding(mesh, P(None, "x")), "norm": everywhere})
    with pytest.raises(ValueError, match=r"^norm: Axis -1 of length 36 .* 8 devices .* as many elements. 6 devices"):
        lowbit.shardings(params, {"layers": everywhere, "norm": sharded})
    with pytest.raises(ValueError, match=r"^norm: .*'x'.* has 2 entries, and the array of shape \(36,\) has 1 axes"):
        lowbit.shardings(params, {"layers": everywhere, "norm": NamedSharding(mesh, P(None, "x"))})
    with pytest.raises(ValueError, match=r"^norm: .* needs a mesh"):
        lowbit.shardings(params, {"layers": everywhere, "norm": P("x")})
    with pytest.raises(ValueError, match=r"structure|keys"):
        lowbit.shardings(params, {"layers": everywhere})


def test_a_bare_sharding_acts_on_the_components() -> None:
    """`jax.device_put` applies a sharding to each component; `lowbit.shardings` gives one for each."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    q = lowbit.Array8B(jnp.ones((64, 32)), axis=-2)
    rows = NamedSharding(mesh, P("x", None))
    with pytest.raises(ValueError, match=r"axis 0 is partitioned 2 times|divisible by 2"):
        jax.device_put(q, rows)
    assert jax.device_put(q, lowbit.shardings(q, rows)).sharding == rows


def test_device_put_inside_of_implicit(layout: Layout, mesh) -> None:
    columns = NamedSharding(mesh, P(None, "x"))
    with lowbit.materialization("error"):
        q, x = implicit(lambda q, x: jax.device_put((q, x), columns))(weight(layout), activations())
    assert x.sharding == columns and q.sharding == columns
    assert_same_bits(q, weight(layout))
    device = jax.devices()[3]
    assert implicit(lambda q: jax.device_put(q, device))(weight(layout)).codes.devices() == {device}


def test_scales_in_eight_bits_are_sharded_by_group_or_raise(mesh) -> None:
    q = lowbit.ArrayNF4.quantize(gaussian(0, (128, 512)), axis=-2, double_quant=True)
    options = {"mesh": mesh, "out_specs": P(None, "x")}
    columns = P(None, "x")
    outside = jax.shard_map(lambda x, w: x @ w, in_specs=(P(), lowbit.specs(q, columns)), **options)
    with pytest.raises(ValueError, match=r"512 of the 8-bit scales .* 4 groups of 256 .* \.plain\(\)"):
        outside(jnp.ones((2, 128)), q)
    inside = implicit(jax.shard_map(lambda x, w: x @ w, in_specs=(P(), columns), **options))
    assert_close(inside(jnp.ones((2, 128)), q), jnp.ones((2, 128)) @ q.materialize())
    laid_out = q.with_sharding(NamedSharding(mesh, columns))
    np.testing.assert_array_equal(laid_out.materialize(), q.materialize())


# Column parallel without a collective, row parallel with one sum.
@pytest.mark.first(tiers.ONE)
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
    outside = jax.shard_map(shard, in_specs=(x_spec, q.component_specs(spec)), **options)
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


def test_pvary_acts_on_the_components(layout: Layout, mesh) -> None:
    q = weight(layout)

    def shard(x, w):
        return lax.fori_loop(0, 2, lambda i, c: c + x @ w, jnp.zeros((4, N)) + lax.axis_index("x") * 0.0)

    f = implicit(jax.shard_map(shard, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x")))
    with lowbit.materialization("error"):
        assert_close(jax.jit(f)(activations(), q), 2 * activations() @ q.materialize())


def test_in_and_out_shardings(layout: Layout, mesh) -> None:
    x, q = activations(), weight(layout)
    columns = NamedSharding(mesh, P(None, "x"))
    components = jax.tree.map(partial(NamedSharding, mesh), q.component_specs(P(None, "x")))
    f = jax.jit(implicit(lambda x, w: (x @ w, w)), in_shardings=(None, components), out_shardings=(columns, components))
    y, back = f(x, q)
    assert y.sharding == columns and back.codes.sharding == columns
    assert_close(y, x @ q.materialize())
    assert "all-gather" not in f.lower(x, q).compile().as_text()


def test_inner_shardings_and_constraints_refer_to_the_logical_array(layout: Layout, mesh) -> None:
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


# --- collectives of the compiled program


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of one dense operand and weights, with the spec of each on a mesh of data 2 x model 4."""

    run: Callable[..., Any]
    operand: tuple[tuple[int, ...], P]
    weights: tuple[tuple[tuple[int, ...], P], ...]

    def operands(self, mesh: jax.sharding.Mesh, quantize: Callable[[jax.Array], Any]) -> list[Any]:
        shape, spec = self.operand
        ids = np.random.default_rng(0).integers(0, 1024, shape, np.int32)
        x = gaussian(0, shape) if len(shape) > 1 else jnp.asarray(ids)
        placed = [jax.device_put(x, NamedSharding(mesh, spec))]
        for i, (shape, spec) in enumerate(self.weights, 1):
            w = quantize(gaussian(i, shape) / 16)
            placed.append(jax.device_put(w, lowbit.shardings(w, NamedSharding(mesh, spec))))
        return placed


def mlp(x, a, b):
    return jax.nn.silu(x @ a) @ b


def experts(x, w):
    return jnp.einsum("ebk,ekn->ebn", x, w)


def scanned(x, w):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]


ROWS, TOKENS = ((16, 256), P("data", None)), ((16,), P("data"))
COLUMN, ROW = ((256, 512), P(None, "model")), ((512, 256), P("model", None))
EXPERTS, OF_EXPERTS = ((8, 256, 512), P("model")), ((8, 16, 256), P("model", "data"))
PROGRAMS = {
    "column": Program(lambda x, w: x @ w, ROWS, (COLUMN,)),
    "row": Program(lambda x, w: x @ w, ((16, 512), P("data", "model")), (ROW,)),
    "column and row": Program(mlp, ROWS, (COLUMN, ROW)),
    "gradient": Program(jax.grad(lambda *args: jnp.sin(mlp(*args)).sum()), ROWS, (COLUMN, ROW)),
    "experts": Program(experts, OF_EXPERTS, (EXPERTS,)),
    "gradient of experts": Program(jax.grad(lambda *args: jnp.sin(experts(*args)).sum()), OF_EXPERTS, (EXPERTS,)),
    "rows looked up": Program(lambda i, w: w[i], TOKENS, (((1024, 256), P("model", None)),)),
    "columns looked up": Program(lambda i, w: w[i], TOKENS, (((1024, 256), P(None, "model")),)),
    "head": Program(lambda x, w: x @ w.T, ROWS, (((1024, 256), P("model", None)),)),
    "layers": Program(scanned, ROWS, (((3, 256, 256), P(None, None, "model")),)),
    "layers by row": Program(scanned, ROWS, (((3, 256, 256), P(None, "model", None)),)),
    "gradient of layers": Program(
        jax.grad(lambda *args: scanned(*args).sum()), ROWS, (((3, 256, 256), P(None, None, "model")),)
    ),
}


def grid(kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)


@functools.cache
def compiled_dense(program: Program, kind: AxisType) -> Any:
    return jax.jit(program.run).lower(*program.operands(grid(kind), lambda w: w)).compile()


def assert_moves_what_the_dense_program_does(
    program: Program, quantize: Callable[[jax.Array], Any], kind: AxisType = AxisType.Auto
) -> None:
    x, *weights = program.operands(grid(kind), quantize)
    with lowbit.materialization("error"):
        compiled = jax.jit(implicit(program.run)).lower(x, *weights).compile()
    want, text = compiled_dense(program, kind), compiled.as_text()
    assert collectives(text) == collectives(want.as_text())
    y = compiled(x, *weights)
    y_dense = want(x, *(jax.device_put(w.materialize(), w.sharding) for w in weights))
    assert jax.typeof(y).sharding == jax.typeof(y_dense).sharding  # in the type, if the axes are explicit
    assert_close(y, y_dense)
    assert "lowbit_matmul" in text or "lowbit_take" in text
    for w in weights:
        # The program builds neither the dense weight nor a dense shard of it.
        shard = w.sharding.shard_shape(w.shape)
        assert not re.search(rf"f32\[(\d+,)*({w.shape[-2]},{w.shape[-1]}|{shard[-2]},{shard[-1]})\]", text)


# A format without blocks, and one with blocks and packed codes: sharding depends on nothing else.
TWO = (Layout("int8", -2, None), Layout("nf4", -1, 16))
EVERY_LAYOUT = ("column and row", "rows looked up")
PAIRS = [
    (name, layout)
    for name in PROGRAMS
    for layout in layouts()
    if name in EVERY_LAYOUT or layout.format in ("int8", "nf4")
]
FIRST = [(name, layout) for name in PROGRAMS for layout in (tiers.KINDS if name in EVERY_LAYOUT else TWO[1:])]


@pytest.mark.parametrize(("name", "way"), tiers.tiered(PAIRS, FIRST), ids=str)
def test_programs_move_what_the_dense_program_does(name: str, way: Layout) -> None:
    assert_moves_what_the_dense_program_does(PROGRAMS[name], way.quantize)


@pytest.mark.parametrize("name", ["column and row", "gradient of layers", "rows looked up"])
def test_scales_in_eight_bits_are_not_gathered(name: str) -> None:
    def quantize(w):
        return lowbit.ArrayNF4.quantize(w, axis=-2, double_quant=True)

    assert_moves_what_the_dense_program_does(PROGRAMS[name], quantize)


def test_weights_sharded_over_the_data_axis_are_gathered_as_stored(layout: Layout) -> None:
    """Fully sharded training (FSDP): layers are gathered one at a time, as codes and scales."""
    program = Program(jax.grad(lambda *args: scanned(*args).sum()), ROWS, (((3, 256, 256), P(None, "data", None)),))
    x, w = program.operands(grid(), layout.quantize)
    compiled = jax.jit(implicit(program.run)).lower(x, w).compile()
    moved = collectives(compiled.as_text())
    layer = ",".join(map(str, w.codes.shape[1:]))
    assert moved.pop(f"all-gather {'s8' if w.codes.dtype == jnp.int8 else 'u8'}[{layer}]") == 2  # forward and backward
    # Scales are gathered. XLA partitions the product with offsets like a dense one, and may permute or sum them too.
    offsets = w.offset_values()
    most = 0 if offsets is None else math.prod(offsets.shape[1:])
    assert all(kind.startswith("all-gather ") or elements(kind) <= most for kind in moved)
    assert not any("256,256" in kind for kind in moved)
    assert_close(compiled(x, w), program.run(x, w.materialize()))


def test_a_shard_map_over_some_axes_does_not_move_the_weight(layout: Layout) -> None:
    x, w = PROGRAMS["column"].operands(grid(), layout.quantize)
    specs = (P("data", None), P())
    f = jax.shard_map(lambda x, w: x @ w, mesh=grid(), in_specs=specs, out_specs=P("data", None), axis_names={"data"})
    f = jax.jit(implicit(f))
    assert not collectives(f.lower(x, w).compile().as_text())
    assert_close(f(x, w), x @ w.materialize())


# --- shardings in types


def summed(x, w):
    return jnp.einsum("bk,kn->bn", x, w, out_sharding=P("data", None))


TYPED = {
    "column": PROGRAMS["column"],
    "row": dataclasses.replace(PROGRAMS["row"], run=summed),
    "gradient": dataclasses.replace(
        PROGRAMS["gradient"], run=jax.grad(lambda x, a, b: jnp.sin(summed(jax.nn.silu(x @ a), b)).sum())
    ),
    "experts": PROGRAMS["experts"],
    "rows looked up": dataclasses.replace(
        PROGRAMS["rows looked up"], run=lambda i, w: w.at[i].get(out_sharding=P("data", None))
    ),
    "resharded": Program(lambda x, w: x @ jax.sharding.reshard(w, P(None, "model")), ROWS, (((256, 512), P()),)),
}


@pytest.mark.parametrize(("name", "way"), tiers.pairs(TYPED, TWO, TWO[1:]), ids=str)
def test_explicit_axes(name: str, way: Layout) -> None:
    with jax.set_mesh(grid(AxisType.Explicit)):
        assert_moves_what_the_dense_program_does(TYPED[name], way.quantize, AxisType.Explicit)


def test_a_mesh_with_explicit_and_automatic_axes() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Explicit))
    dense = gaussian(0, (256, 512))
    x = gaussian(1, (16, 256))
    for layout in TWO:
        w = layout.quantize(dense)
        with jax.set_mesh(mesh):
            placed = jax.device_put(w, lowbit.shardings(w, NamedSharding(mesh, P(None, "model"))))
            f = jax.jit(lambda x, w: x @ w)
            text = f.lower(x, placed).compile().as_text()
            y = f(x, placed)
        assert "lowbit_matmul" in text and not collectives(text)
        assert jax.typeof(y).sharding.spec == P(None, "model")
        assert_close(jax.device_get(y), x @ w.materialize())


def test_quantizing_with_explicit_axes(layout: Layout) -> None:
    mesh = grid(AxisType.Explicit)
    quantizers = [layout.quantize]
    if layout.format == "nf4":
        quantizers.append(partial(lowbit.ArrayNF4.quantize, axis=layout.axis, double_quant=True))
    with jax.set_mesh(mesh):
        for spec in (P(None, "model"), P("model", None)):
            w = jax.device_put(gaussian(1, (N, N)), spec)  # whole blocks of 64 on each of four devices
            for quantize in quantizers:
                assert quantize(w).sharding == w.sharding
                q = jax.jit(quantize)(w)
                assert q.sharding == w.sharding
                assert_close(q, quantize(jax.device_get(w)))


def test_components_that_no_longer_fit_each_other_raise(any_layout: Layout) -> None:
    q = any_layout.quantize(jnp.ones((136, 144)))
    axis = any_layout.axis
    # Half of the blocked axis of every component, as a bare PartitionSpec would shard it.
    halves = q.map_components(
        lambda component, _: jax.lax.slice_in_dim(component, 0, -(-component.shape[axis] // 2), axis=axis)
    )
    if q.block_size is None:
        assert halves.shape[axis] == q.shape[axis] // 2  # every component has the axis in full or not at all
    else:
        with pytest.raises(ValueError, match=rf"no longer fit each other on axis {axis}: they have "):
            _ = halves.shape
    with pytest.raises(ValueError, match="no longer have the same number of axes"):
        _ = q.replace(codes=q.codes[0]).shape


def test_rows_of_a_transposed_matrix_are_taken_inside_of_implicit() -> None:
    q = lowbit.Array8B(gaussian(0, (64, 96)), axis=-1)
    with pytest.raises(ValueError, match="stored transposed, and its components have lost an axis"):
        jax.vmap(lambda row: row @ jnp.ones(64))(q.T)
    got = implicit(lambda q: jax.vmap(lambda row: row @ jnp.ones(64))(q))(q.T)
    assert_close(got, q.T.materialize() @ jnp.ones(64))
