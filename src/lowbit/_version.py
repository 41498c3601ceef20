"""The version of the installed package."""

from importlib.metadata import PackageNotFoundError, version


def _installed() -> str:
    try:
        return version("lowbit")
    except PackageNotFoundError:  # a source tree on the path, which is not installed
        return "0+unknown"


__version__ = _installed()
"""The version of the installed package, for instance "0.1.0"."""
