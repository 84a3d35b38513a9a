"""Whole runs of several plans on one GPU, in turns, with the same seeds on the same text: options, runs, differences."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.command import add_text, measuring
from minillm_core import Plan
from minillm_core.commands import cache_folder
from minillm_core.studies import StopRequest
from minillm_lab.pool import Pool, Wanted
from minillm_lab.study import Trained, open_corpus
from minillm_lab.worth import effect_of

__all__ = ["difference", "in_turns", "settings_of", "training"]


def training(about: str | None, name: str) -> argparse.ArgumentParser:
    """Build the parser of a benchmark that trains plans with some seeds and writes a result file of this name."""
    made = measuring(about, name)
    add_text(made)
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--predictions", type=int, default=1_048_576, help="of the evaluation")
    made.add_argument("--device", default="cuda:0")
    return made


def settings_of(given: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the text and the device."""
    return {
        "data.paths": [given.train],
        "data.val": given.val,
        "data.tokenizer": given.tokenizer,
        "device": given.device,
    }


def in_turns(plans: Mapping[str, Plan], given: argparse.Namespace) -> dict[str, list[Trained]]:
    """Train every plan with every seed, a process each, one at a time; print and return the runs by seed.

    The text is tokenised once, for all of them.

    Raises:
        Exception: the one that ended a run.
    """
    open_corpus(next(iter(plans.values())).config, plans=[*plans.values()])
    wanted = [
        Wanted(name, plan, seed, 1, f"{name}-{seed}", {})
        for seed in range(given.seeds)
        for name, plan in plans.items()
    ]
    found: dict[str, dict[int, Trained]] = {name: {} for name in plans}
    pool = Pool(
        (given.device,),
        [*plans.values()],
        backend="torch",
        cache=cache_folder(),
        stop=StopRequest(),
        each=len(plans),
    )
    with pool:
        for made in pool.train(wanted, watch=lambda under_way, progress: None):
            if not isinstance(made.outcome, Trained):
                raise made.outcome
            run, (label, seed) = made.outcome, (made.wanted.label, made.wanted.seed)
            found[label][seed] = run
            print(label, seed, run.steps, round(run.seconds, 2), run.val_loss, flush=True)
    return {name: [some[seed] for seed in sorted(some)] for name, some in found.items()}


def difference(runs: Sequence[Trained], base: Sequence[Trained]) -> dict[str, Any]:
    """Estimate how much larger the final losses of ``runs`` are than those of ``base``, paired by seed."""
    pairs = zip(runs, base, strict=True)
    return effect_of([one.val_loss - other.val_loss for one, other in pairs]).data()
