"""What run.json says of a run: what it was told, what it runs on, and how it came about."""

from __future__ import annotations

from typing import Any

from minillm_core.train import describe
from minillm_core.train.evidence import Evidence
from minillm_core.train.job import Job
from minillm_core.train.position import Position
from minillm_core.train.record import hardware, versions
from minillm_core.train.resume import Earlier
from minillm_core.train.settings import settings

__all__ = ["document", "taking_part"]


def document(job: Job, earlier: Earlier | None, position: Position) -> dict[str, Any]:
    """The record at the start of one of the run's lives.

    Args:
        job: what is run.
        earlier: the life before this one.
        position: where this one begins.
    """
    binding = job.trainer.binding
    distributions = [one.distribution for one in job.plugins if one.distribution]
    return {
        "config": settings(job.loaded),
        "plan": job.plan.data(),
        "plan_hash": job.plan.hash,
        "binding": describe.binding(binding),
        "plugins": [one.data() | {"evidence": None} for one in job.plugins],
        "versions": versions(binding.backend, distributions),
        "hardware": hardware(binding.device_name),
        "seed": job.config.seed,
        "data": {"fingerprint": job.corpus.fingerprint, "description": job.corpus.description},
        "resumed": _lives(earlier, position),
        "initial": _initial(job, earlier),
    }


def taking_part(job: Job, evidence: Evidence) -> list[dict[str, Any]]:
    """The plugins, with what shows that they took part."""
    shown = evidence.records()
    return [one.data() | {"evidence": shown.get(one.name)} for one in job.plugins]


def _initial(job: Job, earlier: Earlier | None) -> dict[str, Any] | None:
    """The directory that the weights came from, in whichever of the run's lives."""
    if job.initial is not None:
        return job.initial.data()
    return earlier.record.get("initial") if earlier else None


def _lives(earlier: Earlier | None, position: Position) -> list[dict[str, Any]]:
    """One entry for each time that the run was taken up again: where, and how it had ended."""
    if earlier is None:
        return []
    return [
        *earlier.record.get("resumed", ()),
        {"step": position.step, "exit_before": earlier.exit},
    ]
