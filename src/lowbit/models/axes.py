"""Find the axis of each weight that a model contracts: from its jaxpr, or from the names of its leaves.

Scales are best shared along the contracted axis: the product is fastest and the error smallest there.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from lowbit.runtime import _compat, implicit, is_implicit

# A regular expression for the whole path, the contracted axis, and the convention. Embeddings are stored by row.
NAMES: tuple[tuple[str, int, str], ...] = (
    (r"(.*/)?(c_attn|c_proj|c_fc)/weight", -2, "GPT-2's (in, out)"),
    (r"(.*/)?[^/]*(embed|embd|wte|wpe)[^/]*(/weight|/embedding)?", -1, "an embedding, by row"),
    (r"(.*/)?weight", -1, "(out, in) as in Equinox and Hugging Face"),
    (r"(.*/)?kernel", -2, "(in, out) as in Flax"),
    (r"(.*/)?w\d*", -2, "(in, out) as in Haiku"),
)
# Leaves that are added to activations, or multiply them element by element.
_VECTORS = re.compile(r"(.*/)?([^/]*(norm|bias)[^/]*|ln_?\w*|b\d*|scale|offset|gamma|beta)(/weight)?", re.I)


@dataclasses.dataclass(frozen=True)
class Found:
    """How a leaf is used: the contracted axes, counted from the end, or None if unknown; and how that was found.

    - `vector`: not a weight matrix but a norm, a bias, or an array with one axis.
    - `told`: False if nothing is known about the leaf.
    - `multiplied`: False if the program uses it in no product.
    - `stacked`: the axes, counted from the end, of layers and experts, each of which has inputs of its own.
    - `looked_up`: it is in no product, and its rows are looked up.
    """

    axes: tuple[int, ...] | None
    how: str
    vector: bool = False
    told: bool = True
    multiplied: bool = True
    stacked: tuple[int, ...] = ()
    looked_up: bool = False


def axes_by_name(path: str, shape: Sequence[int]) -> Found:
    """How a leaf is used, judged by its name (`NAMES`) and its number of axes.

    >>> axes_by_name("layers/0/mlp/kernel", (64, 256)).axes
    (-2,)
    """
    if len(shape) < 2:
        return Found(None, "a vector", vector=True)
    path = path.replace(".", "/")  # checkpoints have flat names with dots
    if _VECTORS.fullmatch(path):
        return Found(None, "the name of a norm or a bias", vector=True)
    for pattern, axis, why in NAMES:
        if re.fullmatch(pattern, path, re.I):
            # The name does not say whether further axes are heads, a convolution window or layers.
            if len(shape) == 2 or (len(shape) == 3 and axis == -1):
                return Found((axis,), f"name: {why}")
            return Found(None, f"{len(shape)} axes: pass fn=, or a pattern with an axis")
    return Found(None, "name not known: pass fn=, or a pattern with an axis")


def axes_by_program(fn: Callable[..., Any], leaves: Sequence[Any], call: Callable[..., Any], args: Any) -> list[Found]:
    """How `fn(call(leaves), *args)` uses each leaf; leaves and arguments may be `jax.ShapeDtypeStruct`s."""
    given, tree = jax.tree.flatten((list(leaves), args), is_leaf=is_implicit)
    at = [i for i, x in enumerate(given) if hasattr(x, "dtype") and not is_implicit(x)]

    def traced(arrays: list[Any]) -> Any:
        full = list(given)
        for i, x in zip(at, arrays, strict=True):
            full[i] = x
        leaves, args = jax.tree.unflatten(tree, full)
        return fn(call(leaves), *args)

    try:
        program: Any = jax.make_jaxpr(implicit(traced) if any(map(is_implicit, given)) else traced)(
            [given[i] for i in at]
        )
    except Exception as error:
        error.add_note("lowbit traced fn(params, *args) to see which axes of the parameters it contracts.")
        raise
    uses = _Uses()
    uses.walk(program.jaxpr, [(_View(n, tuple((a,) for a in range(given[i].ndim))),) for n, i in enumerate(at)])
    place = {i: n for n, i in enumerate(at)}
    return [
        _conclude(uses.of.get(place[i], set()), leaf.shape) if i in place else Found(None, "not an array")
        for i, leaf in enumerate(leaves)
    ]


def _conclude(uses: "set[_Use]", shape: Sequence[int]) -> Found:
    ndim = len(shape)
    summed = {tuple(a for a in use.axes if shape[a] > 1) or use.axes for use in uses if use.kind == "product"}
    rows = any(use.kind == "lookup" for use in uses)
    if len(summed) > 1:
        axes = " and ".join(sorted(str(tuple(a - ndim for a in axes)) for axes in summed))
        return Found(None, f"fn contracts it along axes {axes}: choose one by a pattern with an axis")
    if summed:
        (axes,) = summed
        stacked = {a for use in uses if use.kind == "stack" for a in use.axes if shape[a] > 1 and a not in axes}
        return Found(tuple(a - ndim for a in axes), "fn", stacked=tuple(a - ndim for a in sorted(stacked)))
    if rows and ndim >= 2:
        return Found((-1,), "fn: rows are looked up", looked_up=True)
    others = sorted({use.kind for use in uses if use.kind != "stack"})
    if not others:
        return Found(None, "fn does not use it", told=False)
    return Found(None, f"fn uses it in {', '.join(others)} only", multiplied=False)


@dataclasses.dataclass(frozen=True)
class _View:
    """A value that holds the elements of a leaf: for each of its axes, the axes of the leaf that run along it."""

    leaf: int
    axes: tuple[tuple[int, ...], ...]

    def along(self, axes: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted({a for axis in axes for a in self.axes[axis]}))


@dataclasses.dataclass(frozen=True)
class _Use:
    kind: str
    axes: tuple[int, ...] = ()


# Primitives whose result has the axes of their first operand.
_SAME = {"convert_element_type", "copy", "copy_p", "neg", "reduce_precision", "stop_gradient", "sharding_constraint"}
_SAME |= {"slice", "pcast", "pvary", "reshard", "mesh_cast"}


# A value may hold several leaves, if they were concatenated.
_Views = tuple[_View, ...]


class _Uses:
    """Follows leaves through a jaxpr and records how they are used."""

    def __init__(self) -> None:
        self.of: dict[int, set[_Use]] = {}

    def note(self, views: _Views, kind: str, axes: Sequence[int] = ()) -> None:
        for view in views:
            self.of.setdefault(view.leaf, set()).add(_Use(kind, view.along(axes)))

    def walk(self, jaxpr: Jaxpr, views: Sequence[_Views]) -> list[_Views]:
        known: dict[Any, _Views] = dict(zip(jaxpr.invars, views, strict=True))

        def held(var: Any) -> _Views:
            return () if isinstance(var, Literal) else known.get(var, ())

        for eqn in jaxpr.eqns:
            found = [held(v) for v in eqn.invars]
            if any(found):
                known |= dict(zip(eqn.outvars, self.step(eqn, found), strict=False))
        return [held(v) for v in jaxpr.outvars]

    def step(self, eqn: JaxprEqn, views: list[_Views]) -> Sequence[_Views]:
        """Record the uses of an equation; return the views that its results are."""
        name, params = eqn.primitive.name, eqn.params
        inner = list(_compat.subjaxprs(params))
        if name == "scan" and (scan := _compat.scan(params)):
            return self.scan(scan, views)
        if name == "while" and (loop := _compat.while_loop(params)):
            return self.loop(loop, views)
        if name in ("scan", "while"):  # of an unknown version of JAX: not followed
            inner = []
        if name == "cond":
            outs = [self.walk(branch, views[1:]) for branch in inner]
            return [tuple(dict.fromkeys(v for views in choices for v in views)) for choices in zip(*outs, strict=True)]
        for body in inner:
            if len(body.invars) == len(views):
                return self.walk(body, views)
        if name == "optimization_barrier":
            return views
        if name in ("dot_general", "ragged_dot_general"):
            # Batch axes are stacked layers or experts, each with its own scales.
            dims = params["dimension_numbers" if name == "dot_general" else "ragged_dot_dimension_numbers"]
            summed, batch = dims if name == "dot_general" else dims.dot_dimension_numbers
            groups = () if name == "dot_general" else dims.rhs_group_dimensions
            for side, axes, stack in zip(views[:2], summed, (batch[0], (*batch[1], *groups)), strict=True):
                self.note(side, "product", axes)
                self.note(side, "stack", stack)
            return []
        if name == "split":
            return [views[0]] * len(eqn.outvars)
        if name == "concatenate":
            return [tuple(v for side in views for v in side)]
        if name == "mul" and not views[0] and math.prod(_shape(eqn.invars[0])) == 1:
            return views[1:]
        moved = [self.moved(eqn, name, view) for view in views[0]]
        if moved and not any(view is None for view in moved):
            return [tuple(view for view in moved if view is not None)]
        for side in views:
            self.note(side, "lookup" if name in ("gather", "dynamic_slice") else name)
        return []

    def moved(self, eqn: JaxprEqn, name: str, view: _View) -> _View | None:
        """The view after an equation that only moves the elements of its first operand; None for any other."""
        params, shape = eqn.params, _shape(eqn.outvars[0])
        if name in _SAME or (name in ("mul", "div") and math.prod(_shape(eqn.invars[1])) == 1):
            return view
        if name == "transpose":
            return _View(view.leaf, tuple(view.axes[a] for a in params["permutation"]))
        if name == "squeeze":
            self.note((view,), "stack", params["dimensions"])  # a layer by its number, if the leaf has more than one
            return _View(view.leaf, tuple(a for i, a in enumerate(view.axes) if i not in params["dimensions"]))
        if name == "broadcast_in_dim":
            place = {to: view.axes[i] for i, to in enumerate(params["broadcast_dimensions"])}
            return _View(view.leaf, tuple(place.get(i, ()) for i in range(len(shape))))
        if name == "reshape":
            return _View(view.leaf, tuple(_regrouped(_shape(eqn.invars[0]), shape, view.axes)))
        if name == "dynamic_slice" and len(shape) > 2 and shape[1:] == _shape(eqn.invars[0])[1:]:
            self.note((view,), "stack", (0,))
            return view
        if name == "gather" and len(view.axes) > 2:
            dims = params["dimension_numbers"]
            whole = params["slice_sizes"][1:] == _shape(eqn.invars[0])[1:]
            if whole and dims.start_index_map == (0,) and dims.collapsed_slice_dims == (0,):
                self.note((view,), "stack", (0,))
                place = dict(zip(dims.offset_dims, view.axes[1:], strict=True))
                return _View(view.leaf, tuple(place.get(i, ()) for i in range(len(shape))))
        return None

    def scan(self, scan: _compat.Scan, views: list[_Views]) -> Sequence[_Views]:
        rest = scan.num_consts + scan.num_carry
        for side in views[rest:]:
            self.note(side, "stack", (0,))
        layers = [tuple(_View(v.leaf, v.axes[1:]) for v in side) for side in views[rest:]]
        outs = self.walk(scan.body.jaxpr, [*views[:rest], *layers])
        stacked = [tuple(_View(v.leaf, ((), *v.axes)) for v in side) for side in outs[scan.num_carry :]]
        return [*outs[: scan.num_carry], *stacked]

    def loop(self, loop: _compat.While, views: list[_Views]) -> Sequence[_Views]:
        start = loop.condition_consts + loop.body_consts
        state = views[start:]
        self.walk(loop.condition.jaxpr, [*views[: loop.condition_consts], *state])
        return self.walk(loop.body.jaxpr, [*views[loop.condition_consts : start], *state])


def _shape(var: Any) -> tuple[int, ...]:
    return tuple(jnp.shape(var.val)) if isinstance(var, Literal) else tuple(getattr(var.aval, "shape", ()))


def _regrouped(
    before: Sequence[int], after: Sequence[int], axes: Sequence[tuple[int, ...]]
) -> Iterator[tuple[int, ...]]:
    """The axes after a reshape: where axes are merged or split, every axis of the group runs along each result."""
    i = j = 0
    while j < len(after):
        group, sizes = list(axes[i : i + 1]), (before[i] if i < len(before) else 1)
        i, first, length = i + 1, j, after[j]
        j += 1
        while sizes != length and (i < len(before) or j < len(after)):
            if (sizes < length or j == len(after)) and i < len(before):
                sizes, group, i = sizes * before[i], [*group, axes[i]], i + 1
            else:
                length, j = length * after[j], j + 1
        merged = tuple(sorted({a for axis in group for a in axis}))
        yield from (merged if after[k] > 1 else () for k in range(first, j))
