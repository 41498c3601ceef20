"""Split the arguments of a call into the arrays, which JAX traces, and everything else, which stays as it is."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import jax

from lowbit.runtime import is_implicit


class Call(NamedTuple):
    """Arguments of a function: their arrays, the places of these among all leaves, the other leaves, the structure."""

    arrays: list[Any]
    places: tuple[int, ...]
    rest: tuple[Any, ...]  # with None in the place of each array
    structure: Any

    @classmethod
    def of(cls, args: Any, is_array: Callable[[Any], bool]) -> Self:
        """Split a pytree of arguments; `is_array` tells which leaves are traced."""
        leaves, structure = jax.tree.flatten(args, is_leaf=is_implicit)
        places = tuple(i for i, x in enumerate(leaves) if is_array(x))
        rest = tuple(None if is_array(x) else x for x in leaves)
        return cls([leaves[i] for i in places], places, rest, structure)

    def args(self, arrays: Sequence[Any]) -> Any:
        """The arguments again, with other arrays in their places."""
        leaves = list(self.rest)
        for i, x in zip(self.places, arrays, strict=True):
            leaves[i] = x
        return jax.tree.unflatten(self.structure, leaves)


def is_dense_array(x: Any) -> bool:
    """Whether a leaf is a plain array, or the type of one."""
    return hasattr(x, "dtype") and not is_implicit(x)
