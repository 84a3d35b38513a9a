"""Tests that hanging plugin code is reported during the hang, at growing intervals, and nothing else."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from minillm_core.config.selection import FileSpec
from minillm_core.errors import PluginCodeError
from minillm_core.plugins import watch
from minillm_core.plugins.attribution import at_work, attribute_errors
from minillm_core.plugins.manager import load
from minillm_core.plugins.watch import Watch, running, watching


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def looking(said: list[str], clock: Clock) -> Iterator[Watch]:
    """Build a watch that checks on demand."""
    made = Watch(said.append, clock=clock)
    made._start = lambda: None  # type: ignore[method-assign]
    yield made
    made.close()


def pass_seconds(clock: Clock, looking: Watch, seconds: int) -> None:
    for _ in range(seconds):
        clock.now += 1
        looking.look()


def test_it_is_said_after_ten_seconds_and_then_ever_more_rarely(
    looking: Watch, clock: Clock, said: list[str]
) -> None:
    with looking.running("plugin 'x', build_model"):
        pass_seconds(clock, looking, 9)
        assert said == []
        pass_seconds(clock, looking, 81)
    pass_seconds(clock, looking, 100)
    assert said == [
        "plugin 'x', build_model: running for 10 s (Ctrl-C twice ends the run)",
        *(f"plugin 'x', build_model: running for {n} s" for n in (20, 40, 80)),
    ]


def test_who_waits_is_named_with_what_it_waits_for(
    looking: Watch, clock: Clock, said: list[str]
) -> None:
    waits = looking.running("step 7 waits for its batch", waits=True)
    with looking.running("plugin 'x', on_batch"), waits:
        pass_seconds(clock, looking, 10)
    assert [line.partition(" (")[0] for line in said] == [
        "plugin 'x', on_batch: running for 10 s; step 7 waits for its batch"
    ]


@pytest.mark.parametrize("later", [-2, -1, 0, 1, 2])
def test_a_hang_is_told_once_whoever_began_first(
    looking: Watch, clock: Clock, said: list[str], later: int
) -> None:
    both = [
        looking.running("plugin 'x', on_batch"),
        looking.running("step 7 waits for its batch", waits=True),
    ]
    first, second = both if later < 0 else reversed(both)
    with first:
        pass_seconds(clock, looking, abs(later))
        with second:
            pass_seconds(clock, looking, 60)
    assert [line.partition(":")[0] for line in said] == ["plugin 'x', on_batch"] * 3
    assert all("; step 7 waits for its batch" in line for line in said)


def test_many_short_calls_do_not_hide_a_wait(looking: Watch, clock: Clock, said: list[str]) -> None:
    with looking.running("step 7 waits for its batch", waits=True):
        for _ in range(8):
            with looking.running("plugin 'x', on_batch"):
                pass_seconds(clock, looking, 4)
    assert [line.partition(" (")[0] for line in said] == [
        f"step 7 waits for its batch: for {n} s" for n in (10, 20)
    ]


def test_a_wait_for_no_plugin_is_said_too(looking: Watch, clock: Clock, said: list[str]) -> None:
    with looking.running("step 7 waits for its batch", waits=True):
        pass_seconds(clock, looking, 10)
    assert said[0].startswith("step 7 waits for its batch: for 10 s")


def test_what_may_take_long_is_given_time(looking: Watch, clock: Clock, said: list[str]) -> None:
    with looking.running("a slow step", after=30.0), looking.running(lambda: None):
        pass_seconds(clock, looking, 29)
        assert said == []
        pass_seconds(clock, looking, 1)
    assert len(said) == 1


def test_another_thread_says_it_of_this_one_and_of_those_in_its_context(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_LOOK_SECONDS", 0.005)
    heard = threading.Event()

    def hear(text: str) -> None:
        said.append(text)
        heard.set()

    def hang() -> None:
        with running("in a thread"):
            heard.wait(10)

    with watching(hear, first=0.0):
        thread = threading.Thread(target=contextvars.copy_context().run, args=(hang,))
        thread.start()
        thread.join(10)
    assert said[0].startswith("in a thread: running for")
    assert not [one for one in threading.enumerate() if one.name == "minillm-watch"]


def test_an_interrupt_while_its_thread_starts_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt), watching(print), running("a hook"):
        pass


def test_without_a_watch_nothing_is_noted() -> None:
    with running("anything"):
        assert not [one for one in threading.enumerate() if one.name == "minillm-watch"]


def test_the_plugin_on_the_stack_is_named(tmp_path: Path) -> None:
    source = """
    from minillm_core import Plugin

    class Trick(Plugin, api=1):
        def on_event(self, event):
            return within(event)

    def within(event):
        return event()
    """
    file = tmp_path / "trick.py"
    file.write_text("\n".join(line[4:] for line in source.splitlines()))
    plugins = load([FileSpec(str(file), "Trick")])
    asked = at_work(plugins)
    assert asked("at step 7") is None
    told = plugins[0].plugin.on_event(event=lambda: asked("at step 7"))  # type: ignore[attr-defined]
    assert told == f"plugin 'trick', Trick.on_event, at step 7 ({file}:9)"
    # beside another plugin of its package, whose code is within the same folder
    trick = replace(plugins[0], root=str(tmp_path))
    other = replace(trick, name="other", file=str(tmp_path / "other.py"))
    for pair in ((trick, other), (other, trick)):
        asked = at_work(pair)
        assert told == trick.plugin.on_event(event=lambda asked=asked: asked("at step 7"))  # type: ignore[attr-defined]
        with pytest.raises(PluginCodeError) as raised, attribute_errors(pair, "in a step"):
            trick.plugin.on_event(event=lambda: 1 / 0)  # type: ignore[attr-defined]
        assert raised.value.plugin == "trick"
