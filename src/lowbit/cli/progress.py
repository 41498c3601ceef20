"""Progress bars on stderr. Without a terminal they print nothing."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

T = TypeVar("T")


def shown(names: Sequence[T], doing: str) -> Iterator[T]:
    """Iterate over names or other items, with a bar that counts them."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield from names
        return
    columns = (TextColumn("{task.completed}/{task.total}"), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), BarColumn(), *columns, console=console, transient=True) as bar:
        yield from bar.track(names, description=doing)


@contextmanager
def counted(
    doing: str,
) -> Iterator[tuple[Callable[[int, int], None], Callable[[str], None], Callable[[str], None]]]:
    """Three functions: to update a bar with the bytes done and their total, to print a line above it, and to say what
    is being done.

    The rate counts only the bytes of this run.
    """
    console = Console(stderr=True)

    def note(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    if not console.is_terminal:
        yield lambda done, total: None, note, lambda text: None
        return
    columns = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), BarColumn(), *columns, console=console, transient=True) as bar:
        task = bar.add_task(doing, total=None)
        counting = False

        def update(done: int, total: int) -> None:
            nonlocal counting
            if not counting:
                bar.reset(task, total=total, completed=done)
                counting = True
            bar.update(task, completed=done)

        yield update, note, lambda text: bar.update(task, description=f"{doing}: {text}")
