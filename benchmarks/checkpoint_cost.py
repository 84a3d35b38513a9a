"""The cost of a checkpoint: stall of training, time to save, and time to load.

    python -m benchmarks.checkpoint_cost                             # gpt2-124m on a GPU
    python -m benchmarks.checkpoint_cost --preset tiny --device cpu  # try it anywhere

minillm beside torch.save and torch.distributed.checkpoint (benchmarks/savers.py), in one process and
in turns. Stall: an interval of steps with one save in its first step, minus an equal interval without
one, the device idle before and after both; so background work counts if it slows steps
down. An interval is longer than the slowest save. Saving and loading are also timed alone, from and
to tensors on the device; the loaded file was just written and is in the page cache.
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import CheckpointException

from benchmarks.command import measuring, written
from benchmarks.ours import PRESET, Ours, bound
from benchmarks.savers import Saver, savers

INTERVAL = 1000  # steps that a stall is reported relative to
WARM = 5  # steps
LONGER = 1.3  # than the slowest save
START = time.perf_counter()


class Bench:
    """A trainer, the savers, and the clock.

    Args:
        ours: steps.
        made: name -> saver.
    """

    def __init__(self, ours: Ours, made: dict[str, Saver]) -> None:
        self.ours, self.savers = ours, made
        self.figures: dict[str, dict[str, list[float]]] = {
            name: {"stall_seconds": [], "call_seconds": [], "save_seconds": [], "load_seconds": []}
            for name in made
        }
        self.plain: list[float] = []  # seconds of the interval without a save
        self.steps = WARM

    def seconds(self, work: Callable[[], Any]) -> float:
        """Time some work, with the device idle before and after it."""
        self.ours.trainer.synchronize()
        began = time.perf_counter()
        work()
        self.ours.trainer.synchronize()
        return time.perf_counter() - began

    def interval(self, save: Callable[[], None] | None = None) -> None:
        """Run some steps; ``save`` is called after the first is enqueued."""
        for step in range(self.steps):
            self.ours.step()
            if step == 0 and save:
                save()

    def alone(self, name: str) -> None:
        """Save and load without concurrent training."""
        saver = self.savers[name]

        def whole() -> None:
            saver.begin()
            saver.end()

        self.figures[name]["save_seconds"].append(self.seconds(whole))
        self.figures[name]["load_seconds"].append(self.seconds(saver.load))

    def within(self, name: str) -> None:
        """Save during training."""
        saver, called = self.savers[name], []

        def begin() -> None:
            began = time.perf_counter()
            saver.begin()
            called.append(time.perf_counter() - began)

        before = self.seconds(self.interval)
        with_save = self.seconds(lambda: self.interval(begin))
        saver.end()
        self.plain.append(before)
        self.figures[name]["stall_seconds"].append(with_save - before)
        self.figures[name]["call_seconds"] += called

    def lengthen(self) -> None:
        """Make the interval longer than the slowest save."""
        slowest = max(max(one["save_seconds"]) for one in self.figures.values())
        step = self.seconds(self.interval) / self.steps
        self.steps = max(2, math.ceil(LONGER * slowest / step))

    def summary(self) -> dict[str, Any]:
        """Return the results as JSON."""
        step = statistics.median(self.plain) / self.steps
        found = {}
        for name, one in self.figures.items():
            medians = {key: round(statistics.median(many), 5) for key, many in one.items() if many}
            found[name] = {
                "bytes": self.savers[name].size(),
                "median": medians,
                f"stall_percent_every_{INTERVAL}_steps": round(
                    100 * medians["stall_seconds"] / (INTERVAL * step), 4
                ),
                **{key: [round(value, 5) for value in many] for key, many in one.items()},
            }
        return {"step_seconds": round(step, 5), "steps_of_interval": self.steps, "savers": found}


def say(line: str) -> None:
    print(f"[{time.perf_counter() - START:6.1f}] {line}", flush=True)


def made_savers(ours: Ours, folder: Path, failed: dict[str, str]) -> dict[str, Saver]:
    """Create the savers that work here; the others' errors are put into ``failed``."""
    device = torch.device(ours.backend.binding.device)
    found: dict[str, Saver] = {}
    for name, make in savers(ours.trainer, device, folder).items():
        try:
            saver = make()
            saver.begin()  # the first save creates folders, threads and pinned memory
            saver.end()
            saver.load()
            found[name] = saver
        except (Exception, CheckpointException):  # the latter is a BaseException
            failed[name] = traceback.format_exc()[-2000:]
            say(f"{name} does not work here:\n{failed[name]}")
    return found


def parsed() -> argparse.Namespace:
    parser = measuring(__doc__, "checkpoint_cost")
    parser.add_argument("--preset", default=PRESET)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--set", action="append", default=[], help="key=value")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, help="on the disk to measure; default: a temporary one"
    )
    return parser.parse_args()


def main() -> None:
    given = parsed()
    warnings.filterwarnings("ignore", message="Detected an existing checkpoint")  # intended
    folder = Path(tempfile.mkdtemp(prefix="minillm-checkpoint-cost-", dir=given.folder))
    plan, backend = bound(given.set, backend="torch", device=given.device, preset=given.preset)
    tokens = np.random.default_rng(0).integers(
        1, plan.config.model.vocab, 8 * plan.tokens_per_step + 1, dtype=np.uint16
    )
    ours, failed = Ours(plan, backend, tokens), {}
    for _ in range(WARM):
        ours.step()
    say(f"{given.preset} on {backend.binding.device_name}: {plan.num_parameters:,} parameters")
    made = made_savers(ours, folder, failed)
    bench = Bench(ours, made)
    path = None
    try:
        for name in made:
            bench.alone(name)
        bench.lengthen()
        for turn in range(given.repeats):
            for name in made:
                bench.alone(name)
                bench.within(name)
            say(f"turn {turn + 1} of {given.repeats}")
            figures = {
                "preset": given.preset,
                "parameters": plan.num_parameters,
                "device": backend.binding.device_name,
                **bench.summary(),
                "failed": failed,
            }  # saved after each turn: a machine may be preempted
            path = written(given, figures)
        for name, one in figures["savers"].items():
            median = one["median"]
            say(
                f"{name:18} {one['bytes'] / 1e6:8.1f} MB  stall {1000 * median['stall_seconds']:8.1f} ms"
                f" ({one[f'stall_percent_every_{INTERVAL}_steps']:.3f} % every {INTERVAL} steps)"
                f"  saved {median['save_seconds']:7.3f} s  loaded {median['load_seconds']:7.3f} s"
            )
    finally:
        for saver in made.values():
            saver.end()
            saver.close()
        ours.close()
        shutil.rmtree(folder, ignore_errors=True)
    say(f"wrote {path}")


if __name__ == "__main__":
    main()
