"""eformer's modules, served by the drop-in, and the arrays that its tests share."""

import importlib

from helpers import gaussian

import lowbit.compat.eformer  # noqa: F401 - serves eformer's module paths

quantization = importlib.import_module("eformer.ops.quantization")
jaximus = importlib.import_module("eformer.jaximus")
escale = importlib.import_module("eformer.escale")
functions = importlib.import_module("eformer.ops.quantization.quantization_functions")
MODULES = {
    name: importlib.import_module(f"eformer.ops.quantization.implicit_array_{name}") for name in ("1bit", "8bit", "nf4")
}

W = gaussian(0, (128, 256)) / 8
X = gaussian(1, (32, 128))
