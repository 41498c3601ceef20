"""Memory of a training step: all weights, adapters over float32, adapters over NF4. Compiled, not run.

`arguments` are the inputs of the step: weights, adapters, optimizer state and tokens. `temporaries` are what it also
needs while it runs. The step is that of examples/qlora.py, on SmolLM2-135M with layers rematerialized.

python benchmarks/qlora_memory.py [--length 128] [--batch 2] [--save NAME]
"""

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import measure

import lowbit
from lowbit.demo import llama
from lowbit.demo.language_model import LanguageModel
from lowbit.demo.model_file import demo_model_path

EXAMPLE = Path(__file__).parent.parent / "examples" / "qlora.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("qlora", EXAMPLE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def adapted(config: llama.LlamaConfig, params: Any) -> Any:
    return lowbit.lora(
        params,
        "layers/*",
        rank=8,
        alpha=16,
        key=jax.random.key(0),
        fn=lambda p, tokens: llama.forward(config, p, tokens)[0],
        args=(jax.ShapeDtypeStruct((1, 8), jnp.int32),),
    )


def megabytes(tree: Any) -> float:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)) / 1e6


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=2)
    args = parser.parse_args()
    qlora = example()
    model = LanguageModel.from_gguf(demo_model_path())
    quantized, _ = model.quantized(qlora.NF4)
    ways = {
        "all weights": model.params,
        "LoRA on float32": adapted(model.config, model.params),
        "QLoRA on NF4": adapted(model.config, quantized.params),
    }
    columns = ["frozen", "trained", "MB", "gradients", "optimizer", "arguments", "temporaries", "in all"]
    report = measure.Report(args, columns)
    tokens = jnp.zeros((args.batch, args.length + 1), jnp.int32)
    for way, params in ways.items():
        trainable, frozen = lowbit.partition(params)
        state = qlora.OPTIMIZER.init(trainable)
        memory = qlora.step.lower(trainable, frozen, state, model.config, tokens).compile().memory_analysis()
        given, needed = memory.argument_size_in_bytes / 1e6, memory.temp_size_in_bytes / 1e6
        gradient = partial(jax.eval_shape, partial(jax.grad(qlora.loss), config=model.config))
        gradients = megabytes(gradient(trainable, frozen, tokens=tokens))
        report.row(
            *(megabytes(frozen), megabytes(trainable), way),
            *(gradients, megabytes(state), given, needed, given + needed),
        )
    report.save()


if __name__ == "__main__":
    main()
