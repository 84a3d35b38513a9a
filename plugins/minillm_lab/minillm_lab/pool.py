"""Runs of a study in several processes: on several devices at once, and several that share a device in turns.

A process gets a run as the text of a settings file and plans it itself, so nothing but text passes between
processes. Only the parent writes files: a process that is killed loses the run that it trains.

The processes of one device compile side by side, and train one after the other. While one trains,
another may draw the initial weights of a run whose graph it has compiled already.

- A run that is timed trains while no other process of its device compiles or trains.
- A run by pace has its number of steps fixed by the time of a step, which is measured once for each graph.
  So others may compile while it trains, which would make a timed run slower and so shorter.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from multiprocessing import resource_tracker
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
from minillm_lab.study import Study, Trained, at_pace, bind, graph_of, open_corpus

KINDS = {one.__name__: one for one in (NonFinite, OutOfMemory)}
"""Errors of a run that some studies count as its outcome."""

POLL = 0.2
"""Seconds between two looks for a signal while runs are trained."""

ENDING = 2.0
"""Seconds that a process has to end by itself: one that is terminated leaves the framework's semaphores."""

MOST, CORES = 5, 3
"""Maximum number of processes that share a device, and the number of cores for each of them."""

SHARED = 3
"""Number of runs of a graph, left to train, from which several processes compile it (which a cache shortens)."""

MARGIN, CONTEXT = 1.25, 1 << 30
"""Memory for a process that shares a device: a factor on the measured peak, and bytes of the driver's own."""

GO, RELEASE = "go", "release"
"""What the parent answers a process that waits for its turn, and asks of one that has to free its memory."""


@dataclass(frozen=True)
class Wanted:
    """A run to train."""

    label: str  # on a display
    plan: Plan
    seed: int
    evaluations: int
    file: str  # of the study's folder, for its figures
    identity: Mapping[str, Any]  # what must be equal for runs to be comparable
    timed: bool = True
    """False: its minutes are converted to steps, by the time of a step of its graph."""


@dataclass(frozen=True)
class Made:
    """A run that ended, with its figures or its error."""

    wanted: Wanted
    outcome: Trained | MinillmError


class State(Enum):
    """What a process does."""

    FREE = "free"
    COMPILING = "compiling"
    PREPARING = "preparing"
    """It draws the initial weights of a run whose graph it has compiled before, or ends a run."""
    READY = "ready"
    """It waits for its turn."""
    TRAINING = "training"
    """It trains, or measures the time of a step."""


def shared(
    devices: Sequence[str],
    processes: int | None,
    *,
    device: str,
    compiled: bool,
    peak: int | None,
    memory: int | None,
) -> tuple[tuple[str, ...], int] | None:
    """Return the devices of a study's pool and the number of processes for each; None: no pool.

    Compiling takes longer than a short run, so that runs that are compiled for a GPU share it by default.

    Args:
        devices: those of ``--gpus``, or none.
        processes: those of ``--processes``; None: as many as memory and cores allow.
        device: of the study's runs, without ``--gpus``.
        compiled: whether their steps are compiled.
        peak: bytes of a run's peak memory; None: unknown.
        memory: bytes of a device; None: unknown.
    """
    here = tuple(devices) or (device,)
    each = processes
    if each is None:
        each = processes_for(here, peak, memory) if compiled and device.startswith("cuda") else 1
    return (here, each) if devices or each > 1 else None


def processes_for(devices: Sequence[str], peak: int | None, memory: int | None) -> int:
    """Return how many processes may share each device: as many as its memory and the cores allow.

    Args:
        devices: the devices.
        peak: bytes of a run's peak memory; None: unknown.
        memory: bytes of one device; None: unknown.
    """
    if peak is None or memory is None:
        return 1
    cores = os.cpu_count() or 1
    fitting = int(memory / (MARGIN * peak + CONTEXT))
    return max(1, min(MOST, fitting, cores // (CORES * len(devices))))


class Pool:
    """Processes that train runs, one or several per device; to be entered as a context.

    Args:
        devices: such as ``("cuda:0", "cuda:1")``.
        each: number of processes that share each device. One that runs out of memory beside others has its
            run trained again with the device to itself.
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
        each: int = 1,
    ) -> None:
        self.devices, self.each = tuple(devices), each
        self._plans, self._backend, self._cache, self._stop = plans, backend, cache, stop
        self._device: dict[Any, str] = {}
        self._state: dict[Any, State] = {}
        self._graph: dict[Any, str] = {}  # of the last run of each process, which keeps it compiled
        self._paces: dict[str, float] = {}  # seconds of a step of a graph, as far as measured
        self._waiting: list[Any] = []  # processes that are ready, in this order
        self._alone: set[str] = set()  # files of runs that have to have their device to themselves
        self._has_device: set[Any] = set()  # processes that train such a run
        self._context = ExitStack()

    @property
    def opening(self) -> str:
        """Describe the start of the processes, for a line before it."""
        many = "a process" if self.each == 1 else f"{self.each} processes"
        each = "each of " if len(self.devices) > 1 else ""
        return f"starting {many} on {each}{', '.join(self.devices)}"

    @property
    def compiling(self) -> int:
        """The number of processes that compile while none trains."""
        states = [*self._state.values()]
        return 0 if State.TRAINING in states else states.count(State.COMPILING)

    def __enter__(self) -> Self:
        spawn = multiprocessing.get_context("spawn")  # a fork would share the parent's CUDA context
        threads = max(1, (os.cpu_count() or 1) // (self.each * len(self.devices)))
        processes: list[Any] = []
        with self._context as context:
            context.callback(self._end, processes)
            for device in (one for one in self.devices for _ in range(self.each)):
                ours, theirs = spawn.Pipe()
                process = spawn.Process(
                    target=serve, args=(theirs, self._backend, device, self._cache, threads)
                )
                with _interrupt_blocked():
                    process.start()
                theirs.close()
                processes.append(process)
                self._device[ours] = device
                ours.send([_text_of(plan) for plan in self._plans])
            kinds = {self._device[one]: self._ready(one) for one in self._device}
            if len({*kinds.values()}) > 1:
                raise MinillmError(
                    "runs on cards of several kinds cannot be compared",
                    where=", ".join(f"{device}: {kind}" for device, kind in kinds.items()),
                    fix="CUDA_VISIBLE_DEVICES with cards of one kind, or fewer --gpus",
                )
            self._state = dict.fromkeys(self._device, State.FREE)
            self._context = context.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._context.close()

    def _end(self, processes: Sequence[Any]) -> None:
        """Close the connections, which ends the idle processes; terminate those that do not end."""
        for connection in self._device:
            connection.close()
        until = time.monotonic() + ENDING
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
        for process in processes:
            process.terminate()
            process.join()

    def train(
        self,
        wanted: Sequence[Wanted],
        *,
        watch: Callable[[Sequence[Wanted], float], None],
    ) -> Iterator[Made]:
        """Train runs, each on the next free device, and yield them as they end.

        A process prefers runs of the graph that it has compiled, and then a graph that no other process has:
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
            for connection in self._device:
                had = self._graph.get(connection)
                if one := self._next(connection, left):
                    running[connection], progress[connection] = one, 0.0
                    kept = self._graph[connection] == had
                    self._state[connection] = State.PREPARING if kept else State.COMPILING
                    asked: dict[str, Any] = {
                        "seed": one.seed,
                        "evaluations": one.evaluations,
                        "hash": one.plan.hash,
                    }
                    if not one.timed:
                        asked["pace"] = self._paces.get(self._graph[connection])
                    connection.send(_text_of(one.plan) | asked)
            for device in self.devices:
                self._give_turn(device, running)
            watch([*running.values()], sum(progress.values()) / len(progress))
            for connection in wait([*running], timeout=POLL):
                answer = self._received(connection)
                if "progress" in answer:
                    progress[connection] = answer["progress"]
                elif "ready" in answer:
                    self._state[connection] = State.READY
                    self._waiting.append(connection)
                elif "left" in answer:
                    self._state[connection] = State.PREPARING
                else:
                    self._state[connection] = State.FREE
                    if pace := answer.get("pace"):
                        self._paces[self._graph[connection]] = pace
                    self._has_device.discard(connection)
                    made = Made(running.pop(connection), _outcome(answer))
                    del progress[connection]
                    if isinstance(made.outcome, MinillmError):  # it has released its trainer
                        self._graph.pop(connection, None)
                    if self._again(made):
                        left.insert(0, (made.wanted, graph_of(made.wanted.plan)))
                    else:
                        yield made
            if self._stop.requested:
                raise Interrupted("ended by a signal; the runs under way are lost")

    def _beside(self, connection: Any) -> dict[Any, State]:
        """Return the states of the other processes of a process's device."""
        return {
            one: state
            for one, state in self._state.items()
            if one is not connection and self._device[one] == self._device[connection]
        }

    def _next(self, connection: Any, left: list[tuple[Wanted, str]]) -> Wanted | None:
        """Take the run out of those left that a process trains next; None: it has to wait.

        A process compiles for a timed run only while no other one of its device trains or is about to, and
        never what another one of its device has compiled; for others only where enough runs are left.
        """
        if self._state[connection] is not State.FREE:
            return None
        beside, own = self._beside(connection), self._graph.get(connection)
        states = {*beside.values()}
        if self._has_device & {*beside}:
            return None
        others = {graph for one, graph in self._graph.items() if one is not connection}
        compiled = {self._graph.get(one) for one in beside}
        number = Counter(graph for _, graph in left)

        def may_begin(one: Wanted, graph: str) -> bool:
            if one.file in self._alone:
                return states <= {State.FREE}
            if graph == own:
                return True
            if one.timed:
                return graph not in compiled and states <= {State.FREE, State.COMPILING}
            return graph not in compiled or (graph in self._paces and number[graph] >= SHARED)

        ranked = [
            (graph != own, graph in others, place)
            for place, (one, graph) in enumerate(left)
            if may_begin(one, graph)
        ]
        if not ranked:
            return None
        one, self._graph[connection] = left.pop(min(ranked)[2])
        if one.file in self._alone:
            self._has_device.add(connection)
            for other in beside:
                other.send(RELEASE)
                self._graph.pop(other, None)
        return one

    def _give_turn(self, device: str, running: Mapping[Any, Wanted]) -> None:
        """Let the process of a device that has been ready longest train, once no other one disturbs it."""
        here = [one for one in self._state if self._device[one] == device]
        states = {self._state[one] for one in here}
        one = next((one for one in self._waiting if one in here), None)
        if one is None or State.TRAINING in states:
            return
        if State.COMPILING in states and running[one].timed:
            return
        self._waiting.remove(one)
        self._state[one] = State.TRAINING
        one.send(GO)

    def _again(self, made: Made) -> bool:
        """Return whether a run ran out of memory that other processes of its device held."""
        if self.each == 1 or not isinstance(made.outcome, OutOfMemory):
            return False
        again = made.wanted.file not in self._alone
        self._alone.add(made.wanted.file)
        return again

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
        Refusal: it has fewer, or another device or one of them was chosen.
    """
    cards, here = sum(one.startswith("cuda") for one in devices), probe().nvidia
    kind, _, number = detected.device.partition(":")
    if cards and number:
        uses = "cuda:0" if cards == 1 else f"cuda:0 to cuda:{cards - 1}"
        raise Refusal(
            f"--gpus {cards} uses {uses}",
            where=f"--gpus {cards} --device {detected.device}",
            fix=f"leave --device out, or CUDA_VISIBLE_DEVICES={number}",
        )
    if cards and (kind != "cuda" or cards > here):
        raise Refusal(
            f"--gpus {cards} needs NVIDIA GPUs: {here} found, on device {detected.device}",
            where=f"--gpus {cards}",
            fix="a smaller number, or leave it out" if kind == "cuda" and here else "leave it out",
        )


@contextmanager
def _interrupt_blocked() -> Iterator[None]:
    """Block SIGINT in a process that is started here, and in this thread until then.

    A terminal sends Ctrl-C to all processes: one that imports its modules would print a traceback.
    """
    resource_tracker.ensure_running()  # it would unblock SIGINT when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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


def serve(parent: Any, backend: str, device: str, cache: Path, threads: int) -> None:
    """Train the runs that the parent sends until it closes the connection; the body of a process.

    Args:
        parent: gives the settings of each run and its turn, and gets its figures, its progress or its error.
        backend: the framework.
        device: of all runs.
        cache: the token cache.
        threads: that compile, unless the environment sets their number.
    """
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))  # torch is imported later
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to the parent too
    study: Study | None = None
    shown = 0.0

    def watch(progress: float) -> None:
        nonlocal shown
        if time.monotonic() - shown > POLL:
            shown = time.monotonic()
            parent.send({"progress": progress})

    @contextmanager
    def turn() -> Iterator[None]:
        parent.send({"ready": True})
        parent.recv()
        try:
            yield
        finally:
            parent.send({"left": True})

    with suppress(EOFError, ConnectionError):  # the parent has closed the connection, or was killed
        while True:
            asked = parent.recv()
            if asked == RELEASE:
                if study is not None:
                    study.release()
                continue
            try:
                if study is None:  # the first message has the plans whose text is read
                    found = [_planned(one, backend, device) for one in asked]
                    plans, detected = [plan for plan, _ in found], found[0][1]
                    corpus = open_corpus(plans[0].config, cache=cache, plans=plans)
                    study = Study(corpus, detected, turn=turn)
                    answer: dict[str, Any] = {"device": bind(plans[0], detected).device_name}
                else:
                    plan, _ = _planned(asked, backend, device)
                    if plan.hash != asked["hash"]:
                        raise MinillmError(
                            f"on {device} the settings give another plan: {plan.hash[:12]}"
                        )
                    how = {"evaluations": asked["evaluations"], "watch": watch}
                    if "pace" in asked:
                        pace = asked["pace"] or study.pace(plan)
                        run = study.train(at_pace(plan, pace), asked["seed"], **how).at_pace(pace)
                        answer = {"run": run.data(), "pace": pace}
                    else:
                        answer = {"run": study.train(plan, asked["seed"], **how).data()}
            except MinillmError as error:
                answer = {
                    "failed": (type(error).__name__, error.what, error.where, error.fix),
                }
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
