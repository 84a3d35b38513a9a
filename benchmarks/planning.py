"""Time to plan a run with more than 20 plugins, each time in a fresh process.

    python -m benchmarks.planning                  # writes results/planning.json
    python -m benchmarks.planning --repeats 3 --out /tmp

Planning starts with the settings and ends with the plan: settings are read and checked, the plugins'
modules imported, every hook called, the plan hashed. The start of Python and minillm's own modules
is reported separately, and so is the whole command ``minillm plan``. Bytecode is cached in a separate
folder, filled by a first round, as in an installed package.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import measuring, written
from benchmarks.environment import ROOT
from benchmarks.planned import FRAMEWORKS, PLUGINS, PRESET, SETTINGS

REPEATS = 15
MOST_SECONDS = 0.5
INSIDE = [sys.executable, "-m", "benchmarks.planned"]
COMMAND = [
    *(sys.executable, "-m", "minillm_core", "plan", "--preset", PRESET),
    *("--plugins", ",".join(PLUGINS), *SETTINGS),
]


def process(command: Sequence[str], cache: Path) -> tuple[dict[str, float], str]:
    """Run a whole process: return its wall seconds, its CPU seconds, and its output."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    before, start = os.times(), time.perf_counter()
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=kept | {"PYTHONPYCACHEPREFIX": str(cache)},
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, after = time.perf_counter() - start, os.times()
    cpu = sum(after[2:4]) - sum(before[2:4])  # of children, user and system
    return {"process_seconds": seconds, "process_cpu_seconds": cpu}, done.stdout


def measured(repeats: int) -> dict[str, Any]:
    """Measure all figures.

    Raises:
        SystemExit: a framework was imported, a plugin is missing, or plans differ.
    """
    inside: list[dict[str, Any]] = []
    command: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        for round_ in range(repeats + 1):
            seconds, printed = process(INSIDE, cache)
            whole, _ = process(COMMAND, cache)
            if round_:  # the first fills the caches
                inside.append(seconds | json.loads(printed))
                command.append(whole)
    check(inside)
    return {
        "plugins": len(PLUGINS),
        "frameworks_imported": [],
        "looked_for": list(FRAMEWORKS),
        "planning": {
            name: summary([one[name] for one in inside])
            for name in ("planning_seconds", "planning_cpu_seconds")
        },
        "parts_median_seconds": {
            part: round(statistics.median(one["parts_seconds"][part] for one in inside), 4)
            for part in inside[0]["parts_seconds"]
        },
        "process": {
            name: summary([one[name] for one in inside])
            for name in ("process_seconds", "process_cpu_seconds")
        },
        "minillm_plan": {
            name: summary([one[name] for one in command])
            for name in ("process_seconds", "process_cpu_seconds")
        },
        "below_seconds": MOST_SECONDS,
        "repeats": repeats,
    }


def check(rounds: Sequence[Mapping[str, Any]]) -> None:
    """Check that the figures measure what they claim."""
    for one in rounds:
        if one["frameworks"]:
            raise SystemExit(f"planning imported {', '.join(one['frameworks'])}")
        if one["plugins"] != len(PLUGINS) or one["plan_hash"] != rounds[0]["plan_hash"]:
            raise SystemExit(f"one round planned something else: {one}")


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Return the median and every repetition."""
    return {
        "median": round(statistics.median(values), 4),
        "all": [round(value, 4) for value in values],
    }


def main() -> None:
    parser = measuring(__doc__, "planning")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    given = parser.parse_args()
    figures = measured(given.repeats)
    path = written(given, figures)
    median = figures["planning"]["planning_seconds"]["median"]
    print(json.dumps({key: figures[key] for key in ("planning", "process", "minillm_plan")}))
    print(f"{len(PLUGINS)} plugins: {median:.3f} s of planning; wrote {path}")
    if median >= MOST_SECONDS:
        raise SystemExit(f"that is not below {MOST_SECONDS} s")


if __name__ == "__main__":
    main()
