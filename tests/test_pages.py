"""The tables in the README and in docs are those of the committed results."""

import importlib
from types import ModuleType

import pytest


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
