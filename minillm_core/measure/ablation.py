"""The ablation: runs of every variant with the same seeds, and what their differences say.

Each finished run is a file of its own in OUT/runs, so that an ablation that was stopped goes on where
it was. Runs of one variant follow each other and share a compilation. The speed of a variant decides
for how many steps it is run once more: as many as the other's seconds allow, which makes the loss
at equal seconds a measurement and no extrapolation.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from minillm_core.checkpoint import disk
from minillm_core.errors import Interrupted, MinillmError, NonFinite, OutOfMemory, Refusal, Stopped
from minillm_core.measure.ablation_page import ablation_page
from minillm_core.measure.paired import effect_of
from minillm_core.measure.rig import Rig, Trained, with_steps
from minillm_core.measure.variants import Comparison, Design, Variant
from minillm_core.plan import Plan

__all__ = ["PAGE", "RESULT", "Ablation", "Planned", "Watch"]

RUNS, RESULT, PAGE = "runs", "ablation.json", "ablation.html"

ALIKE = 0.01
"""Speeds that differ by no more than this share: the run at equal tokens is the one at equal seconds."""

Watch = Callable[[str, float], None]


@dataclass(frozen=True)
class Planned:
    """A run to make."""

    variant: str
    seed: int
    steps: int

    @property
    def file(self) -> str:
        """Where it is kept; the sign of a variant's name is spelt out."""
        signs = {"+": "with-", "-": "without-"}
        name = signs.get(self.variant[0], self.variant[0]) + self.variant[1:]
        return f"{name}-seed{self.seed}-{self.steps}.json"


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
        watch: is told which run goes on and its progress, 0..1.
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
        watch: Watch = lambda run, progress: None,
    ) -> None:
        self.out, self.design, self.seeds, self.rig = out, design, tuple(seeds), rig
        self.minutes, self.about, self.say, self.watch = minutes, dict(about), say, watch
        self.reference = design.variants[0]
        self.done: dict[Planned, Trained | str] = {}  # a run, or why it failed
        self.in_time: dict[str, int] = {self.reference.name: 0}  # variant -> steps at equal seconds
        self.steps = steps or 0

    def run(self) -> dict[str, Any]:
        """Make the runs that are missing; the result, which is written after every run too.

        Raises:
            Stopped: a signal came; what is finished is kept.
            Refusal: OUT holds runs of another ablation.
        """
        self.steps = self.steps or self._steps_in_minutes()
        for variant in self.design.variants:
            for seed in self.seeds:
                self._make(variant, Planned(variant.name, seed, self.steps))
            self.in_time[variant.name] = steps = self._steps_in_time(variant.name)
            for seed in self.seeds:
                self._make(variant, Planned(variant.name, seed, steps))
        return self._write(finished=True)

    def result(self, *, finished: bool) -> dict[str, Any]:
        """What is known so far, as JSON."""
        return {
            "plugins": {one.plugin: self._effects(one) for one in self.design.comparisons},
            "not_judged": dict(self.design.unplanned),
            "design": self.design.kind,
            "variants": {
                one.name: {
                    "plugins": list(one.active),
                    "options": {p.name: p.options for p in one.plan.plugins},
                    "versions": {p.name: p.version for p in one.plugins},
                    "plan_hash": one.plan.hash,
                    "parameters": one.plan.num_parameters,
                    "steps_at_equal_seconds": self.in_time.get(one.name) or self.steps,
                }
                for one in self.design.variants
            },
            "steps": self.steps,
            "seeds": list(self.seeds),
            "runs": [
                {"variant": planned.variant, **outcome.data()}
                if isinstance(outcome, Trained)
                else {
                    "variant": planned.variant,
                    "seed": planned.seed,
                    "steps": planned.steps,
                    "error": outcome,
                }
                for planned, outcome in self.done.items()
            ],
            "finished": finished,
            **self.about,
        }

    def _make(self, variant: Variant, planned: Planned) -> None:
        """Make a run, or take it from OUT."""
        if planned in self.done:
            return
        path = self.out / RUNS / planned.file
        identity = {"plan_hash": with_steps(variant.plan, planned.steps).hash, **self._identity()}
        if (kept := _read(path)) is not None:
            if kept["identity"] != identity:
                raise Refusal(
                    f"{self.out} holds the runs of another ablation",
                    where=f"{path}: {_difference(kept['identity'], identity)}",
                    fix="--out with another folder, or take that one away",
                )
            self.done[planned] = kept.get("failed") or Trained.of(kept["run"])
            return
        label = f"{planned.variant}, seed {planned.seed}, {planned.steps} steps"
        try:
            trained = self.rig.train(
                variant.loaded,
                variant.plugins,
                with_steps(variant.plan, planned.steps),
                planned.seed,
                validations=points(variant.plan, planned.steps),
                watch=lambda progress: self.watch(label, progress),
            )
        except (NonFinite, OutOfMemory) as error:  # a finding about this variant
            self.done[planned], kept = error.what, {"failed": error.what}
            self.say(f"{label}: {error.what}")
        except (Interrupted, KeyboardInterrupt) as error:
            raise self._stopped(error) from None
        else:
            self.done[planned], kept = trained, {"run": trained.data()}
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"identity": identity, **kept}, indent=1, allow_nan=False)
        disk.replace(path, text.encode() + b"\n")
        self._write(finished=False)

    def _identity(self) -> dict[str, Any]:
        """What two runs must share to be compared, beside their plan."""
        return {key: self.about[key] for key in ("data", "device", "dtype", "versions")}

    def _steps_in_minutes(self) -> int:
        """As many as the first variant makes; those of an earlier start, where there was one."""
        if (earlier := _read(self.out / RESULT)) is not None and earlier.get("steps"):
            return int(earlier["steps"])
        assert self.minutes is not None
        first, label = self.reference, "measuring how long a step takes"
        self.watch(label, 0.0)
        try:
            seconds = self.rig.speed(first.loaded, first.plugins, first.plan, self.seeds[0])
        except (Interrupted, KeyboardInterrupt) as error:
            raise self._stopped(error) from None
        return max(1, round(60 * self.minutes / seconds))

    def _steps_in_time(self, name: str) -> int:
        """As many steps as a variant makes in the seconds of the reference's run."""
        own, others = (
            [run.seconds for run in self._runs(variant, self.steps).values()]
            for variant in (name, self.reference.name)
        )
        if not own or not others:
            return self.steps
        share = median(others) / median(own)
        return self.steps if abs(share - 1) <= ALIKE else max(1, round(self.steps * share))

    def _runs(self, variant: str, steps: int) -> dict[int, Trained]:
        """Seed -> run, of those that did not fail."""
        return {
            planned.seed: outcome
            for planned, outcome in self.done.items()
            if (planned.variant, planned.steps) == (variant, steps) and isinstance(outcome, Trained)
        }

    def _effects(self, comparison: Comparison) -> dict[str, Any]:
        """A plugin's: with it minus without it; the loss at equal tokens comes first."""
        having, without = (
            self._runs(name, self.steps) for name in (comparison.having, comparison.without)
        )
        having_t, without_t = (
            self._runs(name, self.in_time.get(name) or self.steps)
            for name in (comparison.having, comparison.without)
        )
        seeds = sorted(having.keys() & without.keys())
        timed = sorted(having_t.keys() & without_t.keys())
        failed = len(self.seeds) - len(seeds)
        found: dict[str, Any] = {"with": comparison.having, "without": comparison.without}
        if not seeds:
            return found | {"effect": None, "low": None, "high": None, "failed": failed}
        loss = effect_of([having[s].val_loss - without[s].val_loss for s in seeds])
        rates = [
            math.log(having[s].tokens_per_second / without[s].tokens_per_second) for s in seeds
        ]
        in_time = [having_t[s].val_loss - without_t[s].val_loss for s in timed]
        return found | {
            **loss.data(),
            "unit": "nats a token of held-out text, at equal tokens; below 0 is better",
            "failed": failed,
            "equal_seconds": effect_of(in_time).data() if timed else None,
            "speed": {
                key: None if value is None else math.exp(value)
                for key, value in effect_of(rates).data().items()
                if key in ("effect", "low", "high")
            },
            "peak_bytes": {
                "with": _largest(having.values()),
                "without": _largest(without.values()),
            },
        }

    def _write(self, *, finished: bool) -> dict[str, Any]:
        result = self.result(finished=finished)
        text = json.dumps(result, indent=1, allow_nan=False, ensure_ascii=False)
        disk.replace(self.out / RESULT, text.encode() + b"\n")
        disk.replace(self.out / PAGE, ablation_page(result).encode())
        return result

    def _stopped(self, error: BaseException) -> MinillmError:
        if not self.done:
            return Interrupted("ended by a signal; no run was finished")
        return Stopped(
            f"ended by a signal; {len(self.done)} finished runs are kept",
            where=str(self.out / RUNS),
            fix="the same command with the same --out goes on with the others",
        )


def points(plan: Plan, steps: int) -> int:
    """How many validations a run has: as many as cost a quarter of its time, from 2 to 10.

    A prediction costs a third of what it costs to learn from it.
    """
    learnt = steps * plan.tokens_per_step
    return max(2, min(10, int(0.25 * 3 * learnt / plan.config.eval.tokens)))


def _largest(runs: Iterable[Trained]) -> int | None:
    peaks = [run.peak_bytes for run in runs if run.peak_bytes is not None]
    return max(peaks, default=None)


def _read(path: Path) -> dict[str, Any] | None:
    """A JSON document of ours; None where there is none or it was cut short."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def _difference(kept: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first entry that differs."""
    key = next(key for key in now if kept.get(key) != now[key])
    return f"its {key} is {str(kept.get(key))[:60]}, this one's {str(now[key])[:60]}"
