"""Common parts of the trial scripts: options, a working folder, worker processes, the table."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import command
from benchmarks.environment import write

__all__ = ["Row", "backends_of", "each", "finish", "parser", "table", "workshop"]

BACKENDS = ("torch", "mlx")

Trial, Outcome = TypeVar("Trial"), TypeVar("Outcome")


@dataclass
class Row:
    """One line of the result.

    Attributes:
        what: the kind of trial.
        tried: trials.
        detected: trials in which the program detected the fault and reported it correctly.
        bit_equal: finished trials whose end equals that of an undisturbed run.
        ended: trials that continued to an end.
        facts: further counts.
        failed: the trials that failed, with reasons.
    """

    what: str
    tried: int = 0
    detected: int = 0
    bit_equal: int = 0
    ended: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def fail(self, trial: str, reasons: Iterable[str]) -> None:
        """Record what went wrong in a trial, and print it at once."""
        self.failed.append(f"{trial}: {'; '.join(reasons)}")
        print(f"FAILED {self.failed[-1]}", flush=True)

    def count(self, fact: str, number: int = 1) -> None:
        """Increment one of the facts."""
        self.facts[fact] = self.facts.get(fact, 0) + number


def parser(doc: str | None, *, both: bool = False) -> argparse.ArgumentParser:
    """Build the parser with the common options; ``both``: trials run on both backends by default."""
    made = command.parser(doc)
    made.add_argument("--seed", type=int, help="of all that is random; default: drawn anew")
    choices = (*BACKENDS, "both") if both else BACKENDS
    made.add_argument("--backend", choices=choices, default="both" if both else "torch")
    made.add_argument("--jobs", type=int, default=2, help="trials at a time")
    made.add_argument("--folder", type=Path, help="to work in; default: a temporary one")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    made.add_argument("--commit", help="for a copy of the tree that came without .git")
    return made


def backends_of(options: argparse.Namespace) -> list[str]:
    """Return the chosen backends; for ``both`` the installed ones, which are printed."""
    if options.backend != "both":
        return [options.backend]
    found = [name for name in BACKENDS if find_spec(name)]
    for name in sorted(set(BACKENDS) - set(found)):
        print(f"{name} is not installed: nothing is tried on it", flush=True)
    return found


@contextmanager
def workshop(options: argparse.Namespace) -> Iterator[Path]:
    """Create a working folder, removed afterwards unless a trial left files in its ``failed/``."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
    if options.seed is None:
        options.seed = secrets.randbelow(2**32)
    print(f"seed {options.seed}", flush=True)
    options.began = time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix="minillm-trials-", dir=options.folder)).resolve()
    try:
        yield folder
    finally:
        if (folder / "failed").exists():
            print(f"what failed is kept in {folder / 'failed'}", flush=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def each(
    run: Callable[[Trial], Outcome], trials: Sequence[Trial], jobs: int
) -> Iterator[tuple[Trial, Outcome]]:
    """Run the trials in ``jobs`` forked workers with a progress report; yield them as they end."""
    began, done = time.perf_counter(), 0
    with multiprocessing.get_context("fork").Pool(jobs) as pool:  # forked before it has threads
        for number, outcome in pool.imap_unordered(_Numbered(run, trials), range(len(trials))):
            done += 1
            if done % max(1, len(trials) // 10) == 0 or done == len(trials):
                seconds = time.perf_counter() - began
                print(f"{done:5} of {len(trials)}, {seconds:6.1f} s", file=sys.stderr, flush=True)
            yield trials[number], outcome


@dataclass(frozen=True)
class _Numbered:
    """A trial run by its number: results are small, and the order is free."""

    run: Callable[[Any], Any]
    trials: Sequence[Any]

    def __call__(self, number: int) -> tuple[int, Any]:
        return number, self.run(self.trials[number])


def table(rows: Sequence[Row]) -> str:
    """Format the rows as text."""
    head = ("", "tried", "detected", "bit-equal", "failed", "of these")
    body = [
        (
            row.what,
            f"{row.tried:,}",
            f"{row.detected:,}",
            f"{row.bit_equal:,} of {row.ended:,}",
            f"{len(row.failed):,}",
            ", ".join(f"{name} {_short(value)}" for name, value in row.facts.items()),
        )
        for row in rows
    ]
    widths = [max(len(line[i]) for line in (head, *body)) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in (0, len(head) - 1) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (head, *body)
    )


def finish(name: str, rows: Sequence[Row], options: argparse.Namespace, **figures: Any) -> int:
    """Print the table, write the result for ``--json``; return the exit code."""
    seconds = time.perf_counter() - options.began
    print(f"\n{table(rows)}\n{seconds:.0f} s, seed {options.seed}", flush=True)
    for row in rows:
        for failure in row.failed:
            print(f"FAILED {row.what}: {failure}", flush=True)
    if options.json:
        found = {
            "seed": options.seed,
            "seconds": round(seconds, 1),
            **figures,
            "rows": [asdict(row) for row in rows],
        }
        if options.json.stem != name:
            print(f"the page reads {name}.json, not {options.json.name}", file=sys.stderr)
        print(write(options.json.stem, found, commit=options.commit, folder=options.json.parent))
    return 1 if any(row.failed or row.detected < row.tried for row in rows) else 0


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else f"{value:,}"
