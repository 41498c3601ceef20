"""Adapters over the frozen weights of a whole model: add them by patterns over paths, and merge them."""

import math
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding

from lowbit.formats.blocks import is_table
from lowbit.models.axes import Found, axes_by_name, axes_by_program
from lowbit.models.partition import is_quantized
from lowbit.models.patterns import Rule, Rules, first_matches, is_array, leaf_path, no_match
from lowbit.models.plan import SMALL, plan
from lowbit.models.tree import quantized
from lowbit.runtime import is_implicit

from .array import LoraArray

T = TypeVar("T")


def lora(
    params: T,
    rules: str | Mapping[str, int | None] | Iterable[str | Rule],
    *,
    rank: int = 8,
    alpha: float | None = None,
    key: jax.Array,
    dtype: Any = jnp.float32,
    fn: Callable[..., Any] | None = None,
    args: Sequence[Any] = (),
) -> T:
    """Add low-rank adapters to weights of a model. Each becomes a `LoraArray`: `base + scale * (a @ b)`.

    - `rules`: a pattern over paths, several of them, or a dict from patterns to ranks, None for no adapter. `Rule`
      objects work too: a format of None means no adapter, any other format is ignored. The first pattern that matches
      a leaf decides. `"*"` means every weight of at least 1,024 elements that is multiplied: convolutions, tables that
      are added, and weights whose inputs are not known are left out, with a `UserWarning` that says why. Norms and
      biases never get an adapter.
    - `alpha`: `scale` is `alpha / rank`, or 1 if `alpha` is None.
    - `key`: random key for `a`, which is normal with variance 1 / in. `b` is zero, so the model starts unchanged. The
      values of a leaf depend on its path and not on which other leaves are adapted.
    - `dtype`: of `a` and `b`.
    - `fn`, `args`: a call of the model, `fn(params, *args)`, that tells which axes are inputs, as in `quantize_tree`.
      Without it the inputs are the axes along which a quantized base shares a scale, unless those are all of its axes;
      of a dense base the last axis but one, or the last by the name (see `quantize_tree`). A dense base with more axes,
      which may be layers, heads or a convolution window, needs `fn`.

    Bases may be quantized (QLoRA) or dense (LoRA). `partition` makes only the adapters trainable.

    >>> import jax, jax.numpy as jnp, lowbit
    >>> params = {"up": lowbit.quantize(jnp.ones((64, 256))), "norm": jnp.ones(64)}
    >>> params = lowbit.lora(params, "*", rank=4, key=jax.random.key(0))
    >>> params["up"].a.shape, params["up"].b.shape
    ((64, 4), (4, 256))
    >>> trainable, frozen = lowbit.partition(params)
    >>> [leaf.shape for leaf in jax.tree.leaves(trainable)]
    [(64, 4), (4, 256)]
    """
    ranks = _ranks(rules, rank)
    found, structure = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_implicit)
    paths, leaves = [leaf_path(path) for path, _ in found], [leaf for _, leaf in found]
    uses: Sequence[Found | None] = [None] * len(leaves)
    if fn is not None:
        types = [jax.ShapeDtypeStruct(x.shape, x.dtype) if is_array(x) else x for x in leaves]
        uses = axes_by_program(fn, types, partial(jax.tree.unflatten, structure), tuple(args))
    for i, (own_rank, axes) in _chosen(ranks, paths, leaves, uses).items():
        scale = 1.0 if alpha is None else alpha / own_rank
        own_key = jax.random.fold_in(key, zlib.crc32(paths[i].encode()))
        leaves[i] = _adapted(leaves[i], axes, own_rank, scale, own_key, dtype)
    return jax.tree.unflatten(structure, leaves)


def merge(params: T, rules: Rules | None = None) -> T:
    """Add each adapter to its base. The result is dense, in the dtype of the base.

    With `rules`, patterns as in `quantize_tree`, the merged weights that they match are quantized again, along the axis
    of the base. That rounds away changes smaller than a step of the format.

    >>> import jax, jax.numpy as jnp, lowbit
    >>> params = {"w": lowbit.quantize(jnp.ones((64, 32)), "int8"), "norm": jnp.ones(64)}
    >>> params = lowbit.lora(params, "w", key=jax.random.key(0))
    >>> type(lowbit.merge(params)["w"]) is type(params["norm"]), type(lowbit.merge(params, "int8")["w"]).__name__
    (True, 'Array8B')
    """
    found, structure = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_implicit)
    leaves = [leaf for _, leaf in found]
    adapted = {i: leaf_path(path) for i, (path, leaf) in enumerate(found) if isinstance(leaf, LoraArray)}
    bases = [leaves[i].base for i in adapted]
    for i in adapted:
        leaves[i] = leaves[i].materialize()
    if rules is not None:
        known = [Found(base.scale_axes, "base") if is_quantized(base) else None for base in bases]
        wanted = [(path, leaves[i], use) for (i, path), use in zip(adapted.items(), known, strict=True)]
        plans, _ = plan(rules, wanted, strict=True)
        for (i, path), planned in zip(adapted.items(), plans, strict=True):
            if planned.config is not None:
                leaves[i] = quantized(path, leaves[i], planned.config)[0]
    return jax.tree.unflatten(structure, leaves)


def _ranks(rules: Any, rank: int) -> list[tuple[Rule, int | None]]:
    """The patterns in order, each with its rank, or None for no adapter."""
    given = {rules: rank} if isinstance(rules, str) else rules
    if isinstance(given, Mapping):
        ordered = [(Rule(pattern, None), own) for pattern, own in given.items()]
    else:
        ordered = [
            (rule, rank if rule.format is not None else None) if isinstance(rule, Rule) else (Rule(rule, None), rank)
            for rule in given
        ]
    for rule, own in ordered:
        if own is not None and (type(own) is not int or own < 1):
            raise ValueError(f"The rank {own!r} of the pattern {rule.pattern!r} must be an integer >= 1, or None.")
    return ordered


class _Axes(NamedTuple):
    """How many leading axes of a weight are stacked layers, and how many axes after them are inputs."""

    layers: int
    inputs: int

    def most(self, shape: Sequence[int]) -> int:
        """The largest rank of an adapter."""
        end = self.layers + self.inputs
        return min(math.prod(shape[self.layers : end]), math.prod(shape[end:]))


def _chosen(
    ranks: Sequence[tuple[Rule, int | None]], paths: Sequence[str], leaves: Sequence[Any], uses: Sequence[Found | None]
) -> dict[int, tuple[int, _Axes]]:
    """The places of the leaves that get an adapter, each with its rank and axes."""
    by_rule, unmatched = first_matches([rule for rule, _ in ranks], list(zip(paths, leaves, strict=True)))
    if unmatched:
        raise ValueError(no_match(unmatched, paths))
    chosen: dict[int, tuple[int, _Axes]] = {}
    left_out: list[str] = []
    for r, members in by_rule.items():
        rule, rank = ranks[r]
        if rank is None:
            continue
        able = [i for i in members if _is_weight(paths[i], leaves[i], rule, uses[i])]
        found = {i: _axes_or_reason(paths[i], leaves[i], rank, rule, uses[i]) for i in able}
        if not any(isinstance(axes, _Axes) for axes in found.values()):
            raise ValueError(
                f"The pattern {rule.pattern!r} matches {', '.join(paths[i] for i in members[:20])}, but no leaf that "
                "can have an adapter: floating-point arrays with two or more axes that are not norms or biases."
                + "".join(f" {paths[i]}: {why}." for i, why in list(found.items())[:3])
            )
        chosen |= {i: (rank, axes) for i, axes in found.items() if isinstance(axes, _Axes)}
        left_out += [f"{paths[i]} ({why})" for i, why in found.items() if isinstance(why, str)]
    if left_out:
        shown = "; ".join(left_out[:5]) + "; ..." * (len(left_out) > 5)
        warnings.warn(f"lora adds no adapter to {len(left_out)} weights that '*' matches: {shown}.", stacklevel=3)
    return chosen


def _is_weight(path: str, leaf: Any, rule: Rule, use: Found | None) -> bool:
    """Whether a leaf is a weight that a pattern asks an adapter for."""
    if isinstance(leaf, LoraArray):
        raise ValueError(f"{path} has an adapter already: merge it first.")
    named = axes_by_name(path, leaf.shape).vector and not (use is not None and use.contracted)
    if not jnp.issubdtype(leaf.dtype, jnp.floating) or named or len(leaf.shape) < 2:
        return False
    return math.prod(leaf.shape) >= SMALL or not rule.is_default


def _axes_or_reason(path: str, base: Any, rank: int, rule: Rule, use: Found | None) -> _Axes | str:
    """The axes of a weight, or why the pattern `*` leaves it out; any other pattern raises."""
    axes = _layers_and_inputs(path, base, use)
    if axes is None:
        why = use.how if use is not None else f"{len(base.shape)} axes: pass fn= to tell layers, inputs and heads apart"
    elif rank > (most := axes.most(base.shape)):
        why = f"rank={rank} must be at most min(in, out) = {most} for {path} of shape {tuple(base.shape)}"
    # A leaf that is only added, such as a position embedding, would be made dense at every step.
    elif rule.is_default and use is not None and not use.multiplied:
        why = use.how
    else:
        return axes
    if not rule.is_default:
        raise ValueError(f"{why}." if path in why else f"{path}: {why}.")
    return why


def _adapted(base: Any, axes: _Axes, rank: int, scale: float, key: jax.Array, dtype: Any) -> LoraArray:
    layers, inputs = axes
    stack, ins, outs = base.shape[:layers], base.shape[layers : layers + inputs], base.shape[layers + inputs :]
    a = jax.random.normal(key, (*stack, *ins, rank), dtype) / math.prod(ins) ** 0.5
    b = jnp.zeros((*stack, rank, *outs), dtype)
    adapted = LoraArray(base, a.astype(dtype), b, scale, inputs)
    sharding = None if isinstance(a, Tracer) else getattr(base, "sharding", None)
    if isinstance(sharding, NamedSharding):
        where = adapted.component_shardings(sharding)
        return adapted.replace(a=jax.device_put(a, where.a), b=jax.device_put(b, where.b))
    return adapted


def _layers_and_inputs(path: str, base: Any, use: Found | None) -> _Axes | None:
    """The axes of a weight by the program, by the scales of the base, or by its name; None if they are not known."""
    ndim = len(base.shape)
    if use is not None and use.looked_up and is_table(base.shape):  # (vocabulary, layers, features)
        return _Axes(0, 1)
    known = [
        (*use.axes, *use.window) if use is not None and use.axes else None,
        base.scale_axes if is_quantized(base) else None,
    ]
    axes = next((axes for axes in (*known, axes_by_name(path, base.shape).axes) if axes is not None), None)
    if axes is None and ndim > 2:
        return None
    first, last = (-2, -2) if axes is None else (min(axes), max(axes))
    if last == -1:  # (*stack, *out, *in): the factors of the transpose work as well
        last, first = first - 1, _first_output(use, ndim, first - 1)
    if first < -ndim:  # one scale for all axes does not distinguish inputs from outputs
        first = last = -2
    return _Axes(max(ndim + first, 0), last - max(first, -ndim) + 1)


def _first_output(use: Found | None, ndim: int, last: int) -> int:
    """The first axis of the outputs, counted from the end, of a weight (*stack, *out, *in); `last` is their last axis.

    What the program does not use as a stack is an output, such as the gate and up projections in one array, and may be
    transposed or merged with the others. Without a program, all axes but one are taken for a stack.
    """
    if use is None or not use.contracted or use.axes is None:
        return last
    return min(last, max(use.stacked, default=-ndim - 1) + 1)
