"""Formats: what the stored bits mean. One file per format; no primitives, no platforms.

A custom format is a `Layout` added by `declare`, or a subclass of `QuantizedArray` written with the functions below:
see `examples/new_format.py`.
"""

import importlib

from ._inputs import axis_spans, checked_input, finite_or_nan, raise_if_not_finite
from .blocks import WHOLE, block_max, block_sum, pack, spread, unpack
from .int8 import Array8B
from .nf4 import ArrayNF4
from .onebit import Array1B
from .packed import Layout, PackedArray, declare
from .permuted import PermutedArray
from .quantized import QuantizedArray, stored
from .table import FORMATS, Format, register_format

__all__ = [
    "FORMATS",
    "WHOLE",
    "Array1B",
    "Array8B",
    "ArrayNF4",
    "Format",
    "Layout",
    "PackedArray",
    "PermutedArray",
    "QuantizedArray",
    "axis_spans",
    "block_max",
    "block_sum",
    "checked_input",
    "declare",
    "finite_or_nan",
    "pack",
    "raise_if_not_finite",
    "register_format",
    "spread",
    "stored",
    "unpack",
]

# Arrays must not meet JAX without their rules, whichever module of lowbit is imported first. This is the last line
# since the rules import the names above.
importlib.import_module("lowbit.rules")
