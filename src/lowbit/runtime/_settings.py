"""Settings that are part of JAX's trace context: a function traced before a switch is traced again after it."""

import threading
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

import jax

from . import _compat

T = TypeVar("T", bound=Hashable)


class Setting(Generic[T]):
    """A named choice. Calling it sets it everywhere; `with` limits it to the block and the thread."""

    def __init__(self, name: str, default: T, choices: tuple[T, ...]):
        self.name = name
        self.choices = choices
        self._context = jax.make_user_context(default)
        self._everywhere = default
        self._lock = threading.Lock()

    @property
    def value(self) -> T:
        return self._context.value

    def __call__(self, value: T) -> "_Switch[T]":
        if value not in self.choices:
            choices = ", ".join(repr(choice) for choice in self.choices)
            raise ValueError(f"{self.name}({value!r}): the value must be one of {choices}.")
        return _Switch(self, value)

    def __repr__(self) -> str:
        return f"{self.name}({self.value!r})"

    def set_everywhere(self, value: T) -> T:
        """Set it for all threads that have no value of their own; returns what it was."""
        with self._lock:
            before, self._everywhere = self._everywhere, value
            _compat.set_globally(self._context, value)
        return before


class _Switch(Generic[T]):
    def __init__(self, setting: Setting[T], value: T):
        self._setting, self._value = setting, value
        self._before = setting.set_everywhere(value)

    def __enter__(self) -> None:
        self._setting.set_everywhere(self._before)
        self._local: Any = self._setting._context(self._value)
        self._local.__enter__()

    def __exit__(self, *exception: object) -> None:
        self._local.__exit__(*exception)
