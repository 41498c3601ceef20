"""Implicit arrays that know nothing of quantization, for the tests of the runtime."""

import dataclasses
from typing import Any

import jax
from jax import lax

from lowbit import ImplicitArray, aux_field, register


@dataclasses.dataclass
class LowRank(ImplicitArray):
    """a @ b, with components that are trained."""

    a: jax.Array
    b: jax.Array

    def materialize(self):
        return self.a @ self.b


@dataclasses.dataclass
class Base(ImplicitArray, warn_on_materialize=False):
    value: jax.Array
    tag: str = aux_field(default="base")

    def materialize(self):
        return self.value


@dataclasses.dataclass
class Derived(Base):
    pass


@dataclasses.dataclass
class Other(ImplicitArray, warn_on_materialize=False, commute_ops=False):
    value: jax.Array

    def materialize(self):
        return self.value


@register("dot_general")
def _(x: jax.Array, w: LowRank, **params: Any):
    if params["dimension_numbers"] != (((x.ndim - 1,), (0,)), ((), ())):
        return NotImplemented
    return lax.dot_general(lax.dot_general(x, w.a, **params), w.b, **params)
