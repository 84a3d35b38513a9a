"""The export claim: what another program would load gives the same logits."""

from __future__ import annotations

import numpy as np

from minillm_core.backends.numpy.model import last_logits, materialise
from minillm_core.checkpoint.directory import exported
from minillm_core.nn.module import declared
from minillm_core.nn.node import Scope
from minillm_core.nn.param import Param
from minillm_core.testing.check import Check, Failed, NotApplicable
from minillm_core.testing.subject import Subject

__all__ = ["CHECKS"]


def exports(subject: Subject) -> str:
    """Its exported tensors in the plain model give its logits, after some steps."""
    plan, claimed = subject.plan(), subject.found.cls.manifest.export
    if plan.export.layout is None:
        if claimed is not None:
            raise Failed(f"claims {claimed}, and is in its own way", cause="see minillm plan")
        raise NotApplicable("its model is of no layout that others know, and it claims none")
    plain = subject.plan(without=True)
    if plan.export.layout != plain.export.layout:
        raise NotApplicable(f"no plain model of the layout {plan.export.layout} to compare with")
    run = subject.trainer(plan, subject.backends[0])
    batches = subject.batches(plan, 5)
    subject.train(run, plan, batches)
    arrays = run.arrays()
    exported(plan, arrays)  # raises where a parameter has no place
    row = {name: array[:1] for name, array in batches[0].items()}
    logits = []
    for one in (plan, plain):
        model = materialise(one, 0)
        for name, module, attribute, _ in declared(model, Param):
            setattr(module, attribute, arrays[f"model.{name}"].astype(np.float64))
        logits.append(last_logits(one, model)(row, Scope))
    apart = float(np.abs(logits[0] - logits[1]).max())
    if not apart <= 1e-6:
        raise Failed(
            f"the plain {plan.export.layout} with its weights gives logits {apart:.1e} from its own",
            cause=f"export={claimed!r} is claimed of a model that computes something else",
        )
    return f"{plan.export.layout}: logits {apart:.0e} apart"


CHECKS = (Check("exports", "the export claim is true", exports, ("trains",)),)
