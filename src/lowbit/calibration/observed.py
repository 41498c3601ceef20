"""ObservedArray: a dense weight with probes, whose cotangents are statistics of the inputs that it is multiplied with.

A product `y = x @ w` of an observed weight is followed by an identity of y. Its derivative gives the probes the
cotangents sum of x^2 or x^T x over rows, and the number of rows. So `jax.grad` with respect to the probes is the
statistic, through scan, vmap, checkpoint, shard_map and everything else that JAX differentiates.
"""

import dataclasses
import math
import string
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from lowbit.runtime import ImplicitArray, aux_field
from lowbit.runtime._compat import match_varying

# The role of an axis of a weight: stacked layers and experts, inputs, outputs.
STACK, IN, OUT = "sio"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ObservedArray(ImplicitArray, warn_on_materialize=False):
    """A dense weight with probes.

    - `moment`: zeros of shape (*stack, *in), or (*stack, *in, *in) for second moments. float32.
    - `count`: zeros of shape (*stack,): the probe of the number of rows.
    - `roles`: the role of each axis of `base`, counted from the end, so that `scan` may remove leading axes.
    - `guided`: weight each row by its squared gradient.
    """

    base: Any
    moment: Any
    count: Any
    roles: str = aux_field()
    full: bool = aux_field()
    guided: bool = aux_field()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.base.shape)

    @property
    def dtype(self) -> Any:
        return self.base.dtype

    @property
    def axis_roles(self) -> str:
        """The role of each axis. Axes that `vmap` added are stacks."""
        return self.roles[max(len(self.roles) - self.ndim, 0) :].rjust(self.ndim, STACK)

    @property
    def is_stack(self) -> bool:
        return self.axis_roles[:1] == STACK

    def axes(self, role: str) -> list[int]:
        return [a for a, own in enumerate(self.axis_roles) if own == role]

    def materialize(self) -> jax.Array:
        return self.base

    def component_specs(self, spec: PartitionSpec, mesh: Any = None) -> Any:
        entries = [*spec, *[None] * (self.ndim - len(spec))]
        stack, inputs = ([entries[a] for a in self.axes(role)] for role in (STACK, IN))
        if self.full and any(entry is not None for entry in inputs):
            raise ValueError(
                f"The inputs of a weight of shape {self.shape} are sharded as {spec}, and no device sees the products "
                "of all pairs of them: calibrate it with 'diag'."
            )
        count = PartitionSpec(*stack)
        moment = PartitionSpec(*stack, *inputs, *(inputs if self.full else ()))
        return dataclasses.replace(self, base=spec, moment=moment, count=count)

    def logical_spec(self) -> PartitionSpec | None:
        return getattr(getattr(self.base, "sharding", None), "spec", None)


@dataclasses.dataclass(frozen=True)
class _Letters:
    """A product as an einsum: the lower-case letters of the axes of x, of the weight and of the result.

    - `groups`: the axis of x whose rows are divided into groups, one for each layer of the first axis of the weight.
    - `moment`, `count`: the shapes of the probes.
    """

    x: str
    w: str
    y: str
    roles: str
    full: bool
    guided: bool
    groups: int | None
    moment: tuple[int, ...]
    count: tuple[int, ...]

    def of(self, role: str) -> str:
        return "".join(letter for letter, own in zip(self.w, self.roles, strict=True) if own == role)


def observed_product(
    x: jax.Array,
    w: ObservedArray,
    y: jax.Array,
    summed: Any,
    batch: Any,
    *,
    weight_first: bool = False,
    sizes: jax.Array | None = None,
    groups: int | None = None,
) -> Any:
    """`y`, the product of x and the weight, with its inputs observed; NotImplemented if it does not sum all inputs.

    `summed` and `batch` are the axes of x, then those of the weight. With `sizes`, axis `groups` of x is divided into
    groups of these sizes, one for each layer of the first axis of the weight.
    """
    if sorted(summed[1]) != w.axes(IN) or not w.axes(IN):
        return NotImplemented
    letters = iter(string.ascii_lowercase)
    of_w, of_x = [next(letters) for _ in w.shape], [next(letters) for _ in x.shape]
    for i, j in zip((*summed[0], *batch[0]), (*summed[1], *batch[1]), strict=True):
        of_x[i] = of_w[j]
    used = {of_w[j] for j in (*summed[1], *batch[1], *((0,) if sizes is not None else ()))}
    free = [[c for c in side if c not in used] for side in (of_x, of_w)]
    of_y = [*(of_w[j] for j in batch[1]), *(free[1] + free[0] if weight_first else free[0] + free[1])]
    shapes = w.moment.shape, w.count.shape
    names = _Letters("".join(of_x), "".join(of_w), "".join(of_y), w.axis_roles, w.full, w.guided, groups, *shapes)
    # Devices that have other outputs of the same rows count them again, which multiplies all sums by the same number.
    y, x, moment, count = match_varying([y, x, w.moment, w.count])
    return _observe(names, y, x, sizes, moment, count)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _observe(names: _Letters, y: jax.Array, x: jax.Array, sizes: Any, moment: jax.Array, count: jax.Array) -> Any:
    return y


def _forward(names: _Letters, y: jax.Array, x: jax.Array, sizes: Any, moment: jax.Array, count: jax.Array) -> Any:
    return y, (x, sizes)


def _backward(names: _Letters, kept: Any, g: jax.Array) -> Any:
    x, sizes = kept
    if sizes is None:
        rows = [n for c, n in zip(names.x, x.shape, strict=True) if c not in names.of(IN) + names.of(STACK)]
        moment, count = _moment(names, x, g), jnp.full(names.count, math.prod(rows), jnp.float32)
    else:
        moment, count = _moments_of_groups(names, x, g, sizes), sizes.astype(jnp.float32)
    # Only gradient-guided statistics of earlier weights need the values of the cotangent of y.
    back = g if names.guided else match_varying([g, jnp.zeros_like(g)])[1]
    return back, None, None, jnp.broadcast_to(moment, names.moment), match_varying([x, count])[1]


_observe.defvjp(_forward, _backward)


def _moment(names: _Letters, x: jax.Array, g: jax.Array) -> jax.Array:
    """The sum of x^2 or x^T x over rows, with axes (*stack, *in) or (*stack, *in, *in); 1 for stacks with one value."""
    wide = x.astype(jnp.float32)
    left, of_left = wide, names.x
    exact: Any = {"precision": lax.Precision.HIGHEST}
    if names.guided:
        kept = "".join(c for c in names.y if c in names.x + names.of(STACK))
        of_left = "".join(dict.fromkeys(names.x + kept))
        weight = jnp.einsum(f"{names.y}->{kept}", g.astype(jnp.float32) ** 2)
        left = jnp.einsum(f"{names.x},{kept}->{of_left}", wide, weight)
    stack, inputs = names.of(STACK), names.of(IN)
    # A second set of letters for the second inputs of a pair.
    right = "".join(c.upper() if names.full and c in inputs else c for c in names.x)
    out = "".join(c for c in stack if c in of_left) + inputs + (inputs.upper() if names.full else "")
    moment = jnp.einsum(f"{of_left},{right}->{out}", left, wide, **exact)
    return jnp.expand_dims(moment, [i for i, c in enumerate(stack) if c not in of_left])


def _moments_of_groups(names: _Letters, x: jax.Array, g: jax.Array, sizes: jax.Array) -> jax.Array:
    """The moments of each group of rows, one group after the other."""
    ends = jnp.cumsum(sizes)
    assert names.groups is not None
    number = lax.broadcasted_iota(ends.dtype, x.shape, names.groups)
    layer = dataclasses.replace(names, w=names.w[1:], roles=names.roles[1:])

    def of_group(i: jax.Array) -> jax.Array:
        mine = (number < ends[i]) & (number >= ends[i] - sizes[i])
        return _moment(layer, jnp.where(mine, x, 0), g)

    return lax.map(of_group, jnp.arange(sizes.shape[0]))


# --- rows of a table


def observed_rows(indices: jax.Array, w: ObservedArray, y: jax.Array, columns: int) -> jax.Array:
    """`y`, the rows of a table at these indices (..., 1), with how often each row is looked up observed.

    A look-up is a product with rows of zeros and a one, whose second moments are counts on the diagonal. `columns` is
    the axis of y along which a row of the table runs.
    """
    y, moment, count = match_varying([y, w.moment, w.count])
    return _observe_rows((columns, w.guided, w.moment.shape[0]), y, indices, moment, count)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _observe_rows(how: tuple[int, bool, int], y: jax.Array, indices: jax.Array, moment: Any, count: Any) -> Any:
    return y


def _rows_forward(how: tuple[int, bool, int], y: jax.Array, indices: jax.Array, moment: Any, count: Any) -> Any:
    return y, indices[..., 0]


def _rows_backward(how: tuple[int, bool, int], indices: jax.Array, g: jax.Array) -> Any:
    columns, guided, length = how
    each = jnp.sum(g.astype(jnp.float32) ** 2, columns) if guided else jnp.ones(indices.shape, jnp.float32)
    inside = (indices >= 0) & (indices < length)
    moment = jnp.zeros(length, jnp.float32).at[jnp.where(inside, indices, length)].add(each, mode="drop")
    _, moment, count = match_varying([g, moment, jnp.sum(inside, dtype=jnp.float32)])
    back = g if guided else match_varying([g, jnp.zeros_like(g)])[1]
    return back, None, moment, count


_observe_rows.defvjp(_rows_forward, _rows_backward)


def observed_look_up(w: ObservedArray, y: jax.Array, columns: int) -> jax.Array:
    """`y`, rows of a table that is also multiplied along its rows, with its gradients g observed: sum of g^2 or g^T g.

    An error e of a row changes the loss by g . e where it is looked up, and by a gradient times x . e in a product with
    x, so that both sums of squares weight the same errors. `columns` is the axis of y along which a row runs.
    """
    y, moment = match_varying([y, w.moment])
    return _observe_look_up((columns, w.full), y, moment)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _observe_look_up(how: tuple[int, bool], y: jax.Array, moment: jax.Array) -> jax.Array:
    return y


def _look_up_forward(how: tuple[int, bool], y: jax.Array, moment: jax.Array) -> Any:
    return y, None


def _look_up_backward(how: tuple[int, bool], kept: None, g: jax.Array) -> Any:
    columns, full = how
    rows = jnp.moveaxis(g.astype(jnp.float32), columns, -1).reshape(-1, g.shape[columns])
    return g, jnp.matmul(rows.T, rows, precision=lax.Precision.HIGHEST) if full else jnp.sum(rows**2, 0)


_observe_look_up.defvjp(_look_up_forward, _look_up_backward)
