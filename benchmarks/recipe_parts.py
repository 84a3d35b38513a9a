"""What each plugin of a preset is worth in it: the preset beside itself without each, paired seeds, on several GPUs.

    python -m benchmarks.recipe_parts --preset speedrun --train english_train.jsonl.xz --val english_val.jsonl.xz \
        --tokenizer bpe50k.json --work RUNS --gpus 2 --steps 210 --seeds 3 --minutes 17

Processes compile concurrently and train in turns, as in benchmarks.cards; the same command continues after
--minutes. ``effect`` is the preset's loss minus that without the plugin, at equal tokens: below 0 it helps.
A plugin on which another builds is left out together with that one (``with_it``), and the effect is that of both. The 95 % intervals
pool the noise of sets with losses near the preset's: at most three times as far away as the set in question, and
at least three sets. ``time`` and ``memory`` are the preset's seconds and peak over those without the plugin. Each
GPU trains the preset's own runs, which also shows how far two runs of one seed are apart (``repeated``).

Exit codes: 0; 75, out of time, the same command continues; 1, a set failed (its log is in --work).
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.card_job import Share
from benchmarks.card_table import Judged
from benchmarks.card_turns import Turns
from benchmarks.command import add_text, measuring, written
from minillm_core.checkpoint.lock import lock
from minillm_core.config.folders import cache_folder
from minillm_core.errors import MinillmError, PlanError
from minillm_core.train.request import Prepared, RunRequest, prepare
from minillm_lab.ablation import RESULT
from minillm_lab.variants import BASELINE, variant
from minillm_lab.worth import effect_of, noise_of

NEAR, NEAREST = 3.0, 3
"""How far away, in a set's own difference, other sets may be whose noise counts, and how many always do."""

MOST_WITH_IT = 2
"""How many plugins may build on one that is left out."""

Losses = dict[str, dict[int, Mapping[str, Any]]]
"""Plugin set -> seed -> its run."""


def parts_of(prepared: Prepared) -> tuple[list[Judged], dict[str, list[str]]]:
    """Return each plugin beside all others that do not build on it, and by plugin those that do.

    Raises:
        MinillmError: a plugin cannot be left out, not with MOST_WITH_IT others either.
    """
    names = [one.name for one in prepared.plugins]

    def planned(left_out: set[str]) -> bool:
        try:
            kept = [name for name in names if name not in left_out]
            variant("", prepared.loaded, prepared.plugins, kept)
        except PlanError:
            return False
        return True

    found, with_it = [], {}
    for name in names:
        others = [other for other in names if other != name]
        sets = (
            {name, *more}
            for size in range(MOST_WITH_IT + 1)
            for more in itertools.combinations(others, size)
        )
        first = next((left_out for left_out in sets if planned(left_out)), None)
        if first is None:
            raise MinillmError(
                f"'{name}' cannot be left out, not with {MOST_WITH_IT} others either"
            )
        with_it[name] = sorted(first - {name})
        found.append(Judged(name, beside=tuple(one for one in names if one not in first)))
    return found, {name: others for name, others in with_it.items() if others}


def shares_of(
    given: argparse.Namespace, text: Sequence[str]
) -> tuple[list[Share], dict[str, list[str]]]:
    """Divide the sets among the GPUs."""
    request = RunRequest(
        plugins=given.plugins,
        preset=given.preset,
        assignments=(*text, *given.set),
        flags={"--steps": given.steps, "--device": given.device},
    )
    judged, with_it = parts_of(prepare(request, to_run=False))
    names = tuple(sorted(one.plugin for one in judged))
    wanted = set(given.only.split(",")) if given.only else set(names)
    parts = divided([one for one in judged if one.plugin in wanted], with_it, given.gpus)
    shares = [
        Share(
            folder=str(given.work / f"gpu{number}"),
            judged=tuple(part),
            preset=given.preset,
            settings=(*text, *given.set),
            steps=given.steps,
            seeds=given.seeds,
            device=given.device,
            cache=str(cache_folder()),
            commit=given.commit,
            validations=1,
            reference=names,
            equal_seconds=False,
        )
        for number, part in enumerate(parts)
    ]
    return shares, with_it


def divided(
    judged: Sequence[Judged], with_it: Mapping[str, Sequence[str]], parts: int
) -> list[list[Judged]]:
    """Divide into shares of about equal length; plugins that are left out together stay together."""
    below = {other: plugin for plugin, others in with_it.items() for other in others}
    bundles: dict[str, list[Judged]] = {}
    for one in judged:
        bundles.setdefault(below.get(one.plugin, one.plugin), []).append(one)
    shares: list[list[Judged]] = [[] for _ in range(parts)]
    for bundle in sorted(bundles.values(), key=len, reverse=True):
        min(shares, key=len).extend(bundle)
    return [share for share in shares if share]


def worth_of(
    results: Sequence[Mapping[str, Any]], with_it: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Compute every plugin's effect from the runs of all GPUs."""
    compared, sets = {}, []
    for number, result in enumerate(results):
        runs: Losses = {}
        for run in result["runs"]:
            if "curve" in run and "length" not in run:
                runs.setdefault(run["variant"], {})[run["seed"]] = run
        for plugin, one in result["plugins"].items():
            whole, without = runs.get(BASELINE, {}), runs.get(one["without"], {})
            if seeds := sorted(whole.keys() & without.keys()):
                compared[plugin] = (seeds, whole, without)
        sets += [((number, name), found) for name, found in runs.items()]
    found = {}
    for plugin, (seeds, whole, without) in compared.items():
        differences = [loss_of(whole[seed]) - loss_of(without[seed]) for seed in seeds]
        noise = noise_of(near([runs for _, runs in sets], sorted(whole), whole, without))
        found[plugin] = {
            **effect_of(differences, noise).data(),
            "differences": [round(one, 5) for one in differences],
            **{
                name: round(median(whole[seed][key] / without[seed][key] for seed in seeds), 4)
                for name, key in (("time", "seconds"), ("memory", "peak_bytes"))
                if all(run[key] for one in (whole, without) for run in one.values())
            },
        } | ({"with_it": with_it[plugin]} if plugin in with_it else {})
    whole = [runs for (_, name), runs in sets if name == BASELINE]
    repeated = [
        round(loss_of(one[seed]) - loss_of(other[seed]), 5)
        for one, other in itertools.combinations(whole, 2)
        for seed in sorted(one.keys() & other.keys())
    ]
    losses = {
        seed: [loss_of(one[seed]) for one in whole if seed in one] for seed in sorted({*whole[0]})
    }
    return {
        "plugins": dict(sorted(found.items(), key=lambda one: one[1]["effect"])),
        "losses": losses,
        "repeated": repeated,
    }


def loss_of(run: Mapping[str, Any]) -> float:
    """Return a run's held-out loss at its end."""
    return run["curve"][-1]["val_loss"]


def near(
    sets: Sequence[Mapping[int, Any]],
    seeds: Sequence[int],
    whole: Mapping[int, Any],
    without: Mapping[int, Any],
) -> list[list[float]]:
    """Return the losses, [set][seed], of the sets whose noise is like that of the two that are compared.

    Args:
        sets: all sets, seed -> run; those without a run of each of ``seeds`` do not count.
        seeds: the preset's.
        whole: the preset's runs.
        without: those without the plugin; of fewer seeds where others are missing.
    """
    rows = [[loss_of(one[seed]) for seed in seeds] for one in sets if all(s in one for s in seeds)]
    centre = fmean(loss_of(whole[seed]) for seed in seeds)
    pairs = [loss_of(run) - loss_of(whole[seed]) for seed, run in without.items() if seed in whole]
    far = NEAR * abs(fmean(pairs))
    rows.sort(key=lambda row: abs(fmean(row) - centre))
    return max([row for row in rows if abs(fmean(row) - centre) <= far], rows[:NEAREST], key=len)


def main() -> int:
    """Measure the sets that are missing, then write the result of those that are there."""
    parser = measuring(__doc__, "recipe_parts")
    add_text(parser)
    parser.add_argument("--preset", default="speedrun")
    parser.add_argument("--plugins", default="", help="added to it, or -NAME removed from it")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--only", help="the plugins to leave out, in place of all: muon,relu2")
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=210)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=600, help="everything ends after them")
    parser.add_argument("--patience", type=float, default=240, help="seconds for compiling a wave")
    parser.add_argument("--ahead", type=int, default=5, help="processes of a wave on a GPU")
    given = parser.parse_args()
    text = (
        f"data.paths={json.dumps([given.train])}",
        f"data.val={given.val}",
        f"data.tokenizer={given.tokenizer}",
    )
    given.work.mkdir(parents=True, exist_ok=True)
    with lock(given.work):
        shares, with_it = shares_of(given, text)
        for share in shares:
            Path(share.folder).mkdir(exist_ok=True)
            share.ready()
        turns = Turns(
            [(share, share.variants()) for share in shares],
            seconds=60 * given.minutes,
            patience=given.patience,
            ahead=given.ahead,
            reserve=0,
            say=lambda line: print(line, flush=True),
        )
        turns.run()
        paths = [Path(share.folder) / RESULT for share in shares]
        results = [json.loads(path.read_bytes()) for path in paths if path.exists()]
    figures = worth_of(results, with_it)
    said = {"preset": given.preset, "added": given.plugins, "settings": given.set}
    said |= {"steps": given.steps, "seeds": given.seeds}
    print(written(given, {**said, **figures, "failed": turns.failed, "skipped": turns.skipped}))
    for plugin, one in figures["plugins"].items():
        low, high = one["low"], one["high"]
        range_ = "" if low is None else f" [{low:+.4f}, {high:+.4f}]"
        print(
            f"{plugin}: {one['effect']:+.4f}{range_}, time x{one.get('time')}, {one['pairs']} pairs"
        )
    return 1 if turns.failed else 75 if turns.skipped else 0


if __name__ == "__main__":
    raise SystemExit(main())
