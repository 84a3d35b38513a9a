"""The whole job of ``minillm bench``: sets of plugins in one process, stepped in turns (A B A B)."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minillm_core import backends
from minillm_core.backends.base import Backend, Trainer
from minillm_core.backends.detect import Detected
from minillm_core.backends.profiling import Profiler, profiler_of
from minillm_core.config.load import Loaded
from minillm_core.data import Corpus, open_corpus
from minillm_core.errors import Refusal
from minillm_core.measure.stepped import PROGRESS, Stepped, uncollected
from minillm_core.plan import Plan, build_plan
from minillm_core.plugins.blame import blaming
from minillm_core.plugins.manager import LoadedPlugin, check_support
from minillm_core.train.budget import Budget
from minillm_core.train.job import Job
from minillm_core.train.record import hardware, versions

__all__ = ["Contender", "Request", "bench", "shares"]

WARM = 3
"""Steps before anything is timed: the first compiles, the second has all memory."""

Create = Callable[[Detected, Plan], Backend]
Profile = Callable[[Trainer], Profiler]


@dataclass(frozen=True)
class Contender:
    """A set of plugins, to be timed."""

    name: str
    loaded: Loaded
    plugins: tuple[LoadedPlugin, ...]


@dataclass(frozen=True)
class Request:
    """What is to be found out."""

    steps: int = 10  # timed together, a turn
    repeats: int = 5  # turns of each set
    layers: bool = False
    trace: Path | None = None

    def check(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            Refusal: fewer than one step or turn, or a trace that cannot be written.
        """
        for flag, count in (("--steps", self.steps), ("--repeats", self.repeats)):
            if count < 1:
                raise Refusal("nothing would be timed", where=f"{flag} {count}", fix=f"{flag} 5")
        if self.trace is not None and not self.trace.parent.is_dir():
            raise Refusal(
                f"{self.trace.parent} is not a folder",
                where=f"--trace {self.trace}",
                fix="name a file in a folder that is there",
            )


def bench(
    request: Request,
    contenders: Sequence[Contender],
    detected: Detected,
    *,
    cache: Path,
    say: Callable[[str], None],
    create: Create | None = None,
    profile: Profile = profiler_of,
) -> dict[str, Any]:
    """Time one set of plugins, or two against each other.

    Args:
        request: how long, and what else.
        contenders: one or two; the second is what the first is compared with.
        detected: backend and device.
        cache: where tokens are kept.
        say: prints a line.
        create: makes the backend; default: :func:`minillm_core.backends.create`.
        profile: makes a trainer's profiler.

    Returns:
        The document that ``--json`` prints; see :meth:`_Contest.figures`.

    Raises:
        Refusal: nothing was started.
        MinillmError: a plugin's own code raised, or the framework cannot tell what is asked for.
    """
    request.check()
    for one in contenders:
        check_support(one.plugins, detected.backend, detected.device)
    plans = [build_plan(one.loaded.config, one.plugins) for one in contenders]
    for plan in plans:  # a kernel that cannot serve is to be told now
        backends.bind(detected, plan)
        if request.layers or request.trace:
            backends.bind(detected, _eager(plan))
    config = contenders[0].loaded.config
    corpus = open_corpus(
        config.data, config.model.vocab, config.train.seq_len, cache=cache, say=say
    )
    make = create or backends.create
    with ExitStack() as stack:
        contests: list[_Contest] = []
        held = 0
        for one, plan in zip(contenders, plans, strict=True):
            contest = _Contest(one, plan, corpus, detected, make, profile)
            stack.enter_context(contest.stepped)
            contest.profiler.check(layers=request.layers, trace=request.trace is not None)
            contests.append(contest)
            contest.warm()
            gc.collect()  # what compiling left behind is nobody's
            now = contest.profiler.held_bytes() or 0
            contest.held, held = now - held, now
            say(f"{one.name}: built and warm, the first step after {contest.first:.1f} s")
        for turn in range(request.repeats):
            for contest in contests:
                contest.turn(request.steps, others=held - contest.held)
                say(f"turn {turn + 1} {contest.name}: {contest.speeds[-1]:,.0f} tokens/s")
        if request.layers or request.trace:
            for contest in contests:
                contest.look(request, detected, make, profile, alone=len(contests) == 1, say=say)
        result = {contest.name: contest.figures() for contest in contests}
        binding = contests[0].stepped.job.trainer.binding
    distributions = [p.distribution for one in contenders for p in one.plugins if p.distribution]
    return {
        "device": binding.device_name,
        "backend": binding.backend,
        "preset": config.preset,
        "steps": request.steps,
        "repeats": request.repeats,
        "data": {"fingerprint": corpus.fingerprint, "description": corpus.description},
        "hardware": hardware(binding.device_name),
        "versions": versions(binding.backend, distributions),
        "sets": result,
        "ratio": _ratio(*result.values()) if len(result) == 2 else None,
    }


class _Contest:
    """One set's trainer, and its figures so far."""

    def __init__(
        self,
        one: Contender,
        plan: Plan,
        corpus: Corpus,
        detected: Detected,
        create: Create,
        profile: Profile,
    ) -> None:
        self.name, self.one, self.plan, self.corpus = one.name, one, plan, corpus
        self.first = 0.0
        self.held = self.peak = 0
        self.seconds: list[float] = []  # of a step, turn by turn
        self.speeds: list[float] = []  # real tokens a second, turn by turn
        self.waits: list[float] = []  # share of a turn spent waiting for data
        self.parts: list[dict[str, float]] = []
        self.layers: dict[str, tuple[float, float]] = {}
        self.traces: list[str] = []
        self.notes: list[str] = []
        with blaming(one.plugins, "while it is built"):
            trainer = create(detected, plan).trainer(plan, one.loaded.config.seed)
        self.profiler = profile(trainer)
        self.stepped = Stepped(self._job(plan, trainer))

    def _job(self, plan: Plan, trainer: Trainer) -> Job:
        budget = Budget(plan.config.train.steps or 1)
        return Job(self.one.loaded, self.one.plugins, plan, self.corpus, trainer, budget, ())

    def warm(self) -> None:
        """Compile, and take all memory."""
        began = time.perf_counter()
        self.stepped.run(1)
        self.first = time.perf_counter() - began
        self.stepped.run(WARM - 1)
        self.parts_once()
        self.parts.clear()

    def turn(self, steps: int, *, others: int) -> None:
        """Time some steps together, and the parts of one more.

        Args:
            steps: how many.
            others: bytes that the other set holds meanwhile, which are not this one's peak.
        """
        self.profiler.trim()
        self.stepped.run(1)  # takes back the memory that was given up
        self.profiler.forget_peak()
        with uncollected():
            timed = self.stepped.run(steps)
        self.peak = max(self.peak, (self.profiler.peak_bytes() or others) - others)
        self.seconds.append(timed.seconds / steps)
        self.speeds.append(timed.real / timed.seconds)
        self.waits.append(timed.waited / timed.seconds)
        self.parts_once()

    def parts_once(self) -> None:
        """Time the parts of a step."""
        batch = self.stepped.batch()
        with blaming(self.one.plugins, "in a step"):
            self.parts.append(
                self.profiler.parts(batch.micro, self.plan.values(PROGRESS), batch.supervised)
            )

    def look(
        self,
        request: Request,
        detected: Detected,
        create: Create,
        profile: Profile,
        *,
        alone: bool,
        say: Callable[[str], None],
    ) -> None:
        """Layers and trace: of an eager step, since a compiled one has neither layers nor ranges."""
        stepped, profiler = self.stepped, self.profiler
        with ExitStack() as stack:
            if stepped.job.trainer.binding.compile:
                self.notes.append(
                    "the step is compiled, and has no layers: the layers and modules shown are of "
                    "an eager step, which is slower"
                )
                say(f"{self.name}: {self.notes[-1]}")
                plan = _eager(self.plan)
                profiler.trim()
                trainer = create(detected, plan).trainer(plan, self.one.loaded.config.seed)
                stepped = stack.enter_context(Stepped(self._job(plan, trainer)))
                profiler = profile(trainer)
            stepped.run(2)
            if request.layers:
                batch = stepped.batch()
                profiler.layers(batch.micro, self.plan.values(PROGRESS), batch.supervised)
                self.layers = profiler.layers(
                    batch.micro, self.plan.values(PROGRESS), batch.supervised
                )
            if request.trace is not None:
                path = request.trace if alone else _beside(request.trace, self.name)
                profiler.trace(path, lambda: stepped.run(2))
                self.traces.append(str(path))
                say(f"{self.name}: trace in {path}; open it at https://ui.perfetto.dev")

    def figures(self) -> dict[str, Any]:
        """As JSON: medians over the turns, and the turns themselves."""
        binding = self.stepped.job.trainer.binding
        flops = self.plan.estimate().flops_per_token
        speed = statistics.median(self.speeds)
        parts = {name: statistics.median(one[name] for one in self.parts) for name in self.parts[0]}
        return {
            "plugins": [one.data() for one in self.one.plugins],
            "plan": self.plan.hash,
            "dtype": binding.dtype,
            "compile": binding.compile,
            "kernels": {choice.op: choice.kernel for choice in binding.kernels},
            "tokens_per_second": speed,
            "tokens_per_second_by_turn": self.speeds,
            "step_seconds": statistics.median(self.seconds),
            "first_step_seconds": self.first,
            "flops_per_token": flops,
            "mfu": speed * flops / binding.peak_flops if binding.peak_flops else None,
            "peak_bytes": self.peak or None,
            "part_seconds": parts,
            "shares": shares(statistics.median(self.waits), parts),
            "layers": {
                name: {"forward_seconds": forward, "backward_seconds": backward}
                for name, (forward, backward) in self.layers.items()
            },
            "traces": self.traces,
            "notes": [*self.profiler.notes, *self.notes],
        }


def shares(waited: float, parts: dict[str, float]) -> dict[str, float]:
    """Share of a step's time that goes into data and each part; they sum to 1.

    Args:
        waited: share of the time that the loop waited for data.
        parts: seconds of the other parts, of steps that had their data.
    """
    total = sum(parts.values())
    return {"data": waited} | {name: (1 - waited) * s / total for name, s in parts.items()}


def _ratio(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """The first over the second: of medians, and the lowest and highest of the turns' pairs."""
    turns = [
        x / y
        for x, y in zip(a["tokens_per_second_by_turn"], b["tokens_per_second_by_turn"], strict=True)
    ]
    peaks = a["peak_bytes"], b["peak_bytes"]
    return {
        "tokens_per_second": a["tokens_per_second"] / b["tokens_per_second"],
        "low": min(turns),
        "high": max(turns),
        "peak_bytes": peaks[0] / peaks[1] if all(peaks) else None,
    }


def _eager(plan: Plan) -> Plan:
    """The same plan, to be run without compilation."""
    train = plan.config.train.model_copy(update={"compile": "off"})
    return replace(plan, config=plan.config.model_copy(update={"train": train}))


def _beside(path: Path, name: str) -> Path:
    """trace.json -> trace-muon.json."""
    return path.with_name(f"{path.stem}-{name}{path.suffix}")
