"""Steps of several plans in the processes of one launcher; rank 0 writes their losses as JSON.

    torchrun --nproc-per-node 2 stepped.py torch OUT.json SPLIT [NAMES [CONTEXT]]
    mlx.launch -n 2 -- python stepped.py mlx OUT.json SPLIT

Every process makes the same global batches; a plan is trained twice, by all processes together and by
rank 0 alone.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import minillm_core as minillm
from minillm_core.backends.ranks import ALONE, join
from minillm_core.data.batch import part_of
from minillm_core.inspection import Detected, Ranks, batch_hook, trainer

STEPS = 20
TINY = {
    "model.dim": 32,
    "model.heads": 4,
    "model.kv_heads": 2,
    "model.layers": 4,
    "model.vocab": 128,
    "train.seq_len": 32,
    "train.steps": STEPS,
    "train.dtype": "float32",
    "train.compile": "off",
    "train.clip": 1.0,
}
CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "plain": ("", {}),
    "muon": ("muon", {}),
    "normuon": ("muon,normuon", {}),
    "paired_heads": ("paired_heads", {}),
    "windows": (
        "windows",
        {"windows.documents": True, "windows.block": 8, "windows.start": 8, "windows.window": 24},
    ),
    "moe": ("moe", {}),
    "mtp": ("mtp", {}),
    "value_embeds": ("value_embeds", {}),
    "speedrun": (
        "speedrun",
        {"model.kv_heads": 4, "windows.block": 8, "windows.start": 8, "windows.window": 24},
    ),
}
SPLITS = {"micro": (2, 4), "rows": (8, 1)}  # rows and micro-batches of a step


def plan_of(name: str, split: str) -> minillm.Plan:
    """Plan a case: tiny, with steps that can be divided."""
    plugins, options = CASES[name]
    rows, accumulate = SPLITS[split]
    preset = "speedrun" if name == "speedrun" else "tiny"
    sizes = {"train.rows": rows, "train.accumulate": accumulate}
    named = None if name == "speedrun" else plugins or None
    return minillm.build_plan(
        minillm.load(preset=preset, plugins=named, settings={**TINY, **sizes, **options})
    )


def batches(plan: minillm.Plan) -> Iterator[tuple[dict[str, np.ndarray], ...]]:
    """Make the micro-batches of each step; their rows have very different numbers of labels."""
    pieces = tuple(bytes([one]) for one in range(128))
    rng, hook = np.random.default_rng(0), batch_hook(plan, pieces=pieces)
    (shape,) = plan.course
    size = shape.rows, shape.seq_len
    while True:
        micro = []
        for number in range(shape.accumulate):
            ids = rng.integers(0, 128, (size[0], size[1] + 1)).astype(np.int32)
            starts = rng.random(size) < 0.1
            starts[:, 0] = False
            batch = {
                "ids": ids[:, :-1].copy(),
                "labels": ids[:, 1:].copy(),
                "documents": np.cumsum(starts, axis=1, dtype=np.int32),
                "positions": np.tile(np.arange(size[1], dtype=np.int32), (size[0], 1)),
            }
            kept = 3 + 7 * ((np.arange(size[0])[:, None] + number) % 4)
            batch["labels"][np.arange(size[1])[None] >= kept] = -1
            micro.append(hook(batch, "train") if hook else batch)
        yield tuple(micro)


def train(
    plan: minillm.Plan, backend: str, ranks: Ranks, *, moved: bool = False
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Train a plan for its steps: losses, norms and terms, and what a checkpoint would hold.

    ``moved``: no weight is what it begins with, so that gates that start closed are open.
    """
    made = trainer(plan, backend, seed=1)
    if moved:
        arrays, rng = made.arrays(), np.random.default_rng(7)
        for name in sorted(name for name in arrays if name.startswith("model.")):
            off = rng.normal(0.0, 0.05, arrays[name].shape)
            arrays[name] = (arrays[name] + off).astype(np.float32)
        made.resume(arrays)
    made.join(ranks)
    steps = plan.config.train.steps or 1
    figures = []
    for step, micro in zip(range(steps), batches(plan), strict=False):
        supervised = sum(int((one["labels"] >= 0).sum()) for one in micro)
        part = tuple(ranks.columns(one, plan) for one in part_of(micro, *ranks.data))
        found = made.read(made.step(part, plan.values(step / steps), supervised))
        figures.append([found.loss, found.grad_norm, sum(found.terms.values())])
    return np.array(figures), dict(made.arrays())


def main(
    backend: str, out: str, split: str, names: str = ",".join(CASES), context: str = "1"
) -> None:
    """Train every case together and alone, and write how far they are apart."""
    ranks, found = join(Detected(backend, "cpu", "")), {}
    ranks.share_rows(int(context))
    for name in names.split(","):
        plan = plan_of(name, split)
        ranks.check(plan)
        figures, arrays = train(plan, backend, ranks)
        digest = hashlib.sha256(b"".join(arrays[k].tobytes() for k in sorted(arrays))).hexdigest()
        same = len({*map(str, ranks.gathered([int(digest[:12], 16)]))}) == 1
        alone, theirs = train(plan, backend, ALONE) if ranks.leads else (figures, arrays)
        found[name] = {
            "losses": figures[:, 0].tolist(),
            "alone": alone[:, 0].tolist(),
            "figures": float(np.abs(figures - alone).max()),
            "arrays": max(
                float(np.abs(arrays[k] - theirs[k]).max()) for k in arrays if "random" not in k
            ),
            "same": same,
        }
        ranks.agreed()
    if ranks.leads:
        Path(out).write_text(json.dumps(found))
    ranks.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
