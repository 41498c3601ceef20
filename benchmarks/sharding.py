"""Bytes on each device compared with the ideal, and a plan for a model of 70 billion weights on real meshes.

    python benchmarks/sharding.py held --save sharding-held
    python benchmarks/sharding.py plan --save sharding-plan

`held` shards a model of 19 million weights over eight virtual devices and counts the bytes on each; the ideal is an
equal share of the stored bytes. `plan` needs no weights: shapes give the bytes, and the program that generates one
token, compiled for as many virtual devices as the mesh has, gives the collectives.
"""

import collections
import math
import os
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import measure
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import lowbit
from lowbit.demo import llama
from lowbit.demo.llama import LlamaConfig

SMALL = LlamaConfig(4096, 512, 4, 8, 8, 2048, 2048, 1e4, 1e-5)
LARGE = LlamaConfig(128_256, 8192, 80, 64, 8, 28_672, 8192, 5e5, 1e-5)  # Llama 3.1 70B
NF4 = lowbit.QuantizationConfig("nf4", double_quant=True)
CONTEXT = 8192


def mesh_of(**axes: int) -> Mesh:
    count = math.prod(axes.values())
    kinds = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds, devices=jax.devices()[:count])


def every_weight_over(params: Any, axis: str) -> Any:
    """Fully sharded: each matrix by its first axis, gathered as stored for the product that needs it."""

    def spec(path: Any, leaf: Any) -> PartitionSpec:
        if "norm" in jax.tree_util.keystr(path):
            return PartitionSpec()
        return PartitionSpec(*[None] * (len(leaf.shape) - 2), axis, None)

    return jax.tree_util.tree_map_with_path(spec, params, is_leaf=lambda x: isinstance(x, lowbit.QuantizedArray))


def quantized(config: LlamaConfig, params: Any, format: Any) -> Any:
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    forward = partial(llama.forward, config)
    return lowbit.quantize_tree(params, format, fn=lambda p, t: forward(p, t)[0], args=(tokens,), strict=True)[0]


LAYOUTS = {"tensor parallel": llama.specs, "fully sharded": partial(every_weight_over, axis="data")}


# --- bytes on each device


def held() -> Iterator[list[Any]]:
    params = llama.init(SMALL, jax.random.key(0))
    formats: dict[str, Any] = {"float32": None, **{name: name for name in lowbit.FORMATS}, "nf4, 8-bit scales": NF4}
    for name, format in formats.items():
        stored = params if format is None else quantized(SMALL, params, format)
        total = bytes_of(stored)
        for layout, axes in (("tensor parallel", {"model": 8}), ("fully sharded", {"data": 8})):
            mesh = mesh_of(**axes)
            where = jax.tree.map(partial(NamedSharding, mesh), LAYOUTS[layout](stored))
            placed = jax.device_put(stored, lowbit.shardings(stored, where))
            on_each: collections.Counter[Any] = collections.Counter()
            for component in jax.tree.leaves(placed):
                for shard in component.addressable_shards:
                    on_each[shard.device] += shard.data.nbytes
            assert len(on_each) == 8 and len(set(on_each.values())) == 1
            most = max(on_each.values())
            yield [layout, total / 1e6, name, total / 8e6, most / 1e6, most / (total / 8)]


def bytes_of(tree: Any) -> int:
    return sum(math.prod(component.shape) * component.dtype.itemsize for component in jax.tree.leaves(tree))


# --- the plan

PLANS = {
    "2 GPUs of 24 GB": ("tensor parallel", {"data": 1, "model": 2}),
    "4 TPU v5p": ("tensor parallel", {"data": 1, "model": 4}),
    "8 H100": ("tensor parallel", {"data": 1, "model": 8}),
    "16 TPU v5e": ("tensor parallel", {"data": 2, "model": 8}),
    "64 TPU v5e": ("fully sharded", {"data": 64, "model": 1}),
}


def planned() -> Iterator[list[Any]]:
    dense = jax.eval_shape(partial(llama.init, LARGE), jax.random.key(0))
    dense = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), dense)
    low = quantized(LARGE, dense, NF4)
    for name, (layout, axes) in PLANS.items():
        mesh = mesh_of(**axes)
        for format, params in (("bfloat16", dense), ("nf4", low)):
            yield [name, format, layout, *one_plan(mesh, layout, params, "bfloat16" if params is dense else "int8")]


def one_plan(mesh: Mesh, layout: str, params: Any, cache_format: str) -> list[Any]:
    where = jax.tree.map(partial(NamedSharding, mesh), LAYOUTS[layout](params))
    params = placed(params, lowbit.shardings(params, where))
    formats = ("int8", "int8") if cache_format == "int8" else llama.DENSE
    sequences = mesh.shape["data"]  # one on each group of devices
    cache = jax.eval_shape(lambda: llama.new_cache(LARGE, CONTEXT, formats))
    cache = {name: batch_of(stack, sequences) for name, stack in cache.items()}
    heads = NamedSharding(mesh, PartitionSpec(None, "data", "model"))
    cache = placed(cache, lowbit.shardings(cache, {"k": heads, "v": heads}))
    tokens = jax.ShapeDtypeStruct((sequences, 1), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec("data")))

    def step(params: Any, tokens: jax.Array, cache: Any) -> Any:
        return llama.forward(LARGE, params, tokens, cache, CONTEXT - 1, formats=formats)

    program = jax.jit(lowbit.implicit(step), donate_argnums=2)
    text = program.lower(params, tokens, cache).compile().as_text()
    layers = text[: text.index("\nENTRY ")]
    return [
        on_one(params) / 1e9,
        bytes_of(params) / mesh.size / 1e9,
        on_one(cache) / 1e9,
        collectives(layers),
        collectives(text[len(layers) :]),
    ]


def placed(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def batch_of(stack: Any, count: int) -> Any:
    """A stack of caches for this many sequences."""
    return jax.eval_shape(lambda s: lowbit.implicit(lambda s: jnp.concatenate([s] * count, axis=1))(s), stack)


def on_one(tree: Any) -> int:
    """The bytes on one device."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


_WIDTHS = {"f32": 4, "bf16": 2, "f16": 2, "s32": 4, "u8": 1, "s8": 1, "pred": 1}


def collectives(text: str) -> str:
    """The collectives of a compiled program, and the bytes of their results."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    found = re.findall(rf"= \(?(\w+)\[([\d,]*)\][^=\n]*? ({kinds})(?:-start)?\(", text)
    moved: collections.Counter[str] = collections.Counter()
    for dtype, shape, kind in found:
        moved[kind] += _WIDTHS[dtype] * math.prod(int(n) for n in shape.split(",") if n)
    counts = collections.Counter(kind for *_, kind in found)
    return "; ".join(f"{counts[kind]} {kind} of {moved[kind] / 1e6:.3f} MB" for kind in sorted(counts)) or "none"


COLUMNS = {
    "held": ["layout", "MB stored", "format", "MB ideal", "MB on each of 8", "ratio"],
    "plan": [
        "devices",
        "format",
        "layout",
        "GB of weights",
        "GB ideal",
        "GB of cache",
        "in a layer",
        "outside of them",
    ],
}


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("table", choices=COLUMNS)
    args = parser.parse_args()
    # Read when JAX detects devices.
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=64 --xla_backend_optimization_level=0"
    report = measure.Report(args, COLUMNS[args.table])
    for row in held() if args.table == "held" else planned():
        report.row(*row)
    report.save()


if __name__ == "__main__":
    main()
