"""Measuring a quantized language model: perplexity, divergence from a reference, speed."""

import dataclasses
import hashlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lowbit.io import Reader, open_tensors

from .language_model import PROMPT_STEP, STORED, LanguageModel, model_fields
from .llama import LlamaFile

# Each window is evaluated separately; its first token is not predicted.
WINDOW = 512
PROMPT_TOKENS = 4 * PROMPT_STEP
RUNS = 3


def demo_text() -> str:
    """The prose that the demo measures on."""
    return files("lowbit.demo").joinpath("text.txt").read_text("utf-8")


def checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class Quality:
    """How well a model predicts a text, and how far it is from a reference model.

    - `perplexity`: exp of the mean negative log-likelihood of a token.
    - `divergence`: mean Kullback-Leibler divergence from the reference, in nats; 0 for the reference itself.
    - `agreement`: the share of tokens where both predict the same most likely token.
    - `divergence_error`: the standard error of the mean divergence, as if tokens were independent.
    - `divergence_99`: the 99 % quantile of the divergence over tokens.
    """

    perplexity: float
    divergence: float
    agreement: float
    divergence_error: float
    divergence_99: float


@dataclasses.dataclass(frozen=True)
class Speed:
    """Tokens per second, the best of three runs: reading a prompt of 256, and generating after it."""

    prompt: float
    generated: float


def windows(model: LanguageModel, text: str) -> list[list[int]]:
    """The tokens of a text in windows of `WINDOW`, without an incomplete last one unless it is the only one."""
    ids = model.tokenizer.encode(text)
    if len(ids) < 2:
        raise ValueError(f"The text has {len(ids)} tokens: at least 2 are needed, and {WINDOW} fill a window.")
    return split(ids)


def split(ids: Sequence[int], size: int = WINDOW, most: int | None = None) -> list[list[int]]:
    """Tokens in windows of a size, up to `most` tokens; without an incomplete last one unless it is the only one."""
    ids = list(ids)[: len(ids) if most is None else max(most, 2)]
    found = [ids[i : i + size] for i in range(0, len(ids), size)]
    return [window for window in found if len(window) == size or window is found[0]]


class Reference(NamedTuple):
    """The predictions of the reference model after each token of a text.

    The logits are kept in half precision, which changes a divergence by a few millionths. It also makes ties, so the
    most likely tokens are kept separately.
    """

    logits: np.ndarray
    likeliest: np.ndarray


def references(model: LanguageModel, windows: Sequence[Sequence[int]]) -> list[Reference]:
    """The predictions of a model for each window of a text, in numpy arrays."""
    return [reference(logits) for logits in map(model.logits, windows)]


def reference(logits: jax.Array) -> Reference:
    return Reference(np.array(logits.astype(jnp.float16)), np.array(jnp.argmax(logits, -1)))


def quality(model: LanguageModel, windows: Sequence[Sequence[int]], references: Sequence[Reference]) -> Quality:
    """The quality of a model over the windows of a text."""
    return summary([by_token(model, window, reference) for window, reference in zip(windows, references, strict=True)])


def by_token(model: LanguageModel, window: Sequence[int], reference: Reference) -> np.ndarray:
    """Negative log-likelihood, divergence and agreement of each token of a window but the first: (3, tokens)."""
    return compared(model.logits(window), reference, window)


def compared(logits: jax.Array, reference: Reference, window: Sequence[int]) -> np.ndarray:
    """The same, given the logits of the model."""
    return np.stack([np.asarray(x, np.float64) for x in _compared(logits, reference, jnp.asarray(window))])


def summary(found: Sequence[np.ndarray]) -> Quality:
    """The quality over several windows, from the `by_token` of each."""
    surprise, divergence, agreement = np.concatenate(found, axis=1)
    count = len(surprise)
    return Quality(
        perplexity=float(np.exp(surprise.mean())),
        divergence=float(divergence.mean()),
        agreement=float(agreement.mean()),
        divergence_error=float(divergence.std(ddof=1) / count**0.5) if count > 1 else 0.0,
        divergence_99=float(np.quantile(divergence, 0.99)),
    )


@jax.jit
def _compared(logits: jax.Array, reference: Reference, tokens: jax.Array) -> tuple[jax.Array, ...]:
    """For each token but the first: negative log-likelihood, divergence, agreement."""
    got, wanted = (jax.nn.log_softmax(x[:-1].astype(jnp.float32)) for x in (logits, reference.logits))
    surprise = -jnp.take_along_axis(got, tokens[1:, None], axis=-1)[:, 0]
    divergence = jnp.sum(jnp.exp(wanted) * (wanted - got), axis=-1)
    agreement = jnp.argmax(logits[:-1], -1) == reference.likeliest[:-1]
    return surprise, divergence, agreement


# --- two files


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Two models on the same text. B is compared with A, for instance the quantized model with the dense one.

    - `a`, `b`: the quality of each; divergence and agreement are those of B from A.
    - `bits`: stored bits per weight of each file, over all tensors. `linear_bits`: over the matrices of the layers.
    - `tokens`, `window`: how many tokens were evaluated, and how many at a time. Each window starts anew, so that
      perplexities for other windows do not compare.
    """

    a: Quality
    b: Quality
    bits: tuple[float, float]
    linear_bits: tuple[float, float]
    tokens: int
    window: int

    @property
    def log_ratio(self) -> float:
        """ln(perplexity of B / perplexity of A)."""
        return math.log(self.b.perplexity / self.a.perplexity)

    def as_dict(self) -> dict[str, Any]:
        """All numbers as a plain dict, for JSON."""
        own = self.b
        names = ("bits", "linear_bits", "perplexity")
        pairs = (self.bits, self.linear_bits, (self.a.perplexity, self.b.perplexity))
        sides = [dict(zip(names, values, strict=True)) for values in zip(*pairs, strict=True)]
        kl = {"mean": own.divergence, "standard_error": own.divergence_error, "quantile_99": own.divergence_99}
        found = {"kl": kl, "top1": own.agreement, "log_perplexity_ratio": self.log_ratio}
        return {"a": sides[0], "b": sides[1], **found, "tokens": self.tokens, "window": self.window}

    def __str__(self) -> str:
        own = self.b
        rows = (
            ("bits, all tensors", *(f"{bits:.2f}" for bits in self.bits)),
            ("bits, linears", *(f"{bits:.2f}" for bits in self.linear_bits)),
            ("perplexity", *(f"{q.perplexity:.4g}" for q in (self.a, self.b))),
        )
        table = [f"{'':22}{'A':>10}{'B':>10}", *(f"{name:22}{a:>10}{b:>10}" for name, a, b in rows)]
        return "\n".join(
            [
                *table,
                f"{'ln ratio':22}{'':10}{self.log_ratio:>10.4f}",
                f"{'KL of B from A, nats':22}{'':10}{own.divergence:>10.4g} +- {own.divergence_error:.2g}",
                f"{'  99 % quantile':22}{'':10}{own.divergence_99:>10.4g}",
                f"{'same top-1':22}{'':10}{own.agreement:>10.2%}",
                f"{self.tokens:,} tokens in windows of {self.window}.",
                "Perplexities of other windows do not compare.",
            ]
        )


def evaluate(
    a: str | Path,
    b: str | Path,
    text: str,
    *,
    tokens: int | None = None,
    window: int = WINDOW,
    progress: Callable[[Sequence[Any]], Iterable[Any]] = lambda windows: windows,
) -> Evaluation:
    """Compare two files of a language model on a text, each with its stored bits.

    - `a`, `b`: GGUF files, lowbit files that were made from them, or Hugging Face directories, of a llama.
    - `text`: what to predict; other text than one that a file was calibrated with.
    - `tokens`: how many tokens of the text to use; by default all that fill a window.
    - `window`: how many tokens are read at a time.
    - `progress`: wraps the sequence of windows to iterate over, for instance in a progress bar.

    Dense tensors run in float32. Both models are in memory at the same time.

        evaluate("model.gguf", "q4.safetensors", Path("text.txt").read_text()).b.divergence    # 0.0213
    """
    if window < 2:
        raise ValueError(f"window={window} must be at least 2: the first token of a window is not predicted.")
    files = [LlamaFile.of(file, model_fields(file)) for file in map(open_tensors, (a, b))]
    if files[0].config.vocabulary != files[1].config.vocabulary:
        sizes = " and ".join(f"{file.config.vocabulary:,}" for file in files)
        raise ValueError(f"{a} and {b} have vocabularies of {sizes} tokens: their predictions cannot be compared.")
    models = [LanguageModel.from_file(path, STORED) for path in (a, b)]
    ids = [model.tokenizer.encode(text) for model in models]
    if ids[0] != ids[1]:
        at = next((i for i, (x, y) in enumerate(zip(*ids, strict=False)) if x != y), min(map(len, ids)))
        raise ValueError(
            f"{a} and {b} have different tokenizers: the text is {len(ids[0]):,} and {len(ids[1]):,} tokens, and they "
            f"differ from token {at} on. Predictions of different tokens cannot be compared."
        )
    parts = split(ids[0], window, tokens)
    if len(ids[0]) < 2:
        raise ValueError(f"The text has {len(ids[0])} tokens: at least 2 are needed, and {window} fill a window.")
    found: list[list[np.ndarray]] = [[], []]
    for part in progress(parts):
        logits = [model.logits(part) for model in models]
        reference = Reference(*map(np.asarray, (logits[0], jnp.argmax(logits[0], -1))))
        for own, of_model in zip(found, logits, strict=True):
            own.append(compared(of_model, reference, part))
    first, second = files
    bits = stored_bits(first.file, first.file), stored_bits(second.file, second.file)
    linear = stored_bits(first.file, first.linears), stored_bits(second.file, second.linears)
    return Evaluation(summary(found[0]), summary(found[1]), bits, linear, sum(map(len, parts)), len(parts[0]))


def stored_bits(file: Reader, names: Iterable[str]) -> float:
    """Stored bits per weight over some tensors of a file, with their scales."""
    names = list(names)
    size = sum(math.prod(file.shape(name)) for name in names)
    return 8 * sum(map(file.nbytes, names)) / size if size else 0.0


# --- speed


def speed(model: LanguageModel, prompt: Sequence[int], tokens: int) -> Speed:
    """How fast a model reads a prompt and generates after it."""
    prompt = (list(prompt) * (PROMPT_TOKENS // len(prompt) + 1))[:PROMPT_TOKENS]
    runs = [seconds(model, prompt, tokens) for _ in range(RUNS)]
    reading, writing = (min(times) for times in zip(*runs, strict=True))
    return Speed(PROMPT_TOKENS / reading, tokens / writing)


def seconds(model: LanguageModel, prompt: Sequence[int], tokens: int) -> tuple[float, float]:
    """The time that a model takes to read a prompt, and to generate this number of tokens after the first."""
    forever: Any = _Endless()
    text = dataclasses.replace(model, tokenizer=forever).generate(prompt, tokens + 1)
    start = time.perf_counter()
    next(text)
    read = time.perf_counter()
    for _ in text:
        pass
    return read - start, time.perf_counter() - read


class _Endless:
    """A tokenizer without an end token, so that every run generates the same number of tokens."""

    eos = None


def live_bytes() -> int:
    """Bytes of all live JAX arrays."""
    return sum(x.nbytes for x in jax.live_arrays())
