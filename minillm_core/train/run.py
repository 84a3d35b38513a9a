"""The whole job of ``minillm train``: check, take OUT, and train in it (``minillm_core.train.session``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from minillm_core.backends.base import Backend
from minillm_core.backends.detect import Detected
from minillm_core.checkpoint import lock
from minillm_core.config.load import Loaded
from minillm_core.errors import Stopped
from minillm_core.plan import Plan
from minillm_core.plugins.manager import LoadedPlugin
from minillm_core.train.ending import interrupted, resume_line
from minillm_core.train.job import check
from minillm_core.train.record import RUNS, claim_out, refuse_taken
from minillm_core.train.restore import recorded
from minillm_core.train.resume import Earlier, finished
from minillm_core.train.session import session
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
    earlier = None
    if resume and out is not None and (record := recorded(out)) is not None:
        earlier = Earlier(out, record)
    with stop_on_signals(patient=False) as stop:
        try:
            job = check(
                loaded,
                plugins,
                detected,
                out=out,
                runs=runs,
                cache=cache,
                earlier=earlier,
                resume=resume,
                create=create,
            )
            if earlier is not None and (place := finished(earlier, job.budget)) is not None:
                say(f"{earlier.out} is finished: {place}")
                return 0
            out = claim_out(job.config.preset, out, runs=runs, resume=resume)
            with lock(out, say):
                if not resume:
                    refuse_taken(out)  # by a run that began and ended since it was looked at
                session(job, out, earlier, resume=resume, stop=stop, say=say)
        except KeyboardInterrupt:
            raise interrupted(out, stop, plugins) from None
        except Stopped as error:
            error.fix = resume_line(out, plugins) if out is not None else None
            raise
    return 0
