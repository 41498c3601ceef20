"""The demo: one model in every format, its answers, and a table of quality, memory and speed."""

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from lowbit import FORMATS, QuantizationConfig
from lowbit.cli.progress import counted
from lowbit.io import open_tensors
from lowbit.io.readers import is_stored
from lowbit.models.patterns import Rules

from . import evaluation
from .evaluation import Quality, Reference, Speed, live_bytes
from .language_model import STORED, LanguageModel
from .llama import DENSE, Formats

# The formats that are shown by default; "stored" is the file in its own bits, "mix" is q4 with the embedding, which is
# also the output layer, in int8.
MIX = "mix"
SHOWN = (STORED, "q4", "q3", MIX, "nf4", "int8", "ternary", "binary")
MIXED = {"*embed*": "int8", "*": "q4"}
CONTINUED = "The capital of France is"
ASKED = "What is gravity? Answer in one sentence."


@dataclasses.dataclass(frozen=True)
class Result:
    """A row of the table."""

    name: str
    bits: float
    stored: int
    peak: int
    quality: Quality
    speed: Speed
    continuation: str


def run(
    path: Path, text: str, *, formats: Sequence[str] = SHOWN, cache: Formats | None = None, tokens: int = 40
) -> list[Result]:
    """Print the answers of the model in float32 and in each format, and the table; returns its rows.

    `cache` is the format of keys and values for all runs but float32. By default they are dense, and q4 has a second
    run with both in int8. int8 has a second run with blocks of 32.
    """
    start = time.monotonic()
    print(f"model  {path.name}, {path.stat().st_size / 1e6:.0f} MB")
    model = LanguageModel.from_gguf(path)
    windows = evaluation.windows(model, text)
    count = sum(map(len, windows))
    print(f"text   {len(text.encode()):,} bytes, sha256 {evaluation.checksum(text)}")
    print(f"       {count:,} tokens are evaluated, in {len(windows)} windows of {len(windows[0])}\n")
    size = _size(model)
    print("== float32")
    # The dense model can be freed after this.
    references = evaluation.references(model, windows)
    results = [_measured("float32", model, size, windows, references, tokens)]
    for name, config, kv in _runs(path, formats, cache):
        del model
        print(f"\n== {name}{_remark(name)}")
        if config is None:
            model = LanguageModel.from_file(path)
        else:
            with counted("quantizing") as (progress, *_):
                model, _ = LanguageModel.from_gguf(path).quantized(config, strict=True, progress=progress)
        model = dataclasses.replace(model.joined(), formats=kv)
        results.append(_measured(name, model, size, windows, references, tokens))
    print()
    print(table(results))
    print(f"\n{time.monotonic() - start:.0f} seconds")
    return results


def _runs(path: Path, formats: Sequence[str], cache: Formats | None) -> Iterator[tuple[str, Rules | None, Formats]]:
    """The name of each run, how weights are quantized (None keeps the bits of the file), and the cache."""
    for name in formats:
        if name == MIX:
            yield "q4, embedding int8", MIXED, cache or DENSE
            continue
        if name == STORED:
            if kind := _stored_type(path):
                yield f"{kind}, as stored", None, cache or DENSE
            continue
        yield name, QuantizationConfig(name), cache or DENSE
        if name == "int8":
            yield "int8, blocks of 32", QuantizationConfig("int8", block_size=32), cache or DENSE
        if name == "q4" and cache is None:
            yield "q4, cache int8", QuantizationConfig("q4"), ("int8", "int8")


def _stored_type(path: Path) -> str | None:
    """The type of most quantized weights of a file; None if it is dense."""
    file = open_tensors(path)
    sizes: Counter[str] = Counter()
    for name in file:
        sizes[file.type(name)] += math.prod(file.shape(name)) * is_stored(file.type(name))
    kind, size = sizes.most_common(1)[0]
    return kind if size else None


def table(results: Sequence[Result]) -> str:
    """The results as text."""
    head = (
        "format",
        "bits",
        "MB",
        "peak MB",
        "perplexity",
        "KL",
        "top-1",
        "prompt tok/s",
        "generated tok/s",
    )
    lines: list[tuple[str, ...]] = [head]
    for r in results:
        q = r.quality
        lines.append(
            (
                r.name,
                f"{r.bits:.2f}",
                _megabytes(r.stored),
                _megabytes(r.peak),
                f"{q.perplexity:.3f}" if q.perplexity < 1e5 else f"{q.perplexity:.1e}",
                f"{q.divergence:.5f}",
                f"{q.agreement:.1%}",
                f"{r.speed.prompt:.0f}",
                f"{r.speed.generated:.1f}",
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    first, *others = widths
    rows = [
        "  ".join([f"{line[0]:{first}}", *(f"{cell:>{width}}" for cell, width in zip(line[1:], others, strict=True))])
        for line in lines
    ]
    rows = [rows[0], *(row + _remark(r.name) for row, r in zip(rows[1:], results, strict=True))]
    notes = [
        "bits: per weight, over all parameters. peak MB: live JAX arrays while it generates, with the cache.",
        "KL: divergence from float32 in nats. top-1: share of tokens where both predict the same most likely token.",
        "The weights of this file are on a 4-bit grid already (Q4_1), so 4-bit formats lose less here than on a model",
        "in full precision; as stored, nothing is lost.",
    ]
    return "\n".join([*rows, *notes])


def _measured(
    name: str,
    model: LanguageModel,
    size: int,
    windows: Sequence[Sequence[int]],
    references: Sequence[Reference],
    tokens: int,
) -> Result:
    peak = 0

    def said(prompt: Sequence[int]) -> Iterator[str]:
        nonlocal peak
        for text in model.tokenizer.stream(model.generate(prompt, tokens)):
            peak = max(peak, live_bytes())
            print(text, end="", flush=True)
            yield text
        print(flush=True)

    print(f"{CONTINUED}...", end="", flush=True)
    continuation = "".join(said(model.tokenizer.encode(CONTINUED)))
    print(f"> {ASKED}")
    _ = "".join(said(model.tokenizer.chat(ASKED)))
    speed = evaluation.speed(model, windows[0], tokens)
    quality = evaluation.quality(model, windows, references)
    return Result(name, 8 * _nbytes(model) / size, _nbytes(model), peak, quality, speed, continuation)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f}" if count >= 1e7 else f"{count / 1e6:.3f}"


def _remark(name: str) -> str:
    """Formats of one or two bits are for models that were trained with them."""
    return "  needs training" if name in FORMATS and FORMATS[name].bits < 3 else ""


def _nbytes(model: LanguageModel) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(model.params))


def _size(model: LanguageModel) -> int:
    return sum(x.size for x in jax.tree.leaves(model.params))
