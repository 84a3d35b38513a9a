"""Validation: held-out loss in nats per token of the main target, and in bits per byte of its text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minillm_core.backends.base import Batch, Model
from minillm_core.backends.ranks import ALONE, Ranks
from minillm_core.data import Cancelled, ValidationBatches, bytes_per_token
from minillm_core.errors import DataError
from minillm_core.plan import Plan
from minillm_core.train.events import Evaluated, Event, Stepped
from minillm_core.train.job import Job


@dataclass(eq=False)
class Validation:
    """An evaluation of a model on fixed lists of batches, one for each source of the text.

    For several sources the loss is the mean by their weights, and bits per byte are those of a text
    whose tokens come from them in these proportions.
    """

    model: Model
    # by source; always the same; label -1 where nothing is predicted
    batches: Mapping[str, Iterable[Batch]]
    token_bytes: np.ndarray | None  # int (vocab,): bytes_per_token; None: no tokenizer
    cancelled: Callable[[], bool] = lambda: False  # polled before every batch
    progress: Callable[[int], None] = lambda predictions: None  # takes the number so far
    text: str = "the held-out text"  # the origin of the batches, for an error
    seen: Mapping[str, int] = field(default_factory=dict)  # counts of hooks.plan_hook
    weights: Mapping[str, float] = field(default_factory=dict)  # of the sources; default: 1
    predictions: int = 0  # of the last evaluation
    ranks: Ranks = ALONE  # each evaluates its part of the batches

    def __call__(self, step: int) -> Evaluated | None:
        """Evaluate after ``step``; None: cancelled.

        Raises:
            DataError: nothing is predicted.
        """
        found, total = dict[str, Evaluated](), Counter[str]()
        share, nats, spelt = 0.0, 0.0, 0.0  # weights, and nats and bytes a token times these
        for name, batches in self.batches.items():
            before, weight = Counter(total), self.weights.get(name, 1.0)
            try:
                lost, predictions = self.model.evaluate(self._counted(batches, total))
            except Cancelled:
                return None
            size = total["bytes"] - before["bytes"]
            if self.ranks.size > 1:
                each = self.ranks.all_gather([lost, predictions, size])
                lost, *counts = map(sum, zip(*each, strict=True))
                predictions, size = map(int, counts)
            if predictions:
                rate = _bits_per_byte(lost, size)
                found[name] = Evaluated(step, lost / predictions, rate, predictions)
                share, nats = share + weight, nats + weight * lost / predictions
                spelt += weight * size / predictions
        self.predictions = sum(one.tokens for one in found.values())
        if not found:
            raise self._unlabelled()
        if len(self.batches) == 1:
            return next(iter(found.values()))
        each = {name: one.figures() for name, one in found.items()}
        rate = _bits_per_byte(nats, spelt)
        return Evaluated(step, nats / share, rate, self.predictions, sources=each)

    def _unlabelled(self) -> DataError:
        """Build the error for an evaluation without labels, with the plugins that removed them."""
        names = [k.partition(":")[2] for k in self.seen if k.startswith("unlabelled:")]
        by, fix = "", "give other text to evaluate on (train data.val=PATH, eval --data)"
        if names:
            by = " after on_batch of " + " and ".join(f"'{name}'" for name in names)
            fix = f"let '{names[-1]}' keep labels in phase eval, or give text where it keeps some"
        what = "there is nothing to predict in the evaluation: every label is -1"
        return DataError(what + by, where=self.text, fix=fix)

    def _counted(self, batches: Iterable[Batch], total: Counter[str]) -> Iterator[Batch]:
        """Yield the batches, and add up the bytes of their predicted tokens."""
        for batch in batches:
            if self.cancelled():
                raise Cancelled
            self.progress(total["predictions"])
            labels = batch["labels"]
            before, predicted = batch["ids"][labels >= 0], labels[labels >= 0]
            total["predictions"] += predicted.size
            if self.token_bytes is not None:
                total["bytes"] += int(self.token_bytes[predicted].clip(0).sum(dtype=np.int64))
                total["bytes"] += int(self.token_bytes[before].clip(max=0).sum(dtype=np.int64))
            yield batch


def _bits_per_byte(nats: float, spelt: float) -> float | None:
    return nats / math.log(2) / spelt if spelt > 0 else None


_COUNTED = 1 << 15  # tokens that the estimate counts


def validation(
    job: Job,
    tokens: int,
    *,
    share: float = 1.0,
    cancelled: Callable[[], bool],
    progress: Callable[[int, int], None] = lambda predictions, of: None,
) -> Validation:
    """Prepare the held-out evaluation of a job's model.

    Args:
        job: held-out documents, plugins and sizes.
        tokens: predictions of one evaluation.
        share: share of them to make, in windows spread evenly.
        cancelled: polled before every batch.
        progress: takes the numbers of predictions done and in all, before every batch.
    """
    config, tokenizer, val = job.config, job.corpus.tokenizer, job.config.data.val
    held = {one.name: (one.weight, one.val) for one in job.corpus.parts if one.val is not None}
    held = held or {"": (1.0, job.corpus.val)}
    total = sum(weight for weight, _ in held.values())
    whole = {
        name: ValidationBatches(
            documents,
            rows=config.train.rows,
            seq_len=config.train.seq_len,
            tokens=max(1, round(tokens * weight / total)),
            seed=None,  # the documents are in seeded order already
            on_batch=job.hook(),
            share=share,
        )
        for name, (weight, documents) in held.items()
    }
    predictions = sum(one.predictions for one in whole.values())
    ranks = job.ranks
    batches = {name: _RankBatches(each, ranks, job.plan) for name, each in whole.items()}
    return Validation(
        job.trainer,
        batches,
        bytes_per_token(tokenizer, config.model.vocab) if tokenizer else None,
        cancelled=cancelled,
        progress=lambda done: progress(done * ranks.size, predictions),
        weights={name: weight for name, (weight, _) in held.items()},
        text=f"data.val = {val}" if isinstance(val, float) else f"the held-out text {val}",
        seen=job.seen,
        ranks=ranks,
    )


@dataclass(frozen=True)
class _RankBatches:
    """A rank's batches of a list, with its columns of them; each is made when it is indexed."""

    whole: Sequence[Batch]
    ranks: Ranks
    plan: Plan

    def __iter__(self) -> Iterator[Batch]:
        parts, own = self.ranks.evaluation_part
        every = (self.whole[at] for at in range(own, len(self.whole), parts))
        return (self.ranks.columns(one, self.plan) for one in every)


def bytes_of_a_token(job: Job) -> float | None:
    """Estimate bytes of text per token from the first held-out documents; None without a tokenizer.

    It converts the training loss to bits per byte, at no cost in a step.
    """
    if job.corpus.tokenizer is None:
        return None
    lengths = bytes_per_token(job.corpus.tokenizer, job.config.model.vocab)
    tokens = spelt = 0
    for index in range(len(job.corpus.val)):
        ids = np.asarray(job.corpus.val[index][: _COUNTED - tokens], np.int64)
        tokens, spelt = tokens + len(ids), spelt + int(lengths[ids].sum(dtype=np.int64))
        if tokens >= _COUNTED:
            break
    return spelt / tokens if spelt else None


@dataclass(eq=False)
class Trend:
    """An observer of held-out and training loss that warns once when the held-out loss rises.

    It warns after two evaluations above the best if the training loss falls, else after three.

    Only evaluations of the same predictions are compared: those on the way, and at the end the one passed
    to :meth:`take`.
    """

    say: Callable[[str], None]
    best: Evaluated | None = None
    newest: Evaluated | None = None
    rising: bool = False  # the warning was printed
    _tokens: int | None = None  # predictions of the compared evaluations
    _steps: list[float] = field(default_factory=list)  # training losses since the last evaluation
    _training: float = math.nan  # their mean up to the best evaluation
    _worse: int = 0  # evaluations since the best one

    def resume(self, events: Iterable[Mapping[str, Any]], evaluations: Iterable[Evaluated]) -> None:
        """Add the records of earlier processes of the run, without a warning."""
        say, self.say = self.say, lambda line: None
        found = {one.step: one for one in evaluations}
        for event in events:
            if event.get("event") == Stepped.event:
                self._step(event.get("loss"))
            elif event.get("event") == Evaluated.event and event.get("step") in found:
                self.take(found[event["step"]])
        self.say = say

    def restart(self, evaluations: Sequence[Evaluated]) -> None:
        """Compare with these evaluations alone: later ones were of weights that no longer exist."""
        self.best, self.newest, self._steps, self._worse = None, None, [], 0
        self.resume([{"event": Evaluated.event, "step": e.step} for e in evaluations], evaluations)

    def __call__(self, event: Event) -> None:
        """Add a step or an evaluation."""
        if isinstance(event, Stepped):
            self._step(event.loss)
        elif isinstance(event, Evaluated):
            self.take(event)

    def take(self, found: Evaluated) -> None:
        """Compare an evaluation with the best one so far."""
        if self._tokens is None:
            self._tokens = found.tokens
        if found.tokens != self._tokens or not math.isfinite(found.val_loss):
            return
        mean = sum(self._steps) / len(self._steps) if self._steps else math.nan
        self._steps, self.newest = [], found
        if self.best is None or found.val_loss < self.best.val_loss:
            self.best, self._training, self._worse = found, mean, 0
            return
        self._worse += 1
        memorises = mean < self._training
        if self.rising or self._worse < (2 if memorises else 3):
            return
        self.rising = True
        why = " while the training loss falls" if memorises else ""
        cure = "a lower train.lr, fewer steps"
        if memorises:
            cure = f"more text, a smaller model,\n  {cure}"
        self.say(
            f"held-out loss has risen since step {self.best.step:,}{why}, from "
            f"{self.best.val_loss:.3f} to {found.val_loss:.3f}:\n  "
            f"{'the model is memorising its text. ' * memorises}What helps: {cure}; "
            "checkpoint.best=true keeps the best one"
        )

    def _step(self, loss: float | None) -> None:
        if loss is not None and math.isfinite(loss):
            self._steps.append(loss)
