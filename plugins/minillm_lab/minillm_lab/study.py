"""Many runs on one corpus and one machine, trained whole or stepped by hand.

Each is a :class:`minillm_core.Run`, so that a study measures what a user gets. The runs share the
expensive parts: the tokenized corpus, and the compiled step of plans that differ only in its inputs.
"""

from __future__ import annotations

import gc
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import TypeAdapter

from minillm_core import Evaluated, Event, MinillmError, NonFinite, Plan, PlanError, Run, Stepped
from minillm_core.commands import cache_folder, display
from minillm_core.inspection import ALONE, Config, check_support, choose, probe
from minillm_core.studies import (
    Backend,
    Batch,
    Binding,
    Budget,
    Corpus,
    Detected,
    Shared,
    Sourcing,
    StopRequest,
    Trainer,
    attribute_errors,
    create_backend,
    divides,
    read_corpus,
    variants_of,
)
from minillm_lab.profiling import profiler_of
from minillm_lab.speeds import Positive, remember

WARM = 2
"""Warm-up steps before timing: the first compiles, the second has allocated all memory."""

STRETCH, STRETCHES = 4, 5
"""Number of steps in a stretch whose time is measured beside other processes, and number of stretches."""

MIDDLE = 0.5
"""Training progress at which a stepper evaluates the schedules."""

Say = Callable[[str], None]
Create = Callable[[Detected, Plan], Backend]


@dataclass(frozen=True)
class Point:
    """An evaluation during a run."""

    step: int
    tokens: int  # real tokens so far
    seconds: float  # of training and waiting for data so far
    val_loss: float  # nats per token
    bits_per_byte: float | None
    verdicts: Mapping[str, float] = field(
        default_factory=dict
    )  # of plugins: "plugin.name" -> number


@dataclass(frozen=True)
class Trained:
    """The results of a run."""

    seed: int
    steps: int
    tokens: int
    seconds: Positive
    tokens_per_second: Positive  # real tokens
    peak_bytes: int | None  # None: the framework cannot attribute memory to this run
    curve: tuple[Point, ...]

    @property
    def val_loss(self) -> float:
        """The final held-out loss, in nats per token."""
        return self.curve[-1].val_loss

    def at_pace(self, pace: float) -> Trained:
        """Return the results with the times of steps of ``pace`` seconds each, in place of those that passed."""
        return replace(
            self,
            seconds=self.steps * pace,
            tokens_per_second=self.tokens / (self.steps * pace),
            curve=tuple(replace(point, seconds=point.step * pace) for point in self.curve),
        )

    def data(self) -> dict[str, Any]:
        """Return the results as JSON."""
        return asdict(self)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Trained:
        """Parse results from JSON: the inverse of :meth:`data`.

        Raises:
            ValueError: a field is missing, or of another type.
        """
        return _TRAINED.validate_python(data)


_TRAINED = TypeAdapter(Trained)


@dataclass(frozen=True)
class Timed:
    """The timing of some consecutive steps."""

    seconds: float
    waited: float  # seconds of these spent waiting for data
    real: int  # tokens that are not padding
    supervised: int  # labels >= 0


def bind(plan: Plan, detected: Detected) -> Binding:
    """Bind a plan to a machine without building its model; imports the framework.

    Raises:
        PluginError: a plugin does not support the machine, or lacks a package.
        BackendError: a kernel does not support the plan, or the device is missing.
        ConfigError: the settings require several processes; a study runs in one.
    """
    check_support(plan.active, detected.backend, detected.device)
    divides(plan.config.mesh.shard, ALONE)
    ALONE.divide(plan)
    return create_backend(detected, plan).binding


def open_corpus(
    config: Config,
    *,
    cache: Path | None = None,
    say: Say = lambda line: None,
    note: Say | None = None,
    plans: Sequence[Plan] = (),
) -> Corpus:
    """Read and tokenize the corpus of a plan's ``config``, once for any number of runs.

    Args:
        config: sets the data, the vocabulary size and the row length.
        cache: the token cache; default: minillm's own.
        say: prints progress; default: silence.
        note: called with remarks on the text; default: ``say``.
        plans: the plans to train on it; its tokenizer has the special tokens of all of them.

    Raises:
        DataError: the text, its tokenizer or the cache folder cannot be used.
        PlanError: plugins make the plans read different documents.
    """
    more: dict[str, Any] = {"asked": plans[0].sourcing} if plans else {}
    for plan in plans[1:]:
        more["asked"] = _joined(more["asked"], plan)
    with display(say) as shown, attribute_errors(plans[0].active if plans else (), "of the data"):
        cache = cache or cache_folder()
        return read_corpus(config, cache, shown, say=note or shown.say, **more)


def _joined(asked: Sourcing, plan: Plan) -> Sourcing:
    """Merge a plan's requirements on the documents.

    Raises:
        PlanError: it reads other documents, or has a conflicting special token of the same name.
    """
    if (both := asked.joined(plan.sourcing)) is None:
        raise PlanError(
            "the compared plans read documents from different sources, or have different special tokens "
            "of one name",
            where="the corpus of the study",
            fix="compare plans whose documents have one source: minillm ablate --with names the plugin "
            "that reads them in every run",
        )
    return both


class Study:
    """A trainer of plans, one after another, on one machine and one corpus, as by ``minillm train``.

    Plans with the same compiled step (:func:`graph_of`) share a trainer. The time excludes compilation,
    warm-up (whose updates are undone) and evaluations; it includes waiting for data.

    Args:
        corpus: training and evaluation text of every run, in the same order.
        detected: backend and device; default: the choice of ``--backend auto``.
        say: prints a line; default: silence.
        stop: ends a run early.
        create: the backend factory; default: the one of ``detected``.
        turn: a context entered once a run is compiled and initialised, and left at its end: a lock
            for processes that share a device.
    """

    def __init__(
        self,
        corpus: Corpus,
        detected: Detected | None = None,
        *,
        say: Say = lambda line: None,
        stop: StopRequest | None = None,
        create: Create | None = None,
        turn: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._say, self._turn = say, turn
        self._shared = Shared(
            corpus, detected or choose(probe()), stop=stop or StopRequest(), warn=say
        )
        self._create = create or create_backend
        self._kept: tuple[str, Trainer] | None = None  # (graph, its compiled trainer)

    def train(
        self,
        plan: Plan,
        seed: int,
        *,
        evaluations: int = 10,
        watch: Callable[[float], None] = lambda progress: None,
    ) -> Trained:
        """Train to the end of the plan's steps.

        Args:
            plan: made of loaded settings; ``train.steps`` or ``train.minutes`` of training.
            seed: of the initial weights and of all other randomness but the data's order.
            evaluations: number of evaluations, including the final one; a run limited by time has only that.
            watch: called with the progress, 0..1, after every step.

        Raises:
            PlanError: the plan has no settings, or the corpus was not read for it.
            ConfigError: the settings have neither steps nor minutes.
            MinillmError: the run ended early; the next one starts with a trainer of its own.
        """
        plan = _member(plan, seed, evaluations)
        figures = _Figures(watch, Budget.of(plan.config.train))
        try:
            kept = _ReusedTrainer(self._warm(plan))
            with self._run(plan, lambda detected, plan: kept) as run, self._turn(), without_gc():
                for event in run.steps():
                    figures.take(event)
            if not figures.curve or not figures.seconds:
                train = plan.config.train
                raise MinillmError(
                    "the run ended before its first step was evaluated",
                    where=f"train.minutes={train.minutes:g}" if train.minutes else "the run",
                    fix="a longer run: --minutes 0.5",
                )
        except BaseException:
            self.release()
            raise
        return Trained(
            seed=seed,
            steps=run.step,
            tokens=figures.tokens,
            seconds=figures.seconds,
            tokens_per_second=figures.tokens / figures.seconds,
            peak_bytes=_own_peak(run.trainer),
            curve=tuple(figures.curve),
        )

    def step_seconds(self, plan: Plan, seed: int) -> float:
        """Measure the seconds per step, in a run of twelve steps."""
        trained = self._short(plan, seed)
        return trained.seconds / trained.steps

    def measure(self, plan: Plan, seed: int) -> dict[str, Any]:
        """Measure a plan in a run of twelve steps.

        Returns:
            ``tokens_per_second``, ``peak_bytes`` (None: unknown) and ``device_bytes``, the device's memory.
        """
        trained = self._short(plan, seed)
        assert self._kept is not None  # by the run
        return {
            "tokens_per_second": plan.tokens_per_step * trained.steps / trained.seconds,
            "peak_bytes": trained.peak_bytes,
            "device_bytes": profiler_of(self._kept[1]).memory_bytes(),
        }

    def _short(self, plan: Plan, seed: int) -> Trained:
        return self.train(plan.with_train(steps=12, minutes=None), seed, evaluations=1)

    def stepper(self, plan: Plan) -> Stepper:
        """Build a separate trainer for a plan, to be stepped by hand.

        Raises:
            PlanError: the plan has no settings.
            OutOfMemory: the model does not fit.
        """
        stepper = Stepper(self._run(plan, self._create), self._shared.corpus)
        for one in plan.references:
            for line in one.model.notes:
                self._say(f"reference '{one.name}': {line}")
        return stepper

    def _run(self, plan: Plan, create: Create) -> Run:
        """Bind a plan to corpus and machine; raise PlanError where the corpus was not read for it."""
        asked = self._shared.corpus.asked
        if _joined(asked, plan) != asked:
            names = ", ".join(one.text for one in plan.sourcing.specials)
            fix = "open_corpus(config, plans=[...]) with every plan of the study"
            raise PlanError(f"the text was read without {names}", where="Study(corpus)", fix=fix)
        return Run(plan, shared=self._shared, create=create)

    def pace(self, plan: Plan) -> float:
        """Measure the seconds of a step, in a turn of its own, while other processes may compile.

        Compiling uses the device now and then, so the quickest of some stretches of steps counts.

        Raises:
            MinillmError: as :meth:`train`.
        """
        try:
            with self._warm_stepper(plan) as stepper, self._turn(), without_gc():
                return min(stepper.run(STRETCH).seconds for _ in range(STRETCHES)) / STRETCH
        except BaseException:
            self.release()
            raise

    def _warm(self, plan: Plan) -> Trainer:
        """Return a compiled trainer for the plan."""
        if (kept := self._trainer_of(plan)) is None:
            with self._warm_stepper(plan) as stepper:
                kept = stepper.trainer
        return kept

    def keeps(self, plan: Plan) -> bool:
        """Return whether the step of a plan is compiled already, by the last run."""
        return self._trainer_of(plan) is not None

    def _trainer_of(self, plan: Plan) -> Trainer | None:
        """Return the kept trainer if it is compiled for the plan's graph."""
        return self._kept[1] if self._kept and self._kept[0] == graph_of(plan) else None

    @contextmanager
    def _warm_stepper(self, plan: Plan) -> Iterator[Stepper]:
        """Open a stepper with the compiled trainer of the plan, which is kept from now on."""
        if (kept := self._trainer_of(plan)) is not None:
            run = self._run(plan, lambda detected, plan: _ReusedTrainer(kept))
            with Stepper(run, self._shared.corpus) as stepper:
                yield stepper
            return
        self.release()
        with self.stepper(plan) as stepper:
            stepper.warm()
            self._kept = graph_of(plan), stepper.trainer
            yield stepper

    def release(self) -> None:
        """Free the compiled trainer's memory, before another trainer allocates its own."""
        self._kept = None
        gc.collect()
        free_cached_memory()


class Stepper:
    """A trainer with its dataloader, stepped as in the training loop; a context manager that closes it.

    Made by :meth:`Study.stepper`.

    Attributes:
        trainer: the plan's model, optimizer and compiled step on this machine.
    """

    def __init__(self, run: Run, corpus: Corpus) -> None:
        self._run, self._corpus, self.trainer = run, corpus, run.trainer
        middle = round(MIDDLE * (run.plan.config.train.steps or 0))
        self._values, self._batches = run.plan.values(MIDDLE), run.batches(middle)

    def warm(self) -> None:
        """Compile steps and evaluation, and allocate all memory."""
        self.run(WARM)
        self._run.validate(self._run.plan.config.train.seq_len)

    def arguments(self) -> tuple[Sequence[Batch], Mapping[str, float], int]:
        """Load the next step's batch: the arguments of ``trainer.step``.

        Returns:
            Micro-batches of int32 (rows, T), the schedules' values in the middle of the run, and
            the number of supervised tokens.
        """
        with attribute_errors(self._run.plan.active, "in a step"):
            batch = next(self._batches)
        return batch.micro, self._values, batch.supervised

    def run(self, steps: int) -> Timed:
        """Run steps, reading each result while the next step is enqueued; synchronise after the last.

        Raises:
            PluginCodeError: a plugin's code raised.
        """
        trainer = self.trainer
        trainer.synchronize()
        waited, real, supervised = 0.0, 0, 0
        before: Any = None
        with attribute_errors(self._run.plan.active, "in a step"):
            began = time.perf_counter() - trainer.compile_seconds
            for _ in range(steps):
                waiting = time.perf_counter()
                batch = next(self._batches)
                waited += time.perf_counter() - waiting
                real, supervised = real + batch.real, supervised + batch.supervised
                handle = trainer.step(batch.micro, self._values, batch.supervised)
                if before is not None:
                    trainer.read(before)
                before = handle
            trainer.read(before)
            trainer.synchronize()
            ended = time.perf_counter() - trainer.compile_seconds
            return Timed(ended - began, waited, real, supervised)

    def keep_speed(
        self, cache: Path, tokens_per_second: float, steps: int, by: Literal["run", "bench"]
    ) -> None:
        """Store a throughput measured over some steps, for the estimates of ``minillm plan``."""
        plan, tokens = self._run.plan, self._corpus.train.tokens
        speed = {"steps": steps, "by": by}
        remember(cache, plan, self.trainer.binding, tokens, tokens_per_second, **speed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._batches.__exit__(*exception)


class _ReusedTrainer(Backend):
    """A backend that reuses a compiled trainer for a plan of the same graph."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self.binding = trainer, trainer.binding
        self.name = trainer.binding.backend

    def model(self, plan: Plan, seed: int, **more: Any) -> Trainer:
        """Return the trainer."""
        return self.trainer(plan, seed)

    def trainer(self, plan: Plan, seed: int, **more: Any) -> Trainer:
        """Return the trainer, reinitialised with a seed."""
        self._trainer.restart(seed)
        return self._trainer


@dataclass(eq=False)
class _Figures:
    """The accumulated time of a run, and its loss curve."""

    watch: Callable[[float], None]
    budget: Budget
    seconds: float = 0.0
    tokens: int = 0
    curve: list[Point] = field(default_factory=list)

    def take(self, event: Event) -> None:
        """Record an event.

        Raises:
            NonFinite: a held-out loss is not finite.
        """
        if isinstance(event, Stepped):
            self.seconds += event.step_seconds
            self.tokens = event.tokens
            self.watch(self.budget.progress(event.step, self.seconds))
        elif isinstance(event, Evaluated):
            clock, found = (self.tokens, self.seconds), (event.val_loss, event.bits_per_byte)
            if not math.isfinite(event.val_loss):
                what = f"the held-out loss after step {event.step} is {event.val_loss}"
                raise NonFinite(what, fix="a lower train.lr, or a longer train.warmup")
            self.curve.append(Point(event.step, *clock, *found, dict(event.verdicts)))


def _member(plan: Plan, seed: int, evaluations: int) -> Plan:
    """Return the plan of a study's run: evenly spaced evaluations, no samples and no checkpoints."""
    config = plan.config
    every = max(1, round(config.train.steps / evaluations)) if config.train.steps else 0
    of_eval = config.eval.model_copy(update={"every": every, "share": 1.0, "samples": 0})
    none = config.checkpoint.model_copy(update={"every": 0, "minutes": 0.0, "best": False})
    more = {"seed": seed, "eval": of_eval, "checkpoint": none}
    return replace(plan, config=config.model_copy(update=more))


def _own_peak(trainer: Trainer) -> int | None:
    """Return the run's peak memory on its device; None for torch on a CPU, which has the process's only.

    A process's peak never falls, so an earlier run of this process would count for later ones.
    """
    bound = trainer.binding
    return None if (bound.backend, bound.device) == ("torch", "cpu") else trainer.peak_bytes()


def graph_of(plan: Plan) -> str:
    """Return a key of everything that a plan's compiled step depends on: equal keys can share a step.

    Learning rates, schedules and the number of steps are inputs of the step; staged values are not.
    """
    data, train = plan.data(), plan.config.train
    options = {one.name: one.options for one in plan.plugins}
    shapes = [] if len(plan.course) == 1 else [variants_of(plan)]
    kept = {
        "model": data["model"],
        "optimizer": data["optimizer"],
        "sizes": [train.rows, train.accumulate > 1, train.seq_len, plan.fields, *shapes],
        "bound": [train.dtype, train.compile, train.checkpointing, plan.config.kernels],
        "references": {one.name: one.model.identity for one in plan.references},
        "kernels": [[who, one.op, one.name, options[who]] for who, one in plan.candidates],
        "values": {
            name: schedule.data() if name in plan.staged else None
            for name, (_, schedule) in sorted(plan.schedules.items())
        },
    }
    return json.dumps(kept, sort_keys=True)


def at_pace(plan: Plan, pace: float) -> Plan:
    """Return a plan with as many steps of ``pace`` seconds as fit into its minutes, at least one."""
    minutes = plan.config.train.minutes
    assert minutes is not None
    return plan.with_train(steps=steps_in(minutes, pace), minutes=None)


def steps_in(minutes: float, pace: float) -> int:
    """Compute how many steps of ``pace`` seconds fit into some minutes, at least one."""
    return max(1, round(60 * minutes / pace))


def gpu_bytes(device: str) -> int:
    """Return the bytes of memory of one of torch's GPUs."""
    import torch

    return torch.cuda.get_device_properties(device).total_memory


def free_cached_memory() -> None:
    """Return the GPU memory that torch keeps for its next tensors to the driver, for other processes."""
    torch = sys.modules.get("torch")  # not imported for MLX
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@contextmanager
def without_gc() -> Iterator[None]:
    """Disable Python's garbage collector, which walks every object of a plan and a model, during timing."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
