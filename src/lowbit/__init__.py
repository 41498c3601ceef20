"""Low-bit arrays for JAX: weights stored in 8, 4, 2 or 1 bits that still behave like arrays."""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import rules, testing
    from ._version import __version__
    from .adapters.array import LoraArray
    from .adapters.tree import lora, merge
    from .calibration.allocation import allocate
    from .calibration.collect import calibrate
    from .calibration.compare import OutputComparison, compare_outputs
    from .calibration.statistics import Calibration
    from .compat.eformer_names import (
        matmul_bf16_int8_weight_only,
        safe_materialize,
        straight_through_1bit,
        straight_through_8bit,
        straight_through_nf4,
    )
    from .config import QuantizationConfig, QuantizationType, quantize, straight_through
    from .dispatch import compute, is_kernel_available, use_kernel
    from .formats import FORMATS, Array1B, Array8B, ArrayNF4, Format, PermutedArray, QuantizedArray, register_format
    from .io import load, load_metadata, save
    from .kernels.export import export_checks
    from .models.partition import combine, is_frozen, is_quantized, partition, trainable, tree_map
    from .models.patterns import Rule
    from .models.qat import learned_scales, straight_through_tree
    from .models.report import Report
    from .models.sharding import shardings, specs
    from .models.tree import dequantize_tree, quantize_tree
    from .runtime import (
        ImplicitArray,
        MaterializationWarning,
        aux_field,
        implicit,
        materialization,
        materialize,
        register,
        ste,
        use_implicit,
    )

__all__ = [
    "FORMATS",
    "Array1B",
    "Array8B",
    "ArrayNF4",
    "Calibration",
    "Format",
    "ImplicitArray",
    "LoraArray",
    "MaterializationWarning",
    "OutputComparison",
    "PermutedArray",
    "QuantizationConfig",
    "QuantizationType",
    "QuantizedArray",
    "Report",
    "Rule",
    "__version__",
    "allocate",
    "aux_field",
    "calibrate",
    "combine",
    "compare_outputs",
    "compute",
    "dequantize_tree",
    "export_checks",
    "implicit",
    "is_frozen",
    "is_kernel_available",
    "is_quantized",
    "learned_scales",
    "load",
    "load_metadata",
    "lora",
    "materialization",
    "materialize",
    "matmul_bf16_int8_weight_only",
    "merge",
    "partition",
    "quantize",
    "quantize_tree",
    "register",
    "register_format",
    "rules",
    "safe_materialize",
    "save",
    "shardings",
    "specs",
    "ste",
    "straight_through",
    "straight_through_1bit",
    "straight_through_8bit",
    "straight_through_nf4",
    "straight_through_tree",
    "testing",
    "trainable",
    "tree_map",
    "use_implicit",
    "use_kernel",
]

# The public names of each module, which is imported when one of them is first used: `lowbit --help` needs no JAX.
_HOMES = {
    "_version": "__version__",
    "adapters.array": "LoraArray",
    "adapters.tree": "lora merge",
    "calibration.allocation": "allocate",
    "calibration.collect": "calibrate",
    "calibration.compare": "OutputComparison compare_outputs",
    "calibration.statistics": "Calibration",
    "compat.eformer_names": "matmul_bf16_int8_weight_only safe_materialize "
    "straight_through_1bit straight_through_8bit straight_through_nf4",
    "config": "QuantizationConfig QuantizationType quantize straight_through",
    "dispatch": "compute is_kernel_available use_kernel",
    "formats": "FORMATS Array1B Array8B ArrayNF4 Format PermutedArray QuantizedArray register_format",
    "io": "load load_metadata save",
    "kernels.export": "export_checks",
    "models.partition": "combine is_frozen is_quantized partition trainable tree_map",
    "models.patterns": "Rule",
    "models.qat": "learned_scales straight_through_tree",
    "models.report": "Report",
    "models.sharding": "shardings specs",
    "models.tree": "dequantize_tree quantize_tree",
    "runtime": "ImplicitArray MaterializationWarning aux_field implicit materialization materialize register "
    "ste use_implicit",
}


def __getattr__(name: str) -> Any:
    """Import a public name, or a module of the package, when it is first used."""
    home = next((module for module, names in _HOMES.items() if name in names.split()), None)
    if home is not None:
        value = getattr(importlib.import_module(f".{home}", __name__), name)
    elif name.startswith("__") or importlib.util.find_spec(f"{__name__}.{name}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    else:
        value = importlib.import_module(f".{name}", __name__)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
