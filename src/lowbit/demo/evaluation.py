"""Measuring a quantized language model: perplexity, divergence from a reference, speed."""

import dataclasses
import hashlib
import time
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .language_model import PROMPT_STEP, LanguageModel, read

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
    """

    perplexity: float
    divergence: float
    agreement: float


@dataclasses.dataclass(frozen=True)
class Speed:
    """Tokens per second, the best of three runs: reading a prompt of 256, and generating after it."""

    prompt: float
    generated: float


def windows(model: LanguageModel, text: str) -> list[list[int]]:
    """The tokens of a text in windows of `WINDOW`, without an incomplete last one unless it is the only one."""
    ids = model.tokenizer.encode(text)
    found = [ids[i : i + WINDOW] for i in range(0, len(ids), WINDOW)]
    return [window for window in found if len(window) == WINDOW or window is found[0]]


class Reference(NamedTuple):
    """The predictions of the reference model after each token of a text.

    The logits are kept in half precision, which changes a divergence by a few millionths. It also makes ties, so the
    most likely tokens are kept separately.
    """

    logits: np.ndarray
    likeliest: np.ndarray


def references(model: LanguageModel, windows: Sequence[Sequence[int]]) -> list[Reference]:
    """The predictions of a model for each window of a text, in numpy arrays."""
    return [
        Reference(np.array(logits.astype(jnp.float16)), np.array(jnp.argmax(logits, -1)))
        for logits in map(model.logits, windows)
    ]


def quality(model: LanguageModel, windows: Sequence[Sequence[int]], references: Sequence[Reference]) -> Quality:
    """The quality of a model over the windows of a text."""
    return summary([sums(model, window, reference) for window, reference in zip(windows, references, strict=True)])


def sums(model: LanguageModel, window: Sequence[int], reference: Reference) -> np.ndarray:
    """Sums over the tokens of a window: negative log-likelihood, divergence, agreement, and their number."""
    found = _compared(model.logits(window), reference, jnp.asarray(window))
    return np.array([*found, len(window) - 1], np.float64)


def summary(found: Sequence[np.ndarray]) -> Quality:
    """The quality over several windows, from the `sums` of each."""
    surprise, divergence, agreement, count = np.sum(found, axis=0)
    return Quality(float(np.exp(surprise / count)), float(divergence / count), float(agreement / count))


@jax.jit
def _compared(logits: jax.Array, reference: Reference, tokens: jax.Array) -> tuple[jax.Array, ...]:
    """Sums over all tokens but the first: negative log-likelihood, divergence, agreement."""
    got, wanted = (jax.nn.log_softmax(x[:-1].astype(jnp.float32)) for x in (logits, reference.logits))
    surprise = -jnp.take_along_axis(got, tokens[1:, None], axis=-1)
    divergence = jnp.sum(jnp.exp(wanted) * (wanted - got), axis=-1)
    agreement = jnp.argmax(logits[:-1], -1) == reference.likeliest[:-1]
    return jnp.sum(surprise), jnp.sum(divergence), jnp.sum(agreement)


def speed(model: LanguageModel, prompt: Sequence[int], tokens: int) -> Speed:
    """How fast a model reads a prompt and generates after it."""
    forever: Any = _Endless()
    prompt = (list(prompt) * (PROMPT_TOKENS // len(prompt) + 1))[:PROMPT_TOKENS]
    batch = np.asarray(prompt, np.int32)[None]
    endless = dataclasses.replace(model, tokenizer=forever)

    def reading() -> None:
        cache = model.cache(PROMPT_TOKENS + tokens)
        jax.block_until_ready(cache)
        with clock:
            jax.block_until_ready(read(model.config, model.params, batch, cache, PROMPT_TOKENS - 1, model.formats))

    def writing() -> None:
        text = endless.generate(prompt, tokens + 1)
        next(text)
        with clock:
            for _ in text:
                pass

    seconds = []
    for work in (reading, writing):
        clock = _Clock()
        for _ in range(1 + RUNS):  # the first compiles
            work()
        seconds.append(min(clock.seconds[1:]))
    return Speed(PROMPT_TOKENS / seconds[0], tokens / seconds[1])


class _Endless:
    """A tokenizer without an end token, so that every run generates the same number of tokens."""

    eos = None


class _Clock:
    """Collects the duration of each `with` block."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self.seconds.append(time.perf_counter() - self.start)


def live_bytes() -> int:
    """Bytes of all live JAX arrays."""
    return sum(x.nbytes for x in jax.live_arrays())
