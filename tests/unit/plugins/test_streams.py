"""Tests of random numbers for on_batch: a stream per plugin, restored from a saved state."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm_core import random_stream
from minillm_core.plugins.streams import Streams

NAMES = ("a", "b", "a.b")
DRAWS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.sampled_from(["", "x"]), st.integers(1, 5)), max_size=20
)


def drawn(
    streams: Streams, plugin: str, name: str, count: int, phase: str = "train"
) -> list[float]:
    with streams.of(plugin, phase):
        random = random_stream(name)
        # of several kinds, so that half-used words of the generator are in its state
        return [*random.random(count), *random.integers(0, 7, count, dtype="uint8").tolist()]


@settings(max_examples=50, deadline=None)
@given(before=DRAWS, after=DRAWS, seed=st.integers(0, 2**40))
def test_they_go_on_from_a_state_that_went_through_json(
    before: list, after: list, seed: int
) -> None:
    streams = Streams(seed)
    for one in before:
        drawn(streams, *one)
    again = Streams(seed, json.loads(json.dumps(streams.data())))
    assert [drawn(streams, *one) for one in after] == [drawn(again, *one) for one in after]
    assert streams.data() == again.data()


@settings(max_examples=30, deadline=None)
@given(others=DRAWS)
def test_nobody_else_moves_them(others: list) -> None:
    streams, alone = Streams(3), Streams(3)
    for plugin, name, count in others:
        drawn(streams, f"other.{plugin}", name, count)
        drawn(streams, "mine", "", count, phase="eval")
    assert drawn(streams, "mine", "", 4) == drawn(alone, "mine", "", 4)


def test_seeds_plugins_and_names_are_told_apart() -> None:
    found = [
        drawn(Streams(seed), plugin, name, 4)
        for seed in (0, 1)
        for plugin in ("a", "b")
        for name in ("", "x")
    ]
    assert len({tuple(one) for one in found}) == len(found)


def test_other_phases_begin_anew_and_leave_no_trace() -> None:
    streams = Streams(0)
    first = drawn(streams, "a", "", 4, phase="eval")
    assert drawn(streams, "a", "", 4, phase="eval") == first
    assert drawn(streams, "a", "", 4, phase="decode") != first
    assert streams.data() == {}


def test_there_is_none_outside_of_on_batch() -> None:
    with pytest.raises(RuntimeError, match="on_batch"):
        random_stream()
    with Streams(0).of("a", "train"):
        random_stream()
    with pytest.raises(RuntimeError, match="on_batch"):
        random_stream()
