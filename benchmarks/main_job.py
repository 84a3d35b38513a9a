"""The main job, `minillm train`, as run by a user: wall time by stage, held-out loss, speed.

    python -m benchmarks.main_job                    # default of this machine: tiny on a CPU
    python -m benchmarks.main_job --preset small     # or any other arguments of minillm train

It runs in a separate process with empty caches. Stages are timed by this script's clock: when each
line was printed, and when each event was written.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.command import parser
from benchmarks.environment import RESULTS, write

WARM_STEPS = 10  # not counted in the medians: compilation, allocation
POLL_SECONDS = 0.02


def job(arguments: list[str], folder: Path) -> dict[str, Any]:
    """Run it once with all its files under ``folder``."""
    out = folder / "run"
    command = [sys.executable, "-m", "minillm_core", "train", *arguments, "--out", str(out)]
    environment = os.environ | {
        "MINILLM_CACHE": str(folder / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "PYTHONUNBUFFERED": "1",
    }
    lines: list[tuple[float, str]] = []
    began = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    watcher = Watcher(out / "metrics.jsonl", began)
    watcher.start()
    assert process.stdout is not None
    for line in process.stdout:
        lines.append((time.perf_counter() - began, line.rstrip()))
        print(line, end="", flush=True)
    code = process.wait()
    wall = time.perf_counter() - began
    watcher.end()
    return {
        "arguments": arguments,
        "exit": code,
        "wall_seconds": round(wall, 2),
        **stages(watcher.seen, wall),
        **figures(watcher.events),
        **run(out),
        "lines": [f"{at:7.2f} {line}".replace(f"{folder}{os.sep}", "") for at, line in lines],
    }


class Watcher(threading.Thread):
    """A thread that records when each kind of event was first and last seen in metrics.jsonl."""

    def __init__(self, path: Path, began: float) -> None:
        super().__init__(daemon=True)
        self.path, self.began = path, began
        self.seen: dict[str, tuple[float, float]] = {}  # kind -> first, last
        self.events: list[dict[str, Any]] = []
        self._rest, self._done, self._at = "", threading.Event(), 0

    def run(self) -> None:
        """Poll for new events."""
        while not self._done.wait(POLL_SECONDS):
            self._read()

    def end(self) -> None:
        """Read the rest and stop."""
        self._done.set()
        self.join()
        self._read()

    def _read(self) -> None:
        if not self.path.exists():
            return
        now = time.perf_counter() - self.began
        with self.path.open() as file:
            file.seek(self._at)
            text = self._rest + file.read()
            self._at = file.tell()
        *whole, self._rest = text.split("\n")
        for event in map(json.loads, whole):
            self.events.append(event)
            first, _ = self.seen.get(event["event"], (now, now))
            self.seen[event["event"]] = first, now


def stages(seen: dict[str, tuple[float, float]], wall: float) -> dict[str, Any]:
    """Compute seconds from the start of the process to the end of each stage."""
    ends = {
        "ready": seen.get("run", (None,))[0],  # imported, text read, tokenizer trained, model built
        "first_step": seen.get("step", (None,))[0],  # including compilation
        "trained": seen.get("step", (None, None))[-1],
        "evaluated": seen.get("eval", (None, None))[-1],
        "ended": seen.get("end", (None, None))[-1],
        "all": wall,
    }
    return {"seconds_until": {k: round(v, 2) for k, v in ends.items() if v is not None}}


def figures(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return loss and speed from the run's own events."""
    steps = [event for event in events if event["event"] == "step"]
    evals = [event for event in events if event["event"] == "eval"]
    warm = steps[WARM_STEPS:]
    mfus = [step["mfu"] for step in warm if step["mfu"] is not None]
    peaks = [step["peak_bytes"] for step in steps if step["peak_bytes"] is not None]
    return {
        "steps": steps[-1]["step"] if steps else 0,
        "tokens": steps[-1]["tokens"] if steps else 0,
        "first_loss": steps[0]["loss"] if steps else None,
        "val_loss": evals[-1]["val_loss"] if evals else None,
        "bits_per_byte": evals[-1]["bits_per_byte"] if evals else None,
        "step_seconds_median": _median([step["step_seconds"] for step in warm]),
        "tokens_per_second_median": _median([s["tokens_per_second"]["real"] for s in warm]),
        "mfu_median": _median(mfus),
        "peak_bytes": max(peaks, default=None),
    }


def run(out: Path) -> dict[str, Any]:
    """Return preset, plan and binding from run.json."""
    path = out / "run.json"
    if not path.exists():
        return {}
    document = json.loads(path.read_text())
    wanted = ("dtype", "compile", "device", "device_name", "kernels", "reason")
    return {
        "preset": document["config"]["preset"]["value"],
        "plan_hash": document["plan_hash"],
        "binding": {key: document["binding"].get(key) for key in wanted},
    }


def _median(numbers: list[float]) -> float | None:
    return statistics.median(numbers) if numbers else None


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=1)
    options.add_argument("--name", default="main_job", help="of the result file")
    options.add_argument("--results", type=Path, default=RESULTS, help="its folder")
    options.add_argument("--commit", help="what is measured, where there is no .git")
    arguments, given = options.parse_known_args()
    jobs = []
    for _ in range(arguments.repeats):
        with tempfile.TemporaryDirectory() as folder:
            jobs.append(job(given, Path(folder)))
        path = write(
            arguments.name, {"jobs": jobs}, commit=arguments.commit, folder=arguments.results
        )
    for one in jobs:
        shown = {k: v for k, v in one.items() if k not in ("lines", "binding")}
        print(json.dumps(shown, indent=2))
    print(f"wrote {path}")
    raise SystemExit(max(one["exit"] for one in jobs))


if __name__ == "__main__":
    main()
