"""Keras models with quantized weights: `model(x)`, `predict`, `evaluate`, `fit` and keras-hub's `generate` run on them.

The variables of Keras check what is assigned to them, and its scopes convert values to dense arrays. `quantize_model`
puts quantized arrays into the variables of one model and runs its methods under `lowbit.implicit`:

    os.environ["KERAS_BACKEND"] = "jax"
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128), keras.layers.Dense(10)])
    report = lowbit.compat.keras.quantize_model(model, "q4", args=(x,))
    y = model.predict(x)

docs/frameworks.md has programs that run.
"""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

import lowbit
from lowbit.runtime import is_implicit

# The methods that get values of variables from Keras as arguments, of those that a model has.
METHODS = ("stateless_call", "train_step", "test_step")


def quantize_model(model: Any, rules: Any, *, args: Sequence[Any] = (), strict: bool = False) -> lowbit.Report:
    """Quantize the weights of a built Keras model in place, and return the report of `lowbit.quantize_tree`.

    - `rules`: as for `quantize_tree`. The path of a weight is that of its variable, such as "sequential/dense/kernel".
    - `args`: the arguments of a call, `model(*args)`, which tells the axes that are contracted.

    Quantized variables are not trainable from then on, and `fit` trains the others; compile the model again before it.
    `lowbit.save(path, weights(model))` stores the weights, `set_weights(model, lowbit.load(path))` puts them back.

    Raises `ValueError` if Keras does not run on JAX, if the model is not built, or if two variables have the same path.
    """
    keras = _keras()
    if keras.backend.backend() != "jax":
        raise ValueError(
            f"Keras runs on {keras.backend.backend()!r}, and quantized weights need JAX: set the environment variable "
            "KERAS_BACKEND=jax before keras is imported."
        )
    if not model.built:
        raise ValueError(f"{model.name!r} has no weights yet: call it, or model.build(...), before quantize_model.")
    run = _stateless(model.variables, functools.partial(model, training=False))

    def call(values: Mapping[str, Any], *args: Any) -> Any:
        return run([values[v.path] for v in model.variables], *args)[0]

    quantized, report = lowbit.quantize_tree(weights(model), rules, fn=call, args=tuple(args), strict=strict)
    set_weights(model, quantized)
    return report


def weights(model: Any) -> dict[str, Any]:
    """The values of the variables of a Keras model, dense or quantized, by path."""
    found = {v.path: v.value for v in model.variables}
    if len(found) < len(model.variables):
        paths = [v.path for v in model.variables]
        twice = sorted({path for path in paths if paths.count(path) > 1})
        raise ValueError(
            f"Several variables of {model.name!r} have the path {', '.join(twice[:5])}: rename the layers."
        )
    return found


def set_weights(model: Any, values: Mapping[str, Any]) -> None:
    """Set variables of a Keras model by path. Values may be quantized, or have adapters, and are then not trained."""
    variables = {v.path: v for v in model.variables}
    if unknown := sorted(set(values) - set(variables)):
        raise ValueError(f"{model.name!r} has no variable {', '.join(unknown[:5])}.")
    for path, value in values.items():
        v = variables[path]
        if tuple(value.shape) != tuple(v.shape):
            raise ValueError(f"{path} has shape {tuple(v.shape)}, and the value has shape {tuple(value.shape)}.")
        if is_implicit(value):
            v.trainable = False
            v.__class__ = _holder(type(v))
            v._value = value
        else:
            v.assign(value)
    _run_implicitly(model)


def _stateless(variables: Sequence[Any], method: Callable[..., Any]) -> Callable[..., Any]:
    """`method` as a function of the values of variables: its result, and the values that it changed by position."""

    def run(values: Sequence[Any], *args: Any, **kwargs: Any) -> tuple[Any, dict[int, Any]]:
        with _keras().StatelessScope(state_mapping=list(zip(variables, values, strict=True))) as scope:
            before = [scope.get_current_value(v) for v in variables]
            out = method(*args, **kwargs)
            after = [scope.get_current_value(v) for v in variables]
        return out, {i: new for i, (old, new) in enumerate(zip(before, after, strict=True)) if new is not old}

    return run


def _implicitly(variables: Sequence[Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """Call what `_stateless` made, with the present values of the variables, and assign those that it changed."""

    def call(*args: Any, **kwargs: Any) -> Any:
        out, changed = run([v.value for v in variables], *args, **kwargs)
        for i, value in changed.items():
            variables[i].assign(value)
        return out

    return call


def _keras() -> Any:
    """The imported package: a model of it is at hand. lowbit does not depend on Keras."""
    return sys.modules["keras"]


@functools.cache
def _holder(cls: type) -> type:
    """The class of variables, with one that keeps implicit arrays as they are."""
    if hasattr(cls, "holds_implicit"):
        return cls
    base: Any = cls

    class Holder(base):
        holds_implicit = True

        def _convert_to_tensor(self, value: Any, dtype: Any = None) -> Any:
            return value if is_implicit(value) else super()._convert_to_tensor(value, dtype)

        def _maybe_autocast(self, value: Any) -> Any:
            return value if is_implicit(value) else super()._maybe_autocast(value)

    return Holder


def _run_implicitly(model: Any) -> None:
    """Run the methods of a model under `implicit`, once; forget what was compiled for other weights."""
    if "call" not in vars(model):
        plain = model.call
        variables = list(model.variables)
        eager = _implicitly(variables, lowbit.implicit(_stateless(variables, plain)))

        def call(*args: Any, **kwargs: Any) -> Any:
            # Inside of the methods below, variables read as dense arrays.
            return (eager if any(is_implicit(v.value) for v in variables) else plain)(*args, **kwargs)

        model.call = call
        for name in METHODS:
            if hasattr(model, name):
                setattr(model, name, lowbit.implicit(getattr(model, name)))
        if hasattr(model, "generate_step"):
            model.make_generate_function = functools.partial(_generate_function, model)
    for name in ("train_function", "test_function", "predict_function", "generate_function"):
        if hasattr(model, name):
            setattr(model, name, None)


def _generate_function(model: Any) -> Callable[..., Any]:
    """keras-hub's compiled generation, as a function of the weights; the sampler has random seeds."""
    if model.generate_function is None:
        variables = [*model.variables, *model.sampler.variables]
        run = jax.jit(lowbit.implicit(_stateless(variables, model.generate_step)), static_argnames="stop_token_ids")
        generate = _implicitly(variables, run)

        def call(inputs: Any, stop_token_ids: Any = None) -> Any:
            stop = tuple(stop_token_ids) if isinstance(stop_token_ids, list) else stop_token_ids
            return generate(jax.tree.map(_keras().ops.convert_to_tensor, inputs), stop_token_ids=stop)

        model.generate_function = call
    return model.generate_function
