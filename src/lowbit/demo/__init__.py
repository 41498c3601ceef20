"""A real language model in plain JAX, which `lowbit demo` and `lowbit generate` run quantized."""
