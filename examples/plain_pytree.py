"""A transformer in plain dicts: layers stacked and scanned, quantized in one line.

The names of its weights do not show their layout, and two of them are stored (out, in). From `fn=` lowbit finds the
contracted axis of each weight, along which scales are shared. Run it: python examples/plain_pytree.py
"""

from typing import Any

import jax
import jax.numpy as jnp

import lowbit

VOCABULARY, WIDTH, HIDDEN, LAYERS, HEADS = 256, 128, 512, 3, 4
IDS = jnp.array(list(__doc__.encode()[:48])).reshape(2, 24)  # a token is a byte
# Patterns over paths and their formats. The first that matches a leaf decides; norms and biases are kept.
RULES = {"embed": "int8", "*": "nf4"}


def init(key: jax.Array) -> dict[str, Any]:
    def weight(i: int, *shape: int, size: int) -> jax.Array:
        return jax.random.normal(jax.random.fold_in(key, i), shape) / size**0.5

    layers = {
        "norm_in": jnp.ones((LAYERS, WIDTH)),
        "qkv": weight(0, LAYERS, WIDTH, 3, WIDTH, size=WIDTH),  # (in, out) with three outputs
        "mix": weight(1, LAYERS, WIDTH, WIDTH, size=WIDTH),  # (in, out)
        "norm_mid": jnp.ones((LAYERS, WIDTH)),
        "up": weight(2, LAYERS, HIDDEN, WIDTH, size=WIDTH),  # (out, in)
        "down": weight(3, LAYERS, WIDTH, HIDDEN, size=HIDDEN),  # (out, in)
    }
    embed = weight(4, VOCABULARY, WIDTH, size=1)
    return {"embed": embed, "layers": layers, "norm_out": jnp.full(WIDTH, WIDTH**-0.5)}


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True)) * scale


def layer(x: jax.Array, p: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    batch, length, _ = x.shape
    q, k, v = jnp.moveaxis(jnp.einsum("bsw,wco->bsco", rms_norm(x, p["norm_in"]), p["qkv"]), 2, 0)
    q, k, v = (t.reshape(batch, length, HEADS, WIDTH // HEADS) for t in (q, k, v))
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
    x = x + mixed @ p["mix"]
    h = jax.nn.gelu(jnp.einsum("bsw,hw->bsh", rms_norm(x, p["norm_mid"]), p["up"]))
    return x + h @ p["down"].T, None


def forward(params: dict[str, Any], ids: jax.Array) -> jax.Array:
    x, _ = jax.lax.scan(layer, params["embed"][ids], params["layers"])
    return rms_norm(x, params["norm_out"]) @ params["embed"].T  # logits, with the tied embedding


def main() -> tuple[dict[str, Any], lowbit.Report, jax.Array, float]:
    params = init(jax.random.key(0))
    want = jax.jit(forward)(params, IDS)

    # The only change. `forward` is traced, not run; `strict` raises if a pattern matches nothing or an axis is unknown.
    params, report = lowbit.quantize_tree(params, RULES, fn=forward, args=(IDS,), strict=True)
    print(report)

    # The unmodified model. Each product reads its layer in the quantized stack; going dense would raise here.
    with lowbit.materialization("error"):
        got = jax.jit(lowbit.implicit(forward))(params, IDS)

    error = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
    print(f"{report.before:,} bytes before, {report.after:,} after; relative error of the logits {error:.4f}")
    return params, report, got, error


if __name__ == "__main__":
    main()
