"""The runs of a search: plans trained to a length and compared in pairs with the same seed and data."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

from minillm_core import MinillmError, Plan
from minillm_core.commands import amount, duration, few
from minillm_lab.card import interval, signed
from minillm_lab.members import Members, identity_of
from minillm_lab.pool import Pool, Wanted
from minillm_lab.result_diff import difference
from minillm_lab.space import Move, Recipe
from minillm_lab.study import Trained, graph_of
from minillm_lab.worth import Noise, effect_of, near, noise_among

TREND = 0.5
"""Fraction of a gain's last change, from one length to the next, that is extrapolated to the next length."""

SAVES = 0.02
"""Fraction of time or memory saved that justifies a part whose effect on the loss is not distinguishable."""

EVALUATION = 0.2
"""Maximum time of the final evaluation, as a fraction of the run's time."""

LEARN = 3.0
"""Ratio of a token's training time to its evaluation time."""

Outcomes = Mapping[int, Trained | str]
"""Seed -> the trained run, or the reason of its failure."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Length:
    """The length of a run: minutes of training, or tokens."""

    minutes: float | None = None
    tokens: float | None = None

    def shorter(self, factor: float) -> Length:
        """Return the length divided by ``factor``."""
        return Length(self.minutes and self.minutes / factor, self.tokens and self.tokens / factor)

    def of(self, plan: Plan) -> Plan:
        """Return a plan with this length."""
        if self.minutes is not None:
            return plan.with_train(steps=None, minutes=self.minutes)
        assert self.tokens is not None
        steps = max(1, round(self.tokens / plan.tokens_per_step))
        return plan.with_train(steps=steps, minutes=None)

    def seconds(self, tokens_per_second: float) -> float:
        """Estimate the training time in seconds."""
        if self.minutes is not None:
            return 60.0 * self.minutes
        assert self.tokens is not None
        return self.tokens / tokens_per_second

    @property
    def words(self) -> str:
        """Format the length: ``18 s``, ``2:30``, ``1.05 M tokens``."""
        if self.minutes is None:
            return f"{amount(round(self.tokens or 0))} tokens"
        seconds = 60.0 * self.minutes
        return f"{seconds:.3g} s" if seconds < 90 else duration(seconds)


@dataclass(frozen=True)
class Rung:
    """A rung of a round: the length of its runs, and the number of pairs per candidate."""

    length: Length
    pairs: int


@dataclass
class Candidate:
    """A move from the incumbent, and its measurements."""

    move: Move
    recipe: Recipe
    plan: Plan
    rungs: list[dict[str, Any]] = field(default_factory=list)  # length, effect and differences
    failed: str = ""
    verdict: str = ""

    @property
    def gain(self) -> float:
        """The mean difference at its last rung; below 0 is better."""
        return self.rungs[-1]["effect"]

    @property
    def trend(self) -> float | None:
        """The change of the gain since the previous rung; above 0: the benefit fades."""
        return self.gain - self.rungs[-2]["effect"] if len(self.rungs) > 1 else None

    @property
    def expected(self) -> float:
        """The gain extrapolated to the next rung."""
        return self.gain + TREND * (self.trend or 0.0)

    def data(self) -> dict[str, Any]:
        """Return the candidate as JSON."""
        return {
            "name": self.move.name,
            "parts": [one.name for one in self.move.parts],
            "rungs": self.rungs,
            "trend": self.trend if self.rungs else None,
            "verdict": self.verdict or ("running" if not self.failed else f"failed: {self.failed}"),
        }


@dataclass(frozen=True)
class Current:
    """The run in progress, for a display."""

    label: str
    stage: str  # "round 1, 6 s"
    number: int  # of this stage's runs, from 1
    runs: int
    table: Sequence[Candidate]  # candidates of the stage, so far
    spent: float  # seconds of the budget used
    compiling: int = 0  # recipes that are compiled now, while none trains


Watch = Callable[[Current, float], None]


Planner = Callable[[Recipe], Plan]
"""Maps a recipe to its plan; raises MinillmError if it cannot be planned."""


class PairedRuns:
    """Trainer of plans at given lengths, with paired comparisons.

    Args:
        members: trains each run, or loads it from its file.
        base: the baseline plan, whose failure ends the search.
        length: of the runs for which the recipe is optimised.
        seed: of the first run.
        speed: measured tokens per second of the baseline.
        about: facts that must be equal for two runs to be comparable.
        say: prints a line.
        watch: called with the current run and its progress.
        turns: interleave the plans, so that a slowdown of the machine affects all of them; False: the runs
            of a plan are consecutive, and compile it once.
        pool: trains runs on several devices at once; None: one after another, here.
    """

    def __init__(
        self,
        members: Members,
        base: Plan,
        length: Length,
        *,
        seed: int,
        speed: float,
        about: Mapping[str, Any],
        say: Say,
        watch: Watch,
        turns: bool,
        pool: Pool | None = None,
    ) -> None:
        self._pool = pool
        self.members, self.base, self.length = members, base, length
        self.seed, self.speed, self.say = seed, speed, say
        self._about, self._watch, self._turns = about, watch, turns
        self._made: dict[str, Trained | str] = {}  # by file: the incumbent's runs are shared
        self._overheads: list[float] = []  # seconds of a run outside training and evaluation
        self._compiling: list[float] = []  # the same, of runs that compiled their graph
        self._graphs: list[str] = []  # of the runs so far
        self._alive: list[Candidate] = []
        self._stage, self._number, self._runs = "", 0, 1

    def begin(self, stage: str, runs: int, table: Sequence[Candidate] = ()) -> None:
        """Begin a stage with its number of runs and its candidates."""
        self._stage, self._number, self._runs, self._alive = stage, 0, runs, list(table)

    def alone(self, stage: str, plan: Plan, length: Length, seed: int, label: str) -> Trained | str:
        """Train a plan by the clock as the only run of a stage, or load the run from its file.

        Returns:
            The run, or the reason of its failure.

        Raises:
            Interrupted: a signal.
        """
        self.begin(stage, 1)
        self._ahead([(label, plan, seed)], length, timed=True)
        self._number += 1
        return self._trained(plan, length, seed, label, timed=True)

    def runs_of(
        self,
        plans: Mapping[str, Plan],
        length: Length,
        seeds: Sequence[int] | Mapping[str, Sequence[int]],
        *,
        timed: bool = False,
    ) -> dict[str, dict[int, Trained | str]]:
        """Train each plan with the seeds until one of its runs fails, in the order A B B A or A A B B.

        Args:
            plans: label -> plan.
            length: of the runs.
            seeds: of all plans' runs; or label -> of this plan's.
            timed: train by the clock, with nothing beside a run; False: where processes share a device,
                minutes are converted to steps, so that some compile while others train.

        Raises:
            MinillmError: the baseline plan failed.
        """
        of = seeds if isinstance(seeds, Mapping) else dict.fromkeys(plans, seeds)
        if self._turns:
            order = [
                (label, of[label][number])
                for number in range(max(map(len, of.values()), default=0))
                for label in (reversed(plans) if number % 2 else plans)
                if number < len(of[label])
            ]
        else:
            order = [(label, seed) for label in plans for seed in of[label]]
        self._ahead([(label, plans[label], seed) for label, seed in order], length, timed)
        found: dict[str, dict[int, Trained | str]] = {label: {} for label in plans}
        for label, seed in order:
            if any(isinstance(run, str) for run in found[label].values()):
                continue
            self._number += 1
            run = found[label][seed] = self._trained(plans[label], length, seed, label, timed=timed)
            if isinstance(run, str) and plans[label] is self.base:
                raise MinillmError(
                    f"the settings that the search begins with cannot be trained: {run}",
                    where=f"{length.words}, seed {seed}",
                    fix="settings with which minillm train runs",
                )
        return found

    def _trained(
        self, plan: Plan, length: Length, seed: int, label: str, *, timed: bool
    ) -> Trained | str:
        """Train a plan to a length, or load the run from its file; raises as :meth:`alone`."""
        sized, identity, file = self._identified(plan, length, seed, timed)
        if file in self._made:
            return self._made[file]
        current = self._current(label)
        self._watch(current, 0.0)
        found = self.members.take(file, identity, difference)
        if found is None:
            if not (self._turns or self.members.study.keeps(sized)):
                self._watch(replace(current, compiling=1), 0.0)
            found = self.members.make(
                file,
                identity,
                sized,
                seed,
                evaluations=1,
                watch=lambda progress: self._watch(current, progress),
            )
            if isinstance(found, str):
                self.say(f"{label}, seed {seed}: {found}")
        if isinstance(found, Trained):
            at_once = min(self._at_once, self._runs)  # the first run is alone on the machine
            beside = self.members.wall * at_once - (1 + EVALUATION) * found.seconds
            if self._pool and self.by_pace and not self._graphs:  # nothing was beside the first run
                beside /= self._pool.each
            (self._compiling if self._compiles(plan) else self._overheads).append(max(0.0, beside))
            self._graphs.append(graph_of(plan))
        self._made[file] = found
        return found

    def _ahead(self, runs: Iterable[tuple[str, Plan, int]], length: Length, timed: bool) -> None:
        """Train the runs (label, plan, seed) without a file on all devices at once."""
        if (pool := self._pool) is None:
            return
        wanted = []
        for label, plan, seed in runs:
            sized, identity, file = self._identified(plan, length, seed, timed)
            if file not in self._made:
                by_clock = not identity["by_pace"]
                wanted.append(Wanted(label, sized, seed, 1, file, identity, by_clock))
        done, walls = 0, 0.0

        def watch(under_way: Sequence[Wanted], progress: float) -> None:
            current = self._current(few([*dict.fromkeys(one.label for one in under_way)]))
            now = {"number": current.number + done + 1, "spent": current.spent + walls}
            compiling = 0 if self._turns else pool.compiling
            self._watch(replace(current, **now, compiling=compiling), progress)

        for made, wall in self.members.ahead(pool, wanted, watch):
            if isinstance(made.outcome, MinillmError):
                self.say(f"{made.wanted.label}, seed {made.wanted.seed}: {made.outcome.what}")
            done, walls = done + 1, walls + wall

    def _current(self, label: str) -> Current:
        return Current(
            label, self._stage, self._number, self._runs, self._alive, self.members.spent
        )

    def _identified(
        self, plan: Plan, length: Length, seed: int, timed: bool
    ) -> tuple[Plan, dict[str, Any], str]:
        """Return a plan with its length and evaluation, its run's identity, and the name of its file."""
        sized = with_evaluation(length.of(plan), self._predictions(plan, length))
        train = sized.config.train
        identity = {
            **identity_of(sized, self._about),
            "rows": [train.rows, train.accumulate],
            "length": [train.steps, train.minutes],
            "by_pace": self.by_pace and not timed,
        }
        digest = hashlib.sha256(json.dumps(identity["plan_hash"]).encode())
        digest.update(json.dumps([identity[k] for k in ("rows", "length", "by_pace")]).encode())
        return sized, identity, f"{digest.hexdigest()[:16]}-seed{seed}.json"

    @property
    def by_pace(self) -> bool:
        """Whether runs that are not timed are trained by pace: by minutes, in processes that share a device."""
        shared = self._pool is not None and self._pool.each > 1
        return shared and self.length.minutes is not None

    @property
    def _at_once(self) -> int:
        """The number of runs that are trained at the same time."""
        return len(self._pool.devices) if self._pool else 1

    def _predictions(self, plan: Plan, length: Length) -> int:
        """Choose the number of evaluation tokens within the allowed fraction of a run's time."""
        learnt = length.seconds(self.speed) * self.speed
        allowed = max(plan.config.train.seq_len, EVALUATION * LEARN * learnt)
        return min(plan.config.eval.tokens, 2 ** int(math.log2(allowed)))

    def _compiles(self, plan: Plan) -> bool:
        """Return whether a run compiles: one process keeps the graph of its last run, a pool's keep several."""
        kept = self._graphs if self._pool else self._graphs[-1:]
        return not self._turns and graph_of(plan) not in kept

    def cost(self, length: Length, *, runs: int = 1, graphs: int = 0) -> float:
        """Estimate the seconds that runs of a length take of the search.

        Args:
            length: of each run.
            runs: their number.
            graphs: number of graphs to compile for them.
        """
        beside = median(self._overheads) if self._overheads else 1.0
        compiling = fmean(self._compiling) if self._compiling else 0.0
        training = (1 + EVALUATION) * length.seconds(self.speed)
        return (runs * (training + beside) + graphs * compiling) / self._at_once

    def compare(
        self,
        one: Candidate,
        length: Length,
        reference: Outcomes,
        runs: Outcomes,
    ) -> None:
        """Record a candidate's gain at a rung, replacing a measurement with fewer pairs.

        If a run of the reference failed, nothing is known of the candidate.
        """
        if failed := failure_of(runs):
            one.failed = failed
        if failed or failure_of(reference):
            return
        if one.rungs and one.rungs[-1]["length"] == length.words:
            one.rungs.pop()
        pairs = zip(trained_of(runs), trained_of(reference), strict=True)
        differences = [ours.val_loss - theirs.val_loss for ours, theirs in pairs]
        one.rungs.append(
            {
                "length": length.words,
                "tokens": fmean(run.tokens for run in trained_of(runs)),
                "seconds": fmean(run.seconds for run in trained_of(runs)),
                **effect_of(differences).data(),
                "loss": fmean(run.val_loss for run in trained_of(runs)),
                "differences": differences,
                "speed": _ratio(runs, reference, "tokens_per_second"),
                "memory": _ratio(runs, reference, "peak_bytes"),
            }
        )

    def difference(
        self, ours: Outcomes, others: Outcomes, pool: Sequence[Outcomes] = ()
    ) -> dict[str, Any]:
        """Compare two sets of runs by their common seeds; the result has no effect if a run failed.

        Args:
            ours: the runs with a change.
            others: the runs without it.
            pool: the sets of runs that show how noisy a difference is, if there are more than these two.
        """
        if failed := failure_of(ours) or failure_of(others):
            return {"effect": None, "why": f"failed: {failed}"}
        seeds = [seed for seed in ours if seed in others]
        ours, others = (_succeeded(runs, seeds) for runs in (ours, others))
        sets = [_succeeded(one, one) for one in pool]
        noise = noise_among(near(sets, ours, others), seeds, lambda run: run.val_loss)
        speeds = noise_among(sets, seeds, lambda run: math.log(run.tokens_per_second))
        differences = [ours[seed].val_loss - others[seed].val_loss for seed in seeds]
        return {
            **effect_of(differences, noise).data(),
            "speed": _ratio(ours, others, "tokens_per_second", speeds),
            "memory": _ratio(ours, others, "peak_bytes"),
        }

    def saving(self, rung: Mapping[str, Any]) -> str:
        """Describe a candidate's saving: memory, or time where runs have equal tokens."""
        speed, memory = rung["speed"], rung["memory"]
        if self.length.tokens and speed and speed["low"] and speed["low"] > 1 + SAVES:
            return "time"
        return "memory" if memory and memory["high"] and memory["high"] < 1 - SAVES else ""


def with_evaluation(plan: Plan, tokens: int) -> Plan:
    """Return a plan with another number of evaluation tokens."""
    changed = plan.config.eval.model_copy(update={"tokens": tokens})
    return replace(plan, config=plan.config.model_copy(update={"eval": changed}))


def in_words(effect: Mapping[str, Any]) -> str:
    """Format a gain with its interval: ``-0.123 [-0.150, -0.096]``."""
    return interval(signed, effect["effect"], effect["low"], effect["high"])


def trained_of(runs: Outcomes) -> list[Trained]:
    """List the successful runs."""
    return [run for run in runs.values() if isinstance(run, Trained)]


def failure_of(runs: Outcomes) -> str:
    """Return why the first failed run failed; empty: no run failed."""
    return next((run for run in runs.values() if isinstance(run, str)), "")


def _succeeded(runs: Outcomes, seeds: Iterable[int]) -> dict[int, Trained]:
    return {seed: run for seed in seeds if isinstance(run := runs[seed], Trained)}


def _ratio(
    ours: Outcomes, others: Outcomes, figure: str, noise: Noise | None = None
) -> dict[str, Any] | None:
    """Estimate the ratio of a measurement over pairs, with its interval; None if a value is missing."""
    pairs = [
        (getattr(one, figure), getattr(other, figure))
        for one, other in zip(trained_of(ours), trained_of(others), strict=False)
    ]
    if not pairs or not all(one and other for one, other in pairs):
        return None
    found = effect_of([math.log(one / other) for one, other in pairs], noise)
    values = {"effect": found.effect, "low": found.low, "high": found.high}
    return {key: None if log is None else math.exp(log) for key, log in values.items()}
