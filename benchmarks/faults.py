"""Plugin faults in every place where plugin code runs, and their effects on the run.

    python -m benchmarks.faults [--hang 60] [--steps 28] [--only on_batch-hang] [--backend torch|mlx]

A trial is a run of a third of a second on a CPU that resumes from a checkpoint of step 8 with a
plugin (benchmarks/trials/faulty.py) that has one fault, then once more with the fixed
plugin. A hang lasts to its end; ``signal`` is the same hang, ended by Ctrl-C.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from argparse import Namespace
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.trials.bench import Row, each, finish, parser, workshop
from benchmarks.trials.compare import differences, newest_step, state
from benchmarks.trials.forked import Child, import_all, modules_of
from benchmarks.trials.tiny_run import TinyRun

NAME, VERSION = "faulty", "minillm-faulty 1.0"
BEFORE, AFTER = 8, 28  # steps of the existing run, and of the resumed run
PLANNING = (
    *("import", "class", "build_attention", "build_model", "compute_loss"),
    *("optimizer_factory", "kernel_provider", "build_data", "accepts"),
)
RUNNING = ("on_batch", "on_event", "forward", "stage", "kernel")
PLACES = (*PLANNING, *RUNNING)
KINDS = (
    *("exception", "interrupt", "exit", "wrong type", "mutated", "non-finite", "hang", "signal"),
)
HOOKS = {
    "class": "import",
    "forward": "Gate.forward",
    "stage": "scaled",
    "kernel": "swiglu",
}
"""Place -> its name in the program's messages, if it differs."""
NONE = {
    *(("import", "mutated"), ("class", "mutated"), ("import", "non-finite")),
    *(("class", "non-finite"), ("kernel_provider", "non-finite"), ("build_data", "non-finite")),
    *(("on_event", "non-finite"), ("accepts", "mutated"), ("accepts", "non-finite")),
}
"""Places without arguments, or without a numeric result."""
UNSEEN = {("forward", "mutated"), ("stage", "mutated"), ("kernel", "mutated")}
"""MLX does not count in-place writes to an array."""
RAISED = {"exception", "interrupt", "exit"}


@dataclass(frozen=True)
class Trial:
    """One place and kind of fault; ``hang`` in seconds, ``steps`` of the resumed run."""

    run: TinyRun
    place: str
    kind: str
    hang: float
    steps: int

    @property
    def name(self) -> str:
        """``on_batch-hang``."""
        return f"{self.place}-{self.kind.replace(' ', '_')}"


@dataclass
class Outcome:
    """The result of a trial.

    Attributes:
        place, kind: of the trial.
        code: the program's exit code.
        seconds: until its end, counted from the signal if there is one.
        plugin, version, hook, step: whether the message names each; None: not applicable,
            such as the step before the first one.
        reported: number of lines printed during the hang.
        kept: the newest checkpoint's step, if all verify; else -1.
        mended: the exit code of the run without the fault, from that checkpoint.
        equal: that run's state and losses are bitwise equal to an undisturbed run's; after
            exit 5, whose steps were skipped, that it finished.
        said: the first line about the fault.
    """

    place: str
    kind: str
    code: int
    seconds: float
    plugin: bool | None
    version: bool | None
    hook: bool | None
    step: bool | None
    reported: int
    kept: int
    mended: int
    equal: bool
    said: str

    def wrong(self) -> list[str]:
        """List what is wrong."""
        found = []
        if self.code not in expected(self.place, self.kind):
            found.append(f"exit {self.code}, not {sorted(expected(self.place, self.kind))}")
        found += [
            f"{what} is not named"
            for what in ("plugin", "version", "hook", "step")
            if getattr(self, what) is False
        ]
        if self.kept < BEFORE:
            found.append(f"newest checkpoint {self.kept}")
        if self.mended or not self.equal:
            found.append(f"mended: exit {self.mended}, {'' if self.equal else 'not '}equal")
        if self.kind in ("hang", "signal") and not self.reported:
            found.append("nothing was said while it hung")
        if self.kind == "signal" and self.seconds > 8:
            found.append(f"{self.seconds:.0f} s from Ctrl-C to the end")
        return found


def expected(place: str, kind: str) -> set[int]:
    """Return the allowed exit codes; only 0 where the run must finish."""
    if kind == "hang":
        return {0}
    if kind == "signal":
        return {75} if place in RUNNING else {75, 130}
    if place == "on_event":
        return {0}
    if kind in RAISED:
        return {3}
    if kind == "non-finite":
        return {2} if place in PLANNING else {3} if place == "on_batch" else {5}
    return {2, 3} if place in PLANNING else {3}


def try_it(trial: Trial) -> Outcome:
    """Resume with the faulty plugin, and then with the fixed one."""
    out, site = trial.run.folder / trial.name, trial.run.folder / f"site-{trial.name}"
    shutil.copytree(trial.run.folder / "base", out)
    install(site, trial)
    child = start(trial.run, out, site, trial.steps)
    began = time.perf_counter()
    if trial.kind == "signal":
        began = interrupt(trial, out, child)
    code = child.wait(trial.hang + 60)
    seconds = time.perf_counter() - began
    said = trial.run.said(out).replace(f"{trial.run.folder}{os.sep}", "")
    kept = newest_step(out) if state(out) == "whole" else -1
    install(site, None)
    mended = start(trial.run, out, site, trial.steps).wait()
    different = differences(trial.run.folder / "reference", out) if mended == 0 else ["no end"]
    shutil.rmtree(site)
    shutil.rmtree(out)
    return outcome(trial, code, seconds, said, kept, mended, different)


def outcome(
    trial: Trial, code: int, seconds: float, said: str, kept: int, mended: int, different: list[str]
) -> Outcome:
    """Parse what the printed lines name."""
    about = [line for line in said.splitlines() if f"'{NAME}'" in line]
    reports = [line for line in about if re.search(r"running for \d+ s", line)]
    text = "\n".join(reports if trial.kind in ("hang", "signal") else about)
    whole = text + "\n" + "\n".join(re.findall(r"(?m)^.*\n  where: .*$", said))
    hook = HOOKS.get(trial.place, trial.place)
    harmless = trial.place == "on_event" and trial.kind in ("wrong type", "mutated")
    step = bool(re.search(r"\bstep \d+", whole)) if trial.place in RUNNING else None
    return Outcome(
        trial.place,
        trial.kind,
        code,
        round(seconds, 2),
        plugin=None if harmless else f"'{NAME}'" in whole,
        version=None if harmless else VERSION in whole,
        hook=None if harmless else hook in whole,
        step=None if harmless else step,
        reported=len(reports),
        kept=kept,
        mended=mended,
        equal=mended == 0 and (code == 5 or all(map(_more, different))),
        said=next(filter(None, whole.splitlines()), said.strip().rpartition("\n")[2]),
    )


def _more(difference: str) -> bool:
    """Return whether the extra checkpoint is only the one saved at Ctrl-C."""
    return difference.startswith("checkpoints ")


def interrupt(trial: Trial, out: Path, child: Child) -> float:
    """Press Ctrl-C once the hang is reported, and again if that has no effect; return the time."""
    end = time.perf_counter() + trial.hang - 5
    while "running for" not in trial.run.said(out) and time.perf_counter() < end:
        time.sleep(0.2)
    began = time.perf_counter()
    os.kill(child.pid, signal.SIGINT)
    if child.wait_until(time.perf_counter() + 3.0 - child.began) is None:
        os.kill(child.pid, signal.SIGINT)
    return began


def start(run: TinyRun, out: Path, site: Path, steps: int) -> Child:
    """Resume the run in ``out`` with the plugin in ``site``."""
    arguments = ["train", "--resume", "--out", str(out), "--steps", str(steps)]
    if not (out / "run.json").exists():
        arguments = [*run.arguments(out), "--plugins", NAME, "--steps", str(steps)]

    def program() -> int:
        from benchmarks.trials.tiny_run import minillm

        sys.path.insert(0, str(site))
        return minillm(arguments)

    return run.fork(program, run.log(out))


def install(site: Path, trial: Trial | None) -> None:
    """Install the plugin as pip would, with the trial's fault or none."""
    about = site / "minillm_faulty-1.0.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: minillm-faulty\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[minillm.plugins]\n{NAME} = minillm_faulty:Faulty\n")
    source = Path(__file__).parent / "trials" / "faulty.py"
    shutil.copyfile(source, site / "minillm_faulty.py")
    fault = (trial.place, trial.kind, trial.hang) if trial else ("", "", 0)
    (site / "fault.json").write_text(json.dumps(fault))


def prepare(run: TinyRun, steps: int) -> None:
    """Create the run to resume, and the undisturbed reference of that many steps."""
    site, base, reference = (run.folder / name for name in ("site", "base", "reference"))
    install(site, None)
    scout = run.folder / "scout"
    modules = run.folder / "modules.json"
    child = run.fork(partial(_scouted, run, scout, site, modules), run.log(scout))
    _finished(run, scout, child)
    import_all(
        name for name in json.loads(modules.read_text()) if not name.startswith("minillm_faulty")
    )
    _finished(run, base, start(run, base, site, BEFORE))
    shutil.copytree(base, reference)
    _finished(run, reference, start(run, reference, site, steps))


def _finished(run: TinyRun, out: Path, child: Child) -> None:
    if code := child.wait():
        raise RuntimeError(f"exit {code}:\n{run.said(out)}")


def _scouted(run: TinyRun, out: Path, site: Path, modules: Path) -> int:
    from benchmarks.trials.tiny_run import minillm

    sys.path.insert(0, str(site))
    code = minillm([*run.arguments(out), "--plugins", NAME, "--steps", "2"])
    modules_of(modules)
    return code


def trials_of(run: TinyRun, given: Namespace) -> list[Trial]:
    """List all cells; those that only sleep are last, so that they sleep concurrently."""
    found = [
        Trial(run, place, kind, 60.0 if kind == "signal" else given.hang, given.steps)
        for kind in KINDS
        for place in PLACES
        if (place, kind) not in NONE | (UNSEEN if given.backend == "mlx" else set())
    ]
    return [trial for trial in found if not given.only or re.fullmatch(given.only, trial.name)]


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--hang", type=float, default=60.0, help="seconds that a hang lasts")
    options.add_argument("--steps", type=int, default=AFTER, help="of a resumed run")
    options.add_argument("--only", help="trials whose names, such as on_batch-hang, fit this regex")
    given = options.parse_args()
    found: dict[str, Row] = {}
    cells = []
    with workshop(given) as folder:
        run = replace(TinyRun(folder, given.backend), settings=("checkpoint.keep=100",))
        prepare(run, given.steps)
        trials = trials_of(run, given)
        asleep = [trial for trial in trials if trial.kind in ("hang", "signal")]
        awake = [trial for trial in trials if trial not in asleep]
        for part, jobs in ((awake, given.jobs), (asleep, 7 * given.jobs)):
            for trial, one in each(try_it, part, jobs) if part else ():
                row = found.setdefault(trial.kind, Row(f"a plugin's fault: {trial.kind}"))
                row.tried += 1
                row.ended += one.mended == 0
                row.bit_equal += one.equal
                row.detected += not one.wrong()
                cells.append(asdict(one))
                if wrong := one.wrong():
                    row.fail(f"--only {trial.name}", [*wrong, f"it said [{one.said}]"])
        cells.sort(key=lambda cell: (PLACES.index(cell["place"]), KINDS.index(cell["kind"])))
        rows = [found[kind] for kind in KINDS if kind in found]
        return finish("faults", rows, given, hang=given.hang, cells=cells)


if __name__ == "__main__":
    raise SystemExit(main())
