"""The page of a report in headless Chromium: sort, filter, light and dark. `make test-browser` runs it."""

import itertools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import jax.numpy as jnp
import numpy as np
import pytest

import lowbit
from lowbit.models.report import Row

CHROMIUM = os.environ.get("CHROMIUM", "chromium")
HOSTILE = "layers/9/</script><img src=x onerror=document.title='broken'>&\"'\u2028é"


class Page:
    """A page in a browser of its own, driven by the DevTools protocol over pipes: messages of JSON that end in a 0."""

    def __init__(self, path: Path, profile: Path):
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        # The browser reads from 3 and writes to 4. Its ends get other numbers first, since the pipes may be 3 and 4.
        moved = [(to_browser, 100), (from_browser, 101), (100, 3), (101, 4)]
        quiet = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_WRONLY, 0) for number in (1, 2)]
        options = ["--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        self._process = os.posix_spawnp(
            CHROMIUM,
            [CHROMIUM, "--headless", *options, "about:blank"],
            os.environ,
            file_actions=[*((os.POSIX_SPAWN_DUP2, a, b) for a, b in moved), *quiet],
        )
        os.close(to_browser), os.close(from_browser)
        self._number, self._rest, self._session, self.events = 0, b"", None, list[dict[str, Any]]()
        target = next(t for t in self.send("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.send(f"{domain}.enable")
        self.show(width=1200)
        self.send("Page.navigate", url=path.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        os.close(self._out)  # the browser ends with its pipe
        os.waitpid(self._process, 0)
        os.close(self._in)

    def send(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        session = {} if self._session is None else {"sessionId": self._session}
        message = {"id": self._number, "method": method, "params": parameters, **session}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._in, 1 << 16)
            assert more, f"{CHROMIUM} ended by itself."
            self._rest += more
        text, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(text)
        if "method" in message:
            self.events.append(message)
        return message

    def show(self, *, width: int, height: int = 900, scheme: str = "light") -> None:
        """Set the size of the window and the color scheme of the system."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def value(self, script: str) -> Any:
        """Evaluate an expression in the page."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, selector: str, key: str = "Enter", code: int = 13) -> None:
        """Focus an element and press a key."""
        self.value(f"document.querySelector({json.dumps(selector)}).focus()")
        text = {"text": "\r" if key == "Enter" else key} if key != "Delete" else {}
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text)

    def write(self, selector: str, text: str) -> None:
        """Replace the text of a field."""
        self.value(f"document.querySelector({json.dumps(selector)}).select()")
        self.send("Input.insertText", text=text) if text else self.press(selector, "Delete", 46)

    def column(self, number: int) -> list[str]:
        """The text of a column, in the rows that are shown."""
        cells = f"tbody td:nth-child({number})"
        return self.value(f"[...document.querySelectorAll('{cells}')].map(cell => cell.firstChild.textContent)")


@pytest.fixture(scope="module")
def report() -> lowbit.Report:
    draw = np.random.default_rng(0).normal
    names = [f"layers/{i}/{part}/kernel" for i in range(12) for part in ("query", "up", "down")] + [HOSTILE]
    params = {name: jnp.asarray(draw(size=(64, 32)) * 0.02, jnp.float32) for name in names}
    params |= {f"layers/{i}/norm": jnp.ones(64) for i in range(12)}
    rules = {
        "*query*": "int8",
        "*down*": "ternary",
        HOSTILE.replace("[", "?"): lowbit.QuantizationConfig("nf4", axis=-1),
    }
    return lowbit.quantize_tree(params, {**rules, "*": "nf4"}, histograms=8)[1]


@pytest.fixture
def page(report: lowbit.Report, tmp_path: Path) -> Iterator[Page]:
    (tmp_path / "report.html").write_text(report.to_html("Twelve layers"), "utf-8")
    with Page(tmp_path / "report.html", tmp_path / "profile") as page:
        yield page


def test_it_draws_every_tensor_and_loads_nothing(page: Page, report: lowbit.Report) -> None:
    assert not [event for event in page.events if event["method"] == "Runtime.exceptionThrown"]
    loaded = [event["params"]["request"]["url"] for event in page.events if event["method"].endswith("WillBeSent")]
    assert len(loaded) == 1 and loaded[0].endswith("/report.html")
    assert page.value("document.title") == "Twelve layers" and HOSTILE in page.column(1)
    assert sorted(page.column(1)) == sorted(row.path for row in report)
    assert page.value("document.querySelectorAll('#errors circle').length") == len(report.quantized)
    assert page.value("document.querySelectorAll('#sizes g').length") == 12
    shown = page.value(
        "[...document.querySelectorAll('#histograms figure')].map(x => x.querySelectorAll('line').length)"
    )
    assert shown == [len(found.levels) for found in report.histograms] and shown[0] == 3
    titles = page.value("[...document.querySelectorAll('#histograms h3')].map(title => title.textContent)")
    assert titles == [re.sub(r"[/.]", "\\g<0>\u200b", found.path) for found in report.histograms]  # breaks after these
    kept = page.value("[...document.querySelectorAll('#kept summary')].map(x => x.textContent)")
    assert len(kept) == 1 and kept[0].startswith("a vector: 12 tensors, 3.07 kB")


def test_the_table_sorts_by_the_keyboard(page: Page, report: lowbit.Report) -> None:
    heads = "[...document.querySelectorAll('th')].map(x => x.getAttribute('aria-sort'))"
    errors = sorted((row.error for row in report.quantized), reverse=True)
    want = [f"{error:.4f}" for error in errors] + ["\u2013"] * 12  # leaves that were kept come last in either order
    assert page.column(7) == want and page.value(heads) == [None] * 6 + ["descending", None]
    page.press("th:nth-child(7) button")
    assert page.column(7) == want[:-12][::-1] + want[-12:] and page.value(heads)[6] == "ascending"
    page.press("th:nth-child(1) button")
    assert page.value(heads) == ["ascending"] + [None] * 7
    layers = [name.split("/")[1] for name in page.column(1) if name != HOSTILE]
    assert layers == [str(i) for i in range(12) for _ in range(4)]  # 2 before 10


def test_the_table_filters_by_words_and_by_what_was_done(page: Page) -> None:
    page.write("#filter", "LAYERS/1 ternary")
    assert set(page.column(1)) == {f"layers/{i}/down/kernel" for i in (1, 10, 11)}
    assert page.value("document.querySelector('#shown').textContent").startswith("3 of 49 tensors, ")
    page.write("#filter", "")
    assert len(page.column(1)) == 49
    page.press("#kind", "k", 75)  # the first letter of the option to choose
    assert set(page.column(1)) == {f"layers/{i}/norm" for i in range(12)}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1200])
def test_it_is_readable_light_and_dark_wide_and_narrow(width: int, scheme: str, page: Page) -> None:
    page.show(width=width, scheme=scheme)
    other = {"light": "dark", "dark": "light"}[scheme]
    for want in (scheme, other):
        text, ground = (
            page.value(f"getComputedStyle(document.body)['{name}']") for name in ("color", "background-color")
        )
        light, dark = (max(numbers(c)) for c in ((text, ground) if want == "dark" else (ground, text)))
        assert light > 220 and dark < 50, (text, ground)
        page.press("#theme")
    root = "document.documentElement"
    assert page.value(f"{root}.scrollWidth") <= page.value(f"{root}.clientWidth") <= width  # nothing overflows
    page.value("scrollTo(0, scrollY + document.querySelector('tbody').getBoundingClientRect().top + 200)")
    assert 0 <= page.value("document.querySelector('th button').getBoundingClientRect().top") < 20


def numbers(colour: str) -> list[int]:
    return [int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]


@pytest.mark.parametrize("width", [400, 1200])
def test_labels_name_layers_and_do_not_collide(width: int, tmp_path: Path) -> None:
    layers = [f"encoder.layer.{i}" for i in range(60)] + ["embeddings.word_embeddings"]
    rows = [Row(f"{name}.up.weight", (64, 64), "float32", "q4", -1, 4000, 540, 0.08, "fn") for name in layers]
    (tmp_path / "report.html").write_text(lowbit.Report(tuple(rows)).to_html(), "utf-8")
    with Page(tmp_path / "report.html", tmp_path / "profile") as page:
        page.show(width=width)
        for chart in ("sizes", "errors"):
            labels = f"[...document.querySelectorAll('#{chart} .name')]"
            names = page.value(f"{labels}.map(label => label.textContent)")
            assert len(names) > 5 and set(names) <= {name.replace(".", "/") for name in layers}
            places = page.value(f"{labels}.map(label => label.transform.baseVal[0].matrix.e)")
            # They lean by 45 degrees, and a line is 12 pixels high.
            assert all(b - a >= 12 * 2**0.5 for a, b in itertools.pairwise(places))
            low = "getBoundingClientRect().bottom"
            assert page.value(f"{labels}.every(label => label.{low} <= document.getElementById('{chart}').{low})")


def test_shapes_stay_on_one_line_and_calibrated_layers_have_output_errors(tmp_path: Path) -> None:
    rows = [
        Row(
            f"encoder.layer.{i}.weight",
            (30522, 384),
            "float32",
            "q4",
            -1,
            4000,
            540,
            0.08,
            "fn: rows are looked up; no gain from weighted search, not calibrated",
            None,
            0.0000812,
            0.0000811,
        )
        for i in range(3)
    ]
    (tmp_path / "report.html").write_text(lowbit.Report(tuple(rows)).to_html(), "utf-8")
    with Page(tmp_path / "report.html", tmp_path / "profile") as page:
        assert page.value("document.querySelectorAll('#outputs circle').length") == 6  # without and with calibration
        assert page.value("document.getElementById('calibrated').hidden") is False
        assert page.column(8) == ["0.000081\u00a0\u2192\u00a00.000081"] * 3
        for width, cell in ((1200, "td:nth-child(2)"), (400, ".more .whole")):
            page.show(width=width)
            lines = f"[...document.querySelectorAll('{cell}')].map(x => x.getClientRects().length)"
            text = f"[...document.querySelectorAll('{cell}')].map(x => x.textContent)"
            assert page.value(lines) == [1, 1, 1] and page.value(text) == ["30522\u00d7384"] * 3
        for width in (400, 700, 1000, 1040, 1200):
            page.show(width=width)
            root = "document.documentElement"
            assert page.value(f"{root}.scrollWidth") <= page.value(f"{root}.clientWidth"), width
            # The numbers of a row are on one line, also where its name and its reason have lines of their own.
            tops = "cells => new Set(cells.map(cell => Math.round(cell.getBoundingClientRect().top))).size"
            cells = "[...document.querySelectorAll('tbody tr:first-child td.number:not(.wide)')]"
            assert page.value(f"({tops})({cells})") == 1, width
