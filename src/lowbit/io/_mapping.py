"""The names of a mapping: which tensors of a file make which leaf of a tree, as layers of a stack or transposed."""

import dataclasses
import difflib
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

Target = str | tuple[str, str | None] | None
_SHOWN = 5  # names in an error


@dataclasses.dataclass(frozen=True)
class Source:
    """A tensor that a leaf is made of.

    - `index`: its place in a stack; empty for a leaf of one tensor.
    - `transposed`: whether its last two axes are swapped; None if the shapes decide.
    """

    name: str
    index: tuple[int, ...]
    transposed: bool | None


@dataclasses.dataclass(frozen=True)
class _Rule:
    pattern: str
    target: str | None
    transposed: bool | None

    @classmethod
    def of(cls, pattern: str, given: Target) -> "_Rule":
        match given:
            case None | str():
                return cls(pattern, given, None)
            case (str(target), "T" | None as flag):
                return cls(pattern, target, flag == "T")
        raise TypeError(
            f"mapping[{pattern!r}] must be a path, (path, 'T') to transpose, (path, None) not to, or None to leave "
            f"tensors out; it is {given!r}."
        )

    def source(self, found: re.Match[str]) -> tuple[str, Source] | None:
        """The leaf that a matching tensor belongs to, and how; None for a tensor that is left out."""
        if self.target is None:
            return None
        name = found.string
        try:
            path, bracket, numbers = found.expand(self.target).partition("[")
            index = tuple(int(number) for number in numbers.removesuffix("]").split(",")) if bracket else ()
        except (re.error, IndexError, ValueError) as error:
            raise ValueError(
                f"mapping[{self.pattern!r}] = {self.target!r} cannot be applied to {name!r}: {error}."
            ) from None
        return path, Source(name, index, self.transposed)


def sources(
    mapping: Mapping[str, Target],
    names: Sequence[str],
    leaves: Mapping[str, tuple[int, ...]],
    bad: Callable[[str], ValueError],
) -> dict[str, list[Source]]:
    """The tensors that each leaf is made of, in the order of their layers.

    - `names`: of the tensors. `leaves`: the shape of each leaf. `bad` makes the error.
    """
    made: dict[str, list[Source]] = {}
    for name, (rule, found) in _matched(mapping, names, bad).items():
        if (placed := rule.source(found)) is None:
            continue
        path, source = placed
        if path not in leaves:
            near = difflib.get_close_matches(path, leaves)
            raise bad(
                f"{name!r} is mapped to {path!r}, which `like` does not have."
                + (f" Did you mean {' or '.join(near)}?" if near else "")
            )
        made.setdefault(path, []).append(source)
    if missing := [path for path in leaves if path not in made]:
        raise bad(f"no tensor is mapped to {_some(missing)} of `like`.")
    return {path: _in_order(path, found, leaves[path], bad) for path, found in made.items()}


def _matched(
    mapping: Mapping[str, Target], names: Sequence[str], bad: Callable[[str], ValueError]
) -> dict[str, tuple[_Rule, re.Match[str]]]:
    """The rule of each tensor: exactly one pattern must match its whole name."""
    rules = [_Rule.of(pattern, target) for pattern, target in mapping.items()]
    try:
        expressions = [re.compile(rule.pattern) for rule in rules]
    except re.error as error:
        raise ValueError(
            f"mapping has the pattern {error.pattern!r}, which is not a regular expression: {error}."
        ) from None
    matched: dict[str, tuple[_Rule, re.Match[str]]] = {}
    for name in names:
        pairs = zip(rules, expressions, strict=True)
        found = [(rule, match) for rule, expression in pairs if (match := expression.fullmatch(name))]
        if len(found) > 1:
            raise bad(f"{name!r} matches {' and '.join(repr(rule.pattern) for rule, _ in found)} of `mapping`.")
        if found:
            matched[name] = found[0]
    if unmatched := [name for name in names if name not in matched]:
        raise bad(f"no pattern of `mapping` matches {_some(unmatched)}. Map them, or to None to leave them out.")
    used = {rule.pattern for rule, _ in matched.values()}
    if unused := [rule.pattern for rule in rules if rule.target is not None and rule.pattern not in used]:
        raise bad(f"no tensor matches {_some(unused)} of `mapping`. The tensors are {_some(names)}.")
    return matched


def _in_order(path: str, found: list[Source], shape: tuple[int, ...], bad: Callable[[str], ValueError]) -> list[Source]:
    by_index: dict[tuple[int, ...], Source] = {}
    for source in found:
        if (other := by_index.setdefault(source.index, source)) is not source:
            place = f"{path}[{','.join(map(str, source.index))}]" if source.index else path
            raise bad(f"{other.name!r} and {source.name!r} are both mapped to {place!r}.")
    axes = {len(source.index) for source in found}
    if len(axes) > 1 or (depth := axes.pop()) > len(shape):
        raise bad(
            f"{_some([source.name for source in found])} are mapped to {path!r} of shape {shape} in `like` with "
            f"different numbers of indices, or more than it has axes."
        )
    wanted = list(itertools.product(*map(range, shape[:depth])))
    if missing := [_number(index) for index in wanted if index not in by_index]:
        raise bad(f"{path!r} of shape {shape} in `like` lacks layer {_some(missing, quoted=False)}.")
    if beyond := [by_index[index].name for index in by_index if index not in set(wanted)]:
        raise bad(f"{_some(beyond)} are layers beyond the shape {shape} of {path!r} in `like`.")
    return [by_index[index] for index in wanted]


def _number(index: tuple[int, ...]) -> str:
    return str(index[0] if len(index) == 1 else index)


def _some(names: Iterable[str], *, quoted: bool = True) -> str:
    shown = [repr(name) if quoted else name for name in names]
    return ", ".join(shown[:_SHOWN]) + (f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else "")
