"""Lowbit files that are truncated or changed, and files of other kinds: they are refused."""

import random
import re

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from files_helpers import assert_same, mutated, reads, refused, saved, seeds, signed, split, weights

from lowbit import ArrayNF4
from lowbit.io import load, save
from lowbit.io.readers import is_lowbit_file


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


def test_arrays_of_the_drop_in_load_as_lowbit_arrays(tmp_path):
    from lowbit.compat.eformer import arrays

    ours, theirs = ArrayNF4.quantize(weights(4, 64), axis=-1), arrays.ArrayNF4(weights(4, 64))
    save(tmp_path / "a.safetensors", [ours, theirs])
    for array in load(tmp_path / "a.safetensors"):
        assert type(array) is ArrayNF4
        assert np.array_equal(array.materialize(), ours.materialize())


def test_every_truncation_raises_an_error_that_names_the_file(tmp_path):
    path = tmp_path / "b.safetensors"
    contents = seeds(tmp_path)[0].read_bytes()
    for size in range(len(contents)):
        path.write_bytes(contents[:size])
        assert "b.safetensors" in refused(path)[0]


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
                assert changed == contents  # every byte is checked
    assert refused > 1900


def test_any_header_is_read_or_raises_one_error(tmp_path):
    dice = random.Random(1)
    path = tmp_path / "b.safetensors"
    outcomes = {"read": 0, "refused": 0}
    # Changes that leave most of it readable: a digit, a letter, a token of JSON.
    changes = [
        b"0",
        b"-1",
        b"9" * 30,
        b"1e9",
        b"null",
        b"true",
        b"[]",
        b"{}",
        b'\\"',
        b"\\ud800",
        b"",
        b",",
        b"]",
        b"}",
    ]
    for seed in seeds(tmp_path):
        header, data = split(seed)
        tokens = re.findall(rb'[\w.]+|\\?"|[^\w]', header.rstrip())
        for _ in range(100):
            changed = list(tokens)
            for _ in range(dice.choice([1, 1, 2])):
                at = dice.randrange(4, len(changed))
                changed[at] = dice.choice([*changes, dice.choice(tokens), changed[at] + b"1"])
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
