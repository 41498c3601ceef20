"""Timing matrix products in several formats, and other libraries where they are installed."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax

from lowbit import QuantizationConfig, quantize

from . import peers

# Total size of the copies of a weight, which are used in rotation: more than a cache holds.
ROTATED = 128 << 20
# Text: the tokens of the prompt, and those that are generated after it.
PROMPT, WRITTEN = 256, 32


class Timing(NamedTuple):
    """One product: the rows of x, the minimum time, and the speedup over float32.

    For another library, `like` is the product of lowbit that is compared with it, and `ratio` how many times as fast
    that is; None if it was not timed.
    """

    rows: int
    product: str
    microseconds: float
    speedup: float
    like: str | None = None
    ratio: float | None = None


def products(
    size: int,
    rows: Sequence[int],
    repeat: int,
    formats: Sequence[str],
    note: Callable[[str], None] | None = None,
) -> Iterator[Timing]:
    """The minimum times of `x @ w` with square weights, over interleaved repeats.

    With `note`, also of other libraries that are installed; it is called with what is left out, and why.
    """
    key = jax.random.key(0)
    w = jax.random.normal(key, (size, size)) / size**0.5
    weights: dict[str, Any] = {"float32": w}
    for name in formats:
        for arithmetic in ("exact", "fast"):
            weights[f"{name} {arithmetic}"] = quantize(w, QuantizationConfig(name, axis=-2, compute=arithmetic))
    copies = {name: [jax.tree.map(lambda x: x + 0, w) for _ in range(_copies(w))] for name, w in weights.items()}
    multiply = jax.jit(lambda x, w: x @ w)
    for m in rows:
        x = jax.random.normal(key, (m, size))
        others = {} if note is None else peers.products(w, x, ROTATED, note)
        calls: dict[str, Sequence[Callable[[], Any]]] = {
            name: [partial(multiply, x, copy) for copy in own] for name, own in copies.items()
        }
        best = _least(calls | {name: other.calls for name, other in others.items()}, repeat)
        for name, seconds in best.items():
            like = others[name].like if name in others else None
            ratio = seconds / best[like] if like in best else None
            yield Timing(m, name, 1e6 * seconds, best["float32"] / seconds, like, ratio)


def _least(calls: dict[str, Sequence[Callable[[], Any]]], repeat: int) -> dict[str, float]:
    best = dict.fromkeys(calls, float("inf"))
    for turn in range(repeat + 1):
        for name, own in calls.items():
            took = _timed(own[turn % len(own)])
            best[name] = min(best[name], took) if turn else best[name]  # the first compiles
    return best


def _copies(w: Any) -> int:
    return min(max(2, ROTATED // sum(x.nbytes for x in jax.tree.leaves(w))), 64)


def _timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(work())
    return time.perf_counter() - start


class TextTiming(NamedTuple):
    """A language model: tokens per second, and how many times as fast lowbit's q4 with int8 activations is."""

    model: str
    prompt: float
    generated: float
    prompt_ratio: float
    generated_ratio: float


def text(path: Any, repeat: int) -> list[TextTiming]:
    """Speeds of a GGUF file in llama.cpp, as it is stored, and of the same weights in q4, over interleaved repeats."""
    from lowbit.demo import evaluation
    from lowbit.demo.language_model import LanguageModel

    dense = LanguageModel.from_gguf(path)
    prompt = evaluation.windows(dense, evaluation.demo_text())[0][:PROMPT]

    def lowbit(compute: str) -> Callable[[], tuple[float, float]]:
        model = dense.quantized(QuantizationConfig("q4", compute=compute), strict=True)[0].joined()
        return partial(evaluation.seconds, model, prompt, WRITTEN)

    runs = {"q4 exact": lowbit("exact"), "q4 fast": lowbit("fast"), "llama.cpp": peers.llama_cpp(path, prompt, WRITTEN)}
    best = dict.fromkeys(runs, (float("inf"), float("inf")))
    for turn in range(repeat + 1):
        for name, run in runs.items():
            took = run()
            best[name] = (min(best[name][0], took[0]), min(best[name][1], took[1])) if turn else best[name]
    ours = best["q4 fast"]
    return [
        TextTiming(name, PROMPT / reading, WRITTEN / writing, reading / ours[0], writing / ours[1])
        for name, (reading, writing) in best.items()
    ]
