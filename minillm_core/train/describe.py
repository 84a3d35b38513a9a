"""The console's description of a run: its start, its result and the next commands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from minillm_core.data.documents import column
from minillm_core.plan.render import epochs_read, exportable, parameters_of
from minillm_core.plugins.builders.loss import LEFT_OUT, POSITIONS
from minillm_core.plugins.builders.optimizer import ROWS
from minillm_core.plugins.sourcing import WEIGHTS
from minillm_core.text import counted
from minillm_core.train.errors import command
from minillm_core.train.events import Evaluated, Throughput
from minillm_core.train.job import Job
from minillm_core.train.progress import by_source, duration, losses
from minillm_core.train.validation import Trend

EPOCHS = 4
"""Epochs over a text that are nearly as good as new text (arXiv:2305.16264)."""


def start(job: Job, *, verbose: bool = False) -> Iterator[str]:
    """Yield two lines of data, model and budget; then notes to act on; with ``verbose`` every note."""
    plan, model = job.plan, job.config.model
    size = f"{parameters_of(plan)} ({counted(model.layers, 'layer')}, {model.dim} wide)"
    plugins = ", plugins " + ", ".join(one.name for one in plan.plugins) if plan.plugins else ""
    yield f"data: {job.corpus.description}"
    yield f"model: {size}{plugins}; {_budget(job)}"
    yield from _mixture(job)
    yield from _supervised_share(job)
    yield from (f"warning: {warning}" for warning in job.warnings)
    yield from (f"note: {note}" for note in (*plan.notes, *job.notes))
    if verbose:
        yield from _details(job)


def _details(job: Job) -> Iterator[str]:
    bound, plan = job.trainer.binding, job.plan
    how = [bound.dtype, "compiled" if bound.compile else "eager"]
    if bound.checkpointing:
        how.append(f"{'selective ' * (bound.checkpointing == 'selective')}activation checkpointing")
    if bound.deterministic:
        how.append("deterministic")
    yield f"device: {bound.device_name}; {', '.join(how)}"
    for plugin in plan.plugins:
        origin = f"{plugin.distribution} {plugin.version}" if plugin.distribution else "a file"
        yield f"plugin {plugin.name} ({origin})"
    yield f"plan: {plan.hash[:12]}"
    yield f"export: {exportable(plan)}"
    yield "kernels: " + ", ".join(f"{choice.op} {choice.kernel}" for choice in bound.kernels)
    for choice in bound.kernels:
        if choice.reason != "preferred":
            yield f"kernel {choice.op} {choice.kernel}: {choice.reason}"
    yield from (f"note: {note}" for note in (*bound.notes, *job.details))


def _mixture(job: Job) -> Iterator[str]:
    """Yield the share of each source of a mixture, and its number of epochs."""
    parts, train = job.corpus.parts, job.config.train
    total = sum(one.weight for one in parts)
    for one in parts:
        share, often = one.weight / total, ""
        if train.steps is not None:
            read = share * job.plan.tokens_per_step * train.steps / one.train.tokens
            often = f", {epochs_read(read)}"
        yield f"mixture: {100 * share:.2f} % {one.name}, {one.train.tokens:,} tokens{often}"


LOOKED_AT = 1000
"""First documents of the data, whose loss weights give the share of supervised tokens."""


def _supervised_share(job: Job) -> Iterator[str]:
    """Yield the share of supervised tokens, if the loss is computed at the other tokens as well."""
    loss, block = job.plan.spec.loss, job.corpus.train.block(0)
    weighed = any(one.name == WEIGHTS for one in job.plan.sourcing.fields)
    if loss.gather or loss.rows or not weighed or block is None:
        return
    spans = block.spans[:LOOKED_AT].tolist()
    weights = [column(block.arrays[array], WEIGHTS)[first:end] for array, first, end in spans]
    share = sum(map(np.count_nonzero, weights)) / sum(map(len, weights))
    if share < SPARSE:
        yield (
            f"note: {share:.0%} of the tokens are supervised: --plugins sparse_loss computes the loss at "
            "those alone"
        )


SPARSE = 0.9
"""Share of supervised tokens above which there is little to leave out."""


@dataclass(frozen=True)
class Outcome:
    """The result of a run, or of one process of it."""

    steps: int  # in the whole run
    evaluated: Evaluated | None  # the last evaluation
    trend: Trend
    speed: Throughput | None
    preparing: float  # seconds of this process
    training: float
    evaluating: float
    saving: float  # while training waited for a checkpoint
    prompts: Sequence[str] = ()
    read: int = 0  # tokens of this text
    packed: Mapping[str, int] | None = None  # a packer's counts; None: documents lie end to end


def end(job: Job, out: Path, made: Outcome) -> Iterator[str]:
    """Yield how long the run took, its result, and the paths of its files."""
    parts = {"training": made.training, "preparing": made.preparing, "evaluating": made.evaluating}
    parts |= {"waiting for checkpoints": made.saving} if made.saving >= 1 else {}
    total = duration(sum(parts.values()))
    spent = ", ".join(f"{name} {duration(seconds)}" for name, seconds in parts.items())
    speed = "" if made.speed is None else f", {made.speed.real:,.0f} tokens/s"
    read = made.packed["used"] + made.packed["cut"] if made.packed else made.read
    epochs = read / job.corpus.train.tokens
    yield f"done in {total} ({spent})"
    yield f"{counted(made.steps, 'step')}, {epochs_read(epochs)}{speed}"
    if made.evaluated is not None and made.evaluated.stop:
        yield f"stopped by {made.evaluated.stop}"
    if (seen := job.trainer.witnesses()).get(LEFT_OUT):
        share = 1 - seen[LEFT_OUT] / seen[POSITIONS]
        yield f"the head was computed at {share:.1%} of the positions"
    for name in job.plan.by_rows:
        rows, count = seen.get(f"{ROWS}{name}", 0), job.plan.parameters[name].shape[0]
        yield f"{rows / max(seen.get(ROWS, 0), 1):,.0f} of {count:,} rows of {name} a step"
    if made.packed is not None:
        of, padding = made.packed, 1 - made.packed["used"] / made.packed["room"]
        yield (
            f"packed: {padding:.2%} padding, {of['cut']:,} of {of['taken']:,} tokens cut, "
            f"{of['split']:,} pieces begin inside a document"
        )
    if (found := made.evaluated) is not None:
        of = by_source(found)
        yield f"held-out loss {losses(found.val_loss, found.bits_per_byte)}{of}{_best(made)}"
    if epochs > EPOCHS:
        yield f"the text was read {epochs:.0f} times: more text (--data) would help the most"
    kept = "checkpoints/, " if job.config.checkpoint.every != 0 else ""
    own = "tokenizer.json, " if job.corpus.tokenizer else ""
    yield f"in {out}: {kept}{own}metrics.jsonl, run.json, run.toml"


def _best(made: Outcome) -> str:
    """Return the step with the lowest held-out loss as text, empty if it is the last one."""
    best, last = made.trend.best, made.trend.newest
    if best is None or last is None or best.step == last.step:
        return ""
    return f"; step {best.step:,} was the best, {last.val_loss - best.val_loss:.3f} lower"


def next_steps(job: Job, out: Path, made: Outcome) -> Iterator[str]:
    """Yield commands to run next, ready to be typed."""
    plan, plugins, kept = job.plan, job.plugins, job.config.checkpoint.every != 0
    lines = [command(["report", str(out)])]
    if kept and made.evaluated is not None and made.evaluated.stop:
        lines.append(command(["train", "--branch", str(out), "--out", f"{out}-on"], plugins))
    elif kept:
        minutes = job.config.train.minutes
        longer = [f"train.minutes={2 * minutes:g}"] if minutes else ["--steps", str(2 * made.steps)]
        lines.append(command(["train", "--resume", "--out", str(out), *longer], plugins))
    if kept and plan.sourcing.prompt is not None:
        lines.insert(0, command(["chat", str(out)], plugins))
    elif kept and job.corpus.tokenizer is not None:
        lines.insert(0, command(["generate", str(out)], plugins, last=made.prompts[:1]))
    if kept and plan.export.layout is not None:
        named = out if out.name not in ("", "..") else out.resolve()  # "." has no name
        to = named.with_name(f"{named.name}-model")
        lines.append(command(["export", str(out), "--to", str(to)], plugins))
    yield "next:"
    yield from (f"  {line}" for line in lines)
    if plan.export.layout is None:
        yield f"  (export: {exportable(plan)})"


def _budget(job: Job) -> str:
    train, tokens = job.config.train, job.plan.tokens_per_step
    if train.steps is not None:
        at = job.begins
        read = at.tokens - at.before + tokens * (train.steps - at.step)
        epochs = epochs_read(read / job.corpus.train.tokens)
        return f"{counted(train.steps, 'step')} of {tokens:,} tokens, {epochs}"
    clock = counted(train.minutes or 0, "minute", "g")
    return f"{clock} of training at {tokens:,} tokens a step; start and evaluation come on top"
