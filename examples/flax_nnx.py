"""A Flax NNX transformer, quantized in one line.

An NNX model is a pytree of its variables: `quantize_tree` takes a model and returns one. Leaves that are not weights,
such as the random state of dropout, are kept. Run it: python examples/flax_nnx.py
"""

import jax
import jax.numpy as jnp
from flax import nnx

import lowbit

VOCABULARY, WIDTH, HIDDEN, LAYERS, HEADS = 256, 128, 512, 2, 4
IDS = jnp.array(list(__doc__.encode()[:48])).reshape(2, 24)  # a token is a byte


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm_in = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, use_bias=False, decode=False, rngs=rngs)
        self.norm_mid = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norm_in(x), mask=mask)
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm_mid(x)))))


class LanguageModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, embedding_init=nnx.initializers.normal(1.0), rngs=rngs)
        self.blocks = nnx.Sequential(*[Block(rngs) for _ in range(LAYERS)])
        self.norm_out = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.embed.attend(self.norm_out(self.blocks(self.embed(ids))))


def forward(model: LanguageModel, ids: jax.Array) -> jax.Array:
    return model(ids)


def main() -> tuple[LanguageModel, lowbit.Report, jax.Array, float]:
    model = LanguageModel(nnx.Rngs(0))
    model.eval()
    want = nnx.jit(forward)(model, IDS)

    # The only change. It returns a new model and does not change the given one.
    rules = {"embed/*": "int8", "*": "nf4"}
    model, report = lowbit.quantize_tree(model, rules, fn=forward, args=(IDS,))
    print(report)

    # `nnx.jit` works too. Going dense would raise here.
    with lowbit.materialization("error"):
        got = jax.jit(lowbit.implicit(forward))(model, IDS)

    error = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
    print(f"{report.before:,} bytes before, {report.after:,} after; relative error of the logits {error:.4f}")
    return model, report, got, error


if __name__ == "__main__":
    main()
