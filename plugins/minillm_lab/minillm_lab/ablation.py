"""The runs of an ablation: every variant with the same seeds, and the paired differences.

Each finished run is a file in OUT/runs, so that a stopped ablation resumes with the missing ones.
Runs that are compiled are consecutive for each variant and share its compilation. Others take turns, A B B A,
so that a machine that becomes slower or faster does so for all variants. The speeds of the other variants
determine further lengths for which the first variant (the baseline) is trained, giving its loss at
equal seconds (``minillm_lab.worth``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from minillm_core import (
    Interrupted,
    MinillmError,
    Plan,
    Stopped,
)
from minillm_core.commands import counted, few
from minillm_core.studies import ABLATION
from minillm_lab.ablation_page import ablation_page
from minillm_lab.card import PAIRS
from minillm_lab.members import BOUND, RUNS, Members, continuing, identity_of, read, stopped
from minillm_lab.pool import Pool, Wanted
from minillm_lab.result_diff import difference, settings
from minillm_lab.study import Study, Trained, steps_in
from minillm_lab.variants import Design, Variant
from minillm_lab.worth import Lengths, extra_lengths, steps_in_time, worth

RESULT, PAGE = ABLATION, "ablation.html"

FLAGS = {"one at a time": "--one-at-a-time", "leave one out": "--leave-one-out"}
"""Design -> the option for it."""


@dataclass(frozen=True)
class RunSpec:
    """A run to train: plugin set, seed and length."""

    variant: str
    seed: int
    steps: int  # of the first variant, with as many tokens

    @property
    def file(self) -> str:
        """The run's file name."""
        return f"{_stem(self.variant, self.seed)}-{self.steps}.json"

    @property
    def label(self) -> str:
        """The run's display name."""
        return f"{self.variant}, seed {self.seed}, {counted(self.steps, 'step')}"


@dataclass(frozen=True)
class RunProgress:
    """The current run, and the runs known to follow."""

    run: RunSpec
    number: int = 1  # from 1, counting runs of earlier starts
    ahead: tuple[RunSpec, ...] = ()  # runs still to train, in order
    runs: int = 1  # total, as far as known
    left: float | None = None
    """Runs to train less the progress of all under way; None: one is trained at a time."""
    compiling: int = 0  # sets that are compiled now, while none trains
    sets: int = 1  # of plugins

    @classmethod
    def of(
        cls,
        run: RunSpec,
        course: Sequence[RunSpec],
        done: Collection[RunSpec],
        under_way: float | None = None,
    ) -> RunProgress:
        """Locate a run among all runs; a run outside them counts as the only one.

        Args:
            run: the current one.
            course: all runs in their order.
            done: finished runs.
            under_way: the sum of the progress of the runs that several processes train; None: one trains.
        """
        if run not in course:
            return cls(run)
        at = course.index(run)
        ahead = tuple(one for one in course[at + 1 :] if one not in done)
        left = None
        if under_way is not None:
            left = sum(one not in done for one in course) - under_way
        return cls(run, at + 1, ahead, len(course), left)


Watch = Callable[[RunProgress, float], None]


class _Earlier(BaseModel):
    """The entries of ablation.json that a later start reads."""

    model_config = ConfigDict(strict=True)

    design: str = ""
    plugins: dict[str, dict[str, Any]] = {}
    seeds: list[int] = []
    variants: dict[str, dict[str, Any]] = {}
    steps: int | None = None
    minutes: float | None = None
    eval_tokens: int | None = None


class Ablation:
    """An ablation in a folder: trains the runs of a design and compares them.

    Args:
        out: the folder of finished runs and the result; locked by the caller.
        design: variants and comparisons.
        seeds: one pair of runs each.
        study: trains the runs.
        steps: of each run; None: the number that the first variant makes in ``minutes``.
        minutes: of each run of the first variant, where ``steps`` is None.
        about: metadata for the result: hardware, versions, data ...
        say: prints a line.
        watch: called with the current run and its progress, 0..1.
        evaluations: of each run, including the final one; None: see :func:`points`.
        turns: interleave the variants' runs; False: those of a variant are consecutive, and compile it once.
        pool: trains runs on several devices at once; None: one after another, here.
        equal_seconds: compare at equal seconds too, for which the first variant is trained for further lengths.
    """

    def __init__(
        self,
        out: Path,
        design: Design,
        seeds: Sequence[int],
        study: Study,
        *,
        steps: int | None,
        minutes: float | None,
        about: Mapping[str, Any],
        say: Callable[[str], None],
        watch: Watch = lambda current, progress: None,
        evaluations: int | None = None,
        turns: bool = False,
        pool: Pool | None = None,
        equal_seconds: bool = True,
    ) -> None:
        self.pool, self.turns, self.equal_seconds = pool, turns, equal_seconds
        self.out, self.design, self.seeds, self.study = out, design, tuple(seeds), study
        # Runs of earlier versions do not say how they were evaluated.
        evaluated = {key: self.earlier[key] for key in ("eval_tokens",) if key in self.earlier}
        self.members = Members(out, study, "ablation", say, defaults=BOUND | evaluated)
        self.minutes, self.about, self.say, self.watch = minutes, dict(about), say, watch
        self.evaluations = evaluations
        self.reference = design.variants[0]
        self.done: dict[RunSpec, Trained | str] = {}  # a run, or why it failed
        self.steps = steps or 0
        # by variant and steps, kept: a plan's hash takes longer than reading a finished run
        self.plans: dict[tuple[str, int], Plan] = {}
        self.course: list[RunSpec] = []  # all runs in order, as far as known

    def run(self) -> dict[str, Any]:
        """Train the missing runs and return the result, which is also written after every run.

        Raises:
            Stopped: a signal; finished runs are kept.
            Refusal: OUT holds runs of another ablation.
        """
        self.steps = self.steps or self._steps_in_minutes()
        self.find()
        if self.done:
            there = counted(len(self.done), "finished run")
            self.say(
                f"{there} of {self.out / RUNS} {'is' if len(self.done) == 1 else 'are'} used again"
            )
        self.course = self._ordered()
        variants = {one.name: one for one in self.design.variants}
        try:
            with self._devices():
                for variant in variants.values():
                    self._say_steps(variant)
                self._ahead(self.course)
                for spec in [*self.course]:
                    self._make(variants[spec.variant], spec)
                return self.train_reference()
        except (Stopped, Interrupted):
            raise
        except MinillmError as error:  # for the page: the runs that are missing are not failures
            where = f" ({error.where})" if error.where else ""
            with suppress(MinillmError):  # a full disk, say, which is the first error's reason too
                self._write(finished=False, ended=error.what + where)
            raise

    def _ordered(self) -> list[RunSpec]:
        """List the runs at equal tokens in the order in which they are trained: A B B A, or A A B B."""
        names = [one.name for one in self.design.variants]
        if not self.turns:
            return [RunSpec(name, seed, self.steps) for name in names for seed in self.seeds]
        return [
            RunSpec(name, seed, self.steps)
            for number, seed in enumerate(self.seeds)
            for name in (reversed(names) if number % 2 else names)
        ]

    def planned(self, variant: Variant, steps: int) -> Plan:
        """Plan a variant's run with as many tokens as the first variant has in ``steps`` steps.

        The numbers of steps differ if a plugin changes the tokens of a step (``batch_schedule``).
        """
        if (key := (variant.name, steps)) not in self.plans:
            plan, first = (_with_steps(one.plan, steps) for one in (variant, self.reference))
            ratio = first.tokens_per_step / plan.tokens_per_step
            self.plans[key] = (
                plan if ratio == 1 else _with_steps(plan, max(1, round(steps * ratio)))
            )
        return self.plans[key]

    def make(self, variant: Variant) -> None:
        """Train a variant's runs at equal tokens, one per seed, in a process of its own; raises as :meth:`run`."""
        self._say_steps(variant)
        for seed in self.seeds:
            self._make(variant, RunSpec(variant.name, seed, self.steps))

    def _say_steps(self, variant: Variant) -> None:
        """Print the number of steps of a variant whose steps have other numbers of tokens."""
        steps = self.planned(variant, self.steps).config.train.steps or self.steps
        if steps != self.steps:
            self.say(
                f"{variant.name}: {counted(steps, 'step')}, which have as many tokens as "
                f"{self.steps:,} of {self.reference.name}"
            )

    def train_reference(self) -> dict[str, Any]:
        """Train the first variant for the wall-clock time of the others, unless that is left out.

        Raises as :meth:`run`.
        """
        self.find()
        further = self._at_equal_seconds() if self.equal_seconds else []
        if missing := [spec for spec in further if spec not in self.done]:
            lengths = dict.fromkeys(f"{spec.steps:,}" for spec in missing)
            self.say(
                f"at equal seconds: {counted(len(missing), 'more run')} of {self.reference.name}, of "
                f"{few([*lengths])} steps"
            )
        self.course += further
        self._ahead(further)
        for spec in further:
            self._make(self.reference, spec)
        return self._write(finished=True)

    def _at_equal_seconds(self) -> list[RunSpec]:
        """List the runs of the first variant for the wall-clock time of the others."""
        wanted = (self._steps_in_time(one.name) for one in self.design.variants)
        lengths = extra_lengths(self.steps, [steps for steps in wanted if steps])
        return [
            RunSpec(self.reference.name, seed, steps) for steps in lengths for seed in self.seeds
        ]

    def find(self) -> None:
        """Load the finished runs of OUT.

        Raises:
            Refusal: a run belongs to another ablation.
        """
        for variant in self.design.variants:
            for seed in self.seeds:
                lengths = {self.steps}
                if variant is self.reference:  # other files, such as copies, are none of its runs
                    own = re.compile(re.escape(_stem(variant.name, seed)) + r"-([1-9][0-9]*)\.json")
                    names = (path.name for path in (self.out / RUNS).glob("*.json"))
                    lengths |= {int(found[1]) for name in names if (found := own.fullmatch(name))}
                for steps in sorted(lengths):
                    self._take(variant, RunSpec(variant.name, seed, steps))

    def replaced(self) -> Iterator[str]:
        """Yield a line for each part of OUT's earlier result that this one does not have."""
        path = self.out / RESULT
        earlier = self.earlier
        if not earlier and path.exists():
            yield (
                f"warning: {path} is not as minillm writes it, and is written anew from the runs in "
                f"{self.out / RUNS}"
            )
        if (kind := earlier.get("design", self.design.kind)) != self.design.kind:
            yield (
                f"{path} has the result of {FLAGS.get(kind, kind)}, which is replaced now. Its runs are kept; "
                "repeating the earlier command writes that result again"
            )
        plugins = earlier.get("plugins", {})
        if not self.equal_seconds and any(one.get("equal_seconds") for one in plugins.values()):
            yield (
                f"{path} will be without effects at equal seconds: the runs stay, and the command without "
                "--no-equal-seconds has them"
            )
        judged = {one.plugin for one in self.design.comparisons}
        if gone := sorted(plugins.keys() - judged):
            yield (
                f"{path} will be without {few(gone)}: the runs stay, and --plugins with these too has "
                "the result of all"
            )
        seeds = earlier.get("seeds", ())
        if left_out := sorted({*seeds} - {*self.seeds}):
            again = f", and --seeds {len(seeds)} has the result of all" * ({*seeds} > {*self.seeds})
            which = "seed" if len(left_out) == 1 else "seeds"
            yield (
                f"{path} will be without {which} {few([*map(str, left_out)])}: the runs stay{again}"
            )

    @cached_property
    def earlier(self) -> Mapping[str, Any]:
        """The result of an earlier start, as it was then; empty without one, and if it is damaged."""
        found = read(self.out / RESULT) or {}
        try:
            _Earlier.model_validate(found)
        except ValidationError:
            return {}
        return found

    def result(self, *, finished: bool) -> dict[str, Any]:
        """Return the results so far as JSON."""
        # a technique card's interval is that of its own pairs
        pooled = self.design.variants if self.design.pooled and len(self.seeds) < PAIRS else ()
        sets = [self._trained(one.name).get(self.steps, {}) for one in pooled]
        return {
            "plugins": {
                one.plugin: {
                    "with": one.having,
                    "without": one.without,
                    **({"together": [*one.together]} if one.together else {}),
                    **worth(
                        self._trained(one.having),
                        self._trained(one.without),
                        self.steps,
                        reference=self.reference.name == one.having,
                        pairs=len(self.seeds),
                        sets=sets,
                    ),
                    **({} if self.equal_seconds else {"equal_seconds": None}),
                }
                for one in self.design.comparisons
            },
            "not_judged": dict(self.design.unplanned),
            "design": self.design.kind,
            "variants": {
                one.name: {
                    "plugins": [p.name for p in one.plan.active],
                    "options": {p.name: p.options for p in one.plan.plugins},
                    "versions": {p.name: p.version for p in one.plan.active},
                    "plan_hash": one.plan.hash,
                    "parameters": one.plan.num_parameters,
                    "steps_at_equal_seconds": self._steps_in_time(one.name) or self.steps,
                }
                for one in self.design.variants
            },
            "steps": self.steps,
            "minutes": self.minutes,
            "equal_seconds": self.equal_seconds,
            "seeds": list(self.seeds),
            "runs": [
                {"variant": spec.variant, **outcome.data()}
                | ({"length": spec.steps} if outcome.steps != spec.steps else {})
                if isinstance(outcome, Trained)
                else {**asdict(spec), "error": outcome}
                for spec, outcome in self.done.items()
            ],
            "finished": finished,
            **self.about,
        }

    def _take(self, variant: Variant, spec: RunSpec) -> bool:
        """Load a finished run from OUT; return False where it does not exist."""
        if spec in self.done:
            return True
        outcome = self.members.take(
            spec.file,
            identity_of(self.planned(variant, spec.steps), self.about),
            lambda was, now: self._unlike(was, now, variant),
        )
        if outcome is not None:
            self.done[spec] = outcome
        return outcome is not None

    def _unlike(self, was: Mapping[str, Any], now: Mapping[str, Any], variant: Variant) -> str:
        """Describe why two identities differ: by settings, where OUT's result contains them."""
        found = None
        if was.get("plan_hash") != now["plan_hash"]:
            earlier = read(self.out / RESULT) or {}
            found = settings(earlier, self.result(finished=False), variant.name)
        return found or difference(was, now)

    def _make(self, variant: Variant, spec: RunSpec) -> None:
        """Train a run, or load it from OUT."""
        if self._take(variant, spec):
            return
        current = RunProgress.of(spec, self.course, self.done)
        plan = self.planned(variant, spec.steps)
        if not (self.turns or self.study.keeps(plan)):
            self._watch_compiling(current, 1)
        try:
            outcome = self.members.make(
                spec.file,
                identity_of(plan, self.about),
                plan,
                spec.seed,
                evaluations=self.evaluations or points(plan),
                watch=lambda progress: self.watch(current, progress),
            )
        except (Interrupted, KeyboardInterrupt):
            raise self._stopped() from None
        self._end(spec, outcome)

    @contextmanager
    def _devices(self) -> Iterator[None]:
        """Start the processes of several devices, if there are to be some."""
        if self.pool is None:
            yield
            return
        self.study.release()
        self.say(self.pool.opening)
        try:
            with self.pool:
                yield
        except (Interrupted, KeyboardInterrupt):
            raise self._stopped() from None

    def _ahead(self, specs: Sequence[RunSpec]) -> None:
        """Train the missing runs of these on all devices at once."""
        if (pool := self.pool) is None:
            return
        variants = {one.name: one for one in self.design.variants}
        missing = {one.file: one for one in specs if one not in self.done}
        wanted = []
        for file, spec in missing.items():
            plan = self.planned(variants[spec.variant], spec.steps)
            evaluations = self.evaluations or points(plan)
            identity = identity_of(plan, self.about)
            wanted.append(Wanted(spec.label, plan, spec.seed, evaluations, file, identity))

        def watch(under_way: Sequence[Wanted], progress: float) -> None:
            first, together = missing[under_way[0].file], progress * len(under_way)
            current = RunProgress.of(first, self.course, self.done, together)
            if not self.turns and (number := pool.compiling):
                self._watch_compiling(current, number)
            else:
                self.watch(current, progress)

        for made, _ in self.members.ahead(pool, wanted, watch):
            outcome = made.outcome
            failed = isinstance(outcome, MinillmError)
            self._end(missing[made.wanted.file], outcome.what if failed else outcome)

    def _watch_compiling(self, current: RunProgress, number: int) -> None:
        """Report that sets of plugins are compiled while none trains."""
        self.watch(replace(current, compiling=number, sets=len(self.design.variants)), 0.0)

    def _end(self, spec: RunSpec, outcome: Trained | str) -> None:
        if isinstance(outcome, str):  # a failure is a result about this variant
            self.say(f"{spec.label}: {outcome}")
        self.done[spec] = outcome
        self._write(finished=False)

    def _steps_in_minutes(self) -> int:
        """Measure the steps that the first variant makes in ``minutes``.

        The number of an earlier start is reused, unless its first variant was another set of plugins.
        """
        earlier, first = self.earlier, self.reference
        before = next(iter(earlier.get("variants", {}).values()), {}).get("plugins")
        same = before == [one.name for one in first.plan.active]
        if earlier.get("steps") and earlier.get("minutes") == self.minutes and same:
            return int(earlier["steps"])
        assert self.minutes is not None
        self.say("measuring how long a step takes")
        try:
            seconds = self.study.step_seconds(first.plan, self.seeds[0])
        except (Interrupted, KeyboardInterrupt):
            raise self._stopped() from None
        return steps_in(self.minutes, seconds)

    def _steps_in_time(self, name: str) -> int | None:
        """Compute how many steps the first variant makes in the time of another variant's run."""
        return steps_in_time(
            self._trained(name).get(self.steps, {}),
            self._trained(self.reference.name).get(self.steps, {}),
            self.steps,
        )

    def _trained(self, variant: str) -> Lengths:
        """Group a variant's successful runs: steps -> seed -> run."""
        found: dict[int, dict[int, Trained]] = {}
        for spec, outcome in self.done.items():
            if spec.variant == variant and isinstance(outcome, Trained):
                found.setdefault(spec.steps, {})[spec.seed] = outcome
        return found

    def _write(self, *, finished: bool, **more: str) -> dict[str, Any]:
        self.find()  # also runs of other processes that share OUT
        result = self.result(finished=finished) | more
        self.members.write(RESULT, result)
        self.members.write_page(PAGE, ablation_page(result))
        return result

    def _stopped(self) -> MinillmError:
        return stopped(self.out, len(self.done), continuing(self.out))


def points(plan: Plan) -> int:
    """Choose the number of evaluations of a run: as many as take a quarter of its time, from 2 to 10.

    A forward pass costs a third of a training step on the same tokens.
    """
    learnt = (plan.config.train.steps or 1) * plan.tokens_per_step
    return max(2, min(10, int(0.25 * 3 * learnt / plan.config.eval.tokens)))


def _with_steps(plan: Plan, steps: int) -> Plan:
    """Plan another number of steps; schedules scale, since they are fractions of the run."""
    return plan.with_train(steps=steps, minutes=None)


def _stem(variant: str, seed: int) -> str:
    """Return the prefix of a variant's file names, with the sign of its name spelt out."""
    signs = {"+": "with-", "-": "without-"}
    return f"{signs.get(variant[0], variant[0])}{variant[1:]}-seed{seed}"
