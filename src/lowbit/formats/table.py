"""The table of formats by name."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Format:
    """A row of the table of formats.

    - `quantize`: a function of `(array, *, axis, block_size)` and the options.
    - `error`: root mean square error on N(0, 1), in its default setting.
    - `bits`: bits per weight, without scales.
    - `blocked`: whether it always has blocks; otherwise the default is one scale along the whole axis.
    - `options`: the other fields of a `QuantizationConfig` that `quantize` takes.
    - `top`: the largest level, for formats whose `quantize` takes `scale=`.
    - `scale_of_max`: computes scales from the largest |w| that they cover, for formats that need nothing else.
    - `layout`: what the bits of a declared format mean (`formats.Layout`).
    """

    name: str
    quantize: Callable[..., Any]
    error: float
    bits: float
    blocked: bool = True
    options: frozenset[str] = frozenset()
    top: float | None = None
    scale_of_max: Callable[[jax.Array], jax.Array] | None = None
    layout: Any = None


FORMATS: dict[str, Format] = {}
"""The table of formats by name. `register_format` adds to it.

>>> import lowbit
>>> lowbit.FORMATS["nf4"].bits
4.0
"""


def register_format(format: Format, *, replace: bool = False) -> Format:
    """Register a format, so that `quantize` and all tools find it by name.

    A name that is taken raises a `ValueError`, unless `replace` is True.

    >>> import lowbit
    >>> lowbit.register_format(lowbit.FORMATS["int8"]).name  # registering the same row again is fine
    'int8'
    """
    known = FORMATS.get(format.name)
    if known is not None and known != format and not replace:
        raise ValueError(
            f"There is a format {format.name!r} already, made by {known.quantize!r}: choose another name, or pass "
            "replace=True to put this one in its place."
        )
    FORMATS[format.name] = format
    return format


def format_of(array: Any) -> Format | None:
    """The row whose `quantize` makes arrays like this one, or None."""
    for row in FORMATS.values():
        # A row has a class's own `quantize`, or that with some arguments fixed (`functools.partial`).
        made_by = getattr(getattr(row.quantize, "func", row.quantize), "__self__", None)
        fixed = getattr(row.quantize, "keywords", {})
        if (
            isinstance(made_by, type)
            and isinstance(array, made_by)
            and type(array).levels is made_by.levels
            and all(getattr(array, name, None) == value for name, value in fixed.items())
        ):
            return row
    return None
