"""Choosing the next token: the distribution, the seed, and the two ways to be greedy."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import gaussian

from lowbit.demo.language_model import LanguageModel
from lowbit.demo.sampling import Draw, Sampling, likeliest, next_token, nucleus

LOGITS = np.array([0.3, 2.0, -1.0, 1.5, 0.0, 1.4, -4.0, 0.9], np.float32)
PROMPT = [5, 9, 200, 17, 17, 42]


def by_sorting(p: np.ndarray, top_p: float) -> np.ndarray:
    """The most likely tokens that reach `top_p`, one after the other."""
    kept, total = np.zeros(p.shape, bool), 0.0
    for i in np.argsort(-p, kind="stable"):
        if total >= top_p:
            break
        kept[i], total = True, total + float(p[i])
    return kept


@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.5, 0.9, 0.999])
def test_the_nucleus_is_the_one_of_a_sorted_list(top_p: float) -> None:
    p = np.asarray(jax.nn.softmax(3 * gaussian(1, (4, 100))))
    want = np.stack([by_sorting(row, top_p) for row in p])
    np.testing.assert_array_equal(nucleus(jnp.asarray(p), top_p), want)


def test_a_nucleus_of_one_is_everything_and_equal_tokens_stay_together() -> None:
    p = jnp.array([0.1, 0.4, 0.4, 0.1])
    assert nucleus(p, 1.0).all()
    np.testing.assert_array_equal(nucleus(p, 0.3), [False, True, True, False])


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (2.0, 0.7)])
def test_tokens_have_the_frequencies_of_the_distribution(temperature: float, top_p: float) -> None:
    count = 20_000
    draw = Sampling(temperature, top_p, seed=7).draw
    drawn = jax.jit(jax.vmap(lambda position: next_token(LOGITS, draw, position)))(jnp.arange(count))
    p = np.exp(LOGITS / temperature) / np.exp(LOGITS / temperature).sum()
    p = np.where(by_sorting(p, top_p), p, 0)
    p /= p.sum()
    frequency = np.bincount(drawn, minlength=len(LOGITS)) / count
    assert (np.abs(frequency - p) <= 5 * np.sqrt(p * (1 - p) / count)).all()


def test_temperature_0_and_a_tiny_nucleus_are_greedy(tiny: Path) -> None:
    model = LanguageModel.from_gguf(tiny)
    greedy = list(model.generate(PROMPT, 12))
    assert Sampling(temperature=0, top_p=0.5).draw is None
    assert list(model.generate(PROMPT, 12, Sampling(0.0, seed=3))) == greedy
    assert list(model.generate(PROMPT, 12, Sampling(1.0, 1e-9, seed=3))) == greedy
    assert likeliest(jnp.asarray(LOGITS)) == 1 and next_token(jnp.asarray(LOGITS), None, 0) == 1


def test_a_seed_gives_the_same_text_however_it_is_divided(tiny: Path) -> None:
    model = LanguageModel.from_gguf(tiny)
    sampling = Sampling(1.5, 0.95, seed=11)
    text = list(model.generate(PROMPT, 12, sampling))
    assert list(model.generate(PROMPT, 12, sampling)) == text
    assert list(model.generate([*PROMPT, *text[:4]], 8, sampling)) == text[4:]
    assert list(model.generate(PROMPT, 12, Sampling(1.5, 0.95, seed=12))) != text


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"temperature": -1.0}, "temperature=-1.0 must be 0 .* or a positive number"),
        ({"temperature": float("nan")}, "temperature=nan must be"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p=0.0 must be above 0 and at most 1"),
        ({"temperature": 1.0, "top_p": 1.1}, "top_p=1.1 must be"),
        ({"seed": -1}, "seed=-1 must be from 0 to"),
    ],
)
def test_wrong_settings_are_named(given: dict[str, float], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Sampling(**given)
    assert isinstance(Sampling(1.0).draw, Draw)
