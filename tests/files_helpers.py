"""What the tests of lowbit files share: trees to save, files to damage, and comparisons that assert."""

import hashlib
import importlib.util
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from helpers import assert_same_bits

from lowbit import Array1B, Array8B, ArrayNF4, QuantizedArray
from lowbit.io import LowbitFile, load, load_metadata, save

GOLDEN = Path(__file__).parent / "golden"


def module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def weights(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def assert_same(got: Any, want: Any, path: str = "tree") -> None:
    """Assert the same containers in the same order, the same types of leaves, the same bits."""
    if isinstance(want, QuantizedArray):
        assert type(got) is type(want), path
        assert_same_bits(got, want)
        assert all(isinstance(component, jax.Array) for component in jax.tree.leaves(got)), path
    elif isinstance(want, dict):
        assert type(got) is dict and list(got) == list(want), path
        for key in want:
            assert_same(got[key], want[key], f"{path}/{key}")
    elif isinstance(want, list | tuple):
        assert type(got) is type(want) and len(got) == len(want), path
        for i, (g, w) in enumerate(zip(got, want, strict=True)):
            assert_same(g, w, f"{path}/{i}")
    elif hasattr(want, "dtype"):
        got, want = np.asarray(got), np.asarray(want)
        assert (got.dtype, got.shape) == (want.dtype.newbyteorder("="), want.shape), path
        assert got.tobytes() == want.astype(want.dtype.newbyteorder("=")).tobytes(), path
    else:
        assert type(got) is type(want) and repr(got) == repr(want), path


def saved(tmp_path: Path, tree: Any, **options: Any) -> Path:
    path = tmp_path / "a.safetensors"
    save(path, tree, **options)
    return path


def back(tmp_path: Path, tree: Any, like: Any = None) -> Any:
    return load(saved(tmp_path, tree), like)


def seeds(tmp_path: Path) -> list[Path]:
    """Small valid files of every kind, for tests that change them."""
    trees = [
        {"w": ArrayNF4.quantize(weights(5, 33), 16), "b": weights(3), "step": 7, "flag": np.array([True, False])},
        [Array8B.quantize(weights(4, 6)).T, {"x/y": {}, 3: None}, (1.5, "é")],
        {"t": (q := Array1B.quantize(weights(3, 5))), "tied": q, "b": Array1B.quantize(weights(2, 9), kind="binary")},
        ArrayNF4.quantize(weights(4, 64), double_quant=True, dtype=jnp.bfloat16),
        [],
    ]
    paths = [tmp_path / f"seed{i}.safetensors" for i in range(len(trees))]
    for path, tree in zip(paths, trees, strict=True):
        save(path, tree, metadata={"a": [1, None]})
    return paths


def reads(path: Path) -> Any:
    """Everything that can be read from a file."""
    file = LowbitFile(path)
    return load_metadata(path), load(path), {name: [file.type(name), file.array(name)] for name in file}


def refused(path: Path, read: Callable[[Path], Any] = reads) -> tuple[str, int]:
    """The message of the error, and the peak of allocated bytes."""
    error = ""
    tracemalloc.start()
    try:
        read(path)
    except ValueError as raised:
        error = str(raised)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert error, "it was read"
    return error, peak


def mutated(contents: bytes, dice: random.Random) -> bytes:
    """Change, insert, remove or copy some bytes."""
    changed = bytearray(contents)
    for _ in range(dice.choice([1, 1, 1, 2, 8])):
        at, width = dice.randrange(len(changed)), dice.choice([1, 1, 1, 4, 64])
        match dice.randrange(8):
            case 0:
                del changed[at : at + width]
            case 1:
                changed[at:at] = dice.randbytes(width)
            case 2:
                other = dice.randrange(len(changed))
                copied = changed[other : other + width]
                changed[at : at + len(copied)] = copied
            case 3:
                changed[at] ^= 1 << dice.randrange(8)
            case _:
                changed[at] = dice.choice([0, 1, 127, 128, 255, dice.randrange(256)])
        if not changed:
            return b""
    return bytes(changed)


def signed(header: bytes, data: bytes) -> bytes:
    """A file with this header and a valid checksum."""
    start = len(header).to_bytes(8, "little") + header
    return start + data + hashlib.sha256(start).digest()


def split(path: Path) -> tuple[bytes, bytes]:
    contents = path.read_bytes()
    end = 8 + int.from_bytes(contents[:8], "little")
    return contents[8:end], contents[end:-32]
