"""Several processes that write one checkpoint: which piece of an array is whose, and whether all of them succeeded."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

_MESSAGE = 1000  # bytes that a process may tell the others

# Where a piece of an array begins and ends on each axis.
Box = tuple[tuple[int, int], ...]


def box(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Box:
    """The box of an index as JAX gives it."""
    return tuple(s.indices(n)[:2] for s, n in zip(index or (), shape, strict=True))


def pieces_of(array: Any) -> dict[tuple[int, ...], tuple[int, Any]]:
    """Where the pieces of an array begin, which process writes each, and the piece if this process has it.

    The first device that holds a piece has its process write it, so every process finds the same without asking
    another. What each process has for itself, the first one writes.
    """
    if not isinstance(array, jax.Array) or array.is_fully_addressable:
        return {(0,) * array.ndim: (0, array)}
    own = {box(shard.index, array.shape): shard.data for shard in array.addressable_shards}
    found: dict[tuple[int, ...], tuple[int, Any]] = {}
    for device, index in sorted(array.sharding.devices_indices_map(array.shape).items(), key=lambda item: item[0].id):
        there = box(index, array.shape)
        found.setdefault(tuple(start for start, _ in there), (device.process_index, own.get(there)))
    return found


def together(doing: str, step: Callable[[], bytes]) -> list[bytes]:
    """Take a step in every process, and have what each of them told. Where it fails in one, it is an error in all.

    All must call it, whatever happened to them before, or the others wait.
    """
    failure: BaseException | None = None
    try:
        told = step()
    except BaseException as error:  # an interrupt too, of which the others would not hear
        failure, told = error, (str(error) or type(error).__name__).encode("utf-8", "replace")
    told = told[:_MESSAGE]
    sent = np.zeros(_MESSAGE + 3, np.uint8)
    sent[:3] = failure is not None, len(told) // 256, len(told) % 256
    sent[3 : 3 + len(told)] = np.frombuffer(told, np.uint8)
    rows = multihost_utils.process_allgather(sent)
    messages = [row[3 : 3 + 256 * int(row[1]) + int(row[2])].tobytes() for row in rows]
    if failure is not None and not isinstance(failure, OSError):
        raise failure
    for process, row in enumerate(rows):
        if row[0]:
            text = messages[process].decode("utf-8", "replace")
            raise OSError(f"{doing}: process {process} of {len(rows)} failed: {text}") from failure
    return messages
