"""Load a quantized Hugging Face llama into a Flax linen model with scanned layers, without decoding a weight.

The mapping renames tensors, swaps `(out, in)` by a flag, and stacks layers in stored bits. The checkpoint is written
here, at a small size. Run it: python examples/load_llama.py
"""

import tempfile
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

import lowbit

VOCABULARY, WIDTH, HIDDEN, LAYERS, HEADS, SIZE = 256, 128, 256, 3, 4, 32
IDS = jnp.array(list(__doc__.encode()[:48])).reshape(2, 24)  # a token is a byte
MAPPING = {
    r"model\.embed_tokens\.weight": "params/embed/embedding",
    r"model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)_proj\.weight": r"params/layers/\2/kernel[\1]",
    r"model\.layers\.(\d+)\.(\w+)_layernorm\.weight": r"params/layers/\2/scale[\1]",
    r"model\.norm\.weight": "params/norm/scale",
    r"lm_head\.weight": "params/head/kernel",
}


def rotated(x: jax.Array) -> jax.Array:
    angles = jnp.arange(x.shape[1])[:, None, None] * 1e4 ** (-jnp.arange(0, SIZE, 2) / SIZE)
    (a, b), cos, sin = jnp.split(x, 2, axis=-1), jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        h = nn.RMSNorm(name="input")(x)
        q, k, v = (nn.Dense(WIDTH, False, name=n)(h).reshape(*x.shape[:2], HEADS, SIZE) for n in "qkv")
        h = jax.nn.dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + nn.Dense(WIDTH, False, name="o")(h.reshape(x.shape))
        h = nn.RMSNorm(name="post_attention")(x)
        gate, up = (nn.Dense(HIDDEN, False, name=n)(h) for n in ("gate", "up"))
        return x + nn.Dense(WIDTH, False, name="down")(nn.silu(gate) * up), None


class Llama(nn.Module):
    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        layers = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
        x, _ = layers(name="layers")(nn.Embed(VOCABULARY, WIDTH, name="embed")(ids), None)
        return nn.Dense(VOCABULARY, False, name="head")(nn.RMSNorm(name="norm")(x))


def checkpoint() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)  # random weights, with the names and shapes of Hugging Face
    shapes = {**{f"self_attn.{n}_proj": (WIDTH, WIDTH) for n in "qkvo"}, "mlp.down_proj": (WIDTH, HIDDEN)}
    shapes |= {"mlp.gate_proj": (HIDDEN, WIDTH), "mlp.up_proj": (HIDDEN, WIDTH)}
    names = {f"model.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in shapes.items()}
    names |= dict.fromkeys(["model.embed_tokens", "lm_head"], (VOCABULARY, WIDTH))
    tensors = {f"{n}.weight": rng.normal(0, WIDTH**-0.5, shape).astype(np.float32) for n, shape in names.items()}
    norms = [f"layers.{i}.{n}_layernorm" for i in range(LAYERS) for n in ("input", "post_attention")]
    return tensors | {f"model.{n}.weight": rng.uniform(0.5, 2, WIDTH).astype(np.float32) for n in [*norms, "norm"]}


def main(folder: str) -> tuple[Any, jax.Array, jax.Array]:
    save_file(checkpoint(), f"{folder}/llama.safetensors")
    lowbit.io.convert(f"{folder}/llama.safetensors", f"{folder}/q4.safetensors", rules={"*embed*": "int8", "*": "q4"})
    shapes = jax.eval_shape((model := Llama()).init, jax.random.key(0), IDS)
    params = lowbit.load(f"{folder}/q4.safetensors", like=shapes, mapping=MAPPING)
    with lowbit.materialization("error"):  # going dense would raise
        got = jax.jit(lowbit.implicit(model.apply))(params, IDS)
    want = jax.jit(model.apply)(lowbit.dequantize_tree(params), IDS)
    print(f"{params['params']['layers']['up']['kernel']}\nlargest difference of the logits {abs(got - want).max():.1e}")
    return params, got, want


if __name__ == "__main__":
    main(tempfile.mkdtemp())
