"""Progress on stderr: a bar in a terminal, otherwise a plain line now and then."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column

T = TypeVar("T")
EVERY = 10.0  # seconds between two lines


class Lines:
    """Progress as lines, at most one in `EVERY` seconds."""

    def __init__(self, doing: str, print: Callable[[str], Any]):
        self.doing, self.print = doing, print
        self.start = self.said = time.monotonic()
        self.first: int | None = None

    def update(self, done: int, total: int, unit: str = "") -> None:
        """Print how much is done, and how long the rest takes at the rate of this run."""
        self.first = done if self.first is None else self.first
        if not self.due() or done >= total:
            return
        rate = (done - self.first) / (self.said - self.start)
        left = f", {seconds((total - done) / rate)} left" if rate else ""
        amount = f"{done / 1e6:.1f} of {total / 1e6:.1f} MB" if unit == "bytes" else f"{done} of {total}"
        self.print(f"{self.doing}: {amount}{left}")

    def say(self, text: str) -> None:
        if self.due():
            self.print(f"{self.doing}: {text}")

    def due(self) -> bool:
        now = time.monotonic()
        if now - self.said < EVERY:
            return False
        self.said = now
        return True


def seconds(count: float) -> str:
    """A duration to read: 40 s, 3 min 20 s."""
    whole = max(0, round(count))
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60} s"


def shown(names: Sequence[T], doing: str) -> Iterator[T]:
    """Iterate over names or other items, and show how many are done."""
    console = Console(stderr=True)
    if not console.is_terminal:
        lines = Lines(doing, _printer(console))
        for number, name in enumerate(names):
            lines.update(number, len(names))
            yield name
        return
    with _bar(console, MofNCompleteColumn, TimeRemainingColumn) as bar:
        yield from bar.track(names, description=doing)


@contextmanager
def counted(
    doing: str,
) -> Iterator[tuple[Callable[[int, int], None], Callable[[str], None], Callable[[str], None]]]:
    """Three functions: to show the bytes done and their total, to print a line, and to say what is being done.

    The rate counts only the bytes of this run.
    """
    console = Console(stderr=True)
    note = _printer(console)
    if not console.is_terminal:
        lines = Lines(doing, note)
        yield lambda done, total: lines.update(done, total, "bytes"), note, lines.say
        return
    bar = _bar(console, DownloadColumn, TransferSpeedColumn, TimeRemainingColumn)
    task = bar.add_task(doing, total=None)
    counting = False

    def update(done: int, total: int) -> None:
        nonlocal counting
        if not counting:
            bar.reset(task, total=total, completed=done)
            counting = True
        bar.update(task, completed=done)
        bar.start()  # here and below, not before: a command that has nothing to count shows no bar

    def say(text: str) -> None:
        bar.update(task, description=f"{doing}: {text}")
        bar.start()

    try:
        yield update, note, say
    finally:
        bar.stop()


class _Known(ProgressColumn):
    """A column that is empty until the total is known."""

    def __init__(self, column: ProgressColumn):
        super().__init__(Column(no_wrap=True))
        self.column, self.max_refresh = column, column.max_refresh

    def render(self, task: Task) -> RenderableType:
        return "" if task.total is None else self.column.render(task)


def _bar(console: Console, *columns: Callable[..., ProgressColumn]) -> Progress:
    """A bar on one line: in a narrow terminal the bar and the description shrink, the numbers do not wrap."""
    room = max(10, console.width - 45)  # that the numbers and a short bar leave
    described = TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", max_width=room))
    return Progress(described, BarColumn(), *(_Known(column()) for column in columns), console=console, transient=True)


def _printer(console: Console) -> Callable[[str], None]:
    return lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)
