"""Calibrate a llama in a file with a text: statistics layer by layer, and formats for a size."""

import dataclasses
import glob
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import lowbit
from lowbit.calibration.allocation import Choice, chosen_formats
from lowbit.calibration.collect import Observer, byte_count
from lowbit.formats.moments import Moments
from lowbit.io import Reader
from lowbit.io._convert import header_bytes, plans_for
from lowbit.models.patterns import Rule, naming

from . import llama
from .evaluation import split
from .language_model import model_fields, tokenizer_of
from .llama import LlamaConfig, LlamaFile

Doing = Callable[[str], None]  # called with what is being done


@dataclasses.dataclass(frozen=True)
class Text:
    """A text in windows of tokens of a model; `tokens` are those that the whole text has."""

    windows: list[list[int]]
    tokens: int

    @classmethod
    def of(cls, file: Reader, text: str, most: int) -> "Text":
        """The first `most` tokens of a text, as the tokenizer of a file has them."""
        ids = tokenizer_of(file, model_fields(file)).encode(text)
        if len(ids) < 2:
            raise ValueError(f"The text has {len(ids)} tokens: a few thousand are needed to calibrate.")
        return cls(split(ids, most=most), len(ids))

    @property
    def used(self) -> int:
        return sum(map(len, self.windows))

    @property
    def batches(self) -> list[np.ndarray]:
        return [np.asarray(window, np.int32)[None] for window in self.windows]


@partial(jax.jit, static_argnums=0)
def _layer(config: LlamaConfig, p: Any, x: jax.Array) -> jax.Array:
    return llama.layer(config, p, x, jnp.arange(x.shape[1]))[0]


def _output(config: LlamaConfig, p: Any, x: jax.Array) -> jax.Array:
    return llama.rms_norm(x, p["norm"], config.epsilon) @ p["head"]


class TextMoments(Mapping[str, Moments]):
    """The moments of the inputs of each matrix of a llama, by the names in its file.

    They are computed when they are asked for, layer by layer: the activations of the text are kept, and the weights of
    one layer at a time are in memory. Asking in the order of iteration reads the model once. Inputs are those of the
    model as it is stored, before it is quantized.

    - `gradients`: weight each row by the squared gradient of the predictions, as `calibrate(..., loss=)` does. All
      moments are then collected at once, with the whole model in memory in float32.
    - `budget`: bytes for the second moments of a layer, or of all of them with `gradients`. A matrix whose own do not
      fit gets a diagonal.
    - `doing`: called with what is being done.
    """

    def __init__(
        self,
        source: LlamaFile,
        text: Text,
        *,
        gradients: bool = False,
        budget: str | int = "4GB",
        doing: Doing = lambda text: None,
    ):
        self.source, self.text, self.gradients, self.budget, self.doing = source, text, gradients, budget, doing
        config, names = source.config, source.layout.names
        matrices = [name for name in names if len(source.file.shape(source.name(0, name))) > 1]
        self.places = {} if source.tied else {source.layout.embed: (-1, "embed")}
        self.places |= {source.name(i, name): (i, name) for i in range(config.layers) for name in matrices}
        self.places[source.layout.embed if source.tied else source.layout.head] = (config.layers, "head")
        self.layer, self.known = 0, dict[str, Moments]()
        self.x: list[jax.Array] = []
        self.observers: dict[bool, Observer] = {}

    @property
    def digest(self) -> str:
        """What tells these moments from those of another text."""
        given = [self.text.windows, self.gradients, str(self.budget)]
        return hashlib.sha256(json.dumps(given).encode()).hexdigest()

    def inputs_of(self, name: str) -> tuple[int, ...]:
        """The axes of the inputs of a matrix; a table that is only looked up has counts of its rows."""
        return (-2,) if self.places[name][0] < 0 else (-1,)

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def __contains__(self, name: object) -> bool:
        return name in self.places

    def __getitem__(self, name: str) -> Moments:
        number, _ = self.places[name]
        if name not in self.known:
            if self.gradients:
                self.known = guided_moments(self.source, self.text, "full", self.budget, self.doing)
            else:
                self.known = self.counts(name) if number < 0 else self.observed(number)
        return self.known[name]

    def counts(self, name: str) -> dict[str, Moments]:
        """How often each row of the embedding is looked up."""
        shape = self.source.file.shape(name)
        counts = np.bincount(np.concatenate(self.text.windows), minlength=shape[0]).astype(np.float32)
        return {name: Moments(shape, (-2,), (), counts, None, np.float32(counts.sum()))}

    def observed(self, number: int) -> dict[str, Moments]:
        """The moments of a layer, or of the output layer after all of them."""
        config, last = self.source.config, number == self.source.config.layers
        if number < self.layer or not self.x:
            self.layer, self.x = 0, self.embedded()
        while self.layer < number:
            self.doing(f"reading layer {self.layer + 1} of {config.layers}")
            self.step(self.source.layer(self.layer))
        self.doing("statistics of the output layer" if last else f"statistics of layer {number + 1} of {config.layers}")
        params = self.last() if last else self.source.layer(number)
        with naming(f"{self.source.file.path}, layer {number}"):
            found = self.observer(last, params).moments(params, self.x)
        if not last:
            self.step(params)
        names = {own: name for name, (at, own) in self.places.items() if at == number}
        self.doing("the output layer" if last else f"layer {number + 1} of {config.layers}")
        return {names[own]: _moved(self.source, names[own], m, (-1,)) for own, m in found.items() if own in names}

    def observer(self, last: bool, params: Any) -> Observer:
        if last not in self.observers:
            fn = partial(_output if last else _layer, self.source.config)
            self.observers[last] = Observer(fn, params, self.x[0], budget=self.budget)
        return self.observers[last]

    def last(self) -> Any:
        """The norm before the output layer, and a few columns in place of the output layer: its inputs matter."""
        columns = jnp.zeros((self.source.config.width, 32), jnp.float32)
        return {"norm": self.source.tensor(self.source.layout.norm), "head": columns}

    def step(self, params: Any) -> None:
        self.x = [_layer(self.source.config, params, x) for x in self.x]
        self.layer += 1

    def embedded(self) -> list[jax.Array]:
        """The embeddings of the text; only the rows that are looked up are decoded."""
        table = self.source.file.array(self.source.layout.embed)
        rows = lowbit.implicit(lambda table, ids: table[ids])
        return [jnp.asarray(rows(table, batch), jnp.float32) for batch in self.text.batches]


# --- formats for a size


@dataclasses.dataclass(frozen=True)
class Allocation:
    """Formats that were chosen: patterns of tensors, each with its format as given, and the rules that they make."""

    patterns: list[tuple[str, str]]
    rules: list[Rule]


def allocated(
    source: LlamaFile,
    text: Text,
    formats: Sequence[tuple[str, Any]],
    rules: Sequence[Rule],
    *,
    bits: float | None,
    size: str | int | None,
    target: Path,
    requantize: bool,
    guided: Mapping[str, Moments] | None = None,
    doing: Doing = lambda text: None,
) -> Allocation:
    """Choose a format for each tensor, for a mean of bits or for the bytes of the file `target`.

    - `formats`: those to choose from, each as it is written on the command line and as a config.
    - `rules`: patterns that come first; the tensors that they match count too.
    - `guided`: moments weighted by gradients, if they are known: their second moments predict what GPTQ leaves of each
      error. By default, diagonals are collected.

    The change of the predictions is estimated as `lowbit.allocate` does it, with the Fisher information: squared
    gradients of the log-likelihood of tokens that are drawn from the predictions. The model is in memory in float32.
    """
    file, plans = source.file, []
    if size is not None:
        byte_count(size, "size")  # raises now, not after the gradients
    for _, config in formats:
        plans.append(plans_for(file, [*rules, Rule("*", config)], strict=False, requantize=requantize)[0])
    guided = guided_moments(source, text, "diag", "4GB", doing) if guided is None else guided
    choices, kept = [], max(header_bytes(file, target, plan) for plan in plans)
    for number, name in enumerate(file):
        doing(f"trying formats, tensor {number + 1} of {len(file)}")
        configs = [plan[name].config for plan in plans]
        known = [config for config in configs if config is not None]
        if len(known) < len(configs):
            kept += file.nbytes(name)
        else:
            choices.append(
                Choice.of(name, jnp.asarray(file.dense(name)), known, [guided[name]] if name in guided else [])
            )
    if not choices:
        raise ValueError(
            f"{file.path} has no tensor that can be quantized, or all are stored in a format already, which "
            "--requantize would quantize again."
        )
    chosen = chosen_formats(choices, kept, bits=bits, size=size)
    fixed = {choice.path for choice in choices if len(set(choice.configs)) == 1}
    found = {choice.path: formats[i] for choice, i in zip(choices, chosen, strict=True) if choice.path not in fixed}
    named = patterns({name: text for name, (text, _) in found.items()}, list(file))
    return Allocation(named, [*rules, *(Rule(pattern, dict(formats)[text]) for pattern, text in named)])


def patterns(formats: Mapping[str, str], names: Sequence[str]) -> list[tuple[str, str]]:
    r"""A few patterns for the formats of many tensors, which match none of the other names.

    >>> patterns({"blk.0.up": "q4", "blk.1.up": "q3", "blk.2.up": "q4", "head": "q4"}, ["blk.0.up", "norm"])
    [('re:blk\\.(0|2)\\.up', 'q4'), ('blk.1.up', 'q3'), ('head', 'q4')]
    """
    groups: dict[tuple[str, str], list[str]] = {}
    shapes = {name: re.sub(r"(?<=\.)\d+(?=\.)", "#", name, count=1) for name in {*formats, *names}}
    for name, format in formats.items():
        groups.setdefault((shapes[name], format), []).append(name)
    found = []
    for (shape, format), members in groups.items():
        alike = [name for name in shapes if shapes[name] == shape]
        if len(members) == 1:
            pattern = glob.escape(members[0])
        elif len(members) == len(alike):
            pattern = "*".join(map(glob.escape, shape.split("#", 1)))
        else:
            before, _, after = shape.partition("#")
            numbers = "|".join(sorted((name[len(before) : len(name) - len(after)] for name in members), key=int))
            pattern = f"re:{re.escape(before)}({numbers}){re.escape(after)}"
        found.append((pattern, format))
    return found


def guided_moments(source: LlamaFile, text: Text, rules: str, budget: str | int, doing: Doing) -> dict[str, Moments]:
    """The moments of the inputs of each matrix, weighted by squared gradients of the predictions, by names in the file.

    The loss is the likelihood of tokens that the model itself samples, whose squared gradients are the curvature of the
    KL. The model is in memory in float32. `rules`, `budget`: as for `calibrate`.
    """
    doing("reading the model")
    config, params = llama.load(source.file, model_fields(source.file))

    def forward(params: Any, tokens: jax.Array) -> jax.Array:
        return llama.forward(config, params, tokens, remat=True)[0]

    def loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
        drawn = jax.random.categorical(jax.random.fold_in(jax.random.key(0), jnp.sum(tokens)), logits)
        return -jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(logits), jax.lax.stop_gradient(drawn)[..., None], -1))

    def progress(done: int, total: int | None) -> None:
        doing(f"gradients of window {min(done + 1, total or 1)} of {total}")

    found = lowbit.calibrate(forward, params, text.batches, rules=rules, loss=loss, budget=budget, progress=progress)
    # The embedding has the axes of the file; all other matrices are transposed.
    ends = (("embed", source.layout.embed, None), ("head", source.layout.head, (-1,)))
    moments = {name: _moved(source, name, found[path], axes) for path, name, axes in ends if path in found}
    for weight in source.layout.names:
        if (stack := found.get(f"layers/{weight}")) is not None:
            for i, (diag, count) in enumerate(zip(stack.diag, stack.count, strict=True)):
                hessian = None if stack.hessian is None else stack.hessian[i]
                name = source.name(i, weight)
                moments[name] = Moments(source.file.shape(name), (-1,), (), diag, hessian, count)
    return moments


def _moved(source: LlamaFile, name: str, moments: Moments, inputs: tuple[int, ...] | None = None) -> Moments:
    """Moments for a tensor of the file, along these axes if they are others than in the model."""
    axes = moments.inputs if inputs is None else inputs
    return Moments(source.file.shape(name), axes, (), moments.diag, moments.hessian, moments.count)
