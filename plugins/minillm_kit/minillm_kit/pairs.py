"""Pairs of plugins: the combination plans and trains, or the conflict is refused by name."""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

import numpy as np

from minillm_core import MinillmError, Plan, PlanError, PluginError, build_plan
from minillm_core.inspection import LoadedPlugin, check_support, plugin_name
from minillm_kit.check import Failed, NotApplicable, raised
from minillm_kit.subject import Subject, settings

STEPS = 5

REFUSED, SAME_SLOT, SAME_SITE, ELSEWHERE, NOT_HERE = range(5)

LAYER = re.compile(r"^layers\.\d+\.|\[.*")
HOOKS = ("on_batch", "on_event")
"""Slots that several plugins fill without conflict."""

Partner = tuple[LoadedPlugin, ...]
"""A plugin, followed by its requirements."""


def pairs(subject: Subject) -> str:
    """Check with each partner that the plan is equal in either order and trains, or the conflict names both."""
    if subject.pairs == 0:
        raise NotApplicable("--pairs 0: none asked for")
    found: dict[str, list[str]] = {"trained": [], "refused by name": [], "not run": []}
    for spec in chosen(subject):
        name = plugin_name(spec, where="partner")
        try:
            partner, backends = _partner(subject, spec)
            if refusal := _together(subject, partner, backends):
                verdict, name = "refused by name", f"{name} ({refusal.what})"
            else:
                verdict, alone = "trained", backends != subject.backends
                name = f"{name} (on {', '.join(backends)} alone)" if alone else name
        except _NotRun as reason:
            verdict, name = "not run", f"{name} ({reason})"
        found[verdict].append(name)
    if not found["trained"] and not found["refused by name"]:
        reasons = ", ".join(found["not run"]) or "none is installed"
        raise NotApplicable(f"no other plugin can be run here: {reasons}")
    return "; ".join(f"{word}: {', '.join(names)}" for word, names in found.items() if names)


class _NotRun(Exception):
    """A partner that cannot run here, or is broken itself; holds the reason."""


def _partner(subject: Subject, spec: str) -> tuple[Partner, tuple[str, ...]]:
    """Load a partner with its requirements, and list the backends that can run it here.

    Raises:
        _NotRun: its package, device or account is missing.
    """
    served, reasons = [], []
    try:
        partner = subject.with_companions(_other(spec))
    except MinillmError as error:
        raise _NotRun(error.what) from error
    for backend in subject.backends:
        try:
            check_support(partner, backend, "cpu")
        except PluginError as error:
            reasons.append(error.what)
        else:
            served.append(backend)
    if not served:
        raise _NotRun(reasons[0])
    return partner, tuple(served)


def _together(subject: Subject, partner: Partner, backends: tuple[str, ...]) -> PlanError | None:
    """Plan and train a pair; return the refusal where the pair conflicts and names both.

    Raises:
        Failed: it neither trains nor is properly refused.
        _NotRun: the partner also fails without the plugin.
    """
    other = partner[0]
    try:
        plan = subject.planned(*partner)
    except MinillmError as error:
        _planned_alone(subject, partner)
        missing = [name for name in (subject.name, other.name) if name not in str(error)]
        if missing or not isinstance(error, PlanError):
            named = f" without naming {missing[0]}" if missing else ""
            raise Failed(
                f"beside {other.name} it is refused{named}: {error.what}",
                cause="name the slot's owner in the error, or let both have a place",
            ) from error
        return error
    turned = build_plan(settings(), (*partner, *subject.companions, subject.loaded))
    if plan.hash != turned.hash:
        raise Failed(
            f"the plan with {other.name} depends on the order of --plugins: "
            f"{plan.hash[:12]}, {turned.hash[:12]}",
            cause="a hook looks at what others did before it",
        )
    for backend in backends:
        if fault := _fault(subject, plan, backend, partner):
            if alone := _fault(subject, _planned_alone(subject, partner), backend, partner):
                raise _NotRun(alone.alone)
            raise Failed(
                f"{backend}, beside {other.name}: {fault.beside}",
                cause=f"{fault.cause}; {other.name} trains without this plugin",
            ) from fault.error
    return None


def _planned_alone(subject: Subject, partner: Partner) -> Plan:
    """Plan with the partner and without the plugin.

    Raises:
        _NotRun: it is refused.
    """
    try:
        return subject.planned(*partner, without=True)
    except MinillmError as error:
        raise _NotRun(error.what) from error


class _Fault(NamedTuple):
    """A failed training, with messages for the pair and for the partner alone."""

    beside: str
    alone: str
    cause: str
    error: Exception | None = None


def _fault(subject: Subject, plan: Plan, backend: str, partner: Partner) -> _Fault | None:
    """Train five steps; return the fault, or None if every loss is finite."""
    try:
        batches = subject.batches(plan, STEPS, *partner)
        losses = subject.train(subject.trainer(plan, backend), plan, batches)
    except Exception as error:
        text = raised(error)
        return _Fault(text, f"raises alone: {text}", "a shape or a name", error)
    if np.all(np.isfinite(losses)):
        return None
    return _Fault(f"losses {losses}", f"its losses alone are {losses}", "both change one tensor")


@cache
def _other(spec: str) -> Subject:
    """Return a partner, found once for all plugins of a process."""
    return Subject(spec)


@cache
def _slots_alone(spec: str) -> frozenset[str]:
    """Return the slots that a partner takes without the plugin; none if that plan is refused."""
    other = _other(spec)
    try:
        return _slots(other.plan(), other.name)
    except MinillmError:
        return frozenset()


def chosen(subject: Subject) -> list[str]:
    """Choose the plugins to pair it with, at most ``subject.pairs``.

    First plugins with a declared conflict, among those that change the same part of the model; then
    those in one of its slots; then those at another anchor of one of its sites; last those that cannot
    run here; each group in alphabetical order.
    """
    names = subject.partners()
    if subject.pairs is None or len(names) <= subject.pairs:
        return names
    found: dict[int, list[str]] = {kind: [] for kind in range(REFUSED, NOT_HERE + 1)}
    for spec in names:
        found[_distance(subject, spec)].append(spec)
        if len(found[REFUSED]) == subject.pairs:
            break  # nothing ranks before these
    return [spec for kind in found.values() for spec in kind][: subject.pairs]


def _distance(subject: Subject, spec: str) -> int:
    """Return the rank of a partner's distance from the plugin in the model."""
    try:
        partner, _ = _partner(subject, spec)
    except _NotRun:
        return NOT_HERE
    mine, theirs = _slots(subject.plan(), subject.name), _slots_alone(spec)
    if {*map(_part, mine)} & {*map(_part, theirs)}:  # else there is nothing to conflict in
        try:
            subject.planned(*partner)
        except PlanError as error:
            return REFUSED if {subject.name, partner[0].name} <= {*error.plugins} else ELSEWHERE
        except MinillmError:
            return ELSEWHERE  # a hook raised
    if mine & theirs:
        return SAME_SLOT
    return SAME_SITE if {*map(_site, mine)} & {*map(_site, theirs)} else ELSEWHERE


def _slots(plan: Plan, owner: str) -> frozenset[str]:
    """Return ``attention.qk.norm``, ``model.mlp``, ``opt.rule``: slots without layers and keys."""
    slots = {one.slot for one in plan.placements if one.owner == owner}
    return frozenset(LAYER.sub("", slot) for slot in slots if slot not in HOOKS)


def _part(slot: str) -> str:
    """Return ``attention`` of ``attention.qk.norm`` and of ``model.attention``, which replaces it."""
    return slot.removeprefix("model.").partition(".")[0]


def _site(slot: str) -> str:
    """Return ``attention.qk`` of ``attention.qk.norm``."""
    return slot.rpartition(".")[0]
