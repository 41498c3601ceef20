"""Tables and JSON on stdout."""

import itertools
import json
import math
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import typer

NARROWEST = 60  # columns of a terminal
_GAP = 2


def print_json(value: Any) -> None:
    typer.echo(json.dumps(_finite(value), indent=1, default=str, allow_nan=False))


def _finite(value: Any) -> Any:
    """A value that JSON can represent: None for numbers that are not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def terminal_width() -> int | None:
    """The columns of the terminal, or None if stdout is not one: a file or a pipe gets whole lines."""
    return max(NARROWEST, shutil.get_terminal_size().columns) if sys.stdout.isatty() else None


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, right: bool = False) -> None:
    """Print a table that fits the terminal. `right`: align all columns but the first to the right."""
    typer.echo("\n".join(table_lines(head, rows, terminal_width(), right=right)))


def table_lines(
    head: Sequence[str], rows: Sequence[Sequence[str]], width: int | None, *, right: bool = False
) -> list[str]:
    """The lines of a table of at most `width` columns.

    If it is too wide, the first column, which names the row, is abbreviated in the middle. If less than a third of the
    width is left for it, or if that would make two names equal, further columns follow below instead, with the first
    column again. Text that is still too long for its column is continued on further lines.
    """
    lines = [tuple(map(printable, line)) for line in (head, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    if width is not None and sum(widths) + _GAP * (len(widths) - 1) > width:
        left = width - sum(widths[1:]) - _GAP * (len(widths) - 1)
        beside = left >= width // 3 and not _confused([line[0] for line in lines], left)
        widths[0] = min(widths[0], left if beside else width // 2)
        widths[1:] = [min(own, width - widths[0] - _GAP) for own in widths[1:]]
    confused = _confused([line[0] for line in lines], widths[0])
    found: list[str] = []
    for group in _groups(widths, width):
        found += [""] if found else []
        for line in lines:
            sides = [">" if right and i else "<" for i in group]
            named = [abbreviated(line[0], widths[0])]
            named = textwrap.wrap(line[0], widths[0]) if named[0] in confused else named
            cells = [textwrap.wrap(line[i], widths[i]) if i else named for i in group]
            for parts in itertools.zip_longest(*cells, fillvalue=""):
                row = (f"{part:{side}{widths[i]}}" for part, side, i in zip(parts, sides, group, strict=True))
                found.append((" " * _GAP).join(row).rstrip())
    return found


def _groups(widths: Sequence[int], width: int | None) -> list[list[int]]:
    """The columns that are side by side, each time with the first one."""
    groups, used = [[0]], widths[0]
    for i, own in enumerate(widths[1:], 1):
        used += _GAP + own
        if width is not None and used > width and len(groups[-1]) > 1:
            groups.append([0])
            used = widths[0] + _GAP + own
        groups[-1].append(i)
    return groups


def _confused(names: Sequence[str], width: int) -> set[str]:
    """The abbreviations that several names share."""
    counts = Counter(abbreviated(name, width) for name in set(names))
    return {short for short, count in counts.items() if count > 1}


def printable(text: str) -> str:
    """Text with control characters as escapes: names from a file must not control the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def abbreviated(text: str, width: int) -> str:
    """The text, with an ellipsis in its middle if it is longer than `width`."""
    if len(text) <= width:
        return text
    end = (width - 1) // 2
    return f"{text[: width - 1 - end]}\N{HORIZONTAL ELLIPSIS}{text[len(text) - end :]}"


def listed(file: Any, name: str) -> dict[str, Any]:
    """A tensor of a file as `inspect` lists it."""
    blocks = [{"axis": axis, "size": size} for axis, size in file.blocks(name).items()]
    found = {"name": name, "shape": list(file.shape(name)), "type": file.type(name)}
    return found | {"blocks": blocks, "bytes": file.nbytes(name)}


def print_tensors(rows: list[dict[str, Any]]) -> None:
    """A table of tensors that are `listed`, and their total."""
    cells = [
        (r["name"], shape_text(r["shape"]), r["type"], _blocks(r["blocks"]), f"{r['bytes']:,}", _bits(r)) for r in rows
    ]
    total = {"bytes": sum(r["bytes"] for r in rows), "shape": [sum(math.prod(r["shape"]) for r in rows)]}
    cells.append(("total", f"{total['shape'][0]:,}", "", "", f"{total['bytes']:,}", _bits(total)))
    print_table(("name", "shape", "type", "blocks", "bytes", "bits"), cells)


def shape_text(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _blocks(blocks: list[dict[str, Any]]) -> str:
    return " ".join(f"{block['size'] or 'all'}@{block['axis']}" for block in blocks)


def _bits(row: Any) -> str:
    size = math.prod(row["shape"])
    return f"{8 * row['bytes'] / size:.2f}" if size else "-"
