"""Lowbit files: what is saved comes back to the bit."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tiers
from files_helpers import GOLDEN, assert_same, back, module, saved, weights
from helpers import Layout
from test_new_format import Array6B

import lowbit
from lowbit import Array1B, Array8B, ArrayNF4, QuantizedArray
from lowbit.io import LowbitFile, _dtypes, load, load_metadata, save

# --- round trips


def test_the_file_of_version_1_is_read_as_it_was_written():
    made = module(GOLDEN / "make_version1.py")
    assert made.OUT.stat().st_size < 20_000
    tree = load(made.OUT)
    assert_same(tree, made.contents())
    assert load_metadata(made.OUT) == made.METADATA
    # Numbers that do not depend on the classes of lowbit.
    file = LowbitFile(made.OUT)
    assert file.dense("ternary").tolist() == [[1, 0, -1, 1, 0], [-1, 0, 0, 0, 1]]
    assert file.dense("layers/0/kernel")[0, 14:20].tolist() == [98, 105, 224, 238, 252, -246]
    assert file.dense("binary")[1, :4].tolist() == [-1, -2, -1, -2]
    assert tree["values"][:9] == [True, False, 0, -(2**70), 0.1, -0.0, 1e300, math.inf, 1 - 2j]
    assert tree["layers"][0]["tied"] is tree["layers"][0]["kernel"]


def test_the_same_tree_is_the_same_file(tmp_path):
    made = module(GOLDEN / "make_version1.py")
    assert saved(tmp_path, made.contents(), metadata=made.METADATA).read_bytes() == made.OUT.read_bytes()


@pytest.mark.first(*tiers.EACH_MECHANISM)
def test_every_format_comes_back(layout: Layout, tmp_path):
    w = layout.quantize(jnp.asarray(weights(33, 77)))
    tree = {
        "w": w.replace(use_kernel=False, compute="fast"),
        "transposed": w.T,
        "stack": layout.quantize(jnp.asarray(weights(2, 20, 40))).astype(jnp.bfloat16),
        "empty": layout.quantize(jnp.asarray(weights(0, 32))),
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


def test_a_format_of_the_users_own_comes_back(tmp_path):
    q = Array6B.quantize(jnp.asarray(weights(33, 77)), axis=-2)
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


# --- checkpoints of Orbax


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
