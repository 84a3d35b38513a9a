"""What frameworks do with it: both train alike, in one graph, whether blocks are recomputed or not."""

from __future__ import annotations

import numpy as np

from minillm_core.testing.check import Check, Failed, NotApplicable
from minillm_core.testing.numbers import compare
from minillm_core.testing.subject import Subject

__all__ = ["CHECKS"]

STEPS = 5


def compiles(subject: Subject) -> str:
    """A compiled step is one graph and has the gradients of the step that was not compiled."""
    found = []
    plans = [subject.plan(train_compile=word) for word in ("off", "on")]
    (batch,) = subject.batches(plans[0], 1)
    for backend in subject.backends:
        eager, compiled = (subject.gradients(plan, backend, batch)[1] for plan in plans)
        cause = "the graph depends on a value, or reads something that is not an argument"
        found.append(compare(eager, compiled, f"{backend}, eager and compiled", cause=cause))
        steps = [
            subject.train(subject.trainer(plan, backend), plan, [batch, batch]) for plan in plans
        ]
        if not np.allclose(*steps, rtol=0, atol=1e-5):
            raise Failed(f"{backend}: losses {steps[0]} and, compiled, {steps[1]}", cause=cause)
    return "; ".join(found)


def checkpointing(subject: Subject) -> str:
    """Recomputing blocks in the backward pass changes neither gradients nor state."""
    found = []
    plans = [subject.plan(train_checkpointing=on) for on in (False, True)]
    (batch,) = subject.batches(plans[0], 1)
    cause = "a node keeps something on self, or reads what is neither an argument nor a parameter"
    for backend in subject.backends:
        (_, grads, states), (_, again, states_again) = (
            subject.gradients(plan, backend, batch) for plan in plans
        )
        found.append(compare(grads, again, f"{backend}, with and without", cause=cause))
        for name, value in states.items():
            if not np.array_equal(value, states_again[name]):
                raise Failed(f"{backend}: {name} differs with checkpointing", cause=cause)
    return "; ".join(found)


def alike(subject: Subject) -> str:
    """Five steps with the plugin's own optimizer are the same on both frameworks."""
    if len(backends := subject.backends) < 2:
        raise NotApplicable(f"{', '.join(backends)} alone: {subject.why_alone}")
    plan = subject.plan()
    batches = subject.batches(plan, STEPS)
    first, second = (subject.train(subject.trainer(plan, one), plan, batches) for one in backends)
    apart = np.abs(np.subtract(first, second))
    if not apart.max() <= 1e-4:
        step = int(apart.argmax()) + 1
        raise Failed(
            f"step {step}: {backends[0]} {first[step - 1]:.6f}, {backends[1]} "
            f"{second[step - 1]:.6f}",
            cause="a stage behaves otherwise on one of them",
        )
    return f"losses of {STEPS} steps {apart.max():.0e} apart"


CHECKS = (
    Check("pure", "checkpointing changes no gradient", checkpointing, ("trains",)),
    Check("alike", "both frameworks train alike", alike, ("parity", "resumes")),
    Check("compiles", "a compiled step is one graph, same gradients", compiles, ("resumes",)),
)
