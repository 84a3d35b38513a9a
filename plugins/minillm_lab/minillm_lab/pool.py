"""Runs of a study on several devices at once: a process per device, each with a study of its own.

A process gets a run as the text of a settings file and plans it itself, so nothing but text passes between
processes. Only the parent writes files: a process that is killed loses the run that it trains.
"""

from __future__ import annotations

import multiprocessing
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Self

from minillm_core import Interrupted, MinillmError, Plan, build_plan
from minillm_core.commands import few
from minillm_core.studies import (
    RunRequest,
    StopRequest,
    prepare,
    replace_file,
    settings_file,
)
from minillm_lab.study import Study, Trained, bind, open_corpus

POLL = 0.2
"""Seconds between two looks for a signal while runs are trained."""


@dataclass(frozen=True)
class Wanted:
    """A run to train: its label on a display, its plan and its seed."""

    label: str
    plan: Plan
    seed: int


@dataclass(frozen=True)
class Made:
    """A run that ended: the request, and the run or the reason of its failure."""

    wanted: Wanted
    outcome: Trained | str


class Pool:
    """Processes that train runs, one per device; to be entered as a context.

    Args:
        devices: such as ``("cuda:0", "cuda:1")``.
        base: the plan whose text all runs read.
        backend: the framework of all runs.
        cache: the token cache, which holds the text already.
        stop: a signal that ends all runs.

    Raises:
        MinillmError: on entry: a process cannot use its device, or the devices are of several kinds.
    """

    def __init__(
        self, devices: Sequence[str], base: Plan, *, backend: str, cache: Path, stop: StopRequest
    ) -> None:
        self.devices = tuple(devices)
        self._base, self._backend, self._cache, self._stop = base, backend, cache, stop
        self._free: list[Any] = []
        self._device: dict[Any, str] = {}
        self._context = ExitStack()

    def __enter__(self) -> Self:
        spawn = multiprocessing.get_context("spawn")  # a fork would share the parent's CUDA context
        with self._context as context:
            for device in self.devices:
                ours, theirs = spawn.Pipe()
                process = spawn.Process(
                    target=serve, args=(theirs, self._backend, device, self._cache)
                )
                process.start()
                theirs.close()
                context.callback(process.join)
                context.callback(process.terminate)
                self._device[ours] = device
                ours.send(_text_of(self._base))
            kinds = {self._device[one]: self._ready(one) for one in self._device}
            if len({*kinds.values()}) > 1:
                raise MinillmError(
                    "runs on cards of several kinds cannot be compared",
                    where=", ".join(f"{device}: {kind}" for device, kind in kinds.items()),
                    fix="CUDA_VISIBLE_DEVICES with cards of one kind, or fewer --gpus",
                )
            self._free = [*self._device]
            self._context = context.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._context.close()

    def train(
        self,
        wanted: Sequence[Wanted],
        *,
        evaluations: int,
        watch: Callable[[str, float], None],
    ) -> Iterator[Made]:
        """Train runs, each on the next free device, and yield them as they end.

        Args:
            wanted: the runs, the first ones first.
            evaluations: of each run.
            watch: called with the labels of the runs under way, and their mean progress, 0..1.

        Raises:
            Interrupted: a signal; the runs under way are lost.
            MinillmError: a process ended.
        """
        left, running = list(wanted), dict[Any, Wanted]()
        progress: dict[Any, float] = {}
        while left or running:
            while left and self._free:
                one, connection = left.pop(0), self._free.pop(0)
                running[connection], progress[connection] = one, 0.0
                asked = {"seed": one.seed, "evaluations": evaluations, "hash": one.plan.hash}
                connection.send(_text_of(one.plan) | asked)
            labels = few([*dict.fromkeys(one.label for one in running.values())])
            watch(labels, sum(progress.values()) / len(progress))
            for connection in wait([*running], timeout=POLL):
                answer = self._received(connection)
                progress[connection] = answer.get("progress", 1.0)
                if "progress" not in answer:
                    self._free.append(connection)
                    outcome = answer.get("failed") or Trained.of(answer["run"])
                    yield Made(running.pop(connection), outcome)
                    del progress[connection]
            if self._stop.requested:
                raise Interrupted("ended by a signal; the runs under way are lost")

    def _ready(self, connection: Any) -> str:
        """Wait until a process can train; return the kind of its device."""
        while not connection.poll(POLL):
            if self._stop.requested:
                raise Interrupted("ended by a signal; no run was begun")
        answer = self._received(connection)
        if "failed" in answer:
            raise MinillmError(answer["failed"], where=f"the process of {self._device[connection]}")
        return answer["device"]

    def _received(self, connection: Any) -> dict[str, Any]:
        try:
            return connection.recv()
        except (EOFError, ConnectionError):
            raise MinillmError(
                f"the process that trains on {self._device[connection]} ended",
                fix="look for its message above, or for a lack of memory (dmesg)",
            ) from None


def _text_of(plan: Plan) -> dict[str, Any]:
    """Return a plan's settings and single-file plugins, from which another process plans it."""
    files = [one.origin.source for one in plan.active if one.distribution is None]
    assert plan.config is not None
    return {"settings": settings_file(plan.config, ()), "plugins": ",".join(files) or None}


def serve(parent: Any, backend: str, device: str, cache: Path) -> None:
    """Train the runs that the parent sends until it closes the connection; the body of a process.

    Args:
        parent: gives the settings of each run, and gets its figures, its progress or its error.
        backend: the framework.
        device: of all runs.
        cache: the token cache.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to the parent too
    study: Study | None = None
    shown = 0.0

    def watch(progress: float) -> None:
        nonlocal shown
        if time.monotonic() - shown > POLL:
            shown = time.monotonic()
            parent.send({"progress": progress})

    with suppress(EOFError, ConnectionError):  # the parent has closed the connection, or was killed
        while True:
            asked = parent.recv()
            try:
                plan, detected = _planned(asked, backend, device)
                if study is None:
                    corpus = open_corpus(plan.config, cache=cache, plans=[plan])
                    study = Study(corpus, detected)
                    answer: dict[str, Any] = {"device": bind(plan, detected).device_name}
                elif plan.hash != asked["hash"]:
                    raise MinillmError(
                        f"on {device} the settings give another plan: {plan.hash[:12]}"
                    )
                else:
                    how = {"evaluations": asked["evaluations"], "watch": watch}
                    answer = {"run": study.train(plan, asked["seed"], **how).data()}
            except MinillmError as error:
                answer = {"failed": error.what}
            parent.send(answer)


def _planned(asked: Mapping[str, Any], backend: str, device: str) -> tuple[Plan, Any]:
    """Plan the settings that the parent sent, on this process's device."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.toml"
        replace_file(file, asked["settings"].encode())
        request = RunRequest(
            file=file,
            plugins=asked["plugins"],
            settings={"backend": backend, "device": device},
        )
        prepared = prepare(request, to_run=True)
    return build_plan(prepared.loaded, prepared.plugins), prepared.detected
