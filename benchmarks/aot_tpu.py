"""What the TPU compiler reports for each kernel, without a chip. Run by aot.py."""

import itertools
import math
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DUMPS = Path(tempfile.mkdtemp(prefix="lowbit-aot-"))
# Read when the TPU library is loaded.
os.environ.update(
    JAX_PLATFORMS="cpu",
    TPU_SKIP_MDS_QUERY="1",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_ACCELERATOR_TYPE="v5litepod-4",
    LOWBIT_NATIVE="0",
    LIBTPU_INIT_ARGS=f"--xla_jf_dump_to={DUMPS} --xla_jf_dump_llo_text=true",
)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec  # noqa: E402
from measure import Report  # noqa: E402

from lowbit import FORMATS  # noqa: E402
from lowbit.formats import packed  # noqa: E402
from lowbit.kernels.product import Product  # noqa: E402
from lowbit.kernels.tpu.blocks import in_specs, out_spec  # noqa: E402
from lowbit.kernels.tpu.kernel import Kernel, matmul  # noqa: E402
from lowbit.kernels.tpu.tiling import tiling_for  # noqa: E402

# The topology to compile for, and the published bandwidth of one device in GB/s (half a chip for tpu7x).
CHIPS = {
    "v5e": ("v5e:2x2", 819),
    "v5p": ("v5p:2x2x1", 2765),
    "v6e": ("v6e:2x2", 1640),
    "tpu7x": ("tpu7x:2x2x1", 3690),
}
COLUMNS = ["VMEM MB", "bundles", "in loop", "per 1024 weights", "spills", "moved MB", "of the least", "roofline us"]
SHAPES = ((4096, 4096), (4096, 11008))
ROWS = (1, 16, 256)
MAIN = ("int8", "nf4", "ternary", "binary", "q4", "int4")

for name, layout in packed.LAYOUTS.items():
    if name not in FORMATS:
        packed.declare(name, layout, error=1.0)


def run(args: Any) -> None:
    report = Report(args, ["chip", "shape", "kernel", "M", *COLUMNS])
    todo = list(kernels(SHAPES, ROWS))
    for chip in CHIPS:
        for names, operands in todo:
            found = measure(chip, *operands)
            report.row(chip, *names, *(found[column] for column in COLUMNS))
    report.save()


def kernels(shapes: Any, rows: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The shape, name and rows of each kernel, and the shapes of its operands.

    Every format in bfloat16 for the first shape; the main ones in float32 too, and for the other shapes.
    """
    for (k, n), format, contract, dtype in itertools.product(shapes, FORMATS, (-2, -1), (jnp.bfloat16, jnp.float32)):
        extra = ((k, n) != shapes[0]) + (dtype == jnp.float32)
        if extra > (format in MAIN):
            continue
        dense = jax.ShapeDtypeStruct((k, n) if contract == -2 else (n, k), dtype)
        w = jax.eval_shape(lambda w, f=format, c=contract: FORMATS[f].quantize(w, axis=c), dense)
        name = f"{format} {'x @ w' if contract == -2 else 'x @ w.T'} {dtype.__name__}"
        for m in rows:
            yield (f"{k}x{n}", name, m), (jax.ShapeDtypeStruct((m, k), dtype), w, contract, dtype)


def measure(chip: str, x: Any, w: Any, contract: int, dtype: Any) -> dict[str, Any]:
    """Compile a kernel, and parse the compiler's output."""
    topology, bandwidth = CHIPS[chip]
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    mesh = Mesh(np.array([device]), ("x",), axis_types=(AxisType.Auto,))
    place = NamedSharding(mesh, PartitionSpec())
    for file in DUMPS.iterdir():
        file.unlink()
    with jax.set_mesh(mesh):
        here = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), (x, w))
        tiling = tiling_for(Product(x, w, contract, dtype), device.device_kind)
        jax.jit(lambda x, w: matmul(Product(x, w, contract, dtype), device.device_kind)).lower(*here).compile()
    moved = bytes_moved(Kernel(Product(x, w, contract, dtype), tiling), x)
    least = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in (x, *jax.tree.leaves(w)))
    _, m, n, _ = tiling.shape
    least += m * n * jnp.dtype(dtype).itemsize
    return {
        **compiler_says(tiling),
        "moved MB": moved / 1e6,
        "of the least": moved / least,
        "roofline us": moved / bandwidth / 1e3,
    }


def bytes_moved(kernel: Any, x: Any) -> int:
    """Bytes copied by the steps of the grid, from the kernel's own index maps: blocks whose index changed."""
    tiling = kernel.tiling
    batch, m, n, _ = tiling.shape

    def operands(x: Any, product: Product) -> Any:
        return Kernel(product, tiling).operands(x)

    arrays = jax.eval_shape(operands, x.update(shape=(1, *x.shape)), kernel.product)
    arrays = [*arrays, jax.ShapeDtypeStruct((1, m, n), tiling.dtype)]
    total = 0
    for spec, array in zip([*in_specs(tiling), out_spec(tiling)], arrays, strict=True):
        last = None
        for step in itertools.product(*map(range, tiling.grid)):
            at = tuple(int(i) for i in spec.index_map(*step, [0] * batch))
            if at != last:
                sizes = (max(min(b, s - i * b), 0) for i, b, s in zip(at, spec.block_shape, array.shape, strict=True))
                total += math.prod(sizes) * array.dtype.itemsize
            last = at
    return total


def compiler_says(tiling: Any) -> dict[str, Any]:
    def one(pattern: str) -> str:
        (file,) = DUMPS.glob(f"*lowbit_matmul*{pattern}")
        return file.read_text()

    memory = sum(int(size, 16) for size in re.findall(r"space=vmem, size = (0x[0-9a-f]+)", one("-02-original.txt")))
    slots = [
        line.split()
        for line in one("final_hlo-static-per-bundle-utilization.txt").split("== UTILIZATION:")[1].splitlines()
    ]
    names = re.search(r"(MXU.*)", one("final_hlo-static-per-bundle-utilization.txt"))
    spilled = [name.strip() for name in names[1].split(",")].index("VSTORE:SPILL")
    bundles = [
        line for line in one("-final_bundles.txt").splitlines() if re.match(r"\s*(0x)?[0-9a-f]+\s+(\w\w)?\s*:", line)
    ]
    loop = [line for line in bundles if re.match(r"[^{]*>>", line)]
    weights = tiling.sizes.chunk * tiling.sizes.n
    return {
        "VMEM MB": memory / 1e6,
        "bundles": len(bundles),
        "in loop": len(loop),
        "per 1024 weights": len(loop) / weights * 1024,
        "spills": sum(int(row[spilled]) for row in slots if row),
    }
