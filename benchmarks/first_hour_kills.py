"""kill -9 of the default run, ``minillm train`` without settings, at random moments.

    python -m benchmarks.first_hour_kills --kills 50 --jobs 8 [--per-run 5] [--seed S]

A trial is one such run: its moments are uniform over its steps, it is killed at each and resumed,
and its end must be bitwise equal to that of an uninterrupted run. The cost of a kill is the number of
repeated steps: those of metrics.jsonl beyond the newest checkpoint.
Each run has two dedicated cores, if there are enough, and two threads; no GPU is visible.
``--setting`` gives the runs a setting anyway, such as a smaller model for trying this out.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.trials.bench import Row, each, finish, parser, workshop
from benchmarks.trials.compare import CLOCK, MEASURED, broken, events, identical, newest_step
from minillm_core.checkpoint.read import newest

THREADS = 2
LIMIT = 3600.0  # timeout in seconds of a process of the run


@dataclass(frozen=True)
class Trial:
    """One run to be killed, and resumed to its end."""

    folder: Path  # of the runs and their cache
    settings: tuple[str, ...]
    jobs: int
    number: int
    seed: int
    kills: int

    @property
    def out(self) -> Path:
        """The run's folder."""
        return self.folder / f"run-{self.number}"


@dataclass
class Outcome:
    """The result: for each kill the newest step before it and the step resumed from."""

    kills: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


def start(trial: Trial, *, resume: bool = False) -> subprocess.Popen[bytes]:
    """Start a process of the run, on dedicated cores."""
    cores = sorted(os.sched_getaffinity(0))
    identity = multiprocessing.current_process()._identity or (1,)
    first = (identity[0] - 1) % trial.jobs * THREADS
    own = cores[first : first + THREADS] if len(cores) >= trial.jobs * THREADS else cores
    given = ["--resume"] if resume else list(trial.settings)
    pinned = ["taskset", "-c", ",".join(map(str, own))]
    command = [*pinned, sys.executable, "-m", "minillm_core", "train", "--out", str(trial.out)]
    environment = {
        **os.environ,
        "MINILLM_CACHE": str(trial.folder / "cache"),
        "OMP_NUM_THREADS": str(THREADS),
        "CUDA_VISIBLE_DEVICES": "",
    }
    with trial.out.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            [*command, *given], env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )


def made(out: Path) -> int:
    """Return the newest step in metrics.jsonl."""
    return max((event["step"] for event in events(out, "step")), default=0)


def to_its_end(child: subprocess.Popen[bytes], trial: Trial) -> None:
    """Wait for the end of a process.

    Raises:
        RuntimeError: its exit code is not 0.
    """
    if code := child.wait(LIMIT):
        said = trial.out.with_suffix(".log").read_text(errors="replace")
        raise RuntimeError(f"a run ended with {code}:\n{said[-2000:]}")


def survive(trial: Trial) -> Outcome:
    """Kill at each moment, resume, compare."""
    rng, outcome = random.Random(f"{trial.seed} {trial.number}"), Outcome()
    reference, began = trial.folder / "run-0", time.perf_counter()
    total = made(reference)
    try:
        child = start(trial)
        for moment in sorted(rng.uniform(0, total) for _ in range(trial.kills)):
            if not _kill_at(child, trial, moment, rng):
                break  # it ended between the last check and the kill
            reached, kept = made(trial.out), newest_step(trial.out)
            outcome.kills.append({"moment": moment, "made": reached, "resumed_from": kept})
            outcome.wrong += broken(trial.out)
            child = start(trial, resume=True)
        to_its_end(child, trial)
        outcome.wrong += _differences(reference, trial.out)
    except Exception as error:
        outcome.wrong.append(f"{type(error).__name__}: {error}")
    outcome.seconds = time.perf_counter() - began
    return outcome


def _kill_at(
    child: subprocess.Popen[bytes], trial: Trial, moment: float, rng: random.Random
) -> bool:
    """Kill a process after this many steps; return whether it was still running."""
    end, seen = time.perf_counter() + LIMIT, []
    while child.poll() is None and time.perf_counter() < end:
        if made(trial.out) >= int(moment):
            time.sleep((moment % 1) * (statistics.median(seen) if seen else 0.1) * rng.random())
            child.kill()
            child.wait()
            return True
        times = [event["step_seconds"] for event in events(trial.out, "step")[-20:]]
        seen = times or seen
        time.sleep(0.05)
    return False


def _differences(reference: Path, out: Path) -> Iterator[str]:
    """List the differences between the run's end and the reference's; empty: bitwise equal."""
    wanted, found = newest(reference), newest(out)
    if wanted is None or found is None or wanted.step != found.step:
        yield f"the last checkpoint is {found}, not {wanted}"
        return
    a, b = wanted.arrays(), found.arrays()
    yield from (f"{name} is in one of them alone" for name in sorted(a.keys() ^ b.keys()))
    yield from (f"{n} differs" for n in sorted(a.keys() & b.keys()) if not identical(a[n], b[n]))
    for name in sorted(wanted.scalars.keys() - CLOCK):
        if wanted.scalars[name] != found.scalars.get(name):
            yield f"{name} is {found.scalars.get(name)}, not {wanted.scalars[name]}"
    for kind in ("step", "eval"):
        one, other = (
            [{k: v for k, v in event.items() if k not in MEASURED} for event in events(each, kind)]
            for each in (reference, out)
        )
        if one != other:
            yield f"{kind} events differ"


def rows(trials: list[Trial], total: int, jobs: int) -> tuple[Row, list[dict[str, Any]]]:
    """Run all trials; return one row, and every kill."""
    row, kills = Row("kill -9 of the default run"), []
    for trial, outcome in each(survive, trials, jobs):
        shares = [(kill["made"] - kill["resumed_from"]) / total for kill in outcome.kills]
        kills += [
            {"run": trial.number, "lost": share, **kill}
            for kill, share in zip(outcome.kills, shares, strict=True)
        ]
        row.tried += 1
        row.ended += 1
        row.detected += all(share <= 0.1 for share in shares)
        row.bit_equal += not outcome.wrong
        row.count("kills", len(shares))
        if outcome.wrong:
            row.fail(f"--seed {trial.seed}, run {trial.number}", outcome.wrong[:1])
    return row, kills


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--kills", type=int, default=50, help="in all")
    options.add_argument("--per-run", type=int, default=5, help="kills of one run")
    options.add_argument("--setting", action="append", default=[], metavar="KEY=VALUE")
    given = options.parse_args()
    with workshop(given) as folder:
        runs = -(-given.kills // given.per_run)
        trials = [
            Trial(
                folder,
                tuple(given.setting),
                given.jobs,
                number,
                given.seed,
                min(given.per_run, given.kills - (number - 1) * given.per_run),
            )
            for number in range(1, runs + 1)
        ]
        untouched = Trial(folder, tuple(given.setting), given.jobs, 0, given.seed, 0)
        began = time.perf_counter()
        to_its_end(start(untouched), untouched)
        total, seconds = made(untouched.out), time.perf_counter() - began
        saves = [event["seconds"] for event in events(untouched.out, "save")]
        print(
            f"{total} steps in {seconds:.0f} s, {len(saves)} saves of "
            f"{statistics.median(saves):.2f} s",
            flush=True,
        )
        row, kills = rows(trials, total, given.jobs)
        shares = [kill["lost"] for kill in kills] or [0.0]
        row.facts |= {"most lost": max(shares), "mean lost": statistics.fmean(shares)}
        figures = {
            "steps": total,
            "run_seconds": round(seconds, 1),
            "saves": len(saves),
            "save_seconds": statistics.median(saves),
            "settings": given.setting,
            "threads": THREADS,
            "kills": kills,
            "share_lost": {"max": max(shares), "mean": statistics.fmean(shares)},
        }
        return finish("first_hour_kills", [row], given, **figures)


if __name__ == "__main__":
    raise SystemExit(main())
