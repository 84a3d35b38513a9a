r"""The first start on a text: seconds to the first character, the longest silence, and Ctrl-C.

    python -m benchmarks.first_start --data english_train.jsonl.xz --interrupts 4 \
        --data english_val.jsonl.xz --interrupts 20

One start with an empty cache is read character by character up to its first step. Others, each
with its own empty cache, are sent SIGINT at random moments before that step: how long they
take to end, and the files that they leave in the cache.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.environment import write

STEPS = ("checkpoint.every=0", "eval.every=0", "eval.tokens=256", "--steps", "1")


def start(data: Path, folder: Path) -> subprocess.Popen[bytes]:
    """Start training with an empty cache; stdout and stderr go to one pipe."""
    command = [sys.executable, "-m", "minillm_core", "train", "--preset", "tiny"]
    command += ["--data", str(data), "--out", str(folder / "out"), *STEPS]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "MINILLM_CACHE": str(folder / "cache")},
    )


def watched(data: Path, folder: Path) -> dict[str, Any]:
    """Time every piece of output up to the first step."""
    began = time.monotonic()
    child = start(data, folder)
    assert child.stdout is not None
    heard: list[tuple[float, str]] = []
    stepped = None
    while piece := os.read(child.stdout.fileno(), 1 << 16):
        now = time.monotonic() - began
        heard.append((now, piece.decode("utf-8", "replace")))
        if stepped is None and "step 1" in heard[-1][1]:
            stepped = now
    code = child.wait()
    moments = [0.0, *(at for at, _ in heard if stepped is None or at <= stepped)]
    gaps = [later - earlier for earlier, later in pairwise(moments)]
    return {
        "exit": code,
        "first_character_seconds": round(moments[1], 2) if len(moments) > 1 else None,
        "longest_silence_seconds": round(max(gaps), 2) if gaps else None,
        "first_step_seconds": round(stepped, 1) if stepped else None,
        "output": [f"{at:7.1f}  {text.rstrip()}" for at, text in heard],
    }


def interrupted(data: Path, folder: Path, after: float) -> dict[str, Any]:
    """Send SIGINT after some seconds, and time the exit."""
    child = start(data, folder)
    assert child.stdout is not None
    heard: list[bytes] = []
    reader = threading.Thread(target=lambda: heard.append(child.stdout.read()))  # type: ignore
    reader.start()
    time.sleep(after)
    alive = child.poll() is None
    sent = time.monotonic()
    child.send_signal(signal.SIGINT)
    code = child.wait()
    took = time.monotonic() - sent
    reader.join()
    left = [str(path.relative_to(folder)) for path in folder.rglob("*tmp-*")]
    last = heard[0].decode("utf-8", "replace").strip().splitlines()[-3:] if heard else []
    return {
        "after_seconds": round(after, 2),
        "alive": alive,
        "exit": code,
        "seconds_to_the_end": round(took, 2),
        "left_in_the_cache": left,
        "run_folder_left": (folder / "out" / "run.json").exists(),
        "last_lines": last,
    }


def measure(data: Path, interrupts: int, seed: int) -> dict[str, Any]:
    """Run one watched start, then the interrupted ones, then a start with the last one's cache."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        whole = watched(data, Path(place))
    print(data.name, *list(whole.values())[1:4], flush=True)
    until = whole["first_step_seconds"] or 10.0
    found = []
    for number in range(interrupts):
        with tempfile.TemporaryDirectory() as place:
            found.append(interrupted(data, Path(place), draw.uniform(0.3, until)))
            if number == interrupts - 1:
                again = watched(data, Path(place))
        one = found[-1]
        print(one["after_seconds"], one["exit"], one["seconds_to_the_end"], one["last_lines"][-1:])
    ended = [one["seconds_to_the_end"] for one in found if one["alive"]]
    return {
        "data": data.name,
        "start": whole,
        "interrupts": found,
        "longest_end_seconds": max(ended, default=None),
        "start_after_an_interrupt": {"exit": again["exit"]} if interrupts else None,
    }


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, action="append", required=True)
    parser.add_argument("--interrupts", type=int, action="append", help="for each --data")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="of a copy of the tree that came without .git")
    given = parser.parse_args()
    counts = [*(given.interrupts or []), *[20] * len(given.data)]
    figures = [
        measure(data, count, given.seed) for data, count in zip(given.data, counts, strict=False)
    ]
    print(write("first_start", figures, commit=given.commit))


if __name__ == "__main__":
    main()
