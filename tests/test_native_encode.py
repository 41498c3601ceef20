"""Encoding in the native library: the bits of the formats' own programs, for every instruction set of this machine."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from native_helpers import LIBRARY, Stored, squares, stored_length

from lowbit.formats import int8, nf4, onebit, packed
from lowbit.formats import layout as layouts
from lowbit.kernels import cpu

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="no native library")


PER_BYTE = {"int8": 1, "nf4": 2, "ternary": 4, "absmean": 4, "binary": 8}


def encode(target, x, format, row_span, col_span):
    layers, rows, columns = x.shape
    codes = (layers, rows, -(-columns // PER_BYTE[format]))
    scales = (layers, stored_length(rows, row_span), stored_length(columns, col_span))
    types = (
        jax.ShapeDtypeStruct(codes, jnp.int8 if format == "int8" else jnp.uint8),
        jax.ShapeDtypeStruct(scales, jnp.float32),
    )
    call = jax.ffi.ffi_call(target("lowbit_encode"), types)
    return jax.jit(functools.partial(call, format=format, row_span=np.int64(row_span), col_span=np.int64(col_span)))(x)


@functools.partial(jax.jit, static_argnums=(1, 2))
def by_jax(array, format, spans):
    """Codes and scales of the format's own program."""
    if format in ("int8", "nf4"):
        return {"int8": int8, "nf4": nf4}[format]._by_jax(array, spans)
    kind = "binary" if format == "binary" else "ternary"
    return onebit._by_jax(array, spans, kind, threshold=None, scaled=True, absmean=format == "absmean")


WHOLE, FLOATS = [(0, 1), (1, 0), (0, 0)], (jnp.float32, jnp.bfloat16, jnp.float16)
BLOCKS = [(64, 1), (1, 64), (16, 16), (1, 5), (130, 70)]
ENCODED = {
    # Blocks along each axis and both, one scale for each row, column and matrix; each dtype; parts that are joined; a
    # matrix smaller than a vector of the machine.
    "each once": [
        *itertools.product([(2, 131, 77)], [(64, 1), (1, 5), (16, 16), *WHOLE], [FLOATS[:1]]),
        ((2, 131, 77), (1, 64), FLOATS),
        ((1, 700, 1100), (0, 1), FLOATS[:1]),
        ((1, 20, 5), (0, 0), FLOATS[:1]),
    ],
    "all": [
        *itertools.product([(2, 131, 77)], [*BLOCKS, *WHOLE], [FLOATS]),
        *itertools.product([(1, 64, 520)], [*BLOCKS, *WHOLE], [FLOATS[:1]]),
        *itertools.product([(1, 700, 1100)], [(0, 1), (0, 0), (300, 1)], [FLOATS[:1]]),  # parts that are joined
        *itertools.product([(1, 20, 5), (2, 1, 63), (1, 9, 1000)], WHOLE, [FLOATS[:1]]),
    ],
}


@pytest.mark.parametrize("cases", tiers.tiered(ENCODED, ["each once"]))
@pytest.mark.parametrize("format", PER_BYTE)
def test_encode_gives_the_bits_of_the_format(target, format, cases):
    rng = np.random.default_rng(0)
    for shape, spans, dtypes in ENCODED[cases]:
        x = rng.standard_normal(shape).astype(np.float32)
        if shape[1] > 60 and shape[2] > 70:
            # Zeros, subnormal numbers and their neighbours, numbers near the largest, NaN and infinity.
            x[0, 2] = x[0, :, 11] = 0
            x[0, 3] *= 1e-38
            x[0, :, 12] *= 3e-39
            x[-1, 30:, 13:16] *= 1e37
            x[-1, 50] *= 1e-20
            x[-1, :, 17] += 100  # a mean that is not near 0
            x[-1, 5, 9], x[-1, 6, 10], x[0, 40, 70] = np.nan, np.inf, -np.inf
        for dtype in dtypes:
            a = jnp.asarray(x).astype(dtype)
            want = by_jax(a, format, spans)
            for component, whole_component in zip(encode(target, a, format, *spans), want, strict=True):
                np.testing.assert_array_equal(
                    np.asarray(component).view(np.uint8),
                    np.asarray(whole_component).view(np.uint8),
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


SEARCHED = [
    ((2, 131, 77), (32, 1), jnp.float32, np.float32),
    ((1, 64, 520), (1, 32), jnp.float32, jnp.float16),
    ((1, 70, 90), (16, 1), jnp.bfloat16, jnp.bfloat16),
    ((3, 33, 65), (1, 64), jnp.float16, np.float32),
    ((1, 50, 40), (0, 1), jnp.float32, np.float32),
    ((1, 40, 50), (1, 20), jnp.float32, np.float32),
]


CASES = {"along each axis": SEARCHED[:2], "others": SEARCHED[2:]}


@pytest.mark.parametrize("cases", tiers.tiered(CASES, ["along each axis"]))
@pytest.mark.parametrize("name", ["q4", "q3", "q2", "int4", "int6"])
def test_search_gives_the_bits_of_the_format(search, name, cases):
    rng = np.random.default_rng(0)
    for shape, spans, dtype, scale_dtype in CASES[cases]:
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
        want = jax.jit(lambda a, *args: layouts._by_jax(a, *args), static_argnums=(1, 2, 3))(
            array, spans, layout, options
        )
        got = search(array, spans, layout, options)
        for part, whole in want.items():
            np.testing.assert_array_equal(
                np.asarray(got[part]).view(np.uint8), np.asarray(whole).view(np.uint8), f"{part} {shape} {spans}"
            )


def test_encode_of_nothing(target):
    for format, shape in itertools.product(PER_BYTE, [(0, 3, 4), (1, 0, 4), (1, 3, 0)]):
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
        return squares(target, x, stored, **changes).run()

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
        (call_encode, "not 'q4'", {"format": "q4"}),
        (call_encode, "three axes", {"x": np.ones((8, 32), np.float32)}),
        (call_encode, "f32, bf16 or f16", {"x": np.ones((1, 8, 32), np.int32)}),
        (call_encode, "do not fit", {"codes": (1, 8, 32)}),
        (call_encode, "do not fit", {"scales": (1, 8, 1)}),
        (call_encode, "do not fit", {"span": 8}),
    ]:
        with pytest.raises(Exception, match="lowbit: .*" + text):
            jax.block_until_ready(call(**changes))
