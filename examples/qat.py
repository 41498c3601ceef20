"""Quantization-aware training (QAT) of a small transformer in every format.

The text comes from the grammar below, in which verbs agree with their nouns across the words in between. Each format is
trained from scratch, with embedding and head in int8, and compared with float32 that is quantized after training.
Run it: python examples/qat.py
"""

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowbit

# A symbol is replaced by one of its alternatives at random; other words are copied.
GRAMMAR = {
    "TEXT": ["WHO DOES .", "WHOM DO .", "WHO DOES and DOES .", "WHOM DO and DO ."],
    "WHO": ["ONE", "ONE", "ONE PLACE", "ONE that DOES"],
    "WHOM": ["MANY", "MANY", "MANY PLACE", "MANY that DO"],
    "DOES": ["drifts PLACE", "waits PLACE", "sees WHO", "sees WHOM", "follows WHOM", "carries a THING"],
    "DO": ["drift PLACE", "wait PLACE", "see WHO", "see WHOM", "follow WHO", "carry a THING"],
    "ONE": ["the boat", "the sailor", "a gull", "the pilot", "a stranger", "the child"],
    "MANY": ["the boats", "two sailors", "the gulls", "three pilots", "some strangers", "the children"],
    "PLACE": ["near ONE", "near MANY", "by the harbor", "behind the island", "under the bridge"],
    "THING": ["lantern", "letter", "basket of apples", "barometer", "suitcase with one wheel"],
}
FORMATS = ("float32", "int8", "nf4", "ternary", "binary")
COLUMNS = ("format", "trained", "stored", "rounded", "% over f32", "at worst", "% recovered", "at least")
WIDTH, LAYERS, HEADS, LENGTH, BATCH = 64, 2, 4, 48, 16
# Attention decays with distance, at a different rate in each head, in place of position embeddings.
FADE = -jnp.abs(jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH)) * 2.0 ** -jnp.arange(HEADS)[None, :, None, None]


def written(rng: random.Random, symbol: str = "TEXT") -> str:
    return " ".join(written(rng, s) if s in GRAMMAR else s for s in rng.choice(GRAMMAR[symbol]).split())


def windows(seed: int, count: int) -> jax.Array:
    """A text in windows of equal length; a token is a letter."""
    rng, text, size = random.Random(seed), "", count * (LENGTH + 1)
    while len(text) < size:
        text += written(rng) + " "
    return jnp.array(list(text[:size].encode())).reshape(count, LENGTH + 1)


def init(key: jax.Array) -> dict[str, Any]:
    def weight(i: int, *shape: int) -> jax.Array:
        return jax.random.normal(jax.random.fold_in(key, i), shape) / shape[-2] ** 0.5

    layers = {
        "norm_in": jnp.ones((LAYERS, WIDTH)),
        "qkv": weight(0, LAYERS, WIDTH, 3 * WIDTH),
        "mix": weight(1, LAYERS, WIDTH, WIDTH),
        "norm_mid": jnp.ones((LAYERS, WIDTH)),
        "up": weight(2, LAYERS, WIDTH, 4 * WIDTH),
        "down": weight(3, LAYERS, 4 * WIDTH, WIDTH),
    }
    return {
        "embed": 5 * weight(4, 128, WIDTH),
        "layers": layers,
        "norm": jnp.ones(WIDTH),
        "head": weight(5, WIDTH, 128),
    }


def normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def layer(x: jax.Array, p: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    qkv = (normed(x, p["norm_in"]) @ p["qkv"]).reshape(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
    q, k, v = (qkv[:, :, i] for i in range(3))
    x = x + jax.nn.dot_product_attention(q, k, v, bias=FADE, is_causal=True).reshape(x.shape) @ p["mix"]
    return x + jax.nn.gelu(normed(x, p["norm_mid"]) @ p["up"]) @ p["down"], None


def forward(params: dict[str, Any], ids: jax.Array) -> jax.Array:
    x, _ = jax.lax.scan(layer, params["embed"][ids], params["layers"])
    return normed(x, params["norm"]) @ params["head"]


def loss(params: dict[str, Any], batch: jax.Array) -> jax.Array:
    logits = forward(params, batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def arguments(format: Any) -> dict[str, Any]:
    """The arguments of `straight_through_tree` in training, and of `quantize_tree` afterwards."""
    rules = {"embed": "int8", "head": "int8", "*": format}
    tokens = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)
    return {"rules": rules, "fn": forward, "args": (tokens,), "strict": True}


def simulated(params: dict[str, Any], format: Any) -> dict[str, Any]:
    return params if format == "float32" else lowbit.straight_through_tree(params, **arguments(format))


@partial(jax.jit, static_argnames=("format", "steps"))
def train(key: jax.Array, text: jax.Array, format: Any, steps: int) -> dict[str, Any]:
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, steps // 10, steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))

    def step(carry: Any, key: jax.Array) -> tuple[Any, None]:
        params, state = carry
        batch = text[jax.random.randint(key, (BATCH,), 0, len(text))]
        grads = jax.grad(lambda params: loss(simulated(params, format), batch))(params)  # the only change
        updates, state = optimizer.update(grads, state)
        return (optax.apply_updates(params, updates), state), None

    params = init(key)
    (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), jax.random.split(key, steps))
    return params


measured = jax.jit(lambda params, text, format: loss(simulated(params, format), text), static_argnames="format")
loss_as_stored = jax.jit(lowbit.implicit(loss))


def compare(seed: int, formats: Sequence[Any], steps: int, size: int) -> list[list[float]]:
    """The held-out loss of each format: trained in it, stored in it, and of float32 quantized after training."""
    text, held_out = windows(seed, size), windows(-1 - seed, size // 10)
    dense = train(jax.random.key(seed), text, "float32", steps)
    found = []
    for format in formats:
        params = dense if format == "float32" else train(jax.random.key(seed), text, format, steps)
        trained, rounded = (float(measured(p, held_out, format)) for p in (params, dense))
        kept = params if format == "float32" else lowbit.quantize_tree(params, **arguments(format))[0]
        with lowbit.materialization("error"):  # fused products with the stored weights
            stored = float(loss_as_stored(kept, held_out))
        if abs(stored - trained) > 1e-5 * trained:
            raise ValueError(f"{format} was trained to a loss of {trained}, and stored it has {stored}.")
        print(f"seed {seed}: {format} trained to {trained:.4f}; float32 rounded to it {rounded:.4f}", flush=True)
        found.append([trained, stored, rounded])
    return found


def main(seeds: int = 3, formats: Sequence[Any] = FORMATS, steps: int = 400, size: int = 8000) -> list[Any]:
    losses = np.array([compare(seed, formats, steps, size) for seed in range(seeds)])
    trained, stored, rounded = np.moveaxis(losses, 2, 0)  # (seeds, formats) each
    dense = trained[:, :1]  # the first format is float32
    over = 100 * (trained / dense - 1)
    recovered = 100 * (rounded - trained) / np.where(rounded == dense, np.nan, rounded - dense)
    print(" | ".join(f"{name:>13}" for name in COLUMNS))
    rows = []
    for i, format in enumerate(formats):
        means = [float(x[:, i].mean()) for x in (trained, stored, rounded, over, recovered)]
        rows.append([str(format), *means[:4], float(over[:, i].max()), means[4], float(recovered[:, i].min())])
        print(" | ".join(f"{x:>13}" if isinstance(x, str) else f"{x:13.4f}" for x in rows[-1]))
    return rows


if __name__ == "__main__":
    main()
