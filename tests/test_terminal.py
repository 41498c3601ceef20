"""The command in a terminal: quick answers, tables of its width, progress in lines where there is none."""

import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import run
from rich.console import Console
from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

import lowbit
from lowbit.cli import bench, options, peers, printing, progress

# Modules that take longer to import than a shell should wait for.
HEAVY = ("jax", "numpy", "rich", "safetensors", "lowbit.formats", "lowbit.io", "lowbit.runtime")
ASK = """
import json, os, sys
from lowbit.cli import main
sys.argv = ["lowbit", *json.loads(sys.argv[1])]
try:
    main()
except SystemExit:
    pass
print(json.dumps([name for name in json.loads(os.environ["HEAVY"]) if name in sys.modules]), file=sys.stderr)
"""


def asked(*args: str, **environment: str) -> tuple[str, str]:
    env = os.environ | environment | {"HEAVY": json.dumps(HEAVY)}
    command = [sys.executable, "-c", ASK, json.dumps(args)]
    found = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    return found.stdout, found.stderr.splitlines()[-1]


@pytest.mark.parametrize("args", [("--help",), ("generate", "--help"), ("quantize", "--help")], ids=str)
def test_help_imports_neither_jax_nor_the_library(args: tuple[str, ...]) -> None:
    text, heavy = asked(*args)
    assert "Example: lowbit" in text and heavy == "[]"


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("lowbit ge", ["generate"]),
        ("lowbit generate --format q", [name for name in options.FORMATS if name.startswith("q")]),
        ("lowbit bench --formats q4,nv", ["q4,nvfp4"]),
        ("lowbit quantize a b --req", ["--requantize"]),
    ],
)
def test_completion_imports_neither_jax_nor_the_library(words: str, wanted: list[str]) -> None:
    last = str(len(words.split()) - 1)
    text, heavy = asked(_LOWBIT_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=last)
    assert text.split() == wanted and heavy == "[]"


def test_the_help_has_the_formats_of_the_library() -> None:
    assert options.FORMATS == tuple(lowbit.FORMATS)[: len(options.FORMATS)]
    assert "nvfp4" in options.FORMATS and set(options.FORMATS) >= {str(name) for name in lowbit.QuantizationType}


# --- tables

HEAD = ("format", "bits", "MB", "peak MB", "perplexity", "KL", "top-1", "prompt tok/s", "tok/s")
ROWS = [
    ("float32", "32.00", "538.1", "549.9", "23.019", "0.00000", "100.0%", "236", "21.9"),
    ("q4, embedding int8", "5.17", "86.9", "98.7", "27.411", "0.18402", "79.1%", "1305", "117.0"),
]


@pytest.mark.parametrize("width", [60, 80, 100, None])
def test_a_table_fits_the_terminal_and_loses_no_column(width: int | None) -> None:
    lines = printing.table_lines(HEAD, ROWS, width, right=True)
    assert width is None or max(map(len, lines)) <= width
    text = "\n".join(lines)
    for cell in (*HEAD, *ROWS[0], *ROWS[1]):
        assert cell in text
    assert (len(lines) == 3) == (width in (100, None))


def test_long_names_are_abbreviated_in_the_middle() -> None:
    name = "model.layers.11.self_attn.q_proj.weight.with.a.long.name"
    lines = printing.table_lines(("name", "shape", "bytes"), [(name, "576x1536", "1,234,567")], 60)
    assert max(map(len, lines)) <= 60 and lines[1].endswith("576x1536  1,234,567")
    assert lines[1].startswith("model.layers.11") and "\N{HORIZONTAL ELLIPSIS}" in lines[1]
    assert printing.abbreviated("abcdefgh", 5) == "ab\N{HORIZONTAL ELLIPSIS}gh"
    assert printing.abbreviated("abcde", 5) == "abcde"


@pytest.mark.parametrize("end", ["self_attn.q_proj.weight", "a.rather.long.name.of.a.block.self_attn.q_proj.weight"])
def test_abbreviated_names_stay_distinct(end: str) -> None:
    head, names = ("name", "shape", "error", "largest difference"), [f"model.stage.layers.{i}.{end}" for i in range(12)]
    lines = printing.table_lines(head, [(name, "4096x4096", "0.075392", "0.3216") for name in names], 60)
    assert max(map(len, lines)) <= 60
    blocks = "\n".join(line.split("  ")[0] if line else "" for line in lines).split("\n\n")
    for block in blocks:
        assert len(set(re.findall(r"layers\.\d+", block))) == 12, block


def test_a_file_or_pipe_gets_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert printing.terminal_width() is None
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "72")
    assert printing.terminal_width() == 72
    monkeypatch.setenv("COLUMNS", "10")
    assert printing.terminal_width() == 60


@pytest.mark.parametrize("command", ["inspect", "quantize", "compare"])
def test_tables_of_the_commands_fit(command: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(printing, "terminal_width", lambda: 60)
    args = {"inspect": (tiny,), "compare": (tiny, tiny), "quantize": (tiny, tmp_path / "out.safetensors")}[command]
    lines = [line for line in run(command, *args).stdout.splitlines() if not line.startswith(str(tmp_path))]
    assert max(map(len, lines)) <= 60 and any(line.startswith("blk.1.ffn_down.weight") for line in lines)


# --- progress


def test_without_a_terminal_progress_is_plain_lines(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert run("compare", tiny, tiny).stderr == ""  # soon done
    monkeypatch.setattr(progress, "EVERY", 0.0)
    lines = run("compare", tiny, tiny).stderr.splitlines()
    assert lines[0] == "comparing: 0 of 20" and lines[-1].startswith("comparing: 19 of 20, ")
    assert lines[-1].endswith(" s left") and not any("\x1b" in line or "\r" in line for line in lines)
    lines = run("quantize", tiny, tmp_path / "out.safetensors").stderr.splitlines()
    assert any(line.startswith("out.safetensors: ") and " MB" in line for line in lines)


def test_a_bar_keeps_its_numbers_on_one_line() -> None:
    console = Console(width=60, file=(out := io.StringIO()))
    bar = progress._bar(console, DownloadColumn, TransferSpeedColumn, TimeRemainingColumn)
    bar.add_task("a-rather-long-name-of-a-file.safetensors", total=8_000_000, completed=4_000_000)
    console.print(bar.get_renderable())
    (line,) = out.getvalue().splitlines()
    assert line.startswith("a-rather-") and "4.0/8.0 MB" in line


def terminal_of(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    out = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda **_: Console(file=out, force_terminal=True, width=80))
    return out


def test_generate_shows_a_bar_only_if_it_quantizes(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("quantize", tiny, tmp_path / "q4", "--format", "q4")
    out, given = terminal_of(monkeypatch), ("generate", "a low", "--raw", "--tokens", 1, "--model")
    run(*given, tmp_path / "q4")
    assert out.getvalue() == ""
    run(*given, tiny)
    assert "quantizing" in out.getvalue() and "0.0/" in out.getvalue() and "bytes" not in out.getvalue()


def test_a_bar_has_no_numbers_until_the_total_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    out = terminal_of(monkeypatch)
    with progress.counted("quantizing") as (update, _, say):
        say("window 1 of 2")
        assert "quantizing: window 1 of 2" in out.getvalue() and "bytes" not in out.getvalue()
        update(0, 2_000_000)
        update(1_000_000, 2_000_000)
    assert "1.0/2.0 MB" in out.getvalue() and "bytes" not in out.getvalue()


def test_lines_come_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    said: list[str] = []
    lines = progress.Lines("reading", said.append)
    for done in range(30, 101, 10):
        lines.update(done, 100)
        now += 4.0
    lines.say("the end")
    assert said == ["reading: 60 of 100, 16 s left", "reading: 90 of 100, 4 s left"]
    assert progress.seconds(200) == "3 min 20 s" and progress.seconds(-1) == "0 s"


# --- other libraries


def test_bench_says_which_libraries_are_missing_and_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    text = run("bench", "--peers", "--size", 64, "--rows", 1, "--repeat", 1, "--formats", "q4").stdout
    assert "onnxruntime is not installed, and is left out: pip install onnxruntime onnx." in text
    assert "pip install openvino." in text and "pip install xllamacpp." in text


def test_bench_compares_with_the_libraries_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def products(w: Any, x: Any, total: int, note: Any) -> dict[str, peers.Product]:
        note("it has no u4")
        calls = [lambda: x @ w] * 2
        return {"peer 4-bit": peers.Product(calls, 1, "q4 fast"), "peer nf4": peers.Product(calls, 1, "nf4 exact")}

    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    monkeypatch.setattr(peers, "products", products)
    notes: list[str] = []
    rows = {t.product: t for t in bench.products(64, [2], 2, ["q4"], notes.append)}
    own, peer = rows["q4 fast"], rows["peer 4-bit"]
    assert peer.like == "q4 fast" and peer.ratio == pytest.approx(peer.microseconds / own.microseconds)
    assert rows["peer nf4"].ratio is None and own.ratio is None and own.like is None and notes == ["it has no u4"]
    text = run("bench", "--peers", "--size", 64, "--rows", 1, "--repeat", 1, "--formats", "q4").stdout
    assert "(q4 fast)" in text and "it has no u4." in text and text.count("it has no u4") == 1


@pytest.mark.parametrize("rows", ["a", "1,-2", "0", "1.5", "", "1,"])
def test_rows_that_are_not_numbers_are_named(rows: str) -> None:
    assert f"--rows {rows!r} must be positive numbers" in run("bench", "--rows", rows, code=1).stderr


def test_long_reasons_are_continued_and_lose_nothing() -> None:
    reason = "name: (out, in) as in Equinox and Hugging Face"
    rows = [("model.layers.0.self_attn.k_proj.weight", reason), ("total", "")]
    head, *lines = printing.table_lines(("path", "why"), rows, 60)
    assert all(len(line) <= 60 for line in lines) and len(lines) == 3
    assert " ".join(line[head.index("why") :] for line in lines).split() == reason.split()


def test_tables_escape_control_characters() -> None:
    lines = printing.table_lines(("name", "type"), [("\x1b[2Jtitle\nline é", "F32")], None)
    assert lines[1].split() == ["\\x1b[2Jtitle\\nline", "é", "F32"]
