"""What the bits mean. One file per format; no primitives, no platforms."""

from ._quantized import FORMATS as FORMATS
from ._quantized import Format as Format
from ._quantized import QuantizedArray as QuantizedArray
from ._quantized import register_format as register_format
from .int8 import Array8B as Array8B
from .nf4 import ArrayNF4 as ArrayNF4
from .onebit import Array1B as Array1B
