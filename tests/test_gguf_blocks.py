"""GGUF types whose bits are kept: every array decodes to what llama.cpp decodes, and is written as the same bytes."""

import math
import tracemalloc
import zlib
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
import tiers
from exchange_helpers import bytes_of
from gguf import GGMLQuantizationType as Type
from gguf_helpers import GOLDEN, KEPT, golden, same_bits, stored, weights, write

import lowbit
from lowbit import Array1B, Array8B, QuantizedArray
from lowbit.formats import PackedArray
from lowbit.io import GGUFFile, Reader, _gguf_blocks, open_tensors, write_gguf
from lowbit.io._gguf_blocks import BLOCK_TYPES, type_of
from lowbit.io._regions import full_region
from lowbit.io.readers import is_stored

CODEBOOKS = [Type.IQ1_S, Type.IQ1_M, Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S, Type.IQ3_XXS, Type.IQ3_S]
each_type = pytest.mark.parametrize("kind", KEPT, ids=lambda t: t.name)


def any_blocks(kind: Type, *shape: int) -> np.ndarray:
    """Blocks with any codes that have a meaning, and scales that are not special."""
    row, dice = BLOCK_TYPES[kind.name], np.random.default_rng(len(shape))
    blocks = np.frombuffer(dice.bytes(math.prod(shape) // row.elements * row.dtype.itemsize), row.dtype).copy()
    for name in row.floats:
        blocks[name] = dice.normal(size=len(blocks))
    # Beyond these powers the largest level overflows, and the smallest is subnormal, which XLA takes for 0.
    for name, bounds in {"powers": (2, 245), "floats": (0, 127)}.items():
        if name in (row.dtype.names or ()):
            blocks[name] = dice.integers(*bounds, blocks[name].shape)
    if row.format == "ternary":
        blocks = gguf.quantize(weights(math.prod(shape) // 256, 256), kind).reshape(-1).view(row.dtype)
    return blocks.view(np.uint8).reshape(*shape[:-1], -1)


def quantized(file: Reader, name: str = "w") -> QuantizedArray:
    array = file.array(name)
    assert isinstance(array, QuantizedArray)
    return array


@each_type
def test_blocks_of_llama_cpp_decode_to_its_own_numbers(kind: Type, tmp_path: Path) -> None:
    file = write(tmp_path / "a.gguf", {"w": (golden(kind), kind)})
    array = file.array("w")
    assert (
        isinstance(array, QuantizedArray) and array.shape == file.shape("w") == (4, 512) and array.dtype == np.float32
    )
    assert array.axis == -1 and file.type("w") == kind.name and is_stored(kind.name)
    dense = np.asarray(array.materialize())
    assert zlib.crc32(dense.tobytes()) == GOLDEN[f"{kind.name}/crc32"]
    assert same_bits(file.dense("w"), dense) and same_bits(gguf.dequantize(golden(kind), kind).astype("f4"), dense)


def test_every_type_of_the_table_has_blocks_of_llama_cpp() -> None:
    assert {kind.name for kind in KEPT} == BLOCK_TYPES.keys()
    for kind in KEPT:
        row = BLOCK_TYPES[kind.name]
        assert (row.elements, row.dtype.itemsize) == gguf.GGML_QUANT_SIZES[kind]


SHAPES = [((5, 768),), ((256,),), ((2, 3, 256),), ((0, 256),)]


@each_type
@pytest.mark.parametrize("shape", tiers.tiered(SHAPES, SHAPES[:1]), ids=str)
def test_any_codes_and_scales_are_kept(kind: Type, shape: tuple[int, ...], tmp_path: Path) -> None:
    data = any_blocks(kind, *shape) if math.prod(shape) else np.empty((0, 1), np.uint8)
    data = data.reshape(gguf.quant_shape_to_byte_shape(shape, kind))
    file = write(tmp_path / "a.gguf", {"w": (data, kind)})
    array = quantized(file)
    assert array.shape == shape and array.axis == -1 and array.block_size == BLOCK_TYPES[kind.name].block_size
    want = gguf.dequantize(data, kind) if data.size else np.empty(shape, np.float32)
    # The code of -0 is +0 to llama.cpp, which no product shows.
    assert np.array_equal(np.asarray(array.materialize()), want)
    assert kind in (Type.MXFP4, Type.NVFP4) or same_bits(array.materialize(), want.astype(np.float32))


@each_type
def test_an_array_takes_about_the_bits_of_the_file(kind: Type, tmp_path: Path) -> None:
    array = quantized(write(tmp_path / "a.gguf", {"w": (golden(kind), kind)}))
    # Six-bit and four-bit scales have a byte each, and so have trits a fourth of one.
    more = {"Q2_K": 0.5, "Q3_K": 0.125, "Q4_K": 0.125, "Q5_K": 0.125, "IQ4_XS": 0.0625, "TQ1_0": 0.375}
    bits = 8 * golden(kind).nbytes / array.size + more.get(kind.name, 0)
    assert 8 * array.nbytes / array.size == bits
    assert all(x.dtype in (np.uint8, np.int8, np.float16) for x in jax.tree.leaves(array))


@each_type
def test_regions_of_rows_and_blocks_are_those_of_the_array(kind: Type, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(_gguf_blocks, "CHUNK", 512)
    file = write(tmp_path / "a.gguf", {"w": (any_blocks(kind, 3, 4, 768), kind)})
    whole = np.asarray(quantized(file).materialize())
    for as_stored in (True, False):
        chunks = file.chunks("w", as_stored=as_stored)
        assert chunks.like.shape == (3, 4, 768) and chunks.units[:2] == [1, 1] and 768 % chunks.units[2] == 0
        for region in (((1, 3), (0, 4), (0, 768)), ((0, 3), (1, 3), (256, 768)), full_region(chunks.like.shape)):
            found = chunks.read(region)
            assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(found))
            dense = jax.tree.map(jax.numpy.asarray, found).materialize() if as_stored else found
            assert np.array_equal(dense, whole[tuple(slice(*bounds) for bounds in region)])
        assert jax.tree.structure(found) == jax.tree.structure(chunks.like)
        for a, b in zip(*map(jax.tree.leaves, (found, chunks.like)), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)


@each_type
def test_a_tensor_that_was_read_is_written_as_the_same_bytes(kind: Type, tmp_path: Path) -> None:
    file = write(tmp_path / "a.gguf", {"w": (any_blocks(kind, 2, 3, 512), kind), "v": (golden(kind), kind)})
    assert type_of(file.array("w")) == ("TQ2_0" if kind == Type.TQ1_0 else kind.name)
    write_gguf(tmp_path / "b.gguf", {name: file.array(name) for name in file}, file.fields)
    again = GGUFFile(tmp_path / "b.gguf")
    for name in file:
        assert same_bits(again.dense(name), file.dense(name))
        assert kind == Type.TQ1_0 or bytes_of(again, name) == bytes_of(file, name)
    row = BLOCK_TYPES[kind.name]
    assert row.write(quantized(file)).tobytes() == bytes_of(file, "w")


def test_a_lowbit_file_keeps_the_bits_on_the_way_to_gguf_and_back(tmp_path: Path) -> None:
    kinds = [kind for kind in KEPT if kind != Type.TQ1_0]
    tensors = {f"{kind.name}.weight": (golden(kind), kind) for kind in kinds} | {"norm": (weights(8), Type.F32)}
    file = write(tmp_path / "a.gguf", tensors)
    lowbit.io.convert(file, tmp_path / "b.safetensors")
    between = open_tensors(tmp_path / "b.safetensors")
    assert {between.type(f"{kind.name}.weight") for kind in kinds} == {BLOCK_TYPES[kind.name].format for kind in kinds}
    lowbit.io.convert(between, tmp_path / "c.gguf")
    again = GGUFFile(tmp_path / "c.gguf")
    for name in file:
        assert again.type(name) == file.type(name) and bytes_of(again, name) == bytes_of(file, name)


def test_a_product_with_a_stored_array_is_that_with_its_numbers(tmp_path: Path) -> None:
    x = weights(3, 512)
    for kind in KEPT:
        array = quantized(write(tmp_path / f"{kind.name}.gguf", {"w": (golden(kind), kind)}))
        with lowbit.materialization("error"):
            got = np.asarray(x @ array.T)
        want = x @ np.asarray(array.materialize()).T
        np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max(), err_msg=kind.name)


# --- arrays that are not of GGUF


def test_arrays_of_the_layout_are_written_however_they_were_made(tmp_path: Path) -> None:
    made = {
        "Q4_0": lowbit.quantize(weights(64, 4), "int4", scale_dtype="float16").T,
        "Q4_1": lowbit.quantize(weights(4, 64), "int4", axis=-1, offset=True, scale_dtype="float16"),
        "Q5_0": lowbit.quantize(weights(64, 4), "int5", scale_dtype="float16").T,
        "Q8_0": lowbit.quantize(weights(4, 64), "int8", axis=-1, block_size=32, scale_dtype="float16"),
        "MXFP4": lowbit.quantize(weights(64, 4), "mxfp4").T,
    }
    assert {name: type_of(array) for name, array in made.items()} == {name: name for name in made}
    write_gguf(tmp_path / "a.gguf", made, {})
    file = GGUFFile(tmp_path / "a.gguf")
    for name, array in made.items():
        assert file.type(name) == name and np.array_equal(file.dense(name), np.asarray(array.materialize()))


def test_other_blocks_axes_and_scales_are_not_of_gguf() -> None:
    w = weights(64, 64)
    for array in (
        lowbit.quantize(w, "int4", axis=-1),  # scales that need float32
        lowbit.quantize(w, "int4", axis=-1, block_size=64, scale_dtype="float16"),
        lowbit.quantize(w, "int4", scale_dtype="float16"),  # blocks along the first axis
        lowbit.quantize(w, "int4", axis=-1, scale_dtype="bfloat16") * 1.7,
        lowbit.quantize(w[:, :48], "int4", axis=-1, scale_dtype="float16"),  # a short block
        lowbit.quantize(w, "q4", axis=-1),
        lowbit.quantize(w, "nvfp4", axis=-1),  # with a scale of the matrix
        w,
    ):
        assert type_of(array) is None


# --- codes without a meaning, and types without a format


@pytest.mark.parametrize(
    ("kind", "field", "code", "component"),
    [
        (Type.TQ2_0, "low", 0b00110000, "codes"),
        (Type.MXFP4, "powers", 255, "scales"),
        (Type.NVFP4, "floats", 127, "scales"),
    ],
    ids=["TQ2_0", "MXFP4", "NVFP4"],
)
def test_a_code_without_a_meaning_is_refused(kind: Type, field: str, code: int, component: str, tmp_path: Path) -> None:
    data = golden(kind).copy()
    data.view(BLOCK_TYPES[kind.name].dtype)[2, -1][field][-1] |= code
    file = write(tmp_path / "a.gguf", {"w": (data, kind)})
    for read in (file.array, lambda name: file.chunks(name, as_stored=True).read(((2, 4), (0, 512)))):
        with pytest.raises(ValueError, match=rf"a.gguf: tensor 'w' of type {kind.name} has {component} with the code"):
            read("w")
    with np.errstate(all="ignore"):
        assert np.array_equal(file.dense("w"), gguf.dequantize(data, kind))


@pytest.mark.parametrize("kind", CODEBOOKS, ids=lambda t: t.name)
def test_codebooks_are_decoded_and_refused_if_strict(kind: Type, tmp_path: Path) -> None:
    data = stored(kind)
    file = write(tmp_path / "a.gguf", {"w": (data, kind)})
    with np.errstate(all="ignore"):
        assert not is_stored(kind.name) and same_bits(file.array("w"), gguf.dequantize(data, kind))
    strict = open_tensors(file.path, strict=True)
    for read in (strict.array, lambda name: strict.chunks(name, as_stored=True)):
        with pytest.raises(ValueError, match=rf"a.gguf: tensor 'w' cannot keep .* codebook of {kind.name}"):
            read("w")
    assert strict.dense("w").shape == strict.chunks("w", as_stored=False).like.shape == (6, 512)


def test_classes_of_the_simple_types(tmp_path: Path) -> None:
    classes = {Type.Q8_0: Array8B, Type.TQ1_0: Array1B, Type.TQ2_0: Array1B}
    for kind in KEPT:
        array = quantized(write(tmp_path / f"{kind.name}.gguf", {"w": (golden(kind), kind)}))
        assert type(array) is classes.get(kind, PackedArray)
        assert array.format_label == BLOCK_TYPES[kind.name].format


def test_every_int8_code_is_kept(tmp_path: Path) -> None:
    codes = np.arange(-128, 128, dtype=np.int8).reshape(8, 32)
    scales = np.array([1e-7, 6e-8, -2, 65504, 0, 1, 0.3, 1e-4], np.float16)  # subnormal, negative, largest, zero
    data = np.concatenate([scales.view(np.uint8).reshape(8, 2), codes.view(np.uint8)], axis=1)
    array = quantized(write(tmp_path / "a.gguf", {"w": (data, Type.Q8_0)}))
    assert isinstance(array, Array8B)
    assert same_bits(array.weight, codes) and same_bits(array.scale, scales[:, None])


@pytest.mark.parametrize("as_stored", [True, False])
def test_a_region_takes_the_memory_of_the_region(as_stored: bool, tmp_path: Path) -> None:
    data = np.tile(golden(Type.Q4_K), (1024, 2))  # 4 million weights
    chunks = write(tmp_path / "a.gguf", {"w": (data, Type.Q4_K)}).chunks("w", as_stored=as_stored)
    region = ((1000, 1064), (0, 1024))
    chunks.read(region)
    tracemalloc.start()
    chunks.read(region)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * 1024 * 24  # bytes: of float32 and the steps to it; the whole tensor has 16 MB of them
