"""Compare two files, tensor by tensor."""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from lowbit.models.histogram import histogram
from lowbit.models.partition import is_quantized
from lowbit.models.report import Report, Row, worst

from .readers import Reader, open_tensors


def compare(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    histograms: int = 8,
    progress: Callable[[Sequence[str]], Iterable[str]] = lambda names: names,
) -> Report:
    """A report on how the tensors of file `a` are stored in `b`: sizes, formats and errors.

    - `a`, `b`: files of any kind that can be read, or directories.
    - `histograms`: the number of tensors, the worst first, that get a histogram.
    - `progress`: wraps the sequence of names to iterate over, for instance in a progress bar.

    Tensors that are missing from one of the two, or differ in shape, are listed in `notes`.

    >>> import tempfile, jax.numpy as jnp, lowbit
    >>> from lowbit.io import compare
    >>> folder, w = tempfile.mkdtemp(), jnp.linspace(-1, 1, 2048).reshape(32, 64)
    >>> lowbit.save(f"{folder}/a.safetensors", {"w": w, "b": jnp.ones(64)})
    >>> lowbit.save(f"{folder}/b.safetensors", {"w": lowbit.quantize(w, "int8"), "b": jnp.ones(64)})
    >>> report = compare(f"{folder}/a.safetensors", f"{folder}/b.safetensors")
    >>> [(row.path, row.dtype, row.format, row.why) for row in report]
    [('w', 'F32', 'int8', 'was F32'), ('b', 'F32', None, 'F32 in both')]
    """
    before, after = open_tensors(a), open_tensors(b)
    _ = worst((), histograms)  # raises on a wrong number before any work is done
    common = [name for name in before if name in after and before.shape(name) == after.shape(name)]
    if not common:
        raise ValueError(f"{a} and {b} have no tensor of the same name and shape.")
    rows = [_row(before, after, found["name"], found["error"]) for found in compared(before, after, progress(common))]
    shown = [row.path for row in worst(rows, histograms)]
    counted = tuple(histogram(name, before.dense(name), after.array(name)) for name in shown)
    return Report(tuple(rows), (), counted, _notes(before, after))


def _row(a: Reader, b: Reader, name: str, error: float) -> Row:
    was, now = a.type(name), b.type(name)
    kept = was == now and error == 0
    stored: Any = None if kept else b.array(name)
    axis = stored.scale_axes if is_quantized(stored) else ()
    return Row(
        path=name,
        shape=a.shape(name),
        dtype=was,
        format=None if kept else now,
        axis=axis[0] if len(axis) == 1 else axis or None,
        before=a.nbytes(name),
        after=b.nbytes(name),
        error=None if kept else error,
        why=f"{was} in both" if kept else f"was {was}",
    )


def _notes(a: Reader, b: Reader) -> tuple[str, ...]:
    """Sentences on the tensors that cannot be compared."""
    lost = {f"not in {x.path}": [n for n in y if n not in x] for x, y in ((a, b), (b, a))}
    other = [f"{n} ({a.shape(n)} and {b.shape(n)})" for n in a if n in b and a.shape(n) != b.shape(n)]
    return tuple(
        f"{len(names)} {why}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}."
        for why, names in {**lost, "of another shape": other}.items()
        if names
    )


def compared(a: Reader, b: Reader, names: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The relative error |b - a| / |a| of each tensor, and its largest absolute difference.

    Equal elements differ by 0, also NaN and infinity. Other differences from or to NaN are NaN, and from or to infinity
    infinite. Tensors of different shapes have an infinite error.
    """
    for name in names:
        found = {"name": name, "shape": a.shape(name), "other": b.shape(name)}
        if a.shape(name) != b.shape(name):
            yield {**found, "error": math.inf, "largest": math.inf}
            continue
        x, y = a.dense(name).astype(np.float32), b.dense(name).astype(np.float32)
        with np.errstate(all="ignore"):
            difference = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0, np.abs(y - x))
            norm, size = (float(np.linalg.norm(v.ravel())) for v in (difference, np.where(np.isfinite(x), x, 0)))
        error = norm / size if size else (0.0 if norm == 0 else math.nan if math.isnan(norm) else math.inf)
        yield {**found, "error": error, "largest": float(difference.max(initial=0))}
