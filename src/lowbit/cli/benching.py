"""What `lowbit bench` prints."""

from collections.abc import Callable, Sequence

import typer

from . import peers
from .bench import PROMPT, WRITTEN, TextTiming, products, text
from .printing import print_json, print_table


def run(size: int, rows: Sequence[int], repeat: int, formats: Sequence[str], with_peers: bool, as_json: bool) -> None:
    """Time products, and with `with_peers` also other libraries; print tables, or JSON."""
    notes = peers.missing() if with_peers else []

    def note(line: str) -> None:
        if line not in notes:
            notes.append(line)

    timings = list(products(size, rows, repeat, formats, note if with_peers else None))
    texts = _texts(repeat, note) if with_peers and peers.LLAMA_CPP.installed else []
    if as_json:
        found = [t._asdict() for t in timings]
        shown = {"products": found, "text": [t._asdict() for t in texts], "notes": notes}
        return print_json(shown if with_peers else found)
    cells = [(str(t.rows), t.product, f"{t.microseconds:.0f}", f"{t.speedup:.2f}") for t in timings]
    head = ("rows", "product", "us", "x float32")
    if not with_peers:
        return print_table(head, cells)
    compared = ["" if t.ratio is None else f"{t.ratio:.2f} ({t.like})" for t in timings]
    print_table((*head, "lowbit over it"), [(*line, cell) for line, cell in zip(cells, compared, strict=True)])
    typer.echo("lowbit over it: the speed of the product in parentheses, divided by that of the row.")
    _print_texts(texts)
    for line in notes:
        typer.echo(f"{line}.")


def _texts(repeat: int, note: Callable[[str], None]) -> list[TextTiming]:
    from lowbit.demo.model_file import demo_model_path

    try:
        return text(demo_model_path(), repeat)
    except FileNotFoundError as error:
        note(f"llama.cpp has no model to run, and is left out. {error}")
        return []


def _print_texts(texts: Sequence[TextTiming]) -> None:
    if not texts:
        return
    typer.echo(
        f"\nSmolLM2-135M, tokens per second: a prompt of {PROMPT}, and {WRITTEN} after it. llama.cpp has the weights "
        "as they are in the file."
    )
    cells = [
        (t.model, f"{t.prompt:.0f}", f"{t.generated:.1f}", f"{t.prompt_ratio:.2f} and {t.generated_ratio:.2f}")
        for t in texts
    ]
    print_table(("model", "prompt", "generated", "q4 fast over it"), cells)
