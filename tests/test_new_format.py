"""Formats from outside: the declared one of the example, and a class that passes the tests of the built-in ones."""

import dataclasses
import importlib.util
from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_rules
import test_transforms
import tiers
from features import LAYOUT_MATTERS
from helpers import Layout, assert_close, assert_same_bits, gaussian

import lowbit
from lowbit import formats
from lowbit.io import convert, open_tensors
from lowbit.io.readers._base import is_stored

PATH = Path(__file__).parent.parent / "examples" / "new_format.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("new_format", PATH)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@formats.stored
class Array6B(lowbit.QuantizedArray):
    """A class of one's own, where no layout does: value = (code - 32) * scale, in two components of codes."""

    high: jax.Array  # one more component, in addition to `codes` and `scales`

    packing: ClassVar = {"codes": 2, "high": 4}  # codes per byte

    @classmethod
    def quantize(cls, array, block_size=64, *, axis=None, dtype=None):
        array = formats.checked_input(array, "six")
        spans = formats.axis_spans(array.shape, axis, block_size)
        values = array.astype(jnp.float32)
        scales = formats.finite_or_nan(formats.block_max(values, spans) / 31)
        usable = jnp.where(scales > 0, scales, 1)
        codes = jnp.round(values / formats.spread(usable, spans, array.shape)) + 32
        codes = jnp.nan_to_num(codes).astype(jnp.uint8)
        components = {"codes": formats.pack(codes & 15, 2), "high": formats.pack(codes >> 4, 4), "scales": scales}
        return cls.build(shape=array.shape, dtype=dtype or array.dtype, spans=spans, **components)

    def levels(self, low, high):
        return (low | high << 4).astype(jnp.float32) - 32


SIX = lowbit.Format("six", Array6B.quantize, error=0.0243, bits=6.0)


@pytest.fixture(params=[(-1, 16), pytest.param((-2, None), marks=tiers.MORE)], ids=str)
def six_bits(request, monkeypatch) -> Layout:
    monkeypatch.setitem(lowbit.FORMATS, "six", SIX)
    return Layout("six", *request.param)


def test_the_example_runs(example, monkeypatch, capsys) -> None:
    monkeypatch.setitem(lowbit.FORMATS, "iq4", lowbit.FORMATS["nf4"])  # so that the row is removed afterwards
    del lowbit.FORMATS["iq4"]
    example.main()
    printed = capsys.readouterr().out
    assert "4.2578125 bits per weight, rms error 0.07" in printed and "same codes: True" in printed
    assert len(PATH.read_text().splitlines()) < 40
    assert lowbit.FORMATS["iq4"].error == 0.0747


def test_a_declared_format_is_like_a_built_in_one(example, monkeypatch) -> None:
    monkeypatch.setitem(lowbit.FORMATS, "iq4", lowbit.FORMATS["nf4"])
    del lowbit.FORMATS["iq4"]
    formats.declare("iq4", example.LAYOUT, error=0.0747)
    w, x = gaussian(0, (64, 96)), gaussian(1, (8, 64))
    q = lowbit.quantize(w, "iq4")
    dense = q.materialize()
    with lowbit.materialization("error"):
        assert_close(x @ q, x @ dense)
        assert_close(jax.grad(lambda x: (x @ q).sum())(x), jnp.ones((8, 96)) @ dense.T)
        assert_close(q.T @ x.T, dense.T @ x.T)
        assert_close(lowbit.implicit(lambda q: q[:32])(q), dense[:32], 0)
    tree, report = lowbit.quantize_tree({"up": {"kernel": w}}, "iq4")
    assert [row.format for row in report] == ["iq4"]
    assert_same_bits(tree["up"]["kernel"], q)


FEATURES = [*LAYOUT_MATTERS, "value_and_grad_through_scan_and_checkpoint"]


@pytest.mark.parametrize("feature", tiers.tiered(FEATURES, (*tiers.OF_EVERY_FORMAT, "slices", "einsum_heads")))
def test_features(feature: str, six_bits: Layout) -> None:
    test_transforms.check(feature, six_bits)


MOVES = tiers.tiered(test_rules.MOVES, ("transpose_all", "reshape_split_columns", "slice_of_columns"))


@pytest.mark.parametrize("move", MOVES)
def test_structural_rules_keep_every_bit(move: str, six_bits: Layout) -> None:
    test_rules.test_structural_rules_keep_every_bit(move, six_bits)


def test_odd_shapes(six_bits: Layout) -> None:
    q = six_bits.quantize(gaussian(0, (33, 77)))
    assert_close(q.T, q.materialize().T, 0)
    assert_close(jnp.ones((2, 33)) @ q, jnp.ones((2, 33)) @ q.materialize())


@formats.stored
class Shifted8B(lowbit.Array8B):
    """int8 with other levels; everything else is inherited."""

    def levels(self, *codes):
        return codes[0].astype(jnp.float32) + 0.5


@formats.stored
class ReversedNF4(lowbit.ArrayNF4):
    def levels(self, *codes):
        return -super().levels(*codes)


class Doubled:
    def levels(self, *codes):
        return 2 * codes[0].astype(jnp.float32)


@formats.stored
class Mixed8B(Doubled, lowbit.Array8B):
    """Levels from a mixin class."""


@formats.stored
class Known8B(Shifted8B):
    """A subclass that declares its own decoder."""

    decoder: ClassVar = "int8"
    int8_multiplier: ClassVar = 1

    def levels(self, *codes):
        return codes[0].astype(jnp.float32)


@pytest.mark.parametrize("cls", [Shifted8B, ReversedNF4, Mixed8B])
def test_levels_of_a_subclass_are_what_products_and_lookups_use(cls: type) -> None:
    w, x = gaussian(0, (64, 96)), gaussian(1, (8, 64))
    q = cls.quantize(w, axis=-2)
    assert q.decoder is None and q.int8_multiplier is None
    dense = q.materialize()
    assert float(jnp.abs(dense - w).max()) > 1e-3  # the levels differ
    assert_close(x @ q, x @ dense)
    assert_close(q.T @ x.T, dense.T @ x.T)
    with lowbit.compute("fast"):
        assert_close(x @ q, x @ dense)
    assert_close(lowbit.implicit(jnp.take)(q, jnp.array([3, 5]), axis=0), jnp.take(dense, jnp.array([3, 5]), axis=0))


def test_a_subclass_keeps_the_decoder_that_fits_its_levels() -> None:
    w = jnp.ones((64, 32))
    assert (Known8B.quantize(w).decoder, Known8B.quantize(w).int8_multiplier) == ("int8", 1)

    @formats.stored
    class Renamed(lowbit.ArrayNF4):
        """A subclass that changes nothing."""

    np.testing.assert_array_equal(Renamed.quantize(w).decoder, lowbit.formats.nf4.LEVELS)
    assert Renamed.quantize(w).int8_multiplier == 127


def test_registering_another_format_under_a_known_name_raises(monkeypatch) -> None:
    table = dict(lowbit.FORMATS)
    monkeypatch.setattr(lowbit.formats.table, "FORMATS", table)
    assert lowbit.register_format(SIX) is lowbit.register_format(SIX)
    other = dataclasses.replace(SIX, bits=7.0)
    with pytest.raises(ValueError, match=r"There is a format 'six' already.*replace=True"):
        lowbit.register_format(other)
    with pytest.raises(ValueError, match=r"'nf4' already"):
        lowbit.register_format(dataclasses.replace(other, name="nf4"))
    assert table["six"] is SIX and table["nf4"] is lowbit.FORMATS["nf4"]
    assert lowbit.register_format(other, replace=True) is table["six"]


def test_a_file_with_arrays_of_a_user_defined_class_is_kept(tmp_path) -> None:
    w = gaussian(0, (64, 64))
    q = Array6B.quantize(w)
    lowbit.save(tmp_path / "six.safetensors", {"up": {"weight": q}, "down": {"weight": w}})
    source = open_tensors(tmp_path / "six.safetensors")
    assert source.type("up/weight") == "Array6B" and is_stored("Array6B") and not is_stored("F32")
    report = convert(source, tmp_path / "out.safetensors", rules="int8")
    assert {row.path: row.format for row in report} == {"down/weight": "int8", "up/weight": None}
    assert_same_bits(lowbit.load(tmp_path / "out.safetensors")["up/weight"], q)
    # The same for a tree in memory.
    tree, report = lowbit.quantize_tree(lowbit.load(tmp_path / "six.safetensors"), "int8")
    assert {row.path: row.format for row in report} == {"down/weight": "int8", "up/weight": None}
    assert_same_bits(tree["up"]["weight"], q)


def test_a_file_of_a_format_that_is_not_declared_says_what_to_do(tmp_path: Path) -> None:
    formats.declare("halves", formats.Layout(formats.levels.Integers(4, 8), 32), error=0.08)
    try:
        lowbit.save(tmp_path / "w", lowbit.quantize(jnp.ones((32, 4)), "halves"))
    finally:
        del lowbit.FORMATS["halves"]
    with pytest.raises(
        ValueError, match=r"'halves' is not a declared format .*declare it with lowbit.formats.declare first\.$"
    ):
        lowbit.load(tmp_path / "w")
