"""Steps take their share of the time, on synchronous and queueing devices; the run's results do not change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

import minillm_core as minillm
from minillm_core import Started, Stepped
from minillm_track.throttle import EVERY, MEASURED, Pace, Throttle


class Machine:
    """A simulated clock and device with steps of some seconds, queued or synchronous."""

    def __init__(self, *, queues: bool) -> None:
        self.queues, self.now, self.seconds = queues, 0.0, 1.0
        self.done = 0.0  # time at which the last queued step is done
        self.busy = 0.0  # seconds of computation
        self.slept = 0.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept += seconds
        self.now += seconds

    def queue(self) -> float:
        """Queue a step; return the time at which it is done."""
        self.done = max(self.done, self.now) + self.seconds
        self.busy += self.seconds
        return self.done

    def train(self, pace: Pace, steps: int) -> tuple[float, float]:
        """Run steps; return the total seconds, and those in which the device computed."""
        began, busy = self.now, self.busy
        before = self.queue() if self.queues else 0.0
        for _ in range(steps):
            made = self.queue()  # the loop queues a step, then reads the previous one
            self.now = max(self.now, before if self.queues else made)
            before = made
            pace.step()
        return self.now - began, self.busy - busy


@pytest.mark.parametrize("queues", [False, True])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.8])
def test_steps_take_their_share(queues: bool, share: float) -> None:
    machine = Machine(queues=queues)
    pace = Pace(share, machine.clock, machine.sleep)
    machine.train(pace, MEASURED + 1)
    assert machine.slept == 0
    total, busy = machine.train(pace, EVERY - 2)
    assert busy / total == pytest.approx(share, rel=0.05)
    machine.train(pace, MEASURED + 2)  # measured again
    machine.seconds = 3.0  # another program takes the machine
    machine.train(pace, EVERY + MEASURED)
    total, busy = machine.train(pace, EVERY - MEASURED - 2)
    assert busy / total == pytest.approx(share, rel=0.05)


def test_what_comes_between_steps_is_no_reason_to_wait() -> None:
    machine = Machine(queues=False)
    pace = Pace(0.5, machine.clock, machine.sleep)
    machine.train(pace, MEASURED + 2)
    slept = machine.slept
    machine.now += 60  # an evaluation
    machine.train(pace, 1)
    assert machine.slept == slept
    machine.train(pace, 1)
    assert machine.slept == pytest.approx(slept + 1)


def test_a_run_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("a few words, and more of them\n\n" * 200)
    sizes = {"model.layers": 1, "model.dim": 16, "model.hidden": 32, "model.vocab": 300}
    more = {"train.seq_len": 16, "train.rows": 2, "eval.samples": 0, "backend": "torch"}
    found = []
    for plugins in (None, "throttle"):
        settings = {**sizes, **more, "train.steps": MEASURED + 4, "device": "cpu"}
        loaded = minillm.load("tiny", plugins=plugins, data=text, settings=settings)
        plan = minillm.build_plan(loaded)
        run = minillm.Run(plan)
        losses = [event.loss for event in run.steps() if isinstance(event, Stepped)]
        paces = [one.plugin._pace for one in plan.active]
        assert all(pace.seconds > 0 and pace.left == EVERY - 3 for pace in paces)
        found.append((losses, run.logits([1, 2, 3])))
    (plain, logits), (slowed, same) = found
    assert plain == slowed
    assert len(plain) == MEASURED + 4
    assert np.array_equal(logits, same)


def test_only_steps_count_and_a_share_leaves_something() -> None:
    plugin = Throttle()
    plugin.on_event(Started("hash", 9, 1000))
    assert plugin._pace.last is None
    for share in (0.0, 1.0):
        with pytest.raises(ValidationError):
            Throttle(share=share)
