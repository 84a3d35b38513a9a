r"""The first start on a text: seconds to the first character, the longest silence, and Ctrl-C.

    python -m benchmarks.first_start --data english_train.jsonl.xz --interrupts 4 \
        --data english_val.jsonl.xz --interrupts 20

One start with an empty cache is read character by character up to its first step. Others, each
with its own empty cache, are sent SIGINT at random moments before that step: how long they
take to end, and the files that they leave in the cache.

    python -m benchmarks.first_start --preset speedrun --steps 12 --repeats 2 --interrupts 0 \
        --data english.jsonl.xz --setting data.val=val.jsonl.xz --name first_start_speedrun

The same of a preset whose steps are compiled: with empty caches (compiled graphs included), and
--repeats times again with what the start before left in them. Python's bytecode is written before the
first start, as an installation with pip does.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.command import measuring, written

QUIET = ("checkpoint.every=0", "eval.every=0", "eval.tokens=256")

IMPORTS = """
import minillm_core.cli.main, minillm_core.train.session
try:
    import torch._inductor.compile_fx
except ImportError:
    pass
"""
"""Imports that write the bytecode which an installation with pip writes."""


@dataclass(frozen=True)
class Start:
    """The command of a start; its caches and runs are in a folder of the caller's."""

    data: Path
    preset: str
    steps: int
    settings: tuple[str, ...]
    bytecode: str  # folder of Python's bytecode

    def begin(self, folder: Path, run: str = "out") -> subprocess.Popen[bytes]:
        """Start training; stdout and stderr go to one pipe."""
        command = [sys.executable, "-m", "minillm_core", "train", "--preset", self.preset]
        command += ["--data", str(self.data), "--out", str(folder / run), *QUIET, *self.settings]
        caches = {
            "MINILLM_CACHE": "cache",
            "TORCHINDUCTOR_CACHE_DIR": "inductor",
            "TRITON_CACHE_DIR": "triton",
        }
        return subprocess.Popen(
            [*command, "--steps", str(self.steps)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                **{name: str(folder / path) for name, path in caches.items()},
                "PYTHONPYCACHEPREFIX": self.bytecode,
            },
        )


def watched(what: Start, folder: Path, run: str = "out") -> dict[str, Any]:
    """Time every piece of output up to the first step."""
    began = time.monotonic()
    child = what.begin(folder, run)
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


def interrupted(what: Start, folder: Path, after: float) -> dict[str, Any]:
    """Send SIGINT after some seconds, and time the exit."""
    child = what.begin(folder)
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


def measure(what: Start, interrupts: int, repeats: int, seed: int) -> dict[str, Any]:
    """Run one watched start and its repetitions, then the interrupted ones, then a start with the last one's cache."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        whole = watched(what, Path(place))
        print(what.data.name, *list(whole.values())[1:4], flush=True)
        again = [watched(what, Path(place), f"again-{number}") for number in range(repeats)]
        for one in again:
            print("with filled caches", *list(one.values())[1:4], flush=True)
    until = whole["first_step_seconds"] or 10.0
    found = []
    for number in range(interrupts):
        with tempfile.TemporaryDirectory() as place:
            found.append(interrupted(what, Path(place), draw.uniform(0.3, until)))
            if number == interrupts - 1:
                after = watched(what, Path(place), "again")
        one = found[-1]
        print(one["after_seconds"], one["exit"], one["seconds_to_the_end"], one["last_lines"][-1:])
    ended = [one["seconds_to_the_end"] for one in found if one["alive"]]
    return {
        "data": what.data.name,
        "preset": what.preset,
        "start": whole,
        **({"with_filled_caches": again} if again else {}),
        "interrupts": found,
        "longest_end_seconds": max(ended, default=None),
        "start_after_an_interrupt": {"exit": after["exit"]} if interrupts else None,
    }


def main() -> None:
    """Measure and write the result."""
    parser = measuring(__doc__, "first_start")
    parser.add_argument("--data", type=Path, action="append", required=True)
    parser.add_argument("--interrupts", type=int, action="append", help="for each --data")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--steps", type=int, default=1, help="of a start")
    parser.add_argument("--setting", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--repeats", type=int, default=0, help="starts with filled caches")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    counts = [*(given.interrupts or []), *[20] * len(given.data)]
    figures = []
    with tempfile.TemporaryDirectory() as bytecode:
        subprocess.run(
            [sys.executable, "-c", IMPORTS],
            env={**os.environ, "PYTHONPYCACHEPREFIX": bytecode},
            check=True,
        )
        for data, count in zip(given.data, counts, strict=False):
            start = Start(data, given.preset, given.steps, tuple(given.setting), bytecode)
            figures.append(measure(start, count, given.repeats, given.seed))
    print(written(given, figures))


if __name__ == "__main__":
    main()
