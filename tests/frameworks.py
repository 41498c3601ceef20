"""Run models of other libraries, each family of packages in an environment of its own with pinned versions.

Usage: python tests/frameworks.py WHEEL [FAMILY...]; all families by default.

A family is a list of pinned packages, tests/families/NAME.txt. Its environment, .venv-frameworks-NAME, is kept and
updated when the list changes. In it run the code blocks of docs/frameworks.md that name the family, and the models of
tests/families/models_NAME.py.
"""

import os
import re
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
FAMILIES = ROOT / "tests" / "families"
BLOCK = re.compile(r"<!-- frameworks: (\w+) -->\n```py\n(.*?)```", re.S)


def families() -> list[str]:
    return sorted(path.stem for path in FAMILIES.glob("*.txt"))


def blocks(family: str) -> list[str]:
    """The code blocks of the page that run in a family's environment."""
    return [code for name, code in BLOCK.findall((ROOT / "docs" / "frameworks.md").read_text()) if name == family]


def environment(family: str, wheel: Path) -> Path:
    """The Python of a family, with its packages and the wheel."""
    folder, wanted = ROOT / f".venv-frameworks-{family}", FAMILIES / f"{family}.txt"
    python, installed = folder / "bin" / "python", folder / "installed.txt"
    install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-compile", "--no-deps"]
    if not installed.exists() or installed.read_text() != wanted.read_text():
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([*install, "-r", wanted], check=True)
        installed.write_text(wanted.read_text())
    subprocess.run([*install, "--force-reinstall", wheel], check=True)
    return python


def run(family: str, python: Path) -> None:
    # Some packages write to the home directory or ask a server for news; no test needs either.
    settings = {**os.environ, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "JAX_PLATFORMS": "cpu"}
    for code in blocks(family):
        subprocess.run([python, "-c", code], check=True, cwd=ROOT / "build", env=settings)
    tests = [python, "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider", FAMILIES / f"models_{family}.py"]
    subprocess.run(tests, check=True, cwd=ROOT, env=settings)


if __name__ == "__main__":
    wheel, *chosen = sys.argv[1:]
    if unknown := sorted(set(chosen) - set(families())):
        sys.exit(f"There is no family {', '.join(unknown)}: choose from {', '.join(families())}.")
    (ROOT / "build").mkdir(exist_ok=True)
    failed = []
    for family in chosen or families():
        print("frameworks:", family, flush=True)
        start = time.monotonic()
        try:
            python = environment(family, Path(wheel).resolve())
            installed = time.monotonic()
            run(family, python)
            print(
                f"{family}: {installed - start:.0f} s to install, {time.monotonic() - installed:.0f} s to run",
                flush=True,
            )
        except subprocess.CalledProcessError as error:
            print(error, file=sys.stderr, flush=True)
            failed.append(family)
    sys.exit(f"Failed: {', '.join(failed)}." if failed else 0)
