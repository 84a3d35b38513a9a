"""kill -9 of a run with each plugin of the repository, a resume, and a bitwise equal end.

    python -m benchmarks.plugins_killed [--tried 1] [--once] [--sample N] [--backend torch|mlx|both] [--seed S]

A trial is a run of 24 steps with one plugin and its requirements, or with all at once: killed at a
random moment after a checkpoint exists, the 4th step's or a later one's, then resumed to its end and
compared with an uninterrupted run. Plugins are found through their entry points, each in the
forms with different code; forms that cannot run on this machine are listed with the reason.
"""

from __future__ import annotations

import json
import random
import signal
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.trials.bench import Row, backends_of, each, finish, parser, workshop
from benchmarks.trials.compare import broken, differences, newest_step
from benchmarks.trials.forked import import_all, modules_of
from benchmarks.trials.tiny_run import EVERY, STEPS, TinyRun
from tools.every_plugin import SPARSE, all_at_once, forms, together

ATTEMPTS = 20  # to kill a run before it ends
TOGETHER = "all at once"


@dataclass(frozen=True)
class Trial:
    """One run with plugins, to be killed."""

    plugin: str  # or TOGETHER
    options: str  # "gains=true"
    run: TinyRun
    number: int
    seed: int

    @property
    def name(self) -> str:
        """Name of its folders."""
        return f"{self.plugin.replace(' ', '_')}-{self.run.backend}-{self.number}"


@dataclass
class Outcome:
    """The result of a trial."""

    resumed_from: int = 0  # a step
    wrong: tuple[str, ...] = ()


def survive(trial: Trial) -> Outcome:
    """Run, run again and kill, resume, compare."""
    rng = random.Random(f"{trial.seed} {trial.name}")
    run, outcome = trial.run, Outcome()
    whole, out = (run.folder / f"{trial.name}-{end}" for end in ("whole", "killed"))
    try:
        _kill(trial, out, rng, _between_checkpoints(trial, whole))
        outcome.resumed_from = newest_step(out)
        outcome.wrong += tuple(broken(out))
        _ended(trial, run.start(out, resume=True, bare=True).wait())
        outcome.wrong += tuple(differences(whole, out))
    except Exception as error:
        outcome.wrong += (f"{type(error).__name__}: {error}",)
    for folder in (whole, out):
        run.tidy(folder, keep=bool(outcome.wrong))
    return outcome


def _between_checkpoints(trial: Trial, out: Path) -> float:
    """Run without disturbance; return the seconds between its checkpoints.

    The time before the first one is excluded: with MLX most of a run is its plan and its first step,
    and a kill after a fraction of that would be after the end.
    """
    child = trial.run.start(out)
    while child.poll() is None and not newest_step(out):
        time.sleep(0.0005)
    began = time.perf_counter()
    _ended(trial, child.wait())
    return (time.perf_counter() - began) * EVERY / (STEPS - EVERY)


def _kill(trial: Trial, out: Path, rng: random.Random, seconds: float) -> None:
    """Create a run that was killed after its first checkpoint and before its last.

    Run times vary on a busy machine: each attempt waits half as long.

    Raises:
        RuntimeError: it ended otherwise, or each time before its kill.
    """
    for attempt in range(ATTEMPTS):
        after = rng.randrange(EVERY, STEPS, EVERY)
        child = trial.run.start(out)
        while child.poll() is None and newest_step(out) < after:
            time.sleep(0.0005)
        time.sleep(rng.uniform(0, seconds / 2**attempt))
        code = child.kill()
        if code == -signal.SIGKILL and newest_step(out) < STEPS:
            return
        if code not in (0, -signal.SIGKILL):
            raise RuntimeError(f"a run that should have been killed ended with {code}")
        trial.run.tidy(out, keep=False)
    raise RuntimeError(f"it ended {ATTEMPTS} times before its kill")


def _ended(trial: Trial, code: int) -> None:
    if code:
        raise RuntimeError(f"a run with {trial.plugin} ended with {code}")


def trials(
    folder: Path, backends: list[str], tried: int, seed: int, *, once: bool = False
) -> list[Trial]:
    """Return each form of each plugin, and all plugins at once, on each backend.

    ``once``: forms of the run of all at once are tried in that run only, the others on one backend each,
    by turns.
    """
    elsewhere = together() if once else ()
    chosen = [
        form
        for form in forms()
        if not form.left_out and form.name not in SPARSE and form not in elsewhere
    ]
    sets = [(form.name, form.given, form.names, form.settings) for form in chosen]
    names, settings = all_at_once()
    sets += [(TOGETHER, "", tuple(name for name in names if name not in SPARSE), settings)]
    made = []
    for backend in backends:
        for place, (plugin, options, names, settings) in enumerate(sets):
            turn = backends[(place + seed) % len(backends)]
            if once and plugin != TOGETHER and turn != backend:
                continue
            typed = tuple(f"{key}={value}" for key, value in settings.items())
            run = TinyRun(folder, backend, ",".join(names), typed)
            numbers = range(place * tried, (place + 1) * tried)
            made += [Trial(plugin, options, run, number, seed) for number in numbers]
    return made


def warm(run: TinyRun) -> None:
    """Import the modules of a run with all plugins, so that child processes need not."""
    modules = run.folder / "modules.json"
    scout = run.folder / f"scout-{run.backend}"
    code = run.start(scout, steps=EVERY, last=partial(modules_of, modules)).wait()
    if code:
        raise RuntimeError(f"a run with all plugins ended with {code}:\n{run.said(scout)}")
    import_all(json.loads(modules.read_text()))


Cells = dict[str, dict[str, list[dict[str, Any]]]]
"""Plugin -> backend -> its trials."""


def attempt(planned: list[Trial], jobs: int) -> tuple[list[Row], Cells]:
    """Run all trials; return a row for each backend, and each result."""
    found: dict[str, Row] = {}
    cells: Cells = {}
    names: dict[str, set[str]] = {}  # of the plugins in runs of a backend
    for one in planned:
        what, backend = f"kill -9 with each plugin, {one.run.backend}", one.run.backend
        names.setdefault(backend, set()).update(one.run.plugins.split(","))
        found.setdefault(backend, Row(what)).facts["plugins"] = len(names[backend])
        cells.setdefault(one.plugin, {}).setdefault(backend, [])
    for trial, outcome in each(survive, planned, jobs):
        row, cell = found[trial.run.backend], cells[trial.plugin][trial.run.backend]
        row.tried += 1
        row.ended += 1
        row.detected += outcome.resumed_from > 0
        row.bit_equal += not outcome.wrong
        cell.append(
            {
                "options": trial.options,
                "resumed_from": outcome.resumed_from,
                "equal": not outcome.wrong,
            }
        )
        if outcome.wrong:
            row.fail(f"--seed {trial.seed}: {trial.name}", outcome.wrong[:3])
    return list(found.values()), cells


def main() -> int:
    options = parser(__doc__, both=True)
    options.add_argument("--tried", type=int, default=1, help="trials of each form and backend")
    options.add_argument(
        "--once",
        action="store_true",
        help="try each form once: in the run of all at once, or alone on one of the backends by turns",
    )
    options.add_argument("--only", metavar="NAME", help="one plugin, or 'all at once'")
    options.add_argument(
        "--sample", type=int, help="only so many of the trials with one plugin, drawn at random"
    )
    given = options.parse_args()
    left_out = {form.name: form.left_out for form in forms() if form.left_out}
    backends = backends_of(given)
    with workshop(given) as folder:
        for name, why in left_out.items():
            print(f"{name} is left out: {why}", flush=True)
        planned = trials(folder, backends, given.tried, given.seed, once=given.once)
        for backend in backends:
            together = (one.run for one in planned if one.plugin == TOGETHER)
            warm(next(run for run in together if run.backend == backend))
        if given.only:
            planned = [one for one in planned if one.plugin == given.only]
        if given.sample:
            single = [one for one in planned if one.plugin != TOGETHER]
            kept = random.Random(given.seed).sample(single, min(given.sample, len(single)))
            planned = [one for one in planned if one.plugin == TOGETHER or one in kept]
        rows, cells = attempt(planned, given.jobs)
        return finish("plugins_killed", rows, given, plugins=cells, left_out=left_out)


if __name__ == "__main__":
    raise SystemExit(main())
