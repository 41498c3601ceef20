"""Kernels for CPU, GPU and TPU, and the reference. No public names."""

from . import cpu, gpu, tpu
from ._table import register_kernel

cpu.register(__path__)
register_kernel("matmul", "cuda", gpu.matmul, gpu.matmul_fits, gpu.is_available)
register_kernel("matmul", "tpu", tpu.matmul, tpu.matmul_fits)
