"""What a format costs a language model and what it gains: perplexity, divergence, speed."""

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

# Each window is read by itself; the first token of it is not predicted.
WINDOW = 512
PROMPT_TOKENS = 4 * PROMPT_STEP
RUNS = 3


def demo_text() -> str:
    """The prose that the demo measures on, written for it."""
    return files("lowbit.demo").joinpath("text.txt").read_text("utf-8")


def checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class Quality:
    """How a model predicts a text, and how far it is from the reference: exact zeros and one for the reference itself.

    - `perplexity`: exp of the mean surprise at each token.
    - `divergence`: mean Kullback-Leibler divergence from the reference's distribution, in nats.
    - `agreement`: how often both think the same token the likeliest.
    """

    perplexity: float
    divergence: float
    agreement: float


@dataclasses.dataclass(frozen=True)
class Speed:
    """Tokens per second: of a prompt of 256, and of text after it. The best of three runs."""

    prompt: float
    generated: float


def windows(model: LanguageModel, text: str) -> list[list[int]]:
    """The text as pieces of `WINDOW` tokens, the last one shorter."""
    ids = model.tokenizer.encode(text)
    pieces = [ids[i : i + WINDOW] for i in range(0, len(ids), WINDOW)]
    return [piece for piece in pieces if len(piece) == WINDOW or piece is pieces[0]]


class Reference(NamedTuple):
    """What the model that others are measured against says after each token of a text.

    The logits are in half precision. That moves a divergence by a few millionths, for it grows with the square of a
    difference; but it makes ties, so the likeliest tokens are kept as they were.
    """

    logits: np.ndarray
    likeliest: np.ndarray


def references(model: LanguageModel, pieces: Sequence[Sequence[int]]) -> list[Reference]:
    """What the model says about each piece of a text, held outside of JAX."""
    return [
        Reference(np.array(logits.astype(jnp.float16)), np.array(jnp.argmax(logits, -1)))
        for logits in map(model.logits, pieces)
    ]


def quality(model: LanguageModel, pieces: Sequence[Sequence[int]], references: Sequence[Reference]) -> Quality:
    """How well a model predicts the pieces of a text, and how near it is to the reference."""
    return summary([sums(model, piece, reference) for piece, reference in zip(pieces, references, strict=True)])


def sums(model: LanguageModel, piece: Sequence[int], reference: Reference) -> np.ndarray:
    """Over the tokens of a piece: surprise, divergence, agreement, and how many they are."""
    found = _compared(model.logits(piece), reference, jnp.asarray(piece))
    return np.array([*found, len(piece) - 1], np.float64)


def summary(pieces: Sequence[np.ndarray]) -> Quality:
    """The quality over several pieces, from the sums of each."""
    surprise, divergence, agreement, count = np.sum(pieces, axis=0)
    return Quality(float(np.exp(surprise / count)), float(divergence / count), float(agreement / count))


@jax.jit
def _compared(logits: jax.Array, reference: Reference, tokens: jax.Array) -> tuple[jax.Array, ...]:
    """Sums over the tokens but the first: surprise, divergence, agreement."""
    got, wanted = (jax.nn.log_softmax(x[:-1].astype(jnp.float32)) for x in (logits, reference.logits))
    surprise = -jnp.take_along_axis(got, tokens[1:, None], axis=-1)
    divergence = jnp.sum(jnp.exp(wanted) * (wanted - got), axis=-1)
    agreement = jnp.argmax(logits[:-1], -1) == reference.likeliest[:-1]
    return jnp.sum(surprise), jnp.sum(divergence), jnp.sum(agreement)


def speed(model: LanguageModel, prompt: Sequence[int], tokens: int) -> Speed:
    """How fast a model reads a prompt and writes after it."""
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
    """A tokenizer that knows no end of a text, so that every run writes the same number of tokens."""

    eos = None


class _Clock:
    """Collects how long each `with` block took."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self.seconds.append(time.perf_counter() - self.start)


def live_bytes() -> int:
    """Bytes of all arrays that JAX holds."""
    return sum(x.nbytes for x in jax.live_arrays())
