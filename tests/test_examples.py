"""The examples: what each quantizes, that nothing goes dense, and the error."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
import tiers
from helpers import assert_close, assert_same_bits

import lowbit
from lowbit.testing import dense_weights

pytestmark = pytest.mark.frameworks

FILES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))

# For each example: the format of its weights, with one row for the layers of a list; the least factor by which the
# model shrinks; and the largest error of the logits.
Weights = dict[str, tuple[str, int]]
MODELS: dict[str, tuple[Weights, float, float]] = {
    "plain_pytree": (
        {
            "embed": ("int8", -1),
            "layers/qkv": ("nf4", -3),
            "layers/mix": ("nf4", -2),
            "layers/up": ("nf4", -1),
            "layers/down": ("nf4", -1),
        },
        6.7,
        0.17,
    ),
    "flax_linen": (
        {
            "params/embed/embedding": ("int8", -1),
            "params/blocks/attention/query/kernel": ("nf4", -3),
            "params/blocks/attention/key/kernel": ("nf4", -3),
            "params/blocks/attention/value/kernel": ("nf4", -3),
            "params/blocks/attention/out/kernel": ("nf4", -2),
            "params/blocks/up/kernel": ("nf4", -2),
            "params/blocks/down/kernel": ("int8", -2),
        },
        5.3,
        0.17,
    ),
    "flax_nnx": (
        {
            "embed/embedding": ("int8", -1),
            "blocks/layers/*/attention/query/kernel": ("nf4", -3),
            "blocks/layers/*/attention/key/kernel": ("nf4", -3),
            "blocks/layers/*/attention/value/kernel": ("nf4", -3),
            "blocks/layers/*/attention/out/kernel": ("nf4", -2),
            "blocks/layers/*/up/kernel": ("nf4", -2),
            "blocks/layers/*/down/kernel": ("nf4", -2),
        },
        6.4,
        0.14,
    ),
    "equinox_model": (
        {
            "embed/weight": ("int8", -1),
            "blocks/*/attention/query_proj/weight": ("nf4", -1),
            "blocks/*/attention/key_proj/weight": ("nf4", -1),
            "blocks/*/attention/value_proj/weight": ("nf4", -1),
            "blocks/*/attention/output_proj/weight": ("nf4", -1),
            "blocks/*/mlp/layers/*/weight": ("nf4", -1),
            "head/weight": ("int8", -1),
        },
        6.1,
        0.055,
    ),
}
CLASSES: dict[str | None, type] = {"int8": lowbit.Array8B, "nf4": lowbit.ArrayNF4}
KEPT = re.compile(r".*(norm|bias|adapter|rngs).*", re.IGNORECASE)


def load(name: str) -> ModuleType:
    (path,) = (path for path in FILES if path.stem == name)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def is_quantized(x: Any) -> bool:
    return isinstance(x, lowbit.QuantizedArray)


def stored(params: Any) -> int:
    """The bytes of all arrays in a tree."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params) if hasattr(leaf, "nbytes"))


def check_report(report: lowbit.Report, weights: Weights, params: Any, printed: str) -> None:
    """Assert that weights have their formats, other leaves are kept, and the printed totals are right."""
    found: dict[str, Any] = {}
    for row in report.quantized:
        path = re.sub(r"/\d+/", "/*/", row.path)
        assert found.setdefault(path, (row.format, row.axis)) == (row.format, row.axis)
        assert row.why.startswith("fn")
    assert found == weights
    assert report.kept and all(KEPT.fullmatch(row.path) for row in report.kept)
    leaves = [leaf for leaf in jax.tree.leaves(params, is_leaf=is_quantized) if is_quantized(leaf)]
    for row, leaf in zip(report.quantized, leaves, strict=True):
        assert (type(leaf), leaf.shape, leaf.axis) == (CLASSES[row.format], row.shape, row.axis)
    assert (report.before, report.after) == (stored(lowbit.dequantize_tree(params)), stored(params))
    assert printed.startswith(f"{report}\n{report.before:,} bytes before, {report.after:,} after; relative error of")


# The frameworks themselves are in test_frameworks.
@pytest.mark.parametrize("name", tiers.tiered(MODELS, ["plain_pytree"]))
def test_a_model_of_each_framework_runs_quantized(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    import equinox as eqx

    weights, smaller, bound = MODELS[name]
    example = load(name)
    forward = example.forward if hasattr(example, "forward") else example.LanguageModel().apply
    with lowbit.materialization("error"):
        params, report, got, error = example.main()
        program, *_ = eqx.filter_make_jaxpr(lowbit.implicit(forward))(params, example.IDS)
        assert dense_weights(program, params, example.IDS) == []
    check_report(report, weights, params, capsys.readouterr().out)
    assert report.before / report.after > smaller
    assert 0 < error < bound
    assert_close(got, eqx.filter_jit(forward)(lowbit.dequantize_tree(params), example.IDS))


def test_training_does_not_change_frozen_weights(capsys: pytest.CaptureFixture[str]) -> None:
    example = load("optax_frozen")
    with lowbit.materialization("error"):
        before, after, report, error, losses = example.main()
        trainable, frozen = lowbit.partition(before)
        args = (trainable, frozen, example.OPTIMIZER.init(trainable))
        assert dense_weights(example.step, *args) == []
    weights = {
        "params/embed/embedding": ("nf4", -1),
        "params/block_0/dense/kernel": ("nf4", -2),
        "params/block_1/dense/kernel": ("nf4", -2),
        "params/head/kernel": ("nf4", -2),
    }
    check_report(report, weights, before, capsys.readouterr().out)
    assert report.before / report.after > 6.0
    assert 0 < error < 0.2
    assert losses[-1] < losses[0] / 2
    assert jax.tree.structure(after) == jax.tree.structure(before)
    leaves = (jax.tree.leaves(tree, is_leaf=is_quantized) for tree in (after, before))
    for row, a, b in zip(report, *leaves, strict=True):
        if row.format:
            assert_same_bits(a, b)
        else:
            assert np.any(a != b), row.path


@tiers.MORE  # straight-through training and its stored values are in the first tier without the example
def test_qat_stores_the_trained_values(capsys: pytest.CaptureFixture[str]) -> None:
    example = load("qat")
    rows = example.main(seeds=1, formats=("float32", "ternary"), steps=4, size=40)
    (_, dense, *_), (_, trained, stored, rounded, over, worst, recovered, least) = rows
    assert stored == pytest.approx(trained, rel=1e-5)
    assert dense == rows[0][2] == rows[0][3] < np.log(128)
    assert over == worst == pytest.approx(100 * (trained / dense - 1))
    assert recovered == least == pytest.approx(100 * (rounded - trained) / (rounded - dense))
    assert f"{trained:13.4f}" in capsys.readouterr().out


@tiers.MORE  # test_checkpoints_llama runs such a checkpoint in the first tier
def test_a_llama_is_loaded_in_its_stored_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = load("load_llama")
    params, got, want = example.main(str(tmp_path))
    assert_close(got, want)
    assert dense_weights(lowbit.implicit(example.Llama().apply), params, example.IDS) == []
    assert f"{params['params']['layers']['up']['kernel']}" in capsys.readouterr().out
    # The same model with the weights of the file, dequantized, transposed and stacked by hand.
    file, tree = lowbit.io.open_tensors(tmp_path / "q4.safetensors"), params["params"]
    assert {file.type(name) for name in file} == {"q4", "int8", "F32"}
    places = {n: f"self_attn.{n}_proj" for n in "qkvo"} | {n: f"mlp.{n}_proj" for n in ("gate", "up", "down")}
    for name, stored in places.items():
        layers = [file.dense(f"model.layers.{i}.{stored}.weight").T for i in range(example.LAYERS)]
        np.testing.assert_array_equal(tree["layers"][name]["kernel"].materialize(), np.stack(layers))
    for name in ("input", "post_attention"):
        layers = [file.dense(f"model.layers.{i}.{name}_layernorm.weight") for i in range(example.LAYERS)]
        np.testing.assert_array_equal(tree["layers"][name]["scale"], np.stack(layers))
    np.testing.assert_array_equal(tree["head"]["kernel"].materialize(), file.dense("lm_head.weight").T)
    np.testing.assert_array_equal(tree["embed"]["embedding"].materialize(), file.dense("model.embed_tokens.weight"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < (160 if path.stem == "qat" else 80)  # it brings text and training
    assert path.stem in {"load_llama", "new_format", "optax_frozen", "qat", "qlora", *MODELS}  # each has a test
