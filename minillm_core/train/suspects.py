"""Whose code computes what stopped being finite: a NaN does not say where it came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from minillm_core.plan.rehearse import nodes_of
from minillm_core.train.job import Job

__all__ = ["suspects"]

SHOWN = 4
"""Plugins that are named."""


def suspects(job: Job) -> tuple[list[str], str]:
    """The plugins in whose code it may have happened.

    Where weights themselves are not finite, the stages of their updates; else whatever takes part
    in the loss.

    Returns:
        Their names; and in words, with their functions. Both are empty where it is nobody's.
    """
    found: dict[str, dict[str, None]] = {}
    spoilt = _spoilt(job.trainer.arrays())
    for owner, function in _stages(job, spoilt) if spoilt else _parts(job):
        found.setdefault(owner, {})[function] = None
    if not found:
        return [], ""
    called = {one.name: one.origin.called for one in job.plugins}
    named = [f"{called[owner]}: {', '.join(found[owner])}" for owner in sorted(found)]
    more = len(named) - SHOWN
    what = f"{min(spoilt)} is updated by" if spoilt else "the loss is computed by"
    words = f"{what} " + "; ".join(named[:SHOWN]) + (f"; and {more} more" if more > 0 else "")
    return sorted(found), words


def _spoilt(arrays: Mapping[str, np.ndarray]) -> set[str]:
    """The parameters that are not finite."""
    return {
        name.removeprefix("model.")
        for name, array in arrays.items()
        if name.startswith("model.") and not np.isfinite(array).all()
    }


def _stages(job: Job, spoilt: set[str]) -> Iterator[tuple[str, str]]:
    """(owner, function) of plugins' stages that update any of these parameters."""
    for group in job.plan.groups:
        if spoilt & {member.name for member in group.members}:
            for _, owner, stage in group.rule.stages:
                if owner != "core":
                    yield owner, _function(stage.reference)


def _parts(job: Job) -> Iterator[tuple[str, str]]:
    """(owner, function) of plugins' nodes, and of their kernels that serve."""
    for node, _ in nodes_of(job.plan.spec):
        yield node.owner, f"{_function(node.reference)}.forward"
    serving = {(choice.op, choice.kernel) for choice in job.trainer.binding.kernels}
    for owner, candidate in job.plan.candidates:
        if (candidate.op, candidate.name) in serving:
            yield owner, _function(candidate.reference)


def _function(reference: str) -> str:
    return reference.rpartition(":")[2]
