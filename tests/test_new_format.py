"""The example's format, from outside the package, passes the tests of those inside."""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import test_rules
import test_transforms
from features import LAYOUT_MATTERS
from helpers import HALF, Layout, assert_close

import lowbit

PATH = Path(__file__).parent.parent / "examples" / "new_format.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("new_format", PATH)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=[(-2, None), (-1, 16)] if HALF is None else [[(-2, None), (-1, 16)][HALF]], ids=str)
def six_bits(example, request, monkeypatch) -> Layout:
    monkeypatch.setitem(lowbit.FORMATS, "int6", example.INT6)
    return Layout("int6", *request.param)


def test_the_example_runs(example, monkeypatch, capsys) -> None:
    monkeypatch.setattr(lowbit.formats._quantized, "FORMATS", dict(lowbit.FORMATS))
    monkeypatch.setattr(lowbit, "FORMATS", lowbit.formats._quantized.FORMATS)
    example.main()
    assert "6.5 bits a weight, rms error 0.0243" in capsys.readouterr().out
    assert len(PATH.read_text().splitlines()) < 70


@pytest.mark.parametrize("feature", [*LAYOUT_MATTERS, "value_and_grad_through_scan_and_checkpoint"])
def test_features(feature: str, six_bits: Layout) -> None:
    test_transforms.check(feature, six_bits)


@pytest.mark.parametrize("move", test_rules.MOVES)
def test_structural_rules_keep_every_bit(move: str, six_bits: Layout) -> None:
    test_rules.test_structural_rules_keep_every_bit(move, six_bits)


def test_odd_shapes(six_bits: Layout) -> None:
    q = six_bits.quantize(jax.random.normal(jax.random.key(0), (33, 77)))
    assert_close(q.T, q.materialize().T, 0)
    assert_close(jnp.ones((2, 33)) @ q, jnp.ones((2, 33)) @ q.materialize())
