"""calibrate(): run a model over batches and collect the second moments of the inputs of its weights."""

import dataclasses
import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from lowbit.formats.moments import Moments
from lowbit.models.axes import axes_by_name, axes_by_program
from lowbit.models.calls import Call
from lowbit.models.patterns import Rule, first_matches, is_array, leaf_path, no_match
from lowbit.models.plan import SMALL
from lowbit.runtime import implicit, is_implicit, materialization, materialize

from . import rules as rules  # registers how primitives act on an ObservedArray
from .mismatch import mismatched
from .observed import IN, OUT, STACK, ObservedArray
from .statistics import Calibration

Progress = Callable[[int, int | None], None]
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def calibrate(
    fn: Callable[..., Any],
    params: Any,
    batches: Iterable[Any],
    *,
    rules: str | Mapping[str, str | None] = "full",
    loss: Callable[..., Any] | None = None,
    budget: str | int = "4GB",
    progress: Progress | None = None,
) -> Calibration:
    """Collect statistics of the inputs of every weight: what `quantize_tree(..., calibration=)` needs.

    - `fn`, `params`: the model, called as `fn(params, *batch)`, or as `fn(params, batch)` if a batch is not a tuple.
      Any JAX function works: each product with a weight is observed, inside scan, vmap, checkpoint and shard_map too.
    - `batches`: a few thousand tokens of text like that of the application are enough.
    - `rules`: "full" for second moments (x^T x, for GPTQ), "diag" for their diagonals (a fraction of the memory), or
      patterns over paths with one of these, or None for no statistic. The first pattern that matches a leaf decides.
    - `loss`: a scalar function of the results, `loss(fn(params, *batch), *batch)`. Each row is then weighted by its
      squared gradient, so that inputs count by their effect on the loss.
    - `budget`: bytes for second moments while a batch runs. Weights whose own do not fit get a diagonal. If not all fit
      at once, several passes over the batches are made, with a `UserWarning` before the first.
    - `progress`: called as `progress(done, total)` in batches of all passes; the total is None if it is not known.

    Weights that get no statistic are in `missing`, with the reason: for instance those whose product no output depends
    on, and those of convolutions.

    >>> import jax, jax.numpy as jnp, lowbit
    >>> params = {"up": jax.random.normal(jax.random.key(0), (64, 128)), "down": jnp.ones((128, 64))}
    >>> model = lambda params, x: jax.nn.gelu(x @ params["up"]) @ params["down"]
    >>> batches = jax.random.normal(jax.random.key(1), (4, 100, 64))
    >>> calibration = lowbit.calibrate(model, params, batches)
    >>> calibration
    Calibration(2 weights, 400 rows: 2 with second moments, 0 with diagonals, 0 without)
    """
    first, batches = _opened(batches)
    model = _Model.of(fn, params, loss)
    watched, missing = model.watched(_kinds(rules), first)
    limit = byte_count(budget, "budget")
    passes = _passes(watched, limit)
    if len(passes) > 1:
        _announce(passes, limit, batches)
    found = _collected(model, passes, batches, progress)
    seen = {w.path: found[w.path] for w in watched if np.any(found[w.path].count)}
    unseen = "no floating-point output of fn depends on a product with it, or on rows of it"
    missing |= {path: unseen for path in found if path not in seen}
    return Calibration(seen, missing, loss is not None)


def _collected(
    model: "_Model", passes: Sequence[Sequence["_Weight"]], batches: Any, progress: Progress | None
) -> dict[str, Moments]:
    """The moments of the weights of all passes, by path."""
    total = len(batches) * len(passes) if hasattr(batches, "__len__") else None
    done, found = 0, dict[str, Moments]()
    if progress is not None:
        progress(done, total)
    for members in passes:
        sums = _Pass(members)
        sums.start(model)
        for number, batch in enumerate(batches):
            sums.add(number, arguments(batch))
            done += 1
            if progress is not None:
                progress(done, total)
        found |= sums.moments()
    return found


@dataclasses.dataclass(frozen=True)
class _Weight:
    """A leaf to observe: its place among the leaves, its path, shape, the axes of its inputs and stacks."""

    place: int
    path: str
    shape: tuple[int, ...]
    inputs: tuple[int, ...]
    stacked: tuple[int, ...]
    full: bool

    @property
    def roles(self) -> str:
        named = {**dict.fromkeys(self.inputs, IN), **dict.fromkeys(self.stacked, STACK)}
        return "".join(named.get(a, OUT) for a in range(-len(self.shape), 0))

    @property
    def stack(self) -> tuple[int, ...]:
        return tuple(self.shape[a] for a in self.stacked)

    @property
    def moment(self) -> tuple[int, ...]:
        """The shape of the probe."""
        return (*self.stack, *[self.shape[a] for a in self.inputs] * (2 if self.full else 1))

    @property
    def nbytes(self) -> int:
        """The sum so far, and the moments of a batch."""
        return 2 * 4 * math.prod(self.moment)


@dataclasses.dataclass(frozen=True)
class _Model:
    """A function of a tree of parameters, flattened."""

    fn: Callable[..., Any]
    leaves: list[Any]
    paths: list[str]
    structure: Any
    loss: Callable[..., Any] | None

    @classmethod
    def of(cls, fn: Callable[..., Any], params: Any, loss: Callable[..., Any] | None) -> "_Model":
        found, structure = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_implicit)
        leaves = [leaf for _, leaf in found]
        if any(isinstance(leaf, Tracer | jax.ShapeDtypeStruct) for leaf in leaves):
            raise TypeError("calibrate runs the model on its weights: call it outside of jit, with arrays.")
        return cls(fn, leaves, [leaf_path(path) for path, _ in found], structure, loss)

    def call(self, leaves: Sequence[Any], args: Sequence[Any]) -> Any:
        return implicit(self.fn)(jax.tree.unflatten(self.structure, leaves), *args)

    def watched(self, kinds: Sequence[tuple[Rule, str | None]], args: Any) -> tuple[list[_Weight], dict[str, str]]:
        """The leaves to observe, and those that cannot be, each with the reason."""
        with _explaining(self, 0, args):
            uses = axes_by_program(self.fn, self.leaves, partial(jax.tree.unflatten, self.structure), args)
        named = list(zip(self.paths, self.leaves, strict=True))
        by_rule, unmatched = first_matches([rule for rule, _ in kinds], named)
        if unmatched:
            raise ValueError(no_match(unmatched, self.paths))
        watched, missing = [], {}
        for rule, kind in ((r, kinds[r][1]) for r in by_rule):
            for i in by_rule[rule] if kind is not None else ():
                leaf, path, use = self.leaves[i], self.paths[i], uses[i]
                shape = tuple(leaf.shape)
                if is_implicit(leaf) or not jnp.issubdtype(leaf.dtype, jnp.floating) or len(shape) < 2:
                    continue
                if use.axes is not None and use.how == "fn":
                    watched.append(_Weight(i, path, shape, use.axes, use.stacked, kind == "full"))
                elif use.looked_up and len(shape) == 2:  # a product with rows of zeros and a one
                    watched.append(_Weight(i, path, shape, (-2,), (), full=False))
                elif math.prod(shape) >= SMALL and not axes_by_name(path, shape).vector:
                    missing[path] = use.how
        return sorted(watched, key=lambda weight: weight.place), missing


class _Pass:
    """One pass over the batches: the sums of moments of some of the weights."""

    model: _Model

    def __init__(self, members: Sequence[_Weight]):
        self.members = members
        self.steps: dict[Any, Callable[..., Any]] = {}

    def start(self, model: _Model) -> None:
        """Start from zero, for a model of the same structure as earlier ones."""
        self.model = model
        self.sums = [(jnp.zeros(w.moment, jnp.float32), jnp.zeros(w.stack, jnp.float32)) for w in self.members]

    def add(self, number: int, args: tuple[Any, ...]) -> None:
        """Add the moments of a batch."""
        given = Call.of((self.model.leaves, args), is_array)
        others = tuple((type(x), x) for x in given.rest[len(self.model.leaves) :])
        key = given.structure, given.places, others
        if key not in self.steps:
            self.steps[key] = jax.jit(partial(self.step, given._replace(arrays=[])), donate_argnums=0)
        with _explaining(self.model, number, args), materialization("allow"):
            self.sums, finite = self.steps[key](self.sums, given.arrays)
        bad = [w.path for w, fine in zip(self.members, np.asarray(finite), strict=True) if not fine]
        if bad:
            shown = ", ".join(bad[:5]) + ", ..." * (len(bad) > 5)
            raise ValueError(
                f"Batch {number} gives {len(bad)} weights inputs that are NaN, infinite or too large: {shown}."
            )

    def step(self, given: Call, sums: Any, arrays: list[Any]) -> Any:
        def scalar(probes: Any) -> jax.Array:
            leaves, args = given.args(arrays)
            guided = self.model.loss is not None
            for weight, probe in zip(self.members, probes, strict=True):
                base = leaves[weight.place]
                moment, count = probe
                leaves[weight.place] = ObservedArray(base, moment, count, weight.roles, weight.full, guided)
            out = materialize(implicit(self.model.fn)(jax.tree.unflatten(self.model.structure, leaves), *args))
            return _scalar_of(out) if self.model.loss is None else self.model.loss(out, *args)

        zeros = jax.tree.map(jnp.zeros_like, sums)
        moments = jax.grad(scalar)(zeros)
        finite = jnp.stack([jnp.isfinite(moment).all() for moment, _ in moments])
        return jax.tree.map(jnp.add, sums, moments), finite

    def moments(self) -> dict[str, Moments]:
        found = {}
        for weight, (moment, count) in zip(self.members, self.sums, strict=True):
            k = math.prod(weight.shape[a] for a in weight.inputs)
            full = np.asarray(moment).reshape(*weight.stack, k, *((k,) if weight.full else ()))
            diag = np.ascontiguousarray(np.diagonal(full, axis1=-2, axis2=-1)) if weight.full else full
            hessian = full if weight.full else None
            axes = weight.shape, weight.inputs, weight.stacked
            found[weight.path] = Moments(*axes, diag, hessian, np.asarray(count))
        self.sums = []
        return found


class Observer:
    """Collects moments for one set of parameters after another, such as the layers of a model that pass through memory.

    All must have the structure and shapes of `params`, so that the program is compiled once. `fn`, `rules` and `budget`
    as for `calibrate`; `batch` is the first one.
    """

    def __init__(
        self, fn: Callable[..., Any], params: Any, batch: Any, *, rules: Any = "full", budget: str | int = "4GB"
    ):
        self.fn = fn
        watched, self.missing = _Model.of(fn, params, None).watched(_kinds(rules), arguments(batch))
        self.passes = [_Pass(members) for members in _passes(watched, byte_count(budget, "budget"))]

    def moments(self, params: Any, batches: Sequence[Any]) -> dict[str, Moments]:
        """The moments of the inputs of the weights in `params`, by path."""
        model, found = _Model.of(self.fn, params, None), dict[str, Moments]()
        for sums in self.passes:
            sums.start(model)
            for number, batch in enumerate(batches):
                sums.add(number, arguments(batch))
            found |= sums.moments()
        return found


def _scalar_of(out: Any) -> jax.Array:
    """A number that depends on every floating-point result."""
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(out) if hasattr(leaf, "dtype")]
    floats = [jnp.sum(leaf.astype(jnp.float32)) for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
    if not floats:
        raise TypeError("fn returns no floating-point array, so no statistic can be collected from it.")
    return sum(floats[1:], floats[0])


def _kinds(rules: str | Mapping[str, str | None]) -> list[tuple[Rule, str | None]]:
    given = {"*": rules} if isinstance(rules, str) else rules
    for pattern, kind in given.items():
        if kind not in ("full", "diag", None):
            raise ValueError(f"The pattern {pattern!r} has {kind!r}: the value must be 'full', 'diag' or None.")
    return [(Rule(pattern, None), kind) for pattern, kind in given.items()]


def byte_count(given: str | int, name: str) -> int:
    """A number of bytes: 4_000_000_000, "4GB" or "4GiB"."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([KMGT]?I?)B?\s*", str(given).upper())
    if found is None or found[2] not in _UNITS:
        raise ValueError(f"{name}={given!r} must be a number of bytes, such as 500_000_000, '4GB' or '512MiB'.")
    return int(float(found[1]) * _UNITS[found[2]])


def _passes(watched: Sequence[_Weight], limit: int) -> list[list[_Weight]]:
    """The weights of each pass: as many as fit. One that does not fit alone gets a diagonal."""
    fitting = [dataclasses.replace(w, full=w.full and w.nbytes <= limit) for w in watched]
    passes: list[list[_Weight]] = [[w for w in fitting if not w.full]]
    left = limit
    for weight in (w for w in fitting if w.full):
        if weight.nbytes > left:
            passes.append([])
            left = limit
        passes[-1].append(weight)
        left -= weight.nbytes
    return [members for members in passes if members]


def _announce(passes: Sequence[Sequence[_Weight]], limit: int, batches: Any) -> None:
    count, size = sum(map(len, passes)), sum(w.nbytes for members in passes for w in members)
    said = f"The statistics of {count} weights take {size / 1e9:.3g} GB, and the budget is {limit / 1e9:.3g} GB"
    if isinstance(batches, itertools.chain):
        raise ValueError(
            f"{said}, so {len(passes)} passes over the batches are needed, and an iterator can be read once: pass a "
            "list, a larger budget=, or rules='diag'."
        )
    warnings.warn(f"{said}: calibrate makes {len(passes)} passes over the batches.", stacklevel=3)


def _opened(batches: Iterable[Any]) -> tuple[tuple[Any, ...], Any]:
    """The first batch, and all of them again."""
    once: Iterator[Any] = iter(batches)
    try:
        first = next(once)
    except StopIteration:
        raise ValueError("There is no batch to calibrate with.") from None
    return arguments(first), itertools.chain([first], once) if once is batches else batches


def arguments(batch: Any) -> tuple[Any, ...]:
    """The arguments of `fn` after the parameters."""
    return batch if isinstance(batch, tuple) else (batch,)


class _explaining:
    """Add to errors raised inside the number and the shapes of the batch, and the weights that it does not fit."""

    def __init__(self, model: _Model, number: int, args: Any):
        self.model, self.number, self.args = model, number, args

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception):
            shapes = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}" if is_array(x) else repr(x), self.args)
            error.add_note(f"lowbit.calibrate called fn(params, *batch) with batch {self.number}: {shapes}.")
            paths = mismatched(self.model.call, self.model.leaves, self.model.paths, self.args, error)
            if paths:
                error.add_note(f"The shapes do not fit in a product with {' or '.join(paths)}.")
