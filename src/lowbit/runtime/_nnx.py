"""Flax NNX objects among the arguments of `implicit`: what the function changes in them is written back.

A trace works on copies of its arguments, so a change of a variable (a running mean, the count of a random stream, the
index of a cache) would be lost. The objects are split and merged as the transformations of NNX do it, which also keeps
a variable that several modules share one variable.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import jax

from ._array import is_implicit


def is_nnx_object(x: Any) -> bool:
    """Whether `x` is a module, or another object with variables, or a variable itself."""
    nnx: Any = sys.modules.get("flax.nnx")  # nothing is an object of a module that was not imported
    # Up to 0.11 the base class of modules has another name.
    return nnx is not None and isinstance(x, (getattr(nnx, "Pytree", nnx.Module), nnx.Variable))


def holds_nnx_objects(tree: Any) -> bool:
    """Whether a tree has such objects. A `State` is data that was split from them: nobody changes it in place."""
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None:
        return False
    return any(
        map(is_nnx_object, jax.tree.leaves(tree, is_leaf=lambda x: is_nnx_object(x) or isinstance(x, nnx.State)))
    )


def run_with_objects(run: Callable[..., Any], fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """`run(fn, *args, **kwargs)`, after which the objects in the arguments have changed as `fn` changed them."""
    nnx: Any = sys.modules["flax.nnx"]
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=lambda x: is_implicit(x) or is_nnx_object(x))
    at = [i for i, leaf in enumerate(leaves) if is_nnx_object(leaf)]
    objects = [leaves[i] for i in at]
    rest = [None if i in at else leaf for i, leaf in enumerate(leaves)]
    graph, state = nnx.split(objects)

    def pure(state: Any, rest: list[Any]) -> Any:
        before = [jax.tree.leaves(variable) for _, variable in nnx.to_flat_state(state)]
        copies = nnx.merge(graph, state)
        full = list(rest)
        for i, copy in zip(at, copies, strict=True):
            full[i] = copy
        args, kwargs = jax.tree.unflatten(tree, full)
        out = fn(*args, **kwargs)
        new_graph, new_state = nnx.split(copies)
        if new_graph != graph:
            raise ValueError(
                "The function given to implicit adds or removes a variable of an NNX object, or changes a static "
                "attribute of it, and that change would be lost. Create variables before the call, as init_cache does, "
                "and pop what the call sows inside the function (nnx.pop) to return it."
            )
        after = list(nnx.to_flat_state(new_state))
        same = [_same(values, variable) for values, (_, variable) in zip(before, after, strict=True)]
        return out, [variable for (_, variable), kept in zip(after, same, strict=True) if not kept], same

    out, changed, same = run(pure, state, rest)
    if changed:
        _refuse_copies()
        paths = [path for (path, _), kept in zip(nnx.to_flat_state(state), same, strict=True) if not kept]
        nnx.update(objects, nnx.from_flat_state(list(zip(paths, changed, strict=True))))
    return out


# Packages whose transformations call a function with copies of the objects that they were given.
_COPYING = ("jax", "equinox")


def _refuse_copies() -> None:
    """Raise if a transformation of JAX called the function: nobody sees what changes in its copies of the objects."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith(__package__):
        frame = frame.f_back
    if frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in _COPYING:
        raise ValueError(
            "The function given to implicit changes the state of an NNX object (a running mean, the count of a random "
            "stream, a cache), and jax.jit, jax.grad and other transformations of JAX around implicit lose that "
            "change. Use those of NNX, nnx.jit(lowbit.implicit(fn)), or take and return the state: "
            "nnx.merge(graph, state) before the call and nnx.state(model) after it, inside the transformed function. "
            "model.eval() stops the changes of norms and dropout."
        )


def _same(values: list[Any], variable: Any) -> bool:
    after = jax.tree.leaves(variable)
    return len(values) == len(after) and all(x is y for x, y in zip(values, after, strict=True))
