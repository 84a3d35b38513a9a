"""A full disk at ten points of a save, with checkpoint.on_error=stop and =continue.

    python -m benchmarks.full_disk [--backend torch|mlx]

A run is paused after its first checkpoint, the disk is filled except for some bytes, and the run
continues into the next save. ``stop``: it must exit with 1, report the required bytes, and leave the previous
checkpoint unchanged and no files of its own; after space is freed, ``--resume`` must end bitwise equal to an
undisturbed run. ``continue``: it must report the save (event ``unsaved``) and continue; space is
freed, the next save must work, and the run must end bitwise equal. The disk is a tmpfs at OUT/checkpoints in a
separate mount namespace, else a limit on file size (RLIMIT_FSIZE).
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.trials.bench import Row, each, finish, parser, workshop
from benchmarks.trials.compare import differences, events, newest_step
from benchmarks.trials.forked import Child
from benchmarks.trials.reference import Reference, make_reference
from benchmarks.trials.room import FileLimit, Room, Tmpfs, enter_namespace
from benchmarks.trials.tiny_run import EVERY, TinyRun
from minillm_core.checkpoint import layout

ATTEMPTS = 50  # to pause a run between two saves
NEEDED = re.compile(r"[\d.,]+ MB are needed")


@dataclass(frozen=True)
class Trial:
    """One point and policy."""

    reference: Reference
    policy: str
    point: int
    room: int  # free bytes
    maker: type[Tmpfs] | type[FileLimit]


@dataclass
class Outcome:
    """The result of a trial."""

    told: bool = False  # the required bytes were reported
    intact: bool = False  # of the previous checkpoint
    equal: bool = False
    wrong: list[str] = field(default_factory=list)


def fill(trial: Trial) -> Outcome:
    """Run, pause, fill, continue, free space, continue."""
    outcome = Outcome()
    base = trial.reference.run
    run = TinyRun(base.folder, base.backend, settings=(f"checkpoint.on_error={trial.policy}",))
    out = base.folder / f"full-{trial.policy}-{trial.point}"
    room = trial.maker(out / "checkpoints")
    room.open()
    try:
        POLICIES[trial.policy](trial, run, out, room, outcome)
    except Exception as error:
        outcome.wrong.append(f"{type(error).__name__}: {error}")
    finally:
        room.close()
    shutil.rmtree(out, ignore_errors=True)
    return outcome


def stop(trial: Trial, run: TinyRun, out: Path, room: Room, outcome: Outcome) -> None:
    """Let the run end, to be resumed after space is freed."""
    child, before = _held_and_filled(trial, run, out, room)
    if (code := child.wait()) != 1:
        outcome.wrong.append(f"it ended with {code}: {run.said(out)[-300:]}")
    outcome.told = bool(NEEDED.search(run.said(out)))
    left = [path.name for path in (out / "checkpoints").iterdir() if path.is_dir()]
    outcome.intact = _content(out) == before and left == [layout.folder(out, EVERY).name]
    room.make(child)
    if code := run.start(out, resume=True).wait():
        outcome.wrong.append(f"with room, --resume ended with {code}: {run.said(out)[-300:]}")
        return
    _compare(trial.reference, out, outcome)


def go_on(trial: Trial, run: TinyRun, out: Path, room: Room, outcome: Outcome) -> None:
    """Let the run continue, and save again after space is freed."""
    child, before = _held_and_filled(trial, run, out, room)
    while not (unsaved := events(out, "unsaved")) and child.poll() is None:
        time.sleep(0.0005)
    outcome.intact = _content(out) == before
    room.make(child)
    code = child.wait()
    outcome.told = bool(unsaved and NEEDED.search(unsaved[0]["reason"]))
    if code:
        outcome.wrong.append(f"it ended with {code}: {run.said(out)[-300:]}")
        return
    _compare(trial.reference, out, outcome)


POLICIES = {"stop": stop, "continue": go_on}


def _held_and_filled(
    trial: Trial, run: TinyRun, out: Path, room: Room
) -> tuple[Child, dict[str, bytes]]:
    """Pause a run between its first checkpoint and the next one, with the trial's free space."""
    for _ in range(ATTEMPTS):
        child = run.start(out)
        while not events(out, "save"):
            if child.poll() is not None:
                raise RuntimeError(f"it ended with {child.code}: {run.said(out)[-300:]}")
            time.sleep(0.0003)
        os.kill(child.pid, signal.SIGSTOP)
        if newest_step(out) == EVERY and not list(out.glob("checkpoints/*.tmp-*")):
            break
        child.kill()  # it was already in its next save
        for path in [path for path in out.iterdir() if path.name != "checkpoints"]:
            path.unlink()
        for path in (out / "checkpoints").iterdir():
            shutil.rmtree(path)
    else:
        raise RuntimeError(f"it could not be held between two saves in {ATTEMPTS} runs")
    before = _content(out)
    room.leave(trial.room, child)
    os.kill(child.pid, signal.SIGCONT)
    return child, before


def _content(out: Path) -> dict[str, bytes]:
    """Read the first checkpoint's files."""
    return {path.name: path.read_bytes() for path in layout.folder(out, EVERY).iterdir()}


def _compare(reference: Reference, out: Path, outcome: Outcome) -> None:
    outcome.wrong += (different := differences(reference.out, out))
    outcome.equal = not different


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--inside", action="store_true", help="a namespace is there already")
    options.add_argument("--limit", action="store_true", help="RLIMIT_FSIZE, whatever can be had")
    given = options.parse_args()
    if not given.limit:
        given.limit = not enter_namespace("benchmarks.full_disk", sys.argv[1:])
    maker = FileLimit if given.limit else Tmpfs
    with workshop(given) as folder:
        reference = make_reference(TinyRun(folder, given.backend))
        newest = layout.folders(reference.out)[0][1]
        rooms = maker.points([(newest / name).stat().st_size for name in layout.FILES])
        trials = [
            Trial(reference, policy, point, room, maker)
            for policy in POLICIES
            for point, room in enumerate(rooms)
        ]
        found = {policy: Row(f"{maker.named} in a save, on_error={policy}") for policy in POLICIES}
        for trial, outcome in each(fill, trials, given.jobs):
            row = found[trial.policy]
            row.tried += 1
            row.ended += 1
            row.detected += outcome.told and outcome.intact
            row.bit_equal += outcome.equal
            row.count("told what was needed", outcome.told)
            row.count("checkpoint before intact", outcome.intact)
            if outcome.wrong or not outcome.told or not outcome.intact:
                why = outcome.wrong or [f"told {outcome.told}, intact {outcome.intact}"]
                row.fail(f"{trial.room:,} bytes of room", why)
        return finish("full_disk", list(found.values()), given, disk=maker.named)


if __name__ == "__main__":
    raise SystemExit(main())
