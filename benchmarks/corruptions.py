"""Damaged checkpoints: each must be detected by verification and by a resume.

    python -m benchmarks.corruptions --tried 300 [--backend torch|mlx] [--seed S]

Every trial damages the newest checkpoint of a real run, every fifth one the two newest, every tenth
one all of them (see benchmarks/trials/damage.py), and then runs two checks: ``verify``, and the checkpoint
selection of ``--resume``, which must rename every damaged one to ``step-N.corrupt``, report
it, and select the next older one. Every ``--whole``-th trial runs ``minillm train --resume`` to
its end, which must be bitwise equal to an uninterrupted run; if all were damaged it must exit with 4,
twice.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError
from safetensors.numpy import load_file

from benchmarks.trials.bench import Row, each, finish, parser, workshop
from benchmarks.trials.compare import differences
from benchmarks.trials.damage import KINDS, link
from benchmarks.trials.reference import Reference, make_reference
from benchmarks.trials.tiny_run import EVERY, STEPS, TinyRun
from minillm_core.checkpoint import layout
from minillm_core.checkpoint.manifest import verify
from minillm_core.checkpoint.read import newest_and_set_aside
from minillm_core.errors import NoCheckpoint

MANY = 4  # number of checkpoints of the damaged run
PLACES = {0: MANY, 5: 2}  # trial number modulo 10 -> number of newest checkpoints damaged


@dataclass(frozen=True)
class Trial:
    """One damage."""

    kind: str
    number: int
    seed: int
    reference: Reference
    damaged: Path  # the run's folder, which is copied
    whole: bool  # also run the command

    @property
    def many(self) -> int:
        """The number of newest checkpoints that are damaged."""
        return PLACES.get(self.number % 10, 1)


@dataclass
class Outcome:
    """The result of a trial."""

    did: list[str] = field(default_factory=list)
    unnoticed: bool = False  # the newest loads if only formats are checked
    verified: bool = False  # each damage was detected
    set_aside: bool = False  # each was set aside, and the right checkpoint used
    ended: bool = False
    equal: bool = False
    wrong: list[str] = field(default_factory=list)


def notice(trial: Trial) -> Outcome:
    """Damage, verify, resume."""
    out = trial.reference.run.folder / f"corrupt-{trial.number}"
    shutil.copytree(trial.damaged, out, ignore=shutil.ignore_patterns("checkpoints"))
    link(trial.damaged / "checkpoints", out / "checkpoints")
    outcome = Outcome()
    bad = _damage(trial, out, outcome)
    outcome.unnoticed = _loads(layout.folders(trial.damaged)[0][1].name, out)
    outcome.verified = all(verify(path) for path in bad)
    if not outcome.verified:
        outcome.wrong.append("it verifies")
    if trial.whole:
        again = out.with_name(f"{out.name}-whole")
        shutil.copytree(out, again, ignore=shutil.ignore_patterns("checkpoints"))
        link(out / "checkpoints", again / "checkpoints")
        _resume(trial, again, bad, outcome)
        shutil.rmtree(again)
        trial.reference.run.log(again).unlink(missing_ok=True)
    _set_aside(out, bad, outcome)
    shutil.rmtree(out)
    return outcome


def _damage(trial: Trial, out: Path, outcome: Outcome) -> list[Path]:
    """Damage the newest checkpoints; return the damaged ones, newest first."""
    rng = random.Random(f"{trial.seed} {trial.number}")
    checkpoints = [path for _, path in layout.folders(out)]
    before = {path: _content(path) for path in checkpoints}
    for path in checkpoints[: trial.many]:
        older = checkpoints[
            checkpoints.index(path) - len(checkpoints) + 1
        ]  # of the last one: the first
        outcome.did.append(KINDS[trial.kind](path, older, rng))
    return [path for path in checkpoints if _content(path) != before[path]]


def _loads(name: str, out: Path) -> bool:
    """Return whether the newest checkpoint loads without digest checks, as weights and JSON usually do."""
    folder = out / "checkpoints" / name
    try:
        for file in (layout.MODEL, layout.OPTIMIZER):
            load_file(folder / file)
        json.loads((folder / layout.STATE).read_bytes())
    except (OSError, SafetensorError, ValueError):
        return False
    return True


def _content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _expected(out: Path, bad: list[Path]) -> int | None:
    """Return the step to resume from: that of the newest valid checkpoint."""
    good = [step for step, path in layout.folders(out) if path.name not in {b.name for b in bad}]
    return max(good, default=None)


def _set_aside(out: Path, bad: list[Path], outcome: Outcome) -> None:
    """Select a checkpoint as --resume does, without a trainer."""
    said: list[str] = []
    wanted = _expected(out, bad)
    try:
        found = newest_and_set_aside(out, said.append)
        step = found.step if found else None
    except NoCheckpoint:
        step = None
    outcome.wrong += _not_told(out, bad, wanted, "\n".join(said))
    if step != wanted:
        outcome.wrong.append(f"went on from step {step}, not {wanted}")
    outcome.set_aside = not outcome.wrong


def _not_told(out: Path, bad: list[Path], wanted: int | None, said: str) -> Iterator[str]:
    for path in bad:
        newer = wanted is None or path.name > layout.folder(out, wanted).name
        if newer and not (out / "checkpoints" / f"{path.name}.corrupt").exists():
            yield f"{path.name} was not set aside"
        if newer and path.name not in said:
            yield f"nothing was said of {path.name}"


def _resume(trial: Trial, out: Path, bad: list[Path], outcome: Outcome) -> None:
    """Run the whole command."""
    run, wanted = trial.reference.run, _expected(out, bad)
    codes = [run.start(out, resume=True).wait() for _ in range(1 if wanted else 2)]
    if codes != ([0] if wanted else [4, 4]):
        outcome.wrong.append(f"--resume ended with {codes}: {run.said(out)[-300:]}")
        return
    outcome.wrong += _not_told(out, bad, wanted, run.said(out))
    if wanted:
        outcome.ended = True
        outcome.wrong += (different := differences(trial.reference.out, out))
        outcome.equal = not different


def trials(options: argparse.Namespace, reference: Reference, damaged: Path) -> list[Trial]:
    """Draw trials, every kind equally often."""
    kinds = list(KINDS)
    return [
        Trial(
            kind=kinds[n % len(kinds)],
            number=n,
            seed=options.seed,
            reference=reference,
            damaged=damaged,
            whole=n % options.whole == 0,
        )
        for n in range(options.tried)
    ]


def broken_off(reference: Reference) -> Path:
    """Create the folder of an unfinished run with MANY checkpoints."""
    out = reference.run.folder / "broken-off"
    keep = f"checkpoint.keep={MANY}"
    run = TinyRun(reference.run.folder, reference.run.backend, reference.run.plugins, (keep,))
    child = run.start(out)
    while len(layout.folders(out)) < MANY and child.poll() is None:
        child.wait_until(0)
    child.kill()
    if not MANY <= len(layout.folders(out)) < STEPS // EVERY:
        raise RuntimeError("the run could not be broken off in time; is the machine busy?")
    return out


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--tried", type=int, default=300)
    options.add_argument(
        "--whole", type=int, default=7, metavar="N", help="every N-th as a command"
    )
    given = options.parse_args()
    with workshop(given) as folder:
        reference = make_reference(TinyRun(folder, given.backend))
        every = trials(given, reference, broken_off(reference))
        found = {kind: Row(kind) for kind in KINDS}
        for trial, outcome in each(notice, every, given.jobs):
            row = found[trial.kind]
            row.tried += 1
            row.detected += outcome.verified and outcome.set_aside
            row.ended += outcome.ended
            row.bit_equal += outcome.equal
            row.count("load unnoticed without digests", outcome.unnoticed)
            row.count("all were bad", trial.many == MANY)
            row.count("as a command", trial.whole)
            if outcome.wrong:
                row.fail(f"trial {trial.number} ({'; '.join(outcome.did)})", outcome.wrong)
        return finish("corruptions", list(found.values()), given, backend=given.backend)


if __name__ == "__main__":
    raise SystemExit(main())
