"""Plain JAX programs `(x, p) -> result` on an activation and a dict of weights, quantized or not.

A feature marked *fused* must not go dense anywhere.
"""

import features_operations as features_operations
import features_programs as features_programs
from features_registry import ANY, FUSED
from features_registry import LAYOUT_MATTERS as LAYOUT_MATTERS

ALL = {**FUSED, **ANY}
