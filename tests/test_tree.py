"""quantize_tree: which leaves get which format along which axis, and the report."""

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_same_bits, gaussian
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import lowbit
from lowbit import QuantizationConfig, Rule, quantize_tree
from lowbit.models.axes import axes_by_name


def normal(*shape: int) -> jax.Array:
    return gaussian(sum(shape), shape)


def model() -> dict[str, Any]:
    return {
        "embed": {"embedding": normal(128, 64)},
        "layers": [
            {"up": {"kernel": normal(64, 96), "bias": normal(96)}, "norm": {"scale": normal(64)}},
            {"up": {"kernel": normal(64, 97), "bias": normal(97)}, "norm": {"scale": normal(64)}},
        ],
        "steps": jnp.int32(3),
        "tiny": {"kernel": normal(4, 4)},
    }


def formats(report: lowbit.Report) -> dict[str, str | None]:
    return {row.path: row.format for row in report if row.format}


def test_a_format_quantizes_the_weights_and_nothing_else() -> None:
    params = model()
    quantized, report = quantize_tree(params, "int8")
    assert formats(report) == {
        "embed/embedding": "int8",
        "layers/0/up/kernel": "int8",
        "layers/1/up/kernel": "int8",
    }
    kernel, embedding = params["layers"][0]["up"]["kernel"], params["embed"]["embedding"]
    assert_same_bits(quantized["layers"][0]["up"]["kernel"], lowbit.Array8B.quantize(kernel, axis=-2))
    assert_same_bits(quantized["embed"]["embedding"], lowbit.Array8B.quantize(embedding, axis=-1))
    assert quantized["layers"][0]["up"]["bias"] is params["layers"][0]["up"]["bias"]
    assert isinstance(params["embed"]["embedding"], jax.Array)  # the input is unchanged
    reasons = {row.path: row.why for row in report.kept}
    assert reasons["tiny/kernel"] == "fewer than 1,024 elements"
    assert reasons["steps"] == "its dtype is int32"
    assert reasons["layers/0/norm/scale"] == "a vector"


def test_the_first_pattern_that_matches_decides() -> None:
    rules = {"*1/up*": None, "*embed*": "int8", "re:layers/\\d+/.*": "ternary", "*": "nf4"}
    _, report = quantize_tree(model(), rules)
    assert formats(report) == {"embed/embedding": "int8", "layers/0/up/kernel": "ternary"}
    assert report["layers/1/up/kernel"].why == "the pattern '*1/up*'"


def test_a_pattern_quantizes_small_leaves_and_vectors_only_if_it_matches_nothing_else() -> None:
    _, report = quantize_tree(model(), {"tiny*": "int8", "*bias": "int8", "*layers*": "nf4"}, strict=True)
    assert formats(report) == {
        "tiny/kernel": "int8",
        "layers/0/up/bias": "int8",
        "layers/1/up/bias": "int8",
        "layers/0/up/kernel": "nf4",
        "layers/1/up/kernel": "nf4",
    }
    assert report["layers/0/norm/scale"].why == "a vector"
    assert report["embed/embedding"].why == "no pattern matches"


def test_rules_may_test_shape_and_dtype_and_set_axis_and_options() -> None:
    rules = [
        Rule("*", QuantizationConfig("nf4", 32, axis=0, double_quant=True), where=lambda leaf: leaf.shape == (64, 96)),
        Rule("*kernel", "binary", where=lambda leaf: leaf.dtype == jnp.float32 and leaf.ndim == 2),
    ]
    params, report = quantize_tree(model(), rules)
    assert formats(report) == {"layers/0/up/kernel": "nf4", "layers/1/up/kernel": "binary", "tiny/kernel": "binary"}
    assert report["layers/0/up/kernel"].why == "the pattern's axis"
    want = lowbit.ArrayNF4.quantize(model()["layers"][0]["up"]["kernel"], axis=0, block_size=32, double_quant=True)
    assert_same_bits(params["layers"][0]["up"]["kernel"], want)


@pytest.mark.parametrize(
    ("path", "shape", "axes"),
    [
        ("block/Dense_0/kernel", (8, 4), (-2,)),
        ("layers/0/weight", (8, 4), (-1,)),
        ("experts/weight", (3, 8, 4), (-1,)),
        ("model.layers.0.mlp.down_proj.weight", (8, 4), (-1,)),
        ("transformer.h.0.attn.c_attn.weight", (8, 4), (-2,)),
        ("model.embed_tokens.weight", (8, 4), (-1,)),
        ("Embed_0/embedding", (8, 4), (-1,)),
        ("patch_embed/proj/kernel", (8, 4), (-2,)),
        ("mlp/linear_1/w", (8, 4), (-2,)),
        ("attention/query/kernel", (8, 2, 4), None),
        ("conv/weight", (8, 4, 3, 3), None),
        ("model.layers.0.input_layernorm.weight", (2, 8), None),
        ("ln_1/scale", (2, 8), None),
        ("anything", (8, 4), None),
        ("experts/norm_proj/kernel", (8, 4), (-2,)),
        ("experts/unbiased/weight", (3, 8, 4), (-1,)),
        ("experts/down_proj_bias", (3, 8), None),
        ("final_norm_scale", (2, 8), None),
        ("BatchNorm_0/scale", (2, 8), None),
        ("layers/rms_norm_2/weight", (2, 8), None),
    ],
)
def test_names_tell_the_axis(path: str, shape: tuple[int, ...], axes: Any) -> None:
    assert axes_by_name(path, shape).axes == axes


def test_leaves_without_a_known_axis_are_kept_or_raise() -> None:
    params = {"theta": normal(64, 64), "kernel": normal(64, 4, 16)}
    with pytest.warns(UserWarning, match="none of 2 arrays"):
        quantized, report = quantize_tree(params, "nf4")
    assert quantized["theta"] is params["theta"]
    assert report["theta"].why == "name not known: pass fn=, or a pattern with an axis"
    assert report["kernel"].why == "3 axes: pass fn=, or a pattern with an axis"
    with pytest.raises(ValueError, match=r"Could not quantize as asked: kernel: 3 axes.*; theta: name not known"):
        quantize_tree(params, "nf4", strict=True)
    _, report = quantize_tree(params, QuantizationConfig("nf4", axis=0), strict=True)
    assert formats(report) == {"theta": "nf4", "kernel": "nf4"}


def gated(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x) * jax.nn.silu(x)  # with a custom derivative inside


# A program, the shape of its weight, and the axes that it contracts.
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[int, ...], Any]] = {
    "x @ w": (lambda w, x: gated(x @ w), (64, 96), -2),
    "x @ w.T": (lambda w, x: x @ w.T, (96, 64), -1),
    "cast and scaled": (lambda w, x: x.astype(jnp.bfloat16) @ (0.5 * w.astype(jnp.bfloat16)), (64, 96), -2),
    "einsum to heads": (lambda w, x: jnp.einsum("sd,dhk->shk", x, w), (64, 4, 16), -3),
    "einsum from heads": (lambda w, x: jnp.einsum("shk,hkd->sd", x.reshape(8, 4, 16), w), (4, 16, 64), -2),
    "heads merged": (lambda w, x: x @ w.reshape(64, 64), (64, 4, 16), -3),
    "scan": (lambda w, x: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0], (3, 64, 64), -2),
    "scan of checkpoint": (
        lambda w, x: lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w.T), None)), x, w)[0],
        (3, 64, 64),
        -1,
    ),
    "loop over layers": (lambda w, x: lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ w[i]), x), (3, 64, 64), -2),
    "experts": (lambda w, x: jnp.einsum("sd,edn->esn", x, w), (3, 64, 32), -2),
    "chosen experts": (lambda w, x: jnp.einsum("sd,sdn->sn", x, w[jnp.arange(8) % 3]), (3, 64, 32), -2),
    "ragged": (lambda w, x: lax.ragged_dot(x, w, jnp.array([3, 1, 4])), (3, 64, 32), -2),
    "vmap": (lambda w, x: jax.vmap(lambda row: w @ row)(x), (96, 64), -1),
    "jit and cond": (
        lambda w, x: jax.jit(lambda w: lax.cond(x[0, 0] > 0, lambda w: x @ w, lambda w: 2 * (x @ w), w))(w),
        (64, 96),
        -2,
    ),
    "embedding": (lambda w, x: jnp.take(w, jnp.array([3, 5]), axis=0), (128, 64), -1),
    "checkpoint_name": (lambda w, x: jax.checkpoint(lambda w: x @ checkpoint_name(w, "w"))(w), (64, 96), -2),
    "split": (lambda w, x: jnp.tanh(sum(x @ part for part in jnp.split(w, 3, axis=-1))), (64, 96), -2),
    "unstack": (lambda w, x: sum(x @ part for part in jnp.unstack(w)), (3, 64, 96), -2),
    "stacked": (lambda w, x: jnp.einsum("sd,ldn->lsn", x, jnp.stack([w, 2 * w])), (64, 96), -2),
    "reversed": (lambda w, x: x @ w[:, ::-1], (64, 96), -2),
    "blocks reversed": (lambda w, x: x @ w[::-1], (64, 96), -2),
    "tiled": (lambda w, x: x @ jnp.tile(w, (1, 2)), (64, 96), -2),
    "one of two": (lambda w, x: x @ lax.select_n(x[0, 0] > 0, w, 2 * w), (64, 96), -2),
    "other device": (lambda w, x: x @ jax.device_put(w, jax.devices()[0]), (64, 96), -2),
    "positions": (lambda w, x: x + w[:8], (128, 64), -1),
    "positions of a batch": (lambda w, x: jax.jit(lambda rows: x + 2 * rows)(w[:, :8]), (1, 128, 64), -1),
    "positions from": (lambda w, x: x + lax.dynamic_slice(w, (jnp.argmax(x[0]), 0), (8, 64)), (128, 64), -1),
    "embedding per layer": (lambda w, x: x[:, None] + w[jnp.arange(8)] * 0.5, (128, 4, 64), -1),
    "tied head": (lambda w, x: (x + w[jnp.arange(8)]) @ w.T, (128, 64), -1),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_tells_the_axis(name: str) -> None:
    fn, shape, axis = PROGRAMS[name]
    params, x = {"theta": normal(*shape)}, normal(8, 64)
    quantized, report = quantize_tree(params, "nf4", fn=lambda p, x: fn(p["theta"], x), args=(x,), strict=True)
    assert report["theta"].axis == axis
    assert report["theta"].why.startswith("fn")
    # Blocks lie along that axis, each inside one matrix of a stack.
    spans = [16 if a == axis else 1 for a in range(-len(shape), 0)]
    small, _ = quantize_tree(params, QuantizationConfig("nf4", 16), fn=lambda p, x: fn(p["theta"], x), args=(x,))
    blocks = [-(-n // span) for n, span in zip(shape, spans, strict=True)]
    assert small["theta"].absmax.shape == tuple(blocks)
    with lowbit.materialization("error"):
        got = lowbit.implicit(fn)(quantized["theta"], x)
    assert_close(got, fn(quantized["theta"].materialize(), x), 1e-2 if "cast" in name else 2e-5)


def test_all_contracted_axes_share_a_scale_where_a_format_has_no_blocks() -> None:
    def fn(p: Any, x: jax.Array) -> jax.Array:
        return jnp.einsum("shk,hkd->sd", x.reshape(8, 4, 16), p["w"])

    _, report = quantize_tree({"w": normal(4, 16, 64)}, "int8", fn=fn, args=(normal(8, 64),))
    assert report["w"].axis == (-3, -2)


def test_the_report_says_why_the_axis_of_a_leaf_is_unknown() -> None:
    params = {"both": normal(64, 64), "unused": normal(64, 64), "scale": normal(3, 640), "weight": normal(64, 64)}

    def fn(p: Any, x: jax.Array) -> jax.Array:
        return (x @ p["both"]) @ p["both"].T * p["scale"][0, :64]

    with pytest.warns(
        UserWarning, match=r"keeps 32,768 of .*: both \(fn contracts it .*\); unused \(fn does not use it\)"
    ):
        _, report = quantize_tree(params, "nf4", fn=fn, args=(jax.ShapeDtypeStruct((8, 64), jnp.float32),))
    at = f" at {__file__}:{inspect.getsourcelines(fn)[1] + 1}"
    assert report["both"].why == (
        f"fn contracts it along axes (-1,){at} and (-2,){at}: choose one by a pattern with an axis"
    )
    assert report["unused"].why == "fn does not use it"
    assert report["scale"].why == "the name of a norm or a bias"
    assert formats(report) == {"weight": "nf4"}  # not used, but its name gives the axis
    params["kernel"] = params.pop("both")
    with pytest.raises(ValueError, match=r"asked: kernel: fn contracts it along"):  # the program wins over the name
        quantize_tree(
            params, "nf4", fn=lambda p, x: fn({**p, "both": p["kernel"]}, x), args=(normal(8, 64),), strict=True
        )
    params["both"] = params["kernel"]
    with pytest.raises(TypeError) as error:
        quantize_tree(params, "nf4", fn=lambda p, x: fn(p, x) + "a", args=(normal(8, 64),))
    assert any("lowbit traced fn" in note for note in error.value.__notes__)


def test_a_leaf_that_no_product_uses_is_kept_and_raises_for_a_pattern_that_names_it() -> None:
    params, x = (
        {"a": {"kernel": normal(64, 64)}, "gain": normal(64, 64), "b": {"kernel": normal(64, 64)}},
        normal(8, 64),
    )

    def fn(p: Any, x: jax.Array) -> jax.Array:
        return x @ (p["a"]["kernel"] * p["gain"]) @ p["b"]["kernel"]

    _, report = quantize_tree(params, "nf4", fn=fn, args=(x,), strict=True)
    assert formats(report) == {"b/kernel": "nf4"}
    at = f"{__file__}:{inspect.getsourcelines(fn)[1] + 1}"
    assert report["a/kernel"].why == f"fn uses it in mul at {at} only"
    with pytest.raises(ValueError, match=re.escape(f"a/kernel: fn uses it in mul at {at} only")):
        quantize_tree(params, {"*kernel": "nf4"}, fn=fn, args=(x,), strict=True)


def test_concatenated_weights_are_followed() -> None:
    params = {"q": normal(64, 32), "k": normal(64, 16)}
    fn = partial(lambda p, x: x @ jnp.concatenate([p["q"], p["k"]], -1))
    _, report = quantize_tree(params, "int8", fn=fn, args=(normal(8, 64),), strict=True)
    assert [row.axis for row in report] == [-2, -2]


def test_a_product_wins_over_the_name_of_a_norm_and_the_name_wins_over_lookups() -> None:
    params = {"to_bias": normal(64, 96), "expert_bias": normal(4, 640), "x_norm": normal(2, 64, 64)}

    def fn(p: Any, x: jax.Array) -> jax.Array:
        y = x @ p["to_bias"] + p["expert_bias"][jnp.arange(8) % 4, :96]
        return y[:, :64] @ p["x_norm"][0] @ p["x_norm"][1].T

    _, report = quantize_tree(params, "int8", fn=fn, args=(normal(8, 64),))
    assert report["to_bias"].axis == -2
    assert report["expert_bias"].why == "the name of a norm or a bias"
    assert report["x_norm"].why.startswith("fn contracts it along axes (-1,) at ")


def test_a_program_that_needs_a_mesh_says_how_to_pass_one() -> None:
    spec = jax.sharding.PartitionSpec()

    def fn(p: Any, x: jax.Array) -> jax.Array:
        return jax.shard_map(lambda w, x: x @ w, in_specs=(spec, spec), out_specs=spec)(p["w"], x)

    params, x = {"w": normal(64, 32)}, normal(8, 64)
    with pytest.raises(ValueError) as error:
        quantize_tree(params, "int8", fn=fn, args=(x,))
    assert any("with jax.set_mesh(mesh):" in note for note in error.value.__notes__)
    with jax.set_mesh(jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))):
        assert quantize_tree(params, "int8", fn=fn, args=(x,))[1]["w"].axis == -2


def test_strict_raises_for_patterns_that_match_nothing() -> None:
    with pytest.raises(ValueError, match=r"No leaf matches '\*embd\*'.*The paths are embed/embedding, layers/0"):
        quantize_tree(model(), {"*embd*": "int8", "*": "nf4"}, strict=True)
    _, report = quantize_tree(model(), {"*embd*": "int8", "*": "nf4"})
    assert report.unmatched == ("*embd*",)
    assert str(report).endswith("The pattern '*embd*' matched no leaf.")


@pytest.mark.parametrize(
    ("rules", "error", "text"),
    [
        ("nf5", ValueError, "Unknown quantization type 'nf5'"),
        ({"*": "nf5"}, ValueError, "Unknown quantization type 'nf5'"),
        ({"*": 4}, TypeError, "The pattern '*' has the format 4"),
        ({3: "nf4"}, TypeError, "A pattern must be a string, not 3"),
        ({"re:(": "nf4"}, ValueError, "The pattern 're:(' is not a valid regular expression"),
        ([("*", "nf4")], TypeError, "not ('*', 'nf4')"),
    ],
)
def test_bad_rules_raise_immediately(rules: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        quantize_tree(model(), rules)


def test_the_report_has_sizes_errors_and_totals() -> None:
    params, report = quantize_tree(model(), {"*embed*": "nf4", "*": "int8"})
    row = report["embed/embedding"]
    w = model()["embed"]["embedding"]
    q = params["embed"]["embedding"]
    assert (row.before, row.after) == (w.nbytes, sum(component.nbytes for component in jax.tree.leaves(q)))
    assert row.error == pytest.approx(float(jnp.linalg.norm(q.materialize() - w) / jnp.linalg.norm(w)), rel=1e-5)
    assert report.before == sum(np.asarray(x).nbytes for x in jax.tree.leaves(model()))
    assert report.after == sum(component.nbytes for component in jax.tree.leaves(params))
    text = str(report).splitlines()
    assert text[0].split() == ["path", "shape", "format", "axis", "bits", "MB", "error", "why"]
    assert len(text) == 1 + len(report) + 1
    line = next(line for line in text if line.startswith("embed/embedding"))
    assert line.split()[1:5] == ["128x64", "nf4", "-1", "4.50"]
    assert f"{row.error:.6f}" in line
    with pytest.raises(KeyError, match="no leaf 'embed'"):
        report["embed"]


def test_a_plan_needs_no_weights() -> None:
    params, want = quantize_tree(model(), "nf4")
    structs = jax.eval_shape(lambda p: quantize_tree(p, "nf4")[0], model())
    assert jax.tree.structure(structs) == jax.tree.structure(params)
    assert [x.shape for x in jax.tree.leaves(structs)] == [x.shape for x in jax.tree.leaves(params)]
    plan, report = quantize_tree(jax.eval_shape(model), "nf4")
    assert jax.tree.structure(plan) == jax.tree.structure(params)
    assert [row.after for row in report] == [row.after for row in want]
    assert report["embed/embedding"].error is None


def test_quantized_leaves_are_kept_and_tied_ones_stay_tied() -> None:
    w = normal(64, 64)
    params, report = quantize_tree({"a": {"kernel": w}, "b": {"kernel": w}}, "nf4")
    assert params["a"]["kernel"] is params["b"]["kernel"]
    assert report["b/kernel"].tied == "a/kernel" and report.after == params["a"]["kernel"].nbytes
    _, both = quantize_tree({"embed": w, "kernel": w}, "nf4")
    assert both["kernel"].why.endswith("; no longer tied to embed") and both.after == 2 * report.after

    def fn(p: Any, x: jax.Array) -> jax.Array:
        return x @ p["a"]["kernel"] @ p["b"]["kernel"] @ p["c"]

    again, report = quantize_tree({**params, "c": w}, "int8", fn=fn, args=(normal(8, 64),))
    assert again["a"]["kernel"] is params["a"]["kernel"]
    assert report["a/kernel"].why == "quantized already, as ArrayNF4"
    assert formats(report) == {"c": "int8"}
    with pytest.raises(ValueError, match="a/kernel: quantized already, as ArrayNF4"):
        quantize_tree(params, {"a*": "int8"}, strict=True)


def test_leaves_whose_paths_print_the_same_are_kept_apart() -> None:
    params, report = quantize_tree({"a/kernel": normal(64, 64), "a": {"kernel": normal(3, 32, 32)}}, "nf4")
    assert [(row.path, row.shape, row.format) for row in report] == [
        ("a/kernel", (3, 32, 32), None),
        ("a/kernel", (64, 64), "nf4"),
    ]
    assert isinstance(params["a/kernel"], lowbit.ArrayNF4)


def test_errors_name_the_leaf() -> None:
    with pytest.raises(ValueError, match=r"a/kernel: Cannot quantize to 'nf4': 1 of 4096 values are NaN"):
        quantize_tree({"a": {"kernel": normal(64, 64).at[2, 3].set(jnp.nan)}}, "nf4")


def test_dequantize_tree_makes_all_leaves_dense() -> None:
    params, _ = quantize_tree(model(), "int8")
    dense = lowbit.dequantize_tree(params)
    assert jax.tree.structure(dense) == jax.tree.structure(model())
    assert_close(dense["embed"]["embedding"], params["embed"]["embedding"].materialize(), 0)


def test_progress_is_called_with_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    params, told = {"a": {"kernel": normal(64, 32)}, "b": {"kernel": normal(64, 96)}, "name": "a model"}, []
    _, report = quantize_tree(params, "int8", progress=lambda done, total: told.append((done, total)))
    total = report.before
    assert told == [(0, total), (4 * 64 * 32, total), (total, total)] and total == 4 * 64 * (32 + 96)
    assert capsys.readouterr() == ("", "")  # only the command prints progress


def test_the_types_of_trees_are_kept() -> None:
    for function in (quantize_tree, lowbit.partition):
        hints = typing.get_type_hints(function)
        first = hints[next(iter(hints))]
        assert isinstance(first, TypeVar) and typing.get_args(hints["return"])[0] is first
    for function in (lowbit.dequantize_tree, lowbit.straight_through_tree, lowbit.combine, lowbit.lora, lowbit.merge):
        hints = typing.get_type_hints(function)
        assert hints["return"] is hints[next(iter(hints))]
    assert typing.get_args(typing.get_type_hints(quantize_tree)["return"])[1] is lowbit.Report


def test_strict_is_off_by_default_everywhere() -> None:
    for function in (quantize_tree, lowbit.straight_through_tree, lowbit.learned_scales):
        assert inspect.signature(function).parameters["strict"].default is False


def test_a_config_that_simulates_stores_nothing_and_is_refused() -> None:
    params, config = model(), QuantizationConfig("nf4", simulate=True)
    with pytest.raises(ValueError, match=r"The pattern '\*' has a config with simulate=True.*straight_through_tree"):
        quantize_tree(params, config)
    with pytest.raises(ValueError, match=r"The pattern 'layers\*' has a config with simulate=True"):
        quantize_tree(params, {"layers*": config, "*": "int8"})
    # straight_through_tree and learned_scales accept it, and ignore simulate.
    simulated = lowbit.straight_through_tree(params, config)
    assert_close(simulated, lowbit.dequantize_tree(quantize_tree(params, "nf4")[0]), 0)
    assert jax.tree.structure(lowbit.learned_scales(params, config)) == jax.tree.structure(
        lowbit.learned_scales(params, "nf4")
    )


def test_implicit_arrays_of_other_kinds_are_kept() -> None:
    @dataclasses.dataclass
    class Scaled(lowbit.ImplicitArray):
        data: jax.Array

        def materialize(self) -> jax.Array:
            return 2 * self.data

    params = {"kernel": Scaled(normal(64, 96)), "other": {"kernel": normal(64, 96)}}
    quantized, report = quantize_tree(params, "int8")
    assert quantized["kernel"] is params["kernel"] and formats(report) == {"other/kernel": "int8"}
    assert {row.path: row.why for row in report.kept} == {"kernel": "implicit already, as Scaled"}
    with pytest.raises(ValueError, match="kernel: implicit already, as Scaled"):
        quantize_tree(params, {"*kernel": "int8"}, strict=True)


def test_quantizing_nothing_warns_once() -> None:
    unknown = {
        "a": normal(64, 96),
        "b": {"c": normal(64, 32)},
        "d": normal(8),
        "e": normal(32, 64),
        "f": normal(32, 65),
    }
    with pytest.warns(UserWarning) as caught:
        _, report = quantize_tree(unknown, "nf4")
    (warning,) = caught
    assert formats(report) == {} and warning.filename == __file__
    assert re.search(
        r"quantizes none of 5 arrays: a \(name not known.*\); b/c \(.*\); e \(.*\); \.\.\.", str(warning.message)
    )
    assert re.search(
        r"Pass fn= and args=, .*or patterns with a QuantizationConfig that has an axis", str(warning.message)
    )
    for params, rules, said in (
        ({"kernel": normal(64, 96)}, {"*kernels": "nf4"}, r"none of 1 arrays: kernel \(no pattern matches\)"),
        ({"kernel": normal(4, 4)}, "nf4", r"none of 1 arrays: kernel \(fewer than 1,024 elements\)"),
        ({"name": "model"}, "nf4", "finds no array among the 1 leaves"),
    ):
        with pytest.warns(UserWarning, match=said):
            quantize_tree(params, rules)


def test_keeping_most_bytes_for_lack_of_an_axis_warns_once() -> None:
    params = {"kernel": normal(64, 96), "a": normal(64, 80), "c": normal(64, 96)}
    with pytest.warns(
        UserWarning, match=r"keeps 45,056 of the 69,632 bytes of large arrays dense.*: a \(.*; c \("
    ) as caught:
        _, report = quantize_tree(params, "nf4")
    assert len(caught) == 1 and formats(report) == {"kernel": "nf4"}
    axis = {"kernel": "nf4", "*": QuantizationConfig("nf4", axis=-2)}

    def fn(p: Any, x: jax.Array) -> Any:
        return [x @ p[name] for name in p]

    # No warning if a pattern or fn gives the axis, or if less than half is kept (warnings are errors here).
    assert len(formats(quantize_tree(params, axis)[1])) == 3
    assert len(formats(quantize_tree(params, "nf4", fn=fn, args=(normal(8, 64),))[1])) == 3
    assert len(formats(quantize_tree({**params, "up": {"kernel": normal(96, 96)}}, "nf4")[1])) == 2
    # No warning about leaves that a pattern keeps or that are quantized already.
    quantize_tree(params, {"*": None})
    done, _ = quantize_tree(params, axis)
    assert formats(quantize_tree(done, "nf4")[1]) == {}
