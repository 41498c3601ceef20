"""tunix: the NNX models that it trains, with smaller sizes, in float32."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from check import Model, check, randomized
from flax import nnx

IDS = jnp.array([[3, 1, 60, 9, 9, 4]])
POSITIONS = jnp.arange(6)[None]
MASK = jnp.tril(jnp.ones((1, 6, 6), bool))
SIZES: dict[str, Any] = {"num_layers": 2, "vocab_size": 64, "embed_dim": 32, "hidden_dim": 64}
SIZES |= {"num_heads": 4, "head_dim": 16, "num_kv_heads": 2, "rope_theta": 10_000, "norm_eps": 1e-6}


def language_model(model: Any) -> Model:
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def forward(params: Any, ids: jax.Array) -> Any:
        return nnx.merge(graph, params, rest)(ids, POSITIONS, None, MASK)[0]

    return Model(forward, randomized(params), (IDS,))


def llama3() -> Model:
    from tunix.models.llama3.model import Llama3, ModelConfig

    return language_model(Llama3(ModelConfig(**SIZES), rngs=nnx.Rngs(0)))


def qwen2() -> Model:
    from tunix.models.qwen2.model import ModelConfig, Qwen2

    return language_model(Qwen2(ModelConfig(**SIZES), rngs=nnx.Rngs(0)))


def qwen3() -> Model:
    from tunix.models.qwen3.model import ModelConfig, Qwen3

    return language_model(Qwen3(ModelConfig(**SIZES), rngs=nnx.Rngs(0)))


def qwen3_experts() -> Model:
    from tunix.models.qwen3.model import ModelConfig, Qwen3

    return language_model(Qwen3(ModelConfig(**SIZES, num_experts=4, num_experts_per_tok=2), rngs=nnx.Rngs(0)))


ROWS: dict[str, tuple[Any, ...]] = {
    "Llama 3": (llama3, 16),
    "Qwen 2": (qwen2, 16),
    "Qwen 3": (qwen3, 16),
    "Qwen 3 with experts": (qwen3_experts, 16),
}


@pytest.mark.parametrize("name", ROWS)
def test_model(name: str, tmp_path: Path) -> None:
    make, count, *rules = ROWS[name]
    check(make, count, tmp_path, *rules)
