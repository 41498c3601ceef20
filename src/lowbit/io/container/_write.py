"""Writing lowbit files, from one process or several.

If several processes save one tree, each writes a file with its shards of the arrays, and the path given to `save`
becomes an index of these files.
"""

import hashlib
import secrets
import shutil
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .._atomic import atomic_write
from .._dtypes import NAMES
from ._header import DIGEST, INDEX, SHARDS_KEY, SHARDS_TEXT, Contents, shard_name
from ._layout import as_json, header_bytes, index_files, outlined, remove_shard_files
from ._processes import shards_of, together


def write_file(target: Path, texts: dict[str, str], tensors: dict[str, Any]) -> bytes:
    """Write a file; returns the SHA-256 of its header."""
    crc32 = dict.fromkeys(tensors, "0" * 8)
    try:
        with atomic_write(target) as staged, open(staged, "xb") as file:
            file.write(bytes(len(header_bytes(texts, tensors, crc32))))
            for name, array in tensors.items():
                data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
                crc32[name] = f"{zlib.crc32(data):08x}"
                file.write(data)
            start = header_bytes(texts, tensors, crc32)
            digest = hashlib.sha256(start).digest()
            file.write(digest)
            file.seek(0)
            file.write(start)
    except OSError as error:
        raise OSError(error.errno, f"Cannot save to {target}: {error.strerror or error}") from error
    return digest


def _shards_of_process(process: int, shards: dict[str, Any]) -> dict[str, Any]:
    """The shards that a process writes, by the names of their tensors in its file."""
    return {
        shard_name(name, corner): shard
        for name, found in shards.items()
        for corner, (owner, shard) in found.items()
        if owner == process
    }


def save_together(target: Path, tree: Any, metadata: Any) -> None:
    """Write a checkpoint from all processes: each writes a file with its shards, then process 0 writes the index."""
    here, doing = jax.process_index(), f"Cannot save to {target}"
    texts: dict[str, str] = {}
    tensors: dict[str, Any] = {}
    shards: dict[str, Any] = {}

    def plan() -> bytes:
        found, arrays = outlined(target, tree, metadata)
        texts.update(found)
        for name, array in arrays.items():
            shards[name] = shards_of(array)
            placed = [[process, corner] for corner, (process, _) in shards[name].items()]
            tensors[name] = {"dtype": NAMES[array.dtype], "shape": list(array.shape), SHARDS_KEY: placed}
        return secrets.token_bytes(8) + hashlib.sha256(as_json([target.name, tensors]).encode()).digest()

    plans = together(doing, plan)
    if other := [process for process, sent in enumerate(plans) if sent[8:] != plans[0][8:]]:
        raise ValueError(
            f"{doing}: the file name or the arrays of process {other[0]} differ from those of process 0. "
            "All processes must save the same tree, with arrays on the same devices."
        )
    # New names, so that the files of the old index stay intact until the new index replaces it.
    names = [f"{target.stem}-{plans[0][:8].hex()}-{i + 1:05}-of-{len(plans):05}.safetensors" for i in range(len(plans))]
    own_file = target.parent / names[here]
    written: dict[str, str] = {}

    def write() -> bytes:
        own = _shards_of_process(here, shards)
        digest = write_file(own_file, *outlined(own_file, own, {}))
        written[own_file.name] = digest.hex()
        if target.exists():
            shutil.copymode(target, own_file)
        return digest

    def publish() -> bytes:
        if here == 0:
            old = index_files(target)
            files = {name: digest.hex() for name, digest in zip(names, digests, strict=True)}
            index = texts | {
                "lowbit.version": str(INDEX),
                "lowbit.files": as_json(files),
                SHARDS_TEXT: as_json(tensors),
            }
            start = header_bytes(index, {}, {})
            # Reads the files of all processes, so those of other machines must be visible here.
            Contents(target, start, len(start) + DIGEST).read()
            write_file(target, index, {})
            remove_shard_files(target, old)
        return b""

    try:
        digests = together(doing, write)
        together(doing, publish)
    except BaseException:
        remove_shard_files(target, written)
        raise
