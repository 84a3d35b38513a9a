"""The ablation: runs of every variant with the same seeds, and what their differences say.

Each finished run is a file of its own in OUT/runs, so that an ablation that was stopped goes on where
it was. Runs of one variant follow each other and share a compilation. The speeds of the others
decide for which lengths the first variant is run once more, which tells the loss at equal seconds
(``minillm_core.measure.ladder``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from minillm_core.checkpoint import disk
from minillm_core.errors import Interrupted, MinillmError, NonFinite, OutOfMemory, Refusal, Stopped
from minillm_core.measure.ablation_page import ablation_page
from minillm_core.measure.course import Going, Planned, stem
from minillm_core.measure.ladder import rungs
from minillm_core.measure.rig import Rig, Trained, with_steps
from minillm_core.measure.unlike import difference, settings
from minillm_core.measure.variants import Design, Variant
from minillm_core.measure.worth import Lengths, steps_in_time, worth
from minillm_core.plan import Plan
from minillm_core.text import counted
from minillm_core.train.record import ABLATION

__all__ = ["PAGE", "RESULT", "RUNS", "Ablation", "Watch"]

RUNS, RESULT, PAGE = "runs", ABLATION, "ablation.html"

BOUND = {"compile": "auto", "checkpointing": False, "kernels": "auto"}
"""Settings that are in no plan's hash and change a run's speed: those of a run that names none."""

Watch = Callable[[Going, float], None]


class Ablation:
    """Runs a design and says what it found.

    Args:
        out: where finished runs and the result lie; locked by the caller.
        design: variants and comparisons.
        seeds: of the pairs.
        rig: trains.
        steps: of each run; None: as many as the first variant makes in ``minutes``.
        minutes: see there.
        about: hardware, versions, data ...: what the result says of itself.
        say: prints a line.
        watch: is told which run goes on, what comes after it, and its progress, 0..1.
        validations: of each run, the last one included; None: see :func:`points`.
    """

    def __init__(
        self,
        out: Path,
        design: Design,
        seeds: Sequence[int],
        rig: Rig,
        *,
        steps: int | None,
        minutes: float | None,
        about: Mapping[str, Any],
        say: Callable[[str], None],
        watch: Watch = lambda going, progress: None,
        validations: int | None = None,
    ) -> None:
        self.out, self.design, self.seeds, self.rig = out, design, tuple(seeds), rig
        self.minutes, self.about, self.say, self.watch = minutes, dict(about), say, watch
        self.validations = validations
        self.reference = design.variants[0]
        self.done: dict[Planned, Trained | str] = {}  # a run, or why it failed
        self.steps = steps or 0
        self.course: list[Planned] = []  # all runs in their order, as far as they are known

    def run(self) -> dict[str, Any]:
        """Make the runs that are missing; the result, which is written after every run too.

        Raises:
            Stopped: a signal came; what is finished is kept.
            Refusal: OUT holds runs of another ablation.
        """
        self.steps = self.steps or self._steps_in_minutes()
        self.find()
        self.course = [
            Planned(variant.name, seed, self.steps)
            for variant in self.design.variants
            for seed in self.seeds
        ]
        for variant in self.design.variants:
            self.make(variant)
        return self.climb()

    def make(self, variant: Variant) -> None:
        """Make a variant's runs at equal tokens, one a seed; raises as :meth:`run`."""
        for seed in self.seeds:
            self._make(variant, Planned(variant.name, seed, self.steps))

    def climb(self) -> dict[str, Any]:
        """Make the first variant's runs in the time of the others; raises as :meth:`run`."""
        self.find()
        name = self.reference.name
        further = [Planned(name, seed, steps) for steps in self.lengths() for seed in self.seeds]
        self.course += further
        for planned in further:
            self._make(self.reference, planned)
        return self._write(finished=True)

    def lengths(self) -> list[int]:
        """Steps for which the first variant is to be trained beside those at equal tokens."""
        wanted = (self._steps_in_time(one.name) for one in self.design.variants)
        return rungs(self.steps, [steps for steps in wanted if steps])

    def find(self) -> None:
        """Take in the finished runs of OUT.

        Raises:
            Refusal: one is of another ablation.
        """
        for variant in self.design.variants:
            for seed in self.seeds:
                lengths = {self.steps}
                if variant is self.reference:
                    found = (self.out / RUNS).glob(f"{stem(variant.name, seed)}-*.json")
                    lengths |= {int(path.stem.rpartition("-")[2]) for path in found}
                for steps in sorted(lengths):
                    self._take(variant, Planned(variant.name, seed, steps))

    def result(self, *, finished: bool) -> dict[str, Any]:
        """What is known so far, as JSON."""
        return {
            "plugins": {
                one.plugin: {
                    "with": one.having,
                    "without": one.without,
                    **worth(
                        self._trained(one.having),
                        self._trained(one.without),
                        self.steps,
                        reference=self.reference.name == one.having,
                        pairs=len(self.seeds),
                    ),
                }
                for one in self.design.comparisons
            },
            "not_judged": dict(self.design.unplanned),
            "design": self.design.kind,
            "variants": {
                one.name: {
                    "plugins": list(one.active),
                    "options": {p.name: p.options for p in one.plan.plugins},
                    "versions": {p.name: p.version for p in one.plugins},
                    "plan_hash": one.plan.hash,
                    "parameters": one.plan.num_parameters,
                    "steps_at_equal_seconds": self._steps_in_time(one.name) or self.steps,
                }
                for one in self.design.variants
            },
            "steps": self.steps,
            "minutes": self.minutes,
            "seeds": list(self.seeds),
            "runs": [
                {"variant": planned.variant, **outcome.data()}
                if isinstance(outcome, Trained)
                else {**asdict(planned), "error": outcome}
                for planned, outcome in self.done.items()
            ],
            "finished": finished,
            **self.about,
        }

    def _take(self, variant: Variant, planned: Planned) -> bool:
        """Take a finished run from OUT; whether there is one."""
        if planned in self.done:
            return True
        path = self.out / RUNS / planned.file
        if (kept := _read(path)) is None:
            return False
        identity = self._identity(variant, planned)
        if (was := {**BOUND, **kept["identity"]}) != identity:
            raise Refusal(
                f"{self.out} holds the runs of another ablation",
                where=f"{path}: {self._unlike(was, identity, variant)}",
                fix="--out with another folder, or take that one away",
            )
        self.done[planned] = kept.get("failed") or Trained.of(kept["run"])
        return True

    def _unlike(self, was: Mapping[str, Any], now: Mapping[str, Any], variant: Variant) -> str:
        """What differs: of two plans the settings, where OUT's result holds them."""
        told = None
        if was.get("plan_hash") != now["plan_hash"]:
            earlier = _read(self.out / RESULT) or {}
            told = settings(earlier, self.result(finished=False), variant.name)
        return told or difference(was, now)

    def _make(self, variant: Variant, planned: Planned) -> None:
        """Make a run, or take it from OUT."""
        if self._take(variant, planned):
            return
        going = Going.of(planned, self.course, self.done)
        try:
            trained = self.rig.train(
                variant.loaded,
                variant.plugins,
                with_steps(variant.plan, planned.steps),
                planned.seed,
                validations=self.validations or points(variant.plan, planned.steps),
                watch=lambda progress: self.watch(going, progress),
            )
        except (NonFinite, OutOfMemory) as error:  # a finding about this variant
            self.done[planned], kept = error.what, {"failed": error.what}
            self.say(f"{planned.label}: {error.what}")
        except (Interrupted, KeyboardInterrupt) as error:
            raise self._stopped(error) from None
        else:
            self.done[planned], kept = trained, {"run": trained.data()}
        path = self.out / RUNS / planned.file
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {"identity": self._identity(variant, planned), **kept}
        text = json.dumps(document, indent=1, allow_nan=False)
        disk.replace(path, text.encode() + b"\n")
        self._write(finished=False)

    def _identity(self, variant: Variant, planned: Planned) -> dict[str, Any]:
        """What a run is of; all but the plan is what two must share to be compared."""
        shared = {key: self.about[key] for key in ("data", "device", "dtype", "versions")}
        config, plan = variant.plan.config, with_steps(variant.plan, planned.steps)
        bound = config.train.model_dump(include={"compile", "checkpointing"})
        return {"plan_hash": plan.hash, **shared, **bound, "kernels": config.kernels}

    def _steps_in_minutes(self) -> int:
        """As many as the first variant makes; those of an earlier start for as many minutes."""
        earlier = _read(self.out / RESULT) or {}
        if earlier.get("steps") and earlier.get("minutes") == self.minutes:
            return int(earlier["steps"])
        assert self.minutes is not None
        first = self.reference
        self.say("measuring how long a step takes")
        try:
            seconds = self.rig.speed(first.loaded, first.plugins, first.plan, self.seeds[0])
        except (Interrupted, KeyboardInterrupt) as error:
            raise self._stopped(error) from None
        return max(1, round(60 * self.minutes / seconds))

    def _steps_in_time(self, name: str) -> int | None:
        """As many as the first variant makes in the time of another's run."""
        return steps_in_time(
            self._trained(name).get(self.steps, {}),
            self._trained(self.reference.name).get(self.steps, {}),
            self.steps,
        )

    def _trained(self, variant: str) -> Lengths:
        """Its runs that did not fail: steps -> seed -> run."""
        found: dict[int, dict[int, Trained]] = {}
        for planned, outcome in self.done.items():
            if planned.variant == variant and isinstance(outcome, Trained):
                found.setdefault(planned.steps, {})[planned.seed] = outcome
        return found

    def _write(self, *, finished: bool) -> dict[str, Any]:
        self.find()  # runs of other processes too, where some share OUT
        result = self.result(finished=finished)
        text = json.dumps(result, indent=1, allow_nan=False, ensure_ascii=False)
        disk.replace(self.out / RESULT, text.encode() + b"\n")
        disk.replace(self.out / PAGE, ablation_page(result).encode())
        return result

    def _stopped(self, error: BaseException) -> MinillmError:
        if not self.done:
            return Interrupted("ended by a signal; no run was finished")
        return Stopped(
            f"ended by a signal; {counted(len(self.done), 'finished run')} kept",
            where=str(self.out / RUNS),
            fix="the same command with the same --out goes on with the others",
        )


def points(plan: Plan, steps: int) -> int:
    """How many validations a run has: as many as cost a quarter of its time, from 2 to 10.

    A prediction costs a third of what it costs to learn from it.
    """
    learnt = steps * plan.tokens_per_step
    return max(2, min(10, int(0.25 * 3 * learnt / plan.config.eval.tokens)))


def _read(path: Path) -> dict[str, Any] | None:
    """A JSON document of ours; None where there is none or it was cut short."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None
