"""The commands. Each is a thin layer over a function of the library.

Exit codes: 0 success; 1 failure, with the reason in one line on stderr; 2 wrong usage; 3 `compare` found a difference
that is beyond the tolerance or not finite; 130 interrupted.
"""

import dataclasses
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from lowbit.formats import FORMATS
from lowbit.io import OptionNeeded
from lowbit.models.patterns import Rule

from . import formats as written
from .conversion import CalibrationText, Conversion, Goal, check_page, read_text, write_page
from .options import (
    KV,
    KVK,
    KVV,
    Bits,
    Budget,
    Calibrate,
    Dequantize,
    First,
    Force,
    Formats,
    Json,
    Model,
    Page,
    Requantize,
    Size,
    Source,
    Strict,
    Target,
    To,
    Tokens,
    Type,
)
from .printing import listed, print_json, print_table, print_tensors, shape_text
from .progress import counted, shown

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: lowbit quantize model.safetensors q4.safetensors --format q4",
    help="Low-bit arrays for JAX: quantize models, convert and inspect files, run a language model.",
)


def _version(wanted: bool) -> None:
    if wanted:
        from lowbit import __version__

        typer.echo(f"lowbit {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


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
    if isinstance(error, OptionNeeded):
        return f"{error.problem} --{error.option} {error.does}."
    if isinstance(error, OSError) and error.errno is not None:
        return f"{error.strerror}: {error.filename}" if error.filename else f"{error.strerror}."
    if isinstance(error, MemoryError):
        return "There is not enough memory."
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)


@app.command(epilog="Example: lowbit quantize in.safetensors out.safetensors --rule '*embed*=int8'")
def quantize(
    source: Source,
    target: Target,
    format: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT", help=f"Default: q4. Several, as q3,q4, for --bits and --size. {', '.join(FORMATS)}."
        ),
    ] = None,
    block_size: Annotated[int | None, typer.Option(metavar="N", help="Weights that share a scale.")] = None,
    axis: Annotated[str | None, typer.Option(metavar="N,...", help="Axes along which they do.")] = None,
    double_quant: Annotated[bool, typer.Option("--double-quant", help="8-bit scales for nf4.")] = False,
    rule: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN=FORMAT", help="Formats of tensors by name; the first match decides."),
    ] = None,
    text: Calibrate = None,
    tokens: Tokens = 4096,
    budget: Budget = "4GB",
    bits: Bits = None,
    size: Size = None,
    page: Page = None,
    to: To = None,
    type: Type = "Q8_0",
    strict: Strict = False,
    force: Force = False,
    requantize: Requantize = False,
    dequantize: Dequantize = False,
    as_json: Json = False,
) -> None:
    """Quantize the weights of a file or a directory.

    A lowbit file is written in chunks, and an interrupted run resumes when the command is repeated; other kinds are
    built in memory.
    """
    with plain_errors():
        from lowbit.io._convert import default_format

        axes = None if axis is None else written.option("axis", axis)
        options = {"block_size": block_size, "axis": axes, "double_quant": double_quant or None}
        first = list(map(written.rule, rule or ()))
        flags = {"strict": strict, "requantize": requantize, "dequantize": dequantize}
        conversion = Conversion(source, target, to, type, force, as_json, flags, page)
        wanted = None if text is None else CalibrationText(text, tokens, budget)
        if bits is None and size is None:
            every = written.config(format or default_format(to), **options)
            return conversion.run([*first, Rule("*", every)], wanted)
        if bits is not None and size is not None:
            raise ValueError("--bits and --size both choose formats: give one of them.")
        choices = [(given, written.config(given, **options)) for given in written.several(format)]
        conversion.run(first, wanted, Goal(bits, size, choices, tokens))


@app.command(epilog="Example: lowbit convert SmolLM2-135M.gguf smollm2.safetensors")
def convert(
    source: Source,
    target: Target,
    to: To = None,
    type: Type = "F16",
    strict: Strict = False,
    force: Force = False,
    requantize: Requantize = False,
    dequantize: Dequantize = False,
    as_json: Json = False,
) -> None:
    """Convert a file or a directory to another kind.

    Tensors keep their stored bits.
    """
    with plain_errors():
        flags = {"strict": strict, "requantize": requantize, "dequantize": dequantize}
        Conversion(source, target, to, type, force, as_json, flags).run([])


@app.command(epilog="Example: lowbit inspect model.gguf")
def inspect(source: Source, as_json: Json = False) -> None:
    """List the tensors of a file.

    Shows the shape, format, blocks, bytes and bits per weight of each. Blocks of 32 along the last axis are 32@-1.
    """
    with plain_errors():
        from lowbit.io import open_tensors
        from lowbit.io.readers import decoded_types

        file = open_tensors(source)
        rows = [listed(file, name) for name in file]
        if as_json:
            return print_json({"path": str(source), "kind": type(file).__name__, "tensors": rows})
        print_tensors(rows)
        if file.refusal:
            typer.echo(file.refusal)
        if decoded := decoded_types(file):
            typer.echo(decoded)


@app.command(epilog="Example: lowbit compare model.safetensors model-q4.safetensors --tolerance 0.1")
def compare(
    a: First,
    b: Annotated[Path, typer.Argument(metavar="B", help="The file or directory to compare with A.")],
    tolerance: Annotated[
        float | None,
        typer.Option(metavar="ERROR", help="Exit with 3 if an error is larger, or a tensor is missing."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the errors between two files.

    Lists the relative error of each tensor, the worst first. Exits with 3 if an error is NaN or infinite, or shapes
    differ, whatever the tolerance.
    """
    with plain_errors():
        from lowbit.io import open_tensors
        from lowbit.io._compare import compared

        first, second = open_tensors(a), open_tensors(b)
        common = [name for name in first if name in second]
        if not common:
            raise ValueError(f"{a} and {b} have no tensor of the same name. They are not the same model.")
        missing = {str(a): [n for n in second if n not in first], str(b): [n for n in first if n not in second]}
        rows = sorted(compared(first, second, shown(common, "comparing")), key=_badness, reverse=True)
        if as_json:
            print_json({"tensors": rows, "missing": missing})
        else:
            cells = [
                (r["name"], shape_text(r["shape"]), f"{r['error']:.6f}", f"{r['largest']:.6g}")
                if r["shape"] == r["other"]
                else (r["name"], shape_text(r["shape"]), "-", f"has the shape {shape_text(r['other'])} in {b}")
                for r in rows
            ]
            print_table(("name", "shape", "error", "largest difference"), cells)
            for path, names in missing.items():
                if names:
                    typer.echo(f"{len(names)} not in {path}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}")
        if not all(math.isfinite(r["error"]) for r in rows):
            raise typer.Exit(3)
        if tolerance is not None and (any(missing.values()) or any(r["error"] > tolerance for r in rows)):
            raise typer.Exit(3)


@app.command(epilog="Example: lowbit evaluate model.gguf model-q4.safetensors --text text.txt")
def evaluate(
    a: Annotated[Path, typer.Argument(metavar="A", help="A llama: GGUF, a lowbit file, or a directory.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The same model, quantized.")],
    text: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Text to predict. Default: 20 kB of prose in the package."),
    ] = None,
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

        prose = evaluation.demo_text() if text is None else read_text(text)
        found = evaluation.evaluate(
            a, b, prose, tokens=tokens, window=window, progress=lambda windows: shown(windows, "evaluating")
        )
        if as_json:
            return print_json({"files": [str(a), str(b)], **found.as_dict()})
        typer.echo(str(found))


@app.command(epilog="Example: lowbit report model.safetensors model-q4.safetensors -o report.html")
def report(
    a: First,
    b: Annotated[Path, typer.Argument(metavar="B", help="The same model, quantized.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="PATH", help="The page to write.")] = Path(
        "report.html"
    ),
    histograms: Annotated[
        int, typer.Option(min=0, metavar="COUNT", help="Number of tensors to show in detail, the worst first.")
    ] = 8,
    force: Annotated[bool, typer.Option("--force", help="Replace the page if it exists.")] = False,
) -> None:
    """Write an HTML report on two files.

    Shows sizes and errors by layer, every tensor, and the worst tensors in detail.
    """
    with plain_errors():
        from lowbit.io import compare

        check_page(output, (a, b), force)
        found = compare(a, b, histograms=histograms, progress=lambda names: shown(names, "comparing"))
        write_page(output, found, a, b)
        typer.echo(f"{output}: {len(found)} tensors, {len(found.quantized)} of them changed.")
        for note in found.notes:
            typer.echo(note)


@app.command(epilog="Example: lowbit bench --size 4096 --rows 1,16,256")
def bench(
    size: Annotated[int, typer.Option(min=64, metavar="N", help="Rows and columns of the weights.")] = 4096,
    rows: Annotated[str, typer.Option(metavar="N,...", help="Rows of x, separated by commas.")] = "1,16,256",
    repeat: Annotated[int, typer.Option(min=1, metavar="N", help="Repeats; the minimum is reported.")] = 10,
    formats: Formats = "q4,nf4,int8,ternary,binary",
    as_json: Json = False,
) -> None:
    """Time matrix products in several formats.

    Measured on this machine, relative to float32.
    """
    with plain_errors():
        from .bench import products

        names = [written.known(name) for name in formats.split(",") if name]
        counts = [int(m) for m in rows.split(",") if m]
        timings = list(products(size, counts, repeat, names))
        if as_json:
            return print_json([t._asdict() for t in timings])
        cells = [(str(t.rows), t.product, f"{t.microseconds:.0f}", f"{t.speedup:.2f}") for t in timings]
        print_table(("rows", "product", "us", "x float32"), cells)


@app.command(epilog="Example: lowbit demo --formats q4,int8")
def demo(
    model: Model = None,
    text: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Text to evaluate on. Default: 20 kB of prose in the package."),
    ] = None,
    formats: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT,...",
            help="Formats to run, separated by commas; stored is the file in its own bits, mix is q4 with an int8 "
            "embedding. Default: stored,q4,q3,mix,nf4,int8,ternary,binary.",
        ),
    ] = None,
    kv: KV = None,
    kv_k: KVK = None,
    kv_v: KVV = None,
    tokens: Annotated[int, typer.Option(min=2, metavar="N", help="Number of tokens to generate.")] = 40,
) -> None:
    """Run a language model in every format.

    Prints its answers, quality, memory and speed.
    """
    with plain_errors():
        from lowbit.demo import evaluation, show

        asked = show.SHOWN if formats is None else [name for name in formats.split(",") if name]
        names = [name if name in (show.STORED, show.MIX) else written.known(name) for name in asked]
        cache = written.cache_formats(kv, kv_k, kv_v)
        prose = evaluation.demo_text() if text is None else read_text(text)
        show.run(_model_path(model), prose, formats=names, cache=cache, tokens=tokens)


@app.command(epilog="Example: lowbit generate 'What is gravity?' --format q4 --kv int8")
def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The message to the model.")],
    format: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help=f"{', '.join(FORMATS)}, or float32. Default: as stored; q4 for a dense file.",
        ),
    ] = None,
    model: Model = None,
    kv: KV = None,
    kv_k: KVK = None,
    kv_v: KVV = None,
    tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Maximum number of tokens.")] = 200,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text, without a chat template.")] = False,
) -> None:
    """Answer a prompt with a quantized language model."""
    with plain_errors():
        from lowbit.demo.language_model import LanguageModel

        config = format if format in (None, "float32") else written.config(format)
        with counted("quantizing") as (progress, *_):
            loaded = LanguageModel.from_file(_model_path(model), config, progress=progress).joined()
        loaded = dataclasses.replace(loaded, formats=written.cache_formats(kv, kv_k, kv_v) or (None, None))
        ids = loaded.tokenizer.encode(prompt) if raw else loaded.tokenizer.chat(prompt)
        for text in loaded.tokenizer.stream(loaded.generate(ids, tokens)):
            sys.stdout.write(text)
            sys.stdout.flush()
        sys.stdout.write("\n")


def _model_path(given: Path | None) -> Path:
    if given is not None:
        return given
    from lowbit.demo.model_file import demo_model_path

    return demo_model_path()


def _badness(row: dict[str, Any]) -> float:
    return math.inf if math.isnan(row["error"]) else row["error"]
