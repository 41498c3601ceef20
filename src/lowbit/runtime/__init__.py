"""Arrays that JAX code takes without their numbers being there. Knows JAX, not quantization."""

from . import _control as _control
from ._array import ImplicitArray as ImplicitArray
from ._array import aux_field as aux_field
from ._array import is_implicit as is_implicit
from ._array import materialize as materialize
from ._interpret import MaterializationWarning as MaterializationWarning
from ._interpret import implicit as implicit
from ._interpret import materialization as materialization
from ._interpret import use_implicit as use_implicit
from ._register import register as register
from ._settings import Setting as Setting
from ._ste import ste as ste
