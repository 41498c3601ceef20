"""Second moments of the inputs of a weight, from calibration data."""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

# What is added to the diagonal of second moments, in units of its mean.
DAMPING = 0.01


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("diag", "hessian", "count"),
    meta_fields=("shape", "inputs", "stacked"),
)
@dataclasses.dataclass(frozen=True)
class Moments:
    """Sums over the rows x of the calibration data that a weight of this shape was multiplied with.

    - `inputs`, `stacked`: the axes of the weight, counted from the end, that are summed over in the product, and those
      of layers or experts with inputs of their own.
    - `diag`: the sum of x^2, of shape (*stack, K), where K counts the elements along all inputs.
    - `hessian`: the sum of x^T x, of shape (*stack, K, K); None if only `diag` is known.
    - `count`: the number of rows, of shape (*stack,).
    """

    shape: tuple[int, ...]
    inputs: tuple[int, ...]
    stacked: tuple[int, ...]
    diag: Any
    hessian: Any
    count: Any

    def __post_init__(self) -> None:
        ndim, axes = len(self.shape), (*self.stacked, *self.inputs)
        if len({*axes}) < len(axes) or not all(-ndim <= a < 0 for a in axes):
            raise ValueError(f"inputs={self.inputs}, stacked={self.stacked} are not axes of shape {self.shape}.")
        stack = tuple(self.shape[a] for a in self.stacked)
        k = math.prod(self.shape[a] for a in self.inputs)
        for name, want in (("diag", (*stack, k)), ("hessian", (*stack, k, k)), ("count", stack)):
            found = getattr(getattr(self, name), "shape", want)  # JAX unflattens with placeholders
            if tuple(found) != want:
                raise ValueError(
                    f"{name} of shape {tuple(found)} does not fit a weight of shape {self.shape} with inputs "
                    f"{self.inputs} and stacks {self.stacked}: it must have the shape {want}."
                )

    @property
    def order(self) -> list[int]:
        """The axes of the weight, counted from the front, as (*stack, *in, *out)."""
        ndim = len(self.shape)
        first = [a + ndim for a in (*self.stacked, *self.inputs)]
        return [*first, *(a for a in range(ndim) if a not in first)]

    @property
    def _back(self) -> list[int]:
        return [self.order.index(a) for a in range(len(self.shape))]

    @property
    def k(self) -> int:
        return self.diag.shape[-1]

    def as_matrices(self, array: jax.Array) -> jax.Array:
        """An array of the weight's shape, or of size 1 along some axes, as (stack, K, N)."""
        wide = jnp.broadcast_to(array, self.shape)
        return jnp.transpose(wide, self.order).reshape(math.prod(self.count.shape), self.k, -1)

    def as_weight(self, matrices: jax.Array) -> jax.Array:
        """The inverse of `as_matrices`."""
        shape = [self.shape[a] for a in self.order]
        return jnp.transpose(matrices.reshape(shape), self._back)

    def importance(self) -> jax.Array:
        """The weight of squared errors of each input, with the number of axes of the weight and size 1 along outputs.

        It is `diag` in units of its mean, and a hundredth more, so that inputs that were always 0 count too. For a
        layer without rows it is 0.
        """
        diag = jnp.asarray(self.diag)
        mean = jnp.mean(diag, -1, keepdims=True)
        weights = jnp.where(mean > 0, diag / jnp.where(mean > 0, mean, 1) + DAMPING, 0)
        shape = [n if i - len(self.shape) in (*self.stacked, *self.inputs) else 1 for i, n in enumerate(self.shape)]
        return jnp.transpose(weights.reshape([shape[a] for a in self.order]), self._back)

    def merged(self, other: "Moments") -> "Moments":
        """The moments of both sets of rows."""
        if (self.shape, self.inputs, self.stacked) != (other.shape, other.inputs, other.stacked):
            raise ValueError(
                f"Moments of a weight of shape {self.shape} with inputs {self.inputs} do not add up with those of one "
                f"of shape {other.shape} with inputs {other.inputs}."
            )
        return dataclasses.replace(
            self,
            diag=self.diag + other.diag,
            hessian=None if self.hessian is None or other.hessian is None else self.hessian + other.hessian,
            count=self.count + other.count,
        )

    def of_region(self, region: Sequence[tuple[int, int]]) -> "Moments":
        """The moments of a part of the weight, given the first and last element along each axis.

        Inputs can be divided only if there are no second moments, since those of different parts count too.
        """
        shape = tuple(stop - start for start, stop in region)
        cut = {a for a in range(-len(shape), 0) if shape[a] != self.shape[a]}
        if cut & set(self.inputs) and (self.hessian is not None or len(self.inputs) > 1):
            raise ValueError(f"Inputs along {self.inputs} of a weight of shape {self.shape} cannot be divided.")
        stack = tuple(slice(*region[a]) for a in self.stacked)
        inputs = tuple(slice(*region[a]) for a in self.inputs) if cut & set(self.inputs) else ()
        hessian = None if self.hessian is None else self.hessian[stack]
        diag, count = self.diag[(*stack, *inputs)], self.count[stack]
        return Moments(shape, self.inputs, self.stacked, diag, hessian, count)
