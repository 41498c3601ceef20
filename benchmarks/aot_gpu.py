"""What NVIDIA's compilers report for the kernel, without a GPU. Run by aot.py, after `make test-gpu-aot`.

`ptxas` and XLA report registers, spills and shared memory of the compiled kernel. Bytes are counted by running the
kernel's own addresses over the programs of one tile of columns, since all tiles are alike, in sectors of 32 bytes:
`weight` is how often each stored byte is loaded, `moved` everything that programs load and store (most of x from the L2
cache), `least` the stored weight, x and y once. `bound` is the time to move `least` at the published bandwidth of the
chip: no kernel can be faster.
"""

import itertools
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import measure
import numpy as np

jax.config.update("jax_platforms", "cpu")  # before JAX detects devices

SECTOR = 32


class Place:
    """`operand.at`: indexing it gives the operand and the index."""

    def __init__(self, operand: "Operand"):
        self.operand = operand

    def __getitem__(self, place: Any) -> Any:
        return self.operand, place


class Operand:
    """An array of which only the addresses matter; records the accesses to it."""

    def __init__(self, shape: Any, dtype: Any):
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.elements, self.bytes = 0, 0
        self.at = Place(self)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, place: Any) -> int:
        return 0

    def touch(self, place: Any, mask: Any) -> None:
        number = np.zeros((), np.int64)
        for index, length in zip(place, self.shape, strict=True):
            number = number * length + index
        number = np.broadcast_to(number, np.broadcast_shapes(number.shape, np.shape(mask)))[
            np.broadcast_to(mask, number.shape)
        ]
        self.elements += number.size
        self.bytes += SECTOR * np.unique(number * self.dtype.itemsize // SECTOR).size


def counted(x: Any, w: Any, contract: int, dtype: Any) -> dict[str, Operand]:
    """The operands of a product after the kernel ran over its grid, without its arithmetic.

    Columns must fill their tiles: then each tile of columns accesses as much as the first, which is counted.
    """
    from lowbit.kernels.gpu import kernel
    from lowbit.kernels.gpu.tiling import tiling_for
    from lowbit.kernels.product import Product

    tiling = tiling_for(Product(x, w, contract, dtype))
    (m, _), n, tile = x.shape, w.shape[-3 - contract], tiling.tile

    def load(place: Any, mask: Any = True, other: Any = 0) -> Any:
        found, index = place
        found.touch(index, mask)
        return np.zeros(np.shape(mask), np.float32)

    def loop(start: Any, stop: Any, step: Any, carry: Any) -> Any:
        for i in range(int(start), int(stop)):
            carry = step(i, carry)
        return carry

    operands = {
        "x": Operand((1, *x.shape), x.dtype),
        **{name: Operand((1, *stored.shape), stored.dtype) for name, stored in w.components().items()},
        "y": Operand((tile.splits, 1, m, n), dtype if tile.splits == 1 else np.float32),
    }
    numpy = SimpleNamespace(arange=np.arange, zeros=np.zeros, minimum=np.minimum, float32=np.float32, int32=np.int32)
    empty = np.zeros((tile.rows, tile.columns), np.float32)
    program = mock.Mock()
    changes = {
        "triton": SimpleNamespace(load=load, store=lambda place, value, mask: load(place, mask)),
        "pl": SimpleNamespace(program_id=program),
        "lax": SimpleNamespace(fori_loop=loop, dot_general=lambda *args, **options: empty),
        "jnp": numpy,
        "planes": lambda tiles, packing: [],
        "_side_by_side": lambda planes: np.float32(0),
        "split": lambda *args: [None],
    }
    rows, tiles, left = -(-m // tile.rows), n // tile.columns, n % tile.columns
    if left:
        raise ValueError(f"{n} columns do not fill tiles of {tile.columns}.")
    with mock.patch.multiple(kernel, **changes):
        for share, row in itertools.product(range(tile.splits), range(rows)):
            program.return_value = share * tiles * rows + row
            kernel._kernel(
                np.zeros(1, np.int32), *operands.values(), w=w, contract=contract, tiling=tiling, precision=None
            )
    for found in operands.values():
        found.elements, found.bytes = found.elements * tiles, found.bytes * tiles
    return operands


def run(args: Any) -> None:
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    import gpu_aot
    import jax.numpy as jnp

    import lowbit

    columns = ("chip", "m", "kernel", "registers", "spills", "shared KiB", "programs", "weight", "moved MB", "least MB")
    report = measure.Report(args, (*columns, "bound us"))
    k, n = 4096, 4096
    for dtype, format, contract, m in itertools.product(
        (jnp.bfloat16, jnp.float32), lowbit.FORMATS, (-2, -1), (1, 16, 256)
    ):
        if format not in gpu_aot.MAIN and dtype == jnp.float32:
            continue
        w = jax.eval_shape(lambda f=format, c=contract: lowbit.FORMATS[f].quantize(jnp.zeros((k, n)), axis=c))
        x = jax.ShapeDtypeStruct((m, k), dtype)
        of = counted(x, w, contract, np.dtype(dtype))
        y = of["y"]
        least = sum(operand.nbytes for name, operand in of.items() if name != "y") + m * n * np.dtype(dtype).itemsize
        sums = y.bytes + m * n * np.dtype(dtype).itemsize if y.shape[0] > 1 else 0  # read again, and written
        moved = sum(operand.bytes for operand in of.values()) + sums
        for chip, chip_values in gpu_aot.CHIPS.items():
            found = gpu_aot.compiled(chip, format, contract, m, k, n, dtype)
            name = f"{format} {'x @ w' if contract == -2 else 'x @ w.T'} {np.dtype(dtype).name}"
            said = (found["registers"], found["spills"], found["shared"] / 1024, found["programs"])
            bound = least / chip_values[-1] / 1e3
            read = of["codes"].elements / math.prod(of["codes"].shape)
            report.row(chip, m, name, *said, read, moved / 1e6, least / 1e6, bound)
    report.save()
