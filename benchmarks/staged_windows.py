"""Windows that grow in stages, as inputs of one compiled step or as constants of one each: compile time, speed.

    python -m benchmarks.staged_windows [--preset speedrun] [--steps 8] [--runs one-cold,one-warm,three-cold]

Each run is a separate process: ``one`` graph as bound by the backend, or ``three``, with no window as an
input; with an empty compile cache (``cold``) or the one left by the previous run of its kind (``warm``).
Ids are drawn by Zipf's law, documents end after 400 tokens on average. A run prints the seconds from the start of
planning to its first step's loss, graphs, median milliseconds of a step in each stage, and losses, which
show the variation between runs of one program due to kernels with nondeterministic summation order.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.command import measuring, written
from benchmarks.ours import activated
from benchmarks.sparse_rows import batch_of, zipf
from minillm_core.inspection import batch_hook

RESULT = "RESULT "
BATCHES, TURNS, BEFORE = 6, 3, 4
END = 1 / 400  # of documents, per token


def measure(kind: str, preset: str, steps: int) -> dict[str, Any]:
    """Run one configuration in this process."""
    import torch

    began = time.perf_counter()
    plan, made, active = activated((), "", "torch", "auto", preset=preset)
    train = plan.config.train
    hook = batch_hook(plan, active) or (lambda batch, phase: batch)
    batches = []
    for number, ids in enumerate(
        zipf(plan.config.model.vocab, (BATCHES, train.rows, train.seq_len + 1))
    ):
        batch = batch_of(ids)
        ends = np.random.default_rng(number).random((train.rows, train.seq_len)) < END
        batch["documents"] = np.cumsum(ends, axis=1).astype(np.int32)
        batches.append(hook(batch, "train"))
    trainer: Any = made.trainer(plan, 0)
    if kind == "three":
        trainer.binding = replace(trainer.binding, inputs=())
    tokens, losses = train.rows * train.seq_len, []

    def step(progress: float) -> Any:
        batch = batches[len(losses) % BATCHES]
        return trainer.step([batch], plan.values(progress), tokens)

    losses.append(trainer.read(step(0.05)).loss)
    first, milliseconds = time.perf_counter() - began, {}
    for progress in (0.05, 0.5, 0.95):  # one per stage
        for _ in range(BEFORE):
            losses.append(trainer.read(step(progress)).loss)
        times = []
        for _ in range(TURNS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(steps):
                handle = step(progress)
            trainer.read(handle)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) / steps)
        milliseconds[str(progress)] = round(1000 * statistics.median(times), 2)
    return {
        "graphs": len(trainer.graphs),
        "inputs": trainer.binding.inputs,
        "first_step_seconds": round(first, 1),
        "step_ms": milliseconds,
        "losses": losses,
        "attention": {one.op: one.kernel for one in trainer.binding.kernels}["attention"],
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


def main() -> None:
    """Run every configuration, and write the result file after each."""
    parser = measuring(__doc__, "staged_windows")
    parser.add_argument("--preset", default="speedrun")
    parser.add_argument("--steps", type=int, default=8, help="timed, a turn")
    parser.add_argument("--runs", default="one-cold,one-warm,three-cold,three-warm")
    parser.add_argument("--child", metavar="KIND", help="make one run in this process")
    given = parser.parse_args()
    if given.child:
        print(RESULT + json.dumps(measure(given.child, given.preset, given.steps)))
        return
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in given.runs.split(","):
            kind, _, _ = name.partition("-")
            cache = f"{folder}/{kind}"
            variables = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
            command = [sys.executable, "-m", "benchmarks.staged_windows", "--child", kind]
            command += ["--preset", given.preset, "--steps", str(given.steps)]
            run = subprocess.run(
                command,
                env={**os.environ, **variables},
                capture_output=True,
                text=True,
                check=False,
            )
            lines = [line for line in run.stdout.splitlines() if line.startswith(RESULT)]
            found[name] = (
                json.loads(lines[0][len(RESULT) :]) if lines else {"failed": run.stderr[-2000:]}
            )
            print(
                name, {key: one for key, one in found[name].items() if key != "losses"}, flush=True
            )
            path = written(given, {"preset": given.preset, "runs": found})
    print(path)


if __name__ == "__main__":
    main()
