"""kill -9 at random moments, each with a resume, and a bitwise equal end.

    python -m benchmarks.kills --train 200 --save 200 [--backend torch|mlx|both] [--seed S]

A trial is a run of a third of a second on a CPU that is killed once, twice or three times and then
resumed to its end. ``train``: at a moment that is uniform over the run. ``save``: inside a save;
every other time before the k-th access to the checkpoints (an audit hook: open, mkdir, rename,
remove; also those of retention and of the clean-up at the start), else at a moment that is uniform over
the time of a save, counted from the creation of its temporary folder. A run that ended before its kill is
repeated. After each kill every checkpoint under a final name must verify, and the newest must not be older
than the last one recorded in metrics.jsonl.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from benchmarks.trials.bench import Row, backends_of, each, finish, parser, workshop
from benchmarks.trials.compare import broken, differences, newest_step, state
from benchmarks.trials.reference import Reference, make_reference, watch_checkpoints
from benchmarks.trials.tiny_run import TinyRun

ATTEMPTS = 100  # to kill a run before it ends
LIVES = (1, 1, 1, 2, 3)  # numbers of kills in a trial, one drawn


@dataclass(frozen=True)
class Trial:
    """One run to be killed."""

    mode: str  # train or save
    reference: Reference
    number: int
    seed: int

    @property
    def name(self) -> str:
        """Its name for --only."""
        return f"{self.mode}-{self.reference.run.backend}-{self.number}"


@dataclass
class Outcome:
    """The result of a trial."""

    kills: int = 0
    too_late: int = 0  # runs that ended before their kill
    found: list[str] = field(default_factory=list)  # after each kill: none, whole, corrupt
    resumed_from: list[int] = field(default_factory=list)  # steps
    wrong: list[str] = field(default_factory=list)
    equal: bool = False


def survive(trial: Trial) -> Outcome:
    """Kill, resume, compare."""
    rng = random.Random(f"{trial.seed} {trial.name}")
    run = trial.reference.run
    out, outcome = run.folder / trial.name, Outcome()
    try:
        _kill_some(trial, out, rng, outcome)
        known = (out / "run.json").exists()
        code = run.start(out, resume=True, bare=known and rng.random() < 0.5).wait()
        if code:
            outcome.wrong.append(f"the last resume ended with {code}")
        else:
            outcome.wrong += (different := differences(trial.reference.out, out))
            outcome.equal = not different
    except Exception as error:
        outcome.wrong.append(f"{type(error).__name__}: {error}")
    run.tidy(out, keep=bool(outcome.wrong))
    return outcome


def _kill_some(trial: Trial, out: Path, rng: random.Random, outcome: Outcome) -> None:
    run, wanted = trial.reference.run, rng.choice(LIVES)
    timed = rng.random() < 0.5
    while outcome.kills < wanted:
        if outcome.too_late > ATTEMPTS:
            raise RuntimeError(f"it ended {ATTEMPTS} times before its kill")
        resume = outcome.kills > 0
        kill = at_any_time if trial.mode == "train" else at_a_moment if timed else at_a_touch
        code = kill(trial.reference, out, resume, rng)
        if code == -signal.SIGKILL:
            outcome.kills += 1
            outcome.found.append(state(out))
            outcome.resumed_from.append(newest_step(out))
            outcome.wrong += broken(out)
        elif code:
            raise RuntimeError(f"a run that should have been killed ended with {code}")
        elif resume:
            return
        else:
            outcome.too_late += 1
            run.tidy(out, keep=False)


Killer = Callable[[Reference, Path, bool, random.Random], int]


def at_any_time(reference: Reference, out: Path, resume: bool, rng: random.Random) -> int:
    """Draw a moment uniformly over the duration of a run; a resumed one may end earlier."""
    moment = rng.uniform(0, reference.seconds * 1.1)
    child = reference.run.start(out, resume=resume)
    child.wait_until(moment)
    return child.kill()


def at_a_touch(reference: Reference, out: Path, resume: bool, rng: random.Random) -> int:
    """Kill before the k-th access to the checkpoints, in the run itself."""
    k = rng.randint(1, reference.touches)

    def die(number: int) -> None:
        if number == k:
            os.kill(os.getpid(), signal.SIGKILL)

    first = partial(watch_checkpoints, out, die)
    return reference.run.start(out, resume=resume, first=first).wait()


def at_a_moment(reference: Reference, out: Path, resume: bool, rng: random.Random) -> int:
    """Kill within the time of a save, counted from the j-th new temporary folder."""
    j = rng.randint(1, reference.saves)
    delay = rng.uniform(0, reference.save_seconds)
    seen: set[str] = set(_temporary(out))
    before = len(seen)
    child = reference.run.start(out, resume=resume)
    while child.poll() is None:
        seen.update(_temporary(out))
        if len(seen) >= before + j:
            time.sleep(delay)
            return child.kill()
        time.sleep(0.0003)
    return child.wait()


def _temporary(out: Path) -> list[str]:
    try:
        return [name for name in os.listdir(out / "checkpoints") if ".tmp-" in name]
    except FileNotFoundError:
        return []


def rows(trials: list[Trial], jobs: int) -> list[Row]:
    """Run all trials; return a row for each mode and backend."""
    found: dict[str, Row] = {}
    for trial, outcome in each(survive, trials, jobs):
        what = f"kill -9 in {'training' if trial.mode == 'train' else 'a save'}, {trial.reference.run.backend}"
        row = found.setdefault(what, Row(what, facts={"kills": 0, "whole": 0, "none": 0}))
        row.tried += 1
        row.ended += 1
        row.detected += "corrupt" not in outcome.found and len(outcome.found) == outcome.kills > 0
        row.bit_equal += outcome.equal
        row.count("kills", outcome.kills)
        for one in outcome.found:
            row.count(one)
        row.count("ended before", outcome.too_late)
        if outcome.wrong:
            row.fail(f"--seed {trial.seed} --only {trial.name}", outcome.wrong)
    return [found[what] for what in sorted(found)]


def main() -> int:
    options = parser(__doc__, both=True)
    options.add_argument("--train", type=int, default=50, help="trials killed in training")
    options.add_argument("--save", type=int, default=50, help="trials killed in a save")
    options.add_argument("--plugins", default="", help="as for minillm train")
    options.add_argument("--only", help="one trial by its name, such as save-torch-7")
    given = options.parse_args()
    with workshop(given) as folder:
        run = TinyRun(folder, plugins=given.plugins)
        references = [
            make_reference(replace(run, backend=backend)) for backend in backends_of(given)
        ]
        for one in references:
            print(
                f"{one.run.backend}: {one.seconds:.2f} s a run, {one.saves} saves of "
                f"{1000 * one.save_seconds:.0f} ms, {one.touches} touches",
                flush=True,
            )
        trials = [
            Trial(mode, references[n % len(references)], n, given.seed)
            for mode, many in (("train", given.train), ("save", given.save))
            for n in range(many)
        ]
        if given.only:
            trials = [trial for trial in trials if trial.name == given.only]
        return finish("kills", rows(trials, given.jobs), given, plugins=given.plugins)


if __name__ == "__main__":
    raise SystemExit(main())
