"""Adapters over NF4 compared with adapters over the dequantized weights: gradients, bytes, dense weights built.

The step is that of examples/qlora.py on SmolLM2-135M, layers scanned and rematerialized. `error` is the largest
difference between a gradient and that over the dense base, relative to the largest value of the same array. `weights
built` counts the values of a weight's shape in the program, forward and backward, outside of the products.

python benchmarks/qlora_gradients.py [--save NAME]
"""

from typing import Any

import jax
import jax.numpy as jnp
import measure
import numpy as np
from qlora_memory import adapted, example

import lowbit
from lowbit.demo.language_model import LanguageModel
from lowbit.demo.model_file import demo_model_path
from lowbit.runtime import is_implicit
from lowbit.testing import dense_weights


def learned(w: Any) -> Any:
    """An adapter as after some training; initially one of its factors is zero."""
    if not isinstance(w, lowbit.LoraArray):
        return w
    return w.replace(b=jax.random.normal(jax.random.key(1), w.b.shape) * 1e-3)


def with_dense_base(w: Any) -> Any:
    return w.replace(base=lowbit.materialize(w.base)) if isinstance(w, lowbit.LoraArray) else lowbit.materialize(w)


def main() -> None:
    args = measure.parser(__doc__).parse_args()
    qlora = example()
    model, _ = LanguageModel.from_gguf(demo_model_path()).quantized(qlora.NF4)
    params = jax.tree.map(learned, adapted(model.config, model.params), is_leaf=is_implicit)
    tokens = jnp.array(model.tokenizer.encode(qlora.log_book(0))[:258]).reshape(2, 129)
    report = measure.Report(args, ["arguments", "given", "base", "temporaries", "weights built", "loss", "error"])
    found = {}
    for name, tree in {"dense": jax.tree.map(with_dense_base, params, is_leaf=is_implicit), "NF4": params}.items():
        trainable, frozen = lowbit.partition(tree)
        state = qlora.OPTIMIZER.init(trainable)
        with lowbit.materialization("error"):
            memory = qlora.step.lower(trainable, frozen, state, model.config, tokens).compile().memory_analysis()
            gradient = jax.jit(jax.value_and_grad(qlora.loss), static_argnums=2)
            built = dense_weights(gradient.trace(trainable, frozen, model.config, tokens).jaxpr, params)
            loss, grads = gradient(trainable, frozen, model.config, tokens)
        found[name] = [np.asarray(g) for g in jax.tree.leaves(grads)]
        given = sum(x.nbytes for x in jax.tree.leaves((trainable, frozen, state, tokens)))
        errors = [np.abs(g - d).max() / np.abs(d).max() for g, d in zip(found[name], found["dense"], strict=True)]
        report.row(
            *(memory.argument_size_in_bytes, given, name, memory.temp_size_in_bytes),
            *(len(built), float(loss), float(max(errors))),
        )
    report.save()


if __name__ == "__main__":
    main()
