"""Training: it steps, and what it put into the plan is seen."""

from __future__ import annotations

from collections import Counter

import numpy as np

from minillm_core.testing.check import Check, Failed
from minillm_core.testing.subject import Subject
from minillm_core.train.evidence import Evidence

__all__ = ["CHECKS"]

STEPS = 5


def trains(subject: Subject) -> str:
    """Five steps on each backend; every loss is finite."""
    plan, found = subject.plan(), []
    for backend in subject.backends:
        run = subject.trainer(plan, backend)
        losses = subject.train(run, plan, subject.batches(plan, STEPS))
        if not np.all(np.isfinite(losses)):
            step = int(np.argmin(np.isfinite(losses))) + 1
            raise Failed(
                f"{backend}: the loss of step {step} is {losses[step - 1]}",
                cause="a division by 0, a logarithm or a root of what may be 0, or too large a step",
            )
        found.append(f"{backend} {losses[0]:.3f} to {losses[-1]:.3f}")
    return ", ".join(found)


def evidence(subject: Subject) -> str:
    """What it put into the plan is seen to take part."""
    plan, counts = subject.plan(), []
    (planned,) = (one for one in plan.plugins if one.name == subject.name)
    for backend in subject.backends:
        run = subject.trainer(plan, backend)
        seen: Counter[str] = Counter(dict.fromkeys(_by_construction(subject), 1))
        record = Evidence({planned.name: planned.expected}, run, seen=seen, say=_silent)
        subject.train(run, plan, subject.batches(plan, STEPS))
        (shown,) = record.records().values()
        missing = [k for k in shown.get("missing", ()) if not k.startswith(("kernel:", "event:"))]
        if not shown["shown"] or missing:
            raise Failed(
                f"{backend}: nothing was seen of {', '.join(missing[:3] or planned.expected[:3])}",
                cause="a node or parameter that the forward pass does not use",
            )
        counts.append(f"{backend} {len(planned.expected)}")
    return "expected and seen: " + ", ".join(counts)


def frameworks_untouched(subject: Subject) -> str:
    """Planning and steps leave what a framework has once a process as it was."""
    backends = subject.backends
    answer = subject.probed("train", *backends)
    for when, changed in answer.items():
        if changed:
            raise Failed(
                f"{when}: changed {', '.join(changed[:3])}",
                cause="a default, a flag, a seed or an attribute of the framework's is set: pass it "
                "as an argument, or keep what is needed in the plugin's own objects",
            )
    return f"defaults, flags, seeds and functions of {' and '.join(backends)}"


def _by_construction(subject: Subject) -> list[str]:
    """What the loader and the loop count, and not the trainer."""
    return [f"batch:{subject.name}", f"event:{subject.name}"]


def _silent(_: str) -> None:
    """What is missing is told by the check."""


CHECKS = (
    Check("trains", "five steps on each backend, every loss finite", trains, ("repeats",)),
    Check("evidence", "what it put into the plan is seen to take part", evidence, ("trains",)),
    Check(
        "clean",
        "steps leave the frameworks as they were",
        frameworks_untouched,
        ("traces", "trains"),
    ),
)
