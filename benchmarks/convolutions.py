"""Convolutions with quantized kernels: patches times the kernel in the native product, against a decoded kernel.

python benchmarks/convolutions.py [--cases resnet,whisper] [--formats int8,q4] [--save convolutions]

- *dense*: XLA's convolution with a float32 kernel.
- *decoded*: XLA's convolution with the kernel decoded inside the operation.
- *patches*: the product of the patches of x with the kernel as a matrix; *fast* with activations in 8 bits.
- *x decoded*: how many times faster than the decoded kernel. `lowbit.rules.convolution.few_patches` chooses by it;
  *chosen* is its choice.
- *gradient*: the gradient with respect to x alone, of `implicit(fn)`; *inside*, inside of `implicit`, where JAX makes a
  convolution of it.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import measure
from jax import lax

import lowbit
from lowbit.rules import convolution as rule

# The shape of x without its batch, the window, strides, padding, and the outputs.
CASES: dict[str, tuple[Any, ...]] = {
    "resnet 56 x 56": ((56, 56, 64), (3, 3), (1, 1), "SAME", 64),
    "resnet 28 x 28": ((28, 28, 128), (3, 3), (1, 1), "SAME", 128),
    "resnet 14 x 14": ((14, 14, 256), (3, 3), (1, 1), "SAME", 256),
    "resnet 7 x 7": ((7, 7, 512), (3, 3), (1, 1), "SAME", 512),
    "resnet 20 x 20": ((20, 20, 256), (3, 3), (1, 1), "SAME", 256),
    "80 features": ((100, 80), (3,), (1,), "SAME", 384),
    "whisper first": ((3000, 80), (3,), (1,), "SAME", 384),
    "whisper second": ((3000, 384), (3,), (2,), "SAME", 384),
    "whisper second, 15 s": ((1500, 384), (3,), (2,), "SAME", 384),
    "vit patches": ((224, 224, 3), (16, 16), (16, 16), "VALID", 768),
    "convnext downsample": ((14, 14, 384), (2, 2), (2, 2), "VALID", 768),
}
LAYOUTS = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC")}


few_patches = rule.few_patches


def compiled(fn: Callable[..., Any], as_product: bool, arithmetic: str, *args: Any) -> Any:
    """`fn` compiled with one of the two ways."""
    with mock.patch.object(rule, "few_patches", lambda *_: as_product), lowbit.compute(arithmetic):
        # A new function, since JAX would reuse the trace that it made with the other way.
        return jax.jit(lambda *args: fn(*args)).lower(*args).compile()


def chosen(fn: Callable[..., Any], arithmetic: str, *args: Any) -> str:
    """The way that `fn` takes by itself."""
    asked = []

    def ask(*args: Any) -> bool:
        asked.append(few_patches(*args))
        return asked[-1]

    with mock.patch.object(rule, "few_patches", ask), lowbit.compute(arithmetic):
        jax.eval_shape(lambda *args: fn(*args), *args)
    return "patches" if asked[-1] else "decoded"


def gradient(fn: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: Any, w: Any) -> Any:
        y, back = jax.vjp(lambda x: fn(x, w), x)
        return back(jnp.ones_like(y))

    return run


def main() -> None:
    parser = measure.parser(__doc__)
    parser.set_defaults(repeat=20)
    parser.add_argument("--cases", default="", help="words in the names of cases; all of them by default")
    parser.add_argument("--formats", default="int8,q4")
    args = parser.parse_args()
    report = measure.Report(args, ["patches", "outputs", "case", "way", "ms", "x decoded", "chosen"])
    for name, (shape, window, strides, padding, outputs) in CASES.items():
        if not any(word in name for word in args.cases.split(",")):
            continue
        x = jax.random.normal(jax.random.key(0), (1, *shape))
        inputs = math.prod(window) * shape[-1]
        w = jax.random.normal(jax.random.key(1), (*window, shape[-1], outputs)) / inputs**0.5
        fn = partial(
            lax.conv_general_dilated,
            window_strides=strides,
            padding=padding,
            dimension_numbers=LAYOUTS[len(window)],
        )
        patches = math.prod(jax.eval_shape(fn, x, w).shape[1:-1])
        calls: dict[str, Any] = {"dense": [partial(jax.jit(fn), x, w)]}
        ways: dict[str, Any] = {"dense": ("dense", "")}
        for format in args.formats.split(","):
            tree, _ = lowbit.quantize_tree({"w": w}, {"w": format}, fn=lambda p, x, fn=fn: fn(x, p["w"]), args=(x,))
            q = tree["w"]
            programs = {
                format: lowbit.implicit(fn),
                f"{format} gradient": gradient(lowbit.implicit(fn)),
                f"{format} inside": lowbit.implicit(gradient(fn)),
            }
            for kind, run in programs.items():
                calls[f"{kind} decoded"] = [partial(compiled(run, False, "exact", x, q), x, q)]
                for way, arithmetic in (("patches", "exact"), ("patches fast", "fast")):
                    if kind != format and arithmetic == "fast":
                        continue  # gradients are always exact
                    if "inside" in kind and "vit" in name:
                        continue  # its patches would have 10 billion elements, most of them zeros
                    calls[f"{kind} {way}"] = [partial(compiled(run, True, arithmetic, x, q), x, q)]
                    ways[f"{kind} {way}"] = f"{kind} decoded", chosen(run, arithmetic, x, q)
        best = measure.least(calls, args.repeat)
        for way, seconds in best.items():
            base, choice = ways.get(way, (way, ""))
            report.row(patches, outputs, name, way, 1e3 * seconds, best[base] / seconds, choice)
    report.save()


if __name__ == "__main__":
    main()
