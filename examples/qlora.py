"""QLoRA: teach a language model a new kind of text while its weights stay in 4 bits.

Adapters of rank 8 lie over the NF4 weights of SmolLM2-135M; only they have gradients and an optimizer's state. The text
is generated here: the log of a harbor, line by line, in a form the model has not seen.

python examples/qlora.py            # SmolLM2-135M, some minutes on two cores
python examples/qlora.py --small    # a small llama with random weights, some seconds
"""

import random
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import lowbit
from lowbit.demo import llama
from lowbit.demo.language_model import LanguageModel
from lowbit.demo.model_file import demo_model_path

SHIPS, PORTS = ["Marigold", "Old Tern", "Bellwether", "Sallow"], ["Velm", "Sorrel Bay", "Hask", "Nine Elms"]
GOODS, WINDS = ["salt", "slate", "hops", "tar", "wool"], ["north", "south-east", "west", "no wind"]
OPTIMIZER = optax.adamw(2e-3)
SMALL = llama.LlamaConfig(128, 64, 3, 4, 2, 160, 512, 1e4, 1e-5)


def log_book(seed: int, lines: int) -> str:
    pick = random.Random(seed)
    return "".join(
        f"[{pick.randrange(24):02d}h] {pick.choice(SHIPS)} > {pick.choice(PORTS)}; {pick.randrange(2, 60)} t of "
        f"{pick.choice(GOODS)}; wind: {pick.choice(WINDS)}; keeper's mark {pick.choice('ABC')}{pick.randrange(10)}.\n"
        for _ in range(lines)
    )


def small_model() -> tuple[llama.LlamaConfig, Any, Any]:
    """A llama of random weights that reads characters."""
    c, key = SMALL, jax.random.key(0)
    shapes = {"q": (64, 64), "k": (64, 32), "v": (64, 32), "o": (64, 64), "gate": (64, 160), "up": (64, 160)}
    weight = lambda i, *shape: jax.random.normal(jax.random.fold_in(key, i), shape) / shape[-2] ** 0.5
    layers = {name: weight(i, c.layers, *s) for i, (name, s) in enumerate({**shapes, "down": (160, 64)}.items())}
    norms = {name: jnp.ones((c.layers, c.width)) for name in ("attn_norm", "mlp_norm")}
    params = {"embed": weight(9, c.vocabulary, c.width) * 11, "layers": {**layers, **norms}, "norm": jnp.ones(c.width)}
    return c, {**params, "head": weight(8, c.width, c.vocabulary)}, lambda text: list(text.encode())


def loss(trainable: Any, frozen: Any, config: llama.LlamaConfig, tokens: jax.Array) -> jax.Array:
    params = lowbit.combine(trainable, frozen)
    logits, _ = lowbit.implicit(partial(llama.forward, config, remat=True))(params, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@partial(jax.jit, static_argnames="config", donate_argnames=("trainable", "state"))
def step(trainable: Any, frozen: Any, state: Any, config: llama.LlamaConfig, tokens: jax.Array) -> Any:
    value, grads = jax.value_and_grad(loss)(trainable, frozen, config, tokens)
    updates, state = OPTIMIZER.update(grads, state, trainable)
    return optax.apply_updates(trainable, updates), state, value


def main(small: bool = False, steps: int = 40) -> tuple[Any, Any, list[float]]:
    if small:
        config, params, encode = small_model()
    else:
        model = LanguageModel.from_gguf(demo_model_path())
        config, params, encode = model.config, model.params, model.tokenizer.encode
    batch = lambda seed: jnp.array(encode(log_book(seed, 40))[:516]).reshape(4, 129)  # the seed 0 is held out
    fn = lambda params, tokens: llama.forward(config, params, tokens)[0]
    nf4 = lowbit.QuantizationConfig("nf4", double_quant=True)
    params, report = lowbit.quantize_tree(params, nf4, fn=fn, args=(batch(0),))
    params = lowbit.lora(params, "layers/*", rank=8, alpha=16, key=jax.random.key(0))
    trainable, frozen = lowbit.partition(params)
    state = OPTIMIZER.init(trainable)
    sizes = [f"{sum(x.nbytes for x in jax.tree.leaves(tree)):,}" for tree in (frozen, trainable, state)]
    print("{} bytes stored as they are, {} of adapters, {} of optimizer's state".format(*sizes))
    held_out = [float(jax.jit(loss, static_argnames="config")(trainable, frozen, config, batch(0)))]
    for i in range(steps):
        trainable, state, value = step(trainable, frozen, state, config, batch(1 + i))
        print(f"step {i + 1:3d}: loss {value:.3f}", end="\r", flush=True)
    held_out.append(float(jax.jit(loss, static_argnames="config")(trainable, frozen, config, batch(0))))
    print(f"held-out loss {held_out[0]:.3f} -> {held_out[1]:.3f} in {steps} steps")
    return trainable, frozen, held_out


if __name__ == "__main__":
    main(small="--small" in sys.argv)
