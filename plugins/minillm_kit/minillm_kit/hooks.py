"""The hooks called during training: ``on_batch``, ``on_event`` and ``on_evaluated``."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from contextlib import chdir
from itertools import islice
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

import minillm_core as minillm
from minillm_core.commands import counted, pip_line, plain
from minillm_core.documents import Reading, Tokenizer
from minillm_core.inspection import (
    Documents,
    Loader,
    OnBatch,
    PluginCodeError,
    batch_hook,
    call_names,
    observers,
    unmet,
)
from minillm_kit.check import Failed, NotApplicable
from minillm_kit.subject import Batch, Subject, as_in_text, supervised

if TYPE_CHECKING:
    from minillm_core.inspection import StepBatch

PHASES = ("train", "eval", "decode")

STEPS = 12


def _stepped(step: int) -> minillm.Stepped:
    """Return the event of one training step."""
    rate, terms = minillm.Throughput(1e3, 1e3, 9e2), {"z_loss": 0.1}
    return minillm.Stepped(step, 4.6, 1e-3, 39 * step, rate, 0.04, None, None, 1.0, terms)


EVENTS: tuple[minillm.Event, ...] = (
    minillm.Started("0" * 64, STEPS, 1000),
    *map(_stepped, range(1, 3)),
    minillm.Skipped(2, 1),
    minillm.Guarded(2, float("nan"), float("inf"), 1),
    minillm.Evaluated(2, 4.5, None),
    minillm.Sampled(2, "def main", "(): pass"),
    minillm.Saved(2, "checkpoints/step-00000002", 0.1),
    minillm.Unsaved(2, "no space left on device"),
    minillm.Resumed(2, "checkpoints/step-00000002"),
    minillm.Rewound(3, 9.9, 2, 1),
    *map(_stepped, range(3, STEPS + 1)),
    minillm.Ended(STEPS, 0, 1.0),
)
"""A short run with an event of every kind; fields that may be unknown are None."""


LOADED = 8
"""Number of dataloader steps."""

CALLED = 6
"""Number of batches given to ``on_batch``: what happens to one token in a hundred is seen."""

DOCUMENTS = 1000
"""Maximum number of documents read from a source."""


def batches(subject: Subject) -> str:
    """Check that documents and rows repeat and resume, and ``on_batch``'s ids, fields, labels by phase."""
    plan, done = subject.plan(), []
    claims = {**plan.arrangement, **({"shapes": plan.shaping.choose} if plan.shaping else {})}
    if claimed := sorted(what for what, one in claims.items() if one.owner == subject.name):
        done.append(_rows(plan, " and ".join(claimed)))
    source = plan.sourcing.source
    if source is not None and source.owner == subject.name and not plan.sourcing.files:
        done.append(_documents(plan))
    if "on_batch" in subject.found.cls.hooks:
        done.append(_batches(subject))
    if not done:
        raise NotApplicable("its source reads files" if source else "it has no on_batch")
    return "; ".join(done)


def _documents(plan: minillm.Plan) -> str:
    """Read the first documents of a source without files twice.

    Raises:
        Failed: the source is empty, or the second reading differs.
    """
    source, vocab = plan.sourcing.source, plan.config.model.vocab
    assert source is not None
    read = (islice(source.call((), Reading(vocab)), DOCUMENTS) for _ in range(2))
    first, again = ([_shown(one) for one in some] for some in read)
    if not first:
        raise Failed("the source gives no document", cause="its function yields nothing")
    if first != again:
        cause = "random numbers without a seed, a clock, or what is kept from call to call"
        raise Failed("the source gives other documents the second time", cause=cause)
    return f"source: {len(first)} documents, the same again"


def _shown(document: object) -> object:
    """Convert a document to comparable values."""
    if isinstance(document, list):
        return [
            (_shown(content), {name: np.asarray(one).tolist() for name, one in values.items()})
            for content, values in document
        ]
    return document.tolist() if isinstance(document, np.ndarray) else document


def _rows(plan: minillm.Plan, claimed: str) -> str:
    """Read some steps twice, and again from each of their resume cursors."""
    rng, vocab = np.random.default_rng(0), plan.config.model.vocab
    longest = 3 * plan.config.train.seq_len  # some fit into a row, some are longer
    train, seed = plan.config.train, plan.config.data.seed
    sizes = {"rows": train.rows, "accumulate": 1, "seq_len": train.seq_len, "seed": seed}
    sizes |= {"shape_at": plan.shape_at, "by": plan.arrangement}
    documents = Documents.of(
        [rng.integers(0, vocab, n) for n in rng.integers(1, longest, 40)], vocab
    )

    def read(steps: int, cursor: Mapping[str, Any] | None = None) -> list[StepBatch]:
        with Loader(documents, **sizes, step=LOADED - steps, cursor=cursor) as loader:
            return [next(loader) for _ in range(steps)]

    try:
        whole, again = read(LOADED), read(LOADED)
        _equal(whole, again, "a second time")
        for step, made in enumerate(whole[:-1], 1):
            cursor = json.loads(json.dumps(made.cursor))
            _equal(whole[step:], read(LOADED - step, cursor), f"resumed after step {step}")
    except PluginCodeError as error:
        raise Failed(
            f"{error.what}: {error.where}", cause=error.fix or "see the lines of the plugin"
        ) from error
    return f"{claimed}: {LOADED} steps, the same again and resumed after each"


def _equal(steps: list[StepBatch], others: list[StepBatch], when: str) -> None:
    """Check that two sequences of steps have equal batches.

    Raises:
        Failed: two batches differ.
    """
    for one, two in zip(steps, others, strict=True):
        for batch, other in zip(one.micro, two.micro, strict=True):
            if wrong := _different(batch, other):
                raise Failed(
                    f"{when}, '{wrong}' of the same rows differs",
                    cause="random numbers, or something that is remembered outside of pending and state",
                )


def _batches(subject: Subject) -> str:
    """Call ``on_batch`` in each phase."""
    plain = subject.batches(subject.plan(without=True), CALLED)
    for phase in PHASES:
        first, again = (_called(_hook(subject), plain, phase) for _ in range(2))
        for one, two in zip(first, again, strict=True):
            if wrong := _different(one, two):
                raise Failed(
                    f"phase {phase}: '{wrong}' of the same batch differs from call to call",
                    cause="random numbers that are not of random_stream(), a clock, or a counter",
                )
        if phase != "train":
            _check_kept(plain, first, phase)
        elif not supervised(first):
            raise Failed(
                f"phase train: all {supervised(plain)} labels of {len(plain)} batches become -1",
                cause="nothing would be trained: set only the labels to -1 that are not to be learned",
            )
    _check_prefix(_hook(subject), plain[0])
    return f"{', '.join(PHASES)}: ids in range, the same again; only train drops"


def _hook(subject: Subject) -> OnBatch:
    """Return the plugin's ``on_batch``, set up as at the start of a run."""
    plan = subject.plan()
    hook = batch_hook(plan, [subject.loaded, *subject.companions], pieces=as_in_text(plan))
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
    """Call the hook on a copy of a batch.

    Raises:
        Failed: the copy, or an array of it, changed.
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
    """Return the first field in which two batches differ; None: they are equal."""
    for name in sorted({*one, *two}):
        if name not in one or name not in two or not np.array_equal(one[name], two[name]):
            return name
    return None


def _check_kept(plain: list[Batch], got: list[Batch], phase: str) -> None:
    """Check that labels are dropped or reweighted only in phase train."""
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
    """Check that in phase decode a column does not depend on later columns."""
    whole = hook(copy.deepcopy(batch), "decode")
    for end in (1, 5):
        part = hook({name: array[:, :end].copy() for name, array in batch.items()}, "decode")
        kept = {name: array[:, :end] for name, array in whole.items()}
        if wrong := _different(part, kept):
            raise Failed(
                f"phase decode: '{wrong}' of the first {end} columns changes when more follow",
                cause="a column may depend on itself and earlier ones alone",
            )


def events(subject: Subject) -> str:
    """Check that ``on_event`` takes every event and changes nothing, and the verdicts of ``on_evaluated``."""
    hooks, found = subject.found.cls.hooks, []
    if not {"on_event", "on_evaluated"} & {*hooks}:
        raise NotApplicable("it has no on_event")
    if lacking := unmet(subject.found.cls.manifest.requires):
        raise NotApplicable(f"it needs {', '.join(lacking)}: {pip_line(*lacking)}")
    if "on_event" in hooks:
        found.append(_observes(subject))
    if "on_evaluated" in hooks:
        found.append(_judges(subject))
    return "; ".join(found)


def _observes(subject: Subject) -> str:
    """Call ``on_event`` with the events of a short run."""
    (observer,) = observers([subject.loaded]).values()
    plan = subject.plan()
    before = json.dumps(plan.data(), sort_keys=True)
    with TemporaryDirectory() as folder, chdir(folder):  # it may write files: not over an author's
        for event in EVENTS:
            given = copy.deepcopy(event)
            _called_with(observer, given)
            if repr(given) != repr(event):
                raise Failed(
                    f"event '{event.event}' is {event!r} before and {given!r} after it",
                    cause="an observer changes what others are still to read",
                )
    if json.dumps(plan.data(), sort_keys=True) != before:
        raise Failed("the plan is another one afterwards", cause="an observer writes to the model")
    kinds = {event.event for event in EVENTS}
    return f"a run of {STEPS} steps with {len(kinds)} kinds of events"


def _called_with(observer: Callable[[minillm.Event], None], event: minillm.Event) -> None:
    try:
        observer(event)
    except PluginCodeError as error:
        raise Failed(
            f"{error.what}: {error.where}",
            cause="an event's field may be None, NaN, or absent in other events; an observer that "
            "raises three times receives no further events",
        ) from error


JUDGED: Mapping[str, Any] = {"model_vocab": 512, "train_seq_len": 1024, "train_rows": 1}
"""Sizes of the model that ``on_evaluated`` measures: a text of an author's own fits into a row."""

TEXT = "Shall I compare thee to a summer's day? Thou art more lovely and more temperate."


def _judges(subject: Subject) -> str:
    """Call ``on_evaluated`` after an evaluation of a run on ids, then after one of a run on text.

    Raises:
        Failed: it returns neither None nor a valid verdict.
        MinillmError: it raised.
    """
    backend, plan = subject.backends[0], subject.plan(**JUDGED)
    run, judge = subject.trainer(plan, backend), subject.found.cls.on_evaluated  # type: ignore[attr-defined]
    hook = batch_hook(plan, [subject.loaded, *subject.companions])
    history: list[minillm.Evaluated] = []
    numbers = 0
    for tokenizer in (None, Tokenizer.train([TEXT], JUDGED["model_vocab"])):
        evaluated = minillm.Evaluated(len(history) + 1, 4.5, None if tokenizer is None else 2.2)
        given = {
            "evaluated": evaluated,
            "history": tuple(history),
            "model": minillm.Predictor(run, plan.config, tokenizer, hook),
        }
        with subject.loaded.contain("on_evaluated"):
            taken = {name: given[name] for name in call_names(judge)}
            verdict = judge(subject.loaded.plugin, **taken)
        numbers += _check_verdict(minillm.Verdict() if verdict is None else verdict)
        history.append(evaluated)
    return f"{len(history)} evaluations with {counted(numbers, 'figure')}"


def _check_verdict(verdict: object) -> int:
    """Check that a result of ``on_evaluated`` is a verdict; return the number of its figures."""
    cause = "return Verdict(figures={name: number}, stop=reason), or None; a number is finite"
    if not isinstance(verdict, minillm.Verdict):
        raise Failed(f"on_evaluated returns {plain(repr(verdict), 100)}", cause=cause)
    if not isinstance(verdict.stop, str):
        raise Failed(f"on_evaluated returns a verdict with stop={verdict.stop!r}", cause=cause)
    for name, number in verdict.figures.items():
        value = np.asarray(number)
        real = value.shape == () and value.dtype.kind in "biuf" and bool(np.isfinite(value))
        if not (real and isinstance(name, str) and name.isidentifier()):
            shown = plain(f"{name!r}: {number!r}", 100)
            raise Failed(f"on_evaluated returns a verdict with the figure {shown}", cause=cause)
    return len(verdict.figures)
