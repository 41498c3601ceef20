"""Each primitive on each format: structural rules keep every bit, all others equal the dense operation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from helpers import Layout, assert_close, assert_same_bits, gaussian
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from jax import lax

import lowbit
from lowbit import FORMATS, ArrayNF4, QuantizedArray, implicit
from lowbit.formats.blocks import unpack
from lowbit.kernels import reference
from lowbit.kernels.product import Product
from lowbit.testing import dense_weights, equations


@jax.jit
def codes_of(q: QuantizedArray) -> jax.Array:
    """The unpacked codes in the axis order of the array, by one program and not by one for each operation."""
    q = q.resolved()
    codes = unpack(q.codes, q.packing["codes"])[..., : q.stored_shape[-1]]
    return q.logical_view(codes)


@jax.jit
def codes_and_values(q: QuantizedArray) -> tuple[jax.Array, jax.Array]:
    return codes_of(q), q.materialize()


def assert_keeps_bits(fn, q: QuantizedArray, *others: QuantizedArray) -> None:
    """Assert that `fn` gives a quantized array whose codes are moved as `fn` moves elements."""
    with lowbit.materialization("error"):
        got = jax.jit(implicit(fn))(q, *others)
    assert isinstance(got, type(q))
    codes, values = zip(*map(codes_and_values, (q, *others)), strict=True)
    moved_codes, moved_values = jax.jit(lambda codes, values: (fn(*codes), fn(*values)))(codes, values)
    got_codes, got_values = codes_and_values(got)
    np.testing.assert_array_equal(got_codes, moved_codes)
    np.testing.assert_array_equal(got_values, moved_values)


# --- structural rules

MOVES = {
    "transpose": lambda w: w.T,
    "transpose_all": lambda w: jnp.transpose(w.reshape(4, 16, 96), (2, 0, 1)),
    "transpose_lead": lambda w: jnp.transpose(w.reshape(4, 16, 96), (1, 0, 2)),
    "reshape_split_rows": lambda w: w.reshape(2, 32, 96),
    "reshape_split_columns": lambda w: w.reshape(64, 3, 32),
    "reshape_after_transpose": lambda w: w.T.reshape(3, 32, 64),
    "expand_and_squeeze": lambda w: jnp.squeeze(w[:, None, :, None], (1, 3)),
    "expand_in_front": lambda w: w[None, None],
    "slice_of_rows": lambda w: w[32:64],
    "slice_of_columns": lambda w: w[:, 32:64],
    "slice_of_one_row": lambda w: w[5],
    "slice_of_one_column": lambda w: w[:, 77],
    "slice_of_the_transposed": lambda w: w.T[32:64],
    "dynamic_row": lambda w: w[jnp.int32(13)],
    "dynamic_column": lambda w: w[:, jnp.int32(13)],
    "split": lambda w: jnp.split(w, 2)[1],
    "broadcast": lambda w: jnp.broadcast_to(w, (3, 64, 96)),
    "stack": lambda w: jnp.stack([w, w]),
    "stack_last": lambda w: jnp.stack([w, w], axis=-1),
}


@pytest.mark.first(*tiers.KINDS)
@pytest.mark.parametrize("move", MOVES, ids=str)
def test_structural_rules_keep_every_bit(move: str, layout: Layout) -> None:
    q = layout.quantize(gaussian(0, (64, 96)))
    if q.block_size == 64 and move in ("slice_of_rows", "split"):  # not on the border of a block
        with lowbit.materialization("error"), pytest.raises(TypeError, match="so the whole array is made dense"):
            implicit(MOVES[move])(q)
    else:
        assert_keeps_bits(MOVES[move], q)


def test_concatenation_keeps_every_bit(any_layout: Layout) -> None:
    a, b = (any_layout.quantize(gaussian(seed, (64, 128))) for seed in (0, 1))
    other = {-1: 0, -2: 1}[any_layout.axis]
    assert_keeps_bits(lambda a, b: jnp.concatenate([a, b], other), a, b)
    if a.block_size is not None:
        assert_keeps_bits(lambda a, b: jnp.concatenate([a, b], 1 - other), a, b)
    else:
        with lowbit.materialization("error"), pytest.raises(TypeError, match="concatenate"):
            implicit(lambda a, b: jnp.concatenate([a, b], 1 - other))(a, b)


def test_odd_lengths_keep_every_bit(any_layout: Layout) -> None:
    q = any_layout.quantize(gaussian(0, (33, 77)))
    for move in (lambda w: w.T, lambda w: w[None], lambda w: w.reshape(3, 11, 77) if any_layout.axis == -1 else w):
        assert_keeps_bits(move, q)
    if any_layout.axis == -2:
        assert_keeps_bits(lambda w: w[:, 3:50], q)
        assert_keeps_bits(lambda w: jnp.concatenate([w, w], 1), q)
    else:
        assert_keeps_bits(lambda w: w[3:30], q)
        assert_keeps_bits(lambda w: lax.slice(w, (0, 0), (33, 77), (3, 1)), q)


@pytest.mark.first(*tiers.OF_FEATURES)
def test_ten_structural_operations_keep_the_bits_of_the_first_encode(layout: Layout) -> None:
    q = layout.quantize(gaussian(0, (128, 128)))
    again = q
    for _ in range(5):
        again = again.T.reshape(1, 128, 128)[0].T
    np.testing.assert_array_equal(codes_of(again), codes_of(q))
    np.testing.assert_array_equal(again.scale_values(), q.scale_values())
    assert_same_bits(q.T.T, q)
    assert q.T.codes is q.codes
    with lowbit.materialization("error"):
        for _ in range(3):
            halves = implicit(lambda w: [w[:64], w[64:]])(again) if q.axis == -1 else None
            columns = implicit(lambda w: [w[:, :64], w[:, 64:]])(again) if q.axis == -2 else None
            axis = 0 if halves else 1
            again = implicit(lambda *arrays, axis=axis: jnp.concatenate(arrays, axis))(*(halves or columns))
    np.testing.assert_array_equal(codes_of(again), codes_of(q))
    np.testing.assert_array_equal(again.scale_values(), q.scale_values())  # of one matrix, codes may be decoded


@pytest.mark.first(*tiers.OF_FEATURES)
def test_writing_a_quantized_value_keeps_every_bit(layout: Layout) -> None:
    cache, token = (layout.quantize(gaussian(n, (n, 32, 64))) for n in (10, 1))
    assert_keeps_bits(lambda cache, token: lax.dynamic_update_slice(cache, token, (jnp.int32(3), 0, 0)), cache, token)
    assert_keeps_bits(lambda cache, token: cache.at[3].set(token[0]), cache, token)


@pytest.mark.first(*tiers.OF_FEATURES)
def test_a_stack_is_not_copied(layout: Layout) -> None:
    stack = layout.quantize(gaussian(0, (3, 64, 64)))
    experts = layout.quantize(gaussian(0, (2, 3, 64, 64)))

    def programs():
        yield lambda x, w: lax.scan(lambda c, w: (c @ w, None), x, w)[0], stack
        yield lambda x, w: lax.fori_loop(0, 3, lambda i, c: c @ w[i], x), stack
        yield lambda x, w: x @ w[1] + x @ w[jnp.int32(2)].T, stack
        yield lambda x, w: lax.scan(lambda c, w: (jnp.einsum("bk,ekn->ben", c, w).sum(1), None), x, w)[0], experts
        yield lambda x, w: lax.scan(lambda c, w: (c @ w[2], None), x, w)[0], experts
        yield lambda x, w: jnp.einsum("bk,bkn->bn", x[:2], w[jnp.array([2, 0])]), stack

    for program, weight in programs():
        x = jnp.ones((4, 64)) / 64
        with lowbit.materialization("error"):
            jaxpr = jax.make_jaxpr(implicit(program))(x, weight)
            assert_close(implicit(program)(x, weight), program(x, weight.materialize()))
        made = [v.aval for eqn in equations(jaxpr.jaxpr) for v in eqn.outvars]
        layer = weight.codes.shape[-2:]
        assert not [
            aval
            for aval in made
            if aval.shape[-2:] == layer and aval.dtype == weight.codes.dtype and aval.size < weight.codes.size
        ]


def short_block() -> ArrayNF4:
    """An array whose last block of each row has half its elements."""
    return ArrayNF4.quantize(gaussian(0, (6, 40)), axis=-1, block_size=16)


@pytest.mark.parametrize(
    "program",
    [
        lambda w: lax.rev(w, (1,)),
        lambda w: jnp.concatenate([w, w], 1),
        lambda w: lax.dynamic_slice(w, (4, 0), (3, 40)),
    ],
    ids=["reversed_with_a_short_block", "short_block_is_not_joined", "a_window_out_of_bounds"],
)
def test_corners_of_moves(program) -> None:
    q = short_block()
    with lowbit.materialization("allow"):
        assert_close(implicit(program)(q), program(q.materialize()), 0)


def test_a_block_that_would_become_too_small_is_not_split() -> None:
    q = ArrayNF4.quantize(jnp.ones((4, 96)), axis=-1, block_size=16)
    with lowbit.materialization("error"), pytest.raises(TypeError, match="reshape"):
        implicit(lambda w: w.reshape(4, 4, 24))(q)  # in blocks of 8


def test_the_reference_sums_in_float32_and_rounds_once() -> None:
    x = gaussian(0, (32, 256)).astype(jnp.bfloat16)
    q = ArrayNF4.quantize(gaussian(1, (256, 32)))
    got = reference.matmul(Product(x, q, -2, jnp.bfloat16))
    want = np.asarray(x, np.float64) @ np.asarray(q.materialize(), np.float64)
    assert got.dtype == jnp.bfloat16
    assert np.mean(np.asarray(got) == want.astype(jnp.bfloat16)) > 0.98  # but for sums next to a midpoint


def test_double_quantized_scales_move_too() -> None:
    q = ArrayNF4.quantize(gaussian(0, (2, 128, 256)), double_quant=True)
    w = q.materialize()
    x = jnp.ones((4, 128))
    moves = (
        lambda w: w[1],
        lambda w: w.mT,
        lambda w: w.reshape(256, 256),
        lambda w: w[:, :, 64:128],
        lambda w: w[0, 5],
    )
    with lowbit.materialization("error"):
        for move in moves:
            got = implicit(move)(q)
            assert_close(got, move(w), 1e-6)
        assert_close(implicit(lambda x, w: lax.scan(lambda c, w: (c, x @ w), 0, w)[1])(x, q), x @ w)
        assert_close(jax.vmap(lambda w: x @ w)(q), x @ w)
        assert_close(implicit(lambda w: w[:, jnp.array([3, 100])])(q), w[:, jnp.array([3, 100])], 1e-6)
    assert q.mT.scales.dtype == jnp.uint8
    assert implicit(lambda w: w[1])(q).scales.dtype == jnp.uint8


def test_numbers_scale_the_scales(layout: Layout) -> None:
    q = layout.quantize(gaussian(0, (64, 96)))
    w = q.materialize()
    with lowbit.materialization("error"):
        for fn in (lambda w: w * 2.5, lambda w: 0.3 * w, lambda w: w / 7, lambda w: -w):
            got = fn(q)
            assert isinstance(got, QuantizedArray)
            np.testing.assert_array_equal(got.codes, q.codes)
            assert_close(got, fn(w), 3e-7)
    with lowbit.materialization("allow"):
        # A traced number may be trained: its gradient must not stop at the scales.
        grad = jax.grad(lambda s: implicit(lambda w, s: (w * s).sum())(q, s))(2.0)
        assert_close(grad, w.sum(), 1e-5)


@pytest.mark.first(*tiers.OF_FEATURES)
def test_gradients_stop_at_the_scales(layout: Layout) -> None:
    q = layout.quantize(gaussian(0, (64, 96)))
    for fn in (lambda w: w[jnp.array([1, 2])], lambda w: jnp.ones((2, 64)) @ w, lambda w: w * 2.0, lambda w: w.T + 1):
        with lowbit.materialization("allow"):
            grads = jax.grad(lambda q, fn=fn: lowbit.materialize(implicit(fn)(q)).sum(), allow_int=True)(q)
        assert not np.any(grads.scales)


def test_integer_products_are_exact() -> None:
    codes = jnp.where(jax.random.bernoulli(jax.random.key(0), 0.7, (200, 3)), 1, -1).astype(jnp.int8)
    q = lowbit.Array1B.quantize(codes)
    for x in (jnp.ones((1, 200), jnp.int8), jnp.full((1, 200), 2**24 + 1, jnp.int32), jnp.ones((1, 200), bool)):
        np.testing.assert_array_equal(x @ q, x @ codes)
        assert (x @ q).dtype == (x @ codes).dtype


@pytest.mark.first(*tiers.OF_FEATURES)
def test_corners_of_shapes(layout: Layout) -> None:
    q = layout.quantize(gaussian(0, (300, 1)))
    one = layout.quantize(jnp.ones((1, 1)))
    stack = layout.quantize(gaussian(0, (3, 16, 16)))
    programs = [
        (lambda q: q[jnp.array([1, 2]), 0], q),
        (lambda q: jnp.take(q, jnp.array([1, 200], jnp.uint8), axis=0), q),
        (lambda q: q[:, 0].at[jnp.array([1, 4])].set(q[2:4, 0]), q),
        (lambda q: q.reshape(()), one),
        (lambda q: jnp.take_along_axis(q.mT, jnp.ones((2, 16, 16), int), axis=0), stack),
        (lambda q: lax.scan(lambda c, w: (c @ w, c), jnp.ones((2, 16)), q[:0]), stack),
        (lambda q: lax.scan(lambda c, _: (c, None), q, jnp.zeros((0, 3)))[0], stack),
    ]
    with lowbit.materialization("allow"):
        for program, weight in programs:
            assert_close(implicit(program)(weight), program(weight.materialize()), 1e-6)
    assert q.reshape(np.int64(300)).shape == (300,)


# --- other primitives, with every kind of operand

UNARY = {
    "convert_element_type": lambda w: (w.astype(jnp.bfloat16), w.astype(jnp.int8)),
    "integer_pow": lambda w: w**3,
    "square": lambda w: w**2,
    "sqrt": lambda w: jnp.sqrt(abs(w)),
    "exp": jnp.exp,
    "log": lambda w: jnp.log(abs(w) + 1e-3),
    "reduce_sum": lambda w: (w.sum(), w.sum(0), w.sum(1)),
    "reduce_max": lambda w: (w.max(), w.min(0), w.argmax(1)),
    "reduce": lambda w: lax.reduce(w, np.float32(0), lax.add, (0,)),
    "transpose": lambda w: w.T,
    "reshape": lambda w: w.reshape(-1),
    "broadcast_in_dim": lambda w: jnp.broadcast_to(w, (2, *w.shape)),
    "conv_general_dilated": lambda w: lax.conv(jnp.ones((1, 64, 5)), w[:, :64].T.reshape(16, 64, 4), (1,), "SAME"),
    "gather": lambda w: (w[jnp.array([3, 1])], w[jnp.array([[3], [1]]), jnp.array([5, 6])]),
}
BINARY = {
    "lt": lambda a, b: (a < b, a >= b),
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / (abs(b) + 1),
    "max": jnp.maximum,
    "dot_general": lambda a, b: a.T @ (b + jnp.zeros_like(a)),
}


@pytest.mark.parametrize("name", UNARY, ids=str)
def test_unary_operations(name: str, layout: Layout) -> None:
    q = layout.quantize(gaussian(0, (64, 96)))
    with lowbit.materialization("allow"):
        assert_close(jax.jit(implicit(UNARY[name]))(q), jax.jit(UNARY[name])(q.materialize()), 2e-5)


PARTNERS = {"each kind": tiers.KINDS_OF_FORMATS, "all": FORMATS}


@pytest.mark.parametrize("partners", tiers.tiered(PARTNERS, ["each kind"]))
@pytest.mark.parametrize("name", BINARY, ids=str)
def test_binary_operations_mix_formats_dense_scalars_and_numpy(name: str, partners: str, layout: Layout) -> None:
    q = layout.quantize(gaussian(0, (64, 96)))
    value = gaussian(1, (64, 96))
    others = [value, np.asarray(value), 1.5, 2, np.float32(3)]
    others += [FORMATS[format].quantize(value) for format in PARTNERS[partners]]
    fn = BINARY[name]
    of_dense = jax.jit(fn)
    with lowbit.materialization("allow"):
        for other in others:
            w, dense = q.materialize(), lowbit.materialize(other)
            assert_close(jax.jit(implicit(fn))(q, other), of_dense(w, dense), 2e-5)
            if name != "dot_general":
                assert_close(implicit(fn)(other, q), of_dense(dense, w))


# --- any shape, block, axis and dimension numbers


@st.composite
def contractions(draw):
    ndim = draw(st.integers(1, 4))
    shape = tuple(draw(st.sampled_from([1, 2, 5, 16, 33, 64])) for _ in range(ndim))
    axes = draw(st.permutations(range(ndim)))
    n_sum = draw(st.integers(0 if ndim > 1 else 1, ndim))
    n_batch = draw(st.integers(0, ndim - n_sum))
    summed, batch = axes[:n_sum], axes[n_sum : n_sum + n_batch]
    x_free = tuple(draw(st.sampled_from([1, 3, 4])) for _ in range(draw(st.integers(0, 2))))
    x_axes = [("s", a) for a in summed] + [("b", a) for a in batch] + [("f", i) for i in range(len(x_free))]
    x_axes = draw(st.permutations(x_axes))
    x_shape = tuple(x_free[i] if kind == "f" else shape[i] for kind, i in x_axes)
    x_sum, x_batch = ([x_axes.index((kind, a)) for a in axes] for kind, axes in (("s", summed), ("b", batch)))
    return shape, x_shape, (tuple(x_sum), tuple(summed)), (tuple(x_batch), tuple(batch)), draw(st.booleans())


RANDOM = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@example(
    ((1, 1, 64, 64), (1, 1, 64, 64), ((0, 1, 2, 3), (0, 1, 2, 3)), ((), ()), False), "nf4", -1, None, jnp.float32, False
)
def contraction(dims, format, axis, block, dtype, transposed) -> None:
    shape, x_shape, summed, batch, weight_first = dims
    axis = max(axis, -len(shape))
    options = {} if block is None else {"block_size": block}
    stored = shape[:-2] + shape[-2:][::-1] if transposed else shape
    q = FORMATS[format].quantize(gaussian(0, stored, dtype), axis=axis, **options)
    q = q.mT if transposed and len(shape) > 1 else q
    x = gaussian(1, x_shape, dtype)

    def product(x, w):
        if weight_first:
            return lax.dot_general(w, x, (summed[::-1], batch[::-1]))
        return lax.dot_general(x, w, (summed, batch))

    # Decode, multiply and sum in float32, then round once. A weight that no rule takes is rounded to its dtype first.
    # The order of the sum is not fixed, so the tolerance is relative to the sum of magnitudes.
    try:
        with lowbit.materialization("error"):
            got, decoded = jax.jit(implicit(product))(x, q), q.astype(jnp.float32).materialize()
    except TypeError as error:
        assert "is made dense" in str(error)
        with lowbit.materialization("allow"):
            got, decoded = jax.jit(implicit(product))(x, q), q.materialize().astype(jnp.float32)

    @jax.jit
    def reference(x, w):
        x = x.astype(jnp.float32)
        return product(x, w), product(abs(x), abs(w))

    want, added = (np.asarray(array) for array in reference(x, decoded))
    assert got.dtype == dtype and got.shape == want.shape
    rounding = 0 if dtype == jnp.float32 else 2**-8
    assert np.all(abs(np.asarray(got, np.float32) - want) <= 2e-6 * added + rounding * abs(want))


@pytest.mark.parametrize("examples", tiers.EXAMPLES)
def test_any_contraction_equals_the_reference(examples: int) -> None:
    drawn = given(
        contractions(),
        st.sampled_from(sorted(FORMATS)),
        st.integers(-4, -1),
        st.sampled_from([None, 16, 32]),
        st.sampled_from([jnp.float32, jnp.bfloat16]),
        st.booleans(),
    )
    settings(RANDOM, max_examples=examples)(drawn(contraction))()


def sequence(data) -> None:
    draw = data.draw
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 8, 31, 64]), min_size=1, max_size=3)))
    q = FORMATS[draw(st.sampled_from(sorted(FORMATS)))].quantize(
        gaussian(0, shape), axis=draw(st.integers(-len(shape), -1))
    )
    w = q.materialize()

    def moved(w):
        for kind, argument in steps:
            match kind:
                case "transpose":
                    w = jnp.transpose(w, argument)
                case "reshape":
                    w = w.reshape(argument)
                case "expand":
                    w = jnp.expand_dims(w, argument)
                case "slice":
                    w = lax.slice(w, *argument)
                case "concatenate":
                    w = jnp.concatenate([w, w], argument)
        return w

    steps, now = [], w
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["transpose", "reshape", "expand", "slice", "concatenate"]))
        if kind == "transpose":
            argument = tuple(draw(st.permutations(range(now.ndim))))
        elif kind == "reshape":
            divisors = [n for n in range(1, now.size + 1) if now.size % n == 0]
            first = draw(st.sampled_from(divisors))
            argument = (first, now.size // first)
        elif kind == "expand":
            argument = draw(st.integers(0, now.ndim))
        elif kind == "slice":
            starts = tuple(draw(st.integers(0, n - 1)) for n in now.shape)
            argument = (starts, tuple(draw(st.integers(s + 1, n)) for s, n in zip(starts, now.shape, strict=True)))
        else:
            argument = draw(st.integers(0, now.ndim - 1))
        steps.append((kind, argument))
        now = jax.eval_shape(lambda w: moved(w), w)  # a new function, since `steps` has changed
    with lowbit.materialization("allow"):
        got = implicit(moved)(q)
    np.testing.assert_array_equal(lowbit.materialize(got), jax.jit(lambda w: moved(w))(w))


@pytest.mark.parametrize("examples", tiers.EXAMPLES)
def test_any_sequence_of_structural_operations_keeps_values(examples: int) -> None:
    settings(RANDOM, max_examples=examples)(given(st.data())(sequence))()


def test_a_product_is_shown_to_be_dense_when_it_is() -> None:
    q = ArrayNF4.quantize(jnp.ones((64, 96)))
    x = jnp.ones((2, 64))
    assert dense_weights(lambda x, q: x @ q, x, q) == []
    assert dense_weights(lambda x, q: x @ q.materialize(), x, q)
    stack = ArrayNF4.quantize(jnp.ones((3, 64, 64)))
    program = implicit(lambda x, stack: lax.scan(lambda c, w: (c @ (w * c[0, 0]), None), x, stack)[0])
    with lowbit.materialization("allow"):
        assert dense_weights(program, x, stack)
