"""Readers of lowbit files, safetensors, GGUF and Hugging Face directories, on one base class."""

import os
from pathlib import Path

from .._directory import check_whole
from ._base import Reader, decoded_types, is_stored
from .gguf import GGUFFile
from .lowbit import LowbitDir, LowbitFile, is_lowbit_file
from .safetensors import PICKLES, WEIGHTS, HuggingFaceDir, SafetensorsFile

__all__ = [
    "WEIGHTS",
    "GGUFFile",
    "HuggingFaceDir",
    "LowbitDir",
    "LowbitFile",
    "Reader",
    "SafetensorsFile",
    "decoded_types",
    "is_stored",
    "open_tensors",
]


def open_tensors(path: str | os.PathLike[str], *, strict: bool = False) -> Reader:
    """Open a file or a directory with the reader for its kind, detected from its first bytes, not from its name.

    - A lowbit file, another safetensors file, a GGUF file; a Hugging Face directory with safetensors, or one that the
      command wrote.
    - `strict`: raise if a tensor cannot be read with the bits that the file stores, instead of dequantizing it.

    >>> import tempfile, jax.numpy as jnp, lowbit
    >>> path = f"{tempfile.mkdtemp()}/model.safetensors"
    >>> lowbit.save(path, {"up": lowbit.quantize(jnp.ones((64, 64))), "norm": jnp.ones(64)})
    >>> file = open_tensors(path)
    >>> {name: (file.type(name), file.shape(name), file.nbytes(name)) for name in file}
    {'up': ('nf4', (64, 64), 2304), 'norm': ('F32', (64,), 256)}
    """
    path = Path(path)
    if path.is_dir():
        check_whole(path)
        if (path / WEIGHTS).is_file() and is_lowbit_file(path / WEIGHTS):
            return LowbitDir(path)
        return HuggingFaceDir(path, strict=strict)
    with path.open("rb") as file:
        start = file.read(4)
    if path.suffix in PICKLES and (start[:2] == b"PK" or start[:1] == b"\x80"):
        raise ValueError(
            f"{path} is a pickle, which may run any code when it is opened. Save the model as safetensors."
        )
    if start == b"GGUF":
        return GGUFFile(path, strict=strict)
    return LowbitFile(path) if is_lowbit_file(path) else SafetensorsFile(path, strict=strict)
