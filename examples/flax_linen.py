"""A Flax linen transformer, scanned over its layers with remat, quantized in one line.

The model does not mention lowbit. `nn.scan` stacks the kernels of the layers; from `fn=model.apply` lowbit finds the
contracted axis of each weight, through the scan and the heads. Run it: python examples/flax_linen.py
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import lowbit

VOCABULARY, WIDTH, HIDDEN, LAYERS, HEADS = 256, 128, 512, 3, 4
IDS = jnp.array(list(__doc__.encode()[:48])).reshape(2, 24)  # a token is a byte


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> tuple[jax.Array, None]:
        x = x + nn.MultiHeadAttention(HEADS, use_bias=False, name="attention")(nn.RMSNorm()(x), mask=mask)
        h = nn.gelu(nn.Dense(HIDDEN, name="up")(nn.RMSNorm()(x)))
        return x + nn.Dense(WIDTH, name="down")(h), None


class LanguageModel(nn.Module):
    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        embed = nn.Embed(VOCABULARY, WIDTH, embedding_init=nn.initializers.normal(1.0), name="embed")
        blocks = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=LAYERS,
        )
        x, _ = blocks(name="blocks")(embed(ids), nn.make_causal_mask(ids))
        return embed.attend(nn.RMSNorm()(x))


def main() -> tuple[Any, lowbit.Report, jax.Array, float]:
    model = LanguageModel()
    params = jax.jit(model.init)(jax.random.key(0), IDS)
    want = jax.jit(model.apply)(params, IDS)

    # The only change. The first pattern that matches a path decides; `*` matches `/` too.
    rules = {"*embed*": "int8", "*down*": "int8", "*": "nf4"}
    params, report = lowbit.quantize_tree(params, rules, fn=model.apply, args=(IDS,))
    print(report)

    # `implicit` lets `apply` accept quantized leaves. Going dense would raise here.
    with lowbit.materialization("error"):
        got = jax.jit(lowbit.implicit(model.apply))(params, IDS)

    error = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
    print(f"{report.before:,} bytes before, {report.after:,} after; relative error of the logits {error:.4f}")
    return params, report, got, error


if __name__ == "__main__":
    main()
