"""The operations worth a kernel: checks, shapes, gradient, choice of kernel."""
