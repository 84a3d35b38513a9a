"""What one process does of a run, in a folder that it has locked: train, evaluate, record, show.

A run that was stopped is gone on with in another session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from minillm_core.checkpoint import Writer, layout, put_away, retain, sweep
from minillm_core.errors import MinillmError, NonFinite, OutOfMemory, PluginCodeError
from minillm_core.plugins.blame import at_work, blaming
from minillm_core.plugins.watch import watching
from minillm_core.train import describe
from minillm_core.train.advice import not_finite, out_of_memory
from minillm_core.train.budget import Cadence
from minillm_core.train.document import document, taking_part
from minillm_core.train.ending import interrupted
from minillm_core.train.events import Evaluated, Resumed, Started
from minillm_core.train.evidence import Evidence
from minillm_core.train.feed import Feed
from minillm_core.train.held_out import hook_outside_training, validation
from minillm_core.train.hooks import observers_of
from minillm_core.train.job import Job
from minillm_core.train.loop import Loop
from minillm_core.train.meter import Meter
from minillm_core.train.metrics import METRICS, Metrics, cut
from minillm_core.train.position import Position
from minillm_core.train.progress import View, view
from minillm_core.train.record import Record
from minillm_core.train.restore import TOKENIZER
from minillm_core.train.resume import Earlier, go_on
from minillm_core.train.rewind import Rewind
from minillm_core.train.sample import sample
from minillm_core.train.saving import Saves
from minillm_core.train.signals import StopRequest
from minillm_core.train.suspects import suspects

__all__ = ["session"]

Say = Callable[[str], None]


def session(
    job: Job, out: Path, earlier: Earlier | None, *, resume: bool, stop: StopRequest, say: Say
) -> None:
    """Train in ``out``, which is ours alone.

    Args:
        job: what was checked.
        out: the run's folder, locked.
        earlier: the run that goes on; None: there was none.
        resume: a checkpoint that is there is gone on from.
        stop: ends it early.
        say: prints a line.

    Raises:
        MinillmError: how the run ended, where not as it should; run.json has its exit code.
    """
    for line in describe.start(job, out):
        say(line)
    sweep(out)
    if earlier is None and (kept := put_away(out)) is not None:
        say(f"checkpoints of no run that is known were there; they are kept in {kept.name}")
    position = go_on(out, earlier, job.trainer, say) if resume else Position()
    if position.saved is not None:  # a kill may have come between the last commit and this
        retain(out, job.config.checkpoint.keep)
    if job.initial is not None and position.saved is None:
        for line in job.initial.load(job.trainer):
            say(line)
    events = cut(out / METRICS, position.step)
    if job.corpus.tokenizer:
        job.corpus.tokenizer.save(out / TOKENIZER)
    evidence = Evidence.of(job, say)
    record = Record(out, document(job, earlier, position))
    try:
        evaluated, meter, position = _loop(job, out, position, events, evidence, stop, say)
    except BaseException as error:
        told = error
        if isinstance(error, KeyboardInterrupt):
            told = interrupted(out, stop, job.plugins)
        code = told.exit_code if isinstance(told, MinillmError) else 1
        try:
            record.update(exit=code)
        except OSError as another:  # the disk that ended the run: its error is the one to report
            say(f"warning: {record.path} could not be brought up to date: {another.strerror}")
        # after a failure of the device there may be nobody left to ask
        with suppress(Exception):
            record.update(plugins=taking_part(job, evidence))
        if told is error:
            raise
        raise told from None
    record.update(exit=0, plugins=taking_part(job, evidence))
    evidence.warn()
    for line in describe.end(job, out, evaluated, meter.overall(), position.step):
        say(line)
    stop.patient = False
    if not stop.requested:  # else somebody is in a hurry
        _show_sample(job, say)


def _loop(
    job: Job,
    out: Path,
    position: Position,
    events: Sequence[Mapping[str, Any]],
    evidence: Evidence,
    stop: StopRequest,
    say: Say,
) -> tuple[Evaluated | None, Meter, Position]:
    """Train from ``position`` to the end; the last evaluation, the speed, and where that is."""
    config, trainer = job.config, job.trainer
    last = _evaluations(events)[-1:]
    meter = Meter(
        flops_per_token=job.plan.estimate().flops_per_token,
        peak_flops=trainer.binding.peak_flops,
    )
    with ExitStack() as stack:
        metrics = stack.enter_context(Metrics(out / METRICS, every=config.log.every))
        shown: View = view(lambda: loop.progress, config.train.steps, say)
        stack.enter_context(watching(shown.say))
        feed = Feed(job, position.cursor or None, lambda: stop.requested)
        stack.enter_context(feed)
        observed = observers_of(job, [metrics, evidence, shown], say=shown.say)
        saves = None
        if config.checkpoint.every:
            writer = Writer(out, keep=config.checkpoint.keep)
            stack.callback(lambda: writer.close(now=stop.hurried))
            saves = Saves(
                out,
                trainer,
                writer,
                _constants(job),
                shown.say,
                go_on=config.checkpoint.on_error == "continue",
            )
        validate = validation(
            job,
            config.eval.tokens,
            cancelled=lambda: stop.requested,
            progress=shown.evaluating,
        )

        def evaluate(step: int) -> Evaluated | None:
            found = validate(step)
            last[:] = [found] if found else last
            return found

        loop = Loop(
            trainer,
            feed,
            job.plan.values,
            job.budget,
            observed,
            cadence=Cadence(config.eval.every, config.checkpoint.every),
            evaluate=evaluate,
            saves=saves,
            stop=stop,
            spike=config.train.spike,
            rewind=Rewind(out, trainer, feed, back=config.train.rewind, skip=config.train.skip),
            meter=meter,
            position=position,
            evaluated=last[0].step if last else None,
            contain=lambda: _told(job, lambda: loop.position.step + 1),
            at_work=at_work(job.plugins),
            say=shown.say,
        )
        stack.enter_context(shown)
        observed(
            Started(
                job.plan.hash,
                config.train.steps,
                job.plan.num_parameters,
                str(out),
                config.model_dump(mode="json"),
            )
        )
        if position.saved is not None:
            observed(
                Resumed(position.step, str(layout.folder(out, position.step).relative_to(out)))
            )
        stop.patient = True  # from here on there is something to finish
        loop.run(evaluate_first=_evaluation_is_due(job, position))
    return (last[0] if last else None), meter, loop.position


@contextmanager
def _told(job: Job, step: Callable[[], int]) -> Iterator[None]:
    """What plugins raise under their names, and what there was no memory for with advice."""
    try:
        with blaming(job.plugins, "in a step"):
            yield
    except NonFinite as error:
        names, found = suspects(job)
        error.where = "; ".join(filter(None, (error.where, found))) or None
        error.fix = not_finite(job.config.train, names)
        raise
    except (OutOfMemory, MemoryError) as error:
        peak = job.trainer.peak_bytes()
        raise out_of_memory(error, job.config.train, peak, step()) from error


def _evaluations(events: Sequence[Mapping[str, Any]]) -> list[Evaluated]:
    """The evaluations that earlier processes of the run made, up to where it goes on."""
    found = [e for e in events if e.get("event") == Evaluated.event and e["val_loss"] is not None]
    return [Evaluated(e["step"], e["val_loss"], e["bits_per_byte"]) for e in found]


def _evaluation_is_due(job: Job, position: Position) -> bool:
    """Whether a step that was saved is one to evaluate after; the loop knows whether it was."""
    return position.step > 0 and Cadence(job.config.eval.every).evaluates(position.step)


def _constants(job: Job) -> dict[str, Any]:
    """What every checkpoint of the run says beside its position."""
    return {
        "seed": job.config.seed,
        "plan_hash": job.plan.hash,
        "fingerprint": job.corpus.fingerprint,
    }


def _show_sample(job: Job, say: Say) -> None:
    if job.corpus.tokenizer is None:
        return
    try:
        with blaming(job.plugins, "in the closing sample"):
            text = sample(
                job.trainer,
                job.corpus.tokenizer,
                context=job.config.train.seq_len,
                seed=job.config.seed,
                on_batch=hook_outside_training(job),
            )
    except (PluginCodeError, NonFinite) as error:  # the run is over and recorded
        say(f"warning: no sample of what it writes: {error}")
        return
    except KeyboardInterrupt:  # the run is over and recorded; only this is cut short
        return
    say("a sample of what it writes:")
    say("\n".join(f"  | {line}" for line in text.splitlines()) or "  (nothing)")
