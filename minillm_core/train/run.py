"""The whole job of ``minillm train``, in order: check, say, train, evaluate, show, record."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from minillm_core.backends.base import Backend
from minillm_core.backends.detect import Detected
from minillm_core.checkpoint import commit, retain, sweep
from minillm_core.config.load import Loaded
from minillm_core.data import Loader, bytes_per_token, validation_batches
from minillm_core.errors import Interrupted, MinillmError, OutOfMemory, Refusal
from minillm_core.plan import Plan
from minillm_core.plugins.blame import blaming
from minillm_core.plugins.manager import LoadedPlugin
from minillm_core.train import describe
from minillm_core.train.advice import out_of_memory
from minillm_core.train.budget import Cadence
from minillm_core.train.evaluate import Validation
from minillm_core.train.events import Evaluated, Saved, Started
from minillm_core.train.evidence import Evidence
from minillm_core.train.hooks import batch_hook, observers
from minillm_core.train.job import Job, check
from minillm_core.train.loop import Loop, Position
from minillm_core.train.meter import Meter
from minillm_core.train.metrics import Metrics
from minillm_core.train.observers import Observers
from minillm_core.train.progress import View, view
from minillm_core.train.record import RUNS, Record, claim_out, hardware, versions
from minillm_core.train.restore import TOKENIZER
from minillm_core.train.sample import sample
from minillm_core.train.settings import settings
from minillm_core.train.signals import stop_on_signals

__all__ = ["train"]

Say = Callable[[str], None]


def train(
    loaded: Loaded,
    plugins: Sequence[LoadedPlugin],
    detected: Detected,
    *,
    out: Path | None = None,
    resume: bool = False,
    runs: Path = RUNS,
    cache: Path,
    say: Say,
    create: Callable[[Detected, Plan], Backend] | None = None,
) -> int:
    """Train a model as it was asked for.

    Args:
        loaded: the config and where its values came from.
        plugins: the active ones, loaded.
        detected: backend and device.
        out: the run's folder; default: runs/<preset>-<n>.
        resume: go on with the run in ``out``.
        runs: where folders without a name are made.
        cache: where tokenizers and tokens are kept.
        say: prints a line.
        create: makes the backend; default: :func:`minillm_core.backends.create`.

    Returns:
        0.

    Raises:
        Refusal: nothing was started, nothing was written into OUT.
        MinillmError: how else the run ended; its class says which exit code that is.
    """
    if resume:
        raise Refusal(
            "runs cannot be resumed yet",
            where="--resume",
            fix="start a new run: leave --resume out, and name another --out",
        )
    job = check(loaded, plugins, detected, out=out, runs=runs, cache=cache, create=create)
    out = claim_out(job.config.preset, out, runs=runs)
    for line in describe.start(job, out):
        say(line)
    sweep(out)
    if job.corpus.tokenizer:
        job.corpus.tokenizer.save(out / TOKENIZER)
    evidence = Evidence(
        {planned.name: planned.expected for planned in job.plan.plugins},
        job.trainer,
        seen=job.seen,
        say=say,
    )
    record = Record(out, _document(job))
    try:
        evaluated, meter, steps = _loop(job, out, evidence, say)
    except BaseException as error:
        told = error
        if isinstance(error, KeyboardInterrupt):  # outside the loop, which tells by itself
            told = Interrupted("interrupted; nothing was saved")
        code = told.exit_code if isinstance(told, MinillmError) else 1
        record.update(exit=code)
        # after a failure of the device there may be nobody left to ask
        with suppress(Exception):
            record.update(plugins=_plugins(job, evidence))
        if told is error:
            raise
        raise told from None
    record.update(exit=0, plugins=_plugins(job, evidence))
    evidence.warn()
    for line in describe.end(job, out, evaluated, meter.overall(), steps):
        say(line)
    _show_sample(job, say)
    return 0


def _loop(job: Job, out: Path, evidence: Evidence, say: Say) -> tuple[Evaluated | None, Meter, int]:
    """Train to the end; what the last evaluation found, how fast it went, how many steps."""
    config, trainer = job.config, job.trainer
    on_batch = batch_hook(job.plan.on_batch, job.plugins, job.seen, config.model.vocab)
    validation = Validation(
        trainer,
        validation_batches(
            job.corpus.val,
            rows=config.train.rows,
            seq_len=config.train.seq_len,
            tokens=config.eval.tokens,
            seed=None,  # it is in seeded order already
            on_batch=on_batch,
        ),
        bytes_per_token(job.corpus.tokenizer, config.model.vocab) if job.corpus.tokenizer else None,
    )
    last: list[Evaluated] = []

    def evaluate(step: int) -> Evaluated:
        last[:] = [validation(step)]
        return last[0]

    meter = Meter(
        flops_per_token=job.plan.estimate().flops_per_token,
        peak_flops=trainer.binding.peak_flops,
    )
    with ExitStack() as stack:
        loader = stack.enter_context(
            Loader(
                job.corpus.train,
                rows=config.train.rows,
                accumulate=config.train.accumulate,
                seq_len=config.train.seq_len,
                seed=config.data.seed,
                on_batch=on_batch,
            )
        )
        stop = stack.enter_context(stop_on_signals())
        metrics = stack.enter_context(Metrics(out / "metrics.jsonl", every=config.log.every))
        shown: View = view(lambda: loop.progress, config.train.steps, say)
        observed = Observers(
            [metrics, evidence, shown], observers(job.plugins), say=shown.say, seen=job.seen
        )
        loop = Loop(
            trainer,
            loader,
            job.plan.values,
            job.budget,
            observed,
            cadence=Cadence(config.eval.every, config.checkpoint.every),
            evaluate=evaluate,
            save=_saver(job, out) if config.checkpoint.every else None,
            stop=stop,
            meter=meter,
        )
        stack.enter_context(shown)
        observed(Started(job.plan.hash, config.train.steps, job.plan.num_parameters))
        try:
            with blaming(job.plugins, "a step"):
                loop.run()
        except (OutOfMemory, MemoryError) as error:
            step = loop.position.step + 1
            raise out_of_memory(error, config.train, trainer.peak_bytes(), step) from error
    return (last[0] if last else None), meter, loop.position.step


def _saver(job: Job, out: Path) -> Callable[[Position], Saved]:
    def save(position: Position) -> Saved:
        began = time.perf_counter()
        scalars = {
            "step": position.step,
            "tokens": position.tokens,
            "elapsed_seconds": position.elapsed,
            "skipped": position.skipped,
            "cursor": dict(position.cursor),
            "seed": job.config.seed,
            "plan_hash": job.plan.hash,
            "fingerprint": job.corpus.fingerprint,
        }
        path = commit(out, position.step, job.trainer.arrays(), scalars)
        retain(out, job.config.checkpoint.keep)
        return Saved(position.step, str(path.relative_to(out)), time.perf_counter() - began)

    return save


def _document(job: Job) -> dict[str, Any]:
    binding = job.trainer.binding
    distributions = [one.distribution for one in job.plugins if one.distribution]
    return {
        "config": settings(job.loaded),
        "plan": job.plan.data(),
        "plan_hash": job.plan.hash,
        "binding": describe.binding(binding),
        "plugins": [one.data() | {"evidence": None} for one in job.plugins],
        "versions": versions(binding.backend, distributions),
        "hardware": hardware(binding.device_name),
        "seed": job.config.seed,
        "data": {"fingerprint": job.corpus.fingerprint, "description": job.corpus.description},
    }


def _plugins(job: Job, evidence: Evidence) -> list[dict[str, Any]]:
    shown = evidence.records()
    return [one.data() | {"evidence": shown.get(one.name)} for one in job.plugins]


def _show_sample(job: Job, say: Say) -> None:
    if job.corpus.tokenizer is None:
        return
    try:
        text = sample(
            job.trainer,
            job.corpus.tokenizer,
            context=job.config.train.seq_len,
            seed=job.config.seed,
        )
    except KeyboardInterrupt:  # the run is over and recorded; only this is cut short
        return
    say("a sample of what it writes:")
    say("\n".join(f"  | {line}" for line in text.splitlines()) or "  (nothing)")
