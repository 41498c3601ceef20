"""LoraArray: a frozen array plus a trainable low-rank product."""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from lowbit.runtime import ImplicitArray, aux_field, dense, is_implicit, run

# The role of an axis: of both factors (stacked layers), of `a` (inputs), of `b` (outputs).
BOTH, OF_A, OF_B = "sab"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LoraArray(ImplicitArray):
    """`base + scale * (a @ b)`, in the dtype of `base`.

    - `base`: quantized or dense, of shape `(*stack, *in, *out)`.
    - `a`: `(*stack, *in, rank)`, `b`: `(*stack, rank, *out)`. Dense floating-point arrays, for the optimizer.
    - `inputs`: the number of axes of `in`. The number of leading axes follows from the shapes, so that `vmap` and
      `scan` may add and remove them.

    `lowbit.lora` makes them for a whole model. `lowbit.partition` puts the factors into the trainable tree, with None
    for the base, and the base into the frozen one.

    >>> import jax.numpy as jnp, lowbit
    >>> base = lowbit.quantize(jnp.ones((64, 32)), "int8")
    >>> w = lowbit.LoraArray(base, a=jnp.ones((64, 2)), b=jnp.ones((2, 32)), scale=0.5)
    >>> (jnp.ones((1, 64)) @ w)[0, 0], w.materialize()[0, 0]
    (Array(128., dtype=float32), Array(2., dtype=float32))
    """

    base: Any
    a: Any
    b: Any
    scale: float = aux_field(default=1.0)
    inputs: int = aux_field(default=1)

    def __post_init__(self) -> None:
        shapes = self.base.shape, self.a.shape, self.b.shape
        layers = len(self.a.shape) - 1 - self.inputs
        if layers < 0 or self.b.ndim <= layers or self.a.shape[-1] != self.b.shape[layers] or self.shape != shapes[0]:
            raise ValueError(
                f"A LoraArray with a base of shape {shapes[0]} and inputs={self.inputs} cannot have factors of shape "
                f"{shapes[1]} and {shapes[2]}: they must be (*stack, *in, rank) and (*stack, rank, *out)."
            )

    def replace(self, **changes: Any) -> Self:
        """The same array with some fields changed, as by `dataclasses.replace` but unchecked."""
        fields, static = self._fields()
        new = object.__new__(type(self))
        new.__dict__.update({name: getattr(self, name) for name in (*fields, *static)}, **changes)
        return new

    # --- shape and dtype

    @property
    def layers(self) -> int:
        """The number of leading axes, stacked layers, that the base and both factors have in common."""
        return len(self.a.shape) - 1 - self.inputs

    @property
    def rank(self) -> int:
        return self.a.shape[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        if self.a is None or self.b is None:  # one of the trees that `partition` returns
            return tuple(self.base.shape)
        return (*self.a.shape[:-1], *self.b.shape[self.layers + 1 :])

    @property
    def dtype(self) -> Any:
        return (self.a if self.base is None else self.base).dtype

    @property
    def roles(self) -> str:
        """For each axis, which of the factors have it."""
        count = self.layers + self.inputs
        return BOTH * self.layers + OF_A * self.inputs + OF_B * (len(self.shape) - count)

    @property
    def is_stack(self) -> bool:
        return self.layers > 0

    def resolved(self) -> Self:
        return self.replace(base=self.base.resolved()) if is_implicit(self.base) else self

    @property
    def mT(self) -> Any:
        if (self.inputs, len(self.shape) - self.layers) != (1, 2):
            return super().mT
        return self.replace(base=self.base.mT, a=self.b.mT, b=self.a.mT)

    @property
    def T(self) -> Any:
        return self.mT if self.ndim == 2 else super().T

    # --- dense values

    def delta(self) -> jax.Array:
        """`scale * (a @ b)`: the trained change of the weight, in its shape."""
        batch = tuple(range(self.layers))
        return self.scale * lax.dot_general(self.a, self.b, (((self.a.ndim - 1,), (self.layers,)), (batch, batch)))

    def materialize(self) -> jax.Array:
        delta = self.delta()
        wide = jnp.promote_types(self.dtype, delta.dtype)  # so that only the sum is rounded
        return (dense(apply(lambda base: base.astype(wide), self.base)) + delta).astype(self.dtype)

    # --- sharding

    def plain(self) -> Self:
        return self.replace(base=self.base.plain()) if is_implicit(self.base) else self

    def component_specs(self, spec: PartitionSpec, mesh: Any = None) -> Any:
        entries = [*spec, *[None] * (self.ndim - len(spec))]
        before, both = entries[: self.layers + self.inputs], entries[: self.layers]
        return self.replace(
            base=self.base.component_specs(spec, mesh) if is_implicit(self.base) else spec,
            a=PartitionSpec(*before, None),
            b=PartitionSpec(*both, None, *entries[len(before) :]),
        )

    def logical_spec(self) -> PartitionSpec | None:
        if is_implicit(self.base):
            return self.base.logical_spec()
        return getattr(getattr(self.base, "sharding", None), "spec", None)


def apply(fn: Callable[..., Any], *operands: Any) -> Any:
    """`fn` of operands that may be implicit; the result may be implicit too."""
    return run(fn, *operands) if any(map(is_implicit, operands)) else fn(*operands)
