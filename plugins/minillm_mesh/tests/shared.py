"""A program that compares two processes that share rows or layers with rank 0 alone, for every plugin.

    torchrun --nproc-per-node 2 shared.py OUT.json context|pipeline

Compatible plugins are combined in one model; all others, and further variants, each have a model of their own.
A model trains two steps from perturbed weights, so that every gate is open; a refused plan gives its reason.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from stepped import TINY, train

import minillm_core as minillm
from minillm_core.backends.ranks import ALONE, join
from minillm_core.inspection import Detected
from tools import every_plugin

MODEL = {"build_attention", "build_model", "compute_loss", "on_batch"}
SIZES = {**TINY, "train.rows": 2, "train.accumulate": 1, "train.steps": 2}
AXES: Mapping[str, Mapping[str, int]] = {
    "context": {"mesh.context": 2},
    "pipeline": {"mesh.pipeline": 2, "train.accumulate": 2},
}
AXIS = AXES[sys.argv[2]]
OTHER_SIZES = ("batch_schedule",)
"""Plugins whose steps have several sizes: the batches here have one."""


def plan_of(names: Sequence[str], given: Mapping[str, Any]) -> minillm.Plan:
    """Build a plan of preset tiny with some plugins."""
    settings = {**SIZES, **AXIS, **given}
    return minillm.build_plan(
        minillm.load(preset="tiny", plugins=",".join(names), settings=settings)
    )


def models() -> Iterator[tuple[str, minillm.Plan]]:
    """Yield plans that together have every plugin with a part in the model."""
    together = dict[str, every_plugin.Form]()
    for form in every_plugin.forms():
        hooks = set(form.cls.hooks)
        if form.left_out or form.name in OTHER_SIZES or not hooks & MODEL:
            continue
        options = {f"{form.name}.{key}": value for key, value in form.options.items()}
        plan = plan_of(form.names, options)
        if form.name in every_plugin.ALONE or form.name in together or refusal(plan):
            yield str(form), plan
        else:
            together[form.name] = form
    given: dict[str, Any] = {}
    for form in together.values():
        given |= {f"{form.name}.{key}": value for key, value in form.options.items()}
    for key, value in every_plugin.APART.items():
        if key.partition(".")[0] in together:
            given[key] = json.loads(value)
    yield "together: " + ", ".join(together), plan_of([*together], given)


def refusal(plan: minillm.Plan) -> str | None:
    """Return the reason why the parallelism refuses a plan."""
    try:
        RANKS.check(plan)
    except minillm.MinillmError as error:
        return str(error)
    return None


RANKS = join(Detected("torch", "cpu", ""))


def main(out: str) -> None:
    """Train every model in two processes and in one, and write the differences."""
    RANKS.share_rows(AXIS.get("mesh.context", 1))
    RANKS.share_layers(AXIS.get("mesh.pipeline", 1))
    found = {}
    for name, plan in models():
        if why := refusal(plan):
            found[name] = why
            continue
        figures = train(plan, "torch", RANKS, "updates", moved=True)["figures"]
        if RANKS.is_main:
            alone = train(plan, "torch", ALONE, moved=True)["figures"]
            assert np.isfinite(figures).all()
            found[name] = float((np.abs(figures - alone) / np.maximum(1.0, np.abs(alone))).max())
        RANKS.broadcast()
    if RANKS.is_main:
        Path(out).write_text(json.dumps(found))
    RANKS.close()


if __name__ == "__main__":
    main(sys.argv[1])
