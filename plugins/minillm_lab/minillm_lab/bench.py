"""``minillm bench``: time plugin sets in one process, stepped in turns (A B A B)."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minillm_core import Plan, Refusal
from minillm_core.studies import Detected, Trainer, attribute_errors, hardware, versions
from minillm_lab.profiling import Profiler, profiler_class, profiler_of
from minillm_lab.study import Study, bind, open_corpus, without_gc

WARM = 3
"""Untimed warm-up steps: the first compiles, the second has allocated all memory."""

Say = Callable[[str], None]
Profile = Callable[[Trainer], Profiler]


def refuse_no_time(steps: int, repeats: int) -> None:
    """Check that there is something to time.

    Raises:
        Refusal: fewer than one step or turn.
    """
    for flag, count in (("--steps", steps), ("--repeats", repeats)):
        if count < 1:
            raise Refusal("nothing would be timed", where=f"{flag} {count}", fix=f"{flag} 5")


@dataclass(frozen=True)
class Request:
    """The lengths of a benchmark, and optional measurements beside speed and memory."""

    steps: int = 10  # timed together in one turn
    repeats: int = 5  # turns of each set
    layers: bool = False
    trace: Path | None = None

    def check(self) -> None:
        """Validate the request.

        Raises:
            Refusal: fewer than one step or turn, or a trace that cannot be written.
        """
        refuse_no_time(self.steps, self.repeats)
        if self.trace is not None and not self.trace.parent.is_dir():
            raise Refusal(
                f"{self.trace.parent} is not a folder",
                where=f"--trace {self.trace}",
                fix="name a file in a folder that is there",
            )
        if self.trace is not None and self.trace.is_dir():
            raise Refusal(
                f"{self.trace} is a folder",
                where=f"--trace {self.trace}",
                fix=f"name a file: --trace {self.trace / 'trace.json'}",
            )


def bench(
    request: Request,
    plans: Mapping[str, Plan],
    detected: Detected,
    *,
    cache: Path,
    say: Say,
    create: Callable[[Detected, Plan], Any] | None = None,
    profile: Profile = profiler_of,
) -> dict[str, Any]:
    """Time one plugin set, or two against each other.

    Args:
        request: lengths and optional measurements.
        plans: plugin set -> plan, one or two; the first is compared with the second.
        detected: backend and device.
        cache: the token cache.
        say: prints a line.
        create: the backend factory; default: the one of ``detected``.
        profile: the profiler factory, called with a trainer.

    Returns:
        The JSON document printed by ``--json``; see :meth:`BenchSet.figures`.

    Raises:
        Refusal: the request is invalid; no step was run.
        MinillmError: a plugin's code raised, or the framework does not support a requested measurement.
    """
    request.check()
    looks_inside = request.layers or request.trace is not None
    # reject what does not run here before reading the corpus
    profiler_class(detected.backend).check(layers=request.layers, trace=request.trace is not None)
    bindings = [bind(plan, detected) for plan in plans.values()]
    for plan in plans.values() if looks_inside else ():
        bind(_eager(plan), detected)
    first = next(iter(plans.values()))
    corpus = open_corpus(first.config, cache=cache, say=say, plans=list(plans.values()))
    study = Study(corpus, detected, say=say, create=create)
    with ExitStack() as stack:
        sets: list[BenchSet] = []
        held = 0
        for name, plan in plans.items():
            one = BenchSet(name, plan, study, profile)
            stack.enter_context(one.stepper)
            sets.append(one)
            one.warm()
            gc.collect()  # compilation leaves garbage that must not count for either set
            now = one.profiler.held_bytes() or 0
            one.held, held = now - held, now
            say(f"{one.name}: built and warm, the first step after {one.first:.1f} s")
        for turn in range(request.repeats):
            for one in sets:
                one.turn(request.steps, others=held - one.held)
                say(f"turn {turn + 1} {one.name}: {one.speeds[-1]:,.0f} tokens/s")
        for one in sets if looks_inside else ():
            trace = request.trace
            if trace is not None and len(sets) > 1:  # trace.json -> trace-muon.json
                trace = trace.with_name(f"{trace.stem}-{one.name.replace(' ', '-')}{trace.suffix}")
            one.look_inside(layers=request.layers, trace=trace, say=say)
        result = {one.name: one.figures() for one in sets}
        for one in sets:
            speed = result[one.name]["tokens_per_second"]
            one.stepper.keep_speed(cache, speed, request.steps * request.repeats, "bench")
    plugins = [one for plan in plans.values() for one in plan.active]
    distributions = [one.distribution for one in plugins if one.distribution]
    return {
        "device": bindings[0].device_name,
        "backend": bindings[0].backend,
        "preset": first.config.preset,
        "steps": request.steps,
        "repeats": request.repeats,
        "data": {"fingerprint": corpus.fingerprint, "description": corpus.description},
        "hardware": hardware(bindings[0].device_name),
        "versions": versions(bindings[0].backend, distributions),
        "sets": result,
        "ratio": _ratio(*result.values()) if len(result) == 2 else None,
    }


def _ratio(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Compute ratios of the first set to the second: of the medians, and the least and the largest of the turns.

    With one turn these two are None.
    """
    turns = [
        x / y
        for x, y in zip(a["tokens_per_second_by_turn"], b["tokens_per_second_by_turn"], strict=True)
    ]
    peaks = [one["peak_bytes"] if one["peak_of"] == "set" else None for one in (a, b)]
    return {
        "tokens_per_second": a["tokens_per_second"] / b["tokens_per_second"],
        "low": min(turns) if len(turns) > 1 else None,
        "high": max(turns) if len(turns) > 1 else None,
        "peak_bytes": peaks[0] / peaks[1] if peaks[0] and peaks[1] else None,
    }


class BenchSet:
    """A plugin set under measurement, and its results so far.

    Args:
        name: of the set.
        plan: of the set.
        study: machine and corpus.
        profile: the profiler factory, called with a trainer.
    """

    def __init__(self, name: str, plan: Plan, study: Study, profile: Profile) -> None:
        self.name, self.plan = name, plan
        self._study, self._profile = study, profile
        self.first = 0.0
        self.held = self.peak = 0
        self.apart = False  # whether the peak memory is this set's alone, not the whole process's
        self.seconds: list[float] = []  # per step, one entry per turn
        self.speeds: list[float] = []  # real tokens per second, one entry per turn
        self.computed: list[float] = []  # model FLOPs per second, one entry per turn
        self.real = self.supervised = 0  # timed tokens
        self.waits: list[float] = []  # fraction of each turn spent waiting for data
        self.parts: list[dict[str, float]] = []
        self.layers: dict[str, tuple[float, float]] = {}
        self.traces: list[str] = []
        self.notes = [
            f"what '{p.name}' does at an event is not timed"
            for p in plan.active
            if "on_event" in p.plugin.hooks
        ]
        self.stepper = study.stepper(plan)
        self.profiler = profile(self.stepper.trainer)

    def warm(self) -> None:
        """Run the warm-up steps: compile, and allocate all memory."""
        began = time.perf_counter()
        self.stepper.run(1)
        self.first = time.perf_counter() - began
        self.stepper.run(WARM - 1)
        self._time_parts()
        self.parts.clear()

    def turn(self, steps: int, *, others: int) -> None:
        """Time ``steps`` steps together, then the parts of one further step.

        Args:
            steps: number of steps.
            others: bytes held by the other set, subtracted from this set's peak.
        """
        self.profiler.trim()
        self.stepper.run(1)  # reallocates the memory that was trimmed
        self.profiler.forget_peak()
        with without_gc():
            timed = self.stepper.run(steps)
        if (peak := self.profiler.peak_bytes()) is not None:
            self.peak = max(self.peak, peak - others)
        self.apart = self.profiler.held_bytes() is not None
        self.seconds.append(timed.seconds / steps)
        self.speeds.append(timed.real / timed.seconds)
        cost = self.plan.estimate()
        work = (cost.flops_per_token - cost.flops_per_label) * timed.real
        work += cost.flops_per_label * timed.supervised
        self.computed.append(work / timed.seconds)
        self.real, self.supervised = self.real + timed.real, self.supervised + timed.supervised
        self.waits.append(timed.waited / timed.seconds)
        self._time_parts()

    def _time_parts(self) -> None:
        arguments = self.stepper.arguments()
        with attribute_errors(self.plan.active, "in a step"):
            self.parts.append(self.profiler.parts(*arguments))

    def look_inside(self, *, layers: bool, trace: Path | None, say: Say) -> None:
        """Time layers and write a trace of an eager step; compiled steps support neither.

        Args:
            layers: time each layer.
            trace: the file to write a trace into; None: none.
            say: prints a line.
        """
        stepper, profiler = self.stepper, self.profiler
        with ExitStack() as stack:
            if stepper.trainer.binding.compile:
                self.notes.append(
                    "the step is compiled, and has no layers: the layers and modules shown are of "
                    "an eager step, which is slower"
                )
                say(f"{self.name}: {self.notes[-1]}")
                profiler.trim()
                stepper = stack.enter_context(self._study.stepper(_eager(self.plan)))
                profiler = self._profile(stepper.trainer)
            stepper.run(2)
            if layers:
                arguments = stepper.arguments()
                profiler.layers(*arguments)
                self.layers = profiler.layers(*arguments)
            if trace is not None:
                profiler.trace(trace, lambda: stepper.run(2))
                self.traces.append(str(trace))
                say(f"{self.name}: trace in {trace}; open it at https://ui.perfetto.dev")

    def figures(self) -> dict[str, Any]:
        """Return the results as JSON: medians over the turns, and each turn's values."""
        binding = self.stepper.trainer.binding
        flops = self.plan.estimate().flops_per_token
        speed, computed = statistics.median(self.speeds), statistics.median(self.computed)
        parts = {name: statistics.median(one[name] for one in self.parts) for name in self.parts[0]}
        return {
            "plugins": [one.data() for one in self.plan.active],
            "plan": self.plan.hash,
            "dtype": binding.dtype,
            "compile": binding.compile,
            "kernels": {choice.op: choice.kernel for choice in binding.kernels},
            "tokens_per_second": speed,
            "tokens_per_second_by_turn": self.speeds,
            "supervised_share": self.supervised / self.real,
            "step_seconds": statistics.median(self.seconds),
            "first_step_seconds": self.first,
            "flops_per_token": flops,
            "mfu": computed / binding.peak_flops if binding.peak_flops else None,
            "peak_bytes": self.peak or None,
            "peak_of": ("set" if self.apart else "process") if self.peak else None,
            "part_seconds": parts,
            "shares": shares(statistics.median(self.waits), parts),
            "layers": {
                name: {"forward_seconds": forward, "backward_seconds": backward}
                for name, (forward, backward) in self.layers.items()
            },
            "traces": self.traces,
            "notes": [*self.profiler.notes, *self.notes],
        }


def shares(waited: float, parts: Mapping[str, float]) -> dict[str, float]:
    """Compute the fraction of a step's time spent on data and on each part; the fractions sum to 1.

    Args:
        waited: fraction of the time that the loop waited for data.
        parts: seconds of the other parts, excluding that wait.
    """
    total = sum(parts.values())
    return {"data": waited} | {name: (1 - waited) * s / total for name, s in parts.items()}


def _eager(plan: Plan) -> Plan:
    """Return the same plan without compilation."""
    return plan.with_train(compile="off")
