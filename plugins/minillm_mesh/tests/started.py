"""A program that checks values and memory of trainers with sharded weights from initialisation on.

    torchrun --nproc-per-node 2 started.py OUT.json FOLDER

Rank 0 writes, for each recipe, whether a sharded run's initial values equal a single process's to the bit, and
whether they do after it has read a single process's checkpoint in FOLDER; and, for a model of many layers, each
rank's peak memory in bytes during initialisation and during reading.
"""

from __future__ import annotations

import gc
import json
import sys
import tracemalloc
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from stepped import CASES, MORE, plan_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import minillm_core as minillm
from minillm_core.backends.ranks import ALONE, join
from minillm_core.checkpoint.commit import commit
from minillm_core.checkpoint.read import Checkpoint
from minillm_core.inspection import Detected, Ranks, trainer

DEEP = {"model.layers": 24, "model.dim": 128, "model.vocab": 256}
"""A model with many layers, each a small part of it."""


class Held(TorchDispatchMode):
    """The bytes of live tensors, except those on the meta device.

    Attributes:
        now: current bytes.
        most: peak bytes.
        largest: bytes of the largest tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = self.largest = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Record the memory of an operation's results."""
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, torch.Tensor) and not one.is_meta:
                self._note(getattr(one, "_local_tensor", one).untyped_storage())
        return made

    def _note(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._known or not storage.nbytes():
            return
        self._known[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.most, self.largest = max(self.most, self.now), max(self.largest, storage.nbytes())
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self._known.pop(key)


@contextmanager
def counted() -> Iterator[Any]:
    """Count the bytes of tensors and NumPy arrays within the context."""
    gc.collect()
    # never stopped: tracemalloc.stop() crashes beside gloo's threads before Python 3.12.9 (CPython issue 128679)
    tracemalloc.start()
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    found = SimpleNamespace()
    with Held() as held:
        yield found
    found.tensors, found.largest = held.most, held.largest
    found.arrays = tracemalloc.get_traced_memory()[1] - before


def started(plan: minillm.Plan, ranks: Ranks, shard: str = "") -> Any:
    """Start a trainer with the sharding ``shard``."""
    ranks.shard = shard
    return trainer(plan, "torch", seed=1, ranks=ranks)


def equal(run: Any, expected: Mapping[str, np.ndarray], ranks: Ranks) -> bool:
    """Return, on rank 0, whether a run's arrays are bit-identical; check that its parameters are the masters."""
    arrays = run.arrays()
    if run.plan.config.train.dtype != "bfloat16" and not run.plan.views:
        names = [name for name, *_ in run.model.named_parameters()]
        whole = {name: one.full_tensor() for name, one in run.model.named_parameters()}
        if ranks.is_main:
            for name in names:
                assert np.array_equal(arrays[f"model.{name}"], whole[name].detach().numpy()), name
    return not ranks.is_main or (
        arrays.keys() == expected.keys()
        and all(arrays[name].tobytes() == one.tobytes() for name, one in expected.items())
    )


def moved(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Replace weights and optimizer state by random numbers."""
    rng, found = np.random.default_rng(3), dict(arrays)
    for name, array in arrays.items():
        if name.startswith(("model.", "optimizer.")) and array.dtype == np.float32:
            found[name] = np.abs(rng.normal(size=array.shape)).astype(np.float32)
    return found


def saved(folder: Path, arrays: Mapping[str, np.ndarray], ranks: Ranks) -> dict[str, Any]:
    """Have rank 0 write a checkpoint; return its arrays, which are read lazily."""
    if ranks.is_main:
        folder.mkdir()
        commit(folder, 7, arrays, {"step": 7})
    ranks.broadcast()
    return Checkpoint(folder / "checkpoints" / "step-00000007", 7).deferred()


def main(out: str, folder: str) -> None:
    """Start every recipe and the deep model, and write the results."""
    ranks, found = join(Detected("torch", "cpu", "")), {}
    for name in [*CASES, *(name for name in MORE if name != "float16")]:
        plan = plan_of(name, "micro")
        alone = started(plan, ALONE) if ranks.is_main else None
        expected = alone.arrays() if alone else {}
        shown = ranks.broadcast(sorted(alone.witnesses()) if alone else None)
        run = started(plan, ranks, "weights")
        inits = [key for key in shown if key.startswith("init:")]
        seen = ranks.all_gather([key in run.witnesses() for key in inits])
        begun = equal(run, expected, ranks)
        if alone:
            alone.resume(moved(expected))
            expected = alone.arrays()
        run.resume(saved(Path(folder) / name, expected, ranks))
        found[name] = {
            "begun": begun,
            "shown": all(map(any, zip(*seen, strict=True))),
            "resumed": equal(run, expected, ranks),
        }
    plan = plan_of("plain", "micro", DEEP)
    with counted() as whole:
        run = started(plan, ranks, "updates")
    held = saved(Path(folder) / "deep", run.arrays(), ranks)
    del run
    with counted() as begun:
        run = started(plan, ranks, "weights")
    with counted() as read:
        run.resume(held)
    own = sum(array.nbytes for name, array in run.local_arrays().items() if "random" not in name)
    found["deep"] = {
        "numbers": plan.num_parameters,
        "parameter": 4 * max(info.size for info in plan.parameters.values()),
        "own": [one for (one,) in ranks.all_gather([own])],
    }
    for when, one in (("updates", whole), ("begun", begun), ("read", read)):
        each = ranks.all_gather([one.tensors, one.largest, one.arrays])
        found["deep"][when] = [
            dict(zip(("tensors", "largest", "arrays"), sizes, strict=True)) for sizes in each
        ]
    if ranks.is_main:
        Path(out).write_text(json.dumps(found))
    ranks.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
