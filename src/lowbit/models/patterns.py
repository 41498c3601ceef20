"""Patterns over the key paths of a tree: which leaves get which format."""

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from lowbit.config import QuantizationConfig
from lowbit.formats import FORMATS


@dataclasses.dataclass(frozen=True)
class Rule:
    """Which leaves to store in which format.

    - `pattern`: matches the whole path of a leaf, such as `layers/0/mlp/kernel`. Either a glob, in which `*` also
      matches `/`, or `re:` followed by a regular expression.
    - `format`: the name of a format, a `QuantizationConfig`, or None to keep the leaf unchanged.
    - `where`: an additional condition on the shape and dtype of the leaf.

    >>> import lowbit
    >>> large = lowbit.Rule("*kernel", "nf4", where=lambda leaf: leaf.size >= 1 << 20)
    """

    pattern: str
    format: str | QuantizationConfig | None
    where: Callable[[jax.ShapeDtypeStruct], bool] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str):
            raise TypeError(f"A pattern must be a string, not {self.pattern!r}.")
        if not isinstance(self.format, str | QuantizationConfig | None):
            raise TypeError(
                f"The pattern {self.pattern!r} has the format {self.format!r}: pass the name of a format "
                f"({', '.join(FORMATS)}), a QuantizationConfig, or None to keep the leaf."
            )
        try:
            re.compile(self.expression)
        except re.error as error:
            raise ValueError(f"The pattern {self.pattern!r} is not a valid regular expression: {error}.") from None
        _ = self.config

    @property
    def expression(self) -> str:
        """The pattern as a regular expression for the whole path."""
        return self.pattern[3:] if self.pattern.startswith("re:") else fnmatch.translate(self.pattern)

    @property
    def config(self) -> QuantizationConfig | None:
        return QuantizationConfig(self.format) if isinstance(self.format, str) else self.format

    @property
    def is_default(self) -> bool:
        """Whether it matches every leaf, and so applies only to weights that are worth quantizing."""
        return self.where is None and self.pattern in ("*", "**", "re:.*", "re:.+")

    def matches(self, path: str, leaf: Any) -> bool:
        """Whether the leaf at this path matches."""
        if re.fullmatch(self.expression, path) is None:
            return False
        return self.where is None or bool(self.where(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)))


Rules = str | QuantizationConfig | Mapping[str, str | QuantizationConfig | None] | Iterable[Rule]


def ordered_rules(rules: Rules) -> list[Rule]:
    """The patterns in order, however they were given."""
    if isinstance(rules, str | QuantizationConfig):
        rules = {"*": rules}
    if isinstance(rules, Mapping):
        return [Rule(pattern, format) for pattern, format in dict[Any, Any](rules).items()]
    ordered = list(rules)
    for rule in ordered:
        if not isinstance(rule, Rule):
            raise TypeError(f"rules must be a dict from patterns to formats, or lowbit.Rule objects, not {rule!r}.")
    return ordered


def first_matches(
    rules: Sequence[Rule], leaves: Sequence[tuple[str, Any]]
) -> tuple[dict[int, list[int]], tuple[str, ...]]:
    """The leaves that each rule is the first to match, by their places, and the patterns left without a leaf."""
    by_rule: dict[int, list[int]] = {}
    for i, (path, leaf) in enumerate(leaves):
        chosen = next((r for r, rule in enumerate(rules) if is_array(leaf) and rule.matches(path, leaf)), None)
        if chosen is not None:
            by_rule.setdefault(chosen, []).append(i)
    return by_rule, tuple(rule.pattern for r, rule in enumerate(rules) if r not in by_rule)


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array or the type of one (`jax.ShapeDtypeStruct`)."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def no_match(patterns: Iterable[str], paths: Sequence[str]) -> str:
    """The message for patterns that match no leaf."""
    known = f"{', '.join(paths[:20])}{', ...' if len(paths) > 20 else ''}"
    return f"No leaf matches {', '.join(map(repr, patterns))} (or an earlier pattern took it). The paths are {known}."


def leaf_path(path: Sequence[Any]) -> str:
    """The path of a leaf as patterns see it: `layers/0/mlp/kernel`."""
    # Flax NNX keeps each array in the `value` of a variable.
    if len(path) > 1 and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == "value":
        path = path[:-1]
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Add the path of the leaf to the errors raised inside."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise type(error)(f"{path}: {error}") from error
