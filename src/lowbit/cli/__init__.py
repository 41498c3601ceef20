"""The `lowbit` command."""

import sys


def main() -> None:
    """Run the command; without the packages it needs, say how to get them."""
    try:
        from .app import app
    except ImportError as error:
        sys.exit(f"The lowbit command needs the package {error.name}: pip install 'lowbit[cli]'")
    app()
