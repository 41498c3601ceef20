"""Implicit arrays: objects that JAX code uses as arrays without dense values. Knows JAX, not quantization."""

from . import _control as _control
from ._array import ImplicitArray, aux_field, dense, is_implicit, materialize
from ._interpret import MaterializationWarning, implicit, materialization, run, takes_rows, use_implicit
from ._register import register
from ._settings import Setting
from ._ste import ste

__all__ = [
    "ImplicitArray",
    "MaterializationWarning",
    "Setting",
    "aux_field",
    "dense",
    "implicit",
    "is_implicit",
    "materialization",
    "materialize",
    "register",
    "run",
    "ste",
    "takes_rows",
    "use_implicit",
]
