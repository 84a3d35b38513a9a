"""Resuming a run: the allowed differences from its record, and the checkpoint to resume from.

The plan may differ in the number of steps, in versions and in digests of code, each with a warning or
note; any other difference is refused. The data must have the same fingerprint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from minillm_core.backends.base import Binding, Trainer
from minillm_core.checkpoint.read import Checkpoint, fitting, newest_and_set_aside
from minillm_core.config.load import absolute
from minillm_core.config.schema import Config
from minillm_core.config.values import show
from minillm_core.data import Corpus
from minillm_core.errors import DataError, PlanError, Refusal
from minillm_core.plan import Plan
from minillm_core.plan.diff import differences, in_words
from minillm_core.plugins.manager import LoadedPlugin
from minillm_core.text import are, counted, plain, quoted
from minillm_core.train.budget import Budget, Position
from minillm_core.train.record import versions
from minillm_core.train.run_folder import RunFolder

FREE = ("train.steps", "train.minutes", "versions", "digests")
"""Parts of a plan that may differ."""

SHOWN = 6  # differences that a refusal lists


def check_plan(earlier: RunFolder, plan: Plan) -> tuple[list[str], list[str]]:
    """Compare the plan with the run's.

    Returns:
        Warnings for plugins whose code changed; and notes on other allowed differences.

    Raises:
        PlanError: another difference was found.
        Refusal: the run's seed differs, its record holds no plan, or it has made more steps than it is to have.
    """
    recorded, where = earlier.record.get("plan"), earlier.where
    try:
        found = differences(recorded or {}, plan.data())
    except (KeyError, TypeError, AttributeError) as error:
        raise Refusal("the record of the run holds no plan", where=where) from error
    before = absolute(earlier.config)
    if earlier.newest is not None:
        earlier.check_seed(earlier.newest)
    if before.init != plan.config.init:
        begun = before.init or earlier.part("branched_from").get("out")
        raise Refusal(
            f"the run was started from {begun or 'new weights'}, not {plan.config.init}",
            where=where,
            fix="leave --init out, or start a new run in another --out",
        )
    free = {path: pair for path, pair in found.items() if path.startswith(FREE)}
    other = {path: pair for path, pair in found.items() if path not in free}
    edited, free = edited_plugins(free, [p for p in plan.active if p.name in before.plugins])
    begin = f"step {earlier.newest.step:,}" if edited and earlier.newest else "the run began"
    warnings = [
        f"the file of plugin {name} ({place}) has changed since {begin}"
        for name, place in sorted(edited.items())
    ]
    if other or before.seed != plan.config.seed:
        raise _other_run(earlier, changed_settings(before, plan.config), other, warnings)
    free.pop("train.steps", None)
    notes = [f"resumed with another {line}" for line in in_words(free)]
    return warnings, [*notes, *_steps(earlier, before.train.steps, plan)]


def _other_run(
    earlier: RunFolder,
    settings: Sequence[tuple[str, str]],
    other: Mapping[str, Any],
    warnings: Sequence[str],
) -> PlanError:
    """Build the refusal of a plan that is not the run's, in settings, or else in its slots."""
    lines = [words for words, _ in settings] or in_words(other)
    more = [f"... and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    typed = " ".join(typed for _, typed in settings[:SHOWN]) + (" ..." if more else "")
    branch = f"--branch {quoted(earlier.out)} --out NEW {typed}".rstrip()
    leave = f"leave {'it' if len(settings) == 1 else 'them'} out, or " if settings else ""
    undo = "undo the change, or " if warnings else ""
    return PlanError(
        f"{'these settings differ' if settings else 'the plan differs'} from the run's: "
        + "; ".join([*lines[:SHOWN], *more]),
        where=earlier.where,
        fix="; ".join([*warnings, f"{leave}{undo}start a new run from this one: {branch}"]),
    )


def environment_changes(earlier: RunFolder, binding: Binding) -> Iterator[str]:
    """Yield notes if the device, or a library's version, differs from that of the process before.

    Versions of the core and of plugins are part of the plan, and are compared with it.
    """
    before, versions_then = earlier.part("binding"), earlier.part("versions")
    then = tuple(str(before.get(key)) for key in ("backend", "device"))
    now = (binding.backend, binding.device)
    if then != now:
        yield (
            f"the run was on {' '.join(then)} and continues on {' '.join(now)}: the training is the "
            "same, but not bit for bit"
        )
    found = [
        f"{name} {versions_then[name]} then, {installed} now"
        for name, installed in versions(binding.backend).items()
        if versions_then.get(name, installed) != installed and name != "minillm-core"
    ]
    was = earlier.part("hardware").get("device")
    if was is not None and was != binding.device_name:
        found.append(f"device {was} then, {binding.device_name} now")
    if found:
        yield plain(f"{'; '.join(found)}: the result may not be identical bit for bit", 1000)


def _steps(earlier: RunFolder, before: int | None, plan: Plan) -> Iterator[str]:
    now = plan.config.train.steps
    if before is None or now is None or before == now:
        return
    done = earlier.newest.step if earlier.newest and earlier.record.get("exit") != 0 else 0
    if now < done:
        raise Refusal(
            f"{done:,} of {before:,} steps are done already",
            where=f"train.steps={now}",
            fix=f"leave it out, or --steps {done} to end the run here",
        )
    verb = "extended" if now > before else "shortened"
    yield (
        f"the run is {verb} from {before:,} to {now:,} steps: every schedule now spreads over "
        f"{now:,}, so that train.lr at step {min(before, now):,} is "
        f"{plan.values(min(before, now) / now)['train.lr']:.3g} instead of "
        f"{plan.values(min(before, now) / before)['train.lr']:.3g}"
    )


def check_data(earlier: RunFolder, corpus: Corpus, config: Config) -> None:
    """Refuse data that differ from those of the newest checkpoint, or of the record if there is none.

    Raises:
        DataError: the fingerprints differ.
    """
    checkpoint = earlier.newest
    held = checkpoint.scalars if checkpoint else earlier.record.get("data", {})
    if held.get("fingerprint") != corpus.fingerprint:
        raise DataError(
            "the data have changed since the run began",
            where=f"now {corpus.description}; then {earlier.part('data').get('description')}",
            fix="restore the files, tokenizer, data.val and data.seed that it had; or start a new run from "
            f"this one, which reads the new data from their start: --branch {quoted(earlier.out)} --out NEW "
            + " ".join(f"--data {quoted(path)}" for path in config.data.paths),
        )


def finished(earlier: RunFolder, budget: Budget) -> str | None:
    """Return the reason why a run is finished; None if it has steps left."""
    if earlier.record.get("exit") != 0:  # None if it was killed
        return None
    checkpoint = earlier.newest
    if checkpoint is None:  # no checkpoint was kept: the record alone shows the end
        before = earlier.config
        kept_none = before.checkpoint.every == 0 and budget == Budget.of(before.train)
        return "it kept no checkpoints, and its budget is spent" if kept_none else None
    if why := earlier.record.get("stopped"):
        return f"stopped {why}; --branch {quoted(earlier.out)} trains on from there"
    position = Position.of(checkpoint.scalars)
    if not budget.spent(position.step, position.elapsed):
        return None
    more = "--steps with more of them" if budget.steps else "a longer train.minutes"
    return f"{are(counted(position.step, 'step'), position.step)} done; {more} extends it"


def newest(out: Path, earlier: RunFolder | None, say: Callable[[str], None]) -> Checkpoint | None:
    """Find the newest checkpoint that verifies; requires the lock of ``out``.

    Bad checkpoints are set aside, with a message. If there was no run, or none of its checkpoints was
    ever written, return None and print that the run starts at step 0.

    Raises:
        NoCheckpoint: none verifies.
        Refusal: the run cannot start anew.
    """
    if earlier is None:
        say(f"there is no run in {out} to resume: starting at step 0")
        return None
    checkpoint = newest_and_set_aside(out, say)
    if checkpoint is None and earlier.record.get("branched_from") is not None:
        branched = earlier.part("branched_from")
        flag = "--init" if branched.get("weights_only") else "--branch"
        origin = f"{branched.get('out', 'RUN')}@{branched.get('step', 'STEP')}"
        raise Refusal(
            "the run began with another's weights and has no checkpoint, so it cannot restart",
            where=str(out / "checkpoints"),
            fix=f"start a new run: {flag} {quoted(origin)} --out NEW",
        )
    if checkpoint is None:
        say("no checkpoint of the run was ever written: starting at step 0")
    return checkpoint


def load(checkpoint: Checkpoint, trainer: Trainer) -> Position:
    """Restore the trainer from a checkpoint.

    Raises:
        Refusal: the checkpoint does not fit the model, or another version wrote it.
    """
    with fitting(checkpoint.path, "run"):
        position = Position.of(checkpoint.scalars)
        trainer.resume(checkpoint.deferred())
    return position


DIGESTS = "digests."
"""Prefix of the paths of a plan's digests, each of a plugin, by its name, or of a module."""


def edited_plugins(
    found: Mapping[str, Any], plugins: Iterable[LoadedPlugin]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Find the plugins whose code differs between two plans.

    Args:
        found: the differences, by path.
        plugins: those of the run.

    Returns:
        plugin -> where its code is, for messages; and the other differences.
    """
    owners = {name: one for one in plugins for name in (one.name, _package(one))}
    whose: dict[str, str] = {}
    rest: dict[str, Any] = {}
    for path, pair in found.items():
        key = path.removeprefix(DIGESTS)
        owner = owners.get(key) or owners.get(key.partition(".")[0])
        if path.startswith(DIGESTS) and owner is not None:
            whose[owner.name] = owner.origin.offered_by or plain(
                owner.origin.source.partition(":")[0]
            )
        else:
            rest[path] = pair
    return whose, rest


def _package(one: LoadedPlugin) -> str:
    """Return the top package of the module that defines a plugin; of a single file, its own module."""
    return type(one.plugin).__module__.partition(".")[0]


_UNPLANNED = {"data.paths", "data.tokenizer"} | {
    f"train.{name}"
    for name in ("steps", "minutes", "dtype", "compile", "checkpointing", "spike", "rewind", "skip")
}
"""Settings that no plan depends on."""


def changed_settings(before: Config, now: Config) -> list[tuple[str, str]]:
    """List the settings that differ between a run and the current ones.

    Returns:
        Pairs of ``train.lr = 0.001, the run has 0.003``, and ``train.lr=0.001`` for a new run.
    """
    then, given = (config.model_dump(mode="json") for config in (before, now))
    found: list[tuple[str, str]] = []

    def differs(key: str, value: Any, was: str) -> None:
        found.append((f"{key} = {show(value)}, the run has {was}", f"{key}={show(value)}"))

    if before.seed != now.seed:
        found.append((f"seed = {now.seed}, the run has {before.seed}", f"--seed {now.seed}"))
    rows, rows_then = (one.train.rows * one.train.accumulate for one in (now, before))
    for section in ("model", "train", "data"):
        for name, value in given[section].items():
            key, was = f"{section}.{name}", then[section][name]
            split = rows == rows_then and name in ("rows", "accumulate")
            if value != was and not split and key not in _UNPLANNED:
                differs(key, value, show(was))
    added = [name for name in now.plugins if name not in before.plugins]
    gone = [name for name in before.plugins if name not in now.plugins]
    if added or gone:
        signed = [*(f"+ {name}" for name in added), *(f"- {name}" for name in gone)]
        typed = ",".join([*added, *(f"-{name}" for name in gone)])
        found.append((f"--plugins: {', '.join(signed)}", f"--plugins {typed}"))
    for name, options in now.plugins.items():
        held = before.plugins.get(name, options)
        for option in sorted({*options, *held}):
            value, was = options.get(option), held.get(option)
            if value != was:
                differs(f"{name}.{option}", value, "its default" if was is None else show(was))
    return found
