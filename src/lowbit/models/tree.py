"""Quantize whole models, and make them dense again."""

import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer

from lowbit.config import QuantizationConfig, quantize
from lowbit.ops.squares import squares
from lowbit.runtime import is_implicit, materialize

from .histogram import histogram
from .patterns import Rules, naming, ordered_rules
from .plan import SMALL, Plan, plan_tree
from .report import Report, relative_error, row, worst

T = TypeVar("T")


def quantize_tree(
    params: T,
    rules: Rules = "nf4",
    *,
    fn: Callable[..., Any] | None = None,
    args: Sequence[Any] = (),
    strict: bool = False,
    scales: Any = None,
    histograms: int = 0,
) -> tuple[T, Report]:
    """The parameters of a model with its weights quantized, and a report on every leaf.

    - `rules`: the name of a format or a `QuantizationConfig` for all weights; or patterns over paths, in order, as a
      dict or as `Rule`s: the first that matches a leaf decides, and what none matches is kept.
    - `fn`, `args`: a program of the model, `fn(params, *args)`, from which it is read which axis of each leaf is
      contracted and what is looked up. It is traced, not run, and `args` may be `jax.ShapeDtypeStruct`s. Without it
      the names of the leaves tell (`kernel` is (in, out), `weight` is (out, in), embeddings go by row). An axis in a
      rule's config wins over both.
    - `strict`: raise where a rule matched nothing, or a leaf could not be quantized as a rule asked.
    - `scales`: a tree of `learned_scales`, to round by and to store in place of those that fit the weights.
    - `histograms`: of how many of the worst leaves the report has one, for its page. Each costs a pass over the leaf.

    A format for all weights, or the pattern `*`, leaves norms, biases and arrays of fewer than 1,024 elements as they
    are. Any other pattern means what it matches, whatever its size; a vector only if it matches vectors alone. The
    report says why a leaf was kept. If nothing is quantized, or more than half of the bytes of large weights stay dense
    since their contracted axis is not known, a `UserWarning` says so. `params` may be `ShapeDtypeStruct`s, for a plan
    without the weights.

    >>> import jax, jax.numpy as jnp, lowbit
    >>> params = {"embed": jnp.ones((512, 64)), "up": {"kernel": jnp.ones((64, 256)), "bias": jnp.ones(256)}}
    >>> params, report = lowbit.quantize_tree(params, {"*embed*": "int8", "*": "nf4"})
    >>> [(row.path, row.format, row.axis) for row in report]
    [('embed', 'int8', -1), ('up/bias', None, None), ('up/kernel', 'nf4', -2)]
    """
    rules = ordered_rules(rules)
    structure, leaves, planned_leaves, unmatched = plan_tree(params, rules, fn, args, strict=strict, scales=scales)
    if any(rule.config is not None for rule in rules):
        _warn_of_dense_leaves(leaves, [(path, leaves[i], planned) for i, path, planned, _ in planned_leaves])
    before, rows, done = list(leaves), [], {}
    _ = worst(rows, histograms)  # a wrong number is an error before any work is done
    for i, path, planned, scale in _with_progress(planned_leaves, "quantizing"):
        leaf, config = leaves[i], planned.config
        # Arrays that are tied stay so, if the same is to be done with them.
        ties = done.setdefault((id(leaf), id(scale)), {})
        tied = ties[config][0] if config in ties else None
        if tied is None:
            stored = (leaf, None) if config is None else quantized(path, leaf, config, scale)
            why = f"{planned.why}; no longer tied to {next(iter(ties.values()))[0]}" if ties else planned.why
            ties[config] = path, *stored
            planned = dataclasses.replace(planned, why=why)
        _, leaves[i], error = ties[config]
        rows.append(dataclasses.replace(row(path, leaf, leaves[i], planned, error), tied=tied))
    place = {path: i for i, path, *_ in planned_leaves}
    chosen = [(row.path, before[place[row.path]], leaves[place[row.path]]) for row in worst(rows, histograms)]
    # What lies on another process's devices cannot be counted here.
    counted = tuple(histogram(*leaf) for leaf in chosen if getattr(leaf[1], "is_fully_addressable", True))
    return jax.tree.unflatten(structure, leaves), Report(tuple(rows), unmatched, counted)


def dequantize_tree(params: T) -> T:
    """The parameters with every quantized leaf dense again.

    >>> import jax.numpy as jnp, lowbit
    >>> params, _ = lowbit.quantize_tree({"kernel": jnp.ones((64, 32))}, "int8")
    >>> lowbit.dequantize_tree(params)["kernel"].dtype
    dtype('float32')
    """
    return materialize(params)


def quantized(path: str, leaf: Any, config: QuantizationConfig, scale: Any = None) -> tuple[Any, float | None]:
    """A leaf in its format, and the error that makes where there are numbers to compare."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.eval_shape(partial(quantize, config=config), leaf), None
    with naming(path):
        stored = quantize(leaf, config, scale=scale)
    traced = any(isinstance(part, Tracer) for part in jax.tree.leaves(stored))
    return stored, None if traced else relative_error(*map(float, _squares(stored, leaf)))


_squares = jax.jit(lambda stored, array: [jnp.sum(rows) for rows in squares(stored, array)])


def _warn_of_dense_leaves(leaves: Sequence[Any], planned: Sequence[tuple[str, Any, Plan]]) -> None:
    """Warn once if nothing, or too little, is quantized, and say what to do."""
    large = [(path, leaf, plan) for path, leaf, plan in planned if _is_large(leaf)]
    unknown = [(path, leaf, plan) for path, leaf, plan in large if plan.unknown]
    lost, total = (sum(math.prod(x.shape) * x.dtype.itemsize for _, x, _ in some) for some in (unknown, large))
    if any(plan.config is not None or is_implicit(leaf) for _, leaf, plan in planned):
        if 2 * lost <= total:
            return
        said = f"keeps {lost:,} of the {total:,} bytes of large arrays dense, since their contracted axis is not known"
    elif planned:
        said = f"quantizes none of {len(planned)} arrays"
    else:
        said = f"finds no array among the {len(leaves)} leaves of the tree"
    shown = unknown or planned
    first = [f"{path} ({plan.why})" for path, _, plan in shown[:3]] + ["..."] * (len(shown) > 3)
    warnings.warn(
        f"quantize_tree {said}{': ' * bool(first)}{'; '.join(first)}. Pass fn= and args=, a call of the model that "
        "tells which axis of each weight is contracted, or patterns with a QuantizationConfig that has an axis.",
        stacklevel=3,
    )


def _is_large(leaf: Any) -> bool:
    """Whether an array is large enough to be worth quantizing: many floats, on more than one axis."""
    return len(leaf.shape) > 1 and math.prod(leaf.shape) >= SMALL and jnp.issubdtype(leaf.dtype, jnp.floating)


def _with_progress(items: Sequence[T], doing: str) -> Iterator[T]:
    """The items, with a bar on the terminal if they take longer than a second and rich is installed."""
    start = time.monotonic()
    with ExitStack() as stack:
        bar = task = None
        for done, item in enumerate(items):
            if bar is None and time.monotonic() - start > 1:
                bar, task = _bar(stack, doing, len(items))
            if bar is not None:
                bar.update(task, completed=done)
            yield item


def _bar(stack: ExitStack, doing: str, total: int) -> tuple[Any, Any]:
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        return None, None
    console = Console(stderr=True)
    if not console.is_terminal:
        return None, None
    bar = stack.enter_context(Progress(console=console, transient=True))
    return bar, bar.add_task(doing, total=total)
