"""State: a resumed run is the run that was not interrupted, to the bit."""

from __future__ import annotations

import numpy as np

from minillm_core.testing.check import Check, Failed
from minillm_core.testing.subject import Subject

__all__ = ["CHECKS"]

BEFORE, AFTER = 3, 2
"""Steps on either side of the interruption."""


def resumes(subject: Subject) -> str:
    """Three steps, saved, loaded into a new model, two more: equal to five, to the bit."""
    plan, found = subject.plan(), []
    batches = subject.batches(plan, BEFORE + AFTER)
    for backend in subject.backends:
        whole = subject.trainer(plan, backend)
        subject.train(whole, plan, batches[:BEFORE])
        saved = whole.arrays()
        subject.train(whole, plan, batches[BEFORE:], first=BEFORE)
        expected = whole.arrays()
        again = subject.trainer(plan, backend)
        again.resume(saved)
        _same(saved, again.arrays(), f"{backend}: saved and loaded,")
        subject.train(again, plan, batches[BEFORE:], first=BEFORE)
        _same(expected, again.arrays(), f"{backend}: after {AFTER} steps more")
        found.append(f"{backend} {len(saved)} arrays")
    return f"equal to the bit: {', '.join(found)}"


def _same(expected: dict[str, np.ndarray], got: dict[str, np.ndarray], when: str) -> None:
    for name in sorted(expected):
        if not np.array_equal(expected[name], got[name], equal_nan=True):
            apart = float(np.abs(expected[name].astype(np.float64) - got[name]).max())
            raise Failed(
                f"{when} {name} differs by {apart:.1e}",
                cause="something between steps lives outside Param, State and a stage's state",
            )


CHECKS = (Check("resumes", "a resumed run is the uninterrupted one", resumes, ("trains",)),)
