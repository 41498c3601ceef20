"""Low-rank adapters over frozen weights."""

from lowbit import formats as formats  # first: rules of quantized arrays are older than those of adapters

from . import rules as rules  # registers how primitives act on a LoraArray
