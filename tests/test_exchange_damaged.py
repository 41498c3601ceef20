"""Foreign files that are truncated or changed: they are read, or are one error that names the file."""

import random
import re
import tracemalloc

import numpy as np
import pytest
from exchange_helpers import GOLDEN, reads, seeds, stored
from safetensors.numpy import save_file

SEEDS = ["plain", "block64_float16_nested", "crossing", "gguf", "types", "config", "index", "first", "second"]


@pytest.fixture(params=range(len(SEEDS)), ids=SEEDS)
def seed(request, tmp_path):
    return seeds(tmp_path)[request.param]


def test_every_truncation_raises_one_error_that_names_the_file(seed):
    contents = seed.read_bytes()
    reads(seed)
    needed = len(contents) - 32 if seed.suffix == ".gguf" else len(contents)  # GGUF ends in padding
    for size in {*range(0, needed, max(1, needed // 60)), needed - 1}:
        seed.write_bytes(contents[:size])
        with pytest.raises(ValueError, match=re.escape(str(seed.parent))):
            reads(seed)


def test_changed_bytes_are_read_or_raise_one_error_that_names_the_file(seed):
    contents = seed.read_bytes()
    dice = random.Random(0)
    outcomes = {"read": 0, "refused": 0}
    reads(seed)
    tracemalloc.start()
    for _ in range(100):
        changed = bytearray(contents)
        for _ in range(dice.choice([1, 1, 1, 4])):
            at = dice.randrange(min(len(changed), dice.choice([100, 1500, len(changed)])))
            changed[at] = dice.choice([0, 1, 127, 128, 255, *b'0129"{[,:', dice.randrange(256)])
        seed.write_bytes(changed)
        try:
            reads(seed)
            outcomes["read"] += 1
        except ValueError as error:
            assert str(seed.parent) in str(error)
            outcomes["refused"] += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert min(outcomes.values()) > 1, outcomes
    assert peak < 2 << 20


def test_any_bytes_of_scales_and_codes_decode(tmp_path):
    for file in ("block64_bfloat16_nested", "block64_float16", "crossing_nested"):
        tensors = stored(GOLDEN[file])
        dice = np.random.default_rng(0)
        for name in ("w", "w.absmax", "w.nested_absmax"):
            if name in tensors:
                old = tensors[name]
                tensors[name] = np.frombuffer(dice.bytes(old.nbytes), old.dtype).reshape(old.shape)
        save_file(tensors, tmp_path / "a.safetensors")
        _, found = reads(tmp_path / "a.safetensors")
        assert found["w"][1].dtype == np.float32
