"""Time of a training step with adapters: over float32 weights, and over NF4 weights.

The step is that of examples/qlora.py, on SmolLM2-135M with layers rematerialized, in interleaved repeats.

python benchmarks/qlora_speed.py [--length 128] [--batch 2] [--save NAME]
"""

import jax
import jax.numpy as jnp
import measure
from qlora_memory import adapted, example

import lowbit
from lowbit.demo.language_model import LanguageModel
from lowbit.demo.model_file import demo_model_path


def main() -> None:
    parser = measure.parser(__doc__)
    parser.set_defaults(repeat=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=2)
    args = parser.parse_args()
    qlora = example()
    model = LanguageModel.from_gguf(demo_model_path())
    bases = {"LoRA on float32": model.params, "QLoRA on NF4": model.quantized(qlora.NF4)[0].params}
    tokens = jax.random.randint(jax.random.key(0), (args.batch, args.length + 1), 0, model.config.vocabulary)
    calls = {}
    for way, base in bases.items():
        trainable, frozen = lowbit.partition(adapted(model.config, base))
        run = jax.jit(qlora.step.__wrapped__, static_argnames="config")  # without donation: repeats have one operand
        operands = trainable, frozen, qlora.OPTIMIZER.init(trainable), model.config, jnp.asarray(tokens)
        calls[way] = [lambda run=run, operands=operands: run(*operands)]
    best = measure.least(calls, args.repeat)
    report = measure.Report(args, ["tokens", "seconds", "step", "x float32"])
    for way, seconds in best.items():
        report.row(args.batch * args.length, seconds, way, best["LoRA on float32"] / seconds)
    report.save()


if __name__ == "__main__":
    main()
