"""Indices of implicit arrays: integers and arrays are operands, the rest of an index is static."""

import operator
from typing import Any

import jax
import numpy as np

DENSE_TYPES = (jax.Array, np.ndarray, np.generic)
OPERAND = "operand"


def split_indices(shape: tuple[int, ...], index: Any) -> tuple[list[Any], tuple[Any, ...]]:
    """The operands of an index, and the rest of it."""
    operands: list[Any] = []
    items = index if isinstance(index, tuple) else (index,)
    if any(_is_mask(item) for item in items):
        # Positions outside would be clipped. Numpy knows whether a mask fits, on an array that takes no memory.
        np.broadcast_to(False, shape)[tuple(np.asarray(i) if isinstance(i, jax.Array) else i for i in items)]
    return operands, tuple(entry for item in items for entry in _split_index(item, operands))


def _is_mask(item: Any) -> bool:
    return getattr(item, "dtype", None) == np.bool_ and item.ndim > 0


def _split_index(item: Any, operands: list[Any]) -> list[Any]:
    if isinstance(item, slice):
        bounds = (item.start, item.stop, item.step)
        return [tuple(None if b is None else operator.index(b) for b in bounds)]
    if item is None or item is Ellipsis:
        return [item]
    if _is_mask(item):
        # The size of the result depends on the values, so they must be known here.
        positions = np.nonzero(np.asarray(item))
        operands.extend(positions)
        return [OPERAND] * len(positions)
    if isinstance(item, (int, *DENSE_TYPES)) and not isinstance(item, (bool, np.bool_)):
        operands.append(item)
        return [OPERAND]
    raise TypeError(
        f"Cannot index with {item!r}: pass integers, slices, None, Ellipsis or arrays, in a tuple for several axes."
    )


def joined_index(operands: list[Any], template: tuple[Any, ...]) -> tuple[Any, ...]:
    left = iter(operands)

    def item(entry: Any) -> Any:
        if entry == OPERAND:
            return next(left)
        return slice(*entry) if isinstance(entry, tuple) else entry

    return tuple(item(entry) for entry in template)


def get_item(array: jax.Array, operands: list[Any], *, template: tuple[Any, ...]) -> jax.Array:
    return array[joined_index(operands, template)]
