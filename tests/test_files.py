"""lowbit's own files: what is saved comes back to the bit, and what is not whole is refused."""

import collections
import dataclasses
import hashlib
import importlib.util
import json
import math
import os
import random
import re
import resource
import shutil
import sys
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from helpers import Layout, assert_same_bits
from jax.sharding import NamedSharding, PartitionSpec

import lowbit
from lowbit import Array1B, Array8B, ArrayNF4, QuantizedArray
from lowbit.io import LowbitFile, _atomic, _dtypes, load, load_metadata, save
from lowbit.io.container import _header, _write
from lowbit.io.readers import is_lowbit_file

GOLDEN = Path(__file__).parent / "golden"
EXAMPLE = Path(__file__).parent.parent / "examples" / "new_format.py"


def module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def weights(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def assert_same(got: Any, want: Any, path: str = "tree") -> None:
    """The same containers in the same order, the same types of leaves, the same bits."""
    if isinstance(want, QuantizedArray):
        assert type(got) is type(want), path
        assert_same_bits(got, want)
        assert all(isinstance(part, jax.Array) for part in jax.tree.leaves(got)), path
    elif isinstance(want, dict):
        assert type(got) is dict and list(got) == list(want), path
        for key in want:
            assert_same(got[key], want[key], f"{path}/{key}")
    elif isinstance(want, list | tuple):
        assert type(got) is type(want) and len(got) == len(want), path
        for i, (g, w) in enumerate(zip(got, want, strict=True)):
            assert_same(g, w, f"{path}/{i}")
    elif hasattr(want, "dtype"):
        got, want = np.asarray(got), np.asarray(want)
        assert (got.dtype, got.shape) == (want.dtype.newbyteorder("="), want.shape), path
        assert got.tobytes() == want.astype(want.dtype.newbyteorder("=")).tobytes(), path
    else:
        assert type(got) is type(want) and repr(got) == repr(want), path


def saved(tmp_path: Path, tree: Any, **options: Any) -> Path:
    path = tmp_path / "a.safetensors"
    save(path, tree, **options)
    return path


def back(tmp_path: Path, tree: Any, like: Any = None) -> Any:
    return load(saved(tmp_path, tree), like)


# --- what comes back


def test_the_file_of_version_1_is_read_as_it_was_written():
    made = module(GOLDEN / "make_version1.py")
    assert made.OUT.stat().st_size < 20_000
    tree = load(made.OUT)
    assert_same(tree, made.contents())
    assert load_metadata(made.OUT) == made.METADATA
    # Numbers that do not depend on our own classes.
    file = LowbitFile(made.OUT)
    assert file.dense("ternary").tolist() == [[1, 0, -1, 1, 0], [-1, 0, 0, 0, 1]]
    assert file.dense("layers/0/kernel")[0, 14:20].tolist() == [98, 105, 224, 238, 252, -246]
    assert file.dense("binary")[1, :4].tolist() == [-1, -2, -1, -2]
    assert tree["values"][:9] == [True, False, 0, -(2**70), 0.1, -0.0, 1e300, math.inf, 1 - 2j]
    assert tree["layers"][0]["tied"] is tree["layers"][0]["kernel"]


def test_the_same_tree_is_the_same_file(tmp_path):
    made = module(GOLDEN / "make_version1.py")
    assert saved(tmp_path, made.contents(), metadata=made.METADATA).read_bytes() == made.OUT.read_bytes()


def test_every_format_comes_back(layout: Layout, tmp_path):
    w = layout.quantize(weights(33, 77))
    tree = {
        "w": w.replace(use_kernel=False, compute="fast"),
        "transposed": w.T,
        "stack": layout.quantize(weights(2, 20, 40), dtype=jnp.bfloat16),
        "empty": layout.quantize(weights(0, 32)),
    }
    path = saved(tmp_path, tree)
    assert_same(load(path), tree)
    file = LowbitFile(path)
    for name, array in tree.items():
        assert (file.type(name), file.shape(name), file.nbytes(name)) == (layout.format, array.shape, array.nbytes)
        assert_same(file.array(name), array)
    assert file.dense("stack").dtype == np.float32
    np.testing.assert_array_equal(file.dense("stack"), np.asarray(tree["stack"].materialize(), np.float32))


def test_double_quantized_scales_come_back(tmp_path):
    arrays = [ArrayNF4.quantize(weights(*shape), 16, double_quant=True) for shape in [(70, 90), (2, 9, 33), (5,)]]
    assert_same(back(tmp_path, arrays), arrays)


def test_a_layer_of_a_stack_is_saved_as_it_reads(tmp_path):
    stack = Array8B.quantize(weights(3, 8, 16))
    (layer,) = back(tmp_path, [stack.replace(index=jnp.int32(1))])
    assert layer.index is None
    np.testing.assert_array_equal(layer.materialize(), stack.materialize()[1])


@pytest.mark.parametrize("dtype", _dtypes.DTYPES.values(), ids=str)
@pytest.mark.parametrize("make", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_every_dtype_comes_back(dtype, make, tmp_path):
    if make is jnp.asarray and jax.dtypes.canonicalize_dtype(dtype) != dtype:
        pytest.skip("JAX has 32 bits")
    bits = np.random.default_rng(1).integers(0, 2 if dtype == np.bool_ else 256, (6, 16 * dtype.itemsize), np.uint8)
    array = make(bits.view(dtype))
    tree = [array, array[0, 0], array[:, :0], array[:3, 1:4], make(np.ones((), dtype))]
    path = saved(tmp_path, tree)
    assert_same(load(path), tree)
    assert LowbitFile(path).type("0") == _dtypes.NAMES[np.asarray(array).dtype]


def test_the_safetensors_package_reads_the_files(tmp_path):
    tree = {"a": weights(3, 5), "b": {"c": Array8B.quantize(weights(4, 8))}, "": weights(2)}
    with safetensors.safe_open(saved(tmp_path, tree), "np") as opened:
        assert sorted(opened.keys()) == ["", "a", "b/c/codes", "b/c/scales", "lowbit.sha256"]
        assert_same(opened.get_tensor("a"), tree["a"])
        assert_same(opened.get_tensor("b/c/codes"), tree["b"]["c"].codes)
    assert safetensors.deserialize((GOLDEN / "version1.safetensors").read_bytes())


ODD = [
    {},
    [],
    (),
    None,
    5,
    2.5,
    "text",
    np.float32(3),
    {"a": {}, "b": [[], ((),)], "c": None},
    {"b": 1, "a": 2, 7: {0: 3, -1: 4}, "7": 5},
    [True, 1, 1.0, -0.0, math.nan, -math.inf, 2**100, 1e-320, 1j, complex(math.nan, -0.0), '\0\n"\\☉𝄞'],
    {"a/b": np.ones(1), "a": {"b": np.ones(2), "b~2": np.ones(3)}, "a/b~2": np.ones(4)},
    {"": {"": np.ones(1)}, "/": np.ones(2)},
    {"a": Array8B(np.ones((2, 8))), "a/codes": np.ones(3), "a/scales": {"": np.ones(4)}},
    {".": 1, "..": np.ones(1), "../../etc/passwd": np.ones(2), "a\0b": np.ones(3), "☉𝄞\u200f": np.ones(4), "%s{0}": 5},
    {"__metadata__": np.ones(1), "lowbit.sha256": np.ones(2), "lowbit.tree": np.ones(3)},
    {"x" * 5000: [np.ones(1), np.ones(2)]},
    np.asfortranarray(weights(3, 4)),
    [weights(6, 8)[::2, ::-1], weights(6)[None].T, weights(4)[1:]],
]


@pytest.mark.parametrize("number", range(len(ODD)))
def test_odd_trees_come_back(number, tmp_path):
    path = saved(tmp_path, ODD[number])
    assert_same(load(path), ODD[number])
    if ODD[number] is not None:
        assert_same(load(path, like=ODD[number]), ODD[number])
    file = LowbitFile(path)
    arrays = jax.tree.leaves(ODD[number] if number != 9 else [], is_leaf=lambda x: isinstance(x, QuantizedArray))
    assert len(set(file)) == len(file) == sum(hasattr(x, "dtype") for x in arrays)


def test_other_byte_orders_are_stored_in_the_usual_one(tmp_path):
    swapped = np.arange(4, dtype=">i4")
    got = back(tmp_path, [swapped, np.arange(4, dtype=">f8"), swapped])
    assert [x.dtype for x in got] == [np.int32, np.float64, np.int32] and got[0] is got[2]
    assert all(np.array_equal(x, np.arange(4)) for x in got)


def test_a_deep_tree_comes_back_and_a_deeper_one_is_refused(tmp_path):
    tree: Any = np.ones(2)
    for i in range(64):
        tree = [tree] if i % 2 else {"a": tree}
    assert_same(back(tmp_path, tree), tree)
    with pytest.raises(ValueError, match=r"Cannot save .*a.safetensors: '0/0/a/.*' is nested too deep; .* at most 64"):
        save(tmp_path / "a.safetensors", [tree])
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(ValueError, match="too deep"):
        save(tmp_path / "a.safetensors", cycle)


def test_tied_arrays_are_stored_once_and_tied_again(tmp_path):
    w, q = jnp.asarray(weights(64, 64)), Array8B.quantize(weights(64, 128))
    tree = {"embed": {"w": w, "q": q}, "head": [w, q, q.T], "equal": w + 0}
    path = saved(tmp_path, tree)
    assert path.stat().st_size < 2 * w.nbytes + q.nbytes + 4096
    got = load(path)
    assert_same(got, tree)
    assert got["head"][0] is got["embed"]["w"] and got["head"][1] is got["embed"]["q"]
    assert got["head"][2].codes is got["embed"]["q"].codes
    assert got["equal"] is not got["embed"]["w"]
    assert list(LowbitFile(path)) == ["embed/w", "embed/q", "head/0", "head/1", "head/2", "equal"]


def test_64_bits_stay_64_bits(tmp_path):
    tree = [np.arange(5.0), np.arange(5), np.ones(3, np.float32)]
    path = saved(tmp_path, tree)
    assert [type(x) for x in load(path)[:2]] == [np.ndarray] * 2 and isinstance(load(path)[2], jax.Array)
    jax.config.update("jax_enable_x64", True)
    try:
        assert all(isinstance(x, jax.Array) for x in load(path))
        assert_same(load(path), tree)
    finally:
        jax.config.update("jax_enable_x64", False)


def test_arrays_on_several_devices_are_gathered_and_laid_out_as_like_is(tmp_path):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec("x", "y"))
    w = weights(64, 128)
    tree = {"q": Array8B.quantize(w, axis=-1, block_size=32).with_sharding(sharding), "w": jax.device_put(w, sharding)}
    path = saved(tmp_path, tree)
    assert_same(load(path), tree)
    assert load(path)["w"].is_fully_replicated
    described = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
    dense = jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=sharding)
    for like in (tree, described, {"q": dense, "w": dense}):
        got = load(path, like=like)
        assert_same(got, tree)
        assert got["w"].sharding == sharding
        assert got["q"].sharding == sharding and got["q"].codes.sharding == tree["q"].codes.sharding


def test_devices_read_their_own_pieces(tmp_path, monkeypatch):
    tree = {"q": ArrayNF4.quantize(weights(64, 256), 64).T, "w": weights(8, 6), "wide": np.arange(8)}
    path, taken, read = saved(tmp_path, tree), [], _header.Tensor.read

    def counting(self: Any, wanted: Any) -> np.ndarray:
        taken.append(read(self, wanted).nbytes)
        return read(self, wanted)

    def like(devices: int, *spec: Any) -> Any:
        auto = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((devices,), ("x",), axis_types=auto, devices=jax.devices()[:devices])
        rows, given = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec(*spec))
        arrays = {"q": (rows, (256, 64), np.float32), "w": (given, (8, 6), np.float32), "wide": (rows, (8,), np.int64)}
        return {name: STRUCT(shape, dtype, sharding=sharding) for name, (sharding, shape, dtype) in arrays.items()}

    monkeypatch.setattr(_header.Tensor, "read", counting)
    got = load(path, like(2, "x"))
    assert got["q"].sharding.spec == PartitionSpec("x", None)
    assert got["q"].codes.sharding.spec == PartitionSpec(None, "x")
    assert type(got["wide"]) is np.ndarray and got["wide"].dtype == np.int64  # which JAX would cut
    assert sorted(taken) == sorted([64 * 64] * 2 + [64 * 2 * 4] * 2 + [4 * 6 * 4] * 2 + [8 * 8])
    assert_same(got["q"], tree["q"])
    assert_same(got["w"], jnp.asarray(tree["w"]))
    with pytest.raises(
        ValueError, match=r"a.safetensors: cannot shard 'q' .*: Axis -2 of length 256 .* 4 devices would"
    ):
        load(path, like(8, "x"))
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):  # in which shapes know of the mesh, but not of its devices
        shapes = jax.eval_shape(lambda: {**tree, "w": jax.device_put(jnp.asarray(tree["w"]), PartitionSpec("x"))})
        shapes["wide"] = like(2, "x")["wide"]
        assert load(path, shapes)["w"].sharding == NamedSharding(mesh, PartitionSpec("x", None))
    wrong = r"a.safetensors: cannot shard 'w' like `like`: Axis -1 of length 6 .* 4 devices"
    with pytest.raises(ValueError, match=wrong):
        load(path, like(4, None, "x"))


def test_a_format_of_the_users_own_comes_back(tmp_path):
    example = module(EXAMPLE)
    q = example.Array6B.quantize(jnp.asarray(weights(33, 77)), axis=-2)
    path = saved(tmp_path, {"w": q})
    assert_same(load(path)["w"], q)
    assert LowbitFile(path).type("w") == "Array6B"


def test_a_class_is_found_by_its_name_alone(tmp_path):
    @lowbit.formats.stored
    class Array8C(Array8B):
        pass

    path = saved(tmp_path, Array8C.quantize(weights(2, 8)))
    assert type(load(path)) is Array8C
    other = type("Array8C", (Array8B,), {"__module__": "elsewhere"})
    expected = r"a.safetensors: the tree is of the class 'Array8C': there are .*Array8C and elsewhere.Array8C"
    with pytest.raises(ValueError, match=expected):
        load(path)
    with pytest.raises(ValueError, match=expected):
        save(path, other.quantize(weights(2, 8)))
    path.write_bytes(path.read_bytes())


def test_static_fields_of_the_users_own_come_back_or_are_named(tmp_path):
    @lowbit.formats.stored
    class ArrayNoted(Array8B):
        note: Any = lowbit.aux_field(default=None)

    q = ArrayNoted.quantize(weights(2, 8))
    for note in (None, True, 3, 0.1, "é", np.dtype("int8"), ((1, "a"), (2.5, (None,))), ()):
        got = back(tmp_path, q.replace(note=note))
        assert got.note == note and type(got.note) is type(note)
    assert type(back(tmp_path, q.replace(note=np.int64(3))).note) is int
    with pytest.raises(TypeError, match=r"'w/note' is \{1\}; static fields are finite numbers, strings and dtypes"):
        back(tmp_path, {"w": q.replace(note={1})})
    with pytest.raises(TypeError, match=r"'w/note' is inf; static fields"):
        back(tmp_path, {"w": q.replace(note=(1, math.inf))})


def test_metadata_comes_back(tmp_path):
    metadata = {"a": [1, 2.5, "é☉", None, True, {"b": []}], "": {}, "big": 2**80, "tokens": ["a,", "[", "{"] * 1000}
    path = saved(tmp_path, [], metadata=metadata)
    assert load_metadata(path) == metadata == LowbitFile(path).metadata
    assert load_metadata(saved(tmp_path, [])) == {}


@pytest.mark.parametrize(
    "metadata", [{1: 2}, {"a": (1, 2)}, {"a": math.nan}, {"a": math.inf}, {"a": np.ones(2)}, {"a": {1}}, [1], "a"]
)
def test_metadata_that_would_not_come_back_is_refused(metadata, tmp_path):
    with pytest.raises(TypeError, match="metadata must survive a round trip through JSON: a dict with string keys"):
        save(tmp_path / "a.safetensors", [], metadata=metadata)
    assert not list(tmp_path.iterdir())


# --- a part of the file, and other containers

Pair = collections.namedtuple("Pair", "x y")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    w: Any
    parts: Any


def model() -> Any:
    q = ArrayNF4.quantize(weights(64, 32))
    return Model(q, Pair(collections.OrderedDict(b=weights(2), a=q.T), {"n": 3, "none": None, "empty": Pair((), None)}))


def test_other_containers_come_back_by_like(tmp_path):
    path = saved(tmp_path, model())
    for like in (model(), jax.eval_shape(model)):
        got = load(path, like=like)
        assert jax.tree.structure(got) == jax.tree.structure(model())
        assert type(got) is Model and type(got.parts) is Pair and type(got.parts.y["empty"]) is Pair
        assert got.parts.y["n"] == 3
        assert_same([got.w, *got.parts.x.values()], [model().w, *model().parts.x.values()])
    assert list(LowbitFile(path)) == ["w", "parts/x/b", "parts/x/a"]
    with pytest.raises(ValueError, match=r"a.safetensors: the tree is of the class '.*Model', not a dict.* as `like`"):
        load(path)
    with pytest.raises(ValueError, match=r"a.safetensors: 'k/1' is of the class '.*Pair', not a dict"):
        back(tmp_path, {"k": [1, Pair(1, 2)]})


def test_keys_decide_and_containers_are_those_of_like(tmp_path):
    path = saved(tmp_path, {"w": np.ones(2), "parts": [np.ones(3), 5]})
    got = load(path, like=Model(np.ones(2), (np.ones(3), 5)))
    assert type(got) is Model and type(got.parts) is tuple


def test_a_dense_like_says_shape_and_dtype_and_a_quantized_one_the_format_too(tmp_path):
    q = ArrayNF4.quantize(weights(64, 32), axis=-2)
    path = saved(tmp_path, [q.replace(use_kernel=False)])
    exact = jax.eval_shape(lambda w: ArrayNF4.quantize(w, axis=-2), jax.ShapeDtypeStruct((64, 32), np.float32))
    for like in (q, exact, weights(64, 32), jnp.ones((64, 32)), jax.ShapeDtypeStruct((64, 32), np.float32)):
        assert_same(load(path, like=[like]), [q.replace(use_kernel=False)])


def test_numpy_in_like_gives_numpy(tmp_path):
    path = saved(tmp_path, [np.ones(3, np.float32), np.float32(2)])
    assert all(isinstance(x, np.ndarray) for x in load(path, like=[np.ones(3, np.float32), np.float32(0)]))
    assert all(isinstance(x, jax.Array) for x in load(path, like=[jnp.ones(3), jnp.float32(0)]))


Q = ArrayNF4.quantize(weights(64, 32), axis=-2)
SQUARE = ArrayNF4.quantize(weights(32, 32), 16)
STRUCT = jax.ShapeDtypeStruct
MISMATCHES = {
    "shape": (np.ones(3), np.ones(4), "'k/a' is an array of shape (3,) and dtype float64 in the file and an array of"),
    "dtype": (np.ones(3), STRUCT((3,), np.int32), "'k/a' is an array of shape (3,) and dtype float64"),
    "shape of a format": (Q, STRUCT((32, 64), np.float32), "'k/a' is ArrayNF4 of shape (64, 32) and dtype float32"),
    "dtype of a format": (Q, STRUCT((64, 32), jnp.bfloat16), "'k/a' is ArrayNF4 of shape (64, 32) and dtype float32"),
    "format": (Q, Array8B.quantize(weights(64, 32)), "'k/a' is ArrayNF4 of shape (64, 32) and dtype float32, spans "),
    "axis": (Q, ArrayNF4.quantize(weights(64, 32)), "spans (64, 1) in the file and ArrayNF4 of shape (64, 32) and"),
    "transposed": (Q.T, ArrayNF4.quantize(weights(32, 64)), "spans (64, 1), transposed in the file"),
    "transposed, of the same parts": (SQUARE.T, SQUARE, "spans (16,), transposed in the file and ArrayNF4 of shape"),
    "double": (Q, ArrayNF4.quantize(weights(64, 32), axis=-2, double_quant=True), "'k/a' is ArrayNF4"),
    "kind": (Array1B(weights(2, 8)), Array1B.quantize(weights(2, 8), kind="binary"), "'k/a' is Array1B"),
    "quantized": (np.ones((64, 32), np.float32), Q, "'k/a' is an array of shape (64, 32) and dtype float32 in the"),
    "container": ([1], 1, "'k/a' is a list in the file and a int in `like`"),
    "leaf": (1, [1], "'k/a' is a int in the file and a list in `like`"),
    "leaf and empty": (1, [], "'k/a' is a int in the file and a list in `like`"),
    "none": (None, [], "'k/a' is a NoneType in the file and a list in `like`"),
    "array for none": (None, np.ones(2), "'k/a' is a NoneType in the file and an array of shape (2,)"),
    "none for array": (np.ones(2), None, "'k/a' is an array of shape (2,) and dtype float64 in the file and a NoneTyp"),
    "number": (1, 1.0, "'k/a' is a int in the file and a float in `like`"),
    "number's dtype": (1, STRUCT((), np.float32), "'k/a' is a int in the file and an array of shape () and"),
    "number's shape": (1.5, STRUCT((3,), np.float32), "'k/a' is a float in the file and an array of shape (3,)"),
    "text": ("x", STRUCT((), np.float32), "'k/a' is a str in the file and an array of shape ()"),
    "array for number": (np.ones(()), 1.0, "'k/a' is an array of shape () and dtype float64 in the file and a float"),
    "missing": ({"x": 1}, {"x": 1, "y": 2}, "'k/a/y' is in `like` and not in the file"),
    "too much": ({"x": 1, "y": 2}, {"x": 1}, "'k/a/y' is in the file and not in `like`"),
    "empty": ({"x": {}}, {}, "'k/a/x' is in the file and not in `like`"),
    "key": ({0: 1}, {"0": 1}, "'k/a/0' is in the file and not in `like`"),
    "length": ([1, 2], (1,), "'k/a/1' is in the file and not in `like`"),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_what_like_does_not_say_is_one_error(case, tmp_path):
    stored, like, message = MISMATCHES[case]
    path = saved(tmp_path, {"k": {"a": stored}})
    with pytest.raises(ValueError, match=re.escape(f"a.safetensors: {message}" if message[0] == "'" else message)):
        load(path, like={"k": {"a": like}})


def test_a_file_is_read_by_name(tmp_path):
    tree = {"b": ArrayNF4.quantize(weights(4, 64)), "a": [weights(3), 5, None, jnp.ones((2, 2), jnp.bfloat16)]}
    path = saved(tmp_path, tree, metadata={"x": 1})
    file = LowbitFile(str(path))
    assert file.path == path and file.metadata == {"x": 1} and is_lowbit_file(path)
    assert list(file) == ["b", "a/0", "a/3"] == list(file.names) and len(file) == 3
    assert "a/0" in file and "a" not in file and "a/1" not in file
    assert [file.type(name) for name in file] == ["nf4", "F32", "BF16"]
    assert [file.shape(name) for name in file] == [(4, 64), (3,), (2, 2)]
    assert [file.nbytes(name) for name in file] == [4 * 32 + 4 * 4, 12, 8]
    array = file.array("a/0")
    assert_same(array, tree["a"][0])
    assert isinstance(array, np.ndarray) and not array.flags.writeable and not array.flags.owndata
    assert file.dense("a/3").dtype == np.float32 and file.dense("a/3", np.float16).dtype == np.float16
    with pytest.raises(KeyError, match=r"a.safetensors has no tensor 'a/9'. Did you mean a/"):
        file.array("a/9")


def test_large_arrays_are_the_mapped_file_itself(tmp_path):
    tree = {"odd": np.ones(3, np.int8), "w": weights(16, 64), "q": Array8B.quantize(weights(64, 64)), "b": weights(5)}
    path = saved(tmp_path, tree)
    file = LowbitFile(path)
    shards = [shard for tensor in jax.tree.leaves(file.tree.children) for shard in tensor.shards.values()]
    assert len(shards) == 5 and all(shard.data.ctypes.data % shard.dtype.itemsize == 0 for shard in shards)
    addresses = {
        file.array("w").ctypes.data % 64,
        *(p.unsafe_buffer_pointer() % 64 for p in jax.tree.leaves(tree["q"])),
    }
    assert addresses == {0}
    start = path.read_bytes()
    got = load(path)
    donated = jax.jit(lambda w: w.at[0].set(5), donate_argnums=0)(got["w"])
    assert donated[0, 0] == 5 and path.read_bytes() == start
    save(path, got | {"w": donated})  # over the file that it reads from
    assert_same(load(path)["q"], tree["q"])


# --- what cannot be saved

WRONG = {
    "function": ({"a": [print]}, TypeError, "'a/0' is a builtin_function_or_method; leaves are arrays, numbers, str"),
    "struct": ({"a": STRUCT((2,), np.float32)}, TypeError, "'a' is a ShapeDtypeStruct; leaves are arrays"),
    "bytes": (b"x", TypeError, "the tree is a bytes; leaves are arrays"),
    "int4": ({"a": jnp.ones(2, jnp.int4)}, TypeError, "'a' is a ArrayImpl of dtype int4; files hold BOOL, U8, I8,"),
    "complex128": ({"a": np.ones(2, complex)}, TypeError, "'a' is a ndarray of dtype complex128; files hold"),
    "objects": ({"a": np.array([None])}, TypeError, "'a' is a ndarray of dtype object; files hold"),
    "text array": ({"a": np.array(["x"])}, TypeError, "'a' is a ndarray of dtype <U1; files hold"),
    "key array": ({"a": jax.random.key(0)}, TypeError, "of dtype key<fry>; files hold"),
    "float key": ({"a": {1.5: 1}}, TypeError, "'a' has the key 1.5; keys are strings or integers"),
    "tuple key": ({(1, 2): 1}, TypeError, "the tree has the key (1, 2); keys are strings or integers"),
    "bool key": ({True: 1}, TypeError, "the tree has the key True; keys are strings or integers"),
    "half a character": (
        {"a": {"\ud800": 1}},
        ValueError,
        "a.safetensors: 'a/\\ud800' has an unpaired surrogate",
    ),
    "broken": (
        {"a": Q.replace(scales=Q.scales[:, :3])},
        ValueError,
        "'a' is not a valid ArrayNF4: The components",
    ),
    "part": ({"a": Q.replace(codes=3)}, TypeError, "'a/codes' is a int of dtype None; files hold"),
    "dtype": (
        {"a": Q.replace(dtype=np.dtype("S3"))},
        ValueError,
        "in a static field, which is not a dtype of safetensors",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_saved_is_named_and_leaves_nothing(case, tmp_path):
    tree, error, message = WRONG[case]
    with pytest.raises(error, match=re.escape(message)):
        save(tmp_path / "a.safetensors", tree)
    assert not list(tmp_path.iterdir())


def test_traced_arrays_are_refused(tmp_path):
    @jax.jit
    def step(w):
        save(tmp_path / "a.safetensors", {"w": w})

    with pytest.raises(TypeError, match=r"Cannot save to .*: 'w' is traced; call save outside of jit"):
        step(jnp.ones(2))
    assert not list(tmp_path.iterdir())


# --- files are there whole or not at all


def failing(*error: Any) -> Any:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error[0](*error[1:])

    return fail


FAILURES = {
    "sync": (_atomic.os, "fsync", failing(OSError, 5, "Input/output error"), "Input/output error"),
    "rename": (_atomic.os, "replace", failing(PermissionError, 1, "Operation not permitted"), "not permitted"),
    "directory": (_write, "open", failing(PermissionError, 13, "Permission denied"), "Permission denied"),
}


@pytest.mark.parametrize("case", FAILURES)
@pytest.mark.parametrize("existing", [True, False], ids=["over a file", "to nothing"])
def test_a_failure_leaves_the_old_file_and_nothing_else(case, existing, tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    if existing:
        save(path, {"old": weights(4)})
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    place, name, fail, message = FAILURES[case]
    monkeypatch.setattr(place, name, fail, raising=False)
    with pytest.raises(OSError, match=rf"Cannot save to {re.escape(str(path))}: .*{message}"):
        save(path, {"new": weights(400)})
    monkeypatch.undo()
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize("limit", [0, 100, 2000, 70_000])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(limit, tmp_path):
    path = saved(tmp_path, {"old": weights(4)})
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        with pytest.raises(OSError, match=r"Cannot save to .*a.safetensors: File too large"):
            save(path, {"new": weights(10_000), "more": weights(20_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [before]


def test_an_interrupt_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = saved(tmp_path, {"old": weights(4)})
    before, checksum, calls = path.read_bytes(), zlib.crc32, []

    def interrupted(data: Any) -> int:
        calls.append(len(list(tmp_path.iterdir())))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return checksum(data)

    monkeypatch.setattr(_write.zlib, "crc32", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(path, [weights(5), weights(6)])
    assert calls == [2, 2]  # there was a file beside it
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [before]


def test_the_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    done: list[str] = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, real=real: done.append(name) or real(*a))
    save(tmp_path / "a.safetensors", weights(3))
    assert done == ["fsync", "replace", "fsync"]


def test_targets_that_are_no_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"Cannot save to .*/b/a.safetensors: there is no directory .*/b\."):
        save(tmp_path / "b" / "a.safetensors", [])
    with pytest.raises(IsADirectoryError, match=r"Cannot save to .*: it is a directory or a device"):
        save(tmp_path, [])
    assert not list(tmp_path.iterdir())
    os.mkfifo(tmp_path / "pipe")  # as a device would be; not a real one, which a failing test would replace
    with pytest.raises(IsADirectoryError, match=r"Cannot save to .*/pipe: it is a directory or a device"):
        save(tmp_path / "pipe", [])
    assert (tmp_path / "pipe").is_fifo() and len(list(tmp_path.iterdir())) == 1


def test_of_an_index_only_its_own_parts_are_removed(tmp_path):
    path = tmp_path / "version2.safetensors"
    shutil.copytree(GOLDEN / "version2", tmp_path, dirs_exist_ok=True)
    first, *others = sorted(name for name in os.listdir(tmp_path) if "-of-" in name)
    (tmp_path / first).write_text("not a part, but of its name")
    save(path, [1])
    assert others and sorted(os.listdir(tmp_path)) == [first, path.name] and load(path) == [1]
    assert (tmp_path / first).read_text() == "not a part, but of its name"


def test_links_and_permissions_are_kept(tmp_path):
    path = saved(tmp_path, [1])
    path.chmod(0o640)
    (tmp_path / "link").symlink_to(path)
    save(tmp_path / "link", [2])
    assert (tmp_path / "link").is_symlink() and load(path) == [2]
    assert path.stat().st_mode & 0o777 == 0o640
    mask = os.umask(0o027)
    try:
        save(tmp_path / "b.safetensors", [])
    finally:
        os.umask(mask)
    assert (tmp_path / "b.safetensors").stat().st_mode & 0o777 == 0o640


# --- files of others, files cut off, files changed


def test_a_plain_safetensors_file_loads_by_name_and_a_damaged_lowbit_file_does_not(tmp_path):
    path = tmp_path / "a.safetensors"
    for metadata in (None, {"format": "pt"}):
        safetensors.numpy.save_file({"w": weights(3)}, path, metadata)
        assert not is_lowbit_file(path)
        assert_same(load(path), {"w": jnp.asarray(weights(3))})
    safetensors.numpy.save_file({"w": weights(3)}, path, {"lowbit.version": "1"})
    with pytest.raises(ValueError, match=r"a.safetensors is damaged or truncated"):
        load(path)
    data = saved(tmp_path, {"w": weights(3)}).read_bytes()
    for old, new in ((b'"lowbit.version"', b'"lowbit.vErsion"'), (b"__metadata__", b"__metadatA__")):
        path.write_bytes(data.replace(old, new))
        assert not is_lowbit_file(path)
        with pytest.raises(ValueError, match=r"a.safetensors (is a damaged lowbit file|cannot be read)"):
            load(path)


def test_files_of_no_known_kind_are_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    for contents in (b"", b"GGUF", b"\xff" * 8, b"PK\3\4" + bytes(200), bytes(8)):
        path.write_bytes(contents)
        with pytest.raises(ValueError, match=r"a.safetensors cannot be read as (safetensors|GGUF)"):
            load(path)
        assert not is_lowbit_file(path)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match=r"has neither model.safetensors nor model.safetensors.index.json"):
        load(tmp_path)


def seeds(tmp_path: Path) -> list[Path]:
    """Small valid files of every kind, for tests that change them."""
    trees = [
        {"w": ArrayNF4.quantize(weights(5, 33), 16), "b": weights(3), "step": 7, "flag": np.array([True, False])},
        [Array8B.quantize(weights(4, 6)).T, {"x/y": {}, 3: None}, (1.5, "é")],
        {"t": (q := Array1B.quantize(weights(3, 5))), "tied": q, "b": Array1B.quantize(weights(2, 9), kind="binary")},
        ArrayNF4.quantize(weights(4, 64), double_quant=True, dtype=jnp.bfloat16),
        [],
    ]
    paths = [tmp_path / f"seed{i}.safetensors" for i in range(len(trees))]
    for path, tree in zip(paths, trees, strict=True):
        save(path, tree, metadata={"a": [1, None]})
    return paths


def reads(path: Path) -> Any:
    """All that can be read of a file."""
    file = LowbitFile(path)
    return load_metadata(path), load(path), {name: [file.type(name), file.array(name)] for name in file}


def test_a_drop_in_class_of_the_same_name_does_not_stand_in_the_way(tmp_path):
    from lowbit.compat.eformer import arrays

    ours, theirs = ArrayNF4.quantize(weights(4, 64)), arrays.ArrayNF4(weights(4, 64))
    save(tmp_path / "a.safetensors", [ours, theirs])
    for array in load(tmp_path / "a.safetensors"):
        assert type(array) is ArrayNF4
        assert np.array_equal(array.materialize(), ours.materialize())


def test_every_cut_is_an_error_that_names_the_file(tmp_path):
    path = tmp_path / "b.safetensors"
    contents = seeds(tmp_path)[0].read_bytes()
    for size in range(len(contents)):
        path.write_bytes(contents[:size])
        assert "b.safetensors" in refused(path)[0]


def mutated(contents: bytes, dice: random.Random) -> bytes:
    """A file with some bytes changed, put in, left out, or swapped."""
    changed = bytearray(contents)
    for _ in range(dice.choice([1, 1, 1, 2, 8])):
        at, width = dice.randrange(len(changed)), dice.choice([1, 1, 1, 4, 64])
        match dice.randrange(8):
            case 0:
                del changed[at : at + width]
            case 1:
                changed[at:at] = dice.randbytes(width)
            case 2:
                other = dice.randrange(len(changed))
                piece = changed[other : other + width]
                changed[at : at + len(piece)] = piece
            case 3:
                changed[at] ^= 1 << dice.randrange(8)
            case _:
                changed[at] = dice.choice([0, 1, 127, 128, 255, dice.randrange(256)])
        if not changed:
            return b""
    return bytes(changed)


def test_no_changed_byte_gives_another_array(tmp_path):
    dice = random.Random(0)
    path = tmp_path / "b.safetensors"
    refused = 0
    for seed in seeds(tmp_path):
        contents, want = seed.read_bytes(), reads(seed)
        for _ in range(400):
            path.write_bytes(changed := mutated(contents, dice))
            try:
                got = reads(path)
            except ValueError as error:
                assert "b.safetensors" in str(error)
                assert changed != contents
                refused += 1
            else:
                assert_same(got, want)
                assert changed == contents  # there is no byte that does not count
    assert refused > 1900


def signed(header: bytes, data: bytes) -> bytes:
    """A file with whatever header, and the checksum that it should have."""
    start = len(header).to_bytes(8, "little") + header
    return start + data + hashlib.sha256(start).digest()


def split(path: Path) -> tuple[bytes, bytes]:
    contents = path.read_bytes()
    end = 8 + int.from_bytes(contents[:8], "little")
    return contents[8:end], contents[end:-32]


def test_whatever_a_header_says_it_reads_or_raises_one_error(tmp_path):
    dice = random.Random(1)
    path = tmp_path / "b.safetensors"
    outcomes = {"read": 0, "refused": 0}
    # Changes that leave most of it readable: a digit, a letter, a piece of JSON.
    pieces = [b"0", b"-1", b"9" * 30, b"1e9", b"null", b"true", b"[]", b"{}", b'\\"', b"\\ud800", b"", b",", b"]", b"}"]
    for seed in seeds(tmp_path):
        header, data = split(seed)
        tokens = re.findall(rb'[\w.]+|\\?"|[^\w]', header.rstrip())
        for _ in range(100):
            changed = list(tokens)
            for _ in range(dice.choice([1, 1, 2])):
                at = dice.randrange(4, len(changed))
                changed[at] = dice.choice([*pieces, dice.choice(tokens), changed[at] + b"1"])
            path.write_bytes(signed(b"".join(changed), data))
            try:
                got = reads(path)
            except ValueError as error:
                assert "b.safetensors" in str(error)
                outcomes["refused"] += 1
            else:
                outcomes["read"] += 1
                for _, array in got[2].values():
                    assert isinstance(array.shape, tuple)
    assert outcomes["refused"] > 300 and outcomes["read"] > 10, outcomes


# --- files that lie, and have the right checksums

CODES, SCALES = np.arange(32, dtype=np.int8).reshape(4, 8), np.ones((4, 1), np.float32)
STATIC = {"dtype": {"dtype": "F32"}, "spans": [0], "lengths": [], "transposed": False, "use_kernel": True}
STATIC |= {"compute": "exact"}
PARTS = {"codes": "w/codes", "scales": "w/scales", "index": None}
TENSORS = {"w/codes": CODES, "w/scales": SCALES}


def quantized(cls: str = "Array8B", parts: Any = PARTS, **static: Any) -> dict[str, Any]:
    return {"quantized": cls, "static": STATIC | static, "parts": parts}


def one(node: Any) -> Any:
    return ["dict", [["w", node]]]


def forged(
    folder: Path,
    tree: Any,
    tensors: dict[str, np.ndarray] | None = None,
    *,
    texts: dict[str, Any] | None = None,
    entries: dict[str, Any] | None = None,
    crc32: Any = None,
    replace: tuple[bytes, bytes] = (b"", b""),
) -> Path:
    """A file with whatever in it, and the right checksums."""
    tensors = TENSORS if tensors is None else tensors
    data = b"".join(array.tobytes() for array in tensors.values())
    sums = {name: f"{zlib.crc32(array.tobytes()):08x}" for name, array in tensors.items()}
    told = {
        "lowbit.version": "1",
        "lowbit.tree": json.dumps(tree),
        "lowbit.crc32": json.dumps(sums if crc32 is None else crc32),
    }
    header: dict[str, Any] = {"__metadata__": told | {"lowbit.metadata": "{}"} | (texts or {})}
    end = 0
    for name, array in {**tensors, "lowbit.sha256": np.zeros(32, np.uint8)}.items():
        start, end = end, end + array.nbytes
        kind = _dtypes.NAMES[array.dtype]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [start, end]}
    for name, changes in (entries or {}).items():
        header[name] = header.get(name, {}) | changes if isinstance(changes, dict) else changes
    header["__metadata__"] = {name: text for name, text in header["__metadata__"].items() if text is not None}
    path = folder / "lie.safetensors"
    written = json.dumps(header, separators=(",", ":")).encode()
    assert replace[0] in written
    path.write_bytes(signed(written.replace(*replace) if replace[0] else written, data))
    return path


def deep(depth: int) -> str:
    return '["list",[[0,' * depth + "null" + "]]]" * depth


W = "tensor 'w/codes'"
NF4 = {"parts": {**PARTS, "group_absmax": None, "offset": None}, "spans": [64]}
LIES: dict[str, tuple[dict[str, Any], str]] = {
    "newer": ({"texts": {"lowbit.version": "3"}}, "a lowbit file of version 3, and this lowbit reads versions 1 and 2"),
    "no index": ({"texts": {"lowbit.version": "2"}}, "its metadata must be the texts .*, lowbit.files, lowbit.pieces"),
    "version 0": ({"texts": {"lowbit.version": "0"}}, "version 0"),
    "version text": ({"texts": {"lowbit.version": "one"}}, "is not a lowbit file"),
    "version number": ({"texts": {"lowbit.version": 1}}, "is not a lowbit file"),
    "no tree": ({"texts": {"lowbit.tree": None}}, "its metadata must be the texts lowbit.version, lowbit.tree"),
    "more texts": ({"texts": {"more": ""}}, "its metadata must be the texts"),
    "tree of its own": ({"texts": {"lowbit.tree": {}}}, "its metadata must be the texts"),
    "metadata": ({"texts": {"lowbit.metadata": "[1]"}}, "lowbit.metadata has JSON that is not an object"),
    "metadata cut": ({"texts": {"lowbit.metadata": '{"a":'}}, "lowbit.metadata has JSON that cannot be read"),
    "metadata twice": ({"texts": {"lowbit.metadata": '{"a":1,"a":2}'}}, "lowbit.metadata .*'a' is a duplicate key"),
    "metadata deep": ({"texts": {"lowbit.metadata": '{"a":' + "[" * 9999}}, "lowbit.metadata has JSON"),
    "long number": ({"texts": {"lowbit.metadata": '{"a":' + "9" * 5000 + "}"}}, "lowbit.metadata has JSON"),
    "tree cut": ({"texts": {"lowbit.tree": "["}}, "lowbit.tree has JSON that cannot be read"),
    "tree closed": ({"texts": {"lowbit.tree": 'null,"tree":null'}}, "lowbit.tree .*'tree' is a duplicate key"),
    "tree more": ({"texts": {"lowbit.tree": 'null,"more":null'}}, "tensor 'w/codes' belongs to no array"),
    "tree half": ({"texts": {"lowbit.tree": "\ud800"}}, "lowbit.tree has JSON that cannot be read"),
    "header": ({"replace": (b'"w/codes"', b'"w/codes')}, "its header has JSON that cannot be read"),
    "bytes": ({"replace": (b'"w/codes":', b'"w/c\xff\xff\xffs":')}, "its header has JSON that cannot be read"),
    "same tensor": ({"replace": (b'"w/scales":', b'"w/codes":')}, "its header .*'w/codes' is a duplicate key"),
    "entry": ({"entries": {"w/codes": 5}}, f"{W} is 5, and not a dtype, a shape"),
    "entry null": ({"entries": {"w/codes": None}}, f"{W} is None, and not a dtype, a shape"),
    "entry more": ({"entries": {"w/codes": {"more": 1}}}, f"{W} is .*and not a dtype, a shape"),
    "dtype": ({"entries": {"w/codes": {"dtype": "F4"}}}, f"{W} has the dtype 'F4', which is not one of BOOL, U8"),
    "dtype number": ({"entries": {"w/codes": {"dtype": 5}}}, f"{W} is .*and not a dtype"),
    "shape text": ({"entries": {"w/codes": {"shape": "32"}}}, f"{W} is .*and not a dtype, a shape"),
    "shape negative": ({"entries": {"w/codes": {"shape": [-4, -8]}}}, rf"{W} has the shape \[-4, -8\]"),
    "shape float": ({"entries": {"w/codes": {"shape": [4.0, 8]}}}, rf"{W} has the shape \[4.0, 8\]"),
    "shape flag": ({"entries": {"w/codes": {"shape": [True, 32]}}}, rf"{W} has the shape \[True, 32\]"),
    "shape large": ({"entries": {"w/codes": {"shape": [2**32, 2**32]}}}, rf"{W} has the shape \[42949"),
    "shape around": ({"entries": {"w/codes": {"shape": [2**64 + 4, 8]}}}, rf"{W} has the shape \[18446"),
    "shape very large": ({"entries": {"w/codes": {"shape": [10**4000]}}}, rf"{W} has the shape \[1000"),
    "shape empty and large": ({"entries": {"w/codes": {"shape": [0, 2**41]}}}, rf"{W} has the shape \[0, 21"),
    "shape of many axes": ({"entries": {"w/codes": {"shape": [1] * 65}}}, rf"{W} has the shape"),
    "shape too small": (
        {"entries": {"w/codes": {"shape": [4, 7]}}},
        rf"{W} of shape \[4, 7\] has the offsets \[0, 32\]",
    ),
    "shape too large": (
        {"entries": {"w/codes": {"shape": [4, 9]}}},
        rf"{W} of shape \[4, 9\] has the offsets \[0, 32\]",
    ),
    "offsets": ({"entries": {"w/codes": {"data_offsets": [0]}}}, rf"{W} of shape .* has the offsets \[0\]"),
    "offsets negative": (
        {"entries": {"w/codes": {"data_offsets": [-32, 0]}}},
        rf"{W} of shape .* has the offsets \[-32, 0\]",
    ),
    "offsets float": (
        {"entries": {"w/codes": {"data_offsets": [0.0, 32]}}},
        rf"{W} of shape .* has the offsets \[0.0, 32\]",
    ),
    "offsets flag": (
        {"entries": {"w/codes": {"data_offsets": [False, 32]}}},
        rf"{W} of shape .* has the offsets \[False",
    ),
    "overlap": (
        {"entries": {"w/scales": {"data_offsets": [16, 32]}}},
        r"tensor 'w/scales' .* has the offsets \[16, 32\]",
    ),
    "gap": ({"entries": {"w/scales": {"data_offsets": [33, 49]}}}, r"tensor 'w/scales' .* has the offsets \[33, 49\]"),
    "beyond": (
        {"entries": {"w/scales": {"data_offsets": [2**40, 2**40 + 16]}}},
        "tensor 'w/scales' .* has the offsets",
    ),
    "wrapped": ({"entries": {"w/scales": {"data_offsets": [2**64 + 32, 48]}}}, "tensor 'w/scales' .* has the offsets"),
    "no digest": ({"entries": {"lowbit.sha256": {"shape": [31], "data_offsets": [48, 79]}}}, "ends at byte .* has"),
    "more tensors": ({"entries": {"x": {"dtype": "U8", "shape": [0], "data_offsets": [80, 80]}}}, "lowbit.crc32 .*'x'"),
    "checksum missing": ({"crc32": {"w/codes": "0" * 8}}, r"lowbit.crc32 does not list the tensors .*\['w/scales'\]"),
    "checksum more": ({"crc32": dict.fromkeys([*TENSORS, "x"], "0" * 8)}, "lowbit.crc32 does not list the tensors"),
    "checksum order": ({"crc32": dict.fromkeys(["w/scales", "w/codes"], "0" * 8)}, "lowbit.crc32 does not list"),
    "checksum number": ({"crc32": dict.fromkeys(TENSORS, 0)}, f"{W} has the checksum 0, which is not eight"),
    "checksum short": ({"crc32": dict.fromkeys(TENSORS, "0")}, f"{W} has the checksum '0', which is not eight"),
    "checksum list": ({"crc32": []}, "lowbit.crc32 has JSON that is not an object"),
    "checksum": ({"crc32": dict.fromkeys(TENSORS, "0" * 8)}, f"{W} is damaged: its bytes do not match its checksum"),
    "leaf": ({"tree": one(5)}, "'w' is 5, which is not an array, a number or a container"),
    "leaf text": ({"tree": one("w/codes")}, "'w' is 'w/codes', which is not an array"),
    "leaf empty": ({"tree": one({})}, "'w' is {}, which is not an array"),
    "leaf more": ({"tree": one({"array": "w/codes", "more": 1})}, "'w' is .*which is not an array"),
    "leaf list": ({"tree": one({"array": ["w/codes"]})}, "'w' is .*which is not an array"),
    "int": ({"tree": one({"int": 5})}, "'w' is {'int': 5}, which is not an array, a number"),
    "int text": ({"tree": one({"int": "1_0"})}, "'w' is {'int': '1_0'}, which is not an array, a number"),
    "int long": ({"tree": one({"int": "9" * 5000})}, "'w' is {'int': '9999.*, which is not an array, a number"),
    "float": ({"tree": one({"float": "1e999"})}, "'w' is {'float': '1e999'}, which is not an array, a number"),
    "bool": ({"tree": one({"bool": "true"})}, "'w' is {'bool': 'true'}, which is not an array, a number"),
    "complex": ({"tree": one({"complex": "1"})}, "'w' is {'complex': '1'}, which is not an array, a number"),
    "kind of number": ({"tree": one({"eval": "1"})}, "'w' is {'eval': '1'}, which is not an array, a number"),
    "text number": ({"tree": one({"str": 5})}, "'w' is {'str': 5}, which is not an array, a number"),
    "children": ({"tree": ["dict", {"w": None}]}, "the tree is .*which is not an array, a number or a container"),
    "kind": ({"tree": [5, []]}, "the tree is .*which is not an array, a number or a container"),
    "child": ({"tree": ["dict", ["w"]]}, "the tree has the child 'w', which has no key of its own"),
    "child more": ({"tree": ["dict", [["w", None, None]]]}, "the tree has the child .*, which has no key"),
    "key null": ({"tree": ["dict", [[None, None]]]}, "the tree has the child .*, which has no key"),
    "key flag": ({"tree": ["dict", [[True, None]]]}, "the tree has the child .*, which has no key"),
    "key float": ({"tree": ["dict", [[1.5, None]]]}, "the tree has the child .*, which has no key"),
    "same key": ({"tree": ["dict", [["w", None], ["w", None]]]}, r"has the child \['w', None\], which has no key of"),
    "half a key": ({"tree": ["dict", [["\ud800", None]]]}, "has an unpaired surrogate in its key"),
    "list key": ({"tree": ["list", [["w", None]]]}, "'w' is item 0 of a list"),
    "list order": ({"tree": ["tuple", [[1, None], [0, None]]]}, "'1' is item 0 of a tuple"),
    "deep": ({"texts": {"lowbit.tree": deep(66)}}, "'0/0/.*' is .*which is not an array, a number or a container"),
    "very deep": ({"texts": {"lowbit.tree": deep(20_000)}}, "lowbit.tree has JSON that cannot be read"),
    "missing": ({"tree": one({"array": "x"})}, "'w' needs tensor 'x', which is missing"),
    "the checksum itself": ({"tree": one({"array": "lowbit.sha256"})}, "'w' needs tensor 'lowbit.sha256', which is mi"),
    "unused": ({"tree": one({"array": "w/codes"})}, "tensor 'w/scales' belongs to no array"),
    "missing part": ({"tree": one(quantized(parts=PARTS | {"scales": "x"}))}, "'w' needs tensor 'x', which is missing"),
    "part number": ({"tree": one(quantized(parts=PARTS | {"scales": 5}))}, "'w' needs tensor 5, which is missing"),
    "part list": ({"tree": one(quantized(parts=PARTS | {"scales": []}))}, r"'w' needs tensor \[\], which is missing"),
    "no part": ({"tree": one(quantized(parts=PARTS | {"scales": None}))}, "'w' is not a valid Array8B: "),
    "no codes": ({"tree": one(quantized(parts=PARTS | {"codes": None}))}, r"'w' has the spans \(0,\) on 0 axes"),
    "index": ({"tree": one(quantized(parts=PARTS | {"index": "w/codes"}))}, "'w' is not a valid Array8B"),
    "class": ({"tree": one(quantized("Array9B"))}, "'w' is of the class 'Array9B': import the module that defines"),
    "class of Python": ({"tree": one(quantized("os.system"))}, "'w' is of the class 'os.system': import"),
    "class of all": ({"tree": one(quantized("QuantizedArray"))}, "'w' is of the class 'QuantizedArray': import"),
    "field": ({"tree": one(quantized(more=1))}, r"'w' has other fields than the class Array8B: \['more'\]"),
    "other class": (
        {"tree": one(quantized("ArrayNF4"))},
        r"has other fields than the class ArrayNF4: \['group_absmax', 'offset'\]",
    ),
    "dtype null": ({"tree": one(quantized(dtype=None))}, r"'w' has \(None, False, True, 'exact'\) for dtype"),
    "dtype text": ({"tree": one(quantized(dtype="F32"))}, r"'w' has \('F32', False, True, 'exact'\) for dtype"),
    "dtype unknown": ({"tree": one(quantized(dtype={"dtype": "O"}))}, "'w' has {'dtype': 'O'} in a static field"),
    "dtype more": ({"tree": one(quantized(dtype={"dtype": "F32", "x": 1}))}, "'w' has .* in a static field"),
    "transposed": ({"tree": one(quantized(transposed=1))}, "for dtype, transposed, use_kernel and compute"),
    "use_kernel": ({"tree": one(quantized(use_kernel="no"))}, "for dtype, transposed, use_kernel and compute"),
    "compute": ({"tree": one(quantized(compute="slow"))}, "for dtype, transposed, use_kernel and compute"),
    "compute list": ({"tree": one(quantized(compute=[]))}, "for dtype, transposed, use_kernel and compute"),
    "spans number": ({"tree": one(quantized(spans=0))}, "'w' has the spans 0 on 2 axes"),
    "spans text": ({"tree": one(quantized(spans=["0"]))}, r"'w' has the spans \('0',\) on 2 axes"),
    "spans flag": ({"tree": one(quantized(spans=[False]))}, r"'w' has the spans \(False,\) on 2 axes"),
    "spans float": ({"tree": one(quantized(spans=[8.0]))}, r"'w' has the spans \(8.0,\) on 2 axes"),
    "spans negative": ({"tree": one(quantized(spans=[-8]))}, r"'w' has the spans \(-8,\) on 2 axes"),
    "spans too many": ({"tree": one(quantized(spans=[1, 1, 0]))}, r"'w' has the spans \(1, 1, 0\) on 2 axes"),
    "spans large": ({"tree": one(quantized(spans=[2**62]))}, r"'w' has the spans \(46116.*,\) on 2 axes"),
    "spans very large": ({"tree": one(quantized(spans=[10**4000]))}, r"'w' has the spans \(1000.* on 2 axes"),
    "spans wrong": (
        {"tree": one(quantized(spans=[4]))},
        "'w' is not a valid Array8B: The components of this Array8B no longer fit",
    ),
    "spans none": (
        {"tree": one(quantized(spans=[]))},
        "'w' is not a valid Array8B: The components of this Array8B no longer fit",
    ),
    "lengths number": ({"tree": one(quantized(lengths=8))}, "'w' has the lengths 8 on 2 axes"),
    "lengths flat": ({"tree": one(quantized(lengths=[-1, 8]))}, r"'w' has the lengths \(-1, 8\) on 2 axes"),
    "lengths triple": ({"tree": one(quantized(lengths=[[-1, 8, 0]]))}, r"'w' has the lengths \(\(-1, 8, 0\),\)"),
    "lengths text": ({"tree": one(quantized(lengths=[["-1", 8]]))}, "'w' has the lengths"),
    "lengths negative": ({"tree": one(quantized(lengths=[[-1, -8]]))}, "'w' has the lengths"),
    "lengths axis": ({"tree": one(quantized(lengths=[[-3, 8]]))}, "'w' has the lengths"),
    "lengths twice": ({"tree": one(quantized(lengths=[[-1, 8], [-1, 8]]))}, "'w' has the lengths"),
    "lengths wrong": (
        {"tree": one(quantized(lengths=[[-1, 9]]))},
        "'w' is not a valid Array8B: The components .* of 9",
    ),
    "lengths large": ({"tree": one(quantized(lengths=[[-1, 10**4000]]))}, "'w' is not a valid Array8B: The components"),
    "rank": ({"tensors": TENSORS | {"w/scales": SCALES[:, 0]}}, "'w' is not a valid Array8B: .*same number of axes"),
    "scales": ({"tensors": TENSORS | {"w/scales": SCALES[:3]}}, "'w' is not a valid Array8B: .*no longer fit"),
    "kind of 1 bit": ({"tree": one(quantized("Array1B", kind="octal"))}, "'w' is not a valid Array1B: 'octal'"),
    "kind list": ({"tree": one(quantized("Array1B", kind=[]))}, "'w' is not a valid Array1B"),
    "floats for codes": (
        {"tree": one(quantized("ArrayNF4", **NF4)), "tensors": TENSORS | {"w/codes": np.ones((4, 32), np.float32)}},
        "'w' is not a valid ArrayNF4: The codes of this ArrayNF4 are float32",
    ),
    "integers for scales": (
        {"tensors": TENSORS | {"w/scales": SCALES.astype(np.int32)}},
        "'w' is not a valid Array8B: The scales of this Array8B are int32, and the format stores float32",
    ),
    "groups": (
        {
            "tree": one(quantized("ArrayNF4", **NF4 | {"parts": NF4["parts"] | {"group_absmax": "g", "offset": "o"}})),
            "tensors": {"w/codes": np.ones((4, 32), np.uint8), "w/scales": np.ones((4, 1), np.uint8)}
            | {"g": np.ones((2, 5), np.float32), "o": np.ones((1, 1), np.float32)},
        },
        "'w' is not a valid ArrayNF4: ",
    ),
    "flags": (
        {
            "tree": one({"array": "b"}),
            "tensors": {"b": np.array([0, 2], np.uint8)},
            "entries": {"b": {"dtype": "BOOL"}},
        },
        "tensor 'b' has bytes that are neither 0 nor 1",
    ),
    "index that fits": (
        {
            "tree": one(quantized(parts=PARTS | {"index": "i"})),
            "tensors": {
                "w/codes": np.stack([CODES] * 2),
                "w/scales": np.stack([SCALES] * 2),
                "i": np.zeros(2, np.int32),
            },
        },
        "'w' is not a valid Array8B of stored shape",
    ),
    "vector stored transposed": (
        {"tree": one(quantized(transposed=True)), "tensors": {"w/codes": CODES[0], "w/scales": SCALES[0]}},
        "'w' is not a valid Array8B: This Array8B is stored transposed",
    ),
}


def refused(path: Path) -> tuple[str, int]:
    """What the error says, and how many bytes were allocated until then."""
    error = ""
    tracemalloc.start()
    try:
        reads(path)
    except ValueError as raised:
        error = str(raised)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert error, "it was read"
    return error, peak


def test_a_forged_file_that_does_not_lie_is_read(tmp_path):
    tree = reads(forged(tmp_path, one(quantized())))[1]
    assert_same(tree, {"w": Array8B(weight=CODES, scale=SCALES)})


@pytest.mark.parametrize("case", LIES)
def test_a_file_that_lies_is_one_error(case, tmp_path):
    contents, message = LIES[case]
    path = forged(tmp_path, **{"tree": one(quantized()), **contents})
    error, peak = refused(path)
    assert re.search(f"lie.safetensors.*{message}", error, re.DOTALL), error
    assert len(error) < 2000
    assert peak < 2 * path.stat().st_size + (1 << 22)


def test_names_that_would_fill_the_memory_are_refused(tmp_path):
    leaves = ["list", [[i, {"array": "w"}] for i in range(2000)]]
    path = forged(tmp_path, ["dict", [["x" * 200_000, leaves]]], {"w": CODES})
    error, peak = refused(path)
    assert "have names that are longer than the header" in error and len(error) < 2000
    assert peak < 64 * path.stat().st_size


def test_many_names_that_are_the_same_take_no_longer(tmp_path):
    children = [[f"{'a/' * i}a", one({"array": "w"})] for i in range(3)]
    many = [[f"k{i}", ["dict", [["a/w", {"array": "w"}], ["a", one({"array": "w"})]]]] for i in range(500)]
    file = LowbitFile(forged(tmp_path, ["dict", children + many], {"w": CODES}))
    assert len(file) == 1003 and "k499/a/w~2" in file


def test_values_that_would_fill_the_memory_are_refused_before_they_are_made(tmp_path):
    path = forged(tmp_path, [], texts={"lowbit.metadata": '{"a":[' + "[]," * 2_000_000 + "[]]}"})
    error, peak = refused(path)
    assert re.search("lie.safetensors: its header has JSON of 400.* values", error)
    assert peak < 4 * path.stat().st_size


def test_a_header_that_is_too_large_is_neither_written_nor_read(tmp_path, monkeypatch):
    path = saved(tmp_path, [1, 2, 3])
    monkeypatch.setattr(_header, "_MOST_HEADER", 200)
    with pytest.raises(ValueError, match=r"a.safetensors is not a safetensors file, or is truncated: .* would end"):
        load(path)
    with pytest.raises(ValueError, match=r"a.safetensors: its header has .* bytes, more than 200"):
        save(path, [1, 2, 3])


def test_nothing_in_a_file_is_imported(tmp_path):
    before = set(sys.modules)
    path = forged(tmp_path, ["antigravity.Container", [["w", quantized()]]])
    with pytest.raises(ValueError, match=r"is of the class 'antigravity.Container'"):
        load(path)
    assert "antigravity" not in sys.modules and not {n for n in set(sys.modules) - before if "lowbit" not in n}


# --- checkpoints of others


@pytest.mark.frameworks
def test_an_orbax_checkpoint_comes_back(tmp_path):
    import orbax.checkpoint as ocp

    tree = {
        "binary": Array1B.quantize(weights(9, 11), kind="binary"),
        "list": [Array8B.quantize(weights(33, 77), axis=-2).T, jnp.ones(3)],
        "nf4": ArrayNF4.quantize(weights(64, 96), double_quant=True),
    }
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", tree)
        checkpointer.wait_until_finished()
        assert_same(checkpointer.restore(tmp_path / "checkpoint", jax.eval_shape(lambda: tree)), tree)
