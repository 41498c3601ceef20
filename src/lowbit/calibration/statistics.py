"""Calibration: the second moments of the inputs of every weight of a model, by path. Saves, loads and merges."""

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import jax
import numpy as np

from lowbit.formats.moments import Moments
from lowbit.io import load, load_metadata, save
from lowbit.io.readers import GGUFFile
from lowbit.models.axes import axes_by_name
from lowbit.models.patterns import is_array, leaf_path, naming
from lowbit.runtime import is_implicit

_KIND = "lowbit calibration"


@dataclasses.dataclass(frozen=True, repr=False)
class Calibration(Mapping[str, Moments]):
    """Statistics of the inputs of weights: a mapping from the path of a weight to its `Moments`.

    - `moments`: by path; `calibrate` makes them.
    - `missing`: the weights without a statistic, each with the reason.
    - `guided`: whether rows are weighted by squared gradients of a loss.

    >>> import jax.numpy as jnp, lowbit
    >>> params, x = {"kernel": jnp.ones((64, 32))}, jnp.ones((8, 64))
    >>> c = lowbit.calibrate(lambda params, x: x @ params["kernel"], params, [x, x])
    >>> c
    Calibration(1 weight, 16 rows: 1 with second moments, 0 with diagonals, 0 without)
    >>> c["kernel"].hessian.shape, float(c["kernel"].diag[0])
    ((64, 64), 16.0)
    """

    moments: Mapping[str, Moments]
    missing: Mapping[str, str] = dataclasses.field(default_factory=dict)
    guided: bool = False

    def __getitem__(self, path: str) -> Moments:
        if path not in self.moments:
            known = ", ".join(list(self.moments)[:20]) or "none"
            reason = f": {self.missing[path]}" if path in self.missing else f"; it has {known}"
            raise KeyError(f"The calibration has no statistic of {path!r}{reason}.")
        return self.moments[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self.moments)

    def __len__(self) -> int:
        return len(self.moments)

    def __contains__(self, path: object) -> bool:
        return path in self.moments

    def __repr__(self) -> str:
        full = sum(m.hessian is not None for m in self.moments.values())
        rows = max((int(np.max(m.count, initial=0)) for m in self.moments.values()), default=0)
        many = f"{len(self)} weight{'s' * (len(self) != 1)}"
        guided = ", guided by gradients" * self.guided
        return (
            f"Calibration({many}, {rows:,} rows{guided}: {full} with second moments, {len(self) - full} with "
            f"diagonals, {len(self.missing)} without)"
        )

    @property
    def nbytes(self) -> int:
        """The bytes of all statistics."""
        parts = (part for m in self.moments.values() for part in (m.diag, m.hessian, m.count))
        return sum(part.nbytes for part in parts if part is not None)

    def merge(self, other: "Calibration") -> "Calibration":
        """The statistics of both sets of data, for instance of two halves that two processes went through.

        A weight has second moments if both have them, and a diagonal otherwise.

        >>> import jax.numpy as jnp, lowbit
        >>> params, fn = {"kernel": jnp.ones((64, 32))}, lambda params, x: x @ params["kernel"]
        >>> halves = [lowbit.calibrate(fn, params, [jnp.ones((rows, 64))]) for rows in (3, 5)]
        >>> int(halves[0].merge(halves[1])["kernel"].count)
        8
        """
        if self.guided != other.guided:
            raise ValueError("One calibration is guided by gradients and the other is not: their sums do not add up.")
        merged = dict(self.moments)
        for path, moments in other.moments.items():
            with naming(path):
                merged[path] = merged[path].merged(moments) if path in merged else moments
        missing = {path: why for path, why in {**self.missing, **other.missing}.items() if path not in merged}
        return Calibration(merged, missing, self.guided)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a lowbit file, which `Calibration.load` reads."""
        arrays, shapes = {}, {}
        for name, m in self.moments.items():
            parts = {"diag": m.diag, "hessian": m.hessian, "count": m.count}
            arrays[name] = {part: value for part, value in parts.items() if value is not None}
            shapes[name] = {"shape": [*m.shape], "inputs": [*m.inputs], "stacked": [*m.stacked]}
        metadata = {"kind": _KIND, "weights": shapes, "missing": dict(self.missing), "guided": self.guided}
        save(path, arrays, metadata=metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file that `save` wrote.

        >>> import tempfile, jax.numpy as jnp, lowbit
        >>> c = lowbit.calibrate(lambda p, x: x @ p["kernel"], {"kernel": jnp.ones((64, 32))}, [jnp.ones((8, 64))])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     c.save(f"{folder}/calibration.safetensors")
        ...     lowbit.Calibration.load(f"{folder}/calibration.safetensors")["kernel"].k
        64
        """
        metadata = load_metadata(path)
        if metadata.get("kind") != _KIND:
            raise ValueError(f"{os.fspath(path)} is not a calibration: Calibration.save writes one.")
        moments = {}
        for name, parts in load(path).items():
            axes = (tuple(metadata["weights"][name][key]) for key in ("shape", "inputs", "stacked"))
            arrays = (np.array(parts[part]) if part in parts else None for part in ("diag", "hessian", "count"))
            with naming(name):
                moments[name] = Moments(*axes, *arrays)
        return cls(moments, metadata["missing"], metadata["guided"])

    @classmethod
    def from_imatrix(
        cls, path: str | os.PathLike[str], params: Any, *, names: Callable[[str], str] | None = None
    ) -> Self:
        """Read the importance matrix of llama.cpp, a GGUF file of `llama-imatrix`, for a tree of weights.

        - `params`: the weights, or `jax.ShapeDtypeStruct`s.
        - `names`: the name of a weight in llama.cpp for its path, for instance `blk.0.attn_q.weight`. By default it is
          the path itself, as in a tree that was loaded from a GGUF file.

        It has diagonals only. Weights that the file does not name are in `missing`.
        """
        file = GGUFFile(os.fspath(path))
        moments, missing = {}, {}
        for key, leaf in jax.tree_util.tree_flatten_with_path(params, is_leaf=is_implicit)[0]:
            own = leaf_path(key)
            name = own if names is None else names(own)
            if not is_array(leaf) or len(leaf.shape) < 2:
                continue
            if f"{name}.in_sum2" not in file:
                missing[own] = f"{os.fspath(path)} has no {name}.in_sum2"
                continue
            with naming(own):
                sums, counts = (file.dense(f"{name}.{end}") for end in ("in_sum2", "counts"))
                moments[own] = _from_sums(own, tuple(leaf.shape), sums, counts)
        return cls(moments, missing)


def _from_sums(path: str, shape: tuple[int, ...], sums: np.ndarray, counts: np.ndarray) -> Moments:
    """Moments from sums of squares of shape (matrices, K) or (K,)."""
    k = sums.shape[-1]
    named = axes_by_name(path, shape).axes
    fits = [a for a in (-1, -2) if shape[a] == k]
    axis = named[0] if named and shape[named[0]] == k else fits[0] if len(fits) == 1 else None
    if axis is None:
        raise ValueError(f"A weight of shape {shape} does not tell which of its axes has the {k} inputs of the file.")
    stacked = tuple(range(-len(shape), -2)) if sums.size > k else ()
    stack = tuple(shape[a] for a in stacked)
    if sums.size != k * int(np.prod(stack)):
        raise ValueError(f"A weight of shape {shape} does not fit {sums.size // k} sets of {k} inputs.")
    # A matrix of the file that met no row has a count of 0, and its sums are 0 too.
    diag, count = (
        sums.astype(np.float32).reshape(*stack, k),
        np.broadcast_to(counts.reshape(-1), max(1, sums.size // k)),
    )
    return Moments(shape, (axis,), stacked, diag, None, count.astype(np.float32).reshape(stack))
