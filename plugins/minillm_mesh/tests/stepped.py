"""A program that trains several plans in the processes of a launcher; rank 0 writes their losses as JSON.

    torchrun --nproc-per-node 2 stepped.py torch OUT.json SPLIT NAMES alone,off,updates [SETTING=VALUE ...]
    mlx.launch -n 2 -- python stepped.py mlx OUT.json SPLIT

Every process makes the same global batches; a plan is trained by rank 0 alone, and by all processes
together, where updates are not divided and where they are. The first of these is what others should be, and is
never compiled. ``nudged`` is rank 0 alone from weights that are off by their last bit. What rank 0 has trained
alone is kept in the folder that REFERENCES names, if any, for other calls: layers, rows and weights may be shared
otherwise there.
``windows@2x1`` is the case windows with mesh.context=2 and mesh.tensor=1.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

import minillm_core as minillm
from minillm_core.backends.ranks import ALONE, join
from minillm_core.data.batch import part_of
from minillm_core.inspection import Detected, Ranks, batch_hook, read_value, trainer

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
MORE: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "ema": ("ema", {}),
    "schedule_free": ("schedule_free", {}),
    "soap": ("soap", {}),
    "adam8bit": ("adam8bit", {}),
    "layer_clip": ("layer_clip", {}),
    "untie_head": ("untie_head", {"untie_head.until": 0.5}),
    "freeze": ("freeze", {}),
    "bfloat16": ("muon", {"train.dtype": "bfloat16"}),
    "float16": ("muon", {"train.dtype": "float16"}),
    "compiled": (
        "muon,layer_clip",
        {"train.compile": "on", "train.checkpointing": True, "model.layers": 2, "muon.steps": 2},
    ),
}
"""Cases that only sharded updates treat specially: name -> plugins, settings."""
TRACED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "traced": ("", {"train.compile": "on", "train.checkpointing": True, "model.layers": 2}),
}
"""``compiled`` without Muon, whose compilation takes longer than that of the model: for what changes the model alone."""

SPLITS = {"micro": (2, 4), "rows": (8, 1)}  # rows and micro-batches of a step


def plan_of(name: str, split: str, given: Mapping[str, Any] = {}) -> minillm.Plan:
    """Build the plan of a case: preset tiny, with divisible steps."""
    plugins, options = {**CASES, **MORE, **TRACED}[name]
    rows, accumulate = SPLITS[split]
    preset = "speedrun" if name == "speedrun" else "tiny"
    sizes = {"train.rows": rows, "train.accumulate": accumulate}
    named = None if name == "speedrun" else plugins or None
    return minillm.build_plan(
        minillm.load(preset=preset, plugins=named, settings={**TINY, **sizes, **options, **given})
    )


def batches(plan: minillm.Plan) -> Iterator[tuple[dict[str, np.ndarray], ...]]:
    """Yield the micro-batches of each step; their rows have very different numbers of labels, or none."""
    pieces = tuple(bytes([one]) for one in range(128))
    rng, hook = np.random.default_rng(0), batch_hook(plan, pieces=pieces)
    (shape,) = plan.course
    size = shape.rows, shape.seq_len
    for step in count():
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
            kept = 3 + 7 * ((np.arange(size[0])[:, None] + number) % 5)  # other sums in each half
            batch["labels"][np.arange(size[1])[None] >= kept] = -1
            if step % 3 == 2:  # the first of two ranks reads no label
                whole = size[0] * (number < shape.accumulate // 2)
                batch["labels"][: whole if shape.accumulate > 1 else size[0] // 2] = -1
            micro.append(hook(batch, "train") if hook else batch)
        yield tuple(micro)


def train(
    plan: minillm.Plan,
    backend: str,
    ranks: Ranks,
    how: str = "off",
    *,
    moved: bool = False,
    nudged: bool = False,
) -> dict[str, Any]:
    """Train a plan for its steps.

    Args:
        plan: the plan.
        backend: the framework.
        ranks: the processes.
        how: "updates", sharded, or "off".
        moved: perturb all weights, so that gates that start closed are open.
        nudged: change every weight by a relative 6e-8, up or down, to measure the effect of rounding.

    Returns:
        Losses, norms and terms by step, a checkpoint's arrays (with sharded updates on rank 0 alone),
        the bits of weights and the evaluation loss, and the bytes of the update's own arrays.
    """
    compiler = None
    if plan.config.train.compile == "on":
        import torch

        # traced into forward and backward graphs, whose operations run one by one
        compiler = partial(torch.compile, backend="aot_eager")
    divided = how in ("updates", "weights")
    ranks.shard = how if divided else ""
    more: dict[str, Any] = {"ranks": ranks} if divided and not moved else {}
    made: Any = trainer(plan, backend, seed=1, compiler=compiler, **more)
    if moved or nudged:
        arrays, rng = made.arrays(), np.random.default_rng(7 if moved else 11)
        for name in sorted(name for name in arrays if name.startswith("model.")):
            value = arrays[name]
            bit = 6e-8 * value * rng.choice([-1.0, 1.0], value.shape) if nudged else 0.0
            off = rng.normal(0.0, 0.05, value.shape) if moved else bit
            arrays[name] = (value + off).astype(np.float32)
        made.resume(arrays)
    if not more:
        made.join(ranks)
        if divided:
            made.shard(how)
    steps = plan.config.train.steps or 1
    figures = []
    for step, micro in zip(range(steps), batches(plan), strict=False):
        supervised = sum(int((one["labels"] >= 0).sum()) for one in micro)
        part = tuple(ranks.columns(one, plan) for one in part_of(micro, *ranks.data_parallel))
        found = made.read(made.step(part, plan.values((step + 1) / steps), supervised))
        figures.append([found.loss, found.grad_norm, sum(found.terms.values())])
    nats, _ = made.evaluate(next(batches(plan)))
    if ranks.tensor > 1:  # each rank evaluates its part of the positions
        nats = sum(one for (one,) in ranks.all_gather([nats])) * ranks.tensor / ranks.size
    arrays = dict(made.arrays())
    weights = [arrays[name] for name in sorted(arrays)]
    if backend == "torch":
        parts = [getattr(one, "full_tensor", one.detach)() for one in made.model.parameters()]
        weights = [one.detach().float().numpy() for one in parts]
    return {
        "figures": np.array(figures),
        "arrays": arrays,
        "nats": nats,
        "digest": hashlib.sha256(b"".join(map(np.ndarray.tobytes, weights))).hexdigest(),
        "bytes": sum(
            a.nbytes for name, a in made.local_arrays().items() if name[:5] in ("model", "optim")
        ),
        "beside": beside_rows(made) if how == "weights" else 0,
    }


def beside_rows(made: Any) -> int:
    """Count the bytes of whole master weights that a process holds beside its rows, between steps."""
    rows, masters = made.share.rows, made.weights.masters
    whole = [master for name, master in masters.items() if master is not rows[name]]
    return sum(master.untyped_storage().nbytes() for master in whole)


def alone(plan: minillm.Plan, backend: str, split: str) -> dict[str, Any]:
    """Train a plan in this process alone, not compiled, unless that has been done: see :func:`train`."""
    plan = plan.with_train(compile="off")
    folder = os.environ.get("REFERENCES")
    if folder is None:
        return train(plan, backend, ALONE)
    asked = [backend, split, plan.hash, plan.config.model_dump(mode="json", exclude={"mesh"})]
    name = hashlib.sha256(json.dumps(asked).encode()).hexdigest()
    file = Path(folder, f"{name}.pickle")
    if not file.exists():
        part = file.with_suffix(f".{os.getpid()}")
        part.write_bytes(pickle.dumps(train(plan, backend, ALONE)))
        part.replace(file)
    return pickle.loads(file.read_bytes())


def main(
    backend: str,
    out: str,
    split: str,
    names: str = "cases",
    how: str = "alone,off",
    *settings: str,
) -> None:
    """Train every case in each way, and write the others' differences from the first."""
    ranks, found = join(Detected(backend, "cpu", "")), {}
    words = dict(setting.split("=") for setting in settings)
    given = {key: read_value(word) for key, word in words.items()}
    ranks.share_layers(given.get("mesh.pipeline", 1))
    first, *others = how.split(",")
    for name in {"cases": [*CASES], "more": [*MORE]}.get(names) or names.split(","):
        case, _, shared = name.partition("@")
        ranks.share_rows(*map(int, (shared or f"{given.get('mesh.context', 1)}x1").split("x")))
        plan, expected = plan_of(case, split, given), None
        ranks.check(plan)
        if first != "alone":
            expected = train(plan.with_train(compile="off"), backend, ranks, first)
        elif ranks.is_main:
            expected = alone(plan, backend, split)
        found[name] = {}
        for kind in others:
            ranks.broadcast()
            if kind == "nudged":
                if ranks.is_main and expected is not None:
                    met = train(plan, backend, ALONE, nudged=True)
                    off = float(np.abs(met["figures"] - expected["figures"]).max())
                    found[name][kind] = {
                        "figures": off,
                        "nats": abs(met["nats"] / expected["nats"] - 1),
                    }
                continue
            met = train(plan, backend, ranks, kind)
            each = ranks.all_gather([int(met["digest"][:12], 16), met["nats"]])
            sizes = ranks.all_gather([met["bytes"], met["beside"]])
            if ranks.is_main and expected is not None:
                arrays = expected["arrays"]
                assert met["arrays"].keys() == arrays.keys()
                found[name][kind] = {
                    "losses": met["figures"][:, 0].tolist(),
                    "expected": expected["figures"][:, 0].tolist(),
                    "figures": float(np.abs(met["figures"] - expected["figures"]).max()),
                    "nats": abs(met["nats"] / expected["nats"] - 1),
                    "arrays": max(
                        float(np.abs(array - arrays[key]).max())
                        for key, array in met["arrays"].items()
                        if "random" not in key
                    ),
                    "same": len({*each}) == 1,
                    "bytes": [int(size) for size, _ in sizes],
                    "beside": int(sum(beside for _, beside in sizes)),
                    "all": expected["bytes"],
                }
    if ranks.is_main:
        Path(out).write_text(json.dumps(found))
    ranks.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
