"""`flax.serialization` for trees with quantized leaves: importing this registers the array classes of lowbit.

Flax looks classes up in a table of its own, and takes those that are not in it for values of msgpack. The state of an
array is a dict of its components, with its static metadata as text under `static`.

>>> import jax.numpy as jnp, lowbit
>>> import lowbit.compat.flax
>>> from flax import serialization
>>> params = {"kernel": lowbit.quantize(jnp.ones((64, 32)), "int8"), "bias": jnp.zeros(32)}
>>> sorted(serialization.to_state_dict(params)["kernel"])
['codes', 'scales', 'static']
>>> back = serialization.from_bytes(params, serialization.to_bytes(params))
>>> bool((back["kernel"].materialize() == 1).all())
True
"""

from collections.abc import Iterator
from typing import Any, TypeVar

from flax import serialization

from lowbit.adapters.array import LoraArray
from lowbit.formats import PermutedArray, QuantizedArray

STATIC = "static"
C = TypeVar("C", bound=type)


def register(cls: C) -> C:
    """Let `flax.serialization` store the arrays of a class; for formats defined after this module was imported.

    >>> import lowbit, lowbit.compat.flax
    >>> lowbit.compat.flax.register(lowbit.Array8B) is lowbit.Array8B
    True
    """
    serialization.register_serialization_state(cls, _to_state, _from_state, override=True)
    return cls


def _to_state(array: Any) -> dict[str, Any]:
    components = {name: serialization.to_state_dict(value) for name, value in _components(array).items()}
    return {**components, STATIC: _static(array)}


def _from_state(target: Any, state: dict[str, Any]) -> Any:
    """The array of a state. The target gives the metadata, which must be that of the array that was stored."""
    wanted = {STATIC, *_components(target)}
    if set(state) != wanted:
        raise ValueError(
            f"{_where()} stores {', '.join(sorted(state))}, and the target, an array of class {type(target).__name__}, "
            f"has {', '.join(sorted(wanted))}: make the target in the same format."
        )
    if state[STATIC] != _static(target):
        raise ValueError(
            f"{_where()} was stored with {state[STATIC]}, and the target has {_static(target)}: make the target with "
            "the same call of quantize_tree or quantize."
        )
    components = {
        name: serialization.from_state_dict(value, state[name], name=name)
        for name, value in _components(target).items()
    }
    return target.replace(**components)


def _components(array: Any) -> dict[str, Any]:
    names, _ = array._fields()
    return {name: value for name in names if (value := getattr(array, name)) is not None}


def _static(array: Any) -> str:
    """The class and the static metadata, as text."""
    _, names = array._fields()
    return f"{type(array).__name__}({', '.join(f'{name}={getattr(array, name)!s}' for name in names)})"


def _where() -> str:
    return f"The state at path {serialization.current_path()}"


def _subclasses(cls: type) -> Iterator[type]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


for _cls in (LoraArray, PermutedArray, *_subclasses(QuantizedArray)):
    register(_cls)
