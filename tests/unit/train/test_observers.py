"""Tests of failing observers: a plugin's is reported and the run continues, the core's ends the run."""

from __future__ import annotations

from collections import Counter

import pytest

from minillm_core.errors import PluginCodeError
from minillm_core.train.events import Ended, Evaluated, Event, Started
from minillm_core.train.hooks import STRIKES, Observers

EVENT = Ended(1, 0, 1.0)


@pytest.fixture
def said() -> list[str]:
    return []


def failing(error: BaseException, calls: list[Event]):
    def observe(event: Event) -> None:
        calls.append(event)
        raise error

    return observe


def test_three_errors_switch_it_off(said: list[str]) -> None:
    seen: Counter[str] = Counter()
    bad: list[Event] = []
    good: list[Event] = []
    observers = Observers(
        [],
        {"bad": failing(ValueError("no \x1b[31mluck"), bad), "good": good.append},
        say=said.append,
        seen=seen,
    )
    for _ in range(STRIKES + 2):
        observers(EVENT)
    assert len(bad) == STRIKES
    assert len(good) == STRIKES + 2
    assert seen == {"event:good": STRIKES + 2}
    assert len(said) == STRIKES + 1
    assert "'bad' raised in on_event for 'end' (1 of 3): ValueError: no luck" in said[0]
    assert "gets no more" in said[-1]


def test_noting_the_start_is_no_evidence(said: list[str]) -> None:
    seen: Counter[str] = Counter()
    observers = Observers([], {"late": [].append}, say=said.append, seen=seen)
    observers(Started("hash", 10, 100))
    assert not seen["event:late"]
    observers(EVENT)
    assert seen["event:late"] == 1


def test_an_observer_that_recovers_stays(said: list[str]) -> None:
    calls: list[Event] = []

    def flaky(event: Event) -> None:
        calls.append(event)
        if len(calls) <= STRIKES - 1:
            raise ValueError("not yet")

    observers = Observers([], {"flaky": flaky}, say=said.append, seen=Counter())
    for _ in range(10):
        observers(EVENT)
    assert len(calls) == 10


def test_the_cause_is_shown_where_the_manager_wrapped_it(said: list[str]) -> None:
    def wrapped(event: Event) -> None:
        try:
            raise KeyError("what it raised")
        except KeyError as error:
            raise PluginCodeError("bad", "on_event") from error

    Observers([], {"bad": wrapped}, say=said.append, seen=Counter())(EVENT)
    assert "KeyError: 'what it raised'" in said[0]


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_a_plugin_s_observer_cannot_end_the_run(said: list[str], kind: type) -> None:
    def wrapped(event: Event) -> None:
        try:
            raise kind(0)
        except BaseException as error:
            raise PluginCodeError("bad", "on_event") from error

    observers = Observers([], {"bad": wrapped}, say=said.append, seen=Counter())
    for _ in range(4):
        observers(EVENT)
    assert f"{kind.__name__}: 0" in said[0]
    assert "gets no more events" in said[-1]
    assert len(said) == 4


def test_the_core_is_told_first_and_must_not_fail(said: list[str]) -> None:
    order: list[str] = []
    observers = Observers(
        [lambda event: order.append("core")],
        {"b": lambda event: order.append("b"), "a": lambda event: order.append("a")},
        say=said.append,
        seen=Counter(),
    )
    observers(EVENT)
    assert order == ["core", "a", "b"]

    broken = Observers([failing(OSError("disk full"), [])], {}, say=said.append, seen=Counter())
    with pytest.raises(OSError, match="disk full"):
        broken(EVENT)


def test_what_one_does_to_an_event_nobody_else_sees(said: list[str]) -> None:
    def spoil(event: Event) -> None:
        object.__setattr__(event, "step", -1)

    seen: list[int] = []

    def see(event: Event) -> None:
        assert isinstance(event, Evaluated)
        seen.append(event.step)

    observers = Observers(
        [],
        {"a": spoil, "b": see},
        say=said.append,
        seen=Counter(),
    )
    event = Evaluated(7, 1.0, None)
    observers(event)
    assert (seen, event.step, said) == ([7], 7, [])
