"""Errors that end a run early: the cause, and the command to type."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from minillm_core.backends.memory import memory
from minillm_core.checkpoint import layout
from minillm_core.config.schema import TrainConfig
from minillm_core.errors import ConfigError, Interrupted, MinillmError, OutOfMemory, Stopped
from minillm_core.plugins.manager import LoadedPlugin
from minillm_core.train.budget import Position
from minillm_core.train.job import Job
from minillm_core.train.signals import StopRequest


def exit_code(error: BaseException) -> int:
    """Return the program's exit code for an error."""
    if isinstance(error, MinillmError):
        return error.exit_code
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def newest_checkpoint(position: Position) -> str:
    """Name the newest checkpoint, for a message."""
    last = position.saved
    return "no checkpoint was written" if last is None else f"the last good checkpoint: step {last}"


def stopped(stop: StopRequest, position: Position) -> MinillmError:
    """Build the error for a run that a signal ended."""
    name = stop.signal.name if stop.signal else "a signal"
    return _ended(f"{name} after step {position.step}", position.saved, "nothing was saved")


def interrupted(
    out: Path | None, stop: StopRequest, plugins: Sequence[LoadedPlugin], doing: str | None = None
) -> MinillmError:
    """Build the error for an interrupt outside the loop, which builds its own.

    Args:
        out: the run's folder, if there is one.
        stop: holds the signal.
        plugins: those of the run.
        doing: the work that was interrupted: ``tokenising``.
    """
    name = stop.signal.name if stop.signal else "an interrupt"
    kept = layout.folders(out) if out is not None else []
    by = f"{name} while {doing}" if doing else name
    saved = kept[0][0] if kept else None
    error = _ended(by, saved, "nothing was saved; the same command starts from the beginning")
    if out is not None and kept:
        error.where, error.fix = str(out), resume_line(out, plugins)
    return error


def _ended(by: str, saved: int | None, nothing: str) -> MinillmError:
    if saved is None:
        return Interrupted(f"ended by {by}; {nothing}")
    return Stopped(f"ended by {by}; the checkpoint of step {saved} was saved")


def resume_line(out: Path, plugins: Iterable[LoadedPlugin]) -> str:
    """Return the command that resumes a run; single-file plugins must be named again."""
    return f"{command(['train', '--resume', '--out', str(out)], plugins)} resumes it"


def command(
    words: Sequence[str], plugins: Iterable[LoadedPlugin] = (), last: Sequence[str] = ()
) -> str:
    """Format a command of this program, ready to be typed.

    Args:
        words: after ``minillm``.
        plugins: of the run; single files must be named again, installed ones need not.
        last: an argument that may begin with a dash.
    """
    files = [one.origin.source for one in plugins if one.distribution is None]
    named = ["--plugins", ",".join(files)] if files else []
    dashed = ["--"] if any(word.startswith("-") for word in last) else []
    return shlex.join(["minillm", *words, *named, *dashed, *last])


def unsaved(reason: str, position: Position) -> MinillmError:
    """Build the error for a run whose last step could not be saved."""
    return MinillmError(
        "the run is over, but its last checkpoint could not be written: "
        + reason.partition("\n")[0],
        where=f"step {position.step}; {newest_checkpoint(position)}",
        fix="remove the cause, then --resume",
    )


BYTES = 16
"""Bytes of a token of a batch on the host: ids, labels, documents and positions, int32 each."""

CLIP = 1.0
"""A bound of the gradient norm to try if there is none, or a larger one."""


def remedies(train: TrainConfig, plugins: Sequence[str]) -> str:
    """Return settings to try in a new run, since ``--resume`` accepts no changed ones.

    Args:
        train: the run's settings.
        plugins: those whose code may be the cause.
    """
    plugin = "plugin" if len(plugins) == 1 else "plugins"
    without = [f"try without {plugin} {', '.join(plugins)}"] if plugins else []
    clip = [] if 0 < train.clip <= CLIP else [f"set train.clip={CLIP}"]
    ways = [*without, "lower train.lr", "lengthen train.warmup", *clip]
    return f"in a new run: {', '.join(ways[:-1])}, or {ways[-1]}"


def out_of_memory(
    error: BaseException, train: TrainConfig, peak_bytes: int | None, step: int
) -> OutOfMemory:
    """Build the error for lack of memory: the peak, and rows and accumulate for the same tokens a step."""
    text = error.what if isinstance(error, OutOfMemory) else str(error)
    detail = text.splitlines()[0][:200] if text else ""
    if not step:
        return OutOfMemory(
            "out of memory while the model was built",
            where=detail,
            fix="a smaller model: model.dim, model.layers, model.hidden or model.vocab",
        )
    peak = "" if peak_bytes is None else f"; the peak was {peak_bytes / 2**30:,.2f} GiB"
    sizes = f"rows={train.rows}, accumulate={train.accumulate}, seq_len={train.seq_len}"
    return OutOfMemory(
        f"out of memory in step {step}{peak}",
        where=": ".join(filter(None, (sizes, detail))),
        fix=_fix(train),
    )


def check_step(train: TrainConfig) -> None:
    """Refuse a step whose token arrays alone, in the dataloader, need more memory than there is.

    Raises:
        ConfigError: with the memory that they need.
    """
    needed, here = BYTES * _tokens(train), memory()
    if needed > here:
        raise ConfigError(
            f"a step of {_tokens(train):,} tokens takes {needed / 2**30:,.1f} GiB as arrays, before "
            f"a model processes them; this machine has {here / 2**30:,.1f} GiB",
            where=f"train.rows={train.rows}, train.accumulate={train.accumulate}, "
            f"train.seq_len={train.seq_len}",
            fix="a smaller train.rows or train.accumulate",
        )


def _tokens(train: TrainConfig) -> int:
    return max(shape.tokens for shape in train.shapes)


def _fix(train: TrainConfig) -> str:
    if (needed := BYTES * _tokens(train)) > memory() / 16:  # it holds several steps ahead
        return (
            "a smaller train.accumulate or train.rows: the tokens of one step alone take "
            f"{needed / 2**30:,.1f} GiB as arrays"
        )
    if train.stages:
        return "fewer rows, more accumulate in proportion, also in train.stages: the same result"
    divisors = [n for n in range(1, train.rows) if train.rows % n == 0]
    if divisors:
        rows = divisors[-1]
        accumulate = train.accumulate * train.rows // rows
        return (
            f"train.rows={rows} train.accumulate={accumulate}: "
            "the same tokens a step, and the same result"
        )
    if train.checkpointing is not True:
        return "train.checkpointing=true, or selective, then a smaller train.seq_len or model"
    return "a smaller train.seq_len or model"


SHOWN = 4
"""Plugins that a message names."""


def suspects(job: Job) -> tuple[list[str], str]:
    """Find the plugins whose code may have produced the NaN or infinity.

    Where weights themselves are not finite: those that own stages of their updates; else all plugins
    that take part in the loss.

    Returns:
        Their names, and a sentence with their functions; both empty if only the core's code ran.
    """
    found: dict[str, dict[str, None]] = {}
    spoilt = {
        name.removeprefix("model.")
        for name, array in job.trainer.local_arrays().items()
        if name.startswith("model.") and not np.isfinite(array).all()
    }
    for owner, function in _stages(job, spoilt) if spoilt else _parts(job):
        found.setdefault(owner, {})[function] = None
    if not found:
        return [], ""
    called = {one.name: one.origin.called for one in job.plugins}
    named = [f"{called[owner]}: {', '.join(found[owner])}" for owner in sorted(found)]
    more = len(named) - SHOWN
    what = f"{min(spoilt)} is updated by" if spoilt else "the loss is computed by"
    words = f"{what} " + "; ".join(named[:SHOWN]) + (f"; and {more} more" if more > 0 else "")
    return sorted(found), words


def _stages(job: Job, spoilt: set[str]) -> Iterator[tuple[str, str]]:
    """Yield (owner, function) of plugins' stages that update any of the parameters ``spoilt``."""
    for group in job.plan.groups:
        if spoilt & {member.name for member in group.members}:
            for _, owner, stage in group.rule.stages:
                if owner != "core":
                    yield owner, _function(stage.reference)


def _parts(job: Job) -> Iterator[tuple[str, str]]:
    """Yield (owner, function) of plugins' nodes, and of their kernels in use."""
    for node, _ in job.plan.table.nodes():
        yield node.owner, f"{_function(node.reference)}.forward"
    serving = {(choice.op, choice.kernel) for choice in job.trainer.binding.kernels}
    for owner, candidate in job.plan.candidates:
        if (candidate.op, candidate.name) in serving:
            yield owner, _function(candidate.reference)


def _function(reference: str) -> str:
    return reference.rpartition(":")[2]
