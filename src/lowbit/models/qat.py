"""Quantization-aware training (QAT): train with quantized weights in the forward pass."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from lowbit.config import quantize, straight_through

from .patterns import Rules, naming, no_match
from .plan import plan_tree

T = TypeVar("T")


def straight_through_tree(
    params: T,
    rules: Rules = "q4",
    *,
    fn: Callable[..., Any] | None = None,
    args: Sequence[Any] = (),
    strict: bool = False,
    amount: Any = 1,
    clip: float | None = None,
    scales: Any = None,
) -> T:
    """The values of `quantize_tree(params, rules, ...)` as dense arrays, with straight-through gradients.

    Call it inside the loss, and optimize the parameters that go in. After training, `quantize_tree` with the same
    arguments gives exactly the values that the model was trained with.

    - `rules`, `fn`, `args`: as for `quantize_tree`. The plan is made from paths and shapes when this is traced.
    - `strict`: as for `quantize_tree`. There is no report: without `strict`, a pattern that matches no leaf and a
      leaf that cannot be quantized as its pattern asks give a `UserWarning`.
    - `amount`, `clip`: as for `straight_through`; `amount=step >= 1000` is a warm-up in full precision.
    - `scales`: the tree from `learned_scales`, trained together with the parameters.

    >>> import jax, jax.numpy as jnp, lowbit
    >>> params, x = {"up": {"kernel": jnp.linspace(-1, 1, 64 * 32).reshape(64, 32)}}, jnp.ones((2, 64))
    >>> def loss(params, x):
    ...     return jnp.mean((x @ lowbit.straight_through_tree(params, "ternary")["up"]["kernel"] - 1) ** 2)
    >>> grads = jax.jit(jax.grad(loss))(params, x)
    >>> trained = jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)
    >>> exported, _ = lowbit.quantize_tree(trained, "ternary")
    >>> simulated = lowbit.straight_through_tree(trained, "ternary")
    >>> bool((exported["up"]["kernel"].materialize() == simulated["up"]["kernel"]).all())
    True
    """
    structure, leaves, planned, unmatched = plan_tree(
        params, rules, fn, args, strict=strict, scales=scales, simulated=True
    )
    refused = [f"{leaf.path}: {leaf.plan.why}." for leaf in planned if leaf.plan.refused]
    if unmatched or refused:
        said = [no_match(unmatched, [leaf.path for leaf in planned])] if unmatched else []
        warnings.warn(
            f"straight_through_tree trains weights in full precision that rules ask to quantize. "
            f"{' '.join([*said, *refused])} Pass strict=True to raise an error instead.",
            stacklevel=2,
        )
    for leaf in planned:
        if leaf.plan.config is not None:
            with naming(leaf.path):
                leaves[leaf.place] = straight_through(
                    leaves[leaf.place], leaf.plan.config, amount=amount, clip=clip, scale=leaf.scale
                )
    return jax.tree.unflatten(structure, leaves)


def learned_scales(
    params: Any,
    rules: Rules = "q4",
    *,
    fn: Callable[..., Any] | None = None,
    args: Sequence[Any] = (),
    strict: bool = False,
) -> Any:
    """The scales of the leaves that `rules` quantize, to be trained with the parameters; None for all other leaves.

    They start as those that `quantize_tree` would store. Pass them to `straight_through_tree(..., scales=scales)` while
    training and to `quantize_tree(..., scales=scales)` afterwards. A scale must stay positive: the weights of a
    negative one become NaN. Those of q2 to q4 and int2 to int6 may be negative, and must not become 0. The other
    arguments are those of `quantize_tree`.

    >>> import jax, jax.numpy as jnp, lowbit
    >>> params = {"kernel": jnp.linspace(-1, 1, 64 * 32).reshape(64, 32), "bias": jnp.zeros(32)}
    >>> scales = lowbit.learned_scales(params, "ternary")
    >>> jax.tree.map(jnp.shape, scales)
    {'bias': None, 'kernel': (1, 32)}
    """
    structure, leaves, planned, _ = plan_tree(params, rules, fn, args, strict=strict, simulated=True)
    found: list[Any] = [None] * len(leaves)
    for leaf in planned:
        if leaf.plan.config is not None:
            array, config = leaves[leaf.place], dataclasses.replace(leaf.plan.config, simulate=False)
            with naming(leaf.path):
                scale = quantize(array, config).scale_values()
                # This raises for a block of zeros and for formats that do not accept scales.
                found[leaf.place] = quantize(array, config, scale=scale).scale_values()
    return jax.tree.unflatten(structure, found)
