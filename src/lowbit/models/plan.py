"""What `quantize_tree` will do to each leaf, determined from paths, shapes and the program only."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from lowbit.adapters.array import LoraArray
from lowbit.config import QuantizationConfig
from lowbit.formats import QuantizedArray
from lowbit.runtime import is_implicit

from .axes import Found, axes_by_name, axes_by_program
from .partition import is_quantized
from .patterns import Rule, Rules, first_matches, is_array, leaf_path, no_match, ordered_rules

# Smaller arrays are kept dense, unless a pattern names them.
SMALL = 1024


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `quantize_tree` will do to a leaf: the config to quantize it with, or None to keep it; and why.

    - `refused`: it is kept although a pattern asked for a format.
    - `unknown`: it is kept because its contracted axis is not known.
    - `stored`: it is quantized already. It keeps its codes, and may get learned scales.
    """

    config: QuantizationConfig | None
    why: str
    refused: bool = False
    unknown: bool = False
    stored: bool = False


@dataclasses.dataclass(frozen=True)
class PlannedLeaf:
    """An array of a tree: its place among the leaves, its path, its plan, and its learned scale if there is one."""

    place: int
    path: str
    plan: Plan
    scale: Any = None


def plan_tree(
    params: Any,
    rules: Rules,
    fn: Callable[..., Any] | None,
    args: Sequence[Any],
    *,
    strict: bool,
    scales: Any = None,
    simulated: bool = False,
) -> tuple[Any, list[Any], list[PlannedLeaf], tuple[str, ...]]:
    """Plan a tree: its structure, its leaves, the plan of each array, and the patterns that matched no leaf.

    `simulated` as for `plan`.
    """
    found, structure = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_implicit)
    paths, leaves = [leaf_path(path) for path, _ in found], [leaf for _, leaf in found]
    arrays = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
    uses = axes_by_program(fn, leaves, partial(jax.tree.unflatten, structure), tuple(args)) if fn else None
    wanted = [(paths[i], leaves[i], uses[i] if uses else None) for i in arrays]
    plans, unmatched = plan(rules, wanted, strict=strict, simulated=simulated)
    given = [None] * len(leaves) if scales is None else structure.flatten_up_to(scales)
    planned = [PlannedLeaf(i, paths[i], plan, given[i]) for i, plan in zip(arrays, plans, strict=True)]
    for leaf in planned if scales is not None else ():
        learns = leaf.plan.config is not None or leaf.plan.stored
        if learns != (leaf.scale is not None):
            raise ValueError(
                f"scales {'lacks' if leaf.scale is None else 'has'} {leaf.path}, which the patterns "
                f"{'quantize' if learns else 'keep'}: "
                "create it with learned_scales and the same rules."
            )
    return structure, leaves, planned, unmatched


def plan(
    rules: Rules, leaves: Sequence[tuple[str, Any, Found | None]], *, strict: bool, simulated: bool = False
) -> tuple[list[Plan], tuple[str, ...]]:
    """Plan leaves, each given with its path and how it is used; also the patterns that matched no leaf.

    `simulated`: the caller makes dense leaves, so `simulate=True` in a config is accepted. Otherwise it raises.
    """
    ordered = ordered_rules(rules)
    for rule in ordered:
        if rule.config is not None and rule.config.simulate and not simulated:
            raise ValueError(
                f"The pattern {rule.pattern!r} has a config with simulate=True, which stores nothing. To "
                "quantize, pass simulate=False; to simulate, call straight_through_tree with the same config."
            )
    by_rule, unmatched = first_matches(ordered, [(path, leaf) for path, leaf, _ in leaves])
    if strict and unmatched:
        raise ValueError(no_match(unmatched, [path for path, *_ in leaves]))
    plans = dict.fromkeys(range(len(leaves)), _kept("no pattern matches"))
    for r, members in by_rule.items():
        plans |= _plans(ordered[r], {i: leaves[i] for i in members})
    if strict and (refused := [f"{leaves[i][0]}: {plan.why}" for i, plan in plans.items() if plan.refused]):
        raise ValueError(f"Could not quantize as asked: {'; '.join(refused)}.")
    return list(plans.values()), unmatched


def _kept(why: str, *, refused: bool = False, unknown: bool = False) -> Plan:
    return Plan(None, why, refused, unknown)


def _plans(rule: Rule, members: Mapping[int, tuple[str, Any, Found | None]]) -> dict[int, Plan]:
    """The plans of the leaves that a rule matches."""
    if rule.config is None:
        return {i: _kept(f"the pattern {rule.pattern!r}") for i in members}
    plans = {
        i: dataclasses.replace(_kept(reason, refused=not rule.is_default), stored=isinstance(leaf, QuantizedArray))
        for i, (_, leaf, _) in members.items()
        if (reason := _not_a_dense_weight(leaf))
    }
    uses = {i: _use(*member) for i, member in members.items() if i not in plans}
    vectors_alone = all(use.vector for use in uses.values())
    return plans | {i: _plan(rule, rule.config, members[i][1].shape, use, vectors_alone) for i, use in uses.items()}


def _not_a_dense_weight(leaf: Any) -> str | None:
    """Why a leaf cannot be quantized whatever its use: it is already stored in some form, or is not floating-point."""
    if is_quantized(leaf):
        return f"quantized already, as {type(leaf).__name__}"
    if isinstance(leaf, LoraArray):
        return "it has an adapter"
    if is_implicit(leaf):
        return f"implicit already, as {type(leaf).__name__}"
    return None if jnp.issubdtype(leaf.dtype, jnp.floating) else f"its dtype is {leaf.dtype}"


def _use(path: str, leaf: Any, used: Found | None) -> Found:
    """How a leaf is used: from the program if that shows it, otherwise from its name."""
    named = axes_by_name(path, leaf.shape)
    by_name = used is None or (not used.told and named.axes is not None)
    # A program may reshape or look up a norm in any way, so its name decides unless the program contracts the leaf; a
    # vector has no axis to choose.
    by_name |= named.vector and (len(leaf.shape) < 2 or (used is not None and not used.contracted))
    return named if used is None or by_name else used


def _plan(rule: Rule, config: QuantizationConfig, shape: Sequence[int], use: Found, vectors_alone: bool) -> Plan:
    """The plan of a floating-point leaf. A vector is quantized only by a pattern that matches nothing but vectors."""
    if config.axis is not None and not (rule.is_default and (use.vector or not use.multiplied)):
        return Plan(config, "the pattern's axis")
    if use.vector and (rule.is_default or not vectors_alone or not shape):
        return _kept(use.how)
    if use.vector:
        return Plan(dataclasses.replace(config, axis=-1), f"the pattern {rule.pattern!r}")
    if rule.is_default and math.prod(shape) < SMALL:
        return _kept(f"fewer than {SMALL:,} elements")
    if use.convolved and rule.is_default:
        return _kept(f"{use.how}: name it by a pattern to quantize it")
    if use.axes is None:
        return _kept(use.how, refused=use.multiplied or not rule.is_default, unknown=use.multiplied)
    one = config.format.blocked or config.block_size is not None
    axis = use.axes[-1] if one or len(use.axes) == 1 else tuple(sorted(use.axes))
    return Plan(dataclasses.replace(config, axis=axis), "fn: a convolution" if use.convolved else use.how)
