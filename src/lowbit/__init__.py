"""Low-bit arrays for JAX: weights in 8, 4, 2 or 1 bits that go on being arrays."""

from . import rules as rules
from .formats import FORMATS as FORMATS
from .formats import Array1B as Array1B
from .formats import Array8B as Array8B
from .formats import ArrayNF4 as ArrayNF4
from .formats import Format as Format
from .formats import QuantizedArray as QuantizedArray
from .formats import register_format as register_format
from .runtime import ImplicitArray as ImplicitArray
from .runtime import MaterializationWarning as MaterializationWarning
from .runtime import aux_field as aux_field
from .runtime import implicit as implicit
from .runtime import materialization as materialization
from .runtime import materialize as materialize
from .runtime import register as register
from .runtime import ste as ste
from .runtime import use_implicit as use_implicit
