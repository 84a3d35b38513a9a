"""Peak memory of a process with sharded weights during the start of its run: on CPUs, over gloo.

    python -m benchmarks.start_memory [--preset gpt2-124m] [--sizes 2,4] [--plugins muon]

`mesh.shard=weights` for each number of processes, in two alternating ways, in fresh processes each time:

whole    a process builds the whole model and its optimizer, loads, and keeps its part, as in earlier versions
divided  a process builds only its part: parameters on torch's meta device, rows drawn or read one by one

new      initial values; and the first step, with one row of few tokens in each process
resumed  reading a checkpoint of one process; no step

Figures are bytes per process: the peak resident memory (VmHWM) minus the resident memory before the
model, with PyTorch imported, the plan built and the process group initialised. On a CPU memory allocated and
never written to, such as the optimizer's zeros before a step, is not resident: on a GPU it counts.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.command import measuring, written

WAYS, STARTS = ("whole", "divided"), ("new", "resumed")
TOKENS = 32  # of a row
LIMIT = 1200  # seconds


def planned(preset: str, plugins: str, size: int) -> Any:
    """Plan a preset with rows of few tokens."""
    import minillm_core as minillm

    small = {"train.rows": 1, "train.accumulate": size, "train.seq_len": TOKENS}
    settings = {**small, "train.dtype": "float32", "train.compile": "off"}
    return minillm.build_plan(minillm.load(preset=preset, plugins=plugins, settings=settings))


def batch_of(plan: Any) -> dict[str, np.ndarray]:
    """Build a micro-batch of one row."""
    from minillm_core.inspection import batch_hook

    row = np.arange(TOKENS, dtype=np.int32)[None]
    batch = {"ids": row, "labels": row.copy(), "documents": 0 * row, "positions": row.copy()}
    hook = batch_hook(plan)
    return hook(batch, "train") if hook else batch


def save(preset: str, plugins: str, folder: str) -> None:
    """Write the checkpoint of a new model."""
    from minillm_core.backends.bind import create_backend
    from minillm_core.checkpoint.commit import commit
    from minillm_core.inspection import Detected

    plan = planned(preset, plugins, 1)
    run = create_backend(Detected("torch", "cpu", ""), plan).trainer(plan, 0)
    commit(Path(folder), 1, run.arrays(), {"step": 1})


def start(preset: str, plugins: str, way: str, what: str, folder: str) -> None:
    """Start a run in this process of several; rank 0 writes all figures."""
    from minillm_core.backends.bind import create_backend
    from minillm_core.backends.ranks import join
    from minillm_core.checkpoint.read import Checkpoint
    from minillm_core.inspection import Detected

    detected = Detected("torch", "cpu", "")
    ranks = join(detected)
    plan = planned(preset, plugins, ranks.size)
    backend: Any = create_backend(detected, plan)
    saved = Checkpoint(Path(folder) / "checkpoints" / "step-00000001", 1)
    ranks.broadcast()
    before, began = psutil.Process().memory_info().rss, time.perf_counter()
    if way == "divided":
        ranks.shard = "weights"
        run = backend.trainer(plan, 0, ranks=ranks)
        if what == "resumed":
            run.resume(saved.deferred())
    else:
        run = backend.trainer(plan, 0)
        run.join(ranks)
        if what == "resumed":
            run.resume(saved.arrays())
        run.shard("weights")
    ranks.broadcast()
    figures = {"start_seconds": time.perf_counter() - began, "start_bytes": peak_over(before)}
    if what == "new":
        run.read(run.step([batch_of(plan)], plan.values(0.5), TOKENS * ranks.size))
        figures["step_bytes"] = peak_over(before)
    each = ranks.all_gather(list(figures.values()))
    if ranks.is_main:
        names = {"numbers": plan.num_parameters}
        found = {key: [one[at] for one in each] for at, key in enumerate(figures)}
        (Path(folder) / "found.json").write_text(json.dumps(names | found))
    ranks.close()


def peak_over(before: int) -> int:
    """Return the peak resident memory so far, minus an earlier value."""
    from minillm_core.backends.memory import process_peak

    return (process_peak() or 0) - before


def child(size: int, *words: str) -> None:
    """Run this file in several processes."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(size)] if size > 1 else []
    command = [sys.executable, *launcher, "-m", "benchmarks.start_memory", "--child", *words]
    subprocess.run(command, check=True, timeout=LIMIT)


def main() -> None:
    """Measure every number of processes, in both ways, new and resumed."""
    parser = measuring(__doc__, "start_memory")
    parser.add_argument("--preset", default="gpt2-124m")
    parser.add_argument("--sizes", default="2,4")
    parser.add_argument("--plugins", default="muon")
    given = parser.parse_args()
    found: dict[str, Any] = {"preset": given.preset, "plugins": given.plugins, "processes": {}}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "checkpoints").mkdir()
        child(1, "save", given.preset, given.plugins, folder)
        for size in map(int, given.sizes.split(",")):
            for what in STARTS:
                for way in WAYS:
                    child(size, "start", given.preset, given.plugins, way, what, folder)
                    met = json.loads((Path(folder) / "found.json").read_text())
                    found["numbers"] = met.pop("numbers")
                    found["processes"].setdefault(str(size), {})[f"{what}, {way}"] = met
                    print(size, what, way, met, flush=True)
    written(given, found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        {"save": save, "start": start}[sys.argv[2]](*sys.argv[3:])
    else:
        main()
