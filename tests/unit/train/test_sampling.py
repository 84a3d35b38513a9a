"""Tests of sampling: candidates, frequencies, and refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minillm_core.errors import NonFinite, Refusal
from minillm_core.train.generate import Sampling

logits_of = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=20).map(
    lambda values: np.asarray(values, np.float32)
)
shares = st.floats(0, 1, exclude_min=True)


def drawn(sampling: Sampling, logits: np.ndarray, times: int = 100) -> list[int]:
    random = np.random.default_rng(0)
    return [sampling.draw(logits, random) for _ in range(times)]


def nucleus(logits: np.ndarray, temperature: float, k: int | None, p: float) -> list[int]:
    """Return the candidate ids, one after the other, the most likely first."""
    scaled = [float(x) / temperature for x in logits]
    ranked = sorted(range(len(logits)), key=lambda i: (-scaled[i], i))[:k]
    weights = [math.exp(scaled[i] - max(scaled)) for i in ranked]
    kept, mass = [], 0.0
    for index, weight in zip(ranked, weights, strict=True):
        if (p < 1 and mass >= p * math.fsum(weights)) or weight == 0:  # this one has underflowed
            break
        kept.append(index)
        mass += weight
    return kept


@example(np.asarray([30, -30], np.float32), 0.05, None, 1.0)
@example(np.asarray([0, 5], np.float32), 0.125, None, 1.0)
@given(logits_of, st.floats(0.05, 3), st.none() | st.integers(1, 25), shares)
def test_only_the_likeliest_are_drawn(
    logits: np.ndarray, temperature: float, k: int | None, p: float
) -> None:
    weights = Sampling(temperature, k, p).weights(logits)
    kept = set(np.flatnonzero(weights))
    assert kept
    # due to rounding of a sum, one more or one fewer may make up p
    for share in (p - 1e-12, p, min(p + 1e-12, 1)):
        if kept == set(nucleus(logits, temperature, k, share)):
            break
    else:
        pytest.fail(f"{sorted(kept)}, not {nucleus(logits, temperature, k, p)}")
    assert set(drawn(Sampling(temperature, k, p), logits, 20)) <= kept


@given(logits_of, st.integers(0, 100))
def test_one_number_is_drawn_for_an_id_and_none_for_the_likeliest(
    logits: np.ndarray, seed: int
) -> None:
    random, expected = (np.random.default_rng(seed) for _ in range(2))
    assert 0 <= Sampling().draw(logits, random) < len(logits)
    expected.random()
    assert Sampling(0).draw(logits, random) == logits.argmax()
    assert random.random() == expected.random()


def test_draws_follow_the_probabilities() -> None:
    logits = np.log(np.asarray([0.1, 0.2, 0.7], np.float32))
    for sampling, expected in (
        (Sampling(1.0), [0.1, 0.2, 0.7]),
        (Sampling(0.5), [1 / 54, 4 / 54, 49 / 54]),
        (Sampling(1.0, top_k=2), [0, 2 / 9, 7 / 9]),
        (Sampling(1.0, top_p=0.75), [0, 2 / 9, 7 / 9]),
        (Sampling(1.0, top_p=0.65), [0, 0, 1]),
        (Sampling(1.0, top_k=2, top_p=0.75), [0, 0, 1]),  # of the two, 7 / 9 suffice
    ):
        counts = np.bincount(drawn(sampling, logits, 3000), minlength=3) / 3000
        np.testing.assert_allclose(counts, expected, atol=0.03, err_msg=str(sampling))


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-300, 1e-3])
def test_the_colder_the_surer(temperature: float) -> None:
    logits = np.asarray([1, 3, 2, -1e30], np.float32)
    assert set(drawn(Sampling(temperature), logits, 20)) == {1}


def test_what_cannot_be_drawn_is_not_even_at_the_edge() -> None:
    class Last:
        """A generator that returns its largest number."""

        def random(self) -> float:
            return 1 - 2**-53

    logits = np.asarray([0.0, 0.0, -1e4], np.float32)
    assert Sampling(1.0).draw(logits, Last()) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_not_numbers_end_it(bad: float, temperature: float) -> None:
    with pytest.raises(NonFinite, match="not finite"):
        Sampling(temperature).draw(np.asarray([0, bad], np.float32), np.random.default_rng(0))


@pytest.mark.parametrize(
    "options",
    [
        *({"temperature": bad} for bad in (-0.1, math.nan, math.inf)),
        *({"top_k": bad} for bad in (0, -3)),
        *({"top_p": bad} for bad in (0.0, -0.5, 1.01, math.nan)),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(options: dict) -> None:
    with pytest.raises(Refusal) as raised:
        Sampling(**options)
    (name,) = options
    assert raised.value.where == name
    assert raised.value.fix
