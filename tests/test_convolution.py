"""Convolutions with quantized kernels equal those with dense ones, and the dense kernel is no value of the program."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from helpers import assert_close, gaussian
from jax import lax

import lowbit
from lowbit import implicit, quantize_tree
from lowbit.testing import dense_weights


def normal(*shape: int) -> jax.Array:
    return gaussian(sum(shape), shape)


def convolution(
    layout: str, strides: Any = (1, 1), padding: Any = "SAME", groups: int = 1, **options: Any
) -> Callable[..., jax.Array]:
    options |= {"dimension_numbers": tuple(layout.split()), "feature_group_count": groups}

    def fn(w: Any, x: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, w, strides, padding, **options)

    return fn


# A program, the shapes of kernel and image, and the axes of the inputs.
PROGRAMS = {
    "3 x 3": (convolution("NHWC HWIO NHWC"), (3, 3, 16, 32), (2, 4, 4, 16), (-4, -3, -2)),
    "many patches": (convolution("NHWC HWIO NHWC"), (3, 3, 16, 16), (2, 8, 8, 16), (-4, -3, -2)),
    "dilated": (
        convolution("NHWC HWIO NHWC", (2, 1), ((2, 1), (0, 3)), rhs_dilation=(1, 2)),
        (3, 2, 16, 32),
        (1, 4, 5, 16),
        (-4, -3, -2),
    ),
    "dilated image": (
        convolution("NHWC HWIO NHWC", (2, 1), ((2, 1), (0, 3)), rhs_dilation=(1, 2), lhs_dilation=(2, 1)),
        (3, 2, 16, 32),
        (1, 4, 5, 16),
        (-4, -3, -2),
    ),
    "channels first": (convolution("NCHW OIHW NHWC", (2, 2)), (32, 16, 3, 3), (2, 16, 4, 4), (-3, -2, -1)),
    "depthwise": (convolution("NHWC HWIO NHWC", groups=64), (5, 5, 1, 64), (2, 4, 4, 64), (-4, -3, -2)),
    "causal, as in Mamba": (convolution("NWC WIO NWC", (1,), ((3, 0),), 64), (4, 1, 64), (2, 8, 64), (-3, -2)),
    "1 x 1": (convolution("NHWC HWIO NCHW"), (1, 1, 32, 48), (2, 4, 4, 32), -2),
    "1 x 1 with strides": (convolution("NCHW OIHW NCHW", (2, 2)), (48, 32, 1, 1), (2, 32, 4, 4), -3),
    "1 x 1 with padding": (convolution("NHWC HWIO NHWC", padding=((1, 0), (0, 1))), (1, 1, 32, 48), (2, 4, 4, 32), -2),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_convolution_equals_the_dense_one(name: str) -> None:
    fn, shape, image, axis = PROGRAMS[name]
    x = normal(*image)
    params, report = quantize_tree({"w": normal(*shape)}, {"w": "int8"}, fn=lambda p, x: fn(p["w"], x), args=(x,))
    assert report["w"].axis == axis
    program = str(jax.make_jaxpr(implicit(fn))(params["w"], x))
    decoded = ("many patches", "dilated image", "depthwise", "causal, as in Mamba")
    assert ("lowbit_matmul" in program) == (name not in decoded)
    w, dense = params["w"], lowbit.materialize(params["w"])

    def gradient(fn: Callable[..., jax.Array], w: Any) -> Callable[..., Any]:
        return jax.value_and_grad(lambda x: jnp.sin(fn(w, x)).sum())

    want = jax.jit(gradient(fn, dense))(x)
    with lowbit.materialization("error"):
        program = jax.jit(gradient(implicit(fn), w))
        assert dense_weights(program, x) == [] == dense_weights(implicit(fn), w, x)
        assert_close(program(x), want, 1e-4)
        inside = jax.jit(implicit(lambda w, x: gradient(fn, w)(x)))
        assert dense_weights(inside, w, x) == []
        assert_close(inside(w, x), want, 1e-4)
        mapped = jax.jit(implicit(jax.vmap(fn, (None, 0))))(w, np.stack([x, 2 * np.asarray(x)]))
        assert_close(mapped, jax.jit(lambda w, x: jnp.stack([fn(w, x), fn(w, 2 * x)]))(dense, x))


def test_a_kernel_is_quantized_only_if_a_pattern_names_it() -> None:
    fn, shape, image, _ = PROGRAMS["3 x 3"]
    params, x = {"w": normal(*shape), "head": normal(32, 32)}, normal(*image)

    def model(p: Any, x: jax.Array) -> jax.Array:
        return fn(p["w"], x).mean((1, 2)) @ p["head"]

    _, report = quantize_tree(params, "q4", fn=model, args=(x,), strict=True)
    assert report["w"].why.endswith(": name it by a pattern to quantize it") and __file__ in report["w"].why
    _, report = quantize_tree(params, {"w": "q4", "*": "int8"}, fn=model, args=(x,), strict=True)
    assert (report["w"].axis, report["w"].why, report["head"].axis) == (-2, "fn: a convolution", -2)


def test_layers_and_half_precision() -> None:
    stack, x = lowbit.quantize(normal(2, 3, 16, 16), "int8", axis=(-3, -2)), normal(2, 8, 16).astype(jnp.bfloat16)

    def fn(stack: Any, x: jax.Array) -> jax.Array:
        dims = ("NWC", "WIO", "NWC")
        return lax.scan(
            lambda x, w: (lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=dims), None), x, stack
        )[0]

    with lowbit.materialization("error"):
        got = jax.jit(implicit(fn))(stack.astype(jnp.bfloat16), x)
    assert got.dtype == jnp.bfloat16
    assert_close(got.astype(jnp.float32), fn(stack.materialize(), x.astype(jnp.float32)), 2e-2)


@pytest.mark.parametrize("format", ["q4", "int8"])
def test_blocks_of_a_kernel_with_outputs_first(format: str) -> None:
    fn, _, image, _ = PROGRAMS["channels first"]
    w, x = lowbit.quantize(normal(32, 64, 3, 3), format, axis=-3, block_size=32), normal(2, 64, *image[2:])
    with lowbit.materialization("error"):
        assert dense_weights(implicit(fn), w, x) == []
        assert_close(implicit(fn)(w, x), fn(w.materialize(), x), 1e-4)


@pytest.mark.parametrize("name", tiers.tiered(PROGRAMS, ["3 x 3", "channels first", "1 x 1"]))
def test_adapters(name: str) -> None:
    fn, shape, image, _ = PROGRAMS[name]
    x = normal(*image)

    def model(p: Any, x: jax.Array) -> jax.Array:
        return fn(p["w"], x)

    params, _ = quantize_tree({"w": normal(*shape)}, {"w": "int8"}, fn=model, args=(x,))
    params = lowbit.lora(params, "w", rank=3, alpha=2, key=jax.random.key(0), fn=model, args=(x,))
    w = params["w"].replace(b=normal(*params["w"].b.shape))
    trained, frozen = lowbit.partition({"w": w})

    def result_and_gradient(model: Callable[..., jax.Array]) -> list[jax.Array]:
        def loss(trained: Any) -> tuple[jax.Array, jax.Array]:
            y = model(lowbit.combine(trained, frozen), x)
            return jnp.sin(y).sum(), y

        return jax.tree.leaves(jax.jit(jax.grad(loss, has_aux=True))(trained))

    with lowbit.materialization("error"):
        assert dense_weights(implicit(model), {"w": w}, x) == []
        got = result_and_gradient(implicit(model))
    assert_close(got, result_and_gradient(lambda p, x: fn(p["w"].materialize(), x)), 1e-4)


@pytest.mark.parametrize(
    ("shape", "image", "primitive"),
    [
        ((16, 16, 3, 64), (1, 32, 32, 3), "lowbit_matmul"),  # one block for each row of the window
        (
            (3, 3, 48, 64),
            (1, 4, 4, 48),
            "lowbit_conv",
        ),  # 48 features in blocks of 32: a product would have a slow gradient
    ],
)
def test_blocks_that_are_not_full(shape: tuple[int, ...], image: tuple[int, ...], primitive: str) -> None:
    fn, x = convolution("NHWC HWIO NHWC", shape[:2], "VALID"), normal(*image)
    w = quantize_tree({"w": normal(*shape)}, {"w": "q4"}, fn=lambda p, x: fn(p["w"], x), args=(x,))[0]["w"]

    def gradient(w: Any, x: jax.Array) -> jax.Array:
        return jax.grad(lambda x: jnp.sin(fn(w, x)).sum())(x)

    with lowbit.materialization("error"):
        assert primitive in str(jax.make_jaxpr(implicit(fn))(w, x))
        assert_close(implicit(fn)(w, x), fn(w.materialize(), x), 1e-4)
        assert_close(implicit(gradient)(w, x), gradient(w.materialize(), x), 1e-4)
