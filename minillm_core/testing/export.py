"""The export claim: what another program would load gives the same logits."""

from __future__ import annotations

import numpy as np

from minillm_core.checkpoint.directory import export_layout, exported
from minillm_core.errors import PlanError
from minillm_core.testing.check import Check, Failed, NotApplicable
from minillm_core.testing.layouts import logits
from minillm_core.testing.numbers import first_row
from minillm_core.testing.oracle import Oracle
from minillm_core.testing.subject import Subject

__all__ = ["CHECKS"]

BOUND = 1e-6
"""Largest difference of a logit: tables of angles are float32 in a model."""


def exports(subject: Subject) -> str:
    """Its exported tensors, in the published model of that layout, give its logits."""
    plan, claimed = subject.plan(), subject.found.cls.manifest.export
    if plan.export.layout is None:
        raise NotApplicable("its model is of no layout that others know, and it claims none")
    oracle = Oracle(subject, plan)
    row = first_row(subject.batches(plan, 1)[0])
    states = {
        name: array
        for name, array in subject.trainer(plan, subject.backends[0]).arrays().items()
        if name.startswith("state.")
    }
    cause = f"export={claimed!r} is claimed of a model that computes something else"
    try:
        layout = export_layout(plan)
        tensors = exported(plan, {f"model.{n}": oracle.get(n) for n in oracle.places} | states)
    except PlanError as error:
        raise Failed(error.what, cause=cause) from error
    config = layout.document(plan.config.model, positions=row["ids"].shape[1], boundary=None)
    theirs = logits(tensors, config, row["ids"][0])[-1]
    apart = float(np.abs(oracle.logits(row) - theirs).max())
    if not apart <= BOUND:
        raise Failed(
            f"the published {layout.name} with its weights gives logits {apart:.1e} from its own "
            f"(bound {BOUND:.0e})",
            cause=cause,
        )
    return f"{layout.name}: logits {apart:.0e} apart"


CHECKS = (Check("exports", "the export claim is true", exports, ("forward",)),)
