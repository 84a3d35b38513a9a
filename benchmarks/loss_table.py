"""Generator of the README's table of time to loss, from the results named in FILES.

python -m benchmarks.loss_table             # check that the page is up to date
python -m benchmarks.loss_table --write     # write it

Preset ``speedrun`` and modded-nanogpt were trained in turns on one GPU. Most targets are the
final losses of two other trainers, whose tokens are given: they do not depend on the GPU. A time is
that of the settings that reach the target first, the mean of their seeds, if all reached it. Between two evaluations
the loss is interpolated linearly if they are no more than a tenth of the time apart; otherwise the later one counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.curves import crossing
from benchmarks.environment import RESULTS, ROOT
from benchmarks.page import table as markdown
from benchmarks.provenance import unique
from tools.pages import Page, main

__all__ = ["PAGE", "Reached", "below", "best", "row"]

RECIPE = "speedrun"  # the preset
FILES = "time_to_loss_fourteen", "modded_nanogpt_fourteen", "peers", "time_to_three"
THREE = 3.0  # nats

NEAR = 0.1
"""Fraction of the later time: evaluations further apart only bound the crossing."""

Document = Mapping[str, Any]


@dataclass(frozen=True, order=True)
class Reached:
    """What the runs with the same settings needed to reach a target, the mean of their seeds."""

    seconds: float
    tokens: float
    settings: str
    seeds: int

    def __str__(self) -> str:
        """Format as ``13.8 s, 6.2 M tokens (95 steps, 3 seeds)``."""
        seeds = f", {self.seeds} seeds" if self.seeds > 1 else ""
        return f"{self.seconds:.1f} s, {self.tokens / 1e6:.1f} M tokens ({self.settings}{seeds})"


def table(folder: Path = RESULTS) -> str:
    """Generate Markdown: the table, and its environment."""
    ours, rival, peers, three = (json.loads((folder / f"{n}.json").read_text()) for n in FILES)
    ends = {one["loss"]: one for one in peers["figures"]["targets"]}
    targets = sorted({4.0, *ends}, reverse=True)
    jobs, runs = ours["figures"]["jobs"], rival["figures"]["runs"]
    head = (
        "held-out loss",
        "modded-nanogpt",
        f"minillm, `--preset {RECIPE}`",
        "seconds, ours / theirs",
        "tokens, ours / theirs",
    )
    rows = [row(target, ends.get(target), jobs, runs) for target in targets]
    rows.append(unreached(THREE, three["figures"]))
    return f"{markdown(head, rows, text=(0, 1, 2))}\n\n{provenance(ours, rival, peers, three)}\n"


def row(
    target: float, end: Document | None, jobs: Sequence[Document], runs: Sequence[Document]
) -> tuple[str, ...]:
    """Return the row of one target.

    Args:
        target: nats.
        end: the trainer whose final loss it is, with its tokens; None: a round number.
        jobs: our runs.
        runs: modded-nanogpt's.

    Raises:
        SystemExit: none of our settings, or of theirs, reached it with every seed.
    """
    recipe, rival = (best(found, target) for found in (jobs, runs))
    if recipe is None or rival is None:
        raise SystemExit(
            f"{target:g} was not reached by every seed of any settings of "
            f"{'modded-nanogpt' if recipe else RECIPE}: measure more steps"
        )
    whose = f" ({end['peer']}'s last, after {end['tokens'] / 1e6:.0f} M tokens)" if end else ""
    return (
        f"{target:g}{whose}",
        str(rival),
        f"**{recipe}**",
        f"**{recipe.seconds / rival.seconds:.2f}**",
        f"{recipe.tokens / rival.tokens:.2f}",
    )


def unreached(target: float, figures: Document) -> tuple[str, ...]:
    """Return the row of a target that we reach, and modded-nanogpt's runs beside ours do not.

    Raises:
        SystemExit: we do not reach it, or they do.
    """
    recipe, runs = best(figures["jobs"], target), figures["beside"]["runs"]
    if recipe is None or best(runs, target) is not None:
        raise SystemExit(
            f"{target:g} is reached by both or by neither: it has a row of another kind"
        )
    point, run = min(
        ((point, run) for run in runs for point in run["curve"]), key=lambda one: one[0]["val_loss"]
    )
    return (
        f"{target:g}",
        f"not reached: {point['val_loss']:.3f} after {point['seconds']:.0f} of {run['seconds']:.0f} s "
        f"({named(run['settings'])})",
        f"**{recipe}**",
        f"**below {recipe.seconds / run['seconds']:.2f}**",
        f"below {recipe.tokens / run['tokens']:.2f}",
    )


def best(jobs: Sequence[Document], loss: float) -> Reached | None:
    """Return what the settings needed that reach a loss first; None: none did with every seed.

    Our jobs with another preset, or with plugins beside the recipe's, are left out.
    """
    kinds: dict[tuple[str, ...], list[Document]] = {}
    for job in jobs:
        if job.get("preset", RECIPE) == RECIPE and not job.get("plugins"):
            kinds.setdefault(tuple(job["settings"]), []).append(job)
    found = []
    for settings, kind in kinds.items():
        crossed = [one for job in kind if (one := below(job["curve"], loss)) is not None]
        if len(crossed) == len(kind):
            seconds, tokens = (mean(values) for values in zip(*crossed, strict=True))
            found.append(Reached(seconds, tokens, named(settings), len(kind)))
    return min(found, default=None)


def named(settings: Sequence[str]) -> str:
    """Format settings: ``72 steps, `train.cooldown=0.3```."""
    found = []
    for one in settings:
        key, assigned, value = one.rpartition("=")
        steps = key.rpartition(".")[2] == "steps"
        found.append(f"{int(value):,} steps" if steps else f"`{one}`" if assigned else one)
    return ", ".join(found)


def below(curve: Sequence[Document], loss: float) -> tuple[float, float] | None:
    """Return the seconds and tokens from which on a curve stays below a loss; None: it does not."""
    crossed = crossing(curve, loss)
    if crossed is None:
        return None
    last = max((i for i, point in enumerate(curve) if point["val_loss"] > loss), default=-1)
    before, after = curve[last]["seconds"] if last >= 0 else 0.0, curve[last + 1]
    found = crossed if after["seconds"] - before <= NEAR * after["seconds"] else after
    return found["seconds"], found["tokens"]


def provenance(ours: Document, rival: Document, peers: Document, three: Document) -> str:
    """Describe the environment of all of them."""
    environment = ours["environment"]
    gpu = unique(one["name"] for one in environment["hardware"]["gpus"])
    versions = environment["versions"]
    speeds = [max(one["tokens_per_second"] for one in doc) for doc in _runs(ours, rival)]
    once = unique(one["name"] for one in three["environment"]["hardware"]["gpus"])
    elsewhere = unique(one["name"] for one in peers["environment"]["hardware"]["gpus"])
    return (
        "The seconds are those of training, including waits for data, until the loss over 1,048,576 held-out "
        "predictions stays below the target. Both trainers use the same tokens and tokenizer, and 12 layers of "
        "width 768. modded-nanogpt stands for its record of 2025-02-01 on one GPU, with its fp8 head, at its "
        "published learning rates or at half of them, whichever reaches the target sooner. Both trained in turns "
        f"on one {gpu}, at up to {speeds[1]:,} (theirs) and {speeds[0]:,} tokens/s (ours); PyTorch "
        f"{versions['torch']}, Python {versions['python']}; commit {environment['commit'][:7]}. The last row was "
        f"measured on one {once}, with the nineteen plugins that `{RECIPE}` had at commit "
        f"{three['environment']['commit'][:7]}, and modded-nanogpt at its published rates. "
        "We shuffle rows (`shuffle_rows`); modded-nanogpt's rows follow the shuffled documents, as in its own "
        f"loader. nanoGPT and nanochat reached their losses with their own recipes on one {elsewhere}. How we "
        "measured, and what failed: [docs/experiments.md](docs/experiments.md)."
    )


def _runs(*documents: Document) -> list[Sequence[Document]]:
    return [one["figures"].get("jobs") or one["figures"]["runs"] for one in documents]


PAGE = Page(ROOT / "README.md", {"time to loss": table}, others=True)

if __name__ == "__main__":
    main(__doc__, PAGE)
