"""Choosing the next token from logits, in compiled code."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Draw(NamedTuple):
    """The operands of a compiled program that samples. None in its place means the most likely token."""

    temperature: Any
    top_p: Any
    seed: Any


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. The same seed gives the same text.

    - `temperature`: logits are divided by it; 0 takes the most likely token.
    - `top_p`: draw from the most likely tokens only, as many as reach this probability, at that temperature.
    - `seed`: an integer from 0 to 2**32 - 1.

        model.generate(prompt, 40, Sampling(temperature=0.7, top_p=0.9, seed=1))
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be 0 (the most likely token) or a positive number.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1.")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} must be from 0 to 2**32 - 1.")

    @property
    def draw(self) -> Draw | None:
        """The operands for `next_token`."""
        if self.temperature == 0:
            return None
        return Draw(np.float32(self.temperature), np.float32(self.top_p), np.uint32(self.seed))


def next_token(logits: jax.Array, draw: Draw | None, position: Any) -> jax.Array:
    """The token at `position` of a text, from logits (..., vocabulary). Its random numbers depend on the position."""
    if draw is None:
        return likeliest(logits)
    key = jax.random.fold_in(jax.random.key(draw.seed), position)
    logs = jax.nn.log_softmax(logits.astype(jnp.float32) / draw.temperature)
    kept = nucleus(jnp.exp(logs), draw.top_p)
    return jax.random.categorical(key, jnp.where(kept, logs, -jnp.inf)).astype(jnp.int32)


def nucleus(probabilities: jax.Array, top_p: Any) -> jax.Array:
    """Which tokens are the most likely ones that add up to `top_p`; all of them if equal ones are the last.

    The bits of the least probability among them are found one by one, which is faster on CPU than sorting.
    """
    bits = lax.bitcast_convert_type(probabilities, jnp.int32)  # in the same order, as no number is negative

    def step(i: Any, least: jax.Array) -> jax.Array:
        higher = least | jnp.left_shift(1, 30 - i)
        total = jnp.sum(jnp.where(bits >= higher, probabilities, 0), -1, keepdims=True)
        return jnp.where(total >= top_p, higher, least)

    return bits >= lax.fori_loop(0, 31, step, jnp.zeros_like(bits[..., :1]))


def likeliest(logits: jax.Array) -> jax.Array:
    """The token of the largest logit. On CPU, two plain reductions are faster than argmax."""
    numbers = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    largest = logits == jnp.max(logits, -1, keepdims=True)
    return jnp.min(jnp.where(largest, numbers, numbers[-1]), -1)
