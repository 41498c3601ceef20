"""Reading the weights of quantized checkpoints in chunks."""

from typing import Any

import jax
import numpy as np

from lowbit.formats.blocks import WHOLE

from .._chunks import Chunked, struct_of
from .._maps import release
from .._regions import Region
from ..checkpoints import Weight


def weight_chunks(weight: Weight, *, as_stored: bool) -> Chunked:
    """A weight in chunks of rows of its first stored axis, with the stored bits or as float32."""
    axis = 0 if as_stored else weight.row_axis
    units = [WHOLE] * len(weight.shape)
    if as_stored or not weight.rows_are_ordered:
        units[axis] = weight.unit if as_stored else weight.unit or 1  # values can be read without the others of a scale
    structs: dict[str, Any] = {name: jax.ShapeDtypeStruct(*like) for name, like in weight.like().items()}
    structs |= {name: struct_of(x) for name, x in weight.scales.items()}
    like = weight.built(weight.stored_shape, structs) if as_stored else jax.ShapeDtypeStruct(weight.shape, np.float32)

    def read(region: Region) -> Any:
        if as_stored:
            found = weight.rows(*region[axis])
        else:
            found = weight.dense(np.float32) if weight.rows_are_ordered else weight.values(*region[axis])
        release()
        return found

    return Chunked(like, units, read)
