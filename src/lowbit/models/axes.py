"""Find the axis of each weight that a model contracts: from its jaxpr, or from the names of its leaves.

Scales are best shared along the contracted axis: the product is fastest and the error smallest there.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from lowbit.runtime import _compat, implicit, is_implicit, takes_rows

from .calls import Call, is_dense_array

# A regular expression for the whole path, the contracted axis, and the convention. Embeddings are stored by row.
NAMES: tuple[tuple[str, int, str], ...] = (
    (r"(.*/)?(c_attn|c_proj|c_fc)/weight", -2, "GPT-2's (in, out)"),
    (r"(.*/)?[^/]*(embed|embd|wte|wpe)[^/]*(/weight|/embedding)?", -1, "an embedding, by row"),
    (r"(.*/)?weight", -1, "(out, in) as in Equinox and Hugging Face"),
    (r"(.*/)?kernel", -2, "(in, out) as in Flax"),
    (r"(.*/)?w\d*", -2, "(in, out) as in Haiku"),
)
# Leaves that are added to activations, or multiply them element by element: a norm or a bias by the last word of a
# name, such as `q_norm`, `LayerNorm_0`, `final_norm_scale` and `proj_bias`, but not `norm_proj` or `unbiased`.
_VECTORS = re.compile(
    r"(.*/)?(([^/]*_)?((layer|rms|batch|group|instance)_?)?(norms?|bias(es)?)(_?\d+)?(_(scale|weight|gamma|beta))?"
    r"|ln_?\w*|b\d*|scale|offset|gamma|beta)(/weight)?",
    re.I,
)


@dataclasses.dataclass(frozen=True)
class Found:
    """How a leaf is used: the contracted axes, counted from the end, or None if unknown; and how that was found.

    - `vector`: not a weight matrix but a norm, a bias, or an array with one axis.
    - `told`: False if nothing is known about the leaf.
    - `multiplied`: False if the program uses it in no product and looks up no rows of it.
    - `contracted`: True if the program uses it in a product.
    - `convolved`: True if the program uses it as the kernel of a convolution, and in no product.
    - `stacked`: the axes, counted from the end, of layers and experts, each of which has inputs of its own.
    - `looked_up`: it is in no product, and its rows are looked up.
    - `window`: the axes of a convolution window with one element, where the convolution is a product.
    """

    axes: tuple[int, ...] | None
    how: str
    vector: bool = False
    told: bool = True
    multiplied: bool = True
    contracted: bool = False
    convolved: bool = False
    stacked: tuple[int, ...] = ()
    looked_up: bool = False
    window: tuple[int, ...] = ()


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
    given = Call.of((list(leaves), args), is_dense_array)

    def traced(arrays: list[Any]) -> Any:
        leaves, args = given.args(arrays)
        return fn(call(leaves), *args)

    try:
        program: Any = jax.make_jaxpr(implicit(traced) if any(map(is_implicit, given.rest)) else traced)(given.arrays)
    except Exception as error:
        error.add_note("lowbit traced fn(params, *args) to see which axes of the parameters it contracts.")
        if "mesh" in str(error).lower() and _compat.mesh_in_context() is None:
            error.add_note(
                "fn needs a mesh, and none is set. Make the call inside `with jax.set_mesh(mesh):`, or pass a fn that "
                "sets the mesh as the model expects it; a mesh of one device is enough."
            )
        raise
    uses = _Uses()
    uses.walk(program.jaxpr, [(_View(n, tuple((a,) for a in range(x.ndim))),) for n, x in enumerate(given.arrays)])
    place = {i: n for n, i in enumerate(given.places)}
    return [
        _conclude(uses.of.get(place[i], set()), leaf.shape) if i in place else Found(None, "not an array")
        for i, leaf in enumerate(leaves)
    ]


def _conclude(uses: "set[_Use]", shape: Sequence[int]) -> Found:
    ndim = len(shape)
    summed = {tuple(a for a in use.axes if shape[a] > 1) or use.axes: use.line for use in uses if use.kind == "product"}
    if len(summed) > 1:
        found = sorted(f"{tuple(a - ndim for a in axes)}{line()}" for axes, line in summed.items())
        how = f"fn contracts it along axes {' and '.join(found)}: choose one by a pattern with an axis"
        return Found(None, how, contracted=True)
    if summed:
        (axes,) = summed
        stacked = {a for use in uses if use.kind == "stack" for a in use.axes if shape[a] > 1 and a not in axes}
        window = {a for use in uses if use.kind == "window" for a in use.axes}
        own, stacked, window = (tuple(a - ndim for a in sorted(some)) for some in (axes, stacked, window))
        return Found(own, "fn", contracted=True, stacked=stacked, window=window)
    if any(use.kind == "lookup" for use in uses) and ndim >= 2:
        return Found((-1,), "fn: rows are looked up", looked_up=True)
    if (kernels := [use for use in uses if use.kind == "convolution"]) and len({use.axes for use in kernels}) == 1:
        # Where a format has blocks along one axis, that is the longest.
        axes = tuple(a - ndim for a in sorted(kernels[0].axes, key=lambda a: (shape[a], a)))
        return Found(axes, f"fn uses it in a convolution{kernels[0].line()}", multiplied=False, convolved=True)
    others = {use.kind: use.line for use in uses if use.kind not in ("stack", "window")}
    if not others:
        return Found(None, "fn does not use it", told=False)
    named = ", ".join(f"{kind}{line()}" for kind, line in sorted(others.items()))
    return Found(None, f"fn uses it in {named} only", multiplied=False)


@dataclasses.dataclass(frozen=True)
class _View:
    """A value that holds elements of a leaf: for each of its axes, the axes of the leaf that run along it.

    `rows`: they are rows that were looked up, and are decoded if they are not multiplied.
    """

    leaf: int
    axes: tuple[tuple[int, ...], ...]
    rows: bool = False

    def on(self, axes: Iterable[tuple[int, ...]]) -> "_View":
        return dataclasses.replace(self, axes=tuple(axes))

    def along(self, axes: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted({a for axis in axes for a in self.axes[axis]}))


@dataclasses.dataclass(frozen=True)
class _Use:
    kind: str
    axes: tuple[int, ...] = ()
    eqn: JaxprEqn | None = dataclasses.field(default=None, compare=False)

    def line(self) -> str:
        """Where the user wrote it."""
        return f" at {found[0]}:{found[1]}" if (found := _compat.line_of(self.eqn)) else ""


# Primitives whose result has the axes of their first operand, and elements of it only.
_SAME = {"convert_element_type", "copy", "copy_p", "neg", "reduce_precision", "stop_gradient", "sharding_constraint"}
_SAME |= {"slice", "name", "rev", "tile", "device_put", "pcast", "pvary", "reshard", "mesh_cast", "ppermute"}


# A value may hold several leaves, if they were concatenated.
_Views = tuple[_View, ...]


class _Uses:
    """Follows leaves through a jaxpr and records how they are used."""

    def __init__(self) -> None:
        self.of: dict[int, set[_Use]] = {}

    def note(self, views: _Views, kind: str, axes: Sequence[int] = (), eqn: JaxprEqn | None = None) -> None:
        for view in views:
            self.of.setdefault(view.leaf, set()).add(_Use(kind, view.along(axes), eqn))

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
            return [_joined(choices) for choices in zip(*outs, strict=True)]
        for body in inner:
            if len(body.invars) == len(views):
                return self.walk(body, views)
        if name == "optimization_barrier":
            return views
        if name in ("dot_general", "ragged_dot_general", "conv_general_dilated"):
            self.multiplied(eqn, name, views)
            return []
        if name == "split":
            return [views[0]] * len(eqn.outvars)
        if name == "concatenate" or (name == "dynamic_update_slice" and all(views[:2])):
            return [_joined(views)]
        if name == "select_n" and all(views[1:]):  # one of several weights; a mask over one is no move
            return [_joined(views[1:])]
        if name == "stack":
            at = params["axis"]
            return [tuple(v.on((*v.axes[:at], (), *v.axes[at:])) for v in _joined(views))]
        if name == "unstack":
            self.note(views[0], "stack", (params["axis"],))
            rest = tuple(v.on(a for i, a in enumerate(v.axes) if i != params["axis"]) for v in views[0])
            return [rest] * len(eqn.outvars)
        if name == "mul" and not views[0] and math.prod(_shape(eqn.invars[0])) == 1:
            return views[1:]
        moved = [self.moved(eqn, name, view) for view in views[0]]
        if moved and not any(view is None for view in moved):
            return [tuple(view for view in moved if view is not None)]
        for view in _joined(views):
            self.note((view,), "lookup" if view.rows or name in ("gather", "dynamic_slice") else name, eqn=eqn)
        return []

    def multiplied(self, eqn: JaxprEqn, name: str, views: list[_Views]) -> None:
        """Record the uses of a product or a convolution."""
        params = eqn.params
        if name == "conv_general_dilated":
            _, inputs, *window = params["dimension_numbers"].rhs_spec
            one = all(_shape(eqn.invars[1])[a] == 1 for a in window) and params["feature_group_count"] == 1
            self.note(views[0], name, eqn=eqn)
            self.note(views[1], "product" if one else "convolution", [inputs, *([] if one else window)], eqn)
            if one:
                self.note(views[1], "window", window)
            return
        # Batch axes are stacked layers or experts, each with its own scales.
        dims = params["dimension_numbers" if name == "dot_general" else "ragged_dot_dimension_numbers"]
        summed, batch = dims if name == "dot_general" else dims.dot_dimension_numbers
        groups = () if name == "dot_general" else dims.rhs_group_dimensions
        for side, axes, stack in zip(views[:2], summed, (batch[0], (*batch[1], *groups)), strict=True):
            self.note(side, "product", axes, eqn)
            self.note(side, "stack", stack)

    def moved(self, eqn: JaxprEqn, name: str, view: _View) -> _View | None:
        """The view after an equation that only moves the elements of its first operand; None for any other."""
        params, shape = eqn.params, _shape(eqn.outvars[0])
        if takes_rows(eqn) and name != "gather" and (shape[-2] > 1 or name == "dynamic_slice"):
            return dataclasses.replace(view, rows=True)
        if name in _SAME or (name in ("mul", "div") and math.prod(_shape(eqn.invars[1])) == 1):
            return view
        if name == "transpose":
            return view.on(view.axes[a] for a in params["permutation"])
        if name == "squeeze":
            self.note((view,), "stack", params["dimensions"])  # a layer by its number, if the leaf has more than one
            return view.on(a for i, a in enumerate(view.axes) if i not in params["dimensions"])
        if name == "broadcast_in_dim":
            place = {to: view.axes[i] for i, to in enumerate(params["broadcast_dimensions"])}
            return view.on(place.get(i, ()) for i in range(len(shape)))
        if name == "reshape":
            old = _shape(eqn.invars[0])
            order = params["dimensions"] or range(len(old))  # gradients of grouped convolutions transpose first
            return view.on(_regrouped([old[a] for a in order], shape, [view.axes[a] for a in order]))
        if name == "all_gather":
            at = params["all_gather_dimension"]
            return view if params["tiled"] else view.on((*view.axes[:at], (), *view.axes[at:]))
        if name == "dynamic_slice" and len(shape) > 2 and shape[1:] == _shape(eqn.invars[0])[1:]:
            self.note((view,), "stack", (0,))
            return view
        if name == "gather" and len(view.axes) > 2:
            dims = params["dimension_numbers"]
            whole = params["slice_sizes"][1:] == _shape(eqn.invars[0])[1:]
            if whole and dims.start_index_map == (0,) and dims.collapsed_slice_dims == (0,):
                self.note((view,), "stack", (0,))
                place = dict(zip(dims.offset_dims, view.axes[1:], strict=True))
                taken = view.on(place.get(i, ()) for i in range(len(shape)))
                return dataclasses.replace(taken, rows=len(_shape(eqn.invars[1])) > 1)
        return None

    def scan(self, scan: _compat.Scan, views: list[_Views]) -> Sequence[_Views]:
        rest = scan.num_consts + scan.num_carry
        for side in views[rest:]:
            self.note(side, "stack", (0,))
        layers = [tuple(v.on(v.axes[1:]) for v in side) for side in views[rest:]]
        outs = self.walk(scan.body.jaxpr, [*views[:rest], *layers])
        stacked = [tuple(v.on(((), *v.axes)) for v in side) for side in outs[scan.num_carry :]]
        return [*outs[: scan.num_carry], *stacked]

    def loop(self, loop: _compat.While, views: list[_Views]) -> Sequence[_Views]:
        start = loop.condition_consts + loop.body_consts
        state = views[start:]
        self.walk(loop.condition.jaxpr, [*views[: loop.condition_consts], *state])
        return self.walk(loop.body.jaxpr, [*views[loop.condition_consts : start], *state])


def _joined(views: Iterable[_Views]) -> _Views:
    return tuple(dict.fromkeys(v for side in views for v in side))


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
