"""A bar for long work: how much is done, how fast, and how long it will take. Quiet where there is no terminal."""

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


def shown(names: Sequence[str], doing: str, sizes: Mapping[str, int] | None = None) -> Iterator[str]:
    """The names one by one, with a bar on stderr that counts bytes by `sizes`, or names without."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield from names
        return
    counted = (DownloadColumn(), TransferSpeedColumn()) if sizes else (TextColumn("{task.completed}/{task.total}"),)
    columns = (TextColumn("{task.description}"), BarColumn(), *counted, TimeRemainingColumn())
    weights = [sizes[name] if sizes else 1 for name in names]
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(doing, total=sum(weights))
        for name, weight in zip(names, weights, strict=True):
            yield name
            bar.advance(task, weight)
