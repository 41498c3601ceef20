"""How a primitive acts on any QuantizedArray. One rule per primitive; no format names."""

from . import contraction as contraction
from . import convolution as convolution
from . import elementwise as elementwise
from . import joining as joining
from . import lookup as lookup
from . import permuted as permuted
from . import structural as structural
