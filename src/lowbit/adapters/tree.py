"""Adapters over the frozen weights of a whole model: put on by rules over paths, and merged back."""

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding

from lowbit.formats import QuantizedArray
from lowbit.models.axes import Found, axes_by_name, axes_by_program
from lowbit.models.patterns import Rule, Rules, leaf_path, no_match
from lowbit.models.plan import SMALL, plan
from lowbit.models.tree import quantized
from lowbit.runtime import is_implicit

from . import rules as rules  # registers how primitives act on the arrays made here
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
    """The parameters with low-rank adapters over some weights, each then a `LoraArray`: `base + scale * (a @ b)`.

    - `rules`: a pattern over paths, several of them, or a dict of patterns and ranks, None to leave a weight alone.
      `Rule`s too: of them the pattern and the test count, and None as the format leaves a weight alone. The first that
      matches decides. `"*"` means every weight that is worth it. Norms and biases never have an adapter.
    - `alpha`: `scale` is `alpha / rank`, and 1 without it.
    - `key`: for `a`, which is normal with a variance of one over the number of inputs. `b` is zero, so that the model
      is still what it was. The numbers of a leaf depend on its path, and not on which others are chosen.
    - `fn`, `args`: a program `fn(params, *args)` that tells which axes are the inputs, as in `quantize_tree`. Without
      it the axes along which a quantized base shares a scale are the inputs, unless that is all of its axes. Of other
      arrays with more than two axes, all before the last two count layers.

    Bases may be quantized, which is QLoRA, or dense. `partition` makes the adapters trainable and nothing else.

    >>> import jax, jax.numpy as jnp, lowbit
    >>> params = {"up": lowbit.quantize(jnp.ones((64, 256))), "norm": jnp.ones(64)}
    >>> params = lowbit.lora(params, "*", rank=4, key=jax.random.key(0))
    >>> params["up"].a.shape, params["up"].b.shape
    ((64, 4), (4, 256))
    >>> trainable, frozen = lowbit.partition(params)
    >>> [leaf.shape for leaf in jax.tree.leaves(trainable)]
    [(64, 4), (4, 256)]
    """
    ordered = _ranks(rules, rank)
    found, structure = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_implicit)
    paths, leaves = [leaf_path(path) for path, _ in found], [leaf for _, leaf in found]
    by_rule: dict[int, list[int]] = {}
    for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            chosen = next((r for r, (rule, _) in enumerate(ordered) if rule.matches(path, leaf)), None)
            if chosen is not None:
                by_rule.setdefault(chosen, []).append(i)
    unmatched = [rule.pattern for r, (rule, _) in enumerate(ordered) if r not in by_rule]
    if unmatched:
        raise ValueError(no_match(unmatched, paths))
    uses = None
    if fn is not None:
        types = [jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "dtype") else x for x in leaves]
        uses = axes_by_program(fn, types, partial(jax.tree.unflatten, structure), tuple(args))
    for r, members in by_rule.items():
        rule, own_rank = ordered[r]
        if own_rank is None:
            continue
        able = [i for i in members if _takes_adapter(paths[i], leaves[i], rule, uses[i] if uses else None)]
        if not able:
            raise ValueError(
                f"{rule.pattern!r} matches {', '.join(paths[i] for i in members[:20])}, but no weight that could have "
                "an adapter: those are arrays of floating-point numbers with two axes or more, and no norms or biases."
            )
        for i in able:
            where = jax.random.fold_in(key, zlib.crc32(paths[i].encode()))
            scale = 1.0 if alpha is None else alpha / own_rank
            leaves[i] = _adapted(paths[i], leaves[i], own_rank, scale, where, dtype, uses[i] if uses else None)
    return jax.tree.unflatten(structure, leaves)


def merge(params: T, rules: Rules | None = None) -> T:
    """The parameters with each adapter added to its base: plain arrays, dense and of the dtype of the base.

    Nothing is quantized unless `rules` say so, as in `quantize_tree`: those of the merged weights that they match are
    then quantized anew, along the axis of the base. That rounds away what is smaller than the steps of the format.

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
        known = [Found(base.axis, "base") if isinstance(base, QuantizedArray) else None for base in bases]
        wanted = [(path, leaves[i], use) for (i, path), use in zip(adapted.items(), known, strict=True)]
        plans, _ = plan(rules, wanted, strict=True)
        for (i, path), planned in zip(adapted.items(), plans, strict=True):
            if planned.config is not None:
                leaves[i] = quantized(path, leaves[i], planned.config)[0]
    return jax.tree.unflatten(structure, leaves)


def _ranks(rules: Any, rank: int) -> list[tuple[Rule, int | None]]:
    """The rules in order, each with its rank or None."""
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
            raise ValueError(f"{rule.pattern!r} asks for the rank {own!r}: a rank is a number of at least 1, or None.")
    return ordered


def _takes_adapter(path: str, leaf: Any, rule: Rule, use: Found | None) -> bool:
    if isinstance(leaf, LoraArray):
        raise ValueError(f"{path} has an adapter already: merge it first.")
    if not jnp.issubdtype(leaf.dtype, jnp.floating) or axes_by_name(path, leaf.shape).vector:
        return False
    # What is added, as the embedding of positions is, would be made dense at every step.
    worth = math.prod(leaf.shape) >= SMALL and (use is None or use.multiplied)
    return worth or not rule.is_default


def _adapted(path: str, base: Any, rank: int, scale: float, key: jax.Array, dtype: Any, use: Found | None) -> LoraArray:
    ndim = len(base.shape)
    axes = use.axes if use is not None else base.axis if isinstance(base, QuantizedArray) else None
    first, last = (-2, -2) if axes is None else (min(axes), max(axes))
    if last == -1:  # (out, in): the factors of the transpose are those of the array
        first = last = first - 1
    if first < -ndim:  # one scale for all axes does not tell inputs from outputs
        first = last = -2
    layers, inputs = max(ndim + first, 0), last - max(first, -ndim) + 1
    ins, outs = base.shape[layers : layers + inputs], base.shape[layers + inputs :]
    if rank > min(math.prod(ins), math.prod(outs)):
        raise ValueError(f"{path} of shape {tuple(base.shape)} cannot have an adapter of rank {rank}: that is no less.")
    stack = base.shape[:layers]
    a = jax.random.normal(key, (*stack, *ins, rank), dtype) / math.prod(ins) ** 0.5
    b = jnp.zeros((*stack, rank, *outs), dtype)
    adapted = LoraArray(base, a.astype(dtype), b, scale, inputs)
    sharding = None if isinstance(a, Tracer) else getattr(base, "sharding", None)
    if isinstance(sharding, NamedSharding):
        where = adapted.part_shardings(sharding)
        return adapted.replace(a=jax.device_put(a, where.a), b=jax.device_put(b, where.b))
    return adapted
