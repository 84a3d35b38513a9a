"""Tests of initial values: a random stream per parameter, independent of other parameters."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm_core.errors import PlanError
from minillm_core.nn.init import (
    Constant,
    Init,
    Normal,
    Referenced,
    Uniform,
    generator,
    ones,
    zeros,
)
from minillm_core.nn.initial import AT_ONCE, initial_values
from minillm_core.nn.module import Module, declared
from minillm_core.nn.param import Param
from minillm_core.nn.reference import reference_of

shape = st.lists(st.integers(1, 8), min_size=0, max_size=3).map(tuple)
name = st.text("abc.", min_size=1, max_size=8)
init = st.one_of(
    st.builds(Normal, st.floats(0, 2)),
    st.builds(Uniform, st.floats(0, 2)),
    st.builds(Constant, st.floats(-2, 2)),
)


def counting(rng: np.random.Generator, shape: tuple[int, ...], start: int) -> list[int]:
    return (np.arange(int(np.prod(shape))) + start).reshape(shape).tolist()


def not_numbers(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.full(shape, np.nan)


def flat(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.zeros(1)


@given(init, shape, name, st.integers(0, 2**32))
def test_values_are_float32_and_follow_from_seed_and_name(
    init: Init, shape: tuple[int, ...], name: str, seed: int
) -> None:
    first = init.draw(generator(seed, name), shape)
    again = init.draw(generator(seed, name), shape)
    assert first.dtype == np.float32
    assert first.shape == shape
    np.testing.assert_array_equal(first, again)


@given(name, name, st.integers(0, 2**32))
def test_each_name_has_a_stream_of_its_own(one: str, other: str, seed: int) -> None:
    first = generator(seed, one).random(4)
    assert (first == generator(seed, other).random(4)).all() == (one == other)
    assert not (first == generator(seed + 1, one).random(4)).all()


def test_the_stream_is_fixed_for_good() -> None:
    drawn = Normal(1.0).draw(generator(0, "embedding.weight"), (3,))
    np.testing.assert_allclose(drawn, [-0.21222205, -0.8957783, -0.77252698], rtol=1e-6)


def test_spread_is_what_it_says() -> None:
    drawn = Normal(0.5).draw(generator(1, "a"), (200, 200))
    assert drawn.std() == pytest.approx(0.5, rel=0.02)
    assert drawn.mean() == pytest.approx(0, abs=0.01)
    drawn = Uniform(0.5).draw(generator(1, "a"), (200, 200))
    assert -0.5 <= drawn.min() < -0.499
    assert 0.499 < drawn.max() <= 0.5
    assert not zeros.draw(generator(1, "a"), (2, 2)).any()
    assert ones.draw(generator(1, "a"), (2, 2)).all()


def test_a_plugins_function_draws() -> None:
    drawn = Referenced(reference_of(counting), (("start", 2),)).draw(generator(0, "a"), (2, 2))
    assert drawn.dtype == np.float32
    assert drawn.tolist() == [[2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (flat, r"flat returned shape \(1,\), not \(2, 2\)"),
        (not_numbers, "not_numbers returned NaN or infinity"),
    ],
)
def test_what_a_function_may_not_return_is_refused(function: Init, said: str) -> None:
    with pytest.raises(PlanError, match=said) as refused:
        Referenced(reference_of(function)).draw(generator(0, "a"), (2, 2))
    assert "test_init.py:" in str(refused.value.where)


@given(init)
def test_an_initialiser_is_data(init: Init) -> None:
    data = json.loads(json.dumps(init.data(), allow_nan=False))
    assert data["init"] == type(init).__name__.lower()
    assert len(data) == 2


@dataclass(frozen=True)
class Counted(Init):
    """Uniform numbers, whose shapes are noted when they are drawn."""

    begun: list[tuple[int, ...]]

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        self.begun.append(shape)
        return rng.random(shape, dtype=np.float32)


class Many(Module):
    """Three times as many parameters as are drawn at the same time, and a few more."""

    def __init__(self) -> None:
        super().__init__()
        for index in range(3 * AT_ONCE + 2):
            setattr(self, f"p{index}", Param((index + 1, 2), init=zeros, role="scalar"))


def test_arrays_are_drawn_in_threads_a_few_at_a_time_and_in_order() -> None:
    many, begun = Many(), list[tuple[int, ...]]()
    names = [name for name, *_ in declared(many, Param)]
    inits = dict.fromkeys(names, Counted(begun))
    found = [
        (attribute, value, len(begun)) for _, attribute, value in initial_values(many, inits, 3)
    ]
    assert [attribute for attribute, *_ in found] == names
    for count, (attribute, value, drawn) in enumerate(found):
        assert drawn <= (count // AT_ONCE + 1) * AT_ONCE
        exact = generator(3, attribute).random(value.shape, dtype=np.float32)
        np.testing.assert_array_equal(value, exact)
    assert sorted(begun) == [(index + 1, 2) for index in range(len(names))]
