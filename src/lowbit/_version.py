"""The version of the installed package."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("lowbit")
except PackageNotFoundError:  # a source tree on the path, which is not installed
    __version__ = "0+unknown"
