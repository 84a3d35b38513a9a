"""A set of plugins in the contest of ``minillm bench``: its trainer, stepped in turns, and its figures."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minillm_core.backends.base import Backend, Trainer
from minillm_core.backends.detect import Detected
from minillm_core.backends.profiling import Profiler
from minillm_core.config.load import Loaded
from minillm_core.data import Corpus
from minillm_core.measure.stepped import PROGRESS, Stepped, uncollected
from minillm_core.plan import Plan
from minillm_core.plugins.blame import blaming
from minillm_core.plugins.manager import LoadedPlugin
from minillm_core.train.budget import Budget
from minillm_core.train.job import Job

__all__ = ["WARM", "Contender", "Contest", "Create", "Profile", "eager", "shares"]

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


class Contest:
    """One set's trainer, and its figures so far.

    Args:
        one: the set.
        plan: of it.
        corpus: what it is trained on.
        detected: backend and device.
        create: makes the backend.
        profile: makes a trainer's profiler.
    """

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
        self._detected, self._create, self._profile = detected, create, profile
        self.first = 0.0
        self.held = self.peak = 0
        self.seconds: list[float] = []  # of a step, turn by turn
        self.speeds: list[float] = []  # real tokens a second, turn by turn
        self.waits: list[float] = []  # share of a turn spent waiting for data
        self.parts: list[dict[str, float]] = []
        self.layers: dict[str, tuple[float, float]] = {}
        self.traces: list[str] = []
        self.notes = [
            f"what '{p.name}' does at an event is not timed"
            for p in one.plugins
            if "on_event" in p.plugin.hooks
        ]
        self.stepped = self._built(plan)
        self.profiler = profile(self.stepped.job.trainer)

    def _built(self, plan: Plan) -> Stepped:
        """A trainer of its own for a plan, and the data that it is fed."""
        loaded, plugins = self.one.loaded, self.one.plugins
        with blaming(plugins, "while it is built"):
            trainer = self._create(self._detected, plan).trainer(plan, loaded.config.seed)
        budget = Budget(plan.config.train.steps or 1)
        return Stepped(Job(loaded, plugins, plan, self.corpus, trainer, budget, ()))

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

    def look(self, *, layers: bool, trace: Path | None, say: Callable[[str], None]) -> None:
        """Layers and trace: of an eager step, since a compiled one has neither layers nor ranges.

        Args:
            layers: time each layer.
            trace: the file to write a trace into; None: none.
            say: prints a line.
        """
        stepped, profiler = self.stepped, self.profiler
        with ExitStack() as stack:
            if stepped.job.trainer.binding.compile:
                self.notes.append(
                    "the step is compiled, and has no layers: the layers and modules shown are of "
                    "an eager step, which is slower"
                )
                say(f"{self.name}: {self.notes[-1]}")
                profiler.trim()
                stepped = stack.enter_context(self._built(eager(self.plan)))
                profiler = self._profile(stepped.job.trainer)
            stepped.run(2)
            if layers:
                batch = stepped.batch()
                profiler.layers(batch.micro, self.plan.values(PROGRESS), batch.supervised)
                self.layers = profiler.layers(
                    batch.micro, self.plan.values(PROGRESS), batch.supervised
                )
            if trace is not None:
                profiler.trace(trace, lambda: stepped.run(2))
                self.traces.append(str(trace))
                say(f"{self.name}: trace in {trace}; open it at https://ui.perfetto.dev")

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


def eager(plan: Plan) -> Plan:
    """The same plan, to be run without compilation."""
    return plan.with_train(compile="off")
