"""Loading lowbit files by `like`, a tree that gives containers, formats and shardings, and reading them by name."""

import collections
import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from files_helpers import assert_same, back, saved, weights

from lowbit import Array1B, Array8B, ArrayNF4
from lowbit.io import LowbitFile, load, save
from lowbit.io.readers import is_lowbit_file

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
SQUARE = ArrayNF4.quantize(weights(32, 32), 16, axis=-1)
STRUCT = jax.ShapeDtypeStruct
MISMATCHES = {
    "shape": (np.ones(3), np.ones(4), "'k/a' is an array of shape (3,) and dtype float64 in the file and an array of"),
    "dtype": (np.ones(3), STRUCT((3,), np.int32), "'k/a' is an array of shape (3,) and dtype float64"),
    "shape of a format": (Q, STRUCT((32, 64), np.float32), "'k/a' is ArrayNF4 of shape (64, 32) and dtype float32"),
    "dtype of a format": (Q, STRUCT((64, 32), jnp.bfloat16), "'k/a' is ArrayNF4 of shape (64, 32) and dtype float32"),
    "format": (Q, Array8B.quantize(weights(64, 32)), "'k/a' is ArrayNF4 of shape (64, 32) and dtype float32, spans "),
    "axis": (
        Q,
        ArrayNF4.quantize(weights(64, 32), axis=-1),
        "spans (64, 1) in the file and ArrayNF4 of shape (64, 32) and",
    ),
    "transposed": (Q.T, ArrayNF4.quantize(weights(32, 64), axis=-1), "spans (64, 1), transposed in the file"),
    "transposed, of the same components": (
        SQUARE.T,
        SQUARE,
        "spans (16,), transposed in the file and ArrayNF4 of shape",
    ),
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
def test_a_mismatch_with_like_raises_one_error(case, tmp_path):
    stored, like, message = MISMATCHES[case]
    path = saved(tmp_path, {"k": {"a": stored}})
    with pytest.raises(ValueError, match=re.escape(f"a.safetensors: {message}" if message[0] == "'" else message)):
        load(path, like={"k": {"a": like}})


def test_a_file_is_read_by_name(tmp_path):
    tree = {"b": ArrayNF4.quantize(weights(64, 4)), "a": [weights(3), 5, None, jnp.ones((2, 2), jnp.bfloat16)]}
    path = saved(tmp_path, tree, metadata={"x": 1})
    file = LowbitFile(str(path))
    assert file.path == path and file.metadata == {"x": 1} and is_lowbit_file(path)
    assert list(file) == ["b", "a/0", "a/3"] == list(file.names) and len(file) == 3
    assert "a/0" in file and "a" not in file and "a/1" not in file
    assert [file.type(name) for name in file] == ["nf4", "F32", "BF16"]
    assert [file.shape(name) for name in file] == [(64, 4), (3,), (2, 2)]
    assert [file.nbytes(name) for name in file] == [64 * 2 + 4 * 4, 12, 8]
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
    save(path, got | {"w": donated})  # over the file that is mapped
    assert_same(load(path)["q"], tree["q"])


def test_random_keys_and_functions_among_the_leaves(tmp_path):
    keys = jax.random.split(jax.random.key(3, impl="rbg"), 2)
    tree = {"keys": keys, "w": Array8B.quantize(weights(64, 32)), "f": [jax.nn.relu, np.dtype("int8"), Pair]}
    path = saved(tmp_path, tree)
    like = {**tree, "keys": jax.eval_shape(lambda: jax.random.split(jax.random.key(0, impl="rbg"), 2))}
    got = load(path, like=like)
    assert got["f"] == tree["f"] and got["keys"].dtype == keys.dtype
    assert_same(jax.random.key_data(got["keys"]), jax.random.key_data(keys))
    assert_same(got["w"], tree["w"])
    with pytest.raises(ValueError, match=r"'keys' is an array of shape \(2,\) and dtype key<rbg> in the file and"):
        load(path, like={**tree, "keys": jax.random.split(jax.random.key(0, impl="threefry2x32"), 2)})
    with pytest.raises(ValueError, match=r"'f/0' is of the class .*custom_jvp.*Pass a tree of the same structure"):
        load(path)
    only = saved(tmp_path, {"key": jax.random.key(1)})
    assert jnp.array_equal(jax.random.key_data(load(only)["key"]), jax.random.key_data(jax.random.key(1)))
    with pytest.raises(TypeError, match="'f' is a partial; leaves are arrays"):  # its array would be lost
        saved(tmp_path, {"f": functools.partial(jnp.dot, jnp.ones(3))})
