"""Files that are quantized for a text: layer by layer, resumable, with formats for a size; and their evaluation."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from cli_helpers import huggingface_dir, left_over, run
from test_demo import tiny_file

import lowbit
from lowbit.cli import conversion
from lowbit.demo import calibration, evaluation, llama
from lowbit.demo.calibration import Text, TextMoments, patterns
from lowbit.demo.language_model import LanguageModel
from lowbit.formats.moments import Moments
from lowbit.io import GGUFFile, _chunks, convert, open_tensors, save
from lowbit.io._convert import plans_for

WORDS = "the lower the slower, a low tide is slow and lower than a slow one: "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama, a text, and the llama quantized for that text."""
    folder = tmp_path_factory.mktemp("calibrated")
    tiny_file(folder / "tiny.gguf")
    (folder / "text.txt").write_text(WORDS * 12)
    run("quantize", folder / "tiny.gguf", folder / "q3", "--format", "q3", *calibrate(folder))
    return folder


def calibrate(folder: Path) -> tuple[Any, ...]:
    return "--calibrate", folder / "text.txt", "--tokens", 512


def moments_of(folder: Path, **options: Any) -> TextMoments:
    file = GGUFFile(folder / "tiny.gguf")
    text = Text.of(file, (folder / "text.txt").read_text(), 512)
    return TextMoments(llama.LlamaFile.of(file, file.metadata), text, **options)


# --- layer by layer


def test_moments_by_layer_are_those_of_the_whole_model(folder: Path) -> None:
    model, text = LanguageModel.from_gguf(folder / "tiny.gguf"), moments_of(folder)
    want = lowbit.calibrate(lambda p, t: llama.forward(model.config, p, t)[0], model.params, text.text.batches)
    for name, (number, weight) in text.places.items():
        stacked = want["embed" if weight == "head" else f"layers/{weight}"]
        h = np.asarray(stacked.hessian if weight == "head" else stacked.hessian[number])
        np.testing.assert_allclose(text[name].hessian, h, rtol=1e-4, atol=1e-4 * np.abs(h).max())
        assert text[name].shape == text.source.file.shape(name) and int(text[name].count) == text.text.used
    assert list(text) == [n for n in text.source.file if n in text]  # the file is in the order of its layers


def test_a_file_holds_what_its_moments_lead_to(folder: Path) -> None:
    moments, written = moments_of(folder), open_tensors(folder / "q3")
    for name in ("blk.0.attn_q.weight", "blk.1.ffn_down.weight", "token_embd.weight"):
        want = lowbit.quantize(moments.source.file.dense(name), "q3", axis=-1, hessian=moments[name].hessian)
        got: Any = written.array(name)
        # Moments are sums of floats, so that few codes may differ.
        assert np.mean(np.asarray(got.materialize()) == np.asarray(want.materialize())) > 0.98, name


def test_the_model_passes_through_memory_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    layer = llama.LlamaFile.layer
    monkeypatch.setattr(llama.LlamaFile, "layer", lambda self, i, *more: (read.append(i), layer(self, i, *more))[1])
    monkeypatch.setattr(llama, "load", None)
    # A Hugging Face directory names its tensors in another order, and is one with other names for the layers.
    source = huggingface_dir(folder / "tiny.gguf", tmp_path / "model")
    given = ("quantize", source, tmp_path / "out", *calibrate(folder), "--format", "q3", "--json")
    rows = {row["path"]: row for row in json.loads(run(*given).stdout)["tensors"]}
    assert read == [0, 1]
    linears = [row for row in rows.values() if len(row["shape"]) == 2]
    assert len(linears) == 15 and all(row["output_after"] < row["output_before"] for row in linears)
    assert all(row["why"].endswith("; GPTQ") for row in linears)
    assert (tmp_path / "out" / "README.md").read_text() == "tiny"


@tiers.MORE  # a budget that is too small shows the same of q3
def test_reports_have_output_errors(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "int8.gguf"
    given = ("quantize", folder / "tiny.gguf", target, "--format", "int8:block_size=32,scale_dtype=float16")
    text = run(*given, *calibrate(folder)).output
    assert "output error" in text and len(re.findall(r"0\.\d{6} -> 0\.\d{6}", text)) == 15
    assert run("inspect", target).output.count("Q8_0") == 15


def test_a_budget_that_is_too_small_leaves_diagonals(folder: Path, tmp_path: Path) -> None:
    given = ("quantize", folder / "tiny.gguf", tmp_path / "out", "--format", "q3", *calibrate(folder))
    page = tmp_path / "page.html"
    text = run(
        *given, "--budget", "40kB", "--report", page
    ).output  # two matrices of 64 x 64 in float32 are 33 kB, of 96 x 96 are 74 kB
    assert text.count("weighted search") == 2 and text.count("; GPTQ") == 13
    assert "output error" in text and len(re.findall(r"0\.\d{6} -> 0\.\d{6}", text)) == 15
    data = re.search(r'<script id="data" type="application/json">(.*?)</script>', page.read_text())
    rows = json.loads(data[1])["rows"] if data else []
    assert sum(row["output_after"] is not None for row in rows) == 15 and "Output error" in page.read_text()
    assert "budget='many'" in run(*given, "--budget", "many", "--force", code=1).stderr


def test_an_interrupted_run_resumes_where_it_was(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("quantize", folder / "tiny.gguf", tmp_path / "q3", "--format", "q3", *calibrate(folder))
    asked: list[int] = []
    observed = TextMoments.observed

    def stopped(self: TextMoments, number: int) -> Any:
        asked.append(number)
        if number == 1 and len(asked) == 2:
            raise KeyboardInterrupt
        return observed(self, number)

    monkeypatch.setattr(TextMoments, "observed", stopped)
    assert "Repeat the same conversion" in run(*given, code=130).stderr
    assert "resuming" in run(*given).stderr and asked == [0, 1, 1, 2]
    assert left_over(tmp_path) == [] and (tmp_path / "q3").read_bytes() == (folder / "q3").read_bytes()
    # Another text is another conversion.
    asked[:] = []
    assert run(*given, "--force", code=130)
    (tmp_path / "other.txt").write_text(WORDS[::-1] * 12)
    assert "starting over" in run(*given[:5], "--calibrate", tmp_path / "other.txt", "--force").stderr


def test_a_table_that_is_only_looked_up_has_counts(folder: Path) -> None:
    moments = moments_of(folder)
    head = dataclasses.replace(moments.source.layout, head="blk.0.ffn_up.weight")  # any matrix: the model is not run
    untied = TextMoments(dataclasses.replace(moments.source, layout=head), moments.text)
    found = untied["token_embd.weight"]
    counts = np.bincount(np.concatenate(untied.text.windows), minlength=found.shape[0])
    np.testing.assert_array_equal(found.diag, counts)
    assert found.inputs == untied.inputs_of("token_embd.weight") == (-2,) and found.hessian is None


def test_chunks_of_a_matrix_have_its_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    w, x = (rng.standard_normal(shape).astype(np.float32) for shape in ((48, 64), (200, 64)))
    x *= np.exp(rng.standard_normal(64)).astype(np.float32)
    save(tmp_path / "in", {"up.weight": jnp.asarray(w), "down.weight": jnp.asarray(w)})
    known = {"up.weight": Moments(w.shape, (-1,), (), np.sum(x * x, 0), x.T @ x, np.float32(200))}
    whole = convert(tmp_path / "in", tmp_path / "whole", rules={"*": "q3"}, calibration=known)
    monkeypatch.setattr(_chunks, "STRIPE", 1024)
    split = convert(tmp_path / "in", tmp_path / "split", rules={"*": "q3"}, calibration=known)
    files = [open_tensors(tmp_path / name) for name in ("split", "whole")]
    got, want = (file.dense("up.weight") for file in files)
    assert np.mean(got == want) > 0.99
    one, other = (report["up.weight"] for report in (split, whole))
    assert one.output_before and one.output_after and other.output_before and other.output_after
    np.testing.assert_allclose(one.output_before, other.output_before, rtol=1e-4)
    np.testing.assert_allclose(one.output_after, other.output_after, rtol=0.02)
    error = np.sum((x @ (w - got).T) ** 2) / np.sum((x @ w.T) ** 2)
    np.testing.assert_allclose(one.output_after, error, rtol=1e-3)
    w[3, 5] = np.nan
    save(tmp_path / "bad", {"up.weight": jnp.asarray(w)})
    with pytest.raises(ValueError, match=r"up\.weight: .*NaN"):
        convert(tmp_path / "bad", tmp_path / "out", rules={"*": "q3"}, calibration=known)
    assert left_over(tmp_path) == [] and not (tmp_path / "out").exists()
    assert one.why.endswith("; GPTQ") and split["down.weight"].why.endswith("no statistic in the calibration")


def test_gradients_weight_the_moments(folder: Path, tmp_path: Path) -> None:
    text, model = moments_of(folder, gradients=True), LanguageModel.from_gguf(folder / "tiny.gguf")

    def sampled(logits: jax.Array, tokens: jax.Array) -> jax.Array:
        drawn = jax.random.categorical(jax.random.fold_in(jax.random.key(0), jnp.sum(tokens)), logits)
        return -jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(logits), drawn[..., None], -1))

    def forward(params: Any, tokens: jax.Array) -> jax.Array:
        return llama.forward(model.config, params, tokens)[0]

    want = lowbit.calibrate(forward, model.params, text.text.batches, loss=sampled)
    for name, (number, weight) in text.places.items():
        stacked = want["embed" if weight == "head" else f"layers/{weight}"]
        h = np.asarray(stacked.hessian if weight == "head" else stacked.hessian[number])
        np.testing.assert_allclose(text[name].hessian, h, rtol=1e-4, atol=1e-4 * np.abs(h).max())
        assert text[name].shape == text.source.file.shape(name)
    assert moments_of(folder).digest != text.digest  # a run with gradients does not resume one without

    run("quantize", folder / "tiny.gguf", tmp_path / "q3", "--format", "q3", "--gradients", *calibrate(folder))
    for name in ("blk.0.attn_q.weight", "token_embd.weight"):
        want = lowbit.quantize(text.source.file.dense(name), "q3", axis=-1, hessian=text[name].hessian)
        got, plain = (np.asarray(open_tensors(path).dense(name)) for path in (tmp_path / "q3", folder / "q3"))
        equal = np.mean(got == np.asarray(want.materialize()))
        assert equal > 0.98 and np.mean(got == plain) < equal, name
    with_gradients = run("quantize", folder / "tiny.gguf", tmp_path / "none", "--gradients", code=1)
    assert "--calibrate TEXT" in with_gradients.stderr


# --- formats for a size


@pytest.mark.parametrize("goal", tiers.tiered([(("--bits", "4.4"),), (("--size", "62kB"),)], [(("--bits", "4.4"),)]))
def test_formats_are_chosen_for_bits_or_a_size(goal: tuple[str, str], folder: Path, tmp_path: Path) -> None:
    given = ("quantize", folder / "tiny.gguf", tmp_path / "out", *goal, "--tokens", 512)
    result = run(*given, "--format", "q2,int8", "--json")
    assert "No text was given" in result.stderr
    found = json.loads(result.stdout)
    rows = [row for row in found["tensors"] if row["format"]]
    assert len(rows) == 15 and len({row["format"] for row in rows}) > 1
    assert (
        8 * sum(row["after"] for row in rows) / sum(np.prod(row["shape"]) for row in rows) <= 4.4 or goal[0] != "--bits"
    )
    assert 55_000 < (tmp_path / "out").stat().st_size <= 62_000 or goal[0] != "--size"
    if goal[0] == "--size":
        return
    # The rules that are printed lead to the same file.
    rules = [part for rule in found["rules"] for part in ("--rule", rule)]
    run("quantize", folder / "tiny.gguf", tmp_path / "again", *rules)
    assert (tmp_path / "again").read_bytes() == (tmp_path / "out").read_bytes()


@tiers.MORE  # both are in the first tier alone
def test_rules_come_before_chosen_formats_and_a_text_rounds(folder: Path, tmp_path: Path) -> None:
    given = ("quantize", folder / "tiny.gguf", tmp_path / "out", "--bits", "4.5", "--rule", "*embd*=int8")
    text = run(*given, *calibrate(folder)).output
    rules = re.findall(r"^  --rule (.+)$", text, re.MULTILINE)
    assert rules and "No text" not in text and not any("token_embd" in rule for rule in rules)
    assert re.search(r"^token_embd\.weight .* int8 ", text, re.MULTILINE) and text.count("; GPTQ") == 15


def test_patterns_match_what_they_are_for(folder: Path) -> None:
    names = [f"blk.{i}.{name}.weight" for i in range(12) for name in ("up", "down")] + ["head[1]", "norm"]
    formats = {name: "q4" if i % 3 else "q3" for i, name in enumerate(names[:-1])}
    formats |= {f"blk.{i}.down.weight": "int8" for i in range(12)}
    found = patterns(formats, names)
    assert len(found) == 4
    for name in names:
        matches = [format for pattern, format in found if lowbit.Rule(pattern, None).matches(name, np.ones(1))]
        assert matches == ([formats[name]] if name in formats else [])


# --- two files on a text


def test_an_evaluation_is_the_one_by_hand(folder: Path) -> None:
    a, b, text = folder / "tiny.gguf", folder / "q3", (folder / "text.txt").read_text()
    got = evaluation.evaluate(a, b, text, tokens=256, window=128)
    models = [LanguageModel.from_file(path, format) for path, format in ((a, "float32"), (b, "stored"))]
    assert lowbit.is_quantized(models[1].params["embed"])
    kl, same, nll = [], [], [[], []]
    for part in evaluation.split(models[0].tokenizer.encode(text), 128, 256):
        logs = [np.asarray(jax.nn.log_softmax(model.logits(part)), np.float64)[:-1] for model in models]
        kl += [*np.sum(np.exp(logs[0]) * (logs[0] - logs[1]), -1)]
        same += [*(logs[0].argmax(-1) == logs[1].argmax(-1))]
        for own, log in zip(nll, logs, strict=True):
            own += [*-log[np.arange(127), part[1:]]]
    assert len(kl) == 254 and got.tokens == 256 and got.window == 128
    found = [got.b.divergence, got.b.divergence_error, got.b.divergence_99, got.b.agreement, got.log_ratio]
    want = [np.mean(kl), np.std(kl, ddof=1) / 254**0.5, np.quantile(kl, 0.99), np.mean(same)]
    np.testing.assert_allclose(found, [*want, np.mean(nll[1]) - np.mean(nll[0])], rtol=1e-3)
    np.testing.assert_allclose([got.a.perplexity, got.b.perplexity], np.exp([np.mean(x) for x in nll]), rtol=1e-4)
    file = open_tensors(b)
    size = sum(np.prod(file.shape(name)) for name in file)
    assert got.bits == (32, pytest.approx(8 * sum(map(file.nbytes, file)) / size))
    assert got.linear_bits[0] == 32 and 3.5 < got.linear_bits[1] < 3.75
    assert got.a.divergence == 0 and got.a.agreement == 1


def test_the_command_prints_the_evaluation(folder: Path, tmp_path: Path) -> None:
    given = ("evaluate", folder / "tiny.gguf", folder / "q3", "--text", folder / "text.txt", "--tokens", 128)
    text = run(*given, "--window", 64).output
    found = json.loads(run(*given, "--window", 64, "--json").stdout)
    assert f"{found['kl']['mean']:.4g} +- {found['kl']['standard_error']:.2g}" in text and "windows of 64" in text
    assert f"{found['b']['perplexity']:.4g}" in text and found["tokens"] == 128
    source = huggingface_dir(folder / "tiny.gguf", tmp_path / "model")
    same = json.loads(run("evaluate", source, source, "--tokens", 64, "--json").stdout)
    assert same["kl"]["mean"] == 0 and same["top1"] == 1


def test_what_cannot_be_compared_or_calibrated_is_an_error(folder: Path, tmp_path: Path) -> None:
    a = folder / "tiny.gguf"
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    save(tmp_path / "plain", {"kernel": jnp.ones((64, 64))})
    other = huggingface_dir(a, tmp_path / "other")
    vocabulary = json.loads((other / "tokenizer.json").read_text())
    first, second = ("t", "h")
    vocabulary["model"]["vocab"] |= {
        first: vocabulary["model"]["vocab"][second],
        second: vocabulary["model"]["vocab"][first],
    }
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config))

    def told(*args: Any) -> str:
        return run(*args, code=1).stderr

    assert "different tokenizers" in told("evaluate", a, other, "--text", folder / "text.txt")
    assert "The text has 0 tokens" in told("evaluate", a, a, "--text", tmp_path / "empty.txt")
    assert "latin.txt is not UTF-8 text: byte 3 is 0xe9" in told("evaluate", a, a, "--text", tmp_path / "latin.txt")
    assert "does not describe its model" in told("evaluate", a, tmp_path / "plain")
    assert "exceed the context" in told("evaluate", a, a, "--window", 2048)
    quantize = ("quantize", a, tmp_path / "out")
    assert "The text has 0 tokens" in told(*quantize, "--calibrate", tmp_path / "empty.txt")
    assert "--calibrate runs the model" in told("quantize", tmp_path / "plain", tmp_path / "out", *calibrate(folder))
    assert "--bits and --size both" in told(*quantize, "--bits", 4, "--size", "1MB")
    assert "more than bits=2.0 allows" in told(*quantize, "--bits", 2, "--tokens", 64)
    assert "choose among several formats" in told(*quantize, "--bits", 4, "--format", "q4")
    assert "size='lots'" in told(*quantize, "--size", "lots", "--tokens", 64)
    assert left_over(tmp_path) == [] and not (tmp_path / "out").exists()
    assert calibration.Text.of(GGUFFile(a), WORDS, 10**6).used < 10**6


def test_a_text_that_is_short_is_used_whole_and_said_so(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text(WORDS)
    file, notes = GGUFFile(folder / "tiny.gguf"), list[str]()
    text = conversion.CalibrationText(tmp_path / "short.txt", 4096, False, "4GB")
    found = conversion.text_moments(file, text, notes.append, notes.append)
    count = found.text.used
    assert 2 < count == len(found.text.windows[0])
    assert f"has {count} tokens; {count} are used, and 4,096 were asked for" in notes[0]


def test_plans_do_not_depend_on_calibration(folder: Path) -> None:
    file = GGUFFile(folder / "tiny.gguf")
    plans, _ = plans_for(file, {"*": "q3"}, strict=False)
    assert {name for name, plan in plans.items() if plan.config} == set(moments_of(folder))
