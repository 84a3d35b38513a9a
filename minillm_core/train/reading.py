"""Reading a run where it was not trained: only what shaped its model, its data and its loss is needed.

Kernels, observers, the optimizer and initial values were for the run's machine. Where such a plugin
does not serve, the run is read without it, and one line says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from minillm_core.backends.bind import requests_here
from minillm_core.backends.detect import Detected
from minillm_core.config.kernels import AUTO, parse_policy
from minillm_core.errors import BackendError, PluginError
from minillm_core.ops.select import Candidate, Choice, Request, choose_all
from minillm_core.plan import Plan
from minillm_core.plugins.manager import LoadedPlugin, check_support

__all__ = ["alike", "for_reading", "needed"]

UNREAD = ("kernel[", "on_event", "opt.", "model.init[")
"""How the slots begin that a trained model's loss and text do not depend on."""


def needed(plan: Plan, name: str) -> bool:
    """Whether a plugin shapes what a checkpoint of the plan is read with."""
    return any(p.owner == name and not p.slot.startswith(UNREAD) for p in plan.placements)


def alike(recorded: Any, plan: Plan) -> bool:
    """Whether a plan reads the checkpoints of another: the same model, loss and batches.

    Args:
        recorded: the other's :meth:`Plan.data`, as run.json has it; anything else is not alike.
        plan: the plan.
    """
    try:
        return _read(recorded) == _read(json.loads(json.dumps(plan.data())))
    except (AttributeError, KeyError, TypeError):
        return False


def for_reading(
    plan: Plan, plugins: Iterable[LoadedPlugin], detected: Detected, say: Callable[[str], None]
) -> Plan:
    """A run's plan without what only its training needed and this machine does not serve.

    Left out are such plugins' kernels and initial values, kernels of others that do not serve, and
    a policy for kernels that cannot be had: each is said in one line.

    Args:
        plan: the run's.
        plugins: those that were loaded.
        detected: where it is read.
        say: is told what a person should know.

    Raises:
        PluginError: a plugin that is needed does not run here, or a package that it requires is
            missing.
        BackendError: an op that no kernel serves.
    """
    unserved: dict[str, str] = {}
    for one in plugins:
        try:
            check_support((one,), detected.backend, detected.device)
        except PluginError as error:
            if needed(plan, one.name):
                raise
            unserved[one.name] = error.what
    here = _without(plan, unserved)
    requests, candidates = requests_here(detected, here)
    policy = parse_policy(here.config.kernels)
    try:
        choices = choose_all(requests, candidates, policy)
    except BackendError as error:
        if policy == AUTO:
            raise
        choices = choose_all(requests, candidates)
        say(f"{error.what}; the run's --kernels {policy} gives way to auto")
        here = replace(here, config=here.config.model_copy(update={"kernels": str(AUTO)}))
    serving = {choice.op: choice for choice in choices}
    for name, why in unserved.items():
        ops = [c.op for owner, c in plan.candidates if owner == name]
        instead = ", ".join(f"{serving[op].kernel} serves {op}" for op in ops)
        say(f"{why}; the run is read without it" + (f": {instead}" if instead else ""))
    idle = _idle(here, {request.op: request for request in requests}, serving)
    for name, kernels in idle.items():
        say(f"plugin '{name}': " + "; ".join(kernels.values()))
    kept = [(o, c) for o, c in here.candidates if (c.op, c.name) not in idle.get(o, ())]
    return replace(here, candidates=tuple(kept))


def _without(plan: Plan, names: Iterable[str]) -> Plan:
    """The plan without the kernels and the initial values of some plugins."""
    names = set(names)
    given = {p.slot for p in plan.placements if p.owner in names}
    return replace(
        plan,
        candidates=tuple((owner, c) for owner, c in plan.candidates if owner not in names),
        inits={n: init for n, init in plan.inits.items() if f"model.init[{n}]" not in given},
    )


def _idle(
    plan: Plan, requests: Mapping[str, Request], serving: Mapping[str, Choice]
) -> dict[str, dict[tuple[str, str], str]]:
    """Plugin -> its kernels that do not serve and would end a run, each with what is said of it."""
    offers: dict[str, list[Candidate]] = {}
    for owner, candidate in plan.candidates:
        offers.setdefault(owner, []).append(candidate)
    found = {}
    for owner, kernels in offers.items():
        idle = [c for c in kernels if serving[c.op].kernel != c.name]
        if len(idle) == len(kernels) or any(c.unless for c in idle):
            found[owner] = dict(_said(idle, requests, serving))
    return found


def _said(
    idle: Sequence[Candidate], requests: Mapping[str, Request], serving: Mapping[str, Choice]
) -> Iterator[tuple[tuple[str, str], str]]:
    for one in idle:
        choice = serving[one.op]
        why = one.refusal(requests[one.op]) or choice.reason
        said = f"its kernel {one.op}={one.name} does not serve here, {choice.kernel} does ({why})"
        yield (one.op, one.name), said


def _read(data: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a plan's data that reading depends on."""
    model, batch = dict(data["model"]), data["data"]
    model.pop("inits")
    parameters = {name: info["shape"] for name, info in model.pop("parameters").items()}
    return {
        "model": model,
        "parameters": parameters,
        "data": {"fields": [], "on_batch": [], **batch},
    }
