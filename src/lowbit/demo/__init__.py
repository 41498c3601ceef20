"""A real language model in plain JAX, to run quantized: what `lowbit demo` and `lowbit generate` do."""
