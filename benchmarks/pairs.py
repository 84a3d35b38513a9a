"""Trainers started at once on one folder: exactly one runs, and its death frees the folder.

    python -m benchmarks.pairs --tried 20 [--backend torch|mlx] [--seed S]

Two processes (every fifth time eight) wait at a barrier and are released together, on a new folder
or, every other time, on an interrupted run, with ``--resume``. The first to get the folder is
stopped (SIGSTOP), so that it is alive when the others check. They must
exit with 2 and name its process id; one that is so late that it finds a run.json instead is referred
to --resume, and that must name the owner. The owner is then killed with -9 and a ``--resume`` is started at the
same moment: it must run, and end bitwise equal to an undisturbed run. If the owner ended before it
could be stopped, on a busy machine, the trial proves nothing and is repeated.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.trials.bench import Row, each, finish, parser, workshop
from benchmarks.trials.compare import differences, newest_step
from benchmarks.trials.forked import Child
from benchmarks.trials.reference import Reference, make_reference
from benchmarks.trials.tiny_run import TinyRun
from minillm_core.checkpoint.lock import LOCK

CROWD = 8
AGAIN = 5  # maximum repetitions of a trial that proves nothing


class TooLateError(Exception):
    """The first trainer ended before the others checked."""


@dataclass(frozen=True)
class Trial:
    """One start of several trainers."""

    reference: Reference
    number: int
    seed: int

    @property
    def many(self) -> int:
        """The number of concurrent trainers."""
        return CROWD if self.number % 5 == 4 else 2

    @property
    def resume(self) -> bool:
        """Whether there is a run to resume."""
        return self.number % 2 == 1


@dataclass
class Outcome:
    """The result of a trial."""

    refused: int = 0  # exit 2, the owner named
    killed: bool = False  # the owner, before its end
    equal: bool = False
    wrong: list[str] = field(default_factory=list)


def tried(trial: Trial) -> Outcome:
    """Run a trial, repeating it until it proves something."""
    for _ in range(AGAIN):
        with suppress(TooLateError):
            return start_together(trial)
    return Outcome(wrong=[f"{AGAIN} times the first one had ended before it could be stopped"])


def start_together(trial: Trial) -> Outcome:
    """Start trainers, check the refused ones, kill the owner, resume.

    Raises:
        TooLateError: the owner ended before it could be stopped.
    """
    rng = random.Random(f"{trial.seed} {trial.number}")
    run, outcome = trial.reference.run, Outcome()
    out = run.folder / f"pair-{trial.number}"
    try:
        if trial.resume:
            _broken_off(trial.reference, out, rng)
        children = _let_go(run, out, trial)
        winner = _only_one(children, run, out, outcome)
        if winner is not None:
            outcome.killed = winner.kill() == -signal.SIGKILL
            if code := run.start(out, resume=True).wait():
                outcome.wrong.append(f"the next start ended with {code}: {run.said(out)[-300:]}")
            else:
                outcome.wrong += (different := differences(trial.reference.out, out))
                outcome.equal = not different
    except TooLateError:
        raise
    except Exception as error:
        outcome.wrong.append(f"{type(error).__name__}: {error}")
    finally:
        shutil.rmtree(out, ignore_errors=True)
    return outcome


def _broken_off(reference: Reference, out: Path, rng: random.Random) -> None:
    """Create a run with a checkpoint and without an end."""
    while not newest_step(out):
        shutil.rmtree(out, ignore_errors=True)
        child = reference.run.start(out)
        child.wait_until(reference.seconds * rng.uniform(0.5, 0.7))
        child.kill()


def _let_go(run: TinyRun, out: Path, trial: Trial) -> list[tuple[Child, Path]]:
    """Start trainers that wait for each other, with the output of each."""
    held, barrier = os.pipe()

    def wait() -> None:
        os.close(barrier)
        os.read(held, 1)  # returns when the last writer has closed it

    children = []
    for number in range(trial.many):
        log = run.folder / f"{out.name}-{number}.log"
        children.append((run.start(out, resume=trial.resume, first=wait, log=log), log))
    os.close(held)
    time.sleep(0.02)  # all of them are at the barrier
    os.close(barrier)
    return children


def _only_one(
    children: list[tuple[Child, Path]], run: TinyRun, out: Path, outcome: Outcome
) -> Child | None:
    """Wait until one is left; the others must have been refused with its process id."""
    running = [child for child, _ in children]
    deadline, stopped = time.perf_counter() + 60, None
    while len(running) > 1 and time.perf_counter() < deadline:
        running = [child for child in running if child.poll() is None]
        # the file may still name the one killed to create the interrupted run
        if stopped is None and (owner := _owner(out)) in {child.pid for child in running}:
            os.kill(owner, signal.SIGSTOP)
            stopped = owner
        time.sleep(0.0005)
    said = {child: log.read_text(errors="replace") for child, log in children}
    for _, log in children:
        log.unlink()
    codes = [child.code for child in said]
    winners = [child for child in said if child.code in (None, 0)]
    if len(winners) > 1 and stopped is None:
        for child in running:
            child.kill()
        raise TooLateError
    if len(winners) != 1:
        outcome.wrong.append(f"{len(winners)} of {len(children)} ran: exit codes {codes}")
        for child in running:
            child.kill()
        return None
    for child, text in said.items():
        if child is winners[0]:
            continue
        if child.code == 2 and "holds a run already" in text:
            child, text = _as_it_was_told(run, out)
        if child.code == 2 and re.search(rf"\b{winners[0].pid}\b", text):
            outcome.refused += 1
        else:
            outcome.wrong.append(
                f"a loser ended with {child.code} and did not name {winners[0].pid}: {text[-300:]}"
            )
    return winners[0]


def _as_it_was_told(run: TinyRun, out: Path) -> tuple[Child, str]:
    """Run --resume, as suggested to a trainer that found a run.json; return its end and its message."""
    log = run.folder / f"{out.name}-again.log"
    child = run.start(out, resume=True, log=log)
    child.wait()
    text = log.read_text(errors="replace")
    log.unlink()
    return child, text


def _owner(out: Path) -> int | None:
    """Return the process named in lock.json; None until there is one."""
    try:
        return json.loads((out / LOCK).read_bytes())["pid"]
    except (OSError, ValueError, KeyError):
        return None


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--tried", type=int, default=20)
    given = options.parse_args()
    with workshop(given) as folder:
        reference = make_reference(TinyRun(folder, given.backend))
        trials = [Trial(reference, number, given.seed) for number in range(given.tried)]
        found = {
            resume: Row(f"trainers at once on {'a run to resume' if resume else 'a new folder'}")
            for resume in (False, True)
        }
        for trial, outcome in each(tried, trials, given.jobs):
            row = found[trial.resume]
            row.tried += 1
            row.ended += 1
            row.detected += outcome.refused == trial.many - 1
            row.bit_equal += outcome.equal
            row.count("refused", outcome.refused)
            row.count("owners killed", outcome.killed)
            if outcome.wrong:
                row.fail(f"trial {trial.number}", outcome.wrong)
        return finish("pairs", list(found.values()), given, backend=given.backend)


if __name__ == "__main__":
    raise SystemExit(main())
