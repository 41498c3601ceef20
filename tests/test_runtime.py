"""The runtime alone, with arrays that know nothing of quantization."""

import dataclasses
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runtime_helpers import Base, LowRank

import lowbit
from lowbit import ImplicitArray, aux_field, implicit, materialization


def test_shape_and_dtype_come_from_materialize(low_rank: LowRank) -> None:
    assert (low_rank.shape, low_rank.dtype, low_rank.ndim, low_rank.size) == ((6, 5), jnp.float32, 2, 30)
    assert low_rank.nbytes == 4 * (12 + 10)
    assert len(low_rank) == 6


def test_a_subclass_may_store_its_shape() -> None:
    @dataclasses.dataclass
    class Zeros(ImplicitArray):
        shape: tuple[int, ...] = aux_field()
        dtype: Any = aux_field()

        def materialize(self):
            return jnp.zeros(self.shape, self.dtype)

    z = Zeros((2, 3), np.dtype(np.float32))
    assert z.shape == (2, 3)
    with materialization("allow"):
        assert (z + 1).sum() == 6
        assert implicit(lambda z: jnp.dot(jnp.ones((4, 2)), z))(z).shape == (4, 3)


def test_repr_has_no_numbers(low_rank: LowRank) -> None:
    assert repr(low_rank) == "LowRank(shape=(6, 5), dtype=float32, 88 bytes\n  a float32[6,2], b float32[2,5])"
    # JAX prints trees with placeholders for the components.
    assert "LowRank" in repr(jax.tree.map(lambda _: None, low_rank))
    assert "LowRank" in repr(jax.tree.structure(low_rank))


def test_gradients_reach_the_components(low_rank: LowRank) -> None:
    x = jnp.ones((3, 6))

    def loss(w):
        return jnp.sin(implicit(jnp.dot)(x, w)).sum()

    with materialization("error"):
        got = jax.grad(loss)(low_rank)
    a, b = jax.grad(lambda a, b: jnp.sin(x @ (a @ b)).sum(), (0, 1))(low_rank.a, low_rank.b)
    np.testing.assert_allclose(got.a, a, rtol=1e-5)
    np.testing.assert_allclose(got.b, b, rtol=1e-5)


def test_gradients_reach_the_components_through_custom_rules(low_rank: LowRank) -> None:
    x = jnp.ones((3, 6)) / 9

    @jax.custom_vjp
    def linear(x, w):
        return x @ w

    linear.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, 2 * kept[0].T @ g))

    @jax.custom_jvp
    def sine(w):
        return jnp.sin(w)

    sine.defjvp(lambda p, t: (sine(*p), 3 * t[0]))
    materialization.set("allow")
    plain = jax.grad(lambda w: (x @ (w.a @ w.b)).sum())(low_rank)
    for fn, scale in ((lambda w: linear(x, w).sum(), 2), (lambda w: (x @ sine(w)).sum(), 3)):
        got = jax.grad(implicit(fn))(low_rank)
        want = jax.tree.map(lambda component, scale=scale: scale * component, plain)
        np.testing.assert_allclose(got.a, want.a, rtol=1e-5)
        np.testing.assert_allclose(got.b, want.b, rtol=1e-5)


def test_captures_inside_grad_and_vmap_inside_implicit(low_rank: LowRank) -> None:
    materialization.set("allow")
    x = jnp.ones((3, 6))

    def through_closure(scale):
        return jax.grad(lambda a: jnp.dot(x, LowRank(a, low_rank.b)).sum())(low_rank.a * scale)

    want = jax.grad(lambda a: (x @ a @ low_rank.b).sum())(low_rank.a)
    np.testing.assert_allclose(implicit(through_closure)(jnp.ones(())), want, rtol=1e-6)
    stack = jax.tree.map(lambda component: jnp.stack([component, 2 * component]), low_rank)
    got = implicit(lambda x: jax.vmap(lambda w: jnp.dot(x, w))(stack))(x)
    np.testing.assert_allclose(got, jnp.einsum("bk,ekr,ern->ebn", x, stack.a, stack.b), rtol=1e-6)


# --- methods of arrays


def test_scalars_convert_and_large_arrays_refuse() -> None:
    assert float(Base(jnp.full((1, 1), 2.5))) == 2.5
    assert bool(Base(jnp.ones(1))) and int(Base(jnp.ones(()))) == 1
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        bool(Base(jnp.ones(2)))
    with pytest.raises(TypeError):
        len(Base(jnp.ones(())))


def test_comparisons_are_elementwise_and_arrays_unhashable() -> None:
    base = Base(jnp.arange(3.0))
    assert (base == base).all() and (base != 1).sum() == 2 and (base >= 1).sum() == 2
    assert (base == "text") is False and base is not None
    with pytest.raises(TypeError):
        hash(base)


def test_indexing() -> None:
    base, value = Base(jnp.arange(24.0).reshape(4, 6)), jnp.arange(24.0).reshape(4, 6)
    mask = np.array([True, False, True, False])
    for index in (
        0,
        -1,
        slice(1, 3),
        (0, 1),
        (..., 2),
        None,
        (slice(None), None, 3),
        np.array([0, 2]),
        mask,
        (mask, slice(0, 2)),
        value > 5,
        (jnp.int32(2), slice(None, None, 2)),
    ):
        np.testing.assert_array_equal(base[index], value[index])
    for mask in (np.ones(6, bool), np.ones((4, 5), bool), (slice(None), np.ones(4, bool))):
        with pytest.raises(IndexError):
            base[mask]
    with pytest.raises(TypeError, match="Cannot index with 'a'"):
        base["a"]
    with pytest.raises(TypeError, match=r"Cannot index with \[0, 1\]"):
        base[[0, 1]]


def test_materialize_and_pickle(low_rank: LowRank) -> None:
    tree = lowbit.materialize({"w": low_rank, "b": [1, None]})
    np.testing.assert_array_equal(tree["w"], low_rank.a @ low_rank.b)
    assert tree["b"] == [1, None]
    again = pickle.loads(pickle.dumps(low_rank))
    np.testing.assert_array_equal(again.a, low_rank.a)


def test_a_class_that_is_not_a_dataclass_raises() -> None:
    class Forgot(ImplicitArray):
        pass

    with pytest.raises(TypeError, match="Forgot must be a dataclass"):
        jax.tree.leaves(Forgot())


def test_nothing_private_of_jax_is_imported() -> None:
    from pathlib import Path

    sources = Path(lowbit.__file__).parent.rglob("*.py")
    assert not [path for path in sources if "jax._src" in path.read_text()]


def test_ste_refuses_another_shape() -> None:
    with pytest.raises(ValueError, match=r"ste\(sum\) got an array of shape \(3,\) and returned \(\)"):
        lowbit.ste(jnp.sum)(jnp.ones(3))


def test_ste_with_other_arguments_has_zero_gradient_for_them() -> None:
    def scaled(x, scale, *, n):
        return jnp.round(x * scale) * n

    def f(x, s):
        return lowbit.ste(scaled)(x, s, n=2).sum()

    dx, ds = jax.grad(f, (0, 1))(jnp.array([0.4, 1.6]), jnp.float32(2.0))
    np.testing.assert_array_equal(dx, [1, 1])
    assert ds == 0


def test_one_inner_function_called_often_is_compiled_once(low_rank: LowRank) -> None:
    @jax.jit
    def layer(x, w):
        return jnp.tanh(x @ w)

    def model(x, w):
        for _ in range(6):
            x = layer(x, w)
        return x

    square = LowRank(low_rank.a, low_rank.a.T)
    text = jax.jit(implicit(model)).lower(jnp.ones((3, 6)), square).as_text()
    assert text.count("func.func private @layer") == 1
