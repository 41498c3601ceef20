"""Transformations outside `implicit`, and operators without a decorator, for every format and layout."""

import copy
import pickle
import threading
from functools import partial
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from helpers import LAYERS, ROWS, K, Layout, N, activations, assert_close, assert_same_bits, gaussian, weights
from jax import export, lax

import lowbit
from lowbit import implicit
from lowbit.runtime import _interpret
from lowbit.testing import dense_weights


@pytest.fixture
def x() -> jax.Array:
    return activations()


@pytest.mark.first(*tiers.OF_FEATURES)
def test_operators_need_no_decorator(layout: Layout, x: jax.Array) -> None:
    q = weights(layout)["w"]
    w = q.materialize()
    with lowbit.materialization("error"):
        assert_close(x @ q, x @ w)
        assert_close(np.asarray(x) @ q, x @ w)
        assert_close(q.T @ x.T, w.T @ x.T)
        assert_close(jax.jit(lambda x, q: x @ q)(x, q), x @ w)
        assert_close(jax.jit(lambda x: x @ q)(x), x @ w)
        assert_close(
            x.astype(jnp.bfloat16) @ q.astype(jnp.bfloat16), x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16), 1e-2
        )
        assert_close(q[3], w[3])
    with lowbit.materialization("allow"):
        assert_close(
            (q + 1, 1 - q, q * q, q**2, -q, abs(q), q > 0, q == q, 2 / (q * q + 3)),
            (w + 1, 1 - w, w * w, w**2, -w, abs(w), w > 0, w == w, 2 / (w * w + 3)),
        )
        assert_close(np.ones(N, np.float32) + q, 1 + w)
        np.testing.assert_array_equal(np.asarray(q), w)


@pytest.mark.first(*tiers.OF_FEATURES)
def test_closures_globals_and_attributes(layout: Layout, x: jax.Array) -> None:
    q = weights(layout)["w"]

    class Module:
        kernel = q

        def __call__(self, x):
            return jnp.dot(x, self.kernel)

    want = x @ q.materialize()
    with lowbit.materialization("error"):
        assert_close(implicit(lambda x: jnp.einsum("bk,kn->bn", x, q))(x), want)
        assert_close(jax.jit(implicit(Module()))(x), want)
        assert_close(implicit(jax.jit(lambda x: jnp.dot(x, q)))(x), want)
        assert_close(implicit(lambda x: jax.vmap(lambda row: jnp.dot(row, q))(x))(x), want)
        assert_close(implicit(lambda x: lax.scan(lambda c, r: (c, jnp.dot(r, q)), 0, x)[1])(x), want)
        assert_close(
            jax.grad(lambda x: implicit(lambda x: jnp.dot(x, q))(x).sum())(x),
            jax.grad(lambda x: (x @ q.materialize()).sum())(x),
        )
    assert dense_weights(implicit(lambda x: jnp.dot(x, q)), x) == []


def test_a_function_compiled_inside_implicit_does_not_dequantize_outside(x: jax.Array) -> None:
    q = lowbit.Array8B.quantize(jnp.ones((K, N)))
    f = jax.jit(lambda x: jnp.dot(x, q))
    implicit(f)(x)
    with pytest.raises(TypeError):
        f(x)


def test_no_jax_function_dequantizes_silently(x: jax.Array) -> None:
    q = lowbit.Array8B.quantize(jnp.ones((K, N)))
    for call in (lambda: jnp.dot(x, q), lambda: jnp.sum(q), lambda: lax.exp(q), lambda: jnp.where(True, q, 0)):
        with pytest.raises(TypeError):
            call()


@pytest.mark.parametrize("order", [1, 2])
def test_gradients_of_a_plain_product(layout: Layout, x: jax.Array, order: int) -> None:
    q = weights(layout)["w"]
    w = q.materialize()

    def loss(w, row):
        return jnp.sin(row @ w).sum()

    def total(w, x):
        return jax.vmap(partial(loss, w))(x).sum()

    derivative = jax.grad if order == 1 else jax.hessian
    with lowbit.materialization("error"):
        assert_close(derivative(partial(loss, q))(x[0]), derivative(partial(loss, w))(x[0]))
        assert_close(jax.vmap(derivative(partial(loss, q)))(x), jax.vmap(derivative(partial(loss, w)))(x))
        assert_close(jax.grad(partial(total, q))(x), jax.grad(partial(total, w))(x))
        # Each element for itself: in their sum, those of both signs cancel.
        pushed = [jax.jvp(lambda x, w=w: jnp.sin(x @ w), (x,), (jnp.ones_like(x),)) for w in (q, w)]
        assert_close(*pushed)
    assert dense_weights(jax.grad(partial(loss, q)), x[0]) == []


def test_the_quantized_side_gets_no_gradient(layout: Layout, x: jax.Array) -> None:
    q = weights(layout)["w"]
    grads = jax.grad(lambda q: jnp.sin(x @ q).sum(), allow_int=True)(q)
    for grad in jax.tree.leaves(grads):
        assert grad.dtype == jax.dtypes.float0 or not np.any(grad)


def test_grad_through_checkpointed_scan(layout: Layout, x: jax.Array) -> None:
    stack = weights(layout)["stack"]

    @partial(jax.checkpoint, prevent_cse=False)
    def layer(c, w):
        return jnp.tanh(c @ w), None

    model = implicit(lambda x, stack: lax.scan(layer, x, stack)[0].sum())
    with lowbit.materialization("error"):
        got = jax.jit(jax.grad(model))(x, stack)
    assert_close(got, jax.jit(jax.grad(model))(x, stack.materialize()))
    assert dense_weights(jax.grad(model), x, stack) == []


def test_vmap_and_scan_over_a_stack_see_true_shapes(layout: Layout, x: jax.Array) -> None:
    stack = weights(layout)["stack"]
    seen = []

    def layer(x, w):
        seen.append(w.shape)
        return x @ w

    want = jnp.einsum("bk,lkn->lbn", x, stack.materialize())
    with lowbit.materialization("error"):
        assert_close(jax.vmap(layer, (None, 0))(x, stack), want)
        assert_close(lax.scan(lambda c, w: (c, layer(x, w)), 0, stack)[1], want)
        assert_close(jax.vmap(implicit(layer), (None, 0))(x, stack), want)
    assert set(seen) == {(K, K)}
    assert jax.vmap(lambda w: w.T)(stack).shape == (LAYERS, K, K)


def test_tree_map_takes_the_first_layer(layout: Layout) -> None:
    stack = weights(layout)["stack"]
    first = jax.tree.map(lambda component: component[0], stack)
    assert first.shape == (K, K)
    assert_same_bits(first, stack[0])
    assert_close(first.materialize(), stack.materialize()[0], 0)
    assert_same_bits(jax.tree.map(lambda *components: jnp.stack(components), *stack), stack)


def test_iteration_ends(layout: Layout) -> None:
    stack = weights(layout)["stack"]
    assert [layer.shape for layer in stack] == [(K, K)] * LAYERS
    assert len(list(stack[0])) == len(stack[0]) == K


def test_integer_index_compiles_once(traced: Mock) -> None:
    q = lowbit.Array8B.quantize(jnp.ones((K, N)))
    _ = q[0], q[-1], q[1:]
    before = traced.call_count
    for i in range(5):
        _ = q[i]
    _ = q[2:], q[2:]
    assert traced.call_count - before == 1  # for the one new slice


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """A stand-in that counts how often `implicit` traces."""
    mock = Mock(wraps=_interpret.run)
    monkeypatch.setattr(_interpret, "run", mock)
    return mock


def test_a_second_eager_product_does_not_trace(x: jax.Array, traced: Mock) -> None:
    q, other = (lowbit.Array8B.quantize(gaussian(i, (K, N))) for i in (0, 1))
    lowbit.materialization.set("allow")
    _ = x @ q, q.T, q + x[0, 0]
    before = traced.call_count
    _ = x @ q, (x + 1) @ other, q.T, other + x[1, 1]
    assert traced.call_count == before


def test_jit_of_the_whole_tree(layout: Layout, x: jax.Array) -> None:
    p = {"w": weights(layout)["w"], "stack": weights(layout)["stack"]}
    f = jax.jit(lambda x, p: (x @ p["w"], p["w"].T, p))
    y, transposed, back = f(x, p)
    assert_close(y, x @ p["w"].materialize())
    assert_close(transposed, p["w"].materialize().T, 0)
    assert_same_bits(back["w"], p["w"])


def test_eval_shape_make_jaxpr_and_export(layout: Layout, x: jax.Array) -> None:
    q = weights(layout)["w"]
    f = implicit(lambda x, w: (x @ w, w.T))
    y, transposed = jax.eval_shape(f, x, q)
    assert (y.shape, y.dtype, transposed.shape) == ((ROWS, N), x.dtype, (N, K))
    assert "lowbit_matmul" in str(jax.make_jaxpr(f)(x, q))
    components, tree = jax.tree.flatten((x, q))
    program = jax.jit(lambda *components: f(*jax.tree.unflatten(tree, components))[0])
    with lowbit.use_kernel(False):
        exported = [export.export(program)(*components)]
    exported.append(export.export(program, disabled_checks=lowbit.export_checks())(*components))
    for file in exported:
        assert_close(export.deserialize(file.serialize()).call(*components), x @ q.materialize())


def test_donation(x: jax.Array) -> None:
    q = lowbit.Array8B.quantize(jnp.ones((K, K)))
    f = jax.jit(implicit(lambda x, q: (x @ q, q.T)), donate_argnums=1)
    y, back = f(x, q)
    assert back.codes.unsafe_buffer_pointer() and q.codes.is_deleted()
    assert_close(y, x @ back.materialize().T)


@tiers.DEVICES
def test_copies_pickle_device_put_and_key_paths(layout: Layout) -> None:
    q = weights(layout)["w"]
    assert_same_bits(copy.deepcopy(q), q)
    assert_same_bits(pickle.loads(pickle.dumps(q)), q)
    moved = jax.device_put(q, jax.devices()[3])
    assert_same_bits(moved, q)
    assert moved.codes.devices() == {jax.devices()[3]}
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path({"w": q})[0]]
    assert paths[:2] == ["['w'].codes", "['w'].scales"]


def test_threads(layout: Layout, x: jax.Array) -> None:
    q = weights(layout)["w"]
    want, got, errors = x @ q.materialize(), [], []

    def work(policy):
        try:
            with lowbit.materialization(policy):
                got.append(jax.jit(implicit(lambda x: jnp.dot(x, q)))(x))
                assert lowbit.materialization.value == policy
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(policy,)) for policy in ("allow", "error") * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(got) == 6
    for y in got:
        assert_close(y, want)


def test_state_is_clean_after_an_exception(x: jax.Array) -> None:
    q = lowbit.Array8B.quantize(jnp.ones((K, N)))

    def fails(x):
        jnp.dot(x, q)
        raise KeyError("mine")

    with pytest.raises(KeyError):
        implicit(fails)(x)
    with pytest.raises(TypeError, match="outside of lowbit"):
        jnp.dot(x, q)


def test_jnp_functions_outside_of_implicit_name_it(x: jax.Array) -> None:
    q = lowbit.Array8B.quantize(jnp.ones((K, N)))
    calls = [jnp.dot, jnp.matmul, partial(jnp.einsum, "bd,dn->bn"), jax.jit(jnp.dot), lambda x, q: jnp.stack([q, q])]
    for call in (*calls, lambda x, q: jax.nn.relu(q), lambda x, q: jnp.where(True, q, 0)):
        with pytest.raises(TypeError, match=rf"Array8B of shape \({K}, {N}\) outside of lowbit.implicit: wrap"):
            call(x, q)
    # JAX gives the types of lax arguments an error of its own, which names the class.
    with pytest.raises(TypeError, match="Array8B"):
        jax.lax.sin(q)
    with pytest.warns(lowbit.MaterializationWarning, match="__array__"):
        assert_close(jnp.asarray(q), q.materialize())
    assert (x @ q).shape == (q.T @ x.T).T.shape == (x.shape[0], N)


@pytest.mark.first(*tiers.OF_FEATURES)
def test_ste_is_exact_and_straight(layout: Layout) -> None:
    w = gaussian(0, (K, N))
    quantize = lowbit.ste(layout.quantize)
    np.testing.assert_array_equal(quantize(w), layout.quantize(w).materialize())
    np.testing.assert_array_equal(jax.jit(quantize)(w), layout.quantize(w).materialize())

    def loss(w):
        return (quantize(w) ** 2).sum()

    np.testing.assert_array_equal(jax.grad(loss)(w), 2 * layout.quantize(w).materialize())
    assert_close(jax.jvp(jax.grad(loss), (w,), (w,))[1], 2 * w)
    assert_close(jax.vmap(jax.grad(loss))(jnp.stack([w, 2 * w]))[1], jax.grad(loss)(2 * w))


def test_implicit_takes_statics_keywords_and_methods(x: jax.Array) -> None:
    q = lowbit.Array8B.quantize(jnp.ones((K, N)))

    class Model:
        @implicit
        def apply(self, x, *, w, axis, name="sum"):
            assert name == "mean"
            return getattr(jnp, name)(x @ w, axis=axis), name, None

    y, name, nothing = Model().apply(x, w=q, axis=0, name="mean")
    assert (y.shape, name, nothing) == ((N,), "mean", None)
    f = jax.jit(implicit(lambda x, w, n: (x @ w)[:n]), static_argnums=2)
    assert f(x, q, 3).shape == (3, N)
    assert implicit(lambda x, w: implicit(lambda x, w: x @ w)(x, w))(x, q).shape == (ROWS, N)


def test_implicit_grad_of_a_quantized_argument_is_dense(layout: Layout, x: jax.Array) -> None:
    q = weights(layout)["w"]

    def loss(w):
        return jnp.sin(x @ w).sum()

    with lowbit.materialization("error"):
        got = implicit(jax.grad(loss))(q)
    assert_close(got, jax.grad(loss)(q.materialize()))
