"""Formats, their options and rules as they are written on the command line."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from lowbit import QuantizationConfig
from lowbit.formats import FORMATS
from lowbit.models.patterns import Rule

FORMAT = "FORMAT[:OPTION=VALUE,...]"


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError
    return text.lower() == "true"


def _axes(text: str) -> int | tuple[int, ...]:
    axes = tuple(int(axis) for axis in text.split(","))
    return axes[0] if len(axes) == 1 else axes


# How the value of each option is read, and what to write.
_OPTIONS: dict[str, tuple[Callable[[str], Any], str]] = {
    "block_size": (int, "a number"),
    "axis": (_axes, "a number, or several separated by commas"),
    "double_quant": (_boolean, "true or false"),
    "absmean": (_boolean, "true or false"),
    "offset": (_boolean, "true or false"),
    "search": (_boolean, "true or false"),
    "scale_dtype": (str, "float32, bfloat16 or float16"),
}


def known(format: str, others: Sequence[str] = ()) -> str:
    """The name of a format, or an error that lists the names, also the `others` that the command knows."""
    if format not in FORMATS:
        raise ValueError(f"Unknown format {format!r}: it must be one of {', '.join((*FORMATS, *others))}.")
    return format


def counts(name: str, text: str) -> list[int]:
    """The positive numbers in the value of an option of the command."""
    items = text.split(",")
    if not all(item.strip().isdecimal() and int(item) > 0 for item in items):
        raise ValueError(f"{name} {text!r} must be positive numbers, separated by commas, such as 1,16,256.")
    return [int(item) for item in items]


def option(name: str, text: str) -> Any:
    """The value of an option of a format."""
    if name not in _OPTIONS:
        raise ValueError(f"Unknown option {name!r} of a format: it must be one of {', '.join(_OPTIONS)}.")
    read, wanted = _OPTIONS[name]
    try:
        return read(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} must be {wanted}.") from None


def config(text: str, **given: Any) -> QuantizationConfig:
    """The config of a format with options, `int4:offset=true,block_size=64`, and of options that are not None."""
    name, _, rest = text.partition(":")
    found: list[str] = []
    for item in rest.split(",") if rest else ():
        if "=" in item or not found:
            found.append(item)
        else:
            found[-1] += f",{item}"  # a further axis
    options: dict[str, Any] = {}
    known(name)
    for item in found:
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"{text!r}: write {FORMAT}, for instance int8:block_size=32.")
        options[key] = option(key, value)
    return QuantizationConfig(name, **options | {key: value for key, value in given.items() if value is not None})


def several(text: str | None) -> list[str]:
    """The formats to choose from, `q2,q3,int8:block_size=32`; without any given, one each of 2, 3, 4 and 8 bits."""
    found: list[str] = []
    for item in (text or "q2,q3,q4,int8").split(","):
        if item.partition(":")[0] in FORMATS or not found:
            found.append(item)
        else:
            found[-1] += f",{item}"  # a further option
    if len(found) < 2:
        raise ValueError(f"--format {text}: --bits and --size choose among several formats, such as q2,q3,q4,int8.")
    return found


def rule(text: str) -> Rule:
    """A rule of `PATTERN=FORMAT[:OPTION=VALUE,...]` or `PATTERN=keep`."""
    # A pattern may contain = and : itself, so the options are found by the name of the format before them.
    names = "|".join(sorted(map(re.escape, FORMATS), key=len, reverse=True))
    with_options = re.fullmatch(rf"(.+)=((?:{names}):.*)", text)
    pattern, found, format = (with_options[1], "=", with_options[2]) if with_options else text.rpartition("=")
    if not found or not pattern:
        raise ValueError(f"--rule {text!r}: write PATTERN={FORMAT}, for instance '*embed*=int8'.")
    return Rule(pattern, None if format == "keep" else config(format))


def cache_formats(both: str | None, k: str | None, v: str | None) -> tuple[str | None, str | None] | None:
    """The formats of cached keys and values."""
    keys, values = k or both, v or both
    for format in (keys, values):
        if format is not None:
            known(format)
    return (keys, values) if keys or values else None
