"""Beside others: the plan is made and trains, or is refused by name."""

from __future__ import annotations

import numpy as np

from minillm_core.config.selection import name_of
from minillm_core.errors import MinillmError, PlanError, PluginError
from minillm_core.plan import Plan, build_plan
from minillm_core.plugins.manager import LoadedPlugin, check_support
from minillm_core.testing.check import Check, Failed, NotApplicable
from minillm_core.testing.partners import chosen
from minillm_core.testing.small import settings
from minillm_core.testing.subject import Subject
from minillm_core.text import plain

__all__ = ["CHECKS"]

STEPS = 5

Partner = tuple[LoadedPlugin, ...]
"""A plugin, and then those that it builds on."""


def pairs(subject: Subject) -> str:
    """With each partner: the same plan in either order that trains, or a refusal naming both."""
    told: dict[str, list[str]] = {"trained": [], "refused by name": [], "not run": []}
    for spec in chosen(subject):
        name = name_of(spec, where="partner")
        try:
            partner, backends = _partner(subject, spec)
            if refusal := _together(subject, partner, backends):
                verdict, name = "refused by name", f"{name} ({refusal.what})"
            else:
                verdict, alone = "trained", backends != subject.backends
                name = f"{name} (on {', '.join(backends)} alone)" if alone else name
        except _NotRun as reason:
            verdict, name = "not run", f"{name} ({reason})"
        told[verdict].append(name)
    if not told["trained"] and not told["refused by name"]:
        reasons = ", ".join(told["not run"]) or "none is installed"
        raise NotApplicable(f"no other plugin can be run here: {reasons}")
    return "; ".join(f"{word}: {', '.join(names)}" for word, names in told.items() if names)


class _NotRun(Exception):
    """A partner cannot be run here, or is broken itself; the reason."""


def _partner(subject: Subject, spec: str) -> tuple[Partner, tuple[str, ...]]:
    """A plugin that can be run here with what it builds on, and on which backends.

    Raises:
        _NotRun: its package, device or account is missing.
    """
    served, reasons = [], []
    other = Subject(spec)
    try:
        there = {subject.name, *(one.name for one in subject.companions)}
        below = [one for one in other.companions if one.name not in there]
        partner = (other.loaded, *below)
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
    """None where the pair trains; the refusal where it is refused as it should be.

    Raises:
        Failed: neither.
        _NotRun: the partner does not get so far without the plugin.
    """
    other = partner[0]
    try:
        plan = subject.planned(*partner)
    except MinillmError as error:
        _plans_alone(subject, partner)
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
        try:
            losses = _losses(subject, plan, backend, partner)
        except Exception as error:
            _trains_alone(subject, partner, backend)
            raise Failed(
                f"{backend}, beside {other.name}: {_said(error)}",
                cause=f"a shape or a name; {other.name} trains without this plugin",
            ) from error
        if not np.all(np.isfinite(losses)):
            _trains_alone(subject, partner, backend)
            raise Failed(
                f"{backend}, beside {other.name}: losses {losses}",
                cause=f"both change one tensor; {other.name} trains without this plugin",
            )
    return None


def _losses(subject: Subject, plan: Plan, backend: str, partner: Partner) -> list[float]:
    batches = subject.batches(plan, STEPS, *partner)
    return subject.train(subject.trainer(plan, backend), plan, batches)


def _plans_alone(subject: Subject, partner: Partner) -> Plan:
    """The partner without the plugin.

    Raises:
        _NotRun: it is refused.
    """
    try:
        return subject.planned(*partner, without=True)
    except MinillmError as error:
        raise _NotRun(error.what) from error


def _trains_alone(subject: Subject, partner: Partner, backend: str) -> None:
    """Return where the partner trains without the plugin.

    Raises:
        _NotRun: it does not.
    """
    plan = _plans_alone(subject, partner)
    try:
        losses = _losses(subject, plan, backend, partner)
    except Exception as error:
        raise _NotRun(f"raises alone: {_said(error)}") from error
    if not np.all(np.isfinite(losses)):
        raise _NotRun(f"its losses alone are {losses}")


def _said(error: Exception) -> str:
    return plain(f"{type(error).__name__}: {error}", 200)


CHECKS = (Check("pairs", "beside others it trains, or is refused by name", pairs, ("trains",)),)
