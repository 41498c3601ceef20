"""The rules of quantized arrays: what each JAX primitive does with a `QuantizedArray` of any format."""

from . import contraction as contraction
from . import convolution as convolution
from . import elementwise as elementwise
from . import joining as joining
from . import lookup as lookup
from . import permuted as permuted
from . import structural as structural
