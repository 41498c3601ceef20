"""The operations that have kernels: checks, shapes, gradients, choice of kernel, partitioning over devices."""
