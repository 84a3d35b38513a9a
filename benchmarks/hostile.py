"""Malicious run folders, settings and data: no code runs, nothing is written elsewhere, nothing hangs.

    python -m benchmarks.hostile [--flips 40] [--seed S] [--backend torch|mlx]

Each case (benchmarks/trials/spoiled.py) is a command on a copy of a run with one change.
Correct results: an allowed exit code, and the expected word in the output; no "defect" and no
traceback; no code of the folder is executed; nothing outside the run's folder changes; within SECONDS and
MEMORY. A run with one flipped bit in run.json is refused, or evaluated to the same loss. Then
runs whose folder or data change during training: they must end, not by a signal, with an
error that names the change. Text without spaces must be tokenised, and stay interruptible.
"""

from __future__ import annotations

import os
import random
import re
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.trials.bench import Row, each, finish, parser, workshop
from benchmarks.trials.compare import newest_step
from benchmarks.trials.reference import Reference, make_reference
from benchmarks.trials.spoiled import MARKER, READERS, Case, cases
from benchmarks.trials.tiny_run import STEPS, TinyRun, minillm
from minillm_core.data import write_shard

SECONDS = 60.0  # timeout of a case, on a busy machine
MEMORY = 8 << 30  # bytes of address space of a command
HEARD = 5.0  # seconds within which a signal must end a run
HEADER = 1024  # bytes of a shard before its tokens
DNA = 4 << 20  # characters


@dataclass(frozen=True)
class Trial:
    """A case on a copy of the reference; or an attack on a run in progress."""

    reference: Reference
    seed: int
    flips: int
    loss: float
    number: int = 0  # of the case
    attack: str = ""

    @property
    def case(self) -> Case | None:
        """The case, rebuilt: its functions cannot be pickled."""
        return None if self.attack else self.all()[self.number]

    def all(self) -> list[Case]:
        """Return all cases."""
        return list(cases(random.Random(self.seed), self.flips))

    @property
    def row(self) -> str:
        """Its row in the table."""
        if self.case:
            return self.case.row
        return next(row for row, names in ATTACKS.items() if self.attack in names)


def prepared(reference: Reference, folder: Path) -> Path:
    """Create a folder with a run ``o``, its text, and files that must not be touched."""
    place = Path(tempfile.mkdtemp(prefix="case-", dir=folder))
    shutil.copytree(reference.out, place / "o")
    shutil.copy(reference.run.text, place / "text.jsonl")
    (place / "text.txt").write_text("It was a dark and stormy night.\n" * 200)
    (place / "outside").mkdir()
    (place / "outside" / "precious").write_text("precious")
    return place


def try_case(trial: Trial) -> list[str]:
    """Run a case and return what is wrong; None if it is correct."""
    case, run = trial.case, trial.reference.run
    assert case is not None
    place = prepared(trial.reference, run.folder)
    try:
        case.spoil(place)
        before = tree(place / "outside")
        code, said, seconds = command(run, place, case.arguments)
        wrong = []
        if code not in case.codes:
            wrong.append(f"exit {code}")
        if "a defect in minillm" in said or "Traceback" in said:
            wrong.append("it is called a defect")
        if case.says and not re.search(case.says, said):
            wrong.append(f"the output does not mention {case.says}")
        if (place / MARKER).exists():
            wrong.append("its code was run")
        if tree(place / "outside") != before:
            wrong.append("something outside of the run's folder was changed")
        if seconds > SECONDS:
            wrong.append(f"{seconds:.0f} s")
        if case.row.startswith("one bit") and code == 0:
            loss = re.search(r"val_loss\s+([\d.]+)", said)
            if loss is None or float(loss[1]) != trial.loss:
                wrong.append("another loss, without a word")
        return [f"{'; '.join(wrong)}: {said[-400:]}"] if wrong else []
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    finally:
        shutil.rmtree(place, ignore_errors=True)


def command(run: TinyRun, place: Path, arguments: Sequence[str]) -> tuple[int, str, float]:
    """Return exit code, output, and seconds; a command that hangs is killed."""

    def within() -> int:
        os.chdir(place)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        return minillm(arguments)

    log, began = place / "log", time.perf_counter()
    child = run.fork(within, log)
    with suppress(TimeoutError):
        child.wait(2 * SECONDS)
    code = child.code if child.code is not None else child.kill()
    return code, log.read_text(errors="replace"), time.perf_counter() - began


def tree(folder: Path) -> dict[str, tuple[str, bytes]]:
    """Return every name below a folder, with its content."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[str(path)] = ("link", os.fsencode(path.readlink()))
        elif path.is_file():
            found[str(path)] = ("file", path.read_bytes()[: 1 << 22])
        else:
            found[str(path)] = ("other", b"")
    return found


# A run in progress


def _deleted(out: Path, data: Path) -> None:
    shutil.rmtree(out)


def _moved(out: Path, data: Path) -> None:
    out.rename(out.with_name("elsewhere"))


def _replaced(out: Path, data: Path) -> None:
    _moved(out, data)
    out.mkdir()
    (out / "run.json").write_text("mine")


def _without(name: str) -> Callable[[Path, Path], None]:
    return lambda out, data: (out / name).unlink()


def _overwritten(out: Path, data: Path) -> None:
    with data.open("r+b") as file:
        file.seek(HEADER)
        file.write(np.full((data.stat().st_size - HEADER) // 2, 60_000, np.uint16).tobytes())


def _cut(out: Path, data: Path) -> None:
    os.truncate(data, 4096)


ATTACKS: dict[str, dict[str, Callable[[Path, Path], None]]] = {
    "a run's folder changed while it trains": {
        "deleted": _deleted,
        "moved": _moved,
        "replaced": _replaced,
        "without its metrics.jsonl": _without("metrics.jsonl"),
        "without its lock.json": _without("lock.json"),
    },
    "token shards changed while a run reads them": {"overwritten": _overwritten, "cut": _cut},
    "text without a space": {},
}
NAMES = {
    "a run's folder changed while it trains": r"while this run was training",
    "token shards changed while a run reads them": r"data\.bin",
}


def try_attack(trial: Trial) -> list[str]:
    """Run an attack as :func:`try_case` does, on a run that is resumed."""
    run = trial.reference.run
    place = Path(tempfile.mkdtemp(prefix="attack-", dir=run.folder))
    try:
        if trial.attack in ATTACKS["text without a space"]:
            return _dna(run, place, trial.attack)
        out, data = place / "out", place / "data.bin"
        write_shard(data, np.random.default_rng(0).integers(1, 500, 400_000), 512)
        arguments = run.arguments(out)
        arguments[arguments.index(str(STEPS))] = "100000"
        if trial.row.startswith("token"):
            arguments[arguments.index(str(run.text))] = str(data)
        child = run.fork(lambda: minillm(arguments), place / "log")
        while not newest_step(out) and child.poll() is None:
            child.wait_until(0)
        os.kill(child.pid, signal.SIGSTOP)
        ATTACKS[trial.row][trial.attack](out, data)
        os.kill(child.pid, signal.SIGCONT)
        try:
            code = child.wait(SECONDS)
        except TimeoutError:
            return [f"{trial.attack}: it goes on"]
        said = (place / "log").read_text(errors="replace")
        wrong = []
        if code not in (1, 2):
            wrong.append(f"exit {code}")
        if "a defect in minillm" in said:
            wrong.append("it is called a defect")
        if not re.search(NAMES[trial.row], said):
            wrong.append("what was changed is not named")
        if trial.attack == "replaced" and (out / "run.json").read_text() != "mine":
            wrong.append("the other folder's run.json was overwritten")
        return [f"{trial.attack}: {'; '.join(wrong)}: {said[-400:]}"] if wrong else []
    except Exception as error:
        return [f"{trial.attack}: {type(error).__name__}: {error}"]
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _dna(run: TinyRun, place: Path, how: str) -> list[str]:
    """Train on one long word; or interrupt it by a signal during tokenisation."""
    text = place / "dna.txt"
    text.write_text("".join(random.Random(0).choices("ACGT", k=DNA)))
    arguments = run.arguments(place / "out")
    arguments[arguments.index(str(run.text))] = str(text)
    child = run.fork(lambda: minillm(arguments), place / "log")
    if how == "it is trained on":
        try:
            code = child.wait(2 * SECONDS)
        except TimeoutError:
            return [f"{how}: no end after {2 * SECONDS:.0f} s"]
        return [] if code == 0 else [f"{how}: exit {code}"]
    child.wait_until(1.0)
    if child.poll() is not None:
        return []  # too fast to be interrupted
    os.kill(child.pid, signal.SIGTERM)
    began = time.perf_counter()
    with suppress(TimeoutError):
        child.wait(SECONDS)
    seconds = time.perf_counter() - began
    return [f"{how}: {seconds:.1f} s until it ended"] if seconds > HEARD else []


ATTACKS["text without a space"] = dict.fromkeys(("it is trained on", "SIGTERM"), _deleted)


def attempt(trial: Trial) -> list[str]:
    """Run one trial."""
    return try_case(trial) if trial.case else try_attack(trial)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--flips", type=int, default=40, help="run.json with one bit flipped")
    given = options.parse_args()
    with workshop(given) as folder:
        reference = make_reference(TinyRun(folder, given.backend))
        place = prepared(reference, folder)
        code, said, _ = command(reference.run, place, READERS["eval"])
        found = re.search(r"val_loss\s+([\d.]+)", said)
        if code or found is None:
            raise RuntimeError(f"the reference cannot be evaluated: {said}")
        base = Trial(reference, given.seed, given.flips, float(found[1]))
        every = [
            *(replace(base, number=number) for number in range(len(base.all()))),
            *(replace(base, attack=name) for names in ATTACKS.values() for name in names),
        ]
        rows = {trial.row: Row(trial.row) for trial in every}
        for trial, wrong in each(attempt, every, given.jobs):
            row = rows[trial.row]
            row.tried += 1
            row.detected += not wrong
            name = trial.case.name if trial.case else trial.attack
            row.failed += [f"{name}: {one}" for one in wrong]
        return finish("hostile", list(rows.values()), given, backend=given.backend)


if __name__ == "__main__":
    raise SystemExit(main())
