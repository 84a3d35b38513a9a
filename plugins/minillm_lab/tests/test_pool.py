"""Tests of processes that share a device: they compile side by side and train in turns."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from multiprocessing import Pipe, get_context
from pathlib import Path
from typing import Any

import pytest

from minillm_core import OutOfMemory, Plan, Refusal, build_plan
from minillm_core.inspection import Machine
from minillm_core.studies import Detected, StopRequest
from minillm_lab.cli.devices import cards
from minillm_lab.pool import (
    GO,
    RELEASE,
    Made,
    Pool,
    State,
    Wanted,
    _interrupt_blocked,
    check_devices,
    processes_for,
    shared,
)
from minillm_lab.study import Trained


class Process(threading.Thread):
    """A process of a pool without a framework, which records what it does and when.

    Args:
        ours: its end of the connection.
        log: (name, what, began, ended).
        full: seeds of runs that run out of memory.
        alone: they do where the others have released theirs too.
    """

    def __init__(
        self, name: str, ours: Any, log: list[Any], full: set[int], *, alone: bool
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.ours, self.log, self.full, self.alone = ours, log, full, alone

    def run(self) -> None:
        kept = None
        while (asked := self.ours.recv()) is not None:
            if asked == RELEASE:
                self.log.append((self.name, "releases", time.monotonic(), time.monotonic()))
                continue
            self._does("prepares" if asked["settings"] == kept else "compiles", 0.03)
            kept = asked["settings"]
            if measured := asked.get("pace", 0.0) is None:
                self._in_turn("measures", 0.01)
            self._in_turn("trains", 0.02)
            released = any(one[1] == "releases" for one in self.log)
            if asked["seed"] in self.full and (self.alone or not released):
                answer: dict[str, Any] = {"failed": ("OutOfMemory", "it is full", "", "")}
            else:
                run = Trained(asked["seed"], 1, 1, 1.0, 1.0, None, ())
                answer = {"run": run.data()} | ({"pace": 0.1} if measured else {})
            self.ours.send(answer)

    def _in_turn(self, what: str, seconds: float) -> None:
        self.ours.send({"ready": True})
        assert self.ours.recv() == GO
        self._does(what, seconds)
        self.ours.send({"left": True})

    def _does(self, what: str, seconds: float) -> None:
        began = time.monotonic()
        time.sleep(seconds)
        self.log.append((self.name, what, began, time.monotonic()))


@pytest.fixture
def train(asked: Any, tmp_path: Path) -> Callable[..., tuple[list[Made], list[Any]]]:
    """Return a function that trains runs (layers, seed) in two processes of one device."""

    def plan(layers: int) -> Plan:
        return build_plan(*asked(settings=[f"model.layers={layers}"]))

    def train(
        runs: Sequence[tuple[int, int]],
        full: set[int],
        *,
        alone: bool = False,
        timed: bool = True,
    ) -> tuple[list[Made], list[Any]]:
        plans = {layers: plan(layers) for layers, _ in runs}
        pool = Pool(("gpu",), [], backend="torch", cache=tmp_path, stop=StopRequest(), each=2)
        log: list[Any] = []
        for name in ("first", "second"):
            theirs, ours = Pipe()
            Process(name, ours, log, full, alone=alone).start()
            pool._device[theirs] = "gpu"
        pool._state = dict.fromkeys(pool._device, State.FREE)
        wanted = [
            Wanted(f"{layers} layers", plans[layers], seed, 1, f"{layers}-{seed}", {}, timed)
            for layers, seed in runs
        ]
        compiling: list[int] = []
        made = list(
            pool.train(wanted, watch=lambda under_way, progress: compiling.append(pool.compiling))
        )
        assert max(compiling) > 0
        assert not compiling[-1]
        for connection in pool._device:
            connection.send(None)
        return made, log

    return train


def overlapping(log: Sequence[Any], what: str, other: str) -> bool:
    """Return whether one process did something while another did something else."""
    return any(
        one[0] != two[0]
        and one[1] == what
        and two[1] == other
        and one[2] < two[3]
        and two[2] < one[3]
        for one in log
        for two in log
    )


def test_they_compile_side_by_side_and_train_in_turns(train: Any) -> None:
    runs = [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (4, 0)]
    made, log = train(runs, set())
    assert {(one.wanted.file, one.outcome.seed) for one in made} == {
        (f"{layers}-{seed}", seed) for layers, seed in runs
    }
    assert overlapping(log, "compiles", "compiles")
    assert not overlapping(log, "trains", "trains")
    assert not overlapping(log, "compiles", "trains")


def test_the_next_run_of_a_graph_is_prepared_while_another_trains(train: Any) -> None:
    made, log = train([(layers, seed) for seed in range(4) for layers in (1, 2)], set())
    assert len(made) == 8
    assert [what for _, what, *_ in log].count("compiles") == 2
    assert overlapping(log, "prepares", "trains")
    assert not overlapping(log, "trains", "trains")
    assert not overlapping(log, "compiles", "trains")
    names = [name for name, what, *_ in log if what == "trains"]
    assert sum(one != other for one, other in pairwise(names)) >= 3  # by turns


def test_beside_a_run_by_pace_others_compile_and_share_its_graph(train: Any) -> None:
    runs = [(1, seed) for seed in range(14)] + [(2, 0), (3, 0)]
    made, log = train(runs, set(), timed=False)
    assert len(made) == 16
    assert overlapping(log, "compiles", "trains")
    for one, other in (("trains", "trains"), ("measures", "trains"), ("measures", "measures")):
        assert not overlapping(log, one, other)
    assert [what for _, what, *_ in log].count("measures") == 3  # once for each graph
    assert [what for _, what, *_ in log].count(
        "compiles"
    ) == 4  # that of many runs by both processes


def test_a_run_that_lacks_memory_beside_others_has_the_device_to_itself(train: Any) -> None:
    made, log = train([(1, 0), (2, 7), (3, 0)], {7})
    assert all(isinstance(one.outcome, Trained) for one in made)
    assert [one[1] for one in log].count("releases") == 1
    (released,) = (one for one in log if one[1] == "releases")
    began, ended = (
        next(
            one for one in log if one[0] != released[0] and one[1] == what and one[3] > released[2]
        )
        for what in ("compiles", "trains")
    )
    beside = [one for one in log if one[0] == released[0] and one is not released]
    assert not any(one[2] < ended[3] and began[2] < one[3] for one in beside)


def test_a_run_that_lacks_memory_alone_too_is_a_finding(train: Any) -> None:
    made, log = train([(1, 0), (2, 7)], {7}, alone=True)
    found = {one.wanted.seed: one.outcome for one in made}
    assert isinstance(found[7], OutOfMemory)
    assert isinstance(found[0], Trained)
    assert [one[1] for one in log].count("trains") == 3  # it was tried again once


def test_ctrl_c_does_not_end_a_process_that_is_starting() -> None:
    """The parent ends it: a terminal sends Ctrl-C to both."""
    process = get_context("spawn").Process(target=time.sleep, args=(0.1,))
    with _interrupt_blocked():
        process.start()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    process.join()
    assert process.exitcode == 0
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.parametrize(
    ("peak", "memory", "cores", "devices", "expected"),
    [
        (14 << 30, 80 << 30, 16, 1, 4),
        (14 << 30, 140 << 30, 16, 1, 5),
        (60 << 30, 80 << 30, 16, 1, 1),
        (1 << 30, 80 << 30, 4, 1, 1),
        (1 << 30, 80 << 30, 32, 4, 2),
        (None, 80 << 30, 16, 1, 1),
    ],
)
def test_memory_and_cores_bound_the_processes_of_a_device(
    monkeypatch: Any, peak: int | None, memory: int, cores: int, devices: int, expected: int
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert processes_for(["gpu"] * devices, peak, memory) == expected


@pytest.mark.parametrize(
    ("gpus", "processes", "device", "compiled", "expected"),
    [
        ((), None, "cuda:0", True, (("cuda:0",), 4)),
        ((), None, "cuda:0", False, None),
        ((), None, "cpu", True, None),
        ((), 1, "cuda:0", True, None),
        ((), 2, "cpu", False, (("cpu",), 2)),
        (("cuda:0", "cuda:1"), None, "cuda:0", True, (("cuda:0", "cuda:1"), 2)),
        (("cuda:0", "cuda:1"), None, "cuda:0", False, (("cuda:0", "cuda:1"), 1)),
        (("cuda:0", "cuda:1"), 3, "cuda:0", True, (("cuda:0", "cuda:1"), 3)),
    ],
)
def test_compiled_runs_share_a_gpu_unless_the_processes_are_given(
    monkeypatch: Any,
    gpus: tuple[str, ...],
    processes: int | None,
    device: str,
    compiled: bool,
    expected: Any,
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 12)
    about = {"device": device, "compiled": compiled, "peak": 1 << 30, "memory": 80 << 30}
    assert shared(gpus, processes, **about) == expected


def test_gpus_beside_the_number_of_one_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minillm_lab.pool.probe", lambda: Machine(nvidia=4))
    check_devices(cards(4), Detected("torch", "cuda", "the test says so"))
    check_devices(cards(None), Detected("torch", "cuda:3", "the test says so"))
    with pytest.raises(Refusal, match="--gpus 2 uses cuda:0 to cuda:1") as refused:
        check_devices(cards(2), Detected("torch", "cuda:3", "the test says so"))
    assert refused.value.where == "--gpus 2 --device cuda:3"
    assert refused.value.fix == "leave --device out, or CUDA_VISIBLE_DEVICES=3"
