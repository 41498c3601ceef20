"""levanter's models, which are Equinox modules of haliax's named arrays."""

from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import pytest
from check import Model, check
from levanter.models.gpt2 import Gpt2Config
from levanter.models.llama import LlamaConfig

SIZES: dict[str, Any] = {"hidden_dim": 64, "num_heads": 4, "num_layers": 2}


def language_model(config: Any) -> Model:
    model = config.model_type.init(hax.Axis("vocab", 256), config, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    position = hax.Axis("position", 8)
    ids = hax.arange(position)
    return Model(lambda p: eqx.combine(p, static)(ids, None).array, params, ())


def llama() -> Model:
    return language_model(LlamaConfig(**SIZES, intermediate_dim=128, num_kv_heads=4))


def gpt2() -> Model:
    return language_model(Gpt2Config(**SIZES))


ROWS: dict[str, tuple[Any, ...]] = {"Llama": (llama, 9), "GPT-2": (gpt2, 6)}


@pytest.mark.parametrize("name", ROWS)
def test_model(name: str, tmp_path: Path) -> None:
    make, count, *rules = ROWS[name]
    check(make, count, tmp_path, *rules)
