"""Overheads: a small product in a compiled program and an eager one, compiling a quantized model, importing lowbit.

python benchmarks/overhead.py [--width 576] [--parts chain,eager,models,imports] [--save overhead]

- *chain*: a product of one row inside a compiled program, a chain of them with weights that stay in the cache.
- *eager*: the same product outside of `jit`, and compiled with the components of the weight as arguments.
- *models*: tracing, lowering and compiling SmolLM2-135M (its shapes), scanned over stacks of layers, and unrolled. Each
  repeat starts with empty caches.
- *imports*: every public name of lowbit over `import jax`.

*over dense* is the time divided by that of the same with dense float32 weights.
"""

import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import measure

import lowbit
from lowbit.demo.llama import LlamaConfig, rms_norm, rope

CONFIG = LlamaConfig(49152, 576, 30, 9, 3, 1536, 8192, 100000.0, 1e-5)
STAGES = ("trace", "lower", "compile")
CHAIN = 64


def chain(report: measure.Report, args: Any) -> None:
    n = args.width
    w, x = jax.random.normal(jax.random.key(0), (n, n)) / n**0.5, jnp.ones((1, n))

    @jax.jit
    def run(x: Any, w: Any) -> Any:
        for _ in range(CHAIN):
            x = jax.lax.optimization_barrier(x @ w)
        return x

    weights = {"dense float32": w}
    for format in ("nf4", "q4", "int8", "ternary", "binary"):
        for arithmetic in ("exact", "fast"):
            config = lowbit.QuantizationConfig(format, axis=-2, compute=arithmetic)
            weights[f"{format} {arithmetic}"] = lowbit.quantize(w, config)
    best = measure.least({name: [lambda q=q: run(x, q)] for name, q in weights.items()}, 10 * args.repeat)
    for name, seconds in best.items():
        report.row(f"1x{n} @ {n}x{n}", "in a program", name, 1e3 * seconds / CHAIN, seconds / best["dense float32"])


def model(params: Any, tokens: jax.Array) -> jax.Array:
    """A llama without a cache: a stack of layers in a scan, or a list of layers one after the other."""
    heads, kv_heads, size = CONFIG.heads, CONFIG.kv_heads, CONFIG.head_size
    positions = jnp.arange(tokens.shape[1])

    def split(x: jax.Array, heads: int) -> jax.Array:
        return jnp.swapaxes(x.reshape(*x.shape[:-1], heads, size), 1, 2)

    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        h = rms_norm(x, p["attn_norm"], CONFIG.epsilon)
        q, k = split(h @ p["q"], heads), split(h @ p["k"], kv_heads)
        q, k = (rope(x, positions, CONFIG.rope_base) for x in (q, k))
        q = q.reshape(-1, kv_heads, heads // kv_heads, *q.shape[2:])
        scores = jnp.einsum("bkgsd,bktd->bkgst", q, k) / size**0.5
        weights = jax.nn.softmax(jnp.where(positions <= positions[:, None], scores, -jnp.inf))
        mixed = jnp.einsum("bkgst,bktd->bskgd", weights, split(h @ p["v"], kv_heads)).reshape(x.shape)
        x = x + mixed @ p["o"]
        h = rms_norm(x, p["mlp_norm"], CONFIG.epsilon)
        return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"], None

    x = params["embed"][tokens]
    if isinstance(params["layers"], dict):
        x, _ = jax.lax.scan(layer, x, params["layers"])
    else:
        for p in params["layers"]:
            x, _ = layer(x, p)
    return rms_norm(x, params["norm"], CONFIG.epsilon) @ params["embed"].T


def shapes(format: str | None, unrolled: bool) -> Any:
    """The parameters as shapes: a stack of layers, or a list of them."""
    of_layer = {"attn_norm": (576,), "q": (576, 576), "k": (576, 192), "v": (576, 192), "o": (576, 576)}
    of_layer |= {"mlp_norm": (576,), "gate": (576, 1536), "up": (576, 1536), "down": (1536, 576)}
    stack = () if unrolled else (CONFIG.layers,)

    def weight(shape: tuple[int, ...]) -> Any:
        dense = jnp.zeros((*stack, *shape))
        return dense if format is None or len(shape) < 2 else lowbit.quantize(dense, format, axis=-2)

    def params() -> Any:
        layers = {name: weight(shape) for name, shape in of_layer.items()}
        embed = jnp.zeros((CONFIG.vocabulary, CONFIG.width))
        return {"layers": [layers] * CONFIG.layers if unrolled else layers, "embed": embed, "norm": jnp.zeros(576)}

    return jax.eval_shape(params)


def stages(params: Any, is_dense: bool) -> list[float]:
    """Seconds to trace, lower and compile the model for 16 tokens, without anything cached."""
    jax.clear_caches()
    program = jax.jit((lambda fn: fn if is_dense else lowbit.implicit(fn))(lambda *operands: model(*operands)))
    at = [time.perf_counter()]
    traced = program.trace(params, jax.ShapeDtypeStruct((1, 16), jnp.int32))
    at.append(time.perf_counter())
    lowered = traced.lower()
    at.append(time.perf_counter())
    lowered.compile()
    at.append(time.perf_counter())
    return [b - a for a, b in itertools.pairwise(at)]


def models(report: measure.Report, args: Any) -> None:
    for unrolled in (False, True):
        name = "30 layers unrolled" if unrolled else "30 layers scanned"
        todo = {format: shapes(format, unrolled) for format in (None, "nf4", "q4", "int8")}
        found: dict[Any, list[list[float]]] = {format: [] for format in todo}
        for _ in range(args.repeat):
            for format, params in todo.items():
                found[format].append(stages(params, format is None))
        best = {format: [min(times) for times in zip(*runs, strict=True)] for format, runs in found.items()}
        for format, times in best.items():
            for stage, seconds, dense in zip(STAGES, times, best[None], strict=True):
                report.row(name, stage, format or "dense float32", 1e3 * seconds, seconds / dense)
            report.row(name, "all", format or "dense float32", 1e3 * sum(times), sum(times) / sum(best[None]))


def eager(report: measure.Report, args: Any) -> None:
    n = args.width
    w, x = jax.random.normal(jax.random.key(0), (n, n)), jnp.ones((1, n))
    for format in ("nf4", "q4", "int8"):
        q = lowbit.quantize(w, format, axis=-2)
        components, tree = jax.tree.flatten(q)
        compiled = jax.jit(lambda x, *components, tree=tree: x @ jax.tree.unflatten(tree, components))
        calls: dict[str, Sequence[Callable[[], Any]]] = {
            "compiled": [lambda compiled=compiled, components=components: compiled(x, *components)],
            "eager": [lambda q=q: x @ q],
            "dense": [lambda: x @ w],
        }
        best = measure.least(calls, 200 * args.repeat)
        for stage in ("compiled", "eager"):
            report.row(f"1x{n} @ {n}x{n}", stage, format, 1e3 * best[stage], best[stage] / best["dense"])


def imports(report: measure.Report, args: Any) -> None:
    """In new processes, from bytecode, as an installed package has it."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = cache

        def seconds(statement: str) -> float:
            code = f"import time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
            run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=environment)
            return float(run.stdout)

        alone, all_names = "import jax, jax.numpy", "import jax, jax.numpy; from lowbit import *"
        found = [(seconds(alone), seconds(all_names)) for _ in range(args.repeat + 1)]
    jax_alone, both = (min(times) for times in zip(*found, strict=True))
    report.row("import", "jax", "", 1e3 * jax_alone, "")
    report.row("import", "jax, lowbit", "", 1e3 * both, both / jax_alone)


def main() -> None:
    parser = measure.parser(__doc__)
    parser.set_defaults(repeat=8)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--parts", default="chain,eager,models,imports", help="which parts to run")
    args = parser.parse_args()
    report = measure.Report(args, ["program", "stage", "weights", "ms", "over dense"])
    for part in args.parts.split(","):
        {"chain": chain, "eager": eager, "models": models, "imports": imports}[part](report, args)
    report.save()


if __name__ == "__main__":
    main()
