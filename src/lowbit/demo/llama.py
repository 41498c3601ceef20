"""A llama in plain JAX: stacked layers in a scan, and a key-value cache. Only the cache mentions quantization.

Weights are (in, out), so that `x @ w` is the product; a layer is a slice of each stack.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

import lowbit
from lowbit.io import Reader

Params = dict[str, Any]
Cache = dict[str, Any]
Formats = tuple[str | None, str | None]  # of keys and values; None is dense
DENSE: Formats = (None, None)


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a model."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    context: int
    rope_base: float
    epsilon: float

    @property
    def head_size(self) -> int:
        return self.width // self.heads


@dataclasses.dataclass(frozen=True)
class Layout:
    """The names of the sizes and tensors of a llama in a kind of file, which has each matrix as (out, in).

    - `layer`: a pattern for the number of a layer and the name of a tensor in it.
    - `halves`: rotary embeddings pair the two halves of a head, not adjacent elements.
    """

    sizes: dict[str, str]
    embed: str
    norm: str
    head: str
    layer: str
    names: dict[str, str]
    halves: bool


GGUF = Layout(
    sizes={
        "width": "llama.embedding_length",
        "layers": "llama.block_count",
        "heads": "llama.attention.head_count",
        "kv_heads": "llama.attention.head_count_kv",
        "hidden": "llama.feed_forward_length",
        "context": "llama.context_length",
        "rope_base": "llama.rope.freq_base",
        "epsilon": "llama.attention.layer_norm_rms_epsilon",
    },
    embed="token_embd.weight",
    norm="output_norm.weight",
    head="output.weight",
    layer="blk.{}.{}.weight",
    names={
        "attn_norm": "attn_norm",
        "q": "attn_q",
        "k": "attn_k",
        "v": "attn_v",
        "o": "attn_output",
        "mlp_norm": "ffn_norm",
        "gate": "ffn_gate",
        "up": "ffn_up",
        "down": "ffn_down",
    },
    halves=False,
)
HUGGING_FACE = Layout(
    sizes={
        "width": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "hidden": "intermediate_size",
        "context": "max_position_embeddings",
        "rope_base": "rope_theta",
        "epsilon": "rms_norm_eps",
    },
    embed="model.embed_tokens.weight",
    norm="model.norm.weight",
    head="lm_head.weight",
    layer="model.layers.{}.{}.weight",
    names={
        "attn_norm": "input_layernorm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    },
    halves=True,
)


@dataclasses.dataclass(frozen=True)
class LlamaFile:
    """The tensors of a llama in a file, as the parameters of the model: in float32, or with their stored bits."""

    file: Reader
    layout: Layout
    config: LlamaConfig

    @classmethod
    def of(cls, file: Reader, fields: Mapping[str, Any]) -> "LlamaFile":
        """`fields` are the metadata of a GGUF file, or the config.json of a Hugging Face directory."""
        layout = GGUF if "general.architecture" in fields else HUGGING_FACE
        kind = fields.get("general.architecture", fields.get("model_type"))
        if kind != "llama":
            raise ValueError(f"{file.path} holds a model of type {kind!r}, and only 'llama' can be run.")
        wrong = [key for key in layout.sizes.values() if type(fields.get(key)) not in (int, float)]
        if wrong:
            raise ValueError(f"{file.path}: the metadata has no number for {', '.join(wrong)}.")
        sizes = {name: fields[key] for name, key in layout.sizes.items()}
        return cls(file, layout, LlamaConfig(vocabulary=file.shape(layout.embed)[0], **sizes))

    @property
    def tied(self) -> bool:
        """Whether the embedding is also the output layer."""
        return self.layout.head not in self.file

    def name(self, number: int, weight: str) -> str:
        """The name of a tensor of a layer in the file."""
        return self.layout.layer.format(number, self.layout.names[weight])

    @property
    def linears(self) -> list[str]:
        """The names of the matrices of all layers."""
        names = (self.name(i, weight) for i in range(self.config.layers) for weight in self.layout.names)
        return [name for name in names if len(self.file.shape(name)) > 1]

    def tensor(self, name: str, as_stored: bool = False) -> Any:
        array = self.file.array(name) if as_stored else self.file.dense(name)
        return array if lowbit.is_quantized(array) else jnp.asarray(array, jnp.float32)

    def formats(self, number: int) -> list[str]:
        """How the tensors of a layer are stored."""
        return [self.file.type(self.name(number, weight)) for weight in self.layout.names]

    def layer(self, number: int, as_stored: bool = False) -> Params:
        """The parameters of a layer, with matrices as (in, out)."""
        heads = {"q": self.config.heads, "k": self.config.kv_heads} if self.layout.halves else {}

        @lowbit.implicit
        def turned(w: Any, heads: int | None) -> Any:
            if heads is not None:  # the rows of each head, reordered so that adjacent rows are pairs
                w = jnp.swapaxes(w.reshape(heads, 2, -1, w.shape[-1]), 1, 2).reshape(w.shape)
            return w.T  # a vector is its own transpose

        return {w: turned(self.tensor(self.name(number, w), as_stored), heads.get(w)) for w in self.layout.names}

    def ends(self, as_stored: bool = False) -> Params:
        """The parameters that are not of a layer: embedding, last norm, and the output layer if it is not tied."""
        found = {
            "embed": self.tensor(self.layout.embed, as_stored),
            "norm": self.tensor(self.layout.norm, as_stored),
        }
        return found if self.tied else found | {"head": self.tensor(self.layout.head, as_stored).T}


def load(file: Reader, fields: Mapping[str, Any], *, as_stored: bool = False) -> tuple[LlamaConfig, Params]:
    """The sizes and the parameters of a llama: in float32, or with the stored bits if `as_stored`.

    `fields` as for `LlamaFile.of`. If layers are stored in different formats, `params["layers"]` is a list: a stack for
    each run of layers that are alike.
    """
    source = LlamaFile.of(file, fields)

    @lowbit.implicit
    def stacked(layers: list[Params]) -> Params:
        return {name: jnp.stack([layer[name] for layer in layers]) for name in layers[0]}

    numbers = range(source.config.layers)
    alike = [list(run) for _, run in itertools.groupby(numbers, source.formats if as_stored else lambda i: None)]
    runs = [stacked([source.layer(i, as_stored) for i in run]) for run in alike]
    return source.config, source.ends(as_stored) | {"layers": runs[0] if len(runs) == 1 else runs}


def init(config: LlamaConfig, key: jax.Array) -> Params:
    """Random parameters, with the embedding tied to the head."""
    shapes = {
        "q": (config.width, config.width),
        "k": (config.width, config.kv_heads * config.head_size),
        "v": (config.width, config.kv_heads * config.head_size),
        "o": (config.width, config.width),
        "gate": (config.width, config.hidden),
        "up": (config.width, config.hidden),
        "down": (config.hidden, config.width),
    }
    embed, *keys = jax.random.split(key, 1 + len(shapes))
    ones = jnp.ones((config.layers, config.width))
    stacks = {
        name: jax.random.normal(key, (config.layers, *shape)) / math.sqrt(shape[0])
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return {
        "embed": jax.random.normal(embed, (config.vocabulary, config.width)) / math.sqrt(config.width),
        "layers": {"attn_norm": ones, "mlp_norm": ones, **stacks},
        "norm": jnp.ones(config.width),
    }


def specs(params: Params, axis: str = "model") -> Params:
    """Tensor parallelism: how each parameter is sharded over an axis of a mesh.

    Weights that read the residual stream are sharded by columns, those that write to it by rows, so a layer has two
    all-reduces and gathers no weight. Each device has whole heads if their number divides.
    """
    columns, rows = PartitionSpec(None, None, axis), PartitionSpec(None, axis, None)
    special = {"o": rows, "down": rows, "attn_norm": PartitionSpec(), "mlp_norm": PartitionSpec()}
    runs = [{name: special.get(name, columns) for name in run} for run in runs_of(params)]
    placed: Params = {
        "embed": PartitionSpec(axis, None),
        "layers": runs if isinstance(params["layers"], list) else runs[0],
        "norm": PartitionSpec(),
    }
    return placed | ({"head": PartitionSpec(None, axis)} if "head" in params else {})


def runs_of(params: Params) -> list[Params]:
    """The stacks of layers that are stored alike."""
    return params["layers"] if isinstance(params["layers"], list) else [params["layers"]]


# Products with the same operand that can be one, and the name of the joined weight.
JOINED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


def joined(params: Params) -> Params:
    """The parameters with q, k, v and gate, up side by side, which makes fewer and larger products.

    No bit changes. Weights of different formats are left apart, so that none goes dense.
    """

    def run(stacks: Params) -> Params:
        for name, parts in JOINED.items():
            together = _side_by_side([stacks[part] for part in parts if part in stacks])
            if together is not None:
                stacks = {key: w for key, w in stacks.items() if key not in parts} | {name: together}
        return stacks

    runs = [run(stacks) for stacks in runs_of(params)]
    return params | {"layers": runs if isinstance(params["layers"], list) else runs[0]}


def _side_by_side(weights: list[Any]) -> Any:
    """The weights as one, or None if they are stored in different ways."""
    if not weights or len({(type(w), w.dtype) for w in weights}) > 1:
        return None
    try:
        with lowbit.materialization("error"):
            return lowbit.implicit(lambda weights: jnp.concatenate(weights, -1))(weights)
    except TypeError:
        return None


def products(x: jax.Array, p: Params, joined: str, sizes: Sequence[int]) -> list[jax.Array]:
    """The products of x with the weights that may be joined, of these numbers of columns."""
    if joined in p:
        return jnp.split(x @ p[joined], list(itertools.accumulate(sizes))[:-1], axis=-1)
    return [x @ p[name] for name in JOINED[joined]]


def new_cache(config: LlamaConfig, length: int, formats: Formats = DENSE) -> Cache:
    """An empty cache for the keys and values of `length` tokens, each dense or in a format."""
    shape = (config.layers, 1, config.kv_heads, length, config.head_size)
    return {name: stored(jnp.zeros(shape), format) for name, format in zip("kv", formats, strict=True)}


def stored(x: jax.Array, format: str | None) -> Any:
    """Keys or values as the cache stores them: with a scale for every token and head."""
    return x if format is None else lowbit.quantize(x, lowbit.QuantizationConfig(format, axis=-1))


def forward(
    config: LlamaConfig,
    params: Params,
    tokens: jax.Array,
    cache: Cache | None = None,
    start: Any = 0,
    *,
    last: Any = None,
    formats: Formats = DENSE,
    remat: bool = False,
) -> tuple[jax.Array, Cache | None]:
    """Logits of `tokens` (batch, length), and the cache with them written at `start`.

    `last`: compute only the logits after that token. `formats`: those of the cache. `remat`: recompute each layer in
    the backward pass, to save memory.
    """
    positions = start + jnp.arange(tokens.shape[1])

    def step(carry: tuple[jax.Array, Cache | None], inputs: tuple[jax.Array, Params]) -> Any:
        x, cache = carry
        number, p = inputs
        return layer(config, p, x, positions, cache, (number, start), formats), None

    x = params["embed"][tokens].astype(jnp.float32)  # whatever the weights are
    step = jax.checkpoint(step) if remat else step
    first = 0
    for run in runs_of(params):
        numbers = first + jnp.arange(len(run["attn_norm"]))
        (x, cache), _ = lax.scan(step, (x, cache), (numbers, run))
        first += len(run["attn_norm"])
    if last is not None:
        x = lax.dynamic_slice_in_dim(x, last, 1, axis=1)
    head = params["head"] if "head" in params else params["embed"].T
    return rms_norm(x, params["norm"], config.epsilon) @ head, cache


def layer(
    config: LlamaConfig,
    p: Params,
    x: jax.Array,
    positions: jax.Array,
    cache: Cache | None = None,
    at: tuple[Any, Any] = (0, 0),
    formats: Formats = DENSE,
) -> tuple[jax.Array, Cache | None]:
    """One layer on x (batch, length, width), and the cache with its keys and values. `at`: layer and start there."""
    batch, length, _ = x.shape
    heads, kv_heads, size = config.heads, config.kv_heads, config.head_size
    number, start = at
    h = rms_norm(x, p["attn_norm"], config.epsilon)
    numbers = (heads, kv_heads, kv_heads)
    q, k, v = (
        jnp.swapaxes(y.reshape(batch, length, n, size), 1, 2)
        for n, y in zip(numbers, products(h, p, "qkv", [n * size for n in numbers]), strict=True)
    )
    q, k = rope(q, positions, config.rope_base), rope(k, positions, config.rope_base)
    if cache is not None:
        new = {name: stored(x[None], f) for name, x, f in zip("kv", (k, v), formats, strict=True)}
        place = (number, 0, 0, start, 0)
        cache = {name: lax.dynamic_update_slice(cache[name], jnp.asarray(x), place) for name, x in new.items()}
        k, v = (lax.dynamic_index_in_dim(cache[name], number, keepdims=False) for name in ("k", "v"))
    mask = jnp.arange(k.shape[-2]) <= positions[:, None]
    # Each key is shared by a group of heads.
    q = q.reshape(batch, kv_heads, heads // kv_heads, length, size)
    scores = (one_score if length == 1 else all_scores)(q, k) / math.sqrt(size)
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))
    mixed = jnp.einsum("bkgst,bktd->bkgsd", weights, v).reshape(batch, heads, length, size)
    x = x + jnp.swapaxes(mixed, 1, 2).reshape(batch, length, heads * size) @ p["o"]
    h = rms_norm(x, p["mlp_norm"], config.epsilon)
    gate, up = products(h, p, "gate_up", [config.hidden] * 2)
    return x + (jax.nn.silu(gate) * up) @ p["down"], cache


def all_scores(q: jax.Array, k: Any) -> jax.Array:
    return jnp.einsum("bkgsd,bktd->bkgst", q, k)


def one_score(q: jax.Array, k: Any) -> jax.Array:
    """The same for one query: on CPU, XLA transposes all keys unless they are the first operand, which it swaps."""
    scores = lax.optimization_barrier(jnp.einsum("bktd,bkgsd->bktgs", k, q))
    return jnp.moveaxis(scores, 2, -1)


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon) * weight


def rope(x: jax.Array, positions: jax.Array, base: float) -> jax.Array:
    """Rotary embedding: rotate each pair of adjacent elements by an angle that grows with the position."""
    size = x.shape[-1]
    angles = positions[:, None] * base ** (-jnp.arange(0, size, 2) / size)
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)
