"""What the bits mean. One file per format; no primitives, no platforms.

A format of your own is a subclass of `QuantizedArray` written with the functions below: `examples/new_format.py`.
"""

from ._blocks import WHOLE as WHOLE
from ._blocks import block_max as block_max
from ._blocks import block_sum as block_sum
from ._blocks import pack as pack
from ._blocks import spread as spread
from ._blocks import unpack as unpack
from ._inputs import axis_spans as axis_spans
from ._inputs import checked_input as checked_input
from ._inputs import finite_or_nan as finite_or_nan
from ._inputs import raise_if_not_finite as raise_if_not_finite
from ._quantized import QuantizedArray as QuantizedArray
from ._quantized import stored as stored
from ._table import FORMATS as FORMATS
from ._table import Format as Format
from ._table import register_format as register_format
from .int8 import Array8B as Array8B
from .nf4 import ArrayNF4 as ArrayNF4
from .onebit import Array1B as Array1B
