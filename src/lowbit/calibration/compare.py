"""compare_outputs(): how much the results of a function change from one set of parameters to another."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowbit.runtime import implicit, materialize

from .collect import arguments


@dataclasses.dataclass(frozen=True)
class OutputComparison:
    """How the results of a function differ between two sets of parameters. A row is a slice along the last axis.

    - `error`: |a - b|^2 / |a|^2 over all results.
    - `cosine`: the mean cosine between rows.
    - `rows`: the number of rows.
    - `kl`: the mean Kullback-Leibler divergence of b from a in nats, if rows are logits; None otherwise.
    - `kl_error`: the standard error of that mean, as if rows were independent.
    - `kl_99`: the 99 % quantile over rows.
    - `top1`: in how many of the rows, from 0 to 1, the largest logit is at the same place.
    """

    error: float
    cosine: float
    rows: int
    kl: float | None = None
    kl_error: float | None = None
    kl_99: float | None = None
    top1: float | None = None

    def __str__(self) -> str:
        text = f"output error {self.error:.3g}, cosine {self.cosine:.6f} over {self.rows:,} rows"
        if self.kl is None:
            return text
        return f"{text}, KL {self.kl:.4g} +- {self.kl_error:.2g} (99 %: {self.kl_99:.3g}), same top-1 {self.top1:.2%}"


def compare_outputs(
    fn: Callable[..., Any], params_a: Any, params_b: Any, batches: Iterable[Any], *, logits: bool = False
) -> OutputComparison:
    """Compare the results of `fn(params, *batch)` for two sets of parameters, for instance dense and quantized.

    - `batches`: as for `calibrate`; other data than it was calibrated with.
    - `logits`: the result is one array of logits along its last axis: compare the distributions too.

    >>> import jax, jax.numpy as jnp, lowbit
    >>> params, x = {"kernel": jax.random.normal(jax.random.key(0), (64, 32))}, jnp.ones((1, 8, 64))
    >>> quantized, _ = lowbit.quantize_tree(params, "int8")
    >>> found = lowbit.compare_outputs(lambda params, x: x @ params["kernel"], params, quantized, x)
    >>> found.rows, found.error < 1e-3, found.cosine > 0.999
    (8, True, True)
    """
    run = jax.jit(implicit(fn))
    sums, rows = np.zeros(2), []
    for number, batch in enumerate(batches):
        a, b = (_floats(materialize(run(params, *arguments(batch)))) for params in (params_a, params_b))
        shapes = [[x.shape for x in side] for side in (a, b)]
        if shapes[0] != shapes[1] or not a:
            raise ValueError(f"Batch {number} gives floating-point results of shapes {shapes[0]} and {shapes[1]}.")
        if logits and (len(a) != 1 or not a[0].ndim):
            raise ValueError(f"logits=True needs one array as the result of fn, and there are {len(a)}.")
        for one, other in zip(a, b, strict=True):
            sums += np.array([float(jnp.sum((one - other) ** 2)), float(jnp.sum(one**2))])
            rows.append(np.stack([np.ravel(x) for x in _rows(one, other, logits)]))
    if not rows:
        raise ValueError("There is no batch to compare with.")
    found = np.concatenate(rows, axis=1).astype(np.float64)
    error = float(sums[0] / sums[1]) if sums[1] > 0 else float(sums[0])
    count = found.shape[1]
    if not logits:
        return OutputComparison(error, float(found[0].mean()), count)
    spread = float(found[1].std(ddof=1) / count**0.5) if count > 1 else 0.0
    high = float(np.quantile(found[1], 0.99))
    return OutputComparison(
        error, float(found[0].mean()), count, float(found[1].mean()), spread, high, float(found[2].mean())
    )


def _floats(out: Any) -> list[jax.Array]:
    leaves = [jnp.asarray(x) for x in jax.tree.leaves(out) if hasattr(x, "dtype")]
    return [x.astype(jnp.float32) for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]


def _rows(a: jax.Array, b: jax.Array, logits: bool) -> list[jax.Array]:
    """For each row the cosine, and of logits the divergence and whether the largest is at the same place."""
    a, b = jnp.atleast_1d(a), jnp.atleast_1d(b)
    lengths = jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1)
    same = (a == b).all(-1)
    cosine = jnp.where(same, 1, jnp.sum(a * b, -1) / jnp.where(lengths > 0, lengths, 1))
    if not logits:
        return [cosine]
    wanted, got = (jax.nn.log_softmax(x) for x in (a, b))
    # A logit of minus infinity has probability 0, and adds nothing.
    terms = jnp.where(jnp.isneginf(wanted), 0, jnp.exp(wanted) * (wanted - got))
    return [cosine, jnp.sum(terms, -1), (jnp.argmax(a, -1) == jnp.argmax(b, -1)).astype(jnp.float32)]
