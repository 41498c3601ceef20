"""google's gemma."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from check import Model, check
from gemma import gm

SIZES: dict[str, Any] = {"num_embed": 128, "embed_dim": 64, "hidden_dim": 64, "num_heads": 2, "head_dim": 32}


def gemma3() -> Model:
    config = gm.nn.Gemma3_1B.config
    model = gm.nn.Gemma3_1B(
        config=dataclasses.replace(config, **SIZES, num_kv_heads=1, attention_types=config.attention_types[5:7])
    )
    ids = jnp.arange(1, 9)[None]
    params = model.init(jax.random.key(0), ids)["params"]
    return Model(lambda p, ids: model.apply({"params": p}, ids).logits, params, (ids,))


ROWS: dict[str, tuple[Any, ...]] = {"Gemma 3": (gemma3, 11)}


@pytest.mark.parametrize("name", ROWS)
def test_model(name: str, tmp_path: Path) -> None:
    make, count, *rules = ROWS[name]
    check(make, count, tmp_path, *rules, tolerance=2e-2)  # it computes in bfloat16
