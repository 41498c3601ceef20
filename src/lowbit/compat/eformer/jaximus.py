"""eformer.jaximus: the implicit-array runtime."""

import abc
import dataclasses
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from jax.core import ShapedArray

import lowbit
from lowbit import register as register
from lowbit import ste as ste

__all__ = ("ImplicitArray", "OrginArray", "aux_field", "implicit", "register", "ste", "use_implicit")

_asking = threading.local()


def aux_field(metadata: Any = None, **kwargs: Any) -> Any:
    """`lowbit.aux_field`, with `metadata` as the first positional argument."""
    return lowbit.aux_field(metadata=metadata or {}, **kwargs)


class _Known:
    """`shape` or `dtype`: from the constructor, from `compute_shape` or `compute_dtype`, or from `materialize()`."""

    def __init__(self, check: Callable[[Any], Any]):
        self.check = check

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, array: Any, owner: type | None = None) -> Any:
        if array is None:
            return None
        if (told := self.told(array)) is not None:
            return told
        if getattr(_asking, "now", False):
            raise AttributeError(
                f"materialize() of {type(array).__name__} asks for {self.name}, which is not known: pass {self.name}= "
                f"to the constructor, or define compute_{self.name}()."
            )
        _asking.now = True
        try:
            return getattr(array._dense_type, self.name)
        finally:
            _asking.now = False

    def __set__(self, array: Any, value: Any) -> None:
        vars(array)[self.name] = None if value is None else self.check(value)

    def told(self, array: Any) -> Any:
        """The value if it is known without `materialize()`, or None."""
        given = vars(array).get(self.name)
        given = getattr(array, f"compute_{self.name}")() if given is None else given
        return None if given is None else self.check(given)


@dataclasses.dataclass(eq=False, repr=False)
class _Fields(lowbit.ImplicitArray):
    shape: Any = lowbit.aux_field(kw_only=True, default=None)
    dtype: Any = lowbit.aux_field(kw_only=True, default=None)


@dataclasses.dataclass(eq=False, repr=False)
class ImplicitArray(_Fields, abc.ABC):
    """`lowbit.ImplicitArray` with the static fields `shape` and `dtype`, which the constructor takes by keyword.

    If left out they come from `compute_shape()` and `compute_dtype()`, or else from `materialize()`. A shape or dtype
    other than that of `materialize()` raises a `ValueError`.
    """

    shape = _Known(tuple)
    dtype = _Known(np.dtype)

    default_shape: ClassVar[Any] = None
    default_dtype: ClassVar[Any] = None

    def __post_init__(self) -> None:
        for known in (vars(ImplicitArray)[name] for name in ("shape", "dtype")):
            told = known.told(self)
            if told is not None and told != (found := getattr(self._dense_type, known.name)):
                raise ValueError(
                    f"{type(self).__name__} has {known.name}={told}, but its materialize() gives {found}: pass that "
                    f"{known.name}, or leave it out."
                )

    def compute_shape(self) -> Any:
        """The shape if none is given; None means that of `materialize()`."""
        return self.default_shape

    def compute_dtype(self) -> Any:
        """The dtype if none is given; None means that of `materialize()`."""
        return self.default_dtype

    @property
    def aval(self) -> Any:
        """Shape and dtype as a `ShapedArray`."""
        return ShapedArray(self.shape, self.dtype)

    def _flatten(self) -> tuple[list[Any], tuple[Any, ...]]:
        # Only values that were given: deriving the others needs arrays, and JAX flattens with placeholders.
        components, static = self._fields()
        return [getattr(self, n) for n in components], tuple(vars(self).get(n) for n in static)


ImplicitArray.register(lowbit.QuantizedArray)
ImplicitArray.register(lowbit.LoraArray)
OrginArray = ImplicitArray


class _Implicit:
    """`lowbit.implicit`, also usable as a context manager, which does nothing: operators work without it."""

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return lowbit.implicit(fn)

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None: ...


implicit = use_implicit = _Implicit()
