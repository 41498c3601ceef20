"""Tables and JSON on stdout."""

import json
import math
from collections.abc import Iterable
from typing import Any

import typer


def print_json(value: Any) -> None:
    typer.echo(json.dumps(_finite(value), indent=1, default=str, allow_nan=False))


def _finite(value: Any) -> Any:
    """A value that JSON can represent: None for numbers that are not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def print_table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(line[i]) for line in (head, *rows)) for i in range(len(head))]
    for line in (head, *rows):
        typer.echo("  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)).rstrip())


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
