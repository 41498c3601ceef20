"""The API reference from the docstrings: python docs/reference.py build/docs

pdoc documents what a module defines. The names of `lowbit` are defined in its rooms, so this lists them for pdoc, and
finds the docstrings that stand below variables there.
"""

import inspect
import sys
from pathlib import Path

import jax
import pdoc.doc
import pdoc.render

import lowbit

PAGES = (
    "lowbit",
    "lowbit.formats",
    "lowbit.formats.int8",
    "lowbit.formats.nf4",
    "lowbit.formats.onebit",
    "lowbit.testing",
)


def public_names(module) -> list[str]:
    return [name for name, value in vars(module).items() if not name.startswith("_") and not inspect.ismodule(value)]


def variable_docstrings() -> dict[str, str]:
    found = {}
    for name, module in sorted(sys.modules.items()):
        if name.startswith("lowbit."):
            found |= pdoc.doc.Module(module)._var_docstrings
    return found


def write(directory: Path) -> None:
    docstrings = variable_docstrings()
    jax.Array.__qualname__ = "Array"  # else types would show the inner module of JAX that defines it
    for package in (lowbit, lowbit.formats):
        package.__all__ = public_names(package)
    pdoc.render.configure(search=True)
    modules = {name: pdoc.doc.Module.from_name(name) for name in PAGES}
    for module in modules.values():
        for variable in module.variables:
            variable.docstring = variable.docstring or docstrings.get(variable.name, "")
            if isinstance(getattr(module.obj, variable.name), dict | lowbit.runtime.Setting):
                variable.default_value = inspect.Parameter.empty  # changes, and says nothing here
    for name, module in modules.items():
        path = directory / f"{name.replace('.', '/')}.html"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(pdoc.render.html_module(module, modules))
    (directory / "index.html").write_text(pdoc.render.html_index(modules))
    (directory / "search.js").write_text(pdoc.render.search_index(modules))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
