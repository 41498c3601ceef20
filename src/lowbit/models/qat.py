"""Training through quantization: a model that is trained as what it will read as when it is stored."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from lowbit.config import quantize, straight_through

from .patterns import Rules, naming
from .plan import plan_tree

T = TypeVar("T")


def straight_through_tree(
    params: T,
    rules: Rules = "nf4",
    *,
    fn: Callable[..., Any] | None = None,
    args: Sequence[Any] = (),
    strict: bool = True,
    amount: Any = 1,
    clip: float | None = None,
    scales: Any = None,
) -> T:
    """The parameters as they read after `quantize_tree(params, rules, ...)`, with straight-through gradients.

    Call it inside of the loss, and optimize the parameters that go in. After training, `quantize_tree` with the same
    arguments gives the arrays that the model was trained with, to the bit.

    - `rules`, `fn`, `args`: as for `quantize_tree`. What to do is found from paths and shapes, when it is traced.
    - `strict`: as there, but here it is the default: there is no report that would tell of a rule without a leaf.
    - `amount`, `clip`: as for `straight_through`; a warm-up in full precision is `amount=step >= 1000`.
    - `scales`: the tree of `learned_scales`, trained beside the parameters.

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
    structure, leaves, planned_leaves, _ = plan_tree(
        params, rules, fn, args, strict=strict, scales=scales, simulated=True
    )
    for i, path, planned, scale in planned_leaves:
        if planned.config is not None:
            with naming(path):
                leaves[i] = straight_through(leaves[i], planned.config, amount=amount, clip=clip, scale=scale)
    return jax.tree.unflatten(structure, leaves)


def learned_scales(
    params: Any, rules: Rules = "nf4", *, fn: Callable[..., Any] | None = None, args: Sequence[Any] = ()
) -> Any:
    """The scales of the leaves that the rules choose, to be trained beside the parameters; None for all other leaves.

    They begin as those that `quantize_tree` would store, and are passed to `straight_through_tree(..., scales=scales)`
    in training and to `quantize_tree(..., scales=scales)` after it. A scale must stay positive: where a step makes it
    negative, the weights read as NaN.

    >>> import jax, jax.numpy as jnp, lowbit
    >>> params = {"kernel": jnp.linspace(-1, 1, 64 * 32).reshape(64, 32), "bias": jnp.zeros(32)}
    >>> scales = lowbit.learned_scales(params, "ternary")
    >>> jax.tree.map(jnp.shape, scales)
    {'bias': None, 'kernel': (1, 32)}
    """
    structure, leaves, planned_leaves, _ = plan_tree(params, rules, fn, args, strict=True, simulated=True)
    found: list[Any] = [None] * len(leaves)
    for i, path, planned, _ in planned_leaves:
        if planned.config is not None:
            config = dataclasses.replace(planned.config, simulate=False)
            with naming(path):
                scale = quantize(leaves[i], config).scale_values()
                # By itself, so that what cannot work raises here: a slice of zeros, a format that finds its own scales.
                found[i] = quantize(leaves[i], config, scale=scale).scale_values()
    return jax.tree.unflatten(structure, found)
