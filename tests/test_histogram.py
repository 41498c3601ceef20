"""Histograms of a report: weights counted between the levels of a format."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, gaussian

import lowbit
from lowbit import quantize_tree
from lowbit.formats import spread
from lowbit.models.histogram import histogram


def normal(*shape: int) -> jax.Array:
    return gaussian(sum(shape), shape)


@pytest.mark.parametrize("format", list(lowbit.FORMATS))
def test_histograms_count_weights_between_the_levels(format: str) -> None:
    params = {"a": {"kernel": normal(64, 96)}, "b": {"kernel": jnp.ones((64, 96))}, "norm": jnp.ones(64)}
    quantized, report = quantize_tree(params, format, histograms=1)
    (found,), stored, w = report.histograms, quantized["a"]["kernel"], params["a"]["kernel"]
    assert found.path == "a/kernel" and len(found.counts) == 64
    scales = spread(stored.scale_values(), stored.spans, stored.shape)
    want, _ = np.histogram(np.asarray(w / scales), 64, (-found.limit, found.limit))
    assert np.abs(want - found.counts).sum() <= 4  # a weight on the edge of two bins may be in either
    values = np.unique(np.asarray(stored.materialize() / scales))
    levels = values[np.append(True, np.diff(values) > 1e-6 * np.abs(values).max())]
    assert np.abs(np.asarray(found.levels)[:, None] - levels).min(0).max() <= 1e-6 * np.abs(levels).max()
    assert found.levels[-1] == pytest.approx(levels[-1]) and found.levels[0] == pytest.approx(levels[0])
    assert histogram("", w.T, stored.T) == dataclasses.replace(found, path="")


def test_an_outlier_does_not_flatten_a_histogram() -> None:
    w = normal(64, 96).at[3, 4].set(1e4)
    _, report = quantize_tree({"kernel": w}, lowbit.QuantizationConfig("binary", 16, axis=-2), histograms=8)
    (found,) = report.histograms
    assert sum(found.counts) == w.size - 1 and max(found.counts) < w.size / 4


def test_histograms_need_values_and_count_tied_arrays_once() -> None:
    w = normal(64, 96)
    tied, report = quantize_tree({"a": {"kernel": w}, "b": {"kernel": w}, "bias": jnp.ones(96)}, "nf4", histograms=8)
    assert [found.path for found in report.histograms] == ["a/kernel"] and tied["b"]["kernel"] is tied["a"]["kernel"]
    planned = quantize_tree({"kernel": jax.ShapeDtypeStruct((64, 96), jnp.float32)}, "nf4", histograms=8)
    assert planned[1].histograms == ()
    traced = jax.jit(lambda params: quantize_tree(params, "nf4", histograms=8)[0])({"kernel": w})
    assert_same_bits(traced["kernel"], tied["a"]["kernel"])
    zeros = quantize_tree({"kernel": jnp.zeros((64, 96))}, "nf4", histograms=8)[1].histograms
    assert zeros[0].limit == 1.0 and sum(zeros[0].counts) == w.size
    with pytest.raises(ValueError, match="histograms=-1 must be the number of leaves to show"):
        quantize_tree({"kernel": w}, "nf4", histograms=-1)
