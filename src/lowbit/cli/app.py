"""The commands. Each is a thin layer over a function of the library.

Exit codes: 0 success; 1 failure, with the reason in one line on stderr; 2 wrong usage; 3 `compare` found a difference
that is beyond the tolerance or not finite; 130 interrupted.
"""

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from . import model_commands
from .errors import plain_errors
from .options import (
    FORMATS,
    Bits,
    Budget,
    Calibrate,
    Dequantize,
    First,
    Force,
    Formats,
    Gradients,
    Json,
    Page,
    Requantize,
    Size,
    Source,
    Strict,
    Target,
    To,
    Tokens,
    Type,
    completed,
)
from .printing import listed, print_json, print_table, print_tensors, printable, shape_text

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


@app.command(epilog="Example: lowbit quantize in.safetensors out.safetensors --rule '*embed*=int8'")
def quantize(
    source: Source,
    target: Target,
    format: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help=f"Default: q4. Several, as q3,q4, for --bits and --size. {', '.join(FORMATS)}.",
            autocompletion=completed,
        ),
    ] = None,
    block_size: Annotated[int | None, typer.Option(metavar="N", help="Weights that share a scale.")] = None,
    axis: Annotated[str | None, typer.Option(metavar="N,...", help="Axes along which weights share a scale.")] = None,
    double_quant: Annotated[bool, typer.Option("--double-quant", help="8-bit scales for nf4.")] = False,
    rule: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN=FORMAT", help="Formats of tensors by name; the first match decides."),
    ] = None,
    text: Calibrate = None,
    tokens: Tokens = 4096,
    gradients: Gradients = False,
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
        from lowbit.models.patterns import Rule

        from . import formats as written
        from .conversion import CalibrationText, Conversion, Goal

        axes = None if axis is None else written.option("axis", axis)
        options = {"block_size": block_size, "axis": axes, "double_quant": double_quant or None}
        first = list(map(written.rule, rule or ()))
        flags = {"strict": strict, "requantize": requantize, "dequantize": dequantize}
        conversion = Conversion(source, target, to, type, force, as_json, flags, page)
        if gradients and text is None:
            raise ValueError("--gradients weights the tokens of a text: give one with --calibrate TEXT.")
        wanted = None if text is None else CalibrationText(text, tokens, gradients, budget)
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
        from .conversion import Conversion

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

        from .progress import shown

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
                    some = ", ".join(map(printable, names[:5])) + ", ..." * (len(names) > 5)
                    typer.echo(f"{len(names)} not in {path}: {some}")
        if not all(math.isfinite(r["error"]) for r in rows):
            raise typer.Exit(3)
        if tolerance is not None and (any(missing.values()) or any(r["error"] > tolerance for r in rows)):
            raise typer.Exit(3)


app.command(epilog="Example: lowbit evaluate model.gguf model-q4.safetensors --text text.txt")(model_commands.evaluate)


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

        from .conversion import check_page, write_page
        from .progress import shown

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
    peers: Annotated[
        bool,
        typer.Option("--peers", help="Compare with onnxruntime, OpenVINO and llama.cpp, those that are installed."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Time matrix products in several formats.

    Measured on this machine, relative to float32.
    """
    with plain_errors():
        from . import benching
        from . import formats as written

        names = [written.known(name) for name in formats.split(",") if name]
        benching.run(size, written.counts("--rows", rows), repeat, names, peers, as_json)


app.command(epilog="Example: lowbit demo --formats q4,int8")(model_commands.demo)
app.command(epilog="Example: lowbit generate 'What is gravity?' --format q4 --temperature 0.7")(model_commands.generate)


def _badness(row: dict[str, Any]) -> float:
    return math.inf if math.isnan(row["error"]) else row["error"]
