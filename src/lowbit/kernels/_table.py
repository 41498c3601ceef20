"""The table of kernels: which implementations of an operation there are, for which platform and which operands."""

from collections.abc import Callable
from typing import Any

# operation -> platform ("cpu", "tpu", "cuda") -> implementation and the predicate of what it takes
_kernels: dict[str, dict[str, tuple[Callable[..., Any], Callable[..., bool]]]] = {}


def register_kernel(operation: str, platform: str, kernel: Callable[..., Any], fits: Callable[..., bool]) -> None:
    """Add an implementation. `fits` and `kernel` take the same arguments; shapes and dtypes are known to both."""
    _kernels.setdefault(operation, {})[platform] = (kernel, fits)


def find_kernels(operation: str, *operands: Any, **params: Any) -> dict[str, Callable[..., Any]]:
    """The kernels that take these operands, by platform."""
    rows = _kernels.get(operation, {})
    return {platform: kernel for platform, (kernel, fits) in rows.items() if fits(*operands, **params)}
