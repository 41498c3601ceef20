"""The methods of jax.Array on implicit arrays: quantized where a rule keeps it, dense by the policy where not."""

import copy
import dataclasses
import pickle
import warnings
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from helpers import Layout, assert_close, assert_same_bits, gaussian
from jax import lax

import lowbit
from lowbit import ImplicitArray, QuantizedArray, implicit
from lowbit.runtime import _interpret

METHODS = {
    "all": lambda w: (w.all(), w.all(axis=0), w.all(1, keepdims=True)),
    "any": lambda w: (w.any(), w.any(axis=(0, 1))),
    "argmax": lambda w: (w.argmax(), w.argmax(axis=1), w.argmin(0)),
    "argsort": lambda w: (w.argsort(), w.argsort(axis=0)),
    "sum": lambda w: (w.sum(), w.sum(0), w.sum(axis=np.int64(1)), w.sum(dtype=jnp.float16), w.sum(initial=2.0)),
    "masked sum": lambda w: w.sum(where=np.arange(96) < 5),
    "mean": lambda w: (w.mean(), w.mean(axis=-1, keepdims=True), w.std(0), w.var(ddof=1)),
    "max": lambda w: (w.max(), w.min(axis=0), w.ptp(), w.prod(axis=0)),
    "cumsum": lambda w: (w.cumsum(), w.cumsum(axis=1), w.cumprod(0)),
    "sort": lambda w: (w.sort(), w.sort(axis=0)),
    "clip": lambda w: (w.clip(-0.5, 0.5), w.clip(max=np.float32(0.1)), w.clip(jnp.zeros(96), 1), w.round(1)),
    "take": lambda w: (w.take(jnp.array([3, 1]), axis=0), w.take(np.array([0, 6000]))),
    "dot": lambda w: w.dot(np.ones((96, 3), np.float32)),
    "trace": lambda w: (w.trace(), w.diagonal(), w.repeat(2, axis=0)),
    "real": lambda w: (w.real, w.imag, w.conj(), w.conjugate()),
    "searchsorted": lambda w: w.ravel().searchsorted(jnp.float32(0)),
    "at": lambda w: (w.at[3].get(), w.at[jnp.array([1, 70])].get(mode="fill", fill_value=7.0), w.at[:, 2].set(1.5)),
    "updates": lambda w: (w.at[2].add(1), w.at[1, 2].mul(3.0), w.at[0].apply(jnp.sin), w.at[3:5].min(0)),
    "masked update": lambda w: w.at[np.arange(64) % 2 == 0].set(0.0),
}


@pytest.mark.parametrize("name", METHODS, ids=str)
def test_methods_give_what_they_give_on_the_dense_array(name: str, layout: Layout) -> None:
    q = layout.quantize(gaussian(0, (64, 96)))
    want = jax.jit(METHODS[name])(q.materialize())
    with lowbit.materialization("allow"):
        assert_close(METHODS[name](q), want, 1e-5)
        assert_close(jax.jit(METHODS[name])(q.T.T), want, 1e-5)


KEEP = {
    "transpose": lambda w: w.transpose(),
    "transpose of axes": lambda w: w.transpose(1, 0),
    "transpose of a tuple": lambda w: w.transpose((1, 0)),
    "swapaxes": lambda w: w.swapaxes(0, -1),
    "squeeze": lambda w: w[None].squeeze(0),
    "copy": lambda w: w.copy(),
    "real": lambda w: w.real,
    "conj": lambda w: w.conj(),
    "at.get": lambda w: w.at[5].get(),
}


@pytest.mark.parametrize("name", KEEP, ids=str)
def test_methods_that_move_keep_the_array_quantized(name: str, layout: Layout) -> None:
    q = layout.quantize(gaussian(0, (64, 96)))
    with lowbit.materialization("error"):
        got = KEEP[name](q)
    assert isinstance(got, QuantizedArray)
    assert_close(got, KEEP[name](q.materialize()), 0)


def test_moving_methods_of_a_vector_of_blocks() -> None:
    q = lowbit.Array8B(gaussian(0, (2, 64)), axis=-1, block_size=64)
    with lowbit.materialization("error"):
        for got in (q.ravel(), q.flatten()):
            assert isinstance(got, QuantizedArray)
            assert_close(got, q.materialize().ravel(), 0)


def test_transpose_moves_no_byte() -> None:
    q = lowbit.quantize(jnp.ones((64, 96)))
    assert q.transpose().codes is q.codes


def test_going_dense_follows_the_policy() -> None:
    q = lowbit.quantize(jnp.ones((64, 96)))
    for go_dense in (lambda: q.sum(), lambda: q.at[0].set(1.0), lambda: q.tolist(), lambda: q.clip(0, 1)):
        with lowbit.materialization("error"), pytest.raises(TypeError, match="made dense"):
            go_dense()


def test_host_methods_give_what_they_give_on_the_dense_array() -> None:
    q = lowbit.Array8B(jnp.arange(6.0).reshape(2, 3))
    dense = q.materialize()
    assert q.itemsize == 4 and q.astype(jnp.bfloat16).itemsize == 2
    assert q.devices() == dense.devices() and q.device == dense.device
    assert q.block_until_ready() is not None
    assert_same_bits(q.block_until_ready(), q)
    assert (q.item(1, 2), q.item(4), q[0, 1].item(), q[:1, :1].item()) == (
        dense.item(1, 2),
        dense.item(4),
        dense[0, 1].item(),
        dense[0, 0].item(),
    )
    with pytest.raises(ValueError, match=r"shape \(2, 3\) has no single value; use \.any\(\), \.all\(\)"):
        q.item()
    with lowbit.materialization("allow"):
        assert q.tolist() == dense.tolist()


def test_one_compilation_serves_all_indices_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    q = lowbit.Array8B(jnp.ones((8, 16)), axis=-1, block_size=16)
    row = lowbit.Array8B(jnp.ones((1, 16)), axis=-1, block_size=16)[0]
    _ = q.at[0].set(row)
    traced = Mock(wraps=_interpret.run)
    monkeypatch.setattr(_interpret, "run", traced)
    for i in range(1, 8):
        q = q.at[i].set(row)
    assert traced.call_count == 0
    with lowbit.materialization("allow"):
        _ = q.at[0, 0].add(1.0)
        assert traced.call_count == 1
        _ = q.at[1, 3].add(2.5)
    assert traced.call_count == 1


def test_other_names_of_jax_arrays_say_what_to_do() -> None:
    q = lowbit.quantize(jnp.ones((64, 96)))
    for name in ("view", "nonzero", "addressable_shards", "tobytes", "is_fully_addressable"):
        assert not hasattr(q, name)
        with pytest.raises(AttributeError, match=rf"'ArrayNF4' .*{name}.*components.*materialize\(\)\.{name}"):
            getattr(q, name)
    for name in ("colour", "_arrays", "__array_interface__", "aval"):
        assert not hasattr(q, name)
        with pytest.raises(AttributeError) as error:
            getattr(q, name)
        assert "materialize" not in str(error.value)
    with pytest.raises(AttributeError, match=r"at\[\.\.\.\] has add, apply, .*no 'sett'"):
        q.at[0].sett(1)
    assert {"sum", "at", "devices"} <= {*dir(q)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(hasattr(q, name) for name in ("sum", "any", "tolist", "item", "at", "devices"))


def test_a_property_that_raises_is_not_taken_for_a_missing_one() -> None:
    q = lowbit.quantize(jnp.ones((64, 96)))
    nothing = jax.tree.map(lambda component: None, q)
    with pytest.raises(AttributeError, match="'shape'") as error:
        _ = nothing.shape
    assert "components" not in str(error.value)
    assert_same_bits(copy.deepcopy(q), q)
    assert_same_bits(copy.copy(q), q)
    assert_same_bits(pickle.loads(pickle.dumps(q)), q)


def test_a_field_may_have_the_name_of_a_method() -> None:
    @dataclasses.dataclass
    class Normalized(ImplicitArray):
        mean: jax.Array
        std: jax.Array
        values: jax.Array

        def materialize(self):
            return self.values * self.std + self.mean

    array = Normalized(jnp.float32(1), jnp.float32(2), jnp.arange(3.0))
    assert array.mean == 1
    with lowbit.materialization("allow"):
        assert array.sum() == 9


# --- a cache that is written row by row

SHAPE = (2, 3, 10, 32)  # batch, heads, length, dim
ROWS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "a position": (lambda cache, row, i: cache.at[:, :, i].set(row), (2, 3, 32)),
    "a sequence": (lambda cache, row, i: cache.at[i].set(row), (3, 10, 32)),
    "a head": (lambda cache, row, i: cache.at[:, i].set(row), (2, 10, 32)),
    "a position of a head": (lambda cache, row, i: cache.at[:, i, 5].set(row), (2, 32)),
    "two positions": (lambda cache, row, i: cache.at[:, :, 3:5].set(row), (2, 3, 2, 32)),
    "positions by number": (lambda cache, row, i: cache.at[:, :, jnp.array([7, 2])].set(row), (2, 3, 2, 32)),
    "a position each": (lambda cache, row, i: cache.at[jnp.arange(2), :, jnp.array([4, 9])].set(row), (2, 3, 32)),
}


# Scales along the last axis, or along the heads; that axis has another number in a row, and must not be indexed.
AXES = {what: {-1: -1, 1: at} for what, at in (("a position", 1), ("a sequence", 0), ("two positions", 1))}
AXES |= {"positions by number": {-1: -1, 1: 1}, "a position each": {-1: -1, 1: 1}}
AXES |= {"a head": {-1: -1}, "a position of a head": {-1: -1}}


@pytest.mark.parametrize(("what", "axis"), [(what, axis) for what in ROWS for axis in AXES[what]])
@pytest.mark.parametrize("format", tiers.tiered(["int8", "nf4", "ternary"], ["nf4"]))
def test_writing_rows_into_a_cache_keeps_every_bit(what: str, format: str, axis: int) -> None:
    write, shape = ROWS[what]
    options = {"block_size": 16} if format == "nf4" else {}
    cache = lowbit.FORMATS[format].quantize(gaussian(0, SHAPE), axis=axis, **options)
    row = lowbit.FORMATS[format].quantize(gaussian(1, shape), axis=AXES[what][axis], **options)
    want = jax.jit(write)(cache.materialize(), row.materialize(), jnp.int32(1))
    with lowbit.materialization("error"):
        for got in (
            implicit(lambda cache, row: write(cache, row, 1))(cache, row),
            jax.jit(implicit(write))(cache, row, jnp.int32(1)),
            write(cache, row, 1),
            jax.jit(write)(cache, row, jnp.int32(1)),
        ):
            assert type(got) is type(cache) and got.spans == cache.spans
            np.testing.assert_array_equal(got.materialize(), want)


def test_a_cache_is_filled_in_a_loop() -> None:
    cache = lowbit.Array8B(jnp.zeros(SHAPE), axis=-1)
    rows = gaussian(0, (10, 2, 3, 32))

    def fill(cache, rows):
        def step(i, cache):
            return cache.at[:, :, i].set(lowbit.Array8B(rows[i], axis=-1))

        return lax.fori_loop(0, 10, step, cache)

    with lowbit.materialization("error"):
        got = jax.jit(fill)(cache, rows)
    assert_close(got, lowbit.Array8B(jnp.moveaxis(rows, 0, 2), axis=-1), 1e-6)


def test_positions_out_of_bounds_are_dropped_as_in_a_dense_cache() -> None:
    cache, row = (lowbit.Array8B(array, axis=-1) for array in (jnp.ones(SHAPE), jnp.full((2, 3, 32), 5.0)))
    for i, mode in ((10, None), (-11, None), (-1, None), (10, "clip"), (10, "drop")):
        with lowbit.materialization("error"):
            got = cache.at[:, :, i].set(row, mode=mode)
        assert_close(got, cache.materialize().at[:, :, i].set(row.materialize(), mode=mode), 0)


def test_mapped_writes_keep_every_bit() -> None:
    cache, rows = (lowbit.Array8B(array, axis=-1) for array in (jnp.ones(SHAPE), jnp.full((2, 3, 32), 5.0)))
    write = jax.vmap(lambda cache, row, i: cache.at[:, i].set(row))
    at = jnp.array([4, 9])
    with lowbit.materialization("error"):
        for got in (implicit(write)(cache, rows, at), write(cache, rows, at)):
            assert_close(got, write(cache.materialize(), rows.materialize(), at), 0)


def test_writes_that_would_mix_scales_go_dense() -> None:
    cache = lowbit.Array8B(jnp.ones((4, 8, 16)), axis=-2)  # one scale for the whole of axis -2
    row = lowbit.Array8B(jnp.ones((4, 16)), axis=-1)
    with lowbit.materialization("error"), pytest.raises(TypeError, match="scatter has no rule"):
        cache.at[:, 3].set(row)
    other = lowbit.Array8B(jnp.ones((8, 16)), axis=-1)  # scales along another axis than those of the cache
    with lowbit.materialization("error"), pytest.raises(TypeError, match="scatter has no rule"):
        cache.at[1].set(other)
    with lowbit.materialization("allow"):
        assert_close(cache.at[:, 3].set(row), jnp.ones((4, 8, 16)), 1e-6)
