"""Loading by a mapping: renamed, transposed by a flag, and stacked in the stored bits."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from checkpoint_helpers import checkpoint as checkpoint_of
from helpers import assert_same_bits
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import lowbit
from lowbit import ArrayNF4, PermutedArray

IN, OUT, LAYERS = 64, 32, 3
UP, NORM = r"model\.layers\.(\d+)\.up\.weight", r"model\.layers\.(\d+)\.norm\.weight"
EMBED = {r"model\.embed\.weight": "embed/embedding"}
MAPPING = {UP: r"layers/up/kernel[\1]", NORM: r"layers/norm/scale[\1]", **EMBED}


def struct(*shape: int, dtype: Any = jnp.float32, **options: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, **options)


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def checkpoint(**options: Any) -> dict[str, Any]:
    """Weights with the names of Hugging Face, (out, in), quantized along `in`."""
    ups = {
        f"model.layers.{i}.up.weight": lowbit.quantize(random(i, OUT, IN), axis=-1, **options) for i in range(LAYERS)
    }
    norms = {f"model.layers.{i}.norm.weight": random(10 + i, IN) for i in range(LAYERS)}
    return {**ups, **norms, "model.embed.weight": random(99, 100, IN)}


def saved(tmp_path: Path, tensors: dict[str, Any]) -> Path:
    path = tmp_path / "model.safetensors"
    lowbit.save(path, tensors)
    return path


def scanned() -> dict[str, Any]:
    layers = {"up": {"kernel": struct(LAYERS, IN, OUT)}, "norm": {"scale": struct(LAYERS, IN)}}
    return {"embed": {"embedding": struct(100, IN)}, "layers": layers}


@pytest.mark.parametrize(
    "options", [{}, {"dtype": "int8"}, {"dtype": "q4"}, {"dtype": "nf4", "double_quant": True}], ids=str
)
def test_layers_are_stacked_in_stored_bits(tmp_path: Path, options: Any) -> None:
    tensors = checkpoint(**options)
    with lowbit.materialization("error"):
        params = lowbit.load(saved(tmp_path, tensors), like=scanned(), mapping=MAPPING)
    stack = params["layers"]["up"]["kernel"]
    assert (stack.shape, stack.transposed) == ((LAYERS, IN, OUT), True)
    for i in range(LAYERS):
        layer = tensors[f"model.layers.{i}.up.weight"]
        assert_same_bits(jax.tree.map(lambda component, i=i: component[i], stack), layer.mT)
        np.testing.assert_array_equal(params["layers"]["norm"]["scale"][i], tensors[f"model.layers.{i}.norm.weight"])
        np.testing.assert_array_equal(stack.materialize()[i], layer.materialize().T)
    np.testing.assert_array_equal(params["embed"]["embedding"], tensors["model.embed.weight"])


def test_a_list_of_layers_shares_the_components(tmp_path: Path) -> None:
    tensors = checkpoint()
    layer = {"up": {"kernel": struct(IN, OUT)}, "norm": {"scale": struct(IN)}}
    like = {"embed": {"embedding": struct(100, IN)}, "layers": [layer] * LAYERS}
    mapping = {UP: r"layers/\1/up/kernel", NORM: r"layers/\1/norm/scale", **EMBED}
    params = lowbit.load(saved(tmp_path, tensors), like=like, mapping=mapping)
    for i, got in enumerate(params["layers"]):
        assert isinstance(got["up"]["kernel"], ArrayNF4)
        assert_same_bits(got["up"]["kernel"], tensors[f"model.layers.{i}.up.weight"].mT)


def test_files_of_other_libraries(tmp_path: Path) -> None:
    tensors = {
        **{f"model.layers.{i}.up.weight": random(i, OUT, IN) for i in range(LAYERS)},
        **{f"model.layers.{i}.norm.weight": random(10 + i, IN).astype(jnp.bfloat16) for i in range(LAYERS)},
        "model.embed.weight": random(99, 100, IN),
        "rotary.inv_freq": random(5, 8),
    }
    save_file(tensors, tmp_path / "hf.safetensors")
    params = lowbit.load(tmp_path / "hf.safetensors", like=scanned(), mapping={**MAPPING, r"rotary\..*": None})
    ups, norms = ([tensors[f"model.layers.{i}.{n}.weight"] for i in range(LAYERS)] for n in ("up", "norm"))
    np.testing.assert_array_equal(params["layers"]["up"]["kernel"], np.stack(ups).swapaxes(1, 2))
    scale = params["layers"]["norm"]["scale"]
    assert isinstance(scale, jax.Array) and scale.dtype == jnp.float32  # bfloat16 in the file
    np.testing.assert_array_equal(scale, np.stack(norms).astype(np.float32))


@pytest.mark.parametrize(
    ("path", "target", "transposed"),
    [
        ("kernel", "kernel", True),
        ("weight", "weight", False),
        ("weight", ("weight", "T"), True),
        ("kernel", ("kernel", None), False),
    ],
)
@pytest.mark.parametrize("quantized", [False, True])
def test_a_square_matrix(tmp_path: Path, path: str, target: Any, transposed: bool, quantized: bool) -> None:
    w = random(0, IN, IN)
    array: Any = lowbit.quantize(w, axis=-1) if quantized else w
    file = saved(tmp_path, {"w": array})
    got = lowbit.load(file, like={path: struct(IN, IN)}, mapping={"w": target})[path]
    want = np.asarray(lowbit.materialize(array))
    np.testing.assert_array_equal(lowbit.materialize(got), want.T if transposed else want)
    assert lowbit.is_quantized(got) == quantized


def test_two_axes_of_layers_and_orders(tmp_path: Path) -> None:
    tensors = {}
    for i in range(2):
        for j in range(3):
            order = jax.random.permutation(jax.random.key(3 * i + j), IN)
            tensors[f"{i}.experts.{j}"] = PermutedArray(lowbit.quantize(random(i, OUT, IN), axis=-1), order, axis=-1)
    like = {"up": struct(2, 3, IN, OUT, dtype=jnp.bfloat16)}
    got = lowbit.load(saved(tmp_path, tensors), like=like, mapping={r"(\d)\.experts\.(\d)": r"up[\1,\2]"})["up"]
    assert (got.shape, got.dtype, got.order.shape, got.axis) == ((2, 3, IN, OUT), jnp.bfloat16, (2, 3, IN), -2)
    for i in range(2):
        for j in range(3):
            want = tensors[f"{i}.experts.{j}"].astype(jnp.bfloat16)
            np.testing.assert_array_equal(got.materialize()[i, j], want.materialize().T)


# One for each way of storing scales and offsets.
STORED = "gptq_4 awq compressed_nvfp4 compressed_pack_3 fp8_block gpt_oss mlx_affine_4 torchao_int4_zero".split()


@pytest.mark.parametrize("name", STORED)
def test_stacks_of_the_arrays_of_checkpoints(tmp_path: Path, name: str) -> None:
    weight = next(iter(checkpoint_of(name, tmp_path / "model")))
    array = lowbit.load(tmp_path / "model")[weight]
    assert lowbit.is_quantized(array)
    *layers, out, width = array.shape
    like, mapping = {"w": struct(2, *layers, width, out, dtype=array.dtype)}, {r"(\d)": (r"w[\1]", "T")}
    got = lowbit.load(saved(tmp_path, {"0": array, "1": array}), like=like, mapping=mapping)["w"]
    assert_same_bits(jax.tree.map(lambda component: component[1], got), array.mT)
    np.testing.assert_array_equal(got.materialize()[1], np.swapaxes(array.materialize(), -1, -2))


@tiers.DEVICES
def test_the_shardings_of_like_are_applied(tmp_path: Path) -> None:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    sharding = NamedSharding(mesh, P(None, None, "x"))
    like = scanned()
    like["layers"]["up"]["kernel"] = struct(LAYERS, IN, OUT, sharding=sharding)
    tensors = checkpoint(dtype="int8")
    params = lowbit.load(saved(tmp_path, tensors), like=like, mapping=MAPPING)
    got = params["layers"]["up"]["kernel"]
    assert got.sharding == sharding
    np.testing.assert_array_equal(got.materialize()[2], tensors["model.layers.2.up.weight"].materialize().T)


def test_leaves_of_like_that_are_not_arrays_stay(tmp_path: Path) -> None:
    like = {"w": np.zeros(3, np.float32), "activation": jax.nn.relu, "depth": 3}
    got = lowbit.load(saved(tmp_path, {"a": random(0, 3)}), like=like, mapping={"a": "w"})
    assert type(got["w"]) is np.ndarray and got["activation"] is jax.nn.relu and got["depth"] == 3


def test_a_damaged_layer_raises(tmp_path: Path) -> None:
    array = lowbit.quantize(random(0, OUT, IN), "ternary", axis=-1)
    bad = array.replace(codes=jnp.full_like(array.codes, 255))
    with pytest.raises(ValueError, match=r"'b': .* of this Array1B are out of the range"):
        lowbit.load(
            saved(tmp_path, {"a": array, "b": bad}), like={"w": struct(2, OUT, IN)}, mapping={"a": "w[0]", "b": "w[1]"}
        )


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in checkpoint().items() if key != name}


OTHER_FORMAT = lowbit.quantize(random(1, OUT, IN), "int8", axis=-1)
ERRORS: dict[str, tuple[Any, Any, Any, str]] = {
    # tensors, mapping, like, message
    "unmatched": (
        {"a": np.ones(2), "b": np.ones(2)},
        {"a": "a"},
        {"a": struct(2)},
        "no pattern of `mapping` matches 'b'. Map them, or to None",
    ),
    "doubly matched": (
        {"a": np.ones(2)},
        {"a": "a", ".": "a"},
        {"a": struct(2)},
        "'a' matches 'a' and '.' of `mapping`",
    ),
    "pattern without tensor": (
        {"a": np.ones(2)},
        {"a": "a", "c+": "c"},
        {"a": struct(2)},
        "no tensor matches 'c+' of `mapping`. The tensors are 'a'",
    ),
    "no such leaf": (
        {"a": np.ones(2)},
        {"a": "lyer/a"},
        {"layer": {"a": struct(2)}},
        "'a' is mapped to 'lyer/a', which `like` does not have. Did you mean layer/a?",
    ),
    "missing": (
        {"a": np.ones(2)},
        {"a": "a"},
        {"a": struct(2), "b": [struct(2)]},
        "no tensor is mapped to 'b/0' of `like`",
    ),
    "twice": (
        {"a": np.ones(2), "b": np.ones(2)},
        {"[ab]": "w"},
        {"w": struct(2)},
        "'a' and 'b' are both mapped to 'w'.",
    ),
    "layer twice": (
        {"a0": np.ones(2), "b0": np.ones(2)},
        {r".(\d)": r"w[\1]"},
        {"w": struct(1, 2)},
        "'a0' and 'b0' are both mapped to 'w[0]'",
    ),
    "gap": (
        without("model.layers.1.up.weight"),
        MAPPING,
        scanned(),
        "'layers/up/kernel' of shape (3, 64, 32) in `like` lacks layer 1.",
    ),
    "beyond": (
        {"a0": np.ones(2), "a1": np.ones(2)},
        {r"a(\d)": r"w[\1]"},
        {"w": struct(1, 2)},
        "'a1' are layers beyond the shape (1, 2) of 'w' in `like`",
    ),
    "stacked and not": (
        {"a": np.ones(2), "b": np.ones(2)},
        {"a": "w", "b": "w[0]"},
        {"w": struct(1, 2)},
        "'a', 'b' are mapped to 'w' of shape (1, 2) in `like` with different numbers of indices",
    ),
    "formats": (
        {**checkpoint(), "model.layers.1.up.weight": OTHER_FORMAT},
        MAPPING,
        scanned(),
        "'model.layers.0.up.weight' is ArrayNF4 of shape (64, 32)",
    ),
    "shape": (
        {"a": np.ones((2, 3))},
        {"a": "w"},
        {"w": struct(4, 3)},
        "'a' of shape (2, 3) does not fit 'w' of shape (4, 3) in `like`",
    ),
    "shape of a layer": (
        {"a0": np.ones((2, 3))},
        {r"a(\d)": (r"w[\1]", "T")},
        {"w": struct(1, 2, 3)},
        "'a0' of shape (2, 3), transposed, does not fit 'w' of shape (1, 2, 3), a stack of (1,), in `like`",
    ),
    "dtype": (
        {"a": np.ones(2, np.float32)},
        {"a": "w"},
        {"w": struct(2, dtype=jnp.bfloat16)},
        "'w' is an array of shape (2,) and dtype float32 in the file and an array of shape (2,) and dtype bfloat16",
    ),
    "group": ({"a": np.ones(2)}, {"a": r"w\1"}, {"w": struct(2)}, r"mapping['a'] = 'w\\1' cannot be applied to 'a'"),
    "number": ({"a": np.ones(2)}, {"(a)": r"w[\1]"}, {"w": struct(1, 2)}, "cannot be applied to 'a': invalid literal"),
    "pattern": ({"a": np.ones(2)}, {"(a": "w"}, {"w": struct(2)}, "'(a', which is not a regular expression"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_an_error_has_the_names_and_numbers(tmp_path: Path, case: str) -> None:
    tensors, mapping, like, message = ERRORS[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        lowbit.load(saved(tmp_path, tensors), like=like, mapping=mapping)


def test_wrong_arguments(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": np.ones(2)})
    with pytest.raises(ValueError, match="needs `like`"):
        lowbit.load(path, mapping={"a": "w"})
    with pytest.raises(TypeError, match=r"mapping\['a'\] must be a path, .* it is \('w', 'transposed'\)"):
        lowbit.load(path, like={"w": struct(2)}, mapping={"a": ("w", "transposed")})
