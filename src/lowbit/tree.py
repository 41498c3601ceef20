"""Whole models: quantize their weights by rules over paths; what is trained, and what stays as it is stored."""

import dataclasses
import fnmatch
import math
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer

from .axes import Found, axes_by_name, axes_by_program
from .config import QuantizationConfig, quantize
from .formats import FORMATS, QuantizedArray
from .histogram import histogram
from .low_rank import LoraArray
from .ops.squares import squares
from .report import Report, Row, worst
from .runtime import is_implicit, materialize

T = TypeVar("T")
# Fewer elements are not worth it, unless a rule says so.
SMALL = 1024


@dataclasses.dataclass(frozen=True)
class Rule:
    """Which leaves to store in which format.

    - `pattern`: for the whole path, as in `layers/0/mlp/kernel`. A glob, where `*` matches `/` too, or `re:` and a
      regular expression.
    - `format`: the name of a format, a `QuantizationConfig`, or None to keep the leaf as it is.
    - `where`: a test of the leaf's shape and dtype, on top of the pattern.

    >>> import lowbit
    >>> large = lowbit.Rule("*kernel", "nf4", where=lambda leaf: leaf.size >= 1 << 20)
    """

    pattern: str
    format: str | QuantizationConfig | None
    where: Callable[[jax.ShapeDtypeStruct], bool] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str):
            raise TypeError(f"The pattern of a rule is a string, not {self.pattern!r}.")
        if not isinstance(self.format, str | QuantizationConfig | None):
            raise TypeError(
                f"The rule {self.pattern!r} asks for {self.format!r}: pass the name of a format "
                f"({', '.join(FORMATS)}), a QuantizationConfig, or None to keep the leaf."
            )
        try:
            re.compile(self.expression)
        except re.error as error:
            raise ValueError(f"The pattern {self.pattern!r} is no regular expression: {error}.") from None
        _ = self.config

    @property
    def expression(self) -> str:
        """The pattern as a regular expression for the whole path."""
        return self.pattern[3:] if self.pattern.startswith("re:") else fnmatch.translate(self.pattern)

    @property
    def config(self) -> QuantizationConfig | None:
        return QuantizationConfig(self.format) if isinstance(self.format, str) else self.format

    @property
    def is_default(self) -> bool:
        """Whether it speaks of all leaves, and so only of those that are worth it."""
        return self.where is None and self.pattern in ("*", "**", "re:.*", "re:.+")

    def matches(self, path: str, leaf: Any) -> bool:
        """Whether the rule is for this leaf."""
        if re.fullmatch(self.expression, path) is None:
            return False
        return self.where is None or bool(self.where(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)))


Rules = str | QuantizationConfig | Mapping[str, str | QuantizationConfig | None] | Iterable[Rule]


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


def leaf_path(path: Sequence[Any]) -> str:
    """The path of a leaf as rules see it: `layers/0/mlp/kernel`."""
    # Flax NNX keeps each array in the `value` of a variable.
    if len(path) > 1 and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == "value":
        path = path[:-1]
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def plan_tree(
    params: Any,
    rules: Rules,
    fn: Callable[..., Any] | None,
    args: Sequence[Any],
    *,
    strict: bool,
    scales: Any = None,
    simulated: bool = False,
) -> tuple[Any, list[Any], list[tuple[int, str, "Plan", Any]], tuple[str, ...]]:
    """What the rules mean for a tree: its structure and leaves; place, path, plan and learned scale of each array.

    Last, the patterns that matched none. It depends on paths, shapes and the program alone. `simulated` as for `plan`.
    """
    found, structure = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_implicit)
    paths, leaves = [leaf_path(path) for path, _ in found], [leaf for _, leaf in found]
    arrays = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]
    uses = axes_by_program(fn, leaves, partial(jax.tree.unflatten, structure), tuple(args)) if fn else None
    wanted = [(paths[i], leaves[i], uses[i] if uses else None) for i in arrays]
    plans, unmatched = plan(rules, wanted, strict=strict, simulated=simulated)
    given = [None] * len(leaves) if scales is None else structure.flatten_up_to(scales)
    for i, planned in zip(arrays, plans, strict=True):
        if scales is not None and (given[i] is None) != (planned.config is None):
            raise ValueError(
                f"scales {'lacks' if given[i] is None else 'has'} {paths[i]}, which the rules "
                f"{'keep' if planned.config is None else 'quantize'}: make it by learned_scales with the same rules."
            )
    return structure, leaves, [(i, paths[i], p, given[i]) for i, p in zip(arrays, plans, strict=True)], unmatched


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to do with a leaf: the config to quantize it by, or None to keep it; and why.

    - `refused`: it is kept although a rule asked for more.
    - `unknown`: it is kept because the contracted axis is not known.
    """

    config: QuantizationConfig | None
    why: str
    refused: bool = False
    unknown: bool = False


def plan(
    rules: Rules, leaves: Sequence[tuple[str, Any, Found | None]], *, strict: bool, simulated: bool = False
) -> tuple[list[Plan], tuple[str, ...]]:
    """What the rules mean for each leaf, given with its path and its use; and the patterns that matched none.

    `simulated`: the caller makes dense leaves, so `simulate=True` in a config is accepted. Otherwise it raises.
    """
    ordered = ordered_rules(rules)
    for rule in ordered:
        if rule.config is not None and rule.config.simulate and not simulated:
            raise ValueError(
                f"The pattern {rule.pattern!r} has a config with simulate=True, which stores nothing. To "
                "quantize, pass simulate=False; to simulate, call straight_through_tree with the same config."
            )
    by_rule: dict[int, list[int]] = {}  # each rule's leaves
    for i, (path, leaf, _) in enumerate(leaves):
        chosen = next((r for r, rule in enumerate(ordered) if rule.matches(path, leaf)), None)
        if chosen is not None:
            by_rule.setdefault(chosen, []).append(i)
    unmatched = tuple(rule.pattern for r, rule in enumerate(ordered) if r not in by_rule)
    if strict and unmatched:
        raise ValueError(no_match(unmatched, [path for path, *_ in leaves]))
    plans = dict.fromkeys(range(len(leaves)), _kept("no rule matches"))
    for r, members in by_rule.items():
        plans |= _plans(ordered[r], {i: leaves[i] for i in members})
    refused = [f"{leaves[i][0]}: {plans[i].why}" for i in plans if plans[i].refused]
    if strict and refused:
        raise ValueError("Could not quantize as asked: " + "; ".join(refused) + ".")
    return list(plans.values()), unmatched


def no_match(patterns: Iterable[str], paths: Sequence[str]) -> str:
    """What to say of patterns that no leaf matches."""
    known = f"{', '.join(paths[:20])}{', ...' if len(paths) > 20 else ''}"
    return f"No leaf matches {', '.join(map(repr, patterns))} (or an earlier rule took it). The paths are {known}."


def row(path: str, before: Any, after: Any, plan: Plan, error: float | None) -> Row:
    """The row of the report for a leaf as it was and as it is now."""
    sizes = [int(x.nbytes) if is_implicit(x) else math.prod(x.shape) * x.dtype.itemsize for x in (before, after)]
    name, axis = (None, None) if plan.config is None else (str(plan.config.dtype), plan.config.axis)
    return Row(path, tuple(before.shape), str(before.dtype), name, axis, sizes[0], sizes[1], error, plan.why)


def _kept(why: str, *, refused: bool = False, unknown: bool = False) -> Plan:
    return Plan(None, why, refused, unknown)


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


def ordered_rules(rules: Rules) -> list[Rule]:
    """Rules however given, as a list."""
    if isinstance(rules, str | QuantizationConfig):
        rules = {"*": rules}
    if isinstance(rules, Mapping):
        return [Rule(pattern, format) for pattern, format in dict[Any, Any](rules).items()]
    ordered = list(rules)
    for rule in ordered:
        if not isinstance(rule, Rule):
            raise TypeError(f"Rules are a dict of patterns and formats, or lowbit.Rule's; {rule!r} is neither.")
    return ordered


def _plans(rule: Rule, members: Mapping[int, tuple[str, Any, Found | None]]) -> dict[int, Plan]:
    """What a rule means for the leaves it matches."""
    config = rule.config
    if config is None:
        return {i: _kept(f"the rule {rule.pattern!r}") for i in members}
    plans: dict[int, Plan] = {}
    seen: dict[int, Found] = {}
    for i, (path, leaf, used) in members.items():
        if isinstance(leaf, QuantizedArray):
            plans[i] = _kept(f"quantized already, as {type(leaf).__name__}", refused=not rule.is_default)
        elif isinstance(leaf, LoraArray):
            plans[i] = _kept("it has an adapter", refused=not rule.is_default)
        elif is_implicit(leaf):
            plans[i] = _kept(f"implicit already, as {type(leaf).__name__}", refused=not rule.is_default)
        elif not jnp.issubdtype(leaf.dtype, jnp.floating):
            plans[i] = _kept(f"its dtype is {leaf.dtype}", refused=not rule.is_default)
        else:
            named = axes_by_name(path, leaf.shape)
            by_name = used is None or (not used.told and named.axes is not None)
            # A program may act on a norm as it likes, and is not asked about a vector.
            by_name |= named.vector and (len(leaf.shape) < 2 or (used is not None and used.axes is None))
            seen[i] = named if used is None or by_name else used
    vectors_alone = all(found.vector for found in seen.values())
    for i, found in seen.items():
        shape = members[i][1].shape
        no_weight = found.vector or not found.multiplied
        if config.axis is not None and not (no_weight and rule.is_default):
            plans[i] = Plan(config, "rule")
        elif found.vector and (rule.is_default or not vectors_alone or not shape):
            plans[i] = _kept(found.how)
        elif found.vector:
            plans[i] = Plan(dataclasses.replace(config, axis=-1), f"rule: {rule.pattern}")
        elif rule.is_default and math.prod(shape) < SMALL:
            plans[i] = _kept(f"fewer than {SMALL:,} elements")
        elif found.axes is None:
            plans[i] = _kept(found.how, refused=found.multiplied or not rule.is_default, unknown=found.multiplied)
        else:
            one = config.format.blocked or config.block_size is not None
            axis = found.axes[-1] if one or len(found.axes) == 1 else found.axes
            plans[i] = Plan(dataclasses.replace(config, axis=axis), found.how)
    return plans


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Errors say which leaf they speak of."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise type(error)(f"{path}: {error}") from error


def quantized(path: str, leaf: Any, config: QuantizationConfig, scale: Any = None) -> tuple[Any, float | None]:
    """A leaf in its format, and the error that makes where there are numbers to compare."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.eval_shape(partial(quantize, config=config), leaf), None
    with naming(path):
        stored = quantize(leaf, config, scale=scale)
    traced = any(isinstance(part, Tracer) for part in jax.tree.leaves(stored))
    return stored, None if traced else relative_error(*map(float, _squares(stored, leaf)))


_squares = jax.jit(lambda stored, array: [jnp.sum(rows) for rows in squares(stored, array)])


def relative_error(lost: float, size: float) -> float:
    """The error of a row of the report, from the sums of `squares`."""
    return math.sqrt(lost / size) if size > 0 else math.sqrt(lost)


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


def is_quantized(x: Any) -> bool:
    """Whether `x` is a quantized array as a whole: the `is_leaf` of functions over trees of parameters.

    Without it `jax.tree.map` calls its function on the codes and on the scales, each by itself.

    >>> import jax, jax.numpy as jnp, lowbit
    >>> params = {"w": lowbit.quantize(jnp.ones((64, 8))), "b": jnp.zeros(8)}
    >>> sum(leaf.size for leaf in jax.tree.leaves(params, is_leaf=lowbit.is_quantized))
    520
    """
    return isinstance(x, QuantizedArray)


def tree_map(fn: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """`jax.tree.map` with quantized arrays for leaves: `fn` gets each array as a whole, not its codes and its scales.

    Adapters are not leaves: `fn` gets the base of a `LoraArray` and each of its factors.

    >>> import jax.numpy as jnp, lowbit
    >>> params = {"w": lowbit.quantize(jnp.ones((64, 8))), "b": jnp.ones(8)}
    >>> lowbit.tree_map(lambda a: (a * 2)[0], params)["w"].materialize()[:2]
    Array([2., 2.], dtype=float32)
    >>> lowbit.tree_map(lambda a: a.astype(jnp.bfloat16), params)["w"].dtype
    dtype(bfloat16)
    """
    return jax.tree.map(fn, tree, *rest, is_leaf=lambda x: is_quantized(x) or (is_leaf is not None and is_leaf(x)))


def is_frozen(x: Any) -> bool:
    """Whether `x` cannot be trained: a quantized array as a whole, or an array without a derivative.

    For `is_leaf` too: containers are not frozen, what is in them may be. Of all that could be trained, `trainable` says
    what is.

    >>> import jax, jax.numpy as jnp, lowbit
    >>> params = {"w": lowbit.quantize(jnp.ones((64, 8))), "b": jnp.zeros(8), "step": jnp.int32(0)}
    >>> jax.tree.map(lowbit.is_frozen, params, is_leaf=lowbit.is_frozen)  # an optax mask, but for a `not`
    {'b': False, 'step': True, 'w': True}
    """
    return isinstance(x, QuantizedArray) or (hasattr(x, "dtype") and not jnp.issubdtype(x.dtype, jnp.inexact))


def trainable(tree: Any, train: str | Iterable[str] | None = None) -> Any:
    """Which leaves are trained: a tree of True and False, as a mask for optax or a filter for Equinox.

    - Where there are adapters (`lora`), they alone are trained. Otherwise all arrays of floating-point numbers are.
    - `train`: patterns, as in a `Rule`, of the leaves to train instead. Adapters are trained in any case.

    One False stands for all parts of a quantized array.

    >>> import jax, jax.numpy as jnp, lowbit
    >>> params = {"w": lowbit.quantize(jnp.ones((64, 32))), "b": jnp.zeros(32)}
    >>> lowbit.trainable(params)
    {'b': True, 'w': False}
    >>> params = lowbit.lora(params, "w", key=jax.random.key(0))
    >>> lowbit.trainable(params)["b"], lowbit.trainable(params, train="b")["b"]
    (False, True)
    """
    patterns = None if train is None else [Rule(p, None) for p in ([train] if isinstance(train, str) else train)]
    found, structure = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda x: is_frozen(x) or isinstance(x, LoraArray)
    )
    adapted = any(isinstance(leaf, LoraArray) for _, leaf in found)
    used: set[str] = set()

    def chosen(path: str, leaf: Any) -> Any:
        if isinstance(leaf, LoraArray):
            return leaf.replace(base=False, a=True, b=True)
        if patterns is None:
            return hasattr(leaf, "dtype") and not is_frozen(leaf) and not adapted
        matching = {rule.pattern for rule in patterns if hasattr(leaf, "dtype") and rule.matches(path, leaf)}
        used.update(matching)
        if matching and is_frozen(leaf):
            kind = type(leaf).__name__ if isinstance(leaf, QuantizedArray) else f"an array of {leaf.dtype}"
            raise ValueError(f"train={sorted(matching)[0]!r} matches {path}, which is {kind} and cannot be trained.")
        return bool(matching)

    mask = [chosen(leaf_path(path), leaf) for path, leaf in found]
    unused = [rule.pattern for rule in patterns or () if rule.pattern not in used]
    if unused:
        raise ValueError(no_match(unused, [leaf_path(path) for path, _ in found]))
    return jax.tree.unflatten(structure, mask)


def partition(tree: Any, train: str | Iterable[str] | None = None) -> tuple[Any, Any]:
    """The trainable and the frozen leaves, each in a tree of the same structure with None in the other's places.

    Trainable are the adapters, where `lora` has put some, and else all arrays of floating-point numbers; `train` has
    patterns for others (see `trainable`). The rest is frozen: quantized arrays, integers, and whatever a model holds
    beside its arrays. `jax.grad` and optimizers see the trainable tree only, so no step changes a stored bit or scale.

    >>> import jax, jax.numpy as jnp, lowbit
    >>> params = {"w": lowbit.quantize(jnp.ones((64, 8))), "b": jnp.zeros(8)}
    >>> trainable, frozen = lowbit.partition(params)
    >>> loss = lambda trainable, x: (x @ (p := lowbit.combine(trainable, frozen))["w"] + p["b"]).sum()
    >>> jax.grad(loss)(trainable, jnp.ones((2, 64)))
    {'b': Array([2., 2., 2., 2., 2., 2., 2., 2.], dtype=float32), 'w': None}
    """
    mask = trainable(tree, train)
    return (
        jax.tree.map(lambda chosen, leaf: leaf if chosen else None, mask, tree),
        jax.tree.map(lambda chosen, leaf: None if chosen else leaf, mask, tree),
    )


def combine(trainable: Any, frozen: Any) -> Any:
    """The tree that `partition` took apart; the trainable part may have changed in between.

    >>> import jax.numpy as jnp, lowbit
    >>> params = {"w": lowbit.quantize(jnp.ones((64, 8))), "b": jnp.zeros(8)}
    >>> lowbit.combine(*lowbit.partition(params))["w"] is params["w"]
    True
    """

    def choose(path: Any, t: Any, f: Any) -> Any:
        if t is not None and f is not None:
            name = jax.tree_util.keystr(path)
            raise ValueError(
                f"combine: {name or 'the tree'} is in both trees; each leaf belongs to one, None to the other."
            )
        return f if t is None else t

    return jax.tree_util.tree_map_with_path(choose, trainable, frozen, is_leaf=lambda x: x is None or is_frozen(x))
