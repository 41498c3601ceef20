"""Quantize whole models, and dequantize them."""

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer

from lowbit.config import QuantizationConfig, quantize, quantize_calibrated
from lowbit.formats import QuantizedArray
from lowbit.formats.moments import Moments
from lowbit.ops.squares import squares
from lowbit.runtime import is_implicit, materialize

from .histogram import histogram
from .patterns import Rules, naming, ordered_rules
from .plan import SMALL, PlannedLeaf, plan_tree
from .report import (
    NO_STATISTIC,
    NOT_CALIBRATED,
    Outputs,
    Report,
    Row,
    array_bytes,
    calibrated_by,
    relative_error,
    row,
    worst,
)

T = TypeVar("T")


def quantize_tree(
    params: T,
    rules: Rules = "q4",
    *,
    fn: Callable[..., Any] | None = None,
    args: Sequence[Any] = (),
    strict: bool = False,
    scales: Any = None,
    calibration: Mapping[str, Moments] | None = None,
    histograms: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[T, Report]:
    """Quantize the weights of a model: a tree of the same structure, and a report with a row for every leaf.

    - `rules`: the name of a format or a `QuantizationConfig` for all weights; or patterns over paths, in order, as a
      dict or as `Rule` objects. The first pattern that matches a leaf decides; a leaf that none matches is kept.
    - `fn`, `args`: a call of the model, `fn(params, *args)`. It is traced, not run, to see which axis of each leaf is
      contracted and which leaves are looked up by row; `args` may be `jax.ShapeDtypeStruct`s. Without it their names
      decide (`kernel` is (in, out), `weight` is (out, in), embeddings are stored by row). An axis in a pattern's
      config takes precedence over both.
    - `strict`: raise if a pattern matches no leaf, or a leaf cannot be quantized as its pattern asks. By default the
      report says so.
    - `scales`: a tree from `learned_scales`, to quantize with and to store instead of scales computed from the weights.
      A leaf that is quantized already keeps its codes.
    - `calibration`: from `calibrate`, to quantize for the inputs that the weights are multiplied with: by GPTQ where it
      has second moments, by a weighted search for scales where it has diagonals. The report has the output error before
      and after. A leaf that it does not help is quantized without it.
    - `histograms`: how many of the leaves with the largest errors get a histogram in the report. Each costs a pass
      over the leaf.
    - `progress`: called as `progress(done, total)`, in bytes of the leaves given, at the start and after each leaf.

    A format for all weights, or the pattern `*`, keeps norms, biases and arrays of fewer than 1,024 elements. Any other
    pattern applies to everything it matches, whatever its size; to vectors only if it matches nothing else. The report
    says why a leaf was kept. A `UserWarning` is issued if nothing is quantized, or if more than half of the bytes of
    large arrays stay dense because their contracted axis is not known. `params` may be `jax.ShapeDtypeStruct`s, to plan
    a model without its weights.

    >>> import jax, jax.numpy as jnp, lowbit
    >>> params = {"embed": jnp.ones((512, 64)), "up": {"kernel": jnp.ones((64, 256)), "bias": jnp.ones(256)}}
    >>> params, report = lowbit.quantize_tree(params, {"*embed*": "int8", "*": "q4"})
    >>> [(row.path, row.format, row.axis) for row in report]
    [('embed', 'int8', -1), ('up/bias', None, None), ('up/kernel', 'q4', -2)]
    """
    rules = ordered_rules(rules)
    structure, leaves, planned, unmatched = plan_tree(params, rules, fn, args, strict=strict, scales=scales)
    if any(rule.config is not None for rule in rules):
        _warn_of_dense_leaves(leaves, planned)
    _ = worst((), histograms)  # raises for a bad number before any work is done
    if calibration is not None and scales is not None:
        raise ValueError("calibration= chooses scales, and scales= has learned ones: pass one of them.")
    stored, rows = _quantize_leaves(leaves, planned, progress, calibration)
    places = {leaf.path: leaf.place for leaf in planned}
    shown = [(row.path, leaves[places[row.path]], stored[places[row.path]]) for row in worst(rows, histograms)]
    # A process cannot count the values on the devices of another one.
    counted = tuple(histogram(*leaf) for leaf in shown if getattr(leaf[1], "is_fully_addressable", True))
    return jax.tree.unflatten(structure, stored), Report(tuple(rows), unmatched, counted)


def dequantize_tree(params: T) -> T:
    """Make every quantized leaf of a tree dense.

    >>> import jax.numpy as jnp, lowbit
    >>> params, _ = lowbit.quantize_tree({"kernel": jnp.ones((64, 32))}, "int8")
    >>> lowbit.dequantize_tree(params)["kernel"].dtype
    dtype('float32')
    """
    return materialize(params)


def quantized(path: str, leaf: Any, config: QuantizationConfig, scale: Any = None) -> tuple[Any, float | None]:
    """Quantize a leaf; also the relative error, or None under a trace and for a `jax.ShapeDtypeStruct`."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.eval_shape(partial(quantize, config=config), leaf), None
    with naming(path):
        stored = quantize(leaf, config, scale=scale)
    return stored, _error(stored, leaf)


def _with_scales(path: str, array: QuantizedArray, scales: Any) -> QuantizedArray:
    with naming(path):
        return array.with_scales(scales)


def _error(stored: Any, leaf: Any) -> float | None:
    traced = any(isinstance(component, Tracer) for component in jax.tree.leaves(stored))
    return None if traced else relative_error(*map(float, _squares(stored, leaf)))


_squares = jax.jit(lambda stored, array: [jnp.sum(rows) for rows in squares(stored, array)])


def _calibrated(path: str, leaf: Any, config: QuantizationConfig, moments: Moments) -> tuple[Any, Any, Outputs]:
    """Quantize a leaf with the moments of its inputs; also the relative error, and the errors of its outputs."""
    with naming(path):
        found = quantize_calibrated(leaf, config, moments)
    if isinstance(found.before, Tracer):
        return found.array, None, Outputs(None, None, "calibrated")
    outputs = calibrated_by(float(found.before), float(found.after), moments.hessian is not None)
    return found.array, _error(found.array, leaf), outputs


def _moments_of_arrays(
    leaves: Sequence[Any], planned: Sequence[PlannedLeaf], calibration: Mapping[str, Moments] | None
) -> dict[int, Moments]:
    """The moments of each array by its id: an array that is several leaves has the inputs of them all."""
    found: dict[int, Moments] = {}
    for leaf in planned if calibration is not None else ():
        array, moments = leaves[leaf.place], calibration.get(leaf.path) if calibration else None
        if moments is not None and not isinstance(array, jax.ShapeDtypeStruct):
            known = found.get(id(array))
            if known is not None and known.inputs != moments.inputs:
                # Inputs of products tell more than counts of rows that are looked up.
                axis = leaf.plan.config.axis if leaf.plan.config is not None else None
                found[id(array)] = moments if moments.inputs == (axis,) else known
                continue
            with naming(leaf.path):
                found[id(array)] = moments if known is None else known.merged(moments)
    return found


def _quantize_leaves(
    leaves: Sequence[Any],
    planned: Sequence[PlannedLeaf],
    progress: Callable[[int, int], None] | None,
    calibration: Mapping[str, Moments] | None,
) -> tuple[list[Any], list[Row]]:
    """The leaves as planned, and their rows. Leaves that are the same array stay so if their plans are equal."""
    stored, rows = list(leaves), []
    done, total = 0, sum(array_bytes(leaves[leaf.place]) for leaf in planned)
    results: dict[Any, dict[Any, Any]] = {}  # by array and scale, then by config: path, stored array, errors
    moments = _moments_of_arrays(leaves, planned, calibration)
    missing = NOT_CALIBRATED if calibration is None else NO_STATISTIC
    if progress is not None:
        progress(done, total)
    for leaf in planned:
        array, plan = leaves[leaf.place], leaf.plan
        same = results.setdefault((id(array), id(leaf.scale)), {})
        tied = same[plan.config][0] if plan.config in same else None
        if tied is None:
            if same:
                plan = dataclasses.replace(plan, why=f"{plan.why}; no longer tied to {next(iter(same.values()))[0]}")
            config = plan.config
            if config is None:
                result = (
                    array if leaf.scale is None else _with_scales(leaf.path, array, leaf.scale),
                    None,
                    NOT_CALIBRATED,
                )
            elif id(array) in moments:
                result = _calibrated(leaf.path, array, config, moments[id(array)])
            else:
                result = *quantized(leaf.path, array, config, leaf.scale), missing
            same[config] = leaf.path, *result
        _, stored[leaf.place], error, outputs = same[plan.config]
        own = row(leaf.path, array, stored[leaf.place], plan, error, outputs)
        rows.append(dataclasses.replace(own, tied=tied))
        done += array_bytes(array)
        if progress is not None:
            progress(done, total)
    return stored, rows


def _warn_of_dense_leaves(leaves: Sequence[Any], planned: Sequence[PlannedLeaf]) -> None:
    """Warn if nothing is quantized, or more than half of the bytes of large arrays have no known axis."""
    large = [leaf for leaf in planned if _is_large(leaves[leaf.place])]
    unknown = [leaf for leaf in large if leaf.plan.unknown]
    lost, total = (sum(array_bytes(leaves[leaf.place]) for leaf in some) for some in (unknown, large))
    if any(leaf.plan.config is not None or is_implicit(leaves[leaf.place]) for leaf in planned):
        if 2 * lost <= total:
            return
        said = f"keeps {lost:,} of the {total:,} bytes of large arrays dense, since their contracted axis is not known"
    elif planned:
        said = f"quantizes none of {len(planned)} arrays"
    else:
        said = f"finds no array among the {len(leaves)} leaves of the tree"
    shown = unknown or planned
    first = [f"{leaf.path} ({leaf.plan.why})" for leaf in shown[:3]] + ["..."] * (len(shown) > 3)
    warnings.warn(
        f"quantize_tree {said}{': ' * bool(first)}{'; '.join(first)}. Pass fn= and args=, a call of the model that "
        "shows which axis of each weight is contracted, or patterns with a QuantizationConfig that has an axis.",
        stacklevel=3,
    )


def _is_large(leaf: Any) -> bool:
    """Whether an array is worth quantizing: floating-point, more than one axis, and large."""
    return len(leaf.shape) > 1 and math.prod(leaf.shape) >= SMALL and jnp.issubdtype(leaf.dtype, jnp.floating)
