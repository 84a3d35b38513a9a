"""Trials of the default run on a CPU: shapes, vocabularies and plugins for equal minutes.

    python -m benchmarks.cpu_search --jobs jobs.json --minutes 1.9

Each job trains ``--preset tiny`` with changes on two dedicated cores, several at a time, and is
evaluated by bits per byte on one held-out text, so that vocabularies can be compared. A job is
``{"name": ..., "data": "all" or "few", "args": [...]}``; "few" excludes the character tables and
help texts of the standard library.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.environment import write

NOT_TEXT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
TABLES = {"encodings", "pydoc_data", "lib2to3"}
HELD_OUT = 300_000  # bytes


def make_texts(place: Path) -> None:
    """Copy the standard library into ``all`` and ``few``, and some of its modules into ``val``."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(f for f in root.rglob("*.py") if not NOT_TEXT & set(f.relative_to(root).parts))
    ordinary = [f for f in files if not TABLES & set(f.parts) and 4000 < f.stat().st_size < 40_000]
    random.Random(0).shuffle(ordinary)
    held, size = set(), 0
    for file in ordinary:
        if size > HELD_OUT:
            break
        held.add(file)
        size += file.stat().st_size
    for name in ("all", "few", "val"):
        (place / name).mkdir()
    for number, file in enumerate(files):
        names = ["val"] if file in held else ["all"] + ["few"] * (not TABLES & set(file.parts))
        for name in names:
            shutil.copy(file, place / name / f"{number:05d}.py")


def trial(job: dict[str, Any], minutes: float, place: Path, cores: tuple[int, int]) -> dict:
    """Train and evaluate one job on two cores."""
    out, began = place / "runs" / job["name"], time.monotonic()
    given = [*("--data", str(place / job.get("data", "all"))), f"data.val={place / 'val'}"]
    given += ["eval.tokens=100000000", "eval.every=0", "checkpoint.every=0"]
    command = ["taskset", "-c", ",".join(map(str, cores)), sys.executable, "-m", "minillm_core"]
    command += ["train", "--preset", "tiny", "--device", "cpu", "--out", str(out), *given]
    command += [f"train.minutes={minutes}", *job["args"]]
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "MINILLM_CACHE": str(place / "cache")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return {**job, "error": done.stderr[-500:]}
    events = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    steps = [event for event in events if event["event"] == "step"]
    (last,) = [event for event in events if event["event"] == "eval"][-1:]
    return {
        **job,
        "bits_per_byte": last["bits_per_byte"],
        "val_loss": last["val_loss"],
        "steps": len(steps),
        "tokens_per_second": steps[-1]["tokens_per_second"]["real"],
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> None:
    """Run the jobs and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=1.9)
    parser.add_argument("--commit", help="of a copy of the tree that came without .git")
    given = parser.parse_args()
    slots: queue.Queue[int] = queue.Queue()
    for slot in range((os.cpu_count() or 2) // 2):
        slots.put(slot)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        make_texts(place)

        def run(job: dict[str, Any]) -> dict[str, Any]:
            slot = slots.get()
            try:
                found = trial(job, given.minutes, place, (2 * slot, 2 * slot + 1))
            finally:
                slots.put(slot)
            print(found["name"], found.get("bits_per_byte"), found.get("error", ""), flush=True)
            return found

        with ThreadPoolExecutor(slots.qsize()) as pool:
            figures = list(pool.map(run, json.loads(given.jobs.read_text())))
    print(write("cpu_search", figures, commit=given.commit))


if __name__ == "__main__":
    main()
