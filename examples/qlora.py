"""QLoRA: fine-tune a language model whose weights stay in 4 bits.

The NF4 weights of SmolLM2-135M get adapters, and only these have gradients and optimizer state. The text is synthetic:
the log of a harbor in a form that the model has not seen. Run it: python examples/qlora.py takes a few minutes on two
cores; with --small it takes seconds, on a llama with random weights.
"""

import random
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import optax

import lowbit
from lowbit.demo import llama
from lowbit.demo.language_model import LanguageModel
from lowbit.demo.model_file import demo_model_path

WORDS = {"ship": ["Marigold", "Old Tern", "Bellwether", "Sallow"], "port": ["Velm", "Sorrel Bay", "Hask", "Nine Elms"]}
WORDS |= {"goods": ["salt", "slate", "hops", "tar", "wool"], "wind": ["north", "south-east", "west", "none"]}
NF4, OPTIMIZER = lowbit.QuantizationConfig("nf4", double_quant=True), optax.adamw(2e-3)


def log_book(seed: int, lines: int = 32) -> str:
    line, pick = "[{hour:02d}h] {ship} > {port}; {tons} t of {goods}; wind: {wind}.\n", random.Random(seed)
    words = ({name: pick.choice(choices) for name, choices in WORDS.items()} for _ in range(lines))
    return "".join(line.format(hour=pick.randrange(24), tons=pick.randrange(60), **chosen) for chosen in words)


def small_model() -> LanguageModel:
    """A llama with random weights whose tokens are bytes."""
    shapes = {"q": (64, 64), "k": (64, 32), "v": (64, 32), "o": (64, 64), "gate": (64, 160), "up": (64, 160)}
    normal = partial(jax.random.normal, jax.random.key(0))
    layers = {name: normal((3, *shape)) / shape[0] ** 0.5 for name, shape in {**shapes, "down": (160, 64)}.items()}
    layers |= {name: jnp.ones((3, 64)) for name in ("attn_norm", "mlp_norm")}
    params = {"embed": normal((128, 64)), "layers": layers, "norm": jnp.ones(64), "head": normal((64, 128)) / 8}
    bytes_of: Any = SimpleNamespace(encode=lambda text: list(text.encode()))
    return LanguageModel(llama.LlamaConfig(128, 64, 3, 4, 2, 160, 512, 1e4, 1e-5), bytes_of, params)


def loss(trainable: Any, frozen: Any, config: llama.LlamaConfig, tokens: jax.Array) -> jax.Array:
    forward = lowbit.implicit(partial(llama.forward, config, remat=True))
    logits, _ = forward(lowbit.combine(trainable, frozen), tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@partial(jax.jit, static_argnames="config", donate_argnames=("trainable", "state"))
def step(trainable: Any, frozen: Any, state: Any, config: llama.LlamaConfig, tokens: jax.Array) -> Any:
    value, grads = jax.value_and_grad(loss)(trainable, frozen, config, tokens)
    updates, state = OPTIMIZER.update(grads, state, trainable)
    return optax.apply_updates(trainable, updates), state, value


def main(small: bool = False, steps: int = 16) -> tuple[Any, Any, list[float]]:
    model = small_model() if small else LanguageModel.from_gguf(demo_model_path())
    model, report = model.quantized(NF4)
    params = lowbit.lora(model.params, "layers/*", rank=8, alpha=16, key=jax.random.key(0))
    trainable, frozen = lowbit.partition(params)  # the adapters, and everything else
    state, evaluate = OPTIMIZER.init(trainable), jax.jit(loss, static_argnames="config")
    sizes = [sum(x.nbytes for x in jax.tree.leaves(tree)) for tree in (trainable, state)]
    print("{:,} bytes frozen in NF4, {:,} of adapters, {:,} of optimizer state".format(report.after, *sizes))

    tokens = (model.tokenizer.encode(log_book(seed))[:258] for seed in range(steps + 1))
    held_out, *batches = (jnp.array(page).reshape(2, 129) for page in tokens)
    losses = [float(evaluate(trainable, frozen, model.config, held_out))]
    for i, batch in enumerate(batches, 1):
        trainable, state, value = step(trainable, frozen, state, model.config, batch)
        print(f"step {i}: loss {value:.3f}", flush=True)
    losses.append(float(evaluate(trainable, frozen, model.config, held_out)))
    print(f"held-out loss {losses[0]:.3f} -> {losses[1]:.3f}")
    return lowbit.combine(trainable, frozen), state, losses


if __name__ == "__main__":
    main(small="--small" in sys.argv)
