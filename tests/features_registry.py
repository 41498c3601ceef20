"""The tables that the features register themselves in."""

from collections.abc import Callable
from typing import Any

import jax

Feature = Callable[[jax.Array, dict[str, Any]], Any]
FUSED: dict[str, Feature] = {}
ANY: dict[str, Feature] = {}
LAYOUT_MATTERS: list[str] = []


def fused(fn: Feature) -> Feature:
    FUSED[fn.__name__] = fn
    return fn


def may_go_dense(fn: Feature) -> Feature:
    ANY[fn.__name__] = fn
    return fn


def layout_matters(fn: Feature) -> Feature:
    """Mark a feature that is tested with blocks along either axis and without blocks."""
    LAYOUT_MATTERS.append(fn.__name__)
    return fn
