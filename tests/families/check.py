"""Models of other libraries: what a row of a family's table says, and the one check that every row goes through."""

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import lowbit
from lowbit.runtime import is_implicit


class Model(NamedTuple):
    """`fn(params, *args)` of a model with random weights."""

    fn: Callable[..., Any]
    params: Any
    args: tuple[Any, ...]


def randomized(params: Any) -> Any:
    """Weights of a model that begins with zeros, replaced by random ones."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(2), len(leaves))
    weights = [jax.random.normal(key, w.shape, w.dtype) / 8 for key, w in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(tree, weights)


def close(got: Any, want: Any, tolerance: float) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert a.shape == b.shape
        assert np.isfinite(b).all()
        assert np.abs(a - b).max(initial=0) <= tolerance * max(np.abs(b).max(initial=0), 1e-3)


def adapted(model: Model, params: Any, rules: Any) -> Any:
    """Adapters on all products, or on the weights that the patterns of `rules` name, with both factors random."""
    patterns = "*" if isinstance(rules, str) else list(rules)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # '*' leaves out convolutions and tables that are added, and says so
        params = lowbit.lora(params, patterns, rank=2, key=jax.random.key(0), fn=model.fn, args=model.args)

    def random(x: Any) -> Any:
        if not isinstance(x, lowbit.LoraArray):
            return x
        return x.replace(b=jax.random.normal(jax.random.key(1), x.b.shape, x.b.dtype) / 8)

    return jax.tree.map(random, params, is_leaf=is_implicit)


def program(fn: Callable[..., Any], read: Callable[[Any], Any]) -> Callable[..., Any]:
    """Gradients of the trained leaves, and the result, of `fn` on weights as `read` makes them of the whole tree."""

    def loss(trained: Any, frozen: Any, args: Any) -> Any:
        y = fn(read(lowbit.combine(trained, frozen)), *args)
        return jnp.sin(y.astype(jnp.float32)).sum(), y

    return jax.jit(jax.grad(loss, has_aux=True, allow_int=True))


def check(make: Callable[[], Model], quantized: int, tmp_path: Path, rules: Any = "int8", **options: Any) -> None:
    """Quantize a model, save and load it, add adapters, and compare result and gradients with the dense weights.

    - `quantized`: how many weights `rules` quantize.
    - `tolerance`: of results and gradients, relative to the largest number.
    - `policy`: "error", or "allow" for a model that makes a weight dense by a use that no format has.
    """
    tolerance, policy = options.get("tolerance", 1e-3), options.get("policy", "error")
    model = make()
    params, report = lowbit.quantize_tree(model.params, rules, fn=model.fn, args=model.args)
    assert len(report.quantized) == quantized, report
    lowbit.save(tmp_path / "weights.safetensors", params)
    loaded = lowbit.load(tmp_path / "weights.safetensors", like=params)
    for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    trained, frozen = lowbit.partition(adapted(model, loaded, rules))
    assert jax.tree.leaves(trained)

    with lowbit.materialization(policy) if policy == "error" else contextlib.nullcontext():
        grads, y = program(lowbit.implicit(model.fn), lambda tree: tree)(trained, frozen, model.args)
    want_grads, want = program(model.fn, lowbit.materialize)(trained, frozen, model.args)
    close(y, want, tolerance)
    floating = [[g for g in jax.tree.leaves(tree) if g.dtype != jax.dtypes.float0] for tree in (grads, want_grads)]
    close(*floating, 10 * tolerance)


def check_bfloat16(make: Callable[[Any], Model]) -> None:
    """The gradients of adapters in a bfloat16 model are at least as close to those in float32 as the dense model's.

    `make` takes the dtype in which the model computes.
    """
    model, reference = make(jnp.bfloat16), make(jnp.float32)
    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), model.params)
    params, _ = lowbit.quantize_tree(params, "int8", fn=model.fn, args=model.args)
    trained, frozen = lowbit.partition(adapted(model, params, "int8"))

    def wide(leaf: Any) -> Any:
        if isinstance(leaf, lowbit.LoraArray):
            leaf = leaf.replace(base=leaf.base.astype(jnp.float32))
        return lowbit.materialize(leaf).astype(jnp.float32)

    programs = {
        "lowbit": program(lowbit.implicit(model.fn), lambda tree: tree),
        "dense": program(model.fn, lowbit.materialize),
        "float32": program(reference.fn, lambda tree: jax.tree.map(wide, tree, is_leaf=is_implicit)),
    }
    with lowbit.materialization("error"):
        grads = {name: run(trained, frozen, model.args)[0] for name, run in programs.items()}
    want = jax.tree.leaves(grads["float32"])

    def errors(name: str) -> np.ndarray:
        return np.array([np.linalg.norm(a - b) for a, b in zip(jax.tree.leaves(grads[name]), want, strict=True)])

    got, dense = errors("lowbit"), errors("dense")
    assert all(np.any(w) for w in want)
    assert np.linalg.norm(got) <= np.linalg.norm(dense), (got, dense)
    assert (got <= 2 * dense).all(), got / dense  # leaves are small and differ by chance
