"""register(): rules for primitives on implicit arrays, chosen by the types of the operands."""

import dataclasses
import inspect
import itertools
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.extend import core

from . import _compat
from ._array import ImplicitArray

Fn = TypeVar("Fn", bound=Callable[..., Any])

# Names of a primitive in other versions of JAX, and the name used here.
_ALIASES = {
    "pjit": "jit",
    "remat": "checkpoint",
    "remat2": "checkpoint",
    "pcast": "pvary",
    "copy_p": "copy",
    "custom_vjp_call_jaxpr": "custom_vjp_call",
}
# Primitives that neither of JAX's public modules lists.
_UNLISTED = set(
    "shard_map stop_gradient copy optimization_barrier sharding_constraint closed_call ragged_dot_general "
    "reshard mesh_cast custom_vmap_call name stack tile unstack".split()
)
# Operations with op(a, b) == op(b, a).
_COMMUTATIVE = frozenset({"add", "add_any", "mul", "max", "min", "and", "or", "xor", "eq", "ne"})
# Annotations of a dense operand. Rules see numpy arrays, literals and tracers alike.
_DENSE_CLASSES = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)
_ANYTHING = 1_000  # greater than any inheritance distance

_rules: dict[str, list["_Rule"]] = {}
_order = itertools.count()


def register(primitive: core.Primitive | str, *, precedence: int = 0) -> Callable[[Fn], Fn]:
    """Register the decorated function as a rule for `primitive` on implicit arrays.

    Operands are positional and chosen by their annotations: classes, unions, `Any` or none; `*operands` for any number.
    The most specific rule wins, then the higher precedence, then the later one. Every dense operand is a `jax.Array`.
    The primitive's parameters come by keyword. A rule is skipped if a parameter is set that it does not name, or
    if one that it needs is missing, so a rule need not know the options of later versions of JAX.
    A first argument called `primitive` receives the primitive.
    Returning `NotImplemented` passes on to the next rule; after the last, the arrays go dense and the primitive runs.

    >>> import dataclasses, jax, jax.numpy as jnp, lowbit
    >>> @dataclasses.dataclass
    ... class Zeros(lowbit.ImplicitArray):
    ...     n: int = lowbit.aux_field()
    ...
    ...     def materialize(self):
    ...         return jnp.zeros(self.n)
    >>> @lowbit.register("mul")
    ... def _(zeros: Zeros, other: jax.Array):
    ...     return zeros
    >>> type(Zeros(3) * jnp.arange(3.0)).__name__
    'Zeros'
    """
    name = primitive_name(primitive)

    def decorate(fn: Fn) -> Fn:
        _rules.setdefault(name, []).append(_Rule.of(fn, precedence))
        return fn

    return decorate


def rule_count() -> int:
    """The number of rules, which is part of the key of compiled operators."""
    return sum(map(len, _rules.values()))


def primitive_name(primitive: core.Primitive | str) -> str:
    if not isinstance(primitive, str):
        return _ALIASES.get(primitive.name, primitive.name)
    name = _ALIASES.get(primitive, primitive)
    if name not in known_primitives():
        raise ValueError(
            f"Unknown primitive {primitive!r}: no such name in jax.extend.core.primitives or jax.lax. "
            "jax.make_jaxpr(fn)(*args) shows the names a function uses."
        )
    return name


def known_primitives() -> set[str]:
    found = _UNLISTED | set(_ALIASES.values())
    for module in (core.primitives, jax.lax):
        for value in vars(module).values():
            if isinstance(value, core.Primitive):
                found.add(_ALIASES.get(value.name, value.name))
    return found


def apply_rules(primitive: core.Primitive, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """The result of the first rule that takes these operands, or NotImplemented."""
    rules = _rules.get(primitive_name(primitive), [])
    orders = [tuple(operands)]
    if primitive_name(primitive) in _COMMUTATIVE and len(operands) == 2:
        if any(isinstance(x, ImplicitArray) and x.commute_ops for x in operands):
            orders.append(tuple(reversed(operands)))
    for ordered in orders:
        for rule in _most_specific_first(rules, ordered, params):
            try:
                result = rule.call(primitive, ordered, params)
            except Exception as error:
                kinds = ", ".join(map(describe, ordered))
                error.add_note(f"in the rule {rule.name} for the primitive {primitive} of ({kinds})")
                raise
            if result is not NotImplemented:
                return result
    return NotImplemented


def describe(operand: Any) -> str:
    if isinstance(operand, ImplicitArray):
        return f"{type(operand).__name__} {operand.dtype}{list(operand.shape)}"
    return f"{getattr(operand, 'dtype', type(operand).__name__)}{list(np.shape(operand))}"


@dataclasses.dataclass
class _Rule:
    fn: Callable[..., Any]
    operands: dict[str, tuple[type, ...]]  # the classes that each named operand may have
    variadic: tuple[type, ...] | None  # those of *operands
    takes_primitive: bool
    keywords: frozenset[str] | None  # the parameters it names; None for **params
    required: frozenset[str]  # those without a default
    precedence: int
    order: int

    @property
    def name(self) -> str:
        return f"{self.fn.__module__}:{self.fn.__code__.co_firstlineno}"

    @staticmethod
    def of(fn: Callable[..., Any], precedence: int) -> "_Rule":
        parameters = list(inspect.signature(fn).parameters.values())
        hints = typing.get_type_hints(fn)
        takes_primitive = bool(parameters) and (
            parameters[0].name == "primitive" or hints.get(parameters[0].name) is core.Primitive
        )
        operands, variadic = {}, None
        kinds = {p.kind for p in parameters}
        keywords = None if inspect.Parameter.VAR_KEYWORD in kinds else frozenset(p.name for p in parameters)
        required = frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty)
        for p in parameters[takes_primitive:]:
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty:
                operands[p.name] = _classes(hints.get(p.name, Any), fn)
            elif p.kind is p.VAR_POSITIONAL:
                variadic = _classes(hints.get(p.name, Any), fn)
        return _Rule(fn, operands, variadic, takes_primitive, keywords, required, precedence, next(_order))

    def call(self, primitive: core.Primitive, operands: Sequence[Any], params: dict[str, Any]) -> Any:
        if not self.required <= params.keys():
            _compat.warn_of_unknown_parameters(primitive, list(params))
            return NotImplemented
        if self.keywords is not None:
            if any(value is not None for name, value in params.items() if name not in self.keywords):
                return NotImplemented
            params = {name: value for name, value in params.items() if name in self.keywords}
        return self.fn(*(primitive,) * self.takes_primitive, *operands, **params)

    def distances(self, operands: Sequence[Any], params: dict[str, Any]) -> tuple[int, ...] | None:
        """How far each operand's class is from the annotation; None where one does not fit."""
        wanted = [classes for name, classes in self.operands.items() if name not in params]
        if self.variadic is not None:
            wanted += [self.variadic] * (len(operands) - len(wanted))
        if len(wanted) != len(operands):
            return None
        found = [_distance(x, classes) for x, classes in zip(operands, wanted, strict=True)]
        return None if None in found else tuple(d for d in found if d is not None)


def _classes(annotation: Any, fn: Callable[..., Any]) -> tuple[type, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(c for a in typing.get_args(annotation) for c in _classes(a, fn))
    if annotation is Any:
        return (object,)
    if isinstance(annotation, type):
        return (jax.Array,) if annotation in _DENSE_CLASSES else (annotation,)
    raise TypeError(
        f"Cannot dispatch on the annotation {annotation!r} of the rule {fn.__qualname__}: "
        "use classes, unions of classes, Any, or none."
    )


def _distance(operand: Any, classes: tuple[type, ...]) -> int | None:
    lineage = type(operand).__mro__ if isinstance(operand, ImplicitArray) else (jax.Array,)
    # A virtual subclass of an abstract class is farther from it than any real one.
    found = [
        lineage.index(c) if c in lineage else len(lineage)
        for c in classes
        if c is not object and issubclass(lineage[0], c)
    ]
    return min(found, default=_ANYTHING if object in classes else None)


def _most_specific_first(rules: Sequence[_Rule], operands: Sequence[Any], params: dict[str, Any]) -> Iterator[_Rule]:
    left = {r.order: (r, d) for r in rules if (d := r.distances(operands, params)) is not None}

    def beaten(mine: tuple[int, ...]) -> bool:
        return any(
            theirs != mine and all(a <= b for a, b in zip(theirs, mine, strict=True)) for _, theirs in left.values()
        )

    while left:
        best = [rule for rule, distances in left.values() if not beaten(distances)]
        rule = max(best, key=lambda r: (r.precedence, r.order))
        del left[rule.order]
        yield rule
