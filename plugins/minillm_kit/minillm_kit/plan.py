"""The plan: deterministic, confined to the plugin's claims, and unchanged once the plugin is removed."""

from __future__ import annotations

import json
from typing import Any

from minillm_core import Plan
from minillm_core.commands import counted
from minillm_kit.check import Failed
from minillm_kit.hygiene import HEAVY
from minillm_kit.subject import Subject


def builds(subject: Subject) -> str:
    """Check that the small model can be planned with the plugin."""
    mine = [p for p in subject.plan().placements if p.owner == subject.name]
    taken = f"{counted(len(mine), 'slot')} taken: {', '.join(p.slot for p in mine[:3])}"
    beside = ", ".join(one.name for one in subject.companions)
    return f"{taken}; beside {beside}, which it builds on" if beside else taken


def same_plan(subject: Subject) -> str:
    """Check that the plan is equal twice here and in a process with another hash seed."""
    first, again = subject.planned(), subject.planned()
    if first.hash != again.hash:
        raise Failed(
            f"{first.hash[:12]}, then {again.hash[:12]}{difference(first, again)}",
            cause="a hook depends on what it did before: a counter, a clock, random numbers",
        )
    other = subject.probed("plan")["with"]
    if other != first.hash:
        raise Failed(
            f"{first.hash[:12]} here, {other[:12]} in another process",
            cause="a hook depends on the order of a set, an id(), the environment or the clock",
        )
    return f"{first.hash[:12]} three times"


def only_declared(subject: Subject) -> str:
    """Check that everything that the plugin does not claim is as without it."""
    ours, plain = subject.plan(), subject.plan(without=True)
    if ours.config != plain.config:
        raise Failed("it changed the config", cause="a hook writes to an object of the core's")
    mine = {p.slot for p in ours.placements if p.owner == subject.name}
    known = {"core", subject.name, *(one.name for one in subject.companions)}
    if others := sorted({p.owner for p in ours.placements} - known):
        raise Failed(
            f"slots are filled in the name of {others[0]}", cause="it uses another's builder"
        )
    written = "a hook writes to an object of the core's"
    starts = "model.init[", "opt.follow["  # a follower starts equal to its leader
    claimed = {slot.partition("[")[2].rstrip("]") for slot in mine if slot.startswith(starts)}
    for name, parameter in plain.parameters.items():
        now = ours.parameters.get(name, parameter)
        if now.owner == parameter.owner and name not in claimed and now != parameter:
            raise Failed(f"{name} was {parameter}, is {now}", cause=written)
    if not any(slot.startswith("opt.") for slot in mine):
        updates = _updates(ours)
        for name, update in _updates(plain).items():
            if name in updates and updates[name] != update:
                raise Failed(f"{name} is updated by {updates[name]}, not {update}", cause=written)
    for name, schedule in plain.schedules.items():
        if ours.schedules.get(name) != schedule:
            raise Failed(
                f"value {name} was {schedule}, is {ours.schedules.get(name)}", cause=written
            )
    return (
        f"{counted(len(mine), 'slot')}, {len(plain.parameters)} parameters of the core as they were"
    )


def _updates(plan: Plan) -> dict[str, tuple[Any, ...]]:
    """Return the rule's stages and the factors of each parameter, by name."""
    return {
        one.name: (group.rule.name, group.rule.stages, one.lr_mul, one.wd_mul, one.overrides)
        for group in plan.groups
        for one in group.members
    }


def switched_off(subject: Subject) -> str:
    """Check in one process that the plain plan is equal before and after a plan with the plugin."""
    answer = subject.probed("plan")
    if answer["before"] != answer["after"]:
        raise Failed(
            f"the plain plan was {answer['before'][:12]}, and is {answer['after'][:12]} after it",
            cause="a hook or the module changes a default of the core's",
        )
    return f"{answer['after'][:12]} before and after"


def no_traces(subject: Subject) -> str:
    """Check that planning leaves the process's state unchanged and imports no framework."""
    answer = subject.probed("plan")
    if changed := answer["changed"]:
        raise Failed(
            f"changed: {', '.join(changed[:3])}",
            cause="a hook patches an attribute, seeds a shared generator or sets the environment",
        )
    if heavy := sorted(HEAVY & set(answer["modules"])):
        raise Failed(
            f"planning imports {', '.join(heavy)}",
            cause="a hook imports it: leave it to a native module's factory",
        )
    return "environment, generators, folder, and what numpy and minillm define"


def difference(first: Plan, second: Plan) -> str:
    """Return the first place where two plans differ."""
    texts = [json.dumps(plan.data(), sort_keys=True) for plan in (first, second)]
    at = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), 0)
    return f" at ...{texts[0][max(0, at - 40) : at + 20]}..."
