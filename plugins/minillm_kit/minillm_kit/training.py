"""Training: steps repeat, stay finite, resume bit for bit, show evidence, and leave frameworks unchanged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from minillm_core.inspection import Evidence
from minillm_kit.check import NOT_FINITE, Failed, NotApplicable, raised
from minillm_kit.oracle import Oracle
from minillm_kit.subject import Subject, first_row

if TYPE_CHECKING:
    from minillm_core.inspection import Trainer

Arrays = Mapping[str, np.ndarray]

BEFORE, AFTER = 3, 2
"""Steps before and after an interruption."""

KEPT = (
    "something changes from call to call and is kept in a module's global, a class, a closure or "
    "a generator of its own: keep it in a State or a stage's state, or take it as an argument"
)


def repeats(subject: Subject) -> str:
    """Check that a forward pass, and a step of a new model, are bitwise equal when repeated."""
    plan, found = subject.plan(), []
    (batch,) = subject.batches(plan, 1)

    def objective(oracle: Oracle) -> Arrays:
        return {"the loss": np.array(float(oracle.forward(batch).objective))}

    def logits(run: Trainer) -> Arrays:
        return {"the logits": run.next_logits(first_row(batch))}

    def step(backend: str) -> Arrays:
        run = subject.trainer(plan, backend, stirred=True)
        (loss,) = subject.train(run, plan, [batch])
        return {"the loss": np.array(loss), **run.arrays()}

    if subject.on_numpy:
        _twice("numpy, a forward pass", objective, Oracle(subject, plan))
        found.append("numpy")
    for backend in subject.backends:
        run = subject.trainer(plan, backend, stirred=True)
        _twice(f"{backend}, a forward pass", logits, run)
        _twice(f"{backend}, the first step of a new model", step, backend)
        found.append(backend)
    return f"the same forward pass and step twice, equal to the bit: {', '.join(found)}"


def _twice(what: str, answer: Callable[..., Arrays], given: object) -> None:
    """Check that two calls give the same answer.

    Raises:
        Failed: the second answer differs or fails.
        NotApplicable: the first call fails; a later check reports why.
    """
    try:
        first = answer(given)
    except Exception as error:
        raise NotApplicable(f"{what} gives no answer to compare: {raised(error)}") from error
    try:
        again = answer(given)
    except Exception as error:
        raise Failed(f"{what} raises the second time: {raised(error)}", cause=KEPT) from error
    for name in first:
        one, two = (np.asarray(side[name], np.float64) for side in (first, again))
        if not np.array_equal(one, two, equal_nan=True):
            apart = f"{float(one):.9g}, then {float(two):.9g}" if one.ndim == 0 else ""
            apart = apart or f"{float(np.nanmax(np.abs(one - two))):.1e} from what it was"
            raise Failed(f"{what}, twice from the same weights: {name} is {apart}", cause=KEPT)


class _Trained(NamedTuple):
    """The first steps of a new model."""

    losses: list[float]
    saved: Arrays  # after the first of them
    arrays: Arrays  # after all
    shown: Mapping[str, Any]  # the record of the plugin's evidence


def _trained(subject: Subject, backend: str) -> _Trained:
    """Train a new model for some steps, with a save between them."""
    plan = subject.plan()
    batches = subject.batches(plan, BEFORE + AFTER)
    run = subject.trainer(plan, backend)
    # counted by the dataloader and training loop, which do not run here
    seen = Counter({f"batch:{subject.name}": 1, f"event:{subject.name}": 1})
    expected = {subject.name: _planned(subject).expected}
    record = Evidence(expected, run, seen=seen, say=lambda line: None)
    losses = subject.train(run, plan, batches[:BEFORE])
    saved = run.arrays()
    losses += subject.train(run, plan, batches[BEFORE:], first=BEFORE)
    (shown,) = record.records().values()
    return _Trained(losses, saved, run.arrays(), shown)


def _planned(subject: Subject) -> Any:
    (planned,) = (one for one in subject.plan().plugins if one.name == subject.name)
    return planned


def trains(subject: Subject) -> str:
    """Check that every loss of five steps on each backend is finite."""
    found = []
    for backend in subject.backends:
        losses = subject.once(_trained, backend).losses
        if not np.all(np.isfinite(losses)):
            step = int(np.argmin(np.isfinite(losses))) + 1
            raise Failed(
                f"{backend}: the loss of step {step} is {losses[step - 1]}",
                cause=f"{NOT_FINITE}, or too large a step",
            )
        found.append(f"{backend} {losses[0]:.3f} to {losses[-1]:.3f}")
    return ", ".join(found)


def evidence(subject: Subject) -> str:
    """Check for evidence that the plugin's parts of the plan were active."""
    expected, counts = _planned(subject).expected, []
    for backend in subject.backends:
        shown = subject.once(_trained, backend).shown
        missing = [k for k in shown.get("missing", ()) if not k.startswith(("kernel:", "event:"))]
        if not shown["shown"] or missing:
            raise Failed(
                f"{backend}: nothing was seen of {', '.join(missing[:3] or expected[:3])}",
                cause="a node or parameter that the forward pass does not use",
            )
        counts.append(f"{backend} {len(expected)}")
    return "expected and seen: " + ", ".join(counts)


def frameworks_untouched(subject: Subject) -> str:
    """Check that planning and steps leave a framework's per-process state unchanged."""
    backends = subject.backends
    for when, changed in subject.probed("train", *backends).items():
        if changed:
            raise Failed(
                f"{when}: changed {', '.join(changed[:3])}",
                cause="a default, a flag, a seed or an attribute of the framework's is set: pass it "
                "as an argument, or keep what is needed in the plugin's own objects",
            )
    return f"defaults, flags, seeds and functions of {' and '.join(backends)}"


def resumes(subject: Subject) -> str:
    """Check that three steps, a save, a load into a new model, and two steps equal five steps, bitwise."""
    plan, found = subject.plan(), []
    batches = subject.batches(plan, BEFORE + AFTER)
    for backend in subject.backends:
        _, saved, expected, _ = subject.once(_trained, backend)
        again = subject.trainer(plan, backend)
        again.resume(saved)
        _same(saved, again.arrays(), f"{backend}: saved and loaded,")
        subject.train(again, plan, batches[BEFORE:], first=BEFORE)
        _same(expected, again.arrays(), f"{backend}: after {AFTER} steps more")
        found.append(f"{backend} {len(saved)} arrays")
    return f"equal to the bit: {', '.join(found)}"


def _same(expected: Arrays, got: Arrays, when: str) -> None:
    for name in sorted(expected):
        if not np.array_equal(expected[name], got[name], equal_nan=True):
            apart = float(np.abs(expected[name].astype(np.float64) - got[name]).max())
            raise Failed(
                f"{when} {name} differs by {apart:.1e}",
                cause="something between steps lives outside Param, State and a stage's state",
            )
