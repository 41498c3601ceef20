"""Hugging Face directories: shards read as one model, and inconsistent directories are one error."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from exchange_helpers import FIRST, INDEX, SECOND, model_dir, reads, same_bits, stored, weights
from safetensors.numpy import save_file

from lowbit import ArrayNF4
from lowbit.io import HuggingFaceDir


def test_a_sharded_model_reads_as_one(tmp_path):
    dense = model_dir(tmp_path)
    model = HuggingFaceDir(tmp_path)
    assert not model._opened, "files must be opened lazily"
    assert list(model) == ["norm", "w", "embed"] and len(model) == 3 and "w.absmax" not in model
    assert model.metadata == {"config": {"hidden_size": 8, "model_type": "llama"}, "index": {"total_size": 1}}
    assert same_bits(model.array("norm"), dense["norm"])
    assert list(model._opened) == ["model-00001-of-00002.safetensors"]
    assert [model.type(name) for name in model] == ["F32", "nf4", "BF16"]
    assert [model.shape(name) for name in model] == [(8,), (8, 256), (16, 8)]
    array = model.array("w")
    assert isinstance(array, ArrayNF4) and same_bits(array.materialize(), dense["w"])
    for name, want in dense.items():
        assert same_bits(model.dense(name, want.dtype), want)


def test_a_model_in_one_file_and_the_files_beside_it(tmp_path):
    others = ["config.json", "tokenizer.json", "README.md", "1_Pooling/config.json", "sub/vocab.txt"]
    weights_and_hidden = ["pytorch_model.bin", "x.gguf", "onnx/model.onnx", "pytorch_model.bin.index.json", ".git/HEAD"]
    for name in [*others, *weights_and_hidden, ".gitattributes"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    save_file({"a": weights(3)}, tmp_path / "model.safetensors")
    model = HuggingFaceDir(tmp_path)
    assert model.metadata == {"config": {}} and same_bits(model.array("a"), weights(3))
    assert model.other_files == tuple(sorted(map(Path, others)))
    (tmp_path / "config.json").unlink()
    assert HuggingFaceDir(tmp_path).metadata == {}


def test_files_may_be_links(tmp_path):
    dense = model_dir(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    assert same_bits(HuggingFaceDir(tmp_path / "snapshot").array("norm"), dense["norm"])


def mapped(**files: Any) -> Callable[[Path], None]:
    """Change the index; Ellipsis removes a tensor."""

    def change(path: Path) -> None:
        index = json.loads((path / INDEX).read_text())
        index["weight_map"] |= files
        index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file is not ...}
        (path / INDEX).write_text(json.dumps(index))

    return change


def text(name: str, contents: str) -> Callable[[Path], Any]:
    return lambda path: (path / name).write_text(contents)


DIRECTORIES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing shard": (
        lambda path: (path / SECOND).unlink(),
        f"{INDEX} has tensor 'embed' in '{SECOND}', which does not exist",
    ),
    "not in its shard": (mapped(norm=SECOND), f"{SECOND} has no tensor 'norm', but .*{INDEX} lists it in '{SECOND}'"),
    "nowhere": (mapped(other=FIRST), f"{FIRST} has no tensor 'other', but .*{INDEX} lists it in '{FIRST}'"),
    "unknown": (mapped(norm=...), f"{FIRST} has tensor 'norm', but .*{INDEX} lists it nowhere"),
    "in two shards": (
        lambda path: save_file(stored(path / SECOND) | {"norm": weights(8)}, path / SECOND),
        f"{SECOND} has tensor 'norm', but .*{INDEX} lists it in '{FIRST}'",
    ),
    "duplicate in the index": (
        text(INDEX, '{"weight_map": {"a": "b", "a": "c"}}'),
        f"{INDEX} has JSON.*'a' is a duplicate key",
    ),
    "absolute path": (mapped(norm="/etc/passwd"), f"{INDEX} has tensor 'norm' in '/etc/passwd', which does not exist"),
    "path upwards": (mapped(norm=f"../model/{FIRST}"), f"{INDEX} has tensor 'norm' in '../model/"),
    "path around": (mapped(norm=f"./{FIRST}"), f"{INDEX} has tensor 'norm' in './model"),
    "zero byte": (mapped(norm="a\0b"), f"{INDEX} has tensor 'norm' in 'a"),
    "long name": (mapped(norm="a" * 5000), f"{INDEX} has tensor 'norm' in 'aaaa"),
    "no text": (mapped(norm=[FIRST]), rf"{INDEX} has tensor 'norm' in \['model"),
    "no safetensors": (mapped(norm="config.json"), "config.json cannot be read as safetensors"),
    "missing component": (mapped(**{"w.absmax": ...}), "tensor 'w' lacks 'w.absmax'"),
    "no weight_map": (text(INDEX, "{}"), f"{INDEX} has no weight_map"),
    "list": (text(INDEX, '{"weight_map": []}'), f"{INDEX} has no weight_map"),
    "index no JSON": (text(INDEX, "{"), f"{INDEX} has JSON that cannot be read"),
    "index no object": (text(INDEX, "[]"), f"{INDEX} has JSON that is not an object"),
    "config no JSON": (text("config.json", "{'a': 1}"), "config.json has JSON that cannot be read"),
    "config no object": (text("config.json", "3"), "config.json has JSON that is not an object"),
    "much config": (text("config.json", '{"a": [%s0]}' % ("0," * 200_000)), "config.json has JSON of 200002 values"),
    "both": (text("model.safetensors", ""), f"has both model.safetensors and {INDEX}"),
    "neither": (lambda path: (path / INDEX).unlink(), f"has neither model.safetensors nor {INDEX}"),
    "truncated": (lambda path: os.truncate(path / SECOND, 1500), rf"{SECOND} cannot be read: tensor '.*' ends at byte"),
}


@pytest.mark.parametrize("case", DIRECTORIES)
def test_an_inconsistent_directory_raises_one_error(case, tmp_path):
    change, message = DIRECTORIES[case]
    model_dir(tmp_path / "model")
    change(tmp_path / "model")
    with pytest.raises(ValueError) as error:
        reads(tmp_path / "model" / INDEX)
    assert re.search(f"{tmp_path / 'model'}.*{message}", str(error.value)), error.value
