"""Plain JAX programs, unmodified, on every format in every layout: the same result as on the dense weights.

A fused feature runs under materialization("error") and builds no dense weight.
"""

import jax
import pytest
import tiers
from features import ALL, FUSED, LAYOUT_MATTERS, arguments
from helpers import Layout, activations, assert_close

import lowbit
from lowbit import implicit
from lowbit.testing import dense_weights

# A fused product does not round the weight to bfloat16 first, as the dense one must.
TOLERANCE = {"preferred_element_type": 5e-3}


# Compiled once for all layouts.
DENSE = {name: jax.jit(feature) for name, feature in ALL.items()}


def check(feature: str, layout: Layout) -> None:
    x, p = activations(), arguments(feature, layout)
    want = DENSE[feature](x, lowbit.materialize(p))
    with lowbit.materialization("error" if feature in FUSED else "allow"):
        traced = jax.jit(implicit(ALL[feature])).trace(x, p)
        got = traced.lower().compile()(x, p)
    assert_close(got, want, TOLERANCE.get(feature, 2e-5))
    if feature in FUSED:
        assert dense_weights(traced.jaxpr, p) == []


@pytest.mark.parametrize(("feature", "way"), tiers.features(ALL, LAYOUT_MATTERS), ids=str)
def test_a_feature_equals_the_dense_program(feature: str, way: Layout) -> None:
    check(feature, way)


# Eagerly, a feature runs the same rules on every kind of storage, which are compared above.
EAGER = [pytest.param(name, tiers.ONE, marks=tiers.MORE) for name in ALL]
EAGER += [
    pytest.param(name, way, marks=[tiers.MORE, tiers.EVERY]) for name in ALL for way in tiers.KINDS if way != tiers.ONE
]


@pytest.mark.parametrize(("feature", "way"), EAGER, ids=str)
def test_a_feature_works_eagerly_leaks_nothing_and_promotes_no_dtype(feature: str, way: Layout) -> None:
    x, p = activations(), arguments(feature, way)
    dense = lowbit.materialize(p)
    with lowbit.materialization("allow"), jax.checking_leaks(), jax.numpy_dtype_promotion("strict"):
        want = ALL[feature](x, dense)
        assert_close(implicit(ALL[feature])(x, p), want, TOLERANCE.get(feature, 2e-5))
