"""Flax models of transformers, on the JAX that its last version with Flax takes."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from check import Model, check, check_bfloat16

import lowbit

IDS = jnp.array([[3, 1, 60, 9, 9, 4]])
SMALL = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}
LLAMA = SMALL | {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
GPT2 = SMALL | {"n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}


def flax(name: str, config: Any, output: str, *args: Any, **options: Any) -> Model:
    cls = getattr(transformers, name)
    model = cls(config, **options)
    return Model(lambda p, *args: model(*args, params=p)[output], model.params, args)


def gpt2() -> Model:
    return flax("FlaxGPT2LMHeadModel", transformers.GPT2Config(**GPT2), "logits", IDS)


def llama(dtype: Any = jnp.float32) -> Model:
    config = transformers.LlamaConfig(**LLAMA, max_position_embeddings=32)
    return flax("FlaxLlamaForCausalLM", config, "logits", IDS, dtype=dtype)


def mistral() -> Model:
    config = transformers.MistralConfig(**LLAMA, num_key_value_heads=1, max_position_embeddings=32)
    return flax("FlaxMistralForCausalLM", config, "logits", IDS)


def bert() -> Model:
    config = transformers.BertConfig(**LLAMA, max_position_embeddings=16)
    return flax("FlaxBertModel", config, "last_hidden_state", IDS)


def t5() -> Model:
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    model = transformers.FlaxT5ForConditionalGeneration(transformers.T5Config(**SMALL | sizes))
    return Model(lambda p, x: model(x, decoder_input_ids=x, params=p).logits, model.params, (IDS,))


def whisper() -> Model:
    sides = ("encoder", "decoder")
    config = transformers.WhisperConfig(
        **SMALL,
        **{f"{side}_{name}": size for side in sides for name, size in (("layers", 1), ("attention_heads", 2))},
        **{f"{side}_ffn_dim": 64 for side in sides},
        d_model=32,
        num_mel_bins=16,
        max_source_positions=16,
        max_target_positions=8,
        decoder_start_token_id=0,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = transformers.FlaxWhisperForConditionalGeneration(config, input_shape=(1, 16, 32))
    sound = jax.random.normal(jax.random.key(1), (1, 16, 32))
    return Model(lambda p, x, ids: model(x, ids, params=p).logits, model.params, (sound, IDS))


def resnet() -> Model:
    sizes = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "num_labels": 4}
    model = transformers.FlaxResNetForImageClassification(
        transformers.ResNetConfig(**sizes), input_shape=(1, 32, 32, 3)
    )
    weights, rest = model.params["params"], model.params["batch_stats"]

    def forward(p: Any, x: Any) -> Any:
        return model(x, params={"params": p, "batch_stats": rest}).logits

    return Model(forward, weights, (jax.random.normal(jax.random.key(1), (1, 3, 32, 32)),))


KERNELS = {"*kernel*": "int8"}  # convolutions are quantized if a pattern names them
ROWS: dict[str, tuple[Any, ...]] = {
    "GPT-2": (gpt2, 5),
    "Llama": (llama, 9),
    "Mistral": (mistral, 7),
    "BERT": (bert, 8),
    "T5": (t5, 17),
    "Whisper": (whisper, 18, KERNELS),
    "ResNet": (resnet, 9, KERNELS),
}


@pytest.mark.parametrize("name", ROWS)
def test_model(name: str, tmp_path: Path) -> None:
    make, count, *rules = ROWS[name]
    check(make, count, tmp_path, *rules)


def test_gradients_in_bfloat16() -> None:
    check_bfloat16(llama)


def test_generate() -> None:
    model = transformers.FlaxGPT2LMHeadModel(transformers.GPT2Config(**GPT2))
    params, _ = lowbit.quantize_tree(model.params, "int8", fn=lambda p, x: model(x, params=p).logits, args=(IDS,))

    def generate(p: Any, ids: Any) -> Any:
        return model.generate(ids, params=p, max_new_tokens=4, do_sample=False).sequences

    with lowbit.materialization("error"):
        got = jax.jit(lowbit.implicit(generate))(params, IDS)
    np.testing.assert_array_equal(got, generate(lowbit.materialize(params), IDS))
