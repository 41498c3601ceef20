"""Quantization-aware training (QAT): train with quantized weights in the forward pass."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from lowbit.config import quantize, straight_through
from lowbit.formats import QuantizedArray
from lowbit.formats.blocks import spread

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
    - `scales`: the tree from `learned_scales`, trained together with the parameters. The scales of a leaf that is
      quantized already are trained alone, and its codes stay; `amount` and `clip` do not apply to it.

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
    refused = [f"{leaf.path}: {leaf.plan.why}." for leaf in planned if leaf.plan.refused and leaf.scale is None]
    if unmatched or refused:
        said = [no_match(unmatched, [leaf.path for leaf in planned])] if unmatched else []
        warnings.warn(
            f"straight_through_tree trains weights in full precision that rules ask to quantize. "
            f"{' '.join([*said, *refused])} Pass strict=True to raise an error instead.",
            stacklevel=2,
        )
    for leaf in planned:
        with naming(leaf.path):
            if leaf.plan.config is not None:
                leaves[leaf.place] = straight_through(
                    leaves[leaf.place], leaf.plan.config, amount=amount, clip=clip, scale=leaf.scale
                )
            elif leaf.scale is not None:
                leaves[leaf.place] = _with_gradient(leaves[leaf.place], leaf.scale)
    return jax.tree.unflatten(structure, leaves)


def _with_gradient(array: QuantizedArray, scale: jax.Array) -> jax.Array:
    """The values of an array with other scales, and with the gradient of these."""
    value = array.with_scales(lax.stop_gradient(scale)).materialize()
    levels = array.plain().without_offsets().replace(scales=jnp.ones_like(scale)).decode()
    change = levels * spread(scale - lax.stop_gradient(scale), array.spans, levels.shape)  # 0
    return value + array.logical_view(change).astype(value.dtype)


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

    The scales of leaves that are quantized already are included: trained alone, with frozen codes, they make up for
    errors of the whole model, for instance after calibration.

    >>> import jax, jax.numpy as jnp, lowbit
    >>> params = {"kernel": jnp.linspace(-1, 1, 64 * 32).reshape(64, 32), "bias": jnp.zeros(32)}
    >>> scales = lowbit.learned_scales(params, "ternary")
    >>> jax.tree.map(jnp.shape, scales)
    {'bias': None, 'kernel': (1, 32)}
    """
    structure, leaves, planned, _ = plan_tree(params, rules, fn, args, strict=strict, simulated=True)
    found: list[Any] = [None] * len(leaves)
    for leaf in planned:
        if leaf.plan.stored:
            with naming(leaf.path):
                scale = leaves[leaf.place].scale_values()
                leaves[leaf.place].with_scales(scale)  # raises for formats whose scales cannot be changed
                found[leaf.place] = scale
        if leaf.plan.config is not None:
            array, config = leaves[leaf.place], dataclasses.replace(leaf.plan.config, simulate=False)
            with naming(leaf.path):
                scale = quantize(array, config).scale_values()
                # This raises for a block of zeros and for formats that do not accept scales.
                found[leaf.place] = quantize(array, config, scale=scale).scale_values()
    return jax.tree.unflatten(structure, found)
