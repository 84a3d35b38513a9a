"""The final comparison of a search, with fresh seeds that played no part in the selection.

Compares the recipe with the baseline settings of the search, and with itself without each of its parts
(an ablation). A part that has no measurable gain and saves no time or memory is dropped. If a run of the
recipe fails, the recipe is left without the part, or the two parts, whose removal mends that, or else the settings
stay as they were.

Where processes share a GPU the ablation trains by pace (:mod:`minillm_lab.pool`), so that the next parts are
compiled meanwhile, and recipe and baseline once more by the clock, with the GPU to themselves.

The noise of the ablation is estimated from all of its sets of runs together: with many parts two seeds of
each give narrower intervals than three seeds of a pair alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import combinations
from statistics import fmean
from typing import Any

from minillm_core import MinillmError, Plan
from minillm_lab.paired_runs import Outcomes, PairedRuns, Planner, failure_of, trained_of
from minillm_lab.space import Move, Recipe, parts_of, without

FRESH = 1000
"""Offset of the final comparison's seeds above the seeds used for selection."""

BESIDE = 3
"""The final timed comparison (recipe and baseline, three seeds each) costs as much as the runs of three parts."""

LEFT_OUT, MANY = 2, 4
"""Number of seeds without each part if the recipe has at least ``MANY`` of them."""

OVER = 1.05
"""Multiple of the budget up to which parts are ablated."""


class Confirmation:
    """The final comparison of a recipe.

    Args:
        paired_runs: trains the runs.
        plan: maps a recipe to its plan.
        base: the recipe that the search began with.
        recipe: the recipe found.
        pairs: number of seeds.
        budget: seconds of the whole search.

    Attributes:
        recipe: the recipe without its dropped parts.
        plan: its plan.
        result: as in search.json.
    """

    def __init__(
        self,
        paired_runs: PairedRuns,
        plan: Planner,
        base: Recipe,
        recipe: Recipe,
        *,
        pairs: int,
        budget: float,
    ) -> None:
        self.recipe, self.plan, self.result = recipe, plan(recipe), dict[str, Any]()
        self._paired_runs, self._planner, self._base, self._pairs = paired_runs, plan, base, pairs
        self._length, self._budget = paired_runs.length, budget
        first = paired_runs.seed + FRESH
        self._seeds = range(first, first + pairs)

    def run(self) -> None:
        """Compare, and drop parts without effect.

        Raises:
            Interrupted: a signal; finished runs are kept.
        """
        parts = parts_of(self.recipe, self._base)
        if not parts:
            return
        seeds = self._seeds
        few = seeds[:LEFT_OUT] if len(parts) >= MANY else seeds
        plans: dict[str, Plan] = {}
        unplanned: dict[str, str] = {}
        for part in parts if len(parts) > 1 else ():
            try:
                plans[part.name] = self._planner(without(self.recipe, part))
            except MinillmError as error:
                unplanned[part.name] = error.what
        by_pace = self._paired_runs.by_pace and bool(plans)
        both = {"as it was": self._paired_runs.base, "the recipe": self.plan}
        # by pace, the recipe is compared with its parts alone: with the baseline by the clock, below
        sets = {"the recipe": self.plan} if by_pace else {**both}
        most = self._affordable(len(few)) - len(sets) - (BESIDE if by_pace else 0)
        sets |= {f"no {name}": plan for name, plan in [*plans.items()][: max(0, most)]}
        of = {label: few if label.startswith("no ") else seeds for label in sets}
        self._begin(sum(map(len, of.values())))
        runs = self._paired_runs.runs_of(sets, self._length, of, timed=not by_pace)
        base, found = runs.pop("as it was", None), runs["the recipe"]
        table, idle, failed = [], [], failure_of(found)
        pool = [*runs.values()]
        for part in parts:
            row: dict[str, Any] = {"name": part.name, "effect": None}
            others = base if len(parts) == 1 else runs.get(f"no {part.name}")
            if part.name in unplanned:
                row["why"] = unplanned[part.name]
            elif others is None:
                row["why"] = "the budget is spent"
            else:
                row |= self._paired_runs.difference(found, others, pool)
                if row["effect"] is not None and not row["distinguishable"]:
                    row["saves"] = self._paired_runs.saving(row)
                helps = row["effect"] is None or (row["distinguishable"] and row["effect"] < 0)
                if not helps and not row.get("saves"):
                    idle.append((row["effect"], part))
            table.append(row)
        dropped: list[str] = []
        if failed:
            found, dropped = self._mend(parts, runs, base, timed=not by_pace)
        elif idle:
            idle.sort(key=lambda one: -one[0])
            found, dropped = self._drop([part for _, part in idle], found, timed=not by_pace)
        for row, part in zip(table, parts, strict=True):
            if row["effect"] is None and part.name not in dropped:
                self._compare_without(row, part, found, timed=not by_pace)
        if base is None:
            self._begin(2 * len(seeds), "the last comparison, by the clock")
            both["the recipe"] = self.plan  # without the parts that were dropped
            timed = self._paired_runs.runs_of(both, self._length, seeds, timed=True)
            base, found = timed["as it was"], timed["the recipe"]
        if again := failure_of(found):
            failed, found, dropped = again, base, [*dropped, *self._left_out(self._base)]
        self.result = {
            **{"parts": table, "dropped": dropped, "failed": failed},
            **self._result(base, found),
        }

    def _mend(
        self,
        parts: Sequence[Move],
        runs: Mapping[str, Outcomes],
        base: Outcomes | None,
        *,
        timed: bool,
    ) -> tuple[Outcomes, list[str]]:
        """Leave out the one part without which all seeds train, and best; or a pair of parts; or else all parts.

        Args:
            parts: of the recipe, a run of which failed.
            runs: of the recipe without each part, by label.
            base: of the baseline settings, which what is left has to improve on; None: not known yet.
            timed: train by the clock.

        Returns:
            The runs of the remaining recipe, none if they are those of a base that is not known yet; and
            the names of the parts that are left out.
        """
        left = {part.name: trained_of(runs.get(f"no {part.name}", {})) for part in parts}
        alone = [
            part for part in parts if left[part.name] and not failure_of(runs[f"no {part.name}"])
        ]
        alone.sort(key=lambda part: fmean(run.val_loss for run in left[part.name]))
        pairs = sorted(combinations(parts, 2), key=lambda two: -sum(len(left[p.name]) for p in two))
        for gone in (*((part,) for part in alone), *pairs):
            recipe = reduce(without, gone, self.recipe)
            label = f"no {' '.join(part.name for part in gone)}"
            whole = len(runs.get(label, ())) == len(self._seeds)
            if not parts_of(recipe, self._base) or not (
                whole or self._affordable(len(self._seeds))
            ):
                continue
            try:
                plan = self._planner(recipe)
            except MinillmError:  # another part builds on one of them
                continue
            found = self._trained(label, plan, timed=timed)
            gain = self._paired_runs.difference(found, base)["effect"] if base else None
            if not failure_of(found) and (gain is None or gain < 0):
                return found, self._left_out(recipe)
        return base or {}, self._left_out(self._base)

    def _left_out(self, recipe: Recipe) -> list[str]:
        """Continue with a smaller recipe, and return the names of the parts left out."""
        kept = {part.name for part in parts_of(recipe, self._base)}
        gone = [part.name for part in parts_of(self.recipe, self._base)]
        self.recipe, self.plan = recipe, self._planner(recipe)
        return [name for name in gone if name not in kept]

    def _drop(
        self,
        idle: Sequence[Move],
        found: Outcomes,
        *,
        timed: bool,
    ) -> tuple[Outcomes, list[str]]:
        """Drop the parts without effect: all of them where the joint removal has no effect either.

        Returns:
            The runs of the remaining recipe, and the names of the dropped parts.
        """
        for parts in (idle, idle[:1]) if len(idle) > 1 else (idle,):
            recipe = self.recipe
            for part in parts:
                recipe = without(recipe, part)
            try:
                plan = self._planner(recipe)
            except MinillmError:
                continue
            if len(parts) > 1 and not self._affordable(self._pairs):
                continue
            label = "the recipe without idle parts"
            runs = self._trained(label, plan, timed=timed)
            row = self._paired_runs.difference(runs, found)
            if row["effect"] is None or (row["distinguishable"] and row["effect"] > 0):
                continue
            return runs, self._left_out(recipe)  # options are dropped with their plugin
        return found, []

    def _compare_without(
        self, row: dict[str, Any], part: Move, found: Outcomes, *, timed: bool
    ) -> None:
        """Compare with the recipe without a part that could not be removed before others were dropped."""
        try:
            plan = self._planner(without(self.recipe, part))
        except MinillmError as error:
            row["why"] = error.what
            return
        alone = len(parts_of(self.recipe, self._base)) == 1  # without it: the baseline
        if alone or self._affordable(self._pairs):
            others = self._trained(f"no {part.name}", plan, timed=timed)
            row |= {"why": "", **self._paired_runs.difference(found, others)}

    def _trained(self, label: str, plan: Plan, *, timed: bool) -> Outcomes:
        """Train a plan with all seeds, as a stage of its own."""
        self._begin(len(self._seeds))
        return self._paired_runs.runs_of({label: plan}, self._length, self._seeds, timed=timed)[
            label
        ]

    def _begin(self, runs: int, stage: str = "the last comparison") -> None:
        """Begin a stage of the display with its number of runs."""
        self._paired_runs.begin(f"{stage}, {self._length.words}", runs, [])

    def _affordable(self, pairs: int) -> int:
        """Count the sets of so many runs that fit into the remaining budget plus a twentieth of the whole."""
        left = OVER * self._budget - self._paired_runs.members.spent
        return max(0, int(left / self._paired_runs.cost(self._length, runs=pairs, graphs=1)))

    def _result(self, base: Outcomes, found: Outcomes) -> dict[str, Any]:
        return {
            "gain": self._paired_runs.difference(found, base),
            "seeds": list(found),
            "base_losses": [run.val_loss for run in trained_of(base)],
            "losses": [run.val_loss for run in trained_of(found)],
            "base_runs": [run.data() for run in trained_of(base)],
            "runs": [run.data() for run in trained_of(found)],
        }
