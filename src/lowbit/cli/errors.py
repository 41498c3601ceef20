"""Errors of the command: one line on stderr, and an exit code."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def plain_errors() -> Iterator[None]:
    """Print errors that a user can fix as one line on stderr, not as a traceback."""
    try:
        yield
    except BrokenPipeError:  # the reader of the output, such as head, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
    except KeyboardInterrupt:
        typer.echo("lowbit: interrupted.", err=True)
        raise typer.Exit(130) from None
    except (ValueError, TypeError, KeyError, OSError, ImportError, MemoryError) as error:
        typer.echo(f"lowbit: {_text(error)}", err=True)
        raise typer.Exit(1) from None


def _text(error: BaseException) -> str:
    from lowbit.io import OptionNeeded

    if isinstance(error, OptionNeeded):
        return f"{error.problem} --{error.option} {error.does}."
    if isinstance(error, OSError) and error.errno is not None:
        return f"{error.strerror}: {error.filename}" if error.filename else f"{error.strerror}."
    if isinstance(error, MemoryError):
        return "There is not enough memory."
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
