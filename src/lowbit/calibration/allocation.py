"""allocate(): choose the format of each weight so that a model of a given size changes least."""

import dataclasses
import glob
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lowbit.config import QuantizationConfig, quantize
from lowbit.formats import QuantizedArray
from lowbit.formats.gptq import uncompensated
from lowbit.formats.moments import Moments
from lowbit.models.patterns import naming
from lowbit.models.plan import plan_tree
from lowbit.models.report import array_bytes

from .collect import arguments, byte_count, calibrate
from .statistics import Calibration


def allocate(
    params: Any,
    *,
    fn: Callable[..., Any],
    batches: Iterable[Any],
    bits: float | None = None,
    size: str | int | None = None,
    formats: Sequence[str | QuantizationConfig] = ("q2", "q3", "q4", "int8"),
    loss: Callable[..., Any] | None = None,
    calibration: Calibration | None = None,
) -> dict[str, QuantizationConfig | None]:
    """Choose a format for each weight: rules for `quantize_tree`, from paths to configs, which can be edited.

    - `fn`, `batches`, `loss`: as for `calibrate`. Without a loss, squared changes of the results count.
    - `bits`: the mean number of stored bits of the weights that are quantized, scales included; or `size`, the bytes of
      the whole model, such as "60MB". One of the two.
    - `formats`: those to choose from.
    - `calibration`: from `calibrate(..., loss=)`, instead of diagonals collected from the batches. Second moments
      predict what GPTQ leaves of the error of each weight, if it is quantized with `calibration=` too.

    The change of the loss is estimated as a sum over weights: squared errors of the format, weighted by the squares of
    inputs and gradients. Weights without such a statistic, for instance those of convolutions, get the format with the
    least error.

    >>> import jax, jax.numpy as jnp, lowbit
    >>> params = {"up": jax.random.normal(jax.random.key(0), (64, 128)), "down": jnp.ones((128, 64))}
    >>> model = lambda params, x: jax.nn.gelu(x @ params["up"]) @ params["down"]
    >>> batches = jax.random.normal(jax.random.key(1), (2, 10, 64))
    >>> rules = lowbit.allocate(params, fn=model, batches=batches, bits=5.5, formats=("q2", "int8"))
    >>> {path: str(config.dtype) for path, config in rules.items() if config}
    {'down': 'q2', 'up': 'int8'}
    >>> quantized, report = lowbit.quantize_tree(params, rules)
    """
    if (bits is None) == (size is None):
        raise ValueError(f"Pass bits= or size=, and not both: bits={bits}, size={size}.")
    batches = list(batches)
    if calibration is None:
        calibration = calibrate(fn, params, batches, rules="diag", loss=loss or _random_sum)
    elif not calibration.guided:
        raise ValueError(
            "The calibration does not know what errors do to the results: collect it with calibrate(..., loss=)."
        )
    args = arguments(batches[0])
    choices, kept = _choices(params, fn, args, formats, calibration)
    if not choices:
        raise ValueError("allocate finds no weight that these formats can store: quantize_tree's report says why.")
    chosen = chosen_formats(choices, kept, bits=bits, size=size)
    rules: dict[str, QuantizationConfig | None] = {
        glob.escape(choice.path): choice.configs[i] for choice, i in zip(choices, chosen, strict=True)
    }
    return rules | {"*": None}


@dataclasses.dataclass(frozen=True)
class Choice:
    """A weight, and for each format its config, its bytes and the estimated change of the loss.

    - `known`: whether there are statistics; otherwise `losses` are relative squared errors of the weight.
    """

    path: str
    elements: int
    configs: tuple[QuantizationConfig, ...]
    sizes: tuple[int, ...]
    losses: tuple[float, ...]
    known: bool

    @classmethod
    def of(
        cls, path: str, array: jax.Array, configs: Sequence[QuantizationConfig], moments: Sequence[Moments]
    ) -> "Choice":
        """Quantize a weight in every format; `moments`, of each use of it, are guided by the gradients of a loss."""
        sizes, losses = [], []
        with naming(path):
            for config in configs:
                stored = quantize(array, config)
                sizes.append(stored.nbytes)
                losses.append(_loss(array, stored, moments))
        return cls(path, array.size, tuple(configs), tuple(sizes), tuple(losses), bool(moments))


def chosen_formats(
    choices: Sequence[Choice], kept: int, *, bits: float | None = None, size: str | int | None = None
) -> list[int]:
    """The number of the format of each weight, for a mean of bits, or for the bytes of all and of `kept` more."""
    known = sum(sum(choice.losses) for choice in choices if choice.known) or 1.0
    # A weight without a statistic counts more than all others together.
    choices = [
        c if c.known else dataclasses.replace(c, losses=tuple(1e3 * known * x for x in c.losses)) for c in choices
    ]
    elements = sum(choice.elements for choice in choices)
    limit = bits * elements / 8 if bits is not None else byte_count(size or 0, "size") - kept
    least = sum(min(choice.sizes) for choice in choices)
    if least > limit:
        raise ValueError(
            f"The smallest formats take {8 * least / elements:.3f} bits per weight, {least + kept:,} bytes with the "
            f"arrays that are kept: more than {f'bits={bits}' if bits is not None else f'size={size}'} allows."
        )
    return _chosen(choices, limit)


def _random_sum(out: Any, *batch: Any) -> jax.Array:
    """A sum of the results with random signs: its squared gradients are those of the results, in the mean."""
    leaves = [x for x in jax.tree.leaves(out) if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)]
    keys = jax.random.split(jax.random.key(0), max(len(leaves), 1))
    signs = [jax.random.rademacher(key, x.shape, jnp.float32) for key, x in zip(keys, leaves, strict=False)]
    return sum((jnp.sum(x.astype(jnp.float32) * s) for x, s in zip(leaves, signs, strict=True)), jnp.float32(0))


def _choices(
    params: Any, fn: Any, args: Any, formats: Sequence[Any], calibration: Mapping[str, Moments]
) -> tuple[list[Choice], int]:
    """The weights that every format can store; also the bytes of all other arrays."""
    planned = [plan_tree(params, format, fn, args, strict=False) for format in formats]
    leaves, found, kept = planned[0][1], [], 0
    moments: dict[int, list[Moments]] = {}
    for leaf in planned[0][2]:
        known = calibration.get(leaf.path)
        moments.setdefault(id(leaves[leaf.place]), []).extend([] if known is None else [known])
    seen: set[int] = set()
    for same in zip(*(plans for _, _, plans, _ in planned), strict=True):
        array, path = leaves[same[0].place], same[0].path
        configs = tuple(leaf.plan.config for leaf in same if leaf.plan.config is not None)
        if id(array) in seen:  # a tied leaf is stored once
            continue
        seen.add(id(array))
        if len(configs) < len(same):
            kept += array_bytes(array)
            continue
        found.append(Choice.of(path, array, configs, moments[id(array)]))
    return found, kept


def _loss(array: jax.Array, stored: QuantizedArray, moments: Sequence[Moments]) -> float:
    """The estimated change of the loss; the relative error of the weight if there is no statistic."""
    return sum(float(_weighted(array, stored, m)) for m in moments) if moments else float(_relative(array, stored))


@jax.jit
def _weighted(array: jax.Array, stored: QuantizedArray, moments: Moments) -> jax.Array:
    error = moments.as_matrices(array.astype(jnp.float32) - stored.materialize().astype(jnp.float32))
    weights = jnp.asarray(moments.diag).reshape(-1, moments.k)
    if moments.hessian is not None:
        weights = lax.map(uncompensated, jnp.asarray(moments.hessian).reshape(-1, moments.k, moments.k))
    # Squared gradients are summed over outputs, and each output has its own.
    return jnp.sum(weights[..., None] * error**2) / error.shape[-1]


@jax.jit
def _relative(array: jax.Array, stored: QuantizedArray) -> jax.Array:
    wide = array.astype(jnp.float32)
    return jnp.sum((wide - stored.materialize()) ** 2) / jnp.maximum(jnp.sum(wide**2), 1e-30)


def _chosen(choices: Sequence[Choice], limit: float) -> list[int]:
    """The format of each weight with the least sum of losses within a number of bytes, by a Lagrange multiplier."""

    def at(price: float) -> list[int]:
        costs = ([lost + price * size for lost, size in zip(c.losses, c.sizes, strict=True)] for c in choices)
        return [min(range(len(cost)), key=cost.__getitem__) for cost in costs]

    size = partial(_total, choices)
    low, high = 0.0, 1.0
    while size(at(high)) > limit and high < 1e30:
        high *= 10
    chosen = at(high) if size(at(high)) <= limit else [int(np.argmin(c.sizes)) for c in choices]
    for _ in range(100):
        middle = (low + high) / 2
        fits = size(at(middle)) <= limit
        low, high, chosen = (low, middle, at(middle)) if fits else (middle, high, chosen)
    return _filled(choices, chosen, limit)


def _total(choices: Sequence[Choice], chosen: Sequence[int]) -> int:
    return sum(choice.sizes[i] for choice, i in zip(choices, chosen, strict=True))


def _filled(choices: Sequence[Choice], chosen: list[int], limit: float) -> list[int]:
    """Spend the bytes that are left on the weights that gain most per byte."""
    while True:
        left = limit - _total(choices, chosen)
        steps = [
            ((c.losses[i] - c.losses[j]) / (c.sizes[j] - c.sizes[i]), n, j)
            for n, (c, i) in enumerate(zip(choices, chosen, strict=True))
            for j in range(len(c.sizes))
            if 0 < c.sizes[j] - c.sizes[i] <= left and c.losses[j] < c.losses[i]
        ]
        if not steps:
            return chosen
        _, n, j = max(steps)
        chosen = [j if m == n else i for m, i in enumerate(chosen)]
