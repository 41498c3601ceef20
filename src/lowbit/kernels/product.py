"""The description of a product, which every platform's kernel takes."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from lowbit.formats.quantized import QuantizedArray

_STATIC = ("contract", "dtype", "precision", "out_sharding", "arithmetic")


@partial(jax.tree_util.register_dataclass, data_fields=("x", "w", "sizes"), meta_fields=_STATIC)
@dataclass(frozen=True)
class Product:
    """y[*batch, *rows, n] = sum_k x[*batch, *rows, k] * w[*batch, k, n], or w[*batch, n, k] for `contract` = -1.

    With `sizes` of shape (*batch, groups), w is of shape (*batch, groups, k, n): the first sizes[..., 0] entries along
    the first axis of the rows are multiplied by the first matrix, the next sizes[..., 1] by the second, and so on.
    Entries beyond the last group give zeros.

    - `contract`: the stored axis of `w` that is summed over, -2 or -1.
    - `dtype`: of the result.
    - `precision`, `out_sharding`: as for `jax.lax.dot_general`.
    - `arithmetic`: "exact", "fast", or None for what the setting `compute` or the array says.

    A pytree of x, the components of w and the sizes; all else is static. Shapes may stand for arrays.
    """

    x: jax.Array
    w: QuantizedArray
    contract: int
    dtype: Any
    precision: Any = None
    out_sharding: Any = None
    arithmetic: str | None = None
    sizes: jax.Array | None = None

    @property
    def batch(self) -> tuple[int, ...]:
        return self.w.shape[: -2 if self.sizes is None else -3]

    @property
    def rows(self) -> tuple[int, ...]:
        return self.x.shape[len(self.batch) : -1]

    @property
    def k(self) -> int:
        """The length of the summed axis."""
        return self.w.shape[self.contract]

    @property
    def n(self) -> int:
        """The number of columns of the result."""
        return self.w.shape[-3 - self.contract]

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.batch, *self.rows, self.n)
