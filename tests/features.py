"""Plain JAX programs `(x, p) -> result` on an activation and a dict of weights, quantized or not.

A feature marked *fused* must not go dense anywhere.
"""

import functools
from typing import Any

import features_operations as features_operations
import features_programs as features_programs
import jax
import jax.numpy as jnp
from features_registry import ANY, FUSED
from features_registry import LAYOUT_MATTERS as LAYOUT_MATTERS
from helpers import SHAPES, Layout, activations, weights

ALL = {**FUSED, **ANY}


@functools.cache
def used(feature: str) -> list[str]:
    """The names of the weights that a feature reads, in order."""
    names = set()

    class Asked:
        def __getitem__(self, name: str) -> jax.Array:
            names.add(name)
            return jnp.zeros(SHAPES[name])

    jax.eval_shape(lambda x: ALL[feature](x, Asked()), activations())
    return sorted(names)


def arguments(feature: str, layout: Layout) -> dict[str, Any]:
    """The quantized weights that a feature reads. The others are not made: each costs two compilations."""
    return {name: weights(layout)[name] for name in used(feature)}
