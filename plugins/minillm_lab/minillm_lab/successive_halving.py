"""Successive halving for a search: recipes compete with the incumbent in rounds of ever longer runs.

A rung is a run length. All candidates of a round run at the shortest rung with one seed; the best
third run three times as long, and so on. The longest rung is the target length of the recipe: there
several seeds give a confidence interval, one seed after the other, and a candidate that falls behind the
best one gets no further seeds. A candidate is a difference from the incumbent: its gain is the
mean over pairs of its loss minus the incumbent's, with the same seed and the same data in the same
order. Where technique cards name several plugins that help, the first round tries combinations of them
and nothing else. Between two rungs candidates are ranked by their gain plus part of its change since the previous
rung, so that the trend exposes moves that help early and hurt late. If a third of the length
has too few steps to be informative, the first rung is one pair at full length. Before the last rung
helpful moves are combined, the best first, as far as planning allows; the combination is a candidate.

The best candidate whose interval excludes 0 is the next incumbent. If a run of the incumbent fails with a
further seed, nothing is known of the candidates of the round: the move that made it the incumbent is taken back,
and the next round is run from the recipe before it. At the end, with fresh seeds that
played no part in selection, the recipe is compared with the baseline settings, and with itself without
each of its parts: a part without a measurable effect or saving is dropped.

All decisions are functions of the run files, including their times: a search that was killed repeats
the same decisions on resume, and trains only the missing runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from minillm_core import MinillmError, Plan
from minillm_core.commands import amount
from minillm_lab.confirm import LEFT_OUT, Confirmation
from minillm_lab.paired_runs import (
    Candidate,
    Length,
    Outcomes,
    PairedRuns,
    Planner,
    Rung,
    failure_of,
    in_words,
)
from minillm_lab.space import Move, Recipe, Space, parts_of, present, together
from minillm_lab.study import graph_of

INCUMBENT = "the incumbent"
"""The label of the incumbent's runs."""

ETA = 3
"""Length ratio of consecutive rungs; one in ``ETA`` candidates is promoted to the next rung."""

RUNGS = 3

PAIRS, MORE = 3, 2
"""Seeds at the longest rung, and additional seeds for the best candidate if these do not decide."""

ENOUGH = 2
"""Pairs at the longest rung that can decide, if no other candidate is left."""

FAR = 0.5
"""A candidate with less than this fraction of the best gain gets no further seeds at the longest rung."""

LEAST = 10
"""Steps of the shortest run: fewer only measure the effect of the learning rate."""

UNIONS = 3
"""Candidates of a round that combine several moves."""

LAST = 0.45
"""Maximum fraction of the budget for the final comparison."""

LARGE = 3
"""Number of plugins in a combination that gets a round without other candidates."""

BESIDE_PARTS = 5
"""Sets of two runs that the final comparison takes as long as, beside one for each part: three seeds of the
recipe, of the recipe without all parts that have no effect, of that and of the baseline by the clock."""


class SuccessiveHalving:
    """The rounds of a search.

    Args:
        paired_runs: trains the runs.
        plan: maps a recipe to its plan.
        space: the search space.
        base: the baseline recipe.
        budget: seconds for all runs.
        note: called after each stage.

    Attributes:
        incumbent: the recipe so far.
        plan: its plan.
        rounds: all rounds with their candidates, as in search.json.
        steps: the accepted moves, likewise.
        last: the final comparison, likewise; empty before it.
        refused: move -> why it cannot be planned.
        untried: moves that did not fit into the budget.
    """

    def __init__(
        self,
        paired_runs: PairedRuns,
        plan: Planner,
        space: Space,
        base: Recipe,
        *,
        budget: float,
        note: Callable[[], None] = lambda: None,
    ) -> None:
        self.paired_runs, self.space, self.base, self.budget = paired_runs, space, base, budget
        self._plan, self._note = plan, note
        self.length, self.seed = paired_runs.length, paired_runs.seed
        self.base_plan = paired_runs.base
        self.incumbent, self.plan = base, self.base_plan
        self.rounds: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []
        self.refused: dict[str, str] = {}
        self.untried: list[str] = []
        self.last: dict[str, Any] = {}
        self._out: set[str] = set()  # moves not to try again
        # the recipe before each step, its plan, and the moves that the step put out
        self._before: list[tuple[Recipe, Plan, set[str]]] = []
        self._failed = ""  # why a run of the incumbent failed in this round
        self._expected: dict[str, float] = {}  # gain of moves that may help another incumbent
        tokens = self.length.seconds(paired_runs.speed) * paired_runs.speed
        factors = [ETA**power for power in reversed(range(1, RUNGS))]
        shorter = [
            self.length.shorter(one)
            for one in factors
            if tokens / one >= LEAST * self.base_plan.tokens_per_step
        ]
        self._rungs = [Rung(one, 1) for one in shorter or [self.length]]
        self._rungs.append(Rung(self.length, PAIRS))

    @property
    def lengths(self) -> list[Length]:
        """List the run lengths of the rungs, shortest first."""
        return list(dict.fromkeys(one.length for one in self._rungs))

    def run(self) -> None:
        """Run rounds until the budget is spent or nothing is left to try, then make the final comparison.

        Raises:
            Interrupted: a signal; finished runs are kept.
            MinillmError: the baseline settings cannot be trained.
        """
        self.paired_runs.members.start()
        first = self._rungs[0].length
        self.paired_runs.begin(f"the settings as they are, {first.words}", 1, [])
        self.paired_runs.runs_of({INCUMBENT: self.base_plan}, first, [self.seed])  # times one run
        self._leave_out_short_runs()
        number = 1
        while candidates := self._stacks_alone(number) or self.candidates():
            share = self._share(number)
            if share is None:
                self.paired_runs.say("the rest of the budget is for the last comparison")
                break
            self._round(number, candidates, share)
            number += 1
        if self.incumbent != self.base:
            self._confirm()

    def _confirm(self) -> None:
        """Make the final comparison with fresh seeds, and drop parts without effect."""
        found = Confirmation(
            *(self.paired_runs, self._plan, self.base, self.incumbent),
            pairs=PAIRS,
            budget=self.budget,
        )
        found.run()
        self.incumbent, self.plan, self.last = found.recipe, found.plan, found.result

    def least_cost(self) -> float:
        """Estimate the seconds of the smallest search: a candidate and the baseline, compared twice."""
        return 4 * self.paired_runs.cost(self.length, runs=PAIRS)

    def candidates(self) -> list[Candidate]:
        """Plan the moves from the incumbent, most promising first.

        The first are combinations of the plugins whose technique cards show gains: a short search has no
        time to find them one by one. Among the others those that share the incumbent's compiled graph, which
        take a fraction of the time, alternate with those that do not so that both take equal time.
        """
        moves = [
            one
            for one in self.space.moves(self.incumbent, self.plan, self.base)
            if one.name not in self._out
        ]
        moves.sort(key=lambda one: self._expected.get(one.name, 0.0))
        found = list[Candidate]()
        for move in moves:
            ways = [self._planned(move)]
            if ways == [None] and move.adds:
                more = [one for one in self.space.additions(move) if one.name not in self._out]
                ways = [self._planned(one, note=False) for one in more]
            found += [one for one in ways if one is not None]
        return [*self._stacks(), *self._alternated(found)]

    def _stacks_alone(self, number: int) -> list[Candidate]:
        """Return the combinations alone for the first round, if one is large.

        What else is tried is then tried beside the best of them, and not beside settings that it replaces.
        """
        stacks = self._stacks() if number == 1 else []
        return stacks if any(len(one.move.parts) >= LARGE for one in stacks) else []

    def _alternated(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Merge candidates that have to be compiled with those that do not, by the time that they take."""
        graph, first = graph_of(self.plan), self._rungs[0].length
        queues = {graphs: deque[Candidate]() for graphs in (0, 1)}
        for one in candidates:
            queues[int(graph_of(one.plan) != graph)].append(one)
        seconds, found = dict.fromkeys(queues, 0.0), list[Candidate]()
        while left := [graphs for graphs, queue in queues.items() if queue]:
            next_one = min(left, key=seconds.__getitem__)
            seconds[next_one] += self.paired_runs.cost(first, graphs=next_one)
            found.append(queues[next_one].popleft())
        return found

    def _stacks(self) -> list[Candidate]:
        """Combine plugins whose technique cards show gains, as far as planning allows, the most first."""
        most = self._most_parts - len(parts_of(self.incumbent, self.base))
        joined: list[Move] = []
        found: dict[int, Candidate] = {}
        for moves in self.space.stacks(self.incumbent, self._out):
            more = [one for one in moves if one not in joined]
            if len(joined) + len(more) <= most:
                planned = self._planned(together([*joined, *more]), note=False)
                if planned is not None:
                    joined += more
                    found[len(joined)] = planned
        wanted = {2**power for power in range(1, 6)} | {len(joined)}
        sizes = {max((size for size in found if size <= most), default=0) for most in wanted}
        stacks = [found[size] for size in sorted(sizes, reverse=True) if size > 1]
        return [one for one in stacks if one.move.name not in self._out]

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
            if len(plan.course) > 1:
                raise MinillmError(
                    "the sizes of its batches change in the course of a run, by its number of steps"
                )
            graph_of(plan)  # reads the models that losses are compared with: is one missing?
        except MinillmError as error:
            if note and not move.parts:
                self.refused[move.name] = error.what
            return None
        self.refused.pop(move.name, None)
        return Candidate(move, recipe, plan)

    def _share(self, number: int) -> float | None:
        """Choose the seconds for a round; None: no time is left for one."""
        left = self.budget - self.paired_runs.members.spent - self._reserved()
        least = 2 * self.paired_runs.cost(self.length, runs=PAIRS, graphs=1)
        if left < (least if number == 1 else 1.25 * least):
            return None
        half = left / 2
        return half if half > 2 * least else left  # of half, a later round would try one change

    def _reserved(self) -> float:
        """Estimate the seconds of the final comparison: baseline, recipe, recipe without each part."""
        parts = len(parts_of(self.incumbent, self.base)) + self._more_parts
        sets = BESIDE_PARTS + parts if parts > 1 else 2
        return min(LAST * self.budget, sets * self._confirming)

    @property
    def _more_parts(self) -> int:
        """Count the parts that the next round may add."""
        return max((len(one.move.parts) for one in self._stacks()), default=1)

    @property
    def _most_parts(self) -> int:
        """Count the parts that fit into the time of the final comparison."""
        return max(1, int(LAST * self.budget / self._confirming) - BESIDE_PARTS)

    @property
    def _confirming(self) -> float:
        """Estimate the seconds that the final comparison takes for each of many parts."""
        return self.paired_runs.cost(self.length, runs=LEFT_OUT, graphs=1)

    def _sizes(self, queued: Sequence[Candidate], share: float) -> list[int]:
        """Choose the number of candidates per rung; the shortest rung gets the remaining time."""
        first, *middle, final = self._rungs
        cost = self.paired_runs.cost
        # the first rung has made the runs of the first seed if it is as long
        again = first.length == final.length
        for last in (3, 2, 1):
            runs = (0 if again else last + 1) + (min(last, 2) + 1) * (PAIRS - 1)
            sizes, left = [last], share - cost(final.length, runs=runs)
            for rung in reversed(middle):
                sizes.insert(0, ETA * sizes[0])
                left -= (sizes[0] + 1) * cost(rung.length)
            left -= cost((middle or [first])[-1].length, runs=UNIONS, graphs=1)
            fitting = self._fitting(queued, left, first)
            if fitting < min(len(queued), ETA * sizes[0]) and last > 1:
                continue
            sizes.insert(0, max(fitting, min(len(queued), sizes[0])))
            return [min(len(queued), one) for one in sizes]
        raise AssertionError("the loop ends with a size of 1")

    def _fitting(self, queued: Sequence[Candidate], seconds: float, rung: Rung) -> int:
        """Count the first candidates whose runs at a rung, and the incumbent's, fit into a time."""
        left, graphs = seconds - self.paired_runs.cost(rung.length), {graph_of(self.plan)}
        for number, one in enumerate(queued):
            graph = graph_of(one.plan)
            left -= self.paired_runs.cost(rung.length, graphs=graph not in graphs)
            graphs.add(graph)
            if left < 0:
                return number
        return len(queued)

    def _leave_out_short_runs(self) -> None:
        """Leave out rungs that are hardly cheaper than the next one, where compiling takes most of a run.

        If only the longest one is left, the first rung is one pair at full length.
        """
        for rung, longer in pairwise([*self._rungs]):
            if rung.length == longer.length:
                continue
            cost = self.paired_runs.cost(rung.length, runs=rung.pairs, graphs=1)
            if self.paired_runs.cost(longer.length, runs=longer.pairs, graphs=1) < 2 * cost:
                self._rungs.remove(rung)
                self.paired_runs.say(
                    f"no runs of {rung.length.words}: most of their time would be compiling"
                )
        if len(self._rungs) == 1:
            self._rungs.insert(0, Rung(self.length, 1))

    def _round(self, number: int, queued: Sequence[Candidate], share: float) -> None:
        sizes, self._failed = self._sizes(queued, share), ""
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
            if rung is self._rungs[-1]:
                alive = self._raced_by_seed(number, rung, alive)
            else:
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
        if self._failed:
            record["taken_back"] = {"name": self._take_back(number), "why": self._failed}
        for one in () if self._failed else raced:
            if accepted is None or one.failed or (one.rungs and one.expected >= 0):
                self._out.add(one.move.name)
            elif one.rungs:
                self._expected[one.move.name] = one.expected
        note()

    def _best(self, alive: Sequence[Candidate], size: int) -> list[Candidate]:
        """Choose the candidates promoted to a rung; all of them at the first one."""
        if not all(one.rungs for one in alive):
            return list(alive[:size])
        helping = [one for one in alive if one.expected < 0]
        return sorted(helping, key=lambda one: one.expected)[:size]

    def _unions(self, alive: Sequence[Candidate]) -> list[Candidate]:
        """Combine moves, the best first, as far as the combination can be planned."""
        ranked = self._best(alive, len(alive))
        most = self._most_parts - len(parts_of(self.incumbent, self.base))
        joined: list[Move] = []
        unions: dict[int, Candidate] = {}
        for one in ranked:
            parts = sum(len(move.parts) or 1 for move in (*joined, one.move))
            if parts > most or any(one.move.overlaps(other) for other in joined):
                continue
            union = self._planned(together([*joined, one.move]))
            if union is not None:
                joined.append(one.move)
                unions[len(joined)] = union
        sizes = {2**power for power in range(1, UNIONS)} | {len(joined)}
        return [unions[size] for size in sorted(sizes) if size > 1 and size in unions]

    def _raced(self, number: int, rung: Rung, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Run candidates against the incumbent at a rung; return the successful ones."""
        graph, length = graph_of(self.plan), rung.length
        ordered = sorted(candidates, key=lambda one: graph_of(one.plan) != graph)
        self.paired_runs.begin(
            f"round {number}, {length.words}", (len(ordered) + 1) * rung.pairs, ordered
        )
        seeds = range(self.seed, self.seed + rung.pairs)
        if not ordered:
            return []
        plans = {INCUMBENT: self.plan, **{one.move.name: one.plan for one in ordered}}
        runs = self.paired_runs.runs_of(plans, length, seeds)
        self._compare(ordered, length, runs)
        return [] if self._failed else [one for one in ordered if not one.failed]

    def _compare(
        self, candidates: Sequence[Candidate], length: Length, runs: Mapping[str, Outcomes]
    ) -> None:
        """Record the candidates' gains, and whether a run of the incumbent failed."""
        self._failed = failure_of(runs[INCUMBENT])
        for one in candidates:
            self.paired_runs.compare(one, length, runs[INCUMBENT], runs[one.move.name])

    def _raced_by_seed(
        self, number: int, rung: Rung, candidates: Sequence[Candidate]
    ) -> list[Candidate]:
        """Run candidates one seed after the other; after each, keep at most the best and the one behind it.

        Returns:
            The successful ones that are left, with the pairs of the rung, or fewer if these decide.
        """
        alive = list(candidates)
        for pairs in range(1, rung.pairs + 1):
            alive = self._raced(number, replace(rung, pairs=pairs), alive)
            alive.sort(key=lambda one: one.gain)
            alive = [one for one in alive[:2] if not _behind(one, alive[0])]
            if pairs >= ENOUGH and len(alive) == 1 and alive[0].rungs[-1]["distinguishable"]:
                break
        return alive

    def _accepted(self, alive: Sequence[Candidate]) -> Candidate | None:
        """Choose the next incumbent: its interval excludes 0, or it is cheaper and not worse."""
        ranked = sorted((one for one in alive if not one.failed), key=lambda one: one.gain)
        if not ranked or ranked[0].rungs[-1]["pairs"] < ENOUGH:
            return None
        best = ranked[0]
        if best.gain < 0 and not best.rungs[-1]["distinguishable"]:
            self._more_pairs(best)
            if self._failed:
                return None
            ranked = [one for one in ranked if not one.failed]
        clear = [one for one in ranked if one.rungs[-1]["distinguishable"] and one.gain < 0]
        cheaper = [
            one for one in ranked if one.gain <= 0 and self.paired_runs.saving(one.rungs[-1])
        ]
        return next(iter([*clear, *cheaper]), None)

    def _more_pairs(self, one: Candidate) -> None:
        """Train an undecided candidate with additional seeds, where the budget allows."""
        if (
            self.paired_runs.members.spent
            + self._reserved()
            + 2 * self.paired_runs.cost(self.length, runs=MORE)
            > self.budget
        ):
            return
        self.paired_runs.begin(f"{MORE} more pairs, {self.length.words}", 2 * MORE, [one])
        seeds = range(self.seed, self.seed + PAIRS + MORE)
        plans = {INCUMBENT: self.plan, one.move.name: one.plan}
        self._compare([one], self.length, self.paired_runs.runs_of(plans, self.length, seeds))

    def _judged(self, one: Candidate, accepted: Candidate | None) -> str:
        """Describe the outcome of a candidate."""
        if one.failed:
            return f"failed: {one.failed}"
        if one is accepted:
            return "accepted"
        if self._failed:
            return "not judged: a run of the recipe that it changes failed"
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
                "saves": "" if final["distinguishable"] else self.paired_runs.saving(final),
                "by_rung": [{"length": r["length"], "effect": r["effect"]} for r in one.rungs],
                **final,
            }
        )
        self.paired_runs.say(
            f"round {number}: {one.move.name}, {in_words(final)} at {self.length.words}"
        )
        out = {part.name for part in one.move.parts or (one.move,)}
        moves = self.space.moves(one.recipe, one.plan, self.base)
        for key in one.move.settings:  # never return to the replaced value
            before = {key: present(self.plan, key)}
            out |= {move.name for move in moves if dict(move.settings) == before}
        self._before.append((self.incumbent, self.plan, out - self._out))
        self._out |= out
        self.incumbent, self.plan = one.recipe, one.plan

    def _take_back(self, number: int) -> str:
        """Return to the recipe before the last step, whose move is not tried again, and return its name."""
        name = self.steps.pop()["name"]
        self.incumbent, self.plan, out = self._before.pop()
        self._out = (self._out - out) | {name}
        self.paired_runs.say(
            f"round {number}: {name} is taken back, since a run failed: {self._failed}"
        )
        return name


def _behind(one: Candidate, best: Candidate) -> bool:
    """Return whether a candidate is too far behind the best to be run with more seeds."""
    if one is best:
        return False
    worse = [
        ours > theirs
        for ours, theirs in zip(
            one.rungs[-1]["differences"], best.rungs[-1]["differences"], strict=True
        )
    ]
    return (len(worse) >= ENOUGH and all(worse)) or (best.gain < 0 and one.gain > FAR * best.gain)
