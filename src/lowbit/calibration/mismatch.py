"""Name the weight whose product fails for a batch of the wrong shape."""

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

from lowbit.models.calls import Call, is_dense_array
from lowbit.runtime import is_implicit

Place = tuple[tuple[Any, int], ...]
MOST_TRACES = 32  # a model of many layers must not delay its error


def mismatched(
    call: Callable[..., Any], leaves: Sequence[Any], paths: Sequence[str], args: Any, error: Exception
) -> list[str]:
    """The paths of the weights that fail in `call(leaves, args)` with this error, which has the sizes that differ.

    JAX traces a program before it knows which array is a parameter. So each weight with an axis of one of the sizes is
    given the other size, and `call` is traced again: if it gets past the place of the error, it was this weight. Where
    the result of one weight does not fit another, both are named. After MOST_TRACES, those found so far are returned.
    """
    sizes = list(dict.fromkeys(map(int, re.findall(r"\d+", str(error)))))
    start, found, traces = _failure(call, leaves, args), [], itertools.count(1)
    if start is None:
        return []
    for i, path in enumerate(paths):
        if is_implicit(leaves[i]) or len(getattr(leaves[i], "shape", ())) < 2:
            continue
        for have, want in itertools.permutations(sizes, 2):
            if want not in leaves[i].shape:
                continue
            if next(traces) > MOST_TRACES:
                return found
            shape = [have if n == want else n for n in leaves[i].shape]
            changed = [jax.ShapeDtypeStruct(shape, x.dtype) if j == i else x for j, x in enumerate(leaves)]
            now = _failure(call, changed, args)
            # A weight that fitted before fails with the sizes the other way around.
            swapped = now is not None and now[1] == _swapped(start[1], have, want)
            if not swapped and (now is None or now[0] != start[0]):
                found.append(path)
                break
    return found


def _failure(call: Callable[..., Any], leaves: Sequence[Any], args: Any) -> tuple[Place, str] | None:
    """Where in the program a call fails, and how; None if it does not."""
    given = Call.of((list(leaves), args), is_dense_array)
    try:
        jax.eval_shape(lambda arrays: call(*given.args(arrays)), given.arrays)
    except Exception as error:
        trace, place = error.__traceback__, []
        while trace is not None:
            place.append((trace.tb_frame.f_code, trace.tb_lasti))
            trace = trace.tb_next
        return tuple(place), str(error)
    return None


def _swapped(message: str, a: int, b: int) -> str:
    return re.sub(r"\d+", lambda n: {str(a): str(b), str(b): str(a)}.get(n[0], n[0]), message)
