"""The GPU kernel compiled in full for A100 and H100, on a machine without a GPU: `make test-gpu-aot`.

The compiler needs no device, only its description; `ptxas` is the one that pip installed; PATH has no other.
"""

import glob
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# The compilers from pip come first, then only /usr/bin and /bin, so that no CUDA of the machine is found.
(TOOLS,) = (path / "nvidia/cu13/bin" for path in map(Path, sys.path) if (path / "nvidia/cu13/bin/ptxas").exists())
os.environ["PATH"] = f"{TOOLS}:/usr/bin:/bin"
os.environ["JAX_PLATFORMS"] = "cpu"
DUMP = tempfile.mkdtemp(prefix="lowbit-aot-")
# Newer compilers write the assembly of a kernel only where it is asked for.
ASSEMBLY = "--xla_gpu_dump_llvmir=true --xla_dump_emitter_re=.*"
os.environ["XLA_FLAGS"] = f"--xla_dump_to={DUMP} --xla_dump_hlo_module_re=jit_lowbit_aot.* {ASSEMBLY}"
# With the dumps come stack traces, and looking up their symbols takes most of the time.
os.environ["LLVM_DISABLE_SYMBOLIZATION"] = "1"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.experimental import topologies  # noqa: E402

import lowbit  # noqa: E402
from lowbit.formats import packed  # noqa: E402
from lowbit.kernels import gpu  # noqa: E402
from lowbit.kernels.gpu import kernel, tiling  # noqa: E402
from lowbit.kernels.product import Product  # noqa: E402
from lowbit.runtime._compat import lowering_for  # noqa: E402

CALL = "__gpu$xla.gpu.triton"
MAIN = ("int8", "nf4", "ternary", "binary", "q4", "int4")
for name, layout in packed.LAYOUTS.items():
    if name not in lowbit.FORMATS:
        packed.declare(name, layout, error=1.0)
# Published numbers: multiprocessors, clock, shared memory of one and of a block of threads, L2, bandwidth.
CHIPS = {
    "A100": ("8", "NONE", "sm_80", 108, 1.41, 167936, 166912, 41943040, 2039),
    "H100": ("9", "ACCELERATED_FEATURES", "sm_90a", 132, 1.98, 233472, 232448, 52428800, 3350),
}


def device(chip: str) -> jax.Device:
    major, extension, _, cores, clock, shared, shared_block, cache, bandwidth = CHIPS[chip]
    target = f"""
    gpu_device_info {{
      cuda_compute_capability {{ major: {major} feature_extension: {extension} }}
      core_count: {cores} clock_rate_ghz: {clock} fpus_per_core: {64 if major == "8" else 128}
      threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
      shared_memory_per_block: 49152 shared_memory_per_core: {shared} shared_memory_per_block_optin: {shared_block}
      registers_per_core_limit: 65536 registers_per_block_limit: 65536
      block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
      thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
      l2_cache_size: {cache} memory_bandwidth: {bandwidth}000000000 device_memory_size: 80000000000
      driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
    }}
    platform_name: "CUDA"
    device_description_str: "{chip}"
    """
    options = {"platform": "cuda", "target_config": target, "topology": "1x1x1"}
    return topologies.get_topology_desc("gpu", **options).devices[0]


def compiled(chip, format, contract, m, k, n, dtype, experts=(), **options):
    """The resources of a compiled product (registers, spilled bytes, shared memory) and the text of the program.

    `experts`: the shape of a stack of them, over which the rows are grouped.
    """
    place = jax.sharding.SingleDeviceSharding(device(chip))
    shape = (*experts, *((k, n) if contract == -2 else (n, k)))
    w = jax.eval_shape(lambda: lowbit.FORMATS[format].quantize(jnp.zeros(shape, dtype), axis=contract))
    x = jax.ShapeDtypeStruct((m, k), dtype)
    sizes = jax.ShapeDtypeStruct(experts, jnp.int32)
    x, w, sizes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), (x, w, sizes))

    @lowbit.implicit
    def lowbit_aot(x, w, sizes):
        if experts:
            return jax.lax.ragged_dot(x, w if contract == -2 else jnp.matrix_transpose(w), sizes)
        if options:
            with lowering_for(gpu.ANY_GPU):
                return kernel.matmul(Product(x, w, contract, dtype), **options)
        return x @ (w if contract == -2 else w.T)

    shutil.rmtree(DUMP, ignore_errors=True)
    text = jax.jit(lowbit_aot).trace(x, w, sizes).lower(lowering_platforms=("cuda",)).compile().as_text()
    (code,) = (path for path in glob.glob(f"{DUMP}/*.ptx") if "lowbit_matmul" in Path(path).read_text())
    tool = shutil.which("ptxas")
    assert tool == str(TOOLS / "ptxas"), f"another ptxas than the installed one: {tool}"
    run = subprocess.run(
        [tool, "-v", "-arch", CHIPS[chip][2], code, "-o", "/dev/null"], capture_output=True, text=True, check=True
    )
    said = run.stderr[run.stderr.index("lowbit_matmul") :]
    launch = next(
        line
        for path in glob.glob(f"{DUMP}/*thunk_sequence.txt")
        for line in Path(path).open()
        if "lowbit_matmul" in line
    )
    return {
        "registers": int(re.search(r"Used (\d+) registers", said)[1]),
        "spills": sum(map(int, re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said).groups())),
        "shared": int(re.search(r"shared_memory: (\d+)", launch)[1]),
        "programs": int(re.search(r"grid: \[(\d+)", launch)[1]),
        "text": text,
    }


def test_products(chip: str) -> int:
    """Every format and direction at the sizes of models: the kernel runs, without a dense weight or spills.

    Every format in bfloat16 for the first shape; the main ones in float32 too, and for the other shape.
    """
    count = 0
    shapes = ((4096, 4096), (4096, 11008))
    for (k, n), format, contract, dtype, m in itertools.product(
        shapes, lowbit.FORMATS, (-2, -1), (jnp.bfloat16, jnp.float32), (1, 16, 256)
    ):
        if format not in MAIN and ((k, n) != shapes[0] or dtype == jnp.float32):
            continue
        case = f"{chip} {format} contract {contract} {m}x{k}x{n} {jnp.dtype(dtype).name}"
        found = compiled(chip, format, contract, m, k, n, dtype)
        assert found["text"].count(f'custom_call_target="{CALL}"') == 1, case
        for dense in (f"[{k},{n}]", f"[{n},{k}]"):
            assert not re.search(rf"\b(?:f32|bf16|f16){re.escape(dense)}", found["text"]), f"{case}: a dense weight"
        assert found["spills"] == 0, f"{case}: {found['spills']} bytes spilled"
        count += 1
    return count


def test_experts(chip: str) -> int:
    """Each expert on its own rows, in the main formats."""
    cases = list(itertools.product(MAIN, (-2, -1), (24, 512)))
    for format, contract, m in cases:
        case = f"{chip} {format} contract {contract} {m} rows in 8 groups"
        found = compiled(chip, format, contract, m, 2048, 1408, jnp.bfloat16, experts=(8,))
        assert found["text"].count(f'custom_call_target="{CALL}"') == 1, case
        assert not re.search(r"\b(?:f32|bf16|f16)\[(?:8,)?(?:2048,1408|1408,2048)\]", found["text"]), case
        assert found["spills"] == 0, f"{case}: {found['spills']} bytes spilled"
    return len(cases)


def test_a_tile_beyond_shared_memory_is_refused_by_the_compiler(chip: str) -> None:
    """A tile larger than the shared memory of a multiprocessor."""
    try:
        compiled(chip, "int8", -2, 256, 4096, 4096, jnp.bfloat16, tile=tiling.Tile(256, 128, 256, warps=8, stages=4))
    except Exception as error:
        assert "hared memory" in str(error), error
        return
    raise AssertionError(f"{chip} took a tile that is too large")


def main() -> None:
    try:
        for chip in CHIPS:
            start = time.monotonic()
            test_a_tile_beyond_shared_memory_is_refused_by_the_compiler(chip)
            count = test_products(chip) + test_experts(chip)
            print(f"{chip}: {count} products compiled in {time.monotonic() - start:.0f} s by {shutil.which('ptxas')}")
    finally:
        shutil.rmtree(DUMP, ignore_errors=True)


if __name__ == "__main__":
    main()
