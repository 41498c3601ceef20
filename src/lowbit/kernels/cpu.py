"""The native kernels for CPU: load the library and call its targets.

The library is built from `csrc/` with the package. `LOWBIT_NATIVE=0` disables it; `LOWBIT_ISA` names the instruction
set to use (generic, avx2, avx512; on ARM generic, neon, neon_dot, neon_i8mm) instead of the best one that the
machine has.
"""

import ctypes
import math
import os
import platform
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lowbit.dispatch import register_kernel
from lowbit.formats.blocks import span_of
from lowbit.formats.layout import Layout, Options
from lowbit.formats.levels import Integers, Table
from lowbit.formats.packed import SIGNED8
from lowbit.formats.quantized import QuantizedArray
from lowbit.formats.search import factors_to_try, inverse_top

from . import reference
from ._tiles import layer_numbers
from .groups import group_sizes
from .product import Product

_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
_library: ctypes.CDLL | None = None


def _load(folders: Sequence[str]) -> ctypes.CDLL | None:
    """Load the library and register its targets. Without one, return None and warn, unless LOWBIT_NATIVE=0."""
    if os.environ.get("LOWBIT_NATIVE") == "0":
        return None
    found = [path for folder in folders if (path := Path(folder) / "lowbit_native.so").exists()]
    try:
        library = ctypes.CDLL(str(found[0])) if found else None
        why = why_not_built(sys.platform, platform.machine())
    except OSError as error:
        library, why = None, f"The library does not load here: {error}. Reinstall lowbit on this machine."
    if library is None:
        warnings.warn(
            f"lowbit has no native CPU kernels here, so products on CPU are correct but slow. {why} Set "
            "LOWBIT_NATIVE=0 to silence this warning.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    library.lowbit_isa.restype = library.lowbit_targets.restype = ctypes.c_char_p
    if not library.lowbit_isa():
        library.lowbit_error.restype = ctypes.c_char_p
        raise ValueError(library.lowbit_error().decode())
    for name in library.lowbit_targets().decode().split(","):
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return library


def why_not_built(system: str, machine: str) -> str:
    """Why a package has no library, and what would help on this platform.

    >>> why_not_built("linux", "riscv64")
    'There are none for riscv64 (only for x86-64 and 64-bit ARM), so reinstalling does not help.'
    """
    if system not in ("linux", "darwin"):
        return f"There are none for {system}; under WSL, lowbit has those of Linux."
    if machine not in ("x86_64", "AMD64", "aarch64", "arm64"):
        return f"There are none for {machine} (only for x86-64 and 64-bit ARM), so reinstalling does not help."
    tool = "`xcode-select --install`" if system == "darwin" else "`apt-get install g++` or `dnf install gcc-c++`"
    return (
        f"No C++ compiler was found when lowbit was installed for {machine}: install one ({tool}), then "
        "`pip install --force-reinstall --no-deps --no-cache-dir` lowbit again."
    )


def instruction_set() -> str | None:
    """The instruction set in use; None without the library."""
    return None if _library is None else _library.lowbit_isa().decode()


# --- the product


def matmul_fits(product: Product) -> bool:
    """Whether the library has this product: its format, and matrices that do not share scales."""
    return _matrices_fit(product.w) and product.x.dtype in _FLOATS and product.dtype in _FLOATS


def _matrices_fit(w: QuantizedArray) -> bool:
    return w.decoder is not None and all(span_of(w.spans, axis) == 1 for axis in range(-len(w.spans), -2))


def matmul(product: Product) -> jax.Array:
    """As `reference.matmul`; float32 sums are as exact as any `precision` asks for."""
    w, matrices, rows = product.w, math.prod(product.batch), math.prod(product.rows)
    sizes = np.zeros(0, np.int32) if product.sizes is None else group_sizes(product)
    y = jax.ffi.ffi_call("lowbit_matmul", jax.ShapeDtypeStruct((matrices, rows, product.n), product.dtype))(
        product.x.reshape(matrices, rows, product.k),
        *_operands(w, math.prod(w.stored_shape[:-2])),
        layer_numbers(w),
        sizes,
        **_layout(w),
        contract=np.int64(product.contract + 2),
        fast=product.arithmetic == "fast",
    )
    return y.reshape(product.shape)


def _layout(w: QuantizedArray) -> dict[str, Any]:
    spans = {"row_span": np.int64(span_of(w.spans, -2)), "col_span": np.int64(span_of(w.spans, -1))}
    format = w.decoder if isinstance(w.decoder, str) else "table"
    return {
        "format": format,
        "codec": w.scale_codec or "",
        "columns": np.int64(w.stored_shape[-1]),
        **spans,
    }


def _operands(w: QuantizedArray, layers: int) -> Iterator[Any]:
    """Codes, levels, scales, and what decodes scales that are codes: group scales, offset, table; or empty arrays."""
    none = np.zeros((0, 0), np.float32)
    yield w.codes
    yield getattr(w, "high", None) if "high" in w.packing else none.astype(np.uint8)
    yield none.reshape(0) if isinstance(w.decoder, str) else np.asarray(w.decoder, np.float32)
    if coded := w.coded_scales():
        scales, group, offset, table = coded
        yield scales
        yield group.reshape(layers, group.shape[-1])
        yield offset.reshape(layers, 1)
        yield table
        return
    yield w.scales if w.scale_codec or w.scales.dtype in _FLOATS else w.scale_values()
    group = getattr(w, "group_scales", None)
    yield none if group is None or not w.scale_codec else group.astype(jnp.float32)
    yield none
    yield none.reshape(0)


# --- rows


def take_fits(w: QuantizedArray, rows: jax.Array) -> bool:
    # The values of rows are those of `materialize` to the bit: products of a float32 scale with a code and with a zero
    # point are rounded before they are subtracted.
    zeros = getattr(w, "offsets", None)
    rounded = zeros is not None and zeros.dtype not in _FLOATS and w.scales.dtype == jnp.float32
    return w.decoder is not None and w.dtype in _FLOATS and not rounded


def take(w: QuantizedArray, rows: jax.Array) -> jax.Array:
    """Decode rows of a matrix as stored, for row numbers of shape (..., 1)."""
    offsets = w.offset_values()
    y = jax.ffi.ffi_call(
        "lowbit_take",
        jax.ShapeDtypeStruct((rows.size, w.stored_shape[-1]), w.dtype if offsets is None else jnp.float32),
        vmap_method="sequential",
    )(rows.reshape(rows.size).astype(jnp.int32), *_operands(lax.stop_gradient(w), 1), **_layout(w))
    y = y.reshape(*rows.shape[:-1], y.shape[-1])
    return y if offsets is None else (y + reference.of_rows(w, offsets, rows)).astype(w.dtype)


def squares_fits(w: QuantizedArray, array: jax.Array) -> bool:
    plain = w.ndim > 1 and w.index is None and w.offset_values() is None and array.dtype in _FLOATS
    return _matrices_fit(w) and plain and jax.device_count() == 1


def squares(w: QuantizedArray, array: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As `reference.squares`; a decoded row stays in the cache."""
    *layers, rows, columns = w.stored_shape
    stack = math.prod(layers)
    sums = jax.ShapeDtypeStruct((stack, rows), jnp.float32)
    lost, size = jax.ffi.ffi_call("lowbit_squares", (sums, sums), vmap_method="sequential")(
        array.reshape(stack, rows, columns), *_operands(w, stack), **_layout(w)
    )
    return lost.reshape(*layers, rows), size.reshape(*layers, rows)


# --- quantizing: on one device; over several, JAX partitions the reference program


def encode_fits(array: jax.Array, *, spans: tuple[int, ...], **params: Any) -> bool:
    return array.dtype in _FLOATS and all(span == 1 for span in spans[:-2]) and jax.device_count() == 1


def encode(array: jax.Array, *, spans: tuple[int, ...], format: str, like: Any) -> Any:
    """The codes and scales of the format's own program, bit for bit."""
    matrices = math.prod(array.shape[:-2])
    components = jax.ffi.ffi_call(
        "lowbit_encode", [_stack_of(known, matrices) for known in like], vmap_method="sequential"
    )(
        array.reshape(_stack_of(array, matrices).shape),
        format=format,
        row_span=np.int64(span_of(spans, -2)),
        col_span=np.int64(span_of(spans, -1)),
    )
    return type(like)(found.reshape(known.shape) for found, known in zip(components, like, strict=True))


_LONGEST_BLOCK = 512  # that the library searches


def search_fits(array: jax.Array, *, spans: tuple[int, ...], layout: Layout, options: Options, like: Any) -> bool:
    """Whether the library has this search: blocks along one of the last two axes, few levels, scales that it stores."""
    axis = next(axis for axis in range(-len(spans), 0) if spans[axis] != 1)
    bits = {Table: 4, Integers: 6}.get(type(layout.levels), 0)
    stored = layout.scales is None if layout.group is None else (layout.scales, layout.group) == (SIGNED8, "axis")
    return (
        array.dtype in _FLOATS
        and array.size > 0
        and axis >= -2
        and (spans[axis] or array.shape[axis]) <= _LONGEST_BLOCK
        and layout.levels.bits <= bits
        and stored
        and layout.weighting in ("plain", "square", "root")
        and jax.device_count() == 1
    )


def search(array: jax.Array, *, spans: tuple[int, ...], layout: Layout, options: Options, like: Any) -> Any:
    """The components of the format's own program, bit for bit."""
    levels = layout.levels
    along_rows = span_of(spans, -2) != 1
    span = span_of(spans, -2) if along_rows else span_of(spans, -1)
    matrices = math.prod(array.shape[:-2])
    none, nothing = np.zeros(0, np.float32), jax.ShapeDtypeStruct((0, 0, 0), jnp.float32)
    names = ("codes", "high", "scales", "group_scales")
    types = {name: _stack_of(like[name], matrices) if name in like else nothing for name in names}
    types["high"] = jax.ShapeDtypeStruct(types["high"].shape, jnp.uint8)
    found = jax.ffi.ffi_call("lowbit_search", list(types.values()), vmap_method="sequential")(
        array.reshape(_stack_of(array, matrices).shape),
        levels.table if isinstance(levels, Table) else none,
        levels.middle if isinstance(levels, Table) else none,
        factors_to_try(layout.is_signed),
        bits=np.int64(levels.bits),
        zero=np.int64(levels.zero if isinstance(levels, Integers) else 0),
        weighting=layout.weighting,
        inverse_top=inverse_top(levels),
        group_factor=layout.group_factor if layout.group else np.float32(0),
        along_rows=along_rows,
        span=np.int64(span or array.shape[-2 if along_rows else -1]),
    )
    by_name = dict(zip(names, found, strict=True))
    return {name: by_name[name].reshape(known.shape) for name, known in like.items()}


def _stack_of(array: Any, matrices: int) -> jax.ShapeDtypeStruct:
    """An array as a stack of matrices."""
    shape = (matrices, *(1,) * (2 - len(array.shape)), *array.shape[-2:])
    return jax.ShapeDtypeStruct(shape, array.dtype)


def register(folders: Sequence[str]) -> None:
    """Load the library from the first folder that has it, and add its kernels to the table."""
    global _library
    _library = _load(folders)
    if _library is not None:
        register_kernel("matmul", "cpu", matmul, matmul_fits)
        register_kernel("take", "cpu", take, take_fits)
        register_kernel("squares", "cpu", squares, squares_fits)
        register_kernel("encode", "cpu", encode, encode_fits)
        register_kernel("search", "cpu", search, search_fits)
