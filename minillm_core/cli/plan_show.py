"""What ``minillm plan`` writes: a plan, or the difference of two."""

from __future__ import annotations

from typing import Any

from minillm_core.cli.console import emit, say
from minillm_core.cli.prepare import Asked, prepare
from minillm_core.plan import Plan, build_plan
from minillm_core.plan.plan import as_json

__all__ = ["show_diff", "show_plan"]


def show_plan(asked: Asked, *, json: bool) -> None:
    """Write the plan: a table, or one JSON document."""
    plan = _planned(asked)
    if json:
        emit(_document(plan))
    else:
        from minillm_core.plan.render import table

        print(table(plan))


def show_diff(asked: Asked, first: str, second: str, *, json: bool) -> None:
    """Write what differs between the plans with two sets of plugins."""
    plans = [_planned(asked.with_plugins(plugins)) for plugins in (first, second)]
    if json:
        emit({first: _document(plans[0]), second: _document(plans[1])})
    else:
        from minillm_core.plan.render import diff

        print(diff(*plans))


def _planned(asked: Asked) -> Plan:
    prepared = prepare(asked, to_run=False)
    plan = build_plan(prepared.loaded.config, prepared.plugins)
    for note in prepared.loaded.notes:
        say(note)
    return plan


def _document(plan: Plan) -> dict[str, Any]:
    return {"plan": plan.data(), "plan_hash": plan.hash, "plugins": as_json(plan.plugins)}
