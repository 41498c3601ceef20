"""Train adapters, norms and biases with optax, over the frozen NF4 weights of a model.

The weights stay in 4 bits and no step changes them. Only the other leaves have gradients and optimizer state, which
saves most of the memory of training. Run it: python examples/optax_frozen.py
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import lowbit

VOCABULARY, WIDTH, CONTEXT, HIDDEN, LAYERS, RANK = 256, 128, 4, 512, 2, 8
TEXT = jnp.array(list(__doc__.encode()))  # a token is a byte
INPUTS = jnp.stack([TEXT[i : len(TEXT) - CONTEXT + i] for i in range(CONTEXT)], axis=1)
TARGETS = TEXT[CONTEXT:]


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.RMSNorm(name="norm")(x)
        low_rank = nn.Dense(RANK, use_bias=False, name="adapter_in")(h)
        adapted = nn.Dense(HIDDEN, use_bias=False, kernel_init=nn.initializers.zeros, name="adapter_out")(low_rank)
        return x + nn.gelu(nn.Dense(HIDDEN, name="dense")(h) + adapted)


class LanguageModel(nn.Module):
    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        x = nn.Embed(VOCABULARY, WIDTH, name="embed")(ids).reshape(-1, CONTEXT * WIDTH)
        for i in range(LAYERS):
            x = Block(name=f"block_{i}")(x)
        return nn.Dense(VOCABULARY, name="head")(nn.RMSNorm(name="norm")(x))


MODEL, OPTIMIZER = LanguageModel(), optax.adamw(1e-2, weight_decay=0.1)


def step(trainable: Any, frozen: Any, state: Any) -> tuple[Any, Any, jax.Array]:
    def loss(trainable: Any) -> jax.Array:
        logits = lowbit.implicit(MODEL.apply)(lowbit.combine(trainable, frozen), INPUTS)
        return optax.softmax_cross_entropy_with_integer_labels(logits, TARGETS).mean()

    value, grads = jax.value_and_grad(loss)(trainable)
    updates, state = OPTIMIZER.update(grads, state, trainable)
    return optax.apply_updates(trainable, updates), state, value


def main() -> tuple[Any, Any, lowbit.Report, float, list[float]]:
    params = jax.jit(MODEL.init)(jax.random.key(0), INPUTS)
    want = jax.jit(MODEL.apply)(params, INPUTS)

    # None keeps the adapters dense, to be trained.
    rules = {"*adapter*": None, "*": "nf4"}
    before, report = lowbit.quantize_tree(params, rules, fn=MODEL.apply, args=(INPUTS,))
    print(report)
    got = jax.jit(lowbit.implicit(MODEL.apply))(before, INPUTS)
    error = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
    print(f"{report.before:,} bytes before, {report.after:,} after; relative error of the logits {error:.4f}")

    trainable, frozen = lowbit.partition(before)  # two trees of the same structure, with None for the other's leaves
    state, losses, train = OPTIMIZER.init(trainable), [], jax.jit(step)
    for _ in range(20):
        trainable, state, loss = train(trainable, frozen, state)
        losses.append(float(loss))
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f} with {kept:,} bytes of optimizer state, not {2 * report.before:,}")
    return before, lowbit.combine(trainable, frozen), report, error, losses


if __name__ == "__main__":
    main()
