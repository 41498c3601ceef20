"""The targets of the native library for each instruction set, and random operands for them."""

import contextlib
import ctypes
import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowbit.kernels
from lowbit.formats import packed
from lowbit.formats.nf4 import LEVELS, dynamic_map

FOLDERS = [Path(folder) / "lowbit_native.so" for folder in lowbit.kernels.__path__]
LIBRARY = Path(os.environ.get("LOWBIT_LIBRARY") or next((path for path in FOLDERS if path.exists()), "none"))
# The level of each code.
TABLES = {
    "int8": np.arange(-128.0, 128.0),
    "nf4": LEVELS.astype(np.float64),
    "ternary": np.array([-1.0, 0.0, 1.0]),
    "binary": np.array([-1.0, 1.0]),
    **{name: packed.LAYOUTS[name].levels.table.astype(np.float64) for name in packed.LAYOUTS if name != "nvfp4"},
}
ALL = list(TABLES)
OLD = ALL[:4]
# The mechanisms: a table of small integers, codes in two components with one, two and four chunks of levels, floats.
FORMATS = [*OLD, "q4", "q2", "q3", "int5", "int6", "mxfp4", "fp8", "fp8_e5m2"]
CODECS = {"signed8": packed.SIGNED8, "e4m3": packed.E4M3, "e8m0": packed.E8M0}


def registered(isa, folder):
    """A function that registers a target of the library for one instruction set and gives its name in JAX.

    The instruction set is chosen when a library is loaded: a copy under another name is another library.
    """
    path = folder / f"{isa}.so"
    shutil.copy(LIBRARY, path)
    before = os.environ.get("LOWBIT_ISA")
    os.environ["LOWBIT_ISA"] = isa
    try:
        library = ctypes.CDLL(str(path))
        library.lowbit_isa.restype = ctypes.c_char_p
        chosen = library.lowbit_isa().decode()
    finally:
        del os.environ["LOWBIT_ISA"]
        if before is not None:
            os.environ["LOWBIT_ISA"] = before
    if chosen != isa:
        lacks = pytest.fail if "LOWBIT_TEST_ISA" in os.environ else pytest.skip
        lacks(f"this machine has no {isa}")

    @functools.cache
    def register(name):
        capsule = jax.ffi.pycapsule(getattr(library, name))
        jax.ffi.register_ffi_target(f"{name}_{isa}", capsule, platform="cpu")
        return f"{name}_{isa}"

    return register


def stored_length(length, span):
    return 1 if span == 0 else -(-length // span)


def spread(values, spans, shape):
    """Repeat each stored value for all elements that it covers."""
    for axis, (span, length) in enumerate(zip(spans, shape, strict=True), start=1):
        values = np.repeat(values, span or max(length, 1), axis)
        values = values[:, :length] if axis == 1 else values[:, :, :length]
    return values


def pack(picks, bits):
    """Codes of so many bits, packed along the last axis, the first in the highest bits."""
    per_byte = 8 // bits
    short = -picks.shape[-1] % per_byte
    fields = np.pad(picks, ((0, 0), (0, 0), (0, short)))
    fields = fields.reshape(*picks.shape[:2], (picks.shape[2] + short) // per_byte, per_byte)
    return (fields << 8 - bits * (np.arange(per_byte) + 1)).sum(-1).astype(np.uint8)


class Stored:
    """Random weights: `operands` as the targets take them, `values` in float64.

    `scale`: "float32", "float16", "bfloat16"; "dynamic" for NF4's 8-bit scales; or a codec, with group scales "rows",
    "columns", "matrix" or none behind a space.
    """

    def __init__(self, format, layers, rows, columns, row_span, col_span, *, scale="float32", shared=False, seed=0):
        rng = np.random.default_rng(seed)
        levels = TABLES[format]
        known = np.flatnonzero(np.isfinite(levels))
        picks = known[rng.integers(0, len(known), (layers, rows, columns))]
        bits = max(int(np.ceil(np.log2(len(levels)))), 1)
        low = {3: 2, 5: 4, 6: 4}.get(bits, bits)
        codes = (picks - 128).astype(np.int8) if format == "int8" else pack(picks & 2**low - 1, low)
        high = pack(picks >> low, bits - low) if bits > low else np.zeros((0, 0), np.uint8)
        table = np.zeros(0, np.float32) if bits == 8 else np.resize(levels, 2**bits).astype(np.float32)
        shape = (1 if shared else layers, stored_length(rows, row_span), stored_length(columns, col_span))
        scales, self.stored_scales = random_scales(rng, shape, scale)
        self.operands = [codes, high, table, *self.stored_scales]
        self.levels = levels[picks]
        self.scales = spread(scales.astype(np.float64), (row_span, col_span), (rows, columns))
        self.values = self.levels * self.scales
        self.attributes = {
            "format": {"int8": "int8", "fp8": "e4m3", "fp8_e5m2": "e5m2"}.get(format, "table"),
            "codec": scale.split()[0],
            "columns": np.int64(columns),
            "row_span": np.int64(row_span),
            "col_span": np.int64(col_span),
        }


def random_scales(rng, shape, kind):
    """Scales in float64, and the operands that store them: scales, group scales, offset, map."""
    none = np.zeros((0, 0), np.float32)
    name, *group = kind.split()
    if name == "dynamic":
        stored = rng.integers(0, 256, shape).astype(np.uint8)
        groups = -(-shape[1] * shape[2] // 256)
        tops = rng.uniform(0.1, 1, (shape[0], groups)).astype(np.float32)
        offset = rng.uniform(1, 2, (shape[0], 1)).astype(np.float32)
        flat = dynamic_map().astype(np.float64)[stored].reshape(shape[0], shape[1] * shape[2])
        flat = flat * np.repeat(tops, 256, 1)[:, : flat.shape[1]] + offset
        return flat.reshape(shape), [stored, tops, offset, dynamic_map()]
    if name not in CODECS:
        scales = rng.uniform(0.5, 2, shape).astype(jnp.dtype(name))
        return scales.astype(np.float64), [scales, none, none, none[0:0].reshape(0)]
    values = CODECS[name].table.astype(np.float64)
    near = np.flatnonzero(np.isfinite(values) & (np.abs(values) < 100))
    stored = near[rng.integers(0, len(near), shape)].astype(np.uint8)
    if not group:
        return values[stored], [stored, none, none, none.reshape(0)]
    keep = {"rows": (shape[1], 1), "columns": (1, shape[2]), "matrix": (1, 1)}[group[0]]
    tops = rng.uniform(0.1, 1, (shape[0], *keep)).astype(np.float32)
    return values[stored] * tops, [stored, tops, none, none.reshape(0)]


class Call(NamedTuple):
    """A call of a target."""

    function: Callable
    operands: tuple

    def run(self):
        return jax.jit(self.function)(*self.operands)


def matmul(target, x, stored, index, contract, dtype=jnp.float32, fast=False, sizes=()):
    n = stored.values.shape[2 - contract]
    call = jax.ffi.ffi_call(target("lowbit_matmul"), jax.ShapeDtypeStruct((*x.shape[:2], n), dtype))
    call = functools.partial(call, contract=np.int64(contract), fast=fast, **stored.attributes)
    return Call(call, (x, *stored.operands, np.asarray(index, np.int32), np.asarray(sizes, np.int32)))


def take(target, ids, stored, dtype=jnp.float32):
    shape = jax.ShapeDtypeStruct((len(ids), stored.values.shape[2]), dtype)
    call = functools.partial(jax.ffi.ffi_call(target("lowbit_take"), shape), **stored.attributes)
    return Call(call, (np.asarray(ids, np.int32), *stored.operands))


def squares(target, x, stored, **changes):
    sums = jax.ShapeDtypeStruct(changes.pop("shape", x.shape[:2]), jnp.float32)
    call = jax.ffi.ffi_call(target("lowbit_squares"), (sums, sums))
    return Call(functools.partial(call, **(stored.attributes | changes)), (x, *stored.operands))


def check_together(cases):
    """Run the calls of several cases as one program, since compiling one for each takes longer than all calls.

    A case is a generator: it yields its call, gets the result, and asserts.
    """
    cases = list(cases)
    calls = [next(case) for case in cases]
    run = jax.jit(lambda operands: [call.function(*own) for call, own in zip(calls, operands, strict=True)])
    for case, result in zip(cases, run([call.operands for call in calls]), strict=True):
        with contextlib.suppress(StopIteration):
            case.send(result)
            pytest.fail("a case has one call")
