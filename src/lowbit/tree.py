"""Whole models: what is trained, and what stays as it is stored."""

from typing import Any

import jax
import jax.numpy as jnp

from .formats import QuantizedArray


def is_frozen(x: Any) -> bool:
    """Whether `x` is stored as it is: a quantized array as a whole, or an array without a derivative.

    For `is_leaf` too: containers are not frozen, what is in them may be.

    >>> import jax, jax.numpy as jnp, lowbit
    >>> params = {"w": lowbit.quantize(jnp.ones((64, 8))), "b": jnp.zeros(8), "step": jnp.int32(0)}
    >>> jax.tree.map(lowbit.is_frozen, params, is_leaf=lowbit.is_frozen)  # an optax mask, but for a `not`
    {'b': False, 'step': True, 'w': True}
    """
    return isinstance(x, QuantizedArray) or (hasattr(x, "dtype") and not jnp.issubdtype(x.dtype, jnp.inexact))


def partition(tree: Any) -> tuple[Any, Any]:
    """The trainable and the frozen leaves, each in a tree of the same structure with None in the other's places.

    Trainable are arrays of floating-point numbers. The rest is frozen: quantized arrays, integers, and whatever a
    model holds beside its arrays. `jax.grad` and optimizers see the trainable tree only, so no step changes a stored
    bit or scale.

    >>> import jax, jax.numpy as jnp, lowbit
    >>> params = {"w": lowbit.quantize(jnp.ones((64, 8))), "b": jnp.zeros(8)}
    >>> trainable, frozen = lowbit.partition(params)
    >>> loss = lambda trainable, x: (x @ (p := lowbit.combine(trainable, frozen))["w"] + p["b"]).sum()
    >>> jax.grad(loss)(trainable, jnp.ones((2, 64)))
    {'b': Array([2., 2., 2., 2., 2., 2., 2., 2.], dtype=float32), 'w': None}
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_frozen)
    trained = [hasattr(leaf, "dtype") and not is_frozen(leaf) for leaf in leaves]
    trainable = [leaf if chosen else None for leaf, chosen in zip(leaves, trained, strict=True)]
    frozen = [None if chosen else leaf for leaf, chosen in zip(leaves, trained, strict=True)]
    return jax.tree.unflatten(structure, trainable), jax.tree.unflatten(structure, frozen)


def combine(trainable: Any, frozen: Any) -> Any:
    """The tree that `partition` took apart; the trainable part may have changed in between.

    >>> import jax.numpy as jnp, lowbit
    >>> params = {"w": lowbit.quantize(jnp.ones((64, 8))), "b": jnp.zeros(8)}
    >>> lowbit.combine(*lowbit.partition(params))["w"] is params["w"]
    True
    """

    def choose(path: Any, t: Any, f: Any) -> Any:
        if t is not None and f is not None:
            name = jax.tree_util.keystr(path)
            raise ValueError(
                f"combine: {name or 'the tree'} is in both trees; each leaf belongs to one, None to the other."
            )
        return f if t is None else t

    return jax.tree_util.tree_map_with_path(choose, trainable, frozen, is_leaf=lambda x: x is None or is_frozen(x))
