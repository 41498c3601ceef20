"""Bars for long work: how much is done, how fast, and how long it will take. Quiet where there is no terminal."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


def shown(names: Sequence[str], doing: str) -> Iterator[str]:
    """The names one by one, with a bar on stderr that counts them."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield from names
        return
    columns = (TextColumn("{task.completed}/{task.total}"), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), BarColumn(), *columns, console=console, transient=True) as bar:
        yield from bar.track(names, description=doing)


@contextmanager
def counted(doing: str) -> Iterator[tuple[Callable[[int, int], None], Callable[[str], None]]]:
    """What to tell the bytes that are done and those that there are, and what prints a line above the bar.

    The rate is that of this run alone.
    """
    console = Console(stderr=True)

    def note(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    if not console.is_terminal:
        yield lambda done, total: None, note
        return
    columns = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), BarColumn(), *columns, console=console, transient=True) as bar:
        tasks = []

        def tell(done: int, total: int) -> None:
            if not tasks:
                tasks.append(bar.add_task(doing, total=total, completed=done))
            bar.update(tasks[0], completed=done)

        yield tell, note
