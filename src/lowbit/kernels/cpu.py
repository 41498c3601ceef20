"""The native kernels for CPU: how the library is loaded, and how its targets are called on one device and on many.

The library is built from `csrc/` when the package is. `LOWBIT_NATIVE=0` leaves it alone, `LOWBIT_ISA` names the
instruction set to use (generic, avx2, avx512) instead of the best one that the machine has.
"""

import ctypes
import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lowbit.formats._blocks import WHOLE, span_of
from lowbit.formats._quantized import QuantizedArray
from lowbit.runtime._compat import match_varying, varying_axes

from ._table import register_kernel

_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
_library: ctypes.CDLL | None = None


def _load(folders: Sequence[str]) -> ctypes.CDLL | None:
    """The library with its targets registered, or None, saying why."""
    if os.environ.get("LOWBIT_NATIVE") == "0":
        return None
    found = [path for folder in folders if (path := Path(folder) / "lowbit_native.so").exists()]
    if not found:
        warnings.warn(
            "lowbit was installed without its native CPU kernels, so products on CPU are right but slow. Install it "
            "again where there is a C++ compiler, or set LOWBIT_NATIVE=0 to be told no more.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    library = ctypes.CDLL(str(found[0]))
    library.lowbit_isa.restype = library.lowbit_targets.restype = ctypes.c_char_p
    if not library.lowbit_isa():
        asked = os.environ.get("LOWBIT_ISA")
        raise ValueError(f"LOWBIT_ISA={asked} must be generic, avx2 or avx512, and one that this machine has.")
    for name in library.lowbit_targets().decode().split(","):
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return library


def instruction_set() -> str | None:
    """The instruction set in use; None without the library."""
    return None if _library is None else _library.lowbit_isa().decode()


# --- the product


def matmul_fits(x: jax.Array, w: QuantizedArray, *, contract: int, dtype: Any, **params: Any) -> bool:
    """Whether the library has this product: its format, and matrices that do not share scales."""
    return (
        w.decoder is not None
        and x.dtype in _FLOATS
        and dtype in _FLOATS
        and all(span_of(w.spans, axis) == 1 for axis in range(-len(w.spans), -2))
        and not any(kind == AxisType.Explicit for kind in jax.typeof(x).sharding.mesh.axis_types)
    )


def matmul(
    x: jax.Array,
    w: QuantizedArray,
    *,
    contract: int,
    dtype: Any,
    precision: Any,
    out_sharding: Any,
    arithmetic: str,
) -> jax.Array:
    """As `reference.matmul`; float32 sums are as exact as any `precision` asks for."""
    del precision, out_sharding
    alone = jax.device_count() == 1
    # Scales in 8 bits know their place in the whole matrix, which a piece of it does not.
    w = w if alone else w.plain()
    product = _Product(x, w, contract, dtype, arithmetic == "fast")
    parts = jax.tree.leaves(w)
    if alone or varying_axes(x):  # varying: inside shard_map, where these are one device's own
        return match_varying([product(x, *parts), x])[0]
    call = custom_partitioning(product)
    call.def_partition(
        partition=product.partition,
        infer_sharding_from_operands=product.infer_sharding,
        sharding_rule=product.sharding_rule(),
        **product.factor_sizes,
    )
    return call(x, *parts)


class _Product:
    """One product: what it computes on a device, and how it is cut over several."""

    def __init__(self, x: jax.Array, w: QuantizedArray, contract: int, dtype: Any, fast: bool):
        self.tree = jax.tree.structure(w)
        self.contract, self.dtype, self.fast = contract, dtype, fast
        self.x, self.w = jax.eval_shape(lambda x, w: (x, w), x, w)
        self.factor_sizes: dict[str, Any] = {}
        self.__name__ = "lowbit_matmul"

    def __call__(self, x: jax.Array, *parts: jax.Array) -> jax.Array:
        w = jax.tree.unflatten(self.tree, parts)
        stored, batch, columns = w.stored_shape, w.shape[:-2], w.shape[-3 - self.contract]
        rows = x.shape[len(batch) : -1]
        layers = math.prod(stored[:-2])
        y = jax.ffi.ffi_call(
            "lowbit_matmul",
            jax.ShapeDtypeStruct((math.prod(batch), math.prod(rows), columns), self.dtype),
        )(
            x.reshape(math.prod(batch), math.prod(rows), x.shape[-1]),
            w.codes,
            *_scale_operands(w, layers),
            _layer_numbers(w),
            format=w.decoder,
            columns=np.int64(stored[-1]),
            row_span=np.int64(span_of(w.spans, -2)),
            col_span=np.int64(span_of(w.spans, -1)),
            contract=np.int64(self.contract + 2),
            fast=self.fast,
        )
        return y.reshape(*batch, *rows, columns)

    # --- over devices

    def sharding_rule(self) -> str:
        """Which axes of the operands and of the result are the same one, in the notation of Shardy.

        An axis of which some part stores blocks or bytes is a compound: blocks, bytes in a block, codes in a byte.
        """
        names = (f"f{i}" for i in itertools.count())
        layers = 0 if self.w.index is None else 1
        index = [next(names) for _ in range(0 if self.w.index is None else self.w.index.ndim)]
        lead = [next(names) for _ in self.w.stored_shape[layers:-2]]
        rows = [next(names) for _ in range(len(self.x.shape) - len(index) - len(lead) - 1)]
        cuts = {axis: self._cuts(axis, names) for axis in (-2, -1)}

        stack = [next(names)] * layers

        def part(_: Any, spans: tuple[int, ...]) -> str:
            own = (cuts[axis].get(span_of(spans, axis)) or next(names) for axis in (-2, -1))
            return " ".join([*stack, *lead, *own])

        k, n = (cuts[axis].get(1) or next(names) for axis in (self.contract, -3 - self.contract))
        parts = self.w.map_parts(part, index=None if self.w.index is None else " ".join(index))
        operands = [" ".join([*index, *lead, *rows, k]), *jax.tree.leaves(parts)]
        return ", ".join(operands) + " -> " + " ".join([*index, *lead, *rows, n])

    def _cuts(self, axis: int, names: Iterator[str]) -> dict[int, str]:
        """The axis as each span sees it, or nothing if it can not be cut: a short last block belongs to one device."""
        length = self.w.stored_shape[axis]
        spans = sorted({span_of(s, axis) for s in self.w.part_spans().values()} - {WHOLE} | {1}, reverse=True)
        chain = [length, *spans]
        if any(a % b for a, b in itertools.pairwise(chain)):
            return {}
        factors = [next(names) for _ in spans]
        sizes = [a // b for a, b in itertools.pairwise(chain)]
        # The first is a whole axis of some part, so its size is known.
        self.factor_sizes |= dict(zip(factors[1:], sizes[1:], strict=True))
        return {span: factors[0] if i == 0 else f"({' '.join(factors[: i + 1])})" for i, span in enumerate(spans)}

    def infer_sharding(self, mesh: Mesh, operands: Any, result: Any) -> NamedSharding:
        return self._shardings(mesh, operands)[1]

    def partition(self, mesh: Mesh, operands: Any, result: Any) -> tuple[Mesh, Callable[..., Any], Any, Any]:
        shardings, out, summed = self._shardings(mesh, operands)

        def on_each_device(x: jax.Array, *parts: jax.Array) -> jax.Array:
            if not summed:
                return self(x, *parts)
            wide = _Product(self.x, self.w, self.contract, jnp.float32, self.fast)
            return lax.psum(wide(x, *parts), summed).astype(self.dtype)

        return mesh, on_each_device, out, shardings

    def _shardings(self, mesh: Mesh, operands: Any) -> tuple[tuple[NamedSharding, ...], NamedSharding, tuple[str, ...]]:
        """The weight stays where it is; the activations and the result follow it. Also the axes to be summed over."""
        x, codes = (self._entries(operand) for operand in operands[:2])
        batch = len(self.w.shape) - 2
        layers = 0 if self.w.index is None else 1
        taken: set[str] = set()

        def take(entry: Any, counts: Sequence[int]) -> Any:
            names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
            pieces = math.prod(mesh.shape[name] for name in names)
            if not names or taken & set(names) or any(count % pieces for count in counts):
                return None
            taken.update(names)
            return entry

        def stored(axis: int) -> Any:
            spans = self.w.part_spans()
            counts = [getattr(self.w, part).shape[axis] for part in spans if span_of(spans[part], axis) != WHOLE]
            return take(codes[axis], counts)

        k, n = stored(self.contract), stored(-3 - self.contract)
        lead = [take(codes[axis], [self.w.stored_shape[axis]]) for axis in range(layers, len(self.w.stored_shape) - 2)]
        index = [take(x[axis], [self.x.shape[axis]]) for axis in range(batch - len(lead))]
        rows = [take(x[axis], [self.x.shape[axis]]) for axis in range(batch, len(self.x.shape) - 1)]

        def place(*entries: Any) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*entries))

        matrix = {self.contract: k, -3 - self.contract: n}

        def part(_: Any, spans: tuple[int, ...]) -> NamedSharding:
            own = (None if span_of(spans, axis) == WHOLE else matrix[axis] for axis in (-2, -1))
            return place(*[None] * layers, *lead, *own)

        parts = self.w.map_parts(part, index=None if self.w.index is None else place(*index))
        summed = () if k is None else k if isinstance(k, tuple) else (k,)
        shardings = (place(*index, *lead, *rows, k), *jax.tree.leaves(parts))
        return shardings, place(*index, *lead, *rows, n), summed

    def _entries(self, operand: Any) -> list[Any]:
        spec = getattr(operand.sharding, "spec", ())
        return [*spec, *[None] * (len(operand.shape) - len(spec))]


def _scale_operands(w: QuantizedArray, layers: int) -> Iterator[jax.Array]:
    """Scales, and what decodes them where they are codes themselves: scale of a group, offset, table."""
    none = lax.full((0, 0), 0, jnp.float32)
    scales, group, offset, table = w.coded_scales() or (w.scale_values(), none, none, none.reshape(0))
    yield scales
    for part in (group, offset):
        yield part.reshape(layers if part.size else 0, part.shape[-1])
    yield table


def _layer_numbers(w: QuantizedArray) -> jax.Array:
    """For each matrix of the batch, its place in the stack as stored."""
    inner = w.stored_shape[1:-2] if w.index is not None else w.stored_shape[:-2]
    own = jnp.arange(math.prod(inner), dtype=jnp.int32)
    if w.index is None:
        return own
    chosen = jnp.clip(w.index.astype(jnp.int32), 0, w.stored_shape[0] - 1)
    return (chosen.reshape(-1, 1) * own.size + own).reshape(-1)


# --- rows, and quantizing: on one device; over several, JAX cuts the reference program


def take_fits(w: QuantizedArray, rows: jax.Array) -> bool:
    return w.decoder is not None and w.dtype in _FLOATS and jax.device_count() == 1


def take(w: QuantizedArray, rows: jax.Array) -> jax.Array:
    """The rows of a matrix as stored, for row numbers of shape (..., 1)."""
    scales = _scale_operands(lax.stop_gradient(w), 1)
    y = jax.ffi.ffi_call(
        "lowbit_take",
        jax.ShapeDtypeStruct((rows.size, w.stored_shape[-1]), w.dtype),
        vmap_method="sequential",
    )(
        rows.reshape(rows.size).astype(jnp.int32),
        w.codes,
        *scales,
        lax.full((1,), 0, jnp.int32),
        format=w.decoder,
        columns=np.int64(w.stored_shape[-1]),
        row_span=np.int64(span_of(w.spans, -2)),
        col_span=np.int64(span_of(w.spans, -1)),
    )
    return y.reshape(*rows.shape[:-1], y.shape[-1])


def encode_fits(array: jax.Array, *, spans: tuple[int, ...], **params: Any) -> bool:
    return array.dtype in _FLOATS and all(span == 1 for span in spans[:-2]) and jax.device_count() == 1


def encode(array: jax.Array, *, spans: tuple[int, ...], format: str, like: Any) -> Any:
    """The codes and scales that the format's own program gives, bit for bit."""
    matrices = math.prod(array.shape[:-2])

    def stacked(shape: tuple[int, ...]) -> tuple[int, ...]:
        return (matrices, *(1,) * (2 - len(shape)), *shape[-2:])

    parts = jax.ffi.ffi_call(
        "lowbit_encode",
        [jax.ShapeDtypeStruct(stacked(part.shape), part.dtype) for part in like],
        vmap_method="sequential",
    )(
        array.reshape(stacked(array.shape)),
        format=format,
        row_span=np.int64(span_of(spans, -2)),
        col_span=np.int64(span_of(spans, -1)),
    )
    return type(like)(part.reshape(known.shape) for part, known in zip(parts, like, strict=True))


def register(folders: Sequence[str]) -> None:
    """Load the library from one of the folders, and add its kernels to the table."""
    global _library
    _library = _load(folders)
    if _library is not None:
        register_kernel("matmul", "cpu", matmul, matmul_fits)
        register_kernel("take", "cpu", take, take_fits)
        register_kernel("encode", "cpu", encode, encode_fits)
