"""The demo: one model in several formats, its answers, and a table of quality, memory and speed."""

import dataclasses
import math
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import lowbit
from lowbit import FORMATS, QuantizationConfig
from lowbit.cli.printing import table_lines, terminal_width
from lowbit.cli.progress import counted, seconds
from lowbit.io import open_tensors
from lowbit.io.readers import is_stored
from lowbit.models.patterns import Rules

from . import evaluation, llama
from .evaluation import Quality, Reference, Speed, live_bytes
from .language_model import STORED, LanguageModel
from .llama import DENSE, Formats

# Rows that are not a format alone.
CALIBRATED, MIX, CACHE, BLOCKS = "calibrated", "mix", "q4-cache", "int8-blocks"
SPECIAL = (STORED, CALIBRATED, MIX, CACHE, BLOCKS)
SHOWN = ("int8", "q4", CALIBRATED, "q3", STORED)
ALL = ("int8", BLOCKS, "q4", CALIBRATED, CACHE, MIX, "nf4", "q3", STORED, "ternary", "binary")
MIXED = {"*embed*": "int8", "*": "q4"}  # the embedding is also the output layer
ASKED = "What is gravity? Answer in one sentence."
# Tokens that are measured unless all are asked for, and tokens to calibrate with, which are never measured.
EVALUATED, CALIBRATING = 2048, 2048
# How long rows take, compared with the others.
_COSTS = {"float32": 2.0, CALIBRATED: 6.0}


@dataclasses.dataclass(frozen=True)
class Result:
    """A row of the table."""

    name: str
    bits: float
    stored: int
    peak: int
    quality: Quality
    speed: Speed
    answer: str


@dataclasses.dataclass(frozen=True)
class Texts:
    """Windows of tokens: those that are measured, and others to calibrate with."""

    measured: list[list[int]]
    calibrating: list[list[int]]

    @classmethod
    def of(cls, model: LanguageModel, text: str, most: int | None) -> "Texts":
        """The end of the text is to calibrate with, at most half of it; `most` tokens before it are measured."""
        windows = evaluation.windows(model, text)
        size = len(windows[0])
        end = len(windows) - min(CALIBRATING // size, len(windows) // 2)
        return cls(windows[: end if most is None else min(end, max(1, most // size))], windows[end:])

    def __str__(self) -> str:
        size = len(self.measured[0])
        line = f"{size * len(self.measured):,} tokens are measured, in windows of {size}"
        if self.calibrating:
            line += f"; the last {size * len(self.calibrating):,} calibrate"
        return line


@dataclasses.dataclass(frozen=True)
class Run:
    """A row to come: its name in the table, how the weights are quantized, and the formats of the cache.

    `rules` is None for the bits of the file.
    """

    name: str
    rules: Rules | None
    cache: Formats
    calibrated: bool = False

    @property
    def cost(self) -> float:
        return _COSTS[CALIBRATED] if self.calibrated else 1.0


def run(
    path: Path,
    text: str,
    *,
    formats: Sequence[str] = SHOWN,
    cache: Formats | None = None,
    tokens: int = 32,
    most: int | None = EVALUATED,
) -> list[Result]:
    """Print the answers of the model in float32 and in each format, and the table; returns its rows.

    - `cache`: the format of keys and values for all runs but float32; dense by default.
    - `most`: the number of tokens to measure; None for all that do not calibrate.
    """
    print(f"model  {path.name}, {path.stat().st_size / 1e6:.0f} MB", flush=True)
    dense = LanguageModel.from_gguf(path)
    texts = Texts.of(dense, text, most)
    print(f"text   {len(text.encode()):,} bytes, sha256 {evaluation.checksum(text)[:16]}")
    print(f"       {texts}\n")
    rows = list(_runs(path, formats, cache, texts))
    progress = _Progress(_COSTS["float32"], [row.cost for row in rows])
    size = _size(dense)
    print(f"== float32 (1 of {1 + len(rows)})", flush=True)
    references, quality = _reference(dense, texts.measured)
    results = [_measured("float32", dense, size, texts, tokens, lambda model: quality)]
    # Kept by numpy, so that the peak of the other rows is without it.
    dense = dataclasses.replace(dense, params=jax.tree.map(np.array, dense.params))
    for number, row in enumerate(rows):
        print(f"\n== {row.name} ({progress.next(number)})", flush=True)
        model = dataclasses.replace(_made(path, dense, row, texts.calibrating).joined(), formats=row.cache)
        results.append(
            _measured(row.name, model, size, texts, tokens, lambda m: evaluation.quality(m, texts.measured, references))
        )
        del model
    print()
    print(table(results, texts, terminal_width()))
    print(f"\n{seconds(progress.elapsed)}")
    return results


def _runs(path: Path, formats: Sequence[str], cache: Formats | None, texts: Texts) -> Iterator[Run]:
    for name in formats:
        if name == STORED:
            if kind := _stored_type(path):
                yield Run(f"{kind}, as stored", None, cache or DENSE)
        elif name == CALIBRATED and not texts.calibrating:
            print(f"The text has one window of {evaluation.WINDOW} tokens or less: none is left to calibrate with.")
        elif name == CALIBRATED:
            yield Run("q4 calibrated", "q4", cache or DENSE, calibrated=True)
        elif name == MIX:
            yield Run("q4, embedding int8", MIXED, cache or DENSE)
        elif name == CACHE:
            yield Run("q4, cache int8", "q4", cache or ("int8", "int8"))
        elif name == BLOCKS:
            yield Run("int8, blocks of 32", QuantizationConfig("int8", block_size=32), cache or DENSE)
        else:
            yield Run(name, QuantizationConfig(name), cache or DENSE)


def _made(path: Path, dense: LanguageModel, row: Run, calibrating: Sequence[Sequence[int]]) -> LanguageModel:
    """The model of a row."""
    if row.rules is None:
        return LanguageModel.from_file(path)
    with counted("quantizing") as (progress, _, doing):
        if not row.calibrated:
            return dense.quantized(row.rules, strict=True, progress=progress)[0]
        model = dataclasses.replace(dense, params=jax.tree.map(jax.numpy.asarray, dense.params))
        moments = _moments(model, calibrating, doing)
        doing("GPTQ")
        return model.quantized(row.rules, strict=True, progress=progress, calibration=moments)[0]


def _moments(model: LanguageModel, windows: Sequence[Sequence[int]], doing: Callable[[str], None]) -> Any:
    """The second moments of the inputs of every weight."""

    def progress(done: int, total: int | None) -> None:
        doing(f"statistics, {done} of {total}")

    batches = [np.asarray(window, np.int32)[None] for window in windows]

    def forward(params: Any, tokens: jax.Array) -> jax.Array:
        return llama.forward(model.config, params, tokens)[0]

    return lowbit.calibrate(forward, model.params, batches, progress=progress)


class _Progress:
    """The time that is left, from the costs of the rows and the time so far."""

    def __init__(self, first: float, costs: Sequence[float]):
        self.first, self.costs, self.start = first, costs, time.monotonic()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.start

    def next(self, number: int) -> str:
        """What to say before the row of this number; the reference is done."""
        done, left = self.first + sum(self.costs[:number]), sum(self.costs[number:])
        return f"{number + 2} of {1 + len(self.costs)}, about {seconds(self.elapsed * left / done)} left"


def _stored_type(path: Path) -> str | None:
    """The type of most quantized weights of a file; None if it is dense."""
    file = open_tensors(path)
    sizes: Counter[str] = Counter()
    for name in file:
        sizes[file.type(name)] += math.prod(file.shape(name)) * is_stored(file.type(name))
    kind, size = sizes.most_common(1)[0]
    return kind if size else None


def table(results: Sequence[Result], texts: Texts, width: int | None = None) -> str:
    """The results as text of at most `width` columns."""
    head = ("format", "bits", "MB", "peak MB", "perplexity", "KL", "top-1", "prompt tok/s", "tok/s")
    rows: list[tuple[str, ...]] = []
    for r in results:
        q = r.quality
        rows.append(
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
    notes = [
        "bits: per weight, over all parameters. peak MB: live JAX arrays while it generates, with the cache.",
        "KL: divergence from float32 in nats. top-1: share of tokens where both predict the same most likely token.",
        "tok/s: generated tokens per second.",
        "The weights of this file are on a 4-bit grid already (Q4_1), so 4-bit formats lose less here than on a model "
        "in full precision; as stored, nothing is lost.",
    ]
    if any(r.name == "q4 calibrated" for r in results):
        count = sum(map(len, texts.calibrating))
        notes.append(
            f"calibrated: rounded by GPTQ for the inputs of the last {count:,} tokens of the text, which are not "
            "measured. `lowbit quantize --calibrate` does it for a file."
        )
    if few := [r.name for r in results if r.name in FORMATS and FORMATS[r.name].bits < 3]:
        notes.append(
            f"{' and '.join(few)}: so few bits need training with them; rounding a trained model destroys it "
            "(docs/training.md)."
        )
    wrapped = [line for note in notes for line in textwrap.wrap(note, width or 120, subsequent_indent="  ")]
    return "\n".join([*table_lines(head, rows, width, right=True), *wrapped])


def _reference(model: LanguageModel, windows: Sequence[Sequence[int]]) -> tuple[list[Reference], Quality]:
    """The predictions of the reference, and its own quality."""
    references, each = [], []
    for window in windows:
        logits = model.logits(window)
        references.append(evaluation.reference(logits))
        each.append(evaluation.compared(logits, references[-1], window))
    return references, evaluation.summary(each)


def _measured(
    name: str, model: LanguageModel, size: int, texts: Texts, tokens: int, quality: Callable[[LanguageModel], Quality]
) -> Result:
    # With prompts of one length, a row compiles three programs.
    model = dataclasses.replace(model, prompt_step=evaluation.PROMPT_TOKENS)
    said, peak = [], 0
    print(f"> {ASKED}", flush=True)
    for text in model.tokenizer.stream(model.generate(model.tokenizer.chat(ASKED), tokens)):
        peak = max(peak, live_bytes())
        print(text, end="", flush=True)
        said.append(text)
    print(flush=True)
    speed = evaluation.speed(model, texts.measured[0], tokens)
    return Result(name, 8 * _nbytes(model) / size, _nbytes(model), peak, quality(model), speed, "".join(said))


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f}" if count >= 1e7 else f"{count / 1e6:.3f}"


def _nbytes(model: LanguageModel) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(model.params))


def _size(model: LanguageModel) -> int:
    return sum(x.size for x in jax.tree.leaves(model.params))
