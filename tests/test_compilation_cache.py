"""Programs over several devices in JAX's compilation cache, which does not see what a partitioned call computes."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from helpers import gaussian
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lowbit
from lowbit import FORMATS
from lowbit.kernels.reference import take
from lowbit.ops.partition import ShardedRows

pytestmark = tiers.DEVICES

# Formats whose components have equal shapes and dtypes.
LIKE = ("fp8", "fp8_e5m2")


@pytest.fixture
def without_addresses() -> Iterator[None]:
    """Leave the addresses of partitioned calls out of the keys, as if the second program had got those of the first."""
    option = "jax_remove_custom_partitioning_ptr_from_cache_key"
    jax.config.update(option, True)
    yield
    jax.config.update(option, False)


def entries(name: str) -> int:
    return len(list(Path(os.environ["LOWBIT_TEST_COMPILED"]).glob(f"jit_{name}-*-cache")))


def run_each(program: Any, *operands: Any) -> list[np.ndarray]:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    weights = [lowbit.quantize(gaussian(0, (64, 128)), format, block_size=16) for format in LIKE]
    assert len({str(jax.tree.map(jnp.shape, jax.tree.leaves(w))) for w in weights}) == 1
    run = jax.jit(program)
    return [np.asarray(run(w.with_sharding(NamedSharding(mesh, P(None, "x"))), *operands)) for w in weights]


def test_descriptions_of_operations_are_distinct_and_hold_in_other_processes() -> None:
    rows = jnp.zeros((2, 1), jnp.int32)
    weights = [jax.eval_shape(lambda w, f=format: lowbit.quantize(w, f), jnp.zeros((64, 128))) for format in FORMATS]
    texts = [ShardedRows(kernels, take, w, rows).description() for w in weights for kernels in ({}, {"cpu": take})]
    assert len(set(texts)) == len(texts) and not any("0x" in text for text in texts)


@pytest.mark.usefixtures("without_addresses")
def test_a_product_is_not_taken_for_that_of_another_format() -> None:
    def product_of_like_formats(w: Any, x: jax.Array) -> jax.Array:
        return x @ w

    x = gaussian(1, (8, 64))
    got = run_each(product_of_like_formats, x)
    for y, format in zip(got, LIKE, strict=True):
        w = lowbit.quantize(gaussian(0, (64, 128)), format, block_size=16)
        np.testing.assert_allclose(y, np.asarray(x) @ np.asarray(w.materialize()), rtol=1e-4, atol=1e-4)
    assert entries("product_of_like_formats") >= len(LIKE)  # the cache was in use


@pytest.mark.usefixtures("without_addresses")
def test_rows_are_not_taken_for_those_of_another_format() -> None:
    def rows_of_like_formats(w: Any) -> jax.Array:
        return w[jnp.array([1, 60])]

    for y, format in zip(run_each(rows_of_like_formats), LIKE, strict=True):
        w = lowbit.quantize(gaussian(0, (64, 128)), format, block_size=16)
        np.testing.assert_array_equal(y, np.asarray(w.materialize())[[1, 60]])
    assert entries("rows_of_like_formats") >= len(LIKE)
