"""The operations that have kernels: checks, shapes, gradients, choice of kernel, partitioning over devices."""

from lowbit import formats as formats  # first: it imports the rules, which need modules of this room
