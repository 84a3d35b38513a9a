"""The race of a search: recipes against the incumbent, in rounds of rungs that grow.

A rung is a length of runs. All candidates of a round run at the shortest one, with one seed; the best
third of them runs three times as long, and so on; at the longest, which is the length that the recipe
is for, several seeds make an interval. A candidate is a difference from the incumbent: its gain is the
mean over pairs of its loss minus the incumbent's, with the same seed and the same data in the same
order. Between two rungs candidates are ranked by their gain and by what it lost or won since the
rung before, so that what helps early and hurts late is told by its trend. Where a third of the length
is too few steps to say anything, one pair of the whole length comes first. Before the last rung those
that help are put together, the best ones first, as far as planning allows: that is a candidate too.

The best candidate whose interval leaves 0 out is the next incumbent. In the end, with seeds that have
chosen nothing, the recipe is compared with the settings it began with, and with itself without each
of its parts: a part that makes no difference and saves nothing is left out.

All decisions follow from the files of the members, the time that they took included: a search that was
killed does the same again, and trains only what is missing.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any, Protocol

from minillm_core import MinillmError, Plan
from minillm_core.commands import amount, duration
from minillm_core.studies import Trained, graph_of, interval, signed
from minillm_lab.members import Members, identity_of
from minillm_lab.result_diff import difference
from minillm_lab.space import Move, Recipe, Space, parts_of, together, without
from minillm_lab.worth import Effect, effect_of

ETA = 3
"""Times that a rung is longer than the one before; of the candidates one in so many goes on."""

RUNGS = 3

PAIRS, MORE = 3, 2
"""Seeds at the longest rung, and further ones for the best where they do not decide."""

FRESH = 1000
"""Seeds of the last comparison begin so far above those that have chosen."""

LEAST = 10
"""Steps of the shortest run: fewer say nothing but how fast the rate is."""

TREND = 0.5
"""Share of what a gain changed by from one rung to the next that is expected of the next one."""

UNIONS = 3
"""Candidates that are several moves at once, in a round."""

LAST = 0.45
"""Share of the budget that the last comparison may take."""

SAVES = 0.02
"""Share of time or memory that is worth a part whose effect on the loss is not distinguishable."""

EVALUATION = 0.2
"""Time of the evaluation at a run's end, in times of the run, at most."""

LEARN = 3.0
"""Times that learning from a token takes longer than predicting it."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Length:
    """The length of a run: minutes of training, or tokens."""

    minutes: float | None = None
    tokens: float | None = None

    def shorter(self, factor: float) -> Length:
        """Divide it."""
        return Length(self.minutes and self.minutes / factor, self.tokens and self.tokens / factor)

    def of(self, plan: Plan) -> Plan:
        """Give a plan this length."""
        if self.minutes is not None:
            return plan.with_train(steps=None, minutes=self.minutes)
        assert self.tokens is not None
        steps = max(1, round(self.tokens / plan.tokens_per_step))
        return plan.with_train(steps=steps, minutes=None)

    def seconds(self, tokens_per_second: float) -> float:
        """Estimate its time."""
        if self.minutes is not None:
            return 60.0 * self.minutes
        assert self.tokens is not None
        return self.tokens / tokens_per_second

    @property
    def words(self) -> str:
        """Name it: ``18 s``, ``2:30``, ``1.05 M tokens``."""
        if self.minutes is None:
            return f"{amount(round(self.tokens or 0))} tokens"
        seconds = 60.0 * self.minutes
        return f"{seconds:.3g} s" if seconds < 90 else duration(seconds)


@dataclass(frozen=True)
class Rung:
    """A part of a round: how long runs are, and how many pairs a candidate has."""

    length: Length
    pairs: int


@dataclass
class Candidate:
    """A move from the incumbent, and what was measured of it."""

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
        """What the gain changed by since the rung before; above 0: it fades."""
        return self.gain - self.rungs[-2]["effect"] if len(self.rungs) > 1 else None

    @property
    def expected(self) -> float:
        """The gain that is expected at the next rung."""
        return self.gain + TREND * (self.trend or 0.0)

    def data(self) -> dict[str, Any]:
        """Give it as JSON."""
        return {
            "name": self.move.name,
            "parts": [one.name for one in self.move.parts],
            "rungs": self.rungs,
            "trend": self.trend if self.rungs else None,
            "verdict": self.verdict or ("running" if not self.failed else f"failed: {self.failed}"),
        }


class Planner(Protocol):
    """Whatever makes a recipe's plan."""

    def __call__(self, recipe: Recipe) -> Plan:
        """Plan a recipe.

        Raises:
            MinillmError: it cannot be.
        """
        ...


@dataclass(frozen=True)
class Current:
    """The run that is under way, for a display."""

    label: str
    stage: str  # "round 1, 6 s"
    number: int  # of this stage's runs, from 1
    runs: int
    table: Sequence[Candidate]  # of the stage, as they stand
    spent: float  # seconds of the budget


Watch = Callable[[Current, float], None]


class Race:
    """A race in a folder.

    Args:
        members: makes the runs, and takes finished ones.
        plan: makes a recipe's plan.
        space: what may be tried.
        base: the recipe to begin with.
        length: of the runs that the recipe is for.
        budget: seconds for all runs.
        seed: of the first run.
        speed: tokens a second of the base, as measured before.
        about: facts that two runs must share to be compared.
        say: prints a line.
        watch: takes the current run and its progress.
        note: is called with the result so far, after each stage.
    """

    def __init__(
        self,
        members: Members,
        plan: Planner,
        space: Space,
        base: Recipe,
        length: Length,
        *,
        budget: float,
        seed: int,
        speed: float,
        about: Mapping[str, Any],
        say: Say,
        watch: Watch = lambda current, progress: None,
        note: Callable[[], None] = lambda: None,
    ) -> None:
        self.members, self.space, self.base, self.length = members, space, base, length
        self.budget, self.seed, self.speed, self.about = budget, seed, speed, about
        self._plan, self._say, self._watch, self._note = plan, say, watch, note
        self.base_plan = plan(base)
        self.incumbent, self.plan = base, self.base_plan
        self.rounds: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []
        self.refused: dict[str, str] = {}  # move -> why it cannot be planned
        self.untried: list[str] = []
        self.last: dict[str, Any] = {}
        self._out: set[str] = set()  # moves that are not tried again
        self._expected: dict[str, float] = {}  # of moves that may help another incumbent
        self._overheads: list[float] = []  # of a run, beside its training and evaluation
        self._alive: list[Candidate] = []
        self._stage, self._number, self._runs = "", 0, 0
        steps = length.of(self.base_plan).config.train.steps or (
            length.seconds(speed) * speed / self.base_plan.tokens_per_step
        )
        factors = [ETA**power for power in reversed(range(1, RUNGS))]
        shorter = [length.shorter(one) for one in factors if steps / one >= LEAST]
        self._rungs = [Rung(one, 1) for one in shorter or [length]] + [Rung(length, PAIRS)]

    @property
    def lengths(self) -> list[Length]:
        """List the lengths of runs, the shortest one first."""
        return list(dict.fromkeys(one.length for one in self._rungs))

    # Rounds

    def run(self) -> None:
        """Race until the budget is spent or nothing is left to try, then compare.

        Raises:
            Interrupted: a signal; finished runs are kept.
            MinillmError: the settings that the search began with cannot be trained.
        """
        number = 1
        while candidates := self.candidates():
            share = self._share(number)
            if share is None:
                self._say("the rest of the budget is for the last comparison")
                break
            self._round(number, candidates, share)
            number += 1
        self._finish()

    def least_cost(self) -> float:
        """Estimate the seconds of the smallest search: a candidate and the base, compared twice."""
        return 4 * PAIRS * self._cost(self.length)

    def candidates(self) -> list[Candidate]:
        """Plan the moves from the incumbent, those that are expected to help first."""
        moves = [
            one
            for one in self.space.moves(self.incumbent, self.plan, self.base)
            if one.name not in self._out
        ]
        moves.sort(key=lambda one: self._expected.get(one.name, 0.0))
        found: list[Candidate] = []
        for move in moves:
            ways = [self._planned(move)]
            if ways == [None] and move.adds:
                more = [one for one in self.space.ways_in(move) if one.name not in self._out]
                ways = [self._planned(one, note=False) for one in more]
            found += [one for one in ways if one is not None]
        return found

    def _planned(self, move: Move, *, note: bool = True) -> Candidate | None:
        recipe = move.applied(self.incumbent)
        try:
            plan = self._plan(recipe)
            if plan.num_parameters > max(self.space.parameters, self.base_plan.num_parameters) and (
                any(key.startswith("model.") for key in move.settings)
            ):
                raise MinillmError(
                    f"{amount(plan.num_parameters)} parameters are more than "
                    f"{amount(self.space.parameters)}"
                )
            if self.length.tokens and len(plan.course) > 1:
                raise MinillmError("the sizes of its batches change: search it with --minutes")
        except MinillmError as error:
            if note and not move.parts:
                self.refused[move.name] = error.what
            return None
        self.refused.pop(move.name, None)
        return Candidate(move, recipe, plan)

    def _share(self, number: int) -> float | None:
        """Choose the seconds of a round; None: there is no time for another."""
        left = self.budget - self.members.spent - self._reserved()
        least = 2 * PAIRS * self._cost(self.length)
        if left < (least if number == 1 else 1.25 * least):
            return None
        return max(left / 2, least)

    def _reserved(self) -> float:
        """Estimate the seconds of the last comparison: base, recipe, recipe without each part."""
        parts = max(len(parts_of(self.incumbent, self.base)), 1)
        sets = 2 + (parts if parts > 1 else 0)
        return min(LAST * self.budget, sets * PAIRS * self._cost(self.length))

    @property
    def _most_parts(self) -> int:
        """Count the parts that the last comparison has time for."""
        return max(1, int(LAST * self.budget / (PAIRS * self._cost(self.length))) - 2)

    def _cost(self, length: Length) -> float:
        """Estimate the seconds of a run, what lies around it included."""
        beside = median(self._overheads) if self._overheads else 1.0
        return (1 + EVALUATION) * length.seconds(self.speed) + beside

    def _sizes(self, queued: int, share: float) -> list[int]:
        """Choose how many candidates run at each rung; the shortest one gets what the others leave."""
        costs = [self._cost(one.length) for one in self._rungs]
        for last in (4, 3, 2, 1):
            sizes, left = [last], share - (last + 1) * PAIRS * costs[-1]
            for cost in costs[-2:0:-1]:
                sizes.insert(0, ETA * sizes[0])
                left -= (sizes[0] + 1 + UNIONS) * cost
            first = int(left / costs[0]) - 1 - UNIONS * (len(costs) == 2)
            if first < min(queued, ETA * sizes[0]) and last > 1:
                continue
            sizes.insert(0, max(first, min(queued, sizes[0])))
            return [min(queued, one) for one in sizes]
        raise AssertionError("the loop ends with a size of 1")

    def _round(self, number: int, queued: Sequence[Candidate], share: float) -> None:
        sizes = self._sizes(len(queued), share)
        alive = list(queued[: sizes[0]])
        self.untried = [one.move.name for one in queued[sizes[0] :]]
        record: dict[str, Any] = {
            "round": number,
            "incumbent": [one.name for one in parts_of(self.incumbent, self.base)],
            "candidates": [],
            "accepted": None,
        }
        self.rounds.append(record)
        raced = [*alive]

        def note() -> None:
            record["candidates"] = [one.data() for one in raced]
            self._note()

        for rung, size in zip(self._rungs, sizes, strict=True):
            alive = self._best(alive, size)
            alive = self._raced(number, rung, alive)
            if rung is self._rungs[-2]:
                unions = self._unions(alive)
                raced += unions
                alive += self._raced(number, rung, unions)
            note()
            if not alive:
                break
        accepted = self._accepted(alive)
        for one in raced:
            one.verdict = self._judged(one, accepted)
        if accepted is not None:
            record["accepted"] = accepted.move.name
            self._step(number, accepted)
        for one in raced:
            if accepted is None or one.failed or (one.rungs and one.expected >= 0):
                self._out.add(one.move.name)
            elif one.rungs:
                self._expected[one.move.name] = one.expected
        note()

    def _best(self, alive: Sequence[Candidate], size: int) -> list[Candidate]:
        """Choose those that go on to a rung; before the first one all do."""
        if not all(one.rungs for one in alive):
            return list(alive[:size])
        helping = [one for one in alive if one.expected < 0]
        return sorted(helping, key=lambda one: one.expected)[:size]

    def _unions(self, alive: Sequence[Candidate]) -> list[Candidate]:
        """Put moves together, the best first, as far as they can be planned together."""
        ranked = self._best(alive, len(alive))
        most = self._most_parts - len(parts_of(self.incumbent, self.base))
        joined: list[Move] = []
        unions: dict[int, Candidate] = {}
        for one in ranked:
            if len(joined) >= most:
                break
            if any(one.move.crosses(other) for other in joined):
                continue
            union = self._planned(together([*joined, one.move]))
            if union is not None:
                joined.append(one.move)
                unions[len(joined)] = union
        sizes = {2**power for power in range(1, UNIONS)} | {len(joined)}
        return [unions[size] for size in sorted(sizes) if size > 1 and size in unions]

    def _raced(self, number: int, rung: Rung, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Run candidates at a rung against the incumbent; those that did not fail."""
        graph, length = graph_of(self.plan), rung.length
        ordered = sorted(candidates, key=lambda one: graph_of(one.plan) != graph)
        self.begin(f"round {number}, {length.words}", (len(ordered) + 1) * rung.pairs, ordered)
        seeds = range(self.seed, self.seed + rung.pairs)
        if not ordered:
            return []
        reference = self._runs_of(self.plan, length, seeds, "the incumbent")
        for one in ordered:
            runs = self._runs_of(one.plan, length, seeds, one.move.name)
            self._compare(one, length, reference, runs)
        return [one for one in ordered if not one.failed]

    def _compare(
        self,
        one: Candidate,
        rung: Length,
        reference: Mapping[int, Trained | str],
        runs: Mapping[int, Trained | str],
    ) -> None:
        """Note a candidate's gain at a rung, in the place of one with fewer pairs."""
        failures = [run for run in (*runs.values(), *reference.values()) if isinstance(run, str)]
        if failures:
            one.failed = failures[0]
            return
        if one.rungs and one.rungs[-1]["length"] == rung.words:
            one.rungs.pop()
        losses = _losses(runs), _losses(reference)
        differences = [ours - theirs for ours, theirs in zip(*losses, strict=True)]
        one.rungs.append(
            {
                "length": rung.words,
                "tokens": fmean(run.tokens for run in _trained(runs)),
                "seconds": fmean(run.seconds for run in _trained(runs)),
                **effect_of(differences).data(),
                "loss": fmean(losses[0]),
                "differences": differences,
                "speed": _ratio(runs, reference, "tokens_per_second"),
                "memory": _ratio(runs, reference, "peak_bytes"),
            }
        )

    def _accepted(self, alive: Sequence[Candidate]) -> Candidate | None:
        """Choose the next incumbent: better by more than the interval, or cheaper and no worse."""
        ranked = sorted((one for one in alive if not one.failed), key=lambda one: one.gain)
        if not ranked or ranked[0].rungs[-1]["pairs"] < PAIRS:
            return None
        best = ranked[0]
        if best.gain < 0 and not best.rungs[-1]["distinguishable"]:
            self._more_pairs(best)
        clear = [one for one in ranked if one.rungs[-1]["distinguishable"] and one.gain < 0]
        cheaper = [one for one in ranked if one.gain <= 0 and self._saving(one.rungs[-1])]
        return next(iter([*clear, *cheaper]), None)

    def _more_pairs(self, one: Candidate) -> None:
        """Train what is near once more, with further seeds, where the budget holds it."""
        if self.members.spent + self._reserved() + 2 * MORE * self._cost(self.length) > self.budget:
            return
        self.begin(f"{MORE} more pairs, {self.length.words}", 2 * MORE, [one])
        seeds = range(self.seed, self.seed + PAIRS + MORE)
        reference = self._runs_of(self.plan, self.length, seeds, "the incumbent")
        runs = self._runs_of(one.plan, self.length, seeds, one.move.name)
        self._compare(one, self.length, reference, runs)

    def _saving(self, rung: Mapping[str, Any]) -> str:
        """Say what a candidate saves: memory, or time where runs are of equal tokens."""
        speed, memory = rung["speed"], rung["memory"]
        if self.length.tokens and speed and speed["low"] and speed["low"] > 1 + SAVES:
            return "time"
        return "memory" if memory and memory["high"] and memory["high"] < 1 - SAVES else ""

    def _judged(self, one: Candidate, accepted: Candidate | None) -> str:
        """Put into words what became of a candidate."""
        if one.failed:
            return f"failed: {one.failed}"
        if one is accepted:
            return "accepted"
        if not one.rungs:
            return "not run"
        final = one.rungs[-1]
        if final["pairs"] >= PAIRS:
            if final["distinguishable"]:
                return "better, but not the best of its round" if one.gain < 0 else "worse"
            return "not distinguishable"
        if one.rungs[0]["effect"] < 0 <= one.expected:
            return "helps early, not late"
        return "no gain" if one.expected >= 0 else "others gained more"

    def _step(self, number: int, one: Candidate) -> None:
        """Make a candidate the incumbent."""
        final = one.rungs[-1]
        self.steps.append(
            {
                "round": number,
                "name": one.move.name,
                "parts": [part.name for part in one.move.parts] or [one.move.name],
                "saves": "" if final["distinguishable"] else self._saving(final),
                "by_rung": [{"length": r["length"], "effect": r["effect"]} for r in one.rungs],
                **final,
            }
        )
        self._say(f"round {number}: {one.move.name}, {in_words(final)} at {self.length.words}")
        self._out |= {part.name for part in one.move.parts or (one.move,)}
        for key in one.move.settings:  # there is no way back to the value that was given up
            owner, _, name = key.partition(".")
            if owner in ("model", "train"):
                before = getattr(getattr(self.plan.config, owner), name)
                moves = self.space.moves(one.recipe, one.plan, self.base)
                self._out |= {m.name for m in moves if dict(m.settings) == {key: before}}
        self.incumbent, self.plan = one.recipe, one.plan

    # The last comparison

    def _finish(self) -> None:
        """Compare the recipe with the base and with itself without each part, by fresh seeds."""
        parts = parts_of(self.incumbent, self.base)
        if not parts:
            return
        seeds = range(self.seed + FRESH, self.seed + FRESH + PAIRS)
        plans: dict[str, Plan] = {}
        unplanned: dict[str, str] = {}
        for part in parts:
            try:
                plans[part.name] = self._plan(without(self.incumbent, part))
            except MinillmError as error:
                unplanned[part.name] = error.what
        self.begin(f"the last comparison, {self.length.words}", (2 + len(plans)) * PAIRS, [])
        base = self._runs_of(self.base_plan, self.length, seeds, "as it was")
        found = self._runs_of(self.plan, self.length, seeds, "the recipe")
        table, idle = [], []
        for part in parts:
            row: dict[str, Any] = {"name": part.name, "effect": None}
            if part.name in unplanned:
                row["why"] = unplanned[part.name]
            elif len(parts) > 1 and not self._affordable():
                row["why"] = "the budget is spent"
            else:
                runs = (
                    base
                    if len(parts) == 1
                    else self._runs_of(plans[part.name], self.length, seeds, f"no {part.name}")
                )
                row |= self._difference(found, runs)
                if row["effect"] is not None and not _decided(row):
                    row["saves"] = self._saving(row)
                    if not row["saves"]:
                        idle.append((row["effect"], part))
            table.append(row)
        self.last = {"parts": table, "dropped": [], **self._result(base, found)}
        self._note()
        if idle:
            idle.sort(key=lambda one: -one[0])
            found = self._drop([part for _, part in idle], base, found, seeds)
        for row, part in zip(table, parts, strict=True):
            if row["effect"] is None and part.name not in self.last["dropped"]:
                self._compare_without(row, part, found, base, seeds)

    def _drop(
        self,
        idle: Sequence[Move],
        base: Mapping[int, Trained | str],
        found: Mapping[int, Trained | str],
        seeds: Sequence[int],
    ) -> Mapping[int, Trained | str]:
        """Leave out the parts that make no difference: all of them where that makes none either.

        Returns:
            The runs of what is left.
        """
        for parts in (idle, idle[:1]) if len(idle) > 1 else (idle,):
            recipe = self.incumbent
            for part in parts:
                recipe = without(recipe, part)
            try:
                plan = self._plan(recipe)
            except MinillmError:
                continue
            if len(parts) > 1 and not self._affordable():
                continue
            runs = self._runs_of(plan, self.length, seeds, "the recipe without idle parts")
            row = self._difference(runs, found)
            if row["effect"] is None or (_decided(row) and row["effect"] > 0):
                continue
            self.incumbent, self.plan = recipe, plan
            self.last["dropped"] = [part.name for part in parts]
            self.last |= self._result(base, runs)
            return runs
        return found

    def _compare_without(
        self,
        row: dict[str, Any],
        part: Move,
        found: Mapping[int, Trained | str],
        base: Mapping[int, Trained | str],
        seeds: Sequence[int],
    ) -> None:
        """Compare with the recipe without a part, which is possible now that others have gone."""
        try:
            plan = self._plan(without(self.incumbent, part))
        except MinillmError as error:
            row["why"] = error.what
            return
        alone = len(parts_of(self.incumbent, self.base)) == 1
        if alone or self._affordable():
            runs = base if alone else self._runs_of(plan, self.length, seeds, f"no {part.name}")
            row |= {"why": "", **self._difference(found, runs)}

    def _affordable(self) -> bool:
        """Tell whether the budget, and a twentieth of it more, hold another set of runs."""
        return self.members.spent + PAIRS * self._cost(self.length) <= 1.05 * self.budget

    def _difference(
        self, ours: Mapping[int, Trained | str], others: Mapping[int, Trained | str]
    ) -> dict[str, Any]:
        """Compare two sets of runs; without an effect where a run failed."""
        failures = [run for run in (*ours.values(), *others.values()) if isinstance(run, str)]
        if failures:
            return {"effect": None, "why": f"failed: {failures[0]}"}
        pairs = zip(_losses(ours), _losses(others), strict=True)
        return {
            **effect_of([one - other for one, other in pairs]).data(),
            "speed": _ratio(ours, others, "tokens_per_second"),
            "memory": _ratio(ours, others, "peak_bytes"),
        }

    def _result(
        self, base: Mapping[int, Trained | str], found: Mapping[int, Trained | str]
    ) -> dict[str, Any]:
        return {
            "gain": self._difference(found, base),
            "seeds": list(found),
            "base_losses": [run.val_loss for run in _trained(base)],
            "losses": [run.val_loss for run in _trained(found)],
            "base_runs": [run.data() for run in _trained(base)],
            "runs": [run.data() for run in _trained(found)],
        }

    # Runs

    def begin(self, stage: str, runs: int, table: Sequence[Candidate]) -> None:
        self._stage, self._number, self._runs, self._alive = stage, 0, runs, list(table)

    def _runs_of(
        self, plan: Plan, length: Length, seeds: Sequence[int], label: str
    ) -> dict[int, Trained | str]:
        found: dict[int, Trained | str] = {}
        for seed in seeds:
            self._number += 1
            found[seed] = self.trained(plan, length, seed, label)
            if isinstance(found[seed], str):
                break
        if plan is self.base_plan and (failed := [o for o in found.values() if isinstance(o, str)]):
            raise MinillmError(
                f"the settings that the search begins with cannot be trained: {failed[0]}",
                where=f"{length.words}, seed {seed}",
                fix="settings with which minillm train runs",
            )
        return found

    def trained(self, plan: Plan, length: Length, seed: int, label: str) -> Trained | str:
        """Train a plan to a length, or take the run from its file.

        Returns:
            The run, or why it failed.

        Raises:
            Interrupted: a signal.
        """
        sized = with_evaluation(length.of(plan), self._predictions(plan, length))
        train = sized.config.train
        identity = {
            **identity_of(sized, self.about),
            "rows": [train.rows, train.accumulate],
            "length": [train.steps, train.minutes],
            "eval_tokens": sized.config.eval.tokens,
        }
        digest = hashlib.sha256(json.dumps(identity["plan_hash"]).encode())
        digest.update(json.dumps([identity[k] for k in ("rows", "length")]).encode())
        file = f"{digest.hexdigest()[:16]}-seed{seed}.json"
        current = Current(
            label, self._stage, self._number, self._runs, self._alive, self.members.spent
        )
        self._watch(current, 0.0)
        found = self.members.take(file, identity, difference)
        if found is None:
            found = self.members.make(
                file,
                identity,
                sized,
                seed,
                evaluations=1,
                watch=lambda progress: self._watch(current, progress),
            )
            if isinstance(found, str):
                self._say(f"{label}, seed {seed}: {found}")
        if isinstance(found, Trained):
            beside = self.members.wall - (1 + EVALUATION) * found.seconds
            self._overheads.append(max(0.0, beside))
        return found

    def _predictions(self, plan: Plan, length: Length) -> int:
        """Choose the predictions of an evaluation: no more than its share of a run's time allows."""
        learnt = length.seconds(self.speed) * self.speed
        allowed = max(plan.config.train.seq_len, EVALUATION * LEARN * learnt)
        return min(plan.config.eval.tokens, 2 ** int(math.log2(allowed)))


def with_evaluation(plan: Plan, tokens: int) -> Plan:
    """Give a plan's evaluations another number of predictions."""
    changed = plan.config.eval.model_copy(update={"tokens": tokens})
    return replace(plan, config=plan.config.model_copy(update={"eval": changed}))


def in_words(effect: Mapping[str, Any]) -> str:
    """Write a gain with its interval: ``-0.123 (-0.150 .. -0.096)``."""
    return interval(signed, effect["effect"], effect["low"], effect["high"])


def _decided(row: Mapping[str, Any]) -> bool:
    return bool(row["distinguishable"])


def _trained(runs: Mapping[int, Trained | str]) -> list[Trained]:
    return [run for run in runs.values() if isinstance(run, Trained)]


def _losses(runs: Mapping[int, Trained | str]) -> list[float]:
    return [run.val_loss for run in _trained(runs)]


def _ratio(
    ours: Mapping[int, Trained | str], others: Mapping[int, Trained | str], figure: str
) -> dict[str, Any] | None:
    """Estimate a ratio of two figures over pairs, with its interval; None: one is not known."""
    pairs = [
        (getattr(one, figure), getattr(other, figure))
        for one, other in zip(_trained(ours), _trained(others), strict=False)
    ]
    if not pairs or not all(one and other for one, other in pairs):
        return None
    found: Effect = effect_of([math.log(one / other) for one, other in pairs])
    values = {"effect": found.effect, "low": found.low, "high": found.high}
    return {key: None if log is None else math.exp(log) for key, log in values.items()}
