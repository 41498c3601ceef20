"""Haiku, jax-resnet, flaxmodels, penzai, equimo, Keras and keras-hub, on the newest JAX."""

import os
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import keras
import keras_hub
import numpy as np
import pytest
from check import Model, check, close

import lowbit
import lowbit.compat.keras

KEY = jax.random.key(0)
IDS = jnp.array([[3, 1, 60, 9, 9, 4]])


def image(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(1), shape)


def haiku_attention() -> Model:
    def forward(x: Any) -> Any:
        x = x + hk.MultiHeadAttention(2, 16, w_init=hk.initializers.VarianceScaling())(x, x, x)
        return hk.nets.MLP([64, 32])(hk.LayerNorm(-1, True, True)(x))

    model, x = hk.without_apply_rng(hk.transform(forward)), image(2, 5, 32)
    return Model(model.apply, model.init(KEY, x), (x,))


def haiku_recurrent() -> Model:
    def forward(x: Any) -> Any:
        core = hk.GRU(32)
        return hk.dynamic_unroll(core, x, core.initial_state(2))[0]

    model, x = hk.without_apply_rng(hk.transform(forward)), image(5, 2, 32)
    return Model(model.apply, model.init(KEY, x), (x,))


def linen(model: Any, x: Any, **options: Any) -> Model:
    variables = model.init(KEY, x, **options)
    rest = {name: value for name, value in variables.items() if name != "params"}
    return Model(lambda p, x: model.apply({"params": p, **rest}, x, **options), variables["params"], (x,))


def resnet() -> Model:
    from jax_resnet import ResNet, ResNetBottleneckBlock

    sizes: Any = {"stage_sizes": [1, 1], "hidden_sizes": (16, 32)}
    return linen(ResNet(ResNetBottleneckBlock, n_classes=10, **sizes), image(2, 16, 16, 3))


def flaxmodels_resnet() -> Model:
    from flaxmodels import ResNet18  # its GPT-2 calls an argument that JAX does not have any more

    model = ResNet18(output="logits", pretrained=None, normalize=False, num_classes=10)
    return linen(model, image(1, 16, 16, 3), train=False)


def penzai_mlp() -> Model:
    from penzai import pz
    from penzai.models.simple_mlp import MLP

    model, params = pz.unbind_params(MLP.from_config(init_base_rng=KEY, feature_sizes=[32, 64, 16]), freeze=True)

    def forward(params: Any, x: Any) -> Any:
        return pz.bind_variables(model, params)(pz.nx.wrap(x, "batch", "features")).unwrap("batch", "features")

    return Model(forward, params, (image(3, 32),))


def equinox(model: Any, x: Any, **options: Any) -> Model:
    params, static = eqx.partition(model, eqx.is_inexact_array)
    return Model(lambda p, x: eqx.combine(p, static)(x, **options), params, (x,))


def equimo_vit() -> Model:
    from equimo.vision.models.vit import VisionTransformer

    sizes: Any = {"img_size": 8, "in_channels": 3, "dim": 32, "patch_size": 4, "num_heads": 2, "depths": [1]}
    return equinox(VisionTransformer(**sizes, num_classes=10, key=KEY), image(3, 8, 8), key=KEY, inference=True)


def keras_model(model: Any, *args: Any) -> Model:
    variables = model.variables
    run = lowbit.compat.keras._stateless(variables, lambda *args: model(*args, training=False))
    # The floating-point weights are the parameters; states of random numbers are not.
    others = {v.path: jnp.array(v.value) for v in variables if not jnp.issubdtype(v.value.dtype, jnp.floating)}
    params = {v.path: jnp.array(v.value) for v in variables if v.path not in others}

    def forward(params: Any, *args: Any) -> Any:
        return run([{**params, **others}[v.path] for v in variables], *args)[0]

    return Model(forward, params, args)


def keras_efficientnet() -> Model:
    from keras.src.applications.efficientnet import DEFAULT_BLOCKS_ARGS, EfficientNet

    blocks = [dict(DEFAULT_BLOCKS_ARGS[i], repeats=1) for i in (0, 2)]
    sizes: Any = {"blocks_args": blocks, "weights": None, "input_shape": (32, 32, 3), "classes": 10}
    model = EfficientNet(0.5, 1.0, 32, **sizes, classifier_activation=None)
    return keras_model(model, 50 * image(1, 32, 32, 3))


def keras_convnext() -> Model:
    from keras.src.applications.convnext import ConvNeXt

    sizes: Any = {"depths": [1, 1, 1, 1], "projection_dims": [16, 16, 32, 32], "input_shape": (32, 32, 3)}
    model = ConvNeXt(**sizes, classes=10, classifier_activation=None, layer_scale_init_value=1.0)
    return keras_model(model, 50 * image(1, 32, 32, 3))


def keras_recurrent() -> Model:
    layers = [keras.Input((5, 32)), keras.layers.GRU(32), keras.layers.Dense(32)]
    return keras_model(keras.Sequential(layers), image(2, 5, 32))


GPT2 = {"vocabulary_size": 64, "num_layers": 1, "num_heads": 2, "hidden_dim": 32, "intermediate_dim": 64}


def keras_hub_gpt2() -> Model:
    backbone = keras_hub.models.GPT2Backbone(**GPT2, max_sequence_length=8)
    return keras_model(backbone, {"token_ids": IDS, "padding_mask": jnp.ones_like(IDS)})


KERNELS = {"*kernel*": "int8"}  # convolutions are quantized if a pattern names them
ROWS: dict[str, tuple[Any, ...]] = {
    "haiku attention": (haiku_attention, 6),
    "haiku GRU": (haiku_recurrent, 2),
    "jax-resnet ResNet": (resnet, 9, KERNELS),
    "flaxmodels ResNet18": (flaxmodels_resnet, 21, KERNELS),
    "penzai MLP": (penzai_mlp, 2),
    "equimo VisionTransformer": (equimo_vit, 4),
    "keras EfficientNet": (keras_efficientnet, 12, KERNELS),
    "keras ConvNeXt": (keras_convnext, 17, KERNELS),
    "keras GRU": (keras_recurrent, 3),
    "keras-hub GPT2": (keras_hub_gpt2, 7),
}


@pytest.mark.parametrize("name", ROWS)
def test_model(name: str, tmp_path: Path) -> None:
    make, count, *rules = ROWS[name]
    check(make, count, tmp_path, *rules)


def small_keras_model() -> Any:
    layers = [keras.layers.Dense(64, activation="relu"), keras.layers.BatchNormalization(), keras.layers.Dense(32)]
    return keras.Sequential([keras.Input((32,)), *layers])


def dense_copy(model: Any, like: Any) -> Any:
    for v, w in zip(model.variables, like.variables, strict=True):
        v.assign(np.array(lowbit.materialize(w.value)))
        v.trainable = w.trainable
    return model


def test_keras_predict_fit_and_evaluate(tmp_path: Path) -> None:
    model, x, y = small_keras_model(), np.asarray(image(8, 32)), np.ones((8, 32))
    report = lowbit.compat.keras.quantize_model(model, "int8", args=(x,))
    assert len(report.quantized) == 2
    dense = dense_copy(small_keras_model(), model)
    with lowbit.materialization("error"):
        close(model.predict(x, verbose=0), dense.predict(x, verbose=0), 1e-5)
        close(model(x, training=True), dense(x, training=True), 1e-5)
        close(model.layers[1].moving_mean.value, dense.layers[1].moving_mean.value, 1e-5)
        losses = []
        for each in (model, dense):
            each.compile("sgd", "mse")
            losses.append(each.fit(x, y, epochs=2, verbose=0).history["loss"] + [each.evaluate(x, y, verbose=0)])
    close(*losses, 1e-4)
    stored = lowbit.compat.keras.weights(model)
    assert sum(map(lowbit.is_frozen, stored.values())) == 2
    lowbit.save(tmp_path / "weights.safetensors", stored)
    other = small_keras_model()
    paths = dict(zip(stored, lowbit.compat.keras.weights(other), strict=True))
    loaded = lowbit.load(tmp_path / "weights.safetensors", like=stored)
    lowbit.compat.keras.set_weights(other, {paths[path]: value for path, value in loaded.items()})
    close(other.predict(x, verbose=0), model.predict(x, verbose=0), 1e-5)


def test_keras_stateless_calls() -> None:
    model, x = small_keras_model(), image(8, 32)
    lowbit.compat.keras.quantize_model(model, "int8", args=(x,))

    @jax.jit
    @lowbit.implicit
    def scoped(values: Any, x: Any) -> Any:
        with keras.StatelessScope(state_mapping=list(zip(model.variables, values, strict=True))):
            return model(x)

    variables = model.variables, model.trainable_variables, model.non_trainable_variables
    every, trained, rest = ([v.value for v in some] for some in variables)
    with lowbit.materialization("error"):
        close(scoped(every, x), model(x), 1e-5)
        close(jax.jit(model.stateless_call)(trained, rest, x)[0], model(x), 1e-5)


def test_keras_errors() -> None:
    with pytest.raises(ValueError, match="has no weights yet"):
        lowbit.compat.keras.quantize_model(keras.Sequential([keras.layers.Dense(4)]), "int8")
    model = small_keras_model()
    with pytest.raises(ValueError, match="has no variable nowhere"):
        lowbit.compat.keras.set_weights(model, {"nowhere": jnp.ones(3)})
    with pytest.raises(ValueError, match=r"has shape \(32, 64\), and the value has shape \(3,\)"):
        lowbit.compat.keras.set_weights(model, {model.variables[0].path: jnp.ones(3)})


def test_keras_hub_generate() -> None:
    ids = {"token_ids": jnp.ones((1, 8), int), "padding_mask": (jnp.arange(8) < 3).astype(int)[None]}
    models = []
    for _ in range(2):
        backbone = keras_hub.models.GPT2Backbone(**GPT2, max_sequence_length=8)
        models.append(keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=None))
        models[-1].compile(sampler="greedy")
    model, dense = models
    report = lowbit.compat.keras.quantize_model(model, "int8", args=(ids,))
    assert len(report.quantized) == 7
    dense_copy(dense, model)
    with lowbit.materialization("error"):
        got = model.generate(ids, stop_token_ids=None)["token_ids"]
    np.testing.assert_array_equal(got, dense.generate(ids, stop_token_ids=None)["token_ids"])
