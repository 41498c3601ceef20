"""The commands that run a language model: evaluate, demo and generate."""

import dataclasses
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import plain_errors
from .options import FORMATS, KV, KVK, KVV, Json, Model, completed, completed_list
from .printing import print_json

DEMO_TEXT = "Default: 20 kB of prose in the package."


def evaluate(
    a: Annotated[Path, typer.Argument(metavar="A", help="A llama: GGUF, a lowbit file, or a directory.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The same model, quantized.")],
    text: Annotated[Path | None, typer.Option(metavar="PATH", help=f"Text to predict. {DEMO_TEXT}")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=2, metavar="N", help="Tokens of the text to use. Default: all.")
    ] = None,
    window: Annotated[int, typer.Option(min=2, metavar="N", help="Tokens that are read at a time.")] = 512,
    as_json: Json = False,
) -> None:
    """Compare the predictions of two language models.

    Prints the perplexity of both on a text, the KL divergence of B from A, and how often both predict the same token.
    Each file runs with its stored bits, and dense tensors in float32.
    """
    with plain_errors():
        from lowbit.demo import evaluation

        from .conversion import read_text
        from .progress import shown

        prose = evaluation.demo_text() if text is None else read_text(text)
        found = evaluation.evaluate(
            a, b, prose, tokens=tokens, window=window, progress=lambda windows: shown(windows, "evaluating")
        )
        if as_json:
            return print_json({"files": [str(a), str(b)], **found.as_dict()})
        typer.echo(str(found))


def demo(
    model: Model = None,
    text: Annotated[Path | None, typer.Option(metavar="PATH", help=f"Text to evaluate on. {DEMO_TEXT}")] = None,
    formats: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT,...",
            help="Formats to run, separated by commas; stored is the file in its own bits, calibrated is q4 by GPTQ, "
            "mix is q4 with an int8 embedding. Default: int8,q4,calibrated,q3,stored.",
            autocompletion=completed_list,
        ),
    ] = None,
    everything: Annotated[
        bool,
        typer.Option(
            "--all", help="All formats and caches, on all of the text. Also ternary and binary, which need training."
        ),
    ] = False,
    kv: KV = None,
    kv_k: KVK = None,
    kv_v: KVV = None,
    tokens: Annotated[int, typer.Option(min=2, metavar="N", help="Number of tokens to generate.")] = 32,
) -> None:
    """Run a language model in several formats.

    Prints its answers, quality, memory and speed. Takes less than three minutes on two cores.
    """
    with plain_errors():
        from lowbit.demo import evaluation, show

        from . import formats as written
        from .conversion import read_text

        if formats is not None and everything:
            raise ValueError("--formats and --all both choose the formats: give one of them.")
        asked = [name for name in (formats or "").split(",") if name] or (show.ALL if everything else show.SHOWN)
        names = [name if name in show.SPECIAL else written.known(name, show.SPECIAL) for name in asked]
        cache = written.cache_formats(kv, kv_k, kv_v)
        prose = evaluation.demo_text() if text is None else read_text(text)
        most = None if everything else show.EVALUATED
        show.run(_model_path(model), prose, formats=names, cache=cache, tokens=tokens, most=most)


def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="The message to the model; without it, or as -, standard input."),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help=f"{', '.join(FORMATS)}, or float32. Default: as stored; q4 for a dense file.",
            autocompletion=completed,
        ),
    ] = None,
    model: Model = None,
    kv: KV = None,
    kv_k: KVK = None,
    kv_v: KVV = None,
    tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Maximum number of tokens.")] = 200,
    temperature: Annotated[
        float, typer.Option(metavar="T", help="Sample at this temperature; 0 takes the most likely token.")
    ] = 0.0,
    top_p: Annotated[
        float | None, typer.Option(metavar="P", help="Sample from the most likely tokens that add up to P.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Random seed. Default: a new one, which is printed.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat/--raw", help="Use the model's chat template, or continue the text as it is.")
    ] = True,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the text only.")] = False,
) -> None:
    """Answer a prompt with a quantized language model.

    Text is printed as it is generated.
    """
    with plain_errors():
        from . import formats as written

        sampling = _sampling(temperature, top_p, seed)
        config = format if format in (None, "float32") else written.config(format)
        cache = written.cache_formats(kv, kv_k, kv_v) or (None, None)
        path = _model_path(model)
        message = _prompt(prompt)
        loaded = dataclasses.replace(_loaded(path, config, quiet).joined(), formats=cache)
        ids = _ids(loaded.tokenizer, message, chat)
        counting = _Counted(loaded.generate(ids, tokens, sampling))
        for text in loaded.tokenizer.stream(counting):
            sys.stdout.write(text)
            sys.stdout.flush()
        sys.stdout.write("\n")
        sys.stdout.flush()
        if not quiet:
            for line in _remarks(counting.count, tokens, sampling if seed is None else None):
                typer.echo(f"lowbit: {line}", err=True)


def _sampling(temperature: float, top_p: float | None, seed: int | None) -> Any:
    from lowbit.demo.sampling import Sampling

    given = {"--top-p": top_p, "--seed": seed}
    unused = [f"{name} {value}" for name, value in given.items() if value is not None]
    if temperature == 0 and unused:
        raise ValueError(
            f"{' and '.join(unused)}: nothing is sampled at --temperature 0, its default. Give also --temperature 0.7."
        )
    chosen = secrets.randbits(32) if seed is None else seed
    return Sampling(temperature, 1.0 if top_p is None else top_p, chosen)


def _prompt(given: str | None) -> str:
    text = given
    if text is None or text == "-":
        if sys.stdin.isatty():
            typer.echo("lowbit: reading the prompt from standard input. Ctrl-D ends it.", err=True)
        text = sys.stdin.read().removesuffix("\n")
    if not text:
        raise ValueError("The prompt is empty: give it as an argument, or on standard input.")
    return text


def _loaded(path: Path, config: Any, quiet: bool) -> Any:
    from lowbit.demo.language_model import LanguageModel

    from .progress import counted

    if quiet:
        return LanguageModel.from_file(path, config)
    with counted("quantizing") as (progress, *_):
        return LanguageModel.from_file(path, config, progress=progress)


def _ids(tokenizer: Any, message: str, chat: bool) -> list[int]:
    from lowbit.demo.tokenizer import TemplateError

    try:
        return tokenizer.chat(message) if chat else tokenizer.encode(message)
    except TemplateError as error:
        raise ValueError(f"{error} --raw continues the prompt without a template.") from None


class _Counted:
    """An iterator that counts."""

    def __init__(self, items: Iterator[int]):
        self.items, self.count = items, 0

    def __iter__(self) -> Iterator[int]:
        for item in self.items:
            self.count += 1
            yield item


def _remarks(count: int, most: int, drawn: Any) -> Iterator[str]:
    if count == most:
        yield f"stopped after {most} tokens, the limit of --tokens."
    if drawn is not None and drawn.temperature:
        yield f"--seed {drawn.seed} gives this text again."


def _model_path(given: Path | None) -> Path:
    if given is not None:
        return given
    from lowbit.demo.model_file import demo_model_path

    return demo_model_path()
