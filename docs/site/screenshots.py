"""Take the pictures of the documentation again: python docs/site/screenshots.py

A small transformer is quantized by the library and by the command, and its report and its terminal are drawn:
docs/assets/report-light.png, report-dark.png and terminal.svg. Needs Chromium (CHROMIUM= names another) and
`pip install 'lowbit[cli]' pytest`.
"""

import base64
import html
import importlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import lowbit

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "docs" / "assets"

LAYERS, WIDTH = 6, 256
COLUMNS, LINE, CHARACTER = 100, 17, 7.85


def parameters() -> dict:
    """The weights of a transformer, with tails as trained weights have them."""
    draw = np.random.default_rng(0)

    def matrix(*shape: int) -> jax.Array:
        return jnp.asarray(draw.standard_t(8, size=shape) / shape[0] ** 0.5, jnp.float32)

    def block() -> dict:
        return {
            "attention": {name: {"kernel": matrix(WIDTH, WIDTH)} for name in ("query", "key", "value", "out")},
            "mlp": {"up": {"kernel": matrix(WIDTH, 4 * WIDTH)}, "down": {"kernel": matrix(4 * WIDTH, WIDTH)}},
            "norm": {"scale": jnp.ones(WIDTH)},
        }

    return {"embed": {"embedding": matrix(8192, WIDTH)}, "layers": [block() for _ in range(LAYERS)]}


def model(params: dict, ids: jax.Array) -> jax.Array:
    x = params["embed"]["embedding"][ids]
    for layer in params["layers"]:
        weight = {name: part["kernel"] for name, part in (layer["attention"] | layer["mlp"]).items()}
        h = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True)) * layer["norm"]["scale"]
        scores = jax.nn.softmax((h @ weight["query"]) @ (h @ weight["key"]).mT / WIDTH**0.5)
        x = x + scores @ (h @ weight["value"]) @ weight["out"]
        x = x + jax.nn.gelu(x @ weight["up"]) @ weight["down"]
    return x


def report() -> lowbit.Report:
    params, ids = parameters(), jax.random.randint(jax.random.key(0), (2, 4, 64), 0, 8192)
    calibration = lowbit.calibrate(model, params, ids)
    rules = {"*embed*": "int8", "*down*": "q3", "*": "q4"}
    return lowbit.quantize_tree(params, rules, fn=model, args=(ids[0],), calibration=calibration, histograms=4)[1]


def photograph(page: Path, target: Path, scheme: str) -> None:
    """The page down to the last chart."""
    sys.path.insert(0, str(ROOT / "tests"))
    browser = importlib.import_module("browser")  # that of the tests of the report
    with tempfile.TemporaryDirectory() as profile, browser.Page(page, Path(profile)) as shown:
        shown.show(width=1100, scheme=scheme)
        shown.send("Emulation.setScrollbarsHidden", hidden=True)
        shown.value("new Promise(done => setTimeout(done, 300))")  # the charts are drawn for the width
        end = shown.value("document.querySelector('#outputs').parentNode.getBoundingClientRect().bottom")
        clip = {"x": 0, "y": 0, "width": 1100, "height": int(end) + 20, "scale": 1}
        taken = shown.send("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        target.write_bytes(base64.b64decode(taken["data"]))


def terminal(command: str, folder: Path) -> str:
    """What a command prints in a terminal of 100 columns, as SVG."""
    shown = dict(os.environ, COLUMNS=str(COLUMNS), TERM="xterm-256color", NO_COLOR="1")
    ran = subprocess.run(
        [sys.executable, "-m", "lowbit", *command.split()[1:]],
        cwd=folder,
        env=shown,
        text=True,
        capture_output=True,
        check=True,
    )
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", ran.stdout)
    lines = [f"$ {command}", *(line.rstrip() for line in text.splitlines())]
    width, height = max(map(len, lines)) * CHARACTER + 32, len(lines) * LINE + 28
    kinds = ["typed"] + ["printed"] * len(lines)
    rows = "\n".join(
        f'<text class="{kinds[i]}" x="16" y="{26 + LINE * i}">{html.escape(line)}</text>'
        for i, line in enumerate(lines)
    )
    style = (
        "text { font: 13px ui-monospace, 'DejaVu Sans Mono', Menlo, monospace; white-space: pre }"
        " .printed { fill: #d5dbe1 } .typed { fill: #7ee787 } rect { fill: #16191d }"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img" '
        f'aria-label="{html.escape(command)}">\n<style>{style}</style>\n'
        f'<rect width="{width:.0f}" height="{height}" rx="6"/>\n{rows}\n</svg>\n'
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "report.html").write_text(report().to_html("A small transformer, calibrated"), "utf-8")
        for scheme in ("light", "dark"):
            photograph(folder / "report.html", ASSETS / f"report-{scheme}.png", scheme)
        few = {**parameters(), "layers": parameters()["layers"][:1]}
        lowbit.save(folder / "model.safetensors", few)
        drawn = terminal("lowbit quantize model.safetensors q4.safetensors --format q4 --rule *embed*=int8", folder)
        (ASSETS / "terminal.svg").write_text(drawn, "utf-8")


if __name__ == "__main__":
    main()
