"""The command: files in and out as a user types it, and one line for every mistake."""

import errno
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_helpers import huggingface_dir, left_over, run
from gguf import GGMLQuantizationType as Type
from gguf_helpers import golden, with_codebook, write
from test_demo import TOKENS

import lowbit
from lowbit.demo.language_model import LanguageModel
from lowbit.io import GGUFFile, open_tensors
from lowbit.io import _convert as converting


def test_a_gguf_file_survives_a_round_trip_through_a_lowbit_file(tiny: Path, tmp_path: Path) -> None:
    ours, back = tmp_path / "ours.safetensors", tmp_path / "back.gguf"
    run("convert", tiny, ours)
    file, original = open_tensors(ours), GGUFFile(tiny)
    assert set(file) == set(original) and [file.type(name) for name in file] == ["F32"] * len(file)
    assert all(np.array_equal(file.dense(name), original.dense(name)) for name in file)
    run("convert", ours, back, "--type", "Q8_0")
    fields = dict(GGUFFile(back).fields)
    assert fields.pop("general.file_type").value == 7 and fields == original.fields
    assert GGUFFile(back).type("token_embd.weight") == "Q8_0"
    # Stored bits are kept in both directions.
    ours.unlink()
    run("convert", back, ours)
    assert open_tensors(ours).type("token_embd.weight") == "int8"
    run("convert", ours, back, "--type", "Q8_0", "--force")
    again = GGUFFile(back).array("token_embd.weight")
    assert np.array_equal(again.codes, open_tensors(ours).array("token_embd.weight").codes)


def test_quantized_files_generate_what_quantized_models_do(tiny: Path, tmp_path: Path) -> None:
    target = tmp_path / "tiny-nf4.safetensors"
    result = run("quantize", tiny, target, "--format", "nf4", "--rule", "*ffn_down*=int8", "--rule", "*attn_k*=keep")
    assert "times smaller" in result.output
    file = open_tensors(target)
    types = {name.split(".")[2]: file.type(name) for name in file if name.startswith("blk.0")}
    assert types["ffn_down"] == "int8" and types["attn_q"] == "nf4" and types["attn_k"] == types["attn_norm"] == "F32"
    model = LanguageModel.from_file(target)
    assert isinstance(model.params["layers"]["q"], lowbit.ArrayNF4)
    want = LanguageModel.from_file(target, "float32").logits(TOKENS)
    np.testing.assert_allclose(model.logits(TOKENS), want, atol=2e-4 * np.abs(want).max())
    text = run("generate", "a low", "--raw", "--tokens", 4, "--model", target).stdout
    assert text == model.tokenizer.decode(model.generate(model.tokenizer.encode("a low"), 4)) + "\n"
    report = json.loads(run("quantize", tiny, tmp_path / "b", "--strict", "--json").stdout)
    assert report["before"] == sum(GGUFFile(tiny).nbytes(name) for name in GGUFFile(tiny))
    run("quantize", tiny, tmp_path / "c", "--strict", "--rule", "*ffn_dwn*=int8", code=1)


def test_hugging_face_directories_are_read_and_written(tiny: Path, tmp_path: Path) -> None:
    folder = huggingface_dir(tiny, tmp_path / "hf")
    want = LanguageModel.from_gguf(tiny).logits(TOKENS)
    np.testing.assert_allclose(LanguageModel.from_file(folder, "float32").logits(TOKENS), want, atol=1e-5)
    ours = tmp_path / "ours"
    run("quantize", folder, ours, "--format", "int8")
    others = {"README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert set(os.listdir(ours)) == others | {".lowbit.json"} and (ours / "README.md").read_text() == "tiny"
    model = LanguageModel.from_file(ours)
    assert isinstance(model.params["layers"]["q"], lowbit.Array8B)
    error = np.linalg.norm(model.logits(TOKENS) - want) / np.linalg.norm(want)
    assert 0 < error < 0.05
    assert run("generate", "a low", "--raw", "--tokens", 3, "--model", ours).output.endswith("\n")
    # Written for bitsandbytes, and read back bit for bit.
    other = tmp_path / "bnb"
    assert "--requantize" in run("quantize", folder, other, "--to", "bitsandbytes", code=1).stderr
    run("quantize", folder, other, "--to", "bitsandbytes", "--requantize")
    assert json.loads((other / "config.json").read_text())["quantization_config"]["bnb_4bit_quant_type"] == "nf4"
    name = "model.layers.0.mlp.up_proj.weight"
    got, w = open_tensors(other).array(name), open_tensors(folder).dense(name)
    assert np.array_equal(got.codes, lowbit.ArrayNF4.quantize(w, axis=-1).codes)
    told = run("convert", other, ours, "--force").stderr
    assert "lowbit: model.layers.0.mlp.down_proj.weight was dequantized: its blocks of 64 cross its rows" in told
    assert "cannot keep its stored bits" in run("convert", other, ours, "--force", "--strict", code=1).stderr
    assert open_tensors(ours).type(name) == "nf4" and left_over(tmp_path) == []
    assert open_tensors(other).type("model.embed_tokens.weight") == "F32"
    run("convert", folder, tmp_path / "a.gguf", code=1)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "hqq"}}
    (folder / "config.json").write_text(json.dumps(config))
    assert "was quantized by hqq" in run("convert", folder, tmp_path / "b", code=1).stderr


def test_inspect_and_compare_list_the_tensors(tiny: Path, tmp_path: Path) -> None:
    found = json.loads(run("inspect", tiny, "--json").stdout)
    first = {"name": "blk.0.attn_q.weight", "shape": [64, 64], "type": "F32", "blocks": [], "bytes": 16384}
    assert found["tensors"][0] == first
    lines = run("inspect", tiny).output.splitlines()
    assert lines[0].split() == ["name", "shape", "type", "blocks", "bytes", "bits"] and lines[-1].startswith("total")
    run("quantize", tiny, tmp_path / "b.safetensors", "--format", "int8", "--rule", "*ffn_up*=binary")
    rows = json.loads(run("compare", tiny, tmp_path / "b.safetensors", "--json").stdout)["tensors"]
    assert rows[0]["name"].endswith("ffn_up.weight") and 0.5 < rows[0]["error"] < 0.7
    assert [row["error"] for row in rows] == sorted((row["error"] for row in rows), reverse=True)
    assert rows[-1]["error"] == 0
    run("compare", tiny, tmp_path / "b.safetensors", "--tolerance", 0.7)
    run("compare", tiny, tmp_path / "b.safetensors", "--tolerance", 0.1, code=3)
    lowbit.save(tmp_path / "c.safetensors", {"output_norm.weight": np.zeros(8), "other": np.zeros(3)})
    text = run("compare", tiny, tmp_path / "c.safetensors", code=3).output
    assert "has the shape 8 in" in text and f"1 not in {tiny}: other" in text
    run("compare", tiny, tmp_path / "c.safetensors", "--tolerance", 9, code=3)


def test_formats_have_options(tiny: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.safetensors"
    rules = (
        "--rule",
        "*ffn_down*=int4:offset=true,scale_dtype=float16,axis=-2",
        "--rule",
        "*attn_q*=int8:block_size=4",
    )
    run("quantize", tiny, target, "--block-size", 16, *rules)
    file = open_tensors(target)
    kinds = {name.split(".")[-2]: file.array(name) for name in file if len(file.shape(name)) == 2}
    down, query, up = kinds["ffn_down"], kinds["attn_q"], kinds["ffn_up"]
    assert (down.format_name, down.affine, down.scales.dtype, down.axis) == ("int4", True, np.float16, -2)
    assert (query.format.name, query.block_size) == ("int8", 4)
    assert (up.format.name, up.block_size, up.axis) == ("q4", 16, -1)  # the default
    run("quantize", tiny, target, "--force", "--format", "nf4", "--double-quant", "--axis", "-2")
    up = {name.split(".")[-2]: open_tensors(target).array(name) for name in open_tensors(target)}["ffn_up"]
    assert up.group_absmax is not None and up.axis == -2
    run("quantize", tiny, target, "--force", "--format", "fp8", "--axis", "-2,-1", "--block-size", 8)
    up = {name.split(".")[-2]: open_tensors(target).array(name) for name in open_tensors(target)}["ffn_up"]
    assert up.spans == (8, 8)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--rule", "*a*=int8:blocks=3"), "Unknown option 'blocks' of a format: it must be one of block_size, axis"),
        (("--rule", "*a*=int8:block_size=x"), "block_size='x' must be a number."),
        (("--rule", "*a*=int4:offset=1"), "offset='1' must be true or false."),
        (("--rule", "*a*=q4:offset=true"), "offset=True is for int2, int3, int4, int5, int6, not for 'q4'."),
        (("--rule", "*a*=int4:scale_dtype=int8"), "must be one of float32, bfloat16, float16."),
        (("--format", "int8:offset"), "write FORMAT[:OPTION=VALUE,...], for instance int8:block_size=32."),
        (("--axis", "x"), "axis='x' must be a number, or several separated by commas."),
        (("--double-quant",), "double_quant=True is for nf4, not for 'q4'; its scales are in 8 bits already."),
    ],
    ids=str,
)
def test_wrong_options_of_formats_are_named(given: tuple[str, ...], told: str, tiny: Path, tmp_path: Path) -> None:
    assert told in run("quantize", tiny, tmp_path / "out", *given, code=1).stderr


def test_bench_times_products() -> None:
    rows = json.loads(run("bench", "--size", 64, "--rows", "1,2", "--repeat", 1, "--json").stdout)
    names = ("q4", "nf4", "int8", "ternary", "binary")
    assert {row["product"] for row in rows} == {"float32", *(f"{f} {a}" for f in names for a in ("exact", "fast"))}
    assert {row["rows"] for row in rows} == {1, 2} and all(row["microseconds"] > 0 for row in rows)


def mistakes(tiny: Path, folder: Path) -> dict[str, tuple[tuple[Any, ...], str]]:
    (folder / "there").write_text("old")
    (folder / "text").write_text("no tensors here, just a line of text")
    return {
        "exists": (("quantize", tiny, folder / "there"), "there exists. --force replaces it."),
        "itself": (("convert", tiny, tiny, "--force"), "is the source itself"),
        "absent": (("convert", folder / "none", folder / "b"), "No such file or directory"),
        "no folder": (("convert", tiny, folder / "no" / "b"), "There is no directory"),
        "kind": (("convert", tiny, folder / "b", "--to", "onnx"), "Unknown kind of file 'onnx'"),
        "type": (("convert", tiny, folder / "b.gguf", "--type", "Q2_K"), "Unknown type 'Q2_K'"),
        "format": (("quantize", tiny, folder / "b", "--format", "nf5"), "Unknown format 'nf5'"),
        "rule": (("quantize", tiny, folder / "b", "--rule", "int8"), "write PATTERN=FORMAT"),
        "pattern": (("quantize", tiny, folder / "b", "--rule", "re:(=int8"), "is not a valid regular expression"),
        "text": (("inspect", folder / "text"), f"{folder / 'text'}"),
        "not nf4": (("convert", tiny, folder / "b", "--to", "gguf", "--type", "int8"), "Unknown type 'int8'"),
    }


def test_every_mistake_is_reported_in_one_line_and_changes_nothing(tiny: Path, tmp_path: Path) -> None:
    for args, text in mistakes(tiny, tmp_path).values():
        before = sorted(os.listdir(tmp_path))
        result = run(*args, code=1)
        assert result.stderr.startswith("lowbit: ") and text in result.stderr, result.stderr
        assert result.stderr.count("\n") == 1 and sorted(os.listdir(tmp_path)) == before
    assert (tmp_path / "there").read_text() == "old"


@pytest.mark.parametrize("to", ["safetensors", "gguf"])  # lowbit files leave a staging file, see test_stream_resume
@pytest.mark.parametrize("force", [False, True])
def test_a_failing_command_leaves_the_old_file(
    force: bool, to: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model.safetensors"
    if force:
        target.write_text("old")
    given = ("convert", tiny, target, "--to", to, *(["--force"] if force else []))

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert "No space left on device" in run(*given, code=1).stderr
    with monkeypatch.context() as patch:
        patch.setattr(converting, "transformed", interrupted)
        assert "interrupted" in run(*given, code=130).stderr
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode, **_: mode != os.W_OK)
        assert "cannot be written to" in run(*given, code=1).stderr
    assert left_over(tmp_path) == [] and target.exists() == force
    if force:
        assert target.read_text() == "old"
        run(*given)
        assert len(open_tensors(target)) > 0


def interrupted(*args: Any) -> Any:
    raise KeyboardInterrupt
    yield


def test_only_files_are_replaced(tiny: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "which cannot be replaced" in run("convert", tiny, tmp_path / "pipe.gguf", "--force", code=1).stderr
    assert (tmp_path / "pipe.gguf").is_fifo() and left_over(tmp_path) == []


COMMANDS = ("quantize", "convert", "inspect", "compare", "evaluate", "report", "bench", "demo", "generate")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_screen_and_has_an_example(command: str) -> None:
    text = run(command, "--help").output
    assert f"Example: lowbit {command}" in text and run(command, "-h").output == text
    assert len(text.splitlines()) <= 40
    options = re.findall(r"^  (?:-\w, )?(--[\w-]+) (<\S+>|[a-z]\S*)", text, re.MULTILINE)
    assert not options, "metavars must be in capitals"


def test_help_lists_the_commands_each_on_a_line() -> None:
    text = run("--help").output
    assert "--install-completion" in text and "Example: lowbit" in text and run("-h").output == text
    lines = text.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ") and line.split()[0] in COMMANDS] == [*COMMANDS]
    assert "..." not in text.partition("Commands:")[2]


def test_the_version_is_that_of_the_package() -> None:
    assert lowbit.__version__ == importlib.metadata.version("lowbit")
    assert run("--version").output == f"lowbit {lowbit.__version__}\n"


def test_without_its_packages_the_command_says_what_to_install() -> None:
    blocked = "import sys; sys.modules['typer'] = None; from lowbit.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr == "The lowbit command needs the package typer: pip install 'lowbit[cli]'\n"


def test_python_m_lowbit_is_the_command(tiny: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "lowbit", "inspect", tiny], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0 and result.stdout.startswith("name ")


def test_gguf_types_are_kept_unless_a_pattern_asks_for_another_format(tmp_path: Path) -> None:
    path, kinds = tmp_path / "mixed.gguf", [Type.Q4_K, Type.Q8_0]
    tensors = {f"{kind.name}.weight": (golden(kind), kind) for kind in kinds}
    before = write(path, tensors | {"IQ2_XS.weight": (with_codebook(4, 512), Type.IQ2_XS)})
    told = run("quantize", path, tmp_path / "a", "--format", "nf4").stderr
    assert "dequantized to float32, since lowbit has no format for them: 1 of type IQ2_XS" in told
    file = open_tensors(tmp_path / "a")
    assert [file.type(name) for name in before] == ["q4_k", "int8", "nf4"]
    want = lowbit.ArrayNF4.quantize(before.dense("IQ2_XS.weight"), axis=-1)
    assert np.array_equal(file.array("IQ2_XS.weight").codes, want.codes)
    for name in tensors:
        assert np.array_equal(file.dense(name), before.dense(name))
    run("quantize", path, tmp_path / "b", "--rule", "Q8*=nf4")
    assert open_tensors(tmp_path / "b").type("Q8_0.weight") == "nf4"
    run("quantize", path, tmp_path / "c", "--format", "nf4", "--requantize")
    assert {*map(open_tensors(tmp_path / "c").type, tensors)} == {"nf4"}
    assert "1 of type IQ2_XS" in run("inspect", path).output
    assert "codebook of IQ2_XS" in run("convert", path, tmp_path / "d", "--strict", code=1).stderr
    assert not (tmp_path / "d").exists()


def test_what_gguf_cannot_hold_is_refused_with_what_it_can(tiny: Path, tmp_path: Path) -> None:
    given = ("quantize", tiny, tmp_path / "out.gguf", "--format")
    assert "and its own layouts (Q4_0, Q4_1" in run(*given, "int4", code=1).stderr
    run(*given, "int4:scale_dtype=float16,axis=-1")
    file = GGUFFile(tmp_path / "out.gguf")
    assert file.type("blk.0.attn_q.weight") == "Q4_0" and file.metadata["general.file_type"] == 2


# --- printed numbers


def sizes(path: Path) -> tuple[int, int]:
    file = open_tensors(path)
    return sum(map(file.nbytes, file)), path.stat().st_size


@pytest.mark.parametrize("to", ["lowbit", "gguf", "safetensors"])
def test_totals_are_those_of_the_file(to: str, tiny: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    given = ("quantize", tiny, target, "--to", to)
    if to != "lowbit":
        told = run(*given, code=1).stderr
        assert "cannot hold 15 tensors (blk.0.attn_q.weight, ...) as q4" in told and "--dequantize writes" in told
        assert ("F16" in told and "Q8_0" in told) if to == "gguf" else "dense tensors" in told
        assert not target.exists()
    found = json.loads(run(*given, "--dequantize", "--json").stdout)
    assert (found["after"], found["on_disk"]) == sizes(target) and sum(r["after"] for r in found["tensors"]) == found[
        "after"
    ]
    file, source = open_tensors(target), open_tensors(tiny)
    assert found["before"] == sum(map(source.nbytes, source))
    for row in found["tensors"]:
        a, b = source.dense(row["path"]), file.dense(row["path"])
        assert row["format"] in (None, file.type(row["path"])) and row["after"] == file.nbytes(row["path"])
        assert (row["error"] or 0) == pytest.approx(np.linalg.norm(b - a) / np.linalg.norm(a), rel=1e-4)
    text = run(*given, "--dequantize", "--force").output
    stored = {"lowbit": "q4", "gguf": "Q8_0", "safetensors": "F32"}[to]
    assert f"{found['on_disk']:,} bytes on disk" in text
    assert ("15 tensors have the error of q4 and the size of " + stored in text) == (to != "lowbit")


def test_a_file_that_grows_is_reported_as_larger(tiny: Path, tmp_path: Path) -> None:
    run("quantize", tiny, tmp_path / "nf4", "--format", "nf4")
    assert "cannot hold 15 tensors" in run("convert", tmp_path / "nf4", tmp_path / "f16.gguf", code=1).stderr
    before, after = sizes(tmp_path / "nf4")[0], sizes(tiny)[0]
    text = run("convert", tmp_path / "nf4", tmp_path / "dense", "--to", "safetensors", "--dequantize").output
    assert f"{after / before:.2f} times larger" in text and "smaller" not in text
    assert "the same size" in run("convert", tiny, tmp_path / "copy").output


def test_generate_counts_the_bytes_that_are_quantized(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []

    @contextmanager
    def counted(doing: str) -> Iterator[Any]:
        assert doing == "quantizing"
        yield lambda *progress: told.append(progress), None

    monkeypatch.setattr("lowbit.cli.progress.counted", counted)
    run("generate", "a low", "--raw", "--tokens", 1, "--format", "nf4", "--model", tiny)
    done, totals = zip(*told, strict=True)
    assert done[0] == 0 and done[-1] == totals[0] and list(done) == sorted(done) and len(set(totals)) == 1


def test_a_format_that_bitsandbytes_cannot_hold_is_refused(tiny: Path, tmp_path: Path) -> None:
    given = ("quantize", tiny, tmp_path / "out", "--to", "bitsandbytes", "--format", "int8")
    assert "a bitsandbytes file holds nf4 and dense tensors" in run(*given, code=1).stderr
    rows = json.loads(run(*given, "--dequantize", "--json").stdout)["tensors"]
    assert {(row["format"], row["why"]) for row in rows if row["format"]} == {
        ("F32", "the error of int8, the size of F32")
    }


def test_other_scales_than_those_of_q8_0_are_refused(tiny: Path, tmp_path: Path) -> None:
    run("quantize", tiny, tmp_path / "int8", "--format", "int8")
    file = open_tensors(tmp_path / "int8")
    assert all(isinstance(file.array(name), lowbit.Array8B) for name in file if file.type(name) == "int8")
    given = ("convert", tmp_path / "int8", tmp_path / "out.gguf", "--type", "Q8_0")
    assert "cannot hold blk.0.attn_q.weight as int8" in run(*given, code=1).stderr
    assert "have the error of int8 and the size of Q8_0" in run(*given, "--dequantize").output


def test_stored_tensors_are_requantized_if_asked_and_otherwise_the_report_says_so(tiny: Path, tmp_path: Path) -> None:
    run("quantize", tiny, tmp_path / "nf4", "--format", "nf4")
    nf4 = open_tensors(tmp_path / "nf4")
    given = ("quantize", tmp_path / "nf4", tmp_path / "out", "--force", "--format", "int8")
    told = run(*given).output
    assert "Nothing was quantized" in told and "15 stored as nf4 already" in told and "times" not in told
    assert (tmp_path / "out").read_bytes() == (tmp_path / "nf4").read_bytes()
    told = run(*given, "--requantize").output
    file = open_tensors(tmp_path / "out")
    assert "Nothing" not in told and "times larger" in told
    for name in nf4:
        assert (file.type(name) == "int8") == (nf4.type(name) == "nf4")
    told = run("quantize", tmp_path / "nf4", tmp_path / "out", "--force", "--requantize", "--format", "nf4").output
    assert "Nothing was quantized" in told and "15 stored as nf4 already." in told
    told = run("convert", tmp_path / "nf4", tmp_path / "out", "--force", "--requantize").output
    assert "Nothing was quantized: no format was given." in told


def test_a_rule_that_matches_nothing_is_named(tiny: Path, tmp_path: Path) -> None:
    for options in ((), ("--json",)):
        result = run("quantize", tiny, tmp_path / "out", "--force", "--rule", "*ffn_dwn*=int8", *options)
        assert result.stderr == "lowbit: The pattern '*ffn_dwn*' matched no tensor.\n"
    assert json.loads(result.stdout)["unmatched"] == ["*ffn_dwn*"]


NOT_FINITE = {
    "nan": ([1, np.nan], [1, 2], None),
    "infinite": ([1, 2], [np.inf, 2], None),
    "both nan": ([1, np.nan], [1, np.nan], 0.0),
    "both infinite": ([1, np.inf], [2, np.inf], 1.0),
    "from nothing": ([0, 0], [0, 1], None),
}


@pytest.mark.parametrize("case", NOT_FINITE)
def test_values_that_are_not_finite_raise(case: str, tmp_path: Path) -> None:
    *pair, error = NOT_FINITE[case]
    for name, values in zip("ab", pair, strict=True):
        lowbit.save(tmp_path / name, {"w": np.array(values, np.float32), "v": np.ones(3, np.float32)})
    given = ("compare", tmp_path / "a", tmp_path / "b", "--json")

    def no_json(text: str) -> None:
        raise ValueError(text)

    for options in ((), ("--tolerance", 2)):
        text = run(*given, *options, code=3 if error is None else 0).stdout
        rows = json.loads(text, parse_constant=no_json)["tensors"]
        assert {row["name"]: row["error"] for row in rows} == {"w": error, "v": 0.0}
        assert rows[0]["name"] == ("v" if error == 0 else "w") or error == 0


def test_models_without_a_common_tensor_are_an_error(tiny: Path, tmp_path: Path) -> None:
    lowbit.save(tmp_path / "b", {"w": np.ones(3)})
    for options in ((), ("--json",), ("--tolerance", 1)):
        result = run("compare", tiny, tmp_path / "b", *options, code=1)
        assert "have no tensor of the same name" in result.stderr and result.stdout == ""
