"""Invalid safetensors headers, manifests and scalars, read by both frameworks' trainers.

    python -m benchmarks.headers --tried 1000 [--backend torch|mlx|both] [--seed S]

Each is a real checkpoint with one file changed (benchmarks/trials/hostile.py) and, except for a fraction
of the manifests, with recomputed digests, so that the parsers are tested and not the digests. A child
process reads it as ``--resume`` does: find, verify, read, pass to the trainer. Correct results: minillm's
own error, or the arrays load and are bitwise equal to those that the safetensors package
reads from the same files. Counted: signals (a crash), executed code (an audit hook on exec, compile,
os.system, subprocess, socket, pickle), files touched elsewhere, seconds, memory.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.trials.bench import Row, backends_of, each, finish, parser, workshop
from benchmarks.trials.compare import identical
from benchmarks.trials.hostile import MARKER, mutate
from benchmarks.trials.reference import Reference, make_reference
from benchmarks.trials.tiny_run import TinyRun
from minillm_core.checkpoint import layout

BATCH = 50  # checkpoints read by one child process
SLOW = 1.0  # seconds for one of them
HUNGRY = 256 << 20  # bytes more than before
RUNS_CODE = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "socket.")
WRITES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod")


@dataclass(frozen=True)
class Trial:
    """The checkpoints of one child process."""

    reference: Reference
    seeds: tuple[str, ...]


@dataclass
class Outcome:
    """The result of a batch."""

    refused: int = 0
    equal: int = 0
    seconds: float = 0.0
    bytes: int = 0
    wrong: list[str] = field(default_factory=list)


def read_batch(trial: Trial) -> Outcome:
    """Let child processes read the checkpoints; after a crash another one reads the rest."""
    outcome, left = Outcome(), list(trial.seeds)
    run = trial.reference.run
    while left:
        place = Path(tempfile.mkdtemp(prefix="headers-", dir=run.folder))
        report = place / "report.jsonl"
        read = partial(_child, trial.reference, left, place, report)
        child = run.fork(read, place / "log")
        try:
            code = child.wait(300)
        except TimeoutError:
            code = child.kill()
        found = (
            [json.loads(line) for line in report.read_bytes().splitlines()]
            if report.exists()
            else []
        )
        for seed, one in zip(left, found, strict=False):
            _judge(seed, one, outcome)
        if len(found) < len(left):
            said = (place / "log").read_text(errors="replace")[-500:]
            outcome.wrong.append(f"{left[len(found)]}: the process ended with {code}: {said}")
            found.append({})
        left = left[len(found) :]
        if (place / MARKER).exists():
            outcome.wrong.append(f"one of {trial.seeds[0]} and the next made {MARKER}")
        shutil.rmtree(place)
    return outcome


def _judge(seed: str, one: Mapping[str, Any], outcome: Outcome) -> None:
    outcome.refused += one["result"] == "refused"
    outcome.equal += one["result"] == "equal"
    outcome.seconds = max(outcome.seconds, one["seconds"])
    outcome.bytes = max(outcome.bytes, one["bytes"])
    problems = list(one["ran"])
    if one["result"] not in ("refused", "equal"):
        problems.append(one["result"])
    if one["seconds"] > SLOW:
        problems.append(f"{one['seconds']:.1f} s")
    if one["bytes"] > HUNGRY:
        problems.append(f"{one['bytes']:,} bytes")
    outcome.wrong += [f"{seed}, {one['what']}: {problem}" for problem in problems]


def _child(reference: Reference, seeds: list[str], place: Path, report: Path) -> int:
    """Read them one by one, writing a line for each."""
    os.chdir(place)
    good = layout.folders(reference.out)[0][1]
    load = _loader(reference)
    ran: list[str] = []
    load(_copied(good, place, "warm"))  # perform lazy imports beforehand
    for n in range(20):
        load(_mutated(f"warm {n}", good, place)[0])
    sys.addaudithook(_watch(place, ran))
    with report.open("ab", buffering=0) as lines:
        for seed in seeds:
            out, what = _mutated(seed, good, place)
            ran.clear()
            before, began = _peak(), time.perf_counter()
            result = load(out)
            line = {
                "what": what,
                "result": result,
                "seconds": time.perf_counter() - began,
                "bytes": _peak() - before,
                "ran": [*ran],
            }
            lines.write(json.dumps(line).encode() + b"\n")
            shutil.rmtree(out)
    return 0


def _copied(good: Path, place: Path, name: str) -> Path:
    out = place / name
    shutil.copytree(good, out / "checkpoints" / good.name)
    return out


def _mutated(seed: str, good: Path, place: Path) -> tuple[Path, str]:
    out = Path(tempfile.mkdtemp(prefix="out-", dir=place))
    bad = out / "checkpoints" / good.name
    bad.mkdir(parents=True)
    return out, mutate(random.Random(seed), good, bad)


def _loader(reference: Reference) -> Callable[[Path], str]:
    """Return ``load(OUT)``, which returns refused, equal, or the fault; the trainer is built once."""
    from minillm_core.backends.bind import create_backend
    from minillm_core.backends.detect import choose, probe
    from minillm_core.checkpoint.read import newest_or_refuse
    from minillm_core.errors import MinillmError
    from minillm_core.train.restore import open_run
    from minillm_core.train.resume import load as resume

    run = open_run(reference.out, say=lambda text: None)
    detected = choose(probe(), reference.run.backend, "cpu")
    trainer = create_backend(detected, run.plan).trainer(run.plan, run.plan.config.seed)

    def load(out: Path) -> str:
        try:
            checkpoint = newest_or_refuse(out)
            resume(checkpoint, trainer)
            arrays, held = checkpoint.arrays(), trainer.arrays()
        except MinillmError:
            return "refused"
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:200]}"
        return _compared(checkpoint.path, arrays, held)

    return load


def _compared(path: Path, arrays: Mapping[str, np.ndarray], held: Mapping[str, np.ndarray]) -> str:
    """Compare our arrays, and the trainer's, with the reference parser's."""
    from safetensors.numpy import load_file

    try:
        wanted = {
            name: array
            for file in (layout.MODEL, layout.OPTIMIZER)
            for name, array in load_file(path / file).items()
        }
    except Exception as error:
        return f"loaded what the safetensors package refuses: {error}"
    if wanted.keys() != arrays.keys():
        return f"loaded other names: {sorted(wanted.keys() ^ arrays.keys())[:4]}"
    for name, array in wanted.items():
        if not identical(arrays[name], array):
            return f"{name} is not what the safetensors package reads"
        there = held.get(name, array)
        if there.dtype == array.dtype and not identical(there, array):
            return f"{name} did not reach the trainer as it is"
    return "equal"


def _watch(place: Path, ran: list[str]) -> Callable[[str, tuple], None]:
    """Install an audit hook that records executed code, and files changed elsewhere."""

    def hook(event: str, arguments: tuple) -> None:
        if event == "exec" and not Path(getattr(arguments[0], "co_filename", "?")).is_file():
            ran.append(f"exec of {getattr(arguments[0], 'co_filename', arguments[0])!r:.80}")
        elif event == "compile" and not Path(str(arguments[1])).is_file():
            ran.append(f"compile of {arguments[1]!r:.80}")
        elif event.startswith(RUNS_CODE) or event.startswith("pickle."):
            ran.append(f"{event} {arguments!r:.80}")
        elif event in WRITES or (
            event == "open" and isinstance(arguments[2], int) and arguments[2] & 3
        ):
            path = (
                os.fsdecode(arguments[0])
                if isinstance(arguments[0], (str, bytes, os.PathLike))
                else ""
            )
            if path.startswith("/") and not path.startswith(str(place)):
                ran.append(f"{event} {path}")

    return hook


def _peak() -> int:
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def main() -> int:
    options = parser(__doc__, both=True)
    options.add_argument("--tried", type=int, default=1000, help="for each backend")
    given = options.parse_args()
    with workshop(given) as folder:
        found, trials = {}, []
        for backend in backends_of(given):
            reference = make_reference(replace(TinyRun(folder), backend=backend))
            found[backend] = Row(f"made-up headers and manifests, {backend}")
            seeds = [f"{given.seed} {number}" for number in range(given.tried)]
            trials += [
                Trial(reference, tuple(seeds[at : at + BATCH]))
                for at in range(0, len(seeds), BATCH)
            ]
        for trial, outcome in each(read_batch, trials, given.jobs):
            row = found[trial.reference.run.backend]
            row.tried += len(trial.seeds)
            row.detected += outcome.refused + outcome.equal
            row.ended += outcome.equal  # those that loaded
            row.bit_equal += outcome.equal
            row.count("refused", outcome.refused)
            row.facts["slowest_seconds"] = max(
                row.facts.get("slowest_seconds", 0.0), outcome.seconds
            )
            row.facts["most_bytes"] = max(row.facts.get("most_bytes", 0), outcome.bytes)
            row.failed += outcome.wrong
        return finish("headers", list(found.values()), given)


if __name__ == "__main__":
    raise SystemExit(main())
