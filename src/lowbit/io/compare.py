"""A report on two files: what became of the tensors of one in the other."""

import os
from collections.abc import Callable, Iterable, Sequence

from lowbit.formats import QuantizedArray
from lowbit.models.histogram import histogram
from lowbit.models.report import Report, Row, worst

from .convert import compared
from .source import Tensors, open_tensors


def compare(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    histograms: int = 8,
    progress: Callable[[Sequence[str]], Iterable[str]] = lambda names: names,
) -> Report:
    """A report on what the tensors of `a` are stored as in `b`: files of any kind that we read, or directories.

    `histograms`: of how many of the worst tensors. What is not in both, in one shape, is named in `notes`.

    >>> import tempfile, jax.numpy as jnp, lowbit
    >>> folder, w = tempfile.mkdtemp(), jnp.linspace(-1, 1, 2048).reshape(32, 64)
    >>> lowbit.save(f"{folder}/a.safetensors", {"w": w, "b": jnp.ones(64)})
    >>> lowbit.save(f"{folder}/b.safetensors", {"w": lowbit.quantize(w, "int8"), "b": jnp.ones(64)})
    >>> report = compare(f"{folder}/a.safetensors", f"{folder}/b.safetensors")
    >>> [(row.path, row.dtype, row.format, row.why) for row in report]
    [('w', 'F32', 'int8', 'was F32'), ('b', 'F32', None, 'F32 in both')]
    """
    before, after = open_tensors(a), open_tensors(b)
    _ = worst((), histograms)  # a wrong number is an error before any work is done
    common = [name for name in before if name in after and before.shape(name) == after.shape(name)]
    if not common:
        raise ValueError(f"{a} and {b} have no tensor of the same name and shape.")
    rows = [_row(before, after, found["name"], found["error"]) for found in compared(before, after, progress(common))]
    shown = [row.path for row in worst(rows, histograms)]
    counted = tuple(histogram(name, before.dense(name), after.array(name)) for name in shown)
    return Report(tuple(rows), (), counted, _notes(before, after))


def _row(a: Tensors, b: Tensors, name: str, error: float) -> Row:
    was, now = a.type(name), b.type(name)
    kept = was == now and error == 0
    stored = None if kept else b.array(name)
    axis = stored.scale_axes if isinstance(stored, QuantizedArray) else ()
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


def _notes(a: Tensors, b: Tensors) -> tuple[str, ...]:
    """What cannot be compared, and why."""
    lost = {f"not in {x.path}": [n for n in y if n not in x] for x, y in ((a, b), (b, a))}
    other = [f"{n} ({a.shape(n)} and {b.shape(n)})" for n in a if n in b and a.shape(n) != b.shape(n)]
    return tuple(
        f"{len(names)} {why}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}."
        for why, names in {**lost, "of another shape": other}.items()
        if names
    )
