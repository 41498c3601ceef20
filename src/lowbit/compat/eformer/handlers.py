"""eformer's handlers by name, one per primitive and format. Each runs the primitive by lowbit's rules."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

from lowbit import implicit

# The suffixes of handler names, after the primitive and the format.
_OPERANDS = {
    "lt": ("xy",),
    "convert_element_type": ("operand_pos", "operand_kw"),
    "integer_pow": ("xy", "x"),
    "div": ("xy",),
    "sqrt": ("x",),
    "dot_general": ("lhs_rhs",),
    "add": ("xy",),
    "reduce": ("operand_init_value",),
    "mul": ("xy",),
    "transpose": ("operand",),
    "conv_general_dilated": ("lhs_rhs",),
    "max": ("xy",),
    "exp": ("x",),
    "log": ("x",),
    "reshape": ("operand",),
    "concatenate": ("operands",),
    "broadcast_in_dim": ("operand",),
    "gather": ("operand",),
}
# Parameters that a handler may be called without.
_DEFAULTS: dict[str, dict[str, Any]] = {"integer_pow": {"y": 2}, "convert_element_type": {"new_dtype": jnp.bfloat16}}


def _handler(name: str, operation: str) -> Callable[..., Any]:
    signature = inspect.signature(getattr(lax, operation))

    def handle(primitive: Primitive, *operands: Any, **params: Any) -> Any:
        if len(operands) == 1:
            params = {**_DEFAULTS.get(operation, {}), **params}
        if operation == "integer_pow" and not isinstance((*operands, 2)[1], int):
            return implicit(lax.pow)(*operands)  # elementwise exponents
        try:
            signature.bind(*operands, **params)
        except TypeError:  # not the arguments of the lax function, so the parameters of the primitive
            return implicit(partial(primitive.bind, **params))(*operands)
        return implicit(partial(getattr(lax, operation), **params))(*operands)

    handle.__name__ = handle.__qualname__ = name
    handle.__doc__ = f"`lax.{operation}` with quantized operands."
    return handle


def for_format(suffix: str) -> dict[str, Any]:
    """The handlers of a format: `dot_general_nf4_lhs_rhs` and the others."""
    names = {f"{op}_{suffix}_{operands}": op for op, all_of in _OPERANDS.items() for operands in all_of}
    if suffix == "1bit":
        names["div_1bit_xy_fallback"] = "div"
    return {name: _handler(name, operation) for name, operation in names.items()}
