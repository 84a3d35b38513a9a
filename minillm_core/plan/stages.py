"""The stages of a run: every combination of staged values that occurs, in order.

Each has a compiled step of its own. All of them are warmed up before the clock starts, so that
"no recompilation" means none after that.
"""

from __future__ import annotations

from minillm_core.optim.schedules import Stages
from minillm_core.plan.plan import Plan

__all__ = ["stages_of"]


def stages_of(plan: Plan) -> tuple[dict[str, int], ...]:
    """Value -> number of each stage, by when it begins; one empty stage where nothing is staged."""
    staged = {
        name: schedule
        for name, (_, schedule) in plan.schedules.items()
        if isinstance(schedule, Stages)
    }
    starts = sorted({start for schedule in staged.values() for start, _ in schedule.knots})
    found: list[dict[str, int]] = []
    for start in starts or [0.0]:
        # a stage holds after its knot, and at the run's beginning from the first step on
        just_after = start + 1e-9
        stage = {n: int(s.at(just_after, plan.schedule)) for n, s in sorted(staged.items())}
        if stage not in found:
            found.append(stage)
    return tuple(found)
