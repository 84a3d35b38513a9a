"""One machine and one text: trains variants of a run, each as ``minillm train`` would, and times them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

from minillm_core import backends
from minillm_core.backends.base import Backend, Trainer
from minillm_core.backends.detect import Detected
from minillm_core.config.load import Loaded
from minillm_core.data import Corpus
from minillm_core.measure.graph import graph_of
from minillm_core.measure.stepped import uncollected
from minillm_core.plan import Plan
from minillm_core.plugins.blame import blaming
from minillm_core.plugins.manager import LoadedPlugin
from minillm_core.train.budget import Budget, Cadence
from minillm_core.train.evaluate import Validation
from minillm_core.train.events import Evaluated, Event, Stepped
from minillm_core.train.evidence import Evidence
from minillm_core.train.feed import Feed
from minillm_core.train.held_out import validation
from minillm_core.train.hooks import observers_of
from minillm_core.train.job import Job
from minillm_core.train.loop import Loop
from minillm_core.train.meter import Meter
from minillm_core.train.signals import StopRequest

__all__ = ["Point", "Rig", "Trained", "with_steps"]

WARM = 2
"""Steps before the clock starts: the first compiles, the second has all memory."""


@dataclass(frozen=True)
class Point:
    """A validation on the way."""

    step: int
    tokens: int  # real ones, so far
    seconds: float  # of training and of waiting for data, so far
    val_loss: float  # nats
    bits_per_byte: float | None


@dataclass(frozen=True)
class Trained:
    """A run, measured."""

    seed: int
    steps: int
    tokens: int
    seconds: float
    tokens_per_second: float  # real ones
    peak_bytes: int | None
    curve: tuple[Point, ...]

    @property
    def val_loss(self) -> float:
        """At the end."""
        return self.curve[-1].val_loss

    def data(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @classmethod
    def of(cls, data: dict[str, Any]) -> Trained:
        """The inverse of :meth:`data`."""
        return cls(**{**data, "curve": tuple(Point(**point) for point in data["curve"])})


class Rig:
    """Trains plans one after the other; those whose compiled step is the same share it.

    The clock holds steps and waiting for data; compilation and warm-up, which are undone, and
    validation are outside of it.

    Args:
        corpus: what every run is trained and validated on, in the same order.
        detected: backend and device.
        stop: ends a run early.
        say: prints a line.
        create: makes the backend; default: :func:`minillm_core.backends.create`.
        turn: entered once a run is compiled and has its initial values, left when it is over:
            processes that share a device wait for each other in it.
    """

    def __init__(
        self,
        corpus: Corpus,
        detected: Detected,
        *,
        stop: StopRequest,
        say: Callable[[str], None],
        create: Callable[[Detected, Plan], Backend] | None = None,
        turn: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._corpus, self._detected, self._stop, self._say = corpus, detected, stop, say
        self._turn = turn
        self._create = create or backends.create
        self._kept: tuple[str, Trainer] | None = None  # the graph of a compiled trainer

    def train(
        self,
        loaded: Loaded,
        plugins: Sequence[LoadedPlugin],
        plan: Plan,
        seed: int,
        *,
        validations: int = 10,
        watch: Callable[[float], None] = lambda progress: None,
    ) -> Trained:
        """Train to the end of the plan's steps.

        Args:
            loaded: the settings that the plan was made of.
            plugins: the active ones.
            plan: with ``train.steps``.
            seed: of the initial weights and of all other randomness but the data's order.
            validations: how many points of the curve there are, the last one included.
            watch: is told the progress, 0..1, after every step.

        Raises:
            MinillmError: the run ended early; the next one starts with a trainer of its own.
        """
        try:
            return self._train(loaded, plugins, plan, seed, validations, watch)
        except BaseException:
            self._drop()
            raise

    def speed(
        self, loaded: Loaded, plugins: Sequence[LoadedPlugin], plan: Plan, seed: int
    ) -> float:
        """Seconds of a step, from a few of them."""
        few = with_steps(plan, 12)
        trained = self.train(loaded, plugins, few, seed, validations=1)
        return trained.seconds / trained.steps

    def _train(
        self,
        loaded: Loaded,
        plugins: Sequence[LoadedPlugin],
        plan: Plan,
        seed: int,
        validations: int,
        watch: Callable[[float], None],
    ) -> Trained:
        steps = plan.config.train.steps
        assert steps is not None
        loaded = replace(loaded, config=plan.config.model_copy(update={"seed": seed}))
        with blaming(plugins, "a step"):
            job = self._job(loaded, plugins, plan, seed)
            counts = _Counted(watch, steps)
            told = observers_of(job, [counts, Evidence.of(job, self._say)], say=self._say)
            with Feed(job, None) as feed, self._turn(), uncollected():
                Loop(
                    job.trainer,
                    feed,
                    plan.values,
                    job.budget,
                    told,
                    cadence=Cadence(max(1, round(steps / validations))),
                    evaluate=self._validation(job, plan.config.eval.tokens),
                    stop=self._stop,
                    meter=Meter(),
                    say=self._say,
                ).run()
        return Trained(
            seed=seed,
            steps=steps,
            tokens=counts.tokens,
            seconds=counts.seconds,
            tokens_per_second=counts.tokens / counts.seconds,
            peak_bytes=job.trainer.peak_bytes(),
            curve=tuple(counts.curve),
        )

    def _job(self, loaded: Loaded, plugins: Sequence[LoadedPlugin], plan: Plan, seed: int) -> Job:
        """A trainer with its initial values, compiled and warm."""
        graph = graph_of(plan)
        if self._kept is None or self._kept[0] != graph:
            self._drop()
            trainer = self._create(self._detected, plan).trainer(plan, seed)
            warm = self._of(loaded, plugins, plan, trainer)
            with Feed(warm, None) as feed:
                for _ in range(WARM):
                    batch = next(feed)
                    trainer.read(trainer.step(batch.micro, plan.values(1e-6), batch.supervised))
            self._validation(warm, loaded.config.train.seq_len)(0)
            self._kept = graph, trainer
        trainer = self._kept[1]
        trainer.restart(seed)
        return self._of(loaded, plugins, plan, trainer)

    def _of(
        self, loaded: Loaded, plugins: Sequence[LoadedPlugin], plan: Plan, trainer: Trainer
    ) -> Job:
        budget = Budget(plan.config.train.steps)
        return Job(loaded, tuple(plugins), plan, self._corpus, trainer, budget, ())

    def _validation(self, job: Job, tokens: int) -> Validation:
        return validation(job, tokens, cancelled=lambda: self._stop.requested)

    def _drop(self) -> None:
        """Give the compiled trainer's memory back before the next one takes its own."""
        self._kept = None
        gc.collect()


class _Counted:
    """An observer that adds up a run's clock and keeps its curve."""

    def __init__(self, watch: Callable[[float], None], steps: int) -> None:
        self._watch, self._steps = watch, steps
        self.seconds, self.tokens = 0.0, 0
        self.curve: list[Point] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, Stepped):
            self.seconds += event.step_seconds
            self.tokens = event.tokens
            self._watch(event.step / self._steps)
        elif isinstance(event, Evaluated):
            self.curve.append(
                Point(event.step, self.tokens, self.seconds, event.val_loss, event.bits_per_byte)
            )


def with_steps(plan: Plan, steps: int) -> Plan:
    """The same plan for another number of steps: schedules are fractions of them."""
    return plan.with_train(steps=steps, minutes=None)
