"""The pages: tables are those of the committed results, links lead somewhere, every public name is there."""

import ast
import importlib
import pkgutil
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")})
PUBLIC = ("lowbit", "lowbit.formats", "lowbit.io", "lowbit.runtime", "lowbit.testing")


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModuleType:
    monkeypatch.syspath_prepend(str(request.config.rootpath / "benchmarks"))
    return importlib.import_module("page")


@pytest.mark.parametrize(
    "name",
    ["README", "formats", "performance", "sharding", "streaming", "training", "accelerators", "checkpoints", "quality"],
)
def test_tables_are_those_of_the_results(name: str, page: ModuleType) -> None:
    assert name in page.PAGES
    text = page.path_of(name).read_text()
    assert "<!-- end -->" in text and page.rendered(text) == text


def test_the_readme_has_every_format(page: ModuleType) -> None:
    import lowbit
    from lowbit import QuantizationType

    assert set(page.VALUES) == {str(format) for format in QuantizationType} <= set(lowbit.FORMATS)


def test_errors_are_within_their_bounds(page: ModuleType) -> None:
    rows = {row[2]: row[3:5] for row in page.load("formats")["rows"]}
    bounds = {
        "q4": (0.0058, 0.0062),
        "q4, blocks of 16": (0.0046, 0.0048),
        "q3": (0.0238, 0.0256),
        "q2": (0.099, 0.106),
    }
    for format, bound in bounds.items():
        assert all(got <= most for got, most in zip(rows[format], bound, strict=True)), format


def test_speeds_of_products_are_those_of_these_kernels(page: ModuleType) -> None:
    measure = importlib.import_module("measure")
    for name in ("products-avx512", "products-avx2"):
        found = page.load(name)
        assert found["machine"]["kernels"] == measure.kernels_digest(), (
            f"{name}.json was measured with other kernels: run {found['command']}, and benchmarks/page.py"
        )


def anchors(page: Path) -> set[str]:
    """The anchors of the headings of a page, as the site and code hosts make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    heads = (re.sub(r"[`*]|\]\(.*?\)|\[", "", head) for head in re.findall(r"^#+ (.*)$", text, re.MULTILINE))
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", head).strip().lower()) for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)|(?:src|href|srcset)=\"([^\"]+)\"", text):
        target, _, anchor = "".join(link).partition("#")
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        found = page if not target else page.parent / target
        assert found.exists(), f"{page.name} links to {target}, which is not there"
        assert not anchor or anchor in anchors(found), (
            f"{page.name} links to #{anchor}, which {found.name} does not have"
        )


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_in_the_reference(module: str) -> None:
    text = "".join(page.read_text("utf-8") for page in ROOT.glob("docs/reference/*.md"))
    paths = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    assert len(paths) == len(set(paths))
    documented = [pkgutil.resolve_name(path) for path in paths if path != "lowbit.__version__"]
    public = importlib.import_module(module)
    names = [name for name in public.__all__ if f"{module}.{name}" not in paths]
    missing = [name for name in names if not any(getattr(public, name) is thing for thing in documented)]
    assert not missing, f"docs/reference has no page with {', '.join(missing)}: add lines `::: {module}.NAME`"


def test_every_page_is_on_the_site() -> None:
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    listed = set(re.findall(r"\S+\.md", nav))
    assert {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")} <= listed
    assert {f"examples/{path.stem}.md" for path in ROOT.glob("examples/*.py")} <= listed


def test_figures_are_those_of_the_results(page: ModuleType) -> None:
    for name, drawn in page.DRAWN.items():
        found = re.findall(r"<!-- figure ([\w-]+) (\S+) -->", page.path_of(name).read_text("utf-8"))
        for results, file in found:
            text = (page.DOCS / file).read_text("utf-8")
            assert text == drawn(results), f"{file} is not drawn from {results}.json: run benchmarks/page.py {name}"
    assert (page.DOCS / "assets" / "front.svg").exists()


def test_the_readme_needs_what_its_install_line_gives() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    code = "".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    lines = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {
        (alias.name if isinstance(line, ast.Import) else line.module or "") for line in lines for alias in line.names
    }
    assert {name.partition(".")[0] for name in names} <= {"jax", "lowbit", *sys.stdlib_module_names}
