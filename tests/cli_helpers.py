"""What the tests of the command share: running it, and a Hugging Face directory."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

from lowbit.cli.app import app
from lowbit.demo import llama
from lowbit.io import GGUFFile


def run(*args: Any, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    assert result.exit_code == code, result.output
    return result


def left_over(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.startswith("."))


def huggingface_dir(tiny: Path, folder: Path) -> Path:
    """The tiny llama as a Hugging Face directory: other names, and rotary embeddings that pair halves of a head."""
    folder.mkdir(parents=True)
    file = GGUFFile(tiny)
    tensors = {
        "model.embed_tokens.weight": file.dense("token_embd.weight"),
        "model.norm.weight": file.dense("output_norm.weight"),
    }
    for i in range(2):
        for name, stored in llama.GGUF.names.items():
            w = file.dense(llama.GGUF.layer.format(i, stored))
            if name in ("q", "k"):
                w = w.reshape(-1, 8, 2, 64).swapaxes(1, 2).reshape(w.shape)
            tensors[llama.HUGGING_FACE.layer.format(i, llama.HUGGING_FACE.names[name])] = w
    safetensors.numpy.save_file(
        {name: np.ascontiguousarray(w) for name, w in tensors.items()}, folder / "model.safetensors"
    )
    sizes = {key: file.metadata[llama.GGUF.sizes[name]] for name, key in llama.HUGGING_FACE.sizes.items()}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    tokens = file.metadata["tokenizer.ggml.tokens"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": tokens[2]}))
    (folder / "README.md").write_text("tiny")
    return folder
