"""Code written for other libraries: eformer's names and module paths, and serialization by Flax."""
