"""The targets of the native library, called directly, against float64, for every instruction set of this machine."""

import ctypes
import functools
import itertools
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowbit.kernels
from lowbit.formats import int8, nf4, packed
from lowbit.formats import layout as layouts
from lowbit.formats.nf4 import LEVELS, dynamic_map
from lowbit.kernels import cpu

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
pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="no native library")


@pytest.fixture(scope="module", params=["generic", "avx2", "avx512"])
def target(request, tmp_path_factory):
    """target(name) registers a target of the library for one instruction set and gives its name in JAX.

    The instruction set is chosen when a library is loaded: a copy under another name is another library.
    """
    isa = request.param
    path = tmp_path_factory.mktemp("native") / f"{isa}.so"
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
        pytest.skip(f"this machine has no {isa}")

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


def matmul(target, x, stored, index, contract, dtype=jnp.float32, fast=False):
    n = stored.values.shape[2 - contract]
    call = jax.ffi.ffi_call(target("lowbit_matmul"), jax.ShapeDtypeStruct((*x.shape[:2], n), dtype))
    return jax.jit(functools.partial(call, contract=np.int64(contract), fast=fast, **stored.attributes))(
        x, *stored.operands, np.asarray(index, np.int32)
    )


def check_matmul(
    target, format, contract, spans, m, k, n, *, layers=1, index=(0,), x_type=jnp.float32, y_type=jnp.float32, **options
):
    rows, columns = (n, k) if contract else (k, n)
    stored = Stored(format, layers, rows, columns, *spans, **options)
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((len(index), m, k)), x_type)
    y = np.asarray(matmul(target, x, stored, index, contract, y_type), np.float64)
    wide = np.asarray(x, np.float64)
    w = stored.values[np.clip(index, 0, layers - 1)]
    w = w.swapaxes(1, 2) if contract else w
    want, size = wide @ w, np.abs(wide) @ np.abs(w)
    # The sum is rounded in float32, the result once more in its own type.
    bound = 1e-6 * size + float(jnp.finfo(y_type).eps) * np.abs(want) + 1e-30
    assert y.shape == want.shape
    worst = np.max(np.abs(y - want) / bound, initial=0)
    assert worst < 1, f"{format} {contract=} {spans=} {m=} {k=} {n=}: {worst} times the bound"


@pytest.mark.parametrize("format", FORMATS)
def test_matmul_for_all_spans(target, format):
    for contract, spans in itertools.product((0, 1), [(64, 1), (1, 64), (0, 1), (1, 0)]):
        for m in (1, 3, 37):
            check_matmul(target, format, contract, spans, m, 131, 203)
    for contract, spans in itertools.product((0, 1), [(16, 1), (1, 32), (0, 0), (5, 7), (1, 1), (3, 1), (1, 5)]):
        check_matmul(target, format, contract, spans, 1 + contract, 131, 203)


@pytest.mark.parametrize("format", FORMATS)
def test_matmul_of_large_matrices(target, format):
    """Large enough for several threads, slabs and blocks, with and without ragged ends."""
    for contract, spans in [(0, (64, 1)), (0, (1, 64)), (1, (1, 64)), (1, (64, 1))]:
        check_matmul(target, format, contract, spans, 1, 1024, 768)
        check_matmul(target, format, contract, spans, 4, 1001, 999)
        check_matmul(target, format, contract, spans, 33, 515, 321)


def test_matmul_of_odd_sizes(target):
    sizes = [(1, 1, 1), (1, 0, 5), (2, 3, 0), (0, 3, 4), (1, 2, 577), (1, 577, 2), (13, 17, 31)]
    for format, contract, (m, k, n) in itertools.product(FORMATS, (0, 1), sizes):
        check_matmul(target, format, contract, (64, 1), m, k, n)
        check_matmul(target, format, contract, (1, 64), m, k, n)


def test_matmul_of_all_float_types(target):
    types = [jnp.float32, jnp.bfloat16, jnp.float16]
    for x_type, y_type in itertools.product(types, types):
        check_matmul(target, "nf4", 0, (64, 1), 3, 130, 70, x_type=x_type, y_type=y_type)
        check_matmul(target, "int8", 1, (1, 0), 9, 130, 70, x_type=x_type, y_type=y_type)


def test_matmul_with_scales_in_eight_bits(target):
    for contract, spans, m in itertools.product((0, 1), [(64, 1), (1, 64), (1, 16)], (1, 20)):
        check_matmul(target, "nf4", contract, spans, m, 200, 333, scale="dynamic")
        check_matmul(target, "nf4", contract, spans, m, 70, 130, scale="dynamic", layers=3, index=(2, 0, 9, -1))


@pytest.mark.parametrize(
    "scale",
    ["float16", "bfloat16", "signed8 columns", "signed8 rows", "signed8", "e4m3 matrix", "e4m3", "e8m0", "e8m0 rows"],
)
def test_matmul_for_all_types_of_scales(target, scale):
    for contract, spans, m in itertools.product((0, 1), [(32, 1), (1, 32), (0, 1), (16, 16)], (1, 3, 20)):
        check_matmul(target, "q4", contract, spans, m, 130, 203, scale=scale)
    check_matmul(target, "q3", 0, (32, 1), 2, 70, 130, scale=scale, layers=3, index=(2, 0, 9, -1))
    check_matmul(target, "q4", 1, (1, 32), 2, 70, 130, scale=scale, layers=3, index=(1, 2), shared=True)
    check_fast(target, "q4", 1, 32, 3, 200, 333, scale=scale)
    check_fast(target, "q3", 0, 32, 1, 200, 333, scale=scale)
    stored = Stored("q4", 1, 40, 77, 16, 1, scale=scale)
    got = take(target, np.arange(40), stored)
    np.testing.assert_allclose(got, stored.values[0], rtol=1e-6, atol=1e-30)


def test_matmul_by_index(target):
    for format, contract, shared in itertools.product(FORMATS, (0, 1), (False, True)):
        spans = (1, 64) if contract else (64, 1)
        check_matmul(target, format, contract, spans, 2, 96, 130, layers=3, index=(2, 0, 5, -4, 1), shared=shared)
        check_matmul(target, format, contract, spans, 1, 320, 256, layers=4, index=(3, 1, 1, 0, 2, 3), shared=shared)


def test_matmul_passes_nan_on(target):
    for contract, (row_span, col_span), m in itertools.product((0, 1), [(64, 1), (1, 64)], (1, 20)):
        stored = Stored("nf4", 1, 128, 128, row_span, col_span)
        stored.stored_scales[0][0, 1, 1] = np.nan
        y = np.asarray(matmul(target, np.ones((1, m, 128), np.float32), stored, [0], contract))
        scales = np.repeat(np.repeat(stored.stored_scales[0], row_span, 1), col_span, 2)
        np.testing.assert_array_equal(np.isnan(y[0, 0]), np.isnan(scales[0]).any(axis=contract))


def test_wrong_operands_get_an_error(target):
    stored = Stored("nf4", 2, 64, 33, 16, 1)
    x = np.ones((1, 2, 64), np.float32)
    codes, no_high, levels, scales, none, _, no_map = stored.operands
    good = {
        "x": x,
        "codes": codes,
        "high": no_high,
        "levels": levels,
        "scales": scales,
        "group_scales": none,
        "offset": none,
        "scale_map": no_map,
        "index": np.zeros(1, np.int32),
    }
    name = target("lowbit_matmul")

    def call(shape=(1, 2, 33), dtype=jnp.float32, **changes):
        operands = [changes.pop(component, value) for component, value in good.items()]
        attributes = stored.attributes | {"contract": np.int64(0), "fast": False} | changes
        return jax.jit(lambda *a: jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(shape, dtype))(*a, **attributes))(
            *operands
        ).block_until_ready()

    call()
    eight = scales.astype(np.uint8)
    for text, changes in [
        ("unknown format 'nf5'", {"format": "nf5"}),
        ("codes", {"codes": codes.astype(np.int8)}),
        ("codes .* at least two axes", {"codes": codes[0, 0]}),
        ("codes", {"columns": np.int64(35)}),
        ("hold no layer", {"codes": codes[:0], "scales": scales[:1]}),
        ("scales .* at least two axes", {"scales": scales[0, 0]}),
        ("scales", {"scales": scales[:, :3]}),
        ("scales must be", {"scales": scales.astype(np.int32)}),
        ("levels .* must be f32", {"levels": levels[:15]}),
        ("levels belong", {"format": "e4m3"}),
        ("high belongs", {"high": codes}),
        ("high .* must be u8 with 5 bytes", {"levels": np.arange(32, dtype=np.float32)}),
        ("integers within", {"levels": np.linspace(0, 1, 8, dtype=np.float32)}),
        ("unknown codec 'e9m9'", {"scales": scales.astype(np.uint8), "codec": "e9m9"}),
        ("group_scales", {"scales": eight, "codec": "signed8", "group_scales": np.ones((2, 3, 1), np.float32)}),
        ("scales", {"row_span": np.int64(32)}),
        ("scales", {"col_span": np.int64(0)}),
        ("negative", {"row_span": np.int64(-1)}),
        ("negative", {"columns": np.int64(-33)}),
        ("group_scales", {"scales": eight, "codec": "dynamic"}),
        ("group_scales", {"scales": eight, "codec": "dynamic", "group_scales": np.ones((2, 1), np.float32)}),
        ("group_scales", {"group_scales": np.ones((2, 1), np.float32)}),
        ("f32, bf16 or f16", {"x": x.astype(np.int32)}),
        ("f32, bf16 or f16", {"dtype": jnp.int32}),
        ("do not fit", {"x": x[0]}),
        ("do not fit", {"x": x[:, :, :63]}),
        ("do not fit", {"shape": (1, 2, 34)}),
        ("do not fit", {"contract": np.int64(1)}),
        ("contract=2", {"contract": np.int64(2)}),
        ("index", {"index": np.zeros(2, np.int32)}),
        ("index", {"index": np.zeros(1, np.float32)}),
    ]:
        with pytest.raises(Exception, match="lowbit: .*" + text):
            call(**changes)


# ---- Activations in int8


def rounded_to_int8(x, block):
    """x in float64, with each block of each row rounded to 8 bits."""
    rounded = np.zeros(x.shape)
    for begin in range(0, x.shape[-1], block):
        component = x[..., begin : begin + block]
        top = np.abs(component).max(-1, keepdims=True)
        factor = np.where(top > 0, np.float32(127) / np.where(top > 0, top, 1), 0).astype(np.float32)
        step = np.where(top > 0, top / np.float32(127), 0).astype(np.float64)
        rounded[..., begin : begin + block] = np.rint(component * factor) * step
    return rounded


def check_fast(target, format, contract, span, m, k, n, *, block=None, index=(0,), x_type=None, y_type=None, **options):
    rows, columns = (n, k) if contract else (k, n)
    spans = (1, span) if contract else (span, 1)
    stored = Stored(format, 3, rows, columns, *spans, **options)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((len(index), m, k)), x_type or jnp.float32)
    y_type = y_type or jnp.float32
    y = np.asarray(matmul(target, x, stored, index, contract, y_type, fast=True), np.float64)
    levels = np.rint(stored.levels * 127) / 127 if format == "nf4" else stored.levels
    if format.startswith("fp8"):  # runs as exact
        return check_matmul(target, format, contract, spans, m, k, n, layers=3, index=index, **options)
    layers = np.clip(index, 0, 2)
    w, true = (levels * stored.scales)[layers], stored.values[layers]
    if contract:
        w, true = w.swapaxes(1, 2), true.swapaxes(1, 2)
    wide = rounded_to_int8(np.asarray(x, np.float32), block or span or max(k, 1))
    want = wide @ w
    bound = 1e-6 * (np.abs(wide) @ np.abs(w)) + float(jnp.finfo(y_type).eps) * np.abs(want) + 1e-30
    worst = np.max(np.abs(y - want) / bound, initial=0)
    assert worst < 1, f"{format} {contract=} {span=} {m=} {k=} {n=}: {worst} times the bound"
    if x_type is None and k >= 128:
        exact = np.asarray(x, np.float64) @ true
        assert np.linalg.norm(y - exact) < 1.5e-2 * np.linalg.norm(exact)


@pytest.mark.parametrize("format", FORMATS)
def test_fast_matmul_is_its_definition(target, format):
    for contract in (0, 1):
        check_fast(target, format, contract, 64, 1, 512, 640)
        check_fast(target, format, contract, 256, 1, 1024, 777)
        check_fast(target, format, contract, 0, 1, 1101, 1335, index=(1, 0))
        check_fast(target, format, contract, 1024, 1, 2112, 203, block=512)
        check_fast(target, format, contract, 0, 5, 515, 203)
        check_fast(target, format, contract, 32, 13, 130, 77)
        check_fast(target, format, contract, 1024, 2, 2112, 70, block=512)
        check_fast(target, format, contract, 64, 37, 1000, 130, index=(2, 9))
        check_fast(target, format, contract, 0, 3, 65, 33, index=(1, -5, 0), x_type=jnp.bfloat16, y_type=jnp.float16)
        for m, k, n in [(1, 1, 1), (2, 0, 3), (0, 8, 3), (1, 7, 577)]:
            check_fast(target, format, contract, 0, m, k, n)
    check_fast(target, format, 0, 64, 3, 192, 131, x_type=jnp.float16, y_type=jnp.bfloat16)


def test_fast_matmul_with_scales_in_eight_bits(target):
    for contract, m in itertools.product((0, 1), (1, 7)):
        check_fast(target, "nf4", contract, 64, m, 200, 333, scale="dynamic")


def test_fast_matmul_is_exact_where_scales_vary_in_its_sum(target):
    x = np.random.default_rng(1).standard_normal((1, 3, 96)).astype(np.float32)
    for format, (contract, spans) in itertools.product(OLD, [(0, (1, 64)), (1, (64, 1)), (0, (3, 1)), (1, (1, 6))]):
        stored = Stored(format, 1, 96, 96, *spans)
        fast, exact = (matmul(target, x, stored, [0], contract, fast=fast) for fast in (True, False))
        np.testing.assert_array_equal(fast, exact)


def test_fast_matmul_of_rows_with_nan_or_infinity_is_nan(target):
    x = np.random.default_rng(1).standard_normal((1, 8, 256)).astype(np.float32)
    x[0, 1, 7], x[0, 3, 255], x[0, 4, 100] = np.nan, np.inf, -np.inf
    x[0, 5] = 0
    x[0, 6] *= 1e-42
    for format, contract, span in itertools.product([*OLD, "q4", "q3"], (0, 1), (0, 64)):
        stored = Stored(format, 1, 256, 256, *((1, span) if contract else (span, 1)))
        y = np.asarray(matmul(target, x, stored, [0], contract, fast=True))[0]
        np.testing.assert_array_equal(np.isnan(y).all(1), [i in (1, 3, 4) for i in range(8)])
        assert not np.isnan(y[[0, 2, 5, 6, 7]]).any() and (y[5:7] == 0).all()


# ---- Take


def take(target, ids, stored, dtype=jnp.float32):
    shape = jax.ShapeDtypeStruct((len(ids), stored.values.shape[2]), dtype)
    call = jax.ffi.ffi_call(target("lowbit_take"), shape)
    return jax.jit(functools.partial(call, **stored.attributes))(np.asarray(ids, np.int32), *stored.operands)


def test_take(target):
    ids = [0, 5, 5, -1, 99, 3]
    for format, spans, columns in itertools.product(ALL, [(64, 1), (1, 64), (1, 0), (5, 7)], (33, 256)):
        stored = Stored(format, 1, 20, columns, *spans)
        for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
            want = stored.values[0][np.clip(ids, 0, 19)]
            np.testing.assert_array_equal(
                take(target, ids, stored, dtype), jnp.asarray(want, jnp.float32).astype(dtype)
            )
    stored = Stored("nf4", 1, 300, 640, 1, 64, scale="dynamic")
    many = np.random.default_rng(0).integers(0, 300, 500)
    np.testing.assert_allclose(take(target, many, stored), stored.values[0][many], rtol=1e-6)


# ---- Squares of the error


def squares(target, x, stored, **changes):
    sums = jax.ShapeDtypeStruct(changes.pop("shape", x.shape[:2]), jnp.float32)
    call = jax.ffi.ffi_call(target("lowbit_squares"), (sums, sums))
    return jax.jit(functools.partial(call, **(stored.attributes | changes)))(x, *stored.operands)


def test_squares(target):
    rng = np.random.default_rng(0)
    formats = [*OLD, "q4", "q3", "mxfp4"]
    for format, spans, columns in itertools.product(formats, [(64, 1), (1, 64), (1, 0), (5, 7)], (33, 256, 5000)):
        stored = Stored(format, 2, 20, columns, *spans)
        for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
            x = jnp.asarray(stored.values + rng.standard_normal(stored.values.shape) / 100, dtype)
            lost, size = squares(target, x, stored)
            wide = np.asarray(x, np.float64)
            np.testing.assert_allclose(lost, np.sum((stored.values - wide) ** 2, -1), rtol=1e-3)
            np.testing.assert_allclose(size, np.sum(wide**2, -1), rtol=1e-5)
    stored = Stored("nf4", 2, 300, 640, 1, 64, scale="dynamic")
    lost, _ = squares(target, np.zeros(stored.values.shape, np.float32), stored)
    np.testing.assert_allclose(lost, np.sum(stored.values**2, -1), rtol=1e-5)
    for shape in [(0, 3, 4), (1, 0, 4), (1, 3, 0)]:
        lost, size = squares(target, np.zeros(shape, np.float32), Stored("nf4", *shape, 1, 16))
        assert lost.shape == size.shape == shape[:2] and (np.asarray(lost) == 0).all()


def test_squares_of_a_row_with_nan_are_nan(target):
    x = np.ones((1, 3, 40), np.float32)
    x[0, 1, 39] = np.nan
    lost, size = squares(target, x, Stored("int8", 1, 3, 40, 1, 0))
    for sums in (lost, size):
        np.testing.assert_array_equal(np.isfinite(sums), [[True, False, True]])


# ---- Encode


def encode(target, x, format, row_span, col_span):
    layers, rows, columns = x.shape
    codes = (layers, rows, -(-columns // (1 if format == "int8" else 2)))
    scales = (layers, stored_length(rows, row_span), stored_length(columns, col_span))
    types = (
        jax.ShapeDtypeStruct(codes, jnp.int8 if format == "int8" else jnp.uint8),
        jax.ShapeDtypeStruct(scales, jnp.float32),
    )
    call = jax.ffi.ffi_call(target("lowbit_encode"), types)
    return jax.jit(functools.partial(call, format=format, row_span=np.int64(row_span), col_span=np.int64(col_span)))(x)


def test_encode_gives_the_bits_of_the_format(target):
    rng = np.random.default_rng(0)
    for shape, spans in itertools.product(
        [(2, 131, 77), (1, 64, 520)], [(64, 1), (1, 64), (0, 1), (1, 0), (16, 16), (1, 5)]
    ):
        x = rng.standard_normal(shape).astype(np.float32)
        # Zeros, subnormal numbers and their neighbours, numbers near the largest, NaN and infinity.
        x[0, 2] = x[0, :, 11] = 0
        x[0, 3] *= 1e-38
        x[0, :, 12] *= 3e-39
        x[-1, 30:, 13:16] *= 1e37
        x[-1, 5, 9], x[-1, 6, 10], x[0, 40, 70] = np.nan, np.inf, -np.inf
        for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
            a = jnp.asarray(x).astype(dtype)
            components = nf4._encode(a, spans, False)
            for format, want in [
                ("nf4", (components["codes"], components["scales"])),
                ("int8", int8._encode(a, spans)),
            ]:
                for component, whole in zip(encode(target, a, format, *spans), want, strict=True):
                    np.testing.assert_array_equal(
                        np.asarray(component).view(np.uint8),
                        np.asarray(whole).view(np.uint8),
                        f"{format} {shape} {spans} {dtype}",
                    )


@pytest.fixture
def search(target, monkeypatch):
    """Quantize by the search of the library of one instruction set."""

    def run(array, spans, layout, options):
        like = jax.eval_shape(lambda array: layouts._by_jax(array, spans, layout, options), array)
        call = jax.ffi.ffi_call
        with monkeypatch.context() as patch:
            patch.setattr(jax.ffi, "ffi_call", lambda name, *args, **params: call(target(name), *args, **params))
            return jax.jit(lambda a: cpu.search(a, spans=spans, layout=layout, options=options, like=like))(array)

    return run


@pytest.mark.parametrize("name", ["q4", "q3", "q2", "int4", "int6"])
def test_search_gives_the_bits_of_the_format(search, name):
    rng = np.random.default_rng(0)
    for shape, spans, dtype, scale_dtype in [
        ((2, 131, 77), (32, 1), jnp.float32, np.float32),
        ((1, 64, 520), (1, 32), jnp.float32, jnp.float16),
        ((1, 70, 90), (16, 1), jnp.bfloat16, jnp.bfloat16),
        ((3, 33, 65), (1, 64), jnp.float16, np.float32),
        ((1, 50, 40), (0, 1), jnp.float32, np.float32),
        ((1, 40, 50), (1, 20), jnp.float32, np.float32),
    ]:
        x = rng.standard_normal(shape).astype(np.float32)
        # Zeros, subnormal numbers and their neighbours, numbers near the largest, NaN and infinity.
        x[0, 2] = x[0, :, 11] = 0
        x[0, 3] *= 1e-38
        x[0, :, 12] *= 3e-39
        x[-1, 20:, 13:16] *= 1e37
        x[-1, 5, 9], x[-1, 6, 10], x[0, 30, 33] = np.nan, np.inf, -np.inf
        array, layout = jnp.asarray(x).astype(dtype), packed.LAYOUTS[name]
        held = np.dtype(scale_dtype) if layout.scales is None else np.dtype(np.float32)
        options = layouts.Options(False, True, held)
        assert cpu.search_fits(array, spans=spans, layout=layout, options=options, like=None) or jax.device_count() > 1
        want = jax.jit(lambda a, *args: layouts._by_jax(a, *args), static_argnums=(1, 2, 3))(
            array, spans, layout, options
        )
        got = search(array, spans, layout, options)
        for part, whole in want.items():
            np.testing.assert_array_equal(
                np.asarray(got[part]).view(np.uint8), np.asarray(whole).view(np.uint8), f"{part} {shape} {spans}"
            )


def test_encode_of_nothing(target):
    for format, shape in itertools.product(("nf4", "int8"), [(0, 3, 4), (1, 0, 4), (1, 3, 0)]):
        codes, scales = encode(target, np.zeros(shape, np.float32), format, 0, 1)
        assert codes.shape[:2] == shape[:2] and (np.asarray(scales) == 0).all()


def test_wrong_operands_of_take_squares_and_encode_get_an_error(target):
    stored = Stored("nf4", 1, 8, 32, 1, 16)
    ids = np.zeros(3, np.int32)

    def call_take(shape=(3, 32), dtype=jnp.float32, ids=ids, stored=stored, **changes):
        call = jax.ffi.ffi_call(target("lowbit_take"), jax.ShapeDtypeStruct(shape, dtype))
        return jax.jit(functools.partial(call, **(stored.attributes | changes)))(ids, *stored.operands)

    some = np.ones((1, 8, 32), np.float32)

    def call_encode(x=some, codes=(1, 8, 16), scales=(1, 8, 2), format="nf4", span=16):
        types = (jax.ShapeDtypeStruct(codes, jnp.uint8), jax.ShapeDtypeStruct(scales, jnp.float32))
        call = jax.ffi.ffi_call(target("lowbit_encode"), types)
        return jax.jit(functools.partial(call, format=format, row_span=np.int64(1), col_span=np.int64(span)))(x)

    dense = stored.values.astype(np.float32)

    def call_squares(x=dense, **changes):
        return squares(target, x, stored, **changes)

    jax.block_until_ready((call_take(), call_encode(), call_squares()))
    for call, text, changes in [
        (call_take, "ids", {"ids": ids.astype(np.float32)}),
        (call_take, "ids", {"ids": ids[None]}),
        (call_squares, "does not fit", {"x": np.ones((1, 8, 31), np.float32)}),
        (call_squares, "x must be", {"x": np.ones((1, 8, 32), np.int32)}),
        (call_squares, "sums", {"shape": (1, 7)}),
        (call_take, "ids", {"shape": (4, 32)}),
        (call_take, "f32, bf16 or f16", {"dtype": jnp.int32}),
        (call_take, "must be one matrix", {"stored": Stored("nf4", 2, 8, 32, 1, 16)}),
        (call_take, "scales", {"col_span": np.int64(32)}),
        (call_encode, "not 'ternary'", {"format": "ternary"}),
        (call_encode, "three axes", {"x": np.ones((8, 32), np.float32)}),
        (call_encode, "f32, bf16 or f16", {"x": np.ones((1, 8, 32), np.int32)}),
        (call_encode, "do not fit", {"codes": (1, 8, 32)}),
        (call_encode, "do not fit", {"scales": (1, 8, 1)}),
        (call_encode, "do not fit", {"span": 8}),
    ]:
        with pytest.raises(Exception, match="lowbit: .*" + text):
            jax.block_until_ready(call(**changes))
