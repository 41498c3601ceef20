"""Language models in GGUF files run with the stored bits of every type, and give the logits of the decoded weights."""

import itertools
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiers
from cli_helpers import run
from gguf import GGMLQuantizationType as Type
from gguf_helpers import KEPT, golden
from test_demo import TOKENS

import lowbit
from lowbit.demo import llama
from lowbit.demo.language_model import LanguageModel
from lowbit.demo.model_file import demo_model_path
from lowbit.io import GGUFFile, convert, open_tensors, write_gguf
from lowbit.io._gguf_blocks import BLOCK_TYPES

SHAPES = {"attn_q": (256, 256), "attn_k": (128, 256), "attn_v": (128, 256), "attn_output": (256, 256)}
SHAPES |= {"ffn_gate": (512, 256), "ffn_up": (512, 256), "ffn_down": (256, 512)}


def blocks(kind: Type, *shape: int) -> Any:
    """An array of blocks that llama.cpp made, in another order."""
    row = BLOCK_TYPES[kind.name]
    made = golden(kind).reshape(-1).view(row.dtype)
    chosen = np.random.default_rng(int(kind)).integers(0, len(made), math.prod(shape) // row.elements)
    return row.read(made[chosen], shape)


@pytest.fixture
def mixed(tiny: Path, tmp_path: Path) -> Path:
    """A llama of two layers with each of 16 matrices in another type."""
    source, kinds = GGUFFile(tiny), itertools.cycle(KEPT)
    fields: dict[str, Any] = {**source.fields, "llama.embedding_length": 256, "llama.feed_forward_length": 512}
    tensors = {"token_embd.weight": blocks(next(kinds), source.shape("token_embd.weight")[0], 256)}
    for i, (name, shape) in itertools.product(range(2), SHAPES.items()):
        tensors[f"blk.{i}.{name}.weight"] = blocks(next(kinds), *shape)
    tensors["output.weight"] = blocks(next(kinds), source.shape("token_embd.weight")[0], 256)
    norms = ["output_norm", *(f"blk.{i}.{name}_norm" for i in range(2) for name in ("attn", "ffn"))]
    tensors |= {f"{name}.weight": np.ones(256, np.float32) for name in norms}
    write_gguf(tmp_path / "mixed.gguf", tensors, fields)
    return tmp_path / "mixed.gguf"


def divergence(a: jax.Array, b: jax.Array) -> float:
    """The largest KL of the predictions, in float64."""
    p, q = (np.asarray(jax.nn.log_softmax(x), np.float64) for x in (a, b))
    return float(np.max(np.sum(np.exp(p) * (p - q), -1)))


def test_a_model_of_every_type_runs_as_it_is_stored(mixed: Path, tmp_path: Path) -> None:
    file = GGUFFile(mixed)
    stored = [name for name in file if len(file.shape(name)) == 2]
    assert {file.type(name) for name in stored} == {kind.name for kind in KEPT} - {"TQ1_0"}
    model, dense = LanguageModel.from_file(mixed), LanguageModel.from_gguf(mixed)
    runs = llama.runs_of(model.params)
    assert len(runs) == 2 and len(llama.runs_of(dense.params)) == 1
    assert all(isinstance(run[name], lowbit.QuantizedArray) for run in runs for name in ("q", "k", "v", "o", "down"))
    size = sum(x.nbytes for x in jax.tree.leaves(model.params))
    assert size < 1.1 * sum(map(file.nbytes, file))
    got, want = model.logits(TOKENS), dense.logits(TOKENS)
    np.testing.assert_allclose(got, want, atol=2e-4 * np.abs(want).max())
    assert abs(divergence(want, got)) < 1e-6
    text = run("generate", "a low", "--raw", "--tokens", 4, "--model", mixed).stdout
    assert text == model.tokenizer.decode(model.generate(model.tokenizer.encode("a low"), 4)) + "\n"
    # A lowbit file that was made of it is the same model.
    convert(mixed, tmp_path / "mixed.safetensors")
    again = LanguageModel.from_file(tmp_path / "mixed.safetensors")
    assert np.array_equal(again.logits(TOKENS), got)


def test_the_file_of_the_demo_is_kept_in_a_lowbit_file_and_written_again_byte_for_byte(tmp_path: Path) -> None:
    path = demo_model_path()
    report = convert(path, tmp_path / "demo.safetensors")
    size = path.stat().st_size
    assert report.on_disk is not None and report.on_disk < 1.01 * size
    file = open_tensors(tmp_path / "demo.safetensors")
    kinds = {file.type(name) for name in file if len(file.shape(name)) == 2}
    assert kinds == {"int4", "int8"}
    write_gguf(tmp_path / "demo.gguf", {name: file.array(name) for name in GGUFFile(path)}, GGUFFile(path).fields)
    assert (tmp_path / "demo.gguf").read_bytes() == path.read_bytes()


@tiers.MORE  # the tiny model of every type runs as it is stored in the first tier
def test_the_file_of_the_demo_runs_in_its_own_bits() -> None:
    model, dense = (LanguageModel.from_file(demo_model_path(), format) for format in (None, "float32"))
    layers = model.params["layers"]
    assert 8 * layers["up"].nbytes / layers["up"].size == 5  # Q4_1
    ids = model.tokenizer.encode("The capital of France is")
    with lowbit.materialization("error"):
        got = model.logits(ids)
    assert abs(divergence(dense.logits(ids), got)) < 1e-6
