"""Split a model into trainable and frozen leaves, and combine them again."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from lowbit.adapters.array import LoraArray
from lowbit.formats import PermutedArray, QuantizedArray

from .patterns import Rule, leaf_path, no_match

T = TypeVar("T")


def is_quantized(x: Any) -> bool:
    """Whether `x` is a quantized array as a whole: the `is_leaf` of functions over trees of parameters.

    Without it `jax.tree.map` calls its function on the codes and on the scales separately.

    >>> import jax, jax.numpy as jnp, lowbit
    >>> params = {"w": lowbit.quantize(jnp.ones((64, 8))), "b": jnp.zeros(8)}
    >>> sum(leaf.size for leaf in jax.tree.leaves(params, is_leaf=lowbit.is_quantized))
    520
    """
    return isinstance(x, QuantizedArray | PermutedArray)


def tree_map(fn: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """`jax.tree.map` with quantized arrays as leaves: `fn` gets each array as a whole, not its codes and its scales.

    Adapters are not leaves: `fn` gets the base of a `LoraArray` and each of its factors.

    >>> import jax.numpy as jnp, lowbit
    >>> params = {"w": lowbit.quantize(jnp.ones((64, 8))), "b": jnp.ones(8)}
    >>> lowbit.tree_map(lambda a: (a * 2)[0], params)["w"].materialize()[:2]
    Array([2., 2.], dtype=float32)
    >>> lowbit.tree_map(lambda a: a.astype(jnp.bfloat16), params)["w"].dtype
    dtype(bfloat16)
    """
    return jax.tree.map(fn, tree, *rest, is_leaf=lambda x: is_quantized(x) or (is_leaf is not None and is_leaf(x)))


def is_frozen(x: Any) -> bool:
    """Whether `x` cannot be trained: a quantized array, or an array whose dtype is not floating-point.

    It also works as `is_leaf`: containers are not frozen, though their contents may be. `trainable` chooses among the
    leaves that are not frozen.

    >>> import jax, jax.numpy as jnp, lowbit
    >>> params = {"w": lowbit.quantize(jnp.ones((64, 8))), "b": jnp.zeros(8), "step": jnp.int32(0)}
    >>> jax.tree.map(lowbit.is_frozen, params, is_leaf=lowbit.is_frozen)  # the inverse of an optax mask
    {'b': False, 'step': True, 'w': True}
    """
    return is_quantized(x) or (hasattr(x, "dtype") and not jnp.issubdtype(x.dtype, jnp.inexact))


def trainable(tree: Any, train: str | Iterable[str] | None = None) -> Any:
    """Which leaves are trained: a tree of True and False, a mask for optax or a filter for Equinox.

    - In a model with adapters (`lora`), only the adapters are trained; in one without, all floating-point arrays.
    - `train`: patterns, as in a `Rule`, of the leaves to train in addition to the adapters.

    A quantized array has one False for all of its components.

    >>> import jax, jax.numpy as jnp, lowbit
    >>> params = {"w": lowbit.quantize(jnp.ones((64, 32))), "b": jnp.zeros(32)}
    >>> lowbit.trainable(params)
    {'b': True, 'w': False}
    >>> params = lowbit.lora(params, "w", key=jax.random.key(0))
    >>> lowbit.trainable(params)["b"], lowbit.trainable(params, train="b")["b"]
    (False, True)
    """
    patterns = None if train is None else [Rule(p, None) for p in ([train] if isinstance(train, str) else train)]
    found, structure = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda x: is_frozen(x) or isinstance(x, LoraArray)
    )
    adapted = any(isinstance(leaf, LoraArray) for _, leaf in found)
    used: set[str] = set()

    def chosen(path: str, leaf: Any) -> Any:
        if isinstance(leaf, LoraArray):
            return leaf.replace(base=False, a=True, b=True)
        if patterns is None:
            return hasattr(leaf, "dtype") and not is_frozen(leaf) and not adapted
        matching = {rule.pattern for rule in patterns if hasattr(leaf, "dtype") and rule.matches(path, leaf)}
        used.update(matching)
        if matching and is_frozen(leaf):
            kind = type(leaf).__name__ if is_quantized(leaf) else f"an array of {leaf.dtype}"
            raise ValueError(f"train={sorted(matching)[0]!r} matches {path}, which is {kind} and cannot be trained.")
        return bool(matching)

    mask = [chosen(leaf_path(path), leaf) for path, leaf in found]
    unused = [rule.pattern for rule in patterns or () if rule.pattern not in used]
    if unused:
        raise ValueError(no_match(unused, [leaf_path(path) for path, _ in found]))
    return jax.tree.unflatten(structure, mask)


def partition(tree: T, train: str | Iterable[str] | None = None) -> tuple[T, T]:
    """Split a tree into trainable and frozen leaves: two trees of its structure, with None for the leaves of the other.

    In a model with adapters (`lora`), only the adapters are trainable; in one without, all floating-point arrays.
    `train` has patterns for others (see `trainable`). Everything else is frozen: quantized arrays, integers, and leaves
    that are not arrays. `jax.grad` and optimizers see the trainable tree only: no step changes a stored bit or scale.

    >>> import jax, jax.numpy as jnp, lowbit
    >>> params = {"w": lowbit.quantize(jnp.ones((64, 8))), "b": jnp.zeros(8)}
    >>> trainable, frozen = lowbit.partition(params)
    >>> loss = lambda trainable, x: (x @ (p := lowbit.combine(trainable, frozen))["w"] + p["b"]).sum()
    >>> jax.grad(loss)(trainable, jnp.ones((2, 64)))
    {'b': Array([2., 2., 2., 2., 2., 2., 2., 2.], dtype=float32), 'w': None}
    """
    mask = trainable(tree, train)
    return (
        jax.tree.map(lambda chosen, leaf: leaf if chosen else None, mask, tree),
        jax.tree.map(lambda chosen, leaf: None if chosen else leaf, mask, tree),
    )


def combine(trainable: T, frozen: T) -> T:
    """Combine the trees of `partition`; the leaves of the trainable one may have changed in between.

    >>> import jax.numpy as jnp, lowbit
    >>> params = {"w": lowbit.quantize(jnp.ones((64, 8))), "b": jnp.zeros(8)}
    >>> lowbit.combine(*lowbit.partition(params))["w"] is params["w"]
    True
    """

    def choose(path: Any, t: Any, f: Any) -> Any:
        if t is not None and f is not None:
            name = jax.tree_util.keystr(path)
            raise ValueError(
                f"combine: {name or 'the tree'} is in both trees; each leaf must be in one, with None in the other."
            )
        return f if t is None else t

    return jax.tree_util.tree_map_with_path(choose, trainable, frozen, is_leaf=lambda x: x is None or is_frozen(x))
