"""Kernels for CPU, GPU and TPU, and the reference. No public names."""

from lowbit import formats as formats  # first: it imports the rules, which need modules of this room
from lowbit.dispatch import register_kernel

from . import cpu, gpu, tpu

cpu.register(__path__)
register_kernel("matmul", "cuda", gpu.matmul, gpu.matmul_fits, gpu.is_available)
register_kernel("matmul", "tpu", tpu.matmul, tpu.matmul_fits)
