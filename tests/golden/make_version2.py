"""Make version2/, an index file of version 2 and the two shard files that it names.

    python tests/golden/make_version2.py

Made once, with lowbit 0.1.0. Do not make it again: every later version must read the stored files. The script starts
itself as two more processes with four devices each, which write the files.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from lowbit import Array8B
from lowbit.io import save

OUT = Path(__file__).parent / "version2" / "version2.safetensors"
METADATA = {"step": 12}


def contents() -> Any:
    """The tree of the whole arrays."""
    codes = (7 * np.arange(16 * 8) % 256).astype(np.uint8).view(np.int8).reshape(16, 8)
    scales = (np.arange(16 * 2) % 3 + 1).astype(np.float32).reshape(16, 2)
    return {
        "w": np.arange(32, dtype=np.int16).reshape(8, 4),
        "flags": np.arange(16) % 3 == 0,
        "squares": np.arange(64, dtype=np.float32).reshape(8, 8),
        "replicated": np.arange(5, dtype=np.int32),
        "host": np.float32(2.5),
        "layers": [Array8B(weight=codes, scale=scales, axis=-1, block_size=4).T, (7, None, "text")],
    }


def write(process: int) -> None:
    import jax
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    jax.distributed.initialize("localhost:9876", num_processes=2, process_id=process)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)

    def laid_out(array: Any, *spec: Any) -> Any:
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))

    tree = contents()
    tree["w"], tree["flags"] = laid_out(tree["w"], ("x", "y")), laid_out(tree["flags"], ("x", "y"))
    tree["squares"], tree["replicated"] = laid_out(tree["squares"], "y", "x"), laid_out(tree["replicated"])
    tree["layers"][0] = tree["layers"][0].with_sharding(NamedSharding(mesh, PartitionSpec("y", "x")))
    save(OUT, tree, metadata=METADATA)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write(int(sys.argv[1]))
    else:
        environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
        both = [subprocess.Popen([sys.executable, __file__, str(i)], env=environment) for i in range(2)]
        print([process.wait() for process in both], *OUT.parent.iterdir(), sep="\n")
