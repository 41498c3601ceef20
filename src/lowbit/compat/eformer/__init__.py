"""eformer's documented module paths, implemented by lowbit: code written for them runs unchanged.

>>> import lowbit.compat.eformer
>>> from eformer.ops.quantization import quantize
>>> import jax.numpy as jnp
>>> (jnp.ones((2, 128)) @ quantize(jnp.ones((128, 256)), dtype="nf4")).shape
(2, 256)

Where lowbit does more, these paths keep eformer's behavior: `quantize(w, dtype="binary" | "ternary")` gives codes
without a scale, with one threshold for the whole array; `block_size` applies to NF4 alone; a config takes precedence
over other arguments; NaN does not raise; `Array8B` takes its components as (scale, weight).
"""

import sys
from types import ModuleType

from . import arrays, escale, functions, handlers, jaximus

_CONFIG = ("QuantizationConfig", "QuantizationType", "quantize", "straight_through")
_ONE_BIT = ("Array1B", "straight_through_1bit")
_EIGHT_BIT = ("Array8B", "straight_through_8bit", "matmul_bf16_int8_weight_only")
_NF4 = ("ArrayNF4", "straight_through_nf4", "safe_materialize", "safe_delete")
_RSR = ("RSROperatorBinary", "RSROperatorTernary")
_KERNELS = ("is_kernel_available", "nf4_use_kernel")


def _public(module: ModuleType) -> dict[str, object]:
    return {name: value for name, value in vars(module).items() if name in module.__all__}


def _from_arrays(*names: str) -> dict[str, object]:
    return {name: getattr(arrays, name) for name in names}


def _modules() -> dict[str, dict[str, object]]:
    quantization = "eformer.ops.quantization"
    switches = {name: getattr(functions, name) for name in _KERNELS}
    shown = (*_CONFIG, *_ONE_BIT, *_EIGHT_BIT[:2], *_NF4[:2], *_RSR)
    names = _from_arrays(*shown) | switches
    return {
        "eformer": {},
        "eformer.ops": names,
        "eformer.escale": {**_public(escale), "__getattr__": escale.__getattr__},
        "eformer.jaximus": _public(jaximus),
        quantization: names,
        f"{quantization}._config": _from_arrays(*_CONFIG),
        f"{quantization}.implicit_array_1bit": _from_arrays(*_ONE_BIT) | handlers.for_format("1bit"),
        f"{quantization}.implicit_array_8bit": _from_arrays(*_EIGHT_BIT) | handlers.for_format("8bit"),
        f"{quantization}.implicit_array_nf4": _from_arrays(*_NF4) | handlers.for_format("nf4"),
        f"{quantization}.implicit_array_rsr": _from_arrays(*_RSR),
        f"{quantization}.quantization_functions": _public(functions),
    }


def _install() -> None:
    found = sys.modules.get("eformer")
    if found is not None:
        where = getattr(found, "__file__", None)
        raise ImportError(
            f"eformer is imported already, from {where}. lowbit.compat.eformer replaces it, so import it first, "
            "before anything that imports eformer."
        )
    for name, contents in _modules().items():
        module = ModuleType(name, f"{name}, implemented by lowbit.")
        module.__dict__.update(contents, __all__=tuple(n for n in contents if not n.startswith("_")))
        module.__path__ = []  # a package whose submodules are those put into sys.modules here
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


_install()
