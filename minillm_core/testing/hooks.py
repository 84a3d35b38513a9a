"""The hooks that run while training: ``on_batch`` keeps what a batch is, ``on_event`` only listens."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable
from contextlib import chdir
from tempfile import TemporaryDirectory

import numpy as np

from minillm_core.data import OnBatch
from minillm_core.errors import PluginCodeError
from minillm_core.install import pip_line
from minillm_core.plugins.needs import unmet
from minillm_core.plugins.streams import Streams
from minillm_core.testing.check import Check, Failed, NotApplicable
from minillm_core.testing.small import Batch
from minillm_core.testing.subject import Subject
from minillm_core.train import events
from minillm_core.train.hooks import batch_hook, observers

__all__ = ["CHECKS", "EVENTS"]

PHASES = ("train", "eval", "decode")

STEPS = 12


def _stepped(step: int) -> events.Stepped:
    """One of a run's steps."""
    rate, terms = events.Throughput(1e3, 1e3, 9e2), {"z_loss": 0.1}
    return events.Stepped(step, 4.6, 1e-3, 39 * step, rate, 0.04, None, None, 1.0, terms)


EVENTS: tuple[events.Event, ...] = (
    events.Started("0" * 64, STEPS, 1000),
    *map(_stepped, range(1, 3)),
    events.Skipped(2, 1),
    events.Guarded(2, float("nan"), float("inf"), 1),
    events.Evaluated(2, 4.5, None),
    events.Saved(2, "checkpoints/step-00000002", 0.1),
    events.Unsaved(2, "no space left on device"),
    events.Resumed(2, "checkpoints/step-00000002"),
    events.Rewound(3, 9.9, 2, 1),
    *map(_stepped, range(3, STEPS + 1)),
    events.Ended(STEPS, 0, 1.0),
)
"""A short run with one of each that there is; what a run may not know is None."""


def batches(subject: Subject) -> str:
    """In each phase: ids in range, declared fields, the same again; only train drops or reweights."""
    if "on_batch" not in subject.found.cls.hooks:
        raise NotApplicable("it has no on_batch")
    plan = subject.plan()
    plain = subject.batches(subject.plan(without=True), 2)
    for phase in PHASES:
        first, again = (_called(_hook(subject), plain, phase) for _ in range(2))
        for one, two in zip(first, again, strict=True):
            if wrong := _different(one, two):
                raise Failed(
                    f"phase {phase}: '{wrong}' of the same batch differs from call to call",
                    cause="random numbers that are not of random_stream(), a clock, or a counter",
                )
        for one in first:
            _check_fields(subject, plan.batch_fields, one, phase)
        if phase != "train":
            _check_kept(plain, first, phase)
    _check_prefix(_hook(subject), plain[0])
    return f"{', '.join(PHASES)}: ids in range, the same again; only train drops"


def _hook(subject: Subject) -> OnBatch:
    """Its ``on_batch`` as a run would begin to call it."""
    plan = subject.plan()
    vocab = plan.config.model.vocab
    hook = batch_hook(plan.on_batch, [subject.loaded], Counter(), vocab, Streams(0))
    assert hook is not None
    return hook


def _called(hook: OnBatch, plain: list[Batch], phase: str) -> list[Batch]:
    try:
        return [_kept(hook, batch, phase) for batch in plain]
    except PluginCodeError as error:
        raise Failed(
            f"{error.what}: {error.where}", cause=error.fix or "see the lines of the plugin"
        ) from error


def _kept(hook: OnBatch, batch: Batch, phase: str) -> Batch:
    """What the hook returns.

    Raises:
        Failed: what it was given is not as it was.
    """
    given = copy.deepcopy(batch)
    arrays = dict(given)
    returned = hook(given, phase)
    if wrong := _different(arrays, batch) or _different(given, batch):
        raise Failed(
            f"phase {phase}: on_batch changes '{wrong}' of the batch that it was given",
            cause="return a new dictionary with new arrays: {**batch, 'ids': ids}, and no "
            "batch['ids'] = ..., batch['ids'][...] = ... or +=",
        )
    return returned


def _different(one: Batch, two: Batch) -> str | None:
    """The first field in which they differ."""
    for name in sorted({*one, *two}):
        if name not in one or name not in two:
            return name
        if not np.array_equal(one[name], two[name]):
            return name
    return None


def _check_fields(subject: Subject, fields: tuple, batch: Batch, phase: str) -> None:
    """What it declared is there as declared."""
    for name, owner, field in fields:
        if owner != subject.name:
            continue
        wanted = (*batch["ids"].shape, *field.shape)
        got = batch.get(name)
        if got is None or got.shape != wanted or got.dtype != field.dtype:
            shown = "absent" if got is None else f"{got.dtype} {got.shape}"
            raise Failed(
                f"phase {phase}: field '{name}' is {shown}, declared as {field.dtype} {wanted}",
                cause="on_batch writes a declared field in every phase",
            )


def _check_kept(plain: list[Batch], got: list[Batch], phase: str) -> None:
    """Nothing is dropped or reweighted outside train."""
    cause = "drop and reweight in phase train alone: figures of evaluations must be comparable"
    for before, after in zip(plain, got, strict=True):
        labels = [int((one["labels"] >= 0).sum()) for one in (before, after)]
        if labels[0] != labels[1]:
            raise Failed(f"phase {phase}: {labels[0]} labels become {labels[1]}", cause=cause)
        weights = after.get("weights")
        if weights is not None and not (weights == 1).all():
            worst = float(weights.flat[int(np.abs(weights - 1).argmax())])
            raise Failed(f"phase {phase}: weights such as {worst:g}", cause=cause)


def _check_prefix(hook: OnBatch, batch: Batch) -> None:
    """In phase decode a further column leaves those before it as they were."""
    whole = hook(copy.deepcopy(batch), "decode")
    for end in (1, 5):
        part = hook({name: array[:, :end].copy() for name, array in batch.items()}, "decode")
        kept = {name: array[:, :end] for name, array in whole.items()}
        if wrong := _different(part, kept):
            raise Failed(
                f"phase decode: '{wrong}' of the first {end} columns changes when more follow",
                cause="a column may depend on itself and earlier ones alone",
            )


def hears(subject: Subject) -> str:
    """Every event is taken without an error, and comes back unchanged; the plan stays."""
    if "on_event" not in subject.found.cls.hooks:
        raise NotApplicable("it has no on_event")
    if lacking := unmet(subject.found.cls.manifest.requires):
        raise NotApplicable(f"it needs {', '.join(lacking)}: {pip_line(*lacking)}")
    (observer,) = observers([subject.loaded]).values()
    plan = subject.plan()
    before = json.dumps(plan.data(), sort_keys=True)
    with TemporaryDirectory() as folder, chdir(folder):  # it may write files: not over an author's
        for event in EVENTS:
            given = copy.deepcopy(event)
            _told(observer, given)
            if repr(given) != repr(event):
                raise Failed(
                    f"event '{event.event}' is {event!r} before and {given!r} after it",
                    cause="an observer changes what others are still to read",
                )
    if json.dumps(plan.data(), sort_keys=True) != before:
        raise Failed("the plan is another one afterwards", cause="an observer writes to the model")
    kinds = {event.event for event in EVENTS}
    return f"a run of {STEPS} steps with {len(kinds)} kinds of events"


def _told(observer: Callable[[events.Event], None], event: events.Event) -> None:
    try:
        observer(event)
    except PluginCodeError as error:
        raise Failed(
            f"{error.what}: {error.where}",
            cause="an event's field may be None, NaN, or absent in other events; an observer that "
            "raises three times is told no more",
        ) from error


CHECKS = (
    Check("batches", "on_batch keeps its promises in every phase", batches, ("plans",)),
    Check("events", "on_event takes every event and changes nothing", hears, ("plans",)),
)
