"""Repeats: what was computed before plays no part in what is computed now."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from minillm_core.backends.base import Trainer
from minillm_core.testing.check import Check, Failed, NotApplicable
from minillm_core.testing.numbers import first_row
from minillm_core.testing.oracle import Oracle
from minillm_core.testing.small import Batch
from minillm_core.testing.subject import Subject
from minillm_core.text import plain

__all__ = ["CHECKS"]

Answer = Mapping[str, np.ndarray]

CAUSE = (
    "something changes from call to call and is kept in a module's global, a class, a closure or "
    "a generator of its own: keep it in a State or a stage's state, or take it as an argument"
)


def repeats(subject: Subject) -> str:
    """A forward pass, and a step of a new model, twice: the same to the bit."""
    plan = subject.plan()
    (batch,) = subject.batches(plan, 1)
    found = []
    if "numpy" in subject.found.cls.manifest.backends:
        oracle = Oracle(subject, plan)
        _twice("numpy, a forward pass", lambda: {"the loss": np.array(oracle.objective(batch))})
        found.append("numpy")
    for backend in subject.backends:
        run = subject.stirred(plan, backend)
        _twice(f"{backend}, a forward pass", _passed(run, first_row(batch)))
        _twice(f"{backend}, the first step of a new model", _stepped(subject, backend, batch))
        found.append(backend)
    return f"the same forward pass and step twice, equal to the bit: {', '.join(found)}"


def _passed(run: Trainer, row: Batch) -> Callable[[], Answer]:
    """One row through one model."""
    return lambda: {"the logits": run.next_logits(row)}


def _stepped(subject: Subject, backend: str, batch: Batch) -> Callable[[], Answer]:
    """A step from the same weights, in a model of its own each time it is called."""

    def step() -> Answer:
        plan = subject.plan()
        run = subject.stirred(plan, backend)
        (loss,) = subject.train(run, plan, [batch])
        return {"the loss": np.array(loss), **run.arrays()}

    return step


def _twice(what: str, answer: Callable[[], Answer]) -> None:
    """Raise where the second answer is not the first.

    Raises:
        Failed: it is another one, or there is none.
        NotApplicable: there is no first one: a later check says why.
    """
    try:
        first = answer()
    except Exception as error:
        raise NotApplicable(f"{what} gives no answer to compare: {_said(error)}") from error
    try:
        again = answer()
    except Exception as error:
        raise Failed(f"{what} raises the second time: {_said(error)}", cause=CAUSE) from error
    for name in first:
        one, two = (np.asarray(side[name], np.float64) for side in (first, again))
        if not np.array_equal(one, two, equal_nan=True):
            apart = f"{_number(one)}, then {_number(two)}" if one.ndim == 0 else _apart(one, two)
            raise Failed(f"{what}, twice from the same weights: {name} is {apart}", cause=CAUSE)


def _apart(one: np.ndarray, two: np.ndarray) -> str:
    return f"{float(np.nanmax(np.abs(one - two))):.1e} from what it was"


def _number(value: np.ndarray) -> str:
    return f"{float(value):.9g}"


def _said(error: Any) -> str:
    return plain(f"{type(error).__name__}: {error}", 200)


CHECKS = (
    Check("repeats", "the same step twice gives the same", repeats, ("plans", "batches", "kernel")),
)
