"""Several processes that write one checkpoint: which process writes which shard, and whether all succeeded."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from .._regions import region_of

_MESSAGE = 1000  # bytes that a process can send to the others


def shards_of(array: Any) -> dict[tuple[int, ...], tuple[int, Any]]:
    """The shards of an array by their corners: the process that writes each, and its data if this process has it.

    A shard is written by the process of the first device that holds it, so all processes agree without communication.
    An array that is local to each process is written by process 0.
    """
    if not isinstance(array, jax.Array) or array.is_fully_addressable:
        return {(0,) * array.ndim: (0, array)}
    own = {region_of(shard.index, array.shape): shard.data for shard in array.addressable_shards}
    found: dict[tuple[int, ...], tuple[int, Any]] = {}
    for device, index in sorted(array.sharding.devices_indices_map(array.shape).items(), key=lambda item: item[0].id):
        region = region_of(index, array.shape)
        found.setdefault(tuple(start for start, _ in region), (device.process_index, own.get(region)))
    return found


def together(doing: str, step: Callable[[], bytes]) -> list[bytes]:
    """Run a step in every process and gather what each returns. If it fails in one process, all raise.

    Every process must call it, even after an error; otherwise the others block.
    """
    failure: BaseException | None = None
    try:
        message = step()
    except BaseException as error:  # also an interrupt, which the other processes would not see
        failure, message = error, (str(error) or type(error).__name__).encode("utf-8", "replace")
    message = message[:_MESSAGE]
    sent = np.zeros(_MESSAGE + 3, np.uint8)
    sent[:3] = failure is not None, len(message) // 256, len(message) % 256
    sent[3 : 3 + len(message)] = np.frombuffer(message, np.uint8)
    rows = multihost_utils.process_allgather(sent)
    messages = [row[3 : 3 + 256 * int(row[1]) + int(row[2])].tobytes() for row in rows]
    if failure is not None and not isinstance(failure, OSError):
        raise failure
    for process, row in enumerate(rows):
        if row[0]:
            text = messages[process].decode("utf-8", "replace")
            raise OSError(f"{doing}: process {process} of {len(rows)} failed: {text}") from failure
    return messages
