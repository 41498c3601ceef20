"""The targets of the native library, called directly, against float64, for every instruction set of this machine."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from native_helpers import ALL, FORMATS, LIBRARY, OLD, Stored, check_together, matmul, squares, take

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="no native library")


def matmul_case(
    target,
    format,
    contract,
    spans,
    m,
    k,
    n,
    *,
    layers=1,
    index=(0,),
    x_type=jnp.float32,
    y_type=jnp.float32,
    fast=False,
    **options,
):
    """A case of `check_together`: a product within rounding of the one in float64."""
    rows, columns = (n, k) if contract else (k, n)
    stored = Stored(format, layers, rows, columns, *spans, **options)
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((len(index), m, k)), x_type)
    y = np.asarray((yield matmul(target, x, stored, index, contract, y_type, fast=fast)), np.float64)
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
    often = itertools.product((0, 1), [(64, 1), (1, 64), (0, 1), (1, 0)], (1, 3, 37))
    seldom = itertools.product((0, 1), [(16, 1), (1, 32), (0, 0), (5, 7), (1, 1), (3, 1), (1, 5)])
    cases = [*often, *((contract, spans, 1 + contract) for contract, spans in seldom)]
    check_together(matmul_case(target, format, contract, spans, m, 131, 203) for contract, spans, m in cases)


SPANS = [(0, (64, 1)), (0, (1, 64)), (1, (1, 64)), (1, (64, 1))]
LARGE = [*itertools.product(SPANS, [(1, 1024, 768), (4, 1001, 999), (33, 515, 321)])]


@pytest.mark.parametrize("turn", tiers.tiered((0, 1), (0,)))
@pytest.mark.parametrize("format", FORMATS)
def test_matmul_of_large_matrices(target, format, turn):
    """Large enough for several threads, slabs and blocks, with and without ragged ends.

    Each turn has every size and all spans; what the first one leaves out of a format, the next format has.
    """
    for (contract, span), size in LARGE[(turn + FORMATS.index(format)) % 2 :: 2]:
        check_together([matmul_case(target, format, contract, span, *size)])  # alone, so that it has all threads


@pytest.mark.parametrize("format", FORMATS)
def test_matmul_of_some_rows(target, format):
    """More rows than are streamed, and fewer than a panel is worth: several slabs, blocks across them, ragged ends."""
    sizes = [((48, 1), 7, 600, 203), ((16, 1), 5, 300, 77), ((0, 1), 20, 515, 130), ((320, 1), 32, 700, 65)]
    check_together(matmul_case(target, format, 0, spans, *size) for spans, *size in sizes)


def test_matmul_of_the_last_axis_in_parts(target):
    """Rows so long that x stays in the cache by parts, with a rest; rows of x that are not divided evenly."""
    of = [
        ("nf4", (1, 64)),
        ("q4", (1, 32)),
        ("int8", (1, 0)),
        ("int6", (1, 128)),
        ("binary", (1, 16)),
        ("nf4", (64, 1)),
    ]
    rows = [(1, 13000), (2, 7111), (3, 4200), (8, 1601), (9, 1601), (19, 1000)]
    check_together(
        matmul_case(target, format, 1, spans, m, k, 71) for (format, spans), (m, k) in itertools.product(of, rows)
    )


def test_matmul_of_odd_sizes(target):
    sizes = [(1, 1, 1), (1, 0, 5), (2, 3, 0), (0, 3, 4), (1, 2, 577), (1, 577, 2), (13, 17, 31)]
    cases = itertools.product(FORMATS, (0, 1), [(64, 1), (1, 64)], sizes)
    check_together(matmul_case(target, format, contract, spans, *size) for format, contract, spans, size in cases)


def test_matmul_of_all_float_types(target):
    types = [jnp.float32, jnp.bfloat16, jnp.float16]
    products = [("nf4", 0, (64, 1), 3, 130, 70), ("int8", 1, (1, 0), 9, 130, 70)]
    check_together(
        matmul_case(target, *of, x_type=x_type, y_type=y_type)
        for of, x_type, y_type in itertools.product(products, types, types)
    )


def test_matmul_with_scales_in_eight_bits(target):
    cases = []
    for contract, spans, m in itertools.product((0, 1), [(64, 1), (1, 64), (1, 16)], (1, 20)):
        of = (target, "nf4", contract, spans, m)
        cases.append(matmul_case(*of, 200, 333, scale="dynamic"))
        cases.append(matmul_case(*of, 70, 130, scale="dynamic", layers=3, index=(2, 0, 9, -1)))
    check_together(cases)


@pytest.mark.parametrize(
    "scale",
    ["float16", "bfloat16", "signed8 columns", "signed8 rows", "signed8", "e4m3 matrix", "e4m3", "e8m0", "e8m0 rows"],
)
def test_matmul_for_all_types_of_scales(target, scale):
    cases = itertools.product((0, 1), [(32, 1), (1, 32), (0, 1), (16, 16)], (1, 3, 20))
    check_together(
        [
            *(matmul_case(target, "q4", *case, 130, 203, scale=scale) for case in cases),
            matmul_case(target, "q3", 0, (32, 1), 2, 70, 130, scale=scale, layers=3, index=(2, 0, 9, -1)),
            matmul_case(target, "q4", 1, (1, 32), 2, 70, 130, scale=scale, layers=3, index=(1, 2), shared=True),
            fast_case(target, "q4", 1, 32, 3, 200, 333, scale=scale),
            fast_case(target, "q3", 0, 32, 1, 200, 333, scale=scale),
        ]
    )
    stored = Stored("q4", 1, 40, 77, 16, 1, scale=scale)
    got = take(target, np.arange(40), stored).run()
    np.testing.assert_allclose(got, stored.values[0], rtol=1e-6, atol=1e-30)


def test_matmul_by_index(target):
    cases = []
    for format, contract, shared in itertools.product(FORMATS, (0, 1), (False, True)):
        of = (target, format, contract, (1, 64) if contract else (64, 1))
        cases.append(matmul_case(*of, 2, 96, 130, layers=3, index=(2, 0, 5, -4, 1), shared=shared))
        cases.append(matmul_case(*of, 1, 320, 256, layers=4, index=(3, 1, 1, 0, 2, 3), shared=shared))
    check_together(cases)


def test_matmul_by_groups(target):
    """Each group of rows by its own matrix: few large groups, many small ones, none, and rows behind the last one."""
    rng = np.random.default_rng(1)
    few, many = [[40, 0, 3, 30], [0, 0, 77, -2]], [[1, 2, 0, 3, 1, 1, 2, 4, 0, 5, 1, 2]]

    def case(format, contract, fast, sizes, m, k, n):
        stored = Stored(format, 3, *((n, k) if contract else (k, n)), *((1, 32) if contract else (32, 1)))
        index = rng.integers(-1, 4, np.size(sizes))
        x = rng.standard_normal((len(sizes), m, k)).astype(np.float32)
        y = np.asarray((yield matmul(target, x, stored, index, contract, fast=fast, sizes=sizes)))
        w = stored.values[np.clip(index, 0, 2)].reshape(*np.shape(sizes), *stored.values.shape[1:])
        w = w.swapaxes(-2, -1) if contract else w
        want = np.zeros(y.shape)
        for b, of in enumerate(sizes):
            ends = np.minimum(np.cumsum(np.maximum(of, 0)), m)
            for g, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
                want[b, begin:end] = x[b, begin:end] @ w[b, g]
            assert (y[b, ends[-1] :] == 0).all()
        worst = np.abs(y - want).max(initial=0) / max(np.abs(want).max(initial=0), 1)
        assert worst < (0.03 if fast else 1e-5), (format, contract, fast, sizes, worst)

    sizes = [(few, 77, 96, 130), (many, 25, 320, 256), ([[0, 0]], 3, 33, 7), ([[5, 9]], 6, 33, 7)]
    cases = itertools.product(("nf4", "q3", "fp8"), (0, 1), (False, True), sizes)
    check_together(case(format, contract, fast, *size) for format, contract, fast, size in cases)


def test_matmul_passes_nan_on(target):
    for contract, (row_span, col_span), m in itertools.product((0, 1), [(64, 1), (1, 64)], (1, 20)):
        stored = Stored("nf4", 1, 128, 128, row_span, col_span)
        stored.stored_scales[0][0, 1, 1] = np.nan
        y = np.asarray(matmul(target, np.ones((1, m, 128), np.float32), stored, [0], contract).run())
        scales = np.repeat(np.repeat(stored.stored_scales[0], row_span, 1), col_span, 2)
        np.testing.assert_array_equal(np.isnan(y[0, 0]), np.isnan(scales[0]).any(axis=contract))


def call_with(name, good, attributes, shape=(1, 2, 33), dtype=jnp.float32, **changes):
    """Call a product with some of its operands or attributes changed."""
    operands = [changes.pop(component, value) for component, value in good.items()]
    attributes = attributes | {"contract": np.int64(0), "fast": False} | changes
    run = jax.jit(lambda *a: jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(shape, dtype))(*a, **attributes))
    return run(*operands).block_until_ready()


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
        "sizes": np.zeros(0, np.int32),
    }
    call = functools.partial(call_with, target("lowbit_matmul"), good, stored.attributes)
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
        ("index .* one for each of 3", {"sizes": np.zeros((1, 3), np.int32)}),
        ("sizes", {"sizes": np.zeros((2, 1), np.int32)}),
        ("sizes", {"sizes": np.zeros((1, 1), np.float32)}),
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


def fast_case(
    target, format, contract, span, m, k, n, *, mean=0, block=None, index=(0,), x_type=None, y_type=None, **options
):
    rows, columns = (n, k) if contract else (k, n)
    spans = (1, span) if contract else (span, 1)
    stored = Stored(format, 1 if index == (0,) else 3, rows, columns, *spans, **options)
    x = jnp.asarray(mean + np.random.default_rng(1).standard_normal((len(index), m, k)), x_type or jnp.float32)
    y_type = y_type or jnp.float32
    if format.startswith("fp8"):  # runs as exact
        of = (target, format, contract, spans, m, k, n)
        return (yield from matmul_case(*of, layers=1 if index == (0,) else 3, index=index, fast=True, **options))
    y = np.asarray((yield matmul(target, x, stored, index, contract, y_type, fast=True)), np.float64)
    levels = np.rint(stored.levels * 127) / 127 if format == "nf4" else stored.levels
    layers = np.clip(index, 0, len(stored.values) - 1)
    w, true = (levels * stored.scales)[layers], stored.values[layers]
    if contract:
        w, true = w.swapaxes(1, 2), true.swapaxes(1, 2)
    shared = span if span and span >= k else max(256 // span, 1) * span if span else max(k, 1)
    wide = rounded_to_int8(np.asarray(x, np.float32), block or shared)
    want = wide @ w
    bound = 1e-6 * (np.abs(wide) @ np.abs(w)) + float(jnp.finfo(y_type).eps) * np.abs(want) + 1e-30
    worst = np.max(np.abs(y - want) / bound, initial=0)
    assert worst < 1, f"{format} {contract=} {span=} {m=} {k=} {n=}: {worst} times the bound"
    if x_type is None and k >= 128:
        product = np.asarray(x, np.float64) @ true
        assert np.linalg.norm(y - product) < 1.5e-2 * np.linalg.norm(product)


@pytest.mark.parametrize("format", FORMATS)
def test_fast_matmul_is_its_definition(target, format):
    cases = [fast_case(target, format, 0, 64, 3, 192, 131, x_type=jnp.float16, y_type=jnp.bfloat16)]
    for contract in (0, 1):
        case = functools.partial(fast_case, target, format, contract)
        cases += [
            case(64, 1, 512, 640),
            case(256, 1, 1024, 777),
            case(0, 1, 1101, 1335, index=(1, 0)),
            case(1024, 1, 2112, 203, block=512),
            case(0, 5, 515, 203),
            case(32, 13, 130, 77),
            case(32, 1, 330, 77),
            case(1024, 2, 2112, 70, block=512),
            case(64, 37, 1000, 130, index=(2, 9)),
            *(case(0, m, 70001, 20, block=512) for m in (1, 3, 9)),
            case(0, 3, 65, 33, index=(1, -5, 0), x_type=jnp.bfloat16, y_type=jnp.float16),
            *(case(0, m, k, n) for m, k, n in [(1, 1, 1), (2, 0, 3), (0, 8, 3), (1, 7, 577)]),
        ]
    check_together(cases)


@pytest.mark.parametrize("rows", [2, 3, 4, 8])
def test_fast_matmul_of_few_rows(target, rows):
    """Whole lines of columns and a rest, spans that end within the rows read at a time, scales that are codes.

    With 4,096 columns the rows are divided over threads, each with sums of its own. Rows of 9,000 are read by parts.
    """
    spans = itertools.product(FORMATS, (0, 1), (0, 32))
    codes = itertools.product((0, 1), ("", " rows", " columns"))
    parts = itertools.product(("nf4", "int6"), [(64, None), (128, None), (1024, 512)])
    check_together(
        [
            *(fast_case(target, format, contract, span, rows, 200, 333) for format, contract, span in spans),
            *(fast_case(target, "q4", contract, 32, rows, 200, 333, scale=f"signed8{of}") for contract, of in codes),
            *(fast_case(target, format, 1, span, rows, 9000, 37, block=block) for format, (span, block) in parts),
            *(fast_case(target, format, 0, 32, rows, 256, 4096) for format in ("q4", "int8")),
        ]
    )


def test_offsets_of_levels_cancel_as_integers(target):
    """Levels are multiplied with an offset, whose products are much larger than the result if x has one sign."""
    cases = itertools.product(("q3", "q4", "ternary"), (0, 1), (0, 32, 128), (1, 4, 9))
    check_together(fast_case(target, format, contract, span, m, 700, 65, mean=5) for format, contract, span, m in cases)


def test_fast_matmul_with_scales_in_eight_bits(target):
    cases = itertools.product((0, 1), (1, 7))
    check_together(fast_case(target, "nf4", contract, 64, m, 200, 333, scale="dynamic") for contract, m in cases)


def test_fast_matmul_is_exact_where_scales_vary_in_its_sum(target):
    x = np.random.default_rng(1).standard_normal((1, 3, 96)).astype(np.float32)
    for format, (contract, spans) in itertools.product(OLD, [(0, (1, 64)), (1, (64, 1)), (0, (3, 1)), (1, (1, 6))]):
        stored = Stored(format, 1, 96, 96, *spans)
        fast, exact = (matmul(target, x, stored, [0], contract, fast=fast).run() for fast in (True, False))
        np.testing.assert_array_equal(fast, exact)


def test_fast_matmul_of_rows_with_nan_or_infinity_is_nan(target):
    x = np.random.default_rng(1).standard_normal((1, 8, 256)).astype(np.float32)
    x[0, 1, 7], x[0, 3, 255], x[0, 4, 100] = np.nan, np.inf, -np.inf
    x[0, 5] = 0
    x[0, 6] *= 1e-42

    def case(format, contract, span):
        stored = Stored(format, 1, 256, 256, *((1, span) if contract else (span, 1)))
        y = np.asarray((yield matmul(target, x, stored, [0], contract, fast=True)))[0]
        np.testing.assert_array_equal(np.isnan(y).all(1), [i in (1, 3, 4) for i in range(8)])
        assert not np.isnan(y[[0, 2, 5, 6, 7]]).any() and (y[5:7] == 0).all()

    check_together(itertools.starmap(case, itertools.product([*OLD, "q4", "q3"], (0, 1), (0, 64))))


# ---- Take


def test_take(target):
    ids = [0, 5, 5, -1, 99, 3]

    def case(format, spans, columns, dtype):
        stored = Stored(format, 1, 20, columns, *spans)
        got = yield take(target, ids, stored, dtype)
        with np.errstate(over="ignore"):  # products of 8-bit floats beyond float16 are infinite
            want = stored.values[0][np.clip(ids, 0, 19)].astype(np.float32).astype(dtype)
        np.testing.assert_array_equal(got, want)

    spans, types = [(64, 1), (1, 64), (1, 0), (5, 7)], (jnp.float32, jnp.bfloat16, jnp.float16)
    check_together(itertools.starmap(case, itertools.product(ALL, spans, (33, 256), types)))
    stored = Stored("nf4", 1, 300, 640, 1, 64, scale="dynamic")
    many = np.random.default_rng(0).integers(0, 300, 500)
    np.testing.assert_allclose(take(target, many, stored).run(), stored.values[0][many], rtol=1e-6)


# ---- Squares of the error


def test_squares(target):
    rng = np.random.default_rng(0)
    formats = [*OLD, "q4", "q3", "mxfp4"]

    def case(format, spans, columns, dtype):
        stored = Stored(format, 2, 20, columns, *spans)
        x = (stored.values + rng.standard_normal(stored.values.shape) / 100).astype(dtype)
        lost, size = yield squares(target, x, stored)
        wide = np.asarray(x, np.float64)
        np.testing.assert_allclose(lost, np.sum((stored.values - wide) ** 2, -1), rtol=1e-3)
        np.testing.assert_allclose(size, np.sum(wide**2, -1), rtol=1e-5)

    spans, types = [(64, 1), (1, 64), (1, 0), (5, 7)], (jnp.float32, jnp.bfloat16, jnp.float16)
    check_together(itertools.starmap(case, itertools.product(formats, spans, (33, 256, 5000), types)))
    stored = Stored("nf4", 2, 300, 640, 1, 64, scale="dynamic")
    lost, _ = squares(target, np.zeros(stored.values.shape, np.float32), stored).run()
    np.testing.assert_allclose(lost, np.sum(stored.values**2, -1), rtol=1e-5)
    for shape in [(0, 3, 4), (1, 0, 4), (1, 3, 0)]:
        lost, size = squares(target, np.zeros(shape, np.float32), Stored("nf4", *shape, 1, 16)).run()
        assert lost.shape == size.shape == shape[:2] and (np.asarray(lost) == 0).all()


def test_squares_of_a_row_with_nan_are_nan(target):
    x = np.ones((1, 3, 40), np.float32)
    x[0, 1, 39] = np.nan
    lost, size = squares(target, x, Stored("int8", 1, 3, 40, 1, 0)).run()
    for sums in (lost, size):
        np.testing.assert_array_equal(np.isfinite(sums), [[True, False, True]])
