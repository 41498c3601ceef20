"""What `quantize_tree` will do to each leaf of a tree, found from paths, shapes and the program alone."""

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
from .patterns import Rule, Rules, leaf_path, no_match, ordered_rules

# Fewer elements are not worth it, unless a rule says so.
SMALL = 1024


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


def plan_tree(
    params: Any,
    rules: Rules,
    fn: Callable[..., Any] | None,
    args: Sequence[Any],
    *,
    strict: bool,
    scales: Any = None,
    simulated: bool = False,
) -> tuple[Any, list[Any], list[tuple[int, str, Plan, Any]], tuple[str, ...]]:
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


def _kept(why: str, *, refused: bool = False, unknown: bool = False) -> Plan:
    return Plan(None, why, refused, unknown)


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
