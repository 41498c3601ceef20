"""eformer.jaximus: the implicit-array runtime."""

from collections.abc import Callable
from typing import Any

import lowbit
from lowbit import ImplicitArray as ImplicitArray
from lowbit import register as register
from lowbit import ste as ste

__all__ = ("ImplicitArray", "OrginArray", "aux_field", "implicit", "register", "ste", "use_implicit")

OrginArray = ImplicitArray


def aux_field(metadata: Any = None, **kwargs: Any) -> Any:
    """`lowbit.aux_field`, with the metadata by position."""
    return lowbit.aux_field(metadata=metadata or {}, **kwargs)


class _Implicit:
    """`lowbit.implicit`, which is also a context: operators need none, so entering it does nothing."""

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return lowbit.implicit(fn)

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None: ...


implicit = use_implicit = _Implicit()
