"""Whom a plugin is paired with: first those that it may get in the way of."""

from __future__ import annotations

import re

from minillm_core.errors import MinillmError, PlanError
from minillm_core.plan import Plan
from minillm_core.testing.subject import Subject

__all__ = ["chosen"]

REFUSED, SAME_SLOT, SAME_SITE, ELSEWHERE = range(4)

LAYER = re.compile(r"^layers\.\d+\.|\[.*")
HOOKS = ("on_batch", "on_event")
"""Of these everyone has one of their own."""


def chosen(subject: Subject) -> list[str]:
    """Plugins to pair it with, at most ``subject.pairs``.

    First those that are refused beside it, by name; then those in one of its slots; then those at
    another anchor of one of its sites; of each kind in alphabetical order.
    """
    names = subject.partners()
    if subject.pairs is None or len(names) <= subject.pairs:
        return names
    return sorted(names, key=lambda spec: _distance(subject, spec))[: subject.pairs]


def _distance(subject: Subject, spec: str) -> int:
    """How far from the plugin it is in the model."""
    other = Subject(spec)
    there = {subject.name, *(one.name for one in subject.companions)}
    try:
        below = [one for one in other.companions if one.name not in there]
        plan = subject.planned(other.loaded, *below)
    except PlanError as error:
        both = all(f"'{name}'" in str(error) for name in (subject.name, other.name))
        return REFUSED if both else ELSEWHERE
    except MinillmError:
        return ELSEWHERE  # it cannot be run here
    mine, theirs = (_slots(plan, name) for name in (subject.name, other.name))
    if mine & theirs:
        return SAME_SLOT
    return SAME_SITE if {*map(_site, mine)} & {*map(_site, theirs)} else ELSEWHERE


def _slots(plan: Plan, owner: str) -> set[str]:
    """``attention.qk.norm``, ``model.mlp``, ``opt.rule``: without layers and keys."""
    slots = {one.slot for one in plan.placements if one.owner == owner}
    return {LAYER.sub("", slot) for slot in slots if slot not in HOOKS}


def _site(slot: str) -> str:
    """``attention.qk`` of ``attention.qk.norm``."""
    return slot.rpartition(".")[0]
