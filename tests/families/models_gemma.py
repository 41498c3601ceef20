"""Google's gemma: the published configurations with smaller sizes, in float32 unless said otherwise."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from check import Model, check, check_bfloat16, randomized
from gemma import gm

IDS = jnp.array([[3, 1, 60, 9, 9, 4]])
SIZES: dict[str, Any] = {"num_embed": 64, "embed_dim": 32, "hidden_dim": 64, "num_heads": 4, "head_dim": 16}


def gemma(cls: Any, layers: slice, dtype: Any = jnp.float32, **sizes: Any) -> Model:
    """A model of a class with these layers of its published configuration."""
    sizes["attention_types"] = cls.config.attention_types[layers]
    config = dataclasses.replace(cls.config, vision_encoder=None, **SIZES | sizes)
    model = cls(config=config, dtype=dtype)
    # The initial weights of Gemma 3n give gradients of NaN, also dense.
    params = randomized(model.init(jax.random.key(0), IDS))
    return Model(lambda p, ids: model.apply(p, ids).logits, params, (IDS,))


def gemma2() -> Model:
    return gemma(gm.nn.Gemma2_2B, slice(0, 2), num_kv_heads=2, sliding_window_size=4)


def gemma3(dtype: Any = jnp.float32) -> Model:
    return gemma(gm.nn.Gemma3_4B, slice(4, 6), dtype, num_kv_heads=2, sliding_window_size=4)


def gemma3n() -> Model:
    sizes = {"per_layer_input_dim": 16, "laurel_rank": 8, "activation_sparsity_pattern": (0.95, 0.0)}
    return gemma(gm.nn.Gemma3n_E2B, slice(3, 5), num_kv_heads=2, sliding_window_size=4, **sizes)


def gemma4() -> Model:
    sizes = {
        "per_layer_input_dim": 16,
        "audio_encoder": None,
        "global_key_size": 32,
        "override_kv_shared_ffw_hidden": 64,
    }
    return gemma(gm.nn.Gemma4_E2B, slice(3, 5), num_kv_heads=1, sliding_window_size=4, **sizes)


def gemma4_experts() -> Model:
    sizes: Any = {"num_experts": 4, "expert_dim": 32, "top_k_experts": 2, "moe_dense_hidden_dim": 64}
    sizes |= {"num_kv_heads": 2, "num_global_kv_heads": 1, "global_key_size": 32, "sliding_window_size": 4}
    return gemma(gm.nn.Gemma4_26B_A4B, slice(4, 6), **sizes)


ROWS: dict[str, tuple[Any, ...]] = {
    "Gemma 2": (gemma2, 11),
    "Gemma 3": (gemma3, 11),
    "Gemma 3n": (gemma3n, 18),
    "Gemma 4": (gemma4, 13),
    "Gemma 4 with experts": (gemma4_experts, 15),
}


@pytest.mark.parametrize("name", ROWS)
def test_model(name: str, tmp_path: Path) -> None:
    make, count, *rules = ROWS[name]
    check(make, count, tmp_path, *rules)


def test_gradients_in_bfloat16() -> None:
    check_bfloat16(gemma3)
