"""The lowbit file: safetensors with a tree, quantized arrays and checksums (docs/file-format.md)."""
