"""A run in words: what it is before it starts, and what came of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from minillm_core.backends.base import Binding
from minillm_core.plan.render import amount, exportable
from minillm_core.train.events import Evaluated, Throughput
from minillm_core.train.job import Job

__all__ = ["binding", "end", "start"]


def start(job: Job, out: Path) -> Iterator[str]:
    """Backend, device and reason first; then plugins, data, model, plan, and what to know."""
    bound, config, plan = job.trainer.binding, job.config, job.plan
    how = [bound.dtype, "compiled" if bound.compile else "eager"]
    if bound.checkpointing:
        how.append("activation checkpointing")
    if bound.deterministic:
        how.append("deterministic")
    yield f"{bound.backend} on {bound.device} ({bound.device_name}): {bound.reason}"
    for plugin in plan.plugins:
        origin = f"{plugin.distribution} {plugin.version}" if plugin.distribution else "a file"
        yield f"plugin {plugin.name} ({origin})"
    yield from (f"warning: {warning}" for warning in job.warnings)
    yield f"data: {job.corpus.description}"
    model = config.model
    yield (
        f"model: {config.preset}, {amount(plan.num_parameters)} parameters "
        f"({model.layers} layers, {model.dim} wide); {', '.join(how)}"
    )
    yield f"{_budget(job)}, {plan.tokens_per_step:,} tokens a step; plan {plan.hash[:12]}"
    yield f"export: {exportable(plan)}"
    yield "kernels: " + ", ".join(f"{choice.op} {choice.kernel}" for choice in bound.kernels)
    for choice in bound.kernels:
        if choice.reason != "preferred":
            yield f"kernel {choice.op} {choice.kernel}: {choice.reason}"
    yield from (f"note: {note}" for note in (*plan.notes, *bound.notes, *job.notes))
    yield f"everything goes to {out}"


def end(
    job: Job, out: Path, evaluated: Evaluated | None, speed: Throughput | None, steps: int
) -> Iterator[str]:
    """The result, the speed, and where everything is."""
    if evaluated is not None:
        rate = (
            "" if evaluated.bits_per_byte is None else f", {evaluated.bits_per_byte:.4f} bits/byte"
        )
        yield f"done: {steps:,} steps, validation loss {evaluated.val_loss:.4f}{rate}"
    epochs = job.plan.tokens_per_step * steps / job.corpus.train.tokens
    if epochs > 4:  # arXiv:2305.16264: up to four readings are nearly as good as new text
        yield f"the text was read {epochs:.0f} times: more text (--data) would help the most"
    if speed is not None:
        yield f"{speed.real:,.0f} tokens/s (without the first step)"
    kept = "checkpoints/, " if job.config.checkpoint.every else ""
    own = "tokenizer.json, " if job.corpus.tokenizer else ""
    yield f"{out}: {kept}{own}metrics.jsonl, run.json"


def binding(bound: Binding) -> dict[str, Any]:
    """The binding as JSON."""
    document = asdict(bound)
    document["kernels"] = [asdict(choice) for choice in bound.kernels]
    return document


def _budget(job: Job) -> str:
    parts = []
    if job.budget.steps is not None:
        parts.append(f"{job.budget.steps:,} steps")
    if job.budget.minutes is not None:
        parts.append(f"{job.budget.minutes:g} minutes")
    return " or ".join(parts)
