"""Settings in JAX's trace context: changing one retraces compiled functions."""

import sys
import threading
import warnings
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

import jax

from . import _compat

T = TypeVar("T", bound=Hashable)


class Setting(Generic[T]):
    """A setting: `with setting(value):` applies in the block and its thread, `setting.set(value)` in the process.

    >>> import lowbit
    >>> with lowbit.materialization("error"):
    ...     lowbit.materialization.value
    'error'
    >>> lowbit.materialization.value
    'warn'
    """

    def __init__(self, name: str, default: T, choices: tuple[T, ...]):
        self.name = name
        self.choices = choices
        self._context = jax.make_user_context(default)
        self._thread = threading.local()

    @property
    def value(self) -> T:
        """The value of the innermost `with` block of this thread, or else that of the process."""
        return self._context.value

    def __call__(self, value: T) -> "Switch[T]":
        """A context manager that sets the value. Without `with` it changes nothing."""
        return Switch(self, self._checked(value, "({!r})"))

    def set(self, value: T) -> None:
        """Set the value for the process: it applies in every thread outside of `with` blocks.

        >>> import lowbit
        >>> lowbit.compute.set("fast")
        >>> lowbit.compute.value
        'fast'
        >>> lowbit.compute.set(None)  # the default: each array has its own
        """
        _compat.set_globally(self._context, self._checked(value, ".set({!r})"))

    def __repr__(self) -> str:
        return f"{self.name}({self.value!r})"

    def _checked(self, value: T, call: str) -> T:
        if value not in self.choices:
            choices = ", ".join(repr(choice) for choice in self.choices)
            raise ValueError(f"{self.name}{call.format(value)}: the value must be one of {choices}.")
        return value

    def _entered(self) -> "tuple[Switch[T], ...]":
        return getattr(self._thread, "entered", ())

    def _enter(self, switches: "tuple[Switch[T], ...]") -> None:
        """Set the stack of values of this thread; the last one applies."""
        # One JAX context at a time, so that blocks may be exited in any order.
        held: Any = getattr(self._thread, "held", None)
        if held is not None:
            held.__exit__(None, None, None)
        self._thread.held = held = self._context(switches[-1].value) if switches else None
        self._thread.entered = switches
        if held is not None:
            held.__enter__()


class Switch(Generic[T]):
    """A value of a setting, as a context manager that can be entered any number of times and in any thread."""

    def __init__(self, setting: Setting[T], value: T):
        self.setting, self.value = setting, value
        self._used = False

    def __enter__(self) -> None:
        self._used = True
        self.setting._enter((*self.setting._entered(), self))

    def __exit__(self, *exception: object) -> None:
        entered = self.setting._entered()
        places = [i for i, switch in enumerate(entered) if switch is self]
        if not places:
            raise RuntimeError(f"{self.setting.name}({self.value!r}) was exited in a thread that did not enter it.")
        self.setting._enter((*entered[: places[-1]], *entered[places[-1] + 1 :]))

    def __repr__(self) -> str:
        name, value = self.setting.name, repr(self.value)
        return f"<{name}({value}) for a with statement; {name}.set({value}) sets it for the process>"

    def __del__(self) -> None:
        # Warn of a bare `setting(value)` statement, which changes nothing.
        if not self._used and not sys.is_finalizing():
            name, value = self.setting.name, repr(self.value)
            warnings.warn(
                f"{name}({value}) was called and never entered, so it had no effect: use it in a with statement, or "
                f"call {name}.set({value}) to set it for the process.",
                stacklevel=2,
            )
