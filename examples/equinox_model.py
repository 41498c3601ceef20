"""An Equinox transformer, quantized in one line.

An Equinox model is a pytree with functions among its leaves, which `quantize_tree` keeps. Its weights are (out, in),
as `fn=` shows, and so does the name `weight`. Run it: python examples/equinox_model.py
"""

import equinox as eqx
import jax
import jax.numpy as jnp

import lowbit

VOCABULARY, WIDTH, HIDDEN, LAYERS, HEADS = 256, 128, 512, 2, 4
IDS = jnp.array(list(__doc__.encode()[:48])).reshape(2, 24)  # a token is a byte


class Block(eqx.Module):
    norm_in: eqx.nn.RMSNorm
    attention: eqx.nn.MultiheadAttention
    norm_mid: eqx.nn.RMSNorm
    mlp: eqx.nn.MLP

    def __init__(self, key: jax.Array):
        attention, mlp = jax.random.split(key)
        self.norm_in = eqx.nn.RMSNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=attention)
        self.norm_mid = eqx.nn.RMSNorm(WIDTH)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, HIDDEN, 1, jax.nn.gelu, key=mlp)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = jax.vmap(self.norm_in)(x)
        x = x + self.attention(h, h, h, mask=jnp.tri(len(x), dtype=bool))
        return x + jax.vmap(self.mlp)(jax.vmap(self.norm_mid)(x))


class LanguageModel(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        embed, head, *blocks = jax.random.split(key, 2 + LAYERS)
        self.embed = eqx.nn.Embedding(VOCABULARY, WIDTH, key=embed)
        self.blocks = [Block(key) for key in blocks]
        self.head = eqx.nn.Linear(WIDTH, VOCABULARY, use_bias=False, key=head)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = jax.vmap(self.embed)(ids)
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(x)


def forward(model: LanguageModel, ids: jax.Array) -> jax.Array:
    return jax.vmap(model)(ids)


def main() -> tuple[LanguageModel, lowbit.Report, jax.Array, float]:
    model = LanguageModel(jax.random.key(0))
    want = eqx.filter_jit(forward)(model, IDS)

    # The only change. Leaves that are not weights are kept.
    rules = {"embed/*": "int8", "head/*": "int8", "*": "nf4"}
    model, report = lowbit.quantize_tree(model, rules, fn=forward, args=(IDS,))
    print(report)

    # `filter_jit`, since `jax.jit` does not accept a model with functions in it. Going dense would raise here.
    with lowbit.materialization("error"):
        got = eqx.filter_jit(lowbit.implicit(forward))(model, IDS)

    error = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
    print(f"{report.before:,} bytes before, {report.after:,} after; relative error of the logits {error:.4f}")
    return model, report, got, error


if __name__ == "__main__":
    main()
