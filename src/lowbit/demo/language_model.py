"""A language model from a file: generation and evaluation."""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from lowbit import Calibration, QuantizationConfig, Report, quantize_tree, shardings
from lowbit.io import Reader, open_tensors
from lowbit.io._convert import plain_fields
from lowbit.io.readers import is_stored
from lowbit.models.patterns import Rules
from lowbit.runtime import implicit

from . import llama
from .llama import DENSE, Formats, LlamaConfig
from .sampling import Draw, Sampling, next_token
from .tokenizer import HuggingFaceTokenizer, Tokenizer

# Prompts and caches are padded to multiples of these numbers of tokens.
PROMPT_STEP, CACHE_STEP = 64, 64
AT_ONCE = 8  # the most tokens that one call of the compiled program generates
SOON = 0.1  # seconds that such a call may take, so that text is shown as it is generated
GREEDY = Sampling()
GGUF_KEY = "general.architecture"
STORED = "stored"  # a file in its own bits
Progress = Callable[[int, int], None]  # called with the bytes that are done, and their total


@partial(jax.jit, static_argnames=("config", "formats"), donate_argnames=("cache",))
@partial(implicit)
def read(
    config: LlamaConfig,
    params: Any,
    tokens: jax.Array,
    cache: Any,
    last: Any,
    formats: Formats,
    draw: Draw | None = None,
) -> Any:
    """The token after a prompt whose last token is at `last`, and the cache with the prompt."""
    logits, cache = llama.forward(config, params, tokens, cache, 0, last=last, formats=formats)
    return next_token(logits[:, -1:], draw, last + 1), cache


@partial(jax.jit, static_argnames=("config", "formats"), donate_argnames=("cache",))
@partial(implicit)
def write(
    config: LlamaConfig,
    params: Any,
    token: jax.Array,
    cache: Any,
    position: Any,
    most: Any,
    end: Any,
    formats: Formats,
    draw: Draw | None = None,
) -> Any:
    """The tokens after the one at `position`, up to `most` <= AT_ONCE or to the token `end`; and the updated cache."""

    def unfinished(state: Any) -> Any:
        count, token, _, _ = state
        return (count < most) & ((count == 0) | (token[0, 0] != end))

    def following(state: Any) -> Any:
        count, token, found, cache = state
        logits, cache = llama.forward(config, params, token, cache, position + count, formats=formats)
        token = next_token(logits, draw, position + count + 1)
        return count + 1, token, found.at[count].set(token[0, 0]), cache

    state = jnp.int32(0), jnp.asarray(token, jnp.int32), jnp.zeros(AT_ONCE, jnp.int32), cache
    _, _, found, cache = jax.lax.while_loop(unfinished, following, state)
    return found, cache


@partial(jax.jit, static_argnames=("config", "formats"))
@partial(implicit)
def score(config: LlamaConfig, params: Any, tokens: jax.Array, cache: Any, formats: Formats) -> jax.Array:
    """The logits after each token of a text, read through the cache."""
    return llama.forward(config, params, tokens, cache, 0, formats=formats)[0][0]


def model_fields(file: Reader) -> dict[str, Any]:
    """The metadata of the model in a file: the fields of a GGUF file, or a config.json."""
    for fields in (file.metadata, plain_fields(file.metadata.get("gguf")), file.metadata.get("config")):
        if isinstance(fields, dict) and (GGUF_KEY in fields or "model_type" in fields):
            return fields
    raise ValueError(
        f"{file.path} does not describe its model: it has neither the fields of a GGUF file nor a config.json."
    )


def tokenizer_of(file: Reader, fields: Mapping[str, Any]) -> Tokenizer | HuggingFaceTokenizer:
    """The tokenizer of a file with these `model_fields`."""
    return Tokenizer.from_gguf(fields) if GGUF_KEY in fields else HuggingFaceTokenizer(file.path)


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """Parameters, dense or quantized, with the tokenizer of their file.

    - `formats`: of the keys and the values in the cache, None for float32.
    - `prompt_step`: prompts are padded to multiples of this number of tokens, so that few programs are compiled.
    """

    config: LlamaConfig
    tokenizer: Tokenizer | HuggingFaceTokenizer
    params: Any
    formats: Formats = DENSE
    prompt_step: int = PROMPT_STEP

    @classmethod
    def from_gguf(cls, path: str | Path) -> Self:
        """The model in a GGUF file, in float32."""
        return cls.from_file(path, "float32")

    @classmethod
    def from_file(
        cls, path: str | Path, format: str | QuantizationConfig | None = None, *, progress: Progress | None = None
    ) -> Self:
        """The model in a GGUF file, a lowbit file that was made from one, or a Hugging Face directory.

        `format` is that of the weights, `"float32"`, or `"stored"` for the stored bits, with dense tensors in float32.
        None keeps the stored bits of a file or a directory with quantized weights, and is q4 otherwise.
        """
        file = open_tensors(path)
        fields = model_fields(file)
        tokenizer = tokenizer_of(file, fields)
        as_stored = format == STORED or (format is None and any(is_stored(file.type(name)) for name in file))
        config, params = llama.load(file, fields, as_stored=as_stored)
        model = cls(config, tokenizer, params)
        if format == "float32" or as_stored:
            return model
        return model.quantized(format or "q4", strict=True, progress=progress)[0]

    def quantized(
        self,
        rules: Rules,
        *,
        strict: bool = False,
        progress: Progress | None = None,
        calibration: Calibration | None = None,
    ) -> tuple[Self, Report]:
        """The same model with its weights quantized; the arguments are those of `quantize_tree`."""
        tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
        params, report = quantize_tree(
            self.params,
            rules,
            fn=lambda p, t: llama.forward(self.config, p, t)[0],
            args=(tokens,),
            strict=strict,
            progress=progress,
            calibration=calibration,
        )
        return dataclasses.replace(self, params=params), report

    def joined(self) -> Self:
        """The same model with fewer products: weights that multiply the same activations are side by side.

        Generation is faster, and no bit changes. Quantize and shard before: patterns and shardings name the weights
        apart.
        """
        return dataclasses.replace(self, params=llama.joined(self.params))

    def sharded(self, mesh: Mesh, axis: str = "model") -> Self:
        """The same model with every weight sharded over an axis of a mesh, and whole heads on each device."""
        where = jax.tree.map(partial(NamedSharding, mesh), llama.specs(self.params, axis))
        params = jax.device_put(self.params, shardings(self.params, where))
        if self.config.kv_heads % mesh.shape[axis]:
            raise ValueError(
                f"{self.config.heads} heads that share {self.config.kv_heads} keys cannot be sharded over the "
                f"{mesh.shape[axis]} devices of {axis!r}. {math.gcd(self.config.kv_heads, mesh.shape[axis])} would do."
            )
        return dataclasses.replace(self, params=params)

    def cache(self, length: int) -> Any:
        """An empty cache for at least `length` tokens."""
        if length > self.config.context:
            raise ValueError(
                f"{length} tokens exceed the context of this model, {self.config.context}: shorten the prompt, or "
                "generate fewer."
            )
        room = min(math.ceil(length / CACHE_STEP) * CACHE_STEP, self.config.context)
        return llama.new_cache(self.config, room, self.formats)

    def generate(self, prompt: Sequence[int], most: int, sampling: Sampling = GREEDY) -> Iterator[int]:
        """Generate up to `most` tokens after a prompt, until the end token; by default the most likely one each time.

        Tokens are generated a few at a time, and one at a time if that takes long.
        """
        if not prompt:
            raise ValueError("The prompt is empty: give at least one token.")
        filled = math.ceil(len(prompt) / self.prompt_step) * self.prompt_step
        cache = self.cache(max(len(prompt) + most, min(filled + most, self.config.context)))
        tokens = np.zeros((1, min(filled, cache["k"].shape[-2])), np.int32)
        tokens[0, : len(prompt)] = prompt
        draw, at_once = sampling.draw, 1
        token, cache = read(self.config, self.params, tokens, cache, len(prompt) - 1, self.formats, draw)
        end = -1 if self.tokenizer.eos is None else self.tokenizer.eos
        found, position = np.asarray(token)[0, :most], len(prompt)
        while True:
            yield from itertools.takewhile(lambda number: number != end, found.tolist())
            left = most - (position + len(found) - len(prompt))
            if left <= 0 or end in found:
                return
            position, count, start = position + len(found), min(left, at_once), time.monotonic()
            state = found[None, -1:], cache, position - 1, count, end
            found, cache = write(self.config, self.params, *state, self.formats, draw)
            found = np.asarray(found)[:count]
            at_once = min(2 * count, AT_ONCE) if time.monotonic() - start < SOON else 1

    def logits(self, tokens: Sequence[int]) -> jax.Array:
        """The logits after each token of a text: (tokens, vocabulary)."""
        batch = jnp.asarray(tokens, jnp.int32)[None]
        return score(self.config, self.params, batch, self.cache(len(tokens)), self.formats)
