"""Generator of the README's table of time to loss, from time_to_loss.json, ..._in_order.json and peers.json.

python -m benchmarks.loss_table             # check that the page is up to date
python -m benchmarks.loss_table --write     # write it

Each target is the final loss of another trainer's run, and the time is that run's, shown beside
the shortest times of modded-nanogpt and of ours: the mean of several seeds, if all reached it.
Ours are runs with the recipe, and those before its rows were shuffled, including plain AdamW.
Between two evaluations the loss is interpolated linearly if they are no more than a tenth of the
time apart; otherwise the later one counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.curves import crossing
from benchmarks.environment import RESULTS, ROOT
from benchmarks.page import table as markdown
from benchmarks.provenance import unique
from tools.pages import Page, main

REFERENCE = "modded-nanogpt"
PLAIN, RECIPE = "gpt2-124m", "speedrun"  # presets
FILES = "time_to_loss", "time_to_loss_in_order", "peers"

NEAR = 0.1
"""Fraction of the later time: evaluations further apart only bound the crossing."""

Document = Mapping[str, Any]


def table(folder: Path = RESULTS) -> str:
    """Generate Markdown: the table, and its environment."""
    ours, before, peers = (json.loads((folder / f"{n}.json").read_text()) for n in FILES)
    jobs, runs = ours["figures"]["jobs"], peers["figures"]["runs"]
    in_order = before["figures"]["jobs"]
    head = (
        "target loss (whose final loss)",
        "their time",
        f"{REFERENCE}, best of {sum(one['peer'] == REFERENCE for one in runs)} runs",
        "minillm, plain AdamW",
        "the recipe without `shuffle_rows`",
        f"minillm, `--preset {RECIPE}`",
        "ours / theirs",
    )
    rows = [row(target, jobs, in_order, runs) for target in peers["figures"]["targets"]]
    return f"{markdown(head, rows)}\n\n{provenance(ours, before, peers)}\n"


def row(
    target: Document,
    jobs: Sequence[Document],
    in_order: Sequence[Document],
    runs: Sequence[Document],
) -> tuple[str, ...]:
    """Return the row of one target: {"loss": nats, "peer": its trainer}.

    Raises:
        SystemExit: no run ended at that loss, or not every seed of any of ours reached it.
    """
    loss, peer, theirs = target["loss"], target["peer"], its_time(target, runs)
    recipe = best(jobs, RECIPE, loss)
    before, plain = (best(in_order, preset, loss) for preset in (RECIPE, PLAIN))
    if recipe is None:
        raise SystemExit(
            f"{loss:g} of {peer} was not reached by every seed of any settings of preset {RECIPE}: "
            "measure more steps with benchmarks.time_to_loss, or take the target out of peers.json"
        )
    seconds, settings, seeds = recipe
    said = f"**{seconds:.1f} s** ({settings}{f', {seeds} seeds' if seeds > 1 else ''})"
    return (
        f"{loss:g} ({peer})",
        f"{theirs:.1f} s",
        told(soonest(runs, REFERENCE, loss)),
        told(plain and plain[0]),
        told(before and before[0]),
        said,
        f"**{seconds / theirs:.3f}**",
    )


def its_time(target: Document, runs: Sequence[Document]) -> float:
    """Return the seconds of the run whose final loss is the target."""
    loss, peer = target["loss"], target["peer"]
    for one in runs:
        if one["peer"] == peer and one["val_loss"] == loss:
            return one["total_seconds"]
    raise SystemExit(f"no run of {peer} in peers.json ended at {loss:g}, which is a target there")


def told(seconds: float | None) -> str:
    """Format seconds, or a dash."""
    return "-" if seconds is None else f"{seconds:.1f} s"


def soonest(runs: Sequence[Document], peer: str, loss: float) -> float | None:
    """Return the shortest time of a peer's runs to a loss, seconds."""
    times = [one["seconds"].get(f"{loss:g}") for one in runs if one["peer"] == peer]
    return min((time for time in times if time is not None), default=None)


def sooner(target: Document, runs: Sequence[Document]) -> float | None:
    """Return the seconds of an earlier pass of the target by another run of the same peer."""
    first, time = soonest(runs, target["peer"], target["loss"]), its_time(target, runs)
    return first if first is not None and first < time else None


def best(jobs: Sequence[Document], preset: str, loss: float) -> tuple[float, str, int] | None:
    """Return (seconds, settings in words, seeds) of the settings that reach a loss first.

    Runs are grouped by settings: a group counts if every seed reached the loss.
    """
    kinds: dict[tuple[str, ...], list[Document]] = {}
    for job in jobs:
        if job["preset"] == preset and not job.get("plugins"):
            kinds.setdefault(tuple(job["settings"]), []).append(job)
    found = []
    for kind in kinds.values():
        crossed = [below(job["curve"], loss) for job in kind]
        times = [seconds for seconds in crossed if seconds is not None]
        if len(times) == len(kind):
            found.append((mean(times), told_settings(kind[0]["settings"]), len(kind)))
    return min(found, default=None)


def told_settings(settings: Sequence[str]) -> str:
    """Format settings: ``72 steps, train.cooldown=0.3``."""
    steps = next(one.partition("=")[2] for one in settings if one.startswith("train.steps="))
    others = [f"`{one}`" for one in settings if not one.startswith("train.steps=")]
    return ", ".join([f"{steps} steps", *others])


def below(curve: Sequence[Document], loss: float) -> float | None:
    """Return the seconds from which on a curve stays below a loss; None: it does not."""
    crossed = crossing(curve, loss)
    if crossed is None:
        return None
    last = max((i for i, point in enumerate(curve) if point["val_loss"] > loss), default=-1)
    before, after = curve[last]["seconds"] if last >= 0 else 0.0, curve[last + 1]["seconds"]
    return crossed["seconds"] if after - before <= NEAR * after else after


def provenance(ours: Document, before: Document, peers: Document) -> str:
    """Describe the environment of all of them."""
    environment, theirs = ours["environment"], peers["environment"]
    commits = unique(one["environment"]["commit"][:7] for one in (ours, before))
    gpu = unique(one["name"] for one in environment["hardware"]["gpus"])
    versions = environment["versions"]
    runs, targets = peers["figures"]["runs"], peers["figures"]["targets"]
    passed = " and ".join(
        f"{target['peer']} passes {target['loss']:g} after {told(time)}"
        for target in targets
        if (time := sooner(target, runs)) is not None
    )
    return (
        "Seconds of training, waiting for data included, until the loss over 1,048,576 held-out "
        "predictions stays below the target; the same tokens and tokenizer, and 12 layers of 768, "
        f"for all. One {gpu} per run; PyTorch {versions['torch']}, Python {versions['python']}; commits "
        f"{commits}. The recipe's rows are shuffled; plain AdamW and the peers read documents one after the "
        "other, and what rows in another order would give the peers is not measured. Peers: their own "
        "code and recipes on one "
        f"{unique(one['name'] for one in theirs['hardware']['gpus'])}, PyTorch "
        f"{theirs['versions']['torch']}; {REFERENCE} is its record of 2025-02-01. "
        f"{f'With another batch size or length {passed}. ' if passed else ''}"
        "How it was measured, and what failed: [docs/experiments.md](docs/experiments.md)."
    )


PAGE = Page(ROOT / "README.md", {"time to loss": table}, others=True)

if __name__ == "__main__":
    main(__doc__, PAGE)
