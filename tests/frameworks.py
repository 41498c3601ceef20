"""Run the code blocks of docs/frameworks.md for packages with pinned versions, each in an environment of its own.

Usage: python tests/frameworks.py WHEEL [WORD...]: only the blocks whose packages have one of these words in them.
"""

import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "frameworks.md"
BLOCK = re.compile(r"<!-- frameworks: (.*?) -->\n```py\n(.*?)```", re.S)


def blocks() -> list[tuple[list[str], str]]:
    """The packages that each block needs, and its code."""
    return [(packages.split(), code) for packages, code in BLOCK.findall(PAGE.read_text())]


def run(wheel: str, packages: list[str], code: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = f"{folder}/bin/python"
        install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*install, wheel, *packages], check=True)
        subprocess.run([python, "-c", code], check=True, cwd=folder)


if __name__ == "__main__":
    wheel, *words = sys.argv[1:]
    for packages, code in blocks():
        if not words or any(word in package for word in words for package in packages):
            print("frameworks:", *packages, flush=True)
            run(str(Path(wheel).resolve()), packages, code)
