"""The API reference from the docstrings: python docs/reference.py build/docs

pdoc finds the docstrings of variables only in the module that defines them. Those of `lowbit` are defined in its rooms,
so this collects them there.
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


def variable_docstrings() -> dict[str, str]:
    found = {}
    for name, module in sorted(sys.modules.items()):
        if name.startswith("lowbit."):
            variables = pdoc.doc.Module(module).variables
            found |= {variable.name: variable.docstring for variable in variables if variable.docstring}
    return found


def write(directory: Path) -> None:
    docstrings = variable_docstrings()
    jax.Array.__qualname__ = "Array"  # else types would show the inner module of JAX that defines it
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
