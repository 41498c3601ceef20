"""One contract for all readers, `lowbit.load` of every kind of file, and which modules of io may import what."""

import ast
import inspect
import json
import warnings
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf_helpers import with_codebook
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

import lowbit
from lowbit import io
from lowbit.io._dtypes import DTYPES
from lowbit.io._maps import located, mapped
from lowbit.io._regions import full_region, region_shape

PACKAGE = Path(lowbit.__file__).parent


def weights(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def lowbit_file(folder: Path) -> Path:
    lowbit.save(folder / "own", {"w": lowbit.quantize(weights(64, 128), "nf4"), "b": weights(128)})
    return folder / "own"


def plain_file(folder: Path) -> Path:
    save_file({"w": weights(64, 128), "b": weights(128)}, folder / "plain")
    return folder / "plain"


def bitsandbytes_file(folder: Path) -> Path:
    array = lowbit.quantize(jnp.asarray(weights(64, 128)), "nf4", axis=-1)
    save_file({**io.bitsandbytes_tensors("w", array), "b": weights(128)}, folder / "bnb")
    return folder / "bnb"


def gguf_file(folder: Path) -> Path:
    io.write_gguf(folder / "q8", {"w": weights(64, 128), "b": weights(128)}, {"general.architecture": "x"}, type="Q8_0")
    return folder / "q8"


def directory(folder: Path) -> Path:
    (folder / "hf").mkdir()
    plain_file(folder).rename(folder / "hf" / "model.safetensors")
    (folder / "hf" / "config.json").write_text(json.dumps({"model_type": "x"}))
    return folder / "hf"


def converted_directory(folder: Path) -> Path:
    io.convert(directory(folder), folder / "out", rules="int8")
    return folder / "out"


KINDS: dict[str, tuple[Any, type, type, str]] = {
    "lowbit": (lowbit_file, io.LowbitFile, lowbit.ArrayNF4, "nf4"),
    "safetensors": (plain_file, io.SafetensorsFile, jax.Array, "F32"),
    "bitsandbytes": (bitsandbytes_file, io.SafetensorsFile, lowbit.ArrayNF4, "nf4"),
    "gguf": (gguf_file, io.GGUFFile, lowbit.Array8B, "Q8_0"),
    "directory": (directory, io.HuggingFaceDir, jax.Array, "F32"),
    "converted directory": (converted_directory, io.LowbitDir, lowbit.Array8B, "int8"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_reader_keeps_the_contract(kind: str, tmp_path: Path) -> None:
    make, cls, _, stored = KINDS[kind]
    file = io.open_tensors(make(tmp_path))
    assert isinstance(file, io.Reader) and type(file) is cls and isinstance(file.metadata, dict)
    assert sorted(file) == sorted(file.names) == ["b", "w"] and len(file) == 2 and "w" in file and "x" not in file
    assert repr(file) == f"{cls.__name__}({str(file.path)!r}, 2 tensors)"
    assert file.shape("w") == (64, 128) and (file.type("w"), file.type("b")) == (stored, "F32")
    assert file.nbytes("b") == 512 and file.dense("w", np.float16).dtype == np.float16
    array = file.array("w")
    dense = np.asarray(array.materialize() if isinstance(array, lowbit.QuantizedArray) else array)
    np.testing.assert_array_equal(file.dense("w"), dense)
    for as_stored in (True, False):
        chunks = file.chunks("w", as_stored=as_stored)
        read = chunks.read(full_region(chunks.like.shape))
        assert len(chunks.units) == 2 and jax.tree.structure(read) == jax.tree.structure(chunks.like)
        assert as_stored or np.array_equal(read, dense)
        assert region_shape(full_region(chunks.like.shape)) == (64, 128)
    for method in (file.shape, file.nbytes, file.type, file.array, file.dense):
        with pytest.raises(KeyError, match=r"has no tensor 'ww'. Did you mean w\?"):
            method("ww")


@pytest.mark.parametrize("kind", KINDS)
def test_load_opens_every_kind_of_file(kind: str, tmp_path: Path) -> None:
    make, _, expected, _ = KINDS[kind]
    path = make(tmp_path)
    file, loaded = io.open_tensors(path), lowbit.load(path)
    assert sorted(loaded) == ["b", "w"] and isinstance(loaded["w"], expected) and isinstance(loaded["b"], jax.Array)
    np.testing.assert_array_equal(lowbit.materialize(loaded["w"]), file.dense("w"))
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    like = {"b": np.zeros(128, np.float32), "w": loaded["w"]}
    like["w"] = jax.ShapeDtypeStruct((64, 128), np.float32, sharding=NamedSharding(mesh, PartitionSpec("x")))
    again = lowbit.load(path, like=like)
    assert isinstance(again["b"], np.ndarray) and again["w"].sharding.mesh == mesh
    np.testing.assert_array_equal(lowbit.materialize(again["w"]), file.dense("w"))
    with pytest.raises(ValueError, match="'b' is in the file and not in `like`"):
        lowbit.load(path, like={"w": like["w"]})


def test_load_metadata_of_other_files(tmp_path: Path) -> None:
    assert lowbit.load_metadata(gguf_file(tmp_path)) == {"general.architecture": "x"}
    assert lowbit.load_metadata(directory(tmp_path))["config"] == {"model_type": "x"}


def test_types_without_a_format_are_dequantized_with_one_warning(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    for name in ("v", "w"):
        writer.add_tensor(name, with_codebook(8, 256), raw_dtype=gguf.GGMLQuantizationType.IQ2_XS)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = lowbit.load(tmp_path / "a.gguf")
    assert [type(loaded[name]) for name in loaded] == [type(jnp.ones(1))] * 2 and loaded["w"].dtype == np.float32
    (warning,) = [w for w in caught if w.category is io.DequantizedWarning]
    assert "2 of type IQ2_XS" in str(warning.message) and warning.filename == __file__


def test_a_model_of_another_method_is_refused(tmp_path: Path) -> None:
    path = directory(tmp_path)
    (path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "hqq"}}))
    for work in (lowbit.load, lambda path: io.convert(path, tmp_path / "out")):
        with pytest.raises(ValueError, match="was quantized by hqq, which cannot be read"):
            work(path)


def test_located_finds_the_file_and_offset_of_a_view(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(range(64)))
    data = mapped(tmp_path / "a")
    assert located(data[8:24].view("<u4").reshape(2, 2)) == (tmp_path / "a", 8)
    assert located(np.arange(3)) is None and not data.flags.writeable


def test_public_names_are_documented() -> None:
    names = [name for name, value in vars(io).items() if name[0] != "_" and not inspect.ismodule(value)]
    assert {"open_tensors", "Reader", "convert", "compare", "save", "load", "GGUFFile"} <= set(names)
    page = (PACKAGE.parent.parent / "docs" / "files.md").read_text()
    for name in names:
        assert (getattr(io, name).__doc__ and f"`{name}`" in page) or f"lowbit.{name}" in page, name


def test_the_library_prints_nothing_and_has_one_table_of_dtypes() -> None:
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0]
        source = path.read_text()
        calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
        if room not in ("cli", "demo"):
            assert not [f for f in calls if isinstance(f, ast.Name) and f.id == "print"], path
        if room == "io":
            assert "import rich" not in source and "from rich" not in source and "typer" not in source, path
            assert "._mmap" not in source and "--" not in source.replace("# ---", ""), path
            assert path.name == "_dtypes.py" or "ml_dtypes" not in source, path
    assert DTYPES["BF16"] == jnp.bfloat16
