"""Runs of a study on several devices at once: a process per device, each with a study of its own.

A process gets a run as the text of a settings file and plans it itself, so nothing but text passes between
processes. Only the parent writes files: a process that is killed loses the run that it trains.
"""

from __future__ import annotations

import multiprocessing
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Self

from minillm_core import (
    Interrupted,
    MinillmError,
    NonFinite,
    OutOfMemory,
    Plan,
    Refusal,
    build_plan,
)
from minillm_core.inspection import Detected, probe
from minillm_core.studies import (
    RunRequest,
    StopRequest,
    prepare,
    replace_file,
    settings_file,
)
from minillm_lab.study import Study, Trained, bind, graph_of, open_corpus

KINDS = {one.__name__: one for one in (NonFinite, OutOfMemory)}
"""Errors of a run that some studies count as its outcome."""

POLL = 0.2
"""Seconds between two looks for a signal while runs are trained."""


@dataclass(frozen=True)
class Wanted:
    """A run to train."""

    label: str  # on a display
    plan: Plan
    seed: int
    evaluations: int
    file: str  # of the study's folder, for its figures
    identity: Mapping[str, Any]  # what must be equal for runs to be comparable


@dataclass(frozen=True)
class Made:
    """A run that ended, with its figures or its error."""

    wanted: Wanted
    outcome: Trained | MinillmError


class Pool:
    """Processes that train runs, one per device; to be entered as a context.

    Args:
        devices: such as ``("cuda:0", "cuda:1")``.
        plans: whose text all runs read: the corpus has the special tokens of all of them.
        backend: the framework of all runs.
        cache: the token cache, which holds the text already.
        stop: a signal that ends all runs.

    Raises:
        MinillmError: on entry: a process cannot use its device, or the devices are of several kinds.
    """

    def __init__(
        self,
        devices: Sequence[str],
        plans: Sequence[Plan],
        *,
        backend: str,
        cache: Path,
        stop: StopRequest,
    ) -> None:
        self.devices = tuple(devices)
        self._plans, self._backend, self._cache, self._stop = plans, backend, cache, stop
        self._free: list[Any] = []
        self._device: dict[Any, str] = {}
        self._graph: dict[Any, str] = {}  # of the last run of each process, which keeps it compiled
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
                ours.send([_text_of(plan) for plan in self._plans])
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
        watch: Callable[[Sequence[Wanted], float], None],
    ) -> Iterator[Made]:
        """Train runs, each on the next free device, and yield them as they end.

        A device prefers runs of the graph that it has compiled, and then a graph that no other device has:
        compiling may take longer than a run.

        Args:
            wanted: the runs; within these preferences the first ones first.
            watch: called with the runs under way and their mean progress, 0..1.

        Raises:
            Interrupted: a signal; the runs under way are lost.
            MinillmError: a process ended.
        """
        left, running = [(one, graph_of(one.plan)) for one in wanted], dict[Any, Wanted]()
        progress: dict[Any, float] = {}
        while left or running:
            while left and self._free:
                connection = self._free.pop(0)
                one = running[connection] = self._next(connection, left)
                progress[connection] = 0.0
                asked = {"seed": one.seed, "evaluations": one.evaluations, "hash": one.plan.hash}
                connection.send(_text_of(one.plan) | asked)
            watch([*running.values()], sum(progress.values()) / len(progress))
            for connection in wait([*running], timeout=POLL):
                answer = self._received(connection)
                progress[connection] = answer.get("progress", 1.0)
                if "progress" not in answer:
                    self._free.append(connection)
                    yield Made(running.pop(connection), _outcome(answer))
                    del progress[connection]
            if self._stop.requested:
                raise Interrupted("ended by a signal; the runs under way are lost")

    def _next(self, connection: Any, left: list[tuple[Wanted, str]]) -> Wanted:
        """Take the run out of those left that a process trains next."""
        others = {graph for one, graph in self._graph.items() if one is not connection}
        own = self._graph.get(connection)
        ranked = sorted(left, key=lambda one: (one[1] != own, one[1] in others))  # stable
        left.remove(ranked[0])
        one, self._graph[connection] = ranked[0]
        return one

    def _ready(self, connection: Any) -> str:
        """Wait until a process can train; return the kind of its device."""
        while not connection.poll(POLL):
            if self._stop.requested:
                raise Interrupted("ended by a signal; no run was begun")
        answer = self._received(connection)
        if "failed" in answer:
            raise _outcome(answer)
        return answer["device"]

    def _received(self, connection: Any) -> dict[str, Any]:
        try:
            return connection.recv()
        except (EOFError, ConnectionError):
            raise MinillmError(
                f"the process that trains on {self._device[connection]} ended",
                fix="look for its message above, or for a lack of memory (dmesg)",
            ) from None


def check_devices(devices: Collection[str], detected: Detected) -> None:
    """Check that this machine has the GPUs of ``--gpus``.

    Raises:
        Refusal: it has fewer, or another device was chosen.
    """
    cards, here = sum(one.startswith("cuda") for one in devices), probe().nvidia
    if cards and (detected.device.partition(":")[0] != "cuda" or cards > here):
        raise Refusal(
            f"--gpus {cards} asks for NVIDIA GPUs, and {here} can be used on {detected.device}",
            where=f"--gpus {cards}",
            fix="a smaller number, or leave it out",
        )


def _text_of(plan: Plan) -> dict[str, Any]:
    """Return a plan's settings and single-file plugins, from which another process plans it."""
    files = [one.origin.source for one in plan.active if one.distribution is None]
    assert plan.config is not None
    return {"settings": settings_file(plan.config, ()), "plugins": ",".join(files) or None}


def _outcome(answer: Mapping[str, Any]) -> Any:
    """Return the run of an answer, or its error: of its own class where studies distinguish that."""
    if "run" in answer:
        return Trained.of(answer["run"])
    kind, what, where, fix = answer["failed"]
    return KINDS.get(kind, MinillmError)(what, where=where, fix=fix)


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
                if study is None:  # the first message has the plans whose text is read
                    found = [_planned(one, backend, device) for one in asked]
                    plans, detected = [plan for plan, _ in found], found[0][1]
                    study = Study(open_corpus(plans[0].config, cache=cache, plans=plans), detected)
                    answer: dict[str, Any] = {"device": bind(plans[0], detected).device_name}
                else:
                    plan, _ = _planned(asked, backend, device)
                    if plan.hash != asked["hash"]:
                        raise MinillmError(
                            f"on {device} the settings give another plan: {plan.hash[:12]}"
                        )
                    how = {"evaluations": asked["evaluations"], "watch": watch}
                    answer = {"run": study.train(plan, asked["seed"], **how).data()}
            except MinillmError as error:
                told = type(error).__name__, error.what, error.where, error.fix
                answer = {"failed": told}
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
