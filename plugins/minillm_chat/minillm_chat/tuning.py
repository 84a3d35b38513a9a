"""Default length and learning-rate schedule of a fine-tuning run.

A few epochs over the documents, since more make a good model worse. A branch keeps the learning rates of
its run: those of AdamW and of every plugin's rule follow one schedule, which falls to 0 over the tuning,
from a tenth or, where tuning is more than a tenth of all steps, from its share of them. A run initialised
from another run's weights has its own schedules, and a tenth of that run's train.lr.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from minillm_core import Plan
from minillm_core.commands import counted

__all__ = ["tuned"]

FIRST = 0.1
"""Fraction of the peak learning rates at which a branch continues: a cosine schedule's final value."""


def tuned(prepared: Any, plan: Plan, tokens: int) -> Any | None:
    """Choose the steps and the learning-rate schedule of a run whose data source declares epochs.

    Args:
        prepared: the request; nothing is chosen for a resumed run, or one from scratch.
        plan: of the settings as given.
        tokens: of the run's documents, to train on.

    Returns:
        The settings with the chosen values and notes; None: nothing is chosen.
    """
    loaded, epochs = prepared.loaded, plan.sourcing.epochs
    request, branch, train = prepared.request, loaded.branch, loaded.config.train
    starts = branch is not None or (loaded.config.init is not None and prepared.earlier is None)
    if epochs is None or request is None or not starts:
        return None
    goes_on = branch is not None and not branch.weights_only
    first = branch.checkpoint.step if branch is not None and goes_on else 0
    chosen, notes = {}, list(loaded.notes)
    if request.given("train.steps") is None and request.given("train.minutes") is None:
        steps = max(math.ceil(epochs * tokens / plan.tokens_per_step), 1)
        chosen = {"steps": first + steps, "minutes": None}
        more = f" after the {first:,} of the branch" if first else ""
        packer = plan.arrangement.get("packer")  # how much it pads is known when rows are packed
        less = f", minus what plugin '{packer.owner}' pads of the rows" if packer else ""
        notes.append(
            f"{counted(steps, 'step')}{more}: the documents are read {epochs:g} times{less}, since "
            "train.steps is not given"
        )
    last = chosen.get("steps", train.steps)
    asked = ("train.lr", "train.schedule", "train.cooldown", "train.minutes")
    if branch and not goes_on and request.given("train.lr") is None:
        chosen["lr"] = FIRST * train.lr
        notes.append(
            f"train.lr={FIRST * train.lr:g}, {FIRST:.0%} of the earlier run's, since it is not given"
        )
    if goes_on and last and last > first and all(request.given(key) is None for key in asked):
        share = (last - first) / last
        chosen |= {"schedule": "wsd", "cooldown": min(share / FIRST, 1.0), "warmup": 0.0}
        notes.append(
            f"rates fall to 0 from {100 * max(FIRST, share):.2g} % of the branch's (train.lr={train.lr:g}), "
            "since neither train.lr nor train.schedule is given"
        )
    if not chosen:
        return None
    origins = loaded.origins | {f"train.{key}": "tuning" for key in chosen}
    config = loaded.config.model_copy(update={"train": train.model_copy(update=chosen)})
    return replace(loaded, config=config, origins=origins, notes=tuple(notes))
