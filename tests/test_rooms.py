"""The shape of the sources: imports between rooms are those in CONTRIBUTING.md, and nothing is too long."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lowbit

PACKAGE = Path(lowbit.__file__).parent
GUIDE = Path(__file__).parent.parent / "CONTRIBUTING.md"


@functools.cache
def table() -> dict[str, set[str]]:
    """The modules that each room may import, as the guide has them."""
    rows = re.findall(r"^\| `(\w+)`[^|]*\|[^|]*\|([^|]*)\|$", GUIDE.read_text("utf-8"), re.MULTILINE)
    return {room: set(re.findall(r"`([\w.]+)`", allowed)) for room, allowed in rows}


@functools.cache
def rooms() -> dict[str, list[Path]]:
    """The source files of each room. The package's own module imports them all, to export their names."""
    found: dict[str, list[Path]] = {}
    for path in PACKAGE.rglob("*.py"):
        found.setdefault(path.relative_to(PACKAGE).parts[0].removesuffix(".py"), []).append(path)
    return {room: paths for room, paths in found.items() if not room.startswith("_")}


@functools.cache
def is_module(name: str) -> bool:
    path = PACKAGE.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def imported(source: str, package: str) -> Iterator[str]:
    """The modules and private names of lowbit that a source imports, without the leading `lowbit.`.

    "lowbit" is the package itself.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            inner = module.removeprefix("lowbit").lstrip(".")
            below = [f"{inner}.{alias.name}".lstrip(".") for alias in node.names]
            inside = [is_module(name) or is_private(name.rpartition(".")[2]) for name in below]
            names = [f"lowbit.{name}" if found else module for name, found in zip(below, inside, strict=True)]
        else:
            continue
        for name in names:
            if name == "lowbit" or name.startswith("lowbit."):
                yield name.removeprefix("lowbit.")


def is_allowed(module: str, allowed: set[str]) -> bool:
    return module in allowed or (not is_private(module) and any(module.startswith(f"{name}.") for name in allowed))


def test_the_table_has_every_room() -> None:
    assert set(table()) == set(rooms())


@pytest.mark.parametrize("room", sorted(rooms()))
def test_a_room_imports_what_the_table_allows_and_all_of_it(room: str) -> None:
    allowed, used = table()[room], set[str]()
    for path in rooms()[room]:
        package = ".".join(["lowbit", *path.relative_to(PACKAGE).parts[:-1]])
        for module in imported(path.read_text("utf-8"), package):
            if module.split(".")[0] != room:
                assert is_allowed(module, allowed), f"{path} imports {module}"
                used.add(module)
    for name in allowed:
        assert any(module == name or module.startswith(f"{name}.") for module in used), f"{room} does not use {name}"


def test_what_the_check_sees() -> None:
    source = "from . import _blocks\nfrom .. import io\nfrom ..io._convert import x\nimport lowbit.ops.take\nimport jax"
    assert list(imported(source, "lowbit.formats")) == ["formats._blocks", "io", "io._convert", "ops.take"]
    assert list(imported("from lowbit import FORMATS, runtime", "lowbit.cli")) == ["lowbit", "runtime"]
    assert list(imported("from lowbit.dispatch import _kernels", "lowbit.cli")) == ["dispatch._kernels"]
    assert is_allowed("io.readers", {"io"}) and not is_allowed("io._convert", {"io"})
    assert is_allowed("io._convert", {"io", "io._convert"}) and not is_allowed("iota", {"io"})


def test_files_have_at_most_500_lines_and_functions_60() -> None:
    root = GUIDE.parent
    for folder in ("src", "tests", "benchmarks", "examples", "docs"):
        for path in (root / folder).rglob("*.py"):
            source = path.read_text("utf-8")
            assert source.count("\n") <= 500, path
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
                    assert node.end_lineno - node.lineno < 60, f"{path}:{node.lineno} {node.name}"
    for path in (root / "csrc").iterdir():
        assert path.read_text("utf-8").count("\n") <= 500, path
