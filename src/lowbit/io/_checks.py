"""Checks and errors that the readers share."""

import json
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

# The maximum memory that a byte and a value of JSON need while they are parsed, here and by the safetensors package.
_BYTE, _VALUE = 10, 400
_ALWAYS = 64 << 20  # bytes that may be spent on JSON, however small the files are


class OptionNeeded(ValueError):
    """Raised for what needs an explicit option, such as replacing a file.

    - `problem`: what is wrong without the option. `option`: its keyword. `does`: what it does, as a clause.

    >>> print(OptionNeeded("a.safetensors exists.", "force", "replaces it"))
    a.safetensors exists. force=True replaces it.
    """

    def __init__(self, problem: str, option: str, does: str):
        super().__init__(f"{problem} {option}=True {does}.")
        self.problem, self.option, self.does = problem, option, does


def short(value: Any) -> str:
    """The repr of a value, abbreviated in the middle if it is long."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:120]}...{text[-60:]}"


def bad_tensor(path: str | os.PathLike[str], name: str, problem: str) -> ValueError:
    return ValueError(f"{path} cannot be read: tensor {short(name)} {problem}. Download or convert it again.")


def checked_json(data: bytes, size: int, bad: Callable[[str], ValueError]) -> dict[str, Any]:
    """A JSON object with unique keys, from a model of `size` bytes; `bad` makes the error.

    Three bytes of JSON can become an object of a hundred. Text that would take more than two times the size of the
    model is rejected before it is parsed.
    """
    values = sum(data.count(sign) for sign in (b",", b"[", b"{"))
    if _BYTE * len(data) + _VALUE * values > 2 * size + _ALWAYS:
        raise bad(f"has JSON of {values} values in {len(data)} bytes, too much for {size} bytes of data")
    try:
        value = json.loads(str(data, "utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise bad(f"has JSON that cannot be read ({error})") from None
    if type(value) is not dict:
        raise bad("has JSON that is not an object")
    return value


def checked_field(
    fields: dict[str, Any], key: str, fits: Callable[[Any], bool], bad: Callable[[str], ValueError]
) -> Any:
    """The value of a key, or `bad` if it does not fit."""
    value = fields.get(key)
    if not fits(value):
        raise bad(f"has the {key} {short(value)}")
    return value


def are_counts(numbers: Any, most: int) -> bool:
    """Whether a value is a list of at most `most` non-negative integers of 63 bits."""
    return type(numbers) is list and len(numbers) <= most and all(type(n) is int and 0 <= n < 1 << 63 for n in numbers)


def can_be_a_shape(shape: Sequence[int]) -> bool:
    """Whether numpy can count its elements. An empty array is limited too, since JAX iterates over its rows."""
    return math.prod(max(n, 1) for n in shape) <= 1 << (20 if 0 in shape else 59)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} is a duplicate key")
        found[key] = value
    return found
