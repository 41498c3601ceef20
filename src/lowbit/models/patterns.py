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

    - `pattern`: for the whole path, as in `layers/0/mlp/kernel`. A glob, where `*` matches `/` too, or `re:` and a
      regular expression.
    - `format`: the name of a format, a `QuantizationConfig`, or None to keep the leaf as it is.
    - `where`: a test of the leaf's shape and dtype, on top of the pattern.

    >>> import lowbit
    >>> large = lowbit.Rule("*kernel", "nf4", where=lambda leaf: leaf.size >= 1 << 20)
    """

    pattern: str
    format: str | QuantizationConfig | None
    where: Callable[[jax.ShapeDtypeStruct], bool] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str):
            raise TypeError(f"The pattern of a rule is a string, not {self.pattern!r}.")
        if not isinstance(self.format, str | QuantizationConfig | None):
            raise TypeError(
                f"The rule {self.pattern!r} asks for {self.format!r}: pass the name of a format "
                f"({', '.join(FORMATS)}), a QuantizationConfig, or None to keep the leaf."
            )
        try:
            re.compile(self.expression)
        except re.error as error:
            raise ValueError(f"The pattern {self.pattern!r} is no regular expression: {error}.") from None
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
        """Whether it speaks of all leaves, and so only of those that are worth it."""
        return self.where is None and self.pattern in ("*", "**", "re:.*", "re:.+")

    def matches(self, path: str, leaf: Any) -> bool:
        """Whether the rule is for this leaf."""
        if re.fullmatch(self.expression, path) is None:
            return False
        return self.where is None or bool(self.where(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)))


Rules = str | QuantizationConfig | Mapping[str, str | QuantizationConfig | None] | Iterable[Rule]


def ordered_rules(rules: Rules) -> list[Rule]:
    """Rules however given, as a list."""
    if isinstance(rules, str | QuantizationConfig):
        rules = {"*": rules}
    if isinstance(rules, Mapping):
        return [Rule(pattern, format) for pattern, format in dict[Any, Any](rules).items()]
    ordered = list(rules)
    for rule in ordered:
        if not isinstance(rule, Rule):
            raise TypeError(f"Rules are a dict of patterns and formats, or lowbit.Rule's; {rule!r} is neither.")
    return ordered


def leaf_path(path: Sequence[Any]) -> str:
    """The path of a leaf as rules see it: `layers/0/mlp/kernel`."""
    # Flax NNX keeps each array in the `value` of a variable.
    if len(path) > 1 and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == "value":
        path = path[:-1]
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def no_match(patterns: Iterable[str], paths: Sequence[str]) -> str:
    """What to say of patterns that no leaf matches."""
    known = f"{', '.join(paths[:20])}{', ...' if len(paths) > 20 else ''}"
    return f"No leaf matches {', '.join(map(repr, patterns))} (or an earlier rule took it). The paths are {known}."


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Errors say which leaf they speak of."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise type(error)(f"{path}: {error}") from error
