"""NF4 of bitsandbytes, which says by the names of its tensors alone what it stores (see `lowbit.io.bitsandbytes`)."""

from collections.abc import Iterator, Mapping
from typing import Any

from ..bitsandbytes import SavedNF4, saved_components
from ._base import Found, Method, Settings, Tensors


def _find(names: Mapping[str, Any], settings: Settings) -> Iterator[Found]:
    for name, stored in saved_components(names, settings.path).items():
        yield Found(name, stored, _read)


def _read(tensors: Tensors) -> SavedNF4:
    return SavedNF4.read(tensors.name, tensors.views, tensors.path)


BITSANDBYTES = Method(
    "bitsandbytes", ("bitsandbytes",), _find, mark=".quant_state.bitsandbytes__nf4", needs_config=False
)
