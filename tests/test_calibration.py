"""Statistics of the inputs of weights: equal to those computed by hand, in every transformation."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from helpers import gaussian
from jax import lax
from jax.sharding import PartitionSpec as P

import lowbit
from lowbit import Calibration, calibrate
from lowbit.calibration.mismatch import MOST_TRACES

K, N, LAYERS, EXPERTS = 12, 16, 3, 4
RULES = {"*": "full"}


def normal(seed: int, *shape: int) -> jax.Array:
    return gaussian(seed, shape)


def moments(x: Any) -> np.ndarray:
    """x^T x over all rows."""
    rows = np.asarray(x, np.float64).reshape(-1, np.shape(x)[-1])
    return rows.T @ rows


def check(calibration: Calibration, path: str, inputs: Any, count: int | None = None) -> None:
    """Assert the second moments of a weight, given its inputs: (rows, K), or one such array for each layer."""
    inputs = inputs if isinstance(inputs, list) else [inputs]
    got = calibration[path]
    want = np.stack([moments(x) for x in inputs]).reshape(np.shape(got.hessian))
    np.testing.assert_allclose(got.hessian, want, rtol=2e-5, atol=2e-4)
    np.testing.assert_allclose(got.diag, np.diagonal(want, axis1=-2, axis2=-1), rtol=2e-5, atol=2e-4)
    rows = [np.prod(np.shape(x)[:-1], dtype=int) for x in inputs] if count is None else [count] * len(inputs)
    np.testing.assert_array_equal(np.ravel(got.count), rows)


X = normal(0, 2, 5, 7, K)  # two batches of five rows of seven


@pytest.mark.parametrize(
    "product",
    [
        lambda x, w: x @ w,
        lambda x, w: jnp.matmul(w.T, jnp.moveaxis(x, -1, -2)),
        lambda x, w: jnp.einsum("btk,kn->nbt", x, w),
        lambda x, w: jax.jit(jnp.dot)(x, w.astype(jnp.bfloat16).astype(jnp.float32) * 2),
        lambda x, w: jax.vmap(lambda x: x @ w)(x),
        lambda x, w: jax.vmap(jax.vmap(lambda x: w.T @ x))(x),
        lambda x, w: jax.checkpoint(lambda x, w: jnp.sin(x @ w))(x, w),
        lambda x, w: lax.map(lambda x: x @ w, x),
        lambda x, w: x @ jnp.split(w, 2, axis=1)[0],
        lambda x, w: lax.cond(x.sum() > 1e6, lambda: x @ (2 * w), lambda: x @ w),
        lambda x, w: x[..., : K // 2] @ w[: K // 2] + x[..., K // 2 :] @ w[K // 2 :],
        lambda x, w: x.reshape(5, 7, 3, 4).reshape(5, 7, K) @ lax.stop_gradient(w),
        lambda x, w: jnp.einsum("btij,ijn->btn", x.reshape(5, 7, 3, 4), w.reshape(3, 4, N)),
        lambda x, w: jnp.einsum("btij,nij->btn", x.reshape(5, 7, 3, 4), w.T.reshape(N, 3, 4)),
    ],
)
def test_one_product(product: Callable[..., Any]) -> None:
    params = {"w": normal(1, K, N)}
    got = calibrate(lambda params, x: product(x, params["w"]), params, X)
    want = moments(X)
    h = np.asarray(got["w"].hessian)
    if h[0, -1] == 0:  # the two halves of the inputs were not seen together
        half = np.kron(np.eye(2), np.ones((K // 2, K // 2)))
        assert (h * (1 - half) == 0).all()
        want = want * half
    np.testing.assert_allclose(h, want, rtol=2e-5, atol=2e-4)
    np.testing.assert_allclose(got["w"].diag, np.diag(moments(X)), rtol=2e-5)
    assert not got.missing


def chain(ws: Any, x: jax.Array) -> list[np.ndarray]:
    """The inputs of each of a chain of layers."""
    inputs = []
    for w in ws:
        inputs.append(np.asarray(x))
        x = jnp.tanh(x @ w)
    return inputs


def layered(params: Any, x: jax.Array, wrap: Callable[..., Any] = lambda f: f) -> jax.Array:
    return lax.scan(wrap(lambda x, w: (jnp.tanh(x @ w), None)), x, params["w"])[0]


def unrolled(params: Any, x: jax.Array) -> jax.Array:
    for i in range(LAYERS):
        x = jnp.tanh(x @ params["w"][i])
    return x


def by_number(params: Any, x: jax.Array) -> jax.Array:
    def step(x: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
        w = lax.dynamic_index_in_dim(params["w"], i, 0, keepdims=False)
        return jnp.tanh(x @ w), None

    return lax.scan(step, x, jnp.arange(LAYERS))[0]


@pytest.mark.parametrize(
    "fn",
    [layered, partial(layered, wrap=jax.checkpoint), unrolled, by_number, jax.checkpoint(layered)],
    ids=["scan", "scan of checkpoint", "unrolled", "dynamic index", "checkpoint of scan"],
)
def test_layers_of_a_stack(fn: Callable[..., Any]) -> None:
    params = {"w": normal(1, LAYERS, K, K) / 3}
    got = calibrate(fn, params, X)
    inputs = [np.stack(both) for both in zip(*(chain(params["w"], x) for x in X), strict=True)]
    check(got, "w", inputs)
    assert got["w"].stacked == (-3,)


def test_layers_by_vmap() -> None:
    params = {"w": normal(1, EXPERTS, K, N)}
    x = normal(2, EXPERTS, 6, K)
    got = calibrate(lambda params, x: jax.vmap(jnp.matmul)(x, params["w"]), params, [x])
    check(got, "w", [*x])


def test_experts_by_einsum_see_their_own_rows() -> None:
    params = {"w": normal(1, EXPERTS, K, N)}
    x = normal(2, 6, EXPERTS, K)
    got = calibrate(lambda params, x: jnp.einsum("bek,ekn->bne", x, params["w"]), params, [x])
    check(got, "w", [x[:, e] for e in range(EXPERTS)])


def test_outputs_of_the_same_rows_share_moments() -> None:
    params = {"w": normal(1, 3, K, N)}
    got = calibrate(lambda params, x: jnp.einsum("btk,qkn->qbtn", x, params["w"]), params, X)
    assert got["w"].stacked == ()
    check(got, "w", X)


@pytest.mark.parametrize("sizes", [[3, 1, 4, 2], [0, 7, 0, 3], [2, 2, 2, 2]])
def test_ragged_experts_see_their_own_rows(sizes: list[int]) -> None:
    params, x, sizes_ = {"w": normal(1, EXPERTS, K, N)}, normal(2, 10, K), jnp.array(sizes)
    got = calibrate(lambda params, x: lax.ragged_dot(x, params["w"], sizes_), params, [x])
    ends = np.cumsum(sizes)
    check(got, "w", [x[end - size : end] for size, end in zip(sizes, ends, strict=True)])


def test_gradients_guide_the_moments() -> None:
    params = {"a": normal(1, K, N), "b": normal(2, N, 3), "stack": normal(3, 2, 3, 3)}

    def forward(params: Any, x: jax.Array, extra: Any) -> Any:
        h = x @ params["a"] + extra[0]
        y = jnp.tanh(h) @ params["b"] + extra[1]
        z = jnp.einsum("btk,skn->bstn", y, params["stack"]) + extra[2]
        return z, (x, jnp.tanh(h), y)

    def loss(z: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.sin(z) ** 2)

    got = calibrate(lambda params, x: forward(params, x, (0.0, 0.0, 0.0))[0], params, X[:1], loss=loss)
    extra = jnp.zeros((5, 7, N)), jnp.zeros((5, 7, 3)), jnp.zeros((5, 2, 7, 3))
    grads = jax.grad(lambda extra: loss(forward(params, X[0], extra)[0], X[0]))(extra)
    for name, x, g in zip(params, forward(params, X[0], extra)[1], grads, strict=True):
        rows = np.asarray((g**2).sum((1, 3) if name == "stack" else -1)).reshape(-1)
        x = np.asarray(x, np.float64).reshape(len(rows), -1)
        np.testing.assert_allclose(got[name].hessian, x.T @ (rows[:, None] * x), rtol=1e-4, atol=1e-9)
    assert got.guided and "guided" in repr(got)


@pytest.mark.parametrize(
    "wrap", [lambda f: f, jax.checkpoint, jax.jit, jax.vmap], ids=["", "checkpoint", "jit", "vmap"]
)
def test_rows_that_are_looked_up_are_counted(wrap: Callable[..., Any]) -> None:
    params, ids = {"embed": normal(1, 40, N), "w": normal(2, N, 3)}, jnp.array([[[3, 0, 3], [39, 3, -1]]])

    def model(params: Any, ids: jax.Array) -> jax.Array:
        return wrap(lambda ids: jnp.tanh(params["embed"][ids]) @ params["w"])(ids)

    got = calibrate(model, params, ids)
    counts = np.bincount(np.array([3, 0, 3, 39, 3, 39]), minlength=40)
    np.testing.assert_array_equal(got["embed"].diag, counts)
    assert got["embed"].inputs == (-2,) and got["embed"].hessian is None and got["embed"].count == 6
    guided = calibrate(model, params, ids, loss=lambda y, ids: jnp.sum(y**2))["embed"].diag
    extra = jnp.zeros((2, 3, N))
    grad = jax.grad(lambda extra: jnp.sum((jnp.tanh(params["embed"][ids[0]] + extra) @ params["w"]) ** 2))(extra)
    want = np.zeros(40)
    np.add.at(want, np.asarray(ids[0] % 40), np.sum(np.asarray(grad) ** 2, -1))
    np.testing.assert_allclose(guided, want, rtol=1e-4, atol=1e-6)
    # With its scales along rows, a table is quantized as without counts, and its error is that of the rows.
    _, report = lowbit.quantize_tree(
        {"embed": normal(1, 40, 64)}, "q3", calibration={"embed": dataclasses.replace(got["embed"], shape=(40, 64))}
    )
    table = normal(1, 40, 64)
    error = table - lowbit.quantize(table, "q3", axis=-1).materialize()
    lost = np.sum(counts[:, None] * np.asarray(error) ** 2) / np.sum(counts[:, None] * np.asarray(table) ** 2)
    assert report["embed"].output_before == pytest.approx(lost, rel=1e-4)


@pytest.mark.parametrize("kind", ["full", "diag"])
def test_gradients_of_look_ups_count_for_a_table_that_is_also_the_output_layer(kind: str) -> None:
    params, ids = {"embed": normal(1, 20, K), "w": normal(2, K, K)}, jnp.arange(12).reshape(2, 6) % 7

    def forward(params: Any, ids: jax.Array, extra: Any) -> Any:
        x = jnp.tanh((params["embed"][ids] + extra[0]) @ params["w"])
        return x @ params["embed"].T + extra[1], x

    def loss(y: jax.Array, ids: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(y) ** 2)

    got = calibrate(lambda params, ids: forward(params, ids, (0.0, 0.0))[0], params, [ids], rules=kind, loss=loss)
    extra = jnp.zeros((2, 6, K)), jnp.zeros((2, 6, 20))
    looked_up, output = jax.grad(lambda extra: loss(forward(params, ids, extra)[0], ids))(extra)
    x, g = (np.asarray(a, np.float64).reshape(12, K) for a in (forward(params, ids, extra)[1], looked_up))
    rows = np.sum(np.asarray(output, np.float64).reshape(12, 20) ** 2, 1)
    want = x.T @ (rows[:, None] * x) + g.T @ g
    found = got["embed"]
    assert found.inputs == (-1,) and found.count == 12
    np.testing.assert_allclose(found.diag, np.diag(want), rtol=1e-4)
    if kind == "full":
        np.testing.assert_allclose(found.hessian, want, rtol=1e-3, atol=1e-3)


def test_a_tied_table_has_the_inputs_of_its_product() -> None:
    table = normal(1, 48, 64)
    params, ids = {"embed": table, "head": table}, jnp.arange(24).reshape(2, 12) % 7

    def model(params: Any, ids: jax.Array) -> jax.Array:
        return params["embed"][ids] @ params["head"].T

    got = calibrate(model, params, ids)
    assert got["embed"].inputs == (-2,) and got["head"].inputs == (-1,)
    for rules in ("full", {"embed": "full", "head": "diag"}):
        found = calibrate(model, params, ids, rules=rules)
        quantized, report = lowbit.quantize_tree(params, "q3", fn=model, args=(ids,), calibration=found)
        assert quantized["embed"] is quantized["head"]
        assert report["embed"].why.endswith("GPTQ" if rules == "full" else "weighted search")


@tiers.DEVICES
@pytest.mark.parametrize("loss", [None, lambda y, x: jnp.sum(y**2)])
@pytest.mark.parametrize("checked", [True, False])
def test_shards_add_up(loss: Any, checked: bool) -> None:
    mesh = jax.make_mesh((2, 4), ("rows", "columns"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    params, x = {"w": normal(1, K, N)}, normal(2, 1, 8, K)
    plain = calibrate(lambda params, x: jnp.tanh(x @ params["w"]), params, x, loss=loss)
    options: Any = {"mesh": mesh, "in_specs": (P("rows"), P(None, "columns")), "out_specs": P("rows", "columns")}
    product = jax.shard_map(lambda x, w: jnp.tanh(x @ w), check_vma=checked, **options)
    got = calibrate(lambda params, x: product(x, params["w"]), params, x, loss=loss)["w"]
    # Devices that have other outputs of the same rows count them again, unless gradients tell them apart.
    times = 1 if loss else got.count / plain["w"].count
    np.testing.assert_allclose(got.hessian, times * plain["w"].hessian, rtol=2e-5, atol=1e-5)


@tiers.DEVICES
def test_sharded_inputs_have_a_diagonal() -> None:
    mesh = jax.make_mesh((4,), ("inputs",), axis_types=(jax.sharding.AxisType.Auto,))
    params, x = {"w": normal(1, K, N)}, normal(2, 1, 8, K)
    options: Any = {"mesh": mesh, "in_specs": (P(None, "inputs"), P("inputs")), "out_specs": P()}
    product = jax.shard_map(lambda x, w: lax.psum(x @ w, "inputs"), **options)
    got = calibrate(lambda params, x: product(x, params["w"]), params, x, rules="diag")
    np.testing.assert_allclose(got["w"].diag, np.diag(moments(x)), rtol=2e-5)
    with pytest.raises(ValueError, match="calibrate it with 'diag'"):
        calibrate(lambda params, x: product(x, params["w"]), params, x)


def test_haiku() -> None:
    hk = pytest.importorskip("haiku")
    x = normal(0, 3, 6, K)
    model = hk.without_apply_rng(hk.transform(lambda x: hk.Sequential([hk.Linear(N), jax.nn.gelu, hk.Linear(K)])(x)))
    params = model.init(jax.random.key(0), x[0])
    got = calibrate(model.apply, params, x)
    check(got, "linear/w", x)
    first = params["linear"]
    check(got, "linear_1/w", jax.nn.gelu(x @ first["w"] + first["b"]))


def test_frameworks() -> None:
    eqx, nn, nnx = (pytest.importorskip(name) for name in ("equinox", "flax.linen", "flax.nnx"))
    x = normal(0, 3, 6, K)
    model = nn.Sequential([nn.Dense(N), nn.gelu, nn.Dense(K)])
    params = model.init(jax.random.key(0), x[0])
    got = calibrate(model.apply, params, x)
    check(got, "params/layers_0/kernel", x)
    hidden = nn.gelu(x @ params["params"]["layers_0"]["kernel"] + params["params"]["layers_0"]["bias"])
    check(got, "params/layers_2/kernel", hidden)

    mlp = eqx.nn.MLP(K, 5, N, 1, key=jax.random.key(0))
    got = calibrate(lambda mlp, x: jax.vmap(mlp)(x), mlp, x)
    check(got, "layers/0/weight", x)
    check(got, "layers/1/weight", jax.nn.relu(x @ mlp.layers[0].weight.T + mlp.layers[0].bias))

    linear = nnx.Linear(K, N, rngs=nnx.Rngs(0))
    graph, state = nnx.split(linear)
    got = calibrate(lambda state, x: nnx.merge(graph, state)(x), state, x)
    check(got, "kernel", x)


# --- what is observed, and what is not


def model(params: Any, x: jax.Array) -> Any:
    y = jax.nn.relu(x @ params["a"])
    unused = y @ params["unused"]
    return y @ params["b"], jnp.argmax(unused, -1)


PARAMS = {"a": normal(1, K, N), "b": normal(2, N, K), "unused": normal(3, N, 64), "bias": jnp.zeros(K)}


def test_weights_without_a_statistic_are_named() -> None:
    got = calibrate(model, PARAMS, X)
    assert set(got) == {"a", "b"} and set(got.missing) == {"unused"}
    assert "no floating-point output" in got.missing["unused"]
    with pytest.raises(KeyError, match="no statistic of 'unused': no floating"):
        got["unused"]
    kernel = {"kernel": normal(1, 3, 3, 8, 16), "embedding": normal(2, 64, 16)}

    def convolution(params: Any, x: jax.Array) -> Any:
        dims = ("NHWC", "HWIO", "NHWC")
        y = lax.conv_general_dilated(x, params["kernel"], (1, 1), "SAME", dimension_numbers=dims)
        return y + params["embedding"][3]

    got = calibrate(convolution, kernel, normal(3, 1, 2, 6, 6, 8))
    assert not len(got) and set(got.missing) == {"kernel", "embedding"}


def test_custom_derivatives_hide_products() -> None:
    product = jax.custom_vjp(lambda x, w: x @ w)
    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))
    params = {"a": PARAMS["a"], "b": PARAMS["b"]}
    got = calibrate(lambda params, x: product(x.reshape(-1, K) @ params["a"], params["b"]), params, X)
    check(got, "a", X)
    assert set(got) == {"a"} and set(got.missing) == {"b"}


def test_patterns_choose_statistics() -> None:
    got = calibrate(model, PARAMS, X, rules={"a": "diag", "unused": None, "*": "full"})
    assert got["a"].hessian is None and got["b"].hessian is not None and not got.missing
    np.testing.assert_allclose(got["a"].diag, np.diag(moments(X)), rtol=1e-5)
    with pytest.raises(ValueError, match="No leaf matches 'c'"):
        calibrate(model, PARAMS, X, rules={"c": "diag"})
    with pytest.raises(ValueError, match="'half': the value must be"):
        calibrate(model, PARAMS, X, rules="half")


def test_a_budget_makes_passes_and_diagonals() -> None:
    whole = calibrate(model, PARAMS, X)
    seen: list[Any] = []
    size = 2 * 4 * N * N
    with pytest.warns(UserWarning, match="3 passes over the batches"):
        got = calibrate(model, PARAMS, list(X), budget=size, progress=lambda *at: seen.append(at))
    assert seen == [(done, 6) for done in range(7)]
    for path in whole:
        np.testing.assert_allclose(got[path].hessian, whole[path].hessian, rtol=1e-5, atol=1e-4)
    with pytest.raises(ValueError, match="an iterator can be read once"):
        calibrate(model, PARAMS, iter(X), budget=size)
    few = calibrate(model, PARAMS, iter(X), budget=size - 1)
    assert few["b"].hessian is None and few["a"].hessian is not None
    np.testing.assert_allclose(few["b"].diag, whole["b"].diag, rtol=1e-5)
    once = calibrate(model, PARAMS, iter(X), budget="1MiB")
    np.testing.assert_array_equal(once["b"].hessian, whole["b"].hessian)
    with pytest.raises(ValueError, match="budget='much'"):
        calibrate(model, PARAMS, X, budget="much")


def test_batches_that_cannot_be_used() -> None:
    bad = X.at[1, 2, 3, 4].set(jnp.nan)
    with pytest.raises(ValueError, match=r"Batch 1 gives 2 weights inputs that are NaN.*: a, b"):
        calibrate(model, PARAMS, bad)
    with pytest.raises(TypeError) as caught:
        calibrate(model, PARAMS, [X[0], X[0, :, :, :5]])
    assert "with batch 1: ('float32[5, 7, 5]',)" in "".join(caught.value.__notes__)
    assert "The shapes do not fit in a product with a." in caught.value.__notes__
    with pytest.raises(ValueError, match="no batch"):
        calibrate(model, PARAMS, [])
    with pytest.raises(TypeError, match="no floating-point array"):
        calibrate(lambda params, x: jnp.argmax(x @ params["a"]), PARAMS, X)


def in_loop(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    def layer(x: jax.Array, p: Any) -> Any:
        return x + jax.nn.relu(x @ p["up"]) @ p["down"], None

    x, _ = lax.scan(layer, x, {name: params[name] for name in ("up", "down")})
    return jnp.einsum("bk,kn->bn", x, params["a"]) + jnp.einsum("bk,nk->bn", y, params["b"])


@pytest.mark.parametrize(("x", "y", "path"), [(K + 1, 9, "up"), (K, 8, "b")])
def test_an_input_of_the_wrong_shape_names_its_weight(x: int, y: int, path: str) -> None:
    shapes = {"up": (2, K, N), "down": (2, N, K), "a": (K, N), "b": (N, 9)}
    params = {name: normal(0, *shape) for name, shape in shapes.items()}
    calibrate(in_loop, params, [(normal(1, 5, K), normal(1, 5, 9))])
    with pytest.raises((TypeError, ValueError)) as caught:
        calibrate(in_loop, params, [(normal(1, 5, x), normal(1, 5, y))])
    assert f"The shapes do not fit in a product with {path}." in caught.value.__notes__


def test_a_model_of_many_weights_is_traced_a_bounded_number_of_times_for_its_error() -> None:
    params, traces = {f"w{i}": jnp.ones((64, 64)) for i in range(100)}, []

    def fn(params: Any, x: jax.Array) -> jax.Array:
        traces.append(1)
        for w in params.values():
            x = x @ w
        return x

    with pytest.raises(TypeError) as caught:
        calibrate(fn, params, [jnp.ones((4, 96))])
    assert any("with batch 0" in note for note in caught.value.__notes__)
    assert 1 < len(traces) <= MOST_TRACES + 2


# --- the object


def test_halves_merge_to_the_whole() -> None:
    both = calibrate(model, PARAMS, X[:1]).merge(calibrate(model, PARAMS, X[1:]))
    whole = calibrate(model, PARAMS, X)
    for path in whole:
        np.testing.assert_allclose(both[path].hessian, whole[path].hessian, rtol=1e-5, atol=1e-4)
        np.testing.assert_array_equal(both[path].count, whole[path].count)
    mixed = both.merge(calibrate(model, PARAMS, X, rules="diag"))
    assert mixed["a"].hessian is None and mixed["a"].count == 2 * both["a"].count
    other = calibrate(lambda params, x: x @ params["a"], {"a": normal(1, K, 3)}, X)
    with pytest.raises(ValueError, match="a: Moments of a weight of shape"):
        both.merge(other)
    with pytest.raises(ValueError, match="guided"):
        both.merge(calibrate(model, PARAMS, X, loss=lambda out, x: out[0].sum()))


def test_a_run_continues_from_a_saved_file(tmp_path: Path) -> None:
    path, whole = tmp_path / "c.safetensors", calibrate(model, PARAMS, X)
    calibrate(model, PARAMS, X[:1]).save(path)  # and here the process ends
    Calibration.load(path).merge(calibrate(model, PARAMS, X[1:])).save(path)
    got = Calibration.load(path)
    assert repr(got) == repr(whole)
    for name in whole:
        np.testing.assert_allclose(got[name].hessian, whole[name].hessian, rtol=1e-5, atol=1e-4)


def test_a_file_restores_all(tmp_path: Path) -> None:
    params = PARAMS | {"stack": normal(1, LAYERS, K, K)}
    got = calibrate(
        lambda p, x: layered({"w": p["stack"]}, model(p, x)[0]), params, X, rules={"a": "diag", "*": "full"}
    )
    got.save(tmp_path / "c.safetensors")
    back = Calibration.load(tmp_path / "c.safetensors")
    assert list(back) == list(got) and dict(back.missing) == dict(got.missing) and repr(back) == repr(got)
    for path in got:
        for name in ("diag", "hessian", "count", "shape", "inputs", "stacked"):
            np.testing.assert_array_equal(getattr(back[path], name), getattr(got[path], name))
    lowbit.save(tmp_path / "other.safetensors", PARAMS)
    with pytest.raises(ValueError, match="not a calibration"):
        Calibration.load(tmp_path / "other.safetensors")


def test_an_importance_matrix_of_llama_cpp(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "imatrix.gguf"
    sums, experts = np.arange(1, K + 1, dtype=np.float32), np.arange(EXPERTS * K, dtype=np.float32).reshape(EXPERTS, K)
    writer = gguf.GGUFWriter(path, "imatrix")
    writer.add_type("imatrix")
    for name, values, counts in (("blk.0.attn_q.weight", sums[None], [7]), ("blk.0.ffn.weight", experts, range(4))):
        writer.add_tensor(f"{name}.in_sum2", values)
        writer.add_tensor(f"{name}.counts", np.array(counts, np.float32)[:, None])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    types = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32)
        for name, shape in (
            ("blk.0.attn_q.weight", (N, K)),
            ("blk.0.ffn.weight", (EXPERTS, N, K)),
            ("other.weight", (N, K)),
        )
    }
    got = Calibration.from_imatrix(path, types)
    np.testing.assert_array_equal(got["blk.0.attn_q.weight"].diag, sums)
    np.testing.assert_array_equal(got["blk.0.ffn.weight"].diag, experts)
    np.testing.assert_array_equal(got["blk.0.ffn.weight"].count, range(4))
    assert got["blk.0.attn_q.weight"].inputs == (-1,) and set(got.missing) == {"other.weight"}
    flax = {"q": {"kernel": jax.ShapeDtypeStruct((K, N), jnp.float32)}}
    got = Calibration.from_imatrix(path, flax, names={"q/kernel": "blk.0.attn_q.weight"}.__getitem__)
    assert got["q/kernel"].inputs == (-2,)
    wrong = {"q": {"kernel": jax.ShapeDtypeStruct((K + 1, N), jnp.float32)}}
    with pytest.raises(ValueError, match="q/kernel: A weight of shape"):
        Calibration.from_imatrix(path, wrong, names={"q/kernel": "blk.0.attn_q.weight"}.__getitem__)
