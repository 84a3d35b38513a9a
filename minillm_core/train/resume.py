"""Going on with a run: what may differ from its record, and where it goes on from.

The plan may differ in the number of steps, in versions and in digests of code, which is said; any
other difference is refused. The data must be the same, by fingerprint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from minillm_core.backends.base import Binding, Trainer
from minillm_core.checkpoint import Checkpoint, newest, newest_and_set_aside
from minillm_core.config.schema import Config
from minillm_core.data import Corpus
from minillm_core.errors import DataError, PlanError, Refusal
from minillm_core.plan import Plan
from minillm_core.plan.diff import differences, in_words
from minillm_core.plugins.manager import LoadedPlugin
from minillm_core.train.budget import Budget
from minillm_core.train.changed import changed, since
from minillm_core.train.position import Position
from minillm_core.train.record import RUN
from minillm_core.train.settings import config_of

__all__ = ["Earlier", "another_device", "check_data", "check_plan", "finished", "go_on", "load"]

FREE = ("train.steps", "versions", "digests")
"""Parts of a plan that may differ."""

SHOWN = 6  # differences that a refusal lists


@dataclass(frozen=True)
class Earlier:
    """A run that is to go on, as its folder says."""

    out: Path
    record: Mapping[str, Any]  # run.json

    @cached_property
    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that verifies, as it was when this was first asked."""
        return newest(self.out)

    @property
    def exit(self) -> int | None:
        """How it ended; None where it was killed."""
        return self.record.get("exit")

    @property
    def config(self) -> Config:
        """What it was told."""
        return config_of(self.record["config"], where=str(self.out / RUN))


def check_plan(
    earlier: Earlier, plan: Plan, plugins: Sequence[LoadedPlugin] = ()
) -> tuple[list[str], list[str]]:
    """Compare the plan with the run's.

    Returns:
        Warnings, of plugins whose code is another; and notes of what else may differ, and does.

    Raises:
        PlanError: anything else differs.
        Refusal: the run's seed was another, or its record holds no plan.
    """
    recorded, where = earlier.record.get("plan"), str(earlier.out / RUN)
    try:
        found = differences(recorded or {}, plan.data())
    except (KeyError, TypeError, AttributeError) as error:
        raise Refusal("the record of the run holds no plan", where=where) from error
    free = {path: pair for path, pair in found.items() if path.startswith(FREE)}
    other = {path: pair for path, pair in found.items() if path not in free}
    edited, free = changed(free, plugins)
    warnings = since(earlier.newest.step if edited and earlier.newest else None, edited)
    if other:
        lines = in_words(other)
        more = [f"... and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
        raise PlanError(
            "this is another plan than the run's: " + "; ".join([*lines[:SHOWN], *more]),
            where=where,
            fix="; ".join([*warnings, "leave out what was not given at first"])
            + (", undo the change" if warnings else "")
            + ", or start a new run in another --out",
        )
    before = earlier.config
    if before.seed != plan.config.seed:
        raise Refusal(
            f"the run was started with seed {before.seed}, not {plan.config.seed}",
            where=where,
            fix="leave --seed out, or start a new run in another --out",
        )
    if before.init != plan.config.init:
        raise Refusal(
            f"the run was started from {before.init or 'new weights'}, not {plan.config.init}",
            where=where,
            fix="leave --init out, or start a new run in another --out",
        )
    free.pop("train.steps", None)
    notes = [f"resumed with another {line}" for line in in_words(free)]
    return warnings, [*notes, *_steps(before.train.steps, plan)]


def another_device(earlier: Earlier, binding: Binding) -> Iterator[str]:
    """What to say where the run goes on by another backend, or on another device."""
    recorded = earlier.record.get("binding")
    before = recorded if isinstance(recorded, Mapping) else {}
    then = tuple(str(before.get(key)) for key in ("backend", "device"))
    now = (binding.backend, binding.device)
    if then != now:
        yield (
            f"the run was on {' '.join(then)} and goes on on {' '.join(now)}: it is the same "
            "training, and not the same to the bit"
        )


def _steps(before: int | None, plan: Plan) -> Iterator[str]:
    now = plan.config.train.steps
    if before is None or now is None or before == now:
        return
    verb = "extended" if now > before else "shortened"
    yield (
        f"the run is {verb} from {before:,} to {now:,} steps: every schedule now spreads over "
        f"{now:,}, so that train.lr at step {min(before, now):,} is "
        f"{plan.values(min(before, now) / now)['train.lr']:.3g} instead of "
        f"{plan.values(min(before, now) / before)['train.lr']:.3g}"
    )


def check_data(earlier: Earlier, corpus: Corpus) -> None:
    """Refuse other data than those of the newest checkpoint, or of the record where there is none.

    Raises:
        DataError: the fingerprints differ.
    """
    checkpoint = earlier.newest
    held = checkpoint.scalars if checkpoint else earlier.record.get("data", {})
    if held.get("fingerprint") != corpus.fingerprint:
        raise DataError(
            "the data are not those that the run was reading",
            where=f"fingerprint {corpus.fingerprint} now, {held.get('fingerprint')} then",
            fix="give back the same files, tokenizer, data.val and data.seed, or start a new run",
        )


def finished(earlier: Earlier, budget: Budget) -> str | None:
    """What to say of a run that has nothing left to do; None where it has."""
    if earlier.exit != 0:
        return None
    checkpoint = earlier.newest
    if checkpoint is None:  # it kept none: its record alone tells
        before = earlier.config
        same = budget == Budget(before.train.steps, before.train.minutes)
        kept_none = not before.checkpoint.every and same
        return "it kept no checkpoints, and its budget is spent" if kept_none else None
    position = Position.of(checkpoint.scalars)
    if not budget.spent(position.step, position.elapsed):
        return None
    return f"{position.step:,} steps are done; --steps with more of them extends it"


def go_on(
    out: Path, earlier: Earlier | None, trainer: Trainer, say: Callable[[str], None]
) -> Position:
    """Put the trainer where the newest checkpoint that verifies was; under the lock of ``out``.

    Bad checkpoints are set aside, loudly. Where there was no run, or none of its checkpoints was
    ever written, it starts at step 0 and says so.

    Raises:
        NoCheckpoint: none verifies.
        Refusal: it does not fit the model.
    """
    if earlier is None:
        say(f"there is no run in {out} to resume: starting at step 0")
        return Position()
    checkpoint = newest_and_set_aside(out, say)
    if checkpoint is None:
        say("no checkpoint of the run was ever written: starting at step 0")
        return Position()
    position = load(checkpoint, trainer)
    say(f"resumed after step {position.step:,} from {checkpoint.path.name}")
    return position


def load(checkpoint: Checkpoint, trainer: Trainer) -> Position:
    """Put the trainer where a checkpoint was.

    Raises:
        Refusal: it does not fit the model, or another version wrote it.
    """
    try:
        position = Position.of(checkpoint.scalars)
        trainer.resume(checkpoint.arrays())
    except (KeyError, TypeError, ValueError) as error:
        raise Refusal(
            f"the checkpoint does not fit the run: {type(error).__name__}: {error}",
            where=str(checkpoint.path),
            fix="use the versions of minillm and of the plugins that run.json names",
        ) from error
    return position
